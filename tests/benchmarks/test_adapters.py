"""What an adapter costs is told from the steps that count, as ratios of medians."""

from __future__ import annotations

import tomllib

from benchmarks.kit import series

from benchmarks import adapters
from support.project.code_blocks import PROJECT


def test_the_first_steps_of_a_turn_do_not_count_and_both_clocks_are_told_apart() -> None:
    turn = adapters.Turn("alone", "root", 8, 3)
    turn.begins = [(float(n), n / 4) for n in range(adapters.WARM_UP)]
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
    assert set(adapters.LOOPS) <= set(rows)
