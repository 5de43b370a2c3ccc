"""Numbers of which several tensors have one each, and one is stored: they must agree at every save.

An optimizer counts the steps of each parameter. Parameters that rules or declarations make one
leaf have one count in what is stored; were the counts to differ, all but one would be lost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from holdfast.errors import UsageError
from holdfast.state.binding import Binding


class Agreeing:
    """The numbers of one save, looked at while nothing may change them."""

    def __init__(self, joined: Sequence[tuple[str, Sequence[Binding]]]) -> None:
        self._joined = joined
        self._bits: dict[int, bytes] = {}
        """By the binding: the bytes of its number."""
        self._staged: list[tuple[Sequence[Binding], torch.Tensor]] = []

    def take_on_host(self) -> None:
        """Read what is in the memory of this host."""
        for _, bindings in self._joined:
            for binding in bindings:
                source = binding.source
                if source.is_cpu:
                    data = ctypes.string_at(source.data_ptr(), source.element_size())
                    self._bits[id(binding)] = data

    def enqueue(self, device: torch.device) -> None:
        """Enqueue the copies of all that is on this GPU, on the current stream of it."""
        for _, bindings in self._joined:
            here = [binding for binding in bindings if binding.source.device == device]
            if here:
                numbers = torch.stack([binding.source.reshape(()) for binding in here])
                into = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda)
                into.copy_(numbers, non_blocking=True)
                self._staged.append((here, into))

    def check(self) -> None:
        """UsageError names two tensors whose numbers differ, once every copy has arrived."""
        for bindings, numbers in self._staged:
            for binding, number in zip(bindings, numbers, strict=True):
                data = ctypes.string_at(number.data_ptr(), number.element_size())
                self._bits[id(binding)] = data
        for leaf, (first, *others) in self._joined:
            for other in others:
                if self._bits[id(first)] != self._bits[id(other)]:
                    raise self._unequal(leaf, first, other)

    def _unequal(self, leaf: str, one: Binding, other: Binding) -> UsageError:
        first, second = (
            torch.frombuffer(bytearray(self._bits[id(each)]), dtype=each.tensor.dtype).item()
            for each in (one, other)
        )
        return UsageError(
            f"{one.name} is {first} and {other.name} is {second}, and by the rules both are "
            f"{leaf}, of which there is one: do not join tensors whose updates were counted "
            "otherwise",
            leaf=leaf,
        )
