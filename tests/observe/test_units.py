"""Numbers for people: three digits and a unit, at every border between units."""

from __future__ import annotations

import pytest

from holdfast.geometry.rank_ranges import ranks_text
from holdfast.observe.text import counts_text, moment_text, rate_text, seconds_text, size_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_996, "10.0 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (1_613_000_000, "1.61 GB"),
        (5e18, "5000 PB"),
    ],
)
def test_sizes_have_three_digits(size_bytes: float | None, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("elapsed_s", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (41e-6, "41 µs"),
        (0.0032, "3.20 ms"),
        (1.75, "1.75 s"),
        (599.0, "599 s"),
        (900.0, "15 min"),
        (7500.0, "2 h 05 min"),
    ],
)
def test_times_have_the_unit_a_person_would_say(elapsed_s: float | None, text: str) -> None:
    assert seconds_text(elapsed_s) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((3,), "rank 3"), ((1, 0), "ranks 0-1"), ((0, 5, 4, 3, 7), "ranks 0, 3-5, 7")],
)
def test_ranks_in_a_row_are_named_by_the_first_and_the_last(
    ranks: tuple[int, ...], text: str
) -> None:
    assert ranks_text(ranks) == text


def test_what_was_not_recorded_is_a_dash() -> None:
    assert rate_text(None) == moment_text(0.0) == "-"
    assert rate_text(2.31e9) == "2.31 GB/s"


def test_counts_by_kind_begin_with_the_largest() -> None:
    assert (
        counts_text({"slow": 2, "too_large": 2, "forged": 30}) == "30 forged, 2 slow, 2 too large"
    )
