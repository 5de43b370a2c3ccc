"""Many leaves as rules see them: looked on through, turned round, and proved not to collide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.errors import UsageError
from holdfast.geometry.box import Box, cover_fault, overlap
from holdfast.geometry.patches import Near, Patch, Seen, Shape


class Table:
    """Leaves by name, each as it is seen; what is made of them is seen through them."""

    def __init__(self, seen: Mapping[str, Seen]) -> None:
        self._seen = dict(seen)
        self._near: dict[str, Near] = {}

    @property
    def leaves(self) -> dict[str, Shape]:
        """The leaves that can be looked through, with their shapes."""
        return {name: seen.shape for name, seen in self._seen.items()}

    def see(self, name: str) -> Seen:
        """One of them. UsageError when it is not there."""
        if name not in self._seen:
            raise UsageError(
                f"{name}: nothing is seen as this leaf on the other side of the rules. Give a "
                "rule that leads to it, or leave out what is made of it",
                leaf=name,
            )
        return self._seen[name]

    def through(self, seen: Seen) -> Seen:
        """What ``seen`` is made of, each of its leaves replaced by what this table says it is.

        UsageError names a leaf that is not in the table, has another shape there, or is not all
        there.
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
            self._near[patch.leaf] = Near(self._seen[patch.leaf].patches)
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
    """A box as one would index it."""
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(box.start, box.stop, strict=True))}]"


def turned(seen: Mapping[str, Seen]) -> dict[str, Seen]:
    """The leaves that these are made of, each as made of these.

    Elements that several of them have (repeated, or tied) are seen in the first that is no copy.
    Where nothing is seen as an element, it is in no patch, and no padding either.
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
    """The patches without what earlier ones have."""
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
    """As few patches that say the same, in the order of where they begin."""
    by_leaf: dict[str, list[Patch]] = {}
    for patch in patches:
        by_leaf.setdefault(patch.leaf, []).append(patch)
    found = (patch for of_leaf in by_leaf.values() for patch in _joined(of_leaf))
    return tuple(sorted(found, key=lambda patch: patch.here.start))


def _joined(patches: list[Patch]) -> list[Patch]:
    """The same for patches of one leaf."""
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
    """Two patches as one, the other behind the first along ``dim``; None when they are not."""
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
    """Whether ``along`` is, or can be called, the dimension of the box along ``dim``."""
    return patch.dims[dim] == along or (patch.dims[dim] == -1 and along not in patch.dims)


def _behind(one: Box, other: Box, dim: int) -> Box | None:
    """Both boxes as one, if the other goes on along ``dim`` where the first ends."""
    is_beside = _without(one.start, dim) == _without(other.start, dim)
    is_alike = _without(one.stop, dim) == _without(other.stop, dim)
    if one.stop[dim] != other.start[dim] or not (is_beside and is_alike):
        return None
    return Box(one.start, other.stop)


def _side(box: Box, dim: int) -> tuple[int, int]:
    return box.start[dim], box.stop[dim]


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Clash:
    """Two leaves, ``one`` and ``other``, that cannot both be seen so, and why."""

    one: str
    other: str
    leaf: str
    why: str


def clash(seen: Mapping[str, Seen]) -> Clash | None:
    """Two leaves seen as the same elements, or that give a leaf different shapes; None when none.

    Copies may be the same elements as others.
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
