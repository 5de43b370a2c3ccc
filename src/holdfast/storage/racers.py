"""Has eight processes create and replace the same objects at once, and counts who succeeded.

Some servers keep a condition when it is tried in peace, and let several win a race. Only a race
shows that, and one that is lost only sometimes takes many.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
from multiprocessing.connection import Connection
from threading import BrokenBarrierError
from typing import Protocol

from msgspec import Struct

from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.bucket import Bucket
from holdfast.storage.providers import open_bucket
from holdfast.storage.wrap import Patience

RACERS, ROUNDS = 8, 20
_PATIENCE = Patience(total_s=20.0)
_ANSWER_S = 30.0
#: All come to a round within so many seconds.
_ROUND_S = 60.0


class Gate(Protocol):
    """A barrier between processes."""

    def wait(self, timeout: float | None = None) -> int: ...

    def abort(self) -> None: ...


class RaceReport(Struct, frozen=True):
    """How many of the racers were told in each round that they had created, or replaced."""

    created: tuple[int, ...]
    replaced: tuple[int, ...]

    @property
    def table(self) -> tuple[tuple[str, bool], ...]:
        """Returns what was tried, in words, and whether it is kept."""
        rounds = f"in each of {len(self.created)} rounds"
        return (
            (f"lets one of {RACERS} that create at once win, {rounds}", max(self.created) <= 1),
            (f"lets one of {RACERS} that replace at once win, {rounds}", max(self.replaced) <= 1),
        )


def race(bucket: Bucket, prefix: str, rounds: int = ROUNDS) -> RaceReport:
    """Races on new objects, whose names begin with ``prefix``; they are removed.

    StorageError where a racer could not reach the server.
    """
    context, prefix = multiprocessing.get_context("spawn"), f"{prefix}race-{secrets.token_hex(4)}-"
    gate, pipes = context.Barrier(RACERS), list[Connection]()
    racers = []
    for number in range(RACERS):
        ours, theirs = context.Pipe(duplex=False)
        place = bucket.name, bucket.url, prefix
        racer = context.Process(
            target=_race, args=(place, number, rounds, gate, theirs), daemon=True
        )
        racer.start()
        theirs.close()
        pipes.append(ours)
        racers.append(racer)
    try:
        told = [_received(pipe) for pipe in pipes]
    finally:
        for racer in racers:
            racer.kill()
            racer.join()
        with contextlib.suppress(HoldfastError):
            bucket.delete_many([f"{prefix}{number}" for number in range(rounds)])
    failed = [one for one in told if isinstance(one, str)]
    if failed:  # the others were told to end by one that has a reason
        reason = next(filter(None, failed), "one of them did not come to a round in time")
        raise StorageError(
            f"{bucket.url}: the race of {RACERS} processes came to no end: {reason}",
            operation="race",
            url=bucket.url,
        )
    won = [one for one in told if not isinstance(one, str)]
    created, replaced = zip(*won, strict=True)
    return RaceReport(
        tuple(map(sum, zip(*created, strict=True))), tuple(map(sum, zip(*replaced, strict=True)))
    )


_Won = tuple[list[bool], list[bool]]


def _received(pipe: Connection) -> _Won | str:
    try:
        found: _Won | str = pipe.recv()
    except EOFError:
        return "one of them ended"
    return found


def _race(
    place: tuple[str, str, str], number: int, rounds: int, gate: Gate, told: Connection
) -> None:
    """One process: creates and replaces a name in each round, at the moment when all do."""
    name, url, prefix = place
    created, replaced = list[bool](), list[bool]()
    try:
        bucket = open_bucket(name, url, patience=_PATIENCE, answer_s=_ANSWER_S)
        for turn in range(rounds):
            key = f"{prefix}{turn}"
            gate.wait(_ROUND_S)
            created.append(_has_won(bucket, key, b"%d" % number))
            gate.wait(_ROUND_S)
            tag = bucket.head(key).header("etag")
            gate.wait(_ROUND_S)
            replaced.append(_has_won(bucket, key, b"r%d" % number, tag or '"0"'))
    except (HoldfastError, BrokenBarrierError) as error:
        gate.abort()
        told.send(str(error))
        return
    told.send((created, replaced))


def _has_won(bucket: Bucket, key: str, data: bytes, tag: str = "") -> bool:
    """Creates the object, or replaces what has the tag. Where its answer was lost, or a second try
    finds the first, what is there tells if that had its effect.
    """
    outcome = bucket.put(key, [data], if_none=not tag, if_match=tag)
    if outcome.is_done or (outcome.status and outcome.is_first_try):
        return outcome.is_done
    found = bucket.get(key)
    return found.is_done and found.body == data
