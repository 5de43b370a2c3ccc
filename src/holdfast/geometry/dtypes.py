"""The element types a leaf can have, by the names safetensors gives them where it has any."""

from __future__ import annotations

#: Name -> bytes per element, for what safetensors has a name for.
_SAFETENSORS: dict[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "C64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip

#: What it has no name for: torch's own name in capitals, except the complex numbers. The packed
#: and opaque types count whole storage units: FLOAT4_E2M1FN_X2 is one byte that holds two.
_OTHERS: dict[str, int] = {
    "C128": 16, "C32": 4, "FLOAT4_E2M1FN_X2": 1,
    "BITS8": 1, "BITS1X8": 1, "BITS2X4": 1, "BITS4X2": 1, "BITS16": 2,
    **{f"{sign}INT{bits}": 1 for sign in ("", "U") for bits in range(1, 8)},
}  # fmt: skip

#: Name -> bytes per element, for all.
ITEMSIZE: dict[str, int] = _SAFETENSORS | _OTHERS

#: Whose elements have a mean that is one of them. Of whole numbers, packed elements and powers of
#: two it is another.
HAVE_A_MEAN: frozenset[str] = frozenset(
    {"F64", "F32", "F16", "BF16", "C64", "C128"}
    | {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
)

#: Stored in images as bytes (U8); their true name stands in the layout.
STORED_AS_BYTES: frozenset[str] = frozenset(_OTHERS)
