"""Runs ``holdfast diff``: compares two checkpoints, however each was spread over ranks.

Leaves are compared bit for bit, in portions: memory does not grow with the checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.markup import escape

from holdfast.cli import value_tree as tree
from holdfast.cli.checkpoints import STEP_HELP, ChosenCheckpoint, hold_checkpoint, open_readable
from holdfast.cli.command import Commands, add_command, print_json
from holdfast.cli.leaf_reader import (
    CHUNK_ELEMENTS,
    Read,
    batches,
    bits,
    element,
    has_numbers,
    in_stored_order,
    numbers,
    read,
    short_text,
)
from holdfast.cli.output import SlowProgress, plain_table, stdout
from holdfast.errors import NotFound, UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.layout import LeafSpec
from holdfast.observe.text import NOTHING, count_text, size_text
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading.read import Array, read_values

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
    opened = open_readable(args.root)
    if args.other is None:
        return hold_checkpoint(opened, args.step), hold_checkpoint(opened, args.other_step)
    other_step = args.step if args.other_step is None else args.other_step
    other = open_readable(args.other)
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


# Compares two boxes of one leaf element by element: bit for bit, and by how much they differ.
#
# The bits count. Elements whose bits differ although their values are the same, as 0.0 and -0.0 or
# two forms of NaN, are counted among the others and once more by themselves.


@dataclass(frozen=True, slots=True)
class First:
    """The first element, in row-major order of the leaf, that differs."""

    index: tuple[int, ...]
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """The differences in some boxes of a leaf.

    ``max_abs`` and ``max_rel`` are the largest of |a-b| and |a-b|/max(|a|,|b|) where both are
    numbers, None where no such elements differ; ``nan`` counts those where one of them is not.
    """

    elements: int = 0
    differing: int = 0
    same_value: int = 0
    nan: int = 0
    max_abs: int | float | None = None
    max_rel: float | None = None
    first: First | None = None


def compare(a: Array, b: Array, dtype: str, box: Box) -> CheckpointDifference:
    """Compares the carriers of one box; ``box`` is its place in the leaf."""
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    starts = range(0, flat_a.size, CHUNK_ELEMENTS)
    found = [_compare_chunk(flat_a, flat_b, dtype, box, start) for start in starts]
    return joined(found)


def joined(parts: Iterable[CheckpointDifference]) -> CheckpointDifference:
    """Merges the differences of ``parts``."""
    found = list(parts)
    firsts = [part.first for part in found if part.first is not None]
    return CheckpointDifference(
        elements=sum(part.elements for part in found),
        differing=sum(part.differing for part in found),
        same_value=sum(part.same_value for part in found),
        nan=sum(part.nan for part in found),
        max_abs=max((x.max_abs for x in found if x.max_abs is not None), default=None),
        max_rel=max((x.max_rel for x in found if x.max_rel is not None), default=None),
        first=min(firsts, key=lambda first: first.index, default=None),
    )


def _compare_chunk(a: Array, b: Array, dtype: str, box: Box, start: int) -> CheckpointDifference:
    a, b = a[start : start + CHUNK_ELEMENTS], b[start : start + CHUNK_ELEMENTS]
    where = np.flatnonzero((bits(a) != bits(b)).any(axis=1))
    if not where.size:
        return CheckpointDifference(elements=a.size)
    at = int(where[0])
    first = First(_index(start + at, box), element(a[at], dtype), element(b[at], dtype))
    if not has_numbers(dtype):
        return CheckpointDifference(a.size, where.size, first=first)
    same_value, nan, max_abs, max_rel = _amounts(numbers(a[where], dtype), numbers(b[where], dtype))
    return CheckpointDifference(a.size, where.size, same_value, nan, max_abs, max_rel, first)


def _index(flat: int, box: Box) -> tuple[int, ...]:
    inside = np.unravel_index(flat, box.shape) if box.ndim else ()
    return tuple(int(i) + start for i, start in zip(inside, box.start, strict=True))


def _amounts(a: Array, b: Array) -> tuple[int, int, int | float | None, float | None]:
    """Returns (same value, one is NaN, largest absolute, largest relative difference) of some
    elements.
    """
    if a.dtype.kind in "iu":
        return _whole_amounts(a, b)
    wide = "c16" if a.dtype.kind == "c" else "f8"
    a, b = a.astype(wide), b.astype(wide)
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    same = (a == b) | (nan_a & nan_b)
    fit = ~(nan_a | nan_b)
    if not fit.any():
        return int(same.sum()), int((nan_a != nan_b).sum()), None, None
    a, b = a[fit], b[fit]
    with np.errstate(all="ignore"):
        apart = np.abs(a - b)
        relative = apart / np.maximum(np.abs(a), np.abs(b))
    # An infinite number is infinitely far from any other; 0.0 is not far from -0.0.
    relative = np.where(np.isinf(apart), np.inf, np.where(apart == 0, 0.0, relative))
    return (
        int(same.sum()),
        int((nan_a != nan_b).sum()),
        float(apart.max()),
        float(relative.max()),
    )


def _whole_amounts(a: Array, b: Array) -> tuple[int, int, int, float]:
    """Returns the same for whole numbers, exact where float64 would not be."""
    # Modulo 2**64 the difference of the larger and the smaller is right for either sign.
    ua, ub = (
        a.astype("i8" if a.dtype.kind == "i" else "u8").view("u8"),
        b.astype("i8" if b.dtype.kind == "i" else "u8").view("u8"),
    )
    apart = np.where(a > b, ua - ub, ub - ua)
    larger = np.maximum(np.abs(a.astype("f8")), np.abs(b.astype("f8")))
    return 0, 0, int(apart.max()), float((apart / larger).max())


Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LeafChange:
    """A leaf that differs; ``a`` or ``b`` is None when that checkpoint has no such leaf."""

    name: str
    kind: Literal["only_a", "only_b", "dtype", "shape", "elements"]
    a: LeafSpec | None
    b: LeafSpec | None
    difference: CheckpointDifference = field(default_factory=CheckpointDifference)

    @property
    def text(self) -> str:
        """Describes the difference."""
        if self.kind == "elements":
            return "elements"
        if self.a is None or self.b is None:
            return "only in b" if self.a is None else "only in a"
        if self.kind == "dtype":
            return f"dtype {self.a.dtype} -> {self.b.dtype}"
        return f"shape {list(self.a.shape)} -> {list(self.b.shape)}"

    def record(self) -> dict[str, Any]:
        """Returns the same for machines."""
        found = self.difference
        record: dict[str, Any] = {
            "name": self.name,
            "change": self.kind,
            "dtype": [leaf and leaf.dtype for leaf in (self.a, self.b)],
            "shape": [leaf and list(leaf.shape) for leaf in (self.a, self.b)],
        }
        if found.first is None:
            return record
        return record | {
            "elements": found.elements,
            "differing": found.differing,
            "same_value": found.same_value,
            "nan": found.nan,
            "max_abs": found.max_abs,
            "max_rel": found.max_rel,
            "first": {
                "index": list(found.first.index),
                "a": found.first.a,
                "b": found.first.b,
            },
        }


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A place among the plain values where they differ, and the ranks where it does."""

    path: str
    a: Any
    b: Any
    ranks: tuple[int, ...]

    @property
    def ranks_text(self) -> str:
        """Formats the ranks as ``0, 1, 2``; of many, the first and the last."""
        if len(self.ranks) <= 4:
            return ", ".join(map(str, self.ranks))
        return f"{len(self.ranks)} ranks, {self.ranks[0]} to {self.ranks[-1]}"

    def record(self) -> dict[str, Any]:
        """Returns the same for machines; a side without the value has no key."""
        sides = {"a": self.a, "b": self.b}
        there = {side: value for side, value in sides.items() if value is not tree.ABSENT}
        return {"path": self.path, **there, "ranks": list(self.ranks)}


def leaf_changes(
    a: ChosenCheckpoint,
    b: ChosenCheckpoint,
    names: Sequence[str],
    *,
    progress: Progress = lambda done, total: None,
    read: Read = read,
) -> tuple[list[LeafChange], int]:
    """Returns the leaves of ``names`` that differ, and how many bytes of each side were compared.

    Raises the errors of reading: FormatError, ChecksumMismatch, StorageError.
    """
    changed: dict[str, LeafChange] = {}
    pairs: dict[int, dict[int, list[str]]] = {}  # number in a, number in b, names of both
    for name in names:
        one, other = _leaf(a, name), _leaf(b, name)
        change = _described(name, one, other)
        if change is not None:
            changed[name] = change
        else:
            pairs.setdefault(a.leaves[name], {}).setdefault(b.leaves[name], []).append(name)
    total = sum(
        a.checkpoint.layout.leaves[one].size_bytes * len(others) for one, others in pairs.items()
    )
    found, done = _compare_pairs(a, b, pairs, read, lambda size: progress(size, total))
    for (number, other_number), difference in found.items():
        if difference.differing:
            for name in pairs[number][other_number]:
                changed[name] = LeafChange(
                    name, "elements", _leaf(a, name), _leaf(b, name), difference
                )
    return [changed[name] for name in sorted(changed)], done


def _leaf(chosen: ChosenCheckpoint, name: str) -> LeafSpec | None:
    number = chosen.leaves.get(name)
    return None if number is None else chosen.checkpoint.layout.leaves[number]


def _described(name: str, a: LeafSpec | None, b: LeafSpec | None) -> LeafChange | None:
    """Returns the difference that shows without reading elements."""
    if a is None or b is None:
        return LeafChange(name, "only_b" if a is None else "only_a", a, b)
    if a.dtype != b.dtype:
        return LeafChange(name, "dtype", a, b)
    return LeafChange(name, "shape", a, b) if a.shape != b.shape else None


def _compare_pairs(
    a: ChosenCheckpoint,
    b: ChosenCheckpoint,
    pairs: dict[int, dict[int, list[str]]],
    read: Read,
    progress: Callable[[int], None],
) -> tuple[dict[tuple[int, int], CheckpointDifference], int]:
    """Reads both sides in the order in which ``a`` is stored, and compares as they arrive."""
    layout, other_leaves = a.checkpoint.layout, b.checkpoint.layout.leaves
    found: dict[tuple[int, int], CheckpointDifference] = {}
    done = 0
    for wants in batches(layout, in_stored_order(layout, sorted(pairs))):
        here = read(a.checkpoint, wants)
        targets = [(i, other) for i, want in enumerate(wants) for other in pairs[want.key]]
        asked = [
            Want(other_leaves[other].name, wants[i].box, at)
            for at, (i, other) in enumerate(targets)
        ]
        for some in batches(b.checkpoint.layout, asked):
            for ask, there in zip(some, read(b.checkpoint, some), strict=True):
                i, other = targets[ask.key]
                number, dtype = wants[i].key, layout.leaves[wants[i].key].dtype
                difference = compare(here[i], there, dtype, ask.box)
                before = found.get((number, other), CheckpointDifference())
                found[number, other] = joined([before, difference])
                done += there.nbytes
        progress(done)
    return found, done


def value_changes(
    a: ChosenCheckpoint, b: ChosenCheckpoint, *, progress: Progress = lambda done, total: None
) -> tuple[list[ValueChange], int]:
    """Returns the places where plain values differ, and how many were compared.

    Each rank's values where as many ranks saved both; otherwise those of rank 0, which a restore on
    another number of ranks uses.
    """
    world = a.manifest.world if a.manifest.world == b.manifest.world else 1
    found: dict[tuple[str, str], ValueChange] = {}
    compared = 0
    for rank in range(world):
        one, other = rank_values(a, rank), rank_values(b, rank)
        if rank == 0:
            compared = max(tree.count(one), tree.count(other))
        for change in tree.changes(one, other):
            key = (change.path, f"{change.a!r} {change.b!r}")
            ranks = found[key].ranks if key in found else ()
            found[key] = ValueChange(change.path, change.a, change.b, (*ranks, rank))
        progress(rank + 1, world)
    return list(found.values()), compared


def rank_values(chosen: ChosenCheckpoint, rank: int) -> dict[str, Any]:
    """Returns the plain values of one rank as they are stored: the shared ones, and its own."""
    document = read_values(chosen.checkpoint, rank)
    return {**document.get("shared", {}), **document.get("own", {})}
