"""Tensors of the state seen through rules and declarations: as boxes of the leaves that are stored.

A leaf of the training may be a part of a stored leaf, or made of several. What that comes to is
views of the tensor's memory, each a box of a stored leaf: a save copies from these views and a
restore reads into them, and neither knows of any rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import UnsupportedState, UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.layout import Instance
from holdfast.geometry.patches import Seen, local_padding, local_patches, renamed
from holdfast.rules import Rules
from holdfast.state.declared import FlatBuffer, Named, Piece, Shard, declared
from holdfast.state.origin import Origin
from holdfast.state.tensors import leaf_entry, local_of
from holdfast.state.views import View, box_view, patch_view, whole_view

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What a tensor holds of one stored leaf: ``views[n]`` is ``boxes[n]`` of it.

    With an ``instance`` there are no boxes, and the one view is all that a mesh gives to this
    rank. ``rows``: of how many copies that may differ this is number ``row``; 0 when all copies
    are the same. They are stored side by side, as a leaf of one more dimension.
    """

    leaf: str
    shape: Shape
    boxes: tuple[Box, ...]
    views: tuple[View, ...]
    instance: Instance | None = None
    rows: int = 0
    row: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of the leaf, in one view."""
        return self.instance is None and self.boxes == (Box.whole(self.shape),)

    def as_stored(self) -> Part:
        """The same as one row of all copies."""
        if not self.rows:
            return self
        boxes = (Box((self.row, *b.start), (self.row + 1, *b.stop)) for b in self.boxes)
        shape = (self.rows, *self.shape)
        views = tuple(view.behind() for view in self.views)
        return Part(self.leaf, shape, tuple(boxes), views)



@dataclass(frozen=True, slots=True)
class Sight:
    """A tensor through rules. ``padding``: what of it is stored nowhere. ``dtype`` as in Seen.

    ``spread``: how replicas may divide it, if a rule says. ``is_copy``: another tensor is the same
    elements, so that this one is filled at a restore and never stored.
    """

    parts: tuple[Part, ...]
    padding: tuple[View, ...] = ()
    dtype: str | None = None
    spread: str | None = None
    is_copy: bool = False


Found = tuple[Origin, torch.Tensor]
_SPREADS = {None: None, "replicated": "split", "unique": "lowest", "averaged": "split"}
_Look = tuple[Named, Seen, bool]  # what is held of a leaf, as the rules see it; whether it is flat


class Through:
    """Rules and declarations, on one rank of ``world``."""

    def __init__(self, rules: Rules | None, rank: int, world: int) -> None:
        self.rules = rules
        self.rank = rank
        self.world = world

    def sight(self, origin: Origin, tensor: torch.Tensor) -> Sight | None:
        """What ``tensor`` is of which stored leaves; None where it is a leaf by itself.

        UsageError names a leaf that does not fit its rule or its declaration, UnsupportedState one
        whose part of a leaf cannot be known.
        """
        owner = tensor if origin.parameter is None else origin.parameter
        if self.rules is None and declared(owner) is None and declared(tensor) is None:
            return None
        if tensor.shape == owner.shape:
            looks = self._looks(origin, owner)
            found = _joined([self._held(origin, tensor, look) for look in looks], tensor, looks)
        elif tensor.numel() == 1 and not isinstance(tensor, DTensor):
            found = _scalar(origin, tuple(tensor.shape), self._looks(origin, owner))
        else:
            found = self._other(origin, tensor, owner)
        return None if found is None or _is_itself(origin, found, tensor) else found

    def leaves(self, origin: Origin) -> list[str]:
        """The stored leaves that a parameter is made of, by the names the rules give them."""
        assert origin.parameter is not None
        if self.rules is None and declared(origin.parameter) is None:
            return [origin.name]
        seen = [one for _, one, _ in self._looks(origin, origin.parameter)]
        return list(dict.fromkeys(leaf for one in seen for leaf in one.leaves))

    def made_of(self, origin: Origin) -> dict[str, Part]:
        """The same, with their shapes: nothing is said of what this rank has of them."""
        assert origin.parameter is not None
        tensor = origin.parameter
        if self.rules is None and declared(tensor) is None:
            return {origin.name: Part(origin.name, tuple(tensor.shape), (), ())}
        return {
            leaf: Part(leaf, shape, (), (), None, *self._copies(origin, tensor, seen))
            for _, seen, _ in self._looks(origin, tensor)
            for leaf, shape in seen.leaves.items()
        }

    def shapes(self, origin: Origin, tensor: torch.Tensor) -> dict[str, Shape]:
        """The leaves of the training that a parameter is, or has parts of, with their shapes."""
        looks = self._looks(origin, tensor)
        return {named.name or origin.name: named.shape for named, _, _ in looks}

    def aliases(self, one: Found, leaf: Found) -> dict[str, str]:
        """Further names of stored leaves -> the leaf they are, for two names of one tensor.

        UsageError when the rules make different leaves of the two.
        """
        names, leaves = (self._parts(*each) for each in (one, leaf))
        if self._is_copy(*one):
            return {}
        if [part[1:] for part in names] != [part[1:] for part in leaves]:
            raise UsageError(
                f"{one[0].leaf} and {leaf[0].leaf} are one tensor, and the rules see it as parts of "
                "different leaves under its two names: give both the same kinds",
                leaf=one[0].leaf,
            )
        pairs = zip(names, leaves, strict=True)
        return {name: there for (name, *_), (there, *_) in pairs if name != there}

    def _parts(self, origin: Origin, tensor: torch.Tensor) -> list[tuple[str, Shape, object]]:
        sight = self.sight(origin, tensor)
        if sight is None:
            return [(origin.leaf, tuple(tensor.shape), None)]
        return [
            (part.leaf, part.shape, None if part.is_whole or part.instance else part.boxes)
            for part in sight.parts
        ]

    def _is_copy(self, origin: Origin, tensor: torch.Tensor) -> bool:
        sight = self.sight(origin, tensor)
        return sight is not None and sight.is_copy

    def reference(self, origin: Origin, tensor: torch.Tensor) -> str:
        """What a value calls this leaf. UnsupportedState when it is stored as anything but one."""
        found = self._parts(origin, tensor)
        if len(found) == 1 and found[0][1:] == (tuple(tensor.shape), None):
            return found[0][0]
        raise UnsupportedState(
            f"a value in the state is {origin.leaf}, which the rules do not store as one leaf of "
            "its shape: keep it out of the value, or let the rules only rename it",
            leaf=origin.leaf,
        )

    def _looks(self, origin: Origin, tensor: torch.Tensor) -> list[_Look]:
        """What of which leaves of the training a parameter is, each as the rules see it."""
        what = declared(tensor)
        shape = tuple(tensor.shape)
        if isinstance(tensor, DTensor):
            return [(Named(None, shape, ()), self._see(origin.name, shape), False)]
        if what is not None:
            is_flat = not isinstance(what, Shard)
            return [
                (one, self._see(one.name or origin.name, one.shape), is_flat)
                for one in what.of(shape)
            ]
        if self.rules is None:
            return [(_all_of(shape), renamed(origin.name, shape), False)]
        local = self.rules.local(origin.name, shape, self.rank)
        if local.offsets is None:
            pieces = [Piece(box, inside) for box, inside in local.held]
        else:
            held = zip(local.held, local.offsets, strict=True)
            pieces = [Piece(box, inside, at) for (box, inside), at in held]
        named = Named(None, local.shape, tuple(pieces))
        return [(named, local.seen, local.offsets is not None)]

    def _see(self, name: str, shape: Shape) -> Seen:
        return renamed(name, shape) if self.rules is None else self.rules.see(name, shape)

    def _held(self, origin: Origin, tensor: torch.Tensor, look: _Look) -> Sight:
        named, seen, _ = look
        pieces = named.pieces
        if isinstance(tensor, DTensor):
            entry = leaf_entry(origin.leaf, tensor, self.rank, "split")
            assert isinstance(entry.instance, Instance)
            turned = _turned(origin, seen, entry.instance, local_of(tensor))
            if turned is not None:
                return _said(Sight((turned,)), seen)
            pieces = tuple(Piece(box, inside) for box, inside in entry.boxes(self.rank))
        held = [(piece.box, piece.inside) for piece in pieces]
        found: dict[str, list[tuple[Box, View]]] = {leaf: [] for leaf in seen.leaves}
        for patch in local_patches(seen, held):
            if not patch.box.is_empty:
                view = patch_view(patch, pieces[patch.part])
                found[patch.leaf].append((patch.box, view))
        rows, row = self._copies(origin, tensor, seen)
        parts = [
            _part(origin.stored(leaf), shape, found[leaf], rows, row)
            for leaf, shape in seen.leaves.items()
        ]
        zeros = [box_view(pieces[at], box) for at, box in local_padding(seen, held)]
        return _said(Sight(tuple(parts), tuple(zeros)), seen)

    def _copies(self, origin: Origin, tensor: torch.Tensor, seen: Seen) -> tuple[int, int]:
        """How many copies of a leaf there are that may differ, and which of them is here.

        Copies are what ranks have that are the same part of it by the rules.
        """
        if seen.spread != "averaged":
            return 0, 0
        if isinstance(tensor, DTensor) or declared(tensor) is not None or self.rules is None:
            raise UnsupportedState(
                f"{origin.leaf} is averaged by its rule, and is a {type(tensor).__name__} or was "
                "declared a part of a leaf: which ranks have copies of it is only known of plain "
                "tensors, from the mesh of the rules",
                leaf=origin.leaf,
            )
        shape = tuple(tensor.shape)
        held = [self.rules.local(origin.name, shape, rank).held for rank in range(self.world)]
        alike = [rank for rank, one in enumerate(held) if one == held[self.rank]]
        return len(alike), alike.index(self.rank)

    def _other(self, origin: Origin, tensor: torch.Tensor, owner: torch.Tensor) -> Sight | None:
        """State of another shape than its parameter's: a leaf of its own, whole or declared."""
        looks = self._looks(origin, owner)
        name = looks[0][1].same_as if len(looks) == 1 else None
        leaf, shape = origin.stored(name or origin.name), tuple(tensor.shape)
        what = declared(tensor)
        if what is not None:
            named = what.of(shape)[0]
            found = [(piece.box, box_view(piece, piece.inside)) for piece in named.pieces]
            return Sight((_part(leaf, named.shape, found, 0, 0),))
        if isinstance(tensor, DTensor):
            entry = leaf_entry(leaf, tensor, self.rank, "split")
            assert isinstance(entry.instance, Instance)
            view = whole_view(tuple(local_of(tensor).shape))
            return Sight((Part(leaf, shape, (), (view,), entry.instance),))
        is_cut = not isinstance(owner, DTensor) and any(
            named.pieces != _all_of(named.shape).pieces for named, _, _ in looks
        )
        if is_cut and tensor.numel() > 1:
            raise UnsupportedState(
                f"{origin.leaf} has the shape {list(shape)}, and its parameter, of shape "
                f"{list(owner.shape)}, is a part of a leaf: which part of its own leaf the state "
                "is cannot be known. Say it with holdfast.declare(tensor, holdfast.Shard(...))",
                leaf=origin.leaf,
            )
        return Sight((_part(leaf, shape, [(Box.whole(shape), whole_view(shape))], 0, 0),))


def shard_sight(name: str, tensor: torch.Tensor, rank: int) -> Sight | None:
    """An entry of the state that is a tensor by itself; None where nothing was declared of it.

    The leaves of a buffer are called by its name and theirs.
    """
    what = declared(tensor)
    if what is None:
        return None
    through, origin = Through(None, rank, 1), Origin("", name)
    is_buffer = isinstance(what, FlatBuffer)
    is_flat = not isinstance(what, Shard)
    looks: list[_Look] = [
        (one, renamed(f"{name}.{one.name}" if is_buffer else name, one.shape), is_flat)
        for one in what.of(tuple(tensor.shape))
    ]
    return _joined([through._held(origin, tensor, look) for look in looks], tensor, looks)


def _all_of(shape: Shape) -> Named:
    whole = Box.whole(shape)
    return Named(None, shape, () if whole.is_empty else (Piece(whole, whole),))


def _part(leaf: str, shape: Shape, held: list[tuple[Box, View]], rows: int, row: int) -> Part:
    held = sorted(held, key=lambda one: one[0].start)
    return Part(
        leaf, shape, tuple(box for box, _ in held), tuple(view for _, view in held), None, rows, row
    )


def _turned(origin: Origin, seen: Seen, instance: Instance, local: torch.Tensor) -> Part | None:
    """A tensor that is a whole leaf, perhaps with its dimensions in another order, on its mesh."""
    if len(seen.patches) != 1 or seen.padding or seen.spread == "averaged":
        return None
    (patch,) = seen.patches
    if sorted(patch.dims) != list(range(len(patch.leaf_shape))):
        return None  # it is a part of a leaf, or has more dimensions than that
    if patch.box != Box.whole(patch.leaf_shape) or patch.here != Box.whole(seen.shape):
        return None
    placements = tuple(
        each if each.dim < 0 else replace(each, dim=patch.dims[each.dim])
        for each in instance.placements
    )
    order = tuple(patch.dims.index(dim) for dim in range(len(patch.dims)))
    view = View(Box.whole(tuple(local.shape)), order)
    leaf = origin.stored(patch.leaf)
    return Part(leaf, patch.leaf_shape, (), (view,), Instance(instance.mesh, placements))


def _said(sight: Sight, seen: Seen) -> Sight:
    return replace(
        sight, dtype=seen.dtype, spread=_SPREADS[seen.spread], is_copy=seen.is_copy
    )


def _scalar(origin: Origin, shape: Shape, looks: Sequence[_Look]) -> Sight:
    """A number that is kept for a parameter: each leaf the parameter is made of has its own."""
    leaves = dict.fromkeys(leaf for _, seen, _ in looks for leaf in seen.leaves)
    held = [(Box.whole(shape), whole_view(shape))]
    parts = [_part(origin.stored(leaf), shape, held, 0, 0) for leaf in leaves]
    return Sight(tuple(parts), is_copy=any(seen.is_copy for _, seen, _ in looks))


def _joined(sights: Sequence[Sight], tensor: torch.Tensor, looks: Sequence[_Look]) -> Sight:
    """All that one tensor is. What a flat one has beyond its runs is padding."""
    padding = [view for sight in sights for view in sight.padding]
    if any(is_flat for _, _, is_flat in looks):
        padding += _gaps(tensor.numel(), [piece for named, _, _ in looks for piece in named.pieces])
    if len(sights) == 1:
        return replace(sights[0], padding=tuple(padding))
    held: dict[str, list[Part]] = {}
    for part in (part for sight in sights for part in sight.parts):
        held.setdefault(part.leaf, []).append(part)
    parts = [
        _part(
            leaf, some[0].shape,
            [one for part in some for one in zip(part.boxes, part.views, strict=True)],
            some[0].rows, some[0].row,
        )
        for leaf, some in held.items()
    ]  # fmt: skip
    dtypes = {sight.dtype for sight in sights}
    spreads = {sight.spread for sight in sights}
    return Sight(
        tuple(parts), tuple(padding), dtypes.pop() if len(dtypes) == 1 else None,
        spreads.pop() if len(spreads) == 1 else None, all(sight.is_copy for sight in sights),
    )  # fmt: skip


def _gaps(size: int, pieces: Sequence[Piece]) -> list[View]:
    """The elements of a flat tensor that are in no piece."""
    found, at = [], 0
    runs = sorted((piece.flat or 0, piece.box.volume) for piece in pieces)
    for start, length in [*runs, (size, 0)]:
        if start > at:
            found.append(View(Box((at,), (start,)), (0,), 0, (size,)))
        at = max(at, start + length)
    return found


def _is_itself(origin: Origin, sight: Sight, tensor: torch.Tensor) -> bool:
    if len(sight.parts) != 1 or sight.padding or sight.spread or sight.dtype or sight.is_copy:
        return False
    (part,) = sight.parts
    is_same = part.leaf == origin.leaf and part.shape == tuple(tensor.shape) and not part.rows
    local = whole_view(tuple(local_of(tensor).shape))
    return is_same and part.views == (local,) and (part.instance is not None or part.is_whole)
