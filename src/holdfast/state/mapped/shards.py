"""Defines ``declare``, by which a program says which part of which leaf its own tensor is.

A framework that cuts tensors by itself, without DTensor, declares for each tensor which elements of
which leaf it holds. Rules, saves and restores then treat the tensor like any other shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from msgspec import Struct
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.errors import UsageError
from holdfast.geometry.box import Box, flat_boxes
from holdfast.geometry.leaf_maps import LocalPatch

Shape = tuple[int, ...]


class ShardPiece(NamedTuple):
    """A box of a leaf, and the elements of the tensor that correspond to it.

    ``inside``: a box of the tensor. With a ``flat``, the elements from number ``flat`` on, in the
    tensor's own order, are first viewed as the shape of ``inside``.
    """

    box: Box
    inside: Box
    flat: int | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """Declares a tensor as the box of a leaf of ``global_shape`` that begins at ``offsets``.

    ``global_shape``: the shape of the whole leaf. ``offsets``: the first index along each of its
    dimensions. ``name``: which parameter it is of, as the module names it; needed only for a
    tensor that an optimizer updates and no module holds.
    """

    global_shape: Sequence[int]
    offsets: Sequence[int]
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", _shape("global_shape", self.global_shape))
        object.__setattr__(self, "offsets", _shape("offsets", self.offsets))
        if len(self.offsets) != len(self.global_shape):
            raise UsageError(
                f"Shard: {len(self.offsets)} offsets for a leaf of {len(self.global_shape)} "
                "dimensions; give one for each"
            )

    def of(self, local: Shape) -> list[NamedShard]:
        """Returns the shards that a tensor of this shape holds; raises UsageError when the
        declaration does not fit it.
        """
        whole, offsets = tuple(self.global_shape), tuple(self.offsets)
        fits = len(local) == len(whole) and all(
            at + extent <= size for at, extent, size in zip(offsets, local, whole, strict=True)
        )
        if not fits:
            raise UsageError(
                f"a tensor of shape {list(local)} is no part, from {list(offsets)} on, of a leaf "
                f"of shape {list(whole)}: declare the shape of the whole leaf, and where the "
                "tensor begins in it"
            )
        inside = Box.whole(local)
        pieces = () if inside.is_empty else (ShardPiece(inside.shift(offsets), inside),)
        return [NamedShard(self.name, whole, pieces)]


@dataclass(frozen=True, slots=True)
class FlatShard:
    """Declares a tensor as a run of a leaf's elements, in row-major order, from number ``start``
    on.

    Elements beyond the leaf's last one are padding: not stored, and zero after a restore.

    ``global_shape``: the shape of the whole leaf. ``start``: the number of its first element in
    row-major order. ``name``: as for ``Shard``. ``within``: (offsets, shape) of a box of the leaf,
    whose elements are counted and not those of the whole leaf: of the part that a tensor parallel
    rank has, for example.
    """

    global_shape: Sequence[int]
    start: int
    name: str | None = None
    within: tuple[Sequence[int], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", _shape("global_shape", self.global_shape))
        _count("start", self.start)
        if self.within is not None:
            offsets, shape = (_shape("within", each) for each in self.within)
            Shard(self.global_shape, offsets).of(shape)
            object.__setattr__(self, "within", (offsets, shape))

    def of(self, local: Shape) -> list[NamedShard]:
        """Returns the shards that a tensor of this shape holds."""
        size, whole = math.prod(local), tuple(self.global_shape)
        offsets, counted = self.within or ((0,) * len(whole), whole)
        stop = min(self.start + size, math.prod(counted))
        run = _run(tuple(counted), min(self.start, stop), stop, 0)
        pieces = (piece._replace(box=piece.box.shift(tuple(offsets))) for piece in run)
        return [NamedShard(self.name, whole, tuple(pieces))]


class FlatRange(NamedTuple):
    """Declares that the ``size`` elements of a buffer from ``at`` on are those of a leaf from
    ``start`` on.

    All count elements; the leaf's are in row-major order. With a ``size`` of 0 the leaf belongs to
    the buffer, but this rank has none of its elements.

    ``name``: the parameter. ``global_shape``: the shape of the whole leaf. ``start``: the first
    element in the leaf. ``size``: how many elements. ``at``: the first element in the buffer.
    """

    name: str
    global_shape: Sequence[int]
    start: int
    size: int
    at: int


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """Declares a tensor as a row of elements of several leaves, as ZeRO's optimizers keep them.

    Elements that no range names are padding: not stored, and zero after a restore. Names are those
    of the module's parameters.
    """

    ranges: Sequence[tuple[str, Sequence[int], int, int, int]]
    """Each item is a ``FlatRange``, or the arguments of one as a tuple."""

    def __post_init__(self) -> None:
        ranges = tuple(FlatRange(*each) for each in self.ranges)
        for each in ranges:
            for what in ("start", "size", "at"):
                _count(f"{each.name}: {what}", getattr(each, what))
            shape = _shape(f"{each.name}: global_shape", each.global_shape)
            if each.start + each.size > math.prod(shape):
                raise UsageError(
                    f"{each.name}: elements {each.start} to {each.start + each.size} of a leaf of "
                    f"shape {list(shape)}, which has {math.prod(shape)}"
                )
        ranges = tuple(each._replace(global_shape=tuple(each.global_shape)) for each in ranges)
        ordered = sorted((r for r in ranges if r.size), key=lambda r: r.at)
        for one, other in pairwise(ordered):
            if one.at + one.size > other.at:
                raise UsageError(
                    f"{one.name} and {other.name} share elements of one buffer: ranges are disjoint"
                )
        object.__setattr__(self, "ranges", ranges)

    def of(self, local: Shape) -> list[NamedShard]:
        """Returns the shards that a tensor of this shape holds; raises UsageError when it is too
        short.
        """
        size = math.prod(local)
        found: dict[str, NamedShard] = {}
        for name, shape, start, length, at in self.ranges:
            if at + length > size:
                raise UsageError(
                    f"{name}: elements {at} to {at + length} of a buffer that has {size}"
                )
            whole = tuple(shape)
            before = found.get(name, NamedShard(name, whole, ()))
            if before.shape != whole:
                raise UsageError(f"{name}: two ranges of one buffer give it different shapes")
            pieces = (*before.pieces, *_run(whole, start, start + length, at))
            found[name] = NamedShard(name, whole, pieces)
        return list(found.values())


Declared = Shard | FlatShard | FlatBuffer


class NamedShard(NamedTuple):
    """The part of one leaf that a tensor holds. ``name``: given if the declaration has one."""

    name: str | None
    shape: Shape
    pieces: tuple[ShardPiece, ...]


def _run(shape: Shape, start: int, stop: int, at: int) -> Iterator[ShardPiece]:
    for box in flat_boxes(shape, start, stop):
        yield ShardPiece(box, Box.whole(box.shape), at)
        at += box.volume


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
_changes: list[None] = []


def declare(tensor: torch.Tensor, what: Declared) -> torch.Tensor:
    """Declares that ``tensor`` is a part of a leaf, and returns the tensor.

    ``tensor``: a plain tensor. ``what``: a ``Shard``, a ``FlatShard`` or a ``FlatBuffer``.

    The declaration lives as long as the tensor, and is about this very object. Optimizer state for
    it that has its shape is the same part of its own leaf. Raises UsageError when the tensor cannot
    be that part.
    """
    if not isinstance(what, Shard | FlatShard | FlatBuffer):
        raise UsageError(
            f"{what!r:.60} declares no part of a leaf: give a holdfast.Shard, FlatShard or "
            "FlatBuffer"
        )
    if type(tensor).__name__ == "DTensor" or not isinstance(tensor, torch.Tensor):
        raise UsageError(
            f"a {type(tensor).__qualname__} cannot be declared a part of a leaf: only plain "
            "tensors need it, for a DTensor says itself what it holds"
        )
    if not isinstance(what, Shard) and tensor.ndim != 1 and not tensor.is_contiguous():
        raise UsageError(
            f"a tensor of shape {list(tensor.shape)} that is not contiguous is no run of elements: "
            "make it contiguous, or declare a holdfast.Shard"
        )
    what.of(tuple(tensor.shape))
    if _known.get(tensor) != what:
        _known[tensor] = what
        _changes.append(None)
    return tensor


def declared(tensor: torch.Tensor) -> Declared | None:
    """Returns the declaration made for this very tensor, if there is one."""
    found: Declared | None = _known.get(tensor) if _known else None
    return found


def declarations() -> int:
    """Counts the declarations made so far: a new one may change how a tensor is stored."""
    return len(_changes)


def names_of(what: Declared) -> list[str]:
    """Returns the names of parameters in a declaration."""
    found: Iterable[str | None] = (
        [name for name, *_ in what.ranges] if isinstance(what, FlatBuffer) else [what.name]
    )
    return list(dict.fromkeys(name for name in found if name is not None))


def _count(what: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise UsageError(f"{what} is {value!r:.60}: give a whole number from 0 on")


def _shape(what: str, value: Sequence[int]) -> Shape:
    found = tuple(value)
    for each in found:
        _count(what, each)
    return found


# Describes views of a tensor's memory as boxes of leaves. Nothing is ever copied.


class View(Struct, frozen=True):
    """A way to view elements of a tensor as a box of a leaf.

    With a ``flat``, the elements from that number on are viewed in the shape ``run`` first. Then
    ``inside`` is cut out, and its dimensions are put in the leaf's order: ``order`` has, for each
    dimension of the leaf, the dimension of ``inside``, or -1 where the leaf has extent 1. A
    dimension of ``inside`` that ``order`` does not name has extent 1.
    """

    inside: Box
    order: tuple[int, ...]
    flat: int | None = None
    run: tuple[int, ...] = ()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the view; it shares the tensor's memory, and has the shape of the box."""
        if self.flat is not None:
            size = math.prod(self.run)
            row = tensor if tensor.ndim == 1 else tensor.view(-1)
            tensor = row[self.flat : self.flat + size].view(self.run)
        if self.inside.shape != tuple(tensor.shape):
            tensor = tensor[self.inside.slices()]
        if self.order == tuple(range(tensor.ndim)):
            return tensor
        named = [dim for dim in self.order if dim >= 0]
        dropped = [dim for dim in range(tensor.ndim) if dim not in named]
        tensor = tensor.permute([*named, *dropped])  # a list: there may be none
        for _ in dropped:
            tensor = tensor.select(-1, 0)
        for at, dim in enumerate(self.order):
            if dim < 0:
                tensor = tensor.unsqueeze(at)
        return tensor

    def behind(self) -> View:
        """Returns the same view as one row of a leaf with one more dimension in front."""
        return View(self.inside, (-1, *self.order), self.flat, self.run)


def whole_view(shape: tuple[int, ...]) -> View:
    """Returns the view of a whole tensor."""
    return View(Box.whole(shape), tuple(range(len(shape))))


def patch_view(patch: LocalPatch, piece: ShardPiece) -> View:
    """Returns the view of the patch within ``piece``, shaped as the box of its leaf."""
    named = {there: here for here, there in enumerate(patch.dims) if there >= 0}
    order = tuple(named.get(dim, -1) for dim in range(patch.box.ndim))
    return View(patch.local, order, piece.flat, _run_of_view(piece))


def box_view(piece: ShardPiece, box: Box) -> View:
    """Returns the view of a box given in the coordinates of ``piece.inside``."""
    return View(box, tuple(range(box.ndim)), piece.flat, _run_of_view(piece))


def _run_of_view(piece: ShardPiece) -> tuple[int, ...]:
    return () if piece.flat is None else piece.inside.shape
