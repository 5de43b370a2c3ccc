"""Measure what a verified restore costs, beside disk and memory and other ways to load.

``--quick`` is a first look in a few minutes. Two states: few large tensors, and thousands of
leaves of a GPT with AdamW. From storage with a cold and a warm page cache, from the arena, on
another number of ranks, one leaf, one box.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.kit import disk, machine, results, series
from benchmarks.kit.disk import MEMORY
from benchmarks.kit.options import Parser
from benchmarks.restore.loading import PARTS, Arena, load_holdfast, load_ways, part_ways
from benchmarks.restore.other_worlds import resharded
from benchmarks.restore.restore_limits import PREADV, Limits
from benchmarks.restore.restore_tables import ratios, tables
from benchmarks.restore.stored_state import STATES, Bench


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Everything of one state, alternating."""
    bench.save_all()
    limits = Limits(bench)
    series.show(f"direct reads: {limits.tried['direct_reads_tried']}")
    arena = Arena(bench)
    ways: dict[str, Callable[[], None]] = {
        **limits.ways(),
        "Holdfast, arena": lambda: arena.restore("Holdfast, arena"),
        **part_ways(bench),
        **load_ways(bench),
    }
    for turn, name in series.alternate(list(ways), rounds):
        if name == PREADV or name in PARTS:
            disk.warm([limits.image])
        if name in PARTS:
            load_holdfast(bench)  # what the parts are compared with
        ways[name]()
        shown = "".join(bench.verdicts.get(name, [])[-1:])  # limits have none
        series.show(f"{bench.kind}, round {turn + 1}: {name}: {bench.found[name][-1]:.3f} {shown}")
    arena.close()
    limits.close()
    return {
        "size_bytes": bench.size_bytes,
        "leaves": len(bench.leaves),
        "figures": series.summaries(bench.found),
        "restored": {name: series.counted(found) for name, found in bench.verdicts.items()},
        "exact": all(set(found) == {"exact"} for found in bench.verdicts.values()),
        "settings": limits.settings,
        **limits.tried,
        "ratios": ratios(bench.found),
    }


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = Parser(
        "restore",
        __doc__,
        quick="--rounds 1 --share 0.1 --patience 0",
        quick_settings={"rounds": 1, "share": 0.1, "patience": 0.0},
    )
    parser.add_rounds(7)
    parser.add_patience()
    parser.add_directory()
    parser.add_argument(
        "--share", type=float, default=1.0, help="how much of the 1.6 GB of each state (1.0)"
    )
    parser.add_document()
    return parser.parse(arguments)


def main(arguments: Sequence[str]) -> int:
    """Exit 1 when anything was restored that was not saved."""
    options = parsed(arguments)
    needed = round(10 * 1.7e9 * options.share)
    if machine.available_bytes() < needed:
        raise SystemExit("too little free memory: ten copies of a state must fit; see --share")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["HOLDFAST_ARENA_DIR"] = tempfile.mkdtemp(prefix="hf-bench-", dir=MEMORY)
    result: dict[str, Any] = {"rounds": options.rounds, "states": {}, "ranks": {}}
    try:
        with disk.scratch(options.dir, needed) as root:
            facts = machine.facts(root, ["torch", "safetensors"])
            for number, kind in enumerate(STATES):
                bench = Bench(kind, root / str(number), options.share, options.patience)
                result["states"][kind] = measure(bench, options.rounds)
                shutil.rmtree(bench.root)
            for saved, loaded in ((2, 2), (2, 1), (1, 2)):
                times = resharded(root, options.share, saved, loaded)
                result["ranks"][f"{saved} -> {loaded}"] = series.summary(times)
                series.show(f"{saved} -> {loaded} ranks: {times}")
    finally:
        shutil.rmtree(os.environ["HOLDFAST_ARENA_DIR"], ignore_errors=True)
    shown = tables(result, facts)
    print(f"\n{shown}\n")
    kind = "restore-quick" if options.quick else "restore"
    results.keep(kind, facts, result, shown, document=options.document, block="restore")
    return 0 if all(found["exact"] for found in result["states"].values()) else 1
