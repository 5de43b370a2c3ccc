"""What was not seen on hardware is listed, each line with its command, until there are results."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs" / "operations" / "accelerators.md").read_text()


def test_every_section_of_the_day_stands_on_the_page_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(PROJECT))
    sections = importlib.import_module("benchmarks.gpu.sections")
    rows = [line for line in PAGE.splitlines() if "python -m benchmarks gpu --only" in line]
    assert rows == [sections.page_row(one) for one in sections.SECTIONS]


def test_that_nothing_ran_on_hardware_is_said_as_long_as_there_is_no_result() -> None:
    results = list((PROJECT / "benchmarks" / "results").glob("gpu-*.json"))
    assert ("**nothing yet**" in PAGE) == (not results)
