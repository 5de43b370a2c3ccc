"""Runs ``holdfast import``: makes checkpoints of ours of what another writer left."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash
from rich.markup import escape

from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import SlowProgress, stdout
from holdfast.cli.portion import add_portion, memory_bytes, portion
from holdfast.errors import NotFound, UsageError
from holdfast.interop.arrange import Orders
from holdfast.interop.directories import FORMATS
from holdfast.interop.writing.command_ranks import ALONE, met_ranks, rank_of_command
from holdfast.interop.writing.export_files import DEFAULT_MEMORY_BYTES, window_bytes
from holdfast.interop.writing.import_plan import ImportPlan, open_imports, plan_import
from holdfast.interop.writing.import_state import ImportReport, import_all
from holdfast.observe.text import count_text, size_text
from holdfast.state.parameter_order import ParameterOrder
from holdfast.storage.open import is_bucket, open_store


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "import",
        "make checkpoints of what another writer left, each verified by checksums from then on",
        "holdfast import outputs/checkpoint-500 runs/gpt",
        "holdfast import torchtitan/checkpoint runs/gpt --step 1000 --step 2000",
        "holdfast import model.safetensors runs/base --cast BF16 --dry-run",
    )
    command.add_argument(
        "source", metavar="SOURCE", help="a checkpoint of another writer, or a directory of several"
    )
    command.add_argument("root", metavar="ROOT", help="the root to make them in; it may be new")
    command.add_argument(
        "--format", metavar="FORMAT", help=f"where content does not tell it: {', '.join(FORMATS)}"
    )
    command.add_argument(
        "--step", metavar="STEP", type=int, action="append", help="only this step; may be repeated"
    )
    command.add_argument(
        "--parameters",
        metavar="FILE",
        help="JSON with the names of the parameters in each group of an optimizer that numbers "
        'them: [["a.weight", "a.bias"], ["b.weight"]], or such lists by the optimizer\'s key',
    )
    add_portion(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Makes the checkpoints, on each rank its share of the images; returns 3 where there is none,
    4 for one that is damaged or changes meanwhile, 5 while a run writes to the root.
    """
    memory = memory_bytes("--memory", args.memory, DEFAULT_MEMORY_BYTES)
    window_bytes(memory)
    place = rank_of_command() if args.ranks else ALONE
    if args.dry_run:
        if place[0] == 0:
            _tell(args, *_plans(args), ImportReport())
        return 0
    with met_ranks(_meeting_place(args), "the import", place) as ranks:
        plans, notes = _plans(args)
        with SlowProgress("importing") as progress:
            report = import_all(plans, open_store(args.root), progress, memory, ranks)
        if ranks.rank == 0:
            _tell(args, plans, notes, report)
    return 0


def _meeting_place(args: argparse.Namespace) -> Path:
    """Where the ranks meet: beside the root, or beside the source of one in a bucket, or here."""
    if not is_bucket(args.root):
        path = Path(os.path.abspath(args.root))
        return path.with_name(f".{path.name}.ranks")
    root = xxhash.xxh3_64_hexdigest(args.root.encode())
    if is_bucket(args.source):  # and both are in buckets: where the command runs
        return Path.cwd() / f".{args.source.rstrip('/').rpartition('/')[2]}.{root}.ranks"
    path = Path(os.path.abspath(args.source))
    return path.with_name(f".{path.name}.{root}.ranks")


def _tell(
    args: argparse.Namespace,
    plans: Sequence[ImportPlan],
    notes: Sequence[str],
    report: ImportReport,
) -> None:
    if args.json:
        print_json(_record(args, plans, notes, report))
    else:
        _print(args, plans, notes, report)


def _plans(args: argparse.Namespace) -> tuple[list[ImportPlan], list[str]]:
    """What is made, and notes about what is left out."""
    orders = None if args.parameters is None else _orders(args.parameters)
    sources, notes = open_imports(
        args.source, args.format, lambda saved, opened: portion(args, saved, opened), orders
    )
    steps = sorted(source.step for source in sources)
    wanted = set(args.step or steps)
    if missing := wanted.difference(steps):
        there = f"there are: {', '.join(map(str, steps))}"
        raise NotFound(
            "; ".join([f"no step {min(missing)} in {args.source}; {there}", *notes]),
        )
    chosen = sorted(
        (source for source in sources if source.step in wanted), key=lambda source: source.step
    )
    for one, other in itertools.pairwise(chosen):
        if one.step == other.step:
            raise UsageError(
                f"{one.path} and {other.path} are both of step {one.step}: import them by "
                "themselves, each to a root of its own"
            )
    return [plan_import(source) for source in chosen], notes


def _orders(path: str) -> Orders:
    """The names of parameters by the keys of optimizers, and by group."""
    try:
        found = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"--parameters {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--parameters {path} is no JSON: {error}") from None
    orders = found if isinstance(found, dict) else {"optimizer": found}
    for key, groups in orders.items():
        is_list = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
        if not is_list or any(type(name) is not str for group in groups for name in group):
            raise UsageError(f"--parameters {path}: {key} is no list of lists of names")
    return {key: ParameterOrder(groups) for key, groups in orders.items()}


def _record(
    args: argparse.Namespace,
    plans: Sequence[ImportPlan],
    notes: Sequence[str],
    report: ImportReport,
) -> dict[str, Any]:
    return {
        "source": args.source,
        "root": args.root,
        "dry_run": args.dry_run,
        "checkpoints": [
            {
                "source": str(plan.source.path),
                "format": plan.source.format,
                "step": plan.source.step,
                "images": plan.world,
                "leaves": sorted(plan.source.saved.leaves),
                "values": sorted(plan.source.saved.values),
                "size_bytes": plan.size_bytes,
                "notes": list(plan.source.notes),
            }
            for plan in plans
        ],
        "notes": list(notes),
        "imported": [str(generation) for generation in report.imported],
        "there": [str(generation) for generation in report.there],
        "plan_bytes": sum(plan.size_bytes for plan in plans),
        "resumed_bytes": report.resumed_bytes,
    }


def _print(
    args: argparse.Namespace,
    plans: Sequence[ImportPlan],
    notes: Sequence[str],
    report: ImportReport,
) -> None:
    console = stdout()
    verb = "would be imported" if args.dry_run else "imported"
    for plan in plans:
        source = plan.source
        console.print(
            f"{escape(str(source.path))}  {source.format}  step {source.step}  "
            f"{count_text(len(source.saved.leaves), 'tensor')}  {size_text(plan.size_bytes)}",
            soft_wrap=True,
        )
        if args.dry_run:
            for name, leaf in sorted(source.saved.leaves.items()):
                shape = " x ".join(map(str, leaf.shape)) or "scalar"
                console.print(f"    {escape(name)}  {leaf.dtype} {shape}", soft_wrap=True)
        for note in source.notes:
            console.print(f"    [yellow]{escape(note)}[/]", soft_wrap=True)
    for note in notes:
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
    there = f", {len(report.there)} there already" if report.there else ""
    resumed = f", {size_text(report.resumed_bytes)} there already" if report.resumed_bytes else ""
    count = len(plans) - len(report.there)
    console.print(
        f"{count_text(count, 'checkpoint')} {verb} to {escape(args.root)}{there}{resumed}",
        soft_wrap=True,
    )
