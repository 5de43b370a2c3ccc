"""The arithmetic of the codes in numpy, bit for bit what ISA-L computes, where ISA-L is missing.

A sum is built bit by bit of its coefficients (Horner): from the highest bit down, the sum so far
is doubled and the sources that have the bit are added. For RAID 6 that is the usual Q. It goes
through the buffers in tiles that stay in the processor's cache, and numpy holds no lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.redundancy.matrices import POLYNOMIAL, Row

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

TILE_BYTES = 1 << 18
_SIGN = np.int8(7)
_REDUCE = np.uint8(POLYNOMIAL & 0xFF)


class NumpyBackend:
    """Needs nothing but numpy."""

    name = "numpy"

    def combine(
        self, rows: Sequence[Row], sources: Sequence[Bytes], outputs: Sequence[Bytes], *, add: bool
    ) -> None:
        """See ``holdfast.redundancy.erasure.Backend``."""
        size = len(outputs[0])
        spare, total = (np.empty(min(size, TILE_BYTES), np.uint8) for _ in range(2))
        for start in range(0, size, TILE_BYTES):
            tiles = [source[start : start + TILE_BYTES] for source in sources]
            for row, whole in zip(rows, outputs, strict=True):
                output = whole[start : start + TILE_BYTES]
                found = total[: len(output)] if add else output
                _sum(row, tiles, found, spare[: len(output)])
                if add:
                    np.bitwise_xor(output, found, out=output)


def _sum(row: Row, tiles: Sequence[Bytes], found: Bytes, spare: Bytes) -> None:
    """``found`` becomes the sum of the tiles, each times its coefficient."""
    begun = False
    for bit in reversed(range(max(row).bit_length())):
        if begun:
            _double(found, spare)
        for factor, tile in zip(row, tiles, strict=True):
            if factor >> bit & 1 and begun:
                np.bitwise_xor(found, tile, out=found)
            elif factor >> bit & 1:
                np.copyto(found, tile)
                begun = True
    if not begun:
        found[:] = 0


def _double(found: Bytes, spare: Bytes) -> None:
    """Times 2 in GF(2^8). Shifting the sign out gives 255 where the polynomial is to be added."""
    np.right_shift(found.view(np.int8), _SIGN, out=spare.view(np.int8))
    np.bitwise_and(spare, _REDUCE, out=spare)
    np.add(found, found, out=found)
    np.bitwise_xor(found, spare, out=found)
