"""Reads the files of a foreign directory by ranges; no name leads out of the directory."""

from __future__ import annotations

import itertools
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import ForeignFormatError, NotFound, StorageError

#: A directory of a checkpoint has folders for ranks and tags; what lies deeper is not looked at.
MAX_DEPTH = 3
MAX_FILES = 200_000
#: Files stay open for the next read of them, in all checkpoints of a process together.
MAX_OPEN = 32
#: Documents that are read whole: indexes, states of a trainer.
MAX_DOCUMENT_BYTES = 64 << 20
#: Keys of a JSON document: so many, and one for so many bytes. One takes 200 bytes of memory.
MAX_KEYS, KEY_BYTES = 1 << 16, 12


class SourceFiles:
    """The files below one directory, or one file alone. Names are relative, with "/"."""

    path: Path | str

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_file = path.is_file()
        self._top = path.parent if self._is_file else path
        #: Of each file that was opened: its number, size and when it was changed.
        self._facts: dict[str, tuple[int, int, int]] = {}
        self._number = next(_NUMBERS)
        weakref.finalize(self, _OPEN.end, self._number)

    def names(self) -> list[str]:
        """The sorted names of all files; hidden ones too."""
        if self._is_file:
            return [self.name]
        found: list[str] = []
        self._walk(self._top, "", found, 0)
        return sorted(found)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return str(self.path).rpartition("/")[2]

    @property
    def is_file(self) -> bool:
        """True for one file alone."""
        return self._is_file

    def _walk(self, directory: Path, prefix: str, found: list[str], depth: int) -> None:
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            raise StorageError(
                f"{directory} cannot be listed: {error.strerror}",
                operation="list",
                errno=error.errno,
            ) from error
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if depth < MAX_DEPTH:
                    self._walk(Path(entry.path), f"{prefix}{entry.name}/", found, depth + 1)
            elif self._is_file_at(entry):
                if len(found) >= MAX_FILES:
                    raise ForeignFormatError(
                        f"{self._top} has more than {MAX_FILES} files: no checkpoint has so many, "
                        "give a directory further down",
                        path=str(self._top),
                        offset=0,
                    )
                found.append(prefix + entry.name)

    @staticmethod
    def _is_file_at(entry: os.DirEntry[str]) -> bool:
        """True for a file and for a link to one."""
        try:
            return entry.is_file()
        except OSError:
            return False

    def where(self, name: str) -> str:
        """The file, for messages."""
        return str(self._top / name)

    def size_bytes(self, name: str) -> int:
        """The length of a file."""
        if name not in self._facts:
            with self._opened(name):
                pass
        return self._facts[name][1]

    def changed_s(self, name: str) -> float:
        """When the file was changed last; 0 for one that is not there."""
        try:
            with self._opened(name) as file:
                return os.fstat(file).st_mtime
        except (NotFound, StorageError, ForeignFormatError):
            return 0.0

    def facts(self) -> dict[str, tuple[int, int, int]]:
        """Of each file that was opened so far: its inode, size and time of change then."""
        return dict(self._facts)

    def require_unchanged(self) -> None:
        """Raise ForeignFormatError when a file that was read is another one by now."""
        for name in self.facts():
            file = self._open(name)
            try:
                self._check(name, file)
            finally:
                os.close(file)

    def _check(self, name: str, file: int) -> None:
        """Note what an open file is; ForeignFormatError when it was another one before."""
        found, path = os.fstat(file), self._top / name
        if not stat.S_ISREG(found.st_mode):
            raise ForeignFormatError(f"{path} is no plain file", path=str(path), offset=0)
        if self._facts.setdefault(name, _facts_of(found)) != _facts_of(found):
            raise ForeignFormatError(
                f"{path} was changed while it was read: what was made of it may be a mixture, and "
                "is not used. Start again when nothing writes there",
                path=str(path),
                offset=0,
            )

    def read(self, name: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """Exactly these bytes (None: all of a document); ForeignFormatError for fewer."""
        if size_bytes is None:
            size_bytes = self.size_bytes(name) - offset_bytes
            if size_bytes > MAX_DOCUMENT_BYTES:
                raise ForeignFormatError(
                    f"{self.where(name)} has {size_bytes} bytes, more than a document of its kind",
                    path=self.where(name),
                    offset=0,
                )
        self.require(name, offset_bytes, size_bytes)
        buffer = bytearray(size_bytes)
        self.read_into(name, offset_bytes, memoryview(buffer))
        return bytes(buffer)

    def require(self, name: str, offset_bytes: int, size_bytes: int) -> None:
        """Raise unless the file has these bytes: before memory is taken for them."""
        have = self.size_bytes(name)
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > have:
            raise ForeignFormatError(
                f"{self.where(name)} has {have} bytes; {size_bytes} from byte {offset_bytes} on "
                "are named in it, or of it: it was cut short, or is of another save",
                path=self.where(name),
                offset=offset_bytes,
            )

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset_bytes`` on."""
        with self._opened(name) as file:
            done = 0
            while done < len(buffer):
                try:
                    count = os.preadv(file, [buffer[done:]], offset_bytes + done)
                except OSError as error:
                    raise StorageError(
                        f"{self.where(name)} cannot be read: {error.strerror}",
                        operation="read",
                        path=name,
                        errno=error.errno,
                    ) from error
                if not count:
                    raise ForeignFormatError(
                        f"{self.where(name)} ends at byte {offset_bytes + done}, "
                        f"{len(buffer) - done} bytes too early: it was cut short",
                        path=self.where(name),
                        offset=offset_bytes + done,
                    )
                done += count

    def _open_below(self, name: str) -> int:
        """Open a file. No folder on the way may be a link, which could lead anywhere; the file
        itself may be one, as in the cache of Hugging Face.
        """
        *folders, last = name.split("/")
        at = os.open(self._top, _FLAGS | os.O_DIRECTORY)
        try:
            for folder in folders:
                inner = os.open(folder, _FLAGS | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = inner
            # A pipe would hold whoever opens it; what is no plain file is refused by the caller.
            return os.open(last, _FLAGS | os.O_NONBLOCK, dir_fd=at)
        finally:
            os.close(at)

    def _open(self, name: str) -> int:
        path = self._top / checked_name(name, str(self.path))
        try:
            return self._open_below(name)
        except FileNotFoundError:
            raise NotFound(f"{path} is not there, which the checkpoint names", path=name) from None
        except OSError as error:
            raise StorageError(
                f"{path} cannot be opened: {error.strerror}",
                operation="open",
                path=name,
                errno=error.errno,
            ) from error

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Lend an open file, which is the same before and after it is used."""
        kept = _OPEN.take((self._number, name))
        file = self._open(name) if kept is None else kept
        try:
            self._check(name, file)
            yield file
            self._check(name, file)
        except BaseException:
            os.close(file)
            raise
        _OPEN.keep((self._number, name), file)


class _OpenFiles:
    """Files that nobody uses at the moment and that may soon be read again: the last few."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._files: dict[tuple[int, str], int] = {}
        # A checkpoint may be collected, and ended, in the middle of any of these.
        self._lock = threading.RLock()

    def take(self, key: tuple[int, str]) -> int | None:
        """The open file of this key, for whoever takes it alone."""
        with self._lock:
            return self._files.pop(key, None)

    def keep(self, key: tuple[int, str], file: int) -> None:
        """Keep an open file for later, in place of the oldest."""
        with self._lock:
            if self._files.setdefault(key, file) != file:
                os.close(file)
            while len(self._files) > self._most:
                self._close(next(iter(self._files)))

    def end(self, number: int) -> None:
        """Close what is kept of one checkpoint."""
        with self._lock:
            for key in list(self._files):
                if key[0] == number:
                    self._close(key)

    def _close(self, key: tuple[int, str]) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            os.close(file)


_OPEN = _OpenFiles(MAX_OPEN)
_NUMBERS = itertools.count()


def _facts_of(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def refuse_hollow(document: bytes, where: str) -> bytes:
    """Return JSON text, unless it is so full of lists or keys that these take far more memory."""
    lists, keys = document.count(b"[") + document.count(b"{"), document.count(b":")
    if lists > 16 + len(document) // 8 or keys > MAX_KEYS + len(document) // KEY_BYTES:
        what = "empty lists" if lists > 16 + len(document) // 8 else "keys"
        raise ForeignFormatError(
            f"{where} has little but {what}: no document of its kind", path=where, offset=0
        )
    return document


_FLAGS = os.O_RDONLY | os.O_CLOEXEC


def checked_name(name: object, where: str) -> str:
    """A name of a file that a document gives, if it is one below the directory."""
    if type(name) is str:
        parts = name.split("/")
        is_plain = all(part not in ("", ".", "..") for part in parts)
        if is_plain and "\0" not in name and "\\" not in name and len(name) <= 1024:
            return name
    raise ForeignFormatError(
        f"{where} names the file {name!r:.100}, which is not below its directory",
        path=where,
        offset=0,
    )
