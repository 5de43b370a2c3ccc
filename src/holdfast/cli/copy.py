"""Runs ``holdfast copy``: brings checkpoints into another root."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from rich.markup import escape

from holdfast.catalogue import generation_of
from holdfast.cli.checkpoints import STEP_HELP, OpenedRoot, choose, open_root
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import SlowProgress, stdout
from holdfast.errors import FormatError, NotFound
from holdfast.format.manifest import Generation
from holdfast.maintenance.copies import CopyReport, RootCopyPlan, copy, plan_copy
from holdfast.observe.text import count_text, size_text
from holdfast.storage.open import open_store


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "copy",
        "copy checkpoints to another root, each verified and its manifest last",
        "holdfast copy runs/gpt /archive/gpt",
        "holdfast copy runs/gpt /archive/gpt --step 1200 --step 2400",
    )
    add_roots(command)
    command.add_argument(
        "--step",
        metavar="STEP",
        action="append",
        help=STEP_HELP + "; may be given several times; without it, the newest is copied",
    )
    command.set_defaults(run=run)


def add_roots(command: argparse.ArgumentParser) -> None:
    """Declares what copy and sync have in common."""
    command.add_argument("root", metavar="SOURCE", help="the root to copy from")
    command.add_argument("target", metavar="TARGET", help="the root to copy to; it may be new")
    command.add_argument("--dry-run", action="store_true", help="show what would be copied")


def run(args: argparse.Namespace) -> int:
    """Copies the named checkpoints; returns 4 when any of them is damaged, 3 when one is not there
    any more, 5 while a run writes to the target.
    """
    opened = open_root(args.root)
    chosen = {choose(opened, step).generation for step in args.step or [None]}
    return run_copy(args, opened, chosen)


def run_copy(
    args: argparse.Namespace, opened: OpenedRoot, wanted: Collection[Generation] | None
) -> int:
    """Copies, or shows the plan, and prints what was done."""
    target = open_store(args.target)
    report = CopyReport()
    if args.dry_run:
        plan = plan_copy(opened.store, target, wanted)
    else:
        with SlowProgress("copying") as progress:
            plan, report = copy(opened.store, target, wanted, progress)
    broken = plan.broken if wanted is None else _newer(plan.broken, wanted)
    if args.json:
        print_json(_record(args, plan, report, broken))
    else:
        _print(args, plan, report, broken)
    if report.failed or broken:
        return FormatError.exit_code
    return NotFound.exit_code if plan.missing or (wanted is not None and report.pruned) else 0


def _newer(
    broken: Collection[tuple[str, str]], wanted: Collection[Generation]
) -> tuple[tuple[str, str], ...]:
    """Returns what may be newer than all ``wanted`` ones, or say that they were given up."""
    return tuple(
        (path, reason)
        for path, reason in broken
        if (generation := generation_of(path.rpartition("/")[2])) is None
        or generation > max(wanted)
    )


def _record(
    args: argparse.Namespace,
    plan: RootCopyPlan,
    report: CopyReport,
    broken: Collection[tuple[str, str]],
) -> dict[str, Any]:
    return {
        "root": args.root,
        "target": args.target,
        "dry_run": args.dry_run,
        "to_copy": [str(m.generation) for m in plan.checkpoints],
        "there": [str(m.generation) for m in plan.there],
        "copied": [str(generation) for generation in report.copied],
        "missing": [str(generation) for generation in plan.missing],
        "pruned": [str(generation) for generation in report.pruned],
        "abandons": [str(generation) for generation in plan.abandons],
        "failed": [{"checkpoint": str(g), "reason": reason} for g, reason in report.failed],
        "broken": [{"path": path, "reason": reason} for path, reason in broken],
        "plan_bytes": plan.size_bytes,
        "copied_bytes": report.size_bytes,
        "resumed_bytes": report.resumed_bytes,
    }


def _print(
    args: argparse.Namespace,
    plan: RootCopyPlan,
    report: CopyReport,
    broken: Collection[tuple[str, str]],
) -> None:
    console, failed = stdout(), dict(report.failed)
    for manifest in plan.checkpoints:
        generation = manifest.generation
        word = "would be copied" if args.dry_run else "[green]copied[/]"
        if not args.dry_run and generation not in report.copied:
            word = "[red]not copied[/]" if generation in failed else "[yellow]pruned meanwhile[/]"
        console.print(f"{generation}  {word}  {size_text(manifest.size_bytes)}", soft_wrap=True)
        if generation in failed:
            console.print(f"    {escape(failed[generation])}", soft_wrap=True)
    for generation in plan.missing:
        console.print(f"{generation}  [red]not copied[/]: pruned meanwhile", soft_wrap=True)
    for path, reason in broken:
        console.print(f"{escape(path)}  [red]not copied[/]\n    {escape(reason)}", soft_wrap=True)
    if plan.abandons:
        names = ", ".join(map(str, plan.abandons))
        console.print(
            f"[yellow]{names} of {escape(args.target)}: given up by a start whose record is "
            "copied; a restore takes them by name only[/]",
            soft_wrap=True,
        )
    there = f", {count_text(len(plan.there), 'checkpoint')} there already" if plan.there else ""
    moved = plan.size_bytes if args.dry_run else report.size_bytes
    resumed = f", {size_text(report.resumed_bytes)} there already" if report.resumed_bytes else ""
    verb = "to copy" if args.dry_run else "copied"
    console.print(f"{size_text(moved)} {verb}{resumed}{there}", soft_wrap=True)
