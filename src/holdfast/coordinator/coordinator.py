"""PURE. The coordinator's state machine: one method per event, returns the actions to execute.

Every method handles one event and returns the resulting actions, which the keeper executes. This
module keeps one rule in every state; ``slots`` keeps those of the slots:

* A generation is captured by all ranks of its incarnation in one attempt, or it is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.coordinator.actions import Action, ReportOutcome, SendMessage, skip, skip_all
from holdfast.coordinator.attempt_lifecycle import ONLY_DURABLE, PLANNING, AttemptLifecycle
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.layouts import LayoutRegistry
from holdfast.coordinator.requests import Absence, CaptureRequests, listed
from holdfast.coordinator.slots import NO_SLOT, Slot, SlotWriter
from holdfast.protocol import messages as m

__all__ = ["ONLY_DURABLE", "Coordinator"]

#: A request withdrawn sooner than this did not wait for other ranks: its process may be ending.
WAITED_S = 0.5


class Coordinator(AttemptLifecycle):
    """State machine of a run's slots and attempts; see the module's rules.

    Its own host is number 0. The other hosts are *away* until their keepers connect (``attach``),
    and after they are lost (``detach``): while a host is away nothing is captured, and no slot is
    reused.
    """

    def __init__(self, *, keeper: str, grant_deadline_s: float, capture_deadline_s: float) -> None:
        super().__init__(keeper)
        self.grant_deadline_s = grant_deadline_s
        self.capture_deadline_s = capture_deadline_s
        self.away: dict[int, str] = {}
        """Names of this incarnation's hosts whose slots are unreachable, by number."""
        self._is_taking_over = False
        """True while some ranks of an incarnation that another keeper served have not joined
        yet.
        """
        self._parent: tuple[int, int] | None = None
        """Parent of an incarnation that is taken over from another keeper."""
        self.host_table: Sequence[m.HostEntry] = ()
        self._away_since_s = 0.0
        self._is_pin_requested = False
        """True once the ranks of this incarnation reported what they restore from."""
        self.absence = Absence()
        self._leaving: set[int] = set()
        """Ranks that said goodbye: they save no more, and wait for the others to leave."""
        self._missed_announced_at = -1
        """Newest step announced to repeat a durable save that was missed."""

    # ── state found by a new keeper ──────────────────────────────────────────────────────────────

    def discovered(
        self, slots: Iterable[Slot], attempts: Iterable[Attempt], *, may_be_parts: bool = False
    ) -> None:
        """Take over the slots of an earlier keeper; its attempts may be incomplete.

        ``may_be_parts``: the missing images may be on other hosts.
        """
        self.attempts.add_discovered(attempts)
        if not may_be_parts:
            self.attempts.drop_incomplete()
        for slot in slots:
            self.slots.add_discovered(slot)

    def start_over(
        self, slots: Iterable[Slot], attempts: Iterable[Attempt], next_number: int
    ) -> None:
        """Forget everything but the discovered slots, because another keeper decided meanwhile.

        ``next_number``: the first slot number that was never used.
        """
        self.attempts.clear()
        self.attempts.pinned = None
        for host in [0, *self.slots.other_hosts()]:
            self.slots.lose(host)
        self.slots.on(0).next = next_number
        self.discovered(slots, attempts, may_be_parts=True)

    # ── hosts ────────────────────────────────────────────────────────────────────────────────────

    def attach(
        self, host: int, slots: Iterable[Slot], attempts: Iterable[Attempt], next_number: int = 0
    ) -> None:
        """Add the slots and attempt parts of another host, whose keeper connected.

        ``next_number``: the first slot number that host has not used.
        """
        self.attempts.add_discovered(attempts)
        for slot in slots:
            self.slots.add_discovered(slot)
        memory = self.slots.on(host)
        memory.next = max(memory.next, next_number)
        self.away.pop(host, None)
        if self._is_pin_requested:
            return
        if not self.adopted or self._is_taking_over:
            self.attempts.pinned = self.attempts.newest
        if self._is_taking_over:
            self.attempts.pin_parent(self.incarnation, self._parent)

    def pin_again(self) -> None:
        """Pin the restored attempt again, now that it is known if hosts keep parity."""
        if self._parent is not None and not self._is_pin_requested:
            self.attempts.pin_parent(self.incarnation, self._parent)

    def detach(self, host: int, name: str) -> list[Action]:
        """Handle the loss of another host's keeper: its ranks are lost, its slots unreachable."""
        actions: list[Action] = []
        self.away[host] = name
        reason = self._why_away()
        for attempt in self.attempts.capturing():  # every attempt keeps at least one slot
            actions += self._abort(attempt, reason, is_lost=True)
        actions += self._skip_waiting(reason)
        for rank in self.host_table[host].ranks:
            actions += self.lost(rank)
        self._lose(host)
        self._layouts.forget_plans(self.host_table[host].ranks)
        return actions

    def _lose(self, host: int) -> None:
        self.attempts.lose(self.slots.lose(host))

    def _why_away(self) -> str:
        names = listed([*self.away.values()])
        return f"the keeper of {names} is out of reach; no rank captures until it is back"

    # ── incarnations ─────────────────────────────────────────────────────────────────────────────

    def begin(
        self, incarnation: int, nonce: str, world: int, hosts: Sequence[m.HostEntry] = ()
    ) -> list[Action]:
        """Begin a new incarnation; captures of the old one are aborted.

        ``hosts``: the hosts of its ranks, this host first; empty if all ranks are here.
        """
        actions: list[Action] = []
        for attempt in self.attempts.capturing():
            actions += self._abort(attempt, "a new incarnation began")
        self.incarnation, self.nonce, self.world = incarnation, nonce, world
        self.adopted = False
        self._place(world, hosts)
        self.attempts.pinned = self.attempts.newest
        self.durability.begin(incarnation)
        self.replica_check.begin(nonce)
        self.slots.begin(self.hosts)
        self._is_taking_over = self._is_pin_requested = False
        self._parent = None
        self._joined.clear()
        self._requests = CaptureRequests(world)
        self._missed_announced_at = -1
        self.absence.clear()
        self._leaving.clear()
        self._layouts = LayoutRegistry()
        return actions

    def _place(self, world: int, hosts: Sequence[m.HostEntry]) -> None:
        """Record the host of each rank. Hosts are renumbered, and all other hosts must attach
        again.
        """
        for host in self.slots.other_hosts():
            self._lose(host)
        self.host_table = hosts
        self.hosts = dict.fromkeys(range(world), 0)
        self.hosts |= {rank: n for n, host in enumerate(hosts) for rank in host.ranks}
        self.away = {n: host.id for n, host in enumerate(hosts) if n > 0}
        self._knows_hosts = bool(hosts)
        if not hosts:
            self.attempts.drop_incomplete()
            self.slots.drop_lost()

    def resume(
        self,
        incarnation: int,
        nonce: str,
        world: int,
        parent: tuple[int, int] | None,
        now_s: float,
        hosts: Sequence[m.HostEntry] = (),
        order: m.StandingOrder = m.NO_ORDER,
    ) -> list[Action]:
        """Continue an incarnation that another keeper served; ``parent``: the generation it
        continued from; ``order``: what it has still to make durable, as the arena has it.
        """
        actions = self.begin(incarnation, nonce, world, hosts)
        self.durability.add(order)
        self.attempts.pin_parent(incarnation, parent)
        self._is_taking_over, self._parent = True, parent
        return actions + self.adopt(now_s)

    def join(
        self,
        rank: int,
        writer: SlotWriter,
        *,
        is_copying: bool = True,
        order: m.StandingOrder = m.NO_ORDER,
    ) -> list[Action]:
        """Handle a rank that joins, or joins again after its keeper died or its connection broke.

        ``is_copying`` False: the rank copies into no slot, so slots quarantined because of it are
        free. ``order``: what this rank was to have durable, as an earlier keeper may have known.
        """
        actions = self._drop(rank) if rank in self._joined else []
        self._joined[rank] = writer
        self._leaving.discard(rank)
        self.absence.end(rank)
        self._layouts.sent_hash = ""
        if not is_copying:
            actions += self._free_slots_of(rank)
        self.durability.add(order)
        if len(self._joined) < self.world:
            return actions  # all ranks must hear what becomes of it
        self._is_taking_over = False
        return actions + self.durability.start_next()

    def adopt(self, now_s: float) -> list[Action]:
        """Handle that the incarnation's parent is recorded: captures may begin."""
        self.adopted = True
        self._requests.start_clock(now_s)
        return [
            a for step in self._requests.steps() for a in self._decide_if_all_requested(step, now_s)
        ]

    def pin(self, attempt: str) -> bool:
        """Keep this attempt's slots until a new generation is complete."""
        is_there = self.attempts.pin(attempt)
        self._is_pin_requested |= is_there
        return is_there

    def lost(self, rank: int) -> list[Action]:
        """Handle a rank's lost connection: its unsealed attempts are aborted.

        Other ranks do not wait for it until it joins again.
        """
        actions = self._drop(rank)
        self.absence.lose(rank)
        waits = bool(self._requests.steps())  # the reason names all who are lost, of each host
        return actions + (self._skip_waiting(self.absence.reason) if waits else [])

    def _skip_waiting(self, reason: str) -> list[Action]:
        """Skip all waiting requests: nothing can be captured now; the ranks may request the steps
        again.
        """
        actions: list[Action] = []
        for step in self._requests.steps():
            self._requests.decline(step, reason, is_passing=True)
            actions += skip(step, reason)
        return actions

    def _drop(self, rank: int) -> list[Action]:
        actions: list[Action] = []
        self._joined.pop(rank, None)
        self._requests.drop_rank(rank)
        waiting = self._requests.pop_deferred()
        if waiting is not None:
            actions += skip(waiting.step, f"rank {rank} went away: {NO_SLOT}")
        for attempt in self.attempts.capturing():
            if rank not in attempt.sealed:
                reason = f"rank {rank} went away while it captured"
                actions += self._abort(attempt, reason, is_lost=True)
        return actions

    def writer_gone(self, slot_id: int) -> list[Action]:
        """Free a quarantined slot whose last possible writer is dead, or has sealed it."""
        self.slots.writer_gone(slot_id)
        return self._decide_deferred()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def request_capture(self, rank: int, request: m.RequestCapture, now_s: float) -> list[Action]:
        """Handle a rank's capture request; the step is decided when all ranks have requested it."""
        self._now_s = now_s
        if rank not in self._joined:
            return []
        self._requests.note(rank, request.step)
        if request.durable:
            self.durability.add(m.StandingOrder(request.step, request.step))
        self.absence.end(rank)
        freed = [] if request.is_copying else self._free_slots_of(rank)
        return freed + self._decide_request(rank, request, now_s)

    def divide_requests(
        self, requests: Mapping[int, m.RequestCapture]
    ) -> list[Mapping[int, m.RequestCapture]]:
        """Divide requests of a host for one step into those that are decided as one: all, or each
        alone if there is anything to tell apart. Their ranks are absent no more.
        """
        step = next(iter(requests.values())).step
        for rank in requests.keys() & self._joined.keys() if self.absence.is_any else ():
            self.absence.end(rank)
        is_plain = requests.keys() <= self._joined.keys() and self._requests.is_new(step, requests)
        if is_plain and not (self._leaving or self.away or self.absence.is_any):
            return [requests]
        return [{rank: request} for rank, request in requests.items()]

    def request_captures(
        self, requests: Mapping[int, m.RequestCapture], now_s: float
    ) -> list[Action]:
        """Handle what ``divide_requests`` left together, as if it came one after the other."""
        if len(requests) == 1:
            return self.request_capture(*next(iter(requests.items())), now_s)
        step = next(iter(requests.values())).step
        self._now_s = now_s
        if any(request.durable for request in requests.values()):
            self.durability.add(m.StandingOrder(step, step))
        for rank, request in requests.items() if self.slots.has_quarantined else ():
            if not request.is_copying:
                self.slots.writer_stopped_all(self._joined[rank], rank, self.incarnation)
        self._requests.add_all(step, requests, now_s)
        return self._decide_if_all_requested(step, now_s)

    def _free_slots_of(self, rank: int) -> list[Action]:
        """Free what is quarantined because of a rank that has stopped copying."""
        self.slots.writer_stopped_all(self._joined[rank], rank, self.incarnation)
        return self._decide_deferred()

    def _decide_request(self, rank: int, request: m.RequestCapture, now_s: float) -> list[Action]:
        if self._leaving:
            return skip(request.step, self._why_leaving(), is_passing=False, rank=rank)
        why = self._why_away() if self.away else self.absence.reason
        if why:  # a later request for this step by the absent rank must not wait for this one
            self._requests.decline(request.step, why, is_passing=True, by=rank)
            return skip(request.step, why, rank=rank)
        actions = self._supersede(rank, request.step)
        declined = self._requests.decline_reason(request.step, rank)
        if declined is not None:
            reason, is_passing = declined
            return actions + skip(request.step, reason, is_passing=is_passing, rank=rank)
        if self._requests.has_passed(request.step):
            why = f"the others have gone on, to step {self._requests.newest}"
            return actions + skip(request.step, why, rank=rank)
        self._requests.add(rank, request, now_s)
        return actions + self._decide_if_all_requested(request.step, now_s)

    def _supersede(self, rank: int, step: int) -> list[Action]:
        """Drop the rank's earlier request: a rank waits for one step at a time."""
        before = self._requests.step_of(rank)
        if before is None or before == step:
            return []
        reason = f"rank {rank} waits for step {step} instead"
        self._requests.decline(before, reason, is_passing=True, by=rank)
        return skip(before, reason)

    def cancel_request(self, rank: int, step: int) -> list[Action]:
        """Handle a rank that stopped waiting for its answer."""
        if self._requests.is_deferred(step):
            self._requests.pop_deferred()
            return skip(step, f"rank {rank} stopped waiting: {NO_SLOT}")
        waited_s = self._requests.waited_s(rank, step, self._now_s)
        if waited_s is not None:
            absent = self._requests.absent(step)
            reason = (
                f"rank {rank} stopped waiting for {self._name(absent)}, which have not asked for it"
                if absent
                else f"rank {rank} stopped waiting: {self._why_undecided()}"
            )
            self._requests.decline(step, reason, is_passing=True, by=rank)
            if not self.adopted or waited_s < WAITED_S:
                return skip(step, reason)
            return self._skip_late(step, reason, absent)
        for attempt in self.attempts.capturing():
            if attempt.step == step and rank not in attempt.sealed:
                actions = self._abort(attempt, f"rank {rank} stopped waiting for its slot")
                self.slots.timed_out(attempt)
                return actions
        return []

    def _skip_late(self, step: int, reason: str, ranks: Iterable[int]) -> list[Action]:
        """Skip a step because others waited for ``ranks`` in vain, and mark these as absent, except
        ranks that wait for an earlier step.
        """
        late = [rank for rank in ranks if self._requests.step_of(rank) is None]
        self.absence.miss(late)
        actions = skip(step, reason, late_hosts=self._hosts_of(late))
        return actions + (self._skip_waiting(self.absence.reason) if self.absence.reason else [])

    def _hosts_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the hosts that these ranks are on; none in a run on one host."""
        numbers = sorted({self.hosts[rank] for rank in ranks}) if self.host_table else ()
        return tuple(self.host_table[number].id for number in numbers)

    def _name(self, ranks: Sequence[int]) -> str:
        hosts = listed(self._hosts_of(ranks))
        return f"ranks [{listed(ranks)}]{hosts and ' on '}{hosts}"

    def _decide_if_all_requested(self, step: int, now_s: float) -> list[Action]:
        if not self.adopted:
            return []
        requests = self._requests.pop_complete(step)
        if requests is not None:
            return self._decide(step, requests, now_s)
        missed = self._requests.pop_missed()
        if not missed:
            return []
        # A skipped rank catches up: ``step()`` saves only what is due or announced.
        (latest,) = self._requests.steps()
        return [SendMessage(m.Announced(step=latest, which=m.MISSED)), *skip_all(missed)]

    def decline(
        self, rank: int, step: int, reason: str, *, is_passing: bool = False
    ) -> list[Action]:
        """Handle a rank that cannot save this step: tell every rank that waits for it.

        ``is_passing``: the rank may still request the step later.
        """
        reason = f"rank {rank} could not save it: {reason}"
        self._requests.newest = max(self._requests.newest, step)
        self.absence.end(rank)
        had_asked = self._requests.decline(step, reason, is_passing=is_passing, by=rank)
        return skip(step, reason, is_passing=is_passing) if had_asked else []

    def leaving(self, rank: int) -> list[Action]:
        """Handle a goodbye: no rank waits for this one any more."""
        self._leaving.add(rank)
        actions: list[Action] = []
        for step in self._requests.steps():
            self._requests.drop_step(step)
            actions += skip(step, self._why_leaving(), is_passing=False)
        waiting = self._requests.pop_deferred()
        if waiting is not None:
            actions += skip(waiting.step, self._why_leaving(), is_passing=False)
        for attempt in self.attempts.capturing():  # the keeper would wait for it until its deadline
            if rank not in attempt.sealed:
                actions += self._abort(attempt, self._why_leaving())
        return actions

    def _why_leaving(self) -> str:
        return f"ranks [{listed(sorted(self._leaving))}] have closed their Checkpointer"

    def announce(self, step: int, which: str) -> list[Action]:
        """Announce to all ranks that ``which`` is due at ``step``.

        Not sent while a rank is unreachable: it would not save, and the others would wait for it. A
        ``MISSED`` save is announced once, however many ranks report it.
        """
        if which != m.PREEMPTED:
            if self.away or len(self._joined) < self.world:
                return []
            if which == m.MISSED:
                if self._missed_announced_at > self._requests.newest:
                    return []
                self._missed_announced_at = step
        return [SendMessage(m.Announced(step=step, which=which))]

    # ── captures ─────────────────────────────────────────────────────────────────────────────────

    def captured(self, rank: int, seal: m.Captured, now_s: float) -> list[Action]:
        """Handle a sealed image; the last image makes the generation complete."""
        attempt = self.attempts.get(seal.attempt)
        if attempt is None or attempt.phase != "capturing" or rank not in attempt.slots:
            self.slots.writer_stopped(rank, seal.attempt)
            return []
        if rank in attempt.sealed:
            return []
        self._now_s = now_s
        slot = self.slots[attempt.slots[rank]]
        if seal.image_bytes != slot.image_bytes:
            reason = f"rank {rank} sealed {seal.image_bytes} bytes, {slot.image_bytes} agreed"
            slot.writer = None  # the rank itself reports that it writes no more
            return self._abort(attempt, reason)
        slot.state, slot.writer = "captured", None
        slot.header_xxh3, slot.table_xxh3 = seal.header_xxh3, seal.table_xxh3
        attempt.sealed.add(rank)
        self.replica_check.add_sums(attempt.id, rank, seal.sums, seal.same_since)
        if len(attempt.sealed) < attempt.world:
            return []
        actions = self.replica_check.finish(attempt.id, attempt.step)
        if attempt.is_ring:
            attempt.phase = "draining"  # memory holds only what is not written yet
            return actions
        attempt.phase = "complete"
        self.attempts.captured(attempt.id)
        done = m.Complete(step=attempt.step, attempt=attempt.id, durable=attempt.durable)
        elapsed_s = now_s - attempt.started_s
        note = ReportOutcome(attempt.id, attempt.step, "complete", elapsed_s=elapsed_s)
        return [*actions, SendMessage(done), note, *self.durability.start_next()]

    def abort_capture(self, rank: int, message: m.AbortCapture) -> list[Action]:
        """Handle a rank that will never seal its image."""
        attempt = self.attempts.get(message.attempt)
        if attempt is None or not attempt.is_open or rank not in attempt.slots:
            if message.has_stopped:
                self.slots.writer_stopped(rank, message.attempt)
            return []
        if message.has_stopped:
            self.slots[attempt.slots[rank]].writer = None
        self._layouts.sent_hash = ""  # its host may lack the layout: each is told of it once more
        return self._abort(attempt, message.reason, message.leaf)

    def tick(self, now_s: float) -> list[Action]:
        """Expire every wait whose deadline has passed."""
        self._now_s = now_s
        actions: list[Action] = []
        waiting = self._requests.pop_deferred(before_s=now_s - self.grant_deadline_s)
        if waiting is not None:
            actions += skip(waiting.step, NO_SLOT)
        actions += self._decide_deferred()
        late = self._requests.late(now_s, self.grant_deadline_s) if self.adopted else []
        for step, wait_s in late:
            absent = self._requests.absent(step)
            why = f"{self._name(absent)} did not ask" if absent else f"{self._why_undecided()},"
            reason = f"{why} within {wait_s:g} s"
            if self._requests.decline(step, reason, is_passing=True):
                actions += self._skip_late(step, reason, absent)
        for attempt in self.attempts.capturing():
            if now_s - max(attempt.started_s, attempt.moved_s) > self.capture_deadline_s:
                who = self._name(attempt.unsealed)
                within = f"within {self.capture_deadline_s:g} s"
                actions += self._abort(attempt, f"{who} did not finish {within}")
        return (
            actions
            + self.durability.start_next()
            + self._expire_promises(now_s)
            + self._decide_deferred()
        )

    def _expire_promises(self, now_s: float) -> list[Action]:
        """Fail durable promises while a host is away: nothing can be made durable, and the host may
        never return.
        """
        if not self.away:
            self._away_since_s = now_s
        if now_s - self._away_since_s <= self.capture_deadline_s:
            return []
        return self.durability.expire(self._why_away())

    # ── queries ──────────────────────────────────────────────────────────────────────────────────

    def is_busy(self) -> bool:
        """Return True if something is being captured or persisted."""
        return any(attempt.is_under_way for attempt in self.attempts.values())

    def holds_newest_part(self) -> bool:
        """Return True if an incomplete attempt here is newer than all complete or durable ones."""
        newest = self.attempts.newest_complete()
        known = max(self.durability.newest_durable, newest.generation if newest else (0, -1))
        return any(part.generation > known for part in self.attempts.incomplete())

    def _why_undecided(self) -> str:
        """Describe why a step that all ranks have requested is not decided."""
        if not self.adopted:
            return "it is not known yet what the run goes on from"
        awaited = self._layouts.awaited
        return f"ranks {awaited} have not sent their tables of leaves" if awaited else PLANNING

    def is_whole(self, step: int) -> bool:
        """Return True if the whole generation of ``step`` is in memory."""
        newest = (a for a in self.attempts.complete() if a.generation == (self.incarnation, step))
        return any(newest) or self.durability.is_cached(step)

    def explain(self, step: int) -> str:
        """Describe in words what the save of ``step`` waits for."""
        if self._requests.is_deferred(step):
            return NO_SLOT
        if self.durability.is_cached(step):
            return "the cache has it, and it is not drained to storage yet"
        absent = self._requests.absent(step)
        if absent:
            return f"{self._name(absent)} have not asked to capture it"
        if step in self._requests.steps():
            return self._why_undecided()
        for attempt in self.attempts.values():
            if attempt.generation == (self.incarnation, step):
                return attempt.waits_for
        return "the keeper knows nothing of it"
