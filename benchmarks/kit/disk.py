"""Take directories for a measurement, make files durable, and fill or empty the page cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.kit import machine

MEMORY = Path("/dev/shm")
IN_MEMORY = ("tmpfs", "ramfs", "ramdisk")


@contextmanager
def scratch(parent: str | None, needed_bytes: int) -> Iterator[Path]:
    """A directory on a real disk with room for ``needed_bytes``, removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=parent))
    try:
        if machine.file_system(directory) in IN_MEMORY:
            raise SystemExit(f"{directory} is in memory: name a directory on a disk with --dir")
        if shutil.disk_usage(directory).free < needed_bytes:
            raise SystemExit(f"{directory} has no room for {needed_bytes / 1e9:.0f} GB: use --dir")
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def sync_directories(directory: Path) -> None:
    """Make the names in ``directory`` durable, and its own: files alone are not found again."""
    for path in (directory, directory.parent):
        _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    _fsync(path, os.O_RDONLY)


def sync_tree(directory: Path) -> None:
    """Make everything below ``directory`` durable, and its own name."""
    for path, _, names in os.walk(directory, topdown=False):
        for name in names:
            _fsync(Path(path) / name, os.O_RDONLY)
        _fsync(Path(path), os.O_RDONLY | os.O_DIRECTORY)
    _fsync(directory.parent, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prime_page_cache(directory: Path, size_bytes: int) -> None:
    """Have the page cache just freed as many bytes as are to be written: the rivals' best case.

    A virtual machine gives memory back to its host two seconds after it was freed, and pays to get
    it again: buffered writes of 1.6 GB then took 2.5 to 4.7 s instead of 0.6 (measured), where
    direct I/O out of kept memory took the same. Elsewhere this changes nothing.
    """
    path, block = directory / "primer", memoryview(bytearray(8 << 20))
    with path.open("wb", buffering=0) as file:
        for start in range(0, size_bytes, len(block)):
            file.write(block[: size_bytes - start])
    path.unlink()  # before any of it went to the disk


def remove(directory: Path) -> None:
    """Remove a directory and wait until the disk is done with it: freeing space takes time too."""
    shutil.rmtree(directory, ignore_errors=True)
    sync_directories(directory.parent)


def drop(files: Iterable[Path], *, cold: bool) -> None:
    """Have none of the files in the page cache where they are to be cold."""
    if not cold:
        return
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(files: Iterable[Path]) -> None:
    """Read the files through the page cache."""
    room = bytearray(8 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass
