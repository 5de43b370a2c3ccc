"""Measure how much longer a training step takes while a cache is drained to the root behind it.

A model is trained in turns: so many steps while what is cached is drained, and as many while
nothing is, the one or the other first. Each turn of both is a pair; what counts is the median of
the steps of each, and the median ratio of the pairs. With a limit of bytes a second, as a run would
set it, and without.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.kit import machine, markdown, results, series
from benchmarks.kit.options import Parser

LAYERS, ROWS, STEPS = 8, 48, 20
RATE = "HOLDFAST_DRAIN_BYTES_S"
SECTION = results.Section(
    "Draining a cache",
    "`python -m benchmarks drain`: steps of a training while a cache is drained to a directory,\n"
    "beside as many while nothing is.",
)


def measure(width: int, pairs: int, bytes_s: float, root: str, directory: Path) -> dict[str, Any]:
    """Steps beside a drain and without, in seconds, pair by pair."""
    import torch
    from torch import nn

    import holdfast

    torch.set_num_threads(1)
    os.environ[RATE] = f"{bytes_s:g}"
    layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randn(ROWS, width)

    def step() -> float:
        began_s = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began_s

    beside, alone, ratios, drains_s = list[float](), list[float](), list[float](), list[float]()
    keepers_s = list[float]()
    root_of_run = root or str(directory / "root")
    checkpointer = holdfast.Checkpointer(
        root_of_run,
        {"model": model, "optimizer": optimizer},
        memory=None,
        storage=None,
        keep=holdfast.Keep(last=1),
        cache=directory / "cache",
        cache_keep=holdfast.Keep(last=1),
    )
    with checkpointer:
        checkpointer.restore()
        for _ in range(3):
            step()
        steps = STEPS
        for pair in range(pairs):
            there = [step() for _ in range(steps)] if pair % 2 else []
            handle = checkpointer.save(pair, durable=True)
            step()  # the fence holds this one, not the drain
            handle.wait_cached(120)
            began_s, here = time.perf_counter(), list[float]()
            used_s = keeper_s(root_of_run)
            while handle.state != "durable":
                here.append(step())
            drains_s.append(time.perf_counter() - began_s)
            keepers_s.append(keeper_s(root_of_run) - used_s)
            time.sleep(0.2)  # what was replaced is removed
            there = there or [step() for _ in here]
            steps = len(here)
            beside += here
            alone += there
            ratios.append(statistics.median(here) / statistics.median(there))
    state_bytes = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    return {
        "state_bytes": state_bytes,
        "limit_bytes_s": bytes_s,
        "drain_bytes_s": round(state_bytes / statistics.median(drains_s)),
        "keeper_s": series.summary(keepers_s),
        "beside_s": series.summary(beside),
        "alone_s": series.summary(alone),
        "ratio": series.summary(ratios),
    }


def keeper_s(root: str) -> float:
    """The processor seconds that the keeper of this root has used."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and is_keeper_of(root, (entry / "cmdline").read_bytes()):
                ticks += sum(
                    map(int, (entry / "stat").read_text().rpartition(")")[2].split()[11:13])
                )
    return ticks / os.sysconf("SC_CLK_TCK")


def is_keeper_of(root: str, command: bytes) -> bool:
    """True for the command line of a keeper of this root."""
    return b"holdfast.keeper" in command and root.encode() in command.split(b"\0")


def shown(found: Sequence[dict[str, Any]]) -> str:
    """The table."""
    head = [
        "limit, MB/s",
        "drained, MB/s",
        "of a core",
        "step alone, s",
        "step beside, s",
        "ratio of a pair",
    ]
    rows = [
        [
            f"{one['limit_bytes_s'] / 1e6:.0f}" if one["limit_bytes_s"] else "none",
            f"{one['drain_bytes_s'] / 1e6:.0f}",
            f"{one['keeper_s']['median'] * one['drain_bytes_s'] / one['state_bytes']:.0%}",
            markdown.spread(one["alone_s"]),
            markdown.spread(one["beside_s"]),
            markdown.spread(one["ratio"]),
        ]
        for one in found
    ]
    return f"A state of {found[0]['state_bytes'] / 1e6:.0f} MB.\n\n{markdown.table(head, rows)}"


def main(arguments: Sequence[str]) -> int:
    """Measure, print what was, and keep it."""
    parser = Parser("drain", __doc__, quick="a small state, three pairs, nothing kept")
    parser.add_directory("a directory for root and cache")
    parser.add_argument("--root", default="", help="a bucket, instead of a directory")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--limits", type=float, nargs="*", default=[100e6, 0.0])
    parser.add_document()
    options = parser.parse(arguments)
    width, pairs = (512, 3) if options.quick else (2048, options.pairs)
    found = []
    for number, limit in enumerate(options.limits):
        with tempfile.TemporaryDirectory(prefix="holdfast-drain-", dir=options.dir) as directory:
            root = options.root and f"{options.root}/{number}"
            found.append(measure(width, pairs, limit, root, Path(directory)))
    text = shown(found)
    print(text)
    if not options.quick:
        facts = machine.facts(Path(options.dir or tempfile.gettempdir()), ["torch"])
        results.keep(
            "drain", facts, {"drains": found}, text, document=options.document, section=SECTION
        )
    return 0
