"""Find the keepers a test left running, and end them.

A keeper is made to outlive whoever started it, so nothing but a search finds one that a test
forgot. It is known by its command line, and as this test's by the arena it was given there.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.testing.runs.processes import FoundProcess, HeldProcesses, find


def end_keepers(arena_dir: Path, *, grace_s: float) -> list[str]:
    """End every keeper of ``arena_dir``; say which did not end by themselves within ``grace_s``."""
    keepers = {one.pid: one for one in _keepers(arena_dir)}
    held = HeldProcesses(keepers)
    if not held.keep(one.pid for one in _keepers(arena_dir)):  # as they were when they were opened
        return []
    stubborn = held.wait(grace_s)
    held.kill()
    return [f"{pid}: {' '.join(keepers[pid].words)}" for pid in stubborn]


def keeper_pids(arena_dir: Path) -> list[int]:
    """The process numbers of the keepers that serve arenas below this directory."""
    return [one.pid for one in _keepers(arena_dir)]


def _keepers(arena_dir: Path) -> list[FoundProcess]:
    return find(lambda one: one.is_keeper(arena_dir))
