"""PURE. The coordinator's state machine: one method per event, returns the actions to execute.

Every method handles one event and returns the resulting actions, which the keeper executes. This
module keeps one rule in every state; ``slots`` keeps those of the slots:

* A generation is captured by all ranks of its incarnation in one attempt, or it is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.coordinator.actions import Action, SendMessage, skip, skip_all
from holdfast.coordinator.attempt_lifecycle import AttemptLifecycle
from holdfast.coordinator.attempts import Attempt, CompleteStep
from holdfast.coordinator.layouts import Agreement, LayoutRegistry, Tables
from holdfast.coordinator.requests import Absence, CaptureRequests, listed, state_mismatch
from holdfast.coordinator.slots import NO_SLOT, Slot, SlotWriter
from holdfast.protocol import messages as m
from holdfast.protocol.image_plan import ImageSizes

PLANNING = "its layout is new, and its images are still being planned"

#: A request withdrawn sooner than this did not wait for other ranks: its process may be ending.
WAITED_S = 0.5


class Coordinator:
    """State machine of a run: its hosts and ranks, and their requests; ``lifecycle`` has the
    attempts that come of them, from their slots to storage.

    Its own host is number 0. The other hosts are *away* until their keepers connect (``attach``),
    and after they are lost (``detach``): while a host is away nothing is captured, and no slot is
    reused.
    """

    def __init__(self, *, keeper: str, grant_deadline_s: float, capture_deadline_s: float) -> None:
        self.lifecycle = AttemptLifecycle(keeper)
        self.attempts, self.slots = self.lifecycle.attempts, self.lifecycle.slots
        self.durability = self.lifecycle.durability
        self.replica_check = self.lifecycle.replica_check
        self.incarnation, self.nonce, self.world = 0, "", 0
        self.hosts: dict[int, int] = {}
        """The host of each rank."""
        self.adopted = False
        """True once the incarnation's parent is recorded: captures may begin."""
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
        self._layouts = LayoutRegistry()
        self._joined: dict[int, SlotWriter] = {}
        self._requests = CaptureRequests(0)
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
            actions += self.lifecycle.abort(attempt, reason, is_lost=True)
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

    def _why_hindered(self) -> str:
        return self._why_away() if self.away else self.absence.reason

    # ── incarnations ─────────────────────────────────────────────────────────────────────────────

    def begin(
        self, incarnation: int, nonce: str, world: int, hosts: Sequence[m.HostEntry] = ()
    ) -> list[Action]:
        """Begin a new incarnation; captures of the old one are aborted.

        ``hosts``: the hosts of its ranks, this host first; empty if all ranks are here.
        """
        actions: list[Action] = []
        for attempt in self.attempts.capturing():
            actions += self.lifecycle.abort(attempt, "a new incarnation began")
        self.incarnation, self.nonce, self.world = incarnation, nonce, world
        self.adopted = False
        self._place(world, hosts)
        self.lifecycle.begin(incarnation, nonce, self.hosts, knows_hosts=bool(hosts))
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
        self.lifecycle.layout_sent = ""
        if not is_copying:
            actions += self.lifecycle.writer_stopped(rank, writer)
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
        actions += self.lifecycle.skip_waiting(f"rank {rank} went away: {NO_SLOT}")
        for attempt in self.attempts.capturing(rank):
            reason = f"rank {rank} went away while it captured"
            actions += self.lifecycle.abort(attempt, reason, is_lost=True)
        return actions

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def request_capture(self, rank: int, request: m.RequestCapture, now_s: float) -> list[Action]:
        """Handle a rank's capture request; the step is decided when all ranks have requested it."""
        self.lifecycle.now_s = now_s
        if rank not in self._joined:
            return []
        self._requests.note(rank, request.step)
        if request.durable:
            self.durability.add(m.StandingOrder(request.step, request.step))
        self.absence.end(rank)
        writer, actions = self._joined[rank], list[Action]()
        if not request.is_copying:
            actions += self.lifecycle.writer_stopped(rank, writer)
        return actions + self._decide_request(rank, request, now_s)

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
        is_hindered = self._leaving or self.away or self.absence.is_any or self.lifecycle.waiting
        if is_plain and not is_hindered:
            return [requests]
        return [{rank: request} for rank, request in requests.items()]

    def request_captures(
        self, requests: Mapping[int, m.RequestCapture], now_s: float
    ) -> list[Action]:
        """Handle what ``divide_requests`` left together, as if it came one after the other."""
        if len(requests) == 1:
            return self.request_capture(*next(iter(requests.items())), now_s)
        step = next(iter(requests.values())).step
        self.lifecycle.now_s = now_s
        if any(request.durable for request in requests.values()):
            self.durability.add(m.StandingOrder(step, step))
        for rank, request in requests.items() if self.slots.has_quarantined else ():
            if not request.is_copying:
                self.slots.writer_stopped_all(self._joined[rank], rank, self.incarnation)
        self._requests.add_all(step, requests, now_s)
        return self._decide_if_all_requested(step, now_s)

    def _decide_request(self, rank: int, request: m.RequestCapture, now_s: float) -> list[Action]:
        if self._leaving:
            return skip(request.step, self._why_leaving(), is_passing=False, rank=rank)
        why = self._why_hindered()
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
        if self.lifecycle.is_waiting(step):
            return self.lifecycle.skip_waiting(f"rank {rank} stopped waiting: {NO_SLOT}")
        waited_s = self._requests.waited_s(rank, step, self.lifecycle.now_s)
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
        for attempt in self.attempts.capturing(rank):
            if attempt.step == step:
                actions = self.lifecycle.abort(attempt, f"rank {rank} stopped waiting for its slot")
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
        actions += self.lifecycle.skip_waiting(self._why_leaving(), is_passing=False)
        for attempt in self.attempts.capturing(rank):  # it would be waited for until its deadline
            actions += self.lifecycle.abort(attempt, self._why_leaving())
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

    # ── deciding steps ───────────────────────────────────────────────────────────────────────────

    def _decide(
        self, step: int, requests: Mapping[int, m.RequestCapture], now_s: float
    ) -> list[Action]:
        """Start the attempt of a step that all ranks requested, once its images are planned."""
        apart = self._why_apart(requests)
        if apart:
            return skip(step, apart)
        tables = tuple(requests[rank].table for rank in range(self.world))
        agreed = self._layouts.find(tables)
        if agreed is not None and agreed.planned_count == self.world:
            return self.lifecycle.start(
                CompleteStep(step, requests, now_s, agreed, tables, self._joined)
            )
        # Agreed and planned here, a layout would hold the loop up for up to many seconds.
        for rank, request in requests.items():
            self._requests.add(rank, request, now_s)
        now_s = max(now_s, self.lifecycle.now_s)
        if agreed is None:
            return self._layouts.agree(tables, now_s)
        return self.lifecycle.send_layout(agreed, tables) + agreed.plan(self.hosts, now_s)

    def table(self, hash_: str, deflated: bytes, now_s: float) -> list[Action]:
        """Handle a leaf table that a rank was asked for."""
        return self._go_on({self._layouts.learn(hash_, deflated)}, now_s)

    def layout_agreed(self, tables: Tables, agreement: Agreement, now_s: float) -> list[Action]:
        """Handle what came of ``AgreeLayout``."""
        self._layouts.agreed_on(tables, agreement)
        return self._go_on({tables}, now_s, agreement.reason, is_passing=agreement.is_passing)

    def images_planned(self, layout: str, sizes: ImageSizes, now_s: float) -> list[Action]:
        """Handle the sizes of one host's images: with the last of them the save goes on."""
        agreed = self._layouts.agreed(layout)
        if agreed is None:
            return []
        if sizes.reason:
            agreed.forget_orders()
        else:
            agreed.planned({r: size for r, size in sizes.by_rank.items() if 0 <= r < self.world})
            if agreed.planned_count < self.world:
                return []
        tables = self._layouts.tables_of(agreed)
        return self._go_on(tables, now_s, sizes.reason, is_passing=sizes.is_passing)

    def _go_on(
        self, waiting: set[Tables], now_s: float, reason: str = "", *, is_passing: bool = True
    ) -> list[Action]:
        """Decide the steps that all ranks requested with these tables; skip them if there is a
        ``reason``.
        """
        actions: list[Action] = []
        for step in self._requests.steps() if self.adopted else []:
            is_waiting = self._requests.all_of(step, waiting)
            requests = self._requests.pop_complete(step) if is_waiting else None
            if requests is None:
                continue
            if reason:
                actions += skip(step, reason, is_passing=is_passing)
            else:
                actions += self._decide(step, requests, now_s)
        return actions

    def _why_apart(self, requests: Mapping[int, m.RequestCapture]) -> str:
        return state_mismatch(requests)

    @property
    def used_layouts(self) -> set[str]:
        """Hashes of the layouts that every host must keep."""
        return {attempt.layout for attempt in self.attempts.values()} | self._layouts.hashes

    # ── deadlines ────────────────────────────────────────────────────────────────────────────────

    def tick(self, now_s: float) -> list[Action]:
        """Expire every wait whose deadline has passed."""
        self.lifecycle.now_s = now_s
        actions: list[Action] = []
        waiting = self.lifecycle.waiting
        if waiting is not None and now_s - waiting.since_s > self.grant_deadline_s:
            actions += self.lifecycle.skip_waiting(NO_SLOT)
        actions += self.lifecycle.retry()
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
                actions += self.lifecycle.abort(attempt, f"{who} did not finish {within}")
        return (
            actions
            + self.durability.start_next()
            + self._expire_promises(now_s)
            + self.lifecycle.retry()
        )

    def _expire_promises(self, now_s: float) -> list[Action]:
        """Fail durable promises while a host or rank is away, which may never return, and what is
        in memory does not keep them.
        """
        why = self._why_hindered()
        if not why or (not self.away and self.durability.is_payable):
            self._away_since_s = now_s
        if now_s - self._away_since_s <= self.capture_deadline_s:
            return []
        return self.durability.expire(why)

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
        if self.lifecycle.is_waiting(step):
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
