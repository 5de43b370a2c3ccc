"""Read what the kernel says of processes: memory by kind, processor time, descendants.

No torch and no library: the process that watches must cost nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TICKS = os.sysconf("SC_CLK_TCK")
_KINDS = {"RssAnon": "private", "RssShmem": "shared", "RssFile": "files", "VmHWM": "highest"}


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, so that none is lost."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Be killed when the process that started this one ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def memory(pid: int) -> dict[str, int]:
    """Resident bytes of a process by kind, and its highest sum; empty when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    found = (line.partition(":") for line in lines)
    return {_KINDS[key]: int(value.split()[0]) << 10 for key, _, value in found if key in _KINDS}


def own_memory(pid: int) -> int:
    """Resident bytes of a process without shared memory; of files its proportional part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0
    sizes = {
        key: int(value.split()[0]) << 10 for key, _, value in (x.partition(":") for x in lines)
    }
    return sizes["Pss_Anon"] + sizes["Pss_File"]


def descendants(pid: int) -> set[int]:
    """All processes below ``pid``, without itself."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def processor_s(pids: set[int]) -> float:
    """Seconds the processes, and the children they waited for, spent on processors."""
    ticks = 0
    for pid in pids:
        if fields := _stat(pid):
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def end_descendants(patience_s: float) -> int:
    """Wait for what was started here to end; end the rest. How many had to be ended."""
    deadline, ended = time.monotonic() + patience_s, set[int]()
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = descendants(os.getpid())
        if not left:
            return len(ended)
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ended |= left
        time.sleep(0.02)
