"""Runs ``holdfast export``: writes a checkpoint in the format of another writer."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from holdfast.catalogue import manifest_path
from holdfast.cli.checkpoints import STEP_HELP, ChosenCheckpoint, hold_checkpoint, open_readable
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import SlowProgress, stdout
from holdfast.cli.portion import add_portion, memory_bytes, portion
from holdfast.errors import UsageError
from holdfast.interop.writing.chosen_leaves import LeafReader
from holdfast.interop.writing.command_ranks import ALONE, CommandRanks, met_ranks, rank_of_command
from holdfast.interop.writing.export_files import (
    DEFAULT_MEMORY_BYTES,
    ExportReport,
    export,
    refuse_no_directory,
    refuse_taken,
    window_bytes,
)
from holdfast.interop.writing.formats import FORMATS, plan_format
from holdfast.interop.writing.planned_files import FormatPlan
from holdfast.interop.writing.saved_state import saved_state
from holdfast.observe.text import count_text, size_text
from holdfast.storage.base import source_facts
from holdfast.storage.open import is_bucket

#: As transformers cuts its files.
SHARD_BYTES = 5_000_000_000


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "export",
        "write a checkpoint in the format of another writer, under its name when it is complete",
        "holdfast export runs/gpt gpt-hf --to safetensors --rules rules.py --cast BF16",
        "holdfast export runs/gpt gpt.pt --to torch --only 'model.**'",
        "holdfast export runs/gpt gpt-dcp --to dcp --step 1200 --dry-run",
    )
    command.add_argument("root", metavar="ROOT", help="the root, or a checkpoint of another writer")
    command.add_argument("out", metavar="OUT", help="the new directory; for torch, the new file")
    command.add_argument("--to", metavar="FORMAT", required=True, help=", ".join(FORMATS))
    command.add_argument("--step", metavar="STEP", help=STEP_HELP + "; the newest without it")
    command.add_argument(
        "--shard-size",
        metavar="BYTES",
        default=str(SHARD_BYTES),
        help="the most that one file has, as 5000000000 or 2GiB; one tensor may have more",
    )
    add_portion(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the files, on each rank its share; returns 2 where there are files already, 5 when
    storage refuses.
    """
    memory = memory_bytes("--memory", args.memory, DEFAULT_MEMORY_BYTES)
    window_bytes(memory)
    out = _place(args.out)
    rank, size = place = rank_of_command() if args.ranks else ALONE
    if args.dry_run:
        return 0 if rank else _export(args, memory, out, CommandRanks("the export"))
    if size > 1:
        refuse_no_directory(out)
    with met_ranks(out.with_name(f".{out.name}.ranks"), "the export", place) as ranks:
        return _export(args, memory, out, ranks)


def _export(args: argparse.Namespace, memory: int, out: Path, ranks: CommandRanks) -> int:
    opened = open_readable(args.root)
    chosen = hold_checkpoint(opened, args.step) if ranks.rank == 0 else None
    newest = str(chosen.manifest.generation).encode() if chosen else b""
    same = ranks.from_rank0(lambda: newest).decode()
    chosen = chosen or hold_checkpoint(opened, same)
    saved = portion(args, saved_state(chosen.checkpoint), chosen.checkpoint)
    shard_bytes = memory_bytes("--shard-size", args.shard_size, SHARD_BYTES)
    reader = LeafReader(chosen.checkpoint, saved.leaves)
    plan = plan_format(args.to, saved, shard_bytes, chosen.manifest.step, reader)
    refuse_taken(out, is_file=plan.is_file)
    if plan.is_file:
        plan = replace(plan, files=(replace(plan.files[0], path=out.name),))
    report = None
    if not args.dry_run:
        facts = source_facts(opened.store, manifest_path(chosen.manifest.generation))
        identity = f"{opened.store.url} {chosen.manifest!r} {saved.leaves!r} {facts!r}"
        with SlowProgress(f"exporting {chosen.manifest.generation}") as progress:
            report = export(
                plan,
                reader,
                out,
                identity,
                progress,
                memory_bytes=memory,
                require_unchanged=chosen.checkpoint.require_unchanged,
                ranks=ranks,
            )
    if ranks.rank == 0:
        _print(args, chosen, plan, report)
    return 0


def _place(out: str) -> Path:
    """The path that is written to. UsageError for one that nothing can be written to."""
    if is_bucket(out):
        raise UsageError(f"{out}: an export goes to a directory, which can be copied to a bucket")
    path = Path(os.path.abspath(out))
    if not path.name:
        raise UsageError(f"{out} is no place for an export: name a new directory")
    return path


def _print(
    args: argparse.Namespace,
    chosen: ChosenCheckpoint,
    plan: FormatPlan,
    report: ExportReport | None,
) -> None:
    if args.json:
        print_json(_record(args, chosen, plan, report))
        return
    console = stdout()
    for file in plan.files:
        console.print(f"{escape(file.path)}  {size_text(file.size_bytes)}", soft_wrap=True)
    for note in plan.notes:
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
    verb = "would be written" if report is None else "written"
    done = (
        ""
        if report is None or not report.resumed_bytes
        else (f", {size_text(report.resumed_bytes)} of them there already")
    )
    console.print(
        f"{size_text(plan.size_bytes)} in {count_text(len(plan.files), 'file')} {verb} to "
        f"{escape(args.out)}{done}",
        soft_wrap=True,
    )


def _record(
    args: argparse.Namespace,
    chosen: ChosenCheckpoint,
    plan: FormatPlan,
    report: ExportReport | None,
) -> dict[str, Any]:
    return {
        **chosen.facts,
        "out": args.out,
        "format": args.to,
        "dry_run": args.dry_run,
        "files": [{"path": file.path, "size_bytes": file.size_bytes} for file in plan.files],
        "notes": list(plan.notes),
        "plan_bytes": plan.size_bytes,
        "written_bytes": 0 if report is None else report.size_bytes - report.resumed_bytes,
        "resumed_bytes": 0 if report is None else report.resumed_bytes,
    }
