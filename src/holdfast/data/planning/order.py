"""Computes an epoch's order, each rank's share of a step, and list shares, for any world size.

Nothing of it is stored and nothing is drawn: any range is computed by itself, in memory for that
range, by every rank alike, whatever torch and numpy are installed. It is a keyed permutation: a
Feistel network over the least power of two that holds all samples, applied again to numbers outside
of them (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Each
round can be undone, so no sample can occur twice.

**The numbers are part of the state**: another order would give samples twice to a run that is
resumed in the middle of an epoch. A test pins them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from holdfast.errors import UsageError
from holdfast.policy.arguments import whole

_ROUNDS = 8
_PURPOSE = b"holdfast order 1"
_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_Array = np.ndarray[Any, np.dtype[np.uint64]]


class Order:
    """The numbers from 0 to ``samples``, shuffled for each epoch, or in ascending order."""

    def __init__(self, samples: int, seed: int, *, shuffle: bool) -> None:
        self.samples, self.seed, self.shuffle = samples, seed, shuffle
        bits = max(1, (samples - 1).bit_length())
        self._right_bits = np.uint64(bits - bits // 2)
        self._left, self._right = _mask(bits // 2), _mask(bits - bits // 2)

    def at(self, epoch: int, start: int, stop: int) -> list[int]:
        """Returns the samples of ``epoch`` from place ``start`` to place ``stop``."""
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
    """Mixes the bits: every result bit depends on every bit of ``number`` (the last steps of
    splitmix64).
    """
    number = (number ^ (number >> np.uint64(30))) * _C1
    number = (number ^ (number >> np.uint64(27))) * _C2
    return number ^ (number >> np.uint64(31))


@lru_cache(maxsize=8)
def _keys(seed: int, epoch: int, samples: int) -> tuple[np.uint64, ...]:
    """Returns one key for each round."""
    text = f"{seed} {epoch} {samples}".encode()
    digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS, person=_PURPOSE).digest()
    return tuple(np.frombuffer(digest, dtype="<u8").astype(np.uint64))


# Plans which samples of which epoch each step takes, for any number of ranks.
#
# Every sample of an epoch is taken once, in the epoch's order, and every rank has a batch in every
# step: with collectives in the backward, a rank without one would block all others. Both hold after
# any change of the number of ranks, because a step is a function of the place alone.


class SamplePlace(NamedTuple):
    """The progress of all ranks together: ``consumed`` samples of ``epoch``. Places are ordered."""

    epoch: int
    consumed: int


class Stretch(NamedTuple):
    """Places ``start`` to ``stop`` of an epoch's order."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.stop - self.start


class SampleStep(NamedTuple):
    """The samples that all ranks together take at once, and the place after it."""

    stretches: tuple[Stretch, ...]
    after: SamplePlace

    @property
    def epoch(self) -> int:
        """The epoch that the step belongs to."""
        return self.stretches[-1].epoch

    def share(self, rank: int, world: int) -> list[Stretch]:
        """Returns the part of one rank; the parts of all ranks, one after the other, are the step.

        Parts differ in size by at most one sample.
        """
        stretches = self.stretches
        return [
            Stretch(stretches[n].epoch, stretches[n].start + begin, stretches[n].start + end)
            for n, begin, end in _equal_part([one.size for one in stretches], rank, world)
        ]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Steps of ``batch`` samples, those of all ranks together, over epochs of ``samples``.

    The remainder at the end of an epoch is a smaller step, as long as it has a sample for each
    rank. A smaller remainder is added to the step before it; if that one is past, because the
    number of ranks changed just there, to the first step of the next epoch. With ``drop_last`` the
    remainder is left out instead.

    The caller checks: batch >= world, samples >= world, with ``drop_last`` >= batch.
    """

    samples: int
    batch: int
    world: int
    drop_last: bool

    def next(self, place: SamplePlace) -> SampleStep:
        """Returns the step that is taken at ``place``."""
        epoch, consumed = place
        left = self.samples - consumed
        if left >= self.batch:
            rest = left - self.batch
            is_last = rest < (self.batch if self.drop_last else self.world)
            stop = self.samples if is_last and not self.drop_last else consumed + self.batch
            after = SamplePlace(epoch + 1, 0) if is_last else SamplePlace(epoch, stop)
            return SampleStep((Stretch(epoch, consumed, stop),), after)
        if left >= self.world and not self.drop_last:
            return SampleStep((Stretch(epoch, consumed, self.samples),), SamplePlace(epoch + 1, 0))
        first = self.next(SamplePlace(epoch + 1, 0))
        if self.drop_last or not left:
            return first
        return SampleStep((Stretch(epoch, consumed, self.samples), *first.stretches), first.after)

    def count(self, place: SamplePlace) -> int:
        """Returns the number of steps from ``place`` to the end of the epoch of the next one."""
        left = self.samples - place.consumed
        if left < (self.batch if self.drop_last else self.world):
            left = self.samples
        whole, rest = divmod(left, self.batch)
        return whole + (not self.drop_last and rest >= self.world)


# Provides a list that each rank has for itself, split again for another number of ranks.
#
# An example is the buffer of a packing loader, read and not yet trained on: items lost at a restart
# are never trained on, and items given to two ranks are trained on twice.


class SplitList(list[Any]):
    """A list in the state of which each rank holds its own part, such as a token buffer.

    It is a list, to be changed in place. Its items can be everything the state may hold as values:
    numbers, text, bytes, lists, tuples, dicts, arrays, and tensors of the host. Each save stores
    all of it.

    On as many ranks as it was saved on, each rank gets its own items back. On another number, the
    items of all ranks, concatenated in the order of ranks, are cut into parts as equal as can be:
    rank r of w gets items n * r // w to n * (r + 1) // w of n. No item is lost and none is
    duplicated; back on the first number, the items are in the same order over all ranks.

    ``items``: those of the list on this rank. ``rank``: the number of this data rank, where these
    are not all ranks that have the list: ranks of one data rank must hold the same items, and those
    of the lowest of them are saved. ``world``: how many data ranks there are.

    Raises UsageError for a ``rank`` or ``world`` that is out of range.
    """

    def __init__(
        self,
        items: Iterable[Any] = (),
        *,
        rank: SupportsIndex | None = None,
        world: SupportsIndex | None = None,
    ) -> None:
        super().__init__(items)
        self.data_rank = data_rank(rank, world)
        """(rank, world) as they were given; None where all ranks that have the list are counted."""


# Splits lists of items for another number of ranks: none is lost, none is duplicated.


class SplitPiece(NamedTuple):
    """Items ``start`` to ``stop`` of the list of ``part``."""

    part: int
    start: int
    stop: int


def pieces(sizes: Sequence[int], rank: int, world: int) -> list[SplitPiece]:
    """Returns the items that rank ``rank`` of ``world`` gets of lists of these ``sizes``, in order.

    With as many lists as ranks each gets its own. Otherwise all lists, concatenated in their order,
    are cut into parts as equal as can be, of which rank r gets the r-th: items n * r // world to n
    * (r + 1) // world of n.
    """
    if len(sizes) == world:
        return [SplitPiece(rank, 0, sizes[rank])]
    return _equal_part(sizes, rank, world)


def _equal_part(sizes: Sequence[int], rank: int, world: int) -> list[SplitPiece]:
    total = sum(sizes)
    first, last = total * rank // world, total * (rank + 1) // world
    found, before = [], 0
    for part, size in enumerate(sizes):
        begin, end = max(first - before, 0), min(last - before, size)
        if begin < end:
            found.append(SplitPiece(part, begin, end))
        before += size
    return found


# Checks the data rank that a caller gives, once at the public door.


def data_rank(rank: Any, world: Any) -> tuple[int, int] | None:
    """Returns the data rank and their number; None where neither is given."""
    if rank is None and world is None:
        return None
    if rank is None or world is None:
        raise UsageError(
            f"rank={rank!r:.100}, world={world!r:.100}: give both, the number of this data rank "
            "and how many there are, or neither"
        )
    world, rank = whole("world", world, least=1), whole("rank", rank, least=0)
    if rank >= world:
        raise UsageError(f"rank={rank} is none of world={world} data ranks: they begin with 0")
    return rank, world
