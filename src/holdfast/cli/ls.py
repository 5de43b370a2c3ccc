"""Runs ``holdfast ls``: lists the checkpoints of a root, and the state of each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from holdfast.catalogue import ROOT, read_document
from holdfast.cli.checkpoints import OpenedRoot, open_readable
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.output import LONG, long_table, plain_table, stdout
from holdfast.format.manifest import Generation, Root
from holdfast.observe.text import NOTHING, moment_text, on_one_line, shared_text
from holdfast.overview import Summary, summary_of
from holdfast.persist.drain_order import waiting
from holdfast.persist.pins import PinnedGenerations, read_pins
from holdfast.storage.open import normal_root
from holdfast.storage.tiered import cache_places

COLUMNS = ("checkpoint", "when", "world", "images", "size", "state", "pin")
_RIGHT = ("world", "images", "size")


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "ls",
        "list the checkpoints of a run",
        "holdfast ls runs/gpt",
        "holdfast ls s3://bucket/gpt --cache /nvme/holdfast",
        "holdfast ls runs/gpt --json | jq -r '.checkpoints[] | select(.pinned) | .checkpoint'",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument(
        "--cache",
        metavar="DIR",
        help="also what only this host's cache has, the cache= given to Checkpointer",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the list; returns 0 also when it is empty or has broken checkpoints."""
    opened = open_readable(args.root)
    gap = opened.catalogue.gap
    rows = records(opened)
    if args.cache is not None:
        rows += _cached_alone(opened, args.cache)
    if args.json:
        print_json({"root": args.root, "checkpoints": rows, "undecided": gap})
        return 0
    _print(args.root, [_cells(row) for row in rows])
    if gap:
        stdout().print(escape(f"{gap}. A restore takes them by name only."), soft_wrap=True)
    return 0


def _print(root: str, rows: list[tuple[str, ...]]) -> None:
    if len(rows) > LONG:
        print(long_table(COLUMNS, rows, _RIGHT))
        return
    table = plain_table(*COLUMNS, right=_RIGHT)
    for row in rows:
        table.add_row(*map(escape, row))
    none = f"no checkpoints in {escape(root)} yet"
    stdout().print(table if rows else none, soft_wrap=not rows)


def records(opened: OpenedRoot) -> list[dict[str, Any]]:
    """Returns readable checkpoints in the order of their generations, then broken ones."""
    pins = read_pins(opened.store)
    readable = [
        _record(summary, opened.state_of(summary.generation), pins)
        for summary in opened.catalogue.manifests
    ]
    broken = [
        {"checkpoint": path, "state": "broken", "reason": reason}
        for path, reason in opened.catalogue.broken
    ]
    return readable + broken


def _record(
    summary: Summary, state: str, pins: Mapping[Generation, PinnedGenerations]
) -> dict[str, Any]:
    return {
        "checkpoint": str(summary.generation),
        "incarnation": summary.incarnation,
        "step": summary.step,
        "created_s": summary.created_s,
        "world": summary.world,
        "images": summary.images,
        "size_bytes": summary.size_bytes,
        "reused_bytes": summary.reused_bytes,
        "state": state,
        "pinned": (one := pins.get(summary.generation)) is not None,
        "note": "" if one is None else one.note,
    }


def _cached_alone(opened: OpenedRoot, directory: str) -> list[dict[str, Any]]:
    """Returns what the run's cache below ``directory`` has and the root has not had."""
    run_id = read_document(opened.store, Root, ROOT).run_id
    there = {m.attempt for m in opened.catalogue.manifests}
    found: dict[Generation, dict[str, Any]] = {}
    for place in cache_places(normal_root(directory), run_id, opened.store.identity()):
        cache = open_readable(place).store
        pins = read_pins(cache)
        left = ((g, one) for g, one in waiting(cache).items() if one.attempt not in there)
        found |= {
            generation: _record(summary_of(one, ""), "cached", pins) for generation, one in left
        }
    return [record for _, record in sorted(found.items())]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["state"] == "broken":
        reason = f"broken: {on_one_line(row['reason'])}"
        return (row["checkpoint"], *[NOTHING] * 4, reason, NOTHING)
    return (
        row["checkpoint"],
        moment_text(row["created_s"]),
        str(row["world"]),
        str(row["images"]),
        shared_text(row["size_bytes"], row["reused_bytes"]),
        row["state"],
        (row["note"] or "pinned") if row["pinned"] else NOTHING,
    )
