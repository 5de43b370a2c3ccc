"""PURE. The tree in which ranks meet: who is whose parent, and how words of ranks become one.

Ranks of a host speak to its lowest, and hosts, in the order of their lowest ranks, to a root in
steps of ``FAN_OUT``. The tree follows from rank numbers alone, so nobody is ever elected. Every
join here is associative and commutative, and as large as what differs, not as the ranks are many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import msgpack

#: The most hosts that speak to one.
FAN_OUT = 32
#: Ranks from the first to before the second.
Range = tuple[int, int]
#: For each different value, the ranks that said it.
_Column = dict[bytes, list[Range]]


class Place(NamedTuple):
    """The place of one rank. ``above``: its parent, that one's parent, and so on to rank 0.

    ``height``: the number of levels below it.
    """

    above: tuple[int, ...]
    children: tuple[int, ...]
    height: int


def places_of(hosts: Sequence[str], fan_out: int = FAN_OUT) -> list[Place]:
    """Return the place of each rank, from the names of their hosts by rank."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    leaders = list(first.values())
    parents = [first[host] for host in hosts]
    for number, leader in enumerate(leaders):
        parents[leader] = leaders[(number - 1) // fan_out] if number else -1
    children: list[list[int]] = [[] for _ in hosts]
    for rank, parent in enumerate(parents[1:], 1):
        children[parent].append(rank)
    heights = [0] * len(hosts)
    for rank in (*_non_leaders(parents, first), *reversed(leaders[1:])):
        heights[parents[rank]] = max(heights[parents[rank]], heights[rank] + 1)
    return [
        Place(tuple(_above(parents, rank)), tuple(children[rank]), heights[rank])
        for rank in range(len(hosts))
    ]


def _non_leaders(parents: Sequence[int], first: dict[str, int]) -> Iterator[int]:
    leaders = set(first.values())
    return (rank for rank in range(len(parents)) if rank not in leaders)


def _above(parents: Sequence[int], rank: int) -> Iterator[int]:
    while (rank := parents[rank]) >= 0:
        yield rank


# ── sets of ranks ────────────────────────────────────────────────────────────────────────────


def in_ranges(ranks: Iterable[int]) -> list[Range]:
    """Return these ranks as ranges, in order."""
    return union((rank, rank + 1) for rank in ranks)


def union(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranks that are in any of these ranges."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def ranks_in(ranges: Iterable[Range]) -> list[int]:
    """Return the ranks of these ranges."""
    return [rank for start, stop in ranges for rank in range(start, stop)]


# ── words that are alike ─────────────────────────────────────────────────────────────────────


class Said(NamedTuple):
    """A value, and the ranks that said it, as ranges."""

    value: bytes
    ranks: list[Range]

    @property
    def first(self) -> int:
        """The lowest of them."""
        return self.ranks[0][0]


def said_by(rank: int, values: Sequence[bytes]) -> bytes:
    """Return the word of one rank that says these values, each in a column of its own."""
    return _pack([{value: [(rank, rank + 1)]} for value in values])


def join_said(one: bytes, other: bytes) -> bytes:
    """Join two words: each different value once, with all ranks that said it."""
    columns = _unpack(one)
    for column, more in zip(columns, _unpack(other), strict=True):
        for value, ranks in more.items():
            column[value] = union([*column.get(value, ()), *ranks])
    return _pack(columns)


def all_said(word: bytes) -> list[list[Said]]:
    """Return the different values of each column, in the order of their lowest ranks."""
    return [
        sorted((Said(*item) for item in column.items()), key=lambda said: said.first)
        for column in _unpack(word)
    ]


def with_column(word: bytes, said: Said) -> bytes:
    """Return the word with one column more, of this value alone."""
    return _pack([*_unpack(word), {said.value: said.ranks}])


def by_rank(column: Iterable[Said]) -> list[bytes]:
    """Return the value of each rank; what several said is one object."""
    values = {rank: said.value for said in column for rank in ranks_in(said.ranks)}
    return [values[rank] for rank in range(len(values))]


def _pack(columns: Sequence[_Column]) -> bytes:
    return msgpack.encode([sorted(column.items()) for column in columns])


def _unpack(word: bytes) -> list[_Column]:
    columns = msgpack.decode(word, type=list[list[tuple[bytes, list[Range]]]])
    return [dict(column) for column in columns]
