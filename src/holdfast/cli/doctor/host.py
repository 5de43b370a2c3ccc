"""Finds out which cores, memory and limits this process may use, also within a container."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli.doctor.rules.probe_facts import HostFacts, PlaceFacts, Speeds
from holdfast.format.checksum import checksum
from holdfast.observe.text import SHARE_STORE
from holdfast.persist.writer import CHUNK_BYTES, WRITERS
from holdfast.protocol.control_groups import cores_quota, memory_bytes, memory_limit_bytes
from holdfast.storage.files import MOUNTS, allocate, mounted_at


def probe_host() -> HostFacts:
    """Reads the present facts about the host."""
    proc, groups = Path("/proc"), Path("/sys/fs/cgroup")
    affinity = len(os.sched_getaffinity(0))
    return HostFacts(
        system=platform.system(),
        kernel=platform.release(),
        python=sys.version_info[:3],
        cores=os.cpu_count() or affinity,
        cores_allowed=affinity,
        cores_quota=cores_quota(proc, groups),
        memory_bytes=memory_bytes(proc),
        memory_limit_bytes=memory_limit_bytes(proc, groups),
        locked_memory_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
    )


def settings() -> dict[str, str]:
    """Returns the environment variables of Holdfast, and the one of torchrun that matters here."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("HOLDFAST_") or name == SHARE_STORE
    }


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


# Measures a directory's file system: its type, its features, and its speed. Leaves nothing behind.


#: The most that is written, and the longest that writing takes.
MOST_BYTES = 256 << 20
#: Without direct I/O the page cache takes all bytes at once and fsync then waits for the disk.
MOST_BUFFERED_BYTES = 32 << 20
BUDGET_S = 0.8
_PAGE = 4096
_MEMORY_BYTES = 64 << 20


def probe_place(path: str) -> PlaceFacts:
    """Probes the file system of ``path``. A path that does not exist yet counts as on its nearest
    parent's.
    """
    there = nearest(path)
    kind, mount = mounted_at(there, MOUNTS)
    try:
        room = os.statvfs(there)
        abilities = _try_out(there)
    except OSError as error:
        return PlaceFacts(path, kind, mount, fault=os.strerror(error.errno or 0))
    return PlaceFacts(
        path=path,
        kind=kind,
        mount=mount,
        size_bytes=room.f_blocks * room.f_frsize,
        free_bytes=room.f_bavail * room.f_frsize,
        free_files=room.f_favail if room.f_files else None,  # some count no files
        is_direct=abilities.is_direct,
        links=abilities.links,
        locks=abilities.locks,
    )


def nearest(path: str) -> Path:
    """Returns ``path`` itself, or the nearest directory above it that exists."""
    found = Path(path).absolute()
    while not found.is_dir() and found != found.parent:
        found = found.parent
    return found


@dataclass(frozen=True, slots=True)
class _Abilities:
    is_direct: bool | None = None
    links: bool | None = None
    locks: bool | None = None


@contextmanager
def _workplace(directory: Path) -> Iterator[Path]:
    """Creates a directory below, and removes it at the end. Its name begins with a dot: no store
    lists it.
    """
    with tempfile.TemporaryDirectory(
        prefix=".doctor-", dir=directory, ignore_cleanup_errors=True
    ) as name:
        yield Path(name)


def _try_out(directory: Path) -> _Abilities:
    with _workplace(directory) as work:
        path = work / "file"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            return _Abilities(
                is_direct=_takes_direct(path),
                links=_works(lambda: os.link(path, work / "link")),
                locks=_works(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)),
            )
        finally:
            os.close(descriptor)


def _works(act: Callable[[], object]) -> bool:
    try:
        act()
    except OSError:
        return False
    return True


def _takes_direct(path: Path) -> bool:
    """Tests direct I/O with one page: some file systems accept the flag and refuse the write."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return False
    with mmap.mmap(-1, _PAGE) as page:
        try:
            return os.pwrite(descriptor, page, 0) == _PAGE
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        finally:
            os.close(descriptor)


# ── speed ──────────────────────────────────────────────────────────────────────────────────────


def measure(place: PlaceFacts) -> Speeds:
    """Writes as the keeper does, reads back past the cache, copies and checksums memory: 3 s."""
    copy, summed = measure_memory()
    write: float | None = None
    read: float | None = None
    most = MOST_BYTES if place.is_direct else MOST_BUFFERED_BYTES
    most = min(most, place.free_bytes // 4) // CHUNK_BYTES * CHUNK_BYTES
    if not place.fault and most:
        with suppress(OSError), _workplace(nearest(place.path)) as work:
            write, read = _measure_file(work / secrets.token_hex(4), most, bool(place.is_direct))
    return Speeds(write, read, copy, summed)


def _measure_file(path: Path, most: int, is_direct: bool) -> tuple[float, float]:
    direct = os.O_DIRECT if is_direct else 0
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | direct, 0o600)
    path.unlink()  # whatever ends us, the bytes go
    try:
        with suppress(OSError):
            allocate(descriptor, most)
        size, write = _write(descriptor, most)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return write, _read(descriptor, size)
    finally:
        os.close(descriptor)


def _write(descriptor: int, most: int) -> tuple[int, float]:
    with mmap.mmap(-1, CHUNK_BYTES) as chunk, ThreadPoolExecutor(WRITERS) as pool:
        chunk[:] = os.urandom(1 << 20) * (CHUNK_BYTES >> 20)
        started_s, size, pending = time.monotonic(), 0, []
        while size < most and time.monotonic() - started_s < BUDGET_S:
            pending.append(pool.submit(os.pwrite, descriptor, chunk, size))
            size += CHUNK_BYTES
            if len(pending) >= WRITERS:
                pending.pop(0).result()
        for future in pending:
            future.result()
        os.fsync(descriptor)
        return size, size / (time.monotonic() - started_s)


def _read(descriptor: int, size: int) -> float:
    with mmap.mmap(-1, CHUNK_BYTES) as chunk:
        started_s, done = time.monotonic(), 0
        while done < size and time.monotonic() - started_s < BUDGET_S:
            got = os.preadv(descriptor, [chunk], done)
            if not got:
                break
            done += got
        return done / (time.monotonic() - started_s)


def measure_memory(size: int = _MEMORY_BYTES) -> tuple[float, float]:
    """Measures how fast one thread copies memory, and checksums it: the best of three."""
    source, target = memoryview(bytearray(size)), memoryview(bytearray(size))
    source[:] = bytes([1]) * size  # mapped now, not while it is timed

    def copy() -> None:
        target[:] = source

    copy()
    return size / _quickest(copy), size / _quickest(lambda: checksum(source))


def _quickest(act: Callable[[], object]) -> float:
    taken_s = []
    for _ in range(3):
        started_s = time.perf_counter()
        act()
        taken_s.append(time.perf_counter() - started_s)
    return max(min(taken_s), 1e-9)
