"""Folds the events of a run, in any order, into its report.

Reads ``<root>/events/*.jsonl`` of all ranks and keepers, also while they are being written; of a
long run these are its beginning and its newest part. Lines torn by a kill are skipped and counted;
a run that was killed thirty times is the one that needs a report.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast import events
from holdfast.errors import NotFound
from holdfast.events import AnyEvent
from holdfast.observe.log import divergence_of
from holdfast.observe.report import (
    Damage,
    KeeperLoss,
    ProtectionFigures,
    RefusedAtDoor,
    Report,
    Restore,
    Save,
    Start,
)
from holdfast.observe.sinks import open_parts, parts_of, size_bytes, trails

Progress = Callable[[int, int], None]


def read_report(root: str | Path, *, progress: Progress | None = None) -> Report:
    """Returns the report of the run in ``root``; raises NotFound when it left no events.

    ``progress(done_bytes, total_bytes)`` is called now and then.
    """
    writers = trails(root)
    if not writers:
        where = f"{root}/events"
        raise NotFound(
            f"no events in {where}: a run writes them as it trains; "
            "is this the directory given to Checkpointer?",
            root=str(root),
        )
    fold = _Fold()
    for line in _lines(writers, progress):
        fold.line(line)
    files = sum(1 for writer in writers for part in parts_of(writer) if part.exists())
    return fold.report(str(root), files)


def _lines(writers: list[Path], progress: Progress | None) -> Iterator[bytes]:
    total_bytes = sum(map(size_bytes, writers))
    done_bytes = 0
    for writer in writers:
        for file in open_parts(writer):
            for number, line in enumerate(file):
                done_bytes += len(line)
                if progress and number % 1000 == 0:
                    progress(min(done_bytes, total_bytes), total_bytes)
                if line.strip():
                    yield line


class _Time(msgspec.Struct):
    time_s: float = 0.0


_decode_event = msgspec.json.Decoder(AnyEvent).decode
_decode_time = msgspec.json.Decoder(_Time).decode


class _ReachedState(NamedTuple):
    """A phase that all ranks reached: the moment, and the time it took the reporting process."""

    at_s: float
    elapsed_s: float


def _first(old: _ReachedState | None, new: _ReachedState) -> _ReachedState:
    """Returns the earlier report: the first reporter knows it first hand, others were told
    later.
    """
    return new if old is None else min(old, new)


@dataclass(slots=True)
class _SaveSoFar:
    """The data of a generation while its records come in, in any order."""

    held_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    fence_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    asked_bytes: dict[int, int] = field(default_factory=dict)
    image_bytes: dict[int, int] = field(default_factory=dict)
    called_at_s: float = math.inf
    captured: _ReachedState | None = None
    is_protected: bool = False
    is_cached: bool = False
    durable: _ReachedState | None = None
    durable_bytes: int = 0
    reused_bytes: int = 0
    missed: str | None = None
    ring_bytes: int = 0

    def done(self, incarnation: int, step: int) -> Save:
        return Save(
            incarnation=incarnation,
            step=step,
            state=self._state(),
            ranks=len(self.held_s),
            held_s=max(self.held_s.values(), default=None),
            fence_s=self._fence_s(),
            captured_s=self._since_call(self.captured),
            durable_s=self._since_call(self.durable),
            persist_s=self.durable.elapsed_s if self.durable else None,
            size_bytes=self._size_bytes(),
            reason=self.missed or "",
            reused_bytes=self.reused_bytes or None,
            ring_bytes=self.ring_bytes,
        )

    def _fence_s(self) -> float | None:
        """An update whose copies were already made did not wait, and nothing was recorded."""
        if self.fence_s:
            return max(self.fence_s.values())
        return 0.0 if (self.captured or self.durable) and self.held_s else None

    def _since_call(self, reached: _ReachedState | None) -> float | None:
        if reached is None:
            return None
        # Only trainers know when `save` was called: their clock is used, or the keeper's
        # measurement where their record is lost or the clocks disagree.
        since_call_s = round(reached.at_s - self.called_at_s, 6)
        return since_call_s if since_call_s > 0 else reached.elapsed_s

    def _state(self) -> str:
        # The manifest decides: a durable generation was captured, even if a record says missed.
        if self.durable is not None:
            return "durable"
        if self.is_protected:
            return "protected"
        if self.is_cached:
            return "cached"
        if self.captured is not None:
            return "captured"
        return "unfinished" if self.missed is None else "missed"

    def _size_bytes(self) -> int:
        if self.durable_bytes:
            return self.durable_bytes
        return sum((self.image_bytes or self.asked_bytes).values())


class _Fold:
    """Folds records into a report. Ranks and keepers may both record one fact."""

    def __init__(self) -> None:
        self._torn = self._unknown = self._pruned = 0
        self._saves: dict[tuple[int, int], _SaveSoFar] = defaultdict(_SaveSoFar)
        self._started: dict[int, list[tuple[events.RunStarted, float]]] = defaultdict(list)
        self._restored: dict[tuple[int, int, int], list[tuple[events.Restored, float]]]
        self._restored = defaultdict(list)
        self._lost: dict[tuple[int, int], list[tuple[events.KeeperLost, float]]]
        self._lost = defaultdict(list)
        self._differ: dict[str, list[events.ReplicasDiffer]] = defaultdict(list)
        self._planned: dict[int, events.ProtectionPlanned] = {}
        self._broke: list[str] = []
        self._warned: list[str] = []
        self._unprotected: list[str] = []
        self._refused: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._damages: list[Damage] = []
        self._late: dict[str, set[tuple[int, int]]] = defaultdict(set)

    def line(self, line: bytes) -> None:
        try:
            event = _decode_event(line)
            time_s = _decode_time(line).time_s
        except msgspec.ValidationError:  # whole, but not one of ours: a newer version's
            self._unknown += 1
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._torn += 1
        else:
            self._event(event, time_s)

    def _event(self, event: AnyEvent, time_s: float) -> None:
        match event:
            case events.RunStarted():
                self._started[event.incarnation].append((event, time_s))
            case events.Restored():
                key = (event.incarnation, event.parent_incarnation, event.step)
                self._restored[key].append((event, time_s))
            case events.KeeperLost():
                self._lost[event.incarnation, event.rank].append((event, time_s))
            case events.PersistBroke():
                self._broke.append(f"{event.incarnation}-{event.step}: {event.reason}")
            case events.ProtectionPlanned():
                self._planned[event.incarnation] = event
            case events.ReplicasDiffer():
                self._differ[event.leaf].append(event)
            case events.RequestsRefused():
                self._refused[event.host, event.door].update(event.counts)
            case events.CheckpointPruned():
                self._pruned += 1
            case events.DamageFound():
                self._damages.append(
                    Damage(
                        event.incarnation,
                        event.step,
                        event.host,
                        event.what,
                        event.name,
                        event.size_bytes,
                        event.outcome,
                        event.reason,
                        time_s,
                    )
                )
            case events.Warned():
                self._warned.append(event.message)
            case events.SinkFailed():
                self._warned.append(f"sink {event.sink} failed: {event.reason}")
            case _:
                self._save_event(event, time_s)

    def _save_event(self, event: AnyEvent, time_s: float) -> None:
        key = (event.incarnation, event.step)
        match event:
            case events.SaveReturned():
                save = self._saves[key]
                save.held_s[event.rank] += event.held_s
                save.called_at_s = min(save.called_at_s, time_s - event.held_s)
                save.asked_bytes[event.rank] = event.size_bytes
            case events.FenceWaited():
                self._saves[key].fence_s[event.rank] += event.held_s
            case events.ImageCaptured():
                self._saves[key].image_bytes[event.rank] = event.size_bytes
            case events.ImagePassed():
                save = self._saves[key]
                save.image_bytes[event.rank] = event.size_bytes
                save.ring_bytes = max(save.ring_bytes, event.ring_bytes)
            case events.SnapshotCaptured():
                save = self._saves[key]
                save.captured = _first(save.captured, _ReachedState(time_s, event.elapsed_s))
            case events.SnapshotProtected():
                self._saves[key].is_protected = True
            case events.SnapshotNotProtected():
                self._unprotected.append(f"{event.incarnation}-{event.step}: {event.reason}")
            case events.CheckpointCached():
                self._saves[key].is_cached = True
            case events.CheckpointPublished():
                save = self._saves[key]
                save.durable = _first(save.durable, _ReachedState(time_s, event.elapsed_s))
                save.durable_bytes = max(save.durable_bytes, event.size_bytes)
                save.reused_bytes = max(save.reused_bytes, event.reused_bytes)
            case events.SnapshotMissed():
                what = f"overtaken at {event.leaf}: " if event.overtaken and event.leaf else ""
                self._saves[key].missed = what + event.reason
                for host in event.late_hosts:
                    self._late[host].add(key)

    def report(self, root: str, files: int) -> Report:
        starts = tuple(_start(n, records) for n, records in sorted(self._started.items()))
        return Report(
            root=root,
            files=files,
            torn_lines=self._torn,
            unknown_lines=self._unknown,
            starts=starts,
            saves=tuple(save.done(*key) for key, save in sorted(self._saves.items())),
            restores=tuple(_restore(records) for _, records in sorted(self._restored.items())),
            keeper_losses=self._keeper_losses(),
            persist_failures=tuple(dict.fromkeys(self._broke)),
            warnings=tuple(dict.fromkeys(self._warned)),
            pruned=self._pruned,
            protection=tuple(
                ProtectionFigures(n, event.parity, event.hosts, event.survives, event.missing)
                for n, event in sorted(self._planned.items())
            ),
            unprotected=tuple(dict.fromkeys(self._unprotected)),
            refused=tuple(
                RefusedAtDoor(*where, dict(counts))
                for where, counts in sorted(self._refused.items())
            ),
            damages=tuple(sorted(self._damages, key=lambda one: one.time_s)),
            divergences=tuple(divergence_of(*each) for each in sorted(self._differ.items())),
            late_hosts={host: len(saves) for host, saves in sorted(self._late.items())},
        )

    def _keeper_losses(self) -> tuple[KeeperLoss, ...]:
        """Each rank of a host notices each loss once: the rank that noticed most has all of
        them.
        """
        hosts = {
            (event.incarnation, event.rank): event.host
            for records in self._started.values()
            for event, _ in records
        }
        most: dict[tuple[int, str], list[KeeperLoss]] = {}
        for (incarnation, rank), records in self._lost.items():
            host = hosts.get((incarnation, rank), "")
            losses = [KeeperLoss(incarnation, host, e.reason, t) for e, t in records]
            if len(losses) > len(most.get((incarnation, host), ())):
                most[incarnation, host] = losses
        every = (loss for losses in most.values() for loss in losses)
        return tuple(sorted(every, key=lambda loss: loss.time_s))


def _start(incarnation: int, records: list[tuple[events.RunStarted, float]]) -> Start:
    return Start(
        incarnation=incarnation,
        world=max(event.world for event, _ in records),
        hosts=tuple(sorted({event.host for event, _ in records})),
        time_s=min(time_s for _, time_s in records),
    )


def _restore(records: list[tuple[events.Restored, float]]) -> Restore:
    first = records[0][0]
    return Restore(
        incarnation=first.incarnation,
        parent_incarnation=first.parent_incarnation,
        step=first.step,
        sources=tuple(sorted({event.source for event, _ in records})),
        elapsed_s=max(event.elapsed_s for event, _ in records),
        size_bytes=sum({event.rank: event.size_bytes for event, _ in records}.values()),
        saved_world=first.saved_world,
        world=first.world,
        time_s=max(time_s for _, time_s in records),
        read_bytes=sum({event.rank: event.read_bytes for event, _ in records}.values()),
        received_bytes=sum({event.rank: event.received_bytes for event, _ in records}.values()),
    )
