"""Subscribes a process of a run to its events: a trainer to its ring, the keeper to ring and drain.

Where the arena has no room for a ring, the process writes its events itself, from a queue.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError, UsageError
from holdfast.events import Event, RunStarted, emit, subscribe, to_record, warn
from holdfast.observe.event_files import (
    BUDGET_BYTES,
    SEGMENT_BYTES,
    SPOOL_BUDGET_BYTES,
    SPOOL_SEGMENT_BYTES,
    EventFile,
    event_budget,
)
from holdfast.observe.event_place import EventPlace, event_place
from holdfast.observe.event_ring import RINGS, EventRing
from holdfast.observe.metrics_port import require_metrics
from holdfast.observe.ring_drain import RingDrain, RingDrainer, Watch, end_ring_alone
from holdfast.observe.rollup_writer import RollupWriter
from holdfast.observe.run_rollup_thread import RollupJoining
from holdfast.observe.sinks import JsonlSink
from holdfast.observe.telemetry_setting import require_live_telemetry
from holdfast.observe.text import restart_warning
from holdfast.observe.training import ENDED, TrainingRecorder
from holdfast.protocol.arena import boot_id


def check_settings() -> None:
    """Raises UsageError for a setting about events or metrics that has no meaning here."""
    event_budget()
    require_metrics()
    require_live_telemetry()


@contextmanager
def collected_events() -> Iterator[list[tuple[Event, float]]]:
    """Collects the events of a start, with their times: its sinks need what the start finds."""
    early: list[tuple[Event, float]] = []
    stop = subscribe(lambda event, time_s: early.append((event, time_s)))
    try:
        yield early
    finally:
        stop()


def follow_run(
    root: str,
    arena: Path,
    started: RunStarted,
    torch_version: str,
    early: Sequence[tuple[Event, float]] = (),
) -> tuple[TrainingRecorder, Callable[[float], None]]:
    """Subscribes ring and log, and reports the start, with its ``early`` events.

    Returns the recorder of training, and a function that stops everything, given how many seconds
    to wait for writing. Raises UsageError for an invalid setting.
    """
    from holdfast.observe.log import log_sink_from_environment  # a keeper writes no such lines

    rank, host = started.rank, started.host
    log = log_sink_from_environment(rank)
    event_budget()
    place = event_place(root)
    sink = _sink(place, arena, f"rank-{rank:05d}", rank, host)
    drain = RingDrain(arena, EventFile(_path(place, host), only_beside=place.only_beside))
    sinks = [each for each in (sink, log) if each is not None]
    stops = [subscribe(each) for each in sinks]
    emit(_aged(started))
    for each in sinks:
        with suppress(Exception):  # a report must never stop training
            for event, time_s in early:
                each(event, time_s)
    warning = restart_warning(torch_version, os.environ)
    if warning and rank == 0:
        warn(warning)
    training = TrainingRecorder(
        rank,
        started.incarnation,
        is_reporting=rank == 0 or os.environ.get("LOCAL_RANK", "0") == "0",
        ring=sink if isinstance(sink, EventRing) else None,
    )

    def stop(deadline_s: float) -> None:
        for unsubscribe in stops:
            unsubscribe()
        training.enter(ENDED)
        _close(sink, drain, deadline_s)

    return training, stop


def _aged(started: RunStarted) -> RunStarted:
    """Returns the start with its ages as of now: opening files may have taken a while since."""
    since_s = max(0.0, process_age_s() - started.process_s)
    ages = {"process_s": started.process_s + since_s, "joined_s": started.joined_s + since_s}
    return msgspec.structs.replace(started, **ages)


def process_age_s() -> float:
    """Returns the seconds since this process began; 0.0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    return 0.0


def follow_keeper(
    root: str,
    arena: Path,
    host: str,
    watch: Watch | None = None,
    *,
    leads: Callable[[], bool] = lambda: False,
) -> tuple[EventFile, Callable[[], None]]:
    """Subscribes the keeper of a host, which drains all rings there; returns the file that it
    writes, and a function that ends it.

    ``watch``: called with each record of the host as plain values, on any thread. ``leads``:
    returns True while this keeper coordinates, and rolls up what all hosts rolled up.
    """
    place = event_place(root)
    file = _bounded_file(place, host)
    # What is in a spool is uploaded whole, and the bucket gives nothing up.
    rollups = None if place.is_spool else RollupWriter(file.path, only_beside=file.only_beside)
    drainer = RingDrainer(RingDrain(arena, file, watch=watch), rollups=rollups)
    joining = None if rollups is None else RollupJoining(lambda: file.path.parent, leads)
    sink = _sink(place, arena, "keeper", -1, host)
    stops = [subscribe(sink)]
    if watch is not None and isinstance(sink, JsonlSink):  # what is in no ring is not drained
        stops.append(subscribe(lambda event, time_s: watch(to_record(event, time_s))))

    def end() -> None:
        for unsubscribe in stops:
            unsubscribe()
        if isinstance(sink, JsonlSink):
            sink.close()
        drainer.close()
        if joining is not None:
            joining.close()

    return file, end


def _path(place: EventPlace, host: str) -> Path:
    return place.file(f"host-{host}")


def _bounded_file(place: EventPlace, host: str) -> EventFile:
    """Returns the event file of a host, which its keeper alone sets aside, compresses, gives up.

    What is in a spool is uploaded as it was written.
    """
    budget_bytes = SPOOL_BUDGET_BYTES
    if not place.is_spool:
        try:
            budget_bytes = event_budget()
        except UsageError:  # a trainer says so
            budget_bytes = BUDGET_BYTES
    return EventFile(
        _path(place, host),
        only_beside=place.only_beside,
        part_bytes=SPOOL_SEGMENT_BYTES if place.is_spool else SEGMENT_BYTES,
        budget_bytes=budget_bytes,
        is_compressing=not place.is_spool,
    )


def _sink(place: EventPlace, arena: Path, role: str, rank: int, host: str) -> EventRing | JsonlSink:
    try:
        return EventRing(arena / RINGS, role, rank=rank, host=host, boot=boot_id()[:8])
    except (OSError, HoldfastError):
        path = place.file(f"{role}-{host}")
        return JsonlSink(
            path,
            only_beside=place.only_beside,
            part_bytes=SPOOL_SEGMENT_BYTES,
            host=host,
            role=role,
        )


def _close(sink: EventRing | JsonlSink, drain: RingDrain, deadline_s: float) -> None:
    if isinstance(sink, JsonlSink):
        sink.close(deadline_s=deadline_s)
        drain.close()
    else:
        sink.close(deadline_s=deadline_s, drain=end_ring_alone(drain), end=drain.close)
