"""Chooses which costly tests `make test` runs: a sample that changes every day.

tests/costs.json holds the seconds of every test that takes long. Tests without an entry are cheap
or new and always run; so do those marked ``promise`` that a mutant of tests/mutants.toml names.
With ``--sample SECONDS`` a run takes so much of the others, and leaves the rest out. Day by day it
goes on where the day before ended, half of the seconds through the cheapest test of each file, half
through all others: what breaks a whole file is noticed within days, and each test has its turn.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import random
import re
import time
import tomllib
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

COSTS = Path(__file__).parents[2] / "costs.json"
SEED = "HOLDFAST_TEST_SEED"
CHEAP_S = 0.08
"""A test that takes less has no entry."""

#: The seed of the day, here because each test clears the settings of its environment. Processes of
#: xdist inherit it.
DAY = os.environ.setdefault(SEED, f"{datetime.datetime.now(datetime.UTC):%Y%m%d}")
P = TypeVar("P")


def points_of_the_day(points: Sequence[P], *, least: int, for_s: float) -> Iterator[P]:
    """Yields points in the order of the day: ``least`` at all events, more while time is left."""
    ordered = list(points)
    random.Random(DAY).shuffle(ordered)
    until_s, done = time.monotonic() + for_s, 0
    for point in ordered:
        if done >= least and time.monotonic() > until_s:
            break
        yield point
        done += 1
    print(f"{done} of {len(ordered)} points")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sample")
    group.addoption("--sample", type=float, metavar="SECONDS", help="run so much of costly tests")
    group.addoption("--record-costs", action="store_true", help=f"write {COSTS.name} anew")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SEED] = os.environ.get(SEED, DAY)
    if config.getoption("--record-costs"):
        config.pluginmanager.register(_Recorder())


def pytest_report_header(config: pytest.Config) -> str | None:
    seconds = config.getoption("--sample")
    if seconds is None:
        return None
    return f"sample: {seconds:g} s of costly tests, {SEED}={config.stash[_SEED]}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in the sample; begin with the costliest, so that none comes last."""
    seconds = config.getoption("--sample")
    if seconds is None:
        return
    costs = read_costs()
    chosen = choose(
        {key: costs[key] for item in items if (key := key_of(item.nodeid)) in costs},
        _kept(items),
        seconds,
        config.stash[_SEED],
    )
    left_out = [item for item in items if key_of(item.nodeid) in costs.keys() - chosen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(
        (item for item in items if item not in set(left_out)),
        key=lambda item: -costs.get(key_of(item.nodeid), 0.0),
    )


def _kept(items: Sequence[pytest.Item]) -> set[str]:
    """Returns the tests of promises that a planted fault relies on to be noticed."""
    table = tomllib.loads((COSTS.parent / "mutants.toml").read_text())["mutant"]
    named = {mutant["test"] for mutant in table}
    keys = (key_of(item.nodeid) for item in items if item.get_closest_marker("promise"))
    return {key for key in keys if key in named or key.partition("[")[0] in named}


def key_of(nodeid: str) -> str:
    """Returns a test's name in the costs: on the simulated device, without its delays."""
    return _DELAYS.sub("", nodeid)


def choose(costs: dict[str, float], always: set[str], seconds: float, seed: str) -> set[str]:
    """Returns the tests to run: all of ``always``, and ``seconds`` of the others, by the seed."""
    others = sorted(costs.keys() - always, key=lambda test: (costs[test], test))
    first: dict[str, str] = {}
    for test in others:
        first.setdefault(test.partition("::")[0], test)
    of_files, rest = list(first.values()), sorted(set(others) - set(first.values()))
    shared_s = seconds / 2 if rest else seconds
    chosen = always & costs.keys()
    return chosen.union(*(_turn(tests, costs, shared_s, seed) for tests in (of_files, rest)))


def _turn(tests: list[str], costs: dict[str, float], seconds: float, seed: str) -> Iterator[str]:
    """Yields those whose turn it is on a day, ``seconds`` of them; the next day has the next."""
    random.Random(0).shuffle(tests)
    total_s = math.fsum(costs[test] for test in tests)
    begin_s = _day_of(seed) * seconds
    at_s = 0.0
    for test in tests:  # each starts once in a round of total_s
        if (at_s - begin_s) % total_s < seconds:
            yield test
        at_s += costs[test]


def _day_of(seed: str) -> int:
    with suppress(ValueError):
        return datetime.datetime.strptime(seed, "%Y%m%d").toordinal()
    return zlib.crc32(seed.encode())


def read_costs() -> dict[str, float]:
    """Returns the seconds of each costly test by its node id."""
    costs: dict[str, float] = json.loads(COSTS.read_text())
    return costs


class _Recorder:
    """Writes the seconds of the tests that ran, and keeps those of tests that did not."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[key_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if "PYTEST_XDIST_WORKER" in os.environ:
            return
        costs = {**(read_costs() if COSTS.exists() else {}), **self._seconds}
        kept = {test: round(s, 1) for test, s in sorted(costs.items()) if s >= CHEAP_S}
        COSTS.write_text(json.dumps(kept, indent=0) + "\n")


_SEED = pytest.StashKey[str]()
_ONE = r"(?:kernels|down|up|all)-\d+"
_DELAYS = re.compile(rf"(?<=\[){_ONE}-|-{_ONE}(?=[\]-])|\[{_ONE}\]$")
