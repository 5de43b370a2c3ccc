"""Keeps what a run is doing now, from the newest records of it: as much after a month as at first.

``FileTails`` reads what was appended to the event files since it was last asked; ``LiveRun`` folds
that into the state of the newest saves, the hosts and the last troubles.
"""

from __future__ import annotations

import heapq
import math
import os
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast import events
from holdfast.events import AnyEvent, HostSampled
from holdfast.observe.clocks import OF_CLOCKS, HostClocks
from holdfast.observe.event_files import UNREADABLE, is_named
from holdfast.observe.event_place import event_place
from holdfast.observe.exposure import abandoned_by
from holdfast.observe.log import phrase_of
from holdfast.observe.phases import BY_EVENT
from holdfast.observe.records import RecordHead
from holdfast.observe.text import printable
from holdfast.protocol.arena import boot_id

#: What is read of each file at first: some minutes of a large host.
TAIL_BYTES = 1 << 20
#: The most that is read of each file at one look; what is more is skipped.
_LOOK_BYTES = 8 << 20
#: Seconds of which rates are told.
WINDOW_S = 60.0
_VALUES, _SAVES, _TROUBLES, _HOSTS = 512, 64, 8, 4096
#: Ranks of which is kept what held them.
_HELD_RANKS = 8
STATES = ("captured", "protected", "cached", "durable")
#: The states that a generation must have had to be restored from there.
_OF_SOURCE = {"memory": ("captured",), "storage": ("captured", "durable")}

_decode_event = msgspec.json.Decoder(AnyEvent).decode
_decode_head = msgspec.json.Decoder(RecordHead).decode


class _Tail:
    """One open event file, and how far it was read."""

    def __init__(self, path: Path, *, tail_bytes: int) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        size = os.fstat(self.fd).st_size
        self._at = max(0, size - tail_bytes)
        #: The first line of a tail is not whole.
        self._left, self._is_inside = b"", self._at > 0

    def lines(self) -> Iterator[bytes]:
        """Yields the whole lines that were appended."""
        size = os.fstat(self.fd).st_size
        if size - self._at > _LOOK_BYTES:
            self._at, self._left, self._is_inside = size - _LOOK_BYTES, b"", True
        data = os.pread(self.fd, size - self._at, self._at) if size > self._at else b""
        self._at += len(data)
        *whole, self._left = (self._left + data).split(b"\n")
        if len(self._left) > _LOOK_BYTES:
            self._left, self._is_inside = b"", True
        if self._is_inside and whole:
            self._is_inside = False
            whole = whole[1:]
        yield from whole

    def is_at(self, path: Path) -> bool:
        """True if ``path`` still names this file."""
        return is_named(self.fd, path)


class FileTails:
    """The newest records of a run: at first the end of each file, then what is appended."""

    def __init__(self, root: str | Path, *, tail_bytes: int = TAIL_BYTES) -> None:
        self._place, self._tail_bytes = event_place(root), tail_bytes
        self._tails: dict[Path, _Tail] = {}
        self._is_first = True

    @property
    def files(self) -> int:
        """Returns how many files are followed."""
        return len(self._tails)

    def read(self) -> Iterator[tuple[AnyEvent, RecordHead]]:
        """Yields the records that are new, file by file; lines that are none are passed over."""
        for line in self._lines():
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                yield _decode_event(line), _decode_head(line)

    def _lines(self) -> Iterator[bytes]:
        directory = self._place.read_from()
        for path in sorted(directory.glob("*.jsonl")):
            if _is_full(path):
                continue
            with suppress(*UNREADABLE):
                tail = self._tails.get(path)
                if tail is not None:
                    yield from tail.lines()  # before: it may have been set aside
                    if tail.is_at(path):
                        continue
                    self._close(path)
                tail_bytes = self._tail_bytes if self._is_first else _LOOK_BYTES
                if path.is_file():
                    self._tails[path] = _Tail(path, tail_bytes=tail_bytes)
                    yield from self._tails[path].lines()
        self._is_first = False

    def close(self) -> None:
        """Closes all files."""
        for path in list(self._tails):
            self._close(path)

    def _close(self, path: Path) -> None:
        os.close(self._tails.pop(path).fd)


def _is_full(path: Path) -> bool:
    """True for a file that was set aside: its newest lines were read before."""
    _, _, part = path.stem.rpartition(".")
    return path.stem != part and part.lstrip("s").isdigit()


@dataclass(slots=True)
class UnderWay:
    """A generation, and the ranks that came so far with it."""

    incarnation: int
    step: int
    saved: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    states: set[str] = field(default_factory=set)
    missed: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Reached:
    """A generation in a state, and when it came there, by the wall clock of ``host``; where
    ``is_restored`` that was before what is known, and the moment is that of its restore.
    """

    incarnation: int
    step: int
    time_s: float
    host: str = ""
    is_restored: bool = False


class LiveRun:
    """What a run is doing now."""

    def __init__(self) -> None:
        self.incarnation = self.world = self.records = 0
        self._clocks = HostClocks()
        self._ahead_s: dict[str, float] = {}
        self._solved = 0
        """How many records the clocks of hosts were compared by."""
        self._first = math.inf, ""
        self._last_s: dict[str, float] = {}
        self._came: dict[str, list[Reached]] = {}
        """The newest generations that came into each state, as a heap."""
        self._parents: dict[int, tuple[int, int]] = {}
        self._restored: dict[str, Reached] = {}
        """What the newest start went on from, in each state that it must have had."""
        self.saves: dict[tuple[int, int], UnderWay] = {}
        self.phases: dict[str, deque[tuple[float, int]]] = {}
        """The last lengths of each phase, with the rank."""
        self.hosts: dict[str, HostSampled] = {}
        self._troubles: deque[tuple[float, str, str]] = deque(maxlen=_TROUBLES)
        self.counts: Counter[str] = Counter()
        self._copies: dict[int, tuple[str, float]] = {}
        self._held: deque[tuple[float, str, float]] = deque(maxlen=_VALUES)
        self._stored: deque[tuple[float, str, float]] = deque(maxlen=_SAVES)
        self._captured: deque[tuple[float, str, float]] = deque(maxlen=_VALUES)

    def take(self, event: AnyEvent, head: RecordHead) -> None:
        """Takes a record; of older ones than those before it only what is still true."""
        self.records += 1
        host = head.by_host
        self._first = min(self._first, (head.time_s, host))
        if len(self._last_s) < _HOSTS or host in self._last_s:
            self._last_s[host] = max(head.time_s, self._last_s.get(host, 0.0))
            at = self._clocks.take(host, head.boot, head.time_s, head.mono_s)
            if type(event).__name__ in OF_CLOCKS:
                self._clocks.note(event, at)
        self.incarnation = max(self.incarnation, event.incarnation)
        for phase in BY_EVENT.get(type(event).__name__, ()):
            length_s = getattr(event, phase.field)
            self.phases.setdefault(phase.name, deque(maxlen=_VALUES)).append((length_s, event.rank))
        self._take_moment(event, head)
        match event:
            case events.RunStarted():
                self.world = max(self.world, event.world)
                self.counts["starts"] += event.rank == 0
            case events.SaveReturned():
                self._save(event).saved.add(event.rank)
                self._note_held(event, head)
            case events.FenceWaited():
                self._note_held(event, head)
            case events.ImageCaptured() | events.ImagePassed():
                self._save(event).copied.add(event.rank)
                self._note_copy(event, head.by_host)
            case events.ImageDurable():
                self._save(event).written.add(event.rank)
            case events.HostSampled():
                if len(self.hosts) < _HOSTS or event.host in self.hosts:
                    self.hosts[event.host] = event
            case events.Restored():
                self.counts["restores"] += event.rank == 0
                self._note_restored(event, head)
            case _:
                pass

    def _note_restored(self, of: events.Restored, head: RecordHead) -> None:
        parent = of.parent_incarnation, of.step
        if of.incarnation >= max(self._parents, default=0):
            one = Reached(*parent, head.time_s, head.by_host, is_restored=True)
            # A run's own are of starts before; others are of the root that it started from.
            states = _OF_SOURCE.get(of.source, ()) if parent[0] < of.incarnation else ()
            self._restored = dict.fromkeys(states, one)
        self._parents[of.incarnation] = parent

    def _take_moment(self, event: AnyEvent, head: RecordHead) -> None:
        match event:
            case events.SnapshotCaptured():
                self.world = event.world
                if self._reach(event, head, "captured"):
                    self._captured.append((head.time_s, head.by_host, 1))
            case events.SnapshotProtected():
                self._reach(event, head, "protected")
            case events.CheckpointCached():
                self._reach(event, head, "cached")
            case events.CheckpointPublished():
                if self._reach(event, head, "durable"):
                    size_bytes = event.size_bytes - event.reused_bytes
                    self._stored.append((head.time_s, head.by_host, size_bytes))
            case events.SnapshotMissed():
                save = self._save(event)
                if not save.missed:
                    save.missed = event.reason
                    self._trouble(event, head, f"missed: {event.reason}")
            case events.TrainerLost():
                where = f"rank {event.rank} on {event.host} went away without a goodbye"
                self._trouble(event, head, where)
            case (
                events.PersistBroke()
                | events.SnapshotNotProtected()
                | events.SourceDropped()
                | events.DamageFound()
                | events.ReplicasDiffer()
                | events.KeeperLost()
                | events.SinkFailed()
                | events.LoopHeld()
            ):
                self._trouble(event, head, phrase_of(event))
            case events.Warned():
                self._trouble(event, head, event.message)
            case _:
                pass

    def _save(self, event: AnyEvent) -> UnderWay:
        key = event.incarnation, event.step
        if key not in self.saves:
            self.saves[key] = UnderWay(*key)
            if len(self.saves) > _SAVES:
                del self.saves[min(self.saves)]
                return self.saves.get(key, UnderWay(*key))
        return self.saves[key]

    def _reach(self, event: AnyEvent, head: RecordHead, state: str) -> bool:
        """Returns True for the first record of it: a keeper that takes over tells once more."""
        states = self._save(event).states
        is_new = state not in states
        states.add(state)
        came = self._came.setdefault(state, [])
        if is_new:
            heapq.heappush(came, Reached(event.incarnation, event.step, head.time_s, head.by_host))
            if len(came) > _SAVES:
                heapq.heappop(came)
        return is_new

    def _note_held(self, of: events.SaveReturned | events.FenceWaited, head: RecordHead) -> None:
        """Keeps what held some ranks, evenly chosen: of all, the newest would be of one save."""
        if of.rank % self._every_rank == 0:
            self._held.append((head.time_s, head.by_host, of.held_s))

    @property
    def _every_rank(self) -> int:
        return -(-self.world // _HELD_RANKS) or 1

    def _note_copy(self, of: events.ImageCaptured | events.ImagePassed, host: str) -> None:
        """Keeps a mean of what a byte took in the last few copies of each rank."""
        byte_s = of.copy_s / max(1, of.size_bytes)
        _, before_s = self._copies.get(of.rank, (host, byte_s))
        self._copies[of.rank] = host, before_s + (byte_s - before_s) / 8

    def _trouble(self, event: AnyEvent, head: RecordHead, text: str) -> None:
        where = f"{event.incarnation}-{event.step} " if event.step >= 0 else ""
        self._troubles.append((head.time_s, head.by_host, printable(where + text)))

    # ── what it comes to ─────────────────────────────────────────────────────────────────────────

    @property
    def reached(self) -> dict[str, Reached]:
        """Returns the newest generation in each state, of those that the run has not given up."""
        is_given_up = abandoned_by(self._parents)
        kept = {
            state: max((one for one in came if not is_given_up(one)), default=None)
            for state, came in self._came.items()
        }
        found = {state: newest for state, newest in kept.items() if newest is not None}
        for state, one in self._restored.items():
            newest = found.get(state)
            if newest is None or (newest.incarnation, newest.step) < (one.incarnation, one.step):
                found[state] = one
        return found

    @property
    def given_up(self) -> set[str]:
        """Returns the states of which all that is known was given up: older ones may have them."""
        return self._came.keys() - self.reached.keys()

    @property
    def newest(self) -> UnderWay | None:
        """Returns the newest save that a rank began, of those that the run has not given up."""
        is_given_up = abandoned_by(self._parents)
        kept = (save for _, save in sorted(self.saves.items(), reverse=True))
        return next((save for save in kept if not is_given_up(save)), None)

    def moment_s(self, time_s: float, host: str) -> float:
        """Returns a moment of a host's wall clock by that of this host, or of the run's first."""
        return time_s - self._ahead().get(host, 0.0)

    def _ahead(self) -> dict[str, float]:
        if self._solved != self.records:
            self._solved = self.records
            found = self._clocks.solve(max(0, self._clocks.find_boot(boot_id()[:8])))
            self._ahead_s = {one.host: one.ahead_s for one in found.offsets}
        return self._ahead_s

    @property
    def last_s(self) -> float:
        """Returns the moment of the newest record."""
        return max((self.moment_s(at_s, host) for host, at_s in self._last_s.items()), default=0.0)

    @property
    def troubles(self) -> list[tuple[float, str]]:
        """Returns the last moments at which something went wrong, with words for it."""
        return [(self.moment_s(at_s, host), text) for at_s, host, text in self._troubles]

    def _recent(self, values: Iterable[tuple[float, str, float]]) -> list[tuple[float, float]]:
        """Returns those of the last minute of the records, with their moments."""
        first_s = self.last_s - WINDOW_S
        moments = ((self.moment_s(at_s, host), value) for at_s, host, value in values)
        return [(at_s, value) for at_s, value in moments if at_s > first_s]

    def captures_per_minute(self) -> float:
        """Returns how many generations were captured in the last minute of the records."""
        return len(self._recent(self._captured)) * 60 / WINDOW_S

    def stored_bytes_per_s(self) -> float:
        """Returns the bytes a second that became durable over the last minute of the records."""
        return math.fsum(size for _, size in self._recent(self._stored)) / WINDOW_S

    def held_part(self) -> float | None:
        """Returns the part of the time that saves and fences held a rank; None if none did."""
        recent = self._recent(self._held)
        if not recent or not self.world:
            return None
        first_s = self.moment_s(*self._first)
        if len(self._held) == _VALUES:  # older ones are forgotten
            first_s = max(first_s, min(at_s for at_s, _ in recent))
        elapsed_s = min(WINDOW_S, self.last_s - first_s)
        ranks = -(-self.world // self._every_rank)
        held_s = math.fsum(held_s for _, held_s in recent)
        return held_s / (elapsed_s * ranks) if elapsed_s > 0 else None

    def slowest_ranks(self, count: int) -> list[tuple[int, str, float]]:
        """Returns the ranks that copy a byte most slowly: (rank, host, times the median of all)."""
        if len(self._copies) < 2:
            return []
        median_s = statistics.median(byte_s for _, byte_s in self._copies.values())
        slowest = sorted(self._copies.items(), key=lambda each: -each[1][1])[:count]
        return [(rank, host, byte_s / median_s) for rank, (host, byte_s) in slowest if median_s > 0]
