"""Numbers of which several tensors have one each, and one is stored: they must agree at every save.

An optimizer counts the steps of each parameter. Parameters that rules or declarations make one
leaf have one count in what is stored; were the counts to differ, all but one would be lost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from holdfast.errors import UsageError
from holdfast.state.binding import Source


class Agreeing:
    """The numbers of one save, looked at while nothing may change them."""

    def __init__(self, joined: Sequence[tuple[str, Sequence[Source]]]) -> None:
        self._leaves = [(leaf, [_Number(one) for one in sources]) for leaf, sources in joined]
        self._numbers = [number for _, numbers in self._leaves for number in numbers]
        self._staged: list[tuple[list[_Number], torch.Tensor]] = []

    def take_on_host(self) -> None:
        """Read what is in the memory of this host."""
        for number in self._numbers:
            if number.source.binding.source.is_cpu:
                number.bits = _bits(number.source.memory)

    def enqueue(self, device: torch.device) -> None:
        """Enqueue the copies of all that is on this GPU, on the current stream of it."""
        alike: dict[torch.dtype, list[_Number]] = {}
        for number in self._numbers:
            held = number.source.binding.source
            if held.device == device:
                alike.setdefault(held.dtype, []).append(number)
        for numbers in alike.values():
            there = torch.stack([number.source.memory.reshape(()) for number in numbers])
            into = torch.empty_like(there, device="cpu", pin_memory=there.is_cuda)
            into.copy_(there, non_blocking=True)
            self._staged.append((numbers, into))

    def check(self) -> None:
        """UsageError names two tensors whose numbers differ, once every copy has arrived."""
        for numbers, arrived in self._staged:
            for number, here in zip(numbers, arrived, strict=True):
                number.bits = _bits(here)
        for leaf, (first, *others) in self._leaves:
            for other in others:
                if first.bits != other.bits:
                    raise _unequal(leaf, first, other)


class _Number:
    """One of those that must agree, and the bytes that it is."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.bits = b""

    def __str__(self) -> str:
        dtype = self.source.binding.tensor.dtype
        return str(torch.frombuffer(bytearray(self.bits), dtype=dtype).item())


def _bits(number: torch.Tensor) -> bytes:
    return ctypes.string_at(number.data_ptr(), number.element_size())


def _unequal(leaf: str, one: _Number, other: _Number) -> UsageError:
    return UsageError(
        f"{one.source.binding.name} is {one} and {other.source.binding.name} is {other}, and by "
        f"the rules both are {leaf}, of which there is one: do not join tensors whose updates were "
        "counted otherwise",
        leaf=leaf,
    )
