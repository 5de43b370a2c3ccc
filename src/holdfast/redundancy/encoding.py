"""A member makes the parity of its stripe: it pulls, compares, and only then codes.

Window by window over all columns of the stripe: the bytes of all other members at one place come
in while those of the window before are compared with their block checksums and coded. Nothing that
was not captured so is ever part of a sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.errors import ChecksumMismatch
from holdfast.format.tables import BlockTable, table_offset
from holdfast.peers.calling import Peer, failed
from holdfast.peers.client import Wanted
from holdfast.peers.pull import Pull
from holdfast.redundancy.capacity import AHEAD, window_bytes
from holdfast.redundancy.erasure import Coder
from holdfast.redundancy.paths import generation_name, image_path
from holdfast.redundancy.records import Terms
from holdfast.redundancy.stripes import Source, needed_for_parity
from holdfast.redundancy.waiting import Fetcher, Halt
from holdfast.redundancy.windows import Outbox, block_sums


class Staged(NamedTuple):
    """Bytes of an image of a member from ``start`` on, and where they lie here."""

    member: int
    image: int
    start: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes ``start`` to ``stop`` of the stripe, and what each column has of them."""

    number: int
    start: int
    stop: int
    sources: tuple[Source, ...]
    columns: tuple[memoryview, ...]
    """Where the bytes of each column are put; a column that ends early is shorter."""

    def parts(self) -> Iterator[Staged]:
        """All of them, one by one."""
        for source, column in zip(self.sources, self.columns, strict=True):
            for part in source.parts:
                if part.image is not None:
                    data = column[part.at : part.at + part.stop - part.start]
                    yield Staged(source.member, part.image, part.start, data)


class Encoder:
    """Makes the rows of stripe ``stripe`` of a group, which is the number of this member."""

    def __init__(
        self, terms: Terms, stripe: int, *, peers: Mapping[str, Peer], coder: Coder,
        row: memoryview, staging: memoryview, outbox: Outbox | None,
        fetcher: Fetcher, halt: Halt,
    ) -> None:  # fmt: skip
        self._terms, self._stripe, self._peers = terms, stripe, peers
        self._coder, self._row, self._staging = coder, row, staging
        self._outbox, self._fetcher, self._halt = outbox, fetcher, halt
        self._window_bytes = window_bytes(coder.data)
        self._tables: dict[tuple[int, int], BlockTable] = {}

    def run(self) -> bytes:
        """Make row 0 here and hand the others on; the checksums of the blocks of row 0."""
        self._pull_tables()
        sums = []
        with closing(self._pulled()) as windows:
            for window in windows:
                self._compare(window)
                rows = self._code(window)
                sums.append(block_sums(rows[0]))
                if self._outbox is not None:
                    self._outbox.offer(window.number, rows[1:])
        if self._outbox is not None:
            self._outbox.finish()
        return b"".join(sums)

    def _code(self, window: Window) -> list[memoryview]:
        rows = [self._row[window.start : window.stop]]
        if self._outbox is not None:
            rows += self._outbox.room(window.number, window.stop - window.start)
        self._halt.check()
        self._coder.encode(window.columns, rows)
        return rows

    # ── what comes in ────────────────────────────────────────────────────────────────────

    def _pulled(self) -> Generator[Window]:
        """Each window as soon as it is there; the next is on its way meanwhile."""
        under_way: deque[tuple[Window, Pull]] = deque()
        try:
            for number in range(-(-len(self._row) // self._window_bytes)):
                window = self._window(number)
                under_way.append((window, self._fetcher.begin(self._wanted(window))))
                if len(under_way) == AHEAD:
                    yield self._next(under_way)
            while under_way:
                yield self._next(under_way)
        finally:
            for _, pull in under_way:
                self._fetcher.drop(pull)

    def _next(self, under_way: deque[tuple[Window, Pull]]) -> Window:
        window, pull = under_way.popleft()
        self._fetcher.finish(pull)
        return window

    def _window(self, number: int) -> Window:
        start = number * self._window_bytes
        stop = min(start + self._window_bytes, len(self._row))
        sources = needed_for_parity(
            self._terms.placement, self._stripe, self._stripe, start, stop, ()
        ).sources
        first = number % AHEAD * len(sources)
        columns = []
        for source in sources:
            at = (first + source.number) * self._window_bytes
            length = max((part.at + part.stop - part.start for part in source.parts), default=0)
            columns.append(self._staging[at : at + length])
            _clear_gaps(source, columns[-1])
        return Window(number, start, stop, sources, tuple(columns))

    def _wanted(self, window: Window) -> list[Wanted]:
        return [self._of(part.member, part.image, part.start, part.data) for part in window.parts()]

    def _of(self, member: int, number: int, start: int, into: memoryview) -> Wanted:
        """Bytes of an image from ``start`` on, counted as the placement does."""
        fact = self._terms.members[member]
        image = fact.images[number]
        return Wanted(
            self._peers[fact.host], image_path(self._terms.attempt, image.rank),
            generation_name(self._terms.generation), image.data_start + start, into,
        )  # fmt: skip

    # ── whether it is what was captured ──────────────────────────────────────────────────

    def _pull_tables(self) -> None:
        """The block checksums of all images of the stripe, compared with the seals."""
        wanted = {}
        for member in self._members():
            for number, image in enumerate(self._terms.members[member].images):
                offset = table_offset(image.coded_bytes)
                into = memoryview(bytearray(image.coded_bytes - offset))
                wanted[member, number] = self._of(member, number, offset, into)
        self._fetcher.pull(list(wanted.values()))
        for (member, number), one in wanted.items():
            image = self._terms.members[member].images[number]
            with self._blamed(member):
                self._tables[member, number] = BlockTable(
                    one.into, data_bytes=image.coded_bytes, table_xxh3=image.table_xxh3,
                    where=f"the image of rank {image.rank}",
                )  # fmt: skip

    def _members(self) -> list[int]:
        """Those that the stripe has data of."""
        placement = self._terms.placement
        everyone = range(placement.members)
        return [n for n in everyone if placement.number(n, self._stripe) < placement.columns]

    def _compare(self, window: Window) -> None:
        """PeerError unless all of it is what was captured."""
        for part in window.parts():
            self._halt.check()
            with self._blamed(part.member):
                self._tables[part.member, part.image].check(part.start, part.data)

    @contextmanager
    def _blamed(self, member: int) -> Iterator[None]:
        """Wrong bytes are those of the peer that sent them."""
        try:
            yield
        except ChecksumMismatch as error:
            peer = self._peers[self._terms.members[member].host]
            raise failed(peer, None, "body", str(error)) from error


def _clear_gaps(source: Source, column: memoryview) -> None:
    """Between the segments of two images nothing is pulled: zeros count there."""
    at = 0
    for part in source.parts:
        column[at : part.at] = bytes(part.at - at)
        at = part.at + part.stop - part.start
