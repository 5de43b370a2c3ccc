"""Keeps the standing order: a durable step stays wanted until a published checkpoint pays it.

Whatever comes of a request, its order stands: any complete generation at its step or beyond pays
it. A due save waits while storage is busy, and the newest snapshot is then made durable in its
place. Otherwise every image still being written would hold a slot, and memory would have none for
the newest steps just when storage is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from holdfast.coordinator.actions import AbortPersist, Action, SendMessage, StartPersist
from holdfast.coordinator.attempts import Attempt, Attempts
from holdfast.protocol import messages as m

#: So many generations of this start, newer than what is durable, wait to be drained before due
#: saves wait for them.
BACKLOG = 2


class DurabilityQueue:
    """The standing order of one incarnation, and what storage does for it."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._incarnation = 0
        self.order = m.NO_ORDER
        self._deferred = -1
        """The newest step whose save waits for storage, and whose ranks were told nothing else."""
        self._ending: set[str] = set()
        """Finished attempts that storage may still work on: it removes what failed, or prunes what
        was replaced by an attempt written through rings.
        """
        self._passed: tuple[tuple[int, int], str] | None = None
        """The newest generation, with its attempt, that is durable and of which memory may have no
        snapshot: it was written through rings, or from a cache.
        """
        self._cached: dict[tuple[int, int], str] = {}
        """Generations that a cache has, and storage has not yet: the id of the attempt of each."""
        self.exact: set[tuple[int, int]] = set()
        """Those of them that must be durable themselves, and not a later one in their place."""
        self.is_drain_failing = False
        """True while storage does not take what the cache has."""
        self.is_root_taken: Callable[[], bool] = lambda: False
        """True while a drain keeps the root from a write that the cache does not take now."""
        self.newest_durable = (0, -1)
        """The newest generation that this keeper made durable."""

    def begin(self, incarnation: int) -> None:
        """Begin a new incarnation without the order of the old one."""
        if not self._incarnation:  # the cache was opened before it was known which start goes on
            self.exact = {one for one in self.exact if one[0] == incarnation}
        self._incarnation = incarnation
        self.order, self._deferred = m.NO_ORDER, -1

    # ── the order ────────────────────────────────────────────────────────────────────────────────

    def add(self, order: m.StandingOrder) -> None:
        """Add to the order what is not durable already."""
        self.order = self.order.join(order.pay(self._paid))

    def pays(self, step: int) -> bool:
        """Return True if ``step`` pays an order that nothing under way pays."""
        return self.is_requested and step >= self.order.first

    @property
    def is_requested(self) -> bool:
        """Return True if the order is neither paid nor being paid."""
        return self.order.last > max(self._being_paid(), default=-1)

    @property
    def _paid(self) -> int:
        """Return the newest step of this incarnation that a manifest names; -1: none."""
        incarnation, step = self.newest_durable
        return step if incarnation == self._incarnation else -1

    def _being_paid(self) -> Iterator[int]:
        """Yield the steps of this incarnation that are captured or written to become durable."""
        for attempt in self._attempts.values():
            is_mine = attempt.incarnation == self._incarnation
            if is_mine and attempt.durable and attempt.is_under_way:
                yield attempt.step
        yield from (step for incarnation, step in self._cached if incarnation == self._incarnation)

    def is_to_be_durable(self, step: int, requests: Iterable[m.RequestCapture]) -> bool:
        """Return True if this step itself must be written, not a later one in its place."""
        requested = [request for request in requests if request.durable]
        if any(request.exact for request in requested):
            return True
        if not requested and not self.pays(step):
            return False
        if self._is_busy():
            self._deferred = max(self._deferred, step if requested else -1)
            return False
        return True

    def make_durable(self, step: int) -> list[Action]:
        """Make a step durable that was saved to memory only."""
        self.add(m.StandingOrder(step, step))
        if self.is_cached(step):
            self.exact.add((self._incarnation, step))
            return []
        for attempt in self._attempts.values():
            if attempt.generation == (self._incarnation, step) and not attempt.is_incomplete:
                if attempt.durable:
                    return [] if attempt.is_under_way else self._report_durable(attempt)
                if attempt.phase == "allocating":
                    attempt.durable = True
                    return []
                return self.start(attempt)
        if self._passed is not None and self._passed[0] == (self._incarnation, step):
            return [SendMessage(m.Durable(step=step, attempt=self._passed[1]))]
        reason = "the step is no longer in memory; the next one is made durable"
        return [SendMessage(m.NotDurable(step=step, since=step, attempt="", reason=reason))]

    # ── starting writes ──────────────────────────────────────────────────────────────────────────

    def start(self, attempt: Attempt) -> list[Action]:
        """Start writing this attempt; it pays every order up to its step."""
        attempt.durable = attempt.persisting = True
        return [StartPersist(attempt.id)]

    def start_next(self) -> list[Action]:
        """Start writing the newest snapshot for the order if storage is free."""
        return self.start_newest() if self.is_payable and not self._is_busy() else []

    @property
    def is_payable(self) -> bool:
        """Return True if the newest snapshot in memory pays the order once storage is free."""
        newest = self._attempts.newest_complete()
        if newest is None or newest.refused:
            return False  # steps of another incarnation are unrelated to the order
        return newest.incarnation == self._incarnation and self.pays(newest.step)

    def start_newest(self) -> list[Action]:
        """Make the newest snapshot durable when the run ends or no rank is left."""
        id_ = self.not_durable()
        return self.start(self._attempts[id_]) if id_ else []

    def not_durable(self) -> str:
        """Return the id of the newest complete attempt if no manifest names it, else ""."""
        newest = self._attempts.newest_complete()
        if newest is None or newest.durable or self._is_behind(newest):
            return ""
        return newest.id

    def _is_behind(self, attempt: Attempt) -> bool:
        """Return True if something newer, not in memory, is durable already or drained."""
        newer = [self._passed[0]] if self._passed is not None else []
        return any(attempt.generation < one for one in (*newer, *self._cached))

    @property
    def is_storage_busy(self) -> bool:
        """Return True if storage would not begin a new write at once."""
        return self._is_busy() or bool(self._ending) or self.is_root_taken()

    def _is_busy(self) -> bool:
        ahead = [
            one for one in self._cached if one[0] == self._incarnation and one > self.newest_durable
        ]
        backlog = 0 if self.is_drain_failing else len(ahead)
        return backlog > BACKLOG or any(one.persisting for one in self._attempts.values())

    @property
    def draining(self) -> dict[tuple[int, int], str]:
        """Return the generations that a cache has, and storage not yet, with their attempts."""
        return dict(self._cached)

    def is_cached(self, step: int) -> bool:
        """Return True if a cache has this step, and storage has not yet."""
        return (self._incarnation, step) in self._cached

    def expire(self, reason: str) -> list[Action]:
        """Fail the saves that wait for storage after their deadline; their order stands."""
        if self._deferred <= max((self._paid, *self._being_paid())):
            return []
        return [self._not_durable(self._deferred, "", reason)]

    def _not_durable(
        self, step: int, attempt: str, reason: str, *, in_memory: bool = True
    ) -> Action:
        """Tell the ranks that ``step`` failed, and the saves that nothing older pays any more."""
        self._deferred = self._deferred if self._deferred > step else -1
        earlier = [paying for paying in self._being_paid() if paying < step]
        since = max((self._paid, *earlier))
        told = m.NotDurable(
            step=step, since=since, attempt=attempt, reason=reason, in_memory=in_memory
        )
        return SendMessage(told)

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    def persisted(self, attempt: Attempt) -> list[Action]:
        """Handle a published attempt; an order that came meanwhile is served next."""
        attempt.persisting = False
        self.newest_durable = max(self.newest_durable, attempt.generation)
        self.order = self.order.pay(self._paid)
        if attempt.is_ring:
            self._ending.add(attempt.id)
            self._note_passed(attempt.generation, attempt.id)
        return self._report_durable(attempt) + self.start_next()

    def _note_passed(self, generation: tuple[int, int], attempt_id: str) -> None:
        if self._passed is None or generation >= self._passed[0]:
            self._passed = generation, attempt_id

    def found_cached(
        self, generations: Iterable[tuple[tuple[int, int], str]], *, exact: bool = True
    ) -> None:
        """Handle what a cache is found to have and storage has not: generations with attempts.

        ``exact``: handles of this incarnation may wait for them, of which an earlier keeper knew.
        """
        found = dict(generations)
        self._cached |= found
        if exact:
            self.exact.update(one for one in found if self._incarnation in (0, one[0]))

    def forget_cached(self) -> None:
        """Handle that another cache is used, or none: what the old one has is drained no more."""
        for attempt_id in self._cached.values():
            self._forget_durable(attempt_id)
        self._cached.clear()
        self.exact.clear()

    def _forget_durable(self, attempt_id: str) -> Attempt | None:
        """Return the attempt, if memory has it, from which alone it can be made durable now."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and not attempt.persisting:
            attempt.durable = False
        return attempt

    def cached(self, attempt: Attempt) -> list[Action]:
        """Handle an attempt that a cache has whole; it is drained from there."""
        attempt.persisting = False
        self._cached[attempt.generation] = attempt.id
        if any(request.durable and request.exact for request in attempt.requests.values()):
            self.exact.add(attempt.generation)
        if attempt.is_ring:
            self._ending.add(attempt.id)
        actions: list[Action] = []
        if attempt.incarnation == self._incarnation:
            actions = [SendMessage(m.Cached(step=attempt.step, attempt=attempt.id))]
        return actions + self.start_next()

    def drained(self, generation: tuple[int, int], attempt_id: str) -> list[Action]:
        """Handle a generation that storage now has from the cache."""
        self._cached.pop(generation, None)
        self.exact.discard(generation)
        self.newest_durable = max(self.newest_durable, generation)
        self._note_passed(generation, attempt_id)
        self.order = self.order.pay(self._paid)
        actions: list[Action] = []
        if generation[0] == self._incarnation:
            actions = [SendMessage(m.Durable(step=generation[1], attempt=attempt_id))]
        return actions + self.start_next()

    def superseded(self, generation: tuple[int, int]) -> list[Action]:
        """Handle a cached generation that storage need not have: what is durable replaces it."""
        self._cached.pop(generation, None)
        return self.start_next()

    def cache_lost(self, generation: tuple[int, int], attempt_id: str, reason: str) -> list[Action]:
        """Handle a cached generation that cannot be drained: the next is made durable instead."""
        was_cached = self._cached.pop(generation, None) is not None
        self.exact.discard(generation)
        incarnation, step = generation
        attempt = self._forget_durable(attempt_id) if was_cached else None
        if not was_cached or incarnation != self._incarnation:
            return self.start_next()
        self.add(m.StandingOrder(step, step))
        in_memory = attempt is not None and not attempt.is_incomplete
        told = self._not_durable(step, attempt_id, reason, in_memory=in_memory)
        following = self.start_next()
        if StartPersist(attempt_id) in following:  # it is written once more, from memory
            return following
        return [told, *following]

    def failed(self, attempt: Attempt, reason: str) -> list[Action]:
        """Handle a captured attempt that storage refused; the next attempt is made durable
        instead.
        """
        attempt.persisting = attempt.durable = False
        attempt.refused = True
        actions: list[Action] = []
        if attempt.incarnation == self._incarnation:
            self.add(
                m.StandingOrder(attempt.step, attempt.step)
            )  # also of the newest snapshot, which nobody ordered
            actions = [
                self._not_durable(attempt.step, attempt.id, reason, in_memory=not attempt.is_ring)
            ]
        return actions + self.start_next()

    def aborted(self, attempt: Attempt) -> list[Action]:
        """Handle an aborted capture: what it was to pay stays ordered."""
        if not attempt.persisting:
            return []
        attempt.persisting = False
        self._ending.add(attempt.id)
        return [AbortPersist(attempt.id)]

    def ended(self, attempt_id: str) -> None:
        """Handle that storage has finished all work for an attempt."""
        self._ending.discard(attempt_id)

    def _report_durable(self, attempt: Attempt) -> list[Action]:
        if attempt.incarnation != self._incarnation:
            return []  # these ranks may have another save under the same step
        return [SendMessage(m.Durable(step=attempt.step, attempt=attempt.id))]
