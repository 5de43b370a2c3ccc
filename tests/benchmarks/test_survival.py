"""The page on choosing a parity shows what the formula and the drawing of lots say."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest


@pytest.fixture
def script(importable: None) -> ModuleType:
    return importlib.import_module("benchmarks.survival")


@pytest.mark.slow
def test_the_page_shows_the_tables_that_are_made(script: ModuleType) -> None:
    page = script.PAGE.read_text()
    assert page == script.in_page(page, script.tables()), "python -m benchmarks survival --write"


def test_a_row_of_each_table_is_made_again(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "AT_ONCE", [(128, 8)])
    monkeypatch.setattr(script, "OVER_TIME", [(64, 60)])
    page = script.PAGE.read_text()
    for table in (script.at_once, script.over_time):
        row = list(table())[2]
        assert row.startswith(("| 128 | 8 |", "| 64 | 96 h | 60 min |"))
        assert row in page, "python -m benchmarks survival --write"


def test_what_was_drawn_is_within_the_bounds_of_chance(script: ModuleType) -> None:
    page = script.PAGE.read_text()
    cells = re.findall(r"\| ([\d.]+)( %)? \(([\d.]+)\)", page)
    assert len(cells) > 60
    for exact, percent, drawn in cells:
        trials, scale = (script.LIVES, 100) if percent else (script.DRAWS, 1)
        chance, share = float(exact) / scale, float(drawn) / scale
        bound = 5 * (chance * (1 - chance) / trials) ** 0.5 + 2 / trials
        assert abs(share - chance) <= bound, (exact, drawn)
