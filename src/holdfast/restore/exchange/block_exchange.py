"""Exchanges blocks between ranks: reads this rank's share, takes what hosts read, applies it.

All ranks go through the same steps together. In one step a rank reads its share of a round into its
host's outbox, takes its part of the round before from the outboxes of other hosts, and applies what
was read and taken in earlier steps. No byte is used before its block has the checksum of the
checkpoint: neither on the rank that read it, nor on one that found it in its host's memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from msgspec import Struct

from holdfast.format.checksum import BLOCK_BYTES, blocks, checksum
from holdfast.geometry.box import ITEMSIZE, Box, between, flat
from holdfast.restore.exchange.host_memory import ExchangeBroke, ExchangeMemory, OfferedBlocks
from holdfast.restore.planning.block_rounds import (
    BlockRange,
    HostRound,
    HostRounds,
    SlotRun,
    SlotTable,
)
from holdfast.restore.planning.plan import Fetch, Want
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import (
    CARRIERS,
    READERS,
    Array,
    BorrowBuffer,
    Destination,
    read_verified,
)
from holdfast.restore.restore_clock import RestoreClock

#: Blocks that a rank reads at once.
_READ_BLOCKS = 4


class Traffic(Struct, frozen=True):
    """Bytes that one rank read from storage, and bytes that it received from other ranks
    instead.
    """

    read_bytes: int
    received_bytes: int


class BlockExchange:
    """The exchange of one rank, step by step; between two steps all ranks wait for each other.

    A context: at its end no thread uses the memory any more.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rounds: HostRounds,
        scatter: BlockScatter,
        rank: int,
        memory: ExchangeMemory,
        offered: OfferedBlocks | None,
    ) -> None:
        self._checkpoint, self._scatter, self._rank = checkpoint, scatter, rank
        self._memory, self._offered = memory, offered
        self._rounds = rounds.rounds()
        self._wanted = rounds.wanted_by(rank)
        self._recent: deque[HostRound | None] = deque([None, None, None], maxlen=3)
        self._step = 0
        self._threads = ThreadPoolExecutor(READERS + 1, thread_name_prefix="holdfast-read")
        self._read_bytes = self._received_bytes = 0

    def __enter__(self) -> BlockExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def step(self, clock: RestoreClock) -> None:
        """Read for the next round, take for the one before, apply what is there.

        What this rank then still waits for its own reads is "read" by the clock.

        Raises errors of reading, and ExchangeBroke when something did not arrive as it was.
        """
        self._recent.appendleft(next(self._rounds, None))
        reading, taking, applying = self._recent
        work: list[Future[None]] = []
        try:
            if taking and self._offered:
                take = self._threads.submit(self._offered.take, taking.inbox, self._step - 1)
                work.append(take)
            if reading:
                work += self._read(reading, self._step)
            if taking:
                self._apply_outbox(taking, self._step - 1)
            if applying:
                self._apply_inbox(applying.inbox, self._step - 2)
            with clock.during("read"):
                for future in work[bool(taking and self._offered) :]:
                    future.result()
            for future in work:
                future.result()
        except BaseException:
            if self._offered:
                self._offered.cancel()
            wait(work)
            raise
        self._step += 1

    def finish(self) -> Traffic:
        """Return what was read and received. ExchangeBroke when an element has not arrived."""
        if self._scatter.missing:
            raise ExchangeBroke(f"rank {self._rank} lacks {self._scatter.missing} elements")
        return Traffic(self._read_bytes, self._received_bytes)

    def _read(self, round_: HostRound, number: int) -> Iterator[Future[None]]:
        """Begin to read this rank's share of a round, and offer that of its host."""
        if self._offered:
            self._offered.offer(round_.outbox, number)
        for run in round_.outbox.runs(np.flatnonzero(round_.readers == self._rank)):
            for first in range(run.blocks.first, run.blocks.stop, _READ_BLOCKS):
                some = run.blocks._replace(
                    first=first, stop=min(first + _READ_BLOCKS, run.blocks.stop)
                )
                room = self._memory.outbox(number, run.slot + first - run.blocks.first)
                yield self._threads.submit(self._read_blocks, some, room)

    def _read_blocks(self, run: BlockRange, room: Array) -> None:
        begin, end = self._span(run)
        read_verified(self._checkpoint, run.image, run.first, run.stop, room[: end - begin].data)

    def _span(self, run: BlockRange) -> tuple[int, int]:
        """Return the byte range in the data of the image: the last block may be short."""
        end = self._checkpoint.header(run.image).table.offset
        return run.first * BLOCK_BYTES, min(run.stop * BLOCK_BYTES, end)

    def _apply_outbox(self, round_: HostRound, number: int) -> None:
        wanted = round_.outbox.of_pools(self._wanted)
        is_own = round_.readers[wanted] == self._rank
        for run in round_.outbox.runs(wanted[is_own]):
            self._read_bytes += self._apply(run, self._memory.outbox(number, run.slot))
        for rank in np.unique(round_.readers[wanted[~is_own]]).tolist():
            for run in round_.outbox.runs(wanted[round_.readers[wanted] == rank]):
                data = self._memory.outbox(number, run.slot)
                self._verify(run.blocks, data, f"rank {rank}")
                self._received_bytes += self._apply(run, data)

    def _apply_inbox(self, inbox: SlotTable, number: int) -> None:
        wanted = inbox.of_pools(self._wanted)
        for share in inbox.shares:
            inside = wanted[(wanted >= share.slot) & (wanted < share.slot + share.length)]
            for run in inbox.runs(inside):
                data = self._memory.inbox(number, run.slot)
                self._verify(run.blocks, data, f"host {share.host}")
                self._received_bytes += self._apply(run, data)

    def _verify(self, run: BlockRange, data: Array, sender: str) -> None:
        if not self._checkpoint.has_sums:
            return
        table = self._checkpoint.table(run.image)
        for number, start, stop in blocks(run.first, run.stop, self._span(run)[1]):
            begin = start - run.first * BLOCK_BYTES
            if checksum(data[begin : begin + stop - start].data) != table[number]:
                name = self._checkpoint.files[run.image].name
                raise ExchangeBroke(
                    f"block {number} of {name} was changed on its way from {sender} to "
                    f"rank {self._rank}"
                )

    def _apply(self, run: SlotRun, data: Array) -> int:
        """Apply verified blocks; return their size."""
        begin, end = self._span(run.blocks)
        image, first, stop = run.blocks
        self._scatter.apply(image, range(first, stop), begin, data[: end - begin])
        return end - begin


# Copies wanted elements from verified blocks into destination arrays.


class _Place(Struct, frozen=True):
    """The start of one fetch in the data of its image, and its destination."""

    fetch: Fetch
    offset: int
    item_bytes: int
    inner: Box
    at: Box
    """Position in the destination, relative to the want's start."""
    target: Destination


class BlockScatter:
    """The fetches of one rank, by the blocks they come from."""

    def __init__(
        self, wants: Sequence[Want], destinations: Mapping[int, Destination], borrow: BorrowBuffer
    ) -> None:
        self._wants, self._destinations, self._borrow = wants, destinations, borrow
        self._by_block: dict[tuple[int, int], list[_Place]] = {}
        self._missing = 0

    def add(self, fetch: Fetch, offset: int, blocks: Iterator[int]) -> None:
        """Register a fetch from these blocks; its piece begins at byte ``offset`` of the data."""
        want = self._wants[fetch.want]
        inner, at = fetch.part.relative_to(fetch.piece), fetch.part.relative_to(want.box)
        place = _Place(
            fetch, offset, ITEMSIZE[fetch.dtype], inner, at, self._destinations[want.key]
        )
        for block in blocks:
            self._by_block.setdefault((fetch.rank, block), []).append(place)
        self._missing += inner.volume

    def apply(self, image: int, blocks: range, start: int, data: Array) -> None:
        """Copy the wanted elements out of ``data``, which begins at byte ``start`` of the
        image's data.
        """
        places: dict[int, _Place] = {}
        for block in blocks:
            places.update((id(place), place) for place in self._by_block.get((image, block), ()))
        for place in places.values():
            self._missing -= self._copy(place, start, data)

    @property
    def missing(self) -> int:
        """Return the number of elements that have not arrived yet."""
        return self._missing

    def _copy(self, place: _Place, start: int, data: Array) -> int:
        """Copy everything of one place that ``data`` contains; return the number of elements."""
        item, shape = place.item_bytes, place.fetch.piece.shape
        first = max(0, -((place.offset - start) // item))
        stop = min(math.prod(shape), (start + len(data) - place.offset) // item)
        count = 0
        for rows in between(shape, first, stop):
            part = rows.intersect(place.inner)
            if part is None:
                continue
            at = place.offset + flat(rows.start, shape) * item - start
            raw: Array = data[at : at + rows.volume * item].view(CARRIERS[item]).reshape(rows.shape)
            to = part.relative_to(place.inner).shift(place.at.start)
            self._put(place.target, to, raw[part.relative_to(rows).slices()])
            count += part.volume
        return count

    def _put(self, target: Destination, to: Box, elements: Array) -> None:
        if isinstance(target, np.ndarray):
            target[to.slices()] = elements
            return
        with self._borrow(elements.nbytes) as memory:  # the message is reused before the copy
            copy: Array = np.frombuffer(memory, elements.dtype).reshape(elements.shape)
            copy[...] = elements
            target.write_box(to, copy)
