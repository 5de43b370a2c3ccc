"""Copies this rank's image into the granted slot or ring, and seals it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from holdfast.capture.copy_plan import CopyPlan, SlotTarget, plan_copies
from holdfast.capture.copy_ring import RingTarget, copy_through_ring
from holdfast.capture.copy_slot import copy_image
from holdfast.capture.pinning import PIECE_BYTES, Pins, pin_beside
from holdfast.capture.progress import CopyCancelled, CopyProgress, GpuCopyStuck, ImageSeal
from holdfast.capture.replica_samples import ReplicaSample, ReplicaSampler, sum_of
from holdfast.capture.task import CaptureTask, RankIdentity
from holdfast.errors import CaptureOvertaken, SnapshotSkipped
from holdfast.events import ImageCaptured, ImagePassed, emit
from holdfast.format.image import Image, fill_in
from holdfast.format.manifest import AttemptId
from holdfast.geometry.layout import Layout, table_from_json
from holdfast.policy.arguments import bytes_per_second
from holdfast.protocol import messages as m
from holdfast.protocol.arena import (
    IMAGE_START,
    SlotFile,
    SlotRecord,
    boot_id,
    process_start,
    read_layout,
)
from holdfast.state.bindings import Bindings
from holdfast.state.describe import Description
from holdfast.storage.wrap import RateLimit

#: Bytes copied between two progress messages, each of which wakes the keeper: as many as it
#: writes at once, since it waits for whole chunks.
PROGRESS_BYTES = 8 << 20
#: Set where a device and the network share a link.
DEVICE_RATE = "HOLDFAST_DEVICE_BYTES_S"
#: Interval at which a copy that waits for ring space repeats its progress message.
_TELL_AGAIN_S = 0.25


def device_rate() -> int:
    """Return the most bytes a second that are copied from this process's devices; 0: no limit.

    UsageError where the setting is no number.
    """
    return bytes_per_second(DEVICE_RATE, os.environ.get(DEVICE_RATE, ""))


class Copier:
    """Executes captures one after the other on the worker thread."""

    def __init__(self) -> None:
        self.slots = SlotCache()
        rate = device_rate()
        self._rate = RateLimit(rate) if rate else None
        self.lost_a_copy = False
        """True after a GPU stopped answering during a copy: it may write into its slot at any later
        time.
        """
        self._turn = 0
        self._boot_id = boot_id()
        self._process_start = process_start(os.getpid())

    def copy(
        self,
        capture: CaptureTask,
        grant: m.Grant,
        place: RankIdentity,
        tell: Callable[[m.Message], None],
        room_s: float,
    ) -> tuple[ImageSeal, ReplicaSample]:
        """Fill the granted slot and seal it. Raises CopyCancelled if the capture is cancelled
        meanwhile.

        ``room_s``: how long a copy waits for ring space while storage writes nothing. The sample is
        taken at the same moment, and is empty where nothing is to be compared.
        """
        plan = self.slots.plan(capture.description, grant, place.rank)
        sample = (
            ReplicaSample() if grant.compare is None else self.slots.sampler.sample(*grant.compare)
        )
        if grant.ring_bytes:
            return self._pass_through(capture, grant, plan, sample, place, tell, room_s), sample
        slot, target = self.slots.target(grant.slot, plan, next(iter(capture.ready), None))
        values = capture.description.values
        image = fill_in(plan.image, metadata(place, grant), len(values))
        began_s = time.monotonic()
        self._turn += 1
        progress = _progress(capture, grant, tell, room_s, self._rate)
        with self._noting_losses():
            seal = copy_image(
                target,
                image,
                values,
                capture.overtaking,
                progress,
                self._turn,
                capture.ready,
                sample,
            )
        _require_constant(capture, grant, plan, target.memory, image)
        if not capture.known.copied:
            capture.is_copied([])
        capture.parameters = sum_of(target.memory, image, plan.spans(capture.trained.leaves))
        slot.write_record(self._sealed_record(place, grant, seal))
        _tell_of_copy(ImageCaptured, capture, place, began_s, seal, sample)
        return seal, sample

    @contextmanager
    def _noting_losses(self) -> Iterator[None]:
        """Copies without gradients, and notes if a GPU stops answering."""
        try:
            with torch.no_grad():
                yield
        except GpuCopyStuck:
            self.lost_a_copy = True
            raise

    def _pass_through(
        self,
        capture: CaptureTask,
        grant: m.Grant,
        plan: CopyPlan,
        sample: ReplicaSample,
        place: RankIdentity,
        tell: Callable[[m.Message], None],
        room_s: float,
    ) -> ImageSeal:
        """Copy like ``copy`` through a ring, without memory to keep the image: the slot is not
        sealed.
        """
        if plan.in_place and capture.description.frozen is not None:
            capture.description.frozen.forget_images()
            raise SnapshotSkipped(
                "there is no memory to keep it, and it is to be durable after all: what is frozen "
                "was not copied before save returned. The next save does"
            )
        target = self.slots.ring_target(
            grant.slot, grant.ring_bytes, plan, next(iter(capture.ready), None)
        )
        values = capture.description.values
        image: Image = fill_in(plan.image, metadata(place, grant), len(values))
        began_s = time.monotonic()
        progress = _progress(capture, grant, tell, room_s, self._rate)
        with self._noting_losses():
            seal = copy_through_ring(
                target, image, values, capture.overtaking, progress, capture.ready, sample
            )
        if not capture.known.copied:
            capture.is_copied([])
        kind = partial(ImagePassed, ring_bytes=grant.ring_bytes)
        _tell_of_copy(kind, capture, place, began_s, seal, sample)
        return seal

    def _sealed_record(self, place: RankIdentity, grant: m.Grant, seal: ImageSeal) -> SlotRecord:
        return SlotRecord(
            state="captured",
            boot_id=self._boot_id,
            run_id=place.run_id,
            incarnation=place.incarnation,
            nonce=place.nonce,
            step=grant.step,
            attempt=grant.attempt,
            rank=place.rank,
            world=place.world,
            layout=grant.layout,
            image_bytes=seal.image_bytes,
            header_xxh3=seal.header_xxh3,
            table_xxh3=seal.table_xxh3,
            writer_pid=os.getpid(),
            writer_start=self._process_start,
            hosts=grant.hosts,
            root_id=place.root_id,
        )


def _tell_of_copy(
    kind: Callable[..., ImageCaptured | ImagePassed],
    capture: CaptureTask,
    place: RankIdentity,
    began_s: float,
    seal: ImageSeal,
    sample: ReplicaSample,
) -> None:
    now_s = time.monotonic()
    emit(
        kind(
            incarnation=place.incarnation,
            step=capture.step,
            rank=place.rank,
            elapsed_s=now_s - capture.started_s,
            copy_s=now_s - began_s,
            size_bytes=seal.image_bytes,
            compared_bytes=sample.size_bytes,
            grant_s=capture.grant_s,
        )
    )


def metadata(place: RankIdentity, grant: m.Grant) -> dict[str, str]:
    """Return the metadata of the image's header."""
    id_ = AttemptId(place.incarnation, grant.step, grant.attempt, place.world, grant.layout)
    return id_.image_metadata(place.run_id, place.rank)


def _require_constant(
    capture: CaptureTask, grant: m.Grant, plan: CopyPlan, memory: memoryview, image: Image
) -> None:
    """Raise CaptureOvertaken if a leaf that counted as constant is not what it was, or
    SnapshotSkipped if nothing shows that it is.
    """
    frozen = capture.description.frozen
    if frozen is None:
        return
    parts = plan.watched(frozen.restless)
    refuted = frozen.take_image(
        parts.pieces,
        sum_of(memory, image, parts.spans),
        lambda leaf: sum_of(memory, image, parts.pieces[leaf].spans),
        plan.in_place,
    )
    if refuted is None:
        return
    leaf, has_changed = refuted
    if grant.durable:  # another rank asked for that: the next is not to fail for the same reason
        frozen.forget_images()
    if has_changed:
        raise CaptureOvertaken(
            f"{leaf}, which needs no gradient and is in no optimizer, is not what it was in the "
            "snapshots before, and no version told of it: it may have changed while it was copied. "
            "The next saves copy it before they return",
            leaf=leaf,
        )
    raise SnapshotSkipped(
        f"{leaf}, which is frozen, was divided among ranks otherwise in the snapshots before, so "
        "that they do not show that it is the same. The next saves copy it before they return"
    )


def _progress(
    capture: CaptureTask,
    grant: m.Grant,
    tell: Callable[[m.Message], None],
    room_s: float,
    rate: RateLimit | None,
) -> CopyProgress:
    so_far, reported = 0, -PROGRESS_BYTES

    def say() -> None:
        nonlocal reported
        reported = so_far
        if grant.durable:
            tell(m.Progress(attempt=grant.attempt, size_bytes=so_far))

    def copied(size_bytes: int) -> None:
        nonlocal so_far
        so_far = size_bytes
        if so_far >= reported + PROGRESS_BYTES:
            say()

    def wait_room(needed_bytes: int) -> None:
        began_s = time.monotonic()
        if so_far > reported and not capture.room.wait(needed_bytes, 0.0):
            say()  # the keeper frees no ring space it was not told about
        while not capture.room.wait(needed_bytes, _TELL_AGAIN_S):
            capture.check()
            if capture.room.closed_reason:
                raise CopyCancelled(capture.room.closed_reason)
            if time.monotonic() - max(began_s, capture.room.moved_at_s) > room_s:
                raise CopyCancelled(
                    f"storage took nothing for {room_s:g} s, and shared memory is too small to "
                    "keep this save until it does"
                )
            say()  # progress is optional, and is not sent to a keeper that is behind in reading

    def enqueued(events: list[torch.Event]) -> None:
        capture.is_copied(events)
        capture.release()

    return CopyProgress(
        check=capture.check,
        copied=copied,
        enqueued=enqueued,
        shared=capture.share,
        pace=None if rate is None else lambda size_bytes: rate.wait(size_bytes, capture.check),
        has_room=lambda needed_bytes: capture.room.wait(needed_bytes, 0.0),
        wait_room=wait_room,
    )


# Caches the mapped slots of this rank, and the copies planned for them.


class _Planned(NamedTuple):
    """The copies of one form of a state's bindings."""

    key: tuple[str, str]
    """Table and layout."""
    bindings: Bindings
    plan: CopyPlan
    sampler: ReplicaSampler

    def is_beside(self, other: Bindings) -> bool:
        """True if ``other`` is another form of the same bindings."""
        return self.bindings.origin is other or other.origin is self.bindings


class SlotCache:
    """Mapped slots by path, each with its memory as the copy plan uses it."""

    def __init__(self) -> None:
        self.files: dict[str, SlotFile] = {}
        self._pins: dict[str, Pins] = {}
        self._one_at_a_time = threading.Lock()
        self._targets: dict[tuple[str, int], SlotTarget | RingTarget] = {}
        """By path and plan."""
        self._plans: dict[bool, _Planned] = {}
        """That of a durable save, and that of a snapshot where leaves count as constant (True)."""
        self._layout: tuple[str, Layout] | None = None
        self._sampler: ReplicaSampler | None = None

    def plan(self, description: Description, grant: m.Grant, rank: int) -> CopyPlan:
        """Return the copies of this description under the granted layout, planned anew if either
        changed.

        Raises ArenaError if the layout is not in the arena, StateMismatch if it is not that of
        these leaves: then a coordinator took it for another state's.
        """
        key = (description.table_hash, grant.layout)
        bindings = description.bindings
        is_other = bindings.origin is not None
        known = self._plans.get(is_other)
        if known is not None and known.key == key and known.bindings is bindings:
            self._sampler = known.sampler
            return known.plan
        if self._layout is None or self._layout[0] != grant.layout:
            data = read_layout(Path(grant.slot).parent, grant.layout)
            self._layout = grant.layout, Layout.from_json(data)
        layout = self._layout[1]
        layout.require_declared(rank, table_from_json(description.table))
        beside = self._plans.get(not is_other)
        stays = beside is not None and beside.key == key and beside.is_beside(bindings)
        self._plans = {not is_other: beside} if beside is not None and stays else {}
        left = {id(each.plan) for each in self._plans.values()}
        self._release([key for key in self._targets if key[1] not in left])
        self._sampler = ReplicaSampler(layout, rank, bindings)
        made = _Planned(key, bindings, plan_copies(layout, rank, bindings), self._sampler)
        self._plans[is_other] = made
        return made.plan

    def _release(self, keys: Iterable[tuple[str, int]]) -> None:
        for key in keys:
            target = self._targets.pop(key, None)
            if target is not None:
                target.release_views()

    @property
    def sampler(self) -> ReplicaSampler:
        """Return the sampler for the leaves of the last plan."""
        assert self._sampler is not None
        return self._sampler

    def target(
        self, path: str, plan: CopyPlan, device: torch.device | None
    ) -> tuple[SlotFile, SlotTarget]:
        """Return the slot at ``path``, mapped once, and its memory as used by ``plan``."""
        slot = self._map(path, device, first_bytes=IMAGE_START + plan.image.data_start)
        target = self._targets.get((path, id(plan)))
        if not isinstance(target, SlotTarget):
            target = self._targets[path, id(plan)] = SlotTarget(slot.image, plan)
        target.pins = self._pins.get(path)
        return slot, target

    def ring_target(
        self, path: str, ring_bytes: int, plan: CopyPlan, device: torch.device | None
    ) -> RingTarget:
        """Return the ring target of a slot whose last ``ring_bytes`` are a ring."""
        slot = self._map(path, device, sys.maxsize)  # at once: its copies know no borders
        target = self._targets.get((path, id(plan)))
        if not isinstance(target, RingTarget):
            target = self._targets[path, id(plan)] = RingTarget(slot.image, ring_bytes, plan)
        return target

    def drop_removed(self) -> None:
        """Unmap the slots that the keeper removed: their memory is freed only then."""
        for gone in [path for path in self.files if not Path(path).exists()]:
            self._close(gone)

    def _map(
        self, path: str, device: torch.device | None, piece_bytes: int = 0, first_bytes: int = 0
    ) -> SlotFile:
        slot = self.files.get(path)
        if slot is None or slot.inode != Path(path).stat().st_ino:
            # Mapped memory is not returned to the system, although the keeper removed the file.
            for gone in [p for p in self.files if p == path or not Path(p).exists()]:
                self._close(gone)
            slot = self.files[path] = SlotFile.open(Path(path), writable=True)
            if device is None:
                slot.populate()
        if device is not None and path not in self._pins:
            self._pins[path] = Pins(slot, device, piece_bytes or PIECE_BYTES, first_bytes)
            pin_beside([self._pins[path]], self._one_at_a_time)
        return slot

    def close(self) -> None:
        """Unmap all slots."""
        for path in list(self.files):
            self._close(path)

    def _close(self, path: str) -> None:
        self._release([key for key in self._targets if key[0] == path])
        self._pins.pop(path, None)
        self.files.pop(path).close()
