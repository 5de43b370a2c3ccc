"""Every number that docs/performance.md opens with stands in the committed result it links to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
ROWS = re.findall(r"^\| (\d+) \| .+$", PAGE.read_text(), re.MULTILINE)


def test_the_page_opens_with_ten_numbers() -> None:
    assert [int(number) for number in ROWS] == list(range(1, 11))


@pytest.mark.parametrize("number", ROWS)
def test_a_number_stands_in_the_result_it_is_from(number: str) -> None:
    (row,) = re.findall(rf"^\| {number} \| .+$", PAGE.read_text(), re.MULTILINE)
    figures = re.findall(r"\*\*([+-]?[0-9.]+%?)(?: s)?\*\*", row)
    (target,) = re.findall(r"\]\((\S+_202\d\d\d\.md)\)", row)
    result = (PAGE.parent / target).read_text()
    assert len(figures) >= 2 and row.count("**") == 2 * len(figures)
    words = set(re.findall(r"(?<![\w.])[+-]?[0-9.]+%?(?![\w.])", result))
    assert not [figure for figure in figures if figure not in words]
