"""The order of an epoch's samples, as a function of seed, epoch and place.

Nothing of it is stored and nothing is drawn: any stretch is computed by itself, in memory for that
stretch, by every rank alike, whatever torch and numpy are installed. It is a keyed permutation: a
Feistel network over the least power of two that holds all samples, applied again to what falls
outside of them (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
Each round can be undone, so no sample can be there twice.

**The numbers are part of the state**: another order would give samples twice to a run that is
resumed in the middle of an epoch. A test pins them.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np

_ROUNDS = 8
_PURPOSE = b"holdfast order 1"
_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_Array = np.ndarray[Any, np.dtype[np.uint64]]


class Order:
    """``samples`` numbers from 0 on, in an order of each epoch's own, or as they come."""

    def __init__(self, samples: int, seed: int, *, shuffle: bool) -> None:
        self.samples, self.seed, self.shuffle = samples, seed, shuffle
        bits = max(1, (samples - 1).bit_length())
        self._right_bits = np.uint64(bits - bits // 2)
        self._left, self._right = _mask(bits // 2), _mask(bits - bits // 2)

    def at(self, epoch: int, start: int, stop: int) -> list[int]:
        """The samples of ``epoch`` from place ``start`` to place ``stop``."""
        if not self.shuffle:
            return list(range(start, stop))
        keys = _keys(self.seed, epoch, self.samples)
        found = self._permuted(np.arange(start, stop, dtype=np.uint64), keys)
        outside = np.flatnonzero(found >= self.samples)
        while outside.size:  # less than half of the power of two lies there: two turns, on average
            found[outside] = self._permuted(found[outside], keys)
            outside = outside[found[outside] >= self.samples]
        numbers: list[int] = found.tolist()
        return numbers

    def _permuted(self, places: _Array, keys: tuple[np.uint64, ...]) -> _Array:
        left, right = places >> self._right_bits, places & self._right
        for number, key in enumerate(keys):
            if number % 2:
                right ^= _mixed(left + key) & self._right
            else:
                left ^= _mixed(right + key) & self._left
        return (left << self._right_bits) | right


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _mixed(number: _Array) -> _Array:
    """Every bit of it hangs on every bit of ``number`` (the last steps of splitmix64)."""
    number = (number ^ (number >> np.uint64(30))) * _C1
    number = (number ^ (number >> np.uint64(27))) * _C2
    return number ^ (number >> np.uint64(31))


@lru_cache(maxsize=8)
def _keys(seed: int, epoch: int, samples: int) -> tuple[np.uint64, ...]:
    """One number for each round."""
    text = f"{seed} {epoch} {samples}".encode()
    digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS, person=_PURPOSE).digest()
    return tuple(np.frombuffer(digest, dtype="<u8").astype(np.uint64))
