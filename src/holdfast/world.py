"""The ranks of this run, and small messages between them under deadlines that name the absent.

Ranks meet through the process group's own store, not through collectives: a collective that
one rank never enters hangs the others without a word.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
import torch.distributed as dist

from holdfast import errors
from holdfast.errors import DeadlineExceeded, HoldfastError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
T = TypeVar("T")


class World(Protocol):
    """Which ranks there are, and how they tell each other small things."""

    rank: int
    size: int
    nonce: str

    def gather(self, phase: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Every rank's payload, by rank. DeadlineExceeded names who did not come, and the phase."""
        ...


class SoloWorld:
    """The world of one process."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.nonce = uuid.uuid4().hex

    def gather(self, phase: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """The payload itself."""
        return [payload]


class TorchWorld:
    """The ranks of torch.distributed's default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # The store may be the launcher's and outlive a round of workers, with the keys of the
        # dead round still in it: a nonce, told through the live group, keeps rounds apart.
        told: list[Any] = [uuid.uuid4().hex]
        dist.broadcast_object_list(told, src=0)
        self.nonce = str(told[0])
        self._store = dist.distributed_c10d._get_default_store()
        self._count = 0

    def gather(self, phase: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """See ``World``."""
        self._count += 1
        prefix = f"holdfast/{self.nonce}/{self._count}/{phase}"
        self._store.set(f"{prefix}/{self.rank}", payload)  # type: ignore[arg-type]
        deadline = time.monotonic() + timeout_s
        keys = {rank: f"{prefix}/{rank}" for rank in range(self.size)}
        pause_s = _FIRST_PAUSE_S
        # Asked again and again, not waited for: a time-out of the store's own wait is printed as
        # a warning by torch, on every rank that waits.
        while absent := [rank for rank, key in keys.items() if not self._store.check([key])]:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"ranks {absent} did not reach {phase!r} within {timeout_s:g} s; "
                    f"rank {self.rank} gave up waiting for them",
                    ranks=absent,
                    phase=phase,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return [bytes(self._store.get(key)) for key in keys.values()]


def current_world() -> World:
    """The process group's ranks, or this process alone when there is no group."""
    if dist.is_available() and dist.is_initialized():
        return TorchWorld()
    return SoloWorld()


def host_id() -> str:
    """This host's name for arenas and messages; HOLDFAST_HOST_ID overrides it."""
    name = os.environ.get("HOLDFAST_HOST_ID") or socket.gethostname()
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name)[:64] or "host"


class _Outcome(msgspec.Struct, array_like=True):
    kind: str  # "" when all is well, else an error's class name
    text: str
    payload: bytes


def agree(world: World, phase: str, act: Callable[[], bytes], *, timeout_s: float) -> list[bytes]:
    """Run ``act`` on every rank and give all its results to all, or the same error to all.

    Without it, one rank's error would leave the others waiting for a message it never sends.
    """
    mine = _Outcome("", "", b"")
    cause: Exception | None = None
    try:
        mine.payload = act()
    except Exception as error:  # whatever it is, the others must not wait for this rank
        cause = error
        mine = _Outcome(type(error).__name__, str(error), b"")
    gathered = world.gather(phase, msgspec.msgpack.encode(mine), timeout_s=timeout_s)
    outcomes = [msgspec.msgpack.decode(data, type=_Outcome) for data in gathered]
    failed = [(rank, o) for rank, o in enumerate(outcomes) if o.kind]
    if cause is not None:
        raise cause
    if failed:
        rank, outcome = failed[0]
        kind = getattr(errors, outcome.kind, None)
        if kind is None:
            raise HoldfastError(f"rank {rank}: {outcome.kind}: {outcome.text}")
        raise kind(f"rank {rank}: {outcome.text}")
    return [outcome.payload for outcome in outcomes]


def tell_all(world: World, phase: str, act: Callable[[], bytes], *, timeout_s: float) -> bytes:
    """Run ``act`` on rank 0 only and give its result, or its error, to every rank."""
    return agree(world, phase, act if world.rank == 0 else bytes, timeout_s=timeout_s)[0]
