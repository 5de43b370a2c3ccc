"""``holdfast doctor``: what this machine can do, what is wrong, and what to do about it.

Facts are found out X, and printed here. Nothing
is changed, unless stale arenas are to be cleaned away.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace

from rich.markup import escape

from holdfast.cli.doctor.arena_facts import probe_arenas
from holdfast.cli.doctor.arena_findings import judge_arenas
from holdfast.cli.doctor.cleaning import clean
from holdfast.cli.doctor.facts import Facts, Torch
from holdfast.cli.doctor.finding import Finding, worst
from holdfast.cli.doctor.host_facts import probe_host, settings
from holdfast.cli.doctor.host_findings import judge_host
from holdfast.cli.doctor.place_facts import measure, probe_place
from holdfast.cli.doctor.root_facts import probe_root
from holdfast.cli.doctor.run_facts import probe_meetings
from holdfast.cli.doctor.run_findings import judge_run
from holdfast.cli.doctor.storage_findings import judge_storage
from holdfast.cli.doctor.torch_facts import probe_torch
from holdfast.cli.output import Commands, SlowProgress, add_command, print_json, stdout
from holdfast.observe.units import count_text
from holdfast.snapshot.arena import arena_home
from holdfast.storage.open import normal_root

#: What ``doctor`` exits with when something is bad.
BAD = 11
_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = add_command(
        commands,
        "doctor",
        "tell what this machine can do and what is wrong, with the remedy",
        "holdfast doctor",
        "holdfast doctor runs/gpt --quick",
        "holdfast doctor --clean",
    )
    command.add_argument(
        "root", metavar="ROOT", nargs="?", help="the directory given to Checkpointer, or to be"
    )
    command.add_argument(
        "--keep",
        metavar="N",
        type=int,
        default=0,
        help="checkpoints that the run keeps, to judge free space by; 0: as many as there are",
    )
    command.add_argument(
        "--quick", action="store_true", help="measure no speed and do not load torch"
    )
    command.add_argument(
        "--clean",
        action="store_true",
        help="give back the shared memory of dead runs that holds nothing newer than storage",
    )
    command.add_argument(
        "--lose-snapshots",
        action="store_true",
        help="with --clean: also where snapshots are lost with it, which are listed",
    )
    command.add_argument("--yes", action="store_true", help="do not ask before cleaning")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, or clear; 11 when something is bad."""
    if args.clean or args.lose_snapshots:
        return clean(args)
    with SlowProgress("examining") as progress:
        facts = examine(args.root, quick=args.quick, keeps=args.keep, progress=progress)
    findings = judge(facts)
    if args.json:
        listed = [asdict(one) for one in findings]
        print_json({"worst": worst(findings), "findings": listed, "facts": asdict(facts)})
    else:
        _print(findings)
    return BAD if worst(findings) == "bad" else 0


def examine(
    root: str | None,
    *,
    quick: bool,
    keeps: int = 0,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Facts:
    """Find everything out. ``quick``: without measuring speed and without loading torch."""
    storage = probe_place(normal_root(root or "."))
    found = None if root is None else probe_root(root, keeps=keeps)
    facts = Facts(
        host=probe_host(),
        memory=probe_place(str(arena_home().parent)),
        storage=storage,
        torch=Torch(),
        settings=settings(),
        arenas=probe_arenas(arena_home()),
        root=found,
        meetings=probe_meetings(() if found is None else found.hosts),
    )
    progress(1, 3)
    facts = replace(facts, torch=probe_torch(ask=not quick))
    progress(2, 3)
    return facts if quick else replace(facts, speeds=measure(storage))


def judge(facts: Facts) -> list[Finding]:
    """What the facts mean, in the order in which a person looks at them."""
    run = judge_run(facts)
    return [*judge_host(facts), *judge_storage(facts), *run, *judge_arenas(facts)]


def _print(findings: list[Finding]) -> None:
    console = stdout()
    width = max(len(one.about) for one in findings)
    for one in findings:
        colour = _COLOURS[one.severity]
        text = f"{escape(one.about):{width}}  {escape(one.text)}"
        console.print(f"[{colour}]{one.severity:4}[/]  {text}", soft_wrap=True)
        if one.remedy:
            console.print(f"{'':{width + 6}}  -> {escape(one.remedy)}", soft_wrap=True)
    counts = {word: sum(one.severity == word for one in findings) for word in ("bad", "warn")}
    console.print(f"{counts['bad']} bad, {count_text(counts['warn'], 'warning')}")
