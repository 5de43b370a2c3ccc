"""Folds the events of a run, in any order, into its report.

Reads ``<root>/events/*.jsonl`` of all ranks and keepers, also while they are being written; of a
long run these are its beginning and its newest part. What cannot be read is counted: a run that was
killed thirty times is the one that needs a report.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never, cast, get_args

from holdfast import events
from holdfast.collector import paused_collector
from holdfast.events import AnyEvent
from holdfast.geometry.mesh import MAX_RANKS
from holdfast.observe.clocks import CommonClock, HostMoment
from holdfast.observe.exposure import mark_abandoned, pace_of
from holdfast.observe.interference import BackgroundWork
from holdfast.observe.ledger import account
from holdfast.observe.link_rollups import note_comparisons
from holdfast.observe.links import LinkTrips
from holdfast.observe.lives import Lives
from holdfast.observe.log import divergence_of
from holdfast.observe.records import Progress, RecordCounts, RecordHead, RecordReader
from holdfast.observe.reliability import measure
from holdfast.observe.report import (
    Damage,
    KeeperLife,
    KeeperLoss,
    PinnedMemory,
    ProtectionFigures,
    RebuiltImage,
    RefusedAtDoor,
    Report,
    RunMesh,
)
from holdfast.observe.restore_records import RestoreRecords
from holdfast.observe.rollup_groups import Rollup, SampleRollup, joined_samples, sampled
from holdfast.observe.save_records import TOGETHER, SaveEvent, SaveRecords

_KeeperEvent = (
    events.KeeperStarted
    | events.KeeperLost
    | events.KeeperStopped
    | events.LoopHeld
    | events.HostSampled
    | events.RequestsRefused
    | events.DamageFound
    | events.ImageRebuilt
    | events.MemoryPinned
    | events.ClocksCompared
)


_SAVE_EVENTS = frozenset(kind.__name__ for kind in get_args(SaveEvent))


def read_report(root: str | Path, *, progress: Progress | None = None) -> Report:
    """Returns the report of the run in ``root``; raises NotFound when it left no events.

    ``progress(done_bytes, total_bytes)`` is called now and then.
    """
    records = RecordReader(root, progress)
    with paused_collector():
        fold = _Fold()
        for batch in records.batches():
            if isinstance(batch, Rollup):
                fold.take_rollup(batch)
            else:
                fold.take_all((one, one) for one in batch)
        return fold.report(str(root), records.counts)


def report_of(root: str, records: Iterable[tuple[AnyEvent, RecordHead]]) -> Report:
    """Returns the report of these records alone."""
    fold = _Fold()
    fold.take_all(records)
    return fold.report(root, RecordCounts())


@dataclass(slots=True)
class _HostSoFar:
    """The keepers of one host while their records come in."""

    starts: int = 0
    slowest_start_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    held: int = 0
    longest_held_s: float = 0.0
    samples: SampleRollup | None = None
    doing: dict[str, int] = field(default_factory=dict)
    doing_s: float = 0.0

    def merge(self, of: SampleRollup, newest_s: float) -> None:
        """Takes samples of the host, the newest of them told at ``newest_s`` of its wall clock."""
        self.samples = joined_samples(of, self.samples)
        if newest_s >= self.doing_s:  # roll-ups are read in another order where one was lost
            self.doing, self.doing_s = of.extreme.doing, newest_s


class _Fold:
    """Folds records into a report. Ranks and keepers may both record one fact."""

    def __init__(self) -> None:
        self._pruned = 0
        self._lives = Lives()
        self._saves = SaveRecords(self._lives.clocks)
        self._restores = RestoreRecords()
        self._lost: dict[tuple[int, int], list[tuple[events.KeeperLost, HostMoment]]]
        self._lost = defaultdict(list)
        self._hosts: dict[str, _HostSoFar] = defaultdict(_HostSoFar)
        self._pinned: dict[int, PinnedMemory] = {}
        self._rebuilt: list[RebuiltImage] = []
        self._differ: dict[str, list[events.ReplicasDiffer]] = defaultdict(list)
        self._planned: dict[int, events.ProtectionPlanned] = {}
        self._broke: list[str] = []
        self._dropped: list[str] = []
        self._values: list[str] = []
        self._warned: list[str] = []
        self._refused: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._background = BackgroundWork()
        self._links: dict[tuple[str, str], LinkTrips] = {}
        self._damages: list[tuple[events.DamageFound, HostMoment]] = []
        self._mesh = events.MeshUsed(names=(), sizes=())

    def take_all(self, records: Iterable[tuple[AnyEvent, RecordHead]]) -> None:
        """Takes records. Nearly all are of ``save``: those of a host are taken together, of so few
        saves that the other records of these lie near them as before.
        """
        returned, saves = defaultdict[tuple[Any, ...], list[Any]](list), set[tuple[int, int]]()
        for record in records:
            event, head = record
            saves.add((event.incarnation, event.step))
            if len(saves) > TOGETHER:
                self._take_groups(returned)
                saves.clear()
            if type(event).__name__ == "SaveReturned":
                of = event.incarnation, head.by_host, head.boot, head.mono_s is None
                returned[of].append(record)
            else:
                self._take(event, head)
        self._take_groups(returned)

    def take_rollup(self, of: Rollup) -> None:
        """Takes the roll-up of many records, but for those that stand in it as they were."""
        clocks = []
        for one in of.clocks:
            for time_s, at_s in (one.first, one.last):
                clock = self._lives.clocks.take(one.host, one.boot, time_s, at_s).clock
            clocks.append(clock)
        for life in of.lives:
            self._lives.merge(life, of.clocks[life.clock].host, clocks[life.clock])
            for rank, _, saved in life.ranks:
                if saved >= 0:
                    self._saves.note_newest(life.incarnation, rank, saved)
        for start in of.starts:
            self._lives.merge_start(start, of.clocks[start.clock].host, clocks[start.clock])
        for restore in of.restores:
            self._lives.merge_restore(restore, clocks[restore.clock])
            self._restores.merge(restore, clocks[restore.clock])
        for save in of.saves:
            self._saves.merge(save, clocks)
            self._lives.merge_save(save)
        for link in of.links:
            note_comparisons(link, clocks[link.clock], self._lives.clocks)
            self._links.setdefault((link.host, link.other), LinkTrips()).merge(link)
        newest_s = {one.host: one.last[0] for one in of.clocks}
        for host, samples in of.hosts.items():
            self._hosts[host].merge(samples, newest_s.get(host, 0.0))

    def _take_groups(self, returned: dict[tuple[Any, ...], list[Any]]) -> None:
        for some in returned.values():
            self._take_returned(*zip(*some, strict=True))
        returned.clear()

    def _take_returned(
        self, some: Sequence[events.SaveReturned], heads: Sequence[RecordHead]
    ) -> None:
        """Takes records of ``save``, of one start and one boot of a host."""
        clock, at_s = self._lives.clocks.take_all(heads)
        self._lives.take_returned(some, heads, clock, at_s)
        self._saves.take_returned(some, heads, clock, at_s)
        for event, moment_s in zip(some, at_s, strict=True):
            if event.rank == 0:
                self._background.take(event, HostMoment(clock, moment_s))

    def _take(self, event: AnyEvent, head: RecordHead) -> None:
        at = self._lives.clocks.take(head.by_host, head.boot, head.time_s, head.mono_s)
        self._lives.take(event, head, at)
        if event.rank == 0:
            self._background.take(event, at)
        if isinstance(event, events.CheckpointPruned):
            self._pruned += 1
        if type(event).__name__ in _SAVE_EVENTS:  # nearly all, and the last of the cases below
            self._saves.take(cast(SaveEvent, event), head, at)
        else:
            self._take_other(event, head, at)

    def _take_other(self, event: AnyEvent, head: RecordHead, at: HostMoment) -> None:
        match event:
            case (
                events.RunStarted()
                | events.RunEnded()
                | events.StepsDone()
                | events.PhaseEnded()
                | events.TrainerLost()
                | events.TrainerDied()
            ):
                pass  # `Lives` has them
            case events.Restored():
                self._restores.take(event, at)
            case events.SourceDropped():
                self._dropped.append(f"{event.source}: {event.reason}")
            case events.ValuesDiffer():
                self._values += event.names
            case events.PersistBroke():
                self._broke.append(f"{event.incarnation}-{event.step}: {event.reason}")
            case events.ProtectionPlanned():
                self._planned[event.incarnation] = event
            case events.MeshUsed():
                self._mesh = max(
                    self._mesh, event, key=lambda one: (one.incarnation, one.step, one.names)
                )
            case events.ReplicasDiffer():
                self._differ[event.leaf].append(event)
            case events.Warned():
                self._warned.append(event.message)
            case events.SinkFailed():
                self._warned.append(f"sink {event.sink} failed: {event.reason}")
            case (
                events.KeeperStarted()
                | events.KeeperLost()
                | events.KeeperStopped()
                | events.LoopHeld()
                | events.HostSampled()
                | events.RequestsRefused()
                | events.DamageFound()
                | events.ImageRebuilt()
                | events.MemoryPinned()
                | events.ClocksCompared()
            ):
                self._keeper_event(event, head, at)
            case _:
                self._saves.take(event, head, at)

    def _keeper_event(self, event: _KeeperEvent, head: RecordHead, at: HostMoment) -> None:
        match event:
            case events.KeeperStarted():
                host = self._hosts[head.by_host]
                host.starts += 1
                host.slowest_start_s = max(host.slowest_start_s, event.elapsed_s)
            case events.KeeperStopped():
                self._hosts[head.by_host].ends[event.reason] += 1
            case events.LoopHeld():
                host = self._hosts[event.host]
                host.held += event.times
                host.longest_held_s = max(host.longest_held_s, event.longest_s)
            case events.HostSampled():
                self._hosts[event.host].merge(sampled(event), head.time_s)
            case events.KeeperLost():
                self._lost[event.incarnation, event.rank].append((event, at))
            case events.RequestsRefused():
                self._refused[event.host, event.door].update(event.counts)
            case events.DamageFound():
                self._damages.append((event, at))
            case events.ImageRebuilt():
                of = (event.incarnation, event.step, event.rank)
                self._rebuilt.append(
                    RebuiltImage(*of, event.host, event.elapsed_s, event.size_bytes)
                )
            case events.MemoryPinned():
                before = self._pinned.get(event.rank)
                if before is None or before.elapsed_s < event.elapsed_s:
                    self._pinned[event.rank] = PinnedMemory(
                        event.rank, event.size_bytes, event.pinned_bytes, event.elapsed_s
                    )
            case events.ClocksCompared():
                self._links.setdefault((event.host, event.other), LinkTrips()).take(event)
            case _:
                assert_never(event)

    def report(self, root: str, counts: RecordCounts) -> Report:
        """Returns the report, when every record was taken."""
        common = self._lives.clock()
        restores = self._restores.restores(common)
        saves = mark_abandoned(self._saves.saves(common), restores)
        times = self._lives.times(common)
        ledger = account(times) if times else None
        starts = self._lives.starts(common)
        ranks_by_host = self._lives.newest_ranks()
        last_s = max(map(common.seconds, self._lives.clocks.latest), default=0.0)
        return Report(
            root=root,
            files=counts.files,
            torn_lines=counts.torn_lines,
            unknown_lines=counts.unknown_lines,
            invalid_lines=counts.invalid_lines,
            lost_records=counts.lost_records,
            unreadable=counts.unreadable,
            starts=starts,
            saves=saves,
            ledger=ledger,
            reliability=None
            if ledger is None
            else measure(
                ledger,
                times,
                self._lives.interrupted(common),
                pace_of(
                    saves,
                    self._lives.step_s(common),
                    last_s,
                    starts[-1].newest_step if starts else None,
                ),
            ),
            clocks=common.offsets,
            wrong_clocks=self._saves.wrong_clocks,
            unplaced_hosts=tuple(host for host in common.unknown if host),
            ranks_by_host=ranks_by_host,
            placed_since=self._lives.placed_since(),
            behind=self._saves.behind([rank for ranks in ranks_by_host.values() for rank in ranks]),
            last_s=last_s,
            trained_s=self._lives.trained_s(common),
            longest_step_s=self._lives.longest_step_s(common),
            restores=restores,
            keeper_losses=self._keeper_losses(common),
            keepers=tuple(_keeper_life(*each) for each in sorted(self._hosts.items())),
            pinned=tuple(one for _, one in sorted(self._pinned.items())),
            rebuilt=tuple(self._rebuilt),
            dropped_sources=tuple(dict.fromkeys(self._dropped)),
            differing_values=tuple(dict.fromkeys(self._values)),
            persist_failures=tuple(dict.fromkeys(self._broke)),
            warnings=tuple(dict.fromkeys(self._warned)),
            pruned=self._pruned,
            protection=tuple(
                ProtectionFigures(n, event.parity, event.hosts, event.survives, event.missing)
                for n, event in sorted(self._planned.items())
            ),
            unprotected=self._saves.unprotected(),
            refused=tuple(
                RefusedAtDoor(*where, dict(counts))
                for where, counts in sorted(self._refused.items())
            ),
            damages=_damages(self._damages, common),
            divergences=tuple(divergence_of(*each) for each in sorted(self._differ.items())),
            late_hosts=self._saves.late_hosts(),
            interference=self._background.measure(common),
            links=tuple(trips.figures(*of) for of, trips in sorted(self._links.items())),
            mesh=_mesh(self._mesh),
        )

    def _keeper_losses(self, common: CommonClock) -> tuple[KeeperLoss, ...]:
        """Each rank of a host notices each loss once: the rank that noticed most has all of
        them.
        """
        most: dict[tuple[int, str], list[KeeperLoss]] = {}
        for (incarnation, rank), records in self._lost.items():
            host = self._lives.host_of(incarnation, rank)
            losses = [
                KeeperLoss(incarnation, host, e.reason, common.seconds(at)) for e, at in records
            ]
            if len(losses) > len(most.get((incarnation, host), ())):
                most[incarnation, host] = losses
        every = (loss for losses in most.values() for loss in losses)
        return tuple(sorted(every, key=lambda loss: loss.time_s))


def _mesh(told: events.MeshUsed) -> RunMesh | None:
    """Returns the mesh of a record; None for one that is none, or too large to be one."""
    count = math.prod(told.sizes)
    if not told.names or len(told.names) != len(told.sizes) or not 0 < count <= MAX_RANKS:
        return None
    if told.ranks and len(set(told.ranks)) != count:
        return None
    return RunMesh(told.names, told.sizes, told.ranks)


def _keeper_life(host: str, seen: _HostSoFar) -> KeeperLife:
    starts = seen.starts, seen.slowest_start_s, dict(seen.ends), seen.held, seen.longest_held_s
    of = seen.samples
    if of is None:
        return KeeperLife(host, *starts)
    return KeeperLife(
        host,
        *starts,
        of.samples,
        of.extreme.queued_s,
        of.extreme.finish_s,
        of.extreme.free_bytes,
        of.extreme.keeper_bytes,
        of.cpu / of.told if of.told else -1.0,
        of.io / of.told if of.told else -1.0,
        seen.doing,
    )


def _damages(
    found: list[tuple[events.DamageFound, HostMoment]], common: CommonClock
) -> tuple[Damage, ...]:
    damages = (
        Damage(
            event.incarnation,
            event.step,
            event.host,
            event.what,
            event.name,
            event.size_bytes,
            event.outcome,
            event.reason,
            common.seconds(at),
        )
        for event, at in found
    )
    return tuple(sorted(damages, key=lambda one: one.time_s))
