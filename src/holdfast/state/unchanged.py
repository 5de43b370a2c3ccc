"""Repeats the walk of a state cheaply: values are read again, everything else is only compared.

The result is the same as a whole walk's. Where anything changed there is no result, and a whole
walk is made.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, compress
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.accelerator.devices import memory_key
from holdfast.format import values as codec
from holdfast.state import subclasses
from holdfast.state.bindings import Binding
from holdfast.state.identity import TensorNames
from holdfast.state.mapped.shards import declarations, declared
from holdfast.state.modules import RENORMALISING, parts
from holdfast.state.objects import Objects
from holdfast.state.optimizers import is_hooked, is_tensor
from holdfast.state.tensors import PLAIN_TYPES, is_small, small_tensor
from holdfast.state.values import Values, ValuesBeside
from holdfast.state.walk import Walk

# Detects whether every tensor is still where the last walk met it, without building anything.
#
# A walk makes the names, and asks each object for its contents; that takes several times as long as
# a save may take. So the next walk only compares, and at the slightest difference a whole walk is
# made. Compared is everything the walk read: every dict of every module and optimizer by its keys
# and, by identity, its values; and for each tensor the place of its memory and how it is read.
# Thousands of each are compared by the interpreter's own loops, making no object that is kept: a
# garbage collection would cost more than all of it.


_values: Any = methodcaller("values")
_module_dicts: Any = attrgetter("_parameters", "_buffers", "_modules")
_not_saved: Any = attrgetter("_non_persistent_buffers_set")
_local: Any = attrgetter("_local_tensor")
_asks_for_gradient: Any = attrgetter("requires_grad")
_data_ptr = memory_key
#: Under a mode, such as a default device, torch calls Python at every access to a tensor; these
#: accesses bypass it. Without this they are only slower.
plain_looks: Any = getattr(torch._C, "DisableTorchFunction", contextlib.nullcontext)


class ChangeDetector:
    """Remembers the tensors that a walk met in ``objects``; ``met`` are these tensors under all
    names.
    """

    def __init__(self, objects: Objects, met: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._modules = objects.modules
        self._optimizers = objects.optimizers
        self._registrations = _registrations()
        tensors = {id(tensor): tensor for _, tensor in met}.values()
        parted = {id(tensor) for tensor in tensors if subclasses.is_registered(tensor)}
        self._dicts = _ModuleDicts(objects.modules.values())
        self._states = [_OptimizerState(each) for each in objects.optimizers.values()]
        self._inner = [_OptimizerState(each.optimizer) for each in objects.inner()]
        self._parted = [(t, _parted(t)) for t in tensors if id(t) in parted]
        inner = [part for _, found in self._parted for _, part in found]
        self._memory = _Memory([*(t for t in tensors if id(t) not in parted), *inner])
        of_memory = {id(tensor) for tensor in self._memory.looked_at}  # at that, too
        learning = (t for t in tensors if isinstance(t, nn.Parameter))
        self._learning = [t for t in learning if id(t) not in of_memory]
        self._learn = list(map(_asks_for_gradient, self._learning))

    def is_unchanged(self, objects: Objects) -> bool:
        """True if a walk over ``objects`` would meet the same tensors, in the same memory."""
        try:
            return (
                _are_same(self._modules, objects.modules)
                and _are_same(self._optimizers, objects.optimizers)
                and self._registrations == _registrations()
                and self._dicts.are_unchanged()
                and all(state.is_unchanged() for state in self._states)
                and self._are_inner(objects)
                and self._memory.is_unchanged()
                and list(map(_asks_for_gradient, self._learning)) == self._learn
                and all(_is_parted_alike(*one) for one in self._parted)
            )
        except Exception:  # of whatever kind: the walk that follows says what is the matter
            return False

    def _are_inner(self, objects: Objects) -> bool:
        """True if objects hold the same inner optimizers, and these keep the same tensors."""
        found = objects.inner()
        return len(found) == len(self._inner) and all(
            state.is_of(one.optimizer) and state.is_unchanged()
            for state, one in zip(self._inner, found, strict=True)
        )


class _ModuleDicts:
    """The contents of every module by name, and everything else that decides which of them are
    saved.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        each = (part for module in modules for _, part in parts(module))
        self._parts = list({id(part): part for part in each}.values())
        self._sharded = [part for part in self._parts if isinstance(part, FSDPModule)]
        self._renormalising: list[Any] = [p for p in self._parts if isinstance(p, RENORMALISING)]
        self._have_norms = [part.max_norm is None for part in self._renormalising]
        self._buffered = [part for part in self._parts if part._buffers]
        self._not_saved = [set(_not_saved(part)) for part in self._buffered]
        self._types = list(map(type, self._parts))
        dicts = self._every = self._dicts()
        self._filled = [each for each in dicts if each]
        self._empty = [each for each in dicts if not each]
        self._lengths = list(map(len, dicts))
        self._filled_lengths = list(map(len, self._filled))
        self._names = list(chain.from_iterable(dicts))
        self._held = list(chain.from_iterable(map(_values, dicts)))

    def _dicts(self) -> list[Any]:
        return list(chain.from_iterable(map(_module_dicts, self._parts)))

    def are_unchanged(self) -> bool:
        # Compared part by part from the top: a part still in its place has been compared itself.
        if not _are_all(map(type, self._parts), self._types):
            return False
        for part in self._sharded:
            part.reshard()  # no-op unless a forward without backward left it gathered
        dicts, lengths = self._dicts(), self._lengths
        if _are_all(dicts, self._every):  # most parts have one thing, and so two empty dicts
            if any(self._empty):
                return False
            dicts, lengths = self._filled, self._filled_lengths
        return (
            list(map(len, dicts)) == lengths
            and list(chain.from_iterable(dicts)) == self._names
            and _are_all(chain.from_iterable(map(_values, dicts)), self._held)
            and list(map(_not_saved, self._buffered)) == self._not_saved
            and [part.max_norm is None for part in self._renormalising] == self._have_norms
        )


class _OptimizerState:
    """The parameters of an optimizer by group, and its state for each."""

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

    def is_of(self, optimizer: Optimizer) -> bool:
        """True if it was made for this optimizer."""
        return optimizer is self._optimizer

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
    """The place of each tensor's elements, and how they are read."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        self._locals = list(map(_local, self._sharded))
        self._specs = [tensor._spec for tensor in self._sharded]
        self._tensors = [t for t in tensors if not isinstance(t, DTensor)] + self._locals
        #: Tensors identified by more than their memory are compared one by one each time.
        self._can_tell = all(type(tensor) in PLAIN_TYPES for tensor in self._tensors)
        self.looked_at = self._tensors if self._can_tell else []
        if not self._can_tell:
            return
        self._addresses = array("Q", map(_data_ptr, self._tensors))
        self._looks = TensorGuard(self._tensors)
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
    """True if a flag alone could make the same memory be read differently, or elsewhere.

    That is so for conjugates and views of them, and for an empty tensor, whose address is always 0.
    """
    shares = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.is_complex() or shares or not memory_key(tensor)


def _flags(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.is_conj(), tensor.is_neg(), tensor.device


def _parted(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return list(subclasses.plain_parts("", tensor))


def _is_parted_alike(tensor: torch.Tensor, before: list[tuple[str, torch.Tensor]]) -> bool:
    """True if a registered subclass returns the same parts, or others on the same memory."""
    now = _parted(tensor)
    return [name for name, _ in now] == [name for name, _ in before] and all(
        one is other or subclasses.reads_alike(other, one)
        for (_, one), (_, other) in zip(now, before, strict=True)
    )


def _are_same(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    return list(before) == list(now) and _are_all(now.values(), list(before.values()))


def _are_all(now: Iterable[object], before: Sequence[object]) -> bool:
    """True if these are the very objects of ``before``, and as many."""
    return all(map(is_, now, before))


class _OtherTensors(Exception):
    """Raised when a tensor in a value is not the one that the last walk met there."""


class CachedWalk(Struct):
    """The results of a walk that the next one reuses."""

    watch: ChangeDetector
    aliases: Mapping[str, str]
    value_leaves: Sequence[Binding]
    """The leaves that are tensors in values, in the order they were met."""
    _optimizers: Mapping[str, ValuesBeside]
    _extras: Mapping[str, Sequence[tuple[str, nn.Module]]]
    _known: TensorNames
    """The names of the tensors of modules and optimizers."""
    _in_values: Mapping[str, str]
    _references: Mapping[str, str]
    _keeps_small: bool

    def read_values(self, objects: Objects) -> ValueRead | None:
        """Reads all values as they are now, with the tensors of ``value_leaves``; None when these
        are others.
        """
        taken = ValueRead(self._known, self._in_values, self._references, self._keeps_small)
        try:
            for key, beside in self._optimizers.items():
                taken.values.add_optimizer(key, beside)
            for key, parts in self._extras.items():
                taken.values.add_extra(key, parts)
            taken.values.add_rest(objects)
        except _OtherTensors:
            return None
        return taken if taken.names == [leaf.name for leaf in self.value_leaves] else None


@dataclass(slots=True)
class ValueRead:
    """Values, and the tensors in them that are leaves."""

    _others: TensorNames
    _before: Mapping[str, str]
    _references: Mapping[str, str]
    _keeps_small: bool
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    values: Values = field(init=False)
    _known: TensorNames = field(default_factory=TensorNames)

    def __post_init__(self) -> None:
        self.values = Values(self._tensor)

    def _tensor(self, value: Any, where: str) -> str | codec.SmallTensor | None:
        if not isinstance(value, torch.Tensor):
            return None
        elsewhere = self._others.find(value)
        if elsewhere is not None:
            if self._before.get(where) != elsewhere:
                raise _OtherTensors
            return self._references[elsewhere]
        name = self._known.name(value, where)
        if name is not where:
            return name
        if self._keeps_small and is_small(value) and declared(value) is None:
            return small_tensor(where, value)
        self.names.append(where)
        self.tensors.append(value)
        return name


def again_after(walk: Walk, objects: Objects, bindings: Sequence[Binding]) -> CachedWalk | None:
    """Keeps the results of ``walk`` for the next; None where only a whole walk gives the right
    names.
    """
    own = {where for where, name in walk.in_values.items() if where == name}
    if not own.isdisjoint(walk.aliases.values()):
        return None  # a tensor of a module is called by where it was met in a value before it
    known = TensorNames()
    for name, tensor, *_ in walk.leaves:
        if name not in own:
            known.name(tensor, name)
    return CachedWalk(
        ChangeDetector(objects, walk.met),
        walk.stored_aliases(),
        [b for b in bindings if b.name in own],
        walk.optimizers,
        walk.extras,
        known,
        walk.in_values,
        walk.references,
        walk.keeps_small,
    )


# Compares how tensors are read, and whether they need gradients, in one call where torch can.
#
# torch compares tensors with their former properties when it decides whether compiled code still
# fits them, several times as fast as Python can read the properties. It is not a public interface:
# it is tested before it is relied on, and where it is missing, or returns anything unexpected, the
# properties of each tensor are read.


_size, _stride = torch.Tensor.size, torch.Tensor.stride


class TensorGuard:
    """Records the properties of tensors; ``are_unchanged`` says whether they are still the same."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        looks: dict[tuple[object, ...], tuple[object, ...]] = {}
        found = ((t.size(), t.stride(), t.dtype, t.requires_grad) for t in tensors)
        self._looks = [looks.setdefault(look, look) for look in found]  # few differ
        self._compare = _comparison(self._tensors) if _is_to_be_relied_on() else None

    def are_unchanged(self) -> bool:
        if self._compare is not None and self._compare(*self._tensors):
            return True
        # Under some modes torch reports other properties for the same tensors.
        for tensor, (shape, strides, dtype, learns) in zip(self._tensors, self._looks, strict=True):
            if _size(tensor) != shape or _stride(tensor) != strides or tensor.dtype is not dtype:
                return False
            if tensor.requires_grad is not learns:
                return False
        return True


def _comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Returns a function that compares the same tensors; None where torch has none."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        make: Any = TensorGuards
        guards = make(
            *tensors,
            dynamic_dims_sizes=[list(tensor.size()) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
        check: Callable[..., bool] = guards.check
    except Exception:  # whatever another torch has there
        return None
    return check


@cache
def _is_to_be_relied_on() -> bool:
    """True if torch's comparison notices every change that matters here."""
    with torch.inference_mode(False), torch.no_grad():
        return all(
            map(
                _is_noticed,
                (
                    lambda tensor: tensor.resize_(4, 3),
                    lambda tensor: tensor.resize_(2, 6),
                    lambda tensor: tensor.resize_(12),
                    lambda tensor: tensor.as_strided_((3, 4), (1, 3)),
                    lambda tensor: tensor.as_strided_((3, 2), (4, 1)),
                    lambda tensor: tensor.requires_grad_(True),
                    lambda tensor: setattr(tensor, "data", tensor.view(torch.int32)),
                    lambda tensor: setattr(tensor, "data", tensor.to(torch.bfloat16)),
                ),
            )
        )


def _is_noticed(change: Callable[[torch.Tensor], object]) -> bool:
    tensors = torch.zeros(2), torch.zeros(3, 4, device="cpu"), torch.zeros(())
    same = _comparison(tensors)
    try:
        if same is None or not same(*tensors):
            return False
        change(tensors[1])
        return not same(*tensors)
    except Exception:
        return False
