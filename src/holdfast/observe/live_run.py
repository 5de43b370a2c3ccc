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
from holdfast.observe.clocks import OF_CLOCKS, HostClocks, HostMoment
from holdfast.observe.event_files import UNREADABLE, blocks_in, is_named, open_file
from holdfast.observe.event_place import event_place, is_of_spool
from holdfast.observe.exposure import abandoned_by
from holdfast.observe.log import phrase_of
from holdfast.observe.phases import BY_EVENT
from holdfast.observe.records import RecordHead, lines_in
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
        self._of_spool: set[int] = set()
        """The hashes of all lines that the spool had at the last look, of which the last were read:
        those that it lacks at the next one are in objects that are read then, or nowhere."""

    @property
    def files(self) -> int:
        """Returns how many files are followed."""
        return len(self._tails)

    def read(self) -> Iterator[tuple[AnyEvent, RecordHead]]:
        """Yields the records that are new, file by file; lines that are none are passed over."""
        directory = self._place.read_from()
        of_spool = set(_hashes_of_spool(directory)) if self._place.is_spool else set[int]()
        new = set[int]()
        for path, line in self._lines(directory):
            if self._place.is_spool:
                key = hash(line)
                if key in self._of_spool or key in new:
                    continue
                if is_of_spool(path):
                    new.add(key)
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                yield _decode_event(line), _decode_head(line)
        self._of_spool = of_spool | new

    def _lines(self, directory: Path) -> Iterator[tuple[Path, bytes]]:
        there = sorted(directory.glob("*.jsonl"), key=lambda one: (not is_of_spool(one), one))
        for path in there:
            if _is_full(path):
                continue
            with suppress(*UNREADABLE):
                tail = self._tails.get(path)
                if tail is not None:
                    # Before: it may have been set aside.
                    yield from ((path, line) for line in tail.lines())
                    if tail.is_at(path):
                        continue
                    self._close(path)
                tail_bytes = self._tail_bytes if self._is_first else _LOOK_BYTES
                if path.is_file():
                    self._tails[path] = _Tail(path, tail_bytes=tail_bytes)
                    yield from ((path, line) for line in self._tails[path].lines())
        self._is_first = False
        if self._place.is_spool:  # what was removed is in no other file, as a renamed one is
            for path in self._tails.keys() - set(there):
                self._close(path)

    def close(self) -> None:
        """Closes all files."""
        for path in list(self._tails):
            self._close(path)

    def _close(self, path: Path) -> None:
        os.close(self._tails.pop(path).fd)


def _hashes_of_spool(directory: Path) -> Iterator[int]:
    """Yields those of all lines that were not uploaded yet, however many these are."""
    for path in filter(is_of_spool, directory.glob("*.jsonl")):
        with suppress(*UNREADABLE), open_file(path) as file:
            yield from (hash(line) for block in blocks_in(file) for line in lines_in(block))


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
    """A generation in a state, and when it came there; where ``is_restored`` that was before what
    is known, and the moment is that of its restore.
    """

    incarnation: int
    step: int
    at: HostMoment
    is_restored: bool = False


class LiveRun:
    """What a run is doing now."""

    def __init__(self) -> None:
        self.incarnation = self.world = self.records = 0
        self._clocks = HostClocks()
        self._common = self._clocks.solve()
        self._solved = 0
        """How many records the clocks of hosts were compared by."""
        self._known_hosts: set[str] = set()
        self._came: dict[str, list[Reached]] = {}
        """The newest generations that came into each state, as a heap."""
        self._parents: dict[int, tuple[int, int] | None] = {}
        self._restored: dict[str, Reached] = {}
        """What the newest start went on from, in each state that it must have had."""
        self.saves: dict[tuple[int, int], UnderWay] = {}
        self.phases: dict[str, deque[tuple[float, int]]] = {}
        """The last lengths of each phase, with the rank."""
        self._sampled: dict[str, tuple[HostSampled, HostMoment]] = {}
        self._troubles: deque[tuple[HostMoment, str]] = deque(maxlen=_TROUBLES)
        self.counts: Counter[str] = Counter()
        self.newest_step: int | None = None
        """The newest step that a rank of the newest start ended."""
        self._outcomes: dict[int, str] = {}
        """How ranks of the newest start let go of it."""
        self._copies: dict[int, tuple[str, float]] = {}
        self._held: deque[tuple[HostMoment, float]] = deque(maxlen=_VALUES)
        self._stored: deque[tuple[HostMoment, float]] = deque(maxlen=_SAVES)
        self._captured: deque[tuple[HostMoment, float]] = deque(maxlen=_VALUES)

    def take(self, event: AnyEvent, head: RecordHead) -> None:
        """Takes a record; of older ones than those before it only what is still true."""
        self.records += 1
        at = self._moment(head)
        if type(event).__name__ in OF_CLOCKS and head.by_host in self._known_hosts:
            self._clocks.note(event, at)
        self._begin(event.incarnation)
        for phase in BY_EVENT.get(type(event).__name__, ()):
            length_s = getattr(event, phase.field)
            self.phases.setdefault(phase.name, deque(maxlen=_VALUES)).append((length_s, event.rank))
        self._take_moment(event, at)
        match event:
            case events.RunStarted():
                self._note_world(event)
                self.counts["starts"] += event.rank == 0
            case events.SaveReturned():
                self._save(event).saved.add(event.rank)
                self._note_held(event, at)
                self._note_training(event)
            case events.StepsDone() | events.RunEnded():
                self._note_training(event)
            case events.FenceWaited():
                self._note_held(event, at)
            case events.ImageCaptured() | events.ImagePassed():
                self._save(event).copied.add(event.rank)
                self._note_copy(event, head.by_host)
            case events.ImageDurable():
                self._save(event).written.add(event.rank)
            case events.HostSampled():
                if len(self._sampled) < _HOSTS or event.host in self._sampled:
                    self._sampled[event.host] = event, at
            case events.Restored():
                self.counts["restores"] += event.rank == 0
                self._note_restored(event, at)
            case _:
                pass

    def _begin(self, incarnation: int) -> None:
        """Takes that there is such a start: the ranks of one that is new may be others."""
        if incarnation > self.incarnation:
            self.world = 0 if self.incarnation else self.world
            self.incarnation = incarnation
            self.newest_step = None
            self._outcomes.clear()
            self._copies.clear()

    def _note_world(self, of: events.RunStarted | events.SnapshotCaptured) -> None:
        if of.incarnation == self.incarnation:
            self.world = max(self.world, of.world)

    def _note_training(self, of: events.SaveReturned | events.StepsDone | events.RunEnded) -> None:
        if of.incarnation < self.incarnation:
            return
        if isinstance(of, events.RunEnded):
            self._outcomes[of.rank] = of.outcome
        elif of.step >= 0:
            self.newest_step = max(of.step, self.newest_step or 0)

    def _moment(self, head: RecordHead) -> HostMoment:
        """Returns the moment of a record; of too many hosts those that came last have one clock."""
        if len(self._known_hosts) < _HOSTS or head.by_host in self._known_hosts:
            self._known_hosts.add(head.by_host)
            return self._clocks.take(head.by_host, head.boot, head.time_s, head.mono_s)
        return self._clocks.take("", "", head.time_s, None)

    def _note_restored(self, of: events.Restored, at: HostMoment) -> None:
        parent = of.parent
        if of.incarnation >= max(self._parents, default=0):
            self._restored = {}
            if parent is not None:
                one = Reached(*parent, at, is_restored=True)
                self._restored = dict.fromkeys(_OF_SOURCE.get(of.source, ()), one)
        self._parents[of.incarnation] = parent

    def _take_moment(self, event: AnyEvent, at: HostMoment) -> None:
        match event:
            case events.SnapshotCaptured():
                self._note_world(event)
                if self._reach(event, at, "captured"):
                    self._captured.append((at, 1))
            case events.SnapshotProtected():
                self._reach(event, at, "protected")
            case events.CheckpointCached():
                self._reach(event, at, "cached")
            case events.CheckpointPublished():
                if self._reach(event, at, "durable"):
                    size_bytes = event.size_bytes - event.reused_bytes
                    self._stored.append((at, size_bytes))
            case events.SnapshotMissed():
                save = self._save(event)
                if not save.missed:
                    save.missed = event.reason
                    self._trouble(event, at, f"missed: {event.reason}")
            case events.TrainerLost():
                where = f"rank {event.rank} on {event.host} went away without a goodbye"
                self._trouble(event, at, where)
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
                self._trouble(event, at, phrase_of(event))
            case events.Warned():
                self._trouble(event, at, event.message)
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

    def _reach(self, event: AnyEvent, at: HostMoment, state: str) -> bool:
        """Returns True for the first record of it: a keeper that takes over tells once more."""
        states = self._save(event).states
        is_new = state not in states
        states.add(state)
        came = self._came.setdefault(state, [])
        if is_new:
            heapq.heappush(came, Reached(event.incarnation, event.step, at))
            if len(came) > _SAVES:
                heapq.heappop(came)
        return is_new

    def _note_held(self, of: events.SaveReturned | events.FenceWaited, at: HostMoment) -> None:
        """Keeps what held some ranks, evenly chosen: of all, the newest would be of one save."""
        if of.rank % self._every_rank == 0:
            self._held.append((at, of.held_s))

    @property
    def _every_rank(self) -> int:
        return -(-self.world // _HELD_RANKS) or 1

    def _note_copy(self, of: events.ImageCaptured | events.ImagePassed, host: str) -> None:
        """Keeps a mean of what a byte took in the last few copies of each rank."""
        if of.incarnation < self.incarnation:  # by a rank that may be another one by now
            return
        byte_s = of.copy_s / max(1, of.size_bytes)
        _, before_s = self._copies.get(of.rank, (host, byte_s))
        self._copies[of.rank] = host, before_s + (byte_s - before_s) / 8

    def _trouble(self, event: AnyEvent, at: HostMoment, text: str) -> None:
        where = f"{event.incarnation}-{event.step} " if event.step >= 0 else ""
        self._troubles.append((at, printable(where + text)))

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
    def ended(self) -> str:
        """Returns how the newest start ended, as a report does: open | closed | failed."""
        if not 0 < self.world <= len(self._outcomes):
            return "open"
        return "failed" if "failed" in self._outcomes.values() else "closed"

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

    def moment_s(self, at: HostMoment) -> float:
        """Returns a moment by the wall clock of this host, or of the run's first, as it stands."""
        if self._solved != self.records:
            self._solved = self.records
            self._common = self._clocks.solve(max(0, self._clocks.find_boot(boot_id()[:8])))
        return self._common.exact(at)

    @property
    def last_s(self) -> float:
        """Returns the moment of the newest record."""
        return max(map(self.moment_s, self._clocks.latest), default=0.0)

    @property
    def hosts(self) -> dict[str, HostSampled]:
        """Returns the last sample of each host that has been sampled lately, and is still there."""
        moments = {host: self.moment_s(at) for host, (_, at) in self._sampled.items()}
        first_s = max(moments.values(), default=0.0) - WINDOW_S
        return {host: one for host, (one, _) in self._sampled.items() if moments[host] >= first_s}

    @property
    def troubles(self) -> list[tuple[float, str]]:
        """Returns the last moments at which something went wrong, with words for it."""
        return [(self.moment_s(at), text) for at, text in self._troubles]

    def _recent(self, values: Iterable[tuple[HostMoment, float]]) -> list[tuple[float, float]]:
        """Returns those of the last minute of the records, with their moments."""
        first_s = self.last_s - WINDOW_S
        moments = ((self.moment_s(at), value) for at, value in values)
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
        first_s = min(map(self.moment_s, self._clocks.earliest))
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
