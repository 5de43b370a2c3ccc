"""The leaves that are written elsewhere: those of a checkpoint, chosen, mapped and converted.

Any box of any of them is read, verified, straight into the memory of who writes it. Where rules
compose a leaf of others, or a leaf is converted, its parts are read first and put together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from holdfast.errors import UsageError
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.layout import Layout
from holdfast.geometry.leaf_maps import NearLeaf, Patch, renamed
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import CARRIERS, Array, read_wants
from holdfast.rules.patterns import Pattern

#: The element types that can be converted into each other.
CONVERTED = ("F64", "F32", "F16", "BF16")
_NUMBERS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True, slots=True)
class ChosenLeaf:
    """A leaf as it is written. ``stored``: its type in the checkpoint; ``patches``: what it is
    made of there.
    """

    dtype: str
    shape: tuple[int, ...]
    stored: str
    patches: tuple[Patch, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its elements."""
        return Box.whole(self.shape).volume * ITEMSIZE[self.dtype]

    @property
    def same_as(self) -> str | None:
        """The stored leaf that it is, element by element; None where it is put together."""
        if self.dtype != self.stored or len(self.patches) != 1:
            return None
        (patch,) = self.patches
        is_turned = patch.dims != tuple(range(len(self.shape)))
        return None if is_turned or patch.leaf_shape != self.shape else patch.leaf


def leaves_of(layout: Layout) -> dict[str, ChosenLeaf]:
    """The leaves of a checkpoint as they are stored."""
    return {
        leaf.name: ChosenLeaf(
            leaf.dtype, leaf.shape, leaf.dtype, renamed(leaf.name, leaf.shape).patches
        )
        for leaf in layout.leaves
    }


def convert(
    leaves: Mapping[str, ChosenLeaf],
    casts: Sequence[tuple[Pattern, str]],
    kept: Collection[str] = (),
) -> dict[str, ChosenLeaf]:
    """The same leaves, those of a floating point type with that of the first pattern that matches.

    ``kept``: leaves that only a pattern with the last part of their name matches.

    Raises UsageError for a type that nothing is converted to.
    """
    for _, dtype in casts:
        if dtype not in CONVERTED:
            raise UsageError(f"nothing can be converted to {dtype!r}: {', '.join(CONVERTED)} are")
    found = dict(leaves)
    for name, leaf in leaves.items():
        last = name.rpartition(".")[2] if name in kept else ""
        wanted = [
            dtype
            for pattern, dtype in casts
            if pattern.match(name) is not None and pattern.text.endswith(last)
        ]
        if wanted and leaf.stored in CONVERTED:
            found[name] = replace(leaf, dtype=wanted[0])
    return found


class LeafReader:
    """Reads boxes of the chosen ``leaves`` of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, leaves: Mapping[str, ChosenLeaf]) -> None:
        self._checkpoint, self.leaves = checkpoint, dict(leaves)
        self._near: dict[str, NearLeaf] = {}

    @property
    def is_plain(self) -> bool:
        """True if every leaf is written as it is stored."""
        return all(leaf.same_as is not None for leaf in self.leaves.values())

    def fill(self, wants: Sequence[tuple[str, Box, memoryview]]) -> int:
        """Fill memory with boxes of leaves, row by row; returns the bytes that were read.

        ChecksumMismatch, FormatError or StorageError: then no byte of it may be used.
        """
        plain: list[Want] = []
        destinations: dict[int, Array] = {}
        together: list[tuple[ChosenLeaf, Array, memoryview, list[tuple[Patch, Array]]]] = []
        for name, box, into in wants:
            leaf = self.leaves[name]
            if box.is_empty:
                continue
            same = leaf.same_as
            if same is not None:
                array: Array = np.frombuffer(into, CARRIERS[ITEMSIZE[leaf.dtype]])
                self._want(same, box, array.reshape(box.shape), plain, destinations)
                continue
            whole: Array = np.zeros(box.shape, CARRIERS[ITEMSIZE[leaf.stored]])
            parts: list[tuple[Patch, Array]] = []
            for patch in self._near_of(name, leaf)(box):
                if (cut := patch.cut(box)) is not None and not cut.here.is_empty:
                    part: Array = np.empty(cut.box.shape, whole.dtype)
                    self._want(cut.leaf, cut.box, part, plain, destinations)
                    parts.append((replace(cut, here=cut.here.relative_to(box)), part))
            together.append((leaf, whole, into, parts))
        size_bytes = read_wants(self._checkpoint, plain, destinations)
        for leaf, whole, into, parts in together:
            for patch, part in parts:
                put(patch, part, whole)
            found = np.ascontiguousarray(converted(whole, leaf.stored, leaf.dtype))
            into[:] = found.reshape(-1).view("u1").data
        return size_bytes

    def number(self, name: str) -> float:
        """The number in a leaf of one element. UsageError for a leaf of another kind."""
        leaf = self.leaves[name]
        kind = _NUMBERS.get(leaf.dtype)
        if kind is None or Box.whole(leaf.shape).volume != 1:
            raise UsageError(f"{name} is {leaf.dtype} {list(leaf.shape)}, no number", leaf=name)
        into = memoryview(bytearray(ITEMSIZE[leaf.dtype]))
        self.fill([(name, Box.whole(leaf.shape), into)])
        return float(np.frombuffer(into, kind)[0])

    def _near_of(self, name: str, leaf: ChosenLeaf) -> NearLeaf:
        if name not in self._near:
            self._near[name] = NearLeaf(leaf.patches)
        return self._near[name]

    @staticmethod
    def _want(
        leaf: str, box: Box, array: Array, wants: list[Want], destinations: dict[int, Array]
    ) -> None:
        destinations[len(wants)] = array
        wants.append(Want(leaf, box, len(wants)))


def put(patch: Patch, part: Array, whole: Array) -> None:
    """Copy the elements of ``patch.box`` to where they are in the mapped leaf."""
    named = [dim for dim in patch.dims if dim >= 0]
    rest = [dim for dim in range(part.ndim) if dim not in named]
    turned = part.transpose(*named, *rest).reshape(patch.here.shape)
    if whole.ndim:
        whole[patch.here.slices()] = turned
    else:
        whole[...] = turned


_FLOATS = {"F64": "f8", "F32": "f4", "F16": "f2"}


def converted(raw: Array, stored: str, dtype: str) -> Array:
    """Carriers of ``stored`` as carriers of ``dtype``, each rounded to the nearest as torch does:
    half precision by way of single.
    """
    if stored == dtype:
        return raw
    flat: Array = np.ascontiguousarray(raw).reshape(-1)
    if stored == "BF16":
        numbers: Array = (flat.view("u2").astype("u4") << 16).view("f4")
    else:
        numbers = flat.view(_FLOATS[stored])
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in ("F16", "BF16"):
            numbers = numbers.astype("f4", copy=False)
        found: Any = _to_bfloat16(numbers) if dtype == "BF16" else numbers.astype(_FLOATS[dtype])
    return found.view(CARRIERS[ITEMSIZE[dtype]]).reshape(raw.shape)  # type: ignore[no-any-return]


def _to_bfloat16(numbers: Array) -> Array:
    bits = numbers.view("u4")
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype("u4")) >> 16
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), rounded).astype("u2")
