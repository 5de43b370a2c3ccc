"""Whether every tensor is still where the last walk found it; looked at whole, built anew never.

A walk makes the names, and asks each object what it is; that takes several times what a save may
take. So the next one only compares, and at the slightest difference the walk is made again.
Compared is what the walk went by: every dict of every module and optimizer by its keys and, by
identity, its values; and of each tensor where its memory is and how it is read. Thousands of
each are compared by the interpreter's own loops, making no object that is kept: a collection
of garbage would cost more than all of it.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.state import subclasses
from holdfast.state.declared import declarations
from holdfast.state.looks import Looks
from holdfast.state.modules import RENORMALISING, parts
from holdfast.state.objects import Objects
from holdfast.state.optimizers import is_hooked, is_tensor
from holdfast.state.tensors import PLAIN_TYPES

_values: Any = methodcaller("values")
_module_dicts: Any = attrgetter("_parameters", "_buffers", "_modules")
_not_saved: Any = attrgetter("_non_persistent_buffers_set")
_local: Any = attrgetter("_local_tensor")
_asks_for_gradient: Any = attrgetter("requires_grad")
_data_ptr = torch.Tensor.data_ptr
#: Under a mode, such as a default device, torch asks Python about every look at a tensor; these
#: looks are nobody's business. Without this they are only slower.
plain_looks: Any = getattr(torch._C, "DisableTorchFunction", contextlib.nullcontext)


class Watch:
    """Remembers what a walk found in ``objects``; ``met`` are their tensors under all names."""

    def __init__(self, objects: Objects, met: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._modules = objects.modules
        self._optimizers = objects.optimizers
        self._registrations = _registrations()
        tensors = {id(tensor): tensor for _, tensor in met}.values()
        parted = {id(tensor) for tensor in tensors if subclasses.is_registered(tensor)}
        self._dicts = _ModuleDicts(objects.modules.values())
        self._states = [_OptimizerState(each) for each in objects.optimizers.values()]
        self._parted = [(t, _parted(t)) for t in tensors if id(t) in parted]
        inner = [part for _, found in self._parted for _, part in found]
        self._memory = _Memory([*(t for t in tensors if id(t) not in parted), *inner])
        of_memory = {id(tensor) for tensor in self._memory.looked_at}  # at that, too
        learning = (t for t in tensors if isinstance(t, nn.Parameter))
        self._learning = [t for t in learning if id(t) not in of_memory]
        self._learn = list(map(_asks_for_gradient, self._learning))

    def is_unchanged(self, objects: Objects) -> bool:
        """Whether a walk over ``objects`` would find the same tensors, in the same memory."""
        try:
            return (
                _are_same(self._modules, objects.modules)
                and _are_same(self._optimizers, objects.optimizers)
                and self._registrations == _registrations()
                and self._dicts.are_unchanged()
                and all(state.is_unchanged() for state in self._states)
                and self._memory.is_unchanged()
                and list(map(_asks_for_gradient, self._learning)) == self._learn
                and all(_is_parted_alike(*one) for one in self._parted)
            )
        except Exception:  # of whatever kind: the walk that follows says what is the matter
            return False


class _ModuleDicts:
    """What every module holds under which names, and what else decides which of it is saved."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        each = (part for module in modules for _, part in parts(module))
        self._parts = list({id(part): part for part in each}.values())
        self._sharded = [part for part in self._parts if isinstance(part, FSDPModule)]
        self._renormalising: list[Any] = [p for p in self._parts if isinstance(p, RENORMALISING)]
        self._have_norms = [part.max_norm is None for part in self._renormalising]
        self._buffered = [part for part in self._parts if part._buffers]
        self._not_saved = [set(_not_saved(part)) for part in self._buffered]
        self._types = list(map(type, self._parts))
        dicts = self._dicts()
        self._lengths = list(map(len, dicts))
        self._names = list(chain.from_iterable(dicts))
        self._held = list(chain.from_iterable(map(_values, dicts)))

    def _dicts(self) -> list[Any]:
        return list(chain.from_iterable(map(_module_dicts, self._parts)))

    def are_unchanged(self) -> bool:
        # Part by part from the top: one that is in its place has been looked at itself.
        if not _are_all(map(type, self._parts), self._types):
            return False
        for part in self._sharded:
            part.reshard()  # no-op unless a forward without backward left it gathered
        dicts = self._dicts()
        return (
            list(map(len, dicts)) == self._lengths
            and list(chain.from_iterable(dicts)) == self._names
            and _are_all(chain.from_iterable(map(_values, dicts)), self._held)
            and list(map(_not_saved, self._buffered)) == self._not_saved
            and [part.max_norm is None for part in self._renormalising] == self._have_norms
        )


class _OptimizerState:
    """The parameters of an optimizer by group, and what it keeps for each."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_hooked = is_hooked(optimizer)
        groups = [group["params"] for group in optimizer.param_groups]
        self._group_lengths = list(map(len, groups))
        self._parameters = list(chain.from_iterable(groups))
        of_groups = set(map(id, self._parameters))
        self._keys: list[Any] = list(optimizer.state)
        self._are_parameters = [id(key) in of_groups for key in self._keys]
        kept = self._kept()
        self._lengths = list(map(len, kept))
        self._kinds = list(chain.from_iterable(kept))
        held = list(chain.from_iterable(map(_values, kept)))
        self._are_tensors = list(map(is_tensor, held))
        self._are_others = [not is_one for is_one in self._are_tensors]
        self._has_others = any(self._are_others)
        self._tensors = list(compress(held, self._are_tensors))

    def _kept(self) -> list[Any]:
        return list(compress(self._optimizer.state.values(), self._are_parameters))

    def is_unchanged(self) -> bool:
        optimizer = self._optimizer
        groups = [group["params"] for group in optimizer.param_groups]
        if not (
            is_hooked(optimizer) == self._is_hooked
            and list(map(len, groups)) == self._group_lengths
            and _are_all(chain.from_iterable(groups), self._parameters)
            and len(optimizer.state) == len(self._keys)
            and _are_all(optimizer.state, self._keys)
        ):
            return False
        kept = self._kept()
        if list(map(len, kept)) != self._lengths:
            return False
        if list(chain.from_iterable(kept)) != self._kinds:
            return False
        if not self._has_others:
            return _are_all(chain.from_iterable(map(_values, kept)), self._tensors)
        held = list(chain.from_iterable(map(_values, kept)))
        others = compress(held, self._are_others)
        return _are_all(compress(held, self._are_tensors), self._tensors) and not any(
            map(is_tensor, others)
        )


class _Memory:
    """Where each tensor's elements are, and how they are read."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        self._locals = list(map(_local, self._sharded))
        self._specs = [tensor._spec for tensor in self._sharded]
        self._tensors = [t for t in tensors if not isinstance(t, DTensor)] + self._locals
        #: Others, that are known by more than their memory, are walked to each time.
        self._can_tell = all(type(tensor) in PLAIN_TYPES for tensor in self._tensors)
        self.looked_at = self._tensors if self._can_tell else []
        if not self._can_tell:
            return
        self._addresses = array("Q", map(_data_ptr, self._tensors))
        self._looks = Looks(self._tensors)
        self._flagged = [tensor for tensor in self._tensors if _can_be_flagged(tensor)]
        self._flags = list(map(_flags, self._flagged))

    def is_unchanged(self) -> bool:
        if not (self._can_tell and _are_all(map(_local, self._sharded), self._locals)):
            return False
        if [tensor._spec for tensor in self._sharded] != self._specs:
            return False
        with plain_looks():
            if array("Q", map(_data_ptr, self._tensors)) != self._addresses:
                return False
            if not self._looks.are_unchanged():
                return False
            return list(map(_flags, self._flagged)) == self._flags


def _registrations() -> tuple[int, int]:
    return subclasses.registrations(), declarations()


def _can_be_flagged(tensor: torch.Tensor) -> bool:
    """Whether the same memory could be read otherwise, or elsewhere, by a flag alone.

    Conjugates and what is seen through them; and nothing, which is everywhere at address 0.
    """
    shares = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.is_complex() or shares or not tensor.data_ptr()


def _flags(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.is_conj(), tensor.is_neg(), tensor.device


def _parted(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return list(subclasses.plain_parts("", tensor))


def _is_parted_alike(tensor: torch.Tensor, before: list[tuple[str, torch.Tensor]]) -> bool:
    """Whether a registered subclass gives the parts it gave, or others on the same memory."""
    now = _parted(tensor)
    return [name for name, _ in now] == [name for name, _ in before] and all(
        one is other or _reads_alike(one, other)
        for (_, one), (_, other) in zip(now, before, strict=True)
    )


def _reads_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """``other`` is held, so that no other memory can have come to stand at its address."""
    return type(one) is type(other) is torch.Tensor and (
        (one.data_ptr(), one.shape, one.stride(), one.dtype, _flags(one))
        == (other.data_ptr(), other.shape, other.stride(), other.dtype, _flags(other))
    )


def _are_same(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    return list(before) == list(now) and _are_all(now.values(), list(before.values()))


def _are_all(now: Iterable[object], before: Sequence[object]) -> bool:
    """Whether these are the very objects of ``before``, which are as many."""
    return all(map(is_, now, before))
