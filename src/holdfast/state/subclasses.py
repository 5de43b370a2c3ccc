"""Tensor subclasses that are stored as the plain tensors inside them.

An unknown subclass is refused, for its elements may not be where a plain tensor has them. One
that is registered is stored part by part, and a restore fills the parts in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from holdfast.errors import UnsupportedState, UsageError

Parts = Callable[[Any], Mapping[str, torch.Tensor]]
_registered: dict[type, Parts] = {}
_registrations: list[type] = []


def register_tensor(kind: type[torch.Tensor], parts: Parts | None = None) -> type[torch.Tensor]:
    """Let tensors of the subclass ``kind`` be stored as the plain tensors inside them.

    ``parts(tensor)`` gives them by name, always the same names, and the very tensors the subclass
    computes with, not copies: a restore fills them in place. Without it they are those named
    by ``__tensor_flatten__``, or, for a subclass that only adds methods, its own elements. What
    the subclass keeps beside them (a block size, say) is made by the program, not restored.
    Also a decorator. UsageError for what is no subclass of torch.Tensor.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
        raise UsageError(f"{kind!r} is not a subclass of torch.Tensor")
    if parts is None:
        parts = _flattened if hasattr(kind, "__tensor_flatten__") else _own_elements
    _registered[kind] = parts
    _registrations.append(kind)
    return kind


def registrations() -> int:
    """How often a subclass was registered: what is stored of a tensor may change by it."""
    return len(_registrations)


def is_registered(tensor: torch.Tensor) -> bool:
    """Whether its parts are stored in its place."""
    return type(tensor) in _registered


def plain_parts(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """(leaf name, plain tensor): the tensor itself, or the parts of a registered subclass."""
    find = _registered.get(type(tensor)) if _registered else None
    return ((name, tensor),) if find is None else _parts(name, tensor, find)


def _parts(name: str, tensor: torch.Tensor, find: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    found = find(tensor)
    for part, inner in found.items():
        if not isinstance(inner, torch.Tensor) or type(inner) is type(tensor):
            raise UnsupportedState(
                f"part {part!r} of {name} is a {type(inner).__qualname__}: give plain tensors to "
                "holdfast.register_tensor",
                leaf=name,
            )
        yield from plain_parts(f"{name}.{part}" if part else name, inner)


def check_in_place(name: str, tensor: torch.Tensor) -> None:
    """UnsupportedState for a registered subclass that gives copies: they would restore nothing."""
    if type(tensor) not in _registered:
        return
    first, second = dict(plain_parts(name, tensor)), dict(plain_parts(name, tensor))
    moved = [leaf for leaf, inner in first.items() if inner.data_ptr() != second[leaf].data_ptr()]
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
