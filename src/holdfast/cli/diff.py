"""Runs ``holdfast diff``: compares two checkpoints, however each was spread over ranks.

Leaves are compared bit for bit, in portions: memory does not grow with the checkpoint.
"""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console
from rich.markup import escape

from holdfast.cli import value_tree as tree
from holdfast.cli.checkpoints import STEP_HELP, ChosenCheckpoint, hold_checkpoint, open_root
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.differences import LeafChange, ValueChange, leaf_changes, value_changes
from holdfast.cli.leaf_reader import short_text
from holdfast.cli.output import SlowProgress, plain_table, stdout
from holdfast.errors import NotFound, UsageError
from holdfast.observe.text import NOTHING, count_text, size_text

DIFFERENT = 1
#: From this many columns on there is room for the elements themselves.
WIDE = 100


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "diff",
        "compare two checkpoints, leaf by leaf and value by value, whatever layout each has",
        "holdfast diff runs/gpt --step 100 --other-step 200",
        "holdfast diff runs/gpt runs/gpt-again --leaf 'model.*'",
        "holdfast diff runs/gpt --step 100 --values-only --json",
    )
    command.add_argument("root", metavar="ROOT", help="the directory given to Checkpointer")
    command.add_argument(
        "other", metavar="OTHER", nargs="?", help="the root of the second one; without it, ROOT"
    )
    command.add_argument(
        "--step", metavar="STEP", help=STEP_HELP + "; of OTHER too, if that is given"
    )
    command.add_argument(
        "--other-step", metavar="STEP", help="the second one's step; the newest without any"
    )
    only = command.add_mutually_exclusive_group()
    only.add_argument(
        "--leaf",
        metavar="PATTERN",
        action="append",
        help="compare only leaves like this (* ? [...]), and no values; may be given several times",
    )
    only.add_argument("--values-only", action="store_true", help="compare plain values, no leaves")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the differences; returns 0 when there are none, 1 otherwise."""
    a, b = _both(args)
    leaves: list[LeafChange] = []
    compared = values_compared = size_bytes = 0
    values: list[ValueChange] = []
    if not args.values_only:
        names = _names(a, b, args.leaf)
        with SlowProgress("comparing") as progress:
            leaves, size_bytes = leaf_changes(a, b, names, progress=progress)
        compared = len(names)
    if not args.leaf:
        with SlowProgress("comparing values") as progress:
            values, values_compared = value_changes(a, b, progress=progress)
    record = {
        "identical": not (leaves or values),
        "a": a.facts,
        "b": b.facts,
        "leaves_compared": compared,
        "values_compared": values_compared,
        "size_bytes": size_bytes,
        "leaves": [change.record() for change in leaves],
        "values": [change.record() for change in values],
    }
    print_json(record) if args.json else _print(record, leaves, values)
    return DIFFERENT if leaves or values else 0


def _both(args: argparse.Namespace) -> tuple[ChosenCheckpoint, ChosenCheckpoint]:
    """Opens the two checkpoints."""
    if args.other is None and args.step is None and args.other_step is None:
        raise UsageError(
            "diff needs two checkpoints: give a second root, or --step and --other-step"
        )
    opened = open_root(args.root)
    if args.other is None:
        return hold_checkpoint(opened, args.step), hold_checkpoint(opened, args.other_step)
    other_step = args.step if args.other_step is None else args.other_step
    other = open_root(args.other)
    return hold_checkpoint(opened, args.step), hold_checkpoint(other, other_step)


def _names(a: ChosenCheckpoint, b: ChosenCheckpoint, patterns: list[str] | None) -> list[str]:
    names = sorted(a.leaves.keys() | b.leaves.keys())
    if patterns is None:
        return names
    fit = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not fit:
        raise NotFound(
            f"no leaf is like {' or '.join(patterns)}: `holdfast show {a.root}` lists them"
        )
    return fit


def _print(record: dict[str, Any], leaves: list[LeafChange], values: list[ValueChange]) -> None:
    console = stdout()
    console.print(_summary(record), soft_wrap=True)
    for side in ("a", "b"):
        which = record[side]
        where = f"{which['checkpoint']} of {which['root']}, saved by"
        console.print(
            f"  {side}  {escape(where)} {count_text(which['world'], 'rank')}", soft_wrap=True
        )
    if record["values_compared"] and record["a"]["world"] != record["b"]["world"]:
        console.print("  values are those of rank 0: others saved by so many ranks have no match")
    _print_kinds(console, [change for change in leaves if change.kind != "elements"])
    _print_elements(console, [change for change in leaves if change.kind == "elements"])
    if values:
        several = record["a"]["world"] > 1 or record["b"]["world"] > 1
        rows = plain_table("value", "a", "b", *(["ranks"] if several else []))
        for value in values:
            ranks = [value.ranks_text] if several else []
            cells = (value.path, _value_text(value.a), _value_text(value.b), *ranks)
            rows.add_row(*map(escape, cells))
        console.print()
        console.print(rows)


def _print_kinds(console: Console, changes: list[LeafChange]) -> None:
    """Prints leaves whose elements could not be compared."""
    if not changes:
        return
    table = plain_table("leaf", "what")
    for change in changes:
        table.add_row(escape(change.name), escape(change.text))
    console.print()
    console.print(table)


def _print_elements(console: Console, changes: list[LeafChange]) -> None:
    """Prints leaves that differ in elements; the first two elements only where there is room."""
    if not changes:
        return
    sides = ("a", "b") if console.width >= WIDE else ()
    columns = ("leaf", "differ", "of", "largest", "relative", "first at", *sides)
    table = plain_table(*columns, right=columns[1:5])
    for change in changes:
        table.add_row(escape(change.name), *map(escape, _cells(change)[: len(columns) - 1]))
    console.print()
    console.print(table)


def _summary(record: dict[str, Any]) -> str:
    leaves, values = record["leaves_compared"], record["values_compared"]
    if record["identical"]:
        amount = [_leaves_text(leaves)] if leaves else []
        amount += [f"{size_text(record['size_bytes'])} bit for bit"] if leaves else []
        amount += [count_text(values, "value")] if values else []
        return f"[bold green]identical[/]: {', '.join(amount) or 'there is nothing in them'}"
    parts = []
    if leaves:
        parts.append(f"{len(record['leaves'])} of {_leaves_text(leaves)}")
    if values:
        parts.append(f"{len(record['values'])} of {count_text(values, 'value')}")
    return f"[bold red]different[/]: {', '.join(parts)}"


def _leaves_text(count: int) -> str:
    return "1 leaf" if count == 1 else f"{count} leaves"


def _cells(change: LeafChange) -> tuple[str, ...]:
    found = change.difference
    assert found.first is not None and change.a is not None
    only_bits = found.same_value == found.differing
    return (
        str(found.differing),
        str(found.elements),
        "bits only" if only_bits else _amount(found.max_abs),
        _amount(found.max_rel),
        str(list(found.first.index)),
        short_text(found.first.a, change.a.dtype),
        short_text(found.first.b, change.a.dtype),
    )


def _amount(amount: int | float | None) -> str:
    if amount is None:
        return NOTHING
    return str(amount) if isinstance(amount, int) else f"{amount:.3g}"


def _value_text(value: Any) -> str:
    return NOTHING if value is tree.ABSENT else tree.text(value)
