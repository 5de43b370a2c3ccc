"""Files of events below a root: appended to by one process after the other, of a bounded size.

A writer appends to ``<name>.jsonl``. Once that is full it becomes ``<name>.s000001.jsonl``, the
next one ``<name>.s000002.jsonl`` and so on, each compressed after that (``.jsonl.gz``). Of what is
full the first file stays, for it says how the run began; of the others the oldest are given up for
the newest. Older versions named two files ``<name>.0.jsonl`` and ``<name>.1.jsonl``, which come
first.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from holdfast import events
from holdfast.errors import UsageError
from holdfast.events import Event
from holdfast.observe.event_place import event_place

#: The size at which a file is set aside; a record of a rank has about 0.35 kB.
SEGMENT_BYTES = 64 << 20
#: The most that the files of a host take.
BUDGET_BYTES = 1 << 30
#: The same for a spool, from which events are uploaded.
SPOOL_SEGMENT_BYTES, SPOOL_BUDGET_BYTES = 16 << 20, 48 << 20
_BUDGET = "HOLDFAST_EVENT_BYTES"
_FULL = re.compile(r"\.(?:[01]|s(\d{6,}))\.jsonl(?:\.gz)?$")
_COMPRESSION = 3
_COPY_BYTES = 1 << 20
_SETTLED_NS = 2_000_000_000
#: Errors of a file that cannot be read, or ends in the middle of what was compressed.
UNREADABLE = (OSError, EOFError, zlib.error)


def event_budget() -> int:
    """Returns the most that the events of this host take. Raises UsageError for a bad setting."""
    said = os.environ.get(_BUDGET, "").strip()
    if not said:
        return BUDGET_BYTES
    if not (said.isascii() and said.isdigit() and int(said) > 0):
        raise UsageError(
            f"{_BUDGET} is {said!r}: give how many bytes the event files of a host may take, such "
            f"as {BUDGET_BYTES} for 1 GiB, or leave it unset"
        )
    return int(said)


def closed_files(path: Path) -> list[Path]:
    """Returns the full files of the writer of ``path``, oldest first."""
    older = [path.with_suffix(f".{n}.jsonl") for n in (0, 1)]
    found = [each for each in older if each.exists() or each.is_symlink()]
    return found + _ordered(path, _numbered_files(path.parent).get(path.stem, ()))


def _ordered(path: Path, names: Iterable[str]) -> list[Path]:
    """Returns the full files of the writer of ``path``, by their names, oldest first."""
    numbered: dict[int, Path] = {}
    for name in names:
        number = _number(name)
        # Of a file that is being compressed, both are there; then the compressed one is whole.
        if number not in numbered or name.endswith(".gz"):
            numbered[number] = path.with_name(name)
    return [each for _, each in sorted(numbered.items())]


#: Of the directories that were listed last when each had changed last, and what was in it: a report
#: asks for events and for roll-ups in turn.
_listed: dict[Path, tuple[int, dict[str, list[str]]]] = {}
_MOST_LISTED = 4


def _numbered_files(directory: Path) -> dict[str, list[str]]:
    """Returns the names of full files that have a number, by the stem of their writer.

    A run of thousands of hosts has as many writers in one directory, and each of them is asked for:
    it is listed again only when a name was added or removed.
    """
    try:
        changed_ns = directory.stat().st_mtime_ns
        listed_ns, listed = _listed.get(directory, (-1, {}))
        # What changed a moment ago may change again at what the clock of files calls the same time.
        is_lasting = time.time_ns() - changed_ns > _SETTLED_NS
        if is_lasting and listed_ns == changed_ns:
            return listed
        names = os.listdir(directory)
    except OSError:
        return {}
    found: dict[str, list[str]] = {}
    for name in names:
        full = _FULL.search(name)
        if full and int(full[1] or 0):
            found.setdefault(name[: full.start()], []).append(name)
    if directory not in _listed and len(_listed) >= _MOST_LISTED:
        _listed.clear()  # a race of two threads only lists again
    _listed[directory] = changed_ns if is_lasting else -1, found
    return found


def parts_of(path: Path) -> list[Path]:
    """Returns the files of a writer, oldest first; the newest is ``path`` itself.

    Before all comes what was ``path`` until a user compressed it.
    """
    by_user = path.with_name(f"{path.name}.gz")
    return [*([by_user] if by_user.exists() else []), *closed_files(path), path]


def _number(name: str) -> int:
    """Returns the number of a full file; 0 for another one."""
    found = _FULL.search(name)
    return int(found[1] or 0) if found else 0


def set_aside(path: Path) -> Path:
    """Makes room for a new file at ``path``; returns where the full one is."""
    newest = max((_number(each.name) for each in closed_files(path)), default=0)
    full = path.with_suffix(f".s{newest + 1:06d}.jsonl")
    path.rename(full)
    return full


def compress(full: Path) -> Path:
    """Compresses a full file; whenever this is cut short, one of the two is there, whole."""
    import gzip  # a start of every keeper would wait for it

    made = full.with_name(full.name + ".gz")
    temporary = full.with_name(full.name + ".new")
    try:
        with full.open("rb") as source, temporary.open("wb") as target:
            with gzip.GzipFile("", "wb", _COMPRESSION, target, mtime=0) as packed:
                shutil.copyfileobj(source, packed, _COPY_BYTES)
            target.flush()
            os.fsync(target.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)  # the disk may be full
        raise
    temporary.rename(made)
    full.unlink()
    return made


def give_up(path: Path, budget_bytes: int) -> list[Path]:
    """Removes the oldest full files of a writer but the first, until all take ``budget_bytes`` at
    most; returns those that are gone.
    """
    files = closed_files(path)
    left_bytes = sum(map(_size_bytes, [*files, path]))
    gone = []
    for each in files[1:]:
        if left_bytes <= budget_bytes:
            break
        with suppress(OSError):  # not a file of ours
            size = _size_bytes(each)
            each.unlink()
            left_bytes -= size
            gone.append(each)
    return gone


def trails(root: str | Path) -> list[Path]:
    """Returns the newest file of every writer of ``root``; it need not exist yet."""
    return trails_in(event_place(root).read_from())


def trails_in(directory: Path) -> list[Path]:
    """Returns the newest file of every writer in a directory; it need not exist yet."""
    return list(closed_files_in(directory))


def closed_files_in(directory: Path) -> dict[Path, list[Path]]:
    """Returns the newest file of every writer in a directory, and with it its full files that have
    a number, oldest first: those of thousands of writers by one listing.
    """
    found = defaultdict[str, list[str]](list)
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(directory):
            full = _FULL.search(name)
            if full or name.endswith((".jsonl", ".jsonl.gz")):
                closed = found[_FULL.sub(".jsonl", name).removesuffix(".gz")]
                closed += [name] if full and full[1] else []
    trails = ((directory / name, closed) for name, closed in sorted(found.items()))
    return {path: _ordered(path, closed) for path, closed in trails}


def size_bytes(path: Path) -> int:
    """Returns the bytes of all files of a writer."""
    return sum(map(_size_bytes, parts_of(path)))


def _size_bytes(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


Refused = Callable[[Path, Exception], None]


def open_parts(path: Path, refused: Refused | None = None) -> Iterator[BinaryIO]:
    """Yields each file of a writer, oldest first; none twice, also while it makes a new one.

    ``refused``: called for a file that exists and cannot be opened; without it OSError is raised.
    """
    with ExitStack() as opened:
        while True:
            before = parts_of(path)
            files = [(each, _opened(opened, each, refused)) for each in reversed(before)]
            # One that was set aside or compressed meanwhile may be missing, or be there twice.
            if parts_of(path) == before:
                break
            opened.close()
        yield from reversed([file for _, file in files if file is not None])


def _opened(opened: ExitStack, path: Path, refused: Refused | None) -> BinaryIO | None:
    try:
        return opened.enter_context(open_file(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        if refused is None:
            raise
        refused(path, error)
        return None


def open_file(path: Path) -> BinaryIO:
    """Opens a plain file, or what a compressed one has: a pipe would be waited for.

    Raises OSError.
    """
    if path.is_symlink() and not path.exists():
        raise OSError(errno.ELOOP, "is a link to nothing", str(path))
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a file", str(path))
    if path.suffix == ".gz":
        import gzip

        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def is_named(file: BinaryIO | int, path: Path) -> bool:
    """Returns True if ``path`` still names this open file."""
    here = os.fstat(file if isinstance(file, int) else file.fileno())
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


#: The most that one line may have: a record has less than a thousandth of it.
LINE_BYTES = 1 << 20
#: What is read at once: some hundreds of records, which stay in the cache of a processor.
_BLOCK_BYTES = 128 << 10


def blocks_in(file: BinaryIO, size_bytes: int = 1 << 62) -> Iterator[bytes]:
    """Yields a file, or the next ``size_bytes`` of it, in blocks of whole lines; of a line that is
    longer than any record only its beginning.
    """

    def read(most_bytes: int) -> bytes:
        nonlocal size_bytes
        # What is in front of damage is read, too.
        data: bytes = cast(Any, file).read1(min(most_bytes, size_bytes))
        size_bytes -= len(data)
        return data

    left = b""
    while data := read(_BLOCK_BYTES):
        end = data.rfind(b"\n") + 1
        if end:
            yield left + data[:end]
            left = data[end:]
            continue
        left += data
        if len(left) >= LINE_BYTES:
            yield left
            while data and b"\n" not in data:
                data = read(_BLOCK_BYTES)
            left = data[data.find(b"\n") + 1 :]
    if left:
        yield left


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


def encode_alone(record: dict[str, Any], mono_s: float, host: str, boot: str) -> bytes:
    """Returns a record as a line that no process counts: one about a process that is gone."""
    record["mono_s"], record["by_host"], record["boot"] = round(mono_s, 6), host, boot
    record["version"] = VERSION
    return msgspec.json.encode(record) + b"\n"


def encode_event(event: Event, time_s: float) -> bytes:
    """Returns an event as a line that no process counts: one about the records themselves."""
    return msgspec.json.encode(events.to_record(event, time_s)) + b"\n"


class EventFile:
    """The open file of a writer. Lines are appended by one call, so that those of two do not mix.

    ``only_beside``: a file that must exist for anything to be created. ``part_bytes``: the size at
    which the file is set aside; without it the file grows without bound. ``budget_bytes``: the most
    that all files of the writer take. ``is_compressing``: those set aside are compressed.
    """

    def __init__(
        self,
        path: Path,
        *,
        only_beside: Path | None = None,
        part_bytes: int | None = None,
        budget_bytes: int = BUDGET_BYTES,
        is_compressing: bool = False,
    ) -> None:
        self.path, self.only_beside, self.part_bytes = path, only_beside, part_bytes
        self._budget_bytes, self._is_compressing = budget_bytes, is_compressing
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
        gone: list[Path] = []
        try:
            if self._is_there():
                set_aside(self.path)
                gone = self._tidy()
        except OSError:
            self._size_bytes = 0  # tried again when as much was written again
            return b""
        self.close()
        return encode_event(_given_up_warning(self.path), time.time()) if gone else b""

    def _tidy(self) -> list[Path]:
        """Compresses what is set aside, also by a process that was killed over it, and keeps the
        budget; returns the files that were given up.
        """
        if self._is_compressing:
            for full in closed_files(self.path):
                with suppress(OSError):  # it stays as it is
                    if full.suffix == ".gz":
                        full.with_suffix("").unlink(missing_ok=True)
                    elif _number(full.name):
                        compress(full)
        return give_up(self.path, self._budget_bytes)

    def _is_there(self) -> bool:
        """True if the open file still has its name: an older start may have set it aside."""
        return is_named(self._fd, self.path)

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
        message=f"older events of {path.stem} were given up: its first file and its newest stay"
    )
