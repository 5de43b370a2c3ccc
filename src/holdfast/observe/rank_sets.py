"""PURE. Keeps which ranks of a run came somewhere, or which records of a process were read: a bit
for each, whatever order they come in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

#: Ranks of one word; a rank that nobody has does not make a set large.
_WORD = 1024


class RankSet:
    """Ranks from 0 on."""

    __slots__ = ("_words",)

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._words: dict[int, int] = {}
        self.add_ranges(ranges)

    def __contains__(self, rank: int) -> bool:
        return bool(self._words.get(rank // _WORD, 0) >> rank % _WORD & 1)

    def add(self, ranks: Collection[int]) -> None:
        """Adds ranks, each of them once; those below 0 are none."""
        if not ranks:
            return
        first, last = min(ranks), max(ranks)
        if first >= 0 and last - first < min(_WORD, len(ranks)):  # those of a host
            self._add_range(first, last)
            return
        words = self._words
        for rank in ranks:
            if rank >= 0:
                words[rank // _WORD] = words.get(rank // _WORD, 0) | 1 << rank % _WORD

    def add_ranges(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Adds all ranks from a first to a last one."""
        for first, last in ranges:
            self._add_range(first, last)

    def _add_range(self, first: int, last: int) -> None:
        words = self._words
        for word in range(first // _WORD, last // _WORD + 1):
            low = max(0, first - word * _WORD)
            high = min(_WORD - 1, last - word * _WORD)
            words[word] = words.get(word, 0) | ((1 << (high - low + 1)) - 1) << low

    def without(self, *others: RankSet) -> Iterator[int]:
        """Yields the ranks that none of the others has, in their order."""
        for word, bits in sorted(self._words.items()):
            for other in others:
                bits &= ~other._words.get(word, 0)
            while bits:
                low = bits & -bits
                yield word * _WORD + low.bit_length() - 1
                bits ^= low

    def ranges(self) -> list[tuple[int, int]]:
        """Returns the ranks as ranges from a first to a last one, in their order."""
        found: list[tuple[int, int]] = []
        for word, bits in sorted(self._words.items()):
            at = word * _WORD
            while bits:
                zeros = (bits & -bits).bit_length() - 1
                bits >>= zeros
                ones = (~bits & (bits + 1)).bit_length() - 1
                bits >>= ones
                first, at = at + zeros, at + zeros + ones
                if found and found[-1][1] == first - 1:
                    found[-1] = found[-1][0], at - 1
                else:
                    found.append((first, at - 1))
        return found
