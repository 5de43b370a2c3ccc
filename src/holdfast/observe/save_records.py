"""Collects the records of every save, in any order, into what the report says of it.

Moments are compared by the clock of one host alone, which never goes back: clocks of hosts differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from holdfast import events
from holdfast.observe.records import RecordHead
from holdfast.observe.report import Save

_RankEvent = (
    events.SaveReturned
    | events.FenceWaited
    | events.ImageCaptured
    | events.ImagePassed
    | events.ImageDurable
)
_GenerationEvent = (
    events.SnapshotCaptured
    | events.SnapshotProtected
    | events.SnapshotNotProtected
    | events.SnapshotMissed
    | events.CheckpointCached
    | events.CheckpointPublished
)
SaveEvent = _RankEvent | _GenerationEvent


class _ReachedState(NamedTuple):
    """A phase that all ranks reached: who reported it, and the time it took the reporter."""

    time_s: float
    host: str
    mono_s: float | None
    elapsed_s: float


def _first(old: _ReachedState | None, new: _ReachedState) -> _ReachedState:
    """Returns the earlier report: a keeper that takes over reports again what it finds."""
    return new if old is None else min(old, new, key=lambda each: each.time_s)


class _ByRank(dict[int, float]):
    """Seconds of each rank; what a rank reports several times in one save adds up."""

    def add(self, rank: int, elapsed_s: float) -> None:
        self[rank] = self.get(rank, 0.0) + elapsed_s

    @property
    def slowest(self) -> int | None:
        return max(self, key=lambda rank: self[rank], default=None)


_QUANTITIES = (
    "held_s",
    "describe_s",
    "volatile_s",
    "wait_previous_s",
    "fence_s",
    "copy_s",
    "write_s",
)


@dataclass(slots=True)
class _SaveParts:
    """The data of a generation while its records come in, in any order."""

    by_rank: dict[str, _ByRank] = field(
        default_factory=lambda: {name: _ByRank() for name in _QUANTITIES}
    )
    asked_bytes: dict[int, int] = field(default_factory=dict)
    image_bytes: dict[int, int] = field(default_factory=dict)
    #: The first call of ``save`` on each host, by its own clock.
    called_at_s: dict[str, float] = field(default_factory=dict)
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

    def done(self, incarnation: int, step: int) -> Save:
        slowest = {name: ranks.slowest for name, ranks in self.by_rank.items()}
        return Save(
            incarnation=incarnation,
            step=step,
            state=self._state(),
            ranks=len(self.by_rank["held_s"]),
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
            slowest={name: rank for name, rank in slowest.items() if rank is not None},
            size_bytes=self._size_bytes(),
            reason=self.missed or "",
            reused_bytes=self.reused_bytes or None,
            ring_bytes=self.ring_bytes,
        )

    def _largest(self, quantity: str) -> float | None:
        return max(self.by_rank[quantity].values(), default=None)

    def _fence_s(self) -> float | None:
        """An update whose copies were already made did not wait, and nothing was recorded."""
        if self.by_rank["fence_s"]:
            return self._largest("fence_s")
        return 0.0 if (self.captured or self.durable) and self.by_rank["held_s"] else None

    def _since_call(self, reached: _ReachedState | None) -> float | None:
        if reached is None:
            return None
        # Only trainers know when `save` was called: those of the reporter's own host have its
        # clock. Without any, the keeper's measurement from the first request stands.
        called_at_s = self.called_at_s.get(reached.host)
        if called_at_s is None or reached.mono_s is None:
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
        return sum((self.image_bytes or self.asked_bytes).values())

    def take_of_rank(self, event: _RankEvent, head: RecordHead) -> None:
        """Takes a record that is of one rank."""
        match event:
            case events.SaveReturned():
                for name in ("held_s", "describe_s", "volatile_s", "wait_previous_s"):
                    self.by_rank[name].add(event.rank, getattr(event, name))
                if head.mono_s is not None:
                    earliest = self.called_at_s.get(head.by_host, math.inf)
                    self.called_at_s[head.by_host] = min(earliest, head.mono_s - event.held_s)
                self.asked_bytes[event.rank] = event.size_bytes
            case events.FenceWaited():
                self.by_rank["fence_s"].add(event.rank, event.held_s)
            case events.ImageCaptured():
                self.by_rank["copy_s"].add(event.rank, event.copy_s)
                self.image_bytes[event.rank] = event.size_bytes
            case events.ImagePassed():
                self.by_rank["copy_s"].add(event.rank, event.copy_s)
                self.image_bytes[event.rank] = event.size_bytes
                self.ring_bytes = max(self.ring_bytes, event.ring_bytes)
            case events.ImageDurable():
                ranks = self.by_rank["write_s"]
                ranks[event.rank] = max(ranks.get(event.rank, 0.0), event.elapsed_s)
            case _:
                assert_never(event)

    def take_of_all(self, event: _GenerationEvent, head: RecordHead) -> None:
        """Takes a record that is of all ranks."""
        match event:
            case events.SnapshotCaptured():
                self.captured = _first(self.captured, _reached(event, head))
            case events.SnapshotProtected():
                self.protect_s = max(self.protect_s or 0.0, event.elapsed_s)
            case events.SnapshotNotProtected():
                self.unprotected.append(event.reason)
            case events.CheckpointCached():
                self.is_cached = True
            case events.CheckpointPublished():
                self.durable = _first(self.durable, _reached(event, head))
                self.durable_bytes = max(self.durable_bytes, event.size_bytes)
                self.reused_bytes = max(self.reused_bytes, event.reused_bytes)
            case events.SnapshotMissed():
                what = f"overtaken at {event.leaf}: " if event.overtaken and event.leaf else ""
                self.missed = what + event.reason
                self.late_hosts.update(event.late_hosts)
            case _:
                assert_never(event)


class SaveRecords:
    """All saves of a run by their generation."""

    def __init__(self) -> None:
        self._saves: dict[tuple[int, int], _SaveParts] = defaultdict(_SaveParts)

    def take(self, event: SaveEvent, head: RecordHead) -> None:
        """Takes a record of a save."""
        save = self._saves[event.incarnation, event.step]
        if isinstance(event, _RankEvent):
            save.take_of_rank(event, head)
        else:
            save.take_of_all(event, head)

    def saves(self) -> tuple[Save, ...]:
        """Returns the saves in the order of their generations."""
        return tuple(save.done(*key) for key, save in sorted(self._saves.items()))

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
    event: events.SnapshotCaptured | events.CheckpointPublished, head: RecordHead
) -> _ReachedState:
    return _ReachedState(head.time_s, head.by_host, head.mono_s, event.elapsed_s)
