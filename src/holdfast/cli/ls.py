"""Runs ``holdfast ls``: lists the checkpoints of a root, and the state of each."""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape

from holdfast.cli.checkpoints import OpenedRoot, open_readable
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import plain_table, stdout
from holdfast.observe.text import NOTHING, moment_text, on_one_line, shared_text
from holdfast.persist.pins import read_pins

COLUMNS = ("checkpoint", "when", "world", "images", "size", "state", "pin")


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "ls",
        "list the checkpoints of a run",
        "holdfast ls runs/gpt",
        "holdfast ls runs/gpt --json | jq -r '.checkpoints[] | select(.pinned) | .checkpoint'",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the list; returns 0 also when it is empty or has broken checkpoints."""
    opened = open_readable(args.root)
    gap = opened.catalogue.gap
    if args.json:
        print_json({"root": args.root, "checkpoints": records(opened), "undecided": gap})
        return 0
    rows = records(opened)
    table = plain_table(*COLUMNS, right=("world", "images", "size"))
    for row in rows:
        table.add_row(*_cells(row))
    none = f"no checkpoints in {escape(args.root)} yet"
    stdout().print(table if rows else none, soft_wrap=not rows)
    if gap:
        stdout().print(escape(f"{gap}. A restore takes them by name only."), soft_wrap=True)
    return 0


def records(opened: OpenedRoot) -> list[dict[str, Any]]:
    """Returns readable checkpoints in the order of their generations, then broken ones."""
    pins = read_pins(opened.store)
    readable = [
        {
            "checkpoint": str(manifest.generation),
            "incarnation": manifest.incarnation,
            "step": manifest.step,
            "created_s": manifest.created_s,
            "world": manifest.world,
            "images": len(manifest.images),
            "size_bytes": manifest.size_bytes,
            "reused_bytes": manifest.reused_bytes,
            "state": opened.state_of(manifest.generation),
            "pinned": (one := pins.get(manifest.generation)) is not None,
            "note": "" if one is None else one.note,
        }
        for manifest in opened.catalogue.manifests
    ]
    broken = [
        {"checkpoint": path, "state": "broken", "reason": reason}
        for path, reason in opened.catalogue.broken
    ]
    return readable + broken


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["state"] == "broken":
        reason = escape(f"broken: {on_one_line(row['reason'])}")
        return (row["checkpoint"], *[NOTHING] * 4, reason, NOTHING)
    return (
        row["checkpoint"],
        moment_text(row["created_s"]),
        str(row["world"]),
        str(row["images"]),
        shared_text(row["size_bytes"], row["reused_bytes"]),
        row["state"],
        escape(row["note"] or "pinned") if row["pinned"] else NOTHING,
    )
