"""Runs ``holdfast doctor``: reports the abilities and problems of this machine, with remedies.

Probes collect facts, pure rules judge them, this prints the findings. Changes nothing, unless
``--clean`` is given. With ``--for`` nothing is examined: pure rules compute what a run would need.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace

from rich.markup import escape

from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.doctor.accelerator import probe_near, probe_torch
from holdfast.cli.doctor.host import measure, probe_host, probe_place, settings
from holdfast.cli.doctor.root import probe_meetings, probe_root, probe_storage
from holdfast.cli.doctor.rules.host_rules import judge_host
from holdfast.cli.doctor.rules.probe_facts import Facts, Finding, Torch, worst
from holdfast.cli.doctor.rules.run_rules import judge_arenas, judge_run, judge_storage
from holdfast.cli.doctor.rules.sizing import compute_sizing, parse_size, sizing_rows
from holdfast.cli.doctor.user_arenas import clean, probe_arenas
from holdfast.cli.output import SlowProgress, plain_table, stdout
from holdfast.errors import UsageError
from holdfast.observe.text import count_text, on_one_line
from holdfast.persist.commit import SWEPT_AFTER
from holdfast.protocol.arena import IMAGE_START, arena_home
from holdfast.storage.open import normal_root

#: The exit code of ``doctor`` when a finding is bad.
BAD = 11
_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "doctor",
        "tell what this machine can do and what is wrong, with the remedy",
        "holdfast doctor",
        "holdfast doctor runs/gpt --quick",
        "holdfast doctor s3://bucket/runs/gpt --deep",
        "holdfast doctor --clean",
        "holdfast doctor --for 40GB --hosts 8 --parity 1",
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
        "--deep",
        action="store_true",
        help="of a bucket: have eight processes race for one name, too, as some servers let "
        "several win",
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
    sizing = command.add_argument_group("what a run would need; nothing is examined")
    sizing.add_argument(
        "--for",
        dest="state_size",
        metavar="SIZE",
        help="compute memory, network and storage for a state of this size, such as 40GB; "
        "with --keep also for so many checkpoints",
    )
    sizing.add_argument("--hosts", metavar="N", type=int, help="with --for: hosts of the run (1)")
    sizing.add_argument("--ranks", metavar="N", type=int, help="with --for: ranks on each host (1)")
    sizing.add_argument(
        "--parity", metavar="N", type=int, help="with --for: as given to Checkpointer (0)"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examines, clears, or computes what a run needs; 11 if a finding is bad."""
    if args.state_size is not None:
        return size(args)
    _require_size(args)
    if args.clean or args.lose_snapshots:
        return clean(args)
    with SlowProgress("examining") as progress:
        facts = examine(
            args.root, quick=args.quick, keeps=args.keep, deep=args.deep, progress=progress
        )
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
    deep: bool = False,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Facts:
    """Runs all probes. ``quick``: without measuring speed and without loading torch. ``deep``: with
    races for one name, where the root is in a bucket.
    """
    storage = probe_storage(normal_root(root or "."), deep=deep)
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
        near=probe_near(),
    )
    progress(1, 3)
    facts = replace(facts, torch=probe_torch(ask=not quick, directory=str(arena_home().parent)))
    progress(2, 3)
    return facts if quick else replace(facts, speeds=measure(storage))


def judge(facts: Facts) -> list[Finding]:
    """Applies the rules to the facts; the findings are in the order in which a user reads them."""
    run = judge_run(facts)
    return [*judge_host(facts), *judge_storage(facts), *run, *judge_arenas(facts)]


def _require_size(args: argparse.Namespace) -> None:
    """UsageError for options that mean nothing without ``--for``."""
    for name in ("hosts", "ranks", "parity"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} goes with --for: say how large the state is, as --for 40GB")


def size(args: argparse.Namespace) -> int:
    """Print what a run needs; 0. UsageError for numbers that no run can have."""
    if args.root is not None or args.clean or args.lose_snapshots:
        raise UsageError("--for computes only: leave out ROOT, --clean and --lose-snapshots")
    needs = compute_sizing(
        parse_size("--for", args.state_size),
        hosts=1 if args.hosts is None else args.hosts,
        ranks_per_host=1 if args.ranks is None else args.ranks,
        parity=args.parity or 0,
        keep_last=args.keep,
        slot_head_bytes=IMAGE_START,
        swept_after=SWEPT_AFTER,
    )
    if args.json:
        print_json({"sizing": asdict(needs)})
        return 0
    table = plain_table("", "bytes", "", right=("bytes",))
    for row in sizing_rows(needs):
        table.add_row(*row)
    stdout().print(table)
    for sentence in needs.missing:
        stdout().print(f"[yellow]warn[/]  {escape(sentence)}", soft_wrap=True)
    return 0


def _print(findings: list[Finding]) -> None:
    console = stdout()
    width = max(len(one.about) for one in findings)
    for one in findings:
        colour = _COLOURS[one.severity]
        text = f"{escape(one.about):{width}}  {escape(on_one_line(one.text))}"
        console.print(f"[{colour}]{one.severity:4}[/]  {text}", soft_wrap=True)
        if one.remedy:
            console.print(f"{'':{width + 6}}  -> {escape(on_one_line(one.remedy))}", soft_wrap=True)
    counts = {word: sum(one.severity == word for one in findings) for word in ("bad", "warn")}
    console.print(f"{counts['bad']} bad, {count_text(counts['warn'], 'warning')}")
