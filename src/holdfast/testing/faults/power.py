"""Finds every state of a directory that a loss of power may leave, and lays each out to be opened.

``PowerRecorder`` notes the calls that this process makes below a directory. ``crash_states`` cuts
them after each call and lets everything that no fsync made durable be there, be lost or be torn,
independently of what came before it: names on either side of a link or a rename, whole writes,
sectors of a write, lengths. That is weaker than any file system in use, and no weaker than what
POSIX promises.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

SECTOR_BYTES = 512
#: Up to so many units that may or may not be durable, every combination is tried.
_EXHAUSTED = 6


@dataclass(frozen=True, slots=True)
class WriteBytes:
    """Bytes written into a file; ``offset_bytes`` -1: a length set, of ``size_bytes``."""

    file: int
    offset_bytes: int
    data: bytes = b""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChangeNames:
    """Names of one directory that change together: each is given to a file, or to none."""

    directory: int
    changes: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True)
class SyncObject:
    """An fsync of a file or a directory that has returned."""

    object: int


@dataclass(frozen=True, slots=True)
class Promise:
    """What was told the outside at this moment, and must hold at any later crash."""

    said: str


Operation = WriteBytes | ChangeNames | SyncObject | Promise
_ROOT = 0


class PowerRecorder:
    """Notes what this process changes below ``root``, an existing directory that is empty.

    ``with PowerRecorder(root) as recorder:`` replaces the functions of ``os`` that change files,
    and those alone: files changed by other calls, or by C code, are not seen.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.realpath(root)
        self.operations: list[Operation] = []
        self._numbers: dict[tuple[int, int], int] = {self._key(os.stat(self.root)): _ROOT}
        self._directories = {_ROOT}
        self._lengths: dict[int, int] = {}
        self._held: list[int] = []
        self._one_at_a_time = threading.RLock()
        self._real: dict[str, Callable[..., Any]] = {}

    def promise(self, said: str) -> None:
        """Note that this was told the outside: it must hold at any later crash."""
        self.operations.append(Promise(said))

    @property
    def directories(self) -> frozenset[int]:
        """The numbers of the files that are directories."""
        return frozenset(self._directories)

    def __enter__(self) -> PowerRecorder:
        for name in ("open", "mkdir", "link", "pwrite", "pwritev", "write", "fsync", "ftruncate"):
            self._install(name, getattr(self, f"_{name}"))
        self._install("fdatasync", self._fsync)
        for name in ("replace", "rename"):
            self._install(name, partial(self._replace_name, name))
        for name in ("unlink", "rmdir"):
            self._install(name, partial(self._remove_name, name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        while self._held:
            os.close(self._held.pop())

    def _install(self, name: str, recording: Callable[..., Any]) -> None:
        def record(*arguments: Any, **options: Any) -> Any:
            with self._one_at_a_time:  # noted in the order in which they were made
                return recording(*arguments, **options)

        self._real[name] = getattr(os, name)
        setattr(os, name, record)

    # ── calls with names ─────────────────────────────────────────────────────────────────────────

    def _open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        descriptor: int = self._real["open"](path, flags, mode, **options)
        if is_new and self._split(path)[0] is not None:
            self._name(path, self._number(descriptor))
        return descriptor

    def _mkdir(self, path: Any, mode: int = 0o777, **options: Any) -> None:
        self._real["mkdir"](path, mode, **options)
        if self._split(path)[0] is not None:
            number = self._number_at(path)
            self._directories.add(number)
            self._name(path, number)

    def _link(self, source: Any, target: Any, **options: Any) -> None:
        self._real["link"](source, target, **options)
        if self._split(target)[0] is not None:
            self._name(target, self._number_at(target))

    def _replace_name(self, call: str, source: Any, target: Any, **options: Any) -> None:
        self._real[call](source, target, **options)
        (one, old), (other, new) = self._split(source), self._split(target)
        if other is None:
            self._name(source, None)
            return
        number = self._number_at(target)
        if one == other:
            self.operations.append(ChangeNames(one, ((old, None), (new, number))))
            return
        self._name(target, number)
        self._name(source, None)

    def _remove_name(self, call: str, path: Any, **options: Any) -> None:
        self._real[call](path, **options)
        self._name(path, None)

    # ── calls with descriptors ───────────────────────────────────────────────────────────────────

    def _pwrite(self, descriptor: int, data: Any, offset_bytes: int) -> int:
        self._note_length_of(descriptor)
        count: int = self._real["pwrite"](descriptor, data, offset_bytes)
        self._write_noted(descriptor, bytes(memoryview(data).cast("B")[:count]), offset_bytes)
        return count

    def _pwritev(self, descriptor: int, parts: Any, offset_bytes: int, *flags: int) -> int:
        self._note_length_of(descriptor)
        count: int = self._real["pwritev"](descriptor, parts, offset_bytes, *flags)
        whole = b"".join(bytes(memoryview(part).cast("B")) for part in parts)
        self._write_noted(descriptor, whole[:count], offset_bytes)
        return count

    def _write(self, descriptor: int, data: Any) -> int:
        self._note_length_of(descriptor)
        at = os.lseek(descriptor, 0, os.SEEK_CUR) if self._knows(descriptor) else 0
        count: int = self._real["write"](descriptor, data)
        self._write_noted(descriptor, bytes(memoryview(data).cast("B")[:count]), at)
        return count

    def _write_noted(self, descriptor: int, data: bytes, offset_bytes: int) -> None:
        if self._knows(descriptor):
            number, stop = self._number(descriptor), offset_bytes + len(data)
            self._lengths[number] = max(stop, self._lengths.get(number, 0))
            self.operations.append(WriteBytes(number, offset_bytes, data))

    def _note_length_of(self, descriptor: int) -> None:
        """Note a length that was set by a call this recorder does not replace (fallocate)."""
        if not self._knows(descriptor):
            return
        number = self._number(descriptor)
        length = os.fstat(descriptor).st_size
        if length > self._lengths.get(number, 0):
            self._lengths[number] = length
            self.operations.append(WriteBytes(number, -1, size_bytes=length))

    def _ftruncate(self, descriptor: int, length: int) -> None:
        self._real["ftruncate"](descriptor, length)
        if self._knows(descriptor):
            number = self._number(descriptor)
            self._lengths[number] = length
            self.operations.append(WriteBytes(number, -1, size_bytes=length))

    def _fsync(self, descriptor: int) -> None:
        self._note_length_of(descriptor)
        self._real["fsync"](descriptor)
        if self._knows(descriptor):
            self.operations.append(SyncObject(self._number(descriptor)))

    # ── files by number ──────────────────────────────────────────────────────────────────────────

    def _knows(self, descriptor: int) -> bool:
        return self._key(os.fstat(descriptor)) in self._numbers

    def _number(self, descriptor: int) -> int:
        """Return the file's number; the file stays open until the end, so that no other gets its
        inode.
        """
        key = self._key(os.fstat(descriptor))
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._held.append(self._real["open"](f"/proc/self/fd/{descriptor}", os.O_PATH))
        return self._numbers[key]

    @staticmethod
    def _key(status: os.stat_result) -> tuple[int, int]:
        return status.st_dev, status.st_ino

    def _number_at(self, path: Any) -> int:
        descriptor = self._real["open"](path, os.O_PATH | os.O_NOFOLLOW)
        try:
            return self._number(descriptor)
        finally:
            os.close(descriptor)

    def _split(self, path: Any) -> tuple[int | None, str]:
        """Return the directory's number, None outside of the root, and the last name."""
        directory, name = os.path.split(os.path.abspath(os.fspath(path)))
        directory = os.path.realpath(directory)
        if directory != self.root and not directory.startswith(self.root + "/"):
            return None, name
        return self._numbers.get(self._key(os.stat(directory))), name

    def _name(self, path: Any, number: int | None) -> None:
        directory, name = self._split(path)
        if directory is not None:
            self.operations.append(ChangeNames(directory, ((name, number),)))


@dataclass(slots=True)
class CrashState:
    """One content that a directory may have after the power failed."""

    done: int
    """The number of recorded operations before the crash."""
    promises: tuple[str, ...]
    """What had been told the outside by then."""
    files: dict[str, bytes | None] = field(default_factory=dict)
    """Path -> content; None: a directory."""

    def lay_out(self, directory: str | os.PathLike[str]) -> None:
        """Make ``directory``, which must not exist, with this content."""
        root = Path(directory)
        root.mkdir(parents=True)
        for path, data in sorted(self.files.items()):
            if data is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(data)


def crash_states(
    operations: Sequence[Operation],
    directories: frozenset[int],
    *,
    per_cut: int = 24,
    tears: int = 2,
    seed: int = 0,
) -> Iterator[CrashState]:
    """Yield the distinct states that a loss of power may leave, cut after every operation.

    Every combination of what is not durable is tried while there are few; beside these, of many
    units, all with one or two lost, all with one or two kept, and random ones up to ``per_cut``.
    Of each write longer than a sector ``tears`` torn forms are among them.
    """
    seen: set[int] = set()
    disk = _Disk(directories)
    promises: list[str] = []
    for number, operation in enumerate([*operations, None]):
        for kept in _choices(disk.pending, per_cut, tears, random.Random(f"{seed}.{number}")):
            state = CrashState(number, tuple(promises), disk.content(kept))
            key = hash((state.promises, frozenset(state.files.items())))
            if key not in seen:
                seen.add(key)
                yield state
        if isinstance(operation, Promise):
            promises.append(operation.said)
        elif operation is not None:
            disk.apply(operation)


#: A unit that is not durable yet -> what of it survives.
_Kept = dict[int, "WriteBytes | ChangeNames"]


class _Disk:
    """What is durable by now, and what is not. An fsync makes all that its object has durable, so
    that what is durable always comes before what is not.
    """

    def __init__(self, directories: frozenset[int]) -> None:
        self._directories = directories
        self._names: dict[int, dict[str, int]] = {}
        self._data: dict[int, bytes] = {}
        self.pending: dict[int, WriteBytes | ChangeNames] = {}
        self._count = 0

    def apply(self, operation: WriteBytes | ChangeNames | SyncObject) -> None:
        if not isinstance(operation, SyncObject):
            self.pending[self._count] = operation
            self._count += 1
            return
        for number, one in list(self.pending.items()):
            of = one.file if isinstance(one, WriteBytes) else one.directory
            if of == operation.object:
                _apply(self.pending.pop(number), self._names, self._data)

    def content(self, kept: _Kept) -> dict[str, bytes | None]:
        """Return the tree that the durable operations and those kept make, in their order."""
        names = dict(self._names)
        for one in kept.values():
            if isinstance(one, ChangeNames):
                names[one.directory] = dict(self._names.get(one.directory, {}))
        data = dict(self._data)
        for _, one in sorted(kept.items()):
            _apply(one, names, data)
        found: dict[str, bytes | None] = {}
        self._walk(_ROOT, "", names, data, found)
        return found

    def _walk(
        self,
        directory: int,
        prefix: str,
        names: dict[int, dict[str, int]],
        data: dict[int, bytes],
        found: dict[str, bytes | None],
    ) -> None:
        for name, number in names.get(directory, {}).items():
            path = prefix + name
            if number in self._directories:
                found[path] = None
                self._walk(number, f"{path}/", names, data, found)
            else:
                found[path] = data.get(number, b"")


def _apply(
    one: WriteBytes | ChangeNames, names: dict[int, dict[str, int]], data: dict[int, bytes]
) -> None:
    if isinstance(one, ChangeNames):
        entries = names.setdefault(one.directory, {})
        for name, number in one.changes:
            if number is None:
                entries.pop(name, None)
            else:
                entries[name] = number
        return
    content = data.get(one.file, b"")
    if one.offset_bytes < 0:
        data[one.file] = content[: one.size_bytes].ljust(one.size_bytes, b"\0")
        return
    stop = one.offset_bytes + len(one.data)
    content = content.ljust(stop, b"\0")
    data[one.file] = content[: one.offset_bytes] + one.data + content[stop:]


def _choices(
    pending: dict[int, WriteBytes | ChangeNames], most: int, tears: int, chance: random.Random
) -> Iterator[_Kept]:
    """Yield what of the pending units survives: nothing, all, and combinations between."""
    units = list(pending)
    variants = {number: _variants(pending[number], tears, chance) for number in units}
    if len(units) <= _EXHAUSTED:
        yield from _products(units, variants)
        return
    everything = {number: pending[number] for number in units}
    yield {}
    yield everything
    some = [c for k in (1, 2) for c in combinations(units, k)]
    chance.shuffle(some)
    for lost in some[: most // 3]:
        yield {n: one for n, one in everything.items() if n not in lost}
    for only in some[-(most // 3) :]:
        yield {n: everything[n] for n in only}
    for _ in range(most // 3):
        chosen = {n: chance.choice(variants[n]) for n in units}
        yield {n: one for n, one in chosen.items() if one is not None}


def _products(
    units: Sequence[int], variants: dict[int, list[WriteBytes | ChangeNames | None]]
) -> Iterator[_Kept]:
    for chosen in product(*(variants[number] for number in units)):
        pairs = zip(units, chosen, strict=True)
        yield {number: one for number, one in pairs if one is not None}


def _variants(
    unit: WriteBytes | ChangeNames, tears: int, chance: random.Random
) -> list[WriteBytes | ChangeNames | None]:
    """Return what may become of a unit: nothing, all of it, or some sectors of a write."""
    found: list[WriteBytes | ChangeNames | None] = [None, unit]
    if isinstance(unit, ChangeNames) or len(unit.data) <= SECTOR_BYTES:
        return found
    sectors = -(-len(unit.data) // SECTOR_BYTES)
    for number in range(tears):
        at = chance.randrange(1, sectors) * SECTOR_BYTES
        if number % 2:
            found.append(WriteBytes(unit.file, unit.offset_bytes + at, unit.data[at:]))
        else:
            found.append(WriteBytes(unit.file, unit.offset_bytes, unit.data[:at]))
    return found
