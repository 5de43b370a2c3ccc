"""What a restore costs, verified, beside what disk and memory can do and beside other ways to load.

``python benchmarks/restore.py``; ``--quick`` is a first look in a few minutes. Two states: few
large tensors, and thousands of leaves of a GPT with AdamW. From storage with a cold and a warm
page cache, from the arena, on another number of ranks, one leaf, one box.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import harness
from restore_limits import PREADV, Limits
from restore_ranks import resharded
from restore_report import ratios, tables
from restore_state import STATES, Bench, warm
from restore_ways import PARTS, Arena, load_holdfast, load_ways, part_ways


def show(line: str) -> None:
    """Progress, for whoever watches."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def series(bench: Bench, rounds: int) -> dict[str, Any]:
    """Everything of one state, alternating."""
    bench.save_all()
    limits = Limits(bench)
    show(f"direct reads: {limits.tried['direct_reads_tried']}")
    arena = Arena(bench)
    ways: dict[str, Callable[[], None]] = {
        **limits.ways(),
        "Holdfast, arena": lambda: arena.restore("Holdfast, arena"),
        **part_ways(bench),
        **load_ways(bench),
    }
    for turn, name in harness.alternate(list(ways), rounds):
        if name == PREADV or name in PARTS:
            warm([limits.image])
        if name in PARTS:
            load_holdfast(bench)  # what the parts are compared with
        ways[name]()
        shown = "".join(bench.verdicts.get(name, [])[-1:])  # limits have none
        show(f"{bench.kind}, round {turn + 1}: {name}: {bench.found[name][-1]:.3f} {shown}")
    arena.close()
    limits.close()
    return {
        "size_bytes": bench.size_bytes,
        "leaves": len(bench.leaves),
        "figures": {name: harness.summary(values) for name, values in bench.found.items()},
        "restored": {name: harness.counted(found) for name, found in bench.verdicts.items()},
        "exact": all(set(found) == {"exact"} for found in bench.verdicts.values()),
        "settings": limits.settings,
        **limits.tried,
        "ratios": ratios(bench.found),
    }


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured (7)")
    parser.add_argument(
        "--patience", type=float, default=2, metavar="S",
        help="how long to wait for an idle machine before each measurement, in seconds (2)",
    )  # fmt: skip
    parser.add_argument(
        "--dir", help="a directory on the disk to measure (default: the temporary one)"
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="how much of the 1.6 GB of each state (1.0)"
    )
    harness.add_document_option(parser)
    parser.add_argument("--quick", action="store_true", help="--rounds 1 --share 0.1 --patience 0")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.share, options.patience = 1, 0.1, 0.0
    return options


def main() -> int:
    """Exit 1 when anything was restored that was not saved."""
    options = arguments()
    needed = round(10 * 1.7e9 * options.share)
    if harness.available_bytes() < needed:
        raise SystemExit("too little free memory: ten copies of a state must fit; see --share")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["HOLDFAST_ARENA_DIR"] = tempfile.mkdtemp(prefix="hf-bench-", dir="/dev/shm")
    result: dict[str, Any] = {"rounds": options.rounds, "states": {}, "ranks": {}}
    try:
        with harness.scratch(options.dir, needed) as root:
            facts = harness.machine_facts(root, ["torch", "safetensors"])
            for number, kind in enumerate(STATES):
                bench = Bench(kind, root / str(number), options.share, options.patience)
                result["states"][kind] = series(bench, options.rounds)
                shutil.rmtree(bench.root)
            for saved, loaded in ((2, 2), (2, 1), (1, 2)):
                times = resharded(root, options.share, saved, loaded)
                result["ranks"][f"{saved} -> {loaded}"] = harness.summary(times)
                show(f"{saved} -> {loaded} ranks: {times}")
    finally:
        shutil.rmtree(os.environ["HOLDFAST_ARENA_DIR"], ignore_errors=True)
    shown = tables(result, facts)
    print(f"\n{shown}\n")
    kind = "restore-quick" if options.quick else "restore"
    print(f"results/{harness.write_results(kind, facts, result, shown).name}")
    if options.document:
        harness.replace_block(harness.DOCUMENT, "restore", shown)
    return 0 if all(found["exact"] for found in result["states"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
