"""Real runs on several hosts in which one thing is slow: the report names it, and its place."""

from __future__ import annotations

import os
import re
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
from support.runs.sick_runs import HOSTS, IMAGES, Sickness, make_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing()), reason=f"this machine lacks {missing()}"),
]


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


#: What the report has to say of each sickness: the rule, how its words begin, and what is in them.
#: "Twice the bytes" is not among them: other load on the machine makes all copies of its large
#: state slower, which is named beside it (tests/observe/test_blame.py has it).
EXPECTED: dict[str, tuple[str, str, str]] = {
    "slow fsync": ("slow_place", "host {host}, disk: making an image durable (fsync)", ""),
    "slow writes": ("slow_place", "host {host}, disk: writing an image", ""),
    "slow store": ("slow_place", "all 3 hosts, storage: writing an image", ""),
    "slow fsync of all": ("slow_place", "all 3 hosts, fsync of the storage: making an image", ""),
    "stopped trainer": ("stalled", "steps that hung", "; rank {rank} on {host} came to save "),
    "CPU hog": ("slow_place", "host {host}, CPU or memory: whatever it does", ""),
    "late rank": ("slow_place", "rank {rank} on {host} comes to save ", ""),
    "restart loop": ("same_host_dies", "4 of 4 interruptions began with a rank on {host}", ""),
}
SICK = [
    pytest.param(
        Sickness(cause, rank),
        id=f"{cause} {Sickness(cause, rank).place}",
    )
    for cause in EXPECTED
    for rank in ((-1,) if "all" in cause or "store" in cause else (0, 2))
]


@pytest.mark.parametrize("sick", SICK)
def test_what_is_wrong_is_named_with_its_place_and_nothing_else_is(
    sick: Sickness, tmp_path: Path, arena_dir: Path
) -> None:
    make_run(sick, tmp_path / "run")
    host = "" if sick.rank < 0 else HOSTS[sick.rank]
    rule, *words = EXPECTED[sick.cause]
    begins, has = (text.format(rank=sick.rank, host=host) for text in words)
    found = find(read_report(tmp_path / "run"))
    for one in found:
        print(one.cause, one.evidence)
    own = [one for one in found if one.cause == rule and one.evidence.startswith(begins)]
    assert own and has in own[0].evidence
    places = [one.evidence for one in found if one.cause == "slow_place" and one not in own]
    elsewhere = [
        text for text in places if not re.match(rf"(host {host}|rank {sick.rank})\b", text)
    ]
    assert not elsewhere
    assert (sick.cause == "restart loop") == any(one.cause == "restart_loop" for one in found)


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
