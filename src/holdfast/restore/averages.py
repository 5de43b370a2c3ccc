"""Averages the copies of a leaf that several saved ranks held, where the state has one tensor.

Elements of a type that has a mean are averaged as they are read. All other copies must be equal,
bit for bit; that is checked before anything is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from holdfast.geometry.box import Box, flat_boxes
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import CARRIERS, Array, read_wants
from holdfast.state.mapped.checkpoint_view import CheckpointView, TiedCopies
from holdfast.state.tensors import TORCH_DTYPES, empty

_T = TypeVar("_T")
#: Elements of differing copies that are compared at a time.
_ELEMENTS = 4 << 20


class AveragedCopies(NamedTuple):
    """A box of a leaf of which each saved rank had its own copy; ``rows`` counts the copies."""

    leaf: str
    dtype: str
    rows: int
    box: Box


class AveragedLeaf(NamedTuple):
    """Copies to average, and the destination of their mean."""

    of: AveragedCopies
    into: torch.Tensor


def average(checkpoint: Checkpoint, means: Sequence[AveragedLeaf]) -> int:
    """Fill each destination with the mean of its copies; return the bytes read.

    Sums are in double precision, in the order of the ranks, and rounded once.
    """
    bounded = _bounded(means, lambda mean: mean.of.box.volume)
    return sum(_average(checkpoint, some) for some in bounded)


def _average(checkpoint: Checkpoint, means: Sequence[AveragedLeaf]) -> int:
    sums = [torch.zeros(one.of.box.shape, dtype=_wide(one.of.dtype)) for one in means]
    read = 0
    for copies, size_bytes in _rows(checkpoint, [one.of for one in means]):
        read += size_bytes
        for key, copy in copies.items():
            sums[key] += copy.to(sums[key].dtype)  # torch cannot add float8 to another type
    for one, total in zip(means, sums, strict=True):
        one.into.copy_(total / one.of.rows)
    return read


def unequal_copies(checkpoint: Checkpoint, view: CheckpointView) -> list[str]:
    """List, in words, copies that differ, have no mean, and belong to one tensor here.

    The copies are read before anything is changed.
    """
    named = [
        (one.name, AveragedCopies(one.leaf, one.dtype, one.count, box))
        for one in view.rows
        for box in one.boxes
    ]
    unequal: dict[str, str] = {}
    for some in _bounded(named, lambda one: one[1].box.volume):
        firsts: dict[int, torch.Tensor] = {}
        for copies, _ in _rows(checkpoint, [each for _, each in some]):
            for key, copy in copies.items():
                if _bits(firsts.setdefault(key, copy)) != _bits(copy):
                    name, each = some[key]
                    unequal.setdefault(name, _refusal(name, each))
    return list(unequal.values())


def unequal_ties(checkpoint: Checkpoint, view: CheckpointView) -> list[str]:
    """List, in words, tensors that are one here, of which the checkpoint has two unequal leaves.

    The leaves are read before anything is changed.
    """
    return [
        f"{one.name}: tied to {one.leaf} in the model, but not in the checkpoint, where {one.copy} "
        "has other bytes"
        for one in view.tied
        if not all(_is_same(checkpoint, one, view, part) for part in _parts(one.boxes))
    ]


def _parts(boxes: Sequence[Box]) -> Iterator[Box]:
    """Yield the boxes in parts of so few elements that two of them may be held."""
    for box in boxes:
        for start in range(0, box.volume, _ELEMENTS):
            stop = min(start + _ELEMENTS, box.volume)
            yield from (one.shift(box.start) for one in flat_boxes(box.shape, start, stop))


def _is_same(checkpoint: Checkpoint, tied: TiedCopies, view: CheckpointView, part: Box) -> bool:
    dtype = view.specs[tied.name][0]
    copies = [empty(part.shape, dtype) for _ in range(2)]
    wants = [Want(leaf, part, number) for number, leaf in enumerate((tied.leaf, tied.copy))]
    read_wants(checkpoint, wants, dict(enumerate(map(as_carrier, copies))))
    return _bits(copies[0]) == _bits(copies[1])


def _refusal(name: str, copies: AveragedCopies) -> str:
    return (
        f"{name}: averaged by its rule, and the {copies.rows} copies of {copies.leaf} differ, and "
        f"are {copies.dtype}, which has no mean. Restore it on as many ranks as saved it, or leave "
        "it out by only= and set it yourself"
    )


def unequal_numbers(checkpoint: Checkpoint, view: CheckpointView) -> list[str]:
    """List, in words, numbers that are one here, and several unequal ones in the checkpoint.

    The numbers are read before anything is changed.
    """
    if not view.numbers:
        return []
    wants: list[Want] = []
    copies: list[torch.Tensor] = []
    for name, leaves in view.numbers.items():
        dtype, shape = view.specs[name]
        for leaf in leaves:
            wants.append(Want(leaf, Box.whole(shape), len(wants)))
            copies.append(empty(shape, dtype))
    read_wants(checkpoint, wants, dict(enumerate(map(as_carrier, copies))))
    numbers = {want.leaf: number for want, number in zip(wants, copies, strict=True)}
    return [
        f"{name}: one number here, and by the rules made of several that differ: "
        + ", ".join(f"{leaf} is {numbers[leaf].item()}" for leaf in leaves)
        for name, leaves in view.numbers.items()
        if len({_bits(numbers[leaf]) for leaf in leaves}) > 1
    ]


def _rows(
    checkpoint: Checkpoint, copied: Sequence[AveragedCopies]
) -> Iterator[tuple[dict[int, torch.Tensor], int]]:
    """Yield the first copies of all of ``copied`` by index, then the second; and the bytes read."""
    for row in range(max(one.rows for one in copied)):
        there = {key: one for key, one in enumerate(copied) if row < one.rows}
        copies = {key: empty(one.box.shape, one.dtype) for key, one in there.items()}
        wants = [
            Want(one.leaf, Box((row, *one.box.start), (row + 1, *one.box.stop)), key)
            for key, one in there.items()
        ]
        into = {key: as_carrier(copy.unsqueeze(0)) for key, copy in copies.items()}
        yield copies, read_wants(checkpoint, wants, into)


def _bounded(some: Sequence[_T], volume: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Group items so that each group's volume is bounded: each is held twice, perhaps as
    doubles.
    """
    batch: list[_T] = []
    for one in some:
        if batch and sum(map(volume, batch)) + volume(one) > _ELEMENTS:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def _wide(dtype: str) -> torch.dtype:
    return torch.complex128 if TORCH_DTYPES[dtype].is_complex else torch.float64


def _bits(host: torch.Tensor) -> bytes:
    return as_carrier(host).tobytes()


@functools.cache
def _carrier(itemsize: int) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=CARRIERS[itemsize])).dtype


def as_carrier(host: torch.Tensor) -> Array:
    """Return a writable array over a CPU tensor's memory, with elements of the same size."""
    carrier: Array = host.view(_carrier(host.element_size())).numpy()
    return carrier
