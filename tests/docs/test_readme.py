"""The README stays one that is read to its end, and says first where Holdfast has not run."""

from __future__ import annotations

from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
MOST_LINES = 110


def test_the_readme_has_at_most_110_lines() -> None:
    assert README.count("\n") <= MOST_LINES


def test_where_it_has_not_run_yet_stands_before_the_first_heading() -> None:
    first = README.partition("\n## ")[0]
    assert "**Where it has not run yet.**" in first and "GPU" in first


def test_the_doors_are_named_and_no_index_is_promised_before_a_release() -> None:
    assert "`make demo`" in README and "`make test`" in README
    assert "pip install dist/holdfast-*.whl" in README
    assert "pip install holdfast" not in README
