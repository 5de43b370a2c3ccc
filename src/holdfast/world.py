"""Connects the ranks of this run: gathers small messages, with deadlines that name missing ranks.

Ranks communicate through the process group's own store, not through collectives: a collective that
one rank never enters hangs the others without a message.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import msgspec
import torch.distributed as dist

from holdfast import errors
from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError

#: Default timeout for ranks that wait for each other in a call of Holdfast.
MEET_S = 600.0
MEETING = "the call of Holdfast"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
T = TypeVar("T")


class World(Protocol):
    """The ranks of a run, and the exchange of small messages between them."""

    rank: int
    size: int
    nonce: str

    def gather(self, phase: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Return every rank's payload, by rank. DeadlineExceeded names the missing ranks, and the
        phase.
        """
        ...


class SoloWorld:
    """The world of one process."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.nonce = uuid.uuid4().hex

    def gather(self, phase: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Return the payload itself."""
        return [payload]


class TorchWorld:
    """The ranks of torch.distributed's default process group, connected within ``timeout_s``."""

    def __init__(self, *, timeout_s: float = MEET_S) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = _StoreKeys(dist.distributed_c10d._get_default_store())
        self._count = 0
        self._before = MEETING
        self.nonce = self._meet(timeout_s)

    def _meet(self, timeout_s: float) -> str:
        """Returns a name for this meeting of just these processes, chosen by rank 0.

        The store may be the launcher's and outlive a round of workers, with the keys of the dead
        round still in it. So rank 0 counts answers to its fresh call only, and the others accept a
        call only when rank 0 confirms that it received this very process's answer. A broadcast
        would do it too, but hangs without a message where one rank does not come.
        """
        token, deadline = uuid.uuid4().hex, _Deadline(timeout_s)
        if self.rank == 0:
            self._call(token, deadline, timeout_s)
            return token
        return self._answer(token, deadline, timeout_s)

    def _call(self, call: str, deadline: _Deadline, timeout_s: float) -> None:
        """On rank 0: calls the others, waits for all their answers, and publishes whose arrived."""
        self._store.put("call", call.encode())
        heard: dict[int, bytes] = {}
        while len(heard) < self.size - 1:
            for rank in self._silent(heard, range(1, self.size)):
                token = self._store.find(f"{call}/met/{rank}")
                if token is not None:
                    heard[rank] = token
            if deadline.is_over():
                silent = self._silent(heard, range(1, self.size))
                raise _absent(self, silent, MEETING, timeout_s)
            deadline.pause()
        self._store.put(f"{call}/all", b" ".join(heard.values()))

    def _answer(self, token: str, deadline: _Deadline, timeout_s: float) -> str:
        """On the other ranks: answers every call, until one is confirmed to have received this
        rank's answer.
        """
        call = ""
        while True:
            latest = (self._store.find("call") or b"").decode()
            if latest != call:
                call = latest
                self._store.put(f"{call}/met/{self.rank}", token.encode())
            if call and token.encode() in (self._store.find(f"{call}/all") or b""):
                return call
            if deadline.is_over():
                heard = {r for r in range(1, self.size) if self._store.find(f"{call}/met/{r}")}
                silent = self._silent(heard, range(1, self.size)) if call else []
                raise _absent(self, silent or [0], MEETING, timeout_s)
            deadline.pause()

    @staticmethod
    def _silent(heard: Container[int], ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if rank not in heard]

    def gather(self, phase: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """See ``World``. Raises UsageError at once when a rank is at another phase."""
        self._count += 1
        here = f"{self.nonce}/{self._count}"
        self._store.put(f"{here}/{self.rank}", phase.encode() + b"\0" + payload)
        deadline = _Deadline(timeout_s)
        found: dict[int, bytes] = {}
        while True:
            for rank in self._silent(found, range(self.size)):
                said = self._store.find(f"{here}/{rank}")
                if said is not None:
                    found[rank] = self._require_phase(phase, rank, said)
            silent = self._silent(found, range(self.size))
            if not silent:
                self._before = phase
                return [found[rank] for rank in range(self.size)]
            if deadline.is_over():
                raise _absent(self, silent, phase, timeout_s, self._before)
            deadline.pause()

    def _require_phase(self, phase: str, rank: int, said: bytes) -> bytes:
        theirs, _, payload = said.partition(b"\0")
        if theirs.decode() != phase:
            raise UsageError(
                f"the ranks do different things: rank {self.rank} is at {phase!r}, rank {rank} "
                f"at {theirs.decode()!r}. All ranks make the same calls of Holdfast, in the same "
                "order."
            )
        return payload


class _StoreKeys:
    """Reads the store of the process group by polling, without its own wait.

    torch prints a warning for each timeout of the store's own wait, on every rank that waits.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, data: bytes) -> None:
        with _reaching_the_store():
            self._store.set(f"holdfast/{key}", data)

    def find(self, key: str) -> bytes | None:
        """Returns the value under ``key``, or None when there is none yet."""
        with _reaching_the_store():
            if self._store.check([f"holdfast/{key}"]):
                return bytes(self._store.get(f"holdfast/{key}"))
        return None


@contextlib.contextmanager
def _reaching_the_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise HoldfastError(
            f"the process group's store does not answer ({error}). The process or host that runs "
            "it has ended, and with it this round of training: start the ranks again."
        ) from error


class _Deadline:
    """A deadline, with pauses that grow until it."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s
        self._pause_s = _FIRST_PAUSE_S

    def is_over(self) -> bool:
        return time.monotonic() > self._end_s

    def pause(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def _absent(
    world: World, ranks: list[int], phase: str, timeout_s: float, before: str = ""
) -> DeadlineExceeded:
    seen = f" (last seen at {before!r})" if before else ""
    return DeadlineExceeded(
        f"ranks {ranks} did not reach {phase!r} within {timeout_s:g} s{seen}; rank {world.rank} "
        "gave up waiting for them. See in their logs whether they ended, hang, or are only slower "
        "than timeout_s.",
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
    kind: str  # "" when all is well, else an error's class name
    text: str
    payload: bytes
    fields: dict[str, Any] = {}


def all_gather_or_raise(
    world: World, phase: str, act: Callable[[], bytes], *, timeout_s: float
) -> list[bytes]:
    """Runs ``act`` on every rank and gives all its results to all, or one error to all.

    Without it, one rank's error would leave the others waiting for a message it never sends. Of
    several errors all ranks raise the one of the lowest rank: their next action depends on its
    kind.
    """
    mine = _Outcome("", "", b"")
    cause: Exception | None = None
    try:
        mine.payload = act()
    except Exception as error:  # whatever it is, the others must not wait for this rank
        cause = error
        fields = error.told_fields if isinstance(error, HoldfastError) else {}
        mine = _Outcome(type(error).__name__, str(error), b"", fields)
    except BaseException as error:  # Ctrl-C: this rank goes at once, the others hear of it
        mine = _Outcome(type(error).__name__, str(error), b"")
        with contextlib.suppress(HoldfastError):
            world.gather(phase, msgspec.msgpack.encode(mine), timeout_s=0.0)
        raise
    gathered = world.gather(phase, msgspec.msgpack.encode(mine), timeout_s=timeout_s)
    outcomes = [msgspec.msgpack.decode(data, type=_Outcome) for data in gathered]
    for rank, outcome in enumerate(outcomes):
        if outcome.kind and rank == world.rank and cause is not None:
            raise cause
        if outcome.kind:
            raise _error_of(rank, outcome) from cause
    return [outcome.payload for outcome in outcomes]


def _error_of(rank: int, outcome: _Outcome) -> HoldfastError:
    is_ours = hasattr(errors, outcome.kind)
    text = outcome.text if is_ours else f"{outcome.kind}: {outcome.text}"
    return errors.error_of(outcome.kind, f"rank {rank}: {text}", outcome.fields)


def from_rank0(world: World, phase: str, act: Callable[[], bytes], *, timeout_s: float) -> bytes:
    """Runs ``act`` on rank 0 only and gives its result, or its error, to every rank."""
    return all_gather_or_raise(
        world, phase, act if world.rank == 0 else bytes, timeout_s=timeout_s
    )[0]
