"""Converts the keepers' inventories into the holdings from which a restore selects its sources.

An inventory names parity shards by number alone. Their composition is in their records, which hold
the headers of a whole group and are fetched only for attempts that lack an image. Other attempts
need no parity, unless a host is lost during the restore and the selection runs again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec.structs import replace

from holdfast.errors import FormatError, PeerError
from holdfast.format.manifest import Generation
from holdfast.parity.planning.record import ParityRecord, unseal
from holdfast.protocol import messages as m
from holdfast.restore.cluster.decode import BROKEN
from holdfast.restore.planning.holdings import (
    HostHolding,
    ImageHolding,
    ImageIdentity,
    ShardHolding,
    shard_of,
)
from holdfast.restore.planning.selection import Inventories
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.http import generation_name, record_path

_AT_ONCE = 8
#: Fetches the record of a parity shard: host, attempt, its generation, stripe and row.
Fetch = Callable[[str, str, Generation, int, int], ParityRecord]


class InventoryCollector:
    """The inventories of all hosts; ``fetch`` gets the records of their parity shards."""

    def __init__(self, reports: Iterable[m.Holding], fetch: Fetch | None = None) -> None:
        self._fetch = fetch
        self.reports = tuple(reports)
        self._listed: dict[tuple[str, str], Sequence[tuple[int, int]]] = {}
        self._rows: dict[tuple[str, str], tuple[ShardHolding, ...]] = {}
        self.holdings = tuple(map(self._without_parity, self.reports))

    def _without_parity(self, report: m.Holding) -> HostHolding:
        for part in report.parts:
            self._listed[report.host, part.attempt] = part.parity
        parts = tuple(map(_part, report.parts))
        return HostHolding(report.host, parts, dict(report.parents), starts=dict(report.starts))

    def with_parity(self, known: Inventories) -> Inventories:
        """Return the holdings with the known parity of every attempt that lacks an image.

        A shard whose record does not arrive, or is invalid, counts as missing.
        """
        if self._fetch is None:
            return known  # an only host lists no shards
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

    def _add_rows(self, holding: HostHolding) -> HostHolding:
        parts = (
            replace(part, rows=self._rows.get((holding.host, part.attempt), part.rows))
            for part in holding.parts
        )
        return replace(holding, parts=tuple(parts))

    def _read(self, wanted: tuple[str, ImageHolding]) -> tuple[ShardHolding, ...]:
        assert self._fetch is not None  # nothing is wanted otherwise
        host, part = wanted
        generation, shards = Generation(part.incarnation, part.step), []
        for stripe, row in self._listed.get((host, part.attempt), ()):
            try:
                record = self._fetch(host, part.attempt, generation, stripe, row)
                if (record.attempt, record.stripe, record.row) != (part.attempt, stripe, row):
                    raise FormatError(f"{host} gives another record for row {row} of {stripe}")
                shards.append(shard_of(record))
            except BROKEN:
                continue
        return tuple(shards)


def holding_of(told: m.Inventory) -> m.Holding:
    """Return what the keeper of the only host tells its ranks, in the form of several hosts."""
    parts = (
        m.HoldingPart(
            incarnation=held.incarnation,
            step=held.step,
            attempt=held.attempt,
            world=held.world,
            layout=held.layout,
            images=tuple(
                m.HoldingImage(
                    rank=slot.rank,
                    image_bytes=slot.image_bytes,
                    header_xxh3=slot.header_xxh3,
                    table_xxh3=slot.table_xxh3,
                )
                for slot in held.slots
            ),
            nonce=held.nonce,
        )
        for held in told.generations
    )
    return m.Holding(
        host="",
        address="",
        port=0,
        parts=tuple(parts),
        parents=told.parents,
        newest_incarnation=0,
        starts=told.starts,
    )


def read_record(
    puller: Puller, peer: Peer, attempt: str, generation: Generation, stripe: int, row: int
) -> ParityRecord:
    """Fetch the record of a parity shard from the keeper of a host. PeerError or FormatError."""
    path = record_path(attempt, stripe, row)
    data = puller.document(peer, path, generation=generation_name(generation))
    return unseal(data, f"{peer.name}{path}")


def decode_inventory(data: bytes, host: str) -> m.Holding:
    """Decode the inventory that ``host`` gave; PeerError unless it is that host's."""
    try:
        held = msgspec.msgpack.decode(data, type=m.Holding)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the inventory of {host} cannot be read: {error}", peer=host) from error
    if held.host != host:
        raise PeerError(f"it says that it is host {held.host}", peer=host)
    return held


def _part(report: m.HoldingPart) -> ImageHolding:
    images = (
        ImageIdentity(one.rank, one.image_bytes, one.header_xxh3, one.table_xxh3)
        for one in report.images
    )
    return ImageHolding(
        report.incarnation,
        report.step,
        report.attempt,
        report.world,
        report.layout,
        tuple(images),
        nonce=report.nonce,
    )


def _lacking(holdings: Iterable[HostHolding]) -> set[str]:
    """Return the attempts that lack the images of some ranks on all hosts."""
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    worlds: dict[str, int] = {}
    for holding in holdings:
        for part in holding.parts:
            ranks[part.attempt].update(one.rank for one in part.images)
            worlds[part.attempt] = max(worlds.get(part.attempt, 0), part.world)
    return {attempt for attempt, world in worlds.items() if len(ranks[attempt]) < world}
