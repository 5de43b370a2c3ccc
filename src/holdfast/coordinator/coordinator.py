"""Who may write which slot, and what is complete: the coordinator's whole mind, and no I/O.

Every method takes one thing that happened and returns the actions that follow; the keeper
carries them out. One rule is kept here in every state, those of the slots in ``slots``:

* A generation is captured by all ranks of its incarnation in one attempt, or it is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.snapshot import messages as m
from holdfast.snapshot.actions import Action, Note, Tell, skip, skip_all
from holdfast.snapshot.asks import Asks
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.granting import ONLY_DURABLE
from holdfast.snapshot.layouts import Layouts
from holdfast.snapshot.slots import NO_SLOT, Slot, Writer, host_of
from holdfast.snapshot.storing import Storing

__all__ = ["ONLY_DURABLE", "Coordinator"]


class Coordinator(Storing):
    """The state machine behind a run's slots; see the module's rules.

    Its own host is number 0. The others are *away* until their keepers come to it (``attach``) and
    when they are lost (``detach``): nothing is captured then, and nothing given away.
    """

    def __init__(self, *, keeper: str, grant_deadline_s: float, capture_deadline_s: float) -> None:
        super().__init__(keeper)
        self.grant_deadline_s = grant_deadline_s
        self.capture_deadline_s = capture_deadline_s
        self.adopted = False
        self.away: dict[int, str] = {}
        """The hosts of this incarnation whose slots are out of reach, and their names."""
        self._is_taking_over = False
        """Not all ranks of an incarnation that another keeper served have come yet."""
        self._parent: tuple[int, int] | None = None
        """What an incarnation that is taken over went on from."""
        self._away_since_s = 0.0
        self._is_pin_asked = False
        """Whether the ranks said what they restore from, in this incarnation."""
        self._owes = False
        self._leaving: set[int] = set()
        """Ranks that save no more: they said goodbye, and wait for the others to."""
        self._retaken_at = -1
        """The step that was announced last for a durable save that was missed."""

    # ── what a new keeper finds ──────────────────────────────────────────────────────────

    def found(
        self, slots: Iterable[Slot], attempts: Iterable[Attempt], *, may_be_parts: bool = False
    ) -> None:
        """Take over slots an earlier keeper left; attempts may be incomplete.

        ``may_be_parts``: the rest of them may be on other hosts.
        """
        self.attempts.found(attempts)
        if not may_be_parts:
            self.attempts.drop_parts()
        for slot in slots:
            self.slots.found(slot)

    def start_over(
        self, slots: Iterable[Slot], attempts: Iterable[Attempt], next_number: int
    ) -> None:
        """Another keeper decided meanwhile: forget all but what the slots say.

        ``next_number``: the first that was used for none.
        """
        self.attempts.clear()
        self.attempts.pinned = None
        for host in [0, *self.slots.others()]:
            self.slots.lose(host)
        self.slots.on(0).next = next_number
        self.found(slots, attempts, may_be_parts=True)

    # ── hosts ────────────────────────────────────────────────────────────────────────────

    def attach(
        self, host: int, slots: Iterable[Slot], attempts: Iterable[Attempt], next_number: int = 0
    ) -> None:
        """The keeper of another host came: these are its slots, and its parts of attempts.

        ``next_number``: the first it has not used for a slot.
        """
        self.attempts.found(attempts)
        for slot in slots:
            self.slots.found(slot)
        memory = self.slots.on(host)
        memory.next = max(memory.next, next_number)
        self.away.pop(host, None)
        if self._is_pin_asked:
            return
        if not self.adopted or self._is_taking_over:
            self.attempts.pinned = self.attempts.newest
        if self._is_taking_over:
            self.attempts.pin_parent(self.incarnation, self._parent)

    def pin_again(self) -> None:
        """It is known only now whether hosts keep parity, which keeps what was restored from."""
        if self._parent is not None and not self._is_pin_asked:
            self.attempts.pin_parent(self.incarnation, self._parent)

    def detach(self, host: int, name: str) -> list[Action]:
        """The keeper of another host is lost: its ranks are, and its slots out of reach."""
        actions: list[Action] = []
        self.away[host] = name
        reason = self._why_away()
        for attempt in self.attempts.open():  # of each some slot is there, be it sealed
            actions += self._abort(attempt, reason, is_lost=True)
        for rank in [rank for rank, where in self.hosts.items() if where == host]:
            actions += self.lost(rank)
        for step in self._asks.steps():
            self._asks.decline(step, reason, is_passing=True)
            actions += skip(step, reason)
        self._lose(host)
        return actions

    def _lose(self, host: int) -> None:
        self.slots.lose(host)
        self.attempts.lose(lambda slot: host_of(slot) == host)

    def _why_away(self) -> str:
        names = ", ".join(self.away.values())
        return f"the keeper of {names} is out of reach; no rank captures until it is back"

    # ── incarnations ─────────────────────────────────────────────────────────────────────

    def begin(
        self, incarnation: int, nonce: str, world: int, hosts: Sequence[m.HostPlace] = ()
    ) -> list[Action]:
        """A new incarnation: what the old one was still capturing comes to nothing.

        ``hosts``: where its ranks are, this one first; none when all are here.
        """
        actions: list[Action] = []
        for attempt in self.attempts.open():
            actions += self._abort(attempt, "a new incarnation began")
        self.incarnation, self.nonce, self.world = incarnation, nonce, world
        self.adopted = False
        self._place(world, hosts)
        self.attempts.pinned = self.attempts.newest
        self.debts.begin(incarnation)
        self.comparing.begin(nonce)
        self.slots.begin(self.hosts)
        self._is_taking_over = self._owes = self._is_pin_asked = False
        self._parent = None
        self._joined.clear()
        self._asks = Asks(world)
        self._retaken_at = -1
        self._leaving.clear()
        self._layouts = Layouts()
        return actions

    def _place(self, world: int, hosts: Sequence[m.HostPlace]) -> None:
        """Learn where the ranks are. Hosts are numbered anew: all others are to come again."""
        for host in self.slots.others():
            self._lose(host)
        self.hosts = dict.fromkeys(range(world), 0)
        self.hosts |= {rank: n for n, host in enumerate(hosts) for rank in host.ranks}
        self.away = {n: host.id for n, host in enumerate(hosts) if n > 0}
        self._knows_hosts = bool(hosts)
        if not hosts:
            self.attempts.drop_parts()
            self.slots.drop_lost()

    def resume(
        self, incarnation: int, nonce: str, world: int, parent: tuple[int, int] | None,
        now_s: float, hosts: Sequence[m.HostPlace] = (),
    ) -> list[Action]:  # fmt: skip
        """Go on with an incarnation that another keeper served; ``parent``: what it came from."""
        actions = self.begin(incarnation, nonce, world, hosts)
        self.attempts.pin_parent(incarnation, parent)
        self._is_taking_over, self._parent = True, parent
        return actions + self.adopt(now_s)

    def join(
        self, rank: int, writer: Writer, *, is_copying: bool = True, owes_durable: bool = False
    ) -> list[Action]:
        """A rank takes its place: again, when its keeper died or its line broke unnoticed.

        ``is_copying`` False: it copies into no slot, and what is quarantined because of it is free.
        ``owes_durable``: an earlier keeper died before it made durable what it had promised to.
        """
        actions = self.lost(rank) if rank in self._joined else []
        self._joined[rank] = writer
        self._leaving.discard(rank)
        self._layouts.told = ""
        if not is_copying:
            self.slots.stopped_all(writer, rank, self.incarnation)
            actions += self._slot_freed()
        return actions + self._inherit_debt(owes_durable)

    def _inherit_debt(self, owes_durable: bool) -> list[Action]:
        if not self._is_taking_over:
            return []  # what this keeper promised itself it knows
        self._owes |= owes_durable
        if len(self._joined) < self.world:
            return []  # all are to hear of it
        self._is_taking_over = False
        return self.debts.inherit() if self._owes else []

    def adopt(self, now_s: float) -> list[Action]:
        """The incarnation's parent is recorded: captures may begin."""
        self.adopted = True
        self._asks.start_clock(now_s)
        return self._decide_if_all_asked(now_s)

    def pin(self, attempt: str) -> bool:
        """Keep this attempt's slots until a new generation is complete."""
        is_there = self.attempts.pin(attempt)
        self._is_pin_asked |= is_there
        return is_there

    def lost(self, rank: int) -> list[Action]:
        """The rank's connection broke: what it had not sealed comes to nothing."""
        actions: list[Action] = []
        self._joined.pop(rank, None)
        self._asks.drop_rank(rank)
        waiting = self._asks.take_put_off()
        if waiting is not None:
            actions += skip(waiting.step, f"rank {rank} went away: {NO_SLOT}")
        for attempt in self.attempts.open():
            if rank not in attempt.sealed:
                reason = f"rank {rank} went away while it captured"
                actions += self._abort(attempt, reason, is_lost=True)
        return actions

    def writer_gone(self, slot_id: int) -> list[Action]:
        """The last possible writer of a quarantined slot is dead, or has sealed it."""
        self.slots.writer_gone(slot_id)
        return self._slot_freed()

    # ── asking ───────────────────────────────────────────────────────────────────────────

    def table(self, rank: int, hash_: str, data: bytes) -> None:
        """Learn the leaves a rank holds. FormatError or UsageError when they make no sense."""
        self._layouts.learn(rank, hash_, data)

    def ask(self, rank: int, ask: m.Ask, now_s: float) -> list[Action]:
        """A rank wants to capture a step; decided when all have asked."""
        self._now_s = now_s
        if rank not in self._joined:
            return []
        self._asks.newest = max(self._asks.newest, ask.step)
        if self._leaving:
            return skip(ask.step, self._why_leaving(), is_passing=False)
        if self.away:  # whoever asks for this step when they are back is not to wait for us
            self._asks.decline(ask.step, self._why_away(), is_passing=True, by=rank)
            return skip(ask.step, self._why_away())
        declined = self._asks.why_declined(ask.step, rank)
        if declined is not None:
            reason, is_passing = declined
            return skip(ask.step, reason, is_passing=is_passing)
        self._asks.add(rank, ask, now_s)
        return self._decide_if_all_asked(now_s)

    def withdraw(self, rank: int, step: int) -> list[Action]:
        """A rank stopped waiting for its answer."""
        if self._asks.is_put_off(step):
            self._asks.take_put_off()
            return skip(step, f"rank {rank} stopped waiting: {NO_SLOT}")
        if self._asks.withdraw(rank, step):
            return skip(step, f"rank {rank} stopped waiting for the others")
        for attempt in self.attempts.open():
            if attempt.step == step and rank not in attempt.sealed:
                actions = self._abort(attempt, f"rank {rank} stopped waiting for its slot")
                self.slots.waited_in_vain(attempt)
                return actions
        return []

    def _decide_if_all_asked(self, now_s: float) -> list[Action]:
        if not self.adopted:
            return []
        complete = self._asks.take_complete()
        if complete is not None:
            return self._decide(*complete, now_s)
        missed = self._asks.take_missed()
        if not missed:
            return []
        # Who was skipped catches up: by step() only what is due is saved, or what is announced.
        (latest,) = self._asks.steps()
        return [Tell(m.Announced(step=latest, which=m.MISSED)), *skip_all(missed)]

    def decline(
        self, rank: int, step: int, reason: str, *, is_passing: bool = False
    ) -> list[Action]:
        """A rank cannot save this step: whoever waits for it is told so.

        ``is_passing``: unless it asks for it after all.
        """
        reason = f"rank {rank} could not save it: {reason}"
        self._asks.newest = max(self._asks.newest, step)
        had_asked = self._asks.decline(step, reason, is_passing=is_passing, by=rank)
        return skip(step, reason, is_passing=is_passing) if had_asked else []

    def leaving(self, rank: int) -> list[Action]:
        """A rank saves no more: nobody is to wait for it."""
        self._leaving.add(rank)
        actions: list[Action] = []
        for step in self._asks.steps():
            self._asks.drop_step(step)
            actions += skip(step, self._why_leaving(), is_passing=False)
        return actions

    def _why_leaving(self) -> str:
        return f"ranks {sorted(self._leaving)} have closed their Checkpointer"

    def announce(self, step: int, which: str) -> list[Action]:
        """A rank says that ``which`` is due at ``step``: all ranks are told.

        Not while one of them could not hear it: it would not save then, and the others would wait
        for it. What was ``MISSED`` is due once, however many ranks say so.
        """
        if which != m.PREEMPTED:
            if self.away or len(self._joined) < self.world:
                return []
            if which == m.MISSED:
                if self._retaken_at > self._asks.newest:
                    return []
                self._retaken_at = step
        return [Tell(m.Announced(step=step, which=which))]

    # ── capturing ────────────────────────────────────────────────────────────────────────

    def captured(self, rank: int, seal: m.Captured, now_s: float) -> list[Action]:
        """A rank sealed its image; the last one makes the generation complete."""
        attempt = self.attempts.get(seal.attempt)
        if attempt is None or attempt.phase != "capturing" or rank not in attempt.slots:
            self.slots.stopped(rank, seal.attempt)
            return []
        if rank in attempt.sealed:
            return []
        self._now_s = now_s
        slot = self.slots[attempt.slots[rank]]
        if seal.image_bytes != slot.image_bytes:
            reason = f"rank {rank} sealed {seal.image_bytes} bytes, {slot.image_bytes} agreed"
            slot.writer = None  # it says itself that it writes no more
            return self._abort(attempt, reason)
        slot.state, slot.writer = "captured", None
        slot.header_xxh3, slot.table_xxh3 = seal.header_xxh3, seal.table_xxh3
        attempt.sealed.add(rank)
        self.comparing.told(attempt.id, rank, seal.sums, seal.same_since)
        if len(attempt.sealed) < attempt.world:
            return []
        actions = self.comparing.finish(attempt.id, attempt.step)
        if attempt.is_ring:
            attempt.phase = "draining"  # nothing of it is in memory but what is not written yet
            return actions
        attempt.phase = "complete"
        self.attempts.captured(attempt.id)
        done = m.Complete(step=attempt.step, attempt=attempt.id, durable=attempt.durable)
        elapsed_s = now_s - attempt.started_s
        note = Note(attempt.id, attempt.step, "complete", elapsed_s=elapsed_s)
        return [*actions, Tell(done), note, *self.debts.pay()]

    def abandon(self, rank: int, message: m.Abandon) -> list[Action]:
        """A rank will never seal its image."""
        attempt = self.attempts.get(message.attempt)
        if attempt is None or not attempt.is_open or rank not in attempt.slots:
            if message.has_stopped:
                self.slots.stopped(rank, message.attempt)
            return []
        if message.has_stopped:
            self.slots[attempt.slots[rank]].writer = None
        return self._abort(attempt, message.reason, message.leaf)

    def tick(self, now_s: float) -> list[Action]:
        """Time passed: end the waits whose deadline is over."""
        self._now_s = now_s
        actions: list[Action] = []
        waiting = self._asks.take_put_off(before_s=now_s - self.grant_deadline_s)
        if waiting is not None:
            actions += skip(waiting.step, NO_SLOT)
        actions += self._slot_freed()
        if self.adopted:
            actions += skip_all(self._asks.take_late(now_s, self.grant_deadline_s))
        for attempt in self.attempts.open():
            if now_s - max(attempt.started_s, attempt.moved_s) > self.capture_deadline_s:
                reason = (
                    f"ranks {attempt.unsealed} did not finish within {self.capture_deadline_s:g} s"
                )
                actions += self._abort(attempt, reason)
        return actions + self.debts.pay() + self._break_promises(now_s) + self._slot_freed()

    def _break_promises(self, now_s: float) -> list[Action]:
        """Nothing can be made durable while a host is away, and it may never be back."""
        if not self.away:
            self._away_since_s = now_s
        if now_s - self._away_since_s <= self.capture_deadline_s:
            return []
        return self.debts.give_up(self._why_away())

    # ── questions ────────────────────────────────────────────────────────────────────────

    def is_busy(self) -> bool:
        """Whether something is being captured or persisted."""
        return any(attempt.is_under_way for attempt in self.attempts.values())

    def holds_newest_part(self) -> bool:
        """Whether something newer than all that is whole or durable is here, but in part only."""
        newest = self.attempts.newest_complete()
        known = max(self.debts.newest_paid, newest.generation if newest else (0, -1))
        return any(part.generation > known for part in self.attempts.parts())

    def is_whole(self, step: int) -> bool:
        """Whether all of it is in memory."""
        newest = (a for a in self.attempts.complete() if a.generation == (self.incarnation, step))
        return any(newest)

    def explain(self, step: int) -> str:
        """In words: what the save of ``step`` waits for."""
        if self._asks.is_put_off(step):
            return NO_SLOT
        absent = self._asks.absent(step)
        if absent:
            return f"ranks {absent} have not asked to capture it"
        for attempt in self.attempts.values():
            if attempt.generation == (self.incarnation, step):
                return attempt.waits_for
        return "the keeper knows nothing of it"
