"""A layout says which rank holds which box of which leaf, and which rank stores it.

Ranks agree on it once. Then every rank, and every later reader, computes from its bytes what any
rank held and stored. Boxes are written down only where no mesh determines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, starmap
from typing import TYPE_CHECKING

import msgspec
import xxhash

from holdfast.errors import FormatError, StateMismatch, UsageError
from holdfast.geometry.agreement import agree
from holdfast.geometry.box import Box
from holdfast.geometry.codec import (
    deflate,
    inflate,
    layout_from_json,
    layout_to_json,
    table_from_json,
    table_hash,
    table_to_json,
)
from holdfast.geometry.leaves import BoxList, HolderBoxes, LeafEntry, LeafSpec, with_memory
from holdfast.geometry.mesh import (
    MAX_RANKS,
    REPLICATE,
    Instance,
    Mesh,
    Placement,
    local_boxes,
    local_ranges,
    local_shape,
)

if TYPE_CHECKING:
    from holdfast.geometry.ownership import Owned, WriteOwners
    from holdfast.geometry.replicas import Replicas

__all__ = [
    "REPLICATE",
    "BoxList",
    "HolderBoxes",
    "Instance",
    "Layout",
    "LeafEntry",
    "LeafSpec",
    "Mesh",
    "Piece",
    "Placement",
    "deflate",
    "inflate",
    "local_boxes",
    "local_ranges",
    "local_shape",
    "merge",
    "table_from_json",
    "table_hash",
    "table_to_json",
]


class Piece(msgspec.Struct, frozen=True):
    """A box that is stored as one run of bytes; ``leaf`` counts the layout's leaves."""

    leaf: int
    box: Box


@dataclass(frozen=True)
class Layout:
    """All leaves of a run of ``world`` ranks, sorted by name.

    Raises UsageError if names are not sorted and unique, or a leaf's instances share a rank or name
    one that is not in the world.
    """

    world: int
    leaves: tuple[LeafSpec, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MAX_RANKS:
            raise UsageError(f"a layout is for 1 to {MAX_RANKS} ranks, not {self.world}")
        for one, other in pairwise(self.leaves):
            if one.name >= other.name:
                raise UsageError(
                    f"leaves are sorted by name, each there once; {one.name!r} is before "
                    f"{other.name!r}"
                )
        for leaf in {id(leaf.instances): leaf for leaf in self.leaves}.values():
            self._check_ranks(leaf)

    def _check_ranks(self, leaf: LeafSpec) -> None:
        ranks: set[int] = set()
        for instance in leaf.instances:
            if not ranks.isdisjoint(instance.ranks):
                raise UsageError(f"a rank holds {leaf.name} in two instances")
            ranks.update(instance.ranks)
        if max(ranks, default=0) >= self.world:
            raise UsageError(f"{leaf.name} is on rank {max(ranks)} in a world of {self.world}")

    @cached_property
    def hash(self) -> str:
        """The id of the layout: 32 hexadecimal digits from a hash of its bytes (XXH3, 128 bits)."""
        return xxhash.xxh3_128_hexdigest(self.to_json())

    def to_json(self) -> bytes:
        """Returns the layout's bytes, the same on every rank and in every version of Python."""
        return self._json

    @classmethod
    def from_json(cls, data: bytes | memoryview) -> Layout:
        """Reads a layout from its bytes; raises FormatError for any that are not a layout."""
        world, leaves = layout_from_json(data)
        try:
            return cls(world, leaves)
        except UsageError as error:
            raise FormatError(f"this layout is impossible: {error}") from None

    def require_declared(self, rank: int, entries: Sequence[LeafEntry]) -> None:
        """Raises StateMismatch unless ``rank`` holds by this layout exactly what it declared.

        Where this is so on every rank, the layout is that of their tables, whoever says so.
        """
        places = {leaf.name: (leaf, self._place(leaf.instances, rank)) for leaf in self.leaves}
        held = {name: found for name, found in places.items() if found[1]}
        declared = {entry.name: entry for entry in entries if entry.instance != HolderBoxes(())}
        names = held.keys() ^ declared.keys()
        alike: dict[tuple[int, int], bool] = {}  # a comparison of meshes for each leaf takes long
        for name in held.keys() & declared.keys():
            (leaf, there), entry = held[name], declared[name]
            key = id(there), id(entry.instance)
            if key not in alike:
                alike[key] = _is_alike(there, entry.instance)
            specs = [(one.dtype, one.shape, one.spread) for one in (leaf, entry)]
            if not alike[key] or specs[0] != specs[1]:
                names.add(name)
        if names:
            raise StateMismatch(
                f"the layout {self.hash} is not that of this state: rank {rank} declared "
                f"{min(names)} otherwise",
                leaves=tuple(sorted(names)),
            )

    def held(self, leaf_index: int, rank: int) -> tuple[tuple[Box, Box], ...]:
        """Returns the boxes of a leaf that ``rank`` holds: (box in the leaf, the same box in its
        local tensor).

        Where the boxes are listed, each has memory of its own, as in ``LeafEntry.boxes``.
        """
        leaf = self.leaves[leaf_index]
        there = self._place(leaf.instances, rank)
        if isinstance(there, Instance):
            return local_boxes(leaf.shape, there.mesh, there.placements, rank)
        return there

    def _place(
        self, instances: tuple[Instance | BoxList, ...], rank: int
    ) -> Instance | tuple[tuple[Box, Box], ...]:
        """Returns the instance a rank is in, or its listed boxes; computed once for leaves
        alike.
        """
        key = (id(instances), rank)
        if key not in self._found:
            places = (_place_in(one, rank) for one in instances)
            self._found[key] = next((place for place in places if place), ())
        return self._found[key]

    def owners(self, leaf_index: int) -> Owned:
        """Returns which rank stores which part of a leaf: (rank, box), every element in exactly one
        box.
        """
        return self._owners.of_leaf(leaf_index)

    def owners_meeting(self, leaf_index: int, box: Box) -> Owned:
        """Returns the same for boxes that have an element of ``box``; others are not computed."""
        return self._owners.meeting(leaf_index, box)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Returns the pieces that ``rank`` stores, in the order of the leaves and, in a leaf, of
        the boxes.
        """
        if rank not in self._pieces:
            self._pieces[rank] = tuple(starmap(Piece, self._owners.of_rank(rank)))
        return self._pieces[rank]

    @cached_property
    def replicas(self) -> Replicas:
        """Returns the boxes that several ranks hold."""
        from holdfast.geometry.replicas import Replicas

        return Replicas(self._owners.forms)

    @cached_property
    def _json(self) -> bytes:
        return layout_to_json(self.world, self.leaves)

    @cached_property
    def _owners(self) -> WriteOwners:
        # Imported here: a trainer waits for its keeper to start, and the keeper needs no arithmetic
        # yet.
        from holdfast.geometry.ownership import WriteOwners

        return WriteOwners(self.leaves)

    @cached_property
    def _found(self) -> dict[tuple[int, int], Instance | tuple[tuple[Box, Box], ...]]:
        return {}

    @cached_property
    def _pieces(self) -> dict[int, tuple[Piece, ...]]:
        return {}


def _place_in(one: Instance | BoxList, rank: int) -> Instance | tuple[tuple[Box, Box], ...] | None:
    if isinstance(one, BoxList):
        return with_memory(one.of_rank(rank))
    return None if one.mesh.coordinate(rank) is None else one


def _is_alike(
    there: Instance | tuple[tuple[Box, Box], ...], own: Instance | HolderBoxes | None
) -> bool:
    """True if a rank that declared ``own`` is where the merged leaf has it; see ``agree``."""
    if isinstance(own, HolderBoxes):
        return there == with_memory(own.boxes)
    if own is None or own.is_whole:
        return isinstance(there, Instance) and there.is_whole
    return there == own


def merge(tables: Sequence[Sequence[LeafEntry]], *, is_partial: bool = False) -> Layout:
    """Merges the tables of all ranks into a layout; rank 0's table comes first.

    Ranks with the same table should pass the same object: it is checked once for all.

    Raises StateMismatch with every leaf whose dtype, shape or spread differ between ranks, every
    rank that should have a leaf and has not, and every leaf whose listed boxes leave something out,
    unless ``is_partial``: then missing boxes are no error.
    """
    return Layout(len(tables), agree(tables, is_partial=is_partial))
