"""What memory and storage together offer to a run's restore, and the way to each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.catalogue import Catalogue
from holdfast.errors import HoldfastError, NotFound
from holdfast.load.choose import Candidate, choose
from holdfast.load.source import Checkpoint, from_memory
from holdfast.load.stored import broken_manifests, catalogue_of, nothing_fits, open_stored, stored
from holdfast.snapshot import messages as m
from holdfast.storage.base import Store
from holdfast.world import World, tell_all

A = TypeVar("A", bound=m.Message)
Ask = Callable[[m.Message, type[A]], A]
#: See ``holdfast.load.restore``.
PlanAgain = Callable[[Candidate, HoldfastError], Sequence[Candidate]]


class Offers:
    """The sources of a run on one host: ``ask`` asks its keeper, whose slots lie in ``arena``."""

    def __init__(self, store: Store, rank: int, arena: Path, ask: Ask[m.Message]) -> None:
        self.incarnation = 0
        """Of the asking: peers answer no other."""
        self._store = store
        self._rank = rank
        self._arena = arena
        self._ask = ask

    def is_there_any(self) -> bool:
        """Whether a run that begins now has something to go on from, be it damaged."""
        found = catalogue_of(self._store)
        return bool(self._candidates(found, None) or broken_manifests(found))

    def first(
        self, world: World, step: int | str | None, *, timeout_s: float
    ) -> Sequence[Candidate]:
        """What fits ``step``, best first; the same on all ranks, which all call it.

        NotFound or RestoreError when nothing does and should.
        """

        def find() -> bytes:
            found = catalogue_of(self._store)
            fit = self._candidates(found, step)
            if not fit and (step is not None or broken_manifests(found)):
                raise nothing_fits(self._store, found, step)
            return msgspec.json.encode(fit)

        told = tell_all(world, "restore: candidates", find, timeout_s=timeout_s)
        return msgspec.json.decode(told, type=list[Candidate])

    def plan_again(self) -> PlanAgain | None:
        """What finds out what is left when something has failed; None: the rest of ``first``."""
        return None

    def open(self, candidate: Candidate) -> Checkpoint:
        """The images of ``candidate``; those in memory stay there. NotFound when they are gone."""
        if candidate.where == "memory":
            held = next(
                (g for g in self._held().generations if g.attempt == candidate.attempt), None
            )
            if held is None:
                raise NotFound(f"{candidate.generation} is no longer in memory")
            self._ask(m.Pin(attempt=candidate.attempt), m.Done)
            return from_memory(self._arena, held)
        return open_stored(self._store, candidate, self._rank)

    def close(self) -> None:
        """Nothing more is read."""

    def _candidates(self, found: Catalogue, step: int | str | None) -> list[Candidate]:
        inventory = self._held()
        held = [
            Candidate(g.incarnation, g.step, "memory", g.attempt) for g in inventory.generations
        ]
        return choose([*held, *stored(found)], inventory.parents | found.parents, step)

    def _held(self) -> m.Inventory:
        answer = self._ask(m.ListInventory(), m.Inventory)
        assert isinstance(answer, m.Inventory)
        return answer
