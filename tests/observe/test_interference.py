"""How much longer steps take behind copies and writes is found, and nothing where they do not."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.observe.findings import find
from holdfast.observe.interference import BackgroundWork, Interference, StepWindow, fit
from holdfast.observe.report import Report
from holdfast.observe.report_builder import read_report
from support.runs.told import Told, of, tell_start

RANKS = {0: "a", 1: "b"}


def run(root: Path, slowdown: float, seed: int, *, every: int = 10, held_s: float = 0.03) -> Report:
    """Steps of 0.1 s, a save every ten that is copied for 0.2 s and written for 0.3 s; a step
    behind it takes longer. Steps are told as sums over a second.
    """
    chance, told = random.Random(seed), Told(root, {"b": -50.0})
    tell_start(told, 1, 10.0, RANKS)
    now_s = told_s = 12.0
    busy: list[tuple[float, float]] = []
    first: dict[str, Any] = {"steps": 1, "elapsed_s": 2.0, "longest_s": 2.0, "is_first": True}
    told(of(events.StepsDone, 1, step=0, **first), 12.0)
    steps, step = 0, 0
    while now_s < 12 + 150:
        began_s, work_s = now_s, 0.1 * chance.lognormvariate(0, 0.02)
        while work_s > 1e-9:  # in small pieces, each behind something or not
            piece_s = min(work_s, 0.005)
            is_behind = any(a <= now_s < b for a, b in busy[-2:])
            now_s += piece_s * (1 + slowdown * is_behind)
            work_s -= piece_s
        step, steps = step + 1, steps + 1
        if step % every == 0:
            held = {"step": step, "held_s": held_s, "size_bytes": 10}
            told(of(events.SaveReturned, 1, 0, **held), now_s + held_s)
            now_s += held_s
            busy.append((now_s, now_s + 0.5))
            image = {"step": step, "size_bytes": 10}
            told(of(events.ImageCaptured, 1, 0, copy_s=0.2, **image), now_s + 0.2)
            told(of(events.ImageDurable, 1, 0, elapsed_s=0.3, **image), now_s + 0.5)
        if now_s - told_s >= 1.0 or now_s - began_s > 0.5:
            took: dict[str, Any] = {"steps": steps, "elapsed_s": now_s - told_s, "longest_s": 0.2}
            told(of(events.StepsDone, 1, step=step, **took), now_s)
            steps, told_s = 0, now_s
    return read_report(told.write())


def measured(report: Report) -> Interference:
    assert report.interference is not None
    return report.interference


@pytest.mark.parametrize("seed", range(3))
def test_the_true_slowdown_lies_in_the_interval_and_the_step_is_one_without(
    tmp_path: Path, seed: int
) -> None:
    found = measured(run(tmp_path, 0.3, seed, every=14))
    assert found.low - 0.01 < 0.3 < found.high + 0.01 and found.high - found.low < 0.1
    assert found.slowdown == pytest.approx(0.3, abs=0.03)
    assert found.step_s == pytest.approx(0.1, rel=0.05)


@pytest.mark.promise
def test_where_saves_slow_nothing_there_is_no_finding(tmp_path: Path) -> None:
    report = run(tmp_path, 0.0, 1, every=14, held_s=0.3)  # blocking, and counted as that
    found = measured(report)
    assert found.low < 0 < found.high
    assert "interference" not in {one.cause for one in find(report)}
    assert found.sentence.startswith("behind a copy or a write a step takes ")
    assert found.sentence.endswith(": no more than chance")
    assert not replace(found, low=0.01).sentence.endswith("chance")


@pytest.mark.parametrize(
    "windows",
    [
        [],
        [(0.1 * (n % 2), 1.0, 5) for n in range(19)],
        [(0.5, 1.0 + 0.01 * n, 5) for n in range(40)],
    ],
    ids=["none", "few", "all alike"],
)
def test_too_little_says_nothing(windows: list[tuple[float, float, int]]) -> None:
    assert fit([StepWindow(*each) for each in windows]) is None


def test_a_run_without_saves_or_steps_says_nothing() -> None:
    from holdfast.observe.clocks import HostClocks

    assert BackgroundWork().measure(HostClocks().solve()) is None
