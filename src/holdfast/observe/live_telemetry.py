"""Sends saves and recoveries of one host to OpenTelemetry while the run trains, from its keeper.

Off unless ``HOLDFAST_OTLP`` names a receiver. Trace and span ids follow from run and generation, so
that what each host sends joins; the first span of a trace comes from the host whose keeper told of
the generation as a whole. Moments are by the wall clock of each host. Whoever reports waits for
nothing: records wait in a queue for a thread of their own, and what it has no room for is counted
and told once. An error of sending ends neither the thread nor the run.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast import events
from holdfast.events import AnyEvent
from holdfast.observe.error_file import error_line
from holdfast.observe.records import RecordHead
from holdfast.observe.spans import spans_of
from holdfast.observe.telemetry import TelemetrySpan, telemetry_of

Record = dict[str, Any]
#: Records that wait; seconds without a record after which a generation is sent, and one that is on
#: its way to storage; seconds between two looks.
MOST_WAITING, SETTLED_S, LONGEST_S, LOOK_S = 20_000, 15.0, 900.0, 2.0
#: Generations that are kept apart, and the records of one.
_MOST_OPEN, _MOST_RECORDS = 64, 20_000
#: What a keeper tells of a generation as a whole, and what ends one that was to be durable.
_OF_ALL = (events.SnapshotCaptured, events.SnapshotProtected, events.CheckpointPublished)
_ENDS = (events.CheckpointPublished, events.PersistBroke, events.SnapshotMissed)


@dataclass(slots=True)
class _OpenTrace:
    """The records of one generation, or recovery, while they come in."""

    newest_s: float = 0.0
    leads: bool = False
    """This host's keeper told of all of it: it sends the first span."""
    is_awaited: bool = False
    """It was to be durable, and is not yet."""
    records: list[tuple[AnyEvent, RecordHead]] = field(default_factory=list)

    def take(self, event: AnyEvent, head: RecordHead, now_s: float) -> None:
        """Takes a record."""
        self.newest_s = now_s
        if isinstance(event, events.Restored):
            self.leads |= event.rank == 0
        elif event.rank < 0:
            self.leads |= isinstance(event, _OF_ALL)
        if isinstance(event, events.SaveReturned):
            self.is_awaited |= event.durable
        elif isinstance(event, _ENDS):
            self.is_awaited = False
        if len(self.records) < _MOST_RECORDS:
            self.records.append((event, head))


#: Sends spans of a run; returns False if nobody took them.
Send = Callable[[Iterable[TelemetrySpan], str], bool]


class LiveTelemetry:
    """Collects the records of a host into traces, and sends each when it is settled."""

    def __init__(
        self,
        send: Send,
        warn: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._warn, self._clock = send, warn, clock
        self._queue: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._open: dict[tuple[str, int, int], _OpenTrace] = {}
        self._before: list[tuple[AnyEvent, RecordHead]] = []
        """Deaths and starts, with which a recovery begins."""
        self._run_id = ""
        self.dropped = 0
        self._is_drop_told = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._work, name="holdfast-otlp", daemon=True)

    def start(self) -> None:
        """Starts the thread that sends."""
        self._thread.start()

    def take(self, record: Record) -> None:
        """Takes a record of this host, on any thread."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self, *, deadline_s: float = 5.0) -> None:
        """Sends what there is, in so many seconds at most, and ends."""
        try:
            self._queue.put(None, timeout=deadline_s)
        except queue.Full:
            return
        self._thread.join(deadline_s)

    def _work(self) -> None:
        due_s = self._clock() + LOOK_S
        while True:
            record: Record | None = {}
            with suppress(queue.Empty):
                record = self._queue.get(timeout=max(0.0, due_s - self._clock()))
            if record:
                self.sort(record)
            is_last = record is None
            if is_last or self._clock() >= due_s:
                self._tell_dropped()
                self.send_settled(everything=is_last)
                due_s = self._clock() + LOOK_S
            if is_last:
                return

    def _tell_dropped(self) -> None:
        if self.dropped and not self._is_drop_told:
            self._is_drop_told = True
            self._warn(
                f"{self.dropped} records so far found no room on their way to the receiver of "
                "HOLDFAST_OTLP: spans of this host are missing there; `holdfast events --to otlp` "
                "sends them later"
            )

    def sort(self, record: Record) -> None:
        """Puts a record to those of its trace; one that is in no trace is let go."""
        try:
            event = msgspec.convert(record, AnyEvent)
            head = msgspec.convert(record, RecordHead)
        except msgspec.ValidationError:
            return
        if isinstance(event, events.RunStarted):
            self._run_id = event.run_id
        if isinstance(event, (events.RunStarted, events.TrainerLost)):
            self._before = [*self._before[-_MOST_OPEN:], (event, head)]
            return
        is_restore = isinstance(event, events.Restored)
        if event.step < 0 and not is_restore:
            return
        what = "recovery" if is_restore else "save"
        key = what, event.incarnation, -1 if is_restore else event.step
        if key not in self._open and len(self._open) >= _MOST_OPEN:
            self._send_one(min(self._open, key=lambda each: self._open[each].newest_s))
        self._open.setdefault(key, _OpenTrace()).take(event, head, self._clock())

    def send_settled(self, *, everything: bool = False) -> None:
        """Sends the traces of which no record came for a while."""
        now_s = self._clock()
        for key, trace in list(self._open.items()):
            limit_s = LONGEST_S if trace.is_awaited else SETTLED_S
            if everything or now_s - trace.newest_s >= limit_s:
                self._send_one(key)

    def _send_one(self, key: tuple[str, int, int]) -> None:
        trace = self._open.pop(key)
        trouble = "the receiver of HOLDFAST_OTLP does not take the spans"
        try:
            found = spans_of([*self._before, *trace.records])
            found.run_id = self._run_id
            spans = [one for one in telemetry_of(found) if trace.leads or one.parent]
            if not spans:
                return
            is_taken = self._send(spans, self._run_id)
        except Exception as error:  # whatever it is, later spans may go
            is_taken, trouble = False, f"spans cannot be sent: {error_line(error)}"
        if not is_taken and not self._is_failing:
            self._warn(f"{trouble}; still trying")
        self._is_failing = not is_taken
