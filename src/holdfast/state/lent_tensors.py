"""Detects objects that changed the tensors they were given their stored state in.

A restore reads into the tensors that an object shows where it has no memory to spare for others, or
where something else holds them too. An object that resets its tensors before it takes what it is
given has reset just that: it is given the same once more, read again, as copies, and must then show
what was stored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from holdfast.accelerator.devices import host_address
from holdfast.format import values as codec
from holdfast.format.checksum import checksum
from holdfast.state.identity import made_anew
from holdfast.state.tensors import DTYPE_NAMES, empty, local_of

#: Tensors by leaf.
Tensors = Mapping[str, torch.Tensor]

#: The integer type as which elements of a given size are added up on a device.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
#: Elements that are added up at one time: torch makes eight bytes of each before it adds.
_PIECE = 1 << 22


class LentTensors:
    """The tensors that are in the value of each key, and that its object or another has as well.

    Made when they hold what was stored. ``made``: the other tensors in these values, which no
    object had.
    """

    def __init__(self, lent: Mapping[str, Tensors], made: Mapping[str, Tensors]) -> None:
        self._lent, self._made = lent, made
        tensors = {leaf: one for found in lent.values() for leaf, one in found.items()}
        others = {leaf: one for found in made.values() for leaf, one in found.items()}
        self._forms = {leaf: _Form.of(one) for leaf, one in (tensors | others).items()}
        self._sums = dict(zip(tensors, _sums(tensors.values()), strict=True))
        self._changed: set[str] = set()

    def note_given(self, key: str) -> None:
        """Note which tensors have other elements now that the object of ``key`` has taken them.

        What a later object changes that was not given them, it changes on purpose.
        """
        asked = {n: one for n, one in self._lent.get(key, {}).items() if n not in self._changed}
        self._changed.update(one for one in asked if not self._forms[one].is_of(asked[one]))
        left = {leaf: one for leaf, one in asked.items() if leaf not in self._changed}
        now = zip(left, _sums(left.values()), strict=True)
        self._changed.update(leaf for leaf, found in now if found != self._sums[leaf])

    def changed(self) -> list[str]:
        """Returns the keys of values in which a tensor had other elements, or another form, when an
        object had taken it.
        """
        return [key for key, lent in self._lent.items() if not self._changed.isdisjoint(lent)]

    def of(self, keys: Collection[str]) -> dict[str, torch.Tensor]:
        """Returns the changed tensors in the values of these keys, by leaf, and those that were
        made: the object may have them by now. One that has another form is replaced by a new one.
        """
        found = {
            leaf: tensor
            for key, tensors in self._lent.items()
            if key in keys
            for leaf, tensor in tensors.items()
            if leaf in self._changed
        }
        for key in self._made.keys() & keys:
            found.update(self._made[key])
        forms = self._forms
        return {n: one if forms[n].is_of(one) else forms[n].anew(one) for n, one in found.items()}


class _Form(NamedTuple):
    """What must be the same of a tensor for its memory to have room for its elements."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    local_shape: torch.Size
    memory_bytes: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Form:
        local = local_of(tensor)
        size = local.untyped_storage().nbytes() if local.numel() else 0
        return _Form(tensor.shape, tensor.dtype, local.device, local.shape, size)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """True if the tensor still has this form: memory may have grown, not become less."""
        now = _Form.of(tensor)
        return now[:4] == self[:4] and now.memory_bytes >= self.memory_bytes

    def anew(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of this form in the place of ``tensor``."""
        if isinstance(tensor, DTensor):  # its parts may change, its type does not
            return made_anew(tensor)
        found = empty(tuple(self.shape), DTYPE_NAMES[self.dtype], self.device)
        return found.requires_grad_(tensor.requires_grad)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same elements in memory of its own."""
    if isinstance(tensor, DTensor):
        found = made_anew(tensor)
        local_of(found).copy_(local_of(tensor))
    else:  # torch warns where it makes a tensor of some types
        found = local_of(tensor).clone(memory_format=torch.contiguous_format).view(tensor.dtype)
    return found.requires_grad_(tensor.requires_grad)


def contents(value: Any, where: str) -> Any:
    """Returns a value encoded, with a checksum in the place of each tensor; equal if the values
    are.
    """

    def describe(found: Any, _: str) -> str | None:
        if not isinstance(found, torch.Tensor):
            return None
        return f"{found.dtype} {tuple(found.shape)} {_sums([found])[0]}"

    return codec.encode(value, where, tensor=describe)


def is_as_given(shown: Any, given: Any, before: Any) -> bool:
    """Returns whether an object shows what it was given: ``contents`` of each.

    Of what is no tensor it may also show what it showed ``before``, when it had been given it once:
    a count of restores, for example. What it adds twice differs from both. It may show more names.
    """
    if shown == given:
        return True
    if isinstance(given, dict):
        if "$leaf" in given or not isinstance(shown, dict):
            return "$leaf" not in given and bool(shown == before)
        was = before if isinstance(before, dict) else {}
        return all(
            key in shown and is_as_given(shown[key], one, was.get(key))
            for key, one in given.items()
        )
    if isinstance(given, list) and isinstance(shown, list) and len(shown) == len(given):
        is_alike = isinstance(before, list) and len(before) == len(given)
        return all(map(is_as_given, shown, given, before if is_alike else [None] * len(given)))
    return bool(shown == before)


def _sums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns a checksum of each; devices are waited for once."""
    found = [_sum(local_of(tensor)) for tensor in tensors]
    there: dict[torch.device, list[torch.Tensor]] = {}
    for one in found:
        if isinstance(one, torch.Tensor):
            there.setdefault(one.device, []).append(one)
    here = {device: iter(torch.stack(sums).tolist()) for device, sums in there.items()}
    return [next(here[one.device]) if isinstance(one, torch.Tensor) else one for one in found]


def _sum(local: torch.Tensor) -> int | torch.Tensor:
    """Returns a checksum of a tensor's bytes; on a device the sum of its elements as integers."""
    if local.is_meta or not local.numel():
        return local.numel()
    plain = local.resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.element_size() == 16 else plain
    bits = plain.contiguous().view(-1).view(_BITS[plain.element_size()])
    if not bits.is_cpu:
        return _sum_of_bits(bits)
    # Not through numpy: no storage that it has seen can be resized.
    memory = (ctypes.c_ubyte * bits.nbytes).from_address(host_address(bits))
    return checksum(memoryview(memory))


def _sum_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """Returns the sum of integers without their signs: of anything but zeros it is not zero."""
    mask = (1 << 8 * bits.element_size()) - 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in bits.split(_PIECE):
        total += piece.to(torch.int64).bitwise_and_(mask).sum()
    return total
