"""Runs ``holdfast repair``: mends what is damaged or missing, and names what nobody has."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.markup import escape

from holdfast.catalogue import MANIFESTS, catalogue, generation_of
from holdfast.cli.checkpoints import STEP_HELP, OpenedRoot, choose, open_root
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import SlowProgress, stdout
from holdfast.errors import FormatError, NotFound, RestoreError, StorageError
from holdfast.format.manifest import Generation
from holdfast.maintenance.memory_files import MemoryFiles
from holdfast.maintenance.repairs import (
    DocumentDamage,
    FileDamage,
    RepairPlan,
    RepairReport,
    plan_repair,
    repair,
)
from holdfast.observe.text import count_text
from holdfast.persist.pins import pinned
from holdfast.storage.base import Store

#: Of the blocks and of the lost pieces of a file, the table shows at most this many.
_SHOWN = 8


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "repair",
        "mend what is damaged or missing, from other roots or what replicas stored",
        "holdfast repair runs/gpt --from /archive/gpt --dry-run",
        "holdfast repair runs/gpt --from /archive/gpt",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument(
        "--from",
        dest="sources",
        metavar="ROOT",
        action="append",
        default=[],
        help="a copy of this root to take good bytes from; may be given several times",
    )
    command.add_argument(
        "--from-memory",
        action="store_true",
        help="also take good bytes from snapshots and parity in this host's shared memory",
    )
    command.add_argument(
        "--arenas",
        metavar="DIR",
        action="append",
        default=[],
        help="as --from-memory, and from the arenas of another host, mounted or copied to DIR; may "
        "be given several times",
    )
    command.add_argument("--step", metavar="STEP", help=STEP_HELP + "; without it, all are mended")
    command.add_argument(
        "--dry-run", action="store_true", help="show what is damaged, change nothing"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Mends, or shows the damage; returns 4 while any is left, 5 where storage failed or a
    run is active.
    """
    opened = open_root(args.root, is_brief=args.step is None)
    sources = [open_root(source, is_brief=True).store for source in args.sources]
    wanted = None if args.step is None else _wanted(opened, args.step)
    report = RepairReport()
    memory = _memory(args, opened, sources)
    with SlowProgress("reading every block") as progress:
        if args.dry_run:
            plan = plan_repair(opened.store, sources, wanted, progress, memory)
        else:
            plan, report = repair(opened.store, sources, wanted, progress, memory)
    failed = dict(plan.unread) | report.failed
    is_whole = not failed and all(damage.path in report.mended for damage in plan.damages)
    if args.json:
        print_json(_record(args, plan, report, is_whole))
    else:
        _print(args, plan, report)
    return 0 if is_whole else StorageError.exit_code if failed else FormatError.exit_code


def _memory(
    args: argparse.Namespace, opened: OpenedRoot, sources: list[Store]
) -> tuple[MemoryFiles, ...]:
    if not (args.from_memory or args.arenas):
        return ()
    others = [Path(one) for one in args.arenas]
    manifests = catalogue(opened.store).manifests
    return (MemoryFiles(opened.store, manifests, others=others, stores=sources),)


def _wanted(opened: OpenedRoot, name: str) -> set[Generation]:
    """Returns the checkpoint of this name, also where its manifest cannot be read or only a pin has
    it.
    """
    found = catalogue(opened.store)  # each is read: an index says nothing of its bytes
    names = (path.partition("/") for path, _ in found.broken)
    broken = {generation_of(file) for above, _, file in names if above == MANIFESTS}
    broken |= pinned(opened.store).difference(found.generations)
    wanted = {one for one in broken if one and name in (str(one), str(one.step))}
    try:
        return wanted | {choose(opened, name).generation}
    except (NotFound, RestoreError):
        if not wanted:
            raise
        return wanted


def _record(
    args: argparse.Namespace, plan: RepairPlan, report: RepairReport, is_whole: bool
) -> dict[str, Any]:
    return {
        "root": args.root,
        "dry_run": args.dry_run,
        "ok": is_whole,
        "checkpoints": plan.checkpoints,
        "documents": [
            {
                "path": one.path,
                "fault": one.fault,
                "mendable": one.is_mendable,
                "lacks": list(one.lacks),
                "aside": report.mended.get(one.path) or None,
            }
            for one in plan.documents
        ],
        "files": [
            {
                "path": one.path,
                "checkpoints": [str(generation) for generation in one.generations],
                "faults": list(one.faults),
                "blocks": list(one.blocks),
                "mendable": one.is_mendable,
                "lost": list(one.lost),
                "aside": report.mended.get(one.path) or None,
            }
            for one in plan.files
        ],
        "mended": list(report.mended),
        "failed": [
            {"path": path, "reason": reason}
            for path, reason in (dict(plan.unread) | report.failed).items()
        ],
    }


def _print(args: argparse.Namespace, plan: RepairPlan, report: RepairReport) -> None:
    console = stdout()
    for damage in plan.damages:
        if damage.path in report.mended:
            aside = report.mended[damage.path]
            word = "[green]mended[/]" + (f"  (what was there: {escape(aside)})" if aside else "")
        else:
            left = "[red]not mended[/]" if _lacks(damage) else "[red]LOST[/]"
            word = "[yellow]can be mended[/]" if damage.is_mendable else left
        console.print(f"{escape(damage.path)}  {word}", soft_wrap=True)
        for line in _lines(damage):
            console.print(f"    {escape(line)}", soft_wrap=True)
    read = count_text(plan.checkpoints, "checkpoint")
    failed = dict(plan.unread) | report.failed
    for path, reason in failed.items():
        console.print(f"{escape(path)}  [red]failed[/]: {escape(reason)}", soft_wrap=True)
    if not plan.damages and not failed:
        console.print(f"nothing is damaged in {escape(args.root)}: {read} read", soft_wrap=True)
        return
    lost = sum(not damage.is_mendable for damage in plan.damages)
    if lost:
        console.print(
            f"{count_text(lost, 'file')} cannot be mended: give another copy of the root by --from,"
            " or restore another step",
            soft_wrap=True,
        )


def _lines(damage: DocumentDamage | FileDamage) -> list[str]:
    if isinstance(damage, DocumentDamage):
        named = ", ".join(map(str, damage.generations))
        lines = [damage.fault, *([f"without it lost: {named}"] if named else [])]
        lacks = _short(damage.lacks)
        return [*lines, *([f"it names what is not whole: {lacks}"] if lacks else [])]
    lines = [f"of {', '.join(map(str, damage.generations))}: {'; '.join(damage.faults)}"]
    if damage.blocks:
        lines.append(f"blocks: {_short(damage.blocks)}")
    if damage.lost:
        lines.append(f"lost: {_short(damage.lost)}")
    return lines


def _lacks(damage: DocumentDamage | FileDamage) -> bool:
    return isinstance(damage, DocumentDamage) and bool(damage.lacks)


def _short(items: tuple[Any, ...]) -> str:
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more
