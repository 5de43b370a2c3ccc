"""A host is lost in the middle of what it does, and nothing that was protected goes with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from holdfast.testing.faults import Encoding, Hosts, is_capturing, is_persisting, wait_until
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives
from support.runs.losing import aim, protected, wait_protected


@pytest.fixture(autouse=True)
def ending_keepers(arena_dir: Path) -> Iterator[None]:
    yield
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_lost_while_it_captures_codes_or_writes_takes_nothing_that_was_protected(
    tmp_path: Path, arena_dir: Path
) -> None:
    root, simulated = tmp_path / "run", Hosts(arena_dir)
    moments: dict[str, Callable[[], Callable[[], bool]]] = {
        "b": lambda: partial(is_capturing, simulated.arena("b")),
        "c": lambda: Encoding(simulated.arena("c")),
        "a": lambda: partial(is_persisting, root),  # the coordinator's host, which publishes
    }
    hosts: tuple[str, ...] = ("a", "b", "c")
    least = completed = -1
    with Lives(root, seed=45) as lives:
        for n, (lost, moment) in enumerate(moments.items(), start=1):
            # A large image and few saves to storage: each moment is long enough to be met.
            lives.start(3, 100_000, rows=1201, storage=20, hosts=hosts, options={"parity": 1})
            step, source = lives.wait_restored(3)
            assert source in (("memory", "storage") if n > 1 else ("",))
            assert least <= step <= completed
            wait_protected(lives, root, n, after=step)
            least = protected(root)[1]
            fire = aim(lives, arena_dir, hosts, lost)
            wait_until(moment(), timeout_s=60, pause_s=0.0005, what=f"the moment of {lost}")
            fire()
            completed = lives.end(3)
            hosts = (*(host for host in hosts if host != lost), f"{lost}2")
        lives.start(3, 3, rows=1201, storage=20, hosts=hosts, options={"parity": 1})
        step, _ = lives.wait_restored(3)
        assert least <= step <= completed
        lives.wait_end()
