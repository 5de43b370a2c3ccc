"""What memory and storage together offer to a run's restore, and the way to each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdfast.catalogue import Catalogue
from holdfast.errors import NotFound
from holdfast.load.choose import Candidate, choose
from holdfast.load.peer_image import Peers
from holdfast.load.source import Checkpoint, from_memory
from holdfast.load.stored import broken_manifests, catalogue_of, nothing_fits, open_stored, stored
from holdfast.snapshot import messages as m
from holdfast.snapshot.hosts import Hosts
from holdfast.storage.base import Store

A = TypeVar("A", bound=m.Message)
Ask = Callable[[m.Message, type[A]], A]


class Offers:
    """The sources of a run, on ``rank``: ``ask`` asks its keeper, whose slots lie in ``arena``."""

    def __init__(
        self, store: Store, rank: int, arena: Path, ask: Ask[m.Message], hosts: Hosts | None = None
    ) -> None:
        self.incarnation = 0
        """Of the asking: peers answer no other."""
        self._hosts = hosts
        self._peers: Peers | None = None
        self._store = store
        self._rank = rank
        self._arena = arena
        self._ask = ask

    def is_there_any(self) -> bool:
        """Whether a run that begins now has something to go on from, be it damaged."""
        found = catalogue_of(self._store)
        return bool(self._candidates(found, None) or broken_manifests(found))

    def fitting(self, step: int | str | None) -> list[Candidate]:
        """What fits ``step``, best first. NotFound or RestoreError when nothing does and should."""
        found = catalogue_of(self._store)
        fit = self._candidates(found, step)
        if not fit and (step is not None or broken_manifests(found)):
            raise nothing_fits(self._store, found, step)
        return fit

    def open(self, candidate: Candidate) -> Checkpoint:
        """The images of ``candidate``; those in memory stay there. NotFound when they are gone."""
        if candidate.where == "memory":
            held = next(
                (g for g in self._held().generations if g.attempt == candidate.attempt), None
            )
            if held is None:
                raise NotFound(f"{candidate.generation} is no longer in memory")
            self._ask(m.Pin(attempt=candidate.attempt), m.Done)
            return from_memory(self._arena, held, self._reach_peers())
        return open_stored(self._store, candidate, self._rank)

    def _reach_peers(self) -> Peers | None:
        if self._hosts is not None and self._peers is None:
            self._peers = Peers(
                self._hosts.table, self._hosts.own_id, self._hosts.secret, self.incarnation
            )
        return self._peers

    def close(self) -> None:
        """Nothing more is read from peers."""
        if self._peers is not None:
            self._peers.close()

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
