"""Who holds a lock file, found without touching it: to try a lock can fail the start of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.catalogue import LOCK
from holdfast.storage.open import normal_root


@dataclass(frozen=True, slots=True)
class Holder:
    """Who signed a lock. ``pid`` is 0 when no process of this machine holds it.

    Then whoever signed it was killed, or runs on another host or in another container.
    """

    pid: int
    signed: str


def root_holder(root: str) -> Holder | None:
    """Who holds the lock of a root; None when it is free."""
    path = Path(normal_root(root)) / f".{LOCK}.lock"  # as LocalStore names it
    try:
        signed = path.read_text(errors="replace").strip("\0\n ")
    except OSError:
        return None
    pids = holders(path)
    return Holder(pids[0] if pids else 0, signed) if pids or signed else None


def holders(path: Path, proc: Path = Path("/proc")) -> list[int]:
    """The processes of this machine that hold an flock on ``path``."""
    try:
        inode = path.stat().st_ino
        table = (proc / "locks").read_text().splitlines()
    except OSError:
        return []
    lines = [line.split() for line in table]
    # "1: FLOCK ADVISORY WRITE 4711 fd:00:1234 0 EOF"; one that waits has "->" second.
    locks = [f for f in lines if len(f) >= 6 and f[1] == "FLOCK"]
    pids = {int(f[4]) for f in locks if f[5].rpartition(":")[2] == str(inode)}
    return sorted(pid for pid in pids if pid > 0 and _may_have_open(pid, path, proc))


def _may_have_open(pid: int, path: Path, proc: Path) -> bool:
    """Whether the process has this very file: device numbers in /proc/locks are not always its."""
    wanted = os.path.realpath(path)
    try:
        descriptors = list((proc / str(pid) / "fd").iterdir())
    except PermissionError:
        return True  # another user's: its number is all there is to go by
    except OSError:
        return False
    return any(_target(descriptor) == wanted for descriptor in descriptors)


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""
