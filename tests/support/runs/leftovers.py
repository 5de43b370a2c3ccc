"""Find the keepers a test left running, and end them.

A keeper is made to outlive whoever started it, so nothing but a search finds one that a test
forgot. It is known by its command line, and as this test's by the arena directory it was given.
"""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Keeper:
    """One running keeper, held by a descriptor: its number cannot be taken over by another."""

    pid: int
    pidfd: int
    command: str


def end_keepers(arena_dir: Path, *, grace_s: float) -> list[str]:
    """End every keeper of ``arena_dir``; say which did not end by themselves within ``grace_s``."""
    keepers = [keeper for pid in _pids() if (keeper := _open_keeper(pid, arena_dir))]
    deadline_s = time.monotonic() + grace_s
    stubborn = []
    for keeper in keepers:
        if not _ends_by(keeper, deadline_s):
            signal.pidfd_send_signal(keeper.pidfd, signal.SIGKILL)
            _ends_by(keeper, time.monotonic() + 10)
            stubborn.append(f"{keeper.pid}: {keeper.command}")
        os.close(keeper.pidfd)
    return stubborn


def _pids() -> list[int]:
    own = str(os.getpid())
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != own]


def _open_keeper(pid: int, arena_dir: Path) -> Keeper | None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    command = _read(pid, "cmdline")
    if b"holdfast.keeper" in command and (
        bytes(arena_dir) in command or bytes(arena_dir) in _read(pid, "environ")
    ):
        return Keeper(pid, pidfd, command.replace(b"\0", b" ").decode(errors="replace").strip())
    os.close(pidfd)
    return None


def _read(pid: int, name: str) -> bytes:
    """One of the process's files in /proc; empty when it has just ended or is another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _ends_by(keeper: Keeper, deadline_s: float) -> bool:
    """Wait until the keeper has ended, at most until ``deadline_s`` on the monotonic clock."""
    poll = select.poll()
    poll.register(keeper.pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))


def keeper_pids(arena_dir: Path) -> list[int]:
    """The process numbers of the keepers that serve arenas below this directory."""
    found = [keeper for pid in _pids() if (keeper := _open_keeper(pid, arena_dir))]
    for keeper in found:
        os.close(keeper.pidfd)
    return [keeper.pid for keeper in found]
