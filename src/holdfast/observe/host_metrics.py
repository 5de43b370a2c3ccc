"""Counts the records of one host into the metrics of its keeper: their number never grows."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.observe.metric_table import BUCKETS_S, BY_NAME, OTHER
from holdfast.observe.phases import BY_EVENT
from holdfast.observe.ring_drain import DROPPED

Record = dict[str, Any]


class Histogram:
    """How many values are in each bucket (the last has no bound), and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Adds a value."""
        self.counts[bisect_left(BUCKETS_S, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        """Returns an equal one."""
        other = Histogram()
        other.counts, other.total = list(self.counts), self.total
        return other


class HostMetrics:
    """The metrics of one keeper. Records come on any thread; a reader gets all of one moment."""

    def __init__(self, version: str, *, now: Callable[[], float] = time.time) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {}
        self._histograms: dict[str, Histogram] = {}
        self._newest: dict[str, tuple[int, int]] = {}
        """The newest generation in each state."""
        self._set("holdfast_build_info", version, 1)
        self._set("holdfast_keeper_start_time_seconds", "", now())
        for metric in BY_NAME.values():  # a counter that begins at its first event hides that event
            if metric.kind == "counter":
                for label in metric.labels[0][1] if metric.labels else ("",):
                    self._values[metric.name, label] = 0

    def take(self, record: Record) -> None:
        """Counts a record, its fields as plain values; one that is not whole counts for nothing."""
        name = record.get("event", "")
        handle = _HANDLERS.get(name)
        with self._lock:
            for phase in BY_EVENT.get(name, ()):
                length_s = record.get(phase.field, 0.0)
                if phase.within == "restore":
                    self._add("holdfast_restore_seconds", phase.name, length_s)
                elif length_s or phase.is_whole:
                    self._histograms.setdefault(phase.name, Histogram()).add(length_s)
            if handle is not None:
                handle(self, record)

    def values(self) -> tuple[dict[tuple[str, str], float], dict[str, Histogram]]:
        """Returns the values by (metric, label), and the histograms of phases, of one moment."""
        with self._lock:
            return dict(self._values), {name: h.copy() for name, h in self._histograms.items()}

    def _set(self, name: str, label: str, value: float) -> None:
        self._values[name, _known(name, label)] = value

    def _add(self, name: str, label: str = "", count: float = 1) -> None:
        key = name, _known(name, label)
        self._values[key] = self._values.get(key, 0) + count

    def _reach(self, record: Record, state: str) -> None:
        """Notes that a generation reached a state. A keeper that takes over tells of older ones."""
        self._add("holdfast_generations", state)
        of = record.get("incarnation", 0), record.get("step", -1)
        if of[1] < 0 or of < self._newest.get(state, (0, -1)):
            return
        self._newest[state] = of
        self._set("holdfast_newest_step", state, record["step"])
        self._set("holdfast_newest_reached_seconds", state, record.get("time_s", 0.0))

    def _take_start(self, record: Record) -> None:
        self._add("holdfast_trainer_starts")
        before = self._values.get(("holdfast_incarnation", ""), 0)
        self._set("holdfast_incarnation", "", max(before, record.get("incarnation", 0)))

    def _take_image(self, record: Record, state: str) -> None:
        self._add("holdfast_image_bytes", state, record.get("size_bytes", 0))

    def _take_restore(self, record: Record) -> None:
        self._add("holdfast_restores", record.get("source", ""))

    def _take_refused(self, record: Record) -> None:
        count = sum(record.get("counts", {}).values())
        self._add("holdfast_refused", record.get("door", ""), count)

    def _take_sample(self, record: Record) -> None:
        for state in BY_NAME["holdfast_slots"].labels[0][1]:
            self._values["holdfast_slots", state] = 0
        for state, count in record.get("slots", {}).items():
            self._add("holdfast_slots", state, count)
        for field, name, label in _SAMPLED:
            self._set(name, label, record.get(field, 0))
        waiting = record.get("queued_bytes", 0) - record.get("writing_bytes", 0)
        self._set("holdfast_storage_queue_bytes", "waiting", waiting)
        for resource in ("cpu", "io", "memory"):
            part = record.get(f"{resource}_pressure", -1.0)
            if part >= 0:
                self._set("holdfast_pressure_ratio", resource, part)


#: field of a sample -> metric and label
_SAMPLED = (
    ("arena_bytes", "holdfast_arena_bytes", "slots"),
    ("parity_bytes", "holdfast_arena_bytes", "parity"),
    ("free_bytes", "holdfast_arena_bytes", "free"),
    ("queued_jobs", "holdfast_storage_queue_jobs", ""),
    ("writing_bytes", "holdfast_storage_queue_bytes", "writing"),
    ("queued_s", "holdfast_storage_queue_age_seconds", ""),
    ("trainers", "holdfast_trainers", ""),
    ("trainers_bytes", "holdfast_resident_bytes", "trainers"),
    ("keeper_bytes", "holdfast_resident_bytes", "keeper"),
    ("keeper_cpu_s", "holdfast_keeper_cpu_seconds", ""),
)


_Handler = Callable[[HostMetrics, Record], None]


def _counted(name: str) -> _Handler:
    return lambda metrics, _: metrics._add(name)


def _of_keeper(count: Callable[[HostMetrics, Record], None]) -> _Handler:
    """Counts what the coordinating keeper says: every rank records the same once more."""

    def handle(metrics: HostMetrics, record: Record) -> None:
        if record.get("rank", -1) < 0:
            count(metrics, record)

    return handle


def _outcome(outcome: str) -> _Handler:
    return _of_keeper(lambda metrics, _: metrics._add("holdfast_generations", outcome))


def _state(state: str) -> _Handler:
    return _of_keeper(lambda metrics, record: metrics._reach(record, state))


_HANDLERS: dict[str, _Handler] = {
    "RunStarted": HostMetrics._take_start,
    "SnapshotCaptured": _state("captured"),
    "SnapshotProtected": _state("protected"),
    "CheckpointCached": _state("cached"),
    "CheckpointPublished": _state("durable"),
    "SnapshotMissed": _outcome("missed"),
    "SnapshotNotProtected": _outcome("not_protected"),
    "PersistBroke": _outcome("not_durable"),
    "ImageCaptured": lambda metrics, record: metrics._take_image(record, "captured"),
    "ImageDurable": lambda metrics, record: metrics._take_image(record, "durable"),
    "Restored": HostMetrics._take_restore,
    "TrainerLost": _counted("holdfast_trainers_lost"),
    "DamageFound": lambda metrics, record: metrics._add(
        "holdfast_damage_found", record.get("outcome", "")
    ),
    "SourceDropped": _counted("holdfast_sources_dropped"),
    "ReplicasDiffer": _of_keeper(_counted("holdfast_replicas_differ")),
    "RequestsRefused": HostMetrics._take_refused,
    "LoopHeld": lambda metrics, record: metrics._add(
        "holdfast_loop_held", "", record.get("times", 1)
    ),
    "Warned": _counted("holdfast_warnings"),
    "HostSampled": HostMetrics._take_sample,
    DROPPED: lambda metrics, record: metrics._add(
        "holdfast_events_dropped", "", record.get("count", 1)
    ),
}


def _known(name: str, label: str) -> str:
    """Returns the label's value, or ``OTHER``: texts out of records never become series."""
    labels = BY_NAME[name].labels
    if not labels or not labels[0][1] or label in labels[0][1]:
        return label
    return OTHER


def series(metrics: HostMetrics) -> Iterator[tuple[str, str, float | Histogram]]:
    """Yields (metric, value of its label, value) in the order of the table."""
    values, histograms = metrics.values()
    for name, metric in BY_NAME.items():
        if metric.kind == "histogram":
            yield from ((name, phase, found) for phase, found in histograms.items())
        else:
            yield from ((name, label, v) for (of, label), v in values.items() if of == name)
