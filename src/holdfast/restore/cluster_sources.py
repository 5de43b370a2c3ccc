"""Lists and opens the candidates of a restore on several hosts, from memory and storage.

Rank 0 asks every keeper for its holdings; a keeper that does not answer has none. Rank 0 selects
the generation and the source of each image (``holdfast.restore.planning.selection``) and sends the
selection to all ranks. A source that fails is removed from the holdings, and the selection runs
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from holdfast.catalogue import Catalogue, is_root
from holdfast.errors import (
    ArenaError,
    FormatError,
    HoldfastError,
    NotFound,
    PeerError,
    RestoreError,
    StorageError,
)
from holdfast.events import SourceDropped, emit
from holdfast.format.manifest import Generation
from holdfast.geometry.layout import Layout
from holdfast.hosts import HostTable
from holdfast.parity.planning.record import ParityRecord
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SLOT_SUFFIX, SlotFile
from holdfast.restore.cluster.collect import InventoryCollector, decode_inventory, read_record
from holdfast.restore.cluster.open import ClusterReach, LocalSlot, open_recovery
from holdfast.restore.planning.candidates import Candidate, choose
from holdfast.restore.planning.holdings import (
    ImageIdentity,
    Recovery,
    Refusal,
    decode_choice,
    encode_choice,
)
from holdfast.restore.planning.selection import Inventories, Selection
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.stored import (
    broken_manifests,
    catalogue_of,
    nothing_fits,
    require_there,
    require_whole_line,
    stored,
    stored_starts,
)
from holdfast.restore.sources import Ask, PlanAgain, RestoreSources, StorageHold, gone_meanwhile
from holdfast.storage.base import Store
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.http import INVENTORY
from holdfast.world import World, from_rank0

#: How many keepers are asked at the same time.
_AT_ONCE = 256
#: For so long what a keeper said counts for the restore after it: it captures nothing before that.
_FRESH_S = 10.0


class ClusterSources(RestoreSources):
    """The sources of a run on several hosts, on one rank."""

    def __init__(
        self, store: Store, rank: int, arena: Path, ask: Ask[m.Message], hosts: HostTable
    ) -> None:
        super().__init__(store, rank, arena, ask)
        self._hosts = hosts
        self._recoveries: ClusterRestore | None = None
        self._terms: tuple[World, int | str | None, float]
        self._silent: list[str] = []
        """The hosts that did not report their holdings."""
        self._answers: dict[str, m.Holding] = {}
        self._answered_s = 0.0

    @cached_property
    def _puller(self) -> Puller:
        return Puller(self._hosts.secret, incarnation=self.incarnation)

    @cached_property
    def _peers(self) -> dict[str, Peer]:  # known when all keepers listen
        return {one.id: Peer(one.id, one.address, one.port) for one in self._hosts.table}

    def close(self) -> None:
        """Close the connections to peers."""
        self._puller.close()

    # ── on every rank ────────────────────────────────────────────────────────────────────

    def first(
        self, world: World, step: int | str | None, *, timeout_s: float
    ) -> Sequence[Candidate]:
        """See ``RestoreSources``."""
        reach = ClusterReach(
            host=self._hosts.own_id,
            arena=self._arena,
            puller=self._puller,
            peers=self._peers,
            slots=slots_of(self._arena),
        )
        self._hold = StorageHold(self._store)
        self._recoveries = ClusterRestore(
            world,
            reach,
            self._gather,
            self._open_stored,
            wanted=step,
            timeout_s=timeout_s,
            storage=Storage(self._hold, self._list_stored),
        )
        self._terms = world, step, timeout_s
        candidates = self._recoveries.first()
        if not candidates:
            from_rank0(world, "restore: nothing", lambda: self._nothing(step), timeout_s=timeout_s)
        return candidates

    def plan_again(self) -> PlanAgain | None:
        """See ``RestoreSources``."""
        return None if self._recoveries is None else self._plan_again

    def _plan_again(self, candidate: Candidate, error: HoldfastError) -> Sequence[Candidate]:
        assert self._recoveries is not None
        remaining = self._recoveries.plan_again(candidate, error)
        if not remaining and candidate.where == "storage":
            world, step, timeout_s = self._terms
            from_rank0(
                world,
                "restore: gone",
                lambda: self._gone(step, candidate, error),
                timeout_s=timeout_s,
            )
        return remaining

    def open(self, candidate: Candidate) -> Checkpoint:
        """See ``RestoreSources``."""
        assert self._recoveries is not None
        if candidate.held or candidate.where == "memory":
            self._ask(m.PinAttempt(attempt=candidate.attempt), m.Done)
        return self._recoveries.open(candidate)

    def _open_stored(self, candidate: Candidate, layout: Layout | None) -> Checkpoint:
        return self._hold.open(candidate, self._rank, layout)

    # ── on rank 0 ────────────────────────────────────────────────────────────────────────

    def is_there_any(self) -> bool:
        """See ``RestoreSources``."""
        contents = catalogue_of(self._store)
        known = self._gather(contents)
        self._answers = {one.host: one for one in known.gathering.reports}
        self._answered_s = time.monotonic()
        inventories, is_silent = known.gathering.with_parity(known.inventories), bool(self._silent)
        is_broken = bool(broken_manifests(contents))
        line = inventories.line
        is_there = any(not line.is_abandoned(one.generation) for one in inventories.candidates())
        return is_there or is_broken or is_silent or not is_root(self._store)

    def _nothing(self, step: int | str | None) -> bytes:
        catalogue = catalogue_of(self._store)
        require_there(self._store)
        assert self._recoveries is not None
        inventories = self._recoveries.inventories
        require_whole_line(self._store, inventories.candidates(), inventories.line, step)
        if self._silent:
            raise RestoreError(
                f"nothing else can be restored, and what is in the memory of "
                f"{', '.join(self._silent)} is not known: its keeper did not say. Start the run "
                "again; to begin anew without it, use another root."
            )
        if step is not None or broken_manifests(catalogue):
            raise nothing_fits(self._store, catalogue, step)
        return b""

    def _gone(self, step: int | str | None, candidate: Candidate, error: HoldfastError) -> bytes:
        """Return NotFound when the step is no longer in storage: it was removed meanwhile."""
        try:
            catalogue = catalogue_of(self._store)
        except StorageError:  # unknown
            return b""
        if step is not None and not choose(
            stored(catalogue), catalogue.parents, step, catalogue.unreadable
        ):
            why = nothing_fits(self._store, catalogue, step)
            raise gone_meanwhile(why, candidate, error) if isinstance(why, NotFound) else why
        return b""

    def _list_stored(self) -> tuple[Candidate, ...]:
        return tuple(stored(catalogue_of(self._store)))

    def _gather(self, contents: Catalogue | None = None) -> KnownRecoveries:
        catalogue = catalogue_of(self._store) if contents is None else contents
        asked = self._ask_hosts()
        silent = [host for host, held in asked.items() if held is None]
        self._silent = silent if self.incarnation != 1 else []  # at the first start no host has any
        gathering = InventoryCollector(
            (one for one in asked.values() if one is not None), self._fetch
        )
        there = stored_starts(
            self._store, catalogue, {n for one in gathering.holdings for n in one.starts}
        )
        inventories, others = Inventories(
            gathering.holdings,
            tuple(stored(catalogue)),
            dict(there.parents),
            catalogue.unreadable,
            dict(there.starts),
        ).of_known_starts()
        self._warn_of_others(others)
        return KnownRecoveries(inventories, gathering)

    def _ask_hosts(self) -> dict[str, m.Holding | None]:
        """Ask all keepers at once: those that do not answer cost one deadline together.

        What hosts said while the start looked whether there is anything to restore counts for the
        restore that follows; those that were silent are asked again.
        """
        is_fresh = time.monotonic() < self._answered_s + _FRESH_S
        asked: dict[str, m.Holding | None] = dict(self._answers) if is_fresh else {}
        self._answers = {}
        names = [place.id for place in self._hosts.table]
        left = [name for name in names if name not in asked]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="holdfast-inventories") as pool:
            answers = zip(left, pool.map(self._ask_host, left), strict=True)
        for name, answer in answers:
            if isinstance(answer, m.Holding):
                asked[name] = answer
                continue
            asked[name] = None
            emit(
                SourceDropped(
                    incarnation=self.incarnation,
                    rank=self._rank,
                    source=f"memory of {name}",
                    reason=answer,
                )
            )
        return {name: asked[name] for name in names}

    def _ask_host(self, name: str) -> m.Holding | str:
        """Return the holdings of a host, or why they are not known."""
        try:
            data = self._puller.document(self._peers[name], INVENTORY)
            return decode_inventory(data, name)
        except (PeerError, FormatError) as error:
            return str(error)

    def _fetch(
        self, host: str, attempt: str, generation: Generation, stripe: int, row: int
    ) -> ParityRecord:
        return read_record(self._puller, self._peers[host], attempt, generation, stripe, row)


def slots_of(arena: Path) -> dict[tuple[str, int], LocalSlot]:
    """Return the slots that hold an image, by attempt and rank."""
    slots = {}
    for path in arena.glob(f"*{SLOT_SUFFIX}"):
        try:
            slot = SlotFile.open(path, writable=False)
        except ArenaError:  # incomplete, or removed meanwhile
            continue
        record = slot.read_record()
        slot.close()
        if record is not None and record.state == "captured":
            image = ImageIdentity(
                record.rank, record.image_bytes, record.header_xxh3, record.table_xxh3
            )
            slots[record.attempt, record.rank] = LocalSlot(str(path), image)
    return slots


# Chooses the candidates of a restore on several hosts: rank 0 decides and sends its choice to all.
#
#     restore = ClusterRestore(world, reach, ask, open_stored, wanted=None, timeout_s=60)
#     restore_first(world, state, restore.first(), restore.open,
#                   plan_again=restore.plan_again, ...)


class KnownRecoveries(NamedTuple):
    """The holdings that rank 0 collected, and a function that fetches parity records."""

    inventories: Inventories
    gathering: InventoryCollector


class Storage(NamedTuple):
    """On rank 0: the lease on what is read from storage, and its present list."""

    hold: StorageHold
    list: Callable[[], tuple[Candidate, ...]]


class ClusterRestore:
    """One restore, on one rank; all ranks make the same calls.

    ``ask`` is called on rank 0 alone, ``open_stored`` with a candidate that needs storage.
    """

    def __init__(
        self,
        world: World,
        reach: ClusterReach,
        ask: Callable[[], KnownRecoveries],
        open_stored: Callable[[Candidate, Layout | None], Checkpoint],
        *,
        wanted: int | str | None,
        timeout_s: float,
        storage: Storage | None = None,
    ) -> None:
        self._world, self._reach, self._ask = world, reach, ask
        self._open_stored, self._wanted, self._timeout_s = open_stored, wanted, timeout_s
        self._storage = storage
        self._failed: set[Candidate] = set()
        """Candidates listed in storage that must not be tried again."""
        self._known: KnownRecoveries | None = None
        self._told: set[Refusal] = set()
        self._recovery: Recovery | None = None

    @property
    def inventories(self) -> Inventories:
        """The holdings known so far; on rank 0, once it has asked."""
        assert self._known is not None
        return self._known.inventories

    def first(self) -> list[Candidate]:
        """Return the best candidate that can be restored; none when there is none."""
        return self._decide(self._ask)

    def plan_again(self, candidate: Candidate, error: HoldfastError) -> list[Candidate]:
        """Return the best candidate left after ``candidate`` failed with ``error``, which all
        ranks share.
        """
        return self._decide(lambda: self._less(candidate, error))

    def open(self, candidate: Candidate) -> Checkpoint:
        """Open the images of the last result of ``first`` or ``plan_again``."""
        recovery = self._recovery
        assert recovery is not None and recovery.candidate == candidate
        if not recovery.sources:
            return self._open_stored(candidate, None)
        return open_recovery(recovery, self._reach, partial(self._open_stored, candidate))

    def _less(self, candidate: Candidate, error: HoldfastError) -> KnownRecoveries:
        assert self._known is not None  # rank 0 alone asks, and has it
        before = self._known.inventories
        remaining = before.without(candidate, error.told_fields)
        self._failed |= {*before.stored} - {*remaining.stored}
        return self._listed_again(candidate, self._known._replace(inventories=remaining))

    def _listed_again(self, candidate: Candidate, known: KnownRecoveries) -> KnownRecoveries:
        """List storage again, if retention removed ``candidate``."""
        if self._storage is None or not self._storage.hold.should_list_again(candidate):
            return known
        with suppress(StorageError):  # storage fails: try what is known
            remaining = tuple(one for one in self._storage.list() if one not in self._failed)
            return known._replace(inventories=replace(known.inventories, stored=remaining))
        return known

    def _decide(self, learn: Callable[[], KnownRecoveries]) -> list[Candidate]:
        def decide() -> bytes:
            selection = self._find(learn())
            while selection.recoveries and not self._is_held(selection.recoveries[0]):
                selection = self._find(self._without(selection.recoveries[0].candidate))
            self._report(selection)
            return encode_choice(next(iter(selection.recoveries), None))

        encoded = from_rank0(self._world, "restore: sources", decide, timeout_s=self._timeout_s)
        self._recovery = decode_choice(encoded, self._reach.images) if encoded else None
        return [] if self._recovery is None else [self._recovery.candidate]

    def _find(self, known: KnownRecoveries) -> Selection:
        self._known = known._replace(inventories=known.gathering.with_parity(known.inventories))
        return self._known.inventories.find(self._wanted)

    def _is_held(self, best: Recovery) -> bool:
        return self._storage is None or self._storage.hold.acquire(best.candidate)

    def _without(self, candidate: Candidate) -> KnownRecoveries:
        """Return what is left when retention removed the candidate before this rank opened it."""
        assert self._known is not None
        manifest = candidate._replace(held=0, is_spread=False)
        inventories = self._known.inventories
        remaining = tuple(one for one in inventories.stored if one != manifest)
        known = self._known._replace(inventories=replace(inventories, stored=remaining))
        return self._listed_again(candidate, known)

    def _report(self, selection: Selection) -> None:
        """Report unrestorable attempts that are newer than the best, or of its step, once each."""
        least = min((one.candidate.step for one in selection.recoveries[:1]), default=-1)
        for one in selection.refusals:
            if one.step >= least and one not in self._told:
                self._told.add(one)
                emit(
                    SourceDropped(
                        step=one.step,
                        rank=0,
                        source=f"memory {one.incarnation}-{one.step}",
                        reason=one.reason,
                    )
                )
