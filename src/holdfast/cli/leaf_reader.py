"""Reads leaves of any size in portions that fit into memory, as numbers and as statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.layout import Layout
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import CARRIERS, Array, read_wants
from holdfast.restore.reading.reader import NUMPY_NAMES

# Reads leaves of any size in portions that fit into memory.
#
# Commands that read elements (``diff``, ``dump``) request at most ``BATCH_BYTES`` at once.


#: The most that is read at once from one checkpoint.
BATCH_BYTES = 32 << 20

#: Takes boxes, returns carriers of their elements. ``read`` is the one that reads.
Read = Callable[[Checkpoint, Sequence[Want]], list[Array]]


def read(checkpoint: Checkpoint, wants: Sequence[Want]) -> list[Array]:
    """Reads the elements of boxes, verified, in the order of ``wants``, as carriers of their
    size.
    """
    dtypes = {leaf.name: leaf.dtype for leaf in checkpoint.layout.leaves}
    arrays: list[Array] = [
        np.empty(want.box.shape, dtype=CARRIERS[ITEMSIZE[dtypes[want.leaf]]]) for want in wants
    ]
    numbered = [Want(want.leaf, want.box, key) for key, want in enumerate(wants)]
    read_wants(checkpoint, numbered, dict(enumerate(arrays)))
    return arrays


def cut(box: Box, limit: int) -> Iterator[Box]:
    """Cuts ``box`` into parts of at most ``limit`` elements, each contiguous in it, in row-major
    order.
    """
    if box.is_empty:
        return
    if box.volume <= limit:
        yield box
        return
    for part in box.split(-(-box.volume // limit)):
        yield from cut(part, limit)


def in_stored_order(layout: Layout, leaves: Iterable[int]) -> Iterator[Want]:
    """Yields all elements of ``leaves`` as they lie in the images: nothing is read twice to get
    them.
    """
    stored = [(rank, leaf, box) for leaf in leaves for rank, box in layout.owners(leaf)]
    for _, number, box in sorted(stored, key=lambda each: each[:2]):
        leaf = layout.leaves[number]
        for part in cut(box, BATCH_BYTES // ITEMSIZE[leaf.dtype]):
            yield Want(leaf.name, part, number)


def batches(layout: Layout, wants: Iterable[Want]) -> Iterator[list[Want]]:
    """Joins small neighbours, which often share a block, up to ``BATCH_BYTES``."""
    itemsize = {leaf.name: ITEMSIZE[leaf.dtype] for leaf in layout.leaves}
    together: list[Want] = []
    size_bytes = 0
    for want in wants:
        more = want.box.volume * itemsize[want.leaf]
        if together and size_bytes + more > BATCH_BYTES:
            yield together
            together, size_bytes = [], 0
        together.append(want)
        size_bytes += more
    if together:
        yield together


# Converts elements of every dtype to numbers that numpy computes with, without torch.
#
# numpy has no bfloat16 and no float8. Their bits are widened to float32, which holds each of them
# exactly; tests/cli/test_elements.py compares every one of them with torch's.


#: Elements converted together: widened to float64 they take at most this, times eight.
CHUNK_ELEMENTS = 1 << 20

#: Types that numpy has itself. Booleans stay bytes, so that one that is neither 0 nor 1 is visible.
NATIVE: dict[str, str] = {**NUMPY_NAMES, "BOOL": "u1"}


def has_numbers(dtype: str) -> bool:
    """True if elements are numbers; packed and opaque ones are only bits."""
    return dtype in NATIVE or dtype in _FLOAT8 or dtype in ("BF16", "F8_E8M0", "C32")


def numbers(raw: Array, dtype: str) -> Array:
    """Converts carriers to the numbers they stand for, in the same shape. ``has_numbers`` says for
    which dtypes.
    """
    flat: Array = np.ascontiguousarray(raw).reshape(-1)
    return _flat_numbers(flat, dtype).reshape(raw.shape)


def _flat_numbers(flat: Array, dtype: str) -> Array:
    if dtype in NATIVE:
        return flat.view(NATIVE[dtype])
    if dtype == "BF16":
        return (flat.view("u2").astype("u4") << 16).view("f4")
    if dtype == "C32":
        return flat.view("f2").astype("f4").view("c8")
    found: Array = _FLOAT8_VALUES[dtype][flat.view("u1")]
    return found


def as_bytes(raw: Array) -> memoryview:
    """Returns the bytes of carriers in row-major order."""
    return np.ascontiguousarray(raw).reshape(-1).view("u1").data


def bits(raw: Array) -> Array:
    """Returns carriers as unsigned integers, one or (16 bytes) two an element, in two
    dimensions.
    """
    flat: Array = np.ascontiguousarray(raw).reshape(-1)
    width = min(8, flat.itemsize)
    return flat.view(f"u{width}").reshape(flat.size, flat.itemsize // width)


def plain(number: Any, dtype: str) -> Any:
    """Converts one number to Python's types: a bool, int or float, or for complex ones a pair."""
    if dtype == "BOOL" and int(number) in (0, 1):
        return bool(number)
    value = number.item() if isinstance(number, np.generic) else number
    return [value.real, value.imag] if isinstance(value, complex) else value


def element(raw: Array, dtype: str) -> Any:
    """Converts one carrier to a value for people and JSON; bits in hexadecimal where it is no
    number.
    """
    if has_numbers(dtype):
        return plain(numbers(raw, dtype).reshape(-1)[0], dtype)
    return "0x" + np.ascontiguousarray(raw).tobytes()[::-1].hex()


def short_text(value: Any, dtype: str) -> str:
    """Formats the result of ``element`` in as few digits as distinguish it from its neighbours."""
    if isinstance(value, float) and dtype != "F64":
        with np.errstate(over="ignore"):
            return str(np.float32(value))
    return str(value)


#: Exponent bits, mantissa bits, bias, and whether 0x80 is the one NaN (then there is no -0.0).
_FLOAT8: dict[str, tuple[int, int, int, bool]] = {
    "F8_E4M3": (4, 3, 7, False),
    "F8_E5M2": (5, 2, 15, False),
    "F8_E4M3FNUZ": (4, 3, 8, True),
    "F8_E5M2FNUZ": (5, 2, 16, True),
}


def _float8(code: int, dtype: str) -> float:
    """Returns the value of one code (Micikevicius et al. 2022, "FP8 formats for deep learning")."""
    exponent_bits, mantissa_bits, bias, is_fnuz = _FLOAT8[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    if is_fnuz and code == 0x80:
        return math.nan
    if dtype == "F8_E4M3" and code & 0x7F == 0x7F:  # no infinity, and one NaN of either sign
        return math.nan
    if dtype == "F8_E5M2" and exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


_FLOAT8_VALUES: dict[str, Array] = {
    dtype: np.array([_float8(code, dtype) for code in range(256)], dtype="f4") for dtype in _FLOAT8
} | {"F8_E8M0": np.array([*(2.0 ** (code - 127) for code in range(255)), math.nan], dtype="f4")}


# Computes statistics of the elements of a box, portion by portion.


@dataclass(slots=True)
class Statistics:
    """Smallest, largest, mean and standard deviation (of the population) of the finite elements.

    For complex numbers, of their magnitudes. Elements that are not finite are counted instead.
    """

    dtype: str
    elements: int = 0
    finite: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    negative_inf: int = 0
    min: Any = None
    max: Any = None
    mean: float | None = None
    _squares: float = 0.0  # sum of the squared distances from the mean

    @property
    def std(self) -> float | None:
        """The standard deviation of the finite elements; None when there are none."""
        return math.sqrt(self._squares / self.finite) if self.finite else None

    def add(self, raw: Array) -> None:
        """Adds the carriers of more elements."""
        flat = raw.reshape(-1)
        for start in range(0, flat.size, CHUNK_ELEMENTS):
            self._add(numbers(flat[start : start + CHUNK_ELEMENTS], self.dtype))

    def record(self) -> dict[str, Any]:
        """Returns the same for machines."""
        names = ("elements", "finite", "zeros", "nan", "inf", "negative_inf", "min", "max", "mean")
        return {name: getattr(self, name) for name in names} | {"std": self.std}

    def _add(self, found: Array) -> None:
        if found.dtype.kind == "c":
            with np.errstate(over="ignore", invalid="ignore"):
                found = np.abs(found.astype("c16"))
        self.elements += found.size
        self.zeros += int((found == 0).sum())
        if found.dtype.kind == "f":
            self.nan += int(np.isnan(found).sum())
            self.inf += int((found == np.inf).sum())
            self.negative_inf += int((found == -np.inf).sum())
            found = found[np.isfinite(found)]
        if found.size:
            self._extend(found)

    def _extend(self, found: Array) -> None:
        low, high = plain(found.min(), self.dtype), plain(found.max(), self.dtype)
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        wide = found.astype("f8")
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(wide.mean())
            squares = float(((wide - mean) ** 2).sum())
        # Two sets are merged as T. F. Chan, G. H. Golub and R. J. LeVeque do (1979): one sum of
        # squares over everything would lose digits where the mean is far from zero.
        before, self.finite = self.finite, self.finite + found.size
        apart = mean - (self.mean or 0.0)
        self.mean = (self.mean or 0.0) + apart * found.size / self.finite
        self._squares += squares + apart * apart * before * found.size / self.finite
