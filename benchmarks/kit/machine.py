"""Describe the machine, wait until it is idle, and keep other work off it.

A figure without its machine is a rumour: every result carries these facts.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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


def facts(
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
def alone() -> Iterator[None]:
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
