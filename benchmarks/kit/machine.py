"""What every benchmark shares: a fair order, facts of the machine, and dated results.

A figure without its machine, its rivals and its raw values is a rumour. So every benchmark runs
all systems in one alternating series on one machine, and writes what it measured beside what it
prints.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
IMAGES = DOCUMENT.parent / "images"
RESULTS = Path(__file__).parent / "results"
_VERSIONS = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
IN_MEMORY = ("tmpfs", "ramfs", "ramdisk")


def alternate(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name): every name once a round, each round beginning with another one.

    What disturbs a machine comes and goes; in this order it meets every system alike.
    """
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            yield turn, name


# ── values ───────────────────────────────────────────────────────────────────────────────────


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the values themselves."""
    return {
        "median": round(statistics.median(values), 6),
        "min": round(min(values), 6),
        "max": round(max(values), 6),
        "values": [round(value, 6) for value in values],
    }


def seconds(found: dict[str, Any]) -> str:
    """A summary as it stands in a table."""
    return f"{found['median']:.3f} ({found['min']:.3f}–{found['max']:.3f})"


def counted(verdicts: Sequence[str]) -> str:
    """How often each was found."""
    return ", ".join(f"{verdicts.count(one)}x {one}" for one in sorted(set(verdicts)))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; the first column is text, the others are figures."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


# ── the machine ──────────────────────────────────────────────────────────────────────────────


def machine_facts(
    directory: Path, packages: Sequence[str], interpreter: str = sys.executable
) -> dict[str, str]:
    """What must stand beside a figure; no names of people, hosts or directories.

    Of the packages those that ``interpreter`` has.
    """
    memory = re.search(r"MemTotal:\s+(\d+)", _read("/proc/meminfo"))
    return {
        "processor": processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(memory[1]) / 1e6:.0f} GB" if memory else "unknown",
        "disk": file_system(directory),
        "kernel": platform.release(),
        **versions(packages, interpreter),
    }


def versions(packages: Sequence[str], interpreter: str) -> dict[str, str]:
    """The versions of an interpreter and of those packages it has."""
    asked = subprocess.run(
        [interpreter, "-c", _VERSIONS, *packages], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(asked.stdout)
    return found


def processor() -> str:
    """The processor's own name for itself."""
    named = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    return named[1].strip() if named else platform.machine()


def file_system(directory: Path) -> str:
    """The type of file system ``directory`` lies on."""
    mounts = (line.split()[1:3] for line in _read("/proc/self/mounts").splitlines())
    above = [(point, kind) for point, kind in mounts if directory.resolve().is_relative_to(point)]
    return max(above, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def available_bytes() -> int:
    """Memory that can be taken without pushing anything out."""
    found = re.search(r"MemAvailable:\s+(\d+)", _read("/proc/meminfo"))
    return int(found[1]) << 10 if found else 0


@contextmanager
def machine_alone() -> Iterator[None]:
    """Hold the lock file named by HOLDFAST_BENCH_LOCK, where it is set, while one visit is made.

    Other work on the machine that takes turns by the same file (``flock FILE make test``) stays
    out of the figures.
    """
    if not (path := os.environ.get("HOLDFAST_BENCH_LOCK")):
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait_until_idle(patience_s: float, *, share: float = 0.9) -> float:
    """Wait until the processors are idle for ``share`` of half a second; the share found at last.

    Others' work is in every figure. After ``patience_s`` seconds it has to be.
    """
    deadline = time.monotonic() + patience_s
    while True:
        before = _processor_times()
        time.sleep(0.5)
        spent = [after - then for then, after in zip(before, _processor_times(), strict=True)]
        idle = sum(spent[3:5]) / max(1, sum(spent))  # idle, and idle but waiting for the disk
        if idle >= share or time.monotonic() >= deadline:
            return idle


def _processor_times() -> list[int]:
    first = _read("/proc/stat").partition("\n")[0]
    return [int(ticks) for ticks in first.split()[1:9]]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


# ── the disk ─────────────────────────────────────────────────────────────────────────────────


@contextmanager
def scratch(parent: str | None, needed_bytes: int) -> Iterator[Path]:
    """A directory on a real disk with room for ``needed_bytes``, removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=parent))
    try:
        if file_system(directory) in IN_MEMORY:
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


# ── results ──────────────────────────────────────────────────────────────────────────────────


def write_results(
    kind: str, facts: dict[str, str], found: dict[str, Any], shown: str, directory: Path = RESULTS
) -> Path:
    """``results/<kind>_<processor>_<month>``: the raw values as JSON, what is shown as markdown."""
    path = _results_file(kind, facts, directory)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"date": today(), "machine": facts, **found}, indent=1) + "\n")
    path.with_suffix(".md").write_text(shown + "\n")
    return path


def read_results(kind: str, facts: dict[str, str], directory: Path = RESULTS) -> dict[str, Any]:
    """What was written before where ``write_results`` will write; {} when nothing was."""
    path = _results_file(kind, facts, directory)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _results_file(kind: str, facts: dict[str, str], directory: Path) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", f"{facts['processor']} {facts['cores']}c".lower()).strip("-")
    return directory / f"{kind}_{slug}_{time.strftime('%Y%m')}.json"


def today() -> str:
    """The date of a result."""
    return time.strftime("%Y-%m-%d")


def add_document_option(parser: argparse.ArgumentParser) -> None:
    """``--document``."""
    parser.add_argument(
        "--document", action="store_true", help="put tables and plots into docs/performance.md"
    )


def replace_block(document: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name -->`` and ``<!-- /name -->`` in a document."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, found, rest = document.read_text().partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{document.name} has no block {name!r} to put the table in")
    document.write_text(f"{head}{begin}{text}\n{end}{tail}")
