"""PURE. One step of the optimizer, played through: who does what when, by the model.

Four lanes (the link in each direction, the host's cores, the device) take one task at a time, in
the order in which tasks can begin. What runs on one lane slows the others as the rates say, so
time is counted from one beginning or end to the next. Plans are chosen by it and checked with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal, NamedTuple

from holdfast.offload.rates import Rates

Lane = Literal["h2d", "d2h", "host", "device"]
Act = Literal["gradient", "update", "upload", "prefetch", "compute", "flush"]


class Name(NamedTuple):
    """What is done with which subgroup.

    On the host: ``gradient`` (to the host), ``update``, ``upload`` (of its parameters). On the
    device: ``prefetch`` (of its state), ``compute`` (the update), ``flush`` (of its state).
    """

    act: Act
    subgroup: int


class Task(NamedTuple):
    """Something a lane does in ``work_s`` seconds when nothing slows it, after other tasks."""

    name: Name
    lane: Lane
    work_s: float
    after: tuple[Name, ...] = ()
    from_s: float = 0.0


class Span(NamedTuple):
    """When something began and ended; the step begins at 0."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All of a step: what ran when, on which lane."""

    spans: Mapping[Name, Span]
    tasks: Mapping[Name, Task]

    @property
    def finished_s(self) -> float:
        """When everything is done: the host holds all state, the device all parameters."""
        return max((span.end_s for span in self.spans.values()), default=0.0)

    @property
    def visible_s(self) -> float:
        """When the device holds all new parameters; state may still be on its way back."""
        return max((s.end_s for name, s in self.spans.items() if name.act != "flush"), default=0.0)

    def busy_s(self, lane: Lane) -> float:
        """How long a lane worked."""
        of_lane = (span for name, span in self.spans.items() if self.tasks[name].lane == lane)
        return sum(span.end_s - span.begin_s for span in of_lane)

    def work_s(self, lane: Lane) -> float:
        """How long it would have, if nothing had slowed it."""
        return sum(task.work_s for task in self.tasks.values() if task.lane == lane)


def tasks(
    sizes: Sequence[int], host: Sequence[int], device: Sequence[int], rates: Rates, *,
    device_slots: int, ready_s: Sequence[float] = (),
) -> list[Task]:  # fmt: skip
    """All that a step does, in the order in which it is wanted.

    ``ready_s``: when each gradient lies on the device, below 0 before the step; without it the
    gradients are where they are needed. A slot takes its next subgroup when the last is flushed.
    """
    return [
        *_on_device(sizes, device, rates, device_slots, ready_s),
        *_on_host(sizes, host, rates, ready_s),
    ]


def _on_host(
    sizes: Sequence[int], host: Sequence[int], rates: Rates, ready_s: Sequence[float]
) -> Iterator[Task]:
    for before, one in pairwise((None, *host)):
        assert one is not None
        size, after = sizes[one], [] if before is None else [Name("update", before)]
        if ready_s:
            copy_s = rates.overhead_s + size * rates.gradient_bytes / rates.d2h_bytes_s
            yield Task(Name("gradient", one), "d2h", copy_s, (), ready_s[one])
            after.append(Name("gradient", one))
        update_s = rates.overhead_s + size / rates.host_elements_s
        yield Task(Name("update", one), "host", update_s, tuple(after))
        upload_s = rates.overhead_s + size * rates.parameter_bytes / rates.h2d_bytes_s
        yield Task(Name("upload", one), "h2d", upload_s, (Name("update", one),))


def _on_device(
    sizes: Sequence[int], device: Sequence[int], rates: Rates, slots: int,
    ready_s: Sequence[float],
) -> Iterator[Task]:  # fmt: skip
    for turn, one in enumerate(device):
        size = sizes[one]
        in_s = rates.overhead_s + size * rates.state_in_bytes / rates.h2d_bytes_s
        free = (Name("flush", device[turn - slots]),) if turn >= slots else ()
        yield Task(Name("prefetch", one), "h2d", in_s, free)
        before = (Name("compute", device[turn - 1]),) if turn else ()
        from_s = max(0.0, ready_s[one]) if ready_s else 0.0
        compute_s = rates.overhead_s + size / rates.device_update_elements_s
        yield Task(
            Name("compute", one), "device", compute_s, (Name("prefetch", one), *before), from_s
        )
        out_s = rates.overhead_s + size * rates.state_out_bytes / rates.d2h_bytes_s
        yield Task(Name("flush", one), "d2h", out_s, (Name("compute", one),))


# ── time ─────────────────────────────────────────────────────────────────────────────────────


def run(given: Sequence[Task], rates: Rates) -> Timeline:
    """When everything happens. Tasks that wait for each other, or for none given, are an error."""
    play = _Play(given)
    speeds = cache(lambda busy: {lane: speed(lane, busy, rates) for lane in busy})
    while play.begin():
        play.go_on(speeds(frozenset(play.running)))
    if len(play.ends) < len(given):
        left = next(one.name for one in given if one.name not in play.ends)
        raise ValueError(f"{left} waits for something that never ends")
    spans = {name: Span(begin, play.ends[name]) for name, begin in play.begins.items()}
    return Timeline(spans, {one.name: one for one in given})


def speed(lane: Lane, busy: Collection[Lane], rates: Rates) -> float:
    """The part of its own rate at which a lane works, beside those that work with it.

    Both directions may share a link. Copies and the host's updates share its memory: where all
    want more than it gives, each gets the same part of what it wants.
    """
    if lane == "device":
        return 1.0
    link = rates.both_ways if {"h2d", "d2h"} <= {*busy} else 1.0
    wanted = sum(_traffic_bytes_s(one, rates) * (1 if one == "host" else link) for one in busy)
    given = rates.host_memory_bytes_s
    part = 1.0 if wanted <= given else given / wanted
    return part if lane == "host" else part * link


def _traffic_bytes_s(lane: Lane, rates: Rates) -> float:
    """What a lane at its own rate takes of the host's memory."""
    return {
        "host": rates.host_elements_s * rates.update_traffic_bytes,
        "h2d": rates.h2d_bytes_s,
        "d2h": rates.d2h_bytes_s,
        "device": 0.0,
    }[lane]


class _Play:
    """The state of a run: what can begin and since when, what runs, what has ended."""

    def __init__(self, given: Sequence[Task]) -> None:
        self.begins: dict[Name, float] = {}
        self.ends: dict[Name, float] = {}
        self.running: dict[Lane, tuple[Task, float]] = {}  # and the work that is left
        # Of each lane (since when it can begin, order, task): the first is taken first.
        self._waiting: dict[Lane, list[tuple[float, int, Task]]] = {}
        self._now_s = -math.inf
        self._order = {one.name: order for order, one in enumerate(given)}
        self._open = {one.name: len(one.after) for one in given}
        self._followers: dict[Name, list[Task]] = {}
        for one in given:
            for name in one.after:
                self._followers.setdefault(name, []).append(one)
            if not one.after:
                self._can_begin(one)

    def _can_begin(self, task: Task) -> None:
        since_s = max(self._now_s, task.from_s)
        heappush(self._waiting.setdefault(task.lane, []), (since_s, self._order[task.name], task))

    @property
    def _due_s(self) -> float:
        """When the next task of an idle lane could begin."""
        idle = (lane for lane in self._waiting if lane not in self.running)
        return min((self._waiting[lane][0][0] for lane in idle), default=math.inf)

    def begin(self) -> bool:
        """Every idle lane takes its first task; False when nothing runs, or ever will."""
        if not self.running and (due_s := self._due_s) < math.inf:
            self._now_s = max(self._now_s, due_s)
        for lane, queue in [*self._waiting.items()]:
            if lane not in self.running and queue[0][0] <= self._now_s:
                _, _, task = heappop(queue)
                self.running[lane] = (task, task.work_s)
                self.begins[task.name] = self._now_s
                if not queue:
                    del self._waiting[lane]
        return bool(self.running)

    def go_on(self, speeds: Mapping[Lane, float]) -> None:
        """Until the next task ends, or could begin."""
        left_s = {lane: work / speeds[lane] for lane, (_, work) in self.running.items()}
        passed_s = min(*left_s.values(), self._due_s - self._now_s)
        self._now_s += passed_s
        for lane, (task, work) in [*self.running.items()]:
            if left_s[lane] <= passed_s:
                self._end(task)
            else:
                self.running[lane] = (task, max(0.0, work - passed_s * speeds[lane]))

    def _end(self, task: Task) -> None:
        del self.running[task.lane]
        self.ends[task.name] = self._now_s
        for follower in self._followers.get(task.name, ()):
            self._open[follower.name] -= 1
            if not self._open[follower.name]:
                self._can_begin(follower)
