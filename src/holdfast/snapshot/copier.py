"""From a grant to a sealed image: this rank's part of a generation, copied into its slot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from holdfast.events import ImageCaptured, emit
from holdfast.format.image import fill_in
from holdfast.geometry.layout import Layout
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import SlotRecord, boot_id, process_start
from holdfast.snapshot.capture import Progress, Seal, StillCopying, copy_image
from holdfast.snapshot.mapped import MappedSlots
from holdfast.snapshot.underway import Capture, Place

#: How much is copied between two messages to the keeper, each of which wakes it: as much as it
#: writes at once, for it waits for whole chunks.
PROGRESS_BYTES = 8 << 20


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
        tell: Callable[[m.Message], None],
    ) -> Seal:  # fmt: skip
        """Fill the granted slot and seal it. Stopped when the capture is given up meanwhile."""
        plan = self.slots.plan(capture.description, layout, place.rank)
        slot, target = self.slots.target(grant.slot, plan, pinned=bool(capture.ready))
        values = capture.description.values
        image = fill_in(plan.image, metadata(place, grant), len(values))
        began_s = time.monotonic()
        self._turn += 1
        progress = _progress(capture, grant, tell)
        with torch.no_grad():
            try:
                seal = copy_image(
                    target, image, values, capture.overtaking, progress, self._turn, capture.ready
                )
            except StillCopying:
                self.lost_a_copy = True
                raise
        if not capture.copied:
            capture.is_copied([])
        slot.write_record(self._sealed_record(place, grant, seal))
        now_s = time.monotonic()
        emit(ImageCaptured(
            incarnation=place.incarnation, step=capture.step, rank=place.rank,
            elapsed_s=now_s - capture.started_s, copy_s=now_s - began_s,
            size_bytes=seal.image_bytes,
        ))  # fmt: skip
        return seal

    def _sealed_record(self, place: Place, grant: m.Grant, seal: Seal) -> SlotRecord:
        return SlotRecord(
            state="captured", boot_id=self._boot_id, run_id=place.run_id,
            incarnation=place.incarnation, nonce=place.nonce, step=grant.step,
            attempt=grant.attempt, rank=place.rank, world=place.world, layout=grant.layout,
            image_bytes=seal.image_bytes, header_xxh3=seal.header_xxh3,
            table_xxh3=seal.table_xxh3, writer_pid=os.getpid(), writer_start=self._process_start,
        )  # fmt: skip


def metadata(place: Place, grant: m.Grant) -> dict[str, str]:
    """What an image says of itself."""
    return {
        "run": place.run_id, "incarnation": str(place.incarnation), "step": str(grant.step),
        "attempt": grant.attempt, "rank": str(place.rank), "world": str(place.world),
        "layout": grant.layout,
    }  # fmt: skip


def _progress(capture: Capture, grant: m.Grant, tell: Callable[[m.Message], None]) -> Progress:
    told_bytes = -PROGRESS_BYTES

    def copied(size_bytes: int) -> None:
        nonlocal told_bytes
        if grant.durable and size_bytes >= told_bytes + PROGRESS_BYTES:
            told_bytes = size_bytes
            tell(m.Progress(attempt=grant.attempt, size_bytes=size_bytes))

    def enqueued(events: list[torch.cuda.Event]) -> None:
        capture.is_copied(events)
        capture.release()

    return Progress(check=capture.check, copied=copied, enqueued=enqueued, shared=capture.share)
