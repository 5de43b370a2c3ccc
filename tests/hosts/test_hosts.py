"""Runs on several hosts, simulated on one machine: real ranks, a real keeper and arena for each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore
from holdfast.testing.faults import Hosts, wait_until
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives, read_progress


def keeper_of(arena_home: Path, host: str) -> int:
    """The one keeper of this host."""
    hosts = Hosts(arena_home)
    wait_until(
        lambda: len(hosts.keepers(host)) == 1, timeout_s=30, what=f"the one keeper of {host}"
    )
    return hosts.keepers(host)[0]


def kill_keeper(arena_home: Path, host: str) -> int:
    pid = keeper_of(arena_home, host)
    Hosts(arena_home).kill_keeper(host)
    return pid


@pytest.fixture
def ending_keepers(arena_dir: Path) -> Iterator[None]:
    """For runs that leave a keeper behind on purpose: it is told to stop."""
    yield
    for log in sorted(arena_dir.glob("*/*/keeper.log")):
        print(log.parent.name, log.read_text(errors="replace"), sep=":\n")
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


def newest_stored(root: Path) -> int:
    newest = catalogue(LocalStore(root)).latest
    assert newest is not None
    return newest.step


@pytest.mark.timeout(300)
def test_a_run_on_three_hosts_goes_on_from_memory_whoever_coordinates_and_without_one_from_storage(
    tmp_path: Path, arena_dir: Path, ending_keepers: None
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=21) as lives:
        completed = -1
        for hosts in (("a", "b", "c", "b"), ("a", "b", "c", "b"), ("b", "c", "a", "c")):
            lives.start(4, 100_000, storage=5, hosts=hosts)
            step, source = lives.wait_restored(4)
            assert source == ("memory" if completed >= 0 else "")
            assert step in (completed, completed - 1)
            lives.wait_progress(4, step + 25)
            completed = lives.end(4)
        assert len(keeper_pids(arena_dir)) == 3
        stored = newest_stored(root)
        assert stored > completed - 20  # saved by three keepers together
        # One host fewer, though its keeper lives: what it holds is missing, and storage has all.
        lives.start(4, 3, storage=5, hosts=("c", "a", "c", "a"))
        step, source = lives.wait_restored(4)
        assert (source, step) == ("storage", newest_stored(root))
        assert step >= stored
        lives.wait_end()
    assert Hosts(arena_dir).arena("b").is_dir()
    assert not list(arena_dir.glob("*/*@a")) and not list(arena_dir.glob("*/*@c"))


@pytest.mark.timeout(300)
def test_training_goes_on_when_keepers_of_several_hosts_are_killed_and_their_slots_are_found_again(
    tmp_path: Path, arena_dir: Path, ending_keepers: None
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=22) as lives:
        lives.start(2, 100_000, storage=5, hosts=("a", "b"))
        lives.wait_restored(2)
        for host in ("b", "a", "b", "a"):  # the coordinator's among them
            reached = lives.wait_progress(2, read_progress(lives.directory, 2) + 20)
            old = kill_keeper(arena_dir, host)
            lives.wait_progress(2, reached + 30)
            assert keeper_of(arena_dir, host) != old
            wait_snapshot(lives, root)
        completed = lives.end(2)
        kill_keeper(arena_dir, "a")
        lives.start(2, 100_000, storage=5, hosts=("a", "b"))
        step, source = lives.wait_restored(2)
        assert source == "memory" and step in (completed, completed - 1)
        lives.wait_progress(2, step + 25)
        # A host is lost with its memory: what the other holds of a snapshot is not enough.
        lives.end(2)
        Hosts(arena_dir).lose("b")
        stored = newest_stored(root)
        lives.start(2, 3, storage=5, hosts=("a", "b"))
        assert lives.wait_restored(2) == (stored, "storage")
        lives.wait_end()
    assert not list(arena_dir.glob("*/*@*"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("stopped", ["ab", "b"])
def test_keepers_told_to_stop_make_the_newest_snapshot_durable_together(
    tmp_path: Path, arena_dir: Path, ending_keepers: None, stopped: str
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=23) as lives:
        lives.start(2, 100_000, storage=1_000_000, hosts=("a", "b"))
        lives.wait_restored(2)
        lives.wait_progress(2, 25)
        completed = lives.end(2)
        told = [keeper_of(arena_dir, host) for host in stopped]
        for pid in reversed(told):  # the hand first
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 30
        while set(told) & set(keeper_pids(arena_dir)):
            assert time.monotonic() < deadline, "a keeper did not stop"
            time.sleep(0.05)
        assert newest_stored(root) in (completed, completed - 1)


def wait_snapshot(lives: Lives, root: Path) -> None:
    """Wait until steps that are made now become durable: all keepers work together again."""
    reached, deadline = read_progress(lives.directory, 2), time.monotonic() + 60
    while newest_stored(root) <= reached:
        lives.raise_errors()
        assert time.monotonic() < deadline, f"no save since step {reached}"
        time.sleep(0.05)
