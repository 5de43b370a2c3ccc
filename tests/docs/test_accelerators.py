"""The page of accelerators lists every section of the day, and every result."""

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


def test_every_result_of_hardware_is_linked_from_the_page_and_the_rest_is_said_to_be_unseen() -> (
    None
):
    results = (PROJECT / "benchmarks" / "results").glob("gpu-*.md")
    missing = [one.name for one in results if f"benchmarks/results/{one.name}" not in PAGE]
    assert missing == [] and "**nothing yet**" in PAGE
