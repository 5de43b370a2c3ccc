"""Divides lists that were split over the saved ranks among the new ranks, and reads the items.

Every rank reads an equal share of the images and reports the lengths of their lists. From that all
ranks know the division of items, and each reads the images that hold its own. One image's values
are in memory at a time, beside a bounded cache for the second read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.data.planning.order import SplitList, pieces
from holdfast.errors import FormatError, UsageError
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import read_values
from holdfast.state.values import StoredList, stored_lists

#: Bytes of encoded values that are cached, to avoid a second read.
KEPT_BYTES = 64 << 20


#: The data rank where none was given.
NOT_SAID = (-1, 0)


class SplitListPart(msgspec.Struct, array_like=True, frozen=True):
    """Summary of one saved rank's part of a list."""

    key: str
    saved_rank: int
    data_rank: int
    data_world: int
    items: int


def report_lists(lists: Mapping[str, SplitList]) -> bytes:
    """Encode this rank's report of its own lists, with its data rank in each; b"" without lists."""
    report = [(key, *(one.data_rank or NOT_SAID)) for key, one in lists.items()]
    return msgspec.msgpack.encode(report) if report else b""


def divide(reports: Sequence[bytes], rank: int) -> dict[str, tuple[int, int]]:
    """Return the data rank, and the number of them, with which this rank takes part in each list.

    UsageError unless every item of each list has a receiver.
    """
    taken: dict[str, dict[int, tuple[int, int]]] = {}
    for number, message in enumerate(reports):
        if message:
            for key, *at in msgspec.msgpack.decode(message, type=list[tuple[str, int, int]]):
                taken.setdefault(key, {})[number] = (at[0], at[1])
    places = {}
    for key, ranks in taken.items():
        numbers = _numbers(ranks)
        if numbers is None:
            raise UsageError(
                f"{key}: the ranks of this run take a SplitList as data ranks "
                f"{_shown(ranks.values())}, so that items would be lost or be there twice: give "
                "each rank= and world= of one and the same division, or none of them"
            )
        if rank in numbers:
            places[key] = numbers[rank], 1 + max(numbers.values())
    return places


def _numbers(declared: Mapping[int, tuple[int, int]]) -> dict[int, int] | None:
    """Return the data rank of each rank that has a list; None when they are no complete set.

    Where no data rank was given, the ranks that have the list are numbered in their order.
    """
    distinct = set(declared.values())
    if distinct == {NOT_SAID}:
        return {rank: number for number, rank in enumerate(sorted(declared))}
    _, world = min(distinct)
    if distinct != {(rank, world) for rank in range(world)}:
        return None
    return {rank: number for rank, (number, _) in declared.items()}


def _shown(ranks: Iterable[tuple[int, int]]) -> str:
    shown = sorted(set(ranks))
    named = (f"{rank} of {world}" if world else "(nothing said)" for rank, world in shown[:8])
    text = ", ".join(named)
    return text + (", ..." if len(shown) > 8 else "")


class SavedLists:
    """The lists of one checkpoint, as one rank reads them."""

    def __init__(self, checkpoint: Checkpoint, rank: int, world: int) -> None:
        self._checkpoint, self._rank, self._world = checkpoint, rank, world
        self._kept: dict[int, dict[str, StoredList]] = {}
        self._kept_bytes = 0
        self.parts: dict[str, list[SplitListPart]] = {}
        """The parts of each list, by key; known after all ranks have reported."""

    def read_share(self) -> bytes:
        """Read the lists in this rank's share of the images; return the report for all ranks."""
        saved = self._checkpoint.world
        share = range(saved * self._rank // self._world, saved * (self._rank + 1) // self._world)
        return msgspec.msgpack.encode(
            [
                SplitListPart(key, rank, *(items.data_rank or NOT_SAID), len(items.items))
                for rank in share
                for key, items in self._of(rank).items()
            ]
        )

    def set_reports(self, reports: Sequence[bytes]) -> None:
        """Store the reports of all ranks."""
        for message in reports:
            for part in msgspec.msgpack.decode(message, type=list[SplitListPart]):
                self.parts.setdefault(part.key, []).append(part)

    @property
    def differing(self) -> tuple[str, ...]:
        """Return the lists of which ranks of one data rank held different numbers of items."""
        held: dict[tuple[str, int], set[int]] = {}
        for key, parts in self.parts.items():
            for part in parts:
                if (part.data_rank, part.data_world) != NOT_SAID:
                    held.setdefault((key, part.data_rank), set()).add(part.items)
        return tuple(sorted({key for (key, _), sizes in held.items() if len(sizes) > 1}))

    def read_items(self, places: Mapping[str, tuple[int, int]]) -> dict[str, list[Any]]:
        """Return the encoded items of each list for this rank, as these data ranks.

        Nothing for a list that was not saved; FormatError when a part is missing.
        """
        there = ((key, place) for key, place in places.items() if key in self.parts)
        return {key: self._items(key, *place) for key, place in there}

    def _items(self, key: str, rank: int, world: int) -> list[Any]:
        holders = self._holders(key)
        sizes = [part.items for part in holders]
        return [
            item
            for piece in pieces(sizes, rank, world)
            for item in self._stretch(holders[piece.part], piece.start, piece.stop)
        ]

    def _stretch(self, part: SplitListPart, start: int, stop: int) -> Sequence[Any]:
        return self._of(part.saved_rank)[part.key].items[start:stop]

    def _holders(self, key: str) -> list[SplitListPart]:
        """Return the part of each data rank, from the lowest rank that has one."""
        parts = {part.saved_rank: part for part in self.parts[key]}
        declared = {rank: (part.data_rank, part.data_world) for rank, part in parts.items()}
        numbers = _numbers(declared)
        if numbers is None:
            raise FormatError(
                f"{key}: a SplitList was saved as data ranks {_shown(declared.values())}, which "
                "make no whole: items would be missing. The ranks of that run were given wrong "
                "rank= and world=; restore a step from before, or leave this key out of the state"
            )
        lowest: dict[int, SplitListPart] = {}
        for rank in sorted(parts):
            lowest.setdefault(numbers[rank], parts[rank])
        return [lowest[number] for number in sorted(lowest)]

    def _of(self, rank: int) -> dict[str, StoredList]:
        """Return all lists in one image."""
        if rank in self._kept:
            return self._kept[rank]
        name = self._checkpoint.files[rank].name if rank in self._checkpoint.files else ""
        own = read_values(self._checkpoint, rank).get("own", {})
        lists = stored_lists(own, f"{name}: own")
        size_bytes = self._checkpoint.header(rank).values.size_bytes
        if self._kept_bytes + size_bytes <= KEPT_BYTES:
            self._kept_bytes += size_bytes
            self._kept[rank] = lists
        return lists
