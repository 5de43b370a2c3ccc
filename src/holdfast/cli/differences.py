"""What two checkpoints differ in: leaves first by what they are, then by their elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.cli import tree
from holdfast.cli.checkpoints import Chosen
from holdfast.cli.compare import Difference, compare, joined
from holdfast.cli.portions import Read, batches, in_stored_order, read
from holdfast.geometry.layout import LeafSpec
from holdfast.load.plan import Want
from holdfast.load.read import read_values

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LeafChange:
    """A leaf that differs; ``a`` or ``b`` is None when that checkpoint has no such leaf."""

    name: str
    kind: Literal["only_a", "only_b", "dtype", "shape", "elements"]
    a: LeafSpec | None
    b: LeafSpec | None
    difference: Difference = field(default_factory=Difference)

    @property
    def text(self) -> str:
        """What is different about it."""
        if self.kind == "elements":
            return "elements"
        if self.a is None or self.b is None:
            return "only in b" if self.a is None else "only in a"
        if self.kind == "dtype":
            return f"dtype {self.a.dtype} -> {self.b.dtype}"
        return f"shape {list(self.a.shape)} -> {list(self.b.shape)}"

    def record(self) -> dict[str, Any]:
        """The same for machines."""
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
                "index": list(found.first.index), "a": found.first.a, "b": found.first.b,
            },
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A place among the plain values where they differ, and the ranks it does so on."""

    path: str
    a: Any
    b: Any
    ranks: tuple[int, ...]

    @property
    def ranks_text(self) -> str:
        """``0, 1, 2``; of many, the first and the last."""
        if len(self.ranks) <= 4:
            return ", ".join(map(str, self.ranks))
        return f"{len(self.ranks)} ranks, {self.ranks[0]} to {self.ranks[-1]}"

    def record(self) -> dict[str, Any]:
        """The same for machines; a side without the value has no key."""
        sides = {"a": self.a, "b": self.b}
        there = {side: value for side, value in sides.items() if value is not tree.ABSENT}
        return {"path": self.path, **there, "ranks": list(self.ranks)}


def leaf_changes(
    a: Chosen,
    b: Chosen,
    names: Sequence[str],
    *,
    progress: Progress = lambda done, total: None,
    read: Read = read,
) -> tuple[list[LeafChange], int]:
    """The leaves of ``names`` that differ, and how many bytes of each side were compared.

    Raises what reading raises: FormatError, ChecksumMismatch, StorageError.
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


def _leaf(chosen: Chosen, name: str) -> LeafSpec | None:
    number = chosen.leaves.get(name)
    return None if number is None else chosen.checkpoint.layout.leaves[number]


def _described(name: str, a: LeafSpec | None, b: LeafSpec | None) -> LeafChange | None:
    """What differs before any element is looked at."""
    if a is None or b is None:
        return LeafChange(name, "only_b" if a is None else "only_a", a, b)
    if a.dtype != b.dtype:
        return LeafChange(name, "dtype", a, b)
    return LeafChange(name, "shape", a, b) if a.shape != b.shape else None


def _compare_pairs(
    a: Chosen,
    b: Chosen,
    pairs: dict[int, dict[int, list[str]]],
    read: Read,
    progress: Callable[[int], None],
) -> tuple[dict[tuple[int, int], Difference], int]:
    """Read both sides in the order in which ``a`` is stored, and compare as they come."""
    layout, other_leaves = a.checkpoint.layout, b.checkpoint.layout.leaves
    found: dict[tuple[int, int], Difference] = {}
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
                before = found.get((number, other), Difference())
                found[number, other] = joined([before, difference])
                done += there.nbytes
        progress(done)
    return found, done


def value_changes(
    a: Chosen, b: Chosen, *, progress: Progress = lambda done, total: None
) -> tuple[list[ValueChange], int]:
    """The places where plain values differ, and how many were compared.

    Each rank's values where as many ranks saved both; else those of rank 0, as a restore on
    another number of ranks takes them.
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


def rank_values(chosen: Chosen, rank: int) -> dict[str, Any]:
    """The plain values of one rank as they are stored: those all share, and its own."""
    document = read_values(chosen.checkpoint, rank)
    return {**document.get("shared", {}), **document.get("own", {})}
