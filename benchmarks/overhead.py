"""Measure what events cost a training: steps with them against the same steps without, in pairs.

A real GPT learns on one thread, and every step is saved. A pair is a step whose events are recorded
and one whose are not, in turns the one or the other first; both end when their save is captured, so
that all events of a step lie in it. What counts is the median of the ratios, in processor seconds
of the trainer, and beside it in seconds on the wall, with the interval of 95 % of each.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit import machine, markdown, results, series
from benchmarks.kit.options import Parser

PAIRS, WARM_UP = 300, 10
#: Steps of which the time in the sinks of events is taken.
TIMED = 50
#: What the upper end of the interval of processor seconds is to stay below.
TARGET = 0.005
SECTION = results.Section(
    "What events cost a step",
    "`python -m benchmarks overhead`: steps of a GPT with a save each, events recorded or not.",
)


def measure(directory: str, pairs: int) -> dict[str, Any]:
    """Steps with events and without, in processor and wall seconds, pair by pair."""
    import torch

    import holdfast
    from benchmarks.kit.gpt import QUICK, GptTraining
    from holdfast import events

    torch.set_num_threads(1)
    training = GptTraining("plain", QUICK)
    state = {"model": training.raw, "optimizer": training.optimizer}
    number, told, in_sinks_s = [-1], list[events.Event](), list[float]()
    with holdfast.Checkpointer(directory, state, memory=None, storage=None) as checkpointer:
        checkpointer.restore()
        recording = events.subscribed()

        def step(sinks: Sequence[events.Sink]) -> tuple[float, float]:
            events._sinks[:] = sinks
            number[0] += 1
            began_s, worked_s = time.perf_counter(), time.process_time()
            handle = checkpointer.save(number[0])
            training.step()
            handle.wait_captured(60)
            return time.process_time() - worked_s, time.perf_counter() - began_s

        for _ in range(WARM_UP):
            step(recording)
        found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
        for _, name in series.alternate(list(found), pairs):
            found[name].append(step(recording if name == "on" else ()))
        for _ in range(TIMED):
            spent_s = [0.0]
            told.clear()
            step(
                [
                    *(_timed(sink, spent_s) for sink in recording),
                    lambda event, _: told.append(event),
                ]
            )
            in_sinks_s.append(spent_s[0])
        events._sinks[:] = recording
    with_, without = found["on"], found["off"]
    return {
        "events": len(told),
        "in_sinks_s": series.summary(in_sinks_s),
        "pairs": pairs,
        "load": os.getloadavg()[0],
        "cpu_s": _compared([a for a, _ in with_], [a for a, _ in without]),
        "wall_s": _compared([b for _, b in with_], [b for _, b in without]),
    }


def _timed(
    sink: Callable[[Any, float], None], spent_s: list[float]
) -> Callable[[Any, float], None]:
    """The sink, whose time is added up."""

    def timed(event: Any, time_s: float) -> None:
        began_s = time.perf_counter()
        sink(event, time_s)
        spent_s[0] += time.perf_counter() - began_s

    return timed


def _compared(with_: Sequence[float], without: Sequence[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(with_, without, strict=True)]
    low, high = interval_of_median(ratios)
    return {
        "with": series.summary(with_),
        "without": series.summary(without),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
    }


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """The interval of 95 % of the median, by the order of the values alone."""
    ordered = sorted(values)
    half = 1.96 * math.sqrt(len(ordered)) / 2
    first = max(0, math.floor(len(ordered) / 2 - half))
    last = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return ordered[first], ordered[last]


def shown(found: dict[str, Any]) -> str:
    """The table, and what is around it."""
    rows = [
        [
            name,
            markdown.spread(found[key]["without"]),
            f"{100 * (found[key]['ratio'] - 1):+.2f} %",
            f"{100 * (found[key]['low'] - 1):+.2f} to {100 * (found[key]['high'] - 1):+.2f} %",
        ]
        for key, name in (("cpu_s", "processor seconds of the trainer"), ("wall_s", "wall"))
    ]
    head = ["of a step", "without events, s", "longer with them", "interval of 95 %"]
    is_met = found["cpu_s"]["high"] - 1 < TARGET
    put_us = 1e6 * found["in_sinks_s"]["median"]
    step_us = 1e6 * found["cpu_s"]["without"]["median"]
    return (
        f"{found['pairs']} pairs, {found['events']} events a step, load of the machine "
        f"{found['load']:.1f}.\n\n{markdown.table(head, rows)}\n\nThe upper end of processor "
        f"seconds is {'below' if is_met else 'not below'} {100 * TARGET:g} %. Putting the events "
        f"took {put_us:.0f} us of a step, {100 * put_us / step_us:.3f} %."
    )


def main(arguments: Sequence[str]) -> int:
    """Measure, print what was, and keep it."""
    from benchmarks.kit.ranks import run_ranks

    parser = Parser("overhead", __doc__, quick="twenty pairs, nothing kept")
    parser.add_directory("a directory for the root")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_document()
    options = parser.parse(arguments)
    pairs = 20 if options.quick else options.pairs
    with tempfile.TemporaryDirectory(prefix="holdfast-overhead-", dir=options.dir) as directory:
        root = Path(directory, "root")
        found = run_ranks("overhead", 1, Path(directory), measure, str(root), pairs)
    text = shown(found)
    print(text)
    if not options.quick:
        facts = machine.facts(Path(options.dir or tempfile.gettempdir()), ["torch"])
        results.keep("overhead", facts, found, text, document=options.document, section=SECTION)
    return 0
