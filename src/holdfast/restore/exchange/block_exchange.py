"""Exchanges blocks between ranks: reads this rank's share, sends it, and applies verified blocks.

While one round is in transfer, the next is read. No byte is used before its block has the checksum
of the checkpoint: neither on the rank that read it, nor on one that received it. A rank that cannot
read says so in its next message, which has the usual number of bytes, so no rank waits for bytes
that do not come. A rank that receives this, or nothing, ends its exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from holdfast.format.checksum import BLOCK_BYTES, blocks, checksum
from holdfast.geometry.box import Box
from holdfast.geometry.index import ITEMSIZE, between, flat
from holdfast.restore.planning.block_rounds import BlockRange, ExchangeRound, Ranks
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
from holdfast.storage.direct import aligned_memory

#: Bytes that a rank reads at once.
_READ_BLOCKS = 4
#: Every message ends in one status word: whether the sender could read its bytes.
_WORD_BYTES = 8
_GOOD, _BAD = 0x9C1E_5A77_03D2_B48F, 0x4B60_E8F1_97AC_2D35


class ExchangeBroke(Exception):
    """Bytes did not get from rank to rank; the checkpoint may be sound. Never leaves ``load``."""


class OtherFailed(ExchangeBroke):
    """Another rank failed, and raises the reason itself."""


class RankLost(ExchangeBroke):
    """A rank has ended, cannot be reached, or sends nothing."""


class Pending(Protocol):
    """A message in transfer."""

    def wait(self, timeout_s: float) -> None:
        """Wait until its memory may be used again. RankLost when it did not arrive."""
        ...


class Wire(Protocol):
    """Sends messages between ranks. Two ranks send and receive theirs in the same order."""

    def send(self, rank: int, message: Array) -> Pending:
        """Begin to send these bytes to ``rank``; they must not change until it is done."""
        ...

    def receive(self, rank: int, message: Array) -> Pending:
        """Begin to fill ``message`` with the next bytes that ``rank`` sends."""
        ...

    def close(self) -> None:
        """Close all connections; a rank that still waits for a message gets an error."""
        ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank read from storage, and bytes that it received from other ranks
    instead.
    """

    read_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class _Share:
    """This rank's part of a round while it is read, and the message with it, if it has one."""

    message: Array
    reading: Sequence[Future[None]]


class BlockExchange:
    """Runs the rounds of one rank."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        rounds: Sequence[ExchangeRound],
        scatter: BlockScatter,
        rank: int,
        *,
        timeout_s: float,
    ) -> None:
        self._checkpoint, self._rounds, self._scatter = checkpoint, rounds, scatter
        self._rank, self._timeout_s = rank, timeout_s
        self._error: Exception | None = None  # from this rank's own reads
        self._broke: ExchangeBroke | None = None
        self._left: Ranks = ()  # their further rounds are skipped
        self._read_bytes = self._received_bytes = 0

    def run(self, wire: Wire) -> Traffic:
        """Run every round. Raises read errors, and ExchangeBroke when something did not arrive."""
        own = max((self._size(round_.share_of(self._rank)) for round_ in self._rounds), default=0)
        room = max((self._others_size(round_) for round_ in self._rounds), default=0)
        inbox: Array = np.empty(room, np.uint8)
        outboxes: list[Array] = [
            np.frombuffer(aligned_memory(own + _WORD_BYTES), np.uint8) for _ in range(2)
        ]
        with ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-read") as pool:
            share: _Share | None = None
            for number, round_ in enumerate(self._rounds):
                if round_.ranks == self._left:
                    share = None
                    continue
                share = share or self._begin(round_, outboxes[number % 2], pool)
                ahead = None
                if number + 1 < len(self._rounds) and not self._has_failed:
                    ahead = self._begin(self._rounds[number + 1], outboxes[1 - number % 2], pool)
                self._run_round(round_, share, inbox, wire)
                share = ahead
        if self._error is not None:
            raise self._error
        if self._scatter.missing and not self._broke:
            self._broke = ExchangeBroke(f"rank {self._rank} lacks {self._scatter.missing} elements")
        if self._broke:
            raise self._broke
        return Traffic(self._read_bytes, self._received_bytes)

    @property
    def _has_failed(self) -> bool:
        return self._error is not None or self._broke is not None

    def _size(self, share: Sequence[BlockRange]) -> int:
        return sum(stop - start for start, stop in (self._span(run) for run in share))

    def _span(self, run: BlockRange) -> tuple[int, int]:
        """Return the byte range in the data of the image: the last block may be short."""
        end = self._checkpoint.header(run.image).table.offset
        return run.first * BLOCK_BYTES, min(run.stop * BLOCK_BYTES, end)

    def _others_size(self, round_: ExchangeRound) -> int:
        shares = zip(round_.ranks, round_.shares, strict=True)
        return sum(self._size(s) + _WORD_BYTES for r, s in shares if s and r != self._rank)

    def _begin(self, round_: ExchangeRound, outbox: Array, pool: ThreadPoolExecutor) -> _Share:
        """Begin to read this rank's share of a round."""
        share = round_.share_of(self._rank)
        message = outbox[: self._size(share) + _WORD_BYTES] if share else outbox[:0]
        reading: list[Future[None]] = []
        at = 0
        for run in () if self._has_failed else share:
            for first in range(run.first, run.stop, _READ_BLOCKS):
                some = BlockRange(run.image, first, min(first + _READ_BLOCKS, run.stop))
                size = self._size([some])
                reading.append(pool.submit(self._read, some, message[at : at + size]))
                at += size
        return _Share(message, reading)

    def _read(self, run: BlockRange, room: Array) -> None:
        read_verified(self._checkpoint, run.image, run.first, run.stop, room.data)

    def _run_round(self, round_: ExchangeRound, share: _Share, inbox: Array, wire: Wire) -> None:
        """Run one round: send what was read, apply what arrives. When one rank failed all skip
        the rest.
        """
        others = [rank for rank in round_.ranks if rank != self._rank]
        coming = []
        at = 0
        for rank in others:
            runs = round_.share_of(rank)
            if runs:
                message = inbox[at : at + self._size(runs) + _WORD_BYTES]
                at += len(message)
                coming.append((rank, runs, message, wire.receive(rank, message)))
        going = []
        is_bad = False
        if len(share.message):
            is_bad = not self._finish(share)
            _set_word(share.message, _BAD if is_bad else _GOOD)
            going = [(rank, wire.send(rank, share.message)) for rank in others]
            if not is_bad:
                self._read_bytes += len(share.message) - _WORD_BYTES
                self._apply(round_.share_of(self._rank), share.message)
        for rank, runs, message, pending in coming:
            self._wait(pending, rank)
            if _word(message) == _BAD:
                is_bad = True
                self._broke = self._broke or OtherFailed(f"rank {rank} could not go on")
            elif not self._has_failed and self._is_sound(rank, runs, message):
                self._received_bytes += len(message) - _WORD_BYTES
                self._apply(runs, message)
        for rank, pending in going:
            self._wait(pending, rank)
        if is_bad:
            self._left = round_.ranks

    def _finish(self, share: _Share) -> bool:
        """Wait until the share is read; return whether it may be used, here and by others."""
        for future in share.reading:
            error = future.exception()
            if isinstance(error, Exception):
                self._error = self._error or error
            elif error is not None:
                raise error
        return not self._has_failed

    def _wait(self, pending: Pending, rank: int) -> None:
        try:
            pending.wait(self._timeout_s)
        except RankLost as error:
            raise RankLost(f"rank {self._rank} has lost rank {rank} ({error})") from error

    def _is_sound(self, rank: int, runs: Sequence[BlockRange], message: Array) -> bool:
        if _word(message) != _GOOD:  # corrupt: the sender continues
            self._broke = ExchangeBroke(
                f"a message was changed on its way from rank {rank} to rank {self._rank}"
            )
            return False
        at, sent = 0, message.data
        for run in runs:
            table, (begin, end) = self._checkpoint.table(run.image), self._span(run)
            for number, start, stop in blocks(run.first, run.stop, end):
                actual = checksum(sent[at + start - begin : at + stop - begin])
                if actual != table[number]:
                    name = self._checkpoint.files[run.image].name
                    self._broke = ExchangeBroke(
                        f"block {number} of {name} was changed on its way from rank {rank} to "
                        f"rank {self._rank}"
                    )
                    return False
            at += end - begin
        return True

    def _apply(self, runs: Sequence[BlockRange], message: Array) -> None:
        at = 0
        for run in runs:
            begin, end = self._span(run)
            self._scatter.apply(
                run.image, range(run.first, run.stop), begin, message[at : at + end - begin]
            )
            at += end - begin


def _set_word(message: Array, word: int) -> None:
    message[-_WORD_BYTES:] = np.frombuffer(word.to_bytes(_WORD_BYTES, "little"), np.uint8)


def _word(message: Array) -> int:
    return int.from_bytes(message[-_WORD_BYTES:].tobytes(), "little")


# Copies wanted elements from verified blocks into destination arrays.


@dataclass(frozen=True, slots=True)
class _Place:
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
