"""Computes which boxes ranks would hold under a parallelism given by name, such as ``fsdp=4,tp=2``.

A layout says how leaves were cut, not why. The assumptions behind an answer are written out in
words for the user to judge: nothing here is a promise about a program's behaviour.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from msgspec import Struct

from holdfast.errors import UsageError
from holdfast.geometry.box import Box, flat
from holdfast.geometry.layout import Layout
from holdfast.geometry.leaves import LeafSpec
from holdfast.geometry.mesh import (
    MAX_RANKS,
    REPLICATE,
    Instance,
    Mesh,
    Placement,
    local_boxes,
)

#: The meaning of each name. HSDP is two of them: ``dp=2,fsdp=4``.
REPEATS, SHARDS, TENSOR, STAGES, EXPERTS = "repeats", "shards", "tensor", "stages", "experts"
KINDS = {
    "dp": REPEATS,
    "replicate": REPEATS,
    "fsdp": SHARDS,
    "shard": SHARDS,
    "tp": TENSOR,
    "pp": STAGES,
    "ep": EXPERTS,
}
_PART = re.compile(r"\s*([a-z]+)\s*=\s*([0-9]{1,7})\s*")


class NamedParallelism(Struct, frozen=True):
    """Mesh dimensions by name, in the order of ranks: the last one runs fastest."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Returns the coordinates of a rank, by dimension."""
        found = []
        for size in reversed(self.sizes):
            rank, at = divmod(rank, size)
            found.append(at)
        return tuple(reversed(found))


def asked(text: str) -> NamedParallelism:
    """Parses ``dp=4,tp=2``; raises UsageError for text that names no mesh."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = _PART.fullmatch(part)
        if found is None or found[1] not in KINDS or found[1] in sizes or int(found[2]) < 1:
            raise UsageError(
                f"{text!r:.100} names no parallelism at {part.strip()!r:.50}: give each of "
                f"{', '.join(KINDS)} at most once, as in dp=4,tp=2, the last one running fastest"
            )
        sizes[found[1]] = int(found[2])
    if math.prod(sizes.values()) > MAX_RANKS:
        raise UsageError(f"{text!r:.100} makes more than {MAX_RANKS} ranks")
    return NamedParallelism(tuple(sizes), tuple(sizes.values()))


class _Laid(Struct, frozen=True):
    """The placement of one leaf: ``stages`` and ``experts`` are the coordinates that have it; None:
    all.
    """

    leaf: int
    placements: tuple[Placement, ...]
    stages: frozenset[int] | None = None
    experts: frozenset[int] | None = None


class NamedLayout:
    """The leaves of ``layout`` under the named parallelism. Raises UsageError where no honest
    answer is possible.

    ``assumptions``: those the answer rests on, in words.
    """

    def __init__(self, layout: Layout, wish: NamedParallelism) -> None:
        self.layout, self.wish = layout, wish
        self.assumptions: list[str] = []
        # Ranks that only repeat others are left out of all arithmetic: there may be thousands.
        self._kept = [at for at, name in enumerate(wish.names) if KINDS[name] != REPEATS]
        shape = tuple(wish.sizes[at] for at in self._kept) or (1,)
        self._mesh = Mesh(shape, tuple(range(math.prod(shape))))
        cuts = self._cuts() if "tp" in wish.names else {}
        stages = self._stages() if "pp" in wish.names else {}
        experts = self._experts() if "ep" in wish.names else {}
        stacked = {number for number, part in experts.items() if part is None}
        self._laid = [
            _Laid(
                number,
                self._placements(leaf, cuts.get(number), number in stacked),
                stages.get(number),
                experts.get(number),
            )
            for number, leaf in enumerate(layout.leaves)
        ]
        for name, text in (
            ("dp", "the ranks of dp hold the same"),
            ("replicate", "the ranks of replicate hold the same"),
            ("fsdp", "fsdp cuts parameters and their optimizer state in dimension 0"),
            ("shard", "shard cuts parameters and their optimizer state in dimension 0"),
        ):
            if name in wish.names:
                self.assumptions.append(text)

    def boxes(self, rank: int) -> Iterator[tuple[LeafSpec, Box]]:
        """Yields (leaf, box) of everything that a rank would hold."""
        coordinate = self.wish.coordinate(rank)
        number = self._number(coordinate)
        for one in self._laid:
            if self._is_at(one, coordinate):
                leaf = self.layout.leaves[one.leaf]
                for box, _ in local_boxes(leaf.shape, self._mesh, one.placements, number):
                    yield leaf, box

    def size_bytes(self, rank: int) -> int:
        """Returns the bytes that a rank would hold."""
        coordinate = self.wish.coordinate(rank)
        number, total = self._number(coordinate), 0
        for (shape, itemsize, one), count in self._classes.items():
            if self._is_at(one, coordinate):
                boxes = local_boxes(shape, self._mesh, one.placements, number)
                total += sum(box.volume for box, _ in boxes) * itemsize * count
        return total

    def different(self) -> Iterator[tuple[int, int]]:
        """Yields (rank, number of ranks that hold the same) for the lowest of each set of such
        ranks.
        """
        alike = self.wish.world // len(self._mesh.ranks)
        for number in self._mesh.ranks:
            coordinate = [0] * len(self.wish.sizes)
            for at in reversed(self._kept):
                number, coordinate[at] = divmod(number, self.wish.sizes[at])
            yield flat(coordinate, self.wish.sizes), alike

    def _number(self, coordinate: Sequence[int]) -> int:
        """Returns a rank's number among those that do not only repeat others."""
        return flat([coordinate[at] for at in self._kept], self._mesh.shape[: len(self._kept)])

    @cached_property
    def _classes(self) -> Counter[tuple[tuple[int, ...], int, _Laid]]:
        """Counts the leaves that are alike."""
        return Counter(
            (leaf.shape, leaf.itemsize, _Laid(-1, one.placements, one.stages, one.experts))
            for leaf, one in zip(self.layout.leaves, self._laid, strict=True)
        )

    def _is_at(self, one: _Laid, coordinate: Sequence[int]) -> bool:
        return all(
            held is None or at in held
            for name, at in zip(self.wish.names, coordinate, strict=True)
            for held in (one.stages if name == "pp" else one.experts if name == "ep" else None,)
        )

    def _size(self, name: str) -> int:
        return self.wish.sizes[self.wish.names.index(name)]

    # ── one leaf on the mesh ─────────────────────────────────────────────────────────────

    def _placements(
        self, leaf: LeafSpec, cut: int | None, is_stacked: bool
    ) -> tuple[Placement, ...]:
        """Returns torch's own placements: FSDP cuts after the others, and records that by a split
        factor.
        """
        found: list[Placement] = []
        inner = 1
        for name, size in zip(reversed(self.wish.names), reversed(self.wish.sizes), strict=True):
            kind, placement = KINDS[name], REPLICATE
            if kind == TENSOR and cut is not None:
                placement = Placement(cut)
            elif kind == EXPERTS and is_stacked:
                placement = Placement(0)
            elif kind == SHARDS and leaf.shape and leaf.spread == "split":
                placement = Placement(0, inner)
            if placement.dim == 0:
                inner *= size
            if kind != REPEATS:
                found.append(placement)
        return tuple(reversed(found)) or (REPLICATE,)

    # ── what the stored layout and the names tell ────────────────────────────────────────

    def _cuts(self) -> dict[int, int]:
        """Returns the dimension in which tensor parallelism cuts each leaf, of those that it
        cuts.
        """
        firsts = [leaf.instances[0] for leaf in self.layout.leaves]
        are_tensor = {
            (one.mesh, at)
            for one in firsts
            if isinstance(one, Instance)
            for at, placement in enumerate(one.placements)
            if placement.dim > 0
        }
        found: dict[int, int] = {}
        for number, one in enumerate(firsts):
            if isinstance(one, Instance):
                for at, placement in enumerate(one.placements):
                    if placement.dim != -1 and (one.mesh, at) in are_tensor:
                        found[number] = placement.dim
        if found:
            self.assumptions.append(
                f"tp cuts {len(found)} leaves in the dimensions that the checkpoint was cut in by "
                "the mesh dimensions that cut more than dimension 0, and repeats the others"
            )
        else:
            self.assumptions.append(
                "the checkpoint was cut in dimension 0 only, as by FSDP: how tp would cut is not "
                "known, and every rank of tp is taken to hold whole leaves (the most it can be)"
            )
        return found

    def _stages(self) -> dict[int, frozenset[int]]:
        """Returns the stages that hold each leaf."""
        count = self._size("pp")
        numbered = [_layer(leaf.name) for leaf in self.layout.leaves]
        sizes: Counter[str] = Counter()
        for leaf, found in zip(self.layout.leaves, numbered, strict=True):
            if found is not None:
                sizes[found[0]] += leaf.size_bytes
        word = max(sizes, key=lambda each: (sizes[each], each), default="")
        layers = sorted({found[1] for found in numbered if found is not None and found[0] == word})
        if len(layers) < count:
            raise UsageError(
                f"pp={count}: the names of the leaves tell of {len(layers)} numbered layers"
                f"{f' ({word}.0 and so on)' if layers else ''}, fewer than stages: give a smaller "
                "pp, or ask with holdfast.plan_restore and a table for each rank"
            )
        self.assumptions.append(
            f"pp divides the {len(layers)} layers ({word}.{layers[0]} to {word}.{layers[-1]}) over "
            "the stages in order and evenly; what is in none of them is counted on the first stage "
            "and on the last"
        )
        stage_of = {layer: at * count // len(layers) for at, layer in enumerate(layers)}
        ends = frozenset((0, count - 1))
        return {
            number: ends if found is None or found[0] != word else frozenset({stage_of[found[1]]})
            for number, found in enumerate(numbered)
        }

    def _experts(self) -> dict[int, frozenset[int] | None]:
        """Returns the coordinates that hold the leaves of each expert; None: cut in dimension 0."""
        count = self._size("ep")
        found = {n: _expert(leaf.name) for n, leaf in enumerate(self.layout.leaves)}
        numbers = sorted({at for at in found.values() if at is not None and at >= 0})
        place = {number: at * count // len(numbers) for at, number in enumerate(numbers)}
        stacked = [
            n for n, at in found.items() if at == -1 and len(self.layout.leaves[n].shape) > 1
        ]
        most = max([len(numbers), *(self.layout.leaves[n].shape[0] for n in stacked)])
        if most < count:
            raise UsageError(
                f"ep={count}: the names of the leaves tell of {most} experts, fewer than that: "
                "give a smaller ep, or ask with holdfast.plan_restore and a table for each rank"
            )
        self.assumptions.append(
            f"ep divides {most} experts, as the names of leaves tell them, in order and evenly; "
            "what is no expert's is repeated"
        )
        named = {n: frozenset({place[at]}) for n, at in found.items() if at is not None and at >= 0}
        return {**named, **dict.fromkeys(stacked)}


def _layer(name: str) -> tuple[str, int] | None:
    """Returns the word before the first number in a name, and the number."""
    parts = name.split(".")
    for word, number in pairwise(parts):
        if number.isdecimal():
            return word, int(number)
    return None


def _expert(name: str) -> int | None:
    """Returns the number of a leaf's expert; -1 for one of several stacked; None for none."""
    parts = name.lower().split(".")
    for at, word in enumerate(parts):
        if "expert" in word and "shared" not in word:
            after = parts[at + 1] if at + 1 < len(parts) else ""
            return int(after) if after.isdecimal() else -1
    return None
