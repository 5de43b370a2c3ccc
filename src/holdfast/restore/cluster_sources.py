"""Asks the keepers of several hosts, all at once, what a restore can take from their memory.

A keeper that does not answer has nothing: what it had is taken from elsewhere.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from holdfast.errors import PeerError
from holdfast.events import SourceDropped, emit
from holdfast.format.manifest import Generation
from holdfast.hosts import HostTable
from holdfast.overview import UNSEEN, Overview
from holdfast.parity.planning.record import ParityRecord
from holdfast.protocol import messages as m
from holdfast.restore.cluster.collect import InventoryCollector, decode_inventory, read_record
from holdfast.restore.cluster.open import ClusterReach
from holdfast.restore.cluster.peer_caches import CacheListings, PeerCaches, rank_in
from holdfast.restore.sources import Ask, KnownRecoveries, RestoreSources, slots_of
from holdfast.storage.base import Store
from holdfast.storage.tiered import TieredStore
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.http import INVENTORY

#: How many keepers are asked at the same time.
_AT_ONCE = 256
#: For so long what a keeper said counts for the restore after it: it captures nothing before that.
_FRESH_S = 10.0


class ClusterSources(RestoreSources):
    """The sources of a run on several hosts, on one rank."""

    def __init__(
        self,
        store: Store,
        rank: int,
        arena: Path,
        ask: Ask[m.Message],
        hosts: HostTable,
        listed: Overview = UNSEEN,
    ) -> None:
        super().__init__(store, rank, arena, ask, listed)
        self._hosts = hosts
        self._answers: dict[str, m.Inventory] = {}
        self._answered_s = 0.0
        self._caches = CacheListings(lambda: self._puller)
        if isinstance(store, TieredStore):
            likely = PeerCaches(self._caches, self._peers_with, "the caches of these ranks' hosts")
            others = PeerCaches(self._caches, lambda _: self._others(), "the caches of other hosts")
            store.read_also(likely, others)

    @cached_property
    def _puller(self) -> Puller:
        return Puller(self._hosts.secret, incarnation=self.incarnation)

    @cached_property
    def _peers(self) -> dict[str, Peer]:  # known when all keepers listen
        return {one.id: Peer(one.id, one.address, one.port) for one in self._hosts.table}

    def _others(self) -> list[Peer]:
        return [peer for name, peer in self._peers.items() if name != self._hosts.own_id]

    def _peers_with(self, path: str) -> list[Peer]:
        """Return the host that the rank of this image is on now, as it mostly was: of thousands of
        ranks each asks a few hosts, and not all.
        """
        rank = rank_in(path)
        places = (one for one in self._hosts.table if rank is not None and rank in one.ranks)
        return [self._peers[one.id] for one in places if one.id != self._hosts.own_id]

    def forget(self) -> None:
        """See ``RestoreSources``; caches are asked again, too."""
        self._caches.forget()
        super().forget()

    def close(self) -> None:
        """Close the connections to peers."""
        self._puller.close()

    def reach(self) -> ClusterReach:
        """See ``RestoreSources``."""
        return ClusterReach(
            host=self._hosts.own_id,
            arena=self._arena,
            puller=self._puller,
            peers=self._peers,
            slots=slots_of(self._arena),
        )

    def _holds_any(self, known: KnownRecoveries) -> bool:
        self._answered_s = time.monotonic()
        return super()._holds_any(known)

    def _ask_hosts(self) -> InventoryCollector:
        """Ask all keepers at once: those that do not answer cost one deadline together.

        What hosts said while the start looked whether there is anything to restore counts for the
        restore that follows; those that were silent are asked again.
        """
        is_fresh = time.monotonic() < self._answered_s + _FRESH_S
        known, self._answered_s = self._answers if is_fresh else {}, 0.0
        names = [place.id for place in self._hosts.table]
        left = [name for name in names if name not in known]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="holdfast-inventories") as pool:
            answers = dict(zip(left, pool.map(self._ask_host, left), strict=True))
        silent = {name: why for name, why in answers.items() if isinstance(why, str)}
        for name, why in silent.items():
            emit(
                SourceDropped(
                    incarnation=self.incarnation,
                    rank=self._rank,
                    source=f"memory of {name}",
                    reason=why,
                )
            )
        self._answers = known | {n: h for n, h in answers.items() if isinstance(h, m.Inventory)}
        self._silent = [*silent] if self.incarnation != 1 else []  # at the first start none has any
        asked = [self._answers[name] for name in names if name in self._answers]
        return InventoryCollector(asked, self._fetch)

    def _ask_host(self, name: str) -> m.Inventory | str:
        """Return the holdings of a host, or why they are not known."""
        try:
            data = self._puller.document(self._peers[name], INVENTORY)
            return decode_inventory(data, name)
        except PeerError as error:
            return str(error)

    def _fetch(
        self, host: str, attempt: str, generation: Generation, stripe: int, row: int
    ) -> ParityRecord:
        return read_record(self._puller, self._peers[host], attempt, generation, stripe, row)
