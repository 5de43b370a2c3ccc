"""Two boxes of one leaf, element by element: bit for bit, and by how much they differ.

What counts is the bits. Elements whose bits differ although their values are the same, as 0.0 and
-0.0 or two forms of NaN, are counted among the others and once more by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.cli.elements import CHUNK_ELEMENTS, bits, element, has_numbers, numbers
from holdfast.geometry.box import Box
from holdfast.load.read import Array


@dataclass(frozen=True, slots=True)
class First:
    """The first element, in row-major order of the leaf, that differs."""

    index: tuple[int, ...]
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Difference:
    """What was found in some boxes of a leaf.

    ``max_abs`` and ``max_rel`` are the largest of |a-b| and |a-b|/max(|a|,|b|) where both are
    numbers, None where no such elements differ; ``nan`` counts those where one of them is not.
    """

    elements: int = 0
    differing: int = 0
    same_value: int = 0
    nan: int = 0
    max_abs: int | float | None = None
    max_rel: float | None = None
    first: First | None = None


def compare(a: Array, b: Array, dtype: str, box: Box) -> Difference:
    """Compare the carriers of one box; ``box`` says where in the leaf it is."""
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    starts = range(0, flat_a.size, CHUNK_ELEMENTS)
    found = [_compare_chunk(flat_a, flat_b, dtype, box, start) for start in starts]
    return joined(found)


def joined(parts: Iterable[Difference]) -> Difference:
    """What was found in all of ``parts``."""
    found = list(parts)
    firsts = [part.first for part in found if part.first is not None]
    return Difference(
        elements=sum(part.elements for part in found),
        differing=sum(part.differing for part in found),
        same_value=sum(part.same_value for part in found),
        nan=sum(part.nan for part in found),
        max_abs=max((x.max_abs for x in found if x.max_abs is not None), default=None),
        max_rel=max((x.max_rel for x in found if x.max_rel is not None), default=None),
        first=min(firsts, key=lambda first: first.index, default=None),
    )


def _compare_chunk(a: Array, b: Array, dtype: str, box: Box, start: int) -> Difference:
    a, b = a[start : start + CHUNK_ELEMENTS], b[start : start + CHUNK_ELEMENTS]
    where = np.flatnonzero((bits(a) != bits(b)).any(axis=1))
    if not where.size:
        return Difference(elements=a.size)
    at = int(where[0])
    first = First(_index(start + at, box), element(a[at], dtype), element(b[at], dtype))
    if not has_numbers(dtype):
        return Difference(a.size, where.size, first=first)
    same_value, nan, max_abs, max_rel = _amounts(numbers(a[where], dtype), numbers(b[where], dtype))
    return Difference(a.size, where.size, same_value, nan, max_abs, max_rel, first)


def _index(flat: int, box: Box) -> tuple[int, ...]:
    inside = np.unravel_index(flat, box.shape) if box.ndim else ()
    return tuple(int(i) + start for i, start in zip(inside, box.start, strict=True))


def _amounts(a: Array, b: Array) -> tuple[int, int, int | float | None, float | None]:
    """(same value, one is NaN, largest absolute, largest relative difference) of some elements."""
    if a.dtype.kind in "iu":
        return _whole_amounts(a, b)
    wide = "c16" if a.dtype.kind == "c" else "f8"
    a, b = a.astype(wide), b.astype(wide)
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    same = (a == b) | (nan_a & nan_b)
    fit = ~(nan_a | nan_b)
    if not fit.any():
        return int(same.sum()), int((nan_a != nan_b).sum()), None, None
    a, b = a[fit], b[fit]
    with np.errstate(all="ignore"):
        apart = np.abs(a - b)
        relative = apart / np.maximum(np.abs(a), np.abs(b))
    # What is infinite is infinitely far from anything else; 0.0 is not far from -0.0.
    relative = np.where(np.isinf(apart), np.inf, np.where(apart == 0, 0.0, relative))
    return (
        int(same.sum()),
        int((nan_a != nan_b).sum()),
        float(apart.max()),
        float(relative.max()),
    )


def _whole_amounts(a: Array, b: Array) -> tuple[int, int, int, float]:
    """The same for whole numbers, exact where float64 would not be."""
    # Modulo 2**64 the difference of the larger and the smaller is right for either sign.
    ua, ub = (
        a.astype("i8" if a.dtype.kind == "i" else "u8").view("u8"),
        b.astype("i8" if b.dtype.kind == "i" else "u8").view("u8"),
    )
    apart = np.where(a > b, ua - ub, ub - ua)
    larger = np.maximum(np.abs(a.astype("f8")), np.abs(b.astype("f8")))
    return 0, 0, int(apart.max()), float((apart / larger).max())
