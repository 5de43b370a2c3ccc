"""Schedules parity rounds on the coordinator: which generation is protected, and when.

As soon as all ranks have captured a generation, and no other round is active, every host is told
to make its parity shards; the hosts of a group read from each other of which images; when all have
memory they begin, and with the last shard the generation is protected
(``parity.planning.protection``). Any error ends only this round: what was protected before stays,
and training does not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from holdfast.coordinator.actions import Action
from holdfast.coordinator.coordinator import Coordinator
from holdfast.events import ProtectionPlanned, SnapshotNotProtected, SnapshotProtected, emit
from holdfast.keeper.connections import Ranks
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.followers import FollowerRegistry
from holdfast.keeper.parity.rebuild import RebuildCoordinator
from holdfast.keeper.parity.round import (
    RoundOrders,
    capture_facts,
    derive_takeover,
    divide_hosts,
    has_stale_shards,
    newest_whole,
    protected_shards,
)
from holdfast.keeper.parity.worker import ParityWorker, stored_shards
from holdfast.parity.planning.budget import LEAST, StepPacing
from holdfast.parity.planning.protection import CaptureDone, Protection
from holdfast.protocol import messages as m
from holdfast.protocol.facts import Fact

_AGAIN_S = 5.0
"""Delay after a failed round, if nothing newer was captured."""
_READY_S = 300.0
"""Timeout for all hosts to allocate a round's memory. The memory is touched, which takes time
once.
"""


class ParityScheduler:
    """Runs the rounds on the keeper's loop, for all incarnations that this keeper coordinates."""

    def __init__(
        self,
        coordinator: Coordinator,
        ranks: Ranks,
        followers: FollowerRegistry,
        parity: ParityWorker,
        carry_out: Callable[[Sequence[Action]], None],
    ) -> None:
        self._coordinator, self._ranks = coordinator, ranks
        self._hands, self._parity, self._send = followers, parity, followers.send_to_host
        self._rebuilding = RebuildCoordinator(coordinator, self._send, self._port, carry_out)
        self._hosts: Sequence[m.HostEntry] = ()
        self._asked = 0
        self._state: Protection | None = None
        self._shards: dict[str, tuple[host_messages.ParityShards, ...]] = {}
        self._largest_bytes = 0
        self._ready: dict[str, int] = {}
        """Hosts that have allocated memory for this round's shards, and what they make them of."""
        self._groups: list[list[str]] = []
        """The groups of an earlier division, as far as they are known."""
        self._numbers: dict[str, int] = {}
        self._joined: dict[int, tuple[int, ...]] = {}
        """The group of every host of the present division, by numbers; empty before there is one.
        """
        self._parity_of_group = 0
        self._survives = ""
        self._is_dropped = False
        self._pacer = ParityPacer()
        self._recoded: set[str] = set()
        """Attempts that may still have earlier shards when they are protected again."""
        self._dropping: _Dropping | None = None
        """The report of protection that waits until earlier shards are deleted."""
        self._began_s = self._ready_s = self._encode_s = self._again_s = 0.0

    # ── choosing a generation ────────────────────────────────────────────────────────────────────

    def begin(self, hosts: Sequence[m.HostEntry]) -> None:
        """Begin another incarnation: nothing counts as protected until the stored state is
        known.
        """
        if self._state is not None and self._state.coding is not None:
            self._parity.cancel("another start of the run has begun")
        self._rebuilding.cancel("another start of the run has begun")
        self._hosts, self._asked, self._state, self._is_dropped = hosts, 0, None, False
        self._pacer, self._dropping = ParityPacer(), None
        self._shards.clear()
        self._recoded.clear()
        self._groups.clear()
        self._joined.clear()
        self._numbers = {place.id: number for number, place in enumerate(hosts)}
        attempts = self._coordinator.attempts
        attempts.protects, attempts.pinned_by_parity = False, frozenset()

    def configure(self, parity: int) -> None:
        """Set the number of hosts per group that may be lost, as all ranks request."""
        if len(self._hosts) > 1 and not self._asked:
            self._asked = parity
            self._coordinator.attempts.protects = parity > 0
        self.poll()

    def on_step(self, rank: int, step: int) -> None:
        """Note that a rank has done this step, and requests a snapshot of it."""
        if not rank:
            self._pacer.on_request(step)

    def attached(self, host: str, shards: tuple[host_messages.ParityShards, ...]) -> None:
        """Record the parity shards of another host, whose keeper connected."""
        self._shards[host] = shards
        self._is_dropped = False  # the host may not have received the order to delete parity
        if self._dropping is not None and host in self._dropping.hosts:
            self._send(self._numbers[host], self._dropping.order)
        for number in self._joined.get(self._numbers[host], ()):  # it may listen elsewhere now
            self._tell_group(number)
        self._check_shards(host)
        self.poll()
        self._replace_lost()

    def detached(self, host: str) -> None:
        """Record that a host is unreachable."""
        self._shards.pop(host, None)
        self._rebuilding.cancel(f"the keeper of {host} is out of reach")
        self._fail(f"the keeper of {host} is out of reach", host)

    def will_adopt(self) -> None:
        """Prepare the state of protection: the parent is known, and no capture has begun."""
        if self._asked and not self._coordinator.away and self._state is None:
            self._take_over()

    def poll(self) -> None:
        """Start the next round, if one is due."""
        coordinator = self._coordinator
        if not self._asked or coordinator.away or not coordinator.adopted:
            return
        if self._state is None:
            self._take_over()
        self._check_timeouts()
        self._rebuilding.poll()
        self._go_on()

    def captured(self, attempt_id: str) -> None:
        """Handle an attempt that all ranks captured."""
        if not self._asked:
            self._drop()
        attempt = self._coordinator.attempts.get(attempt_id)
        if self._state is None or attempt is None:
            return
        self._rebuilding.cancel("something newer is captured, and protected instead")
        self._again_s = 0.0
        self._change(self._state.has_captured(capture_facts(attempt)))
        self.poll()

    def _drop(self) -> None:
        """Delete all stored parity: it is switched off, and with this capture none is needed."""
        if self._is_dropped:
            return
        self._is_dropped = True
        if self._hosts:
            self._broadcast(host_messages.DropParity())
        else:
            self._parity.drop()

    def _take_over(self) -> None:
        """Determine the protected attempt, the buffer that holds its parity, and what to protect
        next.
        """
        self._coordinator.pin_again()
        attempts, incarnation = self._coordinator.attempts, self._coordinator.incarnation
        shards = self._all_shards()
        takeover = derive_takeover(attempts, shards, self._hosts, incarnation)
        self._groups = [sorted(group) for group in takeover.groups]
        self._recoded = {one.attempt for held in shards.values() for one in held}
        self._plan()
        whole = newest_whole(attempts, incarnation)
        self._change(
            takeover.state if whole is None else takeover.state.has_captured(capture_facts(whole))
        )
        if has_stale_shards(
            takeover.state, shards
        ):  # an earlier coordinator ended before reporting
            self._began_s, self._encode_s = time.monotonic(), 0.0
            self._drop_stale_shards(takeover.state)
        self._replace_lost()

    def _all_shards(self) -> dict[str, tuple[host_messages.ParityShards, ...]]:
        return self._shards | {self._hosts[0].id: stored_shards(self._parity)}

    def _replace_lost(self) -> None:
        """Start the rebuild of lost images of the restored attempt, so that it can be protected."""
        state, attempts = self._state, self._coordinator.attempts
        pinned = attempts.get(attempts.pinned or "")
        if state is None or state.captured is not None or self._coordinator.away:
            return
        if pinned is not None and pinned.is_incomplete and len(self._hosts) > 1:
            shards = protected_shards(state, pinned.id, self._all_shards())
            self._rebuilding.begin(pinned, [host.id for host in self._hosts], shards)

    def _plan(self) -> None:
        """Divide the hosts into groups, once for this incarnation, and tell them."""
        division = divide_hosts(self._hosts, self._asked, self._groups)
        for group in division.groups:
            numbers = tuple(self._numbers[host.id] for host in group.hosts)
            self._joined.update(dict.fromkeys(numbers, numbers))
            self._parity_of_group = group.parity
        for number in self._joined:
            self._tell_group(number)
        level = division.level
        self._survives = level.text
        emit(
            ProtectionPlanned(
                incarnation=self._coordinator.incarnation,
                parity=self._asked,
                hosts=len(self._hosts),
                survives=level.text,
                missing=level.missing,
            )
        )

    def _tell_group(self, number: int) -> None:
        group = self._joined[number]
        ports = tuple(map(self._port, group))
        joined = host_messages.JoinGroup(hosts=group, ports=ports, parity=self._parity_of_group)
        self._send(number, joined)

    # ── one round ────────────────────────────────────────────────────────────────────────────────

    def _change(self, state: Protection) -> None:
        """Set the state of protection, and retain exactly the slots that it needs."""
        self._state = state
        self._coordinator.attempts.pinned_by_parity = frozenset(
            one.attempt for one in state.slots_stay
        )

    def _go_on(self) -> None:
        state = self._state
        if state is None or (cover := state.next) is None or time.monotonic() < self._again_s:
            return
        if not self._pacer.may_begin():
            return
        attempt = self._coordinator.attempts.get(cover.captured.attempt)
        if attempt is None or not attempt.is_whole or attempt.phase != "complete":
            return
        self._change(state.begin())
        self._began_s = time.monotonic()
        self._ready.clear()
        orders = RoundOrders(attempt, self._coordinator.slots)
        self._largest_bytes = orders.largest_bytes
        assert self._state is not None
        coding = self._state
        for number in range(len(self._hosts)):
            if self._state is coding:  # no host has refused
                order = orders.order(number, coding, self._rate(self._joined[number]))
                self._send(number, order)

    def _rate(self, group: Sequence[int]) -> int | None:
        """Return the common rate of a group's hosts: no host finishes before the slowest."""
        rates = [rate for number in group if (rate := self._hosts[number].parity_rate)]
        own = self._pacer.rate_bytes_s
        return min([*rates, *([] if own is None else [own])], default=None)

    def _broadcast(self, fact: Fact) -> None:
        for number in range(len(self._hosts)):
            self._send(number, fact)

    def handle(self, host: str, fact: Fact) -> None:
        """Handle a host's report about this round, an earlier one, or damage."""
        state = self._state
        match fact:
            case host_messages.RebuildComplete() | host_messages.RebuildFailed():
                self._handle_lost(host, fact)
                return
            case host_messages.ShardLost(attempt=attempt):
                self.shard_lost(attempt)
                return
            case host_messages.ShardsDropped(round_id=round_id):
                self._dropped(round_id, host)
                return
        if state is None or state.coding is None:
            return
        match fact:
            case host_messages.ParityReady(round_id=state.round_id, terms=terms):
                self._is_ready(state.coding.members, host, terms)
            case host_messages.ParityComplete(round_id=state.round_id):
                if self._ready.keys() != state.coding.members:
                    self._fail(f"{host} did not wait for the others", host)
                else:
                    self._made(state.has_sealed(state.round_id, host))
            case host_messages.ParityFailed(round_id=state.round_id, reason=reason):
                self._fail(f"on {host}: {reason}", host)

    def _handle_lost(
        self, host: str, fact: host_messages.RebuildComplete | host_messages.RebuildFailed
    ) -> None:
        if self._rebuilding.handle(self._numbers[host], fact) and self._state is not None:
            whole = capture_facts(self._coordinator.attempts[fact.attempt])
            self._change(self._state.has_lost_shards(whole).has_captured(whole))
            self.poll()

    def shard_lost(self, attempt: str) -> None:
        """Handle parity that is no longer complete on all hosts: make it again."""
        coding = None if self._state is None else self._state.coding
        if coding is not None and coding.captured.attempt == attempt:
            self._fail("a row of it was damaged meanwhile")  # it may have been reported as complete
        state = self._state
        cover = None if state is None else state.protected
        if state is not None and cover is not None and cover.captured.attempt == attempt:
            self._recoded.add(attempt)
            self._change(state.has_lost_shards(cover.captured))
            self.poll()

    def _check_shards(self, host: str) -> None:
        """Check the shards of a host that was unreachable: some may be lost without a report."""
        state = self._state
        cover = None if state is None else state.protected
        if state is None or cover is None or host not in cover.members:
            return
        wanted = cover.captured.attempt, state.half
        held = [one for one in self._shards[host] if (one.attempt, one.half) == wanted]
        if len(held) < (held[0].parity if held else 1):
            self.shard_lost(cover.captured.attempt)

    def _is_ready(self, members: frozenset[str], host: str, terms: int) -> None:
        """Handle a host that has memory; ``terms``: checksum of what its shards will be of."""
        if host in self._ready:
            if self._ready[host] != terms:
                self._fail(f"{host} is of two minds about what it makes parity of", host)
            return
        self._ready[host] = terms
        if self._ready.keys() != members:
            return
        for group in set(self._joined.values()):
            hosts = [self._hosts[number].id for number in group]
            if len({self._ready[one] for one in hosts}) > 1:
                self._fail(f"{', '.join(hosts)} do not make parity of the same images")
                return
        self._pacer.on_begin(self._largest_bytes)
        self._ready_s = time.monotonic()
        assert self._state is not None
        self._broadcast(host_messages.BeginParity(round_id=self._state.round_id))

    def _port(self, number: int) -> int:
        return self._hands.port_of(number) if number else self._parity.port

    def _check_timeouts(self) -> None:
        """End a round in which a host does not allocate its memory in time."""
        coding = self._state.coding if self._state is not None else None
        if coding is None or time.monotonic() < self._began_s + _READY_S:
            return
        if late := sorted(coding.members - self._ready.keys()):
            self._fail(
                f"{', '.join(late)} had no memory for parity in {_READY_S:.0f} s: is there too "
                "little of it?",
                late[0],
            )

    def _made(self, state: Protection) -> None:
        cover = state.protected
        if state.coding is not None or cover is None:  # some host is still working
            self._change(state)
            return
        self._change(state)
        self._pacer.on_end(is_made=True)
        self._encode_s = time.monotonic() - self._ready_s
        self._dropping = None
        if cover.captured.attempt in self._recoded:
            self._drop_stale_shards(state)
        else:
            self._announce(cover.captured, self._began_s, self._encode_s)
        self._go_on()

    def _drop_stale_shards(self, state: Protection) -> None:
        """Order all hosts to delete the shards in the buffer that is written next."""
        assert state.protected is not None
        captured, members = state.protected.captured, set(state.protected.members)
        order = host_messages.DropShards(round_id=state.round_id, half=1 - state.half)
        times = self._began_s, self._encode_s
        self._dropping = _Dropping(captured, *times, members, order)
        self._broadcast(order)

    def _dropped(self, round_id: int, host: str) -> None:
        """Handle a host that deleted its earlier shards; the next round may have begun
        meanwhile.
        """
        dropping = self._dropping
        if dropping is None or round_id != dropping.order.round_id or host not in dropping.hosts:
            return
        dropping.hosts.discard(host)
        if not dropping.hosts:
            self._dropping = None
            self._announce(dropping.captured, dropping.began_s, dropping.encode_s)

    def _announce(self, captured: CaptureDone, began_s: float, encode_s: float) -> None:
        generation, attempt = captured
        self._coordinator.attempts.pinned = None  # all hosts have an equally good copy
        emit(
            SnapshotProtected(
                incarnation=generation.incarnation,
                step=generation.step,
                survives=self._survives,
                elapsed_s=time.monotonic() - began_s,
                encode_s=encode_s,
            )
        )
        if generation.incarnation == self._coordinator.incarnation:
            self._ranks.send(m.Protected(step=generation.step, attempt=attempt), None)

    def _fail(self, reason: str, host: str = "") -> None:
        """End this round on all hosts; the next one is tried."""
        state = self._state
        if state is None or state.coding is None:
            return
        self._pacer.on_end(is_made=False)
        generation, attempt = state.coding.captured
        self._broadcast(host_messages.CancelParity(round_id=state.round_id, reason=reason))
        self._change(state.has_failed(state.round_id))
        self._again_s = time.monotonic() + _AGAIN_S
        emit(
            SnapshotNotProtected(
                incarnation=generation.incarnation, step=generation.step, reason=reason
            )
        )
        if generation.incarnation == self._coordinator.incarnation:
            message = m.Unprotected(step=generation.step, attempt=attempt, reason=reason, host=host)
            self._ranks.send(message, None)
        self.poll()


class _Dropping(Struct):
    """Deletion of earlier shards, which hosts serve in place of new ones of the same name.

    The new protection of an attempt is announced when all ``hosts`` have deleted the earlier
    shards.
    """

    captured: CaptureDone
    began_s: float
    encode_s: float
    hosts: set[str]
    """Hosts that have not reported the deletion yet."""
    order: host_messages.DropShards


# Measures training step times on the coordinator, and limits the rate of parity. A rank requests
# its snapshot when its step is done, so the numbers and times of two requests give the step time.
# No additional message or measurement is needed.


class ParityPacer:
    """Rate control of one incarnation. On the keeper's loop."""

    def __init__(self) -> None:
        self._pacing = StepPacing()
        self._last_request: tuple[int, float, float] | None = None
        """Last request: its step, its time, and ``_coded_s`` at that time."""
        self._interval_s = 0.0
        self._began_s: float | None = None
        self._moved_bytes = 0
        self._coded_s = 0.0
        """Total time in which parity was made."""
        self._rest_until_s = 0.0

    @property
    def rate_bytes_s(self) -> int | None:
        """Return the rate at which each host may pull for the next generation; None: no limit."""
        return self._pacing.rate_bytes_s

    def on_request(self, step: int) -> None:
        """Record a snapshot request for this step, always from the same rank."""
        now_s = time.monotonic()
        coded_s = self._coded_s + (0.0 if self._began_s is None else now_s - self._began_s)
        if self._last_request is not None:
            last_step, last_s, last_coded_s = self._last_request
            if step > last_step and now_s > last_s:
                self._interval_s = now_s - last_s
                self._pacing = self._pacing.stepped(
                    self._interval_s / (step - last_step),
                    (coded_s - last_coded_s) / self._interval_s,
                )
        self._last_request = step, now_s, coded_s

    def on_begin(self, moved_bytes: int) -> None:
        """Record the start of a round, in which each host pulls at most this many bytes."""
        self._began_s, self._moved_bytes = time.monotonic(), moved_bytes

    def on_end(self, *, is_made: bool) -> None:
        """Record the end of a round."""
        if self._began_s is None:
            return
        now_s, began_s, self._began_s = time.monotonic(), self._began_s, None
        self._coded_s += now_s - began_s
        if is_made:
            took_s = max(now_s - began_s, 1e-6)
            self._pacing = self._pacing.made(self._moved_bytes, took_s)
        self._rest_until_s = now_s + (LEAST + 1) * self._interval_s

    def may_begin(self) -> bool:
        """Return True if a round may begin now; False for some steps if no step passes without
        parity.
        """
        return not self._pacing.needs_rest or time.monotonic() >= self._rest_until_s
