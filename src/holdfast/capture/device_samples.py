"""Samples leaves on devices before and after their copies, to detect updates that overtook them.

What differs was written in between. Bytes stay on the device until they are compared, so that a
save waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from holdfast.accelerator import devices
from holdfast.capture.transfers import exact
from holdfast.state.bindings import Binding, Bindings

SAMPLE_BYTES, SAMPLES = 64, 32


class SampledParts(NamedTuple):
    """The bytes to be sampled of some leaves of one device and dtype: views of their memory."""

    device: torch.device
    names: list[str]
    parts: list[torch.Tensor]


class DeviceSample:
    """Some bytes of some leaves of one device and dtype, in both states."""

    def __init__(self, sampled: SampledParts) -> None:
        self.device, self.is_streamed = sampled.device, devices.is_streamed(sampled.device)
        self._names, self._parts = sampled.names, sampled.parts
        self._before = torch.cat(self._parts)
        self._sizes = [part.nbytes for part in self._parts]
        self._both: torch.Tensor | None = None

    def take_again(self) -> None:
        """Enqueue the second sample on the device's current stream; without room for it nothing
        is compared.
        """
        with suppress(torch.OutOfMemoryError):
            self._both = devices.fetch(torch.stack((self._before, torch.cat(self._parts))))

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


def sample_devices(bindings: Bindings, number: int) -> list[DeviceSample]:
    """Return the samples of save ``number``: of parameters and other leaves, as many of both, and
    different ones each time.
    """
    if not any(bindings.sampled_on_devices):
        return []
    with suppress(torch.OutOfMemoryError), torch.no_grad():
        return [DeviceSample(one) for one in _sampled_parts(bindings, number)]
    return []


def _sampled_parts(bindings: Bindings, number: int) -> list[SampledParts]:
    alike: dict[tuple[torch.device, torch.dtype], SampledParts] = {}
    for leaf in _chosen(bindings.sampled_on_devices, number):
        local = exact(leaf.local)
        key = local.device, local.dtype
        found = alike.setdefault(key, SampledParts(local.device, [], []))
        found.names.append(leaf.name)
        found.parts.append(_part(local, number))
    return list(alike.values())


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
