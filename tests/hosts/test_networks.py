"""Networks between hosts that are cut, slow, or lose packets: training goes on, and nothing mixes.

Hosts are in network namespaces of their own (``networks``): plugs are pulled, and queues overflow.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.capture.task import Timeouts
from holdfast.hosts import LATER_S
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives, read_progress
from support.runs.losing import events_of, lose, protected, wait_protected
from support.runs.networks import KEEP, TRAIN, Networks, why_not

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]
PARITY: dict[str, Any] = {"parity": 1}
HOSTS = ("a", "b", "c")
#: A step is held for no longer: the stated deadline, and what a busy machine takes.
HELD_S = Timeouts().grant_s + 3.0
#: After so long the keeper of a host that was cut off is known to be out of reach.
SILENCE_S = 15.0 + 3.0 + 3.0


@pytest.fixture(scope="module", autouse=True)
def _can_be_made() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def wires(arena_dir: Path) -> Iterator[Networks]:
    """The networks of a test; what keepers are left is told to stop while they still stand."""
    with Networks(*HOSTS) as wires:
        yield wires
        for pid in keeper_pids(arena_dir):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 30
        while keeper_pids(arena_dir) and time.monotonic() < deadline:
            time.sleep(0.1)


def start(lives: Lives, wires: Networks, hosts: tuple[str, ...], **options: Any) -> None:
    lives.start(
        len(hosts),
        100_000,
        hosts=hosts,
        storage=100_000,
        options=PARITY,
        settings=wires.settings(hosts),
        namespaces=wires.namespaces(hosts),
        **options,
    )


def longest_step_s(lives: Lives, for_s: float, *, more: int = 0, within_s: float = 60.0) -> float:
    """Watch the ranks for so long, and until they made ``more`` steps; the longest they stood."""
    world = len(lives.pids)
    began_s = moved_s = time.monotonic()
    first = last = read_progress(lives.directory, world)
    longest_s = 0.0
    while (now_s := time.monotonic()) < began_s + for_s or last < first + more:
        lives.raise_errors()
        assert now_s < began_s + for_s + within_s, f"step {last} of {first + more}"
        step = read_progress(lives.directory, world)
        longest_s = max(longest_s, now_s - moved_s)
        if step != last:
            last, moved_s = step, now_s
        time.sleep(0.01)
    return longest_s


def reasons(root: Path, name: str) -> set[str]:
    return {event["reason"] for event in events_of(root, name)}


def go_on_without(
    lives: Lives, wires: Networks, root: Path, arena_dir: Path, lost: str, incarnation: int
) -> tuple[str, ...]:
    """A host is lost with its memory; the others go on at what was protected, or newer."""
    least = protected(root)[1]
    lose(lives, arena_dir, HOSTS, lost)
    completed = lives.end(len(HOSTS))
    left = tuple(host for host in HOSTS if host != lost)
    start(lives, wires, left)
    step, source = lives.wait_restored(len(left))
    assert source == "memory" and least <= step <= completed
    wait_protected(lives, root, incarnation, after=step)
    return left


def test_a_host_cut_off_holds_no_step_beyond_the_deadline_and_comes_back_to_a_run_that_went_on(
    tmp_path: Path, arena_dir: Path, wires: Networks
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=41) as lives:
        start(lives, wires, HOSTS)
        lives.wait_restored(3)
        wait_protected(lives, root, 1)
        for host in ("c", "a"):  # a hand, and then the coordinator
            wires.cut(host)
            assert longest_step_s(lives, SILENCE_S) < HELD_S
            # Nobody waits for it any more, but to try now and then whether it is back.
            assert longest_step_s(lives, 1.0, more=50) < LATER_S + 1.5
            before = read_progress(lives.directory, 3)
            assert protected(root)[1] <= before - 50, "protected, without all hosts"
            wires.join(host)
            assert longest_step_s(lives, 1.0) < HELD_S
            wait_protected(lives, root, 1, after=before)
        missed = reasons(root, "SnapshotMissed")
        assert any("the keeper of c is out of reach" in reason for reason in missed), missed
        warned = [event["message"] for event in events_of(root, "Warned")]
        assert any("the keeper of c is out of reach" in message for message in warned), warned
        go_on_without(lives, wires, root, arena_dir, "b", 2)


def test_a_slow_network_delays_protection_says_so_and_holds_no_step(
    tmp_path: Path, arena_dir: Path, wires: Networks
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=42) as lives:
        start(lives, wires, HOSTS)
        lives.wait_restored(3)
        reached = wait_protected(lives, root, 1)
        wires.slow("b", "8mbit")
        assert longest_step_s(lives, 15.0, more=20) < HELD_S
        reached = wait_protected(lives, root, 1, more=2, after=reached + 5)
        took_s = [
            event["elapsed_s"]
            for event in events_of(root, "SnapshotProtected")
            if event["rank"] < 0 and event["step"] <= reached
        ]
        assert max(took_s) > 5 * min(took_s), took_s
        assert protected(root)[1] < read_progress(lives.directory, 3), "captured, not protected yet"
        wires.mend("b")
        wait_protected(lives, root, 1, after=read_progress(lives.directory, 3))
        wires.slow("b", "8mbit")  # restored over it, too
        go_on_without(lives, wires, root, arena_dir, "c", 2)


def test_a_network_that_loses_packets_delays_and_changes_nothing(
    tmp_path: Path, arena_dir: Path, wires: Networks
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=43) as lives:
        start(lives, wires, HOSTS)
        lives.wait_restored(3)
        reached = wait_protected(lives, root, 1)
        ways = {wires.lose(host) for host in HOSTS}
        assert longest_step_s(lives, 15.0, more=20) < HELD_S
        wait_protected(lives, root, 1, more=2, after=reached + 5)
        assert all(wires.dropped(host) > 10 for host in HOSTS), ways
        go_on_without(lives, wires, root, arena_dir, "a", 2)


def test_a_host_that_is_cut_off_from_everything_changes_nothing_when_it_is_back(
    tmp_path: Path, arena_dir: Path, wires: Networks
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=44) as lives:
        start(lives, wires, HOSTS)
        lives.wait_restored(3)
        wait_protected(lives, root, 1)
        least = protected(root)[1]
        wires.cut("c", KEEP, TRAIN)
        zombie = lives.pids[2]
        lives.kill([0, 1])  # as a launcher does that lost one
        for rank in (0, 1):
            lives.join_rank(rank)
        completed = read_progress(lives.directory, 3)
        start(lives, wires, ("a", "b"))
        step, source = lives.wait_restored(2)
        assert source == "memory" and least <= step <= completed
        reached = wait_protected(lives, root, 2, after=step)
        wires.join("c", KEEP, TRAIN)
        assert longest_step_s(lives, 5.0, more=50) < HELD_S
        reached = wait_protected(lives, root, 2, after=reached)
        assert {event["incarnation"] for event in events_of(root, "SnapshotProtected")} == {1, 2}
        newest_of_old = max(
            event["step"]
            for event in events_of(root, "SnapshotCaptured")
            if event["incarnation"] == 1
        )
        assert newest_of_old <= completed + 1, "the old start took snapshots after its end"
        with suppress(ProcessLookupError):
            os.kill(zombie, signal.SIGKILL)
        # What it still has of the older start is not taken for the newest.
        completed = lives.end(2)
        start(lives, wires, HOSTS)
        step, source = lives.wait_restored(3)
        assert source == "memory" and reached <= step <= completed
        wait_protected(lives, root, 3, after=step)
