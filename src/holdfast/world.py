"""Connects the ranks of this run: reduces their words, with deadlines that name missing ranks.

Ranks communicate in a tree of their own, not through collectives: a collective that one rank never
enters hangs the others without a message. Ranks of a host speak to its first, hosts to a root. The
process group's store tells them once where to find each other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import msgspec
import torch.distributed as dist

from holdfast import errors
from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.transport.rank_channels import RankAddress, RankChannels
from holdfast.transport.wire.rank_phases import Join, Word
from holdfast.transport.wire.rank_tree import (
    FAN_OUT,
    Place,
    Said,
    all_said,
    join_said,
    places_of,
    ranks_in,
    said_by,
)

#: Default timeout for ranks that wait for each other in a call of Holdfast.
MEET_S = 600.0
MEETING = "the call of Holdfast"
ADDRESS = "HOLDFAST_HOST_ADDRESS"
LOOPBACK = "127.0.0.1"


class World(Protocol):
    """The ranks of a run, and the exchange of small messages between them."""

    rank: int
    size: int
    nonce: str
    address: str
    """By which the other ranks reach this process."""

    def reduce(self, phase: str, mine: bytes, join: Join, *, timeout_s: float) -> bytes:
        """Return the words of all ranks, joined, on every rank.

        No rank returns before all have spoken. DeadlineExceeded names the missing ranks, and the
        phase.
        """
        ...

    def leave(self, phase: str, mine: bytes) -> None:
        """Say the last word of a rank that waits for nobody: the others hear no more of it."""
        ...

    def close(self) -> None:
        """End the exchange. Without effect the second time."""
        ...


class SoloWorld:
    """The world of one process."""

    rank, size, address = 0, 1, LOOPBACK

    def __init__(self) -> None:
        self.nonce = uuid.uuid4().hex

    def reduce(self, phase: str, mine: bytes, join: Join, *, timeout_s: float) -> bytes:
        """Return the word itself."""
        return mine

    def leave(self, phase: str, mine: bytes) -> None:
        """Nobody is there to hear it."""

    def close(self) -> None:
        """Nothing is open."""


class TorchWorld:
    """The ranks of torch.distributed's default process group, connected within ``timeout_s``.

    ``fan_out``: the most hosts that speak to one.
    """

    def __init__(self, *, timeout_s: float = MEET_S, fan_out: int = FAN_OUT) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = _StoreKeys(dist.distributed_c10d._get_default_store())
        self._count = 0
        self._entered = 0
        """The phase in which this rank is; 0 between two."""
        self._before = MEETING
        self._channels = RankChannels(self.rank)
        self._end = weakref.finalize(self, self._channels.close)
        try:
            self.nonce = self._meet(_Deadline(timeout_s), fan_out)
        except BaseException:
            self._end()
            raise

    def _meet(self, deadline: _Deadline, fan_out: int) -> str:
        """Returns a name for this meeting of just these processes, chosen by rank 0, once this rank
        has its place in their tree.

        The store may be the launcher's and outlive a round of workers, with the keys of the dead
        round still in it. So rank 0 counts answers to its fresh call only. One that answers an
        older call is told, under that call, to read again. A broadcast would do it too, but hangs
        without a message where one rank does not come.
        """
        return self._call(deadline, fan_out) if self.rank == 0 else self._answer(deadline)

    def _listen(self, call: str) -> bytes:
        """Returns where this rank listens for those that know the call."""
        self.address = host = address_of_this_host(self.size, self._store.host) or LOOPBACK
        try:
            port = self._channels.listen(call.encode(), host)
        except OSError as error:
            raise UsageError(
                f"rank {self.rank} cannot listen at {host}, by which it would be reached: "
                f"{error.strerror}. Set {ADDRESS} on its host to an address of that host itself."
            ) from error
        return msgspec.msgpack.encode((host_id(), RankAddress(self.rank, host, port)))

    def _call(self, deadline: _Deadline, fan_out: int) -> str:
        """On rank 0: calls the others, waits for all their answers, and tells each its place."""
        call, others = uuid.uuid4().hex, range(1, self.size)
        own = self._listen(call)
        older = self._store.find("call")
        self._store.put({"call": call.encode()})
        if older:
            self._store.put({f"{older.decode()}/place/{rank}": b"" for rank in others})
        answers = [f"{call}/met/{rank}" for rank in others]
        if not self._store.wait_for(answers, deadline):
            raise _absent(self.rank, self._silent(call), MEETING, deadline.timeout_s)
        said = [
            msgspec.msgpack.decode(each, type=tuple[str, RankAddress])
            for each in (own, *self._store.take(answers))
        ]
        places = places_of([host for host, _ in said], fan_out)
        self._store.remove("call")
        told = [(place, [said[rank][1] for rank in place.above]) for place in places]
        self._store.put({f"{call}/place/{n}": msgspec.msgpack.encode(told[n]) for n in others})
        self._channels.enter(call.encode(), *told[0])
        return call

    def _answer(self, deadline: _Deadline) -> str:
        """On the other ranks: answers a call, and every later one, until one gives it its place."""
        call, place = "", b""
        while not place:
            if not self._store.wait_for(["call"], deadline):
                raise _absent(self.rank, [0], MEETING, deadline.timeout_s)
            call = self._store.take(["call"])[0].decode()
            mine = f"{call}/met/{self.rank}", f"{call}/place/{self.rank}"
            self._store.put({mine[0]: self._listen(call)})
            if not self._store.wait_for(mine[1:], deadline):
                raise _absent(self.rank, self._silent(call) or [0], MEETING, deadline.timeout_s)
            place = self._store.take(mine[1:])[0]
            self._store.remove(*mine)
        told = msgspec.msgpack.decode(place, type=tuple[Place, list[RankAddress]])
        self._channels.enter(call.encode(), *told)
        return call

    def _silent(self, call: str) -> list[int]:
        """The ranks that have not answered this call."""
        answers = {f"{call}/met/{rank}": rank for rank in range(1, self.size)}
        return [answers[key] for key in self._store.missing(list(answers))]

    def reduce(self, phase: str, mine: bytes, join: Join, *, timeout_s: float) -> bytes:
        """See ``World``. Raises UsageError when a rank is at another phase."""
        self._entered = self._count + 1
        said = Word(self.rank, phase, mine)
        word = self._channels.reduce(self._entered, said, join, timeout_s)
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

    def close(self) -> None:
        """See ``World``."""
        self._end()


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

    @property
    def host(self) -> str:
        """The host that has the store; "" where no host has it."""
        store = self._store
        while (below := getattr(store, "underlying_store", None)) is not None:
            store = below
        return str(getattr(store, "host", ""))

    def put(self, values: Mapping[str, bytes]) -> None:
        with _reaching_the_store():
            self._store.multi_set([f"holdfast/{key}" for key in values], list(values.values()))

    def find(self, key: str) -> bytes | None:
        """Returns the value under ``key``, or None when there is none yet."""
        with _reaching_the_store():
            return self.take([key])[0] if self._store.check([f"holdfast/{key}"]) else None

    def wait_for(self, keys: Sequence[str], deadline: _Deadline) -> bool:
        """Waits for values under all these keys; False if there are not by the deadline.

        On a thread that gets no signals: the store's own wait begins anew after each signal, and
        lets no handler run before its end.
        """
        names, ended, failed = [f"holdfast/{key}" for key in keys], threading.Event(), []

        def wait() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._waiting.wait(names, timedelta(seconds=max(deadline.left_s, 0.001)))
            except RuntimeError as error:
                failed.append(error)
            finally:
                ended.set()

        threading.Thread(target=wait, name="holdfast-meet", daemon=True).start()
        if not ended.wait(max(deadline.left_s, 0) + _STORE_S):
            raise _lost_store(RuntimeError("no answer"))
        if not failed:
            return True
        if deadline.left_s > _TIMING_S:
            raise _lost_store(failed[0]) from failed[0]
        with _reaching_the_store():
            return bool(self._store.check(names))

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
#: The store answers in this time that a wait is over.
_STORE_S = 30.0


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
    rank: int, ranks: list[int], phase: str, timeout_s: float, seen: str = ""
) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"ranks {ranks} did not reach {phase!r} within {timeout_s:g} s{seen}; rank {rank} gave up "
        "waiting for them. See in their logs whether they ended, hang, or are only slower than "
        "timeout_s.",
        ranks=ranks,
        phase=phase,
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
    return _absent(word.rank, ranks, phase, timeout_s, seen + why)


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


def address_of_this_host(ranks: int, store: str = "") -> str:
    """Returns the address by which other hosts of this run reach this one; "" when unknown.

    HOLDFAST_HOST_ADDRESS, or the one that the host of the process group's store sees. No name is
    looked up, which may take long, where nobody else needs to reach this host.
    """
    if address := os.environ.get(ADDRESS, "").strip():
        return address
    if ranks == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(ranks):
        return ""
    store = os.environ.get("MASTER_ADDR", "") or store
    if not store:
        return ""
    try:
        found = socket.getaddrinfo(store, 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, there = found[0]
        with socket.socket(family, kind) as asking:
            asking.connect(there)  # of a datagram socket: nothing is sent
            return str(asking.getsockname()[0])
    except (OSError, UnicodeError):  # no such name, or none that could be one
        return ""


class _Outcome(msgspec.Struct, array_like=True):
    rank: int
    kind: str  # "" when all is well, else an error's class name
    text: str
    payload: bytes
    fields: dict[str, Any] = {}


def reduce_or_raise(
    world: World, phase: str, act: Callable[[], bytes], join: Join, *, timeout_s: float
) -> bytes:
    """Runs ``act`` on every rank and gives all its results, joined, to all, or one error to all.

    Without the verdict, one rank's error would leave the others waiting for a message it never
    sends. Of several errors all ranks raise the one of the lowest rank: their next action depends
    on its kind.
    """
    cause: Exception | None = None
    try:
        try:
            mine = _Outcome(world.rank, "", "", act())
        except Exception as error:  # whatever it is, the others must not wait for this rank
            cause, mine = error, _outcome_of(world.rank, error)
        word = world.reduce(
            phase, _packed(mine), partial(_join_outcomes, join), timeout_s=timeout_s
        )
    except HoldfastError:
        raise
    except BaseException as error:  # Ctrl-C: this rank goes at once, the others hear of it
        with contextlib.suppress(HoldfastError):
            world.leave(phase, _packed(_outcome_of(world.rank, error)))
        raise
    outcome = _unpacked(word)
    if outcome.kind and outcome.rank == world.rank and cause is not None:
        raise cause
    if outcome.kind:
        raise _error_of(outcome) from cause
    return outcome.payload


def _outcome_of(rank: int, error: BaseException) -> _Outcome:
    fields = error.told_fields if isinstance(error, HoldfastError) else {}
    return _Outcome(rank, type(error).__name__, str(error), b"", fields)


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
