"""Find out what this process may use: cores, memory and limits, the container's included."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from holdfast.cli.doctor.facts import Host
from holdfast.cli.doctor.host_findings import SHARE_STORE

#: A version 1 control group without a limit says a number of this order.
_NO_LIMIT = 1 << 60


def probe_host(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Host:
    """The host as it is now."""
    affinity = len(os.sched_getaffinity(0))
    return Host(
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
    """The environment's words on Holdfast, and the one on torchrun that matters here."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("HOLDFAST_") or name == SHARE_STORE
    }


def memory_bytes(proc: Path) -> int:
    """All memory of the machine."""
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return 0


def cores_quota(proc: Path, groups: Path) -> float | None:
    """The smallest quota of processor time on the way up the control groups, in cores."""
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
    """The smallest limit on the way up the control groups."""
    names = ("memory.max", "memory.limit_in_bytes")
    words = [w for g in _groups(proc, groups, "memory") for n in names for w in _words(g / n)]
    limits = [int(word) for word in words if word.isdecimal() and int(word) < _NO_LIMIT]
    return min(limits, default=None)


def _groups(proc: Path, groups: Path, controller: str) -> Iterator[Path]:
    """Our control groups for ``controller`` and all above, of version 2 and of version 1."""
    for line in _lines(proc / "self" / "cgroup"):
        number, names, path = line.split(":", 2)
        if number == "0":
            root = groups
        elif controller in names.split(","):
            root = groups / controller if (groups / controller).is_dir() else groups / names
        else:
            continue
        # In a container the path may be the host's: then only the root of the mount is there.
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


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
