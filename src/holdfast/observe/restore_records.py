"""Collects the records of restores, in any order, into what the report says of each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice

from holdfast import events
from holdfast.observe.clocks import CommonClock, HostMoment
from holdfast.observe.phases import BY_EVENT
from holdfast.observe.rollup_groups import PhaseValues, RestoreRollup
from holdfast.observe.rollups import PhaseRollup
from holdfast.observe.run_report import Restore

_PHASES = tuple(phase for phase in BY_EVENT["Restored"] if phase.within)


@dataclass(slots=True)
class RankRestores:
    """Restores of some ranks, as they are rolled up."""

    #: rank -> the last moment, and the longest restore, with the last bytes
    rows: dict[int, list[float]] = field(default_factory=dict)
    phases: dict[str, PhaseRollup] = field(default_factory=lambda: defaultdict(PhaseRollup))

    def take(self, event: events.Restored, at_s: float) -> None:
        """Takes a record of a rank, with its moment."""
        sizes = event.size_bytes, event.read_bytes, event.received_bytes
        self.rows[event.rank] = [at_s, event.elapsed_s, *map(float, sizes)]
        for phase in _PHASES:
            self.phases[phase.name].add((event.rank,), (getattr(event, phase.field),))

    @property
    def last_s(self) -> float:
        """Returns the last moment."""
        return max(at_s for at_s, *_ in self.rows.values())

    def values(self) -> dict[str, PhaseValues]:
        """Returns what was spent in each phase, for a file."""
        return {name: phase.values() for name, phase in self.phases.items() if phase.largest_s > 0}


@dataclass(slots=True)
class _RestoreParts:
    """One restore while its records come in; of a rank that restored twice the last bytes count."""

    saved_world: int
    world: int
    sources: set[str] = field(default_factory=set)
    elapsed_s: float = 0.0
    #: rank -> the last moment, and bytes that were restored, read and received
    sizes: dict[int, tuple[float, int, int, int]] = field(default_factory=dict)
    phases: dict[str, PhaseRollup] = field(default_factory=lambda: defaultdict(PhaseRollup))
    #: clock -> the last moment by it
    ends: dict[int, HostMoment] = field(default_factory=dict)

    def take(self, event: events.Restored, at: HostMoment) -> None:
        self.sources.add(event.origin or event.source)
        self.elapsed_s = max(self.elapsed_s, event.elapsed_s)
        sizes = event.size_bytes, event.read_bytes, event.received_bytes
        self._take_sizes(event.rank, at, sizes)
        for phase in _PHASES:
            self.phases[phase.name].add((event.rank,), (getattr(event, phase.field),))

    def _take_sizes(self, rank: int, at: HostMoment, sizes: tuple[int, int, int]) -> None:
        self.ends[at.clock] = max(at, self.ends.get(at.clock, at))
        if rank not in self.sizes or self.sizes[rank][0] <= at.at_s:
            self.sizes[rank] = at.at_s, *sizes

    def merge(self, of: RestoreRollup, clock: int) -> None:
        self.sources.add(of.origin or of.source)
        for rank, (at_s, elapsed_s, *sizes) in of.rows():
            self.elapsed_s = max(self.elapsed_s, elapsed_s)
            size_bytes, read_bytes, received_bytes = map(int, sizes)
            of_rank = size_bytes, read_bytes, received_bytes
            self._take_sizes(rank, HostMoment(clock, at_s), of_rank)
        for phase in _PHASES:
            if phase.name in of.phases:
                self.phases[phase.name].merge(of.phases[phase.name])
            else:
                self.phases[phase.name].add(of.ranks, [0.0] * len(of.ranks))

    def done(self, key: tuple[int, int, int], common: CommonClock) -> Restore:
        of_ranks = zip(*self.sizes.values(), strict=True)
        size_bytes, read_bytes, received_bytes = map(sum, islice(of_ranks, 1, None))
        return Restore(
            *key,
            sources=tuple(sorted(self.sources)),
            elapsed_s=self.elapsed_s,
            size_bytes=size_bytes,
            saved_world=self.saved_world,
            world=self.world,
            time_s=max(map(common.seconds, self.ends.values())),
            read_bytes=read_bytes,
            received_bytes=received_bytes,
            phases={
                name: phase.spread() for name, phase in self.phases.items() if phase.largest_s > 0
            },
        )


class RestoreRecords:
    """All restores of a run: by start, and by the generation that was restored."""

    def __init__(self) -> None:
        self._restores: dict[tuple[int, int, int], _RestoreParts] = {}

    def take(self, event: events.Restored, at: HostMoment) -> None:
        """Takes a record."""
        key = event.incarnation, event.parent_incarnation, event.step
        if key not in self._restores:
            self._restores[key] = _RestoreParts(event.saved_world, event.world)
        self._restores[key].take(event, at)

    def merge(self, of: RestoreRollup, clock: int) -> None:
        """Takes a roll-up; ``clock``: its clock, as it is numbered here."""
        key = of.incarnation, of.parent_incarnation, of.step
        if key not in self._restores:
            self._restores[key] = _RestoreParts(of.saved_world, of.world)
        self._restores[key].merge(of, clock)

    def restores(self, common: CommonClock) -> tuple[Restore, ...]:
        """Returns them in the order of their starts."""
        return tuple(parts.done(key, common) for key, parts in sorted(self._restores.items()))
