"""Measures a training step in a framework's loop: by itself, with a Checkpointer, with its adapter.

The three train in turns, in one process: the same model for the same steps, with a snapshot in
memory after each step but for the first way; a fourth calls the framework's own save there, where
it has one. What counts is the time from one step's begin to the next's, and of that the processor
time of the training thread, which depends less on what else the machine does; and the ratios of
medians. A turn of each way counts the bytecodes of Python that the thread executes in a step, which
depend on nothing else. Last, in turns again, the processor time in the adapter's own functions and
in the Checkpointer below them: what an adapter adds, which a machine that does other things tells
as well; ``--work`` measures that alone. It runs in the environment that `make integrations` makes:
`PYTHONPATH=tests .venv-integrations/lightning/bin/python -m benchmarks adapters lightning`.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.adapters.loops import LAYERS, LOOPS, WARM_UP, Turn
from benchmarks.kit import machine, markdown, results, series
from benchmarks.kit.options import Parser

WAYS = ("alone", "checkpointer", "adapter")
#: Those that have a save of their own: the way "own" calls it after each step.
HAS_OWN = ("accelerate", "deepspeed", "lightning", "ray", "torchtitan", "transformers")
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
    "DS_ACCELERATOR": "cpu",
}
SECTION = results.Section(
    "Adapters of frameworks",
    "`python -m benchmarks adapters FRAMEWORK`: steps of a framework's own loop, in turns alone,\n"
    "with a Checkpointer put into the loop, and with its adapter; a snapshot each step.",
)


def measure(framework: str, width: int, steps: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Returns the seconds of a step by way, in alternating turns, and the ratios of medians."""
    import torch

    torch.set_num_threads(1)  # what a step computes is in the training thread's time
    ways = (*WAYS, "own") if framework in HAS_OWN else WAYS
    walls: dict[str, list[float]] = {way: [] for way in ways}
    threads: dict[str, list[float]] = {way: [] for way in ways}
    for turn, way in series.alternate(ways, rounds + 1):
        one = Turn(way, str(directory / f"{way}-{turn}"), width, steps + WARM_UP)
        with machine.alone(), ExitStack() as stack:
            LOOPS[framework](one, stack)
        if turn:  # the first round warms up
            walls[way] += one.took(0)
            threads[way] += one.took(1)
    bytecodes = {}
    for way in WAYS:
        one = Turn(
            way, str(directory / f"{way}-bytecodes"), width, 5 + WARM_UP, counts_bytecodes=True
        )
        with machine.alone(), ExitStack() as stack:
            LOOPS[framework](one, stack)
            one.end()
        bytecodes[way] = one.took(2)
    return {
        "state_bytes": 3 * 4 * LAYERS * width * width,
        "steps_s": series.summaries(walls),
        "threads_s": series.summaries(threads),
        "held_s": held(walls),
        "step": ratios(walls),
        "thread": ratios(threads),
        "bytecodes": {way: statistics.median(found) for way, found in bytecodes.items()},
    }


def measure_work(
    framework: str, width: int, steps: int, rounds: int, directory: Path
) -> dict[str, Any]:
    """Returns the medians of a step's processor time in seconds: the training thread's with the
    framework alone, the adapter's own, and the Checkpointer's, by hand and below the adapter.
    """
    import torch

    torch.set_num_threads(1)
    found: dict[str, list[list[float]]] = {way: [[], [], []] for way in WAYS}
    for number, way in series.alternate(WAYS, rounds + 1):
        root = str(directory / f"{way}-work-{number}")
        turn = Turn(way, root, width, steps + WARM_UP, counts_work=True)
        with machine.alone(), ExitStack() as stack:
            LOOPS[framework](turn, stack)
        for values, clock in zip(found[way], (1, 3, 4), strict=True):
            values += turn.took(clock) if number else []
    alone, by_hand, adapter = ([statistics.median(one) for one in found[way]] for way in WAYS)
    return {
        "step_s": alone[0],
        "own_s": adapter[1],
        "own_most_s": max(found["adapter"][1]),
        "checkpointer_s": by_hand[2],
        "checkpointer_below_s": adapter[2],
        "steps": len(found["adapter"][1]),
    }


def added_s(work: dict[str, Any]) -> float:
    """Returns the processor time that an adapter adds to a step, in seconds."""
    own: float = work["own_s"] + work["checkpointer_below_s"] - work["checkpointer_s"]
    return own


def ratios(found: dict[str, list[float]]) -> dict[str, float]:
    """Returns what the adapter costs over the Checkpointer, as a ratio and in seconds of a step,
    and over the framework alone.
    """
    medians = {way: statistics.median(values) for way, values in found.items()}
    return {
        "over_checkpointer": medians["adapter"] / medians["checkpointer"],
        "over_checkpointer_s": medians["adapter"] - medians["checkpointer"],
        "over_framework": medians["adapter"] / medians["alone"],
    }


def held(walls: dict[str, list[float]]) -> dict[str, float]:
    """Returns how much longer a step takes than one that saves nothing, by way: medians."""
    medians = {way: statistics.median(values) for way, values in walls.items()}
    return {way: one - medians["alone"] for way, one in medians.items() if way != "alone"}


def shown(found: dict[str, dict[str, Any]]) -> str:
    """The tables: of whole steps, and of the work of adapters."""
    whole = {framework: one for framework, one in found.items() if "step" in one}
    worked = {framework: one["work"] for framework, one in found.items() if "work" in one}
    tables = [shown_steps(whole)] if whole else []
    return "\n\n".join([*tables, *([shown_work(worked)] if worked else [])])


def shown_work(found: dict[str, dict[str, Any]]) -> str:
    """The table of the processor time that adapters add."""
    head = [
        "processor time of a step, ms",
        "alone",
        "the adapter's own (most)",
        "Checkpointer, by hand",
        "below the adapter",
        "added",
    ]
    rows = []
    for framework, one in sorted(found.items()):
        added = added_s(one)
        own = f"{one['own_s'] * 1e3:.2f} ({one['own_most_s'] * 1e3:.2f})"
        times = (one["checkpointer_s"], one["checkpointer_below_s"])
        cells = [f"{one['step_s'] * 1e3:.1f}", own, *(f"{each * 1e3:.2f}" for each in times)]
        rows.append([framework, *cells, f"{added * 1e3:+.2f} ({added / one['step_s']:+.1%})"])
    return markdown.table(head, rows)


def shown_steps(found: dict[str, dict[str, Any]]) -> str:
    """The table of whole steps."""
    head = ["of a step", "", *(f"{way}, ms" for way in WAYS), "to Checkpointer", "to alone"]
    rows = []
    for framework, one in sorted(found.items()):
        for what, of_ways in (("step", "steps_s"), ("thread", "threads_s")):
            each = [one[of_ways][way] for way in WAYS]
            in_ms = [{k: way[k] * 1e3 for k in ("median", "min", "max")} for way in each]
            cost = one[what]
            over = f"{cost['over_checkpointer']:.3f} ({cost['over_checkpointer_s'] * 1e3:+.2f} ms)"
            cells = [markdown.spread(way, 1) for way in in_ms]
            name = "the whole" if what == "step" else "its thread's processor"
            rows.append([framework, name, *cells, over, f"{cost['over_framework']:.3f}"])
        if "bytecodes" in one:
            counts = [round(one["bytecodes"][way]) for way in WAYS]
            over = f"{counts[2] - counts[1]:+,}"
            cells = [f"{count:,}" for count in counts]
            rows.append([framework, "its thread's bytecodes", *cells, over, ""])
    size = next(iter(found.values()))["state_bytes"]
    lines = [
        f"{framework}: a step with a save takes this much longer than one without: "
        + ", ".join(f"{way} {seconds * 1e3:.1f} ms" for way, seconds in one["held_s"].items())
        for framework, one in sorted(found.items())
        if "held_s" in one
    ]
    told = "".join(f"\n\n{line}" for line in lines)
    return f"A state of {size / 1e6:.0f} MB.\n\n{markdown.table(head, rows)}{told}"


def main(arguments: Sequence[str]) -> int:
    """Measure one framework, print it, and keep it beside the others."""
    parser = Parser("adapters", __doc__, quick="a small state and one round, nothing kept")
    parser.add_argument("framework", choices=sorted(LOOPS))
    parser.add_argument("--work", action="store_true", help="the adapter's own work alone")
    parser.add_rounds(4, "turns of each way")
    parser.add_argument("--steps", type=int, default=40, help="that count in a turn (40)")
    parser.add_directory("a directory for the roots")
    parser.add_document()
    options = parser.parse(arguments)
    width, rounds, steps = (64, 1, 5) if options.quick else (768, options.rounds, options.steps)
    warnings.filterwarnings("ignore")
    logging.disable()
    if options.framework in ("deepspeed", "torchtitan"):
        os.environ |= ALONE
    with tempfile.TemporaryDirectory(prefix="holdfast-adapters-", dir=options.dir) as directory:
        given = (options.framework, width, steps, rounds, Path(directory))
        found = {} if options.work else measure(*given)
        found["work"] = measure_work(*given)
    facts = machine.facts(Path(options.dir or tempfile.gettempdir()), ["torch", options.framework])
    found["framework"] = facts.pop(options.framework, "")
    print(shown({options.framework: found}))
    if not options.quick:
        kept = results.read("adapters", facts).get("frameworks", {})
        kept[options.framework] = kept.get(options.framework, {}) | found
        results.keep(
            "adapters",
            facts,
            {"frameworks": kept},
            shown(kept),
            document=options.document,
            section=SECTION,
        )
    return 0
