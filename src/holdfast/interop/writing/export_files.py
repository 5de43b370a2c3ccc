"""Writes planned files beside their place, and gives them their names when all are durable.

Until then the place is as it was. What an export that was stopped left behind is gone on with:
journals name each window of bytes that was written, and its checksum, with which the bytes that are
there are compared. Of several ranks each writes its share of the windows, and rank 0 all else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from holdfast.errors import RootBusy, StorageError, UsageError
from holdfast.format.checksum import BLOCK_BYTES, checksum, text
from holdfast.interop.writing.chosen_leaves import LeafReader
from holdfast.interop.writing.command_ranks import CommandRanks
from holdfast.interop.writing.crc import joined_crc
from holdfast.interop.writing.planned_files import FormatPlan, LeafBytes, PlannedFile, fill_window
from holdfast.restore.reading.read import in_parallel
from holdfast.storage.base import reporting
from holdfast.storage.direct import ALIGNMENT_BYTES, aligned_memory
from holdfast.storage.files import FILE_MODE, allocate, remove_tree, sync_directory, write_once

Progress = Callable[[int, int], None]

#: Threads that read, check and write a window each; a read has threads of its own.
WORKERS = 3
MAX_WINDOW_BYTES = 64 << 20
#: Memory that reading takes beside the windows, for each worker.
_READING_BYTES = 24 << 20
DEFAULT_MEMORY_BYTES = 512 << 20


def window_bytes(memory_bytes: int, is_plain: bool = True) -> int:
    """The size of a window that leaves the whole within a bound. UsageError for too small a one.

    ``is_plain``: no leaf is put together or converted, which takes memory of its own.
    """
    room = (memory_bytes // WORKERS - _READING_BYTES) // (2 if is_plain else 8)
    if room < BLOCK_BYTES:
        least = WORKERS * (_READING_BYTES + (2 if is_plain else 8) * BLOCK_BYTES)
        raise UsageError(f"--memory: at least {least >> 20} MiB are needed")
    return min(MAX_WINDOW_BYTES, room // BLOCK_BYTES * BLOCK_BYTES)


@dataclass(slots=True)
class ExportReport:
    """What an export has written: bytes of all files, and how many of them were there already."""

    size_bytes: int = 0
    resumed_bytes: int = 0
    read_bytes: int = 0
    files: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Window:
    file: int
    start: int
    stop: int


def refuse_taken(out: Path, *, is_file: bool) -> None:
    """Raises UsageError when an export may not be written to ``out``."""
    refuse_no_directory(out)
    if is_file and (out.exists() or out.is_symlink()):
        raise UsageError(f"{out} exists already and is never written over: give another place")
    if out.is_dir():
        with reporting("list", out.name, str(out.parent)):
            is_empty = not any(out.iterdir())
        if not is_empty:
            raise UsageError(f"{out} has files in it, which are never mixed: give another place")
    elif out.exists() or out.is_symlink():
        raise UsageError(f"{out} is a file, and a directory is written: give another place")


def refuse_no_directory(out: Path) -> None:
    """Raises UsageError when there is no directory to write ``out`` in."""
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is no directory: make it, or give another place")


def work_directory(out: Path) -> Path:
    """Where files lie until they have their names."""
    return out.with_name(f".{out.name}.export")


def export(
    plan: FormatPlan,
    reader: LeafReader,
    out: Path,
    identity: str,
    progress: Progress,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    before: Callable[[str], None] = lambda _: None,
    require_unchanged: Callable[[], None] = lambda: None,
    ranks: CommandRanks | None = None,
) -> ExportReport:
    """Write the files of ``plan`` to ``out``, which gets its name last.

    ``identity``: of what is read; what another source left behind is thrown away. ``before``: is
    called before each operation on files. ``require_unchanged``: raises when the source has changed
    meanwhile. ``ranks``: that write it together; an error of one is raised on all. UsageError when
    there are files at ``out``, StorageError when storage refuses.
    """
    ranks = ranks or CommandRanks("the export")
    size = window_bytes(memory_bytes, reader.is_plain)
    target = _WorkDirectory(out, before, ranks.rank)
    with contextlib.closing(target):
        whole = _identity(plan, identity, size)
        begun = ranks.from_rank0(lambda: target.begin(plan, whole))
        ranks.gather(lambda: target.take(plan, whole, begun))
        export_ = _Export(plan, reader, target, progress, size, ranks)

        def write() -> bytes:
            export_.run()
            require_unchanged()
            return export_.told()

        def conclude(told: bytes) -> bytes:
            export_.finish(told)
            target.publish(plan)
            return export_.told()

        told = ranks.gather(write, _join_told, conclude)
    return _report(plan, told)


def _identity(plan: FormatPlan, source: str, size: int) -> str:
    found = xxhash.xxh3_128(f"{source} {size}\n".encode())
    for file in plan.files:
        for fact in file.facts():
            found.update(f"{fact}\n".encode(errors="surrogatepass"))
    return found.hexdigest()


class _Told(msgspec.Struct, array_like=True):
    """What ranks have written: bytes, those that were there already, and CRC-32s of leaves.

    ``sums``: by the number of the file and of its part: (offset, bytes, CRC-32).
    """

    size_bytes: int = 0
    resumed_bytes: int = 0
    sums: dict[tuple[int, int], list[tuple[int, int, int]]] = {}


def _join_told(one: bytes, other: bytes) -> bytes:
    first, second = (msgspec.msgpack.decode(each, type=_Told) for each in (one, other))
    for place, sums in second.sums.items():
        first.sums.setdefault(place, []).extend(sums)
    first.size_bytes += second.size_bytes
    first.resumed_bytes += second.resumed_bytes
    return msgspec.msgpack.encode(first)


def _report(plan: FormatPlan, told: bytes) -> ExportReport:
    found = msgspec.msgpack.decode(told, type=_Told)
    files = [file.path for file in plan.files]
    return ExportReport(found.size_bytes, found.resumed_bytes, files=files)


class _Export:
    """One rank's share of an export: windows are written by several threads; what depends on the
    sums of all ranks' windows is written last, on rank 0.
    """

    def __init__(
        self,
        plan: FormatPlan,
        reader: LeafReader,
        target: _WorkDirectory,
        progress: Progress,
        window_bytes: int,
        ranks: CommandRanks,
    ) -> None:
        self._plan, self._reader, self._target = plan, reader, target
        self._progress, self._window_bytes, self._ranks = progress, window_bytes, ranks
        self._told = _Told()
        self._share_bytes = 0
        self._lock = threading.Lock()
        self._thread = threading.local()

    def told(self) -> bytes:
        """What was written so far, for the other ranks."""
        return msgspec.msgpack.encode(self._told)

    def run(self) -> None:
        """Write this rank's share, durably."""
        windows = [
            _Window(number, start, min(start + self._window_bytes, file.size_bytes))
            for number, file in enumerate(self._plan.files)
            for start in range(0, file.size_bytes, self._window_bytes)
        ]
        share = self._ranks.share(len(windows))
        windows = windows[share.start : share.stop]
        self._share_bytes = sum(window.stop - window.start for window in windows)
        threads = min(WORKERS, max(1, len(windows)))
        in_parallel(self._write, windows, threads=threads, name="holdfast-export")
        if self._ranks.rank:
            for number in sorted({window.file for window in windows}):
                self._target.sync(self._plan.files[number])

    def finish(self, told: bytes) -> None:
        """Write what depends on the sums of all windows, and make all files durable."""
        self._told = msgspec.msgpack.decode(told, type=_Told)
        for number, file in enumerate(self._plan.files):
            self._finish(number, file)

    def _write(self, window: _Window) -> int:
        self._ranks.require_others()
        file = self._plan.files[window.file]
        memory = self._memory(window.stop - window.start)
        known = self._target.journal.get((file.path, window.start))
        is_there = known is not None and self._target.has(file, window.start, memory, known)
        if is_there:
            runs = list(_runs(file, window.start, window.stop))
        else:
            runs = fill_window(file, window.start, memory, self._reader.fill)
            self._target.write(file, window.start, memory)
            self._target.note(file, window.start, checksum(memory))
        sums = [
            (number, window.start + begin, stop - begin, zlib.crc32(memory[begin:stop]))
            for number, begin, stop in runs
            if file.finish is not None
        ]
        with self._lock:
            for number, at, size, crc in sums:
                self._told.sums.setdefault((window.file, number), []).append((at, size, crc))
            self._told.size_bytes += len(memory)
            self._told.resumed_bytes += len(memory) if is_there else 0
            self._progress(self._told.size_bytes, self._share_bytes)
        return len(memory)

    def _memory(self, size_bytes: int) -> memoryview:
        """Memory of this thread, valid until its next window."""
        if not hasattr(self._thread, "memory"):
            self._thread.memory = memoryview(aligned_memory(self._window_bytes))
        whole: memoryview = self._thread.memory
        return whole[:size_bytes]

    def _finish(self, number: int, file: PlannedFile) -> None:
        if file.finish is not None:
            found = self._told.sums
            sums = [
                joined_crc((size, crc) for _, size, crc in sorted(found.get((number, at), [])))
                for at, part in enumerate(file.parts)
                if isinstance(part, LeafBytes)
            ]
            for offset, data in file.finish(sums):
                self._target.write(file, offset, memoryview(data))
        self._target.sync(file)


def _runs(file: PlannedFile, start: int, stop: int) -> Sequence[tuple[int, int, int]]:
    return [
        (number, max(part.offset, start) - start, min(part.stop, stop) - start)
        for number, part in file.in_range(start, stop)
        if isinstance(part, LeafBytes)
    ]


class _WorkDirectory:
    """The directory beside ``out`` that has the files and the ranks' journals until the end."""

    def __init__(self, out: Path, before: Callable[[str], None], rank: int) -> None:
        self._out, self._before, self._rank = out, before, rank
        self._path = work_directory(out)
        self._files = self._path / "files"
        self._open: dict[str, int] = {}
        #: The same files past the page cache, where that is possible.
        self._direct: dict[str, int] = {}
        self._journal_file: int | None = None
        self._lock = threading.Lock()
        self.journal: dict[tuple[str, int], str] = {}

    def begin(self, plan: FormatPlan, identity: str) -> bytes:
        """On rank 0: take the directory, throw away what another export has left there, and
        reserve room for all files. Returns the identity.

        RootBusy while another export writes there.
        """
        refuse_taken(self._out, is_file=plan.is_file)
        with self._reporting("mkdir"):
            self._path.mkdir(exist_ok=True)
        self._journal_file, first = self._locked(self._path / "journal")
        with self._reporting("mkdir"):
            others = sorted(self._path.glob("journal-*"))
        is_another = first != identity
        for path in others:  # of a rank that outlived rank 0 of an earlier start
            journal, _ = self._locked(path)
            os.close(journal)
            if is_another:
                path.unlink()
        with self._reporting("mkdir"):
            if is_another:
                os.ftruncate(self._journal_file, 0)
                remove_tree(str(self._files))
                self._append(identity)
            self._files.mkdir(exist_ok=True)
        for file in plan.files:
            self._make(file)
        return identity.encode()

    def take(self, plan: FormatPlan, identity: str, begun: bytes) -> bytes:
        """On every rank: read the journals of an export of the same files that was stopped, and
        open the files that rank 0 has made.
        """
        if begun.decode() != identity:
            raise UsageError(
                f"rank {self._rank} would export other bytes than rank 0: all ranks need the same "
                "arguments, and see the same files"
            )
        if self._rank:
            self._journal_file, first = self._locked(self._path / f"journal-{self._rank}")
            with self._reporting("write", "journal"):
                if first != identity:
                    os.ftruncate(self._journal_file, 0)
                    self._append(identity)
            for file in plan.files:
                self._open_file(file)
        with self._reporting("read", "journal"):
            for path in sorted(self._path.glob("journal*")):
                first, *lines = path.read_text(errors="replace").split("\n")
                if first == identity:
                    self.journal.update(filter(None, map(_journal_entry, lines)))
        return b""

    def _locked(self, path: Path) -> tuple[int, str]:
        """A journal, locked, and its first line. RootBusy while another process has it."""
        with self._reporting("open", "journal"):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND
            journal = os.open(path, flags, FILE_MODE)
            try:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(journal)
                raise RootBusy(
                    f"{self._out} is being written by another export", name=str(self._path)
                ) from None
            return journal, os.pread(journal, 64, 0).decode(errors="replace").partition("\n")[0]

    def _make(self, file: PlannedFile) -> None:
        """Open a file, and reserve its room."""
        place = self._files / file.path
        with self._reporting("create", file.path):
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists() and place.stat().st_nlink > 1:  # published: it belongs to others
                place.unlink()
        self._open_file(file)
        with self._reporting("create", file.path):
            if os.fstat(self._open[file.path]).st_size != file.size_bytes:
                os.ftruncate(self._open[file.path], 0)
                _reserve(self._open[file.path], file.size_bytes)

    def _open_file(self, file: PlannedFile) -> None:
        place = self._files / file.path
        with self._reporting("open", file.path):
            made = 0 if self._rank else os.O_CREAT
            self._open[file.path] = os.open(place, os.O_RDWR | made | os.O_CLOEXEC, FILE_MODE)
            with contextlib.suppress(OSError):  # EINVAL: a file system without direct I/O
                self._direct[file.path] = os.open(place, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def has(self, file: PlannedFile, start: int, memory: memoryview, known: str) -> bool:
        """Read bytes that were written before; True if they are those that were meant."""
        with self._reporting("read", file.path):
            done = 0
            while done < len(memory):
                count = os.preadv(self._open[file.path], [memory[done:]], start + done)
                if not count:
                    return False
                done += count
        return text(checksum(memory)) == known

    def write(self, file: PlannedFile, offset: int, data: memoryview) -> None:
        """Write bytes of a file, whole pages past the page cache."""
        with self._reporting("write", file.path):
            direct = self._direct.get(file.path)
            whole = len(data) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            if direct is not None and whole and not offset % ALIGNMENT_BYTES:
                count = _write_direct(direct, offset, data[:whole])
                offset, data = offset + count, data[count:]
            while data:
                count = write_once(self._open[file.path], offset, data)
                offset, data = offset + count, data[count:]

    def note(self, file: PlannedFile, start: int, sum_: int) -> None:
        """Put into the journal that these bytes were written."""
        with self._lock, self._reporting("write", "journal"):
            self._append(f"\n{json.dumps([file.path, start, text(sum_)])}\n")

    def _append(self, line: str) -> None:
        assert self._journal_file is not None
        data = line.encode()
        while data:
            data = data[os.write(self._journal_file, data) :]

    def sync(self, file: PlannedFile) -> None:
        """Make a file durable."""
        with self._reporting("fsync", file.path):
            os.fsync(self._open[file.path])
            for descriptors in (self._open, self._direct):
                if file.path in descriptors:
                    os.close(descriptors.pop(file.path))

    def publish(self, plan: FormatPlan) -> None:
        """Give the files their name, durably, and remove what was beside them."""
        directories = {(self._files / file.path).parent for file in plan.files}
        with self._reporting("fsync"):
            for directory in {*directories, self._files}:
                sync_directory(str(directory))
        with self._reporting("rename"):
            try:
                if plan.is_file:
                    os.link(self._files / plan.files[0].path, self._out)
                else:
                    os.rename(self._files, self._out)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise UsageError(
                        f"{self._out} was made meanwhile and is never written over: give another "
                        "place"
                    ) from None
                raise
            sync_directory(str(self._out.parent))
        with self._reporting("remove"):
            remove_tree(str(self._path))

    def close(self) -> None:
        """Close all files; what was written stays for the next export of the same."""
        for descriptors in (self._open, self._direct):
            while descriptors:
                os.close(descriptors.popitem()[1])
        if self._journal_file is not None:
            os.close(self._journal_file)
            self._journal_file = None

    @contextlib.contextmanager
    def _reporting(self, operation: str, path: str = "") -> Iterator[None]:
        self._before(f"{operation} {path}")
        try:
            with reporting(operation, path or self._out.name, str(self._out.parent)):
                yield
        except StorageError as error:
            if operation == "remove":  # the export is done
                return
            hint = (
                f" {self._out} is as it was; what is written lies in {self._path} and is used when "
                "the same export is run again."
            )
            error.args = (f"{error}{hint}",)
            raise


def _write_direct(descriptor: int, offset: int, data: memoryview) -> int:
    """Write whole pages; returns how much was taken: nothing where direct I/O is refused, or what
    remains is not aligned.
    """
    done = 0
    try:
        while done < len(data) and not done % ALIGNMENT_BYTES:
            done += write_once(descriptor, offset + done, data[done:])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return done


def _reserve(descriptor: int, size_bytes: int) -> None:
    if not size_bytes:
        return
    try:
        allocate(descriptor, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size_bytes)


def _journal_entry(line: str) -> tuple[tuple[str, int], str] | None:
    """(file, start) and checksum of a line; None for one that was cut short."""
    try:
        path, start, sum_ = json.loads(line)
        return (str(path), int(start)), str(sum_)
    except (ValueError, TypeError):
        return None
