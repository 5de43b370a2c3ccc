"""Keep events in a file, without ever holding or harming training.

``JsonlSink`` only puts a record into a queue; a daemon thread writes. What cannot be kept
(a full disk, a stuck file system) is dropped, oldest first, and counted in the file itself.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import queue
import threading
import time
import weakref
from pathlib import Path

import msgspec

from holdfast import events
from holdfast.events import Event

#: Records held for a file that does not take them; about 50 MB at worst.
QUEUE_LIMIT = 100_000
#: Lines written with one call.
BATCH_LINES = 1_000
#: What the end of the interpreter waits for a sink that nobody closed.
EXIT_DEADLINE_S = 2.0

#: Waiting in the queue: an event and its time, or None behind the last one.
_Queued = tuple[Event, float] | None

_living: weakref.WeakSet[JsonlSink] = weakref.WeakSet()


class JsonlSink:
    """Append every event to ``path``, one JSON object a line; pass it to ``events.subscribe``.

    A line reaches the operating system as soon as the writer is idle, so a killed process loses
    next to nothing; it is not fsynced. Several incarnations append to one file: a line torn by
    a kill is ended before the next is written, so that it spoils no other.

    ``only_beside``: a file without which nothing is made, such as that of a root: where it has
    vanished, or is not mounted, no directory must come to be in its place.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        queue_limit: int = QUEUE_LIMIT,
        only_beside: Path | None = None,
    ) -> None:
        self.path = Path(path)
        self.only_beside = only_beside
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
        self._queue.put((event, time_s))
        if self._thread is None:
            self._start()

    def close(self, *, deadline_s: float = 5.0) -> None:
        """Write what is queued and stop; gives up after ``deadline_s``. Never raises.

        On its own writer's thread, where the collector may end whoever owns it, it waits for
        nothing.
        """
        self._closed = True
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(deadline_s)

    def _begin_afresh(self) -> None:
        """No thread and an empty queue: at first, and in a child after a fork.

        A child has the parent's queue, perhaps locked by a thread that does not exist there,
        but not its writer; what is in that queue is the parent's to write.
        """
        self._queue: queue.SimpleQueue[_Queued] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        # Not waiting for the lock: whoever holds it is starting the thread.
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
        """No lock: a count that racing threads leave a little low beats a held trainer."""
        self._dropped += lines

    def take_dropped(self) -> int:
        """How many were dropped since this was last asked."""
        dropped = self._dropped
        self._dropped -= dropped
        return dropped

    def next_batch(self) -> tuple[list[tuple[Event, float]], bool]:
        """Wait for events; returns them, and whether the end was among them."""
        batch: list[tuple[Event, float]] = []
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
    """The thread's side: owns the file descriptor, survives every error of the file system."""

    def __init__(self, sink: JsonlSink) -> None:
        self._sink = sink
        self._fd = -1
        self._needs_newline = False
        self._is_failing = False

    def run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._sink.next_batch()
            lines = [_line(event, time_s) for event, time_s in batch]
            dropped = self._sink.take_dropped()
            if dropped:
                lines.insert(0, _line(_dropped_warning(dropped, self._sink.path), time.time()))
            if lines and not self._write(b"".join(lines)):
                self._sink.count_dropped(len(batch) + dropped)
        if self._fd >= 0:
            os.close(self._fd)

    def _write(self, data: bytes) -> bool:
        """Append ``data``; False when the file did not take it."""
        try:
            if self._fd < 0:
                self._open()
            if self._needs_newline:
                data = b"\n" + data
            # One call: lines of two processes appending to one file do not mix.
            written = os.write(self._fd, data)
            while written < len(data):
                self._needs_newline = True
                written += os.write(self._fd, data[written:])
            self._needs_newline = False
            self._is_failing = False
            return True
        except OSError as error:
            self._report(error)
            return False

    def _open(self) -> None:
        path, needed = self._sink.path, self._sink.only_beside
        if needed is not None and not needed.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(needed))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size_bytes = os.fstat(self._fd).st_size
        self._needs_newline = size_bytes > 0 and os.pread(self._fd, 1, size_bytes - 1) != b"\n"

    def _report(self, error: OSError) -> None:
        """Tell the other sinks, once until a write succeeds: this event comes back to us too."""
        if not self._is_failing:
            self._is_failing = True
            message = f"events cannot be written to {self._sink.path}: {error}; still trying"
            events.emit(events.Warned(message=message))


def _line(event: Event, time_s: float) -> bytes:
    return msgspec.json.encode(events.to_record(event, time_s)) + b"\n"


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
