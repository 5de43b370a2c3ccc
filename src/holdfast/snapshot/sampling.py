"""Sum a sample of what this rank holds alike with others, of the very moment that is captured.

Bytes on the host are summed where they are, those on a GPU are first copied beside the image:
either way before the fence opens, and before it is looked whether the copy was overtaken. A sample
that cannot be taken costs nobody anything but the comparing.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch

from holdfast.events import Warned, emit
from holdfast.format.checksum import checksum
from holdfast.geometry.box import Box
from holdfast.geometry.layout import Layout
from holdfast.snapshot.copies import part_of
from holdfast.state.binding import Bindings

_SUM_MASK = (1 << 32) - 1


class Sample:
    """The tiles of one save, by the groups that this rank is in; ``sums`` once it is finished."""

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]] = (),
        staging: torch.Tensor | None = None,
    ) -> None:
        self._groups = groups
        self._staging = staging
        self._sums: list[list[int]] = [[0] * len(group) for group in groups]
        self._staged: list[tuple[int, int, int, int]] = []
        """(group, number in it, offset in the staging, bytes) of what comes from a GPU."""
        self._staged_bytes = 0
        self.failed = ""

    @property
    def size_bytes(self) -> int:
        """How much is summed."""
        return sum(tile.nbytes for group in self._groups for tile in group)

    @property
    def sums(self) -> tuple[bytes, ...]:
        """What is told: for each group the sums of its tiles; nothing if they could not be made."""
        if self.failed:
            return ()
        return tuple(struct.pack(f"<{len(some)}I", *some) for some in self._sums)

    def take_on_host(self) -> None:
        """Sum all that is in the memory of this host."""
        try:
            for group, tiles in enumerate(self._groups):
                for number, tile in enumerate(tiles):
                    if tile.is_cpu:
                        self._sums[group][number] = _sum(tile)
        except Exception as error:  # of memory, say: no reason to lose a save
            self.fail(error)

    def enqueue(self, device: torch.device) -> None:
        """Enqueue the copies of all that is on this GPU, on the current stream of it."""
        try:
            for group, tiles in enumerate(self._groups):
                for number, tile in enumerate(tiles):
                    if tile.device == device:
                        self._stage(group, number, tile)
        except Exception as error:
            self.fail(error)

    def _stage(self, group: int, number: int, tile: torch.Tensor) -> None:
        assert self._staging is not None
        start, size = self._staged_bytes, tile.nbytes
        place = self._staging[start : start + size].view(tile.dtype).view(tile.shape)
        place.copy_(tile, non_blocking=True)
        self._staged.append((group, number, start, size))
        self._staged_bytes = start + _aligned(size)

    def finish(self) -> None:
        """Sum what was copied from GPUs, once the copies are there."""
        try:
            for group, number, start, size in self._staged:
                assert self._staging is not None
                self._sums[group][number] = _sum(self._staging[start : start + size])
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Nothing is told of it."""
        self.failed = f"{type(error).__name__}: {error}"
        emit(Warned(message=f"replicas could not be compared at this save: {self.failed}"))


class Sampler:
    """Finds the samples of one layout in the memory of this rank's leaves."""

    def __init__(self, layout: Layout, rank: int, bindings: Bindings) -> None:
        self._layout, self._rank = layout, rank
        self._bindings = bindings
        self._staging: torch.Tensor | None = None

    def sample(self, turn: int, turns: int | None) -> Sample:
        """What is to be summed in this of ``turns`` turns; None: of as many as are cheap."""
        try:
            tiles = self._layout.replicas.tiles(self._rank, turn, turns)
            groups = [[self._find(tile.leaf, tile.box) for tile in some] for some in tiles]
            return Sample(groups, self._room(groups))
        except Exception as error:
            sample = Sample()
            sample.fail(error)
            return sample

    def _find(self, leaf: int, box: Box) -> torch.Tensor:
        return part_of(self._layout, self._rank, leaf, box, self._bindings)[1]

    def _room(self, groups: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor | None:
        """Where copies from GPUs go, kept for the next sample; None when nothing is on one."""
        size = sum(_aligned(tile.nbytes) for some in groups for tile in some if tile.is_cuda)
        if size and (self._staging is None or self._staging.numel() < size):
            self._staging = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._staging


def _aligned(size_bytes: int) -> int:
    """Room in which the next tile begins where any dtype may."""
    return -(-size_bytes // 16) * 16


def _sum(tile: torch.Tensor) -> int:
    """As much as is told of the checksum of a tile's bytes, its elements in a row."""
    row = tile.resolve_conj().resolve_neg().contiguous()
    data = (ctypes.c_char * row.nbytes).from_address(row.data_ptr())
    return checksum(memoryview(data)) & _SUM_MASK
