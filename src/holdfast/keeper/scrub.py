"""Scrubs memory: rereads sealed images and parity shards slowly, and detects changed bytes.

Blocks are compared with their checksums at a bounded rate, and not at all while something is
captured, encoded or written. A slot that is reused meanwhile is not damaged: its record is written
before anybody writes to it, and is checked after each wrong block.
"""

from __future__ import annotations

import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from holdfast.errors import ArenaError, FormatError, NotFound
from holdfast.events import DamageFound, emit
from holdfast.format.checksum import BLOCK_BYTES, block_count, blocks, checksum, text
from holdfast.format.image import BlockTable, header_size, table_offset
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.role import HostRole
from holdfast.keeper.jobs import Background
from holdfast.keeper.published_images import PublishedImages
from holdfast.protocol.arena import SlotFile, SlotRecord

if TYPE_CHECKING:
    from holdfast.keeper.parity.group_access import KeeperReach
    from holdfast.keeper.parity.store import StoredParity
    from holdfast.parity.planning.record import ParityRecord

SCRUB_BYTES_S = 64 << 20
"""Read rate in bytes per second: 1 % of a core (measured, busy), and 100 GB in 27 minutes."""
PAUSE_S = 60.0
"""Pause between two passes over all data."""
_PORTION_BYTES = 4 << 20
_LOOK_S = 0.05
_LONGEST_YIELD_S = 60.0
"""Limit of one wait for other work: work that hangs, or never ends, does not stop scrubbing."""
#: (start, stop) in an image or a shard. A header whose length may be wrong is the bytes 0 to 0.
Span = tuple[int, int]
HEADER: Span = (0, 0)


class DamagedImage(msgspec.Struct, frozen=True):
    """Bytes of a sealed image that differ from the captured ones."""

    slot: int
    record: SlotRecord
    spans: tuple[Span, ...]


class DamagedShard(msgspec.Struct, frozen=True):
    """Blocks of a parity shard that differ from the encoded ones."""

    row: StoredParity
    numbers: tuple[int, ...]


Found = Callable[[DamagedImage | DamagedShard], None]


class _Over(Exception):
    """Raised on the thread when the keeper ends."""


class Scrubber:
    """The scrubbing thread. ``rows`` returns the current shards, ``found`` is called on damage, on
    the thread.
    """

    def __init__(
        self,
        memory: ArenaFiles,
        rows: Callable[[], Sequence[StoredParity]],
        found: Found,
        *,
        rate_bytes_s: int = SCRUB_BYTES_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._memory, self._rows, self._found = memory, rows, found
        self._rate_bytes_s, self._pause_s = rate_bytes_s, pause_s
        self.is_busy = False
        """True while the keeper has more important work; set by its loop."""
        self.passes = self.checked_bytes = 0
        self._excess_bytes = 0
        self._over = threading.Event()

    def begin(self) -> None:
        """Read until ``end``."""
        threading.Thread(target=self._work, name="holdfast-scrub", daemon=True).start()

    def end(self) -> None:
        """Stop reading; does not wait."""
        self._over.set()

    def _work(self) -> None:
        while not self._over.wait(self._pause_s):
            try:
                self.run_pass()
            except _Over:
                return
            except Exception:  # the error is in the log, to be examined there
                traceback.print_exc(file=sys.stderr)

    def run_pass(self) -> None:
        """Make one pass over everything that is sealed now."""
        for number, file in [*self._memory.files.items()]:
            try:
                self._check_image(number, file)
            except ValueError:  # its memory was freed meanwhile
                continue
        for row in list(self._rows()):
            try:
                self._check_shard(row)
            except ArenaError:  # it has no memory any more
                continue
        self.passes += 1

    def _throttle(self, size_bytes: int) -> None:
        """Pause after reading ``size_bytes``: keep the rate, and yield to other work."""
        self.checked_bytes += size_bytes
        self._excess_bytes += size_bytes
        if self._excess_bytes < _PORTION_BYTES:
            return
        wait_s, self._excess_bytes = self._excess_bytes / self._rate_bytes_s, 0
        if self._over.wait(wait_s):
            raise _Over
        patience = int(_LONGEST_YIELD_S / _LOOK_S)
        while self.is_busy and (patience := patience - 1):
            if self._over.wait(_LOOK_S):
                raise _Over

    # ── images ───────────────────────────────────────────────────────────────────────────────────

    def _check_image(self, number: int, file: SlotFile) -> None:
        record = file.read_record()
        if record is None or not self._is_sealed(file, record):
            return
        wrong: list[Span] = []
        for span, is_right in _pieces(file.image, record):
            if not is_right:
                if file.read_record() != record:
                    return  # the slot was reused during the read
                wrong.append(span)
            if not wrong:  # a damaged image is read to its end at once
                self._throttle(span[1] - span[0])
        if wrong:
            self._found(DamagedImage(number, record, tuple(wrong)))

    def _is_sealed(self, file: SlotFile, record: SlotRecord) -> bool:
        is_image = record.state == "captured" and not record.ring_bytes
        fits = 0 < record.image_bytes <= file.capacity_bytes
        return is_image and fits and self._memory.is_ours(record)

    # ── parity shards ────────────────────────────────────────────────────────────────────────────

    def _check_shard(self, row: StoredParity) -> None:
        from holdfast.restore.cluster.arena_shards import shard_path

        size = row.record.size_bytes
        count = block_count(size)
        if not size:
            return
        file = SlotFile.open(shard_path(self._memory.directory, str(row.half)), writable=False)
        sums, wrong = struct.unpack(f"<{count}Q", row.record.sums), []
        for number, start, stop in blocks(0, count, size):
            at = row.offset_bytes
            if checksum(file.image[at + start : at + stop]) != sums[number]:
                if all(one is not row for one in self._rows()):
                    break  # its buffer is being rewritten
                wrong.append(number)
            if not wrong:
                self._throttle(stop - start)
        else:
            if wrong:
                self._found(DamagedShard(row, tuple(wrong)))
        file.close()


def _pieces(image: memoryview, record: SlotRecord) -> Iterator[tuple[Span, bool]]:
    """Yield header, table and blocks of an image, each with True if it is as captured.

    After a wrong header nothing else can be checked, nor after a wrong table.
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
            image[end : record.image_bytes],
            data_bytes=data_bytes,
            table_xxh3=record.table_xxh3,
            where="a slot",
        )
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


# Repairs damaged images and parity shards from the data of peers.
#
# Before anything else, the slot's record is marked as damaged, and a shard loses its record:
# neither is served, restored from or encoded then, also by a later keeper. Decoded and verified
# data is written on the keeper's loop, and only if slot or shard are still the same. If the parity
# does not suffice, the image or shard is dropped.


DAMAGED = "damaged"
"""State of a damaged slot: a later keeper treats the slot as free."""


class Repairer:
    """Repairs on the keeper's loop, except the threads that decode."""

    def __init__(
        self,
        host: str,
        memory: ArenaFiles,
        background: Background,
        offering: PublishedImages,
        part: HostRole,
    ) -> None:
        self._host, self._memory, self._background = host, memory, background
        self._offering, self._role = offering, part
        self.repaired = self.dropped = 0

    def on_damage(self, damage: DamagedImage | DamagedShard) -> None:
        """Receive damage from the thread that detected it."""
        if isinstance(damage, DamagedImage):
            self._background.from_thread(lambda: self._image_damaged(damage))
        else:
            self._background.from_thread(lambda: self._shard_damaged(damage))

    # ── images ───────────────────────────────────────────────────────────────────────────────────

    def _image_damaged(self, damage: DamagedImage) -> None:
        record, file = damage.record, self._memory.files.get(damage.slot)
        if file is None or file.read_record() != record:
            return  # it is not needed any more
        self._offering.withdraw(damage.slot)
        file.write_record(replace(record, state=DAMAGED))
        self._offering.holdings_changed()
        way = self._role.decode_access(record.attempt, record.rank)
        if way is None:
            self._image_settled(damage, {}, "no parity of it is kept here")
            return
        self._background.run_beside(
            "holdfast-repair",
            lambda: _decode_image(damage, *way),
            lambda data, why: self._image_settled(damage, data or {}, why),
        )

    def _image_settled(self, damage: DamagedImage, data: dict[int, bytes], why: str) -> None:
        """Write what was decoded, if the slot was not reused."""
        record, file = damage.record, self._memory.files.get(damage.slot)
        if file is None or file.read_record() != replace(record, state=DAMAGED):
            return
        if data:
            for start, piece in data.items():
                file.image[start : start + len(piece)] = piece
            file.write_record(record)
            self._offering.publish(damage.slot, record.attempt_id, record.image)
            self._offering.refresh()
        else:
            self._role.report(host_messages.ImageLost(slot=damage.slot, attempt=record.attempt))
        size = sum(stop - start for start, stop in damage.spans)
        self._report("image", record, f"rank {record.rank}", size, why)

    # ── parity shards ────────────────────────────────────────────────────────────────────────────

    def _shard_damaged(self, damage: DamagedShard) -> None:
        parity, record = self._role.parity, damage.row.record
        if parity is None or not parity.store.quarantine(damage.row):
            return
        reach = self._role.group_access(record.attempt)
        if reach is None:
            self._shard_settled(damage, {}, "no other host is in reach")
            return
        self._background.run_beside(
            "holdfast-repair",
            lambda: _encode_shard(damage, self._host, reach),
            lambda data, why: self._shard_settled(damage, data or {}, why),
        )

    def _shard_settled(self, damage: DamagedShard, data: dict[int, bytes], why: str) -> None:
        parity, record = self._role.parity, damage.row.record
        if parity is None or not parity.store.is_quarantined(damage.row):
            return  # something newer is written there
        if not data or not parity.store.repair(damage.row, data):
            why = why or "its record could not be written"
            self._role.report(host_messages.ShardLost(attempt=record.attempt))
        name = f"row {record.row} of stripe {record.stripe}"
        self._report("parity", record, name, len(damage.numbers) << 20, why)

    # ── images and shards ────────────────────────────────────────────────────────────────────────

    def _report(
        self, what: str, of: SlotRecord | ParityRecord, name: str, size_bytes: int, why: str
    ) -> None:
        self.repaired += not why
        self.dropped += bool(why)
        emit(
            DamageFound(
                incarnation=of.incarnation,
                step=of.step,
                host=self._host,
                what=what,
                name=name,
                size_bytes=size_bytes,
                outcome="dropped" if why else "repaired",
                reason=why,
            )
        )


def _decode_image(
    damage: DamagedImage, record: ParityRecord, reach: Callable[[], KeeperReach]
) -> dict[int, bytes]:
    """Return the correct content of the damaged bytes; this host's own image is treated as lost."""
    from holdfast.keeper.parity.group_access import open_group
    from holdfast.restore.cluster.decode import decode_image

    said, group = damage.record, open_group(record, reach())
    member, n = group.place_of(said.rank)
    fact = record.members[member].images[n]
    if fact.image != said.image:
        raise NotFound(f"the parity kept here is not of this image of rank {said.rank}")
    image = decode_image(group, record, said.rank)
    spans = ((0, fact.data_start) if span == HEADER else span for span in damage.spans)
    return {start: bytes(image.view(start, stop, bytearray())) for start, stop in spans}


def _encode_shard(
    damage: DamagedShard, own: str, reach: Callable[[], KeeperReach]
) -> dict[int, bytes]:
    """Encode the damaged blocks of a shard again."""
    from holdfast.keeper.parity.group_access import encode_again, open_group

    record = damage.row.record
    group, found = open_group(record, reach()), {}
    for number in damage.numbers:
        block = encode_again(group, record, own, number)
        if block is None:
            raise NotFound(f"block {number} comes out otherwise: the images are not those it is of")
        found[number << 20] = bytes(block)
    return found
