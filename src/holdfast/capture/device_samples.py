"""Samples leaves on devices before and after their copies, to detect updates that overtook them.

What differs was written in between. Bytes stay on the device until they are compared, so that a
save waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from holdfast.accelerator import devices
from holdfast.capture.transfers import exact
from holdfast.state.bindings import Binding

SAMPLE_BYTES, SAMPLES = 64, 32


class DeviceSample:
    """Some bytes of some leaves of one device and dtype, in both states."""

    def __init__(self, device: torch.device, leaves: Sequence[Binding], number: int) -> None:
        self.device, self.is_streamed = device, devices.is_streamed(device)
        self._names = [leaf.name for leaf in leaves]
        self._parts = [_part(exact(leaf.local), number) for leaf in leaves]
        self._before = torch.cat(self._parts)
        self._sizes = [part.nbytes for part in self._parts]
        self._both: torch.Tensor | None = None

    def take_again(self) -> None:
        """Enqueue the second sample on the device's current stream; without room for it nothing
        is compared.
        """
        with suppress(torch.OutOfMemoryError):
            both = torch.stack((self._before, torch.cat(self._parts)))
            arrived = torch.empty_like(both, device="cpu", pin_memory=self.is_streamed)
            self._both = arrived.copy_(both, non_blocking=self.is_streamed)

    def find_changed(self) -> str | None:
        """Return the first leaf whose bytes differ, once the second sample has arrived."""
        if self._both is None:
            return None
        both = self._both.view(torch.uint8)  # as numbers, -0 equals 0, and nan not even itself
        if torch.equal(*both):
            return None
        before, behind = (sample.split(self._sizes) for sample in both)
        pairs = zip(self._names, before, behind, strict=True)
        return next(name for name, one, other in pairs if not torch.equal(one, other))


def sample_devices(
    leaves: tuple[Sequence[Binding], Sequence[Binding]], number: int
) -> list[DeviceSample]:
    """Return the samples of save ``number``: of ``leaves``, which are parameters and
    other leaves, as many of both, and different ones each time.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Binding]] = {}
    for leaf in _chosen(leaves, number):
        alike.setdefault((leaf.local.device, exact(leaf.local).dtype), []).append(leaf)
    with suppress(torch.OutOfMemoryError), torch.no_grad():
        return [DeviceSample(device, some, number) for (device, _), some in alike.items()]
    return []


def _chosen(leaves: tuple[Sequence[Binding], Sequence[Binding]], number: int) -> Iterator[Binding]:
    """Yield leaves that lie evenly spread among all."""
    left = SAMPLES
    for some, most in zip(leaves, (SAMPLES // 2, SAMPLES), strict=True):
        count = min(len(some), most, left)
        left -= count
        for place in range(count):
            yield some[(number + place * len(some) // count) % len(some)]


def _part(local: torch.Tensor, number: int) -> torch.Tensor:
    count = min(local.numel(), max(1, SAMPLE_BYTES // local.element_size()))
    at = number * 7919 * SAMPLE_BYTES % (local.numel() - count + 1)
    return local.as_strided((count,), (1,), local.storage_offset() + at)
