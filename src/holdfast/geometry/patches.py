"""Leaves seen through other leaves: which box of which is which, dimension for dimension.

A rule says what a tensor of the training is a part of, or made of. All that rules do comes down
to patches: boxes of one leaf that are boxes of others, with dimensions reordered, added or left
out, and never a sum or a copy. So a save and a restore need no code for any rule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from holdfast.geometry.box import Box

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
        if common is None:
            return None
        if common == self.here:
            return self
        box = carried(common, self.here, self.box, self.dims)
        return replace(self, box=box, here=common)

    def turned(self, name: str, shape: Shape) -> Patch:
        """The same seen from ``leaf``; ``name`` and ``shape`` are those of the leaf looked at."""
        return Patch(name, shape, self.here, self.box, self._back)

    def then(self, other: Patch) -> Patch | None:
        """Through both, where ``other`` looks at this one's leaf; None when they do not meet."""
        common = common_box(self.box, other.here)
        if common is None:
            return None
        box = carried(common, other.here, other.box, other.dims)
        dims = tuple(-1 if dim < 0 else other.dims[dim] for dim in self.dims)
        return Patch(other.leaf, other.leaf_shape, box, self.behind(common), dims)

    def behind(self, part: Box) -> Box:
        """The elements here that are those of ``part``, a box inside of ``box``."""
        return carried(part, self.box, self.here, self._back)

    @property
    def _back(self) -> tuple[int, ...]:
        """For each dimension of ``box``, that of ``here``."""
        return tuple(
            self.dims.index(dim) if dim in self.dims else -1 for dim in range(self.box.ndim)
        )


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
        # Along a dimension of one element nothing runs, whatever is called to.
        is_turned = any(
            dim != number and (dim != -1 or self.shape[number] != 1)
            for number, dim in enumerate(patch.dims)
        )
        return None if is_turned or patch.leaf_shape != self.shape else patch.leaf


def renamed(name: str, shape: Shape) -> Seen:
    """A leaf that is all of the one called ``name``."""
    whole = Box.whole(shape)
    return Seen(shape, (Patch(name, shape, whole, whole, tuple(range(len(shape)))),))


def common_box(one: Box, other: Box) -> Box | None:
    """The elements in both; where ``one`` has none along a dimension, the place of it in ``other``.

    So a leaf that has no elements is still seen as the leaf it is.
    """
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    for dim, (a, b) in enumerate(zip(start, stop, strict=True)):
        if a > b or (a == b and one.start[dim] < one.stop[dim]):
            return None
    return Box(start, stop)


def carried(part: Box, source: Box, target: Box, dims: Sequence[int]) -> Box:
    """``part`` of ``source`` as that of ``target``, along whose dimensions ``dims`` it runs."""
    start, stop = list(target.start), list(target.stop)
    for dim, along in enumerate(dims):
        if along >= 0:
            start[along] = target.start[along] + part.start[dim] - source.start[dim]
            stop[along] = target.start[along] + part.stop[dim] - source.start[dim]
    return Box(tuple(start), tuple(stop))


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


#: (box in the leaf looked at, the box of the same shape that it is in a rank's own tensor).
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
            if (cut := patch.cut(box)) is not None:
                there = carried(cut.here, box, local, range(box.ndim))
                found.append(LocalPatch(cut.leaf, cut.leaf_shape, cut.box, there, cut.dims, part))
    return found


def local_padding(seen: Seen, held: Held) -> list[tuple[int, Box]]:
    """(part of ``held``, box in the rank's own tensor) of all that is padding."""
    return [
        (part, carried(common, box, local, range(box.ndim)))
        for part, (box, local) in enumerate(held)
        for zeros in seen.padding
        if (common := zeros.intersect(box)) is not None
    ]
