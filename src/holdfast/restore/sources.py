"""Has rank 0 select what is restored, tells all ranks, and selects again if a source fails.

Rank 0 learns what the hosts hold, selects the generation and the source of each image
(``holdfast.restore.planning.selection``) and sends the selection to all ranks. A source that fails
is removed from the holdings, and the selection runs again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.catalogue import is_root
from holdfast.errors import ArenaError, HoldfastError, NotFound, RestoreError, StorageError
from holdfast.events import SourceDropped, emit, warn
from holdfast.format.manifest import Generation, Manifest
from holdfast.geometry.layout import Layout
from holdfast.overview import UNSEEN, Overview
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SLOT_SUFFIX, SlotFile
from holdfast.restore.cluster.collect import InventoryCollector
from holdfast.restore.cluster.open import ClusterReach, LocalSlot, open_recovery
from holdfast.restore.planning.candidates import Candidate, choose
from holdfast.restore.planning.holdings import Recovery, Refusal, decode_choice
from holdfast.restore.planning.selection import Inventories, Selection
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.stored import (
    all_read,
    broken_manifests,
    choose_stored,
    first_read,
    nothing_fits,
    overview_of,
    require_there,
    require_whole_line,
    stored,
    stored_starts,
)
from holdfast.restore.restore_clock import RestoreClock
from holdfast.restore.storage_hold import StorageHold
from holdfast.storage.base import Store
from holdfast.storage.tiered import TieredStore
from holdfast.transport.client import Puller
from holdfast.world import World, from_rank0

A = TypeVar("A", bound=m.Message)
Ask = Callable[[m.Message, type[A]], A]


class RestoreSources:
    """The sources of a run on one host, the table of one: ``ask`` queries its keeper, whose slots
    lie in ``arena``.
    """

    phase = "restore: candidates"
    is_opened = True
    """True where this process has read the file of the root when it started."""

    def __init__(
        self, store: Store, rank: int, arena: Path, ask: Ask[m.Message], listed: Overview = UNSEEN
    ) -> None:
        self.incarnation = 0
        """The incarnation of this restore: peers refuse any other."""
        self.clock = RestoreClock()
        """Counts since ``first`` was called."""
        self._store = store
        self._rank = rank
        self._arena = arena
        self._ask = ask
        self._contents = listed
        """What rank 0 listed last."""
        self._wanted: int | str | None = None
        self.hold = StorageHold(store)
        self._recoveries: ClusterRestore | None = None
        self._told_others: set[int] = set()
        self._silent: list[str] = []
        """The hosts that did not report their holdings."""
        self._newest: bytes | None = None
        """What all ranks restore unless they are asked for a step; None if that is not known."""
        self._selection = Selection((), ())

    def let_go(self) -> None:
        """End the restore: release the lease, so that retention may remove what it read. Never
        raises.
        """
        self.hold.end()

    def close(self) -> None:
        """Release all resources; nothing may be read afterwards."""

    # ── on every rank ────────────────────────────────────────────────────────────────────

    def first(
        self, world: World, step: int | str | None, *, timeout_s: float
    ) -> Sequence[Candidate]:
        """Return the best candidate for ``step``, if any; the same on all ranks, which all call it.

        NotFound or RestoreError when there should be one and is none. Call ``let_go`` after it.
        """
        self.hold, self._wanted = StorageHold(self._store, self._listed), step
        self.clock = RestoreClock()
        self._recoveries = restore = ClusterRestore(self, world, wanted=step, timeout_s=timeout_s)
        if step is None and self._newest is not None:
            return restore.begin_with(self._newest, self._selection)
        return restore.first()

    def learn(self, survey: bytes) -> bool:
        """Take what rank 0 found at the start; return whether there is anything to restore."""
        is_there, self._newest = msgspec.msgpack.decode(survey, type=tuple[bool, bytes | None])
        return is_there

    def forget(self) -> None:
        """Choose anew at another restore: what is newest may follow from the last one."""
        self._newest = self._recoveries = None
        self.hold, self._contents = StorageHold(self._store), UNSEEN

    def plan_again(self, candidate: Candidate, error: HoldfastError) -> Sequence[Candidate]:
        """Return the best candidate left after ``candidate`` failed, as ``first`` does."""
        assert self._recoveries is not None
        return self._recoveries.plan_again(candidate, error)

    def open(self, candidate: Candidate) -> Checkpoint:
        """Open the images of ``candidate``; those in memory stay there. NotFound when they are
        gone.
        """
        assert self._recoveries is not None
        if candidate.held or candidate.where == "memory":
            self._ask(m.PinAttempt(attempt=candidate.attempt), m.Done)
        return self._recoveries.open(candidate)

    def reach(self) -> ClusterReach:
        """Return this rank's access to what all hosts hold."""
        alone = Puller(os.urandom(32), incarnation=self.incarnation)  # there is nobody to ask
        return ClusterReach(host="", arena=self._arena, puller=alone, peers={}, slots=self._slots())

    def _slots(self) -> Mapping[tuple[str, int], LocalSlot]:
        return slots_of(self._arena)

    def open_stored(self, candidate: Candidate, layout: Layout | None) -> Checkpoint:
        """Open a candidate that needs storage."""
        return self.hold.open(candidate, self._rank, layout)

    def distrust(self, path: str) -> bool:
        """Read a file from another tier from now on; False if there is no other."""
        return isinstance(self._store, TieredStore) and self._store.distrust(path)

    # ── on rank 0 ────────────────────────────────────────────────────────────────────────

    def survey(self, ranks: int = 1) -> bytes:
        """Return whether there is anything to restore, and what a restore that follows takes
        first; all ``ranks`` ``learn`` it.
        """
        known = self.gather().with_parity()
        is_there, newest = self._holds_any(known), None
        if is_there and not self._silent:  # these are asked again
            with suppress(HoldfastError):  # it is found again, and explained, by the restore
                self._selection = known.inventories.find(None)
                if self._selection.recoveries:
                    hold = StorageHold(self._store, self._listed)
                    newest = hold.tell(self._selection.recoveries[0], ranks)
        return msgspec.msgpack.encode((is_there, newest))

    def _holds_any(self, known: KnownRecoveries) -> bool:
        """Return whether a new run has anything to continue from, be it damaged."""
        inventories, line = known.inventories, known.inventories.line
        is_there = any(not line.is_abandoned(one.generation) for one in inventories.candidates())
        contents = known.contents
        if not is_there:  # those that no line was known to have are not read yet
            contents = all_read(self._store, contents)
            read = (one.generation for one in contents.manifests)
            is_there = any(not line.is_abandoned(generation) for generation in read)
        is_broken = bool(broken_manifests(contents))
        return is_there or is_broken or bool(self._silent) or not is_root(self._store)

    def nothing(self, known: KnownRecoveries, step: int | str | None) -> None:
        """Raise the error that says why nothing is restored, unless there is nothing indeed."""
        require_there(self._store)
        contents = all_read(self._store, known.contents)
        inventories = replace(known.inventories, stored=tuple(stored(contents)))
        require_whole_line(self._store, inventories.candidates(), inventories.line, step)
        if self._silent:
            raise RestoreError(
                f"nothing else can be restored, and what is in the memory of "
                f"{', '.join(self._silent)} is not known: its keeper did not say. Start the run "
                "again; to begin anew without it, use another root."
            )
        if step is not None or broken_manifests(contents):
            raise nothing_fits(self._store, contents, step)

    def gone(self, step: int | str | None, candidate: Candidate, error: HoldfastError) -> None:
        """Raise NotFound when the step is no longer in storage: it was removed meanwhile."""
        try:
            contents = overview_of(self._store)
        except StorageError:  # unknown
            return
        if step is not None and not choose(
            stored(contents), contents.parents, step, contents.unreadable
        ):
            why = nothing_fits(self._store, contents, step)
            raise gone_meanwhile(why, candidate, error) if isinstance(why, NotFound) else why

    @property
    def unread(self) -> Sequence[Generation]:
        """The checkpoints that are listed, and of which nothing is known yet."""
        return self._contents.unread

    def list_stored(self, known: Inventories) -> Inventories:
        """Bring up to date what storage lists."""
        contents = self._contents = overview_of(self._store)
        return replace(known, stored=tuple(stored(contents)))

    def _listed(self, candidate: Candidate) -> Manifest | None:
        """Return the manifest of a candidate as it was listed."""
        found = self._contents.read.get(candidate.generation)
        return found if found is not None and found.attempt == candidate.attempt else None

    def gather(self) -> KnownRecoveries:
        """Return what all hosts hold, and what storage lists."""
        contents = overview_of(self._store, self._contents, is_brief=True, is_opened=self.is_opened)
        gathering = self._ask_hosts()
        there = stored_starts(
            self._store, contents, {n for one in gathering.holdings for n in one.starts}
        )
        inventories, others = Inventories(
            gathering.holdings,
            tuple(stored(contents)),
            dict(there.parents),
            contents.unreadable,
            dict(there.starts),
        ).of_known_starts()
        self._warn_of_others(others)
        contents = first_read(self._store, contents, inventories.line, self._wanted)
        self._contents = contents
        inventories = replace(inventories, stored=tuple(stored(contents)))
        return KnownRecoveries(inventories, gathering, contents)

    def _ask_hosts(self) -> InventoryCollector:
        """Return what all hosts hold: this one."""
        answer = self._ask(m.ListInventory(), m.Inventory)
        assert isinstance(answer, m.Inventory)
        return InventoryCollector([answer])

    def _warn_of_others(self, numbers: set[int]) -> None:
        for n in sorted(numbers - self._told_others):
            warn(
                f"incarnation {n} in memory was never recorded in storage, and another "
                f"start has taken its number, or that of one it descends from: {n}-STEP "
                "names what is in storage, and what is in memory of it is not restored"
            )
        self._told_others |= numbers


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
            slots[record.attempt, record.rank] = LocalSlot(str(path), record.image)
    return slots


# Chooses the candidates of a restore: rank 0 decides and sends its choice to all.
#
#     restore = ClusterRestore(sources, world, wanted=None, timeout_s=60)
#     restore_first(world, state, restore.first(), restore.open,
#                   plan_again=restore.plan_again, ...)


class KnownRecoveries(NamedTuple):
    """The holdings that rank 0 collected, what fetches parity records, and what storage lists."""

    inventories: Inventories
    gathering: InventoryCollector
    contents: Overview = UNSEEN

    def with_parity(self) -> KnownRecoveries:
        """Fetch the parity records that are needed for the inventories."""
        return self._replace(inventories=self.gathering.with_parity(self.inventories))


class ClusterRestore:
    """One restore, on one rank; all ranks make the same calls. Rank 0 alone gathers."""

    def __init__(
        self,
        sources: RestoreSources,
        world: World,
        *,
        wanted: int | str | None,
        timeout_s: float,
    ) -> None:
        self._sources, self._world, self._reach = sources, world, sources.reach()
        self._wanted, self._timeout_s = wanted, timeout_s
        self._failed: set[Candidate] = set()
        """Candidates listed in storage that must not be tried again."""
        self._known: KnownRecoveries | None = None
        self._told: set[Refusal] = set()
        self._recovery: Recovery | None = None
        self._must_hold = False
        """On rank 0: what was chosen before is not leased yet."""

    def begin_with(self, encoded: bytes, selection: Selection) -> list[Candidate]:
        """Return the candidate that all ranks were told at the start.

        ``selection``: on rank 0, what it is of.
        """
        self._report(selection)
        self._must_hold = self._world.rank == 0
        return self._take(encoded)

    def first(self) -> list[Candidate]:
        """Return the best candidate that can be restored; none when there is none."""

        def explain() -> None:
            if self._known is not None:
                self._sources.nothing(self._known, self._wanted)

        return self._decide(self._sources.gather, explain)

    def plan_again(self, candidate: Candidate, error: HoldfastError) -> list[Candidate]:
        """Return the best candidate left after ``candidate`` failed with ``error``, which all
        ranks share.
        """

        def explain() -> None:
            if candidate.where == "storage":
                self._sources.gone(self._wanted, candidate, error)

        is_elsewhere = self._is_in_another_tier(candidate, error)  # on every rank

        def learn() -> KnownRecoveries:
            if is_elsewhere:
                return self._known or self._sources.gather()
            return self._less(candidate, error)

        return self._decide(learn, explain)

    def _is_in_another_tier(self, candidate: Candidate, error: HoldfastError) -> bool:
        """Return whether another tier of storage has the file whose bytes were wrong."""
        if candidate.where != "storage":
            return False
        fields = error.told_fields
        path = fields.get("image") or fields.get("path")
        return isinstance(path, str) and self._sources.distrust(path)

    def open(self, candidate: Candidate) -> Checkpoint:
        """Open the images of the last result of ``first`` or ``plan_again``."""
        recovery = self._recovery
        assert recovery is not None and recovery.candidate == candidate
        must_hold, self._must_hold = self._must_hold, False
        if must_hold and not self._is_held(recovery):
            raise NotFound(f"{candidate.generation} was removed after the start found it")
        if not recovery.sources:
            return self._sources.open_stored(candidate, None)
        open_stored = partial(self._sources.open_stored, candidate)
        return open_recovery(recovery, self._reach, open_stored)

    def _less(self, candidate: Candidate, error: HoldfastError) -> KnownRecoveries:
        known = (
            self._known or self._sources.gather().with_parity()
        )  # what the start knew may be out of date
        before = known.inventories
        remaining = before.without(candidate, error.told_fields)
        self._failed |= {*before.stored} - {*remaining.stored}
        return self._listed_again(candidate, known._replace(inventories=remaining))

    def _listed_again(self, candidate: Candidate, known: KnownRecoveries) -> KnownRecoveries:
        """List storage again, if retention removed ``candidate``; or wholly, for what is next."""
        unread = self._sources.unread if candidate.where == "storage" else ()
        if not unread and not self._sources.hold.should_list_again(candidate):
            return known
        try:
            listed = self._sources.list_stored(known.inventories)
        except StorageError:
            # What else is stored is not known: to begin anew, or from before it, would abandon it.
            best = next(iter(self._find(known).recoveries), None)
            if best is None or self._comes_before(unread, best.candidate, known.inventories):
                raise
            return known
        remaining = tuple(one for one in listed.stored if one not in self._failed)
        return known._replace(inventories=replace(listed, stored=remaining))

    def _comes_before(
        self, unread: Iterable[Generation], best: Candidate, inventories: Inventories
    ) -> bool:
        """Return True if one of the checkpoints that are not read is better than ``best``."""
        line, wanted = inventories.line, self._wanted
        if isinstance(wanted, str):  # that very generation is found already
            return False
        return any(
            one in line
            and wanted in (None, one.step)
            and (one.step, one.incarnation) > (best.step, best.incarnation)
            for one in unread
        )

    def _decide(
        self, learn: Callable[[], KnownRecoveries], explain: Callable[[], None]
    ) -> list[Candidate]:
        def decide() -> bytes:
            with self._sources.clock.during("choose"):
                return choose_best()

        def choose_best() -> bytes:
            with self._sources.clock.during("inventory"):
                known = learn()
            selection = self._find(known)
            while selection.recoveries and not self._is_held(selection.recoveries[0]):
                selection = self._find(self._without(selection.recoveries[0].candidate))
            self._report(selection)
            if not selection.recoveries:
                explain()
                return b""
            best = selection.recoveries[0]
            return self._sources.hold.tell(best, self._world.size)

        with self._sources.clock.during("meet"):
            encoded = from_rank0(
                self._world, self._sources.phase, decide, timeout_s=self._timeout_s
            )
        return self._take(encoded)

    def _take(self, encoded: bytes) -> list[Candidate]:
        self._recovery = None
        if not encoded:
            return []
        choice, documents = msgspec.msgpack.decode(encoded, type=tuple[bytes, bytes])
        self._recovery = decode_choice(choice, self._reach.images)
        candidate = self._recovery.candidate
        self._sources.hold.take(candidate, documents)
        return [candidate]

    def _find(self, known: KnownRecoveries) -> Selection:
        self._known = known.with_parity()
        return self._known.inventories.find(self._wanted)

    def _is_held(self, best: Recovery) -> bool:
        return self._sources.hold.acquire(best.candidate)

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


class StoredSources(RestoreSources):
    """The checkpoints in storage alone, of which there must be one."""

    phase = "load: candidates"
    is_opened = False

    def __init__(self, store: Store, rank: int) -> None:
        super().__init__(store, rank, Path(), lambda *_: m.Inventory(""))

    def _slots(self) -> Mapping[tuple[str, int], LocalSlot]:
        return {}  # there is no arena

    def list_stored(self, known: Inventories) -> Inventories:
        """See ``RestoreSources``."""
        # Others go on saving: there may be new incarnations.
        contents = self._contents = overview_of(self._store)
        return replace(
            known,
            stored=tuple(stored(contents)),
            parents=dict(contents.parents),
            unreadable=contents.unreadable,
        )

    def nothing(self, known: KnownRecoveries, step: int | str | None) -> None:
        """See ``RestoreSources``."""
        contents = overview_of(self._store)
        require_whole_line(self._store, stored(contents), contents.line, step)
        raise nothing_fits(self._store, contents, step)

    def gone(self, step: int | str | None, candidate: Candidate, error: HoldfastError) -> None:
        """See ``RestoreSources``."""
        with suppress(StorageError):
            try:
                choose_stored(self._store, step)
            except NotFound as gone:
                raise gone_meanwhile(gone, candidate, error) from error


def gone_meanwhile(gone: NotFound, candidate: Candidate, error: HoldfastError) -> NotFound:
    """Return the error when no candidate is left, and a removed one may have been read in part."""
    return NotFound(
        f"{gone}\n{candidate.generation} was there when the restore began, and was removed while "
        f"it was read ({error}): the state may hold a part of it and must not be used. Pin what "
        "must stay: `holdfast pin`.",
        **gone.fields,
    )
