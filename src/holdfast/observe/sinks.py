"""Writes the events of a process outside a run to a file, by a queue that never blocks.

``JsonlSink`` only puts a record into a queue; a daemon thread writes. Records that cannot be
written (a full disk, a stuck file system) are dropped, oldest first, and counted in the file
itself. A run's own processes put their events into rings instead (``observe.event_ring``), where
they survive the process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import queue
import secrets
import threading
import time
import weakref
from pathlib import Path
from typing import NamedTuple

from holdfast import events
from holdfast.events import Event
from holdfast.observe.event_files import EventFile, encode_event, encode_record
from holdfast.protocol.arena import boot_id

#: The most records that wait for a blocked file; about 50 MB at worst.
QUEUE_LIMIT = 100_000
#: Lines written with one call.
BATCH_LINES = 1_000
#: Seconds for which the interpreter's exit waits for a sink that nobody closed.
EXIT_DEADLINE_S = 2.0


class _Noted(NamedTuple):
    """An event in the queue, with its moment by the wall clock and by the host's own."""

    event: Event
    time_s: float
    mono_s: float
    number: int


#: An item of the queue, or None as the end marker.
_Queued = _Noted | None

_living: weakref.WeakSet[JsonlSink] = weakref.WeakSet()


class JsonlSink:
    """Append every event to ``path``, one JSON object a line; pass it to ``events.subscribe``.

    A line reaches the operating system as soon as the writer is idle, so a killed process loses
    next to nothing; it is not fsynced. Several incarnations append to one file: a line torn by a
    kill is ended before the next is written, so that it spoils no other.

    ``part_bytes``: a file of that size is set aside and another begun; all together take three
    times that, the first and the newest are kept (``observe.event_files``). Without it the file
    grows without bound.

    ``only_beside``: a file that must exist for anything to be created, such as that of a root:
    where it has vanished, or is not mounted, no directory must be created in its place.

    ``host``: the host of this process, by which readers know whose clock a record was made by.
    ``role``: what this process is, such as "rank-00003": its records are named after it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        queue_limit: int = QUEUE_LIMIT,
        only_beside: Path | None = None,
        part_bytes: int | None = None,
        host: str = "",
        role: str = "process",
    ) -> None:
        self.path = Path(path)
        self.host, self.role = host, role
        self.only_beside = only_beside
        self.part_bytes = part_bytes
        self.boot = boot_id()[:8]
        self._queue_limit = queue_limit
        self._dropped = 0
        self._closed = False
        self._begin_afresh()
        _living.add(self)

    def __repr__(self) -> str:
        return f"JsonlSink({str(self.path)!r})"

    def __call__(self, event: Event, time_s: float) -> None:
        if self._closed:
            return
        if self._queue.qsize() >= self._queue_limit:
            self._drop_oldest()
        self._queue.put(_Noted(event, time_s, time.monotonic(), next(self._numbers)))
        if self._thread is None:
            self._start()

    def close(self, *, deadline_s: float = 5.0) -> None:
        """Write the queued events and stop; gives up after ``deadline_s``. Never raises.

        On its own writer's thread, where the garbage collector may close the sink's owner, it does
        not wait.
        """
        self._closed = True
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(deadline_s)

    def _begin_afresh(self) -> None:
        """Sets up an empty queue without a thread: at first, and in a child after a fork.

        A child has the parent's queue, perhaps locked by a thread that does not exist there, but
        not its writer; the parent writes the events in that queue.
        """
        self._queue: queue.SimpleQueue[_Queued] = queue.SimpleQueue()
        self.writer = f"{self.role}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        # Without waiting for the lock: its holder is starting the thread.
        if not self._starting.acquire(blocking=False):
            return
        try:
            if self._thread is None:
                writer = _Writer(self)
                thread = threading.Thread(target=writer.run, name="holdfast-events", daemon=True)
                thread.start()
                self._thread = thread
        except RuntimeError:  # no more threads to be had: the next event tries again
            pass
        finally:
            self._starting.release()

    def _drop_oldest(self) -> None:
        with contextlib.suppress(queue.Empty):
            if self._queue.get_nowait() is None:
                self._queue.put(None)  # the end must not get lost
            else:
                self.count_dropped(1)

    def count_dropped(self, lines: int) -> None:
        """No lock: a count that racing threads leave a little low is better than a blocked
        trainer.
        """
        self._dropped += lines

    def pop_dropped(self) -> int:
        """Returns the number of dropped events since the last call."""
        dropped = self._dropped
        self._dropped -= dropped
        return dropped

    def next_batch(self) -> tuple[list[_Noted], bool]:
        """Waits for events; returns them, and whether the end marker was among them."""
        batch: list[_Noted] = []
        item = self._queue.get()
        while item is not None:
            batch.append(item)
            if len(batch) >= BATCH_LINES:
                return batch, False
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True


class _Writer:
    """The thread's side: writes what is queued, survives every error of the file system."""

    def __init__(self, sink: JsonlSink) -> None:
        self._sink = sink
        self._file = EventFile(
            sink.path,
            only_beside=sink.only_beside,
            part_bytes=sink.part_bytes,
            budget_bytes=3 * (sink.part_bytes or 0),
        )

    def run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._sink.next_batch()
            lines = [self._line_of(noted) for noted in batch]
            dropped = self._sink.pop_dropped()
            if dropped:
                lines.insert(
                    0, encode_event(_dropped_warning(dropped, self._sink.path), time.time())
                )
            self._file.path, self._file.only_beside = self._sink.path, self._sink.only_beside
            taken = self._file.append(lines)
            if taken < len(lines):
                told = 1 if dropped else 0
                self._sink.count_dropped(len(lines) - max(taken, told) + dropped * (taken < told))
        self._file.close()

    def _line_of(self, noted: _Noted) -> bytes:
        record = events.to_record(noted.event, noted.time_s)
        sink = self._sink
        return encode_record(record, noted.mono_s, sink.host, sink.writer, noted.number, sink.boot)


def _dropped_warning(dropped: int, path: Path) -> Event:
    return events.Warned(message=f"{dropped} events were dropped: {path} did not take them in time")


def _begin_afresh_in_child() -> None:
    for sink in list(_living):
        sink._begin_afresh()


def _close_at_exit() -> None:
    deadline_s = time.monotonic() + EXIT_DEADLINE_S
    for sink in list(_living):
        sink.close(deadline_s=max(0.0, deadline_s - time.monotonic()))


os.register_at_fork(after_in_child=_begin_afresh_in_child)
atexit.register(_close_at_exit)
