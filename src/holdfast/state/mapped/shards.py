"""What a plain tensor is a part of, where its program knows and torch does not.

A framework that cuts tensors by itself, without DTensor, says of each which elements of which leaf
it holds. Rules, saves and restores then treat it like any other shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.flat import flat_boxes

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A box of a leaf, and the elements of the tensor that are it.

    ``inside``: a box of the tensor. Where there is a ``flat``, the elements from that one on, in
    the tensor's own order, are a box of the shape of ``inside``.
    """

    box: Box
    inside: Box
    flat: int | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """The tensor is the box of a leaf of ``global_shape`` that begins at ``offsets``.

    ``name``: which parameter it is of, as the module names it; needed only for a tensor that an
    optimizer updates and no module holds.
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

    def of(self, local: Shape) -> list[Named]:
        """What a tensor of this shape holds; UsageError when that cannot be."""
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
        pieces = () if inside.is_empty else (Piece(inside.shift(offsets), inside),)
        return [Named(self.name, whole, pieces)]


@dataclass(frozen=True, slots=True)
class FlatShard:
    """The tensor is a run of a leaf's elements, in row-major order, from number ``start`` on.

    What it has beyond the leaf's last element is padding: not stored, and zero after a restore.
    ``name`` as for ``Shard``.
    """

    global_shape: Sequence[int]
    start: int
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", _shape("global_shape", self.global_shape))
        _count("start", self.start)

    def of(self, local: Shape) -> list[Named]:
        """What a tensor of this shape holds."""
        size, whole = math.prod(local), tuple(self.global_shape)
        stop = min(self.start + size, math.prod(whole))
        return [Named(self.name, whole, tuple(_run(whole, min(self.start, stop), stop, 0)))]


class FlatRange(NamedTuple):
    """The ``size`` elements of a buffer from ``at`` on are those of a leaf from ``start`` on.

    All count elements; the leaf's are in row-major order. With a ``size`` of 0 the leaf is one of
    the buffer's, but this rank has nothing of it.
    """

    name: str
    global_shape: Sequence[int]
    start: int
    size: int
    at: int


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """The tensor is a row of elements of several leaves, as ZeRO's optimizers keep them.

    What no range names is padding: not stored, and zero after a restore. Names are those of the
    module's parameters.
    """

    ranges: Sequence[tuple[str, Sequence[int], int, int, int]]
    """Each a ``FlatRange``, or what makes one."""

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

    def of(self, local: Shape) -> list[Named]:
        """What a tensor of this shape holds; UsageError when it is too short."""
        size = math.prod(local)
        found: dict[str, Named] = {}
        for name, shape, start, length, at in self.ranges:
            if at + length > size:
                raise UsageError(
                    f"{name}: elements {at} to {at + length} of a buffer that has {size}"
                )
            whole = tuple(shape)
            before = found.get(name, Named(name, whole, ()))
            if before.shape != whole:
                raise UsageError(f"{name}: two ranges of one buffer give it different shapes")
            pieces = (*before.pieces, *_run(whole, start, start + length, at))
            found[name] = Named(name, whole, pieces)
        return list(found.values())


Declared = Shard | FlatShard | FlatBuffer


class Named(NamedTuple):
    """What a tensor holds of one leaf. ``name``: if the declaration has one."""

    name: str | None
    shape: Shape
    pieces: tuple[Piece, ...]


def _run(shape: Shape, start: int, stop: int, at: int) -> Iterator[Piece]:
    for box in flat_boxes(shape, start, stop):
        yield Piece(box, Box.whole(box.shape), at)
        at += box.volume


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
_changes: list[None] = []


def declare(tensor: torch.Tensor, what: Declared) -> torch.Tensor:
    """Say what ``tensor`` is a part of; gives the tensor back.

    It holds as long as the tensor does, for this very object. An optimizer's state for it, where it
    has its shape, is the same part of its own leaf. UsageError when the tensor cannot be that part.
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
    """What was declared of this very tensor."""
    found: Declared | None = _known.get(tensor) if _known else None
    return found


def declarations() -> int:
    """How often something was declared: what is stored of a tensor may change by it."""
    return len(_changes)


def names_of(what: Declared) -> list[str]:
    """The parameters that it names."""
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
