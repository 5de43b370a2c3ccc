"""Runs ``holdfast show``: lists the content of a checkpoint, and which ranks held and stored a
leaf.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from rich.console import Console
from rich.markup import escape

from holdfast.cli import value_tree as tree
from holdfast.cli.checkpoints import (
    STEP_HELP,
    ChosenCheckpoint,
    OpenedRoot,
    open_checkpoint,
    open_readable,
    unknown,
)
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import plain_table, stdout
from holdfast.cli.pictures import (
    ASCII,
    BOX,
    LEGEND,
    MAX_NAMED,
    box_text,
    boxes_of,
    cuts_of,
    cuts_texts,
    draw,
    grid_of,
    spread_texts,
)
from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.layout import Layout
from holdfast.observe.text import count_text, moment_text, on_one_line, shared_text, size_text

#: Longer values are cut in the table; ``--json`` has them whole.
VALUE_WIDTH = 100
#: Pictures are not drawn wider, however wide a pipe is.
PICTURE_WIDTH = 100


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "show",
        "show a checkpoint's leaves and values, or where each box of one leaf lies",
        "holdfast show runs/gpt --step 1200",
        "holdfast show runs/gpt model.layers.0.wq",
        "holdfast show runs/gpt --for dp=4,tp=2",
        "holdfast show runs/gpt --json | jq '.leaves[].name'",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument("leaf", metavar="LEAF", nargs="?", help="draw who holds and stores it")
    command.add_argument("--step", metavar="STEP", help=STEP_HELP + "; the newest without it")
    command.add_argument(
        "--for",
        metavar="MESH",
        dest="wish",
        help="tell whether, and how, it can be restored on other ranks: sizes of dp, fsdp, tp, pp, "
        "ep, the last one running fastest, as dp=4,tp=2 (HSDP: dp=2,fsdp=4)",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the summary and the leaves, or one leaf; returns 3 when there is no such step or
    leaf.
    """
    opened = open_readable(args.root)
    chosen = open_checkpoint(opened, args.step)
    if args.wish is not None:
        if args.leaf is not None:
            raise UsageError("--for is about a whole checkpoint: leave the leaf out")
        # Imported by name, because it loads numpy, and completion must be fast.
        importlib.import_module("holdfast.cli.restore_plan").show_plan(
            chosen, args.wish, as_json=args.json
        )
        return 0
    if args.leaf is None:
        record = _record(opened, chosen)
        print_json(record) if args.json else _print(record)
        return 0
    if args.leaf not in chosen.leaves:
        raise unknown("leaf", args.leaf, list(chosen.leaves), args.root)
    number = chosen.leaves[args.leaf]
    record = _leaf_record(chosen, args.leaf, number)
    if args.json:
        print_json(record)
    else:
        _print_leaf(record, chosen.checkpoint.layout, number)
    return 0


def _record(opened: OpenedRoot, chosen: ChosenCheckpoint) -> dict[str, Any]:
    manifest, layout = chosen.manifest, chosen.checkpoint.layout
    return {
        "checkpoint": str(manifest.generation),
        "incarnation": manifest.incarnation,
        "step": manifest.step,
        "state": opened.state_of(manifest.generation),
        "created_s": manifest.created_s,
        "run_id": manifest.run_id,
        "attempt": manifest.attempt,
        "world": manifest.world,
        "layout": manifest.layout,
        "images": len(manifest.images),
        "parts": len(manifest.parts),
        "size_bytes": manifest.size_bytes,
        "reused_bytes": manifest.reused_bytes,
        "leaves": [_facts(layout, name, chosen.leaves[name]) for name in sorted(chosen.leaves)],
        "values": chosen.values,
        **({"notes": opened.notes} if opened.notes else {}),
    }


def _facts(layout: Layout, name: str, number: int) -> dict[str, Any]:
    leaf = layout.leaves[number]
    facts = {
        "name": name,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "size_bytes": leaf.size_bytes,
    }
    return facts if name == leaf.name else facts | {"stored_as": leaf.name}


def _leaf_record(chosen: ChosenCheckpoint, name: str, number: int) -> dict[str, Any]:
    layout = chosen.checkpoint.layout
    held, stored = boxes_of(layout, number)
    leaf = layout.leaves[number]
    return {
        **_facts(layout, name, number),
        "spread": spread_texts(leaf),
        "cuts": [list(cuts) for cuts in cuts_of(leaf.shape, (box for _, box in held + stored))],
        "stored": [{"rank": rank, **_box(box)} for rank, box in stored],
        "held": [{"rank": rank, **_box(box)} for rank, box in held],
    }


def _box(box: Box) -> dict[str, list[int]]:
    return {"start": list(box.start), "stop": list(box.stop)}


def _print(record: dict[str, Any]) -> None:
    console = stdout()
    when = moment_text(record["created_s"])
    parts = f" and {count_text(record['parts'], 'frozen part')}" if record["parts"] else ""
    console.print(
        f"[bold]{record['checkpoint']}[/] ({record['state']}), saved {when} by"
        f" {count_text(record['world'], 'rank')} of run {escape(record['run_id'])}:"
        f" {count_text(record['images'], 'image')}{parts},"
        f" {shared_text(record['size_bytes'], record['reused_bytes'])},"
        f" {len(record['leaves'])} leaves",
        soft_wrap=True,
    )
    table = plain_table("leaf", "dtype", "shape", "size", right=("shape", "size"))
    for leaf in record["leaves"]:
        shape = " x ".join(map(str, leaf["shape"])) or "scalar"
        size = size_text(leaf["size_bytes"])
        if "stored_as" in leaf:
            size = f"as {leaf['stored_as']}"
        table.add_row(escape(leaf["name"]), leaf["dtype"], shape, escape(size))
    console.print(table)
    if record["values"]:
        values = plain_table("value", "is")
        for name, value in record["values"].items():
            values.add_row(escape(name), escape(tree.text(value, VALUE_WIDTH)))
        console.print(values)
    for note in record.get("notes", ()):
        console.print(f"not read: {escape(on_one_line(note))}", soft_wrap=True)


def _print_leaf(record: dict[str, Any], layout: Layout, number: int) -> None:
    console = stdout()
    shape = " x ".join(map(str, record["shape"])) or "scalar"
    size = size_text(record["size_bytes"])
    name = escape(record["name"])
    console.print(f"[bold]{name}[/] {record['dtype']} {shape}, {size}", soft_wrap=True)
    if "stored_as" in record:
        console.print(f"  tied to {escape(record['stored_as'])}, stored once", soft_wrap=True)
    for text in record["spread"]:
        console.print(f"  {text}", soft_wrap=True)
    console.print()
    _print_picture(console, layout, number)
    console.print()
    table = plain_table("rank", "holds", "stores", right=("rank",))
    held, stored = _by_rank(record["held"]), _by_rank(record["stored"])
    for rank in sorted(held.keys() | stored.keys()):
        table.add_row(str(rank), held.get(rank, "-"), stored.get(rank, "-"))
    console.print(table)


def _print_picture(console: Console, layout: Layout, number: int) -> None:
    if not layout.leaves[number].size_bytes:
        console.print("it has no elements")
        return
    grid = grid_of(layout, number)
    if grid is None:
        for text in cuts_texts(layout, number):
            console.print(text, soft_wrap=True)
        return
    lines = ASCII if console.options.ascii_only else BOX
    for line in draw(grid, min(console.width, PICTURE_WIDTH), lines):
        console.print(line, soft_wrap=True)
    counted = [cell for cell in grid.cells.values() if len(cell.held) > MAX_NAMED]
    more = "; +7: seven more hold it" if counted else ""
    console.print(LEGEND + more, style="dim", soft_wrap=True)


def _by_rank(parts: list[dict[str, Any]]) -> dict[int, str]:
    """Returns the boxes of each rank as Python would index them."""
    found: dict[int, list[str]] = {}
    for part in parts:
        box = Box(tuple(part["start"]), tuple(part["stop"]))
        found.setdefault(part["rank"], []).append(box_text(box))
    return {rank: escape(", ".join(texts)) for rank, texts in found.items()}


# Implements ``holdfast show --for``: plans a restore under a parallelism, and shows its cost.
