"""From the keepers' own inventories to what the choice of a source takes.

An inventory names rows of parity by number alone. What they are made of is in their records, which
hold the headers of a whole group and are fetched only for attempts that lack an image: of others,
parity is not needed, until a host is lost on the way and the question is asked again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from msgspec.structs import replace

from holdfast.errors import FormatError
from holdfast.format.manifest import Generation
from holdfast.load.decoding import BROKEN
from holdfast.load.holdings import HeldPart, HeldRow, Holding, Image
from holdfast.load.records import Record, held_row
from holdfast.load.sources import Inventories

_AT_ONCE = 8
#: Gives the record of a row: of a host, an attempt, its generation, a stripe and a row.
Fetch = Callable[[str, str, Generation, int, int], Record]


class ToldImage(Protocol):
    """An image, as an inventory has it."""

    @property
    def rank(self) -> int: ...
    @property
    def image_bytes(self) -> int: ...
    @property
    def header_xxh3(self) -> str: ...
    @property
    def table_xxh3(self) -> str: ...


class ToldPart(Protocol):
    """What a host holds of an attempt, as its inventory has it; ``parity``: (stripe, row)."""

    @property
    def incarnation(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def attempt(self) -> str: ...
    @property
    def world(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def images(self) -> Sequence[ToldImage]: ...
    @property
    def parity(self) -> Sequence[tuple[int, int]]: ...


class Told(Protocol):
    """One host's inventory."""

    @property
    def host(self) -> str: ...
    @property
    def parts(self) -> Sequence[ToldPart]: ...
    @property
    def parents(self) -> Mapping[int, tuple[int, int] | None]: ...


class Gathering:
    """What hosts told of themselves; ``fetch`` gets the records of their parity."""

    def __init__(self, told: Iterable[Told], fetch: Fetch) -> None:
        self._fetch = fetch
        self._listed: dict[tuple[str, str], Sequence[tuple[int, int]]] = {}
        self._rows: dict[tuple[str, str], tuple[HeldRow, ...]] = {}
        self.holdings = tuple(map(self._without_rows, told))

    def _without_rows(self, told: Told) -> Holding:
        for part in told.parts:
            self._listed[told.host, part.attempt] = part.parity
        return Holding(told.host, tuple(map(_part, told.parts)), dict(told.parents))

    def with_rows(self, known: Inventories) -> Inventories:
        """The same, with the parity of every attempt that lacks an image, as far as it is known.

        A record that does not come, or is not believed, is of a row that nobody has.
        """
        lacking = _lacking(known.holdings)
        wanted = [
            (holding.host, part)
            for holding in known.holdings
            for part in holding.parts
            if part.attempt in lacking and (holding.host, part.attempt) not in self._rows
        ]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="holdfast-records") as pool:
            for (host, part), rows in zip(wanted, pool.map(self._read, wanted), strict=True):
                self._rows[host, part.attempt] = rows
        return replace(known, holdings=tuple(map(self._add_rows, known.holdings)))

    def _add_rows(self, holding: Holding) -> Holding:
        parts = (
            replace(part, rows=self._rows.get((holding.host, part.attempt), part.rows))
            for part in holding.parts
        )
        return replace(holding, parts=tuple(parts))

    def _read(self, wanted: tuple[str, HeldPart]) -> tuple[HeldRow, ...]:
        host, part = wanted
        generation, found = Generation(part.incarnation, part.step), []
        for stripe, row in self._listed.get((host, part.attempt), ()):
            try:
                record = self._fetch(host, part.attempt, generation, stripe, row)
                if (record.attempt, record.stripe, record.row) != (part.attempt, stripe, row):
                    raise FormatError(f"{host} gives another record for row {row} of {stripe}")
                found.append(held_row(record))
            except BROKEN:
                continue
        return tuple(found)


def _part(told: ToldPart) -> HeldPart:
    images = (
        Image(one.rank, one.image_bytes, one.header_xxh3, one.table_xxh3) for one in told.images
    )
    return HeldPart(
        told.incarnation, told.step, told.attempt, told.world, told.layout, tuple(images)
    )


def _lacking(holdings: Iterable[Holding]) -> set[str]:
    """The attempts of which the images of some ranks are nowhere."""
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    worlds: dict[str, int] = {}
    for holding in holdings:
        for part in holding.parts:
            ranks[part.attempt].update(one.rank for one in part.images)
            worlds[part.attempt] = max(worlds.get(part.attempt, 0), part.world)
    return {attempt for attempt, world in worlds.items() if len(ranks[attempt]) < world}
