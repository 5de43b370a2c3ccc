"""Stores registered tensor subclasses as the plain tensors inside them.

An unknown subclass is refused, because its elements may not be where a plain tensor has them. A
registered one is stored part by part, and a restore fills the parts in place. Inside a DTensor a
part is a DTensor as well: cut like the whole where it has an element for each of its elements, or
along its only dimension where it has one for each block of elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.accelerator.devices import memory_key
from holdfast.errors import UnsupportedState, UsageError
from holdfast.state.tensors import TORCH_DTYPES, local_of

#: Part -> the dtype and the shape of a stored tensor.
StoredParts = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class StoredTensor(Struct, frozen=True):
    """A state tensor of a subclass as it is stored.

    ``name``: its name in the optimizer's state, such as "exp_avg". ``parts``: the dtype and shape
    of each part by name; of a parameter that is sharded those on this rank.
    """

    name: str
    parts: StoredParts


Parts = Callable[[Any], Mapping[str, torch.Tensor]]
Make = Callable[[torch.Tensor, StoredTensor], "torch.Tensor | None"]


class RegisteredSubclass(NamedTuple):
    """The functions that were registered for a tensor subclass."""

    parts: Parts
    make: Make | None


_registered: dict[type, RegisteredSubclass] = {}
_registrations: list[type] = []
#: A DTensor of a registered subclass -> the DTensors of its parts by name. The same objects each
#: time, because a sharded tensor is known by its object.
_sharded: Any = WeakIdKeyDictionary()


def register_tensor(
    kind: type[torch.Tensor], parts: Parts | None = None, *, make: Make | None = None
) -> type[torch.Tensor]:
    """Let tensors of the subclass ``kind`` be stored as the plain tensors inside them.

    ``kind``: the subclass. ``parts``: a function; ``parts(tensor)`` returns these tensors by name:
    always the same names, and the very tensors the subclass computes with, not copies, because a
    restore fills them in place. Without it the parts are those named by ``__tensor_flatten__``, or,
    for a subclass that only adds methods, its own elements. Anything else the subclass keeps (a
    block size, for example) is made by the program, not restored.

    ``make``: a function that makes the state of an optimizer that has not stepped yet;
    ``make(parameter, stored)`` returns a tensor of the subclass for this parameter, whose elements
    the restore then fills, or None where it is none of this subclass. ``stored.name`` is its name
    in the optimizer's state, ``stored.parts`` has the dtype and shape of each stored part by name.
    Without it, take one optimizer step before the restore.

    A DTensor of such tensors is stored so too: as DTensors of the parts, which have an element for
    each element on this rank or, in one dimension, for each block of them. ``make`` is then given
    the part of the parameter that is on this rank, and the shapes of that part.

    Also a decorator. Raises UsageError for a class that is no subclass of torch.Tensor, and for
    what is no function.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
        raise UsageError(f"{kind!r} is not a subclass of torch.Tensor")
    for what, function in (("parts", parts), ("make", make)):
        if function is not None and not callable(function):
            raise UsageError(
                f"register_tensor({kind.__qualname__}): {what}={function!r:.100} is not a function"
            )
    if parts is None:
        parts = _flattened if hasattr(kind, "__tensor_flatten__") else _own_elements
    _registered[kind] = RegisteredSubclass(parts, make)
    _registrations.append(kind)
    return kind


def registrations() -> int:
    """Counts the registrations made so far: a new one may change how a tensor is stored."""
    return len(_registrations)


def is_registered(tensor: torch.Tensor) -> bool:
    """True if the tensor's parts are stored in its place."""
    return bool(_registered) and _find(tensor) is not None


def is_known(kind: type) -> bool:
    """True if this class was registered."""
    return kind in _registered


def _find(tensor: torch.Tensor) -> RegisteredSubclass | None:
    kind = type(tensor)
    if kind is DTensor:
        kind = type(tensor._local_tensor)  # type: ignore[attr-defined]
    return _registered.get(kind)


def plain_parts(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """Yields (leaf name, plain tensor): the tensor itself, or the parts of a registered
    subclass.
    """
    found = _find(tensor) if _registered else None
    return ((name, tensor),) if found is None else _parts(name, tensor, found.parts)


def _parts(name: str, tensor: torch.Tensor, find: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    found = find(local)
    for part, inner in found.items():
        if not isinstance(inner, torch.Tensor) or type(inner) is type(local):
            raise UnsupportedState(
                f"part {part!r} of {name} is a {type(inner).__qualname__}: give plain tensors to "
                "holdfast.register_tensor",
                leaf=name,
            )
        if isinstance(tensor, DTensor):
            inner = _in_dtensor(name, part, tensor, inner)
        yield from plain_parts(f"{name}.{part}" if part else name, inner)


def _in_dtensor(name: str, part: str, outer: DTensor, inner: torch.Tensor) -> DTensor:
    """Returns the DTensor of a part of the tensors in ``outer``; the same one for the same
    memory.
    """
    known = _sharded.setdefault(outer, {})
    if part not in known or not reads_alike(known[part]._local_tensor, inner.detach()):
        shape = _whole_shape(f"{name}.{part}", outer, inner)
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        with torch.no_grad():
            known[part] = DTensor.from_local(
                inner.detach(),
                outer.device_mesh,
                outer.placements,
                run_check=False,
                shape=torch.Size(shape),
                stride=outer.stride() if shape == tuple(outer.shape) else stride,
            )
    found: DTensor = known[part]
    return found


def reads_alike(known: torch.Tensor, now: torch.Tensor) -> bool:
    """True if both read the same memory in the same way. ``known`` is held, so that no other tensor
    can have got its address.
    """
    if type(known) is not type(now):
        return False
    if _find(known) is not None:
        before, after = (dict(plain_parts("", tensor)) for tensor in (known, now))
        return before.keys() == after.keys() and all(
            reads_alike(before[name], after[name]) for name in before
        )
    return type(now) is torch.Tensor and _view(known) == _view(now)


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    read = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return memory_key(tensor), *read, tensor.is_conj(), tensor.is_neg()


def _whole_shape(leaf: str, outer: DTensor, inner: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a part of the whole tensor, from that of the part on this rank."""
    here = outer._local_tensor
    if inner.shape == here.shape:
        return tuple(outer.shape)
    size = block_size(here.numel(), tuple(inner.shape))
    if size and not outer.numel() % size and _is_cut_by_rows(outer):
        return (outer.numel() // size,)
    raise UnsupportedState(
        f"{leaf} is of shape {list(inner.shape)} in a DTensor of {type(here).__qualname__} with "
        f"{list(here.shape)} on this rank: it has an element neither for each of these elements "
        "nor for each block of them, cut along the first dimension; so which elements of the whole "
        "it has is not known. Leave out of parts= what the program makes anew",
        leaf=leaf,
    )


def _is_cut_by_rows(outer: DTensor) -> bool:
    return all(
        isinstance(one, Replicate) or (type(one) is Shard and one.dim == 0)
        for one in outer.placements
    )


def block_size(elements: int, shape: tuple[int, ...]) -> int:
    """Returns how many of a tensor's elements one element of a part of this shape is for; 0 where
    it is not for as many each.
    """
    if len(shape) != 1 or not shape[0] or elements % shape[0]:
        return 0
    return elements // shape[0]


def check_in_place(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedState for a registered subclass whose parts are copies: they would restore
    nothing.
    """
    if not is_registered(tensor):
        return
    first, second = dict(plain_parts(name, tensor)), dict(plain_parts(name, tensor))
    moved = [
        leaf
        for leaf, inner in first.items()
        if memory_key(local_of(inner)) != memory_key(local_of(second[leaf]))
    ]
    if moved:
        raise UnsupportedState(
            f"{', '.join(moved)}: the parts given to holdfast.register_tensor for "
            f"{type(tensor).__qualname__} are made anew at each call; give the tensors that it "
            "computes with",
            leaf=name,
        )


def _flattened(tensor: Any) -> dict[str, torch.Tensor]:
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def _own_elements(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"": tensor.detach().as_subclass(torch.Tensor)}


# Makes the state of an optimizer that has not stepped, of the subclasses that say how.


def make_subclass(
    parameter: torch.Tensor, name: str, stored: Mapping[str, tuple[str, tuple[int, ...]]]
) -> torch.Tensor | None:
    """Returns a new state tensor called ``name`` with the stored parts; None where no registered
    subclass makes it.

    ``stored``: dtype and shape of each part by name. Raises UsageError where two subclasses make
    it, or where ``make`` raises.
    """
    here = {part: _shape_here(parameter, shape) for part, (_, shape) in stored.items()}
    local = local_of(parameter)
    specs = {part: (TORCH_DTYPES[dtype], here[part] or ()) for part, (dtype, _) in stored.items()}
    if None in here.values():
        return None
    found = {}
    for kind, registered in list(_registered.items()):
        if registered.make is not None:
            made = _made(registered.make, kind, local, StoredTensor(name, specs))
            if made is not None and _parts_of(made, registered.parts) == specs:
                found[kind] = made
    if len(found) > 1:
        kinds = " and ".join(kind.__qualname__ for kind in found)
        raise UsageError(
            f"{name} could be made by {kinds}, registered with holdfast.register_tensor(make=): "
            "let make= return None for what is of the other class"
        )
    for made in found.values():
        return _wrapped(parameter, made)
    return None


def _made(
    make: Make, kind: type, parameter: torch.Tensor, stored: StoredTensor
) -> torch.Tensor | None:
    try:
        with torch.no_grad():
            made = make(parameter, stored)
    except Exception as error:  # whatever the program's own function raises
        raise UsageError(
            f"{stored.name}: the make= of holdfast.register_tensor for {kind.__qualname__} "
            f"raised {type(error).__name__}: {error}"
        ) from error
    if made is not None and type(made) is not kind:
        raise UsageError(
            f"{stored.name}: the make= of holdfast.register_tensor for {kind.__qualname__} "
            f"returned a {type(made).__qualname__}"
        )
    return made


def _parts_of(made: torch.Tensor, find: Parts) -> StoredParts:
    found = _parts("", made, find)
    return {leaf.removeprefix("."): (one.dtype, tuple(one.shape)) for leaf, one in found}


def _shape_here(parameter: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape that a stored part has on this rank; None where that is not known."""
    if not isinstance(parameter, DTensor):
        return shape
    local = parameter._local_tensor
    if shape == tuple(parameter.shape):
        return tuple(local.shape)
    size = block_size(parameter.numel(), shape)
    is_whole = bool(size) and not local.numel() % size and _is_cut_by_rows(parameter)
    return (local.numel() // size,) if is_whole else None


def _wrapped(parameter: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return made
    return DTensor.from_local(
        made,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
