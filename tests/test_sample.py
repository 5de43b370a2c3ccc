"""The sample of `make test`: every test has its turn, and what always runs takes nothing of it."""

from __future__ import annotations

import datetime

from support.project import sample

COSTS = {
    f"tests/test_{file}.py::test_{n}": 0.5 + (file * 7 + n) % 5
    for file in range(30)
    for n in range(6)
}
ALWAYS = {f"tests/test_{file}.py::test_0" for file in range(20)}
SECONDS = 20.0


def days(count: int) -> list[set[str]]:
    first = datetime.date(2026, 11, 27)
    seeds = [f"{first + datetime.timedelta(days=day):%Y%m%d}" for day in range(count)]
    return [sample.choose(COSTS, ALWAYS, SECONDS, seed) for seed in seeds]


def test_every_test_has_its_turn_and_every_file_a_soon_one() -> None:
    others = COSTS.keys() - ALWAYS
    first = {
        file: min((t for t in others if t.startswith(file)), key=lambda t: (COSTS[t], t))
        for file in {t.partition("::")[0] for t in others}
    }
    round_s = sum(COSTS[test] for test in first.values())
    soon = days(int(round_s / (SECONDS / 2)) + 1)
    assert set(first.values()) <= set().union(*soon)
    assert len(soon) < 5
    whole = days(int(sum(COSTS.values()) / (SECONDS / 2)) + 1)
    assert set().union(*whole) == COSTS.keys()


def test_what_always_runs_takes_nothing_of_the_others() -> None:
    for chosen in days(20):
        others_s = sum(COSTS[test] for test in chosen - ALWAYS)
        longest_s = max(COSTS.values())
        assert chosen >= ALWAYS
        assert SECONDS - 2 * longest_s <= others_s <= SECONDS + 2 * longest_s


def test_a_seed_that_is_no_day_chooses_too_and_always_the_same() -> None:
    chosen = sample.choose(COSTS, ALWAYS, SECONDS, "of my own")
    assert ALWAYS < chosen < COSTS.keys()
    assert chosen == sample.choose(COSTS, ALWAYS, SECONDS, "of my own")


def test_without_costly_tests_nothing_is_chosen() -> None:
    assert sample.choose({}, ALWAYS, SECONDS, "20261127") == set()
