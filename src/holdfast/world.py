"""Connects the ranks of this run: reduces their words, with deadlines that name missing ranks.

Ranks communicate in a tree of their own, not through collectives: a collective that one rank never
enters hangs the others without a message. Ranks of a host speak to its first, hosts to a root.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import msgspec
import torch.distributed as dist

from holdfast import errors
from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.transport.wire.rank_tree import (
    FAN_OUT,
    Place,
    Range,
    Said,
    all_said,
    in_ranges,
    join_said,
    places_of,
    ranks_in,
    said_by,
    union,
)

#: Default timeout for ranks that wait for each other in a call of Holdfast.
MEET_S = 600.0
MEETING = "the call of Holdfast"
#: Seconds for which a rank waits, after its deadline, for what those below it know of the missing.
_GRACE_S = 1.0

#: Joins two words of a phase into one. Associative and commutative: words meet in any order.
Join = Callable[[bytes, bytes], bytes]
#: On rank 0: makes of all words, joined, what every rank is told.
Conclude = Callable[[bytes], bytes]


class World(Protocol):
    """The ranks of a run, and the exchange of small messages between them."""

    rank: int
    size: int
    nonce: str

    def reduce(
        self,
        phase: str,
        mine: bytes,
        join: Join,
        *,
        timeout_s: float,
        conclude: Conclude | None = None,
    ) -> bytes:
        """Return the words of all ranks, joined, on every rank; ``conclude`` of them, if given.

        No rank returns before all have spoken. ``conclude`` runs on rank 0 and raises nothing; its
        time counts against another ``timeout_s``. DeadlineExceeded names the missing ranks, and
        the phase.
        """
        ...

    def leave(self, phase: str, mine: bytes) -> None:
        """Say the last word of a rank that waits for nobody: the others hear no more of it."""
        ...


class SoloWorld:
    """The world of one process."""

    rank, size = 0, 1

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
        """Return the word itself."""
        return mine if conclude is None else conclude(mine)

    def leave(self, phase: str, mine: bytes) -> None:
        """Nobody is there to hear it."""


class TorchWorld:
    """The ranks of torch.distributed's default process group, connected within ``timeout_s``.

    ``fan_out``: the most hosts that speak to one.
    """

    def __init__(self, *, timeout_s: float = MEET_S, fan_out: int = FAN_OUT) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = _StoreKeys(dist.distributed_c10d._get_default_store())
        self._count = 0
        self._before = MEETING
        self.nonce, self._place = self._meet(timeout_s, fan_out)

    def _meet(self, timeout_s: float, fan_out: int) -> tuple[str, Place]:
        """Returns a name for this meeting of just these processes, chosen by rank 0, and the place
        of this rank in its tree.

        The store may be the launcher's and outlive a round of workers, with the keys of the dead
        round still in it. So rank 0 counts answers to its fresh call only. One that answers an
        older call is told, under that call, to read again. A broadcast would do it too, but hangs
        without a message where one rank does not come.
        """
        deadline = _Deadline(timeout_s)
        if self.rank == 0:
            return self._call(deadline, fan_out)
        return self._answer(deadline)

    def _call(self, deadline: _Deadline, fan_out: int) -> tuple[str, Place]:
        """On rank 0: calls the others, waits for all their answers, and tells each its place."""
        call, others = uuid.uuid4().hex, range(1, self.size)
        older = self._store.find("call")
        self._store.put({"call": call.encode()})
        if older:
            self._store.put({f"{older.decode()}/place/{rank}": b"" for rank in others})
        answers = [f"{call}/met/{rank}" for rank in others]
        if not self._store.wait_for(answers, deadline):
            raise _absent(self, self._silent(call), MEETING, deadline.timeout_s)
        hosts = [host_id(), *(said.decode() for said in self._store.take(answers))]
        places = places_of(hosts, fan_out)
        self._store.put({f"{call}/place/{n}": msgspec.msgpack.encode(places[n]) for n in others})
        self._store.remove("call")
        return call, places[0]

    def _answer(self, deadline: _Deadline) -> tuple[str, Place]:
        """On the other ranks: answers a call, and every later one, until one gives it its place."""
        call, place = "", b""
        while not place:
            if not self._store.wait_for(["call"], deadline):
                raise _absent(self, [0], MEETING, deadline.timeout_s)
            call = self._store.take(["call"])[0].decode()
            mine = f"{call}/met/{self.rank}", f"{call}/place/{self.rank}"
            self._store.put({mine[0]: host_id().encode()})
            if not self._store.wait_for(mine[1:], deadline):
                raise _absent(self, self._silent(call) or [0], MEETING, deadline.timeout_s)
            place = self._store.take(mine[1:])[0]
            self._store.remove(*mine)
        return call, msgspec.msgpack.decode(place, type=Place)

    def _silent(self, call: str) -> list[int]:
        """The ranks that have not answered this call."""
        answers = {f"{call}/met/{rank}": rank for rank in range(1, self.size)}
        return [answers[key] for key in self._store.missing(list(answers))]

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
        self._count += 1
        here = f"{self.nonce}/{self._count}"
        word = self._hear(here, _Word(self.rank, phase, mine), join, timeout_s)
        if self._place.above:
            self._store.put({f"{here}/up/{self.rank}": msgspec.msgpack.encode(word)})
            word = self._verdict(here, phase, timeout_s * (1 if conclude is None else 2))
        elif conclude is not None and word.is_well:
            word.payload = conclude(word.payload)
        if self._place.children:
            self._store.put({f"{here}/down/{self.rank}": msgspec.msgpack.encode(word)})
        if word.apart:
            raise _apart(*word.apart)
        if word.missing:
            missing = ranks_in(word.missing)
            raise _absent(self, missing, phase, timeout_s, self._before, gave_up=word.rank)
        self._before = phase
        return word.payload

    def leave(self, phase: str, mine: bytes) -> None:
        """See ``World``."""
        self._count += 1
        here, word = f"{self.nonce}/{self._count}", _Word(self.rank, phase, mine)
        said = msgspec.msgpack.encode(word)
        self._store.put({f"{here}/{way}/{self.rank}": said for way in ("up", "down")})

    def _hear(self, here: str, word: _Word, join: Join, timeout_s: float) -> _Word:
        """Returns the words of this rank and of all below it, as one."""
        children = self._place.children
        if not children:
            return word
        keys = {f"{here}/up/{child}": child for child in children}
        deadline = _Deadline(timeout_s + _GRACE_S * (self._place.height - 1))
        silent: list[str] = []
        if not self._store.wait_for(list(keys), deadline):
            silent = self._store.missing(list(keys))
        spoken = [key for key in keys if key not in silent]
        for said in self._store.take(spoken):
            word = word.joined(msgspec.msgpack.decode(said, type=_Word), join)
        word.missing = union([*word.missing, *in_ranges(keys[key] for key in silent)])
        before = f"{self.nonce}/{self._count - 1}/down/{self.rank}"
        self._store.remove(*spoken, *(() if silent or self._count == 1 else (before,)))
        return word

    def _verdict(self, here: str, phase: str, timeout_s: float) -> _Word:
        """Returns what the parent of this rank says of all ranks."""
        parent = self._place.above[0]
        key = [f"{here}/down/{parent}"]
        if not self._store.wait_for(key, _Deadline(timeout_s + 2 * _GRACE_S * _MOST_LEVELS)):
            return _Word(self.rank, phase, b"", missing=[(parent, parent + 1)])
        return msgspec.msgpack.decode(self._store.take(key)[0], type=_Word)


#: Of a tree of hosts with any number of ranks.
_MOST_LEVELS = 4


class _Word(msgspec.Struct, array_like=True):
    """What a rank says for itself and all below it."""

    rank: int
    phase: str
    payload: bytes
    apart: tuple[int, str, int, str] | None = None
    """Two ranks at different phases, and these."""
    missing: list[Range] = []

    @property
    def is_well(self) -> bool:
        return not self.missing and self.apart is None

    def joined(self, other: _Word, join: Join) -> _Word:
        apart = self.apart or other.apart
        if self.phase != other.phase:
            apart = self.rank, self.phase, other.rank, other.phase
        missing = union([*self.missing, *other.missing])
        is_whole = not missing and apart is None
        payload = join(self.payload, other.payload) if is_whole else b""
        return _Word(self.rank, self.phase, payload, apart, missing)


def _apart(rank: int, phase: str, other: int, its_phase: str) -> UsageError:
    return UsageError(
        f"the ranks do different things: rank {rank} is at {phase!r}, rank {other} at "
        f"{its_phase!r}. All ranks make the same calls of Holdfast, in the same order."
    )


class _StoreKeys:
    """The keys of Holdfast in the store of the process group.

    A client of its own waits there: one that threads of torch share would keep them waiting.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._waiting = store, store.clone()

    def put(self, values: Mapping[str, bytes]) -> None:
        with _reaching_the_store():
            self._store.multi_set([f"holdfast/{key}" for key in values], list(values.values()))

    def find(self, key: str) -> bytes | None:
        """Returns the value under ``key``, or None when there is none yet."""
        with _reaching_the_store():
            return self.take([key])[0] if self._store.check([f"holdfast/{key}"]) else None

    def wait_for(self, keys: Sequence[str], deadline: _Deadline) -> bool:
        """Waits for values under all these keys; False if there are not by the deadline."""
        names = [f"holdfast/{key}" for key in keys]
        try:
            self._waiting.wait(names, timedelta(seconds=max(deadline.left_s, 0.001)))
        except RuntimeError as error:
            if deadline.left_s > _TIMING_S:
                raise _lost_store(error) from error
            with _reaching_the_store():
                return bool(self._store.check(names))
        return True

    def take(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values under these keys, which are there."""
        with _reaching_the_store():
            values = self._store.multi_get([f"holdfast/{key}" for key in keys]) if keys else []
        return [bytes(value) for value in values]

    def missing(self, keys: list[str]) -> list[str]:
        """Returns the keys without a value; few requests if they are few."""
        with _reaching_the_store():
            if not keys or self._store.check([f"holdfast/{key}" for key in keys]):
                return []
        half = len(keys) // 2
        return keys if not half else [*self.missing(keys[:half]), *self.missing(keys[half:])]

    def remove(self, *keys: str) -> None:
        with _reaching_the_store():
            for key in keys:
                self._store.delete_key(f"holdfast/{key}")


#: A wait of the store may end so much before its time.
_TIMING_S = 0.1


@contextlib.contextmanager
def _reaching_the_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _lost_store(error) from error


def _lost_store(error: RuntimeError) -> HoldfastError:
    return HoldfastError(
        f"the process group's store does not answer ({error}). The process or host that runs "
        "it has ended, and with it this round of training: start the ranks again."
    )


class _Deadline:
    """The end of a wait of ``timeout_s``."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._end_s - time.monotonic()


def _absent(
    world: World,
    ranks: list[int],
    phase: str,
    timeout_s: float,
    before: str = "",
    gave_up: int | None = None,
) -> DeadlineExceeded:
    seen = f" (last seen at {before!r})" if before else ""
    return DeadlineExceeded(
        f"ranks {ranks} did not reach {phase!r} within {timeout_s:g} s{seen}; rank "
        f"{world.rank if gave_up is None else gave_up} gave up waiting for them. See in their logs "
        "whether they ended, hang, or are only slower than timeout_s.",
        ranks=ranks,
        phase=phase,
    )


def current_world(*, timeout_s: float = MEET_S) -> World:
    """Return the process group's ranks, or this process alone when there is no group.

    All ranks call it. DeadlineExceeded names those that did not within ``timeout_s``.
    """
    if dist.is_available() and dist.is_initialized():
        return TorchWorld(timeout_s=timeout_s)
    return SoloWorld()


def refuse_rank_without_group() -> None:
    """Raises UsageError in a process that was started as one of several ranks and has no group.

    It would act as a run of its own, and the ranks would fence each other off.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    has_group = dist.is_available() and dist.is_initialized()
    if not has_group and world.isdecimal() and int(world) > 1 and "RANK" in os.environ:
        raise UsageError(
            f"this process was started as rank {os.environ['RANK']} of {world}, but "
            "torch.distributed is not initialised: call init_process_group() first. For processes "
            "that do not belong together unset WORLD_SIZE."
        )


def host_id() -> str:
    """Returns this host's name for arenas and messages; HOLDFAST_HOST_ID overrides it."""
    name = os.environ.get("HOLDFAST_HOST_ID") or socket.gethostname()
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name)[:64] or "host"


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

    ``conclude``: what rank 0 makes of the joined results, as the result of all. Without the
    verdict, one rank's error would leave the others waiting for a message it never sends. Of
    several errors all ranks raise the one of the lowest rank: their next action depends on its
    kind.
    """
    causes: list[Exception] = []

    def tried(act: Callable[[], bytes]) -> bytes:
        try:
            return _packed(_Outcome(world.rank, "", "", act()))
        except Exception as error:  # whatever it is, the others must not wait for this rank
            causes.append(error)
            fields = error.told_fields if isinstance(error, HoldfastError) else {}
            return _packed(_Outcome(world.rank, type(error).__name__, str(error), b"", fields))

    def concluded(word: bytes) -> bytes:
        outcome = _unpacked(word)
        if conclude is None or outcome.kind:
            return word
        return tried(partial(conclude, outcome.payload))

    try:
        mine = tried(act)
    except BaseException as error:  # Ctrl-C: this rank goes at once, the others hear of it
        with contextlib.suppress(HoldfastError):
            told = _Outcome(world.rank, type(error).__name__, str(error), b"")
            world.leave(phase, _packed(told))
        raise
    word = world.reduce(
        phase,
        mine,
        partial(_join_outcomes, join),
        timeout_s=timeout_s,
        conclude=None if conclude is None else concluded,
    )
    outcome = _unpacked(word)
    if outcome.kind and outcome.rank == world.rank and causes:
        raise causes[-1]
    if outcome.kind:
        raise _error_of(outcome) from (causes[-1] if causes else None)
    return outcome.payload


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


def _error_of(outcome: _Outcome) -> HoldfastError:
    is_ours = hasattr(errors, outcome.kind)
    text = outcome.text if is_ours else f"{outcome.kind}: {outcome.text}"
    return errors.error_of(outcome.kind, f"rank {outcome.rank}: {text}", outcome.fields)


def from_rank0(world: World, phase: str, act: Callable[[], bytes], *, timeout_s: float) -> bytes:
    """Runs ``act`` on rank 0 only and gives its result, or its error, to every rank."""
    return reduce_or_raise(
        world, phase, act if world.rank == 0 else bytes, max, timeout_s=timeout_s
    )


def agree_or_raise(
    world: World, phase: str, act: Callable[[], object], *, timeout_s: float
) -> None:
    """Runs ``act`` on every rank; all return when all are well, or raise one error."""

    def run() -> bytes:
        act()
        return b""

    reduce_or_raise(world, phase, run, max, timeout_s=timeout_s)


def all_said_or_raise(
    world: World, phase: str, act: Callable[[], Sequence[bytes]], *, timeout_s: float
) -> list[list[Said]]:
    """Runs ``act`` on every rank and gives all its different values to all, with who said them.

    A column for each of the values that ``act`` returns, in the order of their lowest ranks.
    """
    return all_said(
        reduce_or_raise(
            world, phase, lambda: said_by(world.rank, act()), join_said, timeout_s=timeout_s
        )
    )
