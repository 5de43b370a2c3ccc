"""After a restore of an older step neither a report nor `top` counts on what came after it."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.observe.exposure import abandoned_by
from holdfast.observe.findings import find
from holdfast.observe.live_run import FileTails, LiveRun, Reached
from holdfast.observe.report import Report
from holdfast.observe.report_builder import read_report
from holdfast.observe.summary import health_text
from observe.test_report import rendered
from support.runs.mishaps import build, train


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


@pytest.mark.parametrize(
    ("parents", "given_up", "kept"),
    [
        ({}, [], [(1, 5), (3, 1)]),
        ({2: (1, 5)}, [(1, 6)], [(1, 5), (2, 1), (3, 1)]),
        ({2: (1, 5), 3: (1, 8)}, [(1, 9), (2, 6)], [(1, 8), (3, 9)]),  # by its name
        ({2: (1, 5), 4: (2, 7)}, [(1, 6), (2, 8), (3, 1)], [(1, 5), (2, 7)]),
        ({4: (3, 7)}, [(3, 8)], [(1, 9), (2, 9), (3, 7)]),  # of the start before nothing is known
        ({1: (9, 500)}, [], [(1, 5)]),  # of another root
    ],
)
def test_only_what_a_restore_certainly_gave_up_is_abandoned(
    parents: dict[int, tuple[int, int]],
    given_up: list[tuple[int, int]],
    kept: list[tuple[int, int]],
) -> None:
    is_abandoned = abandoned_by(parents)
    assert [one for one in [*given_up, *kept] if is_abandoned(Reached(*one, 0.0))] == given_up
