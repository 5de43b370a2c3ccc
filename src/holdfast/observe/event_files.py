"""Files of events below a root: appended to by one process after the other, of a bounded size.

A writer appends to ``<name>.jsonl``. Once that is full
it becomes ``<name>.0.jsonl`` and stays, for it says how the run began; the next ones become
``<name>.1.jsonl``, each in place of the one before. So a writer has three files at most.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from holdfast import events
from holdfast.events import Event
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


#: The version of a record; ``docs/format/events-v1.md``.
VERSION = 1


def encode_record(
    record: dict[str, Any], mono_s: float, host: str, writer: str, number: int, boot: str
) -> bytes:
    """Returns a record of an event as a line, with what is said of every event."""
    record["mono_s"] = round(mono_s, 6)
    record["version"], record["boot"] = VERSION, boot
    record["by_host"], record["writer"], record["number"] = host, writer, number
    return msgspec.json.encode(record) + b"\n"


def encode_event(event: Event, time_s: float) -> bytes:
    """Returns an event as a line that no process counts: one about the records themselves."""
    return msgspec.json.encode(events.to_record(event, time_s)) + b"\n"


class EventFile:
    """The open file of a writer. Lines are appended by one call, so that those of two do not mix.

    ``only_beside``: a file that must exist for anything to be created. ``part_bytes``: the size at
    which the file is set aside; without it the file grows without bound.
    """

    def __init__(
        self, path: Path, *, only_beside: Path | None = None, part_bytes: int | None = None
    ) -> None:
        self.path, self.only_beside, self.part_bytes = path, only_beside, part_bytes
        self._fd = -1
        self._size_bytes = 0
        self._needs_newline = False
        self._is_failing = False

    def append(self, lines: Sequence[bytes]) -> int:
        """Appends lines, first to last; returns how many of them the file took whole.

        Where it did not take all, that is reported once, until it does again.
        """
        taken, written, added = 0, 0, b""
        try:
            if self._fd >= 0 and self._is_full():
                added = self._begin_part()
            if self._fd < 0:
                self.open()
            data = b"\n" * self._needs_newline + added + b"".join(lines)
            before = len(data) - sum(map(len, lines))
            while written < len(data):
                written += os.write(self._fd, data[written:])
                self._needs_newline = written < len(data)
            taken = len(lines)
            self._is_failing = False
        except OSError as error:
            if written:
                taken = _whole_lines(lines, written - before)
            self._report(error)
        self._size_bytes += written
        return taken

    def open(self) -> None:
        """Opens the file, made where there is none. Raises OSError."""
        path, needed = self.path, self.only_beside
        if needed is not None and not needed.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(needed))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = self._size_bytes = os.fstat(self._fd).st_size
        self._needs_newline = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def end(self, limit_bytes: int) -> bytes:
        """Returns the last bytes of the file; none where it is not to be read."""
        with suppress(OSError):
            if self._fd < 0:
                self.open()
            return os.pread(self._fd, limit_bytes, max(0, self._size_bytes - limit_bytes))
        return b""

    def close(self) -> None:
        """Closes the file; the next line opens it again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _is_full(self) -> bool:
        return self.part_bytes is not None and self._size_bytes >= self.part_bytes

    def _begin_part(self) -> bytes:
        """Sets the file aside; returns the line for the next one about the part that was given up
        for it.

        Where that fails, the file is continued: events are worth more than a bound.
        """
        said = b""
        try:
            if self._is_there() and set_aside(self.path):
                said = encode_event(_given_up_warning(self.path), time.time())
        except OSError:
            self._size_bytes = 0  # tried again when as much was written again
            return b""
        self.close()
        return said

    def _is_there(self) -> bool:
        """True if the open file still has its name: an older start may have set it aside."""
        here = os.fstat(self._fd)
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def _report(self, error: OSError) -> None:
        """Tells the other sinks, once until a write succeeds: this file receives the event too."""
        if not self._is_failing:
            self._is_failing = True
            message = f"events cannot be written to {self.path}: {error}; still trying"
            events.emit(events.Warned(message=message))


def _whole_lines(lines: Sequence[bytes], size_bytes: int) -> int:
    """Returns how many of the lines lie wholly within so many bytes."""
    for count, line in enumerate(lines):
        size_bytes -= len(line)
        if size_bytes < 0:
            return count
    return len(lines)


def _given_up_warning(path: Path) -> Event:
    return events.Warned(
        message=f"older events of {path.stem} were given up: its first file and its newest two stay"
    )
