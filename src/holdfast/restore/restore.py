"""Restore one generation into the state of every rank, or leave every rank with the same error.

All ranks try the same candidate, tell each other how it went after every phase, and only go
on together. A source that fails or does not verify is dropped on all of them.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from holdfast.errors import (
    ArenaError,
    FormatError,
    HoldfastError,
    NotFound,
    PeerError,
    RestoreError,
    StorageError,
    TooManyLost,
)
from holdfast.events import Restored as RestoredEvent
from holdfast.events import SourceDropped, ValuesDiffer, emit
from holdfast.format.manifest import Generation
from holdfast.load.choose import Candidate
from holdfast.load.claims import unclaimed
from holdfast.load.compare import Comparison, Request
from holdfast.load.exchange import Traffic
from holdfast.load.filling import Filling
from holdfast.load.late import Staging
from holdfast.load.lists import SavedLists, divide, takers
from holdfast.load.plan import STAGING_BYTES
from holdfast.load.read import read_values, read_wants
from holdfast.load.source import Checkpoint
from holdfast.load.together import read_once
from holdfast.state.following import following_keys
from holdfast.state.lists import decode_items
from holdfast.state.objects import State, sort_objects
from holdfast.state.restore import refuse
from holdfast.world import World, agree

#: Errors that speak against a source, not against the user's state: the next one is tried.
SOURCE_ERRORS = (FormatError, StorageError, ArenaError, NotFound, PeerError, TooManyLost)
#: What to try in order, now that a candidate failed with an error that all ranks were told.
PlanAgain = Callable[[Candidate, HoldfastError], Sequence[Candidate]]
#: Whose values are looked at for differences; each is an image to open.
VALUES_COMPARED = 64


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore brought back: ``source`` is "memory" or "storage"."""

    step: int
    source: str
    elapsed_s: float
    generation: Generation
    size_bytes: int = 0


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave Python's search for cycles until later: none is made here.

    Thousands of leaves make it search all that the process holds, 0.1 to 0.2 s each time
    (measured beside torch).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def restore_first(
    world: World,
    state: State,
    candidates: Sequence[Candidate],
    open_checkpoint: Callable[[Candidate], Checkpoint],
    *,
    incarnation: int,
    timeout_s: float,
    on_poison: Callable[[bool], None],
    request: Request | None = None,
    plan_again: PlanAgain | None = None,
) -> Restored | None:
    """Try ``candidates`` in order, on all ranks alike; None when there are none.

    ``plan_again``: asked on all ranks for what is left to try when one has failed; the rest of
    ``candidates`` otherwise. Each time it must have less to go by (``Inventories.without``).
    ``request``: how the state sees what is stored, and which of it is wanted.
    ``on_poison(True)`` is called before the state is first changed and ``on_poison(False)`` when
    all ranks hold one generation. Raises StateMismatch when the state does not fit, RestoreError
    when no source was good.
    """
    reasons: list[str] = []
    left = deque(candidates)
    while left:
        candidate = left.popleft()
        started_s = time.monotonic()
        phase = f"restore {candidate.incarnation}-{candidate.step} from {candidate.where}"
        try:
            attempt = _Attempt(world, state, candidate, phase, timeout_s, request or Request())
            attempt.run(open_checkpoint, on_poison)
        except SOURCE_ERRORS as error:
            name = f"{candidate.where} {candidate.generation}"
            reasons.append(f"{name}: {error}")
            emit(SourceDropped(
                incarnation=incarnation, step=candidate.step, rank=world.rank, source=name,
                reason=str(error),
            ))  # fmt: skip
            if plan_again is not None:
                left = deque(plan_again(candidate, error))
            continue
        elapsed_s = time.monotonic() - started_s
        emit(RestoredEvent(
            incarnation=incarnation, step=candidate.step, rank=world.rank, source=candidate.where,
            elapsed_s=elapsed_s, size_bytes=attempt.size_bytes, saved_world=attempt.saved_world,
            world=world.size, parent_incarnation=candidate.incarnation,
            read_bytes=attempt.traffic.read_bytes if attempt.traffic else 0,
            received_bytes=attempt.traffic.received_bytes if attempt.traffic else 0,
        ))  # fmt: skip
        return Restored(
            candidate.step, candidate.where, elapsed_s, candidate.generation, attempt.size_bytes
        )
    if reasons:
        raise RestoreError("no generation could be restored:\n  " + "\n  ".join(reasons))
    return None


def sampled_ranks(saved_world: int) -> Iterator[int]:
    """The saved ranks whose values are compared with those of rank 0: some of many, evenly."""
    count = min(saved_world, VALUES_COMPARED)
    return (saved_world * n // count for n in range(1, count))


class _Attempt:
    """One candidate, on this rank, in step with the others."""

    def __init__(
        self, world: World, state: State, candidate: Candidate, phase: str, timeout_s: float,
        request: Request,
    ) -> None:  # fmt: skip
        self.request = request
        self.world, self.state, self.candidate = world, state, candidate
        self.phase, self.timeout_s = phase, timeout_s
        self.size_bytes = self.saved_world = 0
        self.traffic: Traffic | None = None
        self.has_ended = False

    def run(
        self, open_checkpoint: Callable[[Candidate], Checkpoint], on_poison: Callable[[bool], None]
    ) -> None:
        """Prepare, read, finish; every rank learns of any rank's trouble after each."""
        with _no_collection():
            opened = self._together("opened", lambda: self._open(open_checkpoint))
            if any(opened):  # a rank here has lists: all ranks look for them
                self._count_lists(opened)
            said = self._together("compared", self._compare)
            self.request.refuse_unused(said)
            self._check()
            on_poison(True)
            self._together("prepared", self._prepare)
            try:
                # What is in the memory of one host is as near to every rank.
                if self.candidate.where == "storage" or self.candidate.is_spread:
                    self.traffic = self._read_once()
                self._together("read", self._read)
            finally:
                self._end_copies()
        self._together("values set", self._finish)
        on_poison(False)

    def _together(self, what: str, act: Callable[[], bytes | None]) -> list[bytes]:
        """Every rank acts; what each has to tell the others."""

        def run() -> bytes:
            try:
                return act() or b""
            except (HoldfastError, KeyboardInterrupt):
                raise
            except Exception as error:  # of the user's load_state_dict, say: all ranks must know
                raise RestoreError(f"{self.phase}: {what}: {_words(error)}") from error

        return agree(self.world, f"{self.phase}: {what}", run, timeout_s=self.timeout_s)

    def _open(self, open_checkpoint: Callable[[Candidate], Checkpoint]) -> bytes:
        """Tells whether the state of this rank has lists that are split over ranks."""
        self.checkpoint = open_checkpoint(self.candidate)
        self.saved_world = self.checkpoint.world
        mine = self.world.rank if self.world.rank < self.saved_world else 0
        self.own = read_values(self.checkpoint, mine)
        is_same_world = self.saved_world == self.world.size
        self.base = mine if is_same_world else 0
        self.values = self.own if self.base == mine else read_values(self.checkpoint, self.base)
        self.places: dict[str, tuple[int, int]] = {}
        self.lists = SavedLists(self.checkpoint, self.world.rank, self.world.size)
        choice, lists = self.request.choice, sort_objects(self.state).lists
        return takers({key: one for key, one in lists.items() if choice.takes_key(key)})

    def _count_lists(self, taken: Sequence[bytes]) -> None:
        self.places = divide(taken, self.world.rank)
        self.lists.hear(self._together("lists counted", self.lists.look))
        if self.lists.differing and self.world.rank == 0:
            emit(ValuesDiffer(
                step=self.candidate.step, rank=self.world.rank, names=self.lists.differing
            ))  # fmt: skip

    def _compare(self) -> bytes:
        """Find the values of all that is in this state, and what stands against them."""
        objects = sort_objects(self.state)
        following = following_keys(objects)
        comparison = Comparison(
            self.checkpoint, self.state, self.base, self.values, self.own.get("own", {}),
            self.world.rank, self.world.size, self.lists.parts.keys(),
        )  # fmt: skip
        self.compared = comparison.compare(objects, self.request)
        if self.saved_world != self.world.size and self.world.rank == 0:
            self._report_differing(following)
        return self.compared.said

    def _report_differing(self, following: frozenset[str]) -> None:
        """On another number of ranks all take rank 0's values; say so where ranks had others.

        Those that follow names are taken from who had them. Of a world of thousands only some are
        looked at: each is an image to open.
        """
        shared = self.values.get("shared", {})
        differing = {
            name
            for rank in sampled_ranks(self.saved_world)
            for name, value in read_values(self.checkpoint, rank).get("shared", {}).items()
            if name not in following and value != shared.get(name)
        }
        if differing:
            emit(ValuesDiffer(
                step=self.candidate.step, rank=self.world.rank, names=tuple(sorted(differing))
            ))  # fmt: skip

    def _check(self) -> None:
        """StateMismatch, on all ranks, unless all that is stored fits all that there is."""
        leaves, compared = [leaf.name for leaf in self.checkpoint.layout.leaves], self.compared
        left = unclaimed(
            self.world, self.phase, leaves, compared.claimed, compared.restoring, compared.problems,
            timeout_s=self.timeout_s,
        )  # fmt: skip
        if left is not None:
            self._together("checked", lambda: refuse([*compared.problems, *left]))

    def _prepare(self) -> None:
        items = self.lists.take(self.places)
        self.items = {key: decode_items(found) for key, found in items.items()}
        with torch.no_grad():
            self.filling = Filling(
                self.compared.restoring.make_room(), self.world.rank, self.compared.offer
            )
        self.size_bytes = self.filling.size_bytes
        self.filling.copies.begin()
        self.lend = Staging(self.filling.copies, STAGING_BYTES).lend

    def _read(self) -> None:
        filling = self.filling
        if self.traffic is None:
            with torch.no_grad():
                read = read_wants(
                    self.checkpoint, filling.wants, filling.destinations, lend=self.lend,
                    shared=filling.shared if self.world.size > 1 else None,
                )  # fmt: skip
            self.traffic = Traffic(read, received_bytes=0)
        with torch.no_grad():
            averaged = filling.average(self.checkpoint)
        self.traffic = replace(self.traffic, read_bytes=self.traffic.read_bytes + averaged)
        filling.copies.end()
        self.has_ended = True

    def _read_once(self) -> Traffic | None:
        filling = self.filling
        with torch.no_grad():
            return read_once(
                self.world, self.phase, self.checkpoint, filling.entries, filling.wants,
                filling.destinations, self.lend, timeout_s=self.timeout_s,
            )  # fmt: skip

    def _end_copies(self) -> None:
        """Whatever went wrong: nothing is copied to a device any more when it is heard of."""
        if not self.has_ended:
            with suppress(Exception):  # the error that is under way says more
                self.filling.copies.end()

    def _finish(self) -> None:
        with torch.no_grad():
            self.filling.pad()
        was_saved = self.world.rank < self.saved_world
        self.compared.restoring.finish(self.world.rank, rank_was_saved=was_saved, items=self.items)


def _words(error: Exception) -> str:
    """What went wrong, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    last = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{last}{notes}"
