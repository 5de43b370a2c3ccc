"""A member makes the parity of its stripe: it reads, compares, and only then codes.

Piece by piece over all columns of the stripe, on one thread: a few blocks of each column are
received, compared with their checksums and coded; what comes next gathers in the kernel meanwhile.
Nothing that was not captured so is ever part of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from holdfast.errors import ChecksumMismatch
from holdfast.format.tables import BlockTable, table_offset
from holdfast.peers.calling import Peer, failed
from holdfast.peers.client import Wanted
from holdfast.peers.names import generation_name, image_path
from holdfast.peers.stream import Stream
from holdfast.redundancy.capacity import PIECE_BYTES, WINDOW_BYTES
from holdfast.redundancy.erasure import Coder
from holdfast.redundancy.records import ImageFact, Terms
from holdfast.redundancy.stripes import Part, Source, stripes
from holdfast.redundancy.waiting import Fetcher, Halt
from holdfast.redundancy.windows import Outbox, block_sums


class Encoder:
    """Makes the rows of stripe ``stripe`` of a group, which is the number of this member."""

    def __init__(
        self, terms: Terms, stripe: int, *, peers: Mapping[str, Peer], coder: Coder,
        row: memoryview, staging: memoryview, outbox: Outbox | None,
        fetcher: Fetcher, halt: Halt,
    ) -> None:  # fmt: skip
        self._row, self._coder, self._outbox, self._halt = row, coder, outbox, halt
        columns = [
            Column(terms, source, peers[terms.members[source.member].host], fetcher)
            for source in stripes(terms.placement)[stripe].data
        ]
        self._columns = [
            (column, staging[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
            for number, column in enumerate(columns)
        ]

    def run(self) -> bytes:
        """Make row 0 here and hand the others on; the checksums of the blocks of row 0."""
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
        """Code a window of all rows, piece by piece; the checksums of row 0."""
        number, rows = start // WINDOW_BYTES, [self._row[start:stop]]
        if self._outbox is not None:
            rows += self._outbox.room(number, stop - start)
        sums = [b""] * len(rows)
        for at in range(start, stop, PIECE_BYTES):
            self._halt.check()
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
        """A row that is alone is the XOR of its columns: the first one is received in its place."""
        (first, _), *others = self._columns
        length = len(first.read(start, stop, row))
        row[length:] = bytes(len(row) - length)
        for number, (column, into) in enumerate(others, 1):
            self._coder.add(number, column.read(start, stop, into), [row])


class Column:
    """What one member has of a stripe, piece by piece, each block compared with its checksum."""

    def __init__(self, terms: Terms, source: Source, peer: Peer, fetcher: Fetcher) -> None:
        self._terms, self._peer, self._fetcher = terms, peer, fetcher
        self._generation = generation_name(terms.generation)
        self._images = terms.members[source.member].images
        self._parts = source.parts
        self._tables: dict[int, BlockTable] = {}
        self._stream: Stream | None = None
        self._left = self._asked = 0  # bytes of a part not asked for yet, and asked for, not read

    def begin(self, stack: ExitStack) -> None:
        """Get the block tables of all its images; ``stack`` ends what is under way."""
        self._stack = stack
        wanted = {}
        for image in self._images:
            offset = table_offset(image.coded_bytes)
            wanted[image.rank] = Wanted(
                self._peer, image_path(self._terms.attempt, image.rank), self._generation,
                image.data_start + offset, memoryview(bytearray(image.coded_bytes - offset)),
            )  # fmt: skip
        self._fetcher.pull(list(wanted.values()))
        with self._blamed():
            for image in self._images:
                self._tables[image.rank] = BlockTable(
                    wanted[image.rank].into, data_bytes=image.coded_bytes,
                    table_xxh3=image.table_xxh3, where=f"the image of rank {image.rank}",
                )  # fmt: skip

    def read(self, start: int, stop: int, into: memoryview) -> memoryview:
        """Bytes ``start`` to ``stop`` of the stripe, of whole blocks; shorter where it has less."""
        at = start
        while at < stop and self._parts and self._parts[0].at < stop:
            first = self._parts[0].at
            if first > at:  # an image before it is shorter
                into[at - start : first - start] = bytes(first - at)
                at = first
            at += self._read_part(at, into[at - start : stop - start])
        return into[: at - start]

    def _read_part(self, at: int, into: memoryview) -> int:
        """What there is of the first part from byte ``at`` of the stripe on, or all of ``into``."""
        part = self._parts[0]
        assert part.image is not None  # a column is data
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

    def _open(self, image: ImageFact, part: Part) -> Stream:
        path = image_path(self._terms.attempt, image.rank)
        start = image.data_start + part.start
        stream = self._stack.enter_context(
            self._fetcher.stream(self._peer, path, self._generation, start)
        )
        self._stream, self._left, self._asked = stream, part.stop - part.start, 0
        return stream

    def _ask(self, stream: Stream, needed: int) -> None:
        """Have what is needed under way, and so much that the peer never waits for the next."""
        while self._left and self._asked < max(needed, piece := self._fetcher.piece_bytes):
            count = min(piece, self._left)
            self._fetcher.spend(count)
            stream.ask(count)
            self._left -= count
            self._asked += count

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Wrong bytes are those of the peer that sent them."""
        try:
            yield
        except ChecksumMismatch as error:
            raise failed(self._peer, None, "body", str(error)) from error
