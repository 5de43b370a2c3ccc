"""Rings in shared memory through which a process hands its events to the keeper of its host.

``EventRing`` is the sink of a trainer or a keeper: it puts each event into a file of fixed size in
the arena, without a system call and without a lock. Whoever drains it (``observe.ring_drain``)
finds what a killed process put. A full ring drops events and counts them.

A ring is alive while its writer holds the file's lock, which the kernel frees when it dies.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.events import Event, KeeperLost
from holdfast.format.checksum import checksum
from holdfast.observe import error_file
from holdfast.observe.ring_records import (
    SCHEMA,
    SHORT,
    Moment,
    Schema,
    checksum_of,
    pack_long,
    read_moment,
)
from holdfast.protocol.arena import make_private_dir, process_start

#: Where the rings are in an arena.
RINGS, SUFFIX, DRAIN_LOCK = "events", ".ring", "lock"
_MAGIC = int.from_bytes(b"HFRING1\0", "little")
HEADER_BYTES = 16384
#: Slots that a thread may be about to write while another finds the ring full.
_MARGIN = 16
_CLOSE_POLL_S = 0.005


class Area(NamedTuple):
    """A part of a ring: slots of one size, and which two counters of the header are its."""

    start: int
    slots: int
    slot_bytes: int
    head: int
    tail: int


#: A run that saves at every step puts 4 records a step: 1,000 steps without anybody to drain them.
SHORT_AREA = Area(HEADER_BYTES, 4096, 256, head=1, tail=2)
LONG_AREA = Area(HEADER_BYTES + 4096 * 256, 64, 8192, head=3, tail=4)
RING_BYTES = LONG_AREA.start + LONG_AREA.slots * LONG_AREA.slot_bytes
_DROPPED, _REPORTED, _META_BYTES, _META_SUM, _META = 5, 6, 7, 8, 128
#: What the process is doing: phase, step + 1, incarnation, since when; then the phase's name.
_PHASE, _STEP, _INCARNATION, _SINCE_NS, _NAME = 9, 10, 11, 12, 13
_NAME_AT, _NAME_END = 8 * _NAME, _META
#: The phases of a process, by number; the last is one that the program declared.
PHASES = ("", "starting", "restoring", "training", "saving", "ended", "declared")


class RingOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The process that writes a ring."""

    writer: str
    rank: int
    host: str
    boot: str
    table: Schema
    error_file: str = ""
    """Where torchrun has the process leave its error, if it does."""
    pid: int = 0
    start: int = 0
    """When the process ``pid`` began, as ``process_start`` gives it; 0 by earlier versions."""


class Doing(NamedTuple):
    """What a process is doing, or was when it died: the last step that it ended, -1 before one."""

    phase: str
    step: int
    incarnation: int
    since_s: float


class RingFile:
    """A mapped ring, on either side."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self.map = mmap.mmap(descriptor, RING_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.cells = memoryview(self.map)[:_META].cast("Q")

    def try_lock(self) -> bool:
        """Takes the writer's lock; False while the writer, or a child that it forked, lives."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    @classmethod
    def create(cls, directory: Path, owner: RingOwner) -> RingFile:
        """Makes a ring that others see whole or not at all. Raises OSError, ArenaError."""
        for each in (*reversed(directory.parents[:2]), directory):  # an arena that is gone, too
            make_private_dir(each)
        path = directory / f"{owner.writer}{SUFFIX}"
        temporary = path.with_suffix(".new")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, RING_BYTES)
            ring = cls(path, descriptor)
            ring.try_lock()
            meta = msgspec.json.encode(owner)
            ring.map[_META : _META + len(meta)] = meta
            ring.cells[_META_BYTES], ring.cells[_META_SUM] = len(meta), checksum(meta)
            ring.cells[0] = _MAGIC
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return ring

    def copy_to(self, directory: Path) -> RingFile:
        """Makes a ring with the same records. Raises as ``create``."""
        made = RingFile.create(directory, self.owner())
        made.map[HEADER_BYTES:] = self.map[HEADER_BYTES:]
        for cell in (*range(SHORT_AREA.head, _REPORTED + 1), *range(_PHASE, _NAME)):
            made.cells[cell] = self.cells[cell]
        made.map[_NAME_AT:_NAME_END] = self.map[_NAME_AT:_NAME_END]
        return made

    @classmethod
    def open(cls, path: Path) -> RingFile:
        """Maps a ring that another process made. Raises OSError, and ValueError if it is none."""
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != RING_BYTES:
                raise ValueError(f"{path} does not have the size of a ring")
            return cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def owner(self) -> RingOwner:
        """Returns who writes it. Raises ValueError for what is no ring of this version."""
        size = self.cells[_META_BYTES]
        meta = self.map[_META : _META + size] if size <= HEADER_BYTES - _META else b""
        if self.cells[0] != _MAGIC or not meta or checksum(meta) != self.cells[_META_SUM]:
            raise ValueError(f"{self.path} is no ring of this version")
        return msgspec.json.decode(meta, type=RingOwner)

    def record(self, area: Area, position: int) -> bytes | None:
        """Returns the record put at ``position``; None if it is not there, or not whole."""
        start = area.start + position % area.slots * area.slot_bytes
        record = self.map[start : start + area.slot_bytes]
        moment = read_moment(record)
        return record if moment is not None and moment.position == position else None

    def is_drained(self) -> bool:
        """True if everything that was put was taken."""
        return all(
            self.cells[a.tail] >= self.cells[a.head]
            # The head goes back where a thread was interrupted before it noted an older one.
            and self.record(a, self.cells[a.tail]) is None
            for a in (SHORT_AREA, LONG_AREA)
        )

    def undelivered_drops(self) -> int:
        """Returns how many events were dropped since ``drops_reported``."""
        return max(0, self.cells[_DROPPED] - self.cells[_REPORTED])

    def note_doing(self, phase: int, step: int, incarnation: int, name: bytes = b"") -> None:
        """Notes what the process is doing from now on; ``phase`` is an index of ``PHASES``."""
        cells = self.cells
        if name:
            room = _NAME_END - _NAME_AT
            self.map[_NAME_AT:_NAME_END] = name[:room].ljust(room, b"\0")
        cells[_SINCE_NS] = time.monotonic_ns()
        cells[_STEP], cells[_INCARNATION], cells[_PHASE] = step + 1, incarnation, phase

    def doing(self) -> Doing | None:
        """Returns what the process was last noted to do; None for nothing, or its end."""
        return _doing_in(self.cells, self.map[_NAME_AT:_NAME_END])

    def count_dropped(self, total: int) -> None:
        """Notes how many events were dropped in all."""
        if total > self.cells[_DROPPED]:  # a thread that was interrupted has an older one
            self.cells[_DROPPED] = total

    def drops_reported(self, count: int) -> None:
        """Notes that so many more were told of."""
        self.cells[_REPORTED] += count

    def close(self, *, unlock: bool = True) -> None:
        """Closes the file; the memory stays mapped for those who use it.

        The mapping has the lock, too. ``unlock`` frees it, for all who share it since a fork.
        """
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            if unlock:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _doing_in(cells: memoryview[int], name: bytes) -> Doing | None:
    """Returns what the header of a ring says that its process is doing."""
    index = cells[_PHASE]
    if not 0 < index < len(PHASES) or PHASES[index] == "ended":
        return None
    phase = PHASES[index]
    if phase == "declared":
        phase = name.rstrip(b" \0").decode(errors="ignore")
    return Doing(phase, cells[_STEP] - 1, cells[_INCARNATION], cells[_SINCE_NS] / 1e9)


def doing_in(arena: Path) -> Iterator[Doing]:
    """Yields what each process that has a ring in an arena is doing; maps none of them."""
    for path in (arena / RINGS).glob(f"*{SUFFIX}"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                header = os.pread(descriptor, _META, 0)
            finally:
                os.close(descriptor)
            if len(header) == _META:
                cells = memoryview(header).cast("Q")
                doing = _doing_in(cells, header[_NAME_AT:]) if cells[0] == _MAGIC else None
                if doing is not None:
                    yield doing


class _Cursor:
    """Where the next record of an area goes. Of several threads none waits for another."""

    def __init__(self, area: Area) -> None:
        self.area = area
        self.positions = itertools.count()
        self.newest = -1
        self.room = area.slots - _MARGIN

    def claim(self, ring: RingFile) -> int:
        """Returns a position that nobody else has; -1 where the ring is full."""
        if self.newest >= self.room:
            self.room = ring.cells[self.area.tail] + self.area.slots - _MARGIN
            if self.newest >= self.room:
                return -1
        position = self.newest = next(self.positions)
        return position if position < self.room + _MARGIN else -1


class EventRing:
    """Puts every event into a ring of ``directory``; pass it to ``events.subscribe``.

    ``role``: what the process is, such as "rank-00003": its records are named after it. Raises
    OSError or ArenaError where no ring can be made. A child after a fork makes one of its own when
    it has an event.
    """

    def __init__(self, directory: Path, role: str, *, rank: int, host: str, boot: str) -> None:
        self._directory, self._role = directory, role
        self._rank, self._host, self._boot = rank, host, boot
        self._is_closed = False
        self._begin(self._create())
        _living.add(self)

    def __repr__(self) -> str:
        return f"EventRing({str(self._directory)!r}, {self._role!r})"

    def _create(self) -> RingFile:
        self.writer = f"{self._role}-{secrets.token_hex(4)}"
        owner = RingOwner(
            writer=self.writer,
            rank=self._rank,
            host=self._host,
            boot=self._boot,
            table=SCHEMA,
            error_file=os.environ.get(error_file.SETTING, "") if self._rank >= 0 else "",
            pid=os.getpid(),
            start=process_start(os.getpid()),
        )
        return RingFile.create(self._directory, owner)

    def _begin(self, ring: RingFile) -> None:
        self._short, self._long = _Cursor(SHORT_AREA), _Cursor(LONG_AREA)
        self._numbers, self._drops = itertools.count(), itertools.count(1)
        self.ring: RingFile | None = ring

    def __call__(self, event: Event, time_s: float) -> None:
        ring = self.ring
        if self._is_closed or (ring is None and (ring := self._begin_in_child()) is None):
            return
        number = next(self._numbers)
        try:
            if (packing := SHORT.get(type(event))) is None:
                is_put = self._put_long(ring, event, number, time_s)
            else:
                is_put = self._put_short(ring, packing, event, number, time_s)
        except Exception:  # a value that no record can hold
            is_put = False
        if not is_put:
            ring.count_dropped(next(self._drops))
        if type(event) is KeeperLost:
            self._move_if_removed(ring)

    def _put_short(
        self,
        ring: RingFile,
        packing: tuple[Callable[..., bytes], Callable[[Event], tuple[object, ...]], int, int],
        event: Event,
        number: int,
        time_s: float,
    ) -> bool:
        position = self._short.claim(ring)
        if position < 0:
            return False
        pack, numbers, kind, size = packing
        body = pack(size, position, number, time_s, time.monotonic(), kind, *numbers(event))
        at = HEADER_BYTES + (position & 4095) * 256
        ring.map[at : at + 8 + size] = checksum_of(body).to_bytes(8, "little") + body
        ring.cells[1] = position + 1
        return True

    def _put_long(self, ring: RingFile, event: Event, number: int, time_s: float) -> bool:
        area = self._long.area
        position = self._long.claim(ring)
        if position < 0:
            return False
        at = Moment(position, number, time_s, time.monotonic())
        record = pack_long(event, at, area.slot_bytes)
        start = area.start + position % area.slots * area.slot_bytes
        ring.map[start : start + len(record)] = record
        ring.cells[area.head] = position + 1
        return True

    def _move_if_removed(self, ring: RingFile) -> None:
        """Goes on in another file, with all that is in the ring, if its arena was removed."""
        if ring.path.exists():
            return
        try:
            self.ring = ring.copy_to(self._directory)
        except Exception:  # no room: it is drained at the end, if it comes to that
            return

    def _begin_in_child(self) -> RingFile | None:
        if not self._directory.parent.exists():  # nobody would remove what it makes
            self._is_closed = True
            return None
        try:
            self._begin(self._create())
        except Exception:  # its parent's arena is gone, or full: a child's events are given up
            self._is_closed = True
        return self.ring

    def close(
        self,
        *,
        deadline_s: float,
        drain: Callable[[RingFile], bool],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until what was put is drained, then lets go of the ring. Never raises.

        ``drain``: tried again and again; drains the ring if nobody else does, and says if it did.
        ``end``: called after the last try. Both run on a thread that may hang in the storage: what
        is not drained after ``deadline_s`` stays in the arena. With 0 nothing is tried.
        """
        self._is_closed = True
        ring = self.ring
        if ring is None or deadline_s <= 0 or ring.is_drained():
            end()
        else:
            give_up_s = time.monotonic() + deadline_s
            thread = threading.Thread(
                target=_wait_drained, args=(ring, give_up_s, drain, end), daemon=True
            )
            try:
                thread.start()
                thread.join(deadline_s)
            except RuntimeError:  # no thread can be made: the keeper drains it
                end()
        if ring is not None:
            ring.close()

    def forget(self) -> None:
        """Leaves the ring to the process that this one was forked off."""
        if self.ring is not None:
            self.ring.close(unlock=False)
        self.ring = None


def _wait_drained(
    ring: RingFile, give_up_s: float, drain: Callable[[RingFile], bool], end: Callable[[], None]
) -> None:
    while not (ring.is_drained() or drain(ring) or time.monotonic() >= give_up_s):
        time.sleep(_CLOSE_POLL_S)
    end()


_living: weakref.WeakSet[EventRing] = weakref.WeakSet()


def _forget_in_child() -> None:
    for ring in list(_living):
        ring.forget()


os.register_at_fork(after_in_child=_forget_in_child)
