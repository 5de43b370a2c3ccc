"""Lose simulated hosts at any moment, and compare the training that comes back.

``python -m benchmarks chaos --hosts 4 --parity 1 --seconds 300 --seed 1``. The demo's GPT trains
on N hosts, each with its keeper and its arena. Hosts are lost at random moments, and while an
image is captured, parity is made, a checkpoint is written or a restore is under way; now and then
one host more than parity replaces, and now and then bits of another host flip. Each time the run
is started again, with others in their place, on what is left with as many ranks or with fewer, and
its whole state is compared, after the restore and after every step, with that of a training to
which nothing happened: parameters, moments, the count of tokens, and what each rank's generators
are at. Every loss is PASS, LOST_WORK, HARD_FAIL or SILENT_DIVERGENCE, as ``verdict.py`` has it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.life import Reference, reference
from benchmarks.chaos.story import MOMENTS, Loss, Story, as_json
from benchmarks.chaos.verdict import PASS, VERDICTS
from benchmarks.kit import machine, markdown, results
from benchmarks.kit.options import Parser
from holdfast.testing.faults import Hosts

LOSSES_OF_A_RUN = 4


def tell(options: argparse.Namespace, expected: Reference, losses: list[Loss]) -> None:
    """Runs, each in a root of its own, until there were enough losses or there is no more time."""
    began, number = time.monotonic(), 0

    def is_time() -> bool:
        is_left = not options.seconds or time.monotonic() - began < options.seconds
        return is_left and (not options.runs or len(losses) < options.runs)

    while is_time():
        directory = Path(tempfile.mkdtemp(prefix="holdfast-chaos-", dir=options.dir))
        most = min(LOSSES_OF_A_RUN, options.runs - len(losses) if options.runs else LOSSES_OF_A_RUN)
        chance = random.Random(f"{options.seed} {number}")
        with Hosts() as hosts:
            story = Story(
                directory,
                hosts,
                count=options.hosts,
                parity=options.parity,
                seed=options.seed,
                reference=expected,
                chance=chance,
                say=partial(say, number),
                root=f"{options.root}/{directory.name}" if options.root else "",
                cache=options.cache,
            )
            try:
                found = story.tell(most, is_time)
            except KeyboardInterrupt:
                losses += [loss for loss in story.losses if loss.verdict]
                shutil.rmtree(directory, ignore_errors=True)
                raise
            if any(loss.verdict != PASS for loss in found) and options.keep:
                print(f"  kept: {directory}")
                mapped = shutil.ignore_patterns("*.sock", "*.slot", "*.rows")
                shutil.copytree(hosts.arena_dir, directory / "arenas", ignore=mapped)
            else:
                shutil.rmtree(directory, ignore_errors=True)
        losses += found
        number += 1


def say(number: int, loss: Loss) -> None:
    """A line for each loss as it was judged."""
    what = ", ".join(loss.lost) + (
        f" and bits of {', '.join(loss.damaged)}" if loss.damaged else ""
    )
    print(
        f"run {number}: {what or 'nothing'} at {loss.moment}; {loss.then}: promised "
        f"{loss.promised} ({loss.promised_from or 'nothing'}), resumed {loss.resumed} from "
        f"{loss.source or 'nothing'} of {loss.completed}: {loss.verdict} {loss.why}",
        flush=True,
    )


def shown(losses: Sequence[Loss], options: argparse.Namespace) -> str:
    """Verdicts by moment, and what was lost."""
    rows = [_row(moment, [one for one in losses if one.moment == moment]) for moment in MOMENTS]
    other = [one for one in losses if one.moment not in MOMENTS]
    rows += [_row("at a start", other)] if other else []
    rows.append(_row("in all", losses))
    head = [
        "hosts lost during",
        *VERDICTS,
        "from memory",
        "from storage",
        "steps lost, most",
        "seconds to resume, median",
    ]
    return (
        f"{results.today()}: the demo's GPT on {options.hosts} hosts, parity {options.parity}, "
        f"{'a bucket' if options.root else 'a directory'} as root"
        f"{' and a cache on each host' * options.cache}, "
        f"seed {options.seed}; {len(losses)} losses of "
        f"{sum(len(one.lost) for one in losses)} hosts in all.\n\n{markdown.table(head, rows)}"
    )


def _row(name: str, losses: Sequence[Loss]) -> list[str]:
    verdicts, sources = Counter(one.verdict for one in losses), Counter(o.source for o in losses)
    resumed = sorted(one.resume_s for one in losses if one.resume_s)
    return [
        name,
        *(str(verdicts[one]) for one in VERDICTS),
        str(sources["memory"]),
        str(sources["storage"]),
        str(max((one.steps_lost for one in losses), default=0)),
        f"{resumed[len(resumed) // 2]:.1f}" if resumed else "",
    ]


def main(arguments: Sequence[str]) -> int:
    """0 when every loss passed."""
    parser = Parser("chaos", __doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--parity", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=0, help="stop after so many losses")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no run after so long")
    parser.add_argument("--root", default="", help="a bucket, below which the roots are")
    parser.add_argument(
        "--cache", action="store_true", help="each host has a cache, lost with the host"
    )
    parser.add_argument("--steps", type=int, default=90, help="of the reference (90)")
    parser.add_directory("a directory for the roots")
    parser.add_argument("--keep", action="store_true", help="the root of a run that did not pass")
    parser.add_argument("--no-results", action="store_true", help="print, and keep nothing")
    options = parser.parse(arguments)
    if not 2 <= options.hosts <= 12:
        parser.error("--hosts: from 2 to 12, for the demo's batch has 12 sequences")
    if not options.runs and not options.seconds:
        options.runs = 8
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="holdfast-chaos-") as directory:
        expected = reference(Path(directory), options.hosts, options.steps, options.seed, 300.0)
    print(f"reference: {len(expected.sums)} steps", flush=True)
    losses: list[Loss] = []
    with suppress(KeyboardInterrupt):  # what was told by then counts
        tell(options, expected, losses)
    text = shown(losses, options)
    print(f"\n{text}")
    if not options.no_results:
        keep(options, losses, text)
    return 0 if losses and all(loss.verdict == PASS for loss in losses) else 1


def _tiers(options: argparse.Namespace) -> str:
    return "-bucket" * bool(options.root) + "-cache" * options.cache


def keep(options: argparse.Namespace, losses: Sequence[Loss], text: str) -> None:
    """Beside the figures of the other benchmarks."""
    facts = machine.facts(Path(options.dir or tempfile.gettempdir()), ["torch"])
    found: dict[str, Any] = {
        "hosts": options.hosts,
        "parity": options.parity,
        "seed": options.seed,
        "verdicts": dict(Counter(one.verdict for one in losses)),
        "losses": [as_json(one) for one in losses],
    }
    kind = f"chaos-{options.hosts}-hosts-parity-{options.parity}{_tiers(options)}"
    results.keep(kind, facts, found, text)
