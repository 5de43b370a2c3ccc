"""A run that hangs is found beside living keepers, and one that does not is left in peace."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from holdfast import events
from holdfast.observe.findings import find
from holdfast.observe.live_findings import LiveFindings
from holdfast.observe.live_run import LiveRun
from holdfast.observe.records import RecordReader
from holdfast.observe.report import KeeperLife
from holdfast.observe.report_builder import read_report
from holdfast.observe.summary import health_text
from observe.test_findings import causes, healthy, loop
from support.runs.told import RANKS, Told, of, tell_death, tell_save, tell_start


def hang(
    told: Told, until_s: float, *, all_but: int = -1, doing: dict[str, int] | None = None
) -> None:
    """The trainers say nothing more after save 19; their keepers go on to sample their hosts."""
    for rank, host in RANKS.items():
        if rank == all_but:
            continue
        told(of(events.SaveReturned, 1, rank, step=20, held_s=0.01), 211.0, host)
    at_s = 215.0
    while at_s < until_s:
        for host in ("a", "b"):
            told(of(events.HostSampled, 0, -1, host=host, doing=doing or {}), at_s, host)
        at_s += 10.0


@pytest.mark.promise
def test_trainers_that_hang_beside_living_keepers_are_found(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    hang(told, 1500.0, all_but=2)
    report = read_report(told.write())
    found = causes(report, report.last_s + 5)
    assert found["no_sign_of_life"] == (
        "no trainer gave a sign of life for 21 min, after step 20: rank 2 on b did not return from "
        "save 1-20 as others did"
    )
    early = dataclasses.replace(report, trained_s=report.last_s - 800)
    assert "no_sign_of_life" not in causes(early, report.last_s + 5)


def test_of_trainers_that_are_all_gone_the_first_is_named_as_the_first(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    tell_death(told, 1, 205.0, RANKS, "")
    report = read_report(told.write())
    found = causes(report, report.last_s + 150)["no_sign_of_life"]
    assert found.endswith(": 4 of 4 ranks are gone, rank 3 on b before the others")


def test_a_program_whose_phases_take_long_is_not_said_to_hang(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    evaluation = of(events.PhaseEnded, 1, step=19, name="evaluation", elapsed_s=600.0, times=1)
    told(evaluation, 215.0)
    hang(told, 1500.0)
    report = read_report(told.write())
    assert report.longest_step_s == pytest.approx(600.0)
    assert "no_sign_of_life" not in causes(report, report.last_s + 5)
    assert "no_sign_of_life" in causes(report, report.last_s + 5 + 3600)


@pytest.mark.promise
@pytest.mark.parametrize("phase", ["evaluation", "restoring"])
def test_a_first_phase_of_hours_is_no_alarm_while_keepers_see_trainers_in_it(
    phase: str, tmp_path: Path
) -> None:
    """The ranks that wait for rank 0's evaluation are in no phase of their own."""
    told = healthy(tmp_path)
    hang(told, 4000.0, doing={phase: 1, "training": 1})
    report = read_report(told.write())
    assert "no_sign_of_life" not in causes(report, report.last_s + 5)
    late = dataclasses.replace(report, last_s=report.last_s + 4 * 3600)
    assert causes(late, late.last_s + 5)["no_sign_of_life"] == (
        "no trainer gave a sign of life for 5 h 03 min, after step 20 "
        f"(2 in {phase}, 2 in training)"
    )


@pytest.mark.promise
@pytest.mark.parametrize("doing", [{"training": 2}, {"saving": 1, "training": 1}])
def test_trainers_that_keepers_see_hang_in_a_step_are_found_after_a_quarter_of_an_hour(
    doing: dict[str, int], tmp_path: Path
) -> None:
    told = healthy(tmp_path)
    hang(told, 1500.0, doing=doing)
    report = read_report(told.write())
    assert "no_sign_of_life" in causes(report, report.last_s + 5)


def test_a_phase_that_ended_before_may_take_three_times_as_long(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    told(of(events.PhaseEnded, 1, step=19, name="evaluation", elapsed_s=4.0, times=1), 208.0)
    hang(told, 1500.0, doing={"evaluation": 2})
    report = read_report(told.write())
    assert "no_sign_of_life" in causes(report, report.last_s + 5)


def test_keepers_that_ended_with_their_run_were_not_lost(tmp_path: Path) -> None:
    report = read_report(healthy(tmp_path).write())

    def found(starts: int, **ends: int) -> dict[str, str]:
        named = {why.replace("_", " "): times for why, times in ends.items()}
        return causes(dataclasses.replace(report, keepers=(KeeperLife("a", starts, 0.1, named),)))

    assert "keeper_restarts" not in found(40, the_run_ended=39)
    assert "keeper_restarts" not in found(2, nobody_came_back=1)
    assert found(5, the_run_ended=2)["keeper_restarts"] == (
        "the keeper of a was started 5 times, 2 times of them for a run that ended in order"
    )
    assert found(3, nobody_came_back=2)["keeper_restarts"] == (
        "the keeper of a was started 3 times"
    )


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_program_that_saves_by_hand_owes_no_durable_save(is_asked: bool, tmp_path: Path) -> None:
    """Three were asked for at the beginning, and none since."""
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, RANKS)
    for step in range(20):
        is_durable = step < 3
        tell_save(told, 1, step, 11.0 + 10 * step, RANKS, durable=is_durable)
        if is_durable or (is_asked and step == 5):
            returned = of(events.SaveReturned, 1, step=step, durable=True, size_bytes=1_000_000)
            told(returned, 11.0 + 10 * step)
    assert ("no_durable" in causes(read_report(told.write()))) == is_asked


def test_a_start_at_work_may_come_further(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    for number in range(2, 5):
        tell_death(told, number - 1, 205.0 + 40 * (number - 2), RANKS, "")
        tell_start(told, number, 220.0 + 40 * (number - 2), RANKS, (1, 19))
    report = read_report(told.write())
    assert causes(report)["restart_loop"].startswith("3 starts in a row came no further")
    assert "restart_loop" not in causes(report, report.last_s + 5)
    assert "restart_loop" in causes(report, report.last_s + 100)


def test_a_loop_of_restarts_is_found_while_one_looks(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    loop(told)
    found, run = LiveFindings("r"), LiveRun()
    for event, head in RecordReader(told.write()):
        run.take(event, head)
        found.take(event, head)
    report = read_report(tmp_path)
    found(run, report.last_s + 100)
    expected = {one.cause: one.evidence for one in find(report, report.last_s + 100)}
    live = {one.cause: one.evidence for one in found.found}
    assert live["restart_loop"] == expected["restart_loop"]


def test_of_a_run_of_which_nothing_can_be_read_it_is_not_said_that_it_is_healthy(
    tmp_path: Path,
) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "host-a.jsonl").symlink_to("nowhere")
    report = read_report(tmp_path)
    assert report.unreadable
    assert health_text(report, find(report)).startswith("NOTHING IS KNOWN")


def test_a_few_bytes_that_go_to_storage_a_little_slower_are_chance(tmp_path: Path) -> None:
    told = healthy(tmp_path)
    for step in range(20, 25):
        tell_save(told, 1, step, 11.0 + 10 * step, RANKS, persist_s=0.8)
    report = read_report(told.write())
    assert "throughput_down" in causes(report)
    small = [dataclasses.replace(s, persist_s=(s.persist_s or 0.0) / 100) for s in report.saves]
    assert "throughput_down" not in causes(dataclasses.replace(report, saves=tuple(small)))
