"""Logs each write and flush that a file system makes to its disk, and rebuilds disks after a cut.

A process serves one file through FUSE, a loop device is made of it, and a real file system of that.
What the file system has written without a flush behind it may be lost, each write by itself. Needs
root, FUSE, loop devices and the package ``mfusepy``.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

#: Length of the smallest disk that each file system can be made on.
DISK_BYTES = {"ext4": 48 << 20, "xfs": 320 << 20, "btrfs": 128 << 20}
_MAKE = {"ext4": ["-q", "-F"], "xfs": ["-q", "-f"], "btrfs": ["-q", "-f"]}
_HEAD = struct.Struct("<QI")
_FLUSH = 1 << 63
_PAGE_BYTES = 4096
_MOUNTED_S = 20.0


@dataclass(frozen=True, slots=True)
class LoggedWrite:
    """Bytes written to the disk; none: a flush, which makes durable what came before it."""

    offset_bytes: int
    data: bytes

    @property
    def is_flush(self) -> bool:
        """Return True for a flush."""
        return self.offset_bytes < 0


def read_log(path: Path) -> list[LoggedWrite]:
    """Return what was written to a disk so far, in order."""
    data, at = path.read_bytes(), 0
    found: list[LoggedWrite] = []
    while at + _HEAD.size <= len(data):
        offset, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if offset & _FLUSH:
            found.append(LoggedWrite(-1, b""))
            continue
        found.append(LoggedWrite(offset, data[at : at + size]))
        at += size
    return found


class LoggedDisk:
    """A mounted file system of this kind whose disk is logged; ``at``: the directory it is mounted
    on.

    ``with LoggedDisk("ext4", work) as disk:`` where ``work`` is an empty directory of its own.
    """

    def __init__(self, kind: str, work: Path) -> None:
        self.kind = kind
        self.at, self._fuse, self._log = work / "mounted", work / "fuse", work / "log"
        self._server: subprocess.Popen[bytes] | None = None
        self._loop = ""

    def __enter__(self) -> LoggedDisk:
        self.at.mkdir()
        self._fuse.mkdir()
        self._log.touch()
        command = [sys.executable, "-m", __name__, self._fuse, DISK_BYTES[self.kind], self._log]
        self._server = subprocess.Popen([str(part) for part in command])
        try:
            disk = self._fuse / "disk"
            deadline_s = time.monotonic() + _MOUNTED_S
            while not disk.exists():
                if self._server.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"FUSE did not mount {self._fuse}")
                time.sleep(0.02)
            self._loop = _run("losetup", "-f", "--show", str(disk)).strip()
            _run(f"mkfs.{self.kind}", *_MAKE[self.kind], self._loop)
            _run("mount", "-t", self.kind, self._loop, str(self.at))
            os.sync()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for command in (["umount", str(self.at)], ["losetup", "-d", self._loop]):
            with suppress(subprocess.CalledProcessError):
                _run(*command)
        with suppress(subprocess.CalledProcessError):
            _run("umount", str(self._fuse))
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    @property
    def writes(self) -> list[LoggedWrite]:
        """Return what was written to the disk so far."""
        return read_log(self._log)


class _Image:
    """The pages of a disk that are not zero."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._pages: dict[int, bytes] = {}

    def write(self, one: LoggedWrite) -> None:
        at, stop = one.offset_bytes, one.offset_bytes + len(one.data)
        while at < stop:
            number, inside = divmod(at, _PAGE_BYTES)
            count = min(_PAGE_BYTES - inside, stop - at)
            part = one.data[at - one.offset_bytes : at - one.offset_bytes + count]
            if count < _PAGE_BYTES:
                old = self._pages.get(number, bytes(_PAGE_BYTES))
                part = old[:inside] + part + old[inside + count :]
            if part.count(0) == _PAGE_BYTES:
                self._pages.pop(number, None)
            else:
                self._pages[number] = part
            at += count

    def lay_out(self, path: Path, later: Sequence[LoggedWrite]) -> None:
        """Write the disk with these writes behind what it has to a new sparse file."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            os.ftruncate(descriptor, self._size_bytes)
            for number, page in self._pages.items():
                os.pwrite(descriptor, page, number * _PAGE_BYTES)
            for one in later:
                os.pwrite(descriptor, one.data, one.offset_bytes)
        finally:
            os.close(descriptor)


def cut_disks(
    kind: str, writes: Sequence[LoggedWrite], first: int, path: Path, *, per_cut: int = 4, seed: str
) -> Iterator[int]:
    """Lay out at ``path`` each disk that a cut after the first ``first`` writes may leave; yield
    the number of writes before the cut.

    Each prefix of the writes, and each prefix less some of those that no flush is behind: every
    one of these alone, every pair while there are few, and random ones up to ``per_cut``.
    """
    image, pending = _Image(DISK_BYTES[kind]), list[LoggedWrite]()
    for number, one in enumerate([*writes, LoggedWrite(-1, b"")]):
        if number >= first and (number == first or not one.is_flush or pending):
            for kept in _kept(pending, per_cut, random.Random(f"{seed}.{number}")):
                image.lay_out(path, kept)
                yield number
        if not one.is_flush:
            pending.append(one)
            continue
        for done in pending:
            image.write(done)
        pending.clear()


def _kept(
    pending: list[LoggedWrite], most: int, chance: random.Random
) -> Iterator[list[LoggedWrite]]:
    yield pending
    places = range(len(pending))
    lost = [set(some) for size in (1, 2) for some in combinations(places, size)]
    lost += [set(chance.sample(places, chance.randrange(1, len(places)))) for _ in places[1:]]
    chance.shuffle(lost)
    for some in lost[:most]:
        yield [one for place, one in enumerate(pending) if place not in some]


@contextmanager
def mounted(kind: str, image: Path, at: Path) -> Iterator[Path]:
    """Mount a disk that was laid out. Raises CalledProcessError if the file system refuses it."""
    _run("mount", "-t", kind, "-o", "loop", str(image), str(at))
    try:
        yield at
    finally:
        _run("umount", str(at))


def missing_for(kind: str) -> str:
    """Return what this machine lacks for a logged disk of this kind, in words; "" for nothing."""
    if os.geteuid():
        return "root"
    with open("/proc/filesystems", encoding="ascii") as systems:
        if kind not in systems.read().split():
            return f"{kind} in the kernel"
    paths = [*os.environ["PATH"].split(":"), "/usr/sbin", "/sbin"]
    for tool in (f"mkfs.{kind}", "losetup", "mount"):
        if not any(Path(one, tool).exists() for one in paths):
            return tool
    if not (Path("/dev/fuse").exists() and Path("/dev/loop-control").exists()):
        return "/dev/fuse and loop devices"
    try:
        import_module("mfusepy")
    except (ImportError, OSError, AttributeError):
        return "the package mfusepy, or libfuse"
    return ""


def _run(*command: str) -> str:
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return ended.stdout


def _serve(mount_point: str, size_bytes: int, log: str) -> None:
    """Serve the file ``disk`` until it is unmounted."""
    fuse: Any = import_module("mfusepy")
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    pages = _Pages()

    class Served(fuse.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
            if path != "/disk":
                raise fuse.FuseOSError(errno.ENOENT)
            return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": size_bytes}

        def readdir(self, path: str, fh: Any) -> list[str]:
            return [".", "..", "disk"]

        def open(self, path: str, flags: int) -> int:
            return 0

        def read(self, path: str, size: int, offset: int, fh: Any) -> bytes:
            return pages.read(offset, min(size, size_bytes - offset))

        def write(self, path: str, data: bytes, offset: int, fh: Any) -> int:
            os.write(descriptor, _HEAD.pack(offset, len(data)) + data)
            pages.write(offset, data)
            return len(data)

        def fsync(self, path: str, datasync: int, fh: Any) -> int:
            os.write(descriptor, _HEAD.pack(_FLUSH, 0))
            return 0

        def fallocate(self, path: str, mode: int, offset: int, length: int, fh: Any) -> int:
            raise fuse.FuseOSError(errno.EOPNOTSUPP)

    fuse.FUSE(Served(), mount_point, foreground=True, nothreads=True)


class _Pages:
    """The content of the served file, by pages."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def read(self, offset: int, size: int) -> bytes:
        first, last = offset // _PAGE_BYTES, (offset + size - 1) // _PAGE_BYTES
        zeros = bytes(_PAGE_BYTES)
        data = b"".join(bytes(self._pages.get(n, zeros)) for n in range(first, last + 1))
        inside = offset % _PAGE_BYTES
        return data[inside : inside + size]

    def write(self, offset: int, data: bytes) -> None:
        at = 0
        while at < len(data):
            number, inside = divmod(offset + at, _PAGE_BYTES)
            count = min(_PAGE_BYTES - inside, len(data) - at)
            page = self._pages.setdefault(number, bytearray(_PAGE_BYTES))
            page[inside : inside + count] = data[at : at + count]
            at += count


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
