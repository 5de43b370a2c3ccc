"""Hosts of a test, by the chaos kit, and what tests of lives ask about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.testing.faults import Hosts, newest_protected
from holdfast.testing.faults import events_of as told_of
from holdfast.testing.faults import wait_protected as wait_until_protected
from support.runs.lives import Lives


def arena_of(arena_home: Path, host: str) -> Path:
    return Hosts(arena_home).arena(host)


def keepers_of(arena_home: Path, host: str) -> list[int]:
    return Hosts(arena_home).keepers(host)


def kill_keeper(arena_home: Path, host: str) -> None:
    """The keeper of this host dies; what is in its memory stays."""
    Hosts(arena_home).kill_keeper(host)


def aim(lives: Lives, arena_home: Path, hosts: tuple[str, ...], *lost: str) -> Callable[[], None]:
    """These hosts are gone as soon as this is called: trainers, keepers, and their memory."""
    simulated = Hosts(arena_home)
    for host, pid in zip(hosts, lives.pids, strict=True):
        simulated.add(host, pid)
    return simulated.aim(*lost)


def lose(lives: Lives, arena_home: Path, hosts: tuple[str, ...], *lost: str) -> None:
    """These hosts are gone at once: their trainers, their keepers, their memory."""
    aim(lives, arena_home, hosts, *lost)()


def events_of(root: Path, name: str) -> Iterator[dict[str, Any]]:
    """What was told of, by any process; in no order."""
    return told_of(root, name)


def protected(root: Path) -> tuple[int, int]:
    """The newest generation of which somebody said that it is protected."""
    return newest_protected(root) or (0, -1)


def wait_protected(
    lives: Lives, root: Path, incarnation: int, more: int = 3, after: int = -1
) -> int:
    """Wait until this start has protected so many steps ``after`` one; the newest of them."""
    return wait_until_protected(root, incarnation, more=more, after=after, check=lives.raise_errors)
