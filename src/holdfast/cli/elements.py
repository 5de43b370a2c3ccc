"""Elements of every dtype as numbers that numpy computes with, without torch.

numpy has no bfloat16 and no float8. Their bits are widened to float32, which holds each of them
exactly; tests/cli/test_elements.py compares every one of them with torch's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from holdfast.load.read import Array

#: Elements looked at together: widened to float64 they take no more than this, times eight.
CHUNK_ELEMENTS = 1 << 20

#: What numpy has itself. Booleans stay bytes: one that is neither 0 nor 1 is to be seen.
NATIVE: dict[str, str] = {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1",
    "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "u1", "C64": "c8", "C128": "c16",
}  # fmt: skip


def has_numbers(dtype: str) -> bool:
    """Whether elements are numbers at all; packed and opaque ones are bits and nothing else."""
    return dtype in NATIVE or dtype in _FLOAT8 or dtype in ("BF16", "F8_E8M0", "C32")


def numbers(raw: Array, dtype: str) -> Array:
    """Carriers as what they stand for, in the same shape. ``has_numbers`` says for which dtypes."""
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
    """The bytes of carriers in row-major order."""
    return np.ascontiguousarray(raw).reshape(-1).view("u1").data


def bits(raw: Array) -> Array:
    """Carriers as unsigned integers, one or (16 bytes) two a element, in two dimensions."""
    flat: Array = np.ascontiguousarray(raw).reshape(-1)
    width = min(8, flat.itemsize)
    return flat.view(f"u{width}").reshape(flat.size, flat.itemsize // width)


def plain(number: Any, dtype: str) -> Any:
    """One number in Python's types: a bool, int or float, or for complex ones a pair."""
    if dtype == "BOOL" and int(number) in (0, 1):
        return bool(number)
    value = number.item() if isinstance(number, np.generic) else number
    return [value.real, value.imag] if isinstance(value, complex) else value


def element(raw: Array, dtype: str) -> Any:
    """One carrier as a value for people and JSON; bits in hexadecimal where it is no number."""
    if has_numbers(dtype):
        return plain(numbers(raw, dtype).reshape(-1)[0], dtype)
    return "0x" + np.ascontiguousarray(raw).tobytes()[::-1].hex()


def short_text(value: Any, dtype: str) -> str:
    """What ``element`` gave, in as few digits as tell it from its neighbours."""
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
    """The value of one code (Micikevicius et al. 2022, "FP8 formats for deep learning")."""
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
