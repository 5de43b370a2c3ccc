"""Read this rank's share, pass it on, and fill what is wanted from it and from what others read.

While one turn travels, the next is read. No byte is used before its block has the checksum that
the checkpoint has of it: not on the rank that read it, and not on one that received it. A rank that
cannot read says so in its next message, with the same number of bytes as ever, so nobody waits
for what does not come; who hears of it, or hears nothing, takes nothing more from anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from holdfast.format.checksum import BLOCK_BYTES, blocks, checksum
from holdfast.load.landing import Landing
from holdfast.load.read import READERS, Array, read_verified
from holdfast.load.sharing import Ranks, Run, Turn
from holdfast.load.source import Checkpoint
from holdfast.storage.past_cache import aligned_memory

#: What a rank reads at once.
_READ_BLOCKS = 4
#: Every message ends in one word: whether its sender's bytes are what it was to read.
_WORD_BYTES = 8
_GOOD, _BAD = 0x9C1E_5A77_03D2_B48F, 0x4B60_E8F1_97AC_2D35


class ExchangeBroke(Exception):
    """Bytes did not get from rank to rank; what is stored may be sound. Never leaves ``load``."""


class OtherFailed(ExchangeBroke):
    """Another rank could not go on, and says why itself."""


class RankLost(ExchangeBroke):
    """A rank has ended, cannot be reached, or sends nothing."""


class Pending(Protocol):
    """A message under way."""

    def wait(self, timeout_s: float) -> None:
        """Until its memory may be used again. RankLost when it did not get through."""
        ...


class Wire(Protocol):
    """Messages between ranks. Two ranks send and receive theirs in the same order."""

    def send(self, rank: int, message: Array) -> Pending:
        """Begin to send these bytes to ``rank``; they are not changed until it is done."""
        ...

    def receive(self, rank: int, message: Array) -> Pending:
        """Begin to fill ``message`` with the next bytes that ``rank`` sends, as many as it has."""
        ...

    def close(self) -> None:
        """End all connections: who still waits for a message hears of it."""
        ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank read from storage, and what it had from other ranks instead."""

    read_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class _Share:
    """This rank's part of a turn, being read: the message it will be, if it has one."""

    message: Array
    reading: Sequence[Future[None]]


class Exchange:
    """The turns of one rank."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        turns: Sequence[Turn],
        landing: Landing,
        rank: int,
        *,
        timeout_s: float,
    ) -> None:
        self._checkpoint, self._turns, self._landing = checkpoint, turns, landing
        self._rank, self._timeout_s = rank, timeout_s
        self._error: Exception | None = None  # of this rank's own reading
        self._broke: ExchangeBroke | None = None
        self._left: Ranks = ()  # whose further turns nobody takes
        self._read_bytes = self._received_bytes = 0

    def run(self, wire: Wire) -> Traffic:
        """Take every turn. Raises what reading raised, ExchangeBroke when not all has come."""
        own = max((self._size(turn.share_of(self._rank)) for turn in self._turns), default=0)
        room = max((self._others_size(turn) for turn in self._turns), default=0)
        inbox: Array = np.empty(room, np.uint8)
        outboxes: list[Array] = [
            np.frombuffer(aligned_memory(own + _WORD_BYTES), np.uint8) for _ in range(2)
        ]
        with ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-read") as pool:
            share: _Share | None = None
            for number, turn in enumerate(self._turns):
                if turn.ranks == self._left:
                    share = None
                    continue
                share = share or self._begin(turn, outboxes[number % 2], pool)
                ahead = None
                if number + 1 < len(self._turns) and not self._has_failed:
                    ahead = self._begin(self._turns[number + 1], outboxes[1 - number % 2], pool)
                self._take(turn, share, inbox, wire)
                share = ahead
        if self._error is not None:
            raise self._error
        if self._landing.missing and not self._broke:
            self._broke = ExchangeBroke(f"rank {self._rank} lacks {self._landing.missing} elements")
        if self._broke:
            raise self._broke
        return Traffic(self._read_bytes, self._received_bytes)

    @property
    def _has_failed(self) -> bool:
        return self._error is not None or self._broke is not None

    def _size(self, share: Sequence[Run]) -> int:
        return sum(stop - start for start, stop in (self._span(run) for run in share))

    def _span(self, run: Run) -> tuple[int, int]:
        """Where the run's bytes are in the data of its image: the last block may be short."""
        end = self._checkpoint.header(run.image).table.offset
        return run.first * BLOCK_BYTES, min(run.stop * BLOCK_BYTES, end)

    def _others_size(self, turn: Turn) -> int:
        shares = zip(turn.ranks, turn.shares, strict=True)
        return sum(self._size(s) + _WORD_BYTES for r, s in shares if s and r != self._rank)

    def _begin(self, turn: Turn, outbox: Array, pool: ThreadPoolExecutor) -> _Share:
        """Begin to read this rank's share of a turn."""
        share = turn.share_of(self._rank)
        message = outbox[: self._size(share) + _WORD_BYTES] if share else outbox[:0]
        reading: list[Future[None]] = []
        at = 0
        for run in () if self._has_failed else share:
            for first in range(run.first, run.stop, _READ_BLOCKS):
                some = Run(run.image, first, min(first + _READ_BLOCKS, run.stop))
                size = self._size([some])
                reading.append(pool.submit(self._read, some, message[at : at + size]))
                at += size
        return _Share(message, reading)

    def _read(self, run: Run, room: Array) -> None:
        read_verified(self._checkpoint, run.image, run.first, run.stop, room.data)

    def _take(self, turn: Turn, share: _Share, inbox: Array, wire: Wire) -> None:
        """One turn: send what was read, use what comes. When one of them failed all leave it."""
        others = [rank for rank in turn.ranks if rank != self._rank]
        coming = []
        at = 0
        for rank in others:
            runs = turn.share_of(rank)
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
                self._land(turn.share_of(self._rank), share.message)
        for rank, runs, message, pending in coming:
            self._wait(pending, rank)
            if _word(message) == _BAD:
                is_bad = True
                self._broke = self._broke or OtherFailed(f"rank {rank} could not go on")
            elif not self._has_failed and self._is_sound(rank, runs, message):
                self._received_bytes += len(message) - _WORD_BYTES
                self._land(runs, message)
        for rank, pending in going:
            self._wait(pending, rank)
        if is_bad:
            self._left = turn.ranks

    def _finish(self, share: _Share) -> bool:
        """Wait until the share is read; whether it may be used, here and by others."""
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

    def _is_sound(self, rank: int, runs: Sequence[Run], message: Array) -> bool:
        if _word(message) != _GOOD:  # and not bad either: its sender goes on
            self._broke = ExchangeBroke(
                f"a message was changed on its way from rank {rank} to rank {self._rank}"
            )
            return False
        at, sent = 0, message.data
        for run in runs:
            table, (begin, end) = self._checkpoint.table(run.image), self._span(run)
            for number, start, stop in blocks(run.first, run.stop, end):
                found = checksum(sent[at + start - begin : at + stop - begin])
                if found != table[number]:
                    name = self._checkpoint.files[run.image].name
                    self._broke = ExchangeBroke(
                        f"block {number} of {name} was changed on its way from rank {rank} to "
                        f"rank {self._rank}"
                    )
                    return False
            at += end - begin
        return True

    def _land(self, runs: Sequence[Run], message: Array) -> None:
        at = 0
        for run in runs:
            begin, end = self._span(run)
            self._landing.land(
                run.image, range(run.first, run.stop), begin, message[at : at + end - begin]
            )
            at += end - begin


def _set_word(message: Array, word: int) -> None:
    message[-_WORD_BYTES:] = np.frombuffer(word.to_bytes(_WORD_BYTES, "little"), np.uint8)


def _word(message: Array) -> int:
    return int.from_bytes(message[-_WORD_BYTES:].tobytes(), "little")
