"""Records the events of a run on one rank: in a bounded set of files below the root, on stderr.

A writer, which is a rank or the keeper of a host, appends to ``<name>.jsonl``. Once that is full
it becomes ``<name>.0.jsonl`` and stays, for it says how the run began; the next ones become
``<name>.1.jsonl``, each in place of the one before. So a writer has three files at most.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import os
import queue
import re
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from holdfast import events
from holdfast.events import Event, subscribe
from holdfast.observe.event_place import event_place

#: A run that saves at every step writes about 0.7 kB a save: some 23,000 saves fill one.
PART_BYTES = 16 << 20
_FULL = re.compile(r"\.[01]\.jsonl$")


def parts_of(path: Path) -> tuple[Path, Path, Path]:
    """Returns the first part, the one before the newest, and the newest, which is ``path``
    itself.
    """
    return path.with_suffix(".0.jsonl"), path.with_suffix(".1.jsonl"), path


def set_aside(path: Path) -> bool:
    """Makes room for a new part at ``path``; True if an older one was given up for it."""
    first, before, _ = parts_of(path)
    if not first.exists():
        path.rename(first)
        return False
    is_lost = before.exists()
    path.replace(before)
    return is_lost


def trails(root: str | Path) -> list[Path]:
    """Returns the newest part of every writer of ``root``; it need not exist yet."""
    found = event_place(root).read_from().glob("*.jsonl")
    return sorted({path.with_name(_FULL.sub(".jsonl", path.name)) for path in found})


def size_bytes(path: Path) -> int:
    """Returns the bytes of all parts of a writer."""
    found = 0
    for part in parts_of(path):
        with suppress(OSError):
            found += part.stat().st_size
    return found


def open_parts(path: Path) -> Iterator[BinaryIO]:
    """Yields each part of a writer, oldest first; none twice, also while it makes a new one.

    Raises OSError for a part that exists and cannot be read.
    """
    with ExitStack() as opened:
        files: dict[int, BinaryIO] = {}
        # Newest first: a part set aside meanwhile is met again under its next name, never missed.
        for part in reversed(parts_of(path)):
            with suppress(FileNotFoundError):
                file = opened.enter_context(_open_file(part))
                files.setdefault(os.fstat(file.fileno()).st_ino, file)
        yield from reversed(files.values())


def _open_file(path: Path) -> BinaryIO:
    """Opens a plain file: a pipe would be waited for."""
    if path.is_symlink() and not path.exists():
        raise OSError(errno.ELOOP, "is a link to nothing", str(path))
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return path.open("rb")


#: The most that one line may have: a record has less than a thousandth of it.
LINE_BYTES = 1 << 20


def lines_in(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file; of one that is longer than any record only its beginning."""
    while line := file.readline(LINE_BYTES):
        yield line
        while len(line) == LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(LINE_BYTES)


def follow_run(root: str, rank: int, host: str) -> Callable[[float], None]:
    """Subscribes both sinks; returns a function that stops them, given how many seconds to wait for
    writing.

    Raises UsageError for an invalid setting.
    """
    from holdfast.observe.log import log_sink_from_environment  # a keeper writes no such lines

    log = log_sink_from_environment(rank)
    place = event_place(root)
    path = place.file(f"rank-{rank:05d}")
    trace = JsonlSink(path, only_beside=place.only_beside, part_bytes=PART_BYTES, host=host)
    stops = [subscribe(sink) for sink in (trace, log) if sink is not None]

    def stop(deadline_s: float) -> None:
        for unsubscribe in stops:
            unsubscribe()
        trace.close(deadline_s=deadline_s)

    return stop


# Writes events to a file without ever blocking or harming training.
#
# ``JsonlSink`` only puts a record into a queue; a daemon thread writes. Records that cannot be
# written (a full disk, a stuck file system) are dropped, oldest first, and counted in the file
# itself.


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

    ``part_bytes``: a file of that size is set aside and another begun, of which the first and the
    newest two are kept (``observe.trails``); without it the file grows without bound.

    ``only_beside``: a file that must exist for anything to be created, such as that of a root:
    where it has vanished, or is not mounted, no directory must be created in its place.

    ``host``: the host of this process, by which readers know whose clock a record was made by.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        queue_limit: int = QUEUE_LIMIT,
        only_beside: Path | None = None,
        part_bytes: int | None = None,
        host: str = "",
    ) -> None:
        self.path = Path(path)
        self.host = host
        self.only_beside = only_beside
        self.part_bytes = part_bytes
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
        self.writer = secrets.token_hex(4)
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
    """The thread's side: owns the file descriptor, survives every error of the file system."""

    def __init__(self, sink: JsonlSink) -> None:
        self._sink = sink
        self._fd = -1
        self._size_bytes = 0
        self._needs_newline = False
        self._is_failing = False

    def run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._sink.next_batch()
            lines = [self._line_of(noted) for noted in batch]
            dropped = self._sink.pop_dropped()
            if dropped:
                lines.insert(0, _line(_dropped_warning(dropped, self._sink.path), time.time()))
            if lines and not self._write(b"".join(lines)):
                self._sink.count_dropped(len(batch) + dropped)
        if self._fd >= 0:
            os.close(self._fd)

    def _line_of(self, noted: _Noted) -> bytes:
        record = events.to_record(noted.event, noted.time_s)
        record["mono_s"] = round(noted.mono_s, 6)
        record["by_host"], record["writer"] = self._sink.host, self._sink.writer
        record["number"] = noted.number
        return msgspec.json.encode(record) + b"\n"

    def _write(self, data: bytes) -> bool:
        """Appends ``data``; False when the file did not take it."""
        try:
            if self._fd >= 0 and self._is_full():
                data = self._begin_part() + data
            if self._fd < 0:
                self._open()
            if self._needs_newline:
                data = b"\n" + data
            # One call: lines of two processes appending to one file do not mix.
            written = os.write(self._fd, data)
            while written < len(data):
                self._needs_newline = True
                written += os.write(self._fd, data[written:])
            self._size_bytes += written
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
        size = self._size_bytes = os.fstat(self._fd).st_size
        self._needs_newline = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def _is_full(self) -> bool:
        limit = self._sink.part_bytes
        return limit is not None and self._size_bytes >= limit

    def _begin_part(self) -> bytes:
        """Sets the file aside; returns the line for the next one about the part that was given up
        for it.

        Where that fails, the file is continued: events are worth more than a bound.
        """
        path, said = self._sink.path, b""
        try:
            if self._is_there() and set_aside(path):
                said = _line(_given_up_warning(path), time.time())
        except OSError:
            self._size_bytes = 0  # tried again when as much was written again
            return b""
        fd, self._fd = self._fd, -1
        os.close(fd)
        return said

    def _is_there(self) -> bool:
        """True if the open file still has its name: an older start may have set it aside."""
        here = os.fstat(self._fd)
        try:
            there = self._sink.path.stat()
        except FileNotFoundError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def _report(self, error: OSError) -> None:
        """Tells the other sinks, once until a write succeeds: this sink receives the event too."""
        if not self._is_failing:
            self._is_failing = True
            message = f"events cannot be written to {self._sink.path}: {error}; still trying"
            events.emit(events.Warned(message=message))


def _line(event: Event, time_s: float) -> bytes:
    return msgspec.json.encode(events.to_record(event, time_s)) + b"\n"


def _dropped_warning(dropped: int, path: Path) -> Event:
    return events.Warned(message=f"{dropped} events were dropped: {path} did not take them in time")


def _given_up_warning(path: Path) -> Event:
    return events.Warned(
        message=f"older events of {path.stem} were given up: its first file and its newest two stay"
    )


def _begin_afresh_in_child() -> None:
    for sink in list(_living):
        sink._begin_afresh()


def _close_at_exit() -> None:
    deadline_s = time.monotonic() + EXIT_DEADLINE_S
    for sink in list(_living):
        sink.close(deadline_s=max(0.0, deadline_s - time.monotonic()))


os.register_at_fork(after_in_child=_begin_afresh_in_child)
atexit.register(_close_at_exit)
