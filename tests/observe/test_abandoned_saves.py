"""After a restore of an older step neither a report nor `top` counts on what came after it."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast import events
from holdfast.observe.clocks import HostMoment
from holdfast.observe.exposure import abandoned_by
from holdfast.observe.findings import find
from holdfast.observe.live_run import FileTails, LiveRun, Reached
from holdfast.observe.report import Report
from holdfast.observe.report_builder import read_report
from holdfast.observe.summary import health_text
from observe.test_report import rendered
from support.runs.mishaps import build, train
from support.runs.told import RANKS, Told, of, tell_death, tell_save, tell_start


@pytest.fixture
def gone_back(tmp_path: Path) -> Path:
    """Three durable steps, and a start that went on from the first of them and saved in memory."""
    state = build(wide=20)
    with holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        for step in (1, 2, 30):
            train(state, step)
            ckpt.save(step, durable=True).wait_durable(60)
    state = build(wide=20)
    with holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        ckpt.restore(1)
        train(state, 2)
        ckpt.save(4).wait_captured(60)
    return tmp_path


def health(report: Report) -> str:
    return health_text(report, find(report))


def test_the_newest_durable_of_a_report_is_not_of_a_future_that_was_given_up(
    gone_back: Path,
) -> None:
    report = read_report(gone_back)
    assert [s.is_abandoned for s in report.saves] == [False, True, True, False]
    assert "newest durable 1-1" in health(report)
    assert report.reliability is not None
    (least,) = (e for e in report.reliability.exposure if e.loss == "more hosts than parity")
    assert (least.generation, least.steps) == ("1-1", 3)
    assert rendered(report).count("durable, abandoned") == 2


def test_the_newest_states_of_top_are_not_of_a_future_that_was_given_up(gone_back: Path) -> None:
    tails, run = FileTails(gone_back), LiveRun()
    for event, head in tails.read():
        run.take(event, head)
    tails.close()
    found = {state: (at.incarnation, at.step) for state, at in run.reached.items()}
    assert found == {"captured": (2, 4), "durable": (1, 1)}


def test_what_a_run_started_from_of_another_root_keeps_nothing_of_its_own_work(
    tmp_path: Path,
) -> None:
    """Its start has the number of this run's first one, and its step is a larger one."""
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, RANKS)
    for step in range(5):
        tell_save(told, 1, step, 20.0 + 10 * step, RANKS, durable=False)
    tell_death(told, 1, 80.0, RANKS, "")
    tell_start(told, 2, 100.0, RANKS)
    for rank, host in RANKS.items():
        restored = of(
            events.Restored,
            2,
            rank,
            step=900,
            source="storage",
            parent_incarnation=1,
            elapsed_s=1.0,
            origin="start_from",
        )
        told(restored, 101.0, host)
    tell_save(told, 2, 901, 110.0, RANKS)
    report = read_report(told.write())
    assert [save.is_abandoned for save in report.saves] == [True] * 5 + [False]
    assert report.ledger is not None
    assert report.ledger.seconds["lost_work"] > 30 and report.ledger.seconds["unknown"] == 0
    assert report.starts[1].lost_steps is None
    assert [one.sources for one in report.restores] == [("start_from",)]


def test_a_loss_costs_the_steps_that_were_done_and_not_saved_too(tmp_path: Path) -> None:
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, RANKS)
    tell_save(told, 1, 100, 20.0, RANKS)
    tell_save(told, 1, 150, 30.0, RANKS, durable=False)
    told(of(events.StepsDone, 1, 0, step=190, steps=40, elapsed_s=9.0), 39.0)
    reliability = read_report(told.write()).reliability
    assert reliability is not None
    costs = {one.loss: (one.generation, one.steps) for one in reliability.exposure}
    assert costs == {
        "a process": ("1-150", 40),
        "a host": ("1-100", 90),
        "more hosts than parity": ("1-100", 90),
    }


@pytest.mark.parametrize(
    ("parents", "given_up", "kept"),
    [
        ({}, [], [(1, 5), (3, 1)]),
        ({2: (1, 5)}, [(1, 6)], [(1, 5), (2, 1), (3, 1)]),
        ({2: (1, 5), 3: (1, 8)}, [(1, 9), (2, 6)], [(1, 8), (3, 9)]),  # by its name
        ({2: (1, 5), 4: (2, 7)}, [(1, 6), (2, 8), (3, 1)], [(1, 5), (2, 7)]),
        ({4: (3, 7)}, [(3, 8)], [(1, 9), (2, 9), (3, 7)]),  # of the start before nothing is known
        ({1: (9, 500)}, [], [(1, 5)]),  # of another root, by an older version
        ({2: (1, 5), 3: None}, [(1, 5), (2, 1)], [(3, 1)]),  # of another root
    ],
)
def test_only_what_a_restore_certainly_gave_up_is_abandoned(
    parents: dict[int, tuple[int, int] | None],
    given_up: list[tuple[int, int]],
    kept: list[tuple[int, int]],
) -> None:
    is_abandoned = abandoned_by(parents)
    assert [
        one for one in [*given_up, *kept] if is_abandoned(Reached(*one, HostMoment(0, 0.0)))
    ] == given_up
