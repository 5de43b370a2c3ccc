"""Names the tensors of a module as its author did, leaving out the names that wrappers add.

``torch.compile``, activation checkpointing, DDP and their like put a component of their own into
every name; a checkpoint must not depend on them.

Hooks of a ``state_dict`` rename parameters, cut them, or reorder their rows, so that checkpoints of
other programs fit. Stored are the parameters themselves, and nothing is lost by that. Elements that
the ``state_dict`` shows beside them are elements that nothing else holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from holdfast.errors import UnsupportedState, UsageError
from holdfast.state.hidden_state import has_elements, refuse_emptied
from holdfast.state.identity import Spans

_INSERTED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
RENORMALISING = (nn.Embedding, nn.EmbeddingBag)
_PREFIXING = (DistributedDataParallel, DataParallel)


def parts(
    module: nn.Module, prefix: str = "", *, is_old: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) for the module and all inside it, wrappers left out of the names.

    A module that is registered in several places comes once for each, as its tensors are tied.
    ``is_old``: uses the names of checkpoints from when only torch's own wrappers were left out.
    """
    if isinstance(module, FullyShardedDataParallel):
        raise UnsupportedState(
            f"{prefix or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1), whose flat "
            "parameters differ from rank to rank without saying so: use fully_shard (FSDP2)",
            where=prefix,
        )
    yield prefix, module
    if not module._modules:
        return
    drops_name = isinstance(module, _PREFIXING)
    inner = None if is_old else spoken_for(module)
    for name, child in module._modules.items():
        if child is None or inner not in (None, name):
            continue
        if name in _INSERTED or name == inner or (drops_name and name == "module"):
            yield from parts(child, prefix, is_old=is_old)
        else:
            yield from parts(child, f"{prefix}.{name}" if prefix else name, is_old=is_old)


class ModuleTensors(NamedTuple):
    """A tensor that a module would save."""

    name: str
    tensor: torch.Tensor
    is_parameter: bool
    changes_in_forward: bool = False
    """True if a forward may write to the tensor, with no optimizer's step before or after."""


def module_tensors(
    module: nn.Module, key: str = "", *, is_old: bool = False
) -> Iterator[ModuleTensors]:
    """Yields all tensors that a module would save; a tied tensor once for each of its names.

    Raises UnsupportedState for one that a framework has emptied. ``key``: the module's name in the
    state.
    """
    outer = f"{key}." if key else ""
    for prefix, part in parts(module, is_old=is_old):
        changes = isinstance(part, RENORMALISING) and part.max_norm is not None
        if isinstance(part, FSDPModule):
            part.reshard()  # no-op unless a forward without backward left it gathered
        dot = f"{prefix}." if prefix else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if not has_elements(parameter):
                    refuse_emptied(f"{outer}{dot}{name}", parameter, part)
                yield ModuleTensors(dot + name, parameter, True, changes)
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield ModuleTensors(dot + name, buffer, False)


def check_storable(key: str, module: nn.Module) -> None:
    """Raises UnsupportedState for a module that keeps state outside of its parameters, buffers and
    extra state.
    """
    for prefix, part in parts(module):
        where = f"{key}.{prefix}" if prefix else key
        own = type(part)
        if own.get_extra_state is not nn.Module.get_extra_state and (
            own.set_extra_state is nn.Module.set_extra_state
        ):
            raise UnsupportedState(
                f"{where} has get_extra_state but no set_extra_state: what it keeps could not be "
                "given back",
                where=where,
            )
        saves_more = (
            own._save_to_state_dict is not nn.Module._save_to_state_dict
            or own.state_dict is not nn.Module.state_dict
            or part._state_dict_hooks
        )
        extra = _beside(part) if saves_more else []
        if extra:
            raise UnsupportedState(
                f"the state_dict of {where}, a {own.__qualname__}, has {', '.join(extra)} beside "
                "its parameters and buffers, and would be stored without it: register it as a "
                "buffer, or give it back through get_extra_state and set_extra_state; where it "
                "only shows parameters in another way, say so by holdfast.derived",
                where=where,
            )


def _beside(module: nn.Module) -> list[str]:
    """Returns the names in its state_dict that are none of its parameters, buffers and extra
    state, and were not declared to show these.
    """
    held = {id(each.tensor): each.tensor for each in module_tensors(module)}
    left_out = _declared_derived(module)
    shown = module.state_dict(keep_vars=True)
    return beside(
        {name: value for name, value in shown.items() if name not in left_out}, list(held.values())
    )


_derived: dict[type[nn.Module], frozenset[str]] = {}


def derived(kind: type[nn.Module], names: Iterable[str]) -> type[nn.Module]:
    """Declare that names in the ``state_dict`` of a module only show elements that are stored.

    A hook of a ``state_dict`` may show a parameter in other pieces, or converted, for checkpoints
    of other programs. Stored are the parameters and buffers themselves. What is shown of them is
    recognized by its memory where it is a view, and by its elements where it has all of them;
    anything else is refused by name, unless it was declared here.

    ``kind``: the class of the module, or one that it is derived from. ``names``: the names in its
    ``state_dict``, without the module's own prefix.

    Raises UsageError for a class that is no subclass of torch.nn.Module, and for what is no name.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UsageError(f"derived: {kind!r:.100} is not a subclass of torch.nn.Module")
    found = () if isinstance(names, (str, bytes)) else tuple(names)
    if not found or not all(isinstance(name, str) and name for name in found):
        raise UsageError(
            f"derived({kind.__qualname__}): names={names!r:.100} are not names in a state_dict: "
            "give a list of texts"
        )
    _derived[kind] = _derived.get(kind, frozenset()) | frozenset(found)
    return kind


def _declared_derived(module: nn.Module) -> set[str]:
    """Returns the declared names in the state_dict of a module and of all inside it."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in (module.named_modules(remove_duplicate=False) if _derived else ())
        for base in type(part).__mro__
        for name in _derived.get(base, ())
    }


def extra_state(module: nn.Module, *, is_old: bool = False) -> dict[str, Any]:
    """Returns the extra state (everything beside tensors) that modules keep, by their names."""
    found = with_extra_state(module, is_old=is_old)
    return {prefix: part.get_extra_state() for prefix, part in found}


def extra_state_names(module: nn.Module, *, is_old: bool = False) -> set[str]:
    """Returns the names of the modules inside that have extra state."""
    return {prefix for prefix, _ in with_extra_state(module, is_old=is_old)}


def set_extra_state(module: nn.Module, saved: dict[str, Any], *, is_old: bool = False) -> None:
    """Sets the extra state of the modules from ``saved``."""
    for prefix, part in with_extra_state(module, is_old=is_old):
        if prefix in saved:
            part.set_extra_state(saved[prefix])


def with_extra_state(module: nn.Module, *, is_old: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) for every module inside that has extra state, each once."""
    seen: set[int] = set()
    for prefix, part in parts(module, is_old=is_old):
        has_own = type(part).get_extra_state is not nn.Module.get_extra_state
        if has_own and id(part) not in seen:
            seen.add(id(part))
            yield prefix, part


#: The integer type in which elements of a given size are compared.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def beside(shown: Mapping[str, Any], held: Sequence[torch.Tensor]) -> list[str]:
    """Returns the names in ``shown`` of tensors whose elements are in none of the tensors ``held``.

    A view of a held tensor is in it. The others count as held together if they have the elements of
    exactly those held tensors that are not shown.
    """
    known = {id(tensor) for tensor in held}
    others = {
        name: value
        for name, value in shown.items()
        if id(value) not in known and not name.endswith("_extra_state") and value is not None
    }
    if not others:
        return []
    memory = Spans(filter(_is_dense, held))
    views = {n for n, v in others.items() if _is_plain(v) and memory.has_all_of(v)}
    copies = {name: value for name, value in others.items() if name not in views}
    seen = {*map(id, shown.values())}
    in_views = Spans(others[name] for name in views)
    left_out = [t for t in held if id(t) not in seen and not in_views.has_some_of(t)]
    return [] if _are_the_same(list(copies.values()), left_out) else sorted(copies)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if all memory from the tensor's first element to its last is its own."""
    if not _is_plain(tensor) or tensor.layout is not torch.strided:
        return False
    extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return extent + 1 == tensor.numel()


def _are_the_same(shown: Sequence[Any], held: Collection[torch.Tensor]) -> bool:
    """True if both have the same elements, in whatever order and however cut."""
    if not all(isinstance(value, torch.Tensor) for value in shown):
        return False
    dtypes = {tensor.dtype for tensor in (*shown, *held)}
    return all(
        _are_alike([t for t in shown if t.dtype == dtype], [t for t in held if t.dtype == dtype])
        for dtype in dtypes
    )


def _are_alike(shown: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> bool:
    """Compares the number of elements; where all are here, also sums that do not depend on their
    order.

    A hook shows other shards of a sharded tensor than are here, or the whole tensor.
    """
    if sum(tensor.numel() for tensor in shown) != sum(tensor.numel() for tensor in held):
        return False
    if any(tensor.layout is not torch.strided for tensor in (*shown, *held)):
        return False
    if any(isinstance(tensor, DTensor) or tensor.is_meta for tensor in (*shown, *held)):
        return True
    return _sums(shown) == _sums(held)


def _sums(tensors: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """Returns the sum, the least and the greatest of all elements, read as integers."""
    found = [_as_numbers(tensor) for tensor in tensors if tensor.numel()]
    if not found:
        return 0, 0, 0
    total = sum(int(bits.sum(dtype=torch.int64)) for bits in found)
    bounds = [int(bound) for bits in found for bound in bits.aminmax()]
    return total % (1 << 64), min(bounds), max(bounds)


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    kind = _BITS[plain.element_size()]
    return plain.view(kind) if plain.is_contiguous() else plain.contiguous().view(kind)


# Recognizes wrapper modules that return a child's ``state_dict`` as their own, so that names leave
# the wrapper out.
#
# The name of a wrapper, and its name for the module inside, are not the author's. A wrapper is not
# recognized by its class or its names, but by its own ``state_dict``: it has the very tensors of
# one child, under the child's names. A module with any other ``state_dict`` keeps its names.


#: Module -> the children it was checked for, and the name of the child it wraps.
_asked: WeakKeyDictionary[nn.Module, tuple[list[int], str | None]] = WeakKeyDictionary()


def spoken_for(module: nn.Module) -> str | None:
    """Returns the name of the child whose state is this module's; None for a module with its own
    state.
    """
    own = type(module)
    if own.state_dict is nn.Module.state_dict or not module._modules:
        return None
    children = [id(child) for child in module._modules.values()]
    known = _asked.get(module)
    if known is None or known[0] != children:
        known = _asked[module] = children, _find(module)
    return known[1]


def _find(module: nn.Module) -> str | None:
    has_extra = type(module).get_extra_state is not nn.Module.get_extra_state
    if has_extra or any(tensor is not None for tensor in _own_tensors(module)):
        return None
    shown = _shown(module)
    for name, child in module._modules.items():
        if shown and child is not None and _shown(child) == shown and _has_all(child, module):
            return name
    return None


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor | None]:
    yield from module._parameters.values()
    for name, buffer in module._buffers.items():
        if name not in module._non_persistent_buffers_set:
            yield buffer


def _shown(module: nn.Module) -> dict[str, int]:
    """Returns the names in the module's state_dict and the ids of their tensors; {} where it cannot
    be called.
    """
    try:
        found: dict[str, Any] = module.state_dict(keep_vars=True)
    except Exception:  # whatever its own code raises: check_storable says so by name
        return {}
    return {
        name: id(value) if isinstance(value, torch.Tensor) else 0 for name, value in found.items()
    }


def _has_all(child: nn.Module, module: nn.Module) -> bool:
    """True if everything that the other children hold belongs to this child too."""
    inside, around = (_everything_in(m) for m in (child, module))
    own = {id(buffer) for buffer in module._buffers.values()}
    return around - own <= inside


def _everything_in(module: nn.Module) -> set[int]:
    """Returns the ids of all tensors in a module, by the methods of its base class: Megatron's DDP
    calls its gradient buffers ``buffers``.
    """
    return {*map(id, nn.Module.parameters(module)), *map(id, nn.Module.buffers(module))}
