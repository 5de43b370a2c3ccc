"""Restores one generation into the state of every rank, or raises the same error on every rank.

All ranks try the same candidate, exchange their result after every phase, and continue only
together. A source that fails or does not verify is dropped on all of them.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from msgspec import msgpack
from msgspec.structs import replace

from holdfast.collector import paused_collector
from holdfast.errors import (
    ArenaError,
    FormatError,
    HoldfastError,
    NotFound,
    PeerError,
    RestoreError,
    StorageError,
    TooManyLost,
    UsageError,
)
from holdfast.events import Restored as RestoredEvent
from holdfast.events import SourceDropped, ValuesDiffer, emit
from holdfast.format.manifest import Generation
from holdfast.geometry.box import Box
from holdfast.restore.destinations import Destinations, Staging
from holdfast.restore.exchange.block_exchange import Traffic
from holdfast.restore.match import (
    RestoreRequest,
    StateMatch,
    claims_word,
    join_claims,
    left_by_ranks,
)
from holdfast.restore.planning.candidates import Candidate
from holdfast.restore.planning.plan import STAGING_BYTES, Want
from holdfast.restore.read_once import join_replies, own_reply, read_once
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import BorrowBuffer, read_values, read_wants
from holdfast.restore.restore_clock import RestoreClock
from holdfast.restore.split_lists import SavedLists, divide, report_lists
from holdfast.state.objects import State, sort_objects
from holdfast.state.restore import Rewind, refuse
from holdfast.state.saved_values import keys_matched_by_name
from holdfast.state.values import decode_items
from holdfast.transport.wire.rank_tree import Join, Said, all_said, by_rank, join_said, said_by
from holdfast.world import Conclude, World, outcome_of, raise_outcome, reduce_or_raise

T = TypeVar("T")
#: Errors of a source, not of the user's state: the next candidate is tried.
SOURCE_ERRORS = (FormatError, StorageError, ArenaError, NotFound, PeerError, TooManyLost)
#: Returns the candidates to try, in order, after a candidate failed with an error all ranks know.
PlanAgain = Callable[[Candidate, HoldfastError], Sequence[Candidate]]
#: The phases of ``RestoreClock`` that are not "plan", by what the ranks do together.
_PHASES = {"read": "read", "values set": "set", "values set again": "set"}
#: The most ranks whose values are compared for differences, because each is an image to open.
VALUES_COMPARED = 64


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore.

    ``step``: the step that the state is of now. ``source``: "memory" or "storage". ``elapsed_s``:
    the whole restore on this rank. ``generation``: incarnation and step. ``size_bytes``: of what
    was restored here.
    """

    step: int
    source: str
    elapsed_s: float
    generation: Generation
    size_bytes: int = 0
    _rewind: Rewind | None = field(default=None, repr=False, compare=False)

    def rewind(self) -> None:
        """Set the random generators once more to the restored state, on this rank.

        Use it for numbers that a loop draws before its first batch in the middle of an epoch and
        would not have drawn there had it never stopped, as a loader does when it is iterated. Call
        it once, when the first batch has been loaded and before its forward. Not at the beginning
        of an epoch: there an uninterrupted run draws them too. A loader with a generator of its own
        needs no rewind. Raises UsageError without ``holdfast.Rng()`` in the state, and after the
        first update.
        """
        if self._rewind is None:
            raise UsageError(
                "rewind(): this is a copy, of another process or time. Call it on what restore() "
                "or load() returned"
            )
        self._rewind.again()


def restore_first(
    world: World,
    state: State,
    candidates: Sequence[Candidate],
    open_checkpoint: Callable[[Candidate], Checkpoint],
    *,
    incarnation: int,
    timeout_s: float,
    on_poison: Callable[[bool], None],
    request: RestoreRequest | None = None,
    plan_again: PlanAgain | None = None,
    adopt: Callable[[Generation], object] = lambda _: None,
    clock: RestoreClock | None = None,
    origin: str = "",
) -> Restored | None:
    """Try ``candidates`` in order, on all ranks alike; None when there are none.

    ``plan_again``: called on all ranks for the candidates left when one has failed; without it, the
    rest of ``candidates``. Each time it must have fewer (``Inventories.without``). ``request``: how
    the state maps to the checkpoint, and which part of it is wanted. ``on_poison(True)`` is called
    before the state is first changed and ``on_poison(False)`` when all ranks hold one generation.
    ``adopt``: called on rank 0 then, before any rank returns; its error is raised on all.
    ``clock``: has counted since the restore began; without it, it begins here. ``origin``: what the
    event says of where storage is.
    Raises StateMismatch when the state does not fit, RestoreError when no source was good.
    """
    reasons: list[str] = []
    remaining = deque(candidates)
    clock = clock or RestoreClock()
    while remaining:
        candidate = remaining.popleft()
        attempt = _RestoreAttempt(
            world, state, candidate, timeout_s, request or RestoreRequest(), clock, origin
        )
        try:
            with clock.attempting():
                attempt.run(open_checkpoint, on_poison, adopt)
        except SOURCE_ERRORS as error:
            name = f"{candidate.where} {candidate.generation}"
            reasons.append(f"{name}: {error}")
            emit(
                SourceDropped(
                    incarnation=incarnation,
                    step=candidate.step,
                    rank=world.rank,
                    source=name,
                    reason=str(error),
                )
            )
            if plan_again is not None:
                remaining = deque(plan_again(candidate, error))
        else:
            return attempt.restored(incarnation)
    if reasons:
        raise RestoreError("no generation could be restored:\n  " + "\n  ".join(reasons))
    return None


def sampled_ranks(saved_world: int) -> Iterator[int]:
    """Return the saved ranks whose values are compared with those of rank 0: an even sample of
    many.
    """
    count = min(saved_world, VALUES_COMPARED)
    return (saved_world * n // count for n in range(1, count))


class _RestoreAttempt:
    """One candidate, on this rank, in step with the others."""

    def __init__(
        self,
        world: World,
        state: State,
        candidate: Candidate,
        timeout_s: float,
        request: RestoreRequest,
        clock: RestoreClock,
        origin: str,
    ) -> None:
        self.request, self.clock, self.origin = request, clock, origin
        self.world, self.state, self.candidate = world, state, candidate
        # Memory of one host is equally near to every rank.
        self.is_apart = candidate.where == "storage" or candidate.is_spread
        self.phase = f"restore {candidate.generation} from {candidate.where}"
        self.timeout_s = timeout_s
        self.size_bytes = self.saved_world = 0
        self.traffic: Traffic | None = None
        self.rewind: Rewind | None = None
        self.filling: Destinations | None = None
        self.differing: tuple[str, ...] = ()
        self.adopted = b""
        self.has_ended = False

    def run(
        self,
        open_checkpoint: Callable[[Candidate], Checkpoint],
        on_poison: Callable[[bool], None],
        adopt: Callable[[Generation], object],
    ) -> None:
        """Match, read, finish; after each phase every rank learns of errors on any rank."""
        with paused_collector():
            self._match(open_checkpoint)
            on_poison(True)
            try:
                if self.is_apart:
                    self.traffic = self._read_once()
                self._together("read", self._read)
            finally:
                self._end_copies()
            self.adopted = self._set_values(adopt)
            on_poison(False)
            self.filling = None  # thousands of objects, which a collection would go through

    def restored(self, incarnation: int) -> Restored:
        """Report the restore; raise an error of ``adopt``, which all ranks share."""
        candidate, (elapsed_s, phases) = self.candidate, self.clock.read()
        traffic = self.traffic or Traffic(0, 0)
        emit(
            RestoredEvent(
                incarnation=incarnation,
                step=candidate.step,
                rank=self.world.rank,
                source=candidate.where,
                elapsed_s=elapsed_s,
                size_bytes=self.size_bytes,
                saved_world=self.saved_world,
                world=self.world.size,
                parent_incarnation=candidate.incarnation,
                read_bytes=traffic.read_bytes,
                received_bytes=traffic.received_bytes,
                origin=self.checkpoint.origin if candidate.where == "memory" else self.origin,
                **{f"{phase}_s": seconds for phase, seconds in phases.items()},
            )
        )
        raise_outcome(self.world.rank, self.adopted)
        return Restored(
            candidate.step,
            candidate.where,
            elapsed_s,
            candidate.generation,
            self.size_bytes,
            self.rewind,
        )

    def _set_values(self, adopt: Callable[[Generation], object]) -> bytes:
        """Set all values: those of some keys again where on any rank their objects changed the
        tensors they were given. Return the outcome of ``adopt``.
        """

        def conclude(keys: bytes) -> bytes:
            return msgpack.encode((keys, b"" if keys else self._adopt(adopt)))

        word = self._together("values set", self._finish, _join_keys, conclude)
        keys, adopted = msgpack.decode(word, type=tuple[bytes, bytes])
        if not keys:
            return adopted
        return self._together(
            "values set again",
            lambda: self._finish_again(msgpack.decode(keys, type=list[str])),
            conclude=lambda _: self._adopt(adopt),
        )

    def _adopt(self, adopt: Callable[[Generation], object]) -> bytes:
        """On rank 0, when all ranks hold the generation: an error is no fault of its source."""
        with self.clock.during("set"):
            return outcome_of(self.world.rank, lambda: adopt(self.candidate.generation))

    def _together(
        self,
        what: str,
        act: Callable[[], bytes | None],
        join: Join = max,
        conclude: Conclude | None = None,
    ) -> bytes:
        """Run ``act`` on every rank; return the joined results."""

        def run() -> bytes:
            with self.clock.during(_PHASES.get(what, "plan")):
                return self._report_errors(what, act) or b""

        with self.clock.during("meet"):
            return reduce_or_raise(
                self.world,
                f"{self.phase}: {what}",
                run,
                join,
                timeout_s=self.timeout_s,
                conclude=conclude,
            )

    def _report_errors(self, what: str, act: Callable[[], T]) -> T:
        """Raise RestoreError, which all ranks know, for any other error of ``act``."""
        try:
            return act()
        except (HoldfastError, KeyboardInterrupt):
            raise
        except Exception as error:  # such as from load_state_dict: all ranks must know
            raise RestoreError(f"{self.phase}: {what}: {_words(error)}") from error

    def _match(self, open_checkpoint: Callable[[Candidate], Checkpoint]) -> None:
        """Open and compare on every rank; raise StateMismatch unless checkpoint and state fit."""

        def begin() -> bytes:
            lists = self._open(open_checkpoint)
            if lists:  # these are compared when all know the parts of each
                return _match_word(self.world.rank, lists, self.lists.read_share())
            return self._compare()

        word = self._together("matched", begin, _join_matches)
        lists, parts, usages = all_said(_matches_in(word)[0])
        if any(said.value for said in lists):
            self._count_lists(lists, parts)
            word = self._together("lists matched", self._compare, _join_matches)
            usages = all_said(_matches_in(word)[0])[2]
        self.request.refuse_unused(usages)
        _, claims, self.replies = _matches_in(word)
        leaves = [leaf.name for leaf in self.checkpoint.layout.leaves]
        remaining = left_by_ranks(leaves, claims)
        if remaining is not None:
            self._together("checked", lambda: refuse([*self.compared.problems, *remaining]))
        if self.differing:
            emit(ValuesDiffer(step=self.candidate.step, rank=self.world.rank, names=self.differing))

    def _open(self, open_checkpoint: Callable[[Candidate], Checkpoint]) -> bytes:
        """Open the checkpoint; return whether the state of this rank has lists split over ranks."""
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
        return report_lists({key: one for key, one in lists.items() if choice.takes_key(key)})

    def _count_lists(self, taken: Sequence[Said], parts: Sequence[Said]) -> None:
        self.places = divide(by_rank(taken), self.world.rank)
        if not all(said.value for said in parts):  # on some ranks the state has no list
            word = self._together("lists counted", self._share_word, join_said)
            [parts] = all_said(word)
        self.lists.set_reports([said.value for said in parts])
        if self.lists.differing and self.world.rank == 0:
            emit(
                ValuesDiffer(
                    step=self.candidate.step, rank=self.world.rank, names=self.lists.differing
                )
            )

    def _share_word(self) -> bytes:
        return said_by(self.world.rank, [self.lists.read_share()])

    def _compare(self) -> bytes:
        """Find the values of everything in this state, and the mismatches."""
        objects = sort_objects(self.state)
        following = keys_matched_by_name(objects)
        comparison = StateMatch(
            self.checkpoint,
            self.state,
            self.base,
            self.values,
            self.own.get("own", {}),
            self.world.rank,
            self.world.size,
            self.lists.parts.keys(),
        )
        self.compared = comparison.compare(objects, self.request)
        if self.saved_world != self.world.size and self.world.rank == 0:
            self.differing = self._find_differing(following)
        restoring = self.compared.restoring
        leaves = [leaf.name for leaf in self.checkpoint.layout.leaves]
        claims = claims_word(leaves, restoring.claimed(), restoring, self.compared.problems)
        may_exchange = self.is_apart and self.world.size > 1
        replies = own_reply(self.world.size, self.checkpoint, self._wants) if may_exchange else b""
        return _match_word(self.world.rank, usage=self.compared.usage, more=(claims, replies))

    def _wants(self) -> list[Want]:
        """Return what this rank will read, before there is room for all of it."""
        restoring = self.compared.restoring
        likes = dict(restoring.wanted())
        some = [(name, like) for name, like in likes.items() if like is not None]
        whole = (
            Want(name, Box.whole(restoring.stored[name][1]), -1)
            for name, like in likes.items()
            if like is None
        )
        return [*Destinations(some, self.world.rank, restoring.view).wants, *whole]

    def _find_differing(self, following: frozenset[str]) -> tuple[str, ...]:
        """Return the values that differed between saved ranks; on another number of ranks all take
        rank 0's.

        Values that follow names are taken from the ranks that had them. Of thousands of ranks only
        some are compared, because each is an image to open.
        """
        shared = self.values.get("shared", {})
        differing = {
            name
            for rank in sampled_ranks(self.saved_world)
            for name, value in read_values(self.checkpoint, rank).get("shared", {}).items()
            if name not in following and value != shared.get(name)
        }
        return tuple(sorted(differing))

    def _prepare(self) -> Destinations:
        with self.clock.during("allocate"):
            return self._make_room()

    def _make_room(self) -> Destinations:
        restoring = self.compared.restoring
        items = self.lists.read_items(self.places)
        self.items = {key: decode_items(found) for key, found in items.items()}
        with torch.no_grad():
            filling = Destinations(restoring.make_room(), self.world.rank, restoring.view)
        self.filling, self.size_bytes = filling, filling.size_bytes
        filling.copies.begin()
        self.borrow = Staging(filling.copies, STAGING_BYTES).borrow
        return filling

    def _read(self) -> None:
        filling = self.filling or self._prepare()
        if self.traffic is None:
            with torch.no_grad(), self.clock.dividing("read") as spent:
                read = read_wants(
                    self.checkpoint,
                    filling.wants,
                    filling.destinations,
                    borrow=self.borrow,
                    shared=filling.shared if self.world.size > 1 else None,
                    spent=spent,
                )
            self.traffic = Traffic(read, received_bytes=0)
        with torch.no_grad():
            averaged = filling.average(self.checkpoint)
        self.traffic = replace(self.traffic, read_bytes=self.traffic.read_bytes + averaged)
        with self.clock.during("device"):
            filling.copies.end()
        self.has_ended = True
        with self.clock.during("verify"):
            self.checkpoint.require_unchanged()

    def _read_once(self) -> Traffic | None:
        def prepare() -> tuple[Destinations, BorrowBuffer]:
            return self._report_errors("prepared", self._prepare), self.borrow

        with torch.no_grad():
            return read_once(
                self.world,
                self.phase,
                self.checkpoint,
                self.replies,
                prepare,
                timeout_s=self.timeout_s,
                clock=self.clock,
            )

    def _end_copies(self) -> None:
        """End all copies to devices after an error, before the error is reported."""
        if self.filling is not None and not self.has_ended:
            with suppress(Exception):  # the earlier error is more useful
                self.filling.copies.end()

    def _finish(self) -> bytes:
        """Set the values on this rank; return the keys whose objects changed what they were
        given.
        """
        assert self.filling is not None
        with torch.no_grad():
            self.filling.pad()
        restoring = self.compared.restoring
        was_saved = self.world.rank < self.saved_world
        self.rewind = restoring.finish(self.world.rank, rank_was_saved=was_saved, items=self.items)
        return msgpack.encode(restoring.changed) if restoring.changed else b""

    def _finish_again(self, keys: Sequence[str]) -> None:
        self.rewind = self.compared.restoring.finish_again(
            keys,
            self.world.rank,
            rank_was_saved=self.world.rank < self.saved_world,
            read_again=self._read_again,
        )

    def _read_again(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors once more, on this rank alone."""
        with self.clock.during("read"):
            filling = Destinations(tensors, self.world.rank, self.compared.restoring.view)
            filling.copies.begin()
            try:
                borrow = Staging(filling.copies, STAGING_BYTES).borrow
                read_wants(self.checkpoint, filling.wants, filling.destinations, borrow=borrow)
                filling.average(self.checkpoint)
            finally:
                filling.copies.end()
            filling.pad()
            self.checkpoint.require_unchanged()


def _join_keys(one: bytes, other: bytes) -> bytes:
    """Join the keys that two ranks told of."""
    told = [msgpack.decode(word, type=list[str]) for word in (one, other) if word]
    return msgpack.encode(sorted(set().union(*told))) if told else b""


def _match_word(
    rank: int,
    lists: bytes = b"",
    parts: bytes = b"",
    usage: bytes = b"",
    more: tuple[bytes, bytes] = (b"", b""),
) -> bytes:
    """Encode what a rank says of its match with a checkpoint, or of what it needs to know for one.

    Its lists and the saved parts of lists it has read, its use of rules and patterns, its claims,
    and its reply about reading.
    """
    return msgpack.encode((said_by(rank, [lists, parts, usage]), *more))


def _matches_in(word: bytes) -> tuple[bytes, bytes, bytes]:
    """Return what was said, the claims, and the replies."""
    return msgpack.decode(word, type=tuple[bytes, bytes, bytes])


def _join_matches(one: bytes, other: bytes) -> bytes:
    (said, claims, replies), (more, others, answers) = _matches_in(one), _matches_in(other)
    joined = join_replies(replies, answers) if replies and answers else b""
    return msgpack.encode((join_said(said, more), join_claims(claims, others), joined))


def _words(error: Exception) -> str:
    """Describe an error and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    last = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{last}{notes}"
