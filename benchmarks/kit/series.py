"""Run systems in an alternating order and summarize the values that were measured.

What disturbs a machine comes and goes: in an alternating series it meets every system alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.kit import machine


def alternate(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name): every name once a round, each round beginning with another one.

    What disturbs a machine comes and goes; in this order it meets every system alike.
    """
    for turn in range(rounds):
        for name in rotated(names, turn):
            yield turn, name


def rotated(names: Sequence[str], turn: int) -> Sequence[str]:
    """The names in the order of a round."""
    first = turn % len(names)
    return (*names[first:], *names[:first])


def timed(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = 1,
    before: Callable[[str], object] = lambda name: None,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds of every way in an alternating series; rounds to warm up do not count.

    ``before`` and ``after`` are called with the name of the way, outside the time.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn, name in alternate(list(ways), rounds + warm_up):
        before(name)
        with machine.alone():
            began = time.perf_counter()
            ways[name]()
            took = time.perf_counter() - began
        after(name)
        if turn >= warm_up:
            found[name].append(took)
    return found


def summaries(found: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """A summary by name."""
    return {name: summary(values) for name, values in found.items()}


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the values themselves."""
    return {
        "median": round(statistics.median(values), 6),
        "min": round(min(values), 6),
        "max": round(max(values), 6),
        "values": [round(value, 6) for value in values],
    }


def counted(verdicts: Sequence[str]) -> str:
    """How often each was found."""
    return ", ".join(f"{verdicts.count(one)}x {one}" for one in sorted(set(verdicts)))


def show(line: str) -> None:
    """Print progress with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
