"""Leaves seen through other leaves: which box of which is which, dimension for dimension.

A rule says what a tensor of the training is a part of, or made of. All that rules do comes down
to patches: boxes of one leaf that are boxes of others, with dimensions reordered, added or left
out, and never a sum or a copy. So a save and a restore need no code for any rule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from holdfast.errors import UsageError
from holdfast.geometry.box import Box, cover_fault

Shape = tuple[int, ...]
Spread = Literal["replicated", "unique", "averaged"]


@dataclass(frozen=True, slots=True)
class Patch:
    """The box ``here`` of the leaf looked at is ``box`` of ``leaf``.

    ``dims``: for each dimension of ``here``, the dimension of ``box`` that runs along it, or -1
    where it has extent 1 and ``box`` has no such dimension. What ``dims`` does not name has
    extent 1 in ``box``.
    """

    leaf: str
    leaf_shape: Shape
    box: Box
    here: Box
    dims: tuple[int, ...]

    def cut(self, part: Box) -> Patch | None:
        """What is in ``part`` of the leaf looked at; None when nothing is."""
        common = common_box(self.here, part)
        if common is None or common == self.here:
            return self if common else None
        box = _carried(common, self.here, self.box, self.dims)
        return replace(self, box=box, here=common)

    def turned(self, name: str, shape: Shape) -> Patch:
        """The same seen from ``leaf``; ``name`` and ``shape`` are those of the leaf looked at."""
        return Patch(name, shape, self.here, self.box, _turned(self.dims, self.box.ndim))

    def then(self, other: Patch) -> Patch | None:
        """Through both, where ``other`` looks at this one's leaf; None when they do not meet."""
        common = common_box(self.box, other.here)
        if common is None:
            return None
        here = _carried(common, self.box, self.here, _turned(self.dims, self.box.ndim))
        box = _carried(common, other.here, other.box, other.dims)
        dims = tuple(-1 if d < 0 else other.dims[d] for d in self.dims)
        return Patch(other.leaf, other.leaf_shape, box, here, dims)


@dataclass(frozen=True, slots=True)
class Seen:
    """A leaf of this ``shape`` through rules.

    ``patches`` are disjoint; ``padding`` is the rest of the leaf, zeros that are stored nowhere.
    ``dtype``: what the tensor here has, where what is stored may be converted to it. ``spread``:
    what its copies are to each other, where a rule says so. ``is_copy``: a rule says that another
    leaf is the same elements.
    """

    shape: Shape
    patches: tuple[Patch, ...]
    padding: tuple[Box, ...] = ()
    dtype: str | None = None
    spread: Spread | None = None
    is_copy: bool = False

    @property
    def leaves(self) -> dict[str, Shape]:
        """The leaves it is made of, with their shapes, in the order of the patches."""
        return {patch.leaf: patch.leaf_shape for patch in self.patches}

    @property
    def same_as(self) -> str | None:
        """The leaf that it is under another name; None when it is a part, or made of several."""
        if len(self.patches) != 1 or self.padding:
            return None
        (patch,) = self.patches
        is_all = patch.leaf_shape == self.shape and patch.dims == tuple(range(len(self.shape)))
        return patch.leaf if is_all else None


def renamed(name: str, shape: Shape) -> Seen:
    """A leaf that is all of the one called ``name``."""
    whole = Box.whole(shape)
    return Seen(shape, (Patch(name, shape, whole, whole, tuple(range(len(shape)))),))


def common_box(one: Box, other: Box) -> Box | None:
    """The elements in both; two boxes without any meet where the larger one has the other.

    So a leaf that has no elements is still seen as the leaf it is.
    """
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    for dim, (a, b) in enumerate(zip(start, stop, strict=True)):
        if a > b or (a == b and one.start[dim] < one.stop[dim]):
            return None
    return Box(start, stop)


def _carried(part: Box, source: Box, target: Box, dims: Sequence[int]) -> Box:
    """``part`` of ``source`` as that of ``target``, along which ``dims`` run."""
    start, stop = list(target.start), list(target.stop)
    for dim, along in enumerate(dims):
        if along >= 0:
            start[along] = target.start[along] + part.start[dim] - source.start[dim]
            stop[along] = target.start[along] + part.stop[dim] - source.start[dim]
    return Box(tuple(start), tuple(stop))


def _turned(dims: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(dims.index(dim) if dim in dims else -1 for dim in range(ndim))


class Near:
    """Patches by place: those that can meet a box are found without looking at all of them."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = tuple(patches)
        ndim = self._patches[0].here.ndim if self._patches else 0
        counts = [len({patch.here.start[dim] for patch in self._patches}) for dim in range(ndim)]
        self._dim = counts.index(max(counts)) if counts else -1
        if self._dim >= 0:
            self._patches = tuple(sorted(patches, key=lambda patch: patch.here.start[self._dim]))
            self._starts = [patch.here.start[self._dim] for patch in self._patches]
            stops = (patch.here.stop[self._dim] for patch in self._patches)
            self._reached = list(accumulate(stops, max))

    def __call__(self, box: Box) -> tuple[Patch, ...]:
        """Those that have an element of ``box``, and perhaps others."""
        if self._dim < 0 or box.is_empty:
            return self._patches
        first = bisect_right(self._reached, box.start[self._dim])
        return self._patches[first : bisect_left(self._starts, box.stop[self._dim])]


class Table:
    """Leaves by name, each as it is seen through rules; looks on through them from others."""

    def __init__(self, seen: Mapping[str, Seen]) -> None:
        self._seen = dict(seen)
        self._near: dict[str, Near] = {}

    def through(self, seen: Seen) -> Seen:
        """What ``seen`` is made of, each of its leaves replaced by what this table says it is.

        UsageError names a leaf that is not in the table, has another shape there, or is not all
        there.
        """
        patches: list[Patch] = []
        padding = list(seen.padding)
        for patch in seen.patches:
            found = self._seen_as(patch)
            parts = [part for near in self._at(patch) if (part := patch.then(near)) is not None]
            zeros = [zero for box in found.padding if (zero := _behind(patch, box)) is not None]
            _check_complete(patch, [part.here for part in parts] + zeros)
            patches += parts
            padding += zeros
        return replace(seen, patches=tuple(patches), padding=tuple(padding))

    def _seen_as(self, patch: Patch) -> Seen:
        found = self._seen.get(patch.leaf)
        if found is None:
            raise UsageError(
                f"{patch.leaf}: nothing is seen as this leaf on the other side of the rules. Give "
                "a rule that leads to it, or leave out what is made of it",
                leaf=patch.leaf,
            )
        if found.shape != patch.leaf_shape:
            raise UsageError(
                f"{patch.leaf}: the rules of one side give it the shape {list(patch.leaf_shape)}, "
                f"those of the other {list(found.shape)}: make the widths and sizes in them agree",
                leaf=patch.leaf,
            )
        return found

    def _at(self, patch: Patch) -> tuple[Patch, ...]:
        if patch.leaf not in self._near:
            self._near[patch.leaf] = Near(self._seen[patch.leaf].patches)
        return self._near[patch.leaf](patch.box)


def _behind(patch: Patch, box: Box) -> Box | None:
    """The elements here that are those of ``box`` in the leaf of ``patch``."""
    common = common_box(patch.box, box)
    if common is None:
        return None
    return _carried(common, patch.box, patch.here, _turned(patch.dims, patch.box.ndim))


def _check_complete(patch: Patch, parts: Sequence[Box]) -> None:
    if sum(part.volume for part in parts) == patch.here.volume:
        return
    fault = cover_fault(patch.here, parts)
    box = patch.cut(fault.box).box if fault else patch.box  # type: ignore[union-attr]
    raise UsageError(
        f"{patch.leaf}: nothing is seen as the elements {_ranges(box)} of it on the other side of "
        "the rules. Give rules for all its parts",
        leaf=patch.leaf,
    )


def _ranges(box: Box) -> str:
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(box.start, box.stop, strict=True))}]"


def turned(seen: Mapping[str, Seen]) -> dict[str, Seen]:
    """The leaves that these are made of, each as made of these.

    Elements that several of them have (repeated, or tied) are seen in the first of them.
    """
    shapes: dict[str, Shape] = {}
    found: dict[str, list[Patch]] = {}
    for name, one in sorted(seen.items(), key=lambda item: item[1].is_copy):
        for patch in one.patches:
            shapes.setdefault(patch.leaf, patch.leaf_shape)
            found.setdefault(patch.leaf, []).append(patch.turned(name, one.shape))
    return {leaf: Seen(shapes[leaf], tuple(_once(patches))) for leaf, patches in found.items()}


def _once(patches: Iterable[Patch]) -> Iterator[Patch]:
    taken: list[Box] = []
    for patch in patches:
        left = [patch.here]
        for box in taken:
            left = [part for one in left for part in one.subtract(box)]
        taken += left
        yield from (part for box in left if (part := patch.cut(box)) is not None)


@dataclass(frozen=True, slots=True)
class LocalPatch:
    """The box ``local`` of what a rank holds is ``box`` of ``leaf``.

    ``part`` is the place in ``held`` of the part it is in; ``local`` is counted as that part's
    second box is. ``dims`` as in ``Patch``, for the dimensions of ``local``.
    """

    leaf: str
    leaf_shape: Shape
    box: Box
    local: Box
    dims: tuple[int, ...]
    part: int


Held = Sequence[tuple[Box, Box]]


def local_patches(seen: Seen, held: Held) -> list[LocalPatch]:
    """What a rank holds, in terms of the leaves that ``seen`` is made of.

    ``held``: (box in the leaf looked at, the box of the same shape that it is in the rank's own
    tensor, or in a view of it).
    """
    near = Near(seen.patches)
    found = []
    for part, (box, local) in enumerate(held):
        for patch in near(box):
            cut = patch.cut(box)
            if cut is not None:
                moved = _carried(cut.here, box, local, range(box.ndim))
                found.append(LocalPatch(cut.leaf, cut.leaf_shape, cut.box, moved, cut.dims, part))
    return found


def local_padding(seen: Seen, held: Held) -> list[tuple[int, Box]]:
    """(part of ``held``, box in the rank's own tensor) of all that is padding."""
    return [
        (part, _carried(common, box, local, range(box.ndim)))
        for part, (box, local) in enumerate(held)
        for zeros in seen.padding
        if (common := common_box(zeros, box)) is not None
    ]
