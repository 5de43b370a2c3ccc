"""What several stored copies come to where there is one tensor for them.

Elements that have a mean are averaged as they are read. All others must be equal, bit for bit, and
whether they are is known before anything is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from holdfast.geometry.box import Box
from holdfast.load.move import CARRIERS, Array
from holdfast.load.plan import Want
from holdfast.load.read import read_wants
from holdfast.load.source import Checkpoint
from holdfast.state.offer import Offer
from holdfast.state.tensors import TORCH_DTYPES, empty

_T = TypeVar("_T")
#: So many elements of copies that differ are looked at at a time.
_ELEMENTS = 4 << 20


class Copies(NamedTuple):
    """A box of a leaf of which each saved rank had its own copy, one behind another in ``rows``."""

    leaf: str
    dtype: str
    rows: int
    box: Box


class Mean(NamedTuple):
    """Copies, and where their mean goes."""

    of: Copies
    into: torch.Tensor


def average(checkpoint: Checkpoint, means: Sequence[Mean]) -> int:
    """Fill what is the mean of several copies, each of which is read; how many bytes that was.

    Added up in double precision, in the order of the ranks, and rounded once.
    """
    bounded = _bounded(means, lambda mean: mean.of.box.volume)
    return sum(_average(checkpoint, some) for some in bounded)


def _average(checkpoint: Checkpoint, means: Sequence[Mean]) -> int:
    sums = [torch.zeros(one.of.box.shape, dtype=_wide(one.of.dtype)) for one in means]
    read = 0
    for copies, size_bytes in _rows(checkpoint, [one.of for one in means]):
        read += size_bytes
        for key, copy in copies.items():
            sums[key] += copy.to(sums[key].dtype)  # torch adds no float8 to others
    for one, total in zip(means, sums, strict=True):
        one.into.copy_(total / one.of.rows)
    return read


def unequal_copies(checkpoint: Checkpoint, offer: Offer) -> list[str]:
    """Copies that differ, of which there is one here, and that have no mean; in words.

    They are read before anything is changed.
    """
    named = [
        (one.name, Copies(one.leaf, one.dtype, one.count, box))
        for one in offer.rows
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


def _refusal(name: str, copies: Copies) -> str:
    return (
        f"{name}: averaged by its rule, and the {copies.rows} copies of {copies.leaf} differ, and "
        f"are {copies.dtype}, which has no mean. Restore it on as many ranks as saved it, or leave "
        "it out by only= and set it yourself"
    )


def unequal_numbers(checkpoint: Checkpoint, offer: Offer) -> list[str]:
    """Numbers that are one here, and several that are not equal in what is stored; in words.

    They are read before anything is changed.
    """
    wants: list[Want] = []
    found: list[torch.Tensor] = []
    for name, leaves in offer.numbers.items():
        dtype, shape = offer.specs[name]
        for leaf in leaves:
            wants.append(Want(leaf, Box.whole(shape), len(wants)))
            found.append(empty(shape, dtype))
    read_wants(checkpoint, wants, dict(enumerate(map(as_carrier, found))))
    numbers = {want.leaf: number for want, number in zip(wants, found, strict=True)}
    return [
        f"{name}: one number here, and by the rules made of several that differ: "
        + ", ".join(f"{leaf} is {numbers[leaf].item()}" for leaf in leaves)
        for name, leaves in offer.numbers.items()
        if len({_bits(numbers[leaf]) for leaf in leaves}) > 1
    ]


def _rows(
    checkpoint: Checkpoint, copied: Sequence[Copies]
) -> Iterator[tuple[dict[int, torch.Tensor], int]]:
    """Of all the first copy, then the second: by the place in ``copied``; and the bytes read."""
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
    """Some at a time, for each is held once more, perhaps in double precision."""
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
    """A writable array over a CPU tensor's memory, of elements of the same size."""
    found: Array = host.view(_carrier(host.element_size())).numpy()
    return found
