"""What an adapter costs is told from the steps that count, as ratios of medians."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator

import pytest
from benchmarks.adapters import adapters, loops
from benchmarks.adapters.own_work import ADAPTER, CHECKPOINTER, OTHERS, Meter
from benchmarks.kit import series

from support.project.code_blocks import PROJECT


def test_the_first_steps_of_a_turn_do_not_count_and_both_clocks_are_told_apart() -> None:
    turn = loops.Turn("alone", "root", 8, 3)
    turn.begins = [(float(n), n / 4) for n in range(loops.WARM_UP)]
    turn.begins += [(100.0, 10.0), (103.0, 10.5), (104.0, 11.5)]
    assert turn.took(0) == [3.0, 1.0] and turn.took(1) == [0.5, 1.0]


def test_the_table_has_the_medians_and_their_ratios() -> None:
    walls = {"alone": [0.01, 0.02, 0.9], "checkpointer": [0.04] * 3, "adapter": [0.05, 0.05, 9.0]}
    cost = adapters.ratios(walls)
    assert cost["over_checkpointer"] == 1.25 and cost["over_framework"] == 2.5
    assert abs(cost["over_checkpointer_s"] - 0.01) < 1e-12
    summaries = series.summaries(walls)
    found = {"state_bytes": 42_000_000, "steps_s": summaries, "threads_s": summaries}
    table = adapters.shown({"ray": {**found, "step": cost, "thread": cost}})
    assert "A state of 42 MB." in table
    assert "| ray | the whole | 20.0 (10.0–900.0) |" in table
    assert "| 1.250 (+10.00 ms) | 2.500 |" in table


def test_every_loop_is_of_a_framework_with_an_adapter() -> None:
    rows = tomllib.loads((PROJECT / "docs" / "integrations.toml").read_text())
    assert set(loops.LOOPS) <= set(rows)


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_what_is_called_counts_for_the_innermost_of_those_that_are_charged() -> None:
    meter = Meter()
    framework = meter.charge(OTHERS, lambda: burn(0.03))
    gives = meter.charge(ADAPTER, lambda: burn(0.02))

    def save() -> None:
        burn(0.01)
        gives()

    below = meter.charge(CHECKPOINTER, save)

    def step() -> None:
        framework()
        below()
        burn(0.005)

    meter.charge(ADAPTER, step)()
    burn(0.01)
    own, saved = meter.spent_s()
    assert 0.025 <= own < 0.029 and 0.01 <= saved < 0.014


def test_of_a_generator_the_items_count_and_an_error_ends_a_call() -> None:
    meter = Meter()

    def items() -> Iterator[int]:
        for number in range(3):
            burn(0.004)
            yield number

    for _ in meter.charge(ADAPTER, items)():
        burn(0.01)

    def fails() -> None:
        burn(0.004)
        raise KeyError

    with pytest.raises(KeyError):
        meter.charge(CHECKPOINTER, fails)()
    burn(0.01)
    own, saved = meter.spent_s()
    assert 0.012 <= own < 0.016 and 0.004 <= saved < 0.008


def test_the_table_of_work_adds_what_the_checkpointer_takes_more_below_the_adapter() -> None:
    work = {"step_s": 0.04, "own_s": 0.0003, "own_most_s": 0.0009, "checkpointer_s": 0.001}
    work |= {"checkpointer_below_s": 0.0011, "steps": 90}
    table = adapters.shown({"ray": {"work": work}})
    assert "| ray | 40.0 | 0.30 (0.90) | 1.00 | 1.10 | +0.40 (+1.0%) |" in table
