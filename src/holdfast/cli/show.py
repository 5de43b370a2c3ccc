"""``holdfast show``: what a checkpoint holds, and who held and stored which part of a leaf."""

from __future__ import annotations

import argparse
import difflib
from typing import Any

from rich.markup import escape

from holdfast.cli.checkpoints import STEP_HELP, Opened, choose, open_root
from holdfast.cli.output import Commands, add_command, plain_table, print_json, stdout
from holdfast.errors import NotFound
from holdfast.format import values as codec
from holdfast.format.image import volume
from holdfast.format.manifest import Manifest
from holdfast.geometry.box import Box
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.layout import Layout, LeafSpec
from holdfast.load.source import from_manifest
from holdfast.observe.units import count_text, moment_text, size_text

#: Longer values are cut in the table; ``--json`` has them whole.
VALUE_WIDTH = 100


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = add_command(
        commands,
        "show",
        "show a checkpoint's leaves and values, or where each box of one leaf lies",
        "holdfast show runs/gpt model.layers.0.wq --step 1200",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument("leaf", metavar="LEAF", nargs="?", help="show who holds its boxes")
    command.add_argument("--step", metavar="N", help=STEP_HELP + "; the newest without it")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the summary and the leaves, or one leaf; 3 when there is no such step or leaf."""
    opened = open_root(args.root)
    manifest = choose(opened, args.step)
    layout = from_manifest(opened.store, manifest).layout
    if args.leaf is not None:
        record = _leaf_record(layout, args.leaf)
        print_json(record) if args.json else _print_leaf(record)
    else:
        record = _record(opened, manifest, layout)
        print_json(record) if args.json else _print(record)
    return 0


def _record(opened: Opened, manifest: Manifest, layout: Layout) -> dict[str, Any]:
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
        "size_bytes": manifest.size_bytes,
        "leaves": [_facts(leaf) for leaf in layout.leaves],
        "values": {name: codec.decode(value) for name, value in manifest.values.items()},
    }


def _facts(leaf: LeafSpec) -> dict[str, Any]:
    size_bytes = volume(leaf.shape) * ITEMSIZE[leaf.dtype]
    return {
        "name": leaf.name,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "size_bytes": size_bytes,
    }


def _leaf_record(layout: Layout, name: str) -> dict[str, Any]:
    names = [leaf.name for leaf in layout.leaves]
    if name not in names:
        close = ", ".join(difflib.get_close_matches(name, names, n=3))
        hint = f"did you mean {close}?" if close else "`holdfast show ROOT` lists them"
        raise NotFound(f"no leaf {name}: {hint}", leaf=name)
    index = names.index(name)
    return {
        **_facts(layout.leaves[index]),
        "stored": [{"rank": rank, **_box(box)} for rank, box in layout.owners(index)],
        "held": [
            {"rank": rank, **_box(box)}
            for rank in range(layout.world)
            for box, _ in layout.held(index, rank)
        ],
    }


def _box(box: Box) -> dict[str, list[int]]:
    return {"start": list(box.start), "stop": list(box.stop)}


def _print(record: dict[str, Any]) -> None:
    console = stdout()
    when = moment_text(record["created_s"])
    console.print(
        f"[bold]{record['checkpoint']}[/] ({record['state']}), saved {when} by"
        f" {count_text(record['world'], 'rank')} of run {escape(record['run_id'])}:"
        f" {count_text(record['images'], 'image')}, {size_text(record['size_bytes'])},"
        f" {len(record['leaves'])} leaves",
        soft_wrap=True,
    )
    table = plain_table("leaf", "dtype", "shape", "size", right=("shape", "size"))
    for leaf in record["leaves"]:
        shape = " x ".join(map(str, leaf["shape"])) or "scalar"
        table.add_row(escape(leaf["name"]), leaf["dtype"], shape, size_text(leaf["size_bytes"]))
    console.print(table)
    if record["values"]:
        values = plain_table("value", "is")
        for name, value in record["values"].items():
            values.add_row(escape(name), escape(_short(value)))
        console.print(values)


def _print_leaf(record: dict[str, Any]) -> None:
    console = stdout()
    shape = " x ".join(map(str, record["shape"])) or "scalar"
    size = size_text(record["size_bytes"])
    name = escape(record["name"])
    console.print(f"[bold]{name}[/] {record['dtype']} {shape}, {size}", soft_wrap=True)
    table = plain_table("rank", "holds", "stores", right=("rank",))
    for rank in sorted({part["rank"] for part in record["held"] + record["stored"]}):
        table.add_row(str(rank), _parts(record["held"], rank), _parts(record["stored"], rank))
    console.print(table)


def _parts(parts: list[dict[str, Any]], rank: int) -> str:
    """The boxes of one rank as Python would index them."""
    return escape(", ".join(_ranges(part) for part in parts if part["rank"] == rank) or "-")


def _ranges(part: dict[str, Any]) -> str:
    pairs = zip(part["start"], part["stop"], strict=True)
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in pairs) + "]"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_WIDTH else text[: VALUE_WIDTH - 3] + "..."
