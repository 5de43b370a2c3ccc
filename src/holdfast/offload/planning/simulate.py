"""PURE. Models the rates at which a machine moves and updates optimizer state, and simulates a
step.

A schedule is only as good as its rates, and rates change: other processes start, a link is shared,
clocks throttle. So an estimate follows the measurements, a little each time and by the logarithm.
The median of the last few durations is used, so that outliers have no effect.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from statistics import median_low
from typing import Any, Literal, NamedTuple

from holdfast.errors import UsageError

Kind = Literal["h2d", "d2h", "host_update", "device_update", "host_cast"]

#: The number of durations whose median is used: two of them may be outliers. The median has weight
#: 1/2 in an estimate after the first duration, and 1/6 in the end.
RECENT = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a machine that the model needs, for one process and its device.

    Bytes and elements a second while nothing else runs. The fields in ``_bytes`` are the bytes
    moved for one element.
    """

    h2d_bytes_s: float
    d2h_bytes_s: float
    host_update_elements_s: float
    device_update_elements_s: float
    #: Cast from the master's type to the parameters'; ``inf`` where the update includes it.
    host_cast_elements_s: float = math.inf
    #: The part of one direction's rate left while the other is used: 1 duplex, 0.5 one shared link.
    both_ways: float = 1.0
    #: Bandwidth of the host's memory, shared by updates and copies.
    host_memory_bytes_s: float = math.inf
    #: Master and both moments: 12 bytes; 16 with amsgrad.
    state_in_bytes: int = 12
    state_out_bytes: int = 12
    gradient_bytes: int = 2
    parameter_bytes: int = 2
    #: Fixed cost of each copy and each update, beside its bytes or elements.
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value, (least, most) = getattr(self, one.name), _BOUNDS.get(one.name, _FINITE)
            is_rate = one.name.endswith(("bytes_s", "elements_s"))
            if not least <= value <= most or (is_rate and not value):
                raise UsageError(f"{one.name}={value!r} is no rate, share or size to plan with")

    @property
    def host_elements_s(self) -> float:
        """Elements a second that the host updates and then casts, while nothing else runs."""
        return 1 / (1 / self.host_update_elements_s + 1 / self.host_cast_elements_s)

    @property
    def update_traffic_bytes(self) -> int:
        """Bytes that the host's update of one element reads and writes."""
        return (
            self.state_in_bytes + self.state_out_bytes + self.gradient_bytes + self.parameter_bytes
        )


_FINITE = (0.0, sys.float_info.max)
_BOUNDS = {
    "both_ways": (0.1, 1.0),
    "host_cast_elements_s": (0.0, math.inf),
    "host_memory_bytes_s": (0.0, math.inf),
}
_FIELDS: dict[Kind, str] = {
    "h2d": "h2d_bytes_s",
    "d2h": "d2h_bytes_s",
    "host_update": "host_update_elements_s",
    "device_update": "device_update_elements_s",
    "host_cast": "host_cast_elements_s",
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate, and its last few measurements."""

    rate: float
    recent: tuple[float, ...] = ()

    def after(self, work: float, elapsed_s: float) -> Estimate:
        """Return the estimate after one more duration: ``work`` bytes or elements in ``elapsed_s``.

        Without work, or without elapsed time, nothing changes.
        """
        if not (work > 0 and elapsed_s > 0 and 0 < work / elapsed_s < math.inf):
            return self
        recent = (*self.recent, work / elapsed_s)[-RECENT:]
        weight = 1 / (len(recent) + 1)
        return Estimate(self.rate ** (1 - weight) * median_low(recent) ** weight, recent)


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates, and the estimate of each from measurements; every measurement returns a new value."""

    first: Rates
    estimates: dict[Kind, Estimate] = field(default_factory=dict)

    def after(
        self, kind: Kind, work: float, elapsed_s: float, *, overhead: bool = True
    ) -> Measured:
        """Return the value after one more duration of this kind, less the fixed cost of a copy
        or update.
        """
        spent_s = elapsed_s - self.first.overhead_s * overhead
        known = self.estimates.get(kind) or Estimate(getattr(self.first, _FIELDS[kind]))
        if math.isinf(known.rate):
            return self  # modelled as free: it is part of another duration
        return replace(self, estimates={**self.estimates, kind: known.after(work, spent_s)})

    @property
    def rates(self) -> Rates:
        """Return the present rates."""
        learned: dict[str, Any] = {_FIELDS[kind]: one.rate for kind, one in self.estimates.items()}
        return replace(self.first, **learned)


# PURE. Simulates one step of the optimizer by the model.
#
# Four lanes (the link in each direction, the host's cores, the device) run one task at a time, in
# the order in which tasks can begin. The work of one lane slows the others as the rates say, so
# time advances from one begin or end to the next. Plans are chosen and checked with this
# simulation.


Lane = Literal["h2d", "d2h", "host", "device"]
Act = Literal["gradient", "update", "upload", "prefetch", "compute", "flush"]


class Name(NamedTuple):
    """A kind of work with a subgroup.

    On the host: ``gradient`` (to the host), ``update``, ``upload`` (of its parameters). On the
    device: ``prefetch`` (of its state), ``compute`` (the update), ``flush`` (of its state).
    """

    act: Act
    subgroup: int


class SimulatedTask(NamedTuple):
    """A task that takes a lane ``work_s`` seconds when nothing slows it, after other tasks."""

    name: Name
    lane: Lane
    work_s: float
    after: tuple[Name, ...] = ()
    from_s: float = 0.0


class TimeSpan(NamedTuple):
    """The begin and end of a task; the step begins at 0."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All tasks of a step, with their times and lanes."""

    spans: Mapping[Name, TimeSpan]
    tasks: Mapping[Name, SimulatedTask]

    @property
    def finished_s(self) -> float:
        """When everything is done: the host holds all state, the device all parameters."""
        return max((span.end_s for span in self.spans.values()), default=0.0)

    @property
    def visible_s(self) -> float:
        """When the device holds all new parameters; state may still be on its way back."""
        return max((s.end_s for name, s in self.spans.items() if name.act != "flush"), default=0.0)

    def busy_s(self, lane: Lane) -> float:
        """Return how long a lane worked."""
        of_lane = (span for name, span in self.spans.items() if self.tasks[name].lane == lane)
        return sum(span.end_s - span.begin_s for span in of_lane)

    def work_s(self, lane: Lane) -> float:
        """Return how long a lane would have worked, if nothing had slowed it."""
        return sum(task.work_s for task in self.tasks.values() if task.lane == lane)


def tasks(
    sizes: Sequence[int],
    host: Sequence[int],
    device: Sequence[int],
    rates: Rates,
    *,
    device_slots: int,
    ready_s: Sequence[float] = (),
) -> list[SimulatedTask]:
    """Return all tasks of a step, in order of priority.

    ``ready_s``: when each gradient is on the device, below 0 before the step; without it the
    gradients are in place. A slot takes its next subgroup when the last is flushed.
    """
    return [
        *_on_device(sizes, device, rates, device_slots, ready_s),
        *_on_host(sizes, host, rates, ready_s),
    ]


def _on_host(
    sizes: Sequence[int], host: Sequence[int], rates: Rates, ready_s: Sequence[float]
) -> Iterator[SimulatedTask]:
    for before, one in pairwise((None, *host)):
        assert one is not None
        size, after = sizes[one], [] if before is None else [Name("update", before)]
        if ready_s:
            copy_s = rates.overhead_s + size * rates.gradient_bytes / rates.d2h_bytes_s
            yield SimulatedTask(Name("gradient", one), "d2h", copy_s, (), ready_s[one])
            after.append(Name("gradient", one))
        update_s = rates.overhead_s + size / rates.host_elements_s
        yield SimulatedTask(Name("update", one), "host", update_s, tuple(after))
        upload_s = rates.overhead_s + size * rates.parameter_bytes / rates.h2d_bytes_s
        yield SimulatedTask(Name("upload", one), "h2d", upload_s, (Name("update", one),))


def _on_device(
    sizes: Sequence[int],
    device: Sequence[int],
    rates: Rates,
    slots: int,
    ready_s: Sequence[float],
) -> Iterator[SimulatedTask]:
    for turn, one in enumerate(device):
        size = sizes[one]
        in_s = rates.overhead_s + size * rates.state_in_bytes / rates.h2d_bytes_s
        free = (Name("flush", device[turn - slots]),) if turn >= slots else ()
        yield SimulatedTask(Name("prefetch", one), "h2d", in_s, free)
        before = (Name("compute", device[turn - 1]),) if turn else ()
        from_s = max(0.0, ready_s[one]) if ready_s else 0.0
        compute_s = rates.overhead_s + size / rates.device_update_elements_s
        yield SimulatedTask(
            Name("compute", one), "device", compute_s, (Name("prefetch", one), *before), from_s
        )
        out_s = rates.overhead_s + size * rates.state_out_bytes / rates.d2h_bytes_s
        yield SimulatedTask(Name("flush", one), "d2h", out_s, (Name("compute", one),))


# ── time ─────────────────────────────────────────────────────────────────────────────────────


def run(given: Sequence[SimulatedTask], rates: Rates) -> Timeline:
    """Compute when every task runs. Tasks that wait for each other, or for unknown ones, are an
    error.
    """
    play = _Play(given)
    speeds = cache(lambda busy: {lane: speed(lane, busy, rates) for lane in busy})
    while play.begin():
        play.go_on(speeds(frozenset(play.running)))
    if len(play.ends) < len(given):
        left = next(one.name for one in given if one.name not in play.ends)
        raise ValueError(f"{left} waits for something that never ends")
    spans = {name: TimeSpan(begin, play.ends[name]) for name, begin in play.begins.items()}
    return Timeline(spans, {one.name: one for one in given})


def speed(lane: Lane, busy: Collection[Lane], rates: Rates) -> float:
    """Return the part of its own rate at which a lane works, beside the other busy lanes.

    Both directions may share a link. Copies and the host's updates share its memory: where they
    demand more than its bandwidth, each gets the same part of its demand.
    """
    if lane == "device":
        return 1.0
    link = rates.both_ways if {"h2d", "d2h"} <= {*busy} else 1.0
    wanted = sum(_traffic_bytes_s(one, rates) * (1 if one == "host" else link) for one in busy)
    given = rates.host_memory_bytes_s
    part = 1.0 if wanted <= given else given / wanted
    return part if lane == "host" else part * link


def _traffic_bytes_s(lane: Lane, rates: Rates) -> float:
    """Return the host memory traffic of a lane at its own rate."""
    return {
        "host": rates.host_elements_s * rates.update_traffic_bytes,
        "h2d": rates.h2d_bytes_s,
        "d2h": rates.d2h_bytes_s,
        "device": 0.0,
    }[lane]


class _Play:
    """The state of a simulation: tasks that are ready, running, and ended."""

    def __init__(self, given: Sequence[SimulatedTask]) -> None:
        self.begins: dict[Name, float] = {}
        self.ends: dict[Name, float] = {}
        self.running: dict[Lane, tuple[SimulatedTask, float]] = {}  # and the work left
        # Heap of each lane: (time since it is ready, order, task).
        self._waiting: dict[Lane, list[tuple[float, int, SimulatedTask]]] = {}
        self._now_s = -math.inf
        self._order = {one.name: order for order, one in enumerate(given)}
        self._open = {one.name: len(one.after) for one in given}
        self._followers: dict[Name, list[SimulatedTask]] = {}
        for one in given:
            for name in one.after:
                self._followers.setdefault(name, []).append(one)
            if not one.after:
                self._can_begin(one)

    def _can_begin(self, task: SimulatedTask) -> None:
        since_s = max(self._now_s, task.from_s)
        heappush(self._waiting.setdefault(task.lane, []), (since_s, self._order[task.name], task))

    @property
    def _due_s(self) -> float:
        """Return when the next task of an idle lane could begin."""
        idle = (lane for lane in self._waiting if lane not in self.running)
        return min((self._waiting[lane][0][0] for lane in idle), default=math.inf)

    def begin(self) -> bool:
        """Start the first task of every idle lane; False when nothing runs, or ever will."""
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
        """Advance until the next task ends, or could begin."""
        left_s = {lane: work / speeds[lane] for lane, (_, work) in self.running.items()}
        passed_s = min(*left_s.values(), self._due_s - self._now_s)
        self._now_s += passed_s
        for lane, (task, work) in [*self.running.items()]:
            if left_s[lane] <= passed_s:
                self._end(task)
            else:
                self.running[lane] = (task, max(0.0, work - passed_s * speeds[lane]))

    def _end(self, task: SimulatedTask) -> None:
        del self.running[task.lane]
        self.ends[task.name] = self._now_s
        for follower in self._followers.get(task.name, ()):
            self._open[follower.name] -= 1
            if not self._open[follower.name]:
                self._can_begin(follower)
