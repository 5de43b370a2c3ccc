"""Encodes and exchanges the parity shards of one generation among the members of a group.

A member encodes the stripe of its own number from the images of the others, fetches the further
shards that it stores from the members that encode them, and sends the further shards of its own
stripe. ``run`` blocks and uses threads of its own, never the keeper's loop. Any failure ends the
exchange with one error and leaves the shards without a seal, so the earlier protected generation
stays as it was. See docs/design/0006-redundancy.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from holdfast.errors import ChecksumMismatch, Fenced, HoldfastError, NotProtected, UsageError
from holdfast.format.image import BlockTable, table_offset
from holdfast.parity.coding.backends import chosen
from holdfast.parity.coding.codes import Coder
from holdfast.parity.exchange.windows import (
    PATIENCE_S,
    BudgetedPuller,
    CancelScope,
    ExchangeEnded,
    Inbox,
    Outbox,
    RateBudget,
    block_sums,
)
from holdfast.parity.planning.budget import PIECE_BYTES, WINDOW_BYTES, passing_bytes, staging_bytes
from holdfast.parity.planning.placement import (
    StoredShard,
    StripePart,
    StripePlacement,
    StripeSource,
    stored_by,
    stripes,
)
from holdfast.parity.planning.record import ImageFact, RecordTerms, seal
from holdfast.transport.client import Puller, WantedRange
from holdfast.transport.client_connection import Peer, failed
from holdfast.transport.pull import PeerDownload
from holdfast.transport.wire.http import generation_name, image_path

if TYPE_CHECKING:
    from holdfast.transport.server import ThreadSafeServer


class ShardMemory(Struct, frozen=True):
    """Memory for one exchange. Pages that were touched before are several times faster.

    ``rows``: for each (stripe, row) that the member stores, memory of the shard's size.
    ``staging``: any memory. ``passing``: memory of ``file``, from ``offset_bytes`` on. ``capacity``
    gives the sizes.
    """

    rows: Mapping[tuple[int, int], memoryview]
    staging: memoryview
    passing: memoryview = field(default_factory=lambda: memoryview(b""))
    file: Path | int = -1
    offset_bytes: int = 0


class SealedShard(Struct, frozen=True):
    """A complete parity shard, and its record as it is stored and offered."""

    kept: StoredShard
    record: bytes


class ShardExchange:
    """Runs one generation's exchange for the member ``own``. All images must have been captured.

    ``peers``: the addresses of the keepers of all other hosts. ``offers``: the offers of this
    keeper's server. UsageError for memory that does not fit.
    """

    def __init__(
        self,
        terms: RecordTerms,
        own: str,
        *,
        peers: Mapping[str, Peer],
        room: ShardMemory,
        offers: ThreadSafeServer,
        puller: Puller,
        budget: RateBudget,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.terms, self.own = terms, own
        self._number = terms.number_of(own)
        self._kept = stored_by(terms.placement, self._number)
        _check_room(terms.placement, self._kept, room)
        if missing := {one.host for one in terms.members} - {own, *peers}:
            raise UsageError(f"it is not said where the keepers of {sorted(missing)} are")
        self._peers, self._room, self._offers = peers, room, offers
        self._scope = CancelScope()
        self._budgeted = BudgetedPuller(
            puller,
            budget,
            self._scope,
            patience_s=patience_s,
            before_bytes=len(terms.members) * WINDOW_BYTES,  # a window of every column comes first
        )
        self._sums: dict[StoredShard, bytes] = {}

    @property
    def pulled_bytes(self) -> int:
        """The bytes requested so far."""
        return self._budgeted.pulled_bytes

    def run(self) -> tuple[SealedShard, ...]:
        """Make and fetch all shards that this member stores; return them with their sealed records.

        NotProtected when that failed, Fenced when this run continues elsewhere. No thread of the
        exchange runs after it returned or raised.
        """
        threads = [
            threading.Thread(
                target=self._guarded,
                args=(kept,),
                daemon=True,
                name=f"holdfast-row-{kept.stripe}-{kept.row}",
            )
            for kept in self._kept[1:]
        ]
        try:
            for thread in threads:
                thread.start()
        except RuntimeError as error:  # no more threads can start: end those that run
            self._scope.stop(error)
        self._guarded(self._kept[0])
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if self._scope.reason is not None:
            raise self._error(self._scope.reason)
        return tuple(
            SealedShard(kept, seal(self.terms.record(kept, self._sums[kept])))
            for kept in self._kept
        )

    def cancel(self, why: str) -> None:
        """End the exchange, from any thread: ``run`` raises as soon as its current request has
        ended.
        """
        self._scope.stop(self._not_protected(why))

    def _guarded(self, kept: StoredShard) -> None:
        """Fetch one shard; any error cancels the whole exchange."""
        try:
            self._sums[kept] = self._fetch(kept) if kept.row else self._encode(kept)
        except ExchangeEnded:
            return
        except BaseException as error:
            self._scope.stop(error)

    def _encode(self, kept: StoredShard) -> bytes:
        outbox = self._outbox() if self.terms.parity > 1 else None
        try:
            if outbox is not None:
                outbox.begin()
            return Encoder(
                self.terms,
                kept.stripe,
                peers=self._peers,
                coder=self._coder(),
                row=self._memory(kept),
                staging=self._room.staging,
                outbox=outbox,
                budgeted=self._budgeted,
            ).run()
        finally:
            if outbox is not None:
                outbox.close()

    def _outbox(self) -> Outbox:
        return Outbox(
            self.terms,
            self._number,
            memory=self._room.passing,
            file=self._room.file,
            offset_bytes=self._room.offset_bytes,
            offers=self._offers,
            budgeted=self._budgeted,
        )

    def _fetch(self, kept: StoredShard) -> bytes:
        encoder = self.terms.members[kept.stripe].host
        return Inbox(
            self.terms,
            kept,
            memory=self._memory(kept),
            encoder=self._peers[encoder],
            budgeted=self._budgeted,
        ).run()

    def _coder(self) -> Coder:
        return Coder(self.terms.placement.columns, self.terms.parity, chosen().backend)

    def _memory(self, kept: StoredShard) -> memoryview:
        return self._room.rows[kept.stripe, kept.row][: kept.size_bytes]

    def _error(self, reason: BaseException) -> BaseException:
        if isinstance(reason, (Fenced, NotProtected)) or not isinstance(reason, HoldfastError):
            return reason
        error = self._not_protected(str(reason), str(reason.fields.get("peer", "")))
        error.__cause__ = reason
        return error

    def _not_protected(self, why: str, host: str = "") -> NotProtected:
        generation = generation_name(self.terms.generation)
        return NotProtected(
            f"generation {generation} is captured but not protected, for {self.own} cannot make "
            f"its parity: {why.rstrip('.')}. What was protected before stays so; the next one is "
            "tried.",
            generation=generation,
            host=host,
        )


def _check_room(
    placement: StripePlacement, kept: tuple[StoredShard, ...], room: ShardMemory
) -> None:
    """Raise UsageError when some part does not fit into its memory."""
    columns, parity = placement.columns, placement.parity
    needed = {
        "what is pulled": (staging_bytes(columns), room.staging),
        "what is handed on of other rows": (passing_bytes(parity), room.passing),
    }
    for one in kept:
        memory = room.rows.get((one.stripe, one.row), memoryview(b""))
        needed[f"row {one.row} of stripe {one.stripe}"] = (one.size_bytes, memory)
    for what, (size, memory) in needed.items():
        if len(memory) < size:
            raise UsageError(f"{what} takes {size} bytes of memory, there are {len(memory)}")


# Encodes the parity of one stripe: each block is read, verified, and only then coded.
#
# The encoder goes piece by piece over all columns of the stripe, on one thread: a few blocks of
# each column are received, compared with their checksums and coded; meanwhile the kernel buffers
# the next bytes. Blocks that differ from what was captured never enter a sum.


class Encoder:
    """Makes the parity shards of stripe ``stripe`` of a group; ``stripe`` is this member's
    number.
    """

    def __init__(
        self,
        terms: RecordTerms,
        stripe: int,
        *,
        peers: Mapping[str, Peer],
        coder: Coder,
        row: memoryview,
        staging: memoryview,
        outbox: Outbox | None,
        budgeted: BudgetedPuller,
    ) -> None:
        self._row, self._coder, self._outbox = row, coder, outbox
        self._scope = budgeted.scope
        columns = [
            Column(terms, source, peers[terms.members[source.member].host], budgeted)
            for source in stripes(terms.placement)[stripe].data
        ]
        self._columns = [
            (column, staging[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
            for number, column in enumerate(columns)
        ]

    def run(self) -> bytes:
        """Make shard 0 here and send the others; return the checksums of the blocks of shard 0."""
        sums = []
        with ExitStack() as stack:
            for column, _ in self._columns:
                column.begin(stack)
            for start in range(0, len(self._row), WINDOW_BYTES):
                sums.append(self._window(start, min(start + WINDOW_BYTES, len(self._row))))
        if self._outbox is not None:
            self._outbox.finish()
        return b"".join(sums)

    def _window(self, start: int, stop: int) -> bytes:
        """Code a window of all shards, piece by piece; return the checksums of shard 0."""
        number, rows = start // WINDOW_BYTES, [self._row[start:stop]]
        if self._outbox is not None:
            rows += self._outbox.room(number, stop - start)
        sums = [b""] * len(rows)
        for at in range(start, stop, PIECE_BYTES):
            self._scope.check()
            end = min(at + PIECE_BYTES, stop)
            outputs = [row[at - start : end - start] for row in rows]
            if self._outbox is None:
                self._add_up(at, end, outputs[0])
            else:
                sources = [column.read(at, end, into) for column, into in self._columns]
                self._coder.encode(sources, outputs)
            sums = [before + block_sums(one) for before, one in zip(sums, outputs, strict=True)]
        if self._outbox is not None:
            self._outbox.offer(number, stop - start, sums[1:])
        return sums[0]

    def _add_up(self, start: int, stop: int, row: memoryview) -> None:
        """Code a single shard, the XOR of its columns: the first column is received in its
        place.
        """
        (first, _), *others = self._columns
        length = len(first.read(start, stop, row))
        row[length:] = bytes(len(row) - length)
        for number, (column, into) in enumerate(others, 1):
            self._coder.add(number, column.read(start, stop, into), [row])


class Column:
    """Reads one member's bytes of a stripe piece by piece and compares each block with its
    checksum.
    """

    def __init__(
        self, terms: RecordTerms, source: StripeSource, peer: Peer, budgeted: BudgetedPuller
    ) -> None:
        self._terms, self._peer, self._budgeted = terms, peer, budgeted
        self._generation = generation_name(terms.generation)
        self._images = terms.members[source.member].images
        self._parts = source.parts
        self._tables: dict[int, BlockTable] = {}
        self._stream: PeerDownload | None = None
        self._left = self._asked = 0  # bytes not requested yet; requested, not read

    def begin(self, stack: ExitStack) -> None:
        """Read the block tables of all its images; ``stack`` ends open downloads."""
        self._stack = stack
        wanted = {}
        for image in self._images:
            offset = table_offset(image.coded_bytes)
            wanted[image.rank] = WantedRange(
                self._peer,
                image_path(self._terms.attempt, image.rank),
                self._generation,
                image.data_start + offset,
                memoryview(bytearray(image.coded_bytes - offset)),
            )
        self._budgeted.pull(list(wanted.values()))
        with self._blamed():
            for image in self._images:
                self._tables[image.rank] = BlockTable(
                    wanted[image.rank].into,
                    data_bytes=image.coded_bytes,
                    table_xxh3=image.table_xxh3,
                    where=f"the image of rank {image.rank}",
                )

    def read(self, start: int, stop: int, into: memoryview) -> memoryview:
        """Read bytes ``start`` to ``stop`` of the stripe, of whole blocks; shorter where the column
        ends.
        """
        at = start
        while at < stop and self._parts and self._parts[0].at < stop:
            first = self._parts[0].at
            if first > at:  # the image before it is shorter
                into[at - start : first - start] = bytes(first - at)
                at = first
            at += self._read_part(at, into[at - start : stop - start])
        return into[: at - start]

    def _read_part(self, at: int, into: memoryview) -> int:
        """Read from byte ``at`` of the stripe to the end of its first part, or fill all of
        ``into``.
        """
        part = self._parts[0]
        assert part.image is not None  # a column holds data, never parity
        image, first = self._images[part.image], part.start + at - part.at
        data = into[: part.stop - first]
        stream = self._stream or self._open(image, part)
        self._ask(stream, len(data))
        stream.read(data)
        self._asked -= len(data)
        with self._blamed():
            self._tables[image.rank].check(first, data)
        if first + len(data) == part.stop:
            stream.confirm()
            self._stream, self._parts = None, self._parts[1:]
        return len(data)

    def _open(self, image: ImageFact, part: StripePart) -> PeerDownload:
        path = image_path(self._terms.attempt, image.rank)
        start = image.data_start + part.start
        stream = self._stack.enter_context(
            self._budgeted.stream(self._peer, path, self._generation, start)
        )
        self._stream, self._left, self._asked = stream, part.stop - part.start, 0
        return stream

    def _ask(self, stream: PeerDownload, needed: int) -> None:
        """Request what is needed, and enough ahead that the peer never waits for the next
        request.
        """
        while self._left and self._asked < max(needed, piece := self._budgeted.piece_bytes):
            count = min(piece, self._left)
            self._budgeted.spend(count)
            stream.ask(count)
            self._left -= count
            self._asked += count

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Attribute a checksum error to the peer that sent the bytes."""
        try:
            yield
        except ChecksumMismatch as error:
            raise failed(self._peer, None, "body", str(error)) from error
