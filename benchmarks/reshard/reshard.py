"""Measure what a restore into another layout costs, beside torch.distributed.checkpoint.

``--quick`` shows in about a minute whether it works. Ranks over gloo restore parameters and
moments, as DTensors, that were saved in another layout: how long it takes, cold and from the page
cache, how many bytes come from the storage, and how much memory the ranks need beyond what they
restore into.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit import disk, machine, markdown, results, series
from benchmarks.kit.options import Parser
from benchmarks.kit.ranks import run_ranks, show
from benchmarks.reshard.restores import (
    DCP,
    EXCHANGING,
    HOLDFAST,
    PAIRS,
    Bench,
    Pair,
    save_all,
    width_of,
)

CACHES = ("cold", "warm")
READ_TARGET, COLD_TARGET, WARM_TARGET = 1.1, 1.0, 5.0
TITLE = "## What a restore into another layout costs"
SENTENCES = """\
`python -m benchmarks reshard`: parameters and both moments of AdamW, as DTensors, are restored by
ranks that hold them in another way than those that saved them. *cold*: nothing of it is in the page
cache; *warm*: all of it is. *exchanging*: every block is read by one rank and passed on, as between
hosts (`HOLDFAST_EXCHANGE=always`). Holdfast verifies every block, DCP nothing. Processor seconds
and bytes are those of all ranks together; bytes over what the ranks wanted: those that came *from
storage*, and those *asked* of files, whether in the page cache or not. Memory is the most that a
rank had at any moment of the restore beyond what it had before."""


def measure_pairs(root: Path, world: int, options: argparse.Namespace) -> dict[str, Any]:
    """On each rank: save where that is its work, and measure the pairs of this world."""
    width = width_of(options.size)
    if world == max(pair.world for pair in PAIRS):
        save_all(root, width)
    return {
        pair.name: measure(pair, root, width, options)
        for pair in options.pairs
        if pair.world == world
    }


def measure(pair: Pair, root: Path, width: int, options: argparse.Namespace) -> dict[str, Any]:
    """All systems, alternating, after a first round that does not count."""
    bench = Bench(pair, root, width, options.patience)
    labels = [f"{system}, {cache}" for cache in CACHES for system in (HOLDFAST, EXCHANGING, DCP)]
    found: dict[str, dict[str, list[float]]] = {label: {} for label in labels}
    verdicts: dict[str, list[str]] = {label: [] for label in labels}
    for turn, label in series.alternate(labels, options.rounds + 1):
        system, _, cache = label.rpartition(", ")
        figures, verdict = bench.restore(system, is_cold=cache == "cold")
        verdicts[label].append(verdict)
        for name, value in figures.items() if turn else ():
            found[label].setdefault(name, []).append(value)
        told = {name: round(value, 3) for name, value in figures.items()}
        show(f"{pair.name}, round {turn}: {label}: {told} {verdict}")
    return {
        "world": pair.world,
        "size_bytes": bench.size_bytes,
        "leaves": len(bench.state),
        "wanted_bytes": bench.wanted_bytes,
        "bound_bytes": bench.bound_bytes(),
        "figures": {label: series.summaries(figures) for label, figures in found.items()},
        "restored": {label: series.counted(some) for label, some in verdicts.items()},
        "exact": all(set(some) == {"exact"} for some in verdicts.values()),
    }


# ── tables ───────────────────────────────────────────────────────────────────────────────────


def median(found: Mapping[str, Any], label: str, figure: str) -> float:
    """Of one pair."""
    value: float = found["figures"][label][figure]["median"]
    return value


def times_as_fast(found: Mapping[str, Any], cache: str, system: str) -> float:
    """The median of DCP's seconds over Holdfast's, of one round each."""
    slow, fast = (found["figures"][f"{one}, {cache}"]["seconds"] for one in (DCP, system))
    ratios = [a / b for a, b in zip(slow["values"], fast["values"], strict=True)]
    return float(series.summary(ratios)["median"])


def targets(pairs: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What was aimed at, by pair."""
    return {
        name: {
            "read": median(found, f"{HOLDFAST}, cold", "storage") / found["wanted_bytes"],
            "read, exchanging": median(found, f"{EXCHANGING}, cold", "storage")
            / found["wanted_bytes"],
            "cold": times_as_fast(found, "cold", HOLDFAST),
            "warm": times_as_fast(found, "warm", HOLDFAST),
            "memory": max(
                found["figures"][f"{system}, {cache}"]["memory"]["max"]
                for system in (HOLDFAST, EXCHANGING)
                for cache in CACHES
            )
            / found["bound_bytes"],
        }
        for name, found in pairs.items()
    }


def tables(result: dict[str, Any], facts: dict[str, str]) -> str:
    """All of it as markdown."""
    first = next(iter(result["pairs"].values()))
    parts = [
        f"{markdown.heading(facts)}. {first['size_bytes'] / 1e9:.2f} GB in {first['leaves']} "
        f"leaves. Medians of {result['rounds']} rounds (lowest–highest); every restore was "
        "compared bit for bit."
    ]
    parts += [_pair_table(name, found) for name, found in result["pairs"].items()]
    return "\n\n".join([*parts, _targets_table(result)])


def _pair_table(name: str, found: Mapping[str, Any]) -> str:
    wanted = found["wanted_bytes"]
    rows = [
        [
            label,
            markdown.spread(figures["seconds"]),
            f"{figures['processor']['median']:.2f}",
            f"{figures['storage']['median'] / wanted:.2f}",
            f"{figures['asked']['median'] / wanted:.2f}",
            f"{figures['memory']['median'] / 1e6:.0f} MB",
            found["restored"][label],
        ]
        for label, figures in found["figures"].items()
    ]
    head = [name, "seconds", "processor s", "from storage", "asked", "memory", "restored"]
    return markdown.table(head, rows)


def _targets_table(result: Mapping[str, Any]) -> str:
    rows = []
    for name, aims in result["targets"].items():
        bound = result["pairs"][name]["bound_bytes"]
        ratios = [f"{aims[key]:.2f}" for key in ("read", "read, exchanging", "cold", "warm")]
        rows.append([name, *ratios, f"{aims['memory'] * bound / 1e6:.0f} of {bound / 1e6:.0f} MB"])
    head = [
        "Holdfast",
        f"from storage (≤ {READ_TARGET:g})",
        "exchanging",
        f"times as fast as DCP, cold (≥ {COLD_TARGET:g})",
        f"warm (≥ {WARM_TARGET:g})",
        "most memory, of its bound",
    ]
    return markdown.table(head, rows)


# ── the command ──────────────────────────────────────────────────────────────────────────────


def size_of(text: str) -> int:
    """ "32MB" or "0.8GB" in bytes."""
    number, unit = text[:-2], text[-2:].upper()
    if unit not in ("MB", "GB"):
        raise argparse.ArgumentTypeError(f"{text!r}: say 500MB or 1GB")
    return round(float(number) * (1e6 if unit == "MB" else 1e9))


def main(arguments: Sequence[str]) -> int:
    """Exit 1 when anything was restored that was not saved."""
    parser = Parser(
        "reshard",
        __doc__,
        quick="--rounds 1 --size 32MB --patience 0",
        quick_settings={"rounds": 1, "size": 32_000_000, "patience": 0.0},
    )
    parser.add_rounds(7)
    parser.add_argument("--size", type=size_of, default="768MB", help="of the state (768MB)")
    parser.add_patience()
    parser.add_argument("--only", default="", help="pairs with this in their name")
    parser.add_directory()
    parser.add_argument("--out", type=Path, help="where results go (default: benchmarks/results)")
    parser.add_document()
    options = parser.parse(arguments)
    options.pairs = [pair for pair in PAIRS if options.only.lower() in pair.name.lower()]
    if not options.pairs:
        raise SystemExit(f"--only {options.only!r}: one of {', '.join(p.name for p in PAIRS)}")
    if machine.available_bytes() < 6 * options.size:
        raise SystemExit("too little free memory: six copies of the state must fit; see --size")
    with disk.scratch(options.dir, 6 * options.size) as root:
        facts = machine.facts(root, ["torch"])
        pairs: dict[str, Any] = {}
        for world in sorted({pair.world for pair in PAIRS}, reverse=True):  # the most ranks save
            pairs |= run_ranks(f"{world} ranks", world, root, measure_pairs, root, world, options)
    pairs = {pair.name: pairs[pair.name] for pair in options.pairs}
    result = {"rounds": options.rounds, "pairs": pairs, "targets": targets(pairs)}
    shown = tables(result, facts)
    print(f"\n{shown}\n")
    if not options.quick or options.out:
        out = options.out or results.RESULTS
        results.keep("reshard", facts, result, shown, directory=out)
    if options.document:
        block = f"{TITLE}\n\n{SENTENCES}\n\n{shown}"
        results.replace_block(results.DOCUMENT, "reshard", block)
    return 0 if all(found["exact"] for found in pairs.values()) else 1
