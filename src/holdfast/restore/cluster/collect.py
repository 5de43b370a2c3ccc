"""Collects the inventories of keepers, from which a restore selects its sources.

An inventory names parity shards by number alone. Their composition is in their records, which hold
the headers of a whole group and are fetched only for attempts that lack an image. Other attempts
need no parity, unless a host is lost during the restore and the selection runs again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec.structs import replace

from holdfast.errors import FormatError, PeerError
from holdfast.format.manifest import AttemptId, Generation
from holdfast.parity.planning.record import ParityRecord, unseal
from holdfast.protocol import messages as m
from holdfast.restore.cluster.decode import BROKEN
from holdfast.restore.planning.holdings import ShardHolding, shard_of
from holdfast.restore.planning.selection import Inventories
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.http import generation_name, record_path

_AT_ONCE = 8
#: Fetches the record of a parity shard: host, attempt, its generation, stripe and row.
Fetch = Callable[[str, str, Generation, int, int], ParityRecord]


class InventoryCollector:
    """The inventories of all hosts; ``fetch`` gets the records of their parity shards."""

    def __init__(self, holdings: Iterable[m.Inventory], fetch: Fetch | None = None) -> None:
        self._fetch = fetch
        self.holdings = tuple(holdings)
        self._rows: dict[tuple[str, AttemptId], tuple[ShardHolding, ...]] = {}

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
            if part.attempt_id in lacking and (holding.host, part.attempt_id) not in self._rows
        ]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="holdfast-records") as pool:
            for (host, part), rows in zip(wanted, pool.map(self._read, wanted), strict=True):
                self._rows[host, part.attempt_id] = rows
        return replace(known, rows=dict(self._rows))

    def _read(self, wanted: tuple[str, m.HoldingPart]) -> tuple[ShardHolding, ...]:
        assert self._fetch is not None  # nothing is wanted otherwise
        host, part = wanted
        id_, shards = part.attempt_id, []
        for stripe, row in part.parity:
            try:
                record = self._fetch(host, id_.attempt, id_.generation, stripe, row)
                if (record.attempt, record.stripe, record.row) != (id_.attempt, stripe, row):
                    raise FormatError(f"{host} gives another record for row {row} of {stripe}")
                shards.append(shard_of(record))
            except BROKEN:
                continue
        return tuple(shards)


def read_record(
    puller: Puller, peer: Peer, attempt: str, generation: Generation, stripe: int, row: int
) -> ParityRecord:
    """Fetch the record of a parity shard from the keeper of a host. PeerError or FormatError."""
    path = record_path(attempt, stripe, row)
    data = puller.document(peer, path, generation=generation_name(generation))
    return unseal(data, f"{peer.name}{path}")


def decode_inventory(data: bytes, host: str) -> m.Inventory:
    """Decode the inventory that ``host`` gave; PeerError unless it is that host's."""
    try:
        held = msgspec.msgpack.decode(data, type=m.Inventory)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the inventory of {host} cannot be read: {error}", peer=host) from error
    if held.host != host:
        raise PeerError(f"it says that it is host {held.host}", peer=host)
    return held


def _lacking(holdings: Iterable[m.Inventory]) -> set[AttemptId]:
    """Return the attempts that lack the images of some ranks on all hosts."""
    ranks: defaultdict[AttemptId, set[int]] = defaultdict(set)
    for holding in holdings:
        for part in holding.parts:
            ranks[part.attempt_id].update(one.rank for one in part.images)
    return {attempt_id for attempt_id, there in ranks.items() if len(there) < attempt_id.world}
