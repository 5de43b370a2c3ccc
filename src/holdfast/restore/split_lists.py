"""What this rank gets of the lists that all saved ranks hold: read where it lies, and nowhere else.

Every rank looks into an equal share of the images and tells how long their lists are. From that
all ranks know who gets which items, and each reads the images that hold its own. One image's
values are in memory at a time, beside what is kept for a second look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.data.shares import pieces
from holdfast.data.split_list import SplitList
from holdfast.errors import FormatError, UsageError
from holdfast.load.read import read_values
from holdfast.load.source import Checkpoint
from holdfast.state.lists import StoredList, stored_lists

#: Of what was looked into, so much is kept, as it lies in the images, so as not to be read again.
KEPT_BYTES = 64 << 20


#: The data rank where none was given.
NOT_SAID = (-1, 0)


class Part(msgspec.Struct, array_like=True, frozen=True):
    """One saved rank's part of a list, in short."""

    key: str
    saved_rank: int
    data_rank: int
    data_world: int
    items: int


def takers(lists: Mapping[str, SplitList]) -> bytes:
    """What this rank is to tell of its own lists: as which data rank it has them; b"" of none."""
    found = [(key, *(one.data_rank or NOT_SAID)) for key, one in lists.items()]
    return msgspec.msgpack.encode(found) if found else b""


def divide(told: Sequence[bytes], rank: int) -> dict[str, tuple[int, int]]:
    """As which data rank, of how many, this rank takes part in each list.

    UsageError unless every item of each list will be somebody's.
    """
    taken: dict[str, dict[int, tuple[int, int]]] = {}
    for number, message in enumerate(told):
        if message:
            for key, *at in msgspec.msgpack.decode(message, type=list[tuple[str, int, int]]):
                taken.setdefault(key, {})[number] = (at[0], at[1])
    found = {}
    for key, ranks in taken.items():
        numbers = _numbers(ranks)
        if numbers is None:
            raise UsageError(
                f"{key}: the ranks of this run take a SplitList as data ranks "
                f"{_shown(ranks.values())}, so that items would be lost or be there twice: give "
                "each rank= and world= of one and the same division, or none of them"
            )
        if rank in numbers:
            found[key] = numbers[rank], 1 + max(numbers.values())
    return found


def _numbers(said: Mapping[int, tuple[int, int]]) -> dict[int, int] | None:
    """The data rank of each rank that has a list; None when they make no whole.

    Where nothing was said, the ranks that have it are numbered in their order.
    """
    distinct = set(said.values())
    if distinct == {NOT_SAID}:
        return {rank: number for number, rank in enumerate(sorted(said))}
    _, world = min(distinct)
    if distinct != {(rank, world) for rank in range(world)}:
        return None
    return {rank: number for rank, (number, _) in said.items()}


def _shown(ranks: Iterable[tuple[int, int]]) -> str:
    shown = sorted(set(ranks))
    named = (f"{rank} of {world}" if world else "(nothing said)" for rank, world in shown[:8])
    text = ", ".join(named)
    return text + (", ..." if len(shown) > 8 else "")


class SavedLists:
    """The lists of one checkpoint, as one rank looks at them."""

    def __init__(self, checkpoint: Checkpoint, rank: int, world: int) -> None:
        self._checkpoint, self._rank, self._world = checkpoint, rank, world
        self._kept: dict[int, dict[str, StoredList]] = {}
        self._kept_bytes = 0
        self.parts: dict[str, list[Part]] = {}
        """What there is, by key; known when all ranks have told."""

    def look(self) -> bytes:
        """Look into this rank's share of the images; what is to be told to all ranks."""
        saved = self._checkpoint.world
        share = range(saved * self._rank // self._world, saved * (self._rank + 1) // self._world)
        return msgspec.msgpack.encode([
            Part(key, rank, *(found.data_rank or NOT_SAID), len(found.items))
            for rank in share
            for key, found in self._of(rank).items()
        ])  # fmt: skip

    def hear(self, told: Sequence[bytes]) -> None:
        """Know what all ranks have seen."""
        for message in told:
            for part in msgspec.msgpack.decode(message, type=list[Part]):
                self.parts.setdefault(part.key, []).append(part)

    @property
    def differing(self) -> tuple[str, ...]:
        """The lists of which ranks of one data rank held different numbers of items."""
        held: dict[tuple[str, int], set[int]] = {}
        for key, parts in self.parts.items():
            for part in parts:
                if (part.data_rank, part.data_world) != NOT_SAID:
                    held.setdefault((key, part.data_rank), set()).add(part.items)
        return tuple(sorted({key for (key, _), sizes in held.items() if len(sizes) > 1}))

    def take(self, places: Mapping[str, tuple[int, int]]) -> dict[str, list[Any]]:
        """The encoded items that this rank gets of each list, as these data ranks.

        Nothing of a list that was not saved; FormatError when a part is missing.
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

    def _stretch(self, part: Part, start: int, stop: int) -> Sequence[Any]:
        return self._of(part.saved_rank)[part.key].items[start:stop]

    def _holders(self, key: str) -> list[Part]:
        """The part of each data rank, of the lowest rank that has one."""
        parts = {part.saved_rank: part for part in self.parts[key]}
        said = {rank: (part.data_rank, part.data_world) for rank, part in parts.items()}
        numbers = _numbers(said)
        if numbers is None:
            raise FormatError(
                f"{key}: a SplitList was saved as data ranks {_shown(said.values())}, which make "
                "no whole: items would be missing. The ranks of that run were given wrong rank= "
                "and world=; restore a step from before, or leave this key out of the state"
            )
        lowest: dict[int, Part] = {}
        for rank in sorted(parts):
            lowest.setdefault(numbers[rank], parts[rank])
        return [lowest[number] for number in sorted(lowest)]

    def _of(self, rank: int) -> dict[str, StoredList]:
        """All lists in one image."""
        if rank in self._kept:
            return self._kept[rank]
        name = self._checkpoint.files[rank].name if rank in self._checkpoint.files else ""
        own = read_values(self._checkpoint, rank).get("own", {})
        found = stored_lists(own, f"{name}: own")
        size_bytes = self._checkpoint.header(rank).values.size_bytes
        if self._kept_bytes + size_bytes <= KEPT_BYTES:
            self._kept_bytes += size_bytes
            self._kept[rank] = found
        return found
