"""Maps leaves onto other leaves: which box of one is which box of another, dimension by dimension.

A rule says that a tensor of the training is a part of a leaf, or made of several. Every rule
reduces to patches: boxes of one leaf that are boxes of others, with dimensions reordered, added or
left out, and never a sum or a copy. So a save and a restore need no code for any rule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from msgspec import Struct

from holdfast.errors import UsageError
from holdfast.geometry.box import Box, cover_fault, overlap

Shape = tuple[int, ...]
Spread = Literal["replicated", "unique", "averaged"]


@dataclass(frozen=True, slots=True)
class Patch:
    """The box ``here`` of the mapped leaf is ``box`` of ``leaf``.

    ``dims``: for each dimension of ``here``, the dimension of ``box`` that corresponds to it, or -1
    where it has extent 1 and ``box`` has no such dimension. A dimension of ``box`` that ``dims``
    does not name has extent 1. ``leaf_shape``: the shape of ``leaf``.
    """

    leaf: str
    leaf_shape: Shape
    box: Box
    here: Box
    dims: tuple[int, ...]

    def cut(self, part: Box) -> Patch | None:
        """Returns the part of the patch in ``part`` of the mapped leaf; None when it is empty."""
        common = common_box(self.here, part)
        if common is None:
            return None
        if common == self.here:
            return self
        box = carried(common, self.here, self.box, self.dims)
        return replace(self, box=box, here=common)

    def turned(self, name: str, shape: Shape) -> Patch:
        """Returns the inverse, mapping ``leaf``; ``name`` and ``shape`` are those of the leaf
        mapped now.
        """
        return Patch(name, shape, self.here, self.box, self._back)

    def then(self, other: Patch) -> Patch | None:
        """Composes both patches, where ``other`` maps this one's leaf; None when they do not
        meet.
        """
        common = common_box(self.box, other.here)
        if common is None:
            return None
        box = carried(common, other.here, other.box, other.dims)
        dims = tuple(-1 if dim < 0 else other.dims[dim] for dim in self.dims)
        return Patch(other.leaf, other.leaf_shape, box, self.behind(common), dims)

    def behind(self, part: Box) -> Box:
        """Returns the elements here that correspond to ``part``, a box inside of ``box``."""
        return carried(part, self.box, self.here, self._back)

    @property
    def _back(self) -> tuple[int, ...]:
        """Returns for each dimension of ``box`` that of ``here``."""
        return tuple(
            self.dims.index(dim) if dim in self.dims else -1 for dim in range(self.box.ndim)
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """A leaf of this ``shape`` as rules map it.

    ``patches`` are disjoint; ``padding`` is the rest of the leaf, zeros that are stored nowhere.
    ``dtype``: the tensor's here, where the stored leaf may be converted to it. ``spread``: how its
    copies relate to each other, where a rule says so. ``is_copy``: a rule says that another leaf
    has the same elements.
    """

    shape: Shape
    patches: tuple[Patch, ...]
    padding: tuple[Box, ...] = ()
    dtype: str | None = None
    spread: Spread | None = None
    is_copy: bool = False

    @property
    def leaves(self) -> dict[str, Shape]:
        """Returns the leaves it is made of, with their shapes, in the order of the patches."""
        return {patch.leaf: patch.leaf_shape for patch in self.patches}

    @property
    def same_as(self) -> str | None:
        """Returns the leaf that it equals under another name; None when it is a part, or made of
        several.
        """
        if len(self.patches) != 1 or self.padding:
            return None
        (patch,) = self.patches
        # A dimension of one element corresponds to any dimension, whatever ``dims`` says.
        is_turned = any(
            dim != number and (dim != -1 or self.shape[number] != 1)
            for number, dim in enumerate(patch.dims)
        )
        return None if is_turned or patch.leaf_shape != self.shape else patch.leaf


def renamed(name: str, shape: Shape) -> Seen:
    """Returns the mapping of a leaf to the whole leaf called ``name``."""
    whole = Box.whole(shape)
    return Seen(shape, (Patch(name, shape, whole, whole, tuple(range(len(shape)))),))


def common_box(one: Box, other: Box) -> Box | None:
    """Returns the elements in both; where ``one`` is empty along a dimension, its place in
    ``other``.

    So a leaf that has no elements is still mapped to its own leaf.
    """
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    for dim, (a, b) in enumerate(zip(start, stop, strict=True)):
        if a > b or (a == b and one.start[dim] < one.stop[dim]):
            return None
    return Box(start, stop)


def carried(part: Box, source: Box, target: Box, dims: Sequence[int]) -> Box:
    """Carries ``part`` of ``source`` over to ``target``, along whose dimensions ``dims`` it
    runs.
    """
    start, stop = list(target.start), list(target.stop)
    for dim, along in enumerate(dims):
        if along >= 0:
            start[along] = target.start[along] + part.start[dim] - source.start[dim]
            stop[along] = target.start[along] + part.stop[dim] - source.start[dim]
    return Box(tuple(start), tuple(stop))


class NearLeaf:
    """Finds the patches that can meet a box without testing all of them."""

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
        """Returns the patches that have an element of ``box``, and perhaps others."""
        if self._dim < 0 or box.is_empty:
            return self._patches
        first = bisect_right(self._reached, box.start[self._dim])
        return self._patches[first : bisect_left(self._starts, box.stop[self._dim])]


@dataclass(frozen=True, slots=True)
class LocalPatch:
    """The box ``local`` of a rank's memory is ``box`` of ``leaf``.

    ``part`` is the index in ``held`` of the part it is in; ``local`` is counted as that part's
    second box is. ``dims``: as in ``Patch``, for the dimensions of ``local``. ``leaf_shape``: the
    shape of ``leaf``.
    """

    leaf: str
    leaf_shape: Shape
    box: Box
    local: Box
    dims: tuple[int, ...]
    part: int


#: (box in the mapped leaf, the box of the same shape that it is in a rank's own tensor).
Held = Sequence[tuple[Box, Box]]


def local_patches(seen: Seen, held: Held) -> list[LocalPatch]:
    """Returns the boxes a rank holds, as boxes of the leaves that ``seen`` is made of.

    ``held``: (box in the mapped leaf, the box of the same shape that it is in the rank's own
    tensor, or in a view of it).
    """
    near = NearLeaf(seen.patches)
    found = []
    for part, (box, local) in enumerate(held):
        for patch in near(box):
            if (cut := patch.cut(box)) is not None:
                there = carried(cut.here, box, local, range(box.ndim))
                found.append(LocalPatch(cut.leaf, cut.leaf_shape, cut.box, there, cut.dims, part))
    return found


def local_padding(seen: Seen, held: Held) -> list[tuple[int, Box]]:
    """Returns (part of ``held``, box in the rank's own tensor) of all padding.

    ``seen``: the mapped leaf. ``held``: as for ``local_patches``.
    """
    return [
        (part, carried(common, box, local, range(box.ndim)))
        for part, (box, local) in enumerate(held)
        for zeros in seen.padding
        if (common := zeros.intersect(box)) is not None
    ]


# Composes and inverts the mappings of many leaves, and proves that no two collide.


class Table:
    """Mappings by leaf name, through which other mappings can be composed.

    ``seen``: the mapped leaves, by name.
    """

    def __init__(self, seen: Mapping[str, Seen]) -> None:
        self._seen = dict(seen)
        self._near: dict[str, NearLeaf] = {}

    @property
    def leaves(self) -> dict[str, Shape]:
        """The leaves that have a mapping, with their shapes."""
        return {name: seen.shape for name, seen in self._seen.items()}

    def see(self, name: str) -> Seen:
        """Returns the mapping of the leaf ``name``. Raises UsageError when it is not there."""
        if name not in self._seen:
            raise UsageError(
                f"{name}: nothing is seen as this leaf on the other side of the rules. Give a "
                "rule that leads to it, or leave out what is made of it",
                leaf=name,
            )
        return self._seen[name]

    def through(self, seen: Seen) -> Seen:
        """Composes ``seen`` with this table: each leaf it is made of is replaced by that leaf's own
        mapping.

        UsageError names a leaf that is not in the table, has another shape there, or is not
        complete there.
        """
        known = self._seen.get(seen.same_as or "")
        if known is not None and known.shape == seen.shape:  # nothing to cut: most leaves are so
            here = (part.here for part in known.patches)
            _check_complete(seen.patches[0], [*here, *known.padding])
            return replace(seen, patches=known.patches, padding=known.padding)
        patches: list[Patch] = []
        padding = list(seen.padding)
        for patch in seen.patches:
            found = self.see(patch.leaf)
            if found.shape != patch.leaf_shape:
                raise UsageError(
                    f"{patch.leaf}: the rules of one side give it the shape "
                    f"{list(patch.leaf_shape)}, those of the other {list(found.shape)}: make the "
                    "widths and sizes in them agree",
                    leaf=patch.leaf,
                )
            parts = [part for other in self._at(patch) if (part := patch.then(other)) is not None]
            zeros = [patch.behind(box) for box in _inside(found.padding, patch.box)]
            _check_complete(patch, [*(part.here for part in parts), *zeros])
            patches += parts
            padding += zeros
        return replace(seen, patches=joined(patches), padding=tuple(padding))

    def _at(self, patch: Patch) -> tuple[Patch, ...]:
        if patch.leaf not in self._near:
            self._near[patch.leaf] = NearLeaf(self._seen[patch.leaf].patches)
        return self._near[patch.leaf](patch.box)


def _inside(boxes: Iterable[Box], space: Box) -> Iterator[Box]:
    return (common for box in boxes if (common := box.intersect(space)) is not None)


def _check_complete(patch: Patch, parts: Sequence[Box]) -> None:
    if sum(part.volume for part in parts) == patch.here.volume:
        return
    fault = cover_fault(patch.here, parts)
    lost = patch.cut(fault.box) if fault is not None else None
    raise UsageError(
        f"{patch.leaf}: nothing is seen as its elements {ranges((lost or patch).box)} on the other "
        "side of the rules. Give rules for all its parts",
        leaf=patch.leaf,
    )


def ranges(box: Box) -> str:
    """Formats a box as an index."""
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(box.start, box.stop, strict=True))}]"


def turned(seen: Mapping[str, Seen]) -> dict[str, Seen]:
    """Inverts these mappings: returns the leaves they are made of, each as made of the mapped ones.

    ``seen``: the mapped leaves, by name.

    Elements that several have (repeated, or tied) are taken from the first that is no copy. An
    element that none of them has is in no patch, and no padding either.
    """
    shapes: dict[str, Shape] = {}
    found: dict[str, dict[Box, Patch]] = {}
    for name, one in sorted(seen.items(), key=lambda item: item[1].is_copy):
        for patch in one.patches:
            shapes.setdefault(patch.leaf, patch.leaf_shape)
            found.setdefault(patch.leaf, {}).setdefault(patch.box, patch.turned(name, one.shape))
    return {
        leaf: Seen(shapes[leaf], joined(_disjoint(list(patches.values()))))
        for leaf, patches in found.items()
    }


def _disjoint(patches: list[Patch]) -> list[Patch]:
    """Returns the patches without the elements of earlier ones."""
    if overlap([patch.here for patch in patches]) is None:
        return patches
    taken: list[Box] = []
    kept: list[Patch] = []
    for patch in patches:
        left = [patch.here]
        for box in taken:
            left = [part for one in left for part in one.subtract(box)]
        taken += left
        kept += [part for box in left if (part := patch.cut(box)) is not None]
    return kept


def joined(patches: Sequence[Patch]) -> tuple[Patch, ...]:
    """Merges patches into as few as possible, in the order of their first elements."""
    by_leaf: dict[str, list[Patch]] = {}
    for patch in patches:
        by_leaf.setdefault(patch.leaf, []).append(patch)
    found = (patch for of_leaf in by_leaf.values() for patch in _joined(of_leaf))
    return tuple(sorted(found, key=lambda patch: patch.here.start))


def _joined(patches: list[Patch]) -> list[Patch]:
    """Merges patches of one leaf."""
    count = len(patches) + 1
    while 1 < len(patches) < count:
        count = len(patches)
        for dim in reversed(range(patches[0].here.ndim)):
            patches = _joined_along(dim, patches)
    return patches


def _joined_along(dim: int, patches: list[Patch]) -> list[Patch]:
    def line(patch: Patch) -> tuple[object, ...]:
        here = patch.here
        return _without(here.start, dim), _without(here.stop, dim), here.start[dim]

    found: list[Patch] = []
    for patch in sorted(patches, key=line):
        both = _union(found[-1], patch, dim) if found else None
        if both is None:
            found.append(patch)
        else:
            found[-1] = both
    return found


def _union(one: Patch, other: Patch, dim: int) -> Patch | None:
    """Merges two patches, the other following the first along ``dim``; None when they do not
    join.
    """
    if _without(one.dims, dim) != _without(other.dims, dim):
        return None
    here = _behind(one.here, other.here, dim)
    differing = [d for d in range(one.box.ndim) if _side(one.box, d) != _side(other.box, d)]
    if here is None or len(differing) != 1:
        return None
    (along,) = differing
    box = _behind(one.box, other.box, along)
    if box is None or not all(_runs_along(patch, dim, along) for patch in (one, other)):
        return None
    dims = (*one.dims[:dim], along, *one.dims[dim + 1 :])
    return Patch(one.leaf, one.leaf_shape, box, here, dims)


def _runs_along(patch: Patch, dim: int, along: int) -> bool:
    """True if ``along`` corresponds, or can be made to correspond, to the dimension of the box
    along ``dim``.
    """
    return patch.dims[dim] == along or (patch.dims[dim] == -1 and along not in patch.dims)


def _behind(one: Box, other: Box, dim: int) -> Box | None:
    """Merges both boxes, if the other continues along ``dim`` where the first ends."""
    is_beside = _without(one.start, dim) == _without(other.start, dim)
    is_alike = _without(one.stop, dim) == _without(other.stop, dim)
    if one.stop[dim] != other.start[dim] or not (is_beside and is_alike):
        return None
    return Box(one.start, other.stop)


def _side(box: Box, dim: int) -> tuple[int, int]:
    return box.start[dim], box.stop[dim]


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])


class Clash(Struct, frozen=True):
    """Two leaves, ``one`` and ``other``, whose mappings contradict each other, and why."""

    one: str
    other: str
    leaf: str
    why: str


def clash(seen: Mapping[str, Seen]) -> Clash | None:
    """Returns two leaves that map to the same elements, or that give a leaf different shapes; None
    when none.

    Copies may have the same elements as others.
    """
    by_leaf: dict[str, list[tuple[str, Patch]]] = {}
    for name, one in seen.items():
        distinct = {patch.box: patch for patch in one.patches}  # a repeated unit is one
        for patch in distinct.values():
            by_leaf.setdefault(patch.leaf, []).append((name, patch))
    for leaf, found in by_leaf.items():
        if len(found) > 1 and (wrong := _clash_in(leaf, found, seen)) is not None:
            return wrong
    return None


def _clash_in(leaf: str, found: list[tuple[str, Patch]], seen: Mapping[str, Seen]) -> Clash | None:
    first, patch = found[0]
    for name, other in found:
        if other.leaf_shape != patch.leaf_shape:
            shapes = f"{list(patch.leaf_shape)} and {list(other.leaf_shape)}"
            return Clash(first, name, leaf, f"give {leaf} different shapes, {shapes}")
    owned = [(name, patch) for name, patch in found if not seen[name].is_copy]
    box = overlap([patch.box for _, patch in owned])
    if box is None:
        return None
    names = [name for name, patch in owned if patch.box.intersect(box) is not None]
    return Clash(names[0], names[1], leaf, f"are both seen as {leaf}{ranges(box)}")
