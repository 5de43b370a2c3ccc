"""Refuses tensors whose elements a framework keeps elsewhere: stored as they are, nothing would be
stored.

A framework that divides a model may empty its parameters, and give them their elements only while
they are needed. Such a tensor still shows what it was: by attributes set on it, by its gradient, by
the sizes of its module, or by memory shorter than its shape. A tensor that never had an element,
and one declared to be a part without any, shows none of these.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import UnsupportedState
from holdfast.state.identity import Spans, extent
from holdfast.state.mapped.shards import declared

#: Attributes in which torch's own layers keep the sizes of their parameters.
_EXTENTS = (
    "in_features",
    "out_features",
    "in1_features",
    "in2_features",
    "num_embeddings",
    "embedding_dim",
    "num_features",
    "num_channels",
    "in_channels",
    "out_channels",
    "input_size",
    "hidden_size",
    "embed_dim",
    "normalized_shape",
)
_OWN = ("weight", "bias", "in_proj_")
_REMEDY = (
    "nothing would be stored of it. Hand over the tensors that have its elements, and say of each "
    "by holdfast.declare which they are (guide: a partition of your own); or save where the "
    "parameter is gathered"
)


def refuse_emptied(where: str, tensor: torch.Tensor, module: nn.Module | None = None) -> None:
    """Raises UnsupportedState for a tensor whose elements are elsewhere. ``module``: the module
    that holds it.
    """
    found = memory_gone(tensor) if has_elements(tensor) else _told(tensor, module)
    if found:
        raise UnsupportedState(f"{where} {found}: {_REMEDY}", leaf=where)


def refuse_state_of_emptied(where: str, parameter: torch.Tensor, state: torch.Tensor) -> None:
    """Raises UnsupportedState for optimizer state whose parameter no longer has its elements."""
    if state.numel() > 1 and declared(parameter) is None:
        raise UnsupportedState(
            f"{where} has {state.numel()} elements, its parameter has none, "
            f"{_shape(parameter.shape)}: {_REMEDY}",
            leaf=where,
        )


def has_elements(tensor: torch.Tensor) -> bool:
    """True if the tensor has elements, by its shape. A lazy parameter has no shape and is not
    judged here.
    """
    try:
        return tensor.numel() > 0
    except (ValueError, RuntimeError):
        return True


def memory_gone(tensor: torch.Tensor) -> str:
    """Says why a tensor that has a shape cannot be read; "" where it can be."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    is_plain = type(local) in (torch.Tensor, nn.Parameter) and local.layout is torch.strided
    if not is_plain or local.is_meta or local.is_nested or not local.numel():
        return ""
    there = local.untyped_storage().nbytes()
    wanted = (int(local.storage_offset()) + extent(local)) * local.element_size()
    if there >= wanted:
        return ""
    return (
        f"is of shape {_shape(tensor.shape)}, and of its memory {there} of {wanted} bytes are left"
    )


def _told(tensor: torch.Tensor, module: nn.Module | None) -> str:
    if declared(tensor) is not None:
        return ""
    what = next(_noted(tensor), None) or _by_gradient(tensor) or _by_module(tensor, module)
    return f"has no elements, {_shape(tensor.shape)}, but {what}" if what else ""


def _noted(tensor: torch.Tensor) -> Iterator[str]:
    """Yields what attributes of a tensor say about elements that it does not have."""
    for name, value in getattr(tensor, "__dict__", {}).items():
        if isinstance(value, torch.Tensor):
            if has_elements(value):
                yield f"its {name} has {_shape(value.shape)}"
        elif _is_shape(name, value) and math.prod(value) > 0:
            yield f"its {name} is {_shape(value)}"


def _is_shape(name: str, value: Any) -> bool:
    if isinstance(value, torch.Size):
        return True
    is_called_so = "shape" in name or "size" in name
    is_row = is_called_so and isinstance(value, (tuple, list)) and len(value) > 0
    return is_row and all(type(extent) is int for extent in value)


def _by_gradient(tensor: torch.Tensor) -> str:
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is None or not has_elements(gradient):
        return ""
    return f"its gradient has {_shape(gradient.shape)}"


def _by_module(tensor: torch.Tensor, module: nn.Module | None) -> str:
    """Says which sizes of one of torch's own layers show that the tensor had elements.

    A torch layer with no size of 0 makes no parameter without elements. Classes derived from one
    may keep an empty ``weight`` on purpose, with the elements in buffers.
    """
    if module is None or not type(module).__module__.startswith("torch.nn."):
        return ""
    names = [name for name, parameter in module._parameters.items() if parameter is tensor]
    found = {name: getattr(module, name, None) for name in _EXTENTS}
    sizes = {name: size for name, size in found.items() if type(size) in (int, tuple)}
    if not sizes or not names or not names[0].startswith(_OWN):
        return ""
    if any(size == 0 or (type(size) is tuple and 0 in size) for size in sizes.values()):
        return ""
    said = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return f"its {type(module).__qualname__} was made with {said}"


def _shape(shape: Any) -> str:
    return str(list(shape))


# Finds torch optimizers inside other objects of the state, whose tensors would otherwise be stored
# nowhere.
#
# An object with ``state_dict`` and ``load_state_dict`` is expected to give all its state.
# Frameworks' optimizers do not: they hold one of torch's, and leave its moments to a checkpoint of
# their own. So the attributes of the object are searched for an optimizer, and the optimizer's
# tensors are looked up among all stored tensors. Before the first step it has only parameters: the
# check is repeated whenever its tensors change.


#: The search's limits: depth, items in all, and items of one container.
_DEEPEST, _MOST, _MOST_IN_ONE = 5, 1000, 100
_NOTHING_INSIDE = (nn.Module, torch.Tensor, LRScheduler, type)
_LEAVES = frozenset(
    {int, float, bool, str, bytes, type(None), torch.Tensor, nn.Parameter, OrderedDict}
)
_PLAIN_KEYS = frozenset({int, float, bool, str, bytes, type(None)})
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
#: Attributes of an optimizer that hold tensors, thousands of them, and are not searched.
_OF_TENSORS = frozenset({"state", "param_groups", "defaults"})


class Inner(msgspec.Struct, frozen=True):
    """A torch optimizer, and the path in the state where it is held."""

    path: str
    optimizer: Optimizer


def inner_optimizers(outer: Mapping[str, Any], known: Iterable[Optimizer]) -> list[Inner]:
    """Finds optimizers that objects hold and that are not ``known``, that is, entries of the state
    themselves.

    The search follows attributes and containers, and of objects only those that have a state
    themselves. A scheduler steers an optimizer and owns nothing of it.
    """
    seen = set(map(id, known))
    return [inner for path, item in outer.items() for inner in _Search(seen).inside(path, item)]


class _Search:
    """A search through one object, bounded in depth and number of items."""

    def __init__(self, seen: set[int]) -> None:
        self._seen, self._left = seen, _MOST

    def inside(self, path: str, item: Any, depth: int = 0) -> Iterator[Inner]:
        """Searches the attributes of an object."""
        if isinstance(item, _NOTHING_INSIDE) or depth == _DEEPEST:
            return
        skipped = _OF_TENSORS if isinstance(item, Optimizer) else ()
        for name, value in list(getattr(item, "__dict__", {}).items()):
            if type(value) not in _LEAVES and name not in skipped:
                yield from self._at(f"{path}.{name}", value, depth + 1)

    def _at(self, path: str, value: Any, depth: int) -> Iterator[Inner]:
        self._left -= 1
        kind = type(value)
        if self._left < 0 or depth > _DEEPEST:
            return
        if kind in _CONTAINERS:
            items = value.items() if kind is dict else enumerate(value)
            for key, item in list(islice(items, _MOST_IN_ONE)):
                if type(item) not in _LEAVES:
                    yield from self._at(f"{path}[{_brief(key)}]", item, depth + 1)
        elif id(value) not in self._seen and hasattr(kind, "state_dict"):
            self._seen.add(id(value))
            if isinstance(value, Optimizer) and hasattr(value, "param_groups"):
                yield Inner(path, value)
            yield from self.inside(path, value, depth)


def _brief(key: Any) -> str:
    """A key in words; of other than plain ones its type, as a tensor would be read to be shown."""
    return f"{key!r:.40}" if type(key) in _PLAIN_KEYS else type(key).__name__


def refuse_unstored(
    found: Iterable[Inner],
    stored: Iterable[torch.Tensor],
    given: Callable[[str], int | None],
    rank: int,
) -> None:
    """Raises UnsupportedState for the first optimizer whose tensors nobody stores.

    ``stored``: all tensors that are stored. ``given``: returns how many elements the object at the
    beginning of a path gives that are nobody else's; None where it gives nothing at all. As many
    elements as the optimizer keeps may be copies of them. No elements, on ranks other than the
    first, may be what is left of a state that was gathered on rank 0.
    """
    memory = None
    for inner in found:
        memory = Spans(stored) if memory is None else memory
        missing = [(w, t) for w, t in _kept(inner.optimizer) if not memory.has_some_of(t)]
        elements = sum(tensor.numel() for _, tensor in missing)
        if not missing:
            continue
        copied = given(inner.path)
        is_gathered = copied is None and rank > 0
        if not is_gathered and (copied or 0) < elements:
            raise UnsupportedState(_words(inner, missing), where=inner.path)


def _words(inner: Inner, missing: list[tuple[str, torch.Tensor]]) -> str:
    what, first = missing[0]
    return (
        f"{inner.path} is a torch {type(inner.optimizer).__qualname__}, of which {len(missing)} "
        f"tensors would not be stored (the first: {what} of shape {list(first.shape)}): they are "
        "neither in what its holder gives by state_dict nor elsewhere in the state. Hand over that "
        "optimizer itself, under a key of its own; where its tensors are parts of the model's, say "
        "so by holdfast.declare (guide: a partition of your own)"
    )


def _kept(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors an optimizer updates, and those it keeps for that; one-element tensors are
    left out.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.numel() > 1:
                yield "a parameter", parameter
    for kept in list(optimizer.state.values()):
        for kind, value in kept.items() if isinstance(kept, dict) else ():
            yield from ((str(kind), t) for t in _tensors(value) if t.numel() > 1)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple):
        yield from (each for each in value if isinstance(each, torch.Tensor))
