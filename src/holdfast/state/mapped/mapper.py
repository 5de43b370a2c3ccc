"""Tensors of the state seen through rules and declarations: as boxes of the leaves that are stored.

A leaf of the training may be a part of a stored leaf, or made of several. What that comes to is
views of the tensor's memory, each a box of a stored leaf: a save copies from these views and a
restore reads into them, and neither knows of any rule.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import UnsupportedState, UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.layout import Instance
from holdfast.geometry.patches import Seen, local_padding, local_patches, renamed
from holdfast.geometry.tables import Table
from holdfast.rules import Rules
from holdfast.state.declared import FlatBuffer, Named, Piece, Shard, declared
from holdfast.state.origin import Origin
from holdfast.state.sight import (
    Look,
    Part,
    Sight,
    all_of,
    is_itself,
    joined,
    part_of,
    said,
    scalar,
    turned_part,
)
from holdfast.state.tensors import leaf_entry, local_of
from holdfast.state.views import View, box_view, patch_view, whole_view

Shape = tuple[int, ...]


Found = tuple[Origin, torch.Tensor]


class Through:
    """Rules and declarations, on one rank of ``world``.

    ``table``: the leaves that the rules lead to, as they are made of those of a checkpoint that
    was saved without the rules.
    """

    def __init__(
        self, rules: Rules | None, rank: int, world: int, table: Table | None = None
    ) -> None:
        self.rules = rules
        self.table = table
        self.rank = rank
        self.world = world
        self._known: dict[tuple[str, Shape, object], list[Look]] = {}

    def sight(self, origin: Origin, tensor: torch.Tensor) -> Sight | None:
        """What ``tensor`` is of which stored leaves; None where it is a leaf by itself.

        UsageError names a leaf that does not fit its rule or its declaration, UnsupportedState one
        whose part of a leaf cannot be known.
        """
        owner = tensor if origin.parameter is None else origin.parameter
        if self._is_plain(owner) and declared(tensor) is None:
            return None
        found: Sight | None
        if tensor.shape == owner.shape:
            looks = self._looks(origin, owner)
            found = joined([self._held(origin, tensor, look) for look in looks], tensor, looks)
        elif tensor.numel() == 1 and not isinstance(tensor, DTensor):
            found = scalar(origin, tuple(tensor.shape), self._looks(origin, owner))
        else:
            found = self._other(origin, tensor, owner)
        return None if found is None or is_itself(origin, found, tensor) else found

    def leaves(self, origin: Origin) -> list[str]:
        """The stored leaves that a parameter is made of, by the names the rules give them."""
        assert origin.parameter is not None
        if self._is_plain(origin.parameter):
            return [origin.name]
        seen = [one for _, one, _ in self._looks(origin, origin.parameter)]
        return list(dict.fromkeys(leaf for one in seen for leaf in one.leaves))

    def made_of(self, origin: Origin) -> dict[str, Part]:
        """The same, with their shapes: nothing is said of what this rank has of them."""
        assert origin.parameter is not None
        tensor = origin.parameter
        if self._is_plain(tensor):
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
        if all(math.prod(shape) == 1 for _, shape, _ in (*names, *leaves)):
            first = leaves[0][0]  # numbers are one, however many each is stored as
            return {name: first for name, *_ in names if name != first}
        if [part[1:] for part in names] != [part[1:] for part in leaves]:
            raise UsageError(
                f"{one[0].leaf} and {leaf[0].leaf} are one tensor, and the rules see it as parts "
                "of different leaves under its two names: give both the same kinds",
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

    def _looks(self, origin: Origin, tensor: torch.Tensor) -> list[Look]:
        """What of which leaves of the training a parameter is, each as the rules see it.

        The state of an optimizer asks for the same as its parameter, and every save anew.
        """
        what = "on a mesh" if isinstance(tensor, DTensor) else declared(tensor)
        key = origin.name, tuple(tensor.shape), what
        if key not in self._known:
            self._known[key] = self._look(origin, tensor)
        return self._known[key]

    def _look(self, origin: Origin, tensor: torch.Tensor) -> list[Look]:
        what = declared(tensor)
        shape = tuple(tensor.shape)
        if isinstance(tensor, DTensor):  # what it holds is asked of each tensor that has its shape
            return [(all_of(shape), self._see(origin.name, shape), False)]
        if what is not None:
            is_flat = not isinstance(what, Shard)
            return [
                (one, self._see(one.name or origin.name, one.shape), is_flat)
                for one in what.of(shape)
            ]
        if self.rules is None:
            return [(all_of(shape), self._see(origin.name, shape), False)]
        local = self.rules.local(origin.name, shape, self.rank)
        if local.offsets is None:
            pieces = [Piece(box, inside) for box, inside in local.held]
        else:
            held = zip(local.held, local.offsets, strict=True)
            pieces = [Piece(box, inside, at) for (box, inside), at in held]
        named = Named(None, local.shape, tuple(pieces))
        return [(named, self._see(origin.name, local.shape), local.offsets is not None)]

    def _see(self, name: str, shape: Shape) -> Seen:
        seen = renamed(name, shape) if self.rules is None else self.rules.see(name, shape)
        return seen if self.table is None else self.table.through(seen)

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        return self.rules is None and self.table is None and declared(tensor) is None

    def _held(self, origin: Origin, tensor: torch.Tensor, look: Look) -> Sight:
        named, seen, _ = look
        pieces = named.pieces
        if isinstance(tensor, DTensor):
            entry = leaf_entry(origin.leaf, tensor, self.rank, "split")
            assert isinstance(entry.instance, Instance)
            turned = turned_part(origin, seen, entry.instance, local_of(tensor))
            if turned is not None:
                return said(Sight((turned,)), seen)
            pieces = tuple(Piece(box, inside) for box, inside in entry.boxes(self.rank))
        held = [(piece.box, piece.inside) for piece in pieces]
        found: dict[str, list[tuple[Box, View]]] = {leaf: [] for leaf in seen.leaves}
        for patch in local_patches(seen, held):
            if not patch.box.is_empty:
                view = patch_view(patch, pieces[patch.part])
                found[patch.leaf].append((patch.box, view))
        rows, row = self._copies(origin, tensor, seen)
        parts = [
            part_of(origin.stored(leaf), shape, found[leaf], rows, row)
            for leaf, shape in seen.leaves.items()
        ]
        zeros = [box_view(pieces[at], box) for at, box in local_padding(seen, held)]
        return said(Sight(tuple(parts), tuple(zeros)), seen)

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
            return Sight((part_of(leaf, named.shape, found, 0, 0),))
        if isinstance(tensor, DTensor):
            entry = leaf_entry(leaf, tensor, self.rank, "split")
            assert isinstance(entry.instance, Instance)
            view = whole_view(tuple(local_of(tensor).shape))
            return Sight((Part(leaf, shape, (), (view,), entry.instance),))
        is_cut = not isinstance(owner, DTensor) and any(
            named.pieces != all_of(named.shape).pieces for named, _, _ in looks
        )
        if is_cut and tensor.numel() > 1:
            raise UnsupportedState(
                f"{origin.leaf} has the shape {list(shape)}, and its parameter, of shape "
                f"{list(owner.shape)}, is a part of a leaf: which part of its own leaf the state "
                "is cannot be known. Say it with holdfast.declare(tensor, holdfast.Shard(...))",
                leaf=origin.leaf,
            )
        return Sight((part_of(leaf, shape, [(Box.whole(shape), whole_view(shape))], 0, 0),))


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
    looks: list[Look] = [
        (one, renamed(f"{name}.{one.name}" if is_buffer else name, one.shape), is_flat)
        for one in what.of(tuple(tensor.shape))
    ]
    return joined([through._held(origin, tensor, look) for look in looks], tensor, looks)
