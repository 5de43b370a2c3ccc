"""Lists and opens the candidates of a restore on one host, from memory and storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.catalogue import NEW_LISTS, Catalogue, find_manifest, is_root, manifest_path
from holdfast.errors import HoldfastError, NotFound, StorageError
from holdfast.events import Warned, emit
from holdfast.format.manifest import Lineage, Manifest
from holdfast.geometry.layout import Layout
from holdfast.leases import ReadLease
from holdfast.protocol import messages as m
from holdfast.restore.planning.candidates import (
    Candidate,
    StartRecords,
    choose,
    is_replaced,
    join_parents,
    replaced_starts,
)
from holdfast.restore.reading.images import Checkpoint, from_memory
from holdfast.restore.reading.stored import (
    broken_manifests,
    catalogue_of,
    nothing_fits,
    open_stored,
    require_there,
    require_whole_line,
    stored,
    stored_starts,
)
from holdfast.storage.base import Store
from holdfast.world import World, from_rank0

A = TypeVar("A", bound=m.Message)
Parents = dict[int, tuple[int, int] | None]
Ask = Callable[[m.Message, type[A]], A]
#: See ``holdfast.restore.restore``.
PlanAgain = Callable[[Candidate, HoldfastError], Sequence[Candidate]]


class RestoreSources:
    """The sources of a run on one host: ``ask`` queries its keeper, whose slots lie in
    ``arena``.
    """

    def __init__(self, store: Store, rank: int, arena: Path, ask: Ask[m.Message]) -> None:
        self.incarnation = 0
        """The incarnation of this restore: peers refuse any other."""
        self._store = store
        self._rank = rank
        self._arena = arena
        self._ask = ask
        self._hold = StorageHold(store)
        self._choices: Choices | None = None
        self._told_others: set[int] = set()

    def is_there_any(self) -> bool:
        """Return whether a new run has anything to continue from, be it damaged."""
        contents = catalogue_of(self._store)
        candidates, parents = self._candidates(contents)
        line = Lineage(parents, contents.unreadable)
        is_there = any(not line.is_abandoned(one.generation) for one in candidates)
        return is_there or bool(broken_manifests(contents)) or not is_root(self._store)

    def first(
        self, world: World, step: int | str | None, *, timeout_s: float
    ) -> Sequence[Candidate]:
        """Return the candidates for ``step``, best first; the same on all ranks, which all call it.

        NotFound or RestoreError when there should be one and is none. Call ``let_go`` after it.
        """

        def find() -> Sequence[Candidate]:
            contents = catalogue_of(self._store)
            candidates, parents = self._candidates(contents)
            fit = choose(candidates, parents, step, contents.unreadable)
            if not fit:
                require_there(self._store)
                line = Lineage(parents, contents.unreadable)
                require_whole_line(self._store, candidates, line, step)
            if not fit and (step is not None or broken_manifests(contents)):
                raise nothing_fits(self._store, contents, step)
            return fit

        self._hold = StorageHold(self._store)
        phase = "restore: candidates"
        self._choices = Choices(world, phase, self._hold, find, timeout_s=timeout_s)
        return self._choices.first()

    def plan_again(self) -> PlanAgain | None:
        """The function that lists what is left after a failure; None: the rest of ``first``."""
        return None if self._choices is None else self._choices.plan_again

    def open(self, candidate: Candidate) -> Checkpoint:
        """Open the images of ``candidate``; those in memory stay there. NotFound when they are
        gone.
        """
        if candidate.where == "memory":
            held = next(
                (g for g in self._held().generations if g.attempt == candidate.attempt), None
            )
            if held is None:
                raise NotFound(f"{candidate.generation} is no longer in memory")
            self._ask(m.PinAttempt(attempt=candidate.attempt), m.Done)
            return from_memory(self._arena, held)
        return self._hold.open(candidate, self._rank)

    def let_go(self) -> None:
        """End the restore: release the lease, so that retention may remove what it read. Never
        raises.
        """
        self._hold.end()

    def close(self) -> None:
        """Release all resources; nothing may be read afterwards."""

    def _candidates(self, contents: Catalogue) -> tuple[list[Candidate], Parents]:
        inventory = self._held()
        memory = StartRecords(inventory.parents, inventory.starts)
        there = stored_starts(self._store, contents, inventory.starts)
        replaced, held, others = replaced_starts(memory, there), [], set()
        for g in inventory.generations:
            if is_replaced(g.incarnation, g.nonce, memory, there, replaced):
                others.add(g.incarnation)
            else:
                held.append(Candidate(g.incarnation, g.step, "memory", g.attempt))
        self._warn_of_others(others)
        return [*held, *stored(contents)], join_parents([memory], there)

    def _warn_of_others(self, numbers: set[int]) -> None:
        for n in sorted(numbers - self._told_others):
            emit(
                Warned(
                    message=(
                        f"incarnation {n} in memory was never recorded in storage, and another "
                        f"start has taken its number, or that of one it descends from: {n}-STEP "
                        "names what is in storage, and what is in memory of it is not restored"
                    )
                )
            )
        self._told_others |= numbers

    def _held(self) -> m.Inventory:
        answer = self._ask(m.ListInventory(), m.Inventory)
        assert isinstance(answer, m.Inventory)
        return answer


# Protects what a restore reads from retention by a lease, and lists storage again if that was late.
#
# Rank 0 holds the lease for all ranks: on the best candidate, before the others learn of it. A
# candidate removed by then, or removed during the read where no lease can be written, is not
# damaged: storage is listed again, a bounded number of times.


class StorageHold:
    """The lease of one restore on ``store``; on rank 0."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lease = ReadLease(store)
        self._lists_left = NEW_LISTS
        self._read: dict[Candidate, tuple[Manifest, str]] = {}

    def acquire(self, candidate: Candidate) -> bool:
        """Acquire the lease on ``candidate``; False when retention removed it, or is removing
        it.
        """
        if candidate.where != "storage":
            return True
        try:
            found = find_manifest(self._store, candidate.generation)
            if found is None:
                return not self._has_gone(candidate)
            self._read = {candidate: found}
            return self._lease.take(found[0])
        except HoldfastError:  # opening it will report this
            return True

    def open(self, candidate: Candidate, rank: int, layout: Layout | None = None) -> Checkpoint:
        """Open ``candidate`` on this rank; see ``open_stored``."""
        read = self._read.pop(candidate, None)
        return open_stored(self._store, candidate, rank, read=read, layout=layout)

    def should_list_again(self, candidate: Candidate) -> bool:
        """Return whether storage must be listed again, after ``candidate`` failed or got no
        lease.
        """
        if not self._lists_left or not self._has_gone(candidate):
            return False
        self._lists_left -= 1
        return True

    def end(self) -> None:
        """Release the lease."""
        self._lease.end()

    def _has_gone(self, candidate: Candidate) -> bool:
        if candidate.where != "storage":
            return False
        try:
            return not self._store.exists(manifest_path(candidate.generation))
        except HoldfastError:  # storage fails: reported elsewhere
            return False


class Choices:
    """The candidates of a restore, best first, the same on all ranks, which make the same calls.

    ``find`` lists them; only rank 0 calls it. Its NotFound is raised on all ranks.
    """

    def __init__(
        self,
        world: World,
        phase: str,
        hold: StorageHold,
        find: Callable[[], Sequence[Candidate]],
        *,
        timeout_s: float,
    ) -> None:
        self._world, self._phase, self._timeout_s = world, phase, timeout_s
        self._hold, self._find = hold, find
        self._candidates: Sequence[Candidate] = ()
        self._failed: set[Candidate] = set()

    def first(self) -> list[Candidate]:
        """Return all candidates; the best one is leased."""

        def choose() -> list[Candidate]:
            self._candidates = self._find()
            return self._held()

        return self._tell(choose)

    def plan_again(self, candidate: Candidate, error: HoldfastError) -> list[Candidate]:
        """Return the candidates left after ``candidate`` failed with ``error``, which all ranks
        share.
        """

        def choose() -> list[Candidate]:
            self._failed.add(candidate)
            try:
                if self._hold.should_list_again(candidate):
                    self._list_again()
                return self._held()
            except NotFound as gone:
                raise gone_meanwhile(gone, candidate, error) from error

        return self._tell(choose)

    def _held(self) -> list[Candidate]:
        while remaining := [one for one in self._candidates if one not in self._failed]:
            if self._hold.acquire(remaining[0]):
                return remaining
            if self._hold.should_list_again(remaining[0]):
                self._list_again()
            else:
                self._failed.add(remaining[0])
        return []

    def _list_again(self) -> None:
        with suppress(StorageError):  # storage fails: try what is in memory
            self._candidates = self._find()

    def _tell(self, choose: Callable[[], list[Candidate]]) -> list[Candidate]:
        encoded = from_rank0(
            self._world,
            self._phase,
            lambda: msgspec.json.encode(choose()),
            timeout_s=self._timeout_s,
        )
        return msgspec.json.decode(encoded, type=list[Candidate])


def gone_meanwhile(gone: NotFound, candidate: Candidate, error: HoldfastError) -> NotFound:
    """Return the error when no candidate is left, and a removed one may have been read in part."""
    return NotFound(
        f"{gone}\n{candidate.generation} was there when the restore began, and was removed while "
        f"it was read ({error}): the state may hold a part of it and must not be used. Pin what "
        "must stay: `holdfast pin`.",
        **gone.fields,
    )
