"""Drains the rings of a host into its event file: nothing is taken out before it is written.

The keeper drains on a thread of its own. A trainer does so for itself at its end, if no keeper is
left: of all who would drain one has the lock. What was written and not yet taken out when its
drainer was killed is found at the end of the file, and not written again.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from holdfast.events import TrainerDied, Warned, to_record, warn
from holdfast.observe.error_file import error_in
from holdfast.observe.event_files import EventFile, encode_alone, encode_event, encode_record
from holdfast.observe.event_ring import (
    DRAIN_LOCK,
    LONG_AREA,
    RINGS,
    SHORT_AREA,
    SUFFIX,
    Area,
    RingFile,
    RingOwner,
)
from holdfast.observe.ring_records import read_moment, unpack
from holdfast.observe.rollup_writer import RollupWriter
from holdfast.protocol.arena import process_start

POLL_S = 0.05
Watch = Callable[[dict[str, Any]], None]
#: What a watcher is told of as an event beside those of ``holdfast.events``: a ``count`` of records
#: for which a ring had no room.
DROPPED = "EventsDropped"
#: Records written with one call, and taken out together.
BATCH = 500
#: A record that is missing while later ones are there is given up after this time: its thread was
#: interrupted.
STALL_S = 1.0
#: The polls after which it is looked whether the writer of an idle ring is gone.
_IDLE_POLLS = 10
#: The end of the file that a batch lies within.
_END_BYTES = 8 << 20
#: The most that rolling up may take at the end: what is left is for the next keeper.
_LAST_S = 2.0


class _WrittenHead(msgspec.Struct):
    writer: str = ""
    number: int = -1


class _OpenRing:
    """A ring under observation: since when a record is missing in each area, and its writer's end.

    ``writer``: a pidfd, -1 where there is none. ``ended_s``: when it showed the writer's end, by
    the monotonic clock; 0: it did not.
    """

    def __init__(self, ring: RingFile, owner: RingOwner) -> None:
        self.ring, self.owner = ring, owner
        self.stalled_s: dict[Area, float] = {}
        self.polls = 0
        self.writer, self.ended_s = -1, 0.0
        try:
            self.writer = os.pidfd_open(owner.pid) if owner.start else -1
            is_its = process_start(owner.pid) == owner.start  # no other process has its number
        except (OSError, AttributeError):
            is_its = False
        if not is_its:
            self.close_writer()

    def close(self, *, unlock: bool = True) -> None:
        self.ring.close(unlock=unlock)
        self.close_writer()

    def close_writer(self) -> None:
        writer, self.writer = self.writer, -1
        if writer >= 0:
            os.close(writer)


class RingDrain:
    """Drains all rings of an arena into ``file``. Used by one thread at a time.

    ``watch``: called with each record that is written, its fields as plain values.
    """

    def __init__(
        self, arena: Path, file: EventFile, *, batch: int = BATCH, watch: Watch | None = None
    ) -> None:
        self.file, self._watch = file, watch
        self._directory = arena / RINGS
        self._batch = batch
        self._lock = -1
        self._has_lock = False
        with suppress(OSError):  # before the arena may be removed
            self._open_lock()
        self._rings: dict[str, _OpenRing] = {}
        self._refused: set[str] = set()
        self._written: set[tuple[str, int]] = set()
        _living.add(self)

    def poll(self) -> bool:
        """Writes what is in the rings; False where another process drains them.

        Raises OSError where the arena has no room for the lock.
        """
        if not self._has_lock and not self._take_lock():
            return False
        self._find()
        for name, one in list(self._rings.items()):
            if self._drain(one):
                one.ring.path.unlink(missing_ok=True)
                one.close()
                del self._rings[name]
        return True

    def wait(self, wake: int, timeout_s: float) -> None:
        """Waits until ``wake`` can be read, a writer ends, which is noted, or the time is over."""
        writers = {one.writer: one for one in self._rings.values() if one.writer >= 0}
        looks = select.poll()
        for descriptor in (wake, *writers):
            looks.register(descriptor, select.POLLIN)
        ready = looks.poll(timeout_s * 1000)
        now_s = time.monotonic()
        for descriptor, _ in ready:
            if descriptor != wake:
                writers[descriptor].ended_s = now_s
                writers[descriptor].close_writer()

    def drain(self, ring: RingFile) -> bool:
        """Drains a ring of this very process; True if it is empty then."""
        if not self._has_lock and not self._take_lock():
            return False
        if ring.path.name not in self._rings:
            with suppress(ValueError):
                self._rings[ring.path.name] = _OpenRing(ring, ring.owner())
        self._take_all(self._rings[ring.path.name])
        if ring.is_drained():
            ring.path.unlink(missing_ok=True)
        return ring.is_drained()

    def close(self) -> None:
        """Lets another process drain."""
        self.file.close()
        for one in self._rings.values():
            one.close()
        self._rings.clear()
        self._has_lock = False
        lock, self._lock = self._lock, -1
        if lock >= 0:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing it would leave it to a forked child
            os.close(lock)

    def forget(self) -> None:
        """Leaves lock and rings to the process that this one was forked off."""
        lock, self._lock, self._has_lock = self._lock, -1, False
        if lock >= 0:
            os.close(lock)
        for one in self._rings.values():
            one.close(unlock=False)
        self._rings.clear()

    def _open_lock(self) -> None:
        if self._lock < 0:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(self._directory / DRAIN_LOCK, flags, 0o600)

    def _take_lock(self) -> bool:
        self._open_lock()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self._has_lock = True
        self._written = set(_numbers_in(self.file.end(_END_BYTES)))
        return True

    def _find(self) -> None:
        with suppress(FileNotFoundError):  # the arena was removed: known rings are drained on
            for entry in os.scandir(self._directory):
                name = entry.name
                if not name.endswith(SUFFIX) or name in self._rings or name in self._refused:
                    continue
                with suppress(OSError):  # it may be there, or be opened, at the next look
                    self._open_ring(name, Path(entry.path))

    def _open_ring(self, name: str, path: Path) -> None:
        try:
            ring = RingFile.open(path)
            try:
                self._rings[name] = _OpenRing(ring, ring.owner())
            except BaseException:
                ring.close(unlock=False)
                raise
        except (ValueError, msgspec.DecodeError) as error:
            self._refused.add(name)
            warn(f"the events in {path} are not read: {error}")

    def _drain(self, one: _OpenRing) -> bool:
        """Drains a ring; True if its writer is gone and nothing is left in it."""
        one.polls += 1
        is_idle = one.ring.is_drained()
        is_unchanged = is_idle and not one.ended_s and not one.ring.undelivered_drops()
        if is_unchanged and one.polls % _IDLE_POLLS:
            return False
        is_over = one.ring.try_lock()  # before: what a dead writer put is there by now
        return self._take_all(one, is_over=is_over) and is_over and self._tell_death(one)

    def _take_all(self, one: _OpenRing, *, is_over: bool = False) -> bool:
        """Takes what is there; True if all of it could be written."""
        is_taken = True
        for area in (SHORT_AREA, LONG_AREA):
            while records := list(self._records(one, area, is_over)):
                is_taken = self._write(one, area, records)
                if not is_taken or len(records) < self._batch:
                    break
        return self._tell_drops(one) and is_taken

    def _records(self, one: _OpenRing, area: Area, is_over: bool) -> Iterator[tuple[int, bytes]]:
        """Yields the records from the first that was not taken on, each with its position."""
        position = one.ring.cells[area.tail]
        for _ in range(self._batch):
            record = one.ring.record(area, position)
            if record is None:
                position = self._next(one, area, position, is_over)
                if position < 0 or (record := one.ring.record(area, position)) is None:
                    return
            one.stalled_s.pop(area, None)
            yield position, record
            position += 1

    def _next(self, one: _OpenRing, area: Area, missing: int, is_over: bool) -> int:
        """Returns the position of the first record behind a missing one; -1 to wait for it."""
        if not is_over:
            if one.ring.cells[area.head] <= missing:
                return -1
            now_s = time.monotonic()
            if now_s - one.stalled_s.setdefault(area, now_s) < STALL_S:
                return -1
        later = range(missing + 1, one.ring.cells[area.tail] + area.slots + 1)
        return next((at for at in later if one.ring.record(area, at) is not None), -1)

    def _write(self, one: _OpenRing, area: Area, records: list[tuple[int, bytes]]) -> bool:
        """Writes records and takes them out; True if the file took all of them."""
        lines = ((at, self._line(one.owner, record)) for at, record in records)
        fresh = [(at, line) for at, line in lines if line[0]]
        taken = self.file.append([line for _, (line, _) in fresh]) if fresh else 0
        is_whole = taken == len(fresh)
        one.ring.cells[area.tail] = records[-1][0] + 1 if is_whole else fresh[taken][0]
        if self._watch is not None:
            for _, (_, told) in fresh[:taken]:
                self._watch(told)
        return is_whole

    def _line(self, owner: RingOwner, record: bytes) -> tuple[bytes, dict[str, Any]]:
        """Returns a record as a line and as values; no line for one that is in the file, or cannot
        be read.
        """
        at = read_moment(record)
        if at is None or (owner.writer, at.number) in self._written:
            return b"", {}
        try:
            event = unpack(record, owner.table)
        except (ValueError, IndexError, struct.error):
            return b"", {}
        event["time_s"] = round(at.time_s, 6)
        line = encode_record(event, at.mono_s, owner.host, owner.writer, at.number, owner.boot)
        return line, event

    def _tell_death(self, one: _OpenRing) -> bool:
        """Writes what a trainer was doing when it died; True if it ended in order, too."""
        doing, owner = one.ring.doing(), one.owner
        if doing is None or owner.rank < 0:
            return True
        now_s = time.monotonic()
        ended_s = one.ended_s or (now_s if one.writer >= 0 else 0.0)  # since the last wait
        died = TrainerDied(
            incarnation=doing.incarnation,
            step=doing.step,
            rank=owner.rank,
            host=owner.host,
            phase=doing.phase,
            quiet_s=max(0.0, now_s - doing.since_s),
            alive_s=max(0.0, ended_s - doing.since_s),
            reason=error_in(owner.error_file),
            pid=owner.pid,
        )
        record = to_record(died, time.time())
        return self.file.append([encode_alone(record, now_s, owner.host, owner.boot)]) == 1

    def _tell_drops(self, one: _OpenRing) -> bool:
        dropped = one.ring.undelivered_drops()
        if not dropped:
            return True
        message = f"{dropped} events of {one.owner.writer} were dropped: its ring was full"
        is_told = self.file.append([encode_event(Warned(message=message), time.time())]) == 1
        if is_told and self._watch is not None:
            self._watch({"event": DROPPED, "count": dropped})
        if is_told:
            one.ring.drops_reported(dropped)
        return is_told


def _numbers_in(end: bytes) -> Iterator[tuple[str, int]]:
    decode = msgspec.json.Decoder(_WrittenHead).decode
    for line in end.splitlines():
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            found = decode(line)
            yield found.writer, found.number


_living: weakref.WeakSet[RingDrain] = weakref.WeakSet()


def _forget_in_child() -> None:
    for drain in list(_living):
        drain.forget()


os.register_at_fork(after_in_child=_forget_in_child)


class RingDrainer:
    """Drains on a thread of its own until ``close``; ``rollups``: makes those of the file, too."""

    def __init__(self, drain: RingDrain, *, rollups: RollupWriter | None = None) -> None:
        self.drain, self._rollups = drain, rollups
        self._stop, self._is_stopping = os.eventfd(0, os.EFD_CLOEXEC), False
        self._thread = threading.Thread(target=self._work, name="holdfast-drain", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        if self._rollups is not None:
            with suppress(Exception):  # there is no file yet
                self._rollups.begin()
        while not self._is_stopping:
            try:
                self.drain.wait(self._stop, POLL_S)
            except OSError:  # no memory to wait with
                time.sleep(POLL_S)
            with suppress(Exception):  # whatever it met, the next look may not meet it
                if self.drain.poll() and self._rollups is not None:
                    self._rollups.poll()
        with suppress(Exception):
            if self.drain.poll() and self._rollups is not None:
                self._rollups.finish(deadline_s=_LAST_S)

    def close(self, *, deadline_s: float = 5.0) -> None:
        """Drains a last time, and stops; gives up after ``deadline_s``."""
        if self._stop < 0:
            return
        self._is_stopping = True
        os.eventfd_write(self._stop, 1)
        self._thread.join(deadline_s)
        if not self._thread.is_alive():
            self.drain.close()
            os.close(self._stop)
            self._stop = -1


def end_ring_alone(drain: RingDrain) -> Callable[[RingFile], bool]:
    """Returns what a trainer calls at its end until its ring is empty, whoever empties it."""

    def drain_alone(ring: RingFile) -> bool:
        with suppress(Exception):  # events are no reason for a run to end in an error
            return drain.drain(ring)
        return False

    return drain_alone
