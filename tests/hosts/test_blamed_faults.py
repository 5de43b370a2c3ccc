"""Real runs on several hosts in which one thing is slow: the report names it, and its place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.observe.findings import find
from holdfast.observe.report import Report
from holdfast.observe.report_builder import read_report
from holdfast.testing.faults import newest_durable
from holdfast.testing.faults.faulty_calls import Action, Call, CallRule, FaultyCalls, missing
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing()), reason=f"this machine lacks {missing()}"),
]

HOSTS = ("a", "b", "c")
IMAGES = "/run/steps/"
DELAY_MS = 900
SLOW: dict[str, tuple[tuple[Call, ...], tuple[str, ...], str]] = {
    "fsync of host c": ((Call.SYNC,), ("c",), "host c, disk: making an image durable (fsync)"),
    "fsync of host b": ((Call.SYNC,), ("b",), "host b, disk: making an image durable (fsync)"),
    "writes of host c": ((Call.WRITE,), ("c",), "host c, disk: writing an image"),
    "writes of host a": ((Call.WRITE,), ("a",), "host a, disk: writing an image"),
}


@pytest.fixture(autouse=True)
def ending_keepers(arena_dir: Path) -> Iterator[None]:
    yield
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


def run(root: Path, **how: Any) -> Report:
    """The report of forty steps of three hosts, of which each fourth is made durable."""
    with Lives(root, seed=22) as lives:
        lives.start(3, 40, storage=4, hosts=HOSTS, rows=301, pause_s=0.8, **how)
        lives.wait_end(timeout_s=240)
    return read_report(root)


def slow_places(report: Report) -> list[str]:
    return [one.evidence for one in find(report) if one.cause == "slow_place"]


@pytest.mark.parametrize("what", SLOW)
def test_storage_that_is_slow_on_one_host_is_laid_to_that_host(
    what: str, tmp_path: Path, arena_dir: Path
) -> None:
    calls, where, expected = SLOW[what]
    faults = FaultyCalls(tmp_path / "faults")
    faults.add(CallRule(calls, IMAGES, Action.DELAY, DELAY_MS))
    settings = tuple(faults.environment() if host in where else {} for host in HOSTS)
    report = run(tmp_path / "run", settings=settings)
    found = slow_places(report)
    assert found and found[0].startswith(expected), found
    assert not [one for one in found if "fsync" in one or "writing" in one][1:], found


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_comes_late_is_named_and_not_those_that_wait(
    rank: int, tmp_path: Path, arena_dir: Path
) -> None:
    report = run(tmp_path / "run", late=(rank, 0.8))
    found = slow_places(report)
    assert found and found[0].startswith(f"rank {rank} on {HOSTS[rank]} comes to save "), found
    assert not [one for one in found if "comes to save" in one][1:], found


def test_where_nothing_is_slow_nobody_is_blamed_and_all_hosts_are_on_one_clock(
    tmp_path: Path, arena_dir: Path
) -> None:
    report = run(tmp_path / "run")
    assert slow_places(report) == []
    assert {one.host for one in report.clocks} == {"b", "c"} and not report.unplaced_hosts
    for one in report.clocks:  # all are on this machine
        assert one.error_s is not None and abs(one.ahead_s) <= one.error_s + 0.001 < 0.1
    assert {(one.host, one.other) for one in report.links} == {("b", "a"), ("c", "a")}


def test_a_save_that_hangs_on_one_host_is_found_with_its_rank(
    tmp_path: Path, arena_dir: Path
) -> None:
    faults = FaultyCalls(tmp_path / "faults")
    settings = tuple(faults.environment() if host == "c" else {} for host in HOSTS)
    root = tmp_path / "run"
    with Lives(root, seed=23) as lives:
        lives.start(3, 100_000, storage=4, hosts=HOSTS, rows=301, pause_s=0.2, settings=settings)
        lives.wait_restored(3)
        until_s = time.monotonic() + 120
        while newest_durable(root) is None:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        hung = faults.add(CallRule((Call.SYNC,), IMAGES, Action.DELAY, 120_000))
        while not faults.met(hung):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        time.sleep(10)  # training goes on, and every image but one is written
        lives.end(3)
    for pid in keeper_pids(arena_dir):  # that of c hangs
        os.kill(pid, signal.SIGKILL)
    report = read_report(root)
    found = {one.cause: one.evidence for one in find(report, report.last_s + 90)}
    assert "no image was written of rank 2 on c" in found["no_durable"], found
