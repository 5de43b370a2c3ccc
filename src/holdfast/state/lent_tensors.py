"""Detects objects that changed the tensors they were given their stored state in.

A restore reads into the tensors that an object shows, so that nothing needs memory twice. An object
that resets its tensors before it takes what it is given has reset just that: it is given the same
once more, read again, as copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping

import torch
from torch.distributed.tensor import DTensor

from holdfast.format.checksum import checksum
from holdfast.state.identity import made_anew
from holdfast.state.tensors import local_of

#: Tensors by leaf.
Tensors = Mapping[str, torch.Tensor]

#: The integer type as which elements of a given size are added up on a device.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LentTensors:
    """The tensors that are in the value of each key, and that its object or another has as well.

    Made when they hold what was stored.
    """

    def __init__(self, lent: Mapping[str, Tensors]) -> None:
        self._lent = lent
        self._sums = {key: _sums(tensors) for key, tensors in lent.items()}

    def changed(self) -> list[str]:
        """Returns the keys of values in which a tensor has other elements by now."""
        return [key for key in self._lent if not self._is_as_read(key)]

    def of(self, keys: Collection[str]) -> dict[str, torch.Tensor]:
        """Returns all tensors in the values of these keys, by leaf."""
        return {
            leaf: tensor
            for key, tensors in self._lent.items()
            if key in keys
            for leaf, tensor in tensors.items()
        }

    def _is_as_read(self, key: str) -> bool:
        try:
            return _sums(self._lent[key]) == self._sums[key]
        except RuntimeError:  # such as of a tensor that has lost its memory
            return False


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same elements in memory of its own."""
    if isinstance(tensor, DTensor):
        found = made_anew(tensor)
        local_of(found).copy_(local_of(tensor))
    else:  # torch warns where it makes a tensor of some types
        found = local_of(tensor).clone(memory_format=torch.contiguous_format).view(tensor.dtype)
    return found.requires_grad_(tensor.requires_grad)


def _sums(tensors: Tensors) -> list[int]:
    return [_sum(local_of(tensor)) for tensor in tensors.values()]


def _sum(local: torch.Tensor) -> int:
    """Returns a checksum of a tensor's bytes; on a device the sum of its elements as integers."""
    if local.is_meta or not local.numel():
        return local.numel()
    plain = local.resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.element_size() == 16 else plain
    bits = plain.view(_BITS[plain.element_size()]).contiguous()
    if not bits.is_cpu:
        return int(bits.sum(dtype=torch.int64))
    # Not through numpy: no storage that it has seen can be resized.
    memory = (ctypes.c_ubyte * bits.nbytes).from_address(bits.data_ptr())
    return checksum(memoryview(memory))
