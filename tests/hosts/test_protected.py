"""Hosts are lost with all they hold: training goes on from the parity of the others."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives
from support.runs.losing import events_of, kill_keeper, lose, protected, wait_protected

PARITY = {"parity": 1}


@pytest.fixture(autouse=True)
def ending_keepers(arena_dir: Path) -> Iterator[None]:
    """Of hosts that were left out of the last start: they are told to stop."""
    yield
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


def newest_stored(root: Path) -> int:
    newest = catalogue(LocalStore(root)).latest
    assert newest is not None
    return newest.step


@pytest.mark.timeout(300)
def test_four_hosts_with_parity_go_on_from_memory_without_any_one_and_from_storage_without_two(
    tmp_path: Path, arena_dir: Path
) -> None:
    root = tmp_path / "run"
    starts: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        (("a", "b", "c", "d"), ("c",)),  # one of the hands
        (("a", "b", "d"), ("a",)),  # the coordinator; the next is new and empty
        (("e", "b", "d", "f"), ("b", "f")),  # more than parity replaces
    ]
    with Lives(root, seed=31) as lives:
        least = completed = -1
        for n, (hosts, lost) in enumerate(starts, start=1):
            world = len(hosts)
            # Storage has nothing to offer until it is needed.
            storage = 1000 if n < 3 else 15
            lives.start(world, 100_000, storage=storage, hosts=hosts, options=PARITY)
            step, source = lives.wait_restored(world)
            assert source == ("memory" if n > 1 else "")
            assert least <= step <= completed
            wait_protected(lives, root, n)
            lives.wait_progress(world, step + 45)
            assert protected(root)[0] == n
            # Whatever is being captured, coded or written now.
            least = protected(root)[1]
            lose(lives, arena_dir, hosts, *lost)
            completed = lives.end(world)
        lives.start(2, 3, storage=15, hosts=("e", "d"), options=PARITY)
        assert lives.wait_restored(2) == (newest_stored(root), "storage")
        lives.wait_end()
    dropped = [e for e in events_of(root, "SourceDropped") if e["source"].startswith("memory 3-")]
    assert any(e["step"] >= least for e in dropped), dropped
    planned = {e["incarnation"]: e["survives"] for e in events_of(root, "ProtectionPlanned")}
    assert planned[1] == "any 1 of 4 hosts" and planned[2] == "any 1 of 3 hosts"


@pytest.mark.timeout(300)
def test_what_is_protected_is_found_again_when_keepers_are_killed_and_then_a_host_is_lost(
    tmp_path: Path, arena_dir: Path
) -> None:
    root, hosts = tmp_path / "run", ("a", "b", "c")
    with Lives(root, seed=32) as lives:
        lives.start(3, 100_000, storage=100_000, hosts=hosts, options=PARITY)
        lives.wait_restored(3)
        reached = wait_protected(lives, root, 1)
        for host in ("b", "a"):  # the coordinator's too
            kill_keeper(arena_dir, host)
            reached = wait_protected(lives, root, 1, after=reached + 5)
        kill_keeper(arena_dir, "a")  # nobody decides any more
        least = protected(root)[1]
        lose(lives, arena_dir, hosts, "c")
        completed = lives.end(3)
        lives.start(2, 100_000, storage=100_000, hosts=("b", "a"), options=PARITY)
        step, source = lives.wait_restored(2)
        assert source == "memory" and least <= step <= completed
        wait_protected(lives, root, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_hosts_go_on_without_any_two_lost_at_random_moments(
    tmp_path: Path, arena_dir: Path
) -> None:
    root, draw = tmp_path / "run", random.Random(5)
    least = completed = -1
    with Lives(root, seed=33) as lives:
        for n in range(1, 9):
            hosts = tuple("abcde")
            lives.start(5, 100_000, rows=601, storage=100_000, hosts=hosts, options={"parity": 2})
            step, source = lives.wait_restored(5)
            assert source == ("memory" if n > 1 else "")
            assert least <= step <= completed
            wait_protected(lives, root, n, more=1 + draw.randrange(3), after=step)
            time.sleep(draw.random())
            least = protected(root)[1]
            lose(lives, arena_dir, hosts, *draw.sample(hosts, draw.randint(1, 2)))
            completed = lives.end(5)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("lost", ["a", "b"])
def test_of_two_hosts_either_goes_on_alone_from_memory(
    tmp_path: Path, arena_dir: Path, lost: str
) -> None:
    root, hosts = tmp_path / "run", ("a", "b")
    (left,) = {*hosts} - {lost}
    with Lives(root, seed=34) as lives:
        lives.start(2, 100_000, storage=100_000, hosts=hosts, options=PARITY)
        lives.wait_restored(2)
        wait_protected(lives, root, 1)
        least = protected(root)[1]
        lose(lives, arena_dir, hosts, lost)
        completed = lives.end(2)
        lives.start(1, 100_000, storage=100_000, hosts=(left,), options=PARITY)
        step, source = lives.wait_restored(1)
        assert source == "memory" and least <= step <= completed
        # It takes snapshots again, and goes on from them once more.
        lives.wait_progress(1, step + 20)
        lives.kill([0])
        completed = lives.end(1)
        lives.start(1, 100_000, storage=100_000, hosts=(left,), options=PARITY)
        again, source = lives.wait_restored(1)
        assert source == "memory" and step + 15 <= again <= completed


@pytest.mark.timeout(200)
def test_what_was_restored_is_protected_again_before_anything_new_is_saved(
    tmp_path: Path, arena_dir: Path
) -> None:
    root, hosts = tmp_path / "run", ("a", "b", "c")
    with Lives(root, seed=35) as lives:
        lives.start(3, 100_000, storage=100_000, hosts=hosts, options=PARITY)
        lives.wait_restored(3)
        wait_protected(lives, root, 1)
        lose(lives, arena_dir, hosts, "c")
        lives.end(3)
        # Nobody trains: the ranks stand where they are until they are killed.
        lives.start(2, 100_000, storage=100_000, hosts=("a", "b"), options=PARITY, pause_s=1e6)
        first, source = lives.wait_restored(2)
        assert source == "memory"
        wait_protected_again(lives, root, first)
        lose(lives, arena_dir, ("a", "b"), "b")
        assert lives.end(2) == -1  # no step was taken
        lives.start(1, 100_000, storage=100_000, hosts=("a",), options=PARITY)
        assert lives.wait_restored(1) == (first, "memory")
    (rebuilt,) = events_of(root, "ImageRebuilt")
    assert (rebuilt["rank"], rebuilt["step"]) == (2, first)
    origins = {(e["incarnation"], e["origin"]) for e in events_of(root, "Restored")}
    assert (2, "decoded") in origins and (2, "memory") not in origins


@pytest.mark.timeout(200)
def test_a_host_that_comes_back_is_protected_with_the_one_that_has_its_image_decoded(
    tmp_path: Path, arena_dir: Path
) -> None:
    root, hosts = tmp_path / "run", ("a", "b", "c")
    with Lives(root, seed=36) as lives:
        lives.start(3, 100_000, storage=100_000, hosts=hosts, options=PARITY)
        lives.wait_restored(3)
        wait_protected(lives, root, 1)
        lives.kill([0, 1, 2], signal.SIGSTOP)  # what they have captured is the last, and protected
        first = -1
        while first < (first := protected(root)[1]):
            time.sleep(1.0)
        lives.end(3)
        # Nobody trains in any of the next starts.
        still = {"storage": 100_000, "options": PARITY, "pause_s": 1e6}
        lives.start(2, 100_000, hosts=("a", "b"), **still)  # the keeper of c lives on
        assert lives.wait_restored(2) == (first, "memory")
        wait_protected_again(lives, root, first)
        lives.end(2)
        lives.start(3, 100_000, hosts=hosts, **still)
        assert lives.wait_restored(3) == (first, "memory")
        wait_protected_again(lives, root, first, times=3)
        lose(lives, arena_dir, hosts, "a")
        lives.end(3)
        lives.start(2, 100_000, hosts=("b", "c"), **still)
        assert lives.wait_restored(2) == (first, "memory")
    assert len([*events_of(root, "ImageRebuilt")]) <= 2
    assert not [e for e in events_of(root, "SnapshotNotProtected") if "ranks" in e["reason"]]


def wait_protected_again(lives: Lives, root: Path, step: int, times: int = 2) -> None:
    """Wait until generation 1-``step`` is told to be protected for a second time, or further."""
    deadline = time.monotonic() + 60
    while True:
        told = [
            e
            for e in events_of(root, "SnapshotProtected")
            if (e["incarnation"], e["step"]) == (1, step)
        ]
        if len(told) >= times:
            return
        lives.raise_errors()
        why = [e["reason"] for e in events_of(root, "SnapshotNotProtected")]
        assert time.monotonic() < deadline, why[-3:]
        time.sleep(0.05)
