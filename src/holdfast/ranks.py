"""Exchanges words between the ranks that met, with deadlines that name a rank that is missing.

Ranks communicate in a tree of their own, not through collectives: a collective that one rank never
enters hangs the others without a message. Ranks of a host speak to its first, hosts to a root. A
store of keys, whichever it is, tells them once where to find each other.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from holdfast import errors
from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.geometry.rank_ranges import ranks_in
from holdfast.meeting import LOOPBACK, MEETING, RankMeeting, absent
from holdfast.transport.rank_channels import RankChannels
from holdfast.transport.wire.rank_tree import (
    FAN_OUT,
    Join,
    Said,
    Word,
    all_said,
    join_said,
    said_by,
    with_column,
)

#: Default timeout for ranks that wait for each other in a call of Holdfast.
MEET_S = 600.0
#: Makes the word that all ranks get of what all said, on rank 0; see ``World.reduce``.
Conclude = Callable[[bytes], bytes]


class World:
    """The ranks of a run, and the exchange of small messages between them: by itself, one process.

    ``address``: by which the other ranks reach this process.
    """

    rank, size, address = 0, 1, LOOPBACK

    def __init__(self) -> None:
        self.nonce = uuid.uuid4().hex

    def reduce(
        self,
        phase: str,
        mine: bytes,
        join: Join,
        *,
        timeout_s: float,
        conclude: Conclude | None = None,
    ) -> bytes:
        """Return the words of all ranks, joined, on every rank.

        No rank returns before all have spoken. ``conclude``: rank 0 makes of the joined word the
        one that all get. DeadlineExceeded names the missing ranks, and the phase.
        """
        return mine if conclude is None else conclude(mine)

    def leave(self, phase: str, mine: bytes) -> None:
        """Say the last word of a rank that waits for nobody: the others hear no more of it."""

    def ended(self) -> list[int]:
        """Return the ranks that this one is connected with and that have ended."""
        return []

    def end(self) -> None:
        """End the exchange, and wait for nothing. Without effect the second time."""

    def close(self) -> None:
        """End the exchange, and wait until what was said is sent."""


class ConnectedWorld(World):
    """Ranks that meet through ``store``, whose keys are those of torch's stores, within
    ``timeout_s``.

    ``fan_out``: the most hosts that speak to one.
    """

    def __init__(
        self, rank: int, size: int, store: Any, *, timeout_s: float = MEET_S, fan_out: int = FAN_OUT
    ) -> None:
        self.rank, self.size = rank, size
        self._count = 0
        self._entered = 0
        """The phase in which this rank is; 0 between two."""
        self._before = MEETING
        self._channels = RankChannels(self.rank)
        self._turn = threading.Lock()
        weakref.finalize(self, self._channels.end).atexit = False
        try:
            meeting = RankMeeting(self.rank, self.size, self._channels, store)
            self.nonce = meeting.meet(timeout_s, fan_out)
            self.address = meeting.address
        except BaseException:
            self._channels.end()
            raise

    def reduce(
        self,
        phase: str,
        mine: bytes,
        join: Join,
        *,
        timeout_s: float,
        conclude: Conclude | None = None,
    ) -> bytes:
        """See ``World``. Raises UsageError when a rank is at another phase."""
        if not self._turn.acquire(blocking=False):
            raise UsageError(
                f"{phase!r} was called while another call of Holdfast waits for the other ranks: "
                "one thread at a time may call what all ranks call, and no signal handler"
            )
        try:
            self._entered = self._count + 1
            said = Word(self.rank, phase, mine)
            word = self._channels.reduce(self._entered, said, join, timeout_s, conclude)
        except HoldfastError:
            self._count, self._entered = self._entered, 0
            raise
        finally:
            self._turn.release()
        self._count, self._entered = self._entered, 0
        if word.apart:
            raise _apart(*word.apart)
        if word.missing:
            raise _absent_in(word, phase, timeout_s, self._before)
        if word.why:
            raise HoldfastError(word.why)
        self._before = phase
        return word.payload

    def leave(self, phase: str, mine: bytes) -> None:
        """See ``World``."""
        self._count = self._entered or self._count + 1
        self._entered = 0
        self._channels.leave(self._count, Word(self.rank, phase, mine))

    def ended(self) -> list[int]:
        """See ``World``."""
        return self._channels.ended()

    def end(self) -> None:
        """See ``World``."""
        self._channels.end()

    def close(self) -> None:
        """See ``World``."""
        self._channels.close()


def _apart(rank: int, phase: str, other: int, its_phase: str) -> UsageError:
    return UsageError(
        f"the ranks do different things: rank {rank} is at {phase!r}, rank {other} at "
        f"{its_phase!r}. All ranks make the same calls of Holdfast, in the same order."
    )


def _absent_in(word: Word, phase: str, timeout_s: float, before: str) -> DeadlineExceeded:
    ranks, ended = ranks_in(word.missing), set(ranks_in(word.ended))
    seen = f" (last seen at {before!r})"
    if ended.issuperset(ranks):
        return DeadlineExceeded(
            f"ranks {ranks} ended before they reached {phase!r}{seen}: their processes are gone, "
            "or no line to them can be opened. See in their logs why.",
            ranks=ranks,
            phase=phase,
        )
    why = f"; {word.why}" if word.why else ""
    return absent(word.rank, ranks, phase, timeout_s, seen + why)


class _Outcome(msgspec.Struct, array_like=True):
    rank: int
    kind: str  # "" when all is well, else an error's class name
    text: str
    payload: bytes
    fields: dict[str, Any] = {}


def reduce_or_raise(
    world: World,
    phase: str,
    act: Callable[[], bytes],
    join: Join,
    *,
    timeout_s: float,
    conclude: Conclude | None = None,
) -> bytes:
    """Runs ``act`` on every rank and gives all its results, joined, to all, or one error to all.

    ``conclude``: rank 0 makes of the joined results what all get, once every rank is well; the
    others wait ``timeout_s`` for it. Its error is raised on all.

    Without the verdict, one rank's error would leave the others waiting for a message it never
    sends. Of several errors all ranks raise the one of the lowest rank: their next action depends
    on its kind.
    """
    cause: Exception | None = None
    word: bytes | None = None

    def finish(word: bytes) -> bytes:
        nonlocal cause
        outcome = _unpacked(word)
        if outcome.kind or conclude is None:
            return word
        try:
            return _packed(_Outcome(world.rank, "", "", conclude(outcome.payload)))
        except Exception as error:
            cause = error
            return _packed(_outcome_of(world.rank, error))

    try:
        try:
            mine = _Outcome(world.rank, "", "", act())
        except Exception as error:  # whatever it is, the others must not wait for this rank
            cause, mine = error, _outcome_of(world.rank, error)
        word = world.reduce(
            phase,
            _packed(mine),
            partial(_join_outcomes, join),
            timeout_s=timeout_s,
            conclude=None if conclude is None else finish,
        )
    except HoldfastError:
        raise
    except BaseException as error:  # Ctrl-C: this rank goes at once, the others hear of it
        if word is None:
            with contextlib.suppress(HoldfastError):
                world.leave(phase, _packed(_outcome_of(world.rank, error)))
        raise
    try:
        outcome = _unpacked(word)
        if outcome.kind and outcome.rank == world.rank and cause is not None:
            raise cause
        if outcome.kind:
            raise _error_of(outcome) from cause
        return outcome.payload
    finally:
        cause = None  # its traceback holds this frame, and with it the world


def _outcome_of(rank: int, error: BaseException) -> _Outcome:
    fields = error.told_fields if isinstance(error, HoldfastError) else {}
    return _Outcome(rank, type(error).__name__, str(error), b"", fields)


def outcome_of(rank: int, act: Callable[[], object]) -> bytes:
    """Runs ``act`` on this rank; returns how it went, for ``raise_outcome`` on all ranks."""
    try:
        act()
    except Exception as error:
        return _packed(_outcome_of(rank, error))
    return b""


def raise_outcome(rank: int, word: bytes) -> None:
    """Raises the error of the rank that ``word`` is of, if there was one."""
    if word:
        raise _error_of(_unpacked(word), is_own=_unpacked(word).rank == rank)


def _join_outcomes(join: Join, one: bytes, other: bytes) -> bytes:
    """Joins the results of ranks; of errors the one of the lowest rank stays."""
    first, second = sorted((_unpacked(one), _unpacked(other)), key=lambda each: each.rank)
    for outcome in (first, second):
        if outcome.kind:
            return _packed(outcome)
    return _packed(_Outcome(first.rank, "", "", join(first.payload, second.payload)))


def _packed(outcome: _Outcome) -> bytes:
    return msgspec.msgpack.encode(outcome)


def _unpacked(word: bytes) -> _Outcome:
    return msgspec.msgpack.decode(word, type=_Outcome)


def _error_of(outcome: _Outcome, *, is_own: bool = False) -> HoldfastError:
    is_ours = hasattr(errors, outcome.kind)
    text = outcome.text if is_ours else f"{outcome.kind}: {outcome.text}"
    text = text if is_own else f"rank {outcome.rank}: {text}"
    return errors.error_of(outcome.kind, text, outcome.fields)


def from_rank0(world: World, phase: str, act: Callable[[], bytes], *, timeout_s: float) -> bytes:
    """Runs ``act`` on rank 0 only and gives its result, or its error, to every rank."""
    return reduce_or_raise(
        world, phase, act if world.rank == 0 else bytes, max, timeout_s=timeout_s
    )


def all_said_or_raise(
    world: World,
    phase: str,
    act: Callable[[], Sequence[bytes]],
    *,
    timeout_s: float,
    conclude: Callable[[list[list[Said]]], bytes] | None = None,
) -> list[list[Said]]:
    """Runs ``act`` on every rank and gives all its different values to all, with who said them.

    A column for each of the values that ``act`` returns, in the order of their lowest ranks.
    ``conclude``: what it returns on rank 0 for these columns is the last one.
    """

    def finish(word: bytes) -> bytes:
        assert conclude is not None
        return with_column(word, Said(conclude(all_said(word)), [(0, 1)]))

    return all_said(
        reduce_or_raise(
            world,
            phase,
            lambda: said_by(world.rank, act()),
            join_said,
            timeout_s=timeout_s,
            conclude=None if conclude is None else finish,
        )
    )
