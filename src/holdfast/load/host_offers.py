"""What all hosts of a run and storage together offer to its restore, and the way to each of them.

Rank 0 asks every keeper what it holds; a keeper that does not answer has nothing. What can be made
of that, and from where each image comes, all ranks are told alike (``load.sources``). Whatever
fails on the way is taken out of it, and the question asked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from holdfast.errors import ArenaError, FormatError, PeerError
from holdfast.events import SourceDropped, emit
from holdfast.format.manifest import Generation
from holdfast.load.choose import Candidate
from holdfast.load.gathering import Gathering
from holdfast.load.offers import Ask, Offers, PlanAgain
from holdfast.load.recovered import Reach
from holdfast.load.recoveries import Known, Recoveries
from holdfast.load.source import Checkpoint
from holdfast.load.sources import Inventories
from holdfast.load.stored import broken_manifests, catalogue_of, nothing_fits, open_stored, stored
from holdfast.peers.calling import Peer
from holdfast.peers.client import Puller
from holdfast.peers.names import INVENTORY, generation_name, record_path
from holdfast.redundancy.records import ParityRecord, unseal
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import SLOT_SUFFIX, SlotFile
from holdfast.snapshot.hosts import Hosts
from holdfast.storage.base import Store
from holdfast.world import World, tell_all


class HostOffers(Offers):
    """The sources of a run on several hosts, on one rank."""

    def __init__(
        self, store: Store, rank: int, arena: Path, ask: Ask[m.Message], hosts: Hosts
    ) -> None:
        super().__init__(store, rank, arena, ask)
        self._hosts = hosts
        self._recoveries: Recoveries | None = None

    @cached_property
    def _puller(self) -> Puller:
        return Puller(self._hosts.secret, incarnation=self.incarnation)

    @cached_property
    def _peers(self) -> dict[str, Peer]:  # known when all keepers listen
        return {one.id: Peer(one.id, one.address, one.port) for one in self._hosts.table}

    def close(self) -> None:
        """End the connections to peers."""
        self._puller.close()

    # ── on every rank ────────────────────────────────────────────────────────────────────

    def first(
        self, world: World, step: int | str | None, *, timeout_s: float
    ) -> Sequence[Candidate]:
        """See ``Offers``."""
        reach = Reach(
            host=self._hosts.own_id, arena=self._arena, puller=self._puller, peers=self._peers,
            read_record=unseal, slots=slots_of(self._arena),
        )  # fmt: skip
        self._recoveries = Recoveries(
            world, reach, self._gather, self._open_stored, wanted=step, timeout_s=timeout_s
        )
        found = self._recoveries.first()
        if not found:
            tell_all(world, "restore: nothing", lambda: self._nothing(step), timeout_s=timeout_s)
        return found

    def plan_again(self) -> PlanAgain | None:
        """See ``Offers``."""
        return None if self._recoveries is None else self._recoveries.plan_again

    def open(self, candidate: Candidate) -> Checkpoint:
        """See ``Offers``."""
        assert self._recoveries is not None
        if candidate.held or candidate.where == "memory":
            self._ask(m.Pin(attempt=candidate.attempt), m.Done)
        return self._recoveries.open(candidate)

    def _open_stored(self, candidate: Candidate) -> Checkpoint:
        return open_stored(self._store, candidate, self._rank)

    # ── on rank 0 ────────────────────────────────────────────────────────────────────────

    def is_there_any(self) -> bool:
        """See ``Offers``."""
        known = self._gather()
        inventories = known.gathering.with_rows(known.inventories)
        is_broken = bool(broken_manifests(catalogue_of(self._store)))
        return bool(inventories.find(None).recoveries) or is_broken

    def _nothing(self, step: int | str | None) -> bytes:
        found = catalogue_of(self._store)
        if step is not None or broken_manifests(found):
            raise nothing_fits(self._store, found, step)
        return b""

    def _gather(self) -> Known:
        found = catalogue_of(self._store)
        told = [one for one in map(self._ask_host, self._hosts.table) if one is not None]
        gathering = Gathering(told, self._fetch)
        inventories = Inventories(gathering.holdings, tuple(stored(found)), dict(found.parents))
        return Known(inventories, gathering)

    def _ask_host(self, place: m.HostPlace) -> m.Holding | None:
        try:
            data = self._puller.document(self._peers[place.id], INVENTORY)
            held = msgspec.msgpack.decode(data, type=m.Holding)
            if held.host != place.id:
                raise FormatError(f"it says that it is host {held.host}")
        except (PeerError, FormatError, ValueError, RecursionError) as error:
            emit(SourceDropped(
                incarnation=self.incarnation, rank=self._rank, source=f"memory of {place.id}",
                reason=str(error),
            ))  # fmt: skip
            return None
        return held

    def _fetch(
        self, host: str, attempt: str, generation: Generation, stripe: int, row: int
    ) -> ParityRecord:
        path = record_path(attempt, stripe, row)
        data = self._puller.document(
            self._peers[host], path, generation=generation_name(generation)
        )
        return unseal(data, f"{host}{path}")


def slots_of(arena: Path) -> dict[tuple[str, int], str]:
    """The paths of the slots that say that an image is in them, by attempt and rank."""
    found = {}
    for path in arena.glob(f"*{SLOT_SUFFIX}"):
        try:
            slot = SlotFile.open(path, writable=False)
        except ArenaError:  # half-made, or removed meanwhile
            continue
        record = slot.read_record()
        slot.close()
        if record is not None and record.state == "captured":
            found[record.attempt, record.rank] = str(path)
    return found
