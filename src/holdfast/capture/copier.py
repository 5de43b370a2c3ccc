"""From a grant to a sealed image: this rank's part of a generation, copied into its slot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from holdfast.events import ImageCaptured, ImagePassed, emit
from holdfast.format.image import Image, fill_in
from holdfast.geometry.layout import Layout
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import SlotRecord, boot_id, process_start
from holdfast.snapshot.capture import Progress, Seal, StillCopying, Stopped, copy_image
from holdfast.snapshot.copies import CopyPlan
from holdfast.snapshot.mapped import MappedSlots
from holdfast.snapshot.sampling import Sample
from holdfast.snapshot.stillness import sum_of
from holdfast.snapshot.through_ring import copy_through_ring
from holdfast.snapshot.underway import Capture, Place

#: How much is copied between two messages to the keeper, each of which wakes it: as much as it
#: writes at once, for it waits for whole chunks.
PROGRESS_BYTES = 8 << 20
#: How often a copy that waits for room says again how far it is.
_TELL_AGAIN_S = 0.25


class Copier:
    """Copies one capture after the other; on the worker."""

    def __init__(self) -> None:
        self.slots = MappedSlots()
        self.lost_a_copy = False
        """Whether a GPU stopped answering in a copy: it may write into its slot for good."""
        self._turn = 0
        self._boot_id = boot_id()
        self._process_start = process_start(os.getpid())

    def copy(
        self, capture: Capture, grant: m.Grant, layout: Layout, place: Place,
        tell: Callable[[m.Message], None], room_s: float,
    ) -> tuple[Seal, Sample]:  # fmt: skip
        """Fill the granted slot and seal it. Stopped when the capture is given up meanwhile.

        ``room_s``: how long a copy waits for room in a ring while storage takes nothing.
        The sample is of the same moment, and empty where nothing is to be compared.
        """
        plan = self.slots.plan(capture.description, layout, place.rank)
        sample = Sample() if grant.compare is None else self.slots.sampler.sample(*grant.compare)
        if grant.ring_bytes:
            return self._pass_through(capture, grant, plan, sample, place, tell, room_s), sample
        slot, target = self.slots.target(grant.slot, plan, pinned=bool(capture.ready))
        values = capture.description.values
        image = fill_in(plan.image, metadata(place, grant), len(values))
        began_s = time.monotonic()
        self._turn += 1
        progress = _progress(capture, grant, tell, room_s)
        with torch.no_grad():
            try:
                seal = copy_image(
                    target, image, values, capture.overtaking, progress, self._turn, capture.ready,
                    sample,
                )  # fmt: skip
            except StillCopying:
                self.lost_a_copy = True
                raise
        if not capture.copied:
            capture.is_copied([])
        capture.parameters = sum_of(target.memory, image, plan.copies, capture.trained)
        slot.write_record(self._sealed_record(place, grant, seal))
        now_s = time.monotonic()
        emit(ImageCaptured(
            incarnation=place.incarnation, step=capture.step, rank=place.rank,
            elapsed_s=now_s - capture.started_s, copy_s=now_s - began_s,
            size_bytes=seal.image_bytes, compared_bytes=sample.size_bytes,
        ))  # fmt: skip
        return seal, sample

    def _pass_through(
        self, capture: Capture, grant: m.Grant, plan: CopyPlan, sample: Sample, place: Place,
        tell: Callable[[m.Message], None], room_s: float,
    ) -> Seal:  # fmt: skip
        """As ``copy`` where there is no memory to keep the image: nothing is sealed in the slot."""
        target = self.slots.ring_target(
            grant.slot, grant.ring_bytes, plan, pinned=bool(capture.ready)
        )
        values = capture.description.values
        image: Image = fill_in(plan.image, metadata(place, grant), len(values))
        began_s = time.monotonic()
        progress = _progress(capture, grant, tell, room_s)
        with torch.no_grad():
            try:
                seal = copy_through_ring(
                    target, image, values, capture.overtaking, progress, capture.ready, sample
                )
            except StillCopying:
                self.lost_a_copy = True
                raise
        if not capture.copied:
            capture.is_copied([])
        now_s = time.monotonic()
        emit(ImagePassed(
            incarnation=place.incarnation, step=capture.step, rank=place.rank,
            elapsed_s=now_s - capture.started_s, copy_s=now_s - began_s,
            size_bytes=seal.image_bytes, ring_bytes=grant.ring_bytes,
            compared_bytes=sample.size_bytes,
        ))  # fmt: skip
        return seal

    def _sealed_record(self, place: Place, grant: m.Grant, seal: Seal) -> SlotRecord:
        return SlotRecord(
            state="captured", boot_id=self._boot_id, run_id=place.run_id,
            incarnation=place.incarnation, nonce=place.nonce, step=grant.step,
            attempt=grant.attempt, rank=place.rank, world=place.world, layout=grant.layout,
            image_bytes=seal.image_bytes, header_xxh3=seal.header_xxh3,
            table_xxh3=seal.table_xxh3, writer_pid=os.getpid(), writer_start=self._process_start,
            hosts=grant.hosts,
        )  # fmt: skip


def metadata(place: Place, grant: m.Grant) -> dict[str, str]:
    """What an image says of itself."""
    return {
        "run": place.run_id, "incarnation": str(place.incarnation), "step": str(grant.step),
        "attempt": grant.attempt, "rank": str(place.rank), "world": str(place.world),
        "layout": grant.layout,
    }  # fmt: skip


def _progress(
    capture: Capture, grant: m.Grant, tell: Callable[[m.Message], None], room_s: float
) -> Progress:
    so_far, told = 0, -PROGRESS_BYTES

    def say() -> None:
        nonlocal told
        told = so_far
        if grant.durable:
            tell(m.Progress(attempt=grant.attempt, size_bytes=so_far))

    def copied(size_bytes: int) -> None:
        nonlocal so_far
        so_far = size_bytes
        if so_far >= told + PROGRESS_BYTES:
            say()

    def wait_room(needed_bytes: int) -> None:
        began_s = time.monotonic()
        if so_far > told and not capture.room.wait(needed_bytes, 0.0):
            say()  # nothing is freed of what the keeper does not know of
        while not capture.room.wait(needed_bytes, _TELL_AGAIN_S):
            capture.check()
            if capture.room.over:
                raise Stopped(capture.room.over)
            if time.monotonic() - max(began_s, capture.room.moved_at_s) > room_s:
                raise Stopped(
                    f"storage took nothing for {room_s:g} s, and shared memory is too small to "
                    "keep this save until it does"
                )
            say()  # it is a hint, which is not said to a keeper that is behind

    def enqueued(events: list[torch.cuda.Event]) -> None:
        capture.is_copied(events)
        capture.release()

    return Progress(
        check=capture.check, copied=copied, enqueued=enqueued, shared=capture.share,
        has_room=lambda needed_bytes: capture.room.wait(needed_bytes, 0.0), wait_room=wait_room,
    )  # fmt: skip
