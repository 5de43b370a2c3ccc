"""Collects the records of every save, in any order, into what the report says of it.

Moments are compared by the clock of one host alone, which never goes back: clocks of hosts differ.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import add, attrgetter
from typing import NamedTuple, assert_never, cast, get_args

from holdfast import events
from holdfast.observe.clocks import CommonClock, HostClocks, HostMoment
from holdfast.observe.phases import BY_EVENT
from holdfast.observe.rank_sets import RankSet
from holdfast.observe.records import RecordHead
from holdfast.observe.rollup_groups import SaveRollup
from holdfast.observe.rollups import NAMED, PhaseRollup, PhaseSpread
from holdfast.observe.run_report import Save, WrongClock
from holdfast.observe.save_calls import SaveCalls

_ImageEvent = events.FenceWaited | events.ImageCaptured | events.ImagePassed | events.ImageDurable
_GenerationEvent = (
    events.SnapshotCaptured
    | events.SnapshotProtected
    | events.SnapshotNotProtected
    | events.SnapshotMissed
    | events.CheckpointCached
    | events.CheckpointPublished
)
SaveEvent = events.SaveReturned | _ImageEvent | _GenerationEvent | events.CheckpointPruned
_OF_RANKS = frozenset(kind.__name__ for kind in get_args(_ImageEvent))
#: The phases of ``SaveReturned``, in the order in which they are kept apart.
_RETURNED = tuple(phase.report_name for phase in BY_EVENT["SaveReturned"])
_returned = attrgetter(*(phase.field for phase in BY_EVENT["SaveReturned"]))
#: Of what a rank reports several times in one save the longest counts; else it adds up.
_LONGEST = frozenset({"ImageDurable"})
#: The phases that grow with the bytes of a rank: those that it copied, or that were written.
_GROWING = (("copy_s", "image_bytes"), ("write_s", "written_bytes"), ("finish_s", "written_bytes"))
_GIB = float(1 << 30)


class _ReachedState(NamedTuple):
    """A phase that all ranks reached: who reported it, and the time it took the reporter."""

    time_s: float
    clock: int
    mono_s: float | None
    elapsed_s: float


def _first(old: _ReachedState | None, new: _ReachedState) -> _ReachedState:
    """Returns the earlier report: a keeper that takes over reports again what it finds."""
    return new if old is None else min(old, new, key=lambda each: each.time_s)


#: The newest generation of a rank that returned from none.
_NONE = 0, -1
#: Saves of which the values of ranks are kept apart: the records of a host's ranks of one save lie
#: together, with few other saves between them.
_OPEN_SAVES = 64
#: Saves whose records may be taken in any order: far fewer.
TOGETHER = 16


class _OpenRanks:
    """The values of ranks in one save, kept apart while its records pass."""

    __slots__ = ("asked_bytes", "image_bytes", "returned", "seconds", "written_bytes")

    def __init__(self) -> None:
        self.returned: dict[int, tuple[float, ...]] = {}
        """What a rank spent in each phase of ``_RETURNED``."""
        self.seconds: dict[str, dict[int, float]] = {}
        self.asked_bytes: dict[int, int] = {}
        self.image_bytes: dict[int, int] = {}
        self.written_bytes: dict[int, int] = {}

    def even(self) -> dict[str, dict[int, float]]:
        """Returns what the phases that grow with the bytes take for a GiB."""
        found = {}
        for phase, name in _GROWING:
            sizes = getattr(self, name)
            seconds = self.seconds.get(phase, {})
            found[phase] = {r: s * _GIB / sizes[r] for r, s in seconds.items() if sizes.get(r)}
        return {phase: ranks for phase, ranks in found.items() if ranks}

    def phases(self) -> Iterator[tuple[str, Collection[int], Collection[float]]]:
        """Yields each phase, with ranks and what they spent in it."""
        if self.returned:
            columns = zip(*self.returned.values(), strict=True)
            for phase, column in zip(_RETURNED, columns, strict=True):
                yield phase, self.returned.keys(), column
        for phase, seconds in self.seconds.items():
            yield phase, seconds.keys(), seconds.values()

    def add_returned(self, of: events.SaveReturned) -> None:
        """What a rank reports several times in one save adds up."""
        spent: tuple[float, ...] = _returned(of)
        before = self.returned.get(of.rank)
        self.returned[of.rank] = spent if before is None else tuple(map(add, before, spent))
        self.asked_bytes[of.rank] = of.size_bytes

    def add(self, event: _ImageEvent) -> None:
        """Takes the phases of a record."""
        name = type(event).__name__
        for phase in BY_EVENT[name]:
            elapsed_s = getattr(event, phase.field)
            if elapsed_s > 0 or phase.is_whole:
                ranks = self.seconds.setdefault(phase.report_name, {})
                before_s = ranks.get(event.rank, 0.0)
                is_longest = name in _LONGEST
                ranks[event.rank] = max(before_s, elapsed_s) if is_longest else before_s + elapsed_s


@dataclass(slots=True)
class SaveParts:
    """The data of a generation while its records come in, in any order."""

    phases: dict[str, PhaseRollup] = field(default_factory=dict)
    even: dict[str, PhaseRollup] = field(default_factory=dict)
    #: The phases that the coordinator goes through for all, in seconds.
    of_all: dict[str, float] = field(default_factory=dict)
    asked_bytes: int = 0
    image_bytes: int = 0
    written_bytes: int = 0
    open: _OpenRanks | None = None
    #: The images that were captured or passed on, and those that were written.
    images: int = 0
    written: int = 0
    calls: SaveCalls = field(default_factory=SaveCalls)
    captured: _ReachedState | None = None
    protect_s: float | None = None
    is_cached: bool = False
    durable: _ReachedState | None = None
    durable_bytes: int = 0
    reused_bytes: int = 0
    missed: str | None = None
    late_hosts: set[str] = field(default_factory=set)
    unprotected: list[str] = field(default_factory=list)
    ring_bytes: int = 0
    asked_durable: bool = False
    #: The ranks that returned from it, and those whose image was copied, and written.
    asked: RankSet = field(default_factory=RankSet)
    copied: RankSet = field(default_factory=RankSet)
    stored: RankSet = field(default_factory=RankSet)

    def done(
        self, incarnation: int, step: int, common: CommonClock, wrong: Mapping[int, float]
    ) -> Save:
        last = self.calls.last(common, wrong)
        return Save(
            time_s=last.time_s,
            late_s=last.late_s,
            late_rank=last.rank,
            even={name: phase.spread(self._usual_gib(name)) for name, phase in self.even.items()},
            even_bytes={name: self._usual_gib(name) * _GIB for name in self.even},
            incarnation=incarnation,
            step=step,
            state=self._state(),
            ranks=self.phases["held_s"].count if "held_s" in self.phases else 0,
            held_s=self._largest("held_s"),
            describe_s=self._largest("describe_s"),
            volatile_s=self._largest("volatile_s"),
            wait_previous_s=self._largest("wait_previous_s"),
            fence_s=self._fence_s(),
            copy_s=self._largest("copy_s"),
            captured_s=self._since_call(self.captured),
            protect_s=self.protect_s,
            durable_s=self._since_call(self.durable),
            persist_s=self.durable.elapsed_s if self.durable else None,
            write_s=self._largest("write_s"),
            slowest={name: phase.slowest_rank for name, phase in self.phases.items()},
            phases={name: phase.spread() for name, phase in self.phases.items()} | self._of_all(),
            size_bytes=self._size_bytes(),
            reason=self.missed or "",
            reused_bytes=self.reused_bytes or None,
            ring_bytes=self.ring_bytes,
            asked_durable=self.asked_durable,
            uncopied=self._uncopied(),
            unwritten=self._unwritten(),
        )

    def _uncopied(self) -> tuple[int, ...]:
        """Returns ranks that returned and have no image; those of which one was written had one."""
        if self.captured or self.durable:
            return ()
        return tuple(islice(self.asked.without(self.copied, self.stored), NAMED))

    def _unwritten(self) -> tuple[int, ...]:
        if self.durable or not self.asked_durable:
            return ()
        return tuple(islice(self.copied.without(self.stored), NAMED))

    def _of_all(self) -> dict[str, PhaseSpread]:
        return {name: PhaseSpread(1, s, s, s, s, ((-1, s),)) for name, s in self.of_all.items()}

    def _usual_gib(self, phase: str) -> float:
        """Returns the GiB that a rank has of what a phase grows with, on average over all."""
        if phase == "copy_s":
            return self.image_bytes / max(1, self.images) / _GIB
        return self.written_bytes / max(1, self.written) / _GIB

    def wrong_clocks(self, common: CommonClock) -> dict[int, float]:
        """Returns the clocks that contradict the coordinator's, and how far each is ahead."""
        captured = self.captured
        if captured is None or captured.mono_s is None:
            return {}
        return self.calls.wrong(common, captured.clock)

    def _largest(self, quantity: str) -> float | None:
        return self.phases[quantity].largest_s if quantity in self.phases else None

    def _fence_s(self) -> float | None:
        """An update whose copies were already made did not wait, and nothing was recorded."""
        if "fence_s" in self.phases:
            return self._largest("fence_s")
        return 0.0 if (self.captured or self.durable) and "held_s" in self.phases else None

    def _since_call(self, reached: _ReachedState | None) -> float | None:
        if reached is None:
            return None
        # Only trainers know when `save` was called: those of the reporter's own host have its
        # clock. Without any, the keeper's measurement from the first request stands.
        called_at_s = self.calls.first_of(reached.clock)
        if math.isinf(called_at_s) or reached.mono_s is None:
            return reached.elapsed_s
        since_call_s = round(reached.mono_s - called_at_s, 6)
        return since_call_s if since_call_s > 0 else reached.elapsed_s

    def _state(self) -> str:
        # The manifest decides: a durable generation was captured, even if a record says missed.
        if self.durable is not None:
            return "durable"
        if self.protect_s is not None:
            return "protected"
        if self.is_cached:
            return "cached"
        if self.captured is not None:
            return "captured"
        return "unfinished" if self.missed is None else "missed"

    def _size_bytes(self) -> int:
        if self.durable_bytes:
            return self.durable_bytes
        return self.image_bytes if self.images else self.asked_bytes

    def close_ranks(self) -> None:
        """Rolls up the values of ranks that are kept apart."""
        ranks, self.open = self.open, None
        if ranks is None:
            return
        for phase, numbers, seconds in ranks.phases():
            self.phase("phases", phase).add(numbers, seconds)
        for phase, by_rank in ranks.even().items():
            self.phase("even", phase).add(by_rank.keys(), by_rank.values())
        self.asked.add(ranks.asked_bytes.keys())
        self.copied.add(ranks.image_bytes.keys())
        self.stored.add(ranks.written_bytes.keys())
        self.asked_bytes += sum(ranks.asked_bytes.values())
        self.image_bytes += sum(ranks.image_bytes.values())
        self.images += len(ranks.image_bytes)
        self.written_bytes += sum(ranks.written_bytes.values())
        self.written += len(ranks.written_bytes)

    def phase(self, kind: str, phase: str) -> PhaseRollup:
        """Returns the values of a phase; ``kind``: "phases", or "even" for those for a GiB."""
        of: dict[str, PhaseRollup] = getattr(self, kind)
        if phase not in of:
            of[phase] = PhaseRollup()
        return of[phase]

    def rollup(self, incarnation: int, step: int) -> SaveRollup:
        """Returns all that is known of its ranks, for a file."""
        return SaveRollup(
            incarnation,
            step,
            {name: phase.values() for name, phase in self.phases.items()},
            {name: phase.values() for name, phase in self.even.items()},
            list(self.calls.values()),
            list(self.calls.copies()),
            asked_bytes=self.asked_bytes,
            image_bytes=self.image_bytes,
            images=self.images,
            written_bytes=self.written_bytes,
            written=self.written,
            ring_bytes=self.ring_bytes,
            asked_durable=self.asked_durable,
            asked=self.asked.ranges(),
            copied=self.copied.ranges(),
            stored=self.stored.ranges(),
            left_out=self.calls.left_out,
        )

    def merge(self, of: SaveRollup, clocks: Sequence[int]) -> None:
        """Adds the ranks of a roll-up; ``clocks``: its clocks, as they are numbered here."""
        for kind, values in (("phases", of.phases), ("even", of.even)):
            for phase, some in values.items():
                self.phase(kind, phase).merge(some)
        for clock, first_s, last_s, rank in of.calls:
            self.calls.note(clocks[clock], first_s, last_s, rank)
        for clock, began_s in of.copies:
            self.calls.note_copy(clocks[clock], began_s)
        self.calls.left_out += of.left_out
        self.asked_bytes += of.asked_bytes
        self.image_bytes += of.image_bytes
        self.images += of.images
        self.written_bytes += of.written_bytes
        self.written += of.written
        self.ring_bytes = max(self.ring_bytes, of.ring_bytes)
        self.asked_durable = self.asked_durable or of.asked_durable
        self.asked.add_ranges(of.asked)
        self.copied.add_ranges(of.copied)
        self.stored.add_ranges(of.stored)

    def take_returned(
        self, calls: Sequence[tuple[events.SaveReturned, float]], clock: int, *, is_own_clock: bool
    ) -> None:
        """Takes records of ``save`` by one clock, with their moments."""
        ranks = self.open = self.open or _OpenRanks()
        first_s, last_s, last_rank = math.inf, -math.inf, -1
        for event, at_s in calls:
            ranks.add_returned(event)
            called_s = at_s - event.held_s
            first_s = called_s if called_s < first_s else first_s
            if called_s > last_s:
                last_s, last_rank = called_s, event.rank
            if event.durable:
                self.asked_durable = True
        self.calls.note(clock, first_s, last_s, last_rank, is_own_clock=is_own_clock)

    def take_of_rank(self, event: _ImageEvent, at: HostMoment, *, is_own_clock: bool) -> None:
        """Takes a record that is of one rank, but for those of ``save``."""
        ranks = self.open = self.open or _OpenRanks()
        ranks.add(event)
        match event:
            case events.FenceWaited():
                pass
            case events.ImageCaptured() | events.ImagePassed():
                ranks.image_bytes[event.rank] = event.size_bytes
                if is_own_clock:
                    self.calls.note_copy(at.clock, at.at_s - event.copy_s)
                if isinstance(event, events.ImagePassed):
                    self.ring_bytes = max(self.ring_bytes, event.ring_bytes)
            case events.ImageDurable():
                ranks.written_bytes[event.rank] = event.size_bytes
            case _:
                assert_never(event)

    def take_of_all(self, event: _GenerationEvent, head: RecordHead, clock: int) -> None:
        """Takes a record that is of all ranks."""
        match event:
            case events.SnapshotCaptured():
                before = self.captured
                self.captured = _first(before, _reached(event, head, clock))
                if self.captured is not before:
                    self._take_phases(event)
            case events.SnapshotProtected():
                if self.protect_s is None or event.elapsed_s > self.protect_s:
                    self.protect_s = event.elapsed_s
                    self._take_phases(event)
            case events.SnapshotNotProtected():
                self.unprotected.append(event.reason)
            case events.CheckpointCached():
                self.is_cached = True
            case events.CheckpointPublished():
                published = self.durable
                self.durable = _first(published, _reached(event, head, clock))
                if self.durable is not published:
                    self._take_phases(event)
                self.durable_bytes = max(self.durable_bytes, event.size_bytes)
                self.reused_bytes = max(self.reused_bytes, event.reused_bytes)
            case events.SnapshotMissed():
                what = f"overtaken at {event.leaf}: " if event.overtaken and event.leaf else ""
                self.missed = what + event.reason
                self.late_hosts.update(event.late_hosts)
            case _:
                assert_never(event)

    def _take_phases(self, event: _GenerationEvent) -> None:
        """Takes what the coordinator spent in the phases of a record."""
        for phase in BY_EVENT[type(event).__name__]:
            elapsed_s = getattr(event, phase.field)
            if elapsed_s > 0 or phase.is_whole:
                self.of_all[phase.report_name] = elapsed_s
            else:
                self.of_all.pop(phase.report_name, None)


class SaveRecords:
    """All saves of a run by their generation. ``clocks``: those that moments are of."""

    def __init__(self, clocks: HostClocks | None = None) -> None:
        self._saves: dict[tuple[int, int], SaveParts] = defaultdict(SaveParts)
        #: What removing checkpoints took, by the save that it went with, if that was read.
        self._prune_s: dict[tuple[int, int], float] = defaultdict(float)
        self._clocks = HostClocks() if clocks is None else clocks
        #: Those of which the values of ranks are kept apart, the last that had a record last.
        self._open: OrderedDict[tuple[int, int], SaveParts] = OrderedDict()
        #: The newest generation of which a rank returned from ``save``.
        self._newest_of: dict[int, tuple[int, int]] = {}
        self._wrong: dict[str, WrongClock] = {}

    def take(self, event: SaveEvent, head: RecordHead, at: HostMoment | None = None) -> None:
        """Takes a record of a save; ``at``: its moment, where that is known already."""
        if at is None:
            at = self._clocks.take(head.by_host, head.boot, head.time_s, head.mono_s)
        if isinstance(event, events.SaveReturned):
            self.take_returned((event,), (head,), at.clock, (at.at_s,))
            return
        key = event.incarnation, event.step
        if isinstance(event, events.CheckpointPruned):
            self._prune_s[key] += event.elapsed_s
            return
        save = self._saves[key]
        if type(event).__name__ in _OF_RANKS:
            self._keep_open(key, save)
            own = head.mono_s is not None
            save.take_of_rank(cast(_ImageEvent, event), at, is_own_clock=own)
        else:
            save.take_of_all(cast(_GenerationEvent, event), head, at.clock)

    def take_returned(
        self,
        some: Sequence[events.SaveReturned],
        heads: Sequence[RecordHead],
        clock: int,
        at_s: Sequence[float],
    ) -> None:
        """Takes records of one start, and of one boot of a host, with their moments."""
        start, is_own_clock = some[0].incarnation, heads[0].mono_s is not None
        calls = defaultdict[int, list[tuple[events.SaveReturned, float]]](list)
        newest = dict[int, int]()
        for event, moment_s in zip(some, at_s, strict=True):
            step, rank = event.step, event.rank
            calls[step].append((event, moment_s))
            if step > newest.get(rank, -2):
                newest[rank] = step
        for step, own in calls.items():
            key = start, step
            save = self._saves[key]
            self._keep_open(key, save)
            save.take_returned(own, clock, is_own_clock=is_own_clock)
        for rank, step in newest.items():
            self.note_newest(start, rank, step)

    def _keep_open(self, key: tuple[int, int], save: SaveParts) -> None:
        if key in self._open:
            self._open.move_to_end(key)
            return
        self._open[key] = save
        if len(self._open) > _OPEN_SAVES:
            self._open.popitem(last=False)[1].close_ranks()

    def saves(self, common: CommonClock | None = None) -> tuple[Save, ...]:
        """Returns the saves in the order of their generations."""
        self._close_all()
        common = self._clocks.solve() if common is None else common
        self._wrong.clear()
        done = []
        for (number, step), save in sorted(self._saves.items()):
            if (number, step) in self._prune_s:
                save.of_all["prune_s"] = self._prune_s[number, step]
            wrong = save.wrong_clocks(common)
            for clock, ahead_s in wrong.items():
                self._note_wrong(common.host_of(clock), ahead_s, f"{number}-{step}")
            done.append(save.done(number, step, common, wrong))
        return tuple(done)

    @property
    def wrong_clocks(self) -> tuple[WrongClock, ...]:
        """Returns the hosts whose clocks contradict what must have been, each with its worst; known
        when ``saves`` was called.
        """
        return tuple(one for _, one in sorted(self._wrong.items()))

    def _note_wrong(self, host: str, ahead_s: float, generation: str) -> None:
        before = self._wrong.get(host, WrongClock(host, 0.0, 0, generation))
        worst_s = max(before.ahead_s, ahead_s, key=abs)
        self._wrong[host] = replace(before, ahead_s=worst_s, saves=before.saves + 1)

    def rollups(self) -> Iterator[SaveRollup]:
        """Yields a roll-up of the ranks of each save."""
        self._close_all()
        return (save.rollup(*key) for key, save in self._saves.items())

    def merge(self, of: SaveRollup, clocks: Sequence[int]) -> None:
        """Adds a roll-up; ``clocks``: its clocks, as they are numbered here."""
        self._saves[of.incarnation, of.step].merge(of, clocks)

    def parts(self, incarnation: int, step: int) -> SaveParts:
        """Returns the data of a save, to be added to."""
        return self._saves[incarnation, step]

    def note_newest(self, incarnation: int, rank: int, step: int) -> None:
        """Takes the newest save of a start that a rank returned from."""
        self._newest_of[rank] = max(self._newest_of.get(rank, _NONE), (incarnation, step))

    def _close_all(self) -> None:
        for save in self._open.values():
            save.close_ranks()
        self._open.clear()

    def behind(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Returns those of the ranks that did not return from the newest save of any: the first."""
        newest = max((self._newest_of.get(rank, _NONE) for rank in ranks), default=_NONE)
        missing = sorted(rank for rank in ranks if self._newest_of.get(rank, _NONE) < newest)
        return tuple(missing[:NAMED])

    def unprotected(self) -> tuple[str, ...]:
        """Returns the generations of which no parity could be made, with the reason."""
        every = sorted(self._saves.items())
        lines = (f"{n}-{step}: {why}" for (n, step), save in every for why in save.unprotected)
        return tuple(dict.fromkeys(lines))

    def late_hosts(self) -> dict[str, int]:
        """Returns the hosts that the others waited for in vain, and at how many saves."""
        counts: dict[str, int] = defaultdict(int)
        for save in self._saves.values():
            for host in save.late_hosts:
                counts[host] += 1
        return dict(sorted(counts.items()))


def _reached(
    event: events.SnapshotCaptured | events.CheckpointPublished, head: RecordHead, clock: int
) -> _ReachedState:
    return _ReachedState(head.time_s, clock, head.mono_s, event.elapsed_s)
