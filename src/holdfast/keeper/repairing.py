"""What was found damaged in memory is believed no more, and made anew out of what peers have.

The slot itself says that it is damaged, and a row loses its record, before anything else: neither
is offered, restored from or coded then, also by a keeper that comes later. What is decoded and
checked is written on the keeper's loop, and only if slot or row are still what they were. Where
the parity does not suffice, image or row are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from holdfast.errors import HoldfastError, NotFound
from holdfast.events import DamageFound, emit
from holdfast.keeper.background import Background
from holdfast.keeper.memory import Memory
from holdfast.keeper.offering import Offering
from holdfast.keeper.part import Part
from holdfast.keeper.scrubbing import HEADER, DamagedImage, DamagedRow
from holdfast.snapshot.arena import SlotRecord

if TYPE_CHECKING:  # only where something is damaged
    from holdfast.keeper.mending import Reached
    from holdfast.redundancy.records import ParityRecord

T = TypeVar("T")
DAMAGED = "damaged"
"""What a slot says of itself: whoever finds it takes it for free."""


class Repairing:
    """On the keeper's loop, but for the threads that decode."""

    def __init__(
        self, host: str, memory: Memory, background: Background, offering: Offering, part: Part
    ) -> None:
        self._host, self._memory, self._background = host, memory, background
        self._offering, self._part = offering, part
        self.repaired = self.dropped = 0

    def found(self, damage: DamagedImage | DamagedRow) -> None:
        """From the thread that found it."""
        if isinstance(damage, DamagedImage):
            self._background.from_thread(lambda: self._image_found(damage))
        else:
            self._background.from_thread(lambda: self._row_found(damage))

    # ── images ───────────────────────────────────────────────────────────────────────────

    def _image_found(self, damage: DamagedImage) -> None:
        record, file = damage.record, self._memory.files.get(damage.slot)
        if file is None or file.read_record() != record:
            return  # it is not needed any more
        self._offering.withdraw(damage.slot)
        file.write_record(replace(record, state=DAMAGED))
        self._offering.holdings_changed()
        way = self._part.way_to(record.attempt, record.rank)
        if way is None:
            self._image_settled(damage, {}, "no parity of it is kept here")
            return
        self._in_thread(
            lambda: _decode_image(damage, *way),
            lambda data, why: self._image_settled(damage, data or {}, why),
        )

    def _image_settled(self, damage: DamagedImage, data: dict[int, bytes], why: str) -> None:
        """Write what was decoded, if nobody else was given the slot."""
        record, file = damage.record, self._memory.files.get(damage.slot)
        if file is None or file.read_record() != replace(record, state=DAMAGED):
            return
        if data:
            for start, piece in data.items():
                file.image[start : start + len(piece)] = piece
            file.write_record(record)
            self._offer(damage.slot, record)
        else:
            self._part.image_lost(damage.slot, record.attempt)
        size = sum(stop - start for start, stop in damage.spans)
        self._report("image", record, f"rank {record.rank}", size, why)

    def _offer(self, slot: int, record: SlotRecord) -> None:
        self._offering.offer(
            slot, record.attempt, record.rank, record.incarnation, record.step,
            record.image_bytes, record.layout,
        )  # fmt: skip
        self._offering.refresh()

    # ── rows ─────────────────────────────────────────────────────────────────────────────

    def _row_found(self, damage: DamagedRow) -> None:
        parity, record = self._part.parity, damage.row.record
        if parity is None or not parity.kept.doubt(damage.row):
            return
        reach = self._part.reach(record.attempt)
        if reach is None:
            self._row_settled(damage, {}, "no other host is in reach")
            return
        self._in_thread(
            lambda: _encode_row(damage, self._host, reach),
            lambda data, why: self._row_settled(damage, data or {}, why),
        )

    def _row_settled(self, damage: DamagedRow, data: dict[int, bytes], why: str) -> None:
        parity, record = self._part.parity, damage.row.record
        if parity is None or not parity.kept.is_doubted(damage.row):
            return  # something newer is written there
        if not data or not parity.kept.mend(damage.row, data):
            why = why or "its record could not be written"
            self._part.row_lost(record.attempt)
        name = f"row {record.row} of stripe {record.stripe}"
        self._report("parity", record, name, len(damage.numbers) << 20, why)

    # ── both ─────────────────────────────────────────────────────────────────────────────

    def _in_thread(self, work: Callable[[], T], done: Callable[[T | None, str], None]) -> None:
        """``done`` is called on the loop, with the result or why there is none."""

        def run() -> None:
            result, why = None, ""
            try:
                result = work()
            except (HoldfastError, OSError) as error:
                why = str(error)
            except Exception as error:  # whatever it is, what is damaged is not believed
                why = f"{type(error).__name__}: {error}"
            self._background.from_thread(lambda: done(result, why))

        threading.Thread(target=run, name="holdfast-repair", daemon=True).start()

    def _report(
        self, what: str, of: SlotRecord | ParityRecord, name: str, size_bytes: int, why: str
    ) -> None:
        self.repaired += not why
        self.dropped += bool(why)
        emit(DamageFound(
            incarnation=of.incarnation, step=of.step, host=self._host, what=what, name=name,
            size_bytes=size_bytes, outcome="dropped" if why else "repaired", reason=why,
        ))  # fmt: skip


def _decode_image(
    damage: DamagedImage, record: ParityRecord, reach: Callable[[], Reached]
) -> dict[int, bytes]:
    """What belongs into the damaged bytes; this host's own image counts as lost for it."""
    from holdfast.keeper.mending import decode_image, group_left, place_of

    rank, said = damage.record.rank, damage.record
    place = place_of(record, rank)
    fact = None if place is None else record.members[place[0]].images[place[1]]
    if fact is None or (fact.header_xxh3, fact.table_xxh3) != (said.header_xxh3, said.table_xxh3):
        raise NotFound(f"the parity kept here is not of this image of rank {rank}")
    image = decode_image(group_left(record, reach()), record, rank)
    spans = ((0, fact.data_start) if span == HEADER else span for span in damage.spans)
    return {start: bytes(image.view(start, stop, bytearray())) for start, stop in spans}


def _encode_row(damage: DamagedRow, own: str, reach: Callable[[], Reached]) -> dict[int, bytes]:
    """The blocks of a row, encoded again."""
    from holdfast.keeper.mending import decode_row, group_left

    record = damage.row.record
    group, found = group_left(record, reach()), {}
    for number in damage.numbers:
        block = decode_row(group, record, own, number)
        if block is None:
            raise NotFound(f"block {number} comes out otherwise: the images are not those it is of")
        found[number << 20] = bytes(block)
    return found
