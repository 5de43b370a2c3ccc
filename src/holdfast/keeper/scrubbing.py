"""What lies sealed in memory is read again and again, slowly, and what changed by itself is found.

Blocks of images and rows of parity are compared with their checksums at a rate that is bounded
whatever there is, and not at all while something is captured, coded or written. A slot that is
given away meanwhile is no damage: its record says so before anybody writes to it, and is looked
at after each block that is wrong.
"""

from __future__ import annotations

import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.errors import ArenaError, FormatError
from holdfast.format.checksum import BLOCK_BYTES, block_count, blocks, checksum, text
from holdfast.format.image import header_size
from holdfast.format.tables import BlockTable, table_offset
from holdfast.keeper.memory import Memory
from holdfast.snapshot.arena import SlotFile, SlotRecord

if TYPE_CHECKING:  # a run on one host has none
    from holdfast.keeper.rows import KeptRow

SCRUB_BYTES_S = 64 << 20
"""How much is read in a second: 1 % of a core (measured, busy), and 100 GB in 27 minutes."""
PAUSE_S = 60.0
"""Between two passes over all there is."""
_PORTION_BYTES = 4 << 20
_LOOK_S = 0.05
_LONGEST_YIELD_S = 60.0
"""Something that hangs, or goes on for ever, is not waited for at every portion."""
#: (start, stop) in an image or a row. A header whose length may be wrong is the bytes 0 to 0.
Span = tuple[int, int]
HEADER: Span = (0, 0)


@dataclass(frozen=True, slots=True)
class DamagedImage:
    """Bytes of a sealed image that are not those that were captured."""

    slot: int
    record: SlotRecord
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """Blocks of a row of parity that are not those that were made."""

    row: KeptRow
    numbers: tuple[int, ...]


Found = Callable[[DamagedImage | DamagedRow], None]


class _Over(Exception):
    """The keeper ends."""


class Scrubbing:
    """A thread of its own. ``rows`` gives the rows kept now, ``found`` hears of damage, on it."""

    def __init__(
        self, memory: Memory, rows: Callable[[], Sequence[KeptRow]], found: Found, *,
        rate_bytes_s: int = SCRUB_BYTES_S, pause_s: float = PAUSE_S,
    ) -> None:  # fmt: skip
        self._memory, self._rows, self._found = memory, rows, found
        self._rate_bytes_s, self._pause_s = rate_bytes_s, pause_s
        self.is_busy = False
        """Whether the keeper has something better to do; said by its loop."""
        self.passes = self.checked_bytes = 0
        self._unpaid_bytes = 0
        self._over = threading.Event()

    def begin(self) -> None:
        """Read until ``end``."""
        threading.Thread(target=self._work, name="holdfast-scrub", daemon=True).start()

    def end(self) -> None:
        """Read no more; it is not waited for."""
        self._over.set()

    def _work(self) -> None:
        while not self._over.wait(self._pause_s):
            try:
                self.look_through()
            except _Over:
                return
            except Exception:  # whatever it met, it is there to be looked at in the log
                traceback.print_exc(file=sys.stderr)

    def look_through(self) -> None:
        """One pass over all that is sealed now."""
        for number, file in [*self._memory.files.items()]:
            try:
                self._look_at_image(number, file)
            except ValueError:  # its memory was given back meanwhile
                continue
        for row in list(self._rows()):
            try:
                self._look_at_row(row)
            except ArenaError:  # it has no memory any more
                continue
        self.passes += 1

    def _rest(self, size_bytes: int) -> None:
        """So much was read: keep to the rate, and out of the way."""
        self.checked_bytes += size_bytes
        self._unpaid_bytes += size_bytes
        if self._unpaid_bytes < _PORTION_BYTES:
            return
        wait_s, self._unpaid_bytes = self._unpaid_bytes / self._rate_bytes_s, 0
        if self._over.wait(wait_s):
            raise _Over
        patience = int(_LONGEST_YIELD_S / _LOOK_S)
        while self.is_busy and (patience := patience - 1):
            if self._over.wait(_LOOK_S):
                raise _Over

    # ── images ───────────────────────────────────────────────────────────────────────────

    def _look_at_image(self, number: int, file: SlotFile) -> None:
        record = file.read_record()
        if record is None or not self._is_sealed(file, record):
            return
        wrong: list[Span] = []
        for span, is_right in _pieces(file.image, record):
            if not is_right:
                if file.read_record() != record:
                    return  # it was given to somebody else while it was read
                wrong.append(span)
            if not wrong:  # what is damaged is read to its end at once
                self._rest(span[1] - span[0])
        if wrong:
            self._found(DamagedImage(number, record, tuple(wrong)))

    def _is_sealed(self, file: SlotFile, record: SlotRecord) -> bool:
        ours = (self._memory.boot_id, self._memory.run_id)
        is_image = record.state == "captured" and not record.ring_bytes
        fits = 0 < record.image_bytes <= file.capacity_bytes
        return is_image and fits and (record.boot_id, record.run_id) == ours

    # ── rows ─────────────────────────────────────────────────────────────────────────────

    def _look_at_row(self, row: KeptRow) -> None:
        from holdfast.keeper.rows import row_path

        size = row.record.size_bytes
        count = block_count(size)
        if not size:
            return
        file = SlotFile.open(row_path(self._memory.directory, str(row.half)), writable=False)
        sums, wrong = struct.unpack(f"<{count}Q", row.record.sums), []
        for number, start, stop in blocks(0, count, size):
            at = row.offset_bytes
            if checksum(file.image[at + start : at + stop]) != sums[number]:
                if all(one is not row for one in self._rows()):
                    break  # its half is being written anew
                wrong.append(number)
            if not wrong:
                self._rest(stop - start)
        else:
            if wrong:
                self._found(DamagedRow(row, tuple(wrong)))
        file.close()


def _pieces(image: memoryview, record: SlotRecord) -> Iterator[tuple[Span, bool]]:
    """Header, table and blocks of an image, and whether each is what was captured.

    Where the header is wrong nothing else can be told, nor where the table is.
    """
    try:
        start = header_size(bytes(image[:8]), "a slot", record.image_bytes)
        is_right = text(checksum(image[:start])) == record.header_xxh3
    except FormatError:
        start, is_right = 0, False
    yield (0, start) if is_right else HEADER, is_right
    if not is_right:
        return
    data_bytes = record.image_bytes - start
    try:
        end = start + table_offset(data_bytes)
        table = BlockTable(
            image[end : record.image_bytes], data_bytes=data_bytes,
            table_xxh3=record.table_xxh3, where="a slot",
        )  # fmt: skip
    except FormatError:
        yield (start + table_offset(data_bytes), record.image_bytes), False
        return
    yield (end, record.image_bytes), True
    for first in range(start, end, BLOCK_BYTES):
        last = min(first + BLOCK_BYTES, end)
        try:
            table.check(first - start, image[first:last])
        except FormatError:
            yield (first, last), False
        else:
            yield (first, last), True
