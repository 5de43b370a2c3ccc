"""Checksums a sample of replicated data at the moment of capture, to be compared across ranks.

Bytes in host memory are checksummed in place, those on a device with streams are first copied
beside the image, those on any other device are fetched one by one: all before the fence opens, and
before the check for overtaking updates. A failed sample costs only the comparison.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash
from msgspec import Struct, field
from torch.optim import Optimizer

from holdfast.accelerator import devices
from holdfast.capture.copy_plan import part_of
from holdfast.capture.transfers import aligned
from holdfast.errors import UsageError
from holdfast.events import warn
from holdfast.format.checksum import BLOCK_BYTES, checksum
from holdfast.format.image import Image
from holdfast.geometry.box import Box
from holdfast.geometry.layout import Layout
from holdfast.protocol.messages import CHANGED, NOTHING_TO_SAY
from holdfast.state.bindings import Bindings, LeafSource
from holdfast.state.step_calls import parameters_of

_SUM_MASK = (1 << 32) - 1


class ReplicaSample:
    """The sampled tiles of one save, by replica group of this rank; ``sums`` are ready after
    ``finish``.
    """

    def __init__(
        self, groups: Sequence[Sequence[torch.Tensor]] = (), staging: torch.Tensor | None = None
    ) -> None:
        self._groups = groups
        self._staging = staging
        self._sums: list[list[int]] = [[0] * len(group) for group in groups]
        self._staged: list[tuple[int, int, int, int]] = []
        """(group, index in it, offset in the staging buffer, bytes) of the tiles that come from a
        GPU.
        """
        self._staged_bytes = 0
        self.failed = ""

    @property
    def size_bytes(self) -> int:
        """Number of bytes that are checksummed."""
        return sum(tile.nbytes for group in self._groups for tile in group)

    @property
    def sums(self) -> tuple[bytes, ...]:
        """Return the checksums of the tiles for each group; empty if they could not be computed."""
        if self.failed:
            return ()
        return tuple(struct.pack(f"<{len(some)}I", *some) for some in self._sums)

    def sum_on_host(self) -> None:
        """Checksum the tiles in host memory, and those that no stream copies."""
        try:
            for group, tiles in enumerate(self._groups):
                for number, tile in enumerate(tiles):
                    if not devices.is_streamed(tile.device):
                        self._sums[group][number] = _sum(tile)
        except Exception as error:  # out of memory, for example: no reason to lose a save
            self.fail(error)

    def enqueue(self, device: torch.device) -> None:
        """Enqueue the copies of the tiles on this GPU, on its current stream."""
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
        self._staged_bytes = start + aligned(size, 16)

    def finish(self) -> None:
        """Checksum the tiles copied from GPUs, once the copies have arrived."""
        try:
            for group, number, start, size in self._staged:
                assert self._staging is not None
                self._sums[group][number] = _sum(self._staging[start : start + size])
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Record an error: no checksums are sent."""
        self.failed = f"{type(error).__name__}: {error}"
        warn(f"replicas could not be compared at this save: {self.failed}")


class ReplicaSampler:
    """Locates the samples of one layout in the memory of this rank's leaves."""

    def __init__(self, layout: Layout, rank: int, bindings: Bindings) -> None:
        self._layout, self._rank = layout, rank
        self._bindings = bindings
        self._staging: torch.Tensor | None = None

    def sample(self, turn: int, turns: int | None) -> ReplicaSample:
        """Return the sample for part ``turn`` of ``turns`` parts; None: as many parts as keep it
        cheap.
        """
        try:
            tiles = self._layout.replicas.tiles(self._rank, turn, turns)
            groups = [[self._find(tile.leaf, tile.box) for tile in some] for some in tiles]
            return ReplicaSample(groups, self._room(groups))
        except Exception as error:
            sample = ReplicaSample()
            sample.fail(error)
            return sample

    def _find(self, leaf: int, box: Box) -> torch.Tensor:
        return part_of(self._layout, self._rank, leaf, box, self._bindings)[1]

    def _room(self, groups: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor | None:
        """Return the reused staging buffer for tiles that streams copy; None if there are none."""
        size = sum(
            aligned(tile.nbytes, 16)
            for some in groups
            for tile in some
            if devices.is_streamed(tile.device)
        )
        if size and (self._staging is None or self._staging.numel() < size):
            self._staging = devices.empty_pinned(size)
        return self._staging


def _sum(tile: torch.Tensor) -> int:
    """Return the truncated checksum of a tile's bytes, its elements in order."""
    row = tile.resolve_conj().resolve_neg().cpu().contiguous()
    data = (ctypes.c_char * row.nbytes).from_address(devices.host_address(row))
    return checksum(memoryview(data)) & _SUM_MASK


# Checks that scalars held by several tensors but stored once agree at every save. An optimizer
# counts the steps of each parameter. Parameters that rules or declarations merge into one leaf have
# one stored count; if their counts differed, all but one would be lost.


class ScalarAgreement:
    """The scalars of one save, read while nothing may change them."""

    def __init__(self, joined: Sequence[tuple[str, Sequence[LeafSource]]]) -> None:
        self._leaves = [(leaf, [_Number(one) for one in sources]) for leaf, sources in joined]
        self._numbers = [number for _, numbers in self._leaves for number in numbers]
        self._staged: list[tuple[list[_Number], torch.Tensor]] = []

    def read_on_host(self) -> None:
        """Read the scalars in host memory, and those that no stream copies."""
        for number in self._numbers:
            if not devices.is_streamed(number.source.binding.source.device):
                number.bits = _bits(number.source.memory)

    def enqueue(self, device: torch.device) -> None:
        """Enqueue the copies of the scalars on this GPU, on its current stream."""
        alike: dict[torch.dtype, list[_Number]] = {}
        for number in self._numbers:
            held = number.source.binding.source
            if held.device == device:
                alike.setdefault(held.dtype, []).append(number)
        for numbers in alike.values():
            there = torch.stack([number.source.memory.reshape(()) for number in numbers])
            self._staged.append((numbers, devices.fetch(there)))

    def check(self) -> None:
        """Raise UsageError, naming two tensors whose scalars differ; every copy must have
        arrived.
        """
        for numbers, arrived in self._staged:
            for number, here in zip(numbers, arrived, strict=True):
                number.bits = _bits(here)
        for leaf, (first, *others) in self._leaves:
            for other in others:
                if first.bits != other.bits:
                    raise _unequal(leaf, first, other)


class _Number:
    """One scalar that must agree, and its bytes."""

    def __init__(self, source: LeafSource) -> None:
        self.source = source
        self.bits = b""

    def __str__(self) -> str:
        dtype = self.source.binding.tensor.dtype
        return str(torch.frombuffer(bytearray(self.bits), dtype=dtype).item())


def _bits(number: torch.Tensor) -> bytes:
    here = number.detach().cpu()
    return ctypes.string_at(devices.host_address(here), here.element_size())


def _unequal(leaf: str, one: _Number, other: _Number) -> UsageError:
    return UsageError(
        f"{one.source.binding.name} is {one} and {other.source.binding.name} is {other}, and by "
        f"the rules both are {leaf}, of which there is one: do not join tensors whose updates were "
        "counted otherwise",
        leaf=leaf,
    )


# Detects that a rank's parameters equal those of its previous image although they were trained. The
# training thread only notes which optimizers stepped. The worker compares checksums that the sealed
# image has anyway, of the blocks that contain only parameters, and the few bytes around them.


class TrainedParameters(Struct, frozen=True):
    """Training facts of one save: ``leaves`` that optimizers change, and the steps they took."""

    leaves: frozenset[str] = frozenset()
    has_stepped: bool = False
    updates: Mapping[str, int] = field(default_factory=dict)
    """Number of whole updates by each optimizer since the start or the restore."""


UNTRAINED = TrainedParameters()
#: Key under which calls of ``before_update`` are counted, beside the optimizers' keys.
BY_HAND = ""
#: So many saves in a row before which only other optimizers stepped are no training in turns.
_IDLE_SAVES = 2


class OptimizerSteps:
    """Optimizers that certainly changed parameters since the last save, and counts of whole
    updates.
    """

    def __init__(self) -> None:
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._bindings: Bindings | None = None
        self._leaves: frozenset[str] = frozenset()
        self._optimizers: dict[str, weakref.ref[Optimizer]] = {}
        self._whole: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._by_hand = 0
        self._idle_saves = 0
        """Saves in a row before which other optimizers stepped, and none of the state."""

    def note(self, optimizer: Optimizer) -> None:
        """Note an optimizer that is about to step, unless the step may leave all parameters
        unchanged.

        A GradScaler that decides on the GPU to skip the step reports that by ``found_inf``.
        """
        if optimizer in self._stepped or getattr(optimizer, "found_inf", None) is not None:
            return
        if any(_is_trained(group) for group in optimizer.param_groups):
            self._stepped.add(optimizer)

    def count(self, optimizer: Optimizer | None) -> None:
        """Count a whole step of ``optimizer``; None: an update by no torch optimizer."""
        if optimizer is None:
            self._by_hand += 1
        else:
            self._whole[optimizer] = self._whole.get(optimizer, 0) + 1

    def restart(self) -> None:
        """Reset the counts after another state was loaded."""
        self._whole.clear()
        self._by_hand = 0

    def collect(
        self, bindings: Bindings, optimizers: Callable[[], Mapping[str, Optimizer]]
    ) -> TrainedParameters:
        """Return the training facts for this save and reset them; ``optimizers`` is called only if
        needed.
        """
        if bindings is not self._bindings:
            found = optimizers()
            ids = {id(parameter) for each in found.values() for parameter in parameters_of(each)}
            self._leaves = frozenset(b.name for b in bindings if id(b.tensor) in ids)
            self._optimizers = {key: weakref.ref(each) for key, each in found.items()}
            self._bindings = bindings
        living = [(key, one) for key, ref in self._optimizers.items() if (one := ref())]
        stepped = any(one in self._stepped for _, one in living)
        self._warn_of_others(bindings, living, stepped)
        self._stepped.clear()
        updates = {key: self._whole.get(one, 0) for key, one in living}
        if not living:  # beside an optimizer it has other uses, on some ranks only
            updates[BY_HAND] = self._by_hand
        return TrainedParameters(self._leaves, stepped, updates)

    def _warn_of_others(
        self, bindings: Bindings, living: list[tuple[str, Optimizer]], stepped: bool
    ) -> None:
        """Says once that what trains is not what is saved, as when a notebook made both anew."""
        others: list[Optimizer] = []
        if living and not stepped and self._stepped:
            own = {id(parameter) for _, one in living for parameter in parameters_of(one)}
            own.update(id(binding.tensor) for binding in bindings)  # of the model, by another
            others = [one for one in self._stepped if own.isdisjoint(map(id, parameters_of(one)))]
        if not others:
            if self._idle_saves < _IDLE_SAVES:  # else it was said
                self._idle_saves = 0
            return
        self._idle_saves += 1
        if self._idle_saves == _IDLE_SAVES:
            keys = ", ".join(f"state[{key!r}]" for key, _ in living)
            warn(
                f"{type(others[0]).__name__} trains parameters that are not in the "
                f"state, and {keys} took no step in the last {_IDLE_SAVES} saves: the objects "
                "of before are saved, if model and optimizer were made anew. Put the new ones "
                "in their place: checkpointer.state['model'] = model, and so on, on every rank."
            )


def _is_trained(group: dict[str, object]) -> bool:
    rate, parameters = group.get("lr", 0.0), group["params"]
    if isinstance(rate, torch.Tensor):
        if not rate.is_cpu:  # reading it would wait for the GPU
            return False
        rate = rate.item()
    assert isinstance(parameters, list)
    return bool(rate) and any(one.grad is not None for one in parameters)


class StandstillProbe:
    """Compares each sealed image with the previous one. Runs on the worker thread."""

    def __init__(self) -> None:
        self._step, self._sum = -1, ""
        self._has_stepped = False

    def same_since(self, step: int, trained: TrainedParameters, parameters: str) -> int:
        """Return the step of the previous image if its parameters are equal; see ``messages`` for
        other values.

        ``parameters``: their checksum in this image, "" if the image has or keeps none.
        """
        self._has_stepped |= trained.has_stepped
        if not parameters:
            return NOTHING_TO_SAY
        before, was, has_stepped = self._step, self._sum, self._has_stepped
        self._step, self._sum, self._has_stepped = step, parameters, False
        if before < 0 or not has_stepped:
            return NOTHING_TO_SAY
        return before if was == parameters else CHANGED


def sum_of(memory: memoryview, image: Image, spans: Sequence[tuple[int, int]]) -> str:
    """Return the checksum of these byte ranges of a sealed image's data; "" if there are none.

    The checksum is computed from those of the blocks that the ranges fill, and from the bytes
    around these blocks.
    """
    total = xxhash.xxh3_64()
    data = image.data_start
    table = memory[data + image.table_offset : image.size_bytes]
    for start, stop in spans:
        first, last = -(-start // BLOCK_BYTES), stop // BLOCK_BYTES
        if first >= last:
            total.update(memory[data + start : data + stop])
            continue
        total.update(memory[data + start : data + first * BLOCK_BYTES])
        total.update(table[8 * first : 8 * last])
        total.update(memory[data + last * BLOCK_BYTES : data + stop])
    return total.hexdigest() if spans else ""
