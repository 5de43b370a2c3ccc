"""Hosts simulated on one machine: found, lost with all they hold, and asked what they protected."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leftovers import keeper_pids
from lives import Lives


def arena_of(arena_home: Path, host: str) -> Path:
    (arena,) = arena_home.glob(f"*/*@{host}")
    return arena


def keepers_of(arena_home: Path, host: str) -> list[int]:
    return [pid for pid in keeper_pids(arena_home) if f"@{host}\0" in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def kill_keeper(arena_home: Path, host: str) -> None:
    """The keeper of this host dies; what is in its memory stays."""
    for pid in keepers_of(arena_home, host):
        os.kill(pid, signal.SIGKILL)


def lose(lives: Lives, arena_home: Path, hosts: tuple[str, ...], *lost: str) -> None:
    """These hosts are gone at once: their trainers, their keepers, their memory."""
    lives.kill([rank for rank, host in enumerate(hosts) if host in lost])
    for host in lost:
        for pid in keepers_of(arena_home, host):
            os.kill(pid, signal.SIGKILL)
    for host in lost:
        while keepers_of(arena_home, host):
            time.sleep(0.01)
        shutil.rmtree(arena_of(arena_home, host))


def events_of(root: Path, name: str) -> Iterator[dict[str, Any]]:
    """What was told of, by any process; in no order."""
    for path in (root / "events").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            if f'"{name}"' in line:
                try:
                    event = json.loads(line)
                except ValueError:  # cut off by a kill
                    continue
                if event["event"] == name:
                    yield event


def protected(root: Path) -> tuple[int, int]:
    """The newest generation of which somebody said that it is protected."""
    told = events_of(root, "SnapshotProtected")
    return max(((int(e["incarnation"]), int(e["step"])) for e in told), default=(0, -1))


def wait_protected(
    lives: Lives, root: Path, incarnation: int, more: int = 3, after: int = -1
) -> int:
    """Wait until this start has protected so many steps ``after`` one; the newest of them."""
    deadline = time.monotonic() + 60
    while True:
        steps = {
            int(e["step"]) for e in events_of(root, "SnapshotProtected")
            if e["incarnation"] == incarnation and e["step"] > after
        }  # fmt: skip
        if len(steps) >= more:
            return max(steps)
        lives.raise_errors()
        why = [e["reason"] for e in events_of(root, "SnapshotNotProtected")]
        assert time.monotonic() < deadline, f"protected: {sorted(steps)}, not: {why[-3:]}"
        time.sleep(0.05)
