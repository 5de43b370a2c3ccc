"""Reads how many cores and how much memory this process may use, also within a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
#: A version 1 control group without a limit reports a number of this order.
_NO_LIMIT = 1 << 60


def rank_cores() -> int:
    """Return this rank's share of the cores that the ranks of its host may use, at least 1.

    A quota of processor time counts: more threads than it has cores would spend it at once, and
    the kernel stops the whole process until its next period.
    """
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    quota = _own_quota()
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(quota) if quota else cores) // ranks)


@lru_cache(maxsize=1)
def _own_quota() -> float | None:
    return cores_quota(_PROC, _GROUPS)


def memory_bytes(proc: Path) -> int:
    """Return the memory of the machine."""
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return 0


def cores_quota(proc: Path, groups: Path) -> float | None:
    """Return the smallest quota of processor time in the control groups above this process, in
    cores.
    """
    quotas = []
    for group in _groups(proc, groups, "cpu"):
        match _words(group / "cpu.max"):
            case [quota, period] if quota != "max":
                quotas.append(int(quota) / int(period))
        match _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us"):
            case [quota, period] if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes(proc: Path, groups: Path) -> int | None:
    """Return the smallest memory limit in the control groups above this process."""
    names = ("memory.max", "memory.limit_in_bytes")
    words = [w for g in _groups(proc, groups, "memory") for n in names for w in _words(g / n)]
    limits = [int(word) for word in words if word.isdecimal() and int(word) < _NO_LIMIT]
    return min(limits, default=None)


def _groups(proc: Path, groups: Path, controller: str) -> Iterator[Path]:
    """Yield our control groups for ``controller`` and their parents, of version 2 and of version
    1.
    """
    for line in _lines(proc / "self" / "cgroup"):
        number, names, path = line.split(":", 2)
        if number == "0":
            root = groups
        elif controller in names.split(","):
            root = groups / controller if (groups / controller).is_dir() else groups / names
        else:
            continue
        # In a container the path may be the host's: then only the root of the mount exists.
        below = root / path.strip("/")
        yield from (group for group in (below, *below.parents) if group.is_relative_to(root))


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
