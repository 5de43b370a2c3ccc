"""Which rank holds which box of which leaf, and which rank stores it: agreed once, same for all.

A layout is meshes and placements; boxes follow by arithmetic. It is a document with a content
hash, so that "unchanged" is a comparison of 32 characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import xxhash

from holdfast.errors import FormatError, StateMismatch, UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.owners import Holding, assign
from holdfast.geometry.placements import (
    REPLICATE,
    Instance,
    Mesh,
    Placement,
    boxes_at,
    local_boxes,
)

MAX_WORLD = 1 << 20
MAX_NDIM = 64


@dataclass(frozen=True, slots=True)
class LeafEntry:
    """A leaf as one rank declares it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: str  # "split" over its holders, or whole by the "lowest" of them
    instance: Instance


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """A leaf as all ranks hold it: ``instances`` are disjoint sets of ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: str
    instances: tuple[Instance, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that one rank stores. ``leaf`` is an index into the layout's leaves."""

    leaf: int
    box: Box


class _Document(msgspec.Struct):
    world: int
    meshes: list[tuple[list[int], list[int]]]
    leaves: list[tuple[str, str, list[int], str, list[tuple[int, list[tuple[int, int]]]]]]


class Layout:
    """The leaves of a state on ``world`` ranks."""

    def __init__(self, world: int, leaves: Sequence[LeafSpec]) -> None:
        self.world = world
        self.leaves = tuple(sorted(leaves, key=lambda leaf: leaf.name))
        for one, other in zip(self.leaves, self.leaves[1:], strict=False):
            if one.name == other.name:
                raise UsageError(f"two leaves are both called {one.name!r}")

    def to_json(self) -> bytes:
        """The canonical form: equal layouts, equal bytes."""
        meshes: dict[Mesh, int] = {}
        leaves = [
            (leaf.name, leaf.dtype, list(leaf.shape), leaf.spread, [
                (meshes.setdefault(i.mesh, len(meshes)), [(p.dim, p.split_factor) for p in i.placements])
                for i in leaf.instances
            ])
            for leaf in self.leaves
        ]  # fmt: skip
        listed = [(list(mesh.shape), list(mesh.ranks)) for mesh in meshes]
        return msgspec.json.encode(_Document(self.world, listed, leaves))

    @cached_property
    def hash(self) -> str:
        """32 hexadecimal digits (xxh3-128 of the canonical form)."""
        return xxhash.xxh3_128_hexdigest(self.to_json())

    @classmethod
    def from_json(cls, data: bytes) -> Layout:
        """Read a layout; FormatError for anything that is none."""
        try:
            document = msgspec.json.decode(data, type=_Document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FormatError(f"this is not a layout: {error}") from None
        if not 0 < document.world <= MAX_WORLD:
            raise FormatError(f"a layout of {document.world} ranks")
        try:
            meshes = [Mesh(tuple(shape), tuple(ranks)) for shape, ranks in document.meshes]
            if any(not 0 <= rank < document.world for mesh in meshes for rank in mesh.ranks):
                raise ValueError("a rank outside the world")
            leaves = [
                LeafSpec(name, _dtype(dtype), _shape(shape), _spread(spread), tuple(
                    Instance(meshes[_index(number, meshes)], tuple(Placement(d, f) for d, f in cuts))
                    for number, cuts in instances
                ))
                for name, dtype, shape, spread, instances in document.leaves
            ]  # fmt: skip
            return cls(document.world, leaves)
        except (ValueError, UsageError) as error:
            raise FormatError(f"a layout that cannot be: {error}") from None

    def held(self, leaf: int, rank: int) -> tuple[tuple[Box, Box], ...]:
        """The boxes of a leaf that ``rank`` holds, each with its place in the local tensor."""
        spec = self.leaves[leaf]
        for instance in spec.instances:
            if rank in instance.mesh.ranks:
                return local_boxes(spec.shape, instance.mesh, instance.placements, rank)
        return ()

    def owners(self, leaf: int) -> tuple[tuple[int, Box], ...]:
        """(rank, box) of everything stored of a leaf: every element exactly once."""
        return self._owners[leaf]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What ``rank`` stores, by leaf."""
        return self._pieces.get(rank, ())

    @cached_property
    def _owners(self) -> tuple[tuple[tuple[int, Box], ...], ...]:
        return assign(
            [
                Holding(_holders(leaf), ITEMSIZE[leaf.dtype], leaf.spread == "split")
                for leaf in self.leaves
            ]
        )

    @cached_property
    def _pieces(self) -> dict[int, tuple[Piece, ...]]:
        found: dict[int, list[Piece]] = {}
        for number, owned in enumerate(self._owners):
            for rank, box in owned:
                found.setdefault(rank, []).append(Piece(number, box))
        return {rank: tuple(pieces) for rank, pieces in found.items()}


def _holders(leaf: LeafSpec) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """Each distinct box and the ranks that hold it. Instances cut otherwise are not stored from."""
    first = min(leaf.instances, key=lambda i: min(i.mesh.ranks))
    alike = [
        i
        for i in leaf.instances
        if (i.mesh.shape, i.placements) == (first.mesh.shape, first.placements)
    ]
    found: dict[Box, list[int]] = {}
    for number in range(len(first.mesh.ranks)):
        at = first.mesh.coordinate(first.mesh.ranks[number])
        for box, _ in boxes_at(leaf.shape, first.mesh.shape, first.placements, at or ()):
            found.setdefault(box, []).extend(i.mesh.ranks[number] for i in alike)
    return tuple((box, tuple(sorted(ranks))) for box, ranks in found.items())


def merge(tables: Sequence[Sequence[LeafEntry]]) -> Layout:
    """The layout of what every rank declares: ``tables[r]`` by rank r.

    StateMismatch lists every leaf on which ranks disagree.
    """
    declared: dict[str, dict[int, LeafEntry]] = {}
    for rank, table in enumerate(tables):
        for entry in table:
            declared.setdefault(entry.name, {})[rank] = entry
    problems: list[str] = []
    leaves = []
    for name, by_rank in declared.items():
        problems += _disagreements(name, by_rank)
        first = next(iter(by_rank.values()))
        instances = _instances(by_rank)
        problems += [
            f"{name}: ranks {absent} should hold a part of it, but do not declare it"
            for instance in instances
            if (absent := sorted(set(instance.mesh.ranks) - set(by_rank)))
        ]
        leaves.append(LeafSpec(name, first.dtype, first.shape, first.spread, instances))
    if problems:
        raise StateMismatch(
            "the ranks do not hold parts of the same state:\n  " + "\n  ".join(problems[:20]),
            problems=problems,
        )
    return Layout(len(tables), leaves)


def _disagreements(name: str, by_rank: dict[int, LeafEntry]) -> list[str]:
    found = []
    for what in ("dtype", "shape", "spread"):
        kinds: dict[object, list[int]] = {}
        for rank, entry in by_rank.items():
            kinds.setdefault(getattr(entry, what), []).append(rank)
        if len(kinds) > 1:
            told = ", ".join(f"{kind} on ranks {ranks}" for kind, ranks in kinds.items())
            found.append(f"{name}: its {what} differs: {told}")
    return found


def _instances(by_rank: dict[int, LeafEntry]) -> tuple[Instance, ...]:
    """The distinct instances; copies that each rank has for itself become one."""
    alone = sorted(r for r, e in by_rank.items() if e.instance.mesh.ranks == (r,))
    others = {e.instance for e in by_rank.values() if len(e.instance.mesh.ranks) > 1}
    found = sorted(others, key=lambda i: min(i.mesh.ranks))
    if alone:
        found.append(Instance(Mesh((len(alone),), tuple(alone)), (REPLICATE,)))
    return tuple(found)


def table_to_json(entries: Iterable[LeafEntry]) -> bytes:
    """One rank's leaves as a document, to be told to the others."""
    rows = [
        (e.name, e.dtype, e.shape, e.spread, e.instance.mesh.shape, e.instance.mesh.ranks,
         [(p.dim, p.split_factor) for p in e.instance.placements])
        for e in entries
    ]  # fmt: skip
    return msgspec.json.encode(rows)


_Row = tuple[
    str, str, tuple[int, ...], str, tuple[int, ...], tuple[int, ...], list[tuple[int, int]]
]


def table_from_json(data: bytes) -> tuple[LeafEntry, ...]:
    """Read what ``table_to_json`` wrote; FormatError for anything else."""
    try:
        rows = msgspec.json.decode(data, type=list[_Row])
        return tuple(
            LeafEntry(
                name, _dtype(dtype), _shape(list(shape)), _spread(spread),
                Instance(Mesh(mesh, ranks), tuple(Placement(d, f) for d, f in cuts)),
            )
            for name, dtype, shape, spread, mesh, ranks, cuts in rows
        )  # fmt: skip
    except (msgspec.DecodeError, ValueError) as error:
        raise FormatError(f"this is not a table of leaves: {error}") from None


def table_hash(table: bytes) -> str:
    """What a table is known by."""
    return xxhash.xxh3_128_hexdigest(table)


def _dtype(name: str) -> str:
    if name not in ITEMSIZE:
        raise ValueError(f"the dtype {name!r} is unknown")
    return name


def _shape(shape: list[int]) -> tuple[int, ...]:
    if len(shape) > MAX_NDIM or any(size < 0 for size in shape):
        raise ValueError(f"the shape {shape[:8]} is not possible")
    return tuple(shape)


def _spread(spread: str) -> str:
    if spread not in ("split", "lowest"):
        raise ValueError(f"the spread {spread!r} is unknown")
    return spread


def _index(number: int, among: Sequence[object]) -> int:
    if not 0 <= number < len(among):
        raise ValueError(f"there is no mesh {number}")
    return number
