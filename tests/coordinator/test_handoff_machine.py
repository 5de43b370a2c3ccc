"""Ranks, a keeper and storage played against each other at random; the coordinator's rules hold.

What happens to the processes and slots is in ``handoff_world``, what is checked in
``handoff_checks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.coordinator.actions import Action
from holdfast.coordinator.attempt_lifecycle import AttemptLifecycle
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.durability import DurabilityQueue
from holdfast.coordinator.slots import Slot, Slots, SlotWriter
from holdfast.protocol import messages as m
from support.coordinator.coordinators import CAPTURE_S, GRANT_S
from support.coordinator.handoff_checks import CheckedWorld
from support.coordinator.handoff_facts import Process, Save, is_idle
from support.coordinator.handoff_hosts import HostedWorld

#: Sizes of the values in an image: the second pair lies on both sides of a slot's next size.
VALUES_BYTES = (10, 1_000_000, 1_040_000, 5_000_000)
worlds = st.integers(1, 3)
saves = st.builds(
    Save, durable=st.booleans(), exact=st.booleans(), values_bytes=st.sampled_from(VALUES_BYTES)
)


def writes(process: Process) -> bool:
    return process.writes is not None


def hears(process: Process) -> bool:
    return bool(process.inbox)


def waits(process: Process) -> bool:
    return process.waits_for is not None


def is_quiet(process: Process) -> bool:
    """Its last save was answered, and it has heard everything."""
    return process.done > 0 and is_idle(process) and not process.inbox


class Handoff(CheckedWorld, RuleBasedStateMachine):
    """What can happen."""

    @initialize(world=worlds)
    def begin_with(self, world: int) -> None:
        self.start(world)

    def one(self, data: st.DataObject, choices: list[Process]) -> Process:
        return data.draw(st.sampled_from(choices))

    # ── what trainers do ─────────────────────────────────────────────────────────────────

    @precondition(lambda self: any(map(is_idle, self.trainers())))
    @rule(data=st.data(), save=saves)
    def ask(self, data: st.DataObject, save: Save) -> None:
        self.make_ask(self.one(data, self.trainers(is_idle)), save)

    @precondition(lambda self: any(map(hears, self.trainers())))
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        self.take_message(self.one(data, self.trainers(hears)))

    @precondition(lambda self: any(map(self.possible_writers, self.may_write)))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Anybody who may write does, also one the keeper has lost sight of."""
        slots = [slot for slot in self.may_write if self.possible_writers(slot)]
        self.scribble(data.draw(st.sampled_from(slots)))

    @precondition(lambda self: any(map(writes, self.trainers())))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        self.finish_image(self.one(data, self.trainers(writes)))

    @precondition(lambda self: any(hears(p) or writes(p) for p in self.trainers()))
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """One rank hears what it was told, and finishes its image if it was given a slot."""
        process = self.one(data, self.trainers(lambda p: hears(p) or writes(p)))
        self.take_messages(process)
        if writes(process):
            self.finish_image(process)

    @precondition(lambda self: any(map(writes, self.trainers())))
    @rule(data=st.data(), leaf=st.sampled_from(["", "w"]))
    def abandon(self, data: st.DataObject, leaf: str) -> None:
        self.give_up(self.one(data, self.trainers(writes)), leaf)

    @precondition(lambda self: any(map(waits, self.trainers())))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.wait_no_longer(self.one(data, self.trainers(waits)))

    @precondition(lambda self: any(map(is_quiet, self.trainers())))
    @rule(data=st.data())
    def save_again(self, data: st.DataObject) -> None:
        """The last save is asked for once more, durable."""
        self.ask_durable(self.one(data, self.trainers(is_quiet)))

    @precondition(lambda self: any(map(is_idle, self.trainers())))
    @rule(save=saves)
    def all_ask(self, save: Save) -> None:
        for process in self.trainers(is_idle):
            self.make_ask(process, save)

    @precondition(lambda self: any(map(is_idle, self.trainers())))
    @rule(data=st.data())
    def is_asked_an_update_later(self, data: st.DataObject) -> None:
        """A signal, say, reaches this rank behind its next update, and others before theirs."""
        self.one(data, self.trainers(is_idle)).is_ahead = True

    @precondition(lambda self: any(map(hears, self.trainers())))
    @rule()
    def all_hear(self) -> None:
        for process in self.trainers():
            self.take_messages(process)

    @precondition(lambda self: any(map(writes, self.trainers())))
    @rule()
    def all_seal(self) -> None:
        for process in self.trainers():
            if writes(process):
                self.finish_image(process)

    @rule(save=saves, is_persisted=st.booleans())
    def all_goes_well(self, save: Save, is_persisted: bool) -> None:
        """A save as most of them are."""
        self.all_come_back()
        self.all_ask(save)
        while self.planning:
            self.end_planning(self.planning[0])
        self.all_allocations_end()
        for needs in list(self.making_rings):
            self.end_rings(needs, are_there=True)
        self.all_hear()
        self.all_seal()
        for attempt in list(self.persisting):
            if is_persisted and self.is_complete(attempt):
                self.end_persist(attempt, is_stored=True)

    # ── what the machine does ────────────────────────────────────────────────────────────

    @precondition(lambda self: bool(self.allocating))
    @rule()
    def all_allocations_end(self) -> None:
        for slot in list(self.allocating):
            self.end_allocation(slot, is_there=True)

    @precondition(lambda self: bool(self.allocating))
    @rule(data=st.data(), is_there=st.booleans())
    def allocation_ends(self, data: st.DataObject, is_there: bool) -> None:
        slot = data.draw(st.sampled_from(list(self.allocating)))
        self.end_allocation(slot, is_there=is_there)

    @precondition(lambda self: bool(self.allocating))
    @rule()
    def there_is_no_room(self) -> None:
        """What durable saves then do is to take a ring."""
        for slot in list(self.allocating):
            if slot in self.allocating:
                self.end_allocation(slot, is_there=False)
        for needs in list(self.making_rings):
            self.end_rings(needs, are_there=True)

    @precondition(lambda self: bool(self.making_rings))
    @rule(data=st.data(), are_there=st.booleans())
    def rings_are_made(self, data: st.DataObject, are_there: bool) -> None:
        self.end_rings(data.draw(st.sampled_from(self.making_rings)), are_there=are_there)

    @precondition(lambda self: bool(self.ending))
    @rule()
    def storage_is_done_with_what_came_to_nothing(self) -> None:
        for attempt in list(self.ending):
            self.end_cleaning(attempt)

    @precondition(lambda self: bool(self.persisting))
    @rule(data=st.data())
    def storage_breaks(self, data: st.DataObject) -> None:
        self.break_writing(data.draw(st.sampled_from(list(self.persisting))))

    @precondition(lambda self: bool(self.persisting))
    @rule(data=st.data(), is_stored=st.booleans())
    def persist_ends(self, data: st.DataObject, is_stored: bool) -> None:
        attempt = data.draw(st.sampled_from(list(self.persisting)))
        if self.is_complete(attempt) or not is_stored:
            self.end_persist(attempt, is_stored=is_stored)

    @precondition(lambda self: self.moves > 0)
    @rule(seconds=st.sampled_from([0.1, 0.1, GRANT_S + 1, CAPTURE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    # ── what goes wrong ──────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.moves > 0 and bool(self.trainers()))
    @rule(data=st.data(), fate=st.sampled_from(["dies", "is cut off", "connects twice"]))
    def a_rank_is_lost(self, data: st.DataObject, fate: str) -> None:
        """Its line breaks; whether its process died is not told."""
        process = self.one(data, self.trainers())
        process.alive = fate != "dies"
        self.hang_up(process)
        if fate == "connects twice":  # before its old line was seen to be broken
            self.join(process)
        else:
            self.carry_out(self.keeper.lost(process.rank))

    @precondition(lambda self: bool(self.away()))
    @rule()
    def all_come_back(self) -> None:
        for process in self.away():
            self.join(process)

    @precondition(lambda self: bool(self.zombies()))
    @rule(data=st.data())
    def a_zombie_dies(self, data: st.DataObject) -> None:
        self.one(data, self.zombies()).alive = False

    @precondition(lambda self: bool(self.lost_copiers()))
    @rule(data=st.data(), is_whole=st.booleans())
    def a_lost_copier_ends(self, data: st.DataObject, is_whole: bool) -> None:
        process, slot = data.draw(st.sampled_from(self.lost_copiers()))
        self.end_lost_copy(process, slot, is_whole=is_whole)

    @precondition(lambda self: self.moves > 2)
    @rule(world=worlds, data=st.data(), all_die=st.booleans())
    def ranks_start_anew(self, world: int, data: st.DataObject, all_die: bool) -> None:
        for process in self.processes:
            process.alive &= not all_die
        self.begin(world)
        held = self.keeper.attempts.complete()
        restored = data.draw(st.sampled_from([None, *held]))
        if restored is not None:
            self.restore(restored)
        self.moves = 0

    @precondition(lambda self: self.moves > 2)
    @rule()
    def keeper_dies(self) -> None:
        self.restart_keeper()
        self.moves = 0

    # ── what must hold ───────────────────────────────────────────────────────────────────

    @invariant()
    def what_is_called_complete_is_whole_and_of_one_attempt(self) -> None:
        self.check_complete()

    @invariant()
    def the_newest_complete_generation_is_never_lost(self) -> None:
        self.check_newest()

    @invariant()
    def no_slot_that_may_be_written_is_free(self) -> None:
        self.check_slots()

    @invariant()
    def a_ring_is_never_a_snapshot(self) -> None:
        self.check_rings()

    @invariant()
    def nobody_waits_for_a_rank_that_is_not_there(self) -> None:
        self.check_waits()

    @invariant()
    def what_was_to_be_durable_stays_ordered_until_it_or_something_newer_is(self) -> None:
        self.check_order()

    def teardown(self) -> None:
        if not self.is_broken:
            self.check_end()


class OnSeveralHosts(HostedWorld, Handoff):
    """The same where ranks are on several hosts, each with a keeper and memory of its own."""

    @initialize(world=worlds, hosts=st.integers(1, 3))
    def begin_with_hosts(self, world: int, hosts: int) -> None:
        self.hosts = hosts
        self.start(world)

    begin_with = None  # type: ignore[assignment]

    @precondition(lambda self: self.moves > 0 and len(self.in_reach) > 1)
    @rule(data=st.data(), is_stored=st.booleans())
    def a_host_is_lost(self, data: st.DataObject, is_stored: bool) -> None:
        host = data.draw(st.sampled_from(sorted(self.in_reach - {0})))
        self.lose_host(host, is_stored=is_stored)

    @precondition(lambda self: bool(self.lost_hosts()))
    @rule(data=st.data(), is_empty=st.booleans())
    def a_host_returns(self, data: st.DataObject, is_empty: bool) -> None:
        self.host_returns(data.draw(st.sampled_from(self.lost_hosts())), is_empty=is_empty)

    @precondition(lambda self: bool(self.layouts_told))
    @rule(data=st.data())
    def a_host_has_no_room_for_a_layout(self, data: st.DataObject) -> None:
        told = data.draw(st.sampled_from(sorted(self.layouts_told)))
        self.find_no_room_for_layout(*told)

    @precondition(lambda self: self.moves > 2)
    @rule(hosts=st.integers(1, 3))
    def the_next_start_is_on_so_many_hosts(self, hosts: int) -> None:
        for process in self.processes:
            process.alive = False
            self.hang_up(process)  # what its host holds goes first, by where the ranks were
        self.hosts = hosts
        self.begin(max(self.world, hosts))
        self.moves = 0


@pytest.mark.promise
def test_a_durable_save_that_memory_keeps_no_more_is_told_while_a_rank_stays_away() -> None:
    """It waited for storage; a host came back with nothing, and the rank that was there did not."""
    durable = Save(durable=True, exact=False, values_bytes=0)
    world = OnSeveralHosts()
    world.hosts = 1
    world.start(3)
    world.all_goes_well(durable, False)
    for process in world.processes:
        world.hang_up(process)
        process.alive = False
    world.hosts = 3
    world.begin(3)
    world.all_goes_well(durable, False)
    assert world.owed and len(world.persisting) == 1, "storage writes what came before"
    world.lose_host(2, is_stored=False)
    world.host_returns(2, is_empty=True)
    world.check_end()


class WherePlanningTakesLong(OnSeveralHosts):
    """Hosts answer when they have planned their images; all else may happen before."""

    is_planned_at_once = False

    @precondition(lambda self: bool(self.planning))
    @rule(data=st.data())
    def images_are_planned(self, data: st.DataObject) -> None:
        self.end_planning(data.draw(st.sampled_from(self.planning)))


class WhereLateRanksAreWaitedForAMoment(OnSeveralHosts):
    """The next update comes so soon after a save that its copy has to begin at once."""

    spare_ms = 150


MACHINES = (Handoff, OnSeveralHosts, WherePlanningTakesLong, WhereLateRanksAreWaitedForAMoment)

FAST = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


def test_the_rules_hold_whatever_happens() -> None:
    run_state_machine_as_test(Handoff, settings=FAST)


def test_the_rules_hold_on_several_hosts_of_which_some_are_lost_and_come_back() -> None:
    run_state_machine_as_test(OnSeveralHosts, settings=FAST)


def test_the_rules_hold_while_hosts_plan_the_images_of_a_new_layout() -> None:
    run_state_machine_as_test(WherePlanningTakesLong, settings=FAST)


def test_the_rules_hold_where_late_ranks_are_waited_for_a_moment_only() -> None:
    run_state_machine_as_test(
        WhereLateRanksAreWaitedForAMoment, settings=settings(FAST, max_examples=100)
    )


def test_a_ring_that_nobody_was_given_is_a_slot_like_others_when_hosts_are_renumbered() -> None:
    world = HostedWorld()
    world.hosts = 2
    world.start(2)
    for process in world.trainers():
        world.make_ask(process, Save(durable=True, exact=True, values_bytes=10))
    for slot in list(world.allocating):
        world.end_allocation(slot, is_there=False)
    here, there = sorted(world.making_rings)
    world.end_rings(there, are_there=True)
    world.end_rings(here, are_there=False)  # so neither is given to a rank
    assert world.keeper.slots[there[0].slot].is_ring
    world.begin(2)
    assert not world.keeper.slots[there[0].slot].is_ring
    world.check_rings()
    world.check_end()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rules_hold_on_several_hosts_for_long() -> None:
    long = settings(FAST, max_examples=5000, stateful_step_count=100, derandomize=False)
    run_state_machine_as_test(OnSeveralHosts, settings=long)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rules_hold_whatever_happens_for_long() -> None:
    long = settings(FAST, max_examples=5000, stateful_step_count=100, derandomize=False)
    run_state_machine_as_test(Handoff, settings=long)


# ── the machine finds what it is there to find ───────────────────────────────────────────────


class ForgetsTheNewest(Slots):
    """As with two slots: one rank copies n + 2 over n while another still copies n + 1."""

    def is_retained(self, slot: Slot) -> bool:
        is_newest = slot.state == "captured" and slot.attempt == self.attempts.newest
        return super().is_retained(slot) and not is_newest


class ForgetsWhatIsRestored(Slots):
    def is_retained(self, slot: Slot) -> bool:
        is_only_pinned = slot.attempt == self.attempts.pinned != self.attempts.newest
        return super().is_retained(slot) and not (slot.state == "captured" and is_only_pinned)


class ForgetsWhatIsPersisted(Slots):
    def is_retained(self, slot: Slot) -> bool:
        attempt = self.attempts.get(slot.attempt)
        is_newest = slot.attempt == self.attempts.newest
        is_busy = attempt is not None and attempt.persisting and not is_newest
        return super().is_retained(slot) and not (slot.state == "captured" and is_busy)


class ForgetsWhoMayStillWrite(Slots):
    def reclaim(self, attempt: Attempt) -> None:
        for slot in attempt.slots.values():
            if slot in self:
                self[slot].writer = None
        super().reclaim(attempt)


class ForgetsThatASlotWasGivenAway(Slots):
    def forget(self, slot: Slot) -> None:
        slot.free()


class TakesOneRanksWordForAnother(Slots):
    def writer_stopped_all(self, writer: SlotWriter, rank: int, incarnation: int) -> None:
        for slot in self.values():
            if slot.state == "quarantined" and slot.incarnation == incarnation:
                slot.free()


class TakesAProcessForItsSuccessor(Slots):
    def writer_stopped_all(self, writer: SlotWriter, rank: int, incarnation: int) -> None:
        for slot in self.values():
            if slot.state == "quarantined" and slot.rank == rank:
                slot.free()


class TakesAQuarantinedRing(Slots):
    def reclaim(self, attempt: Attempt) -> None:
        super().reclaim(attempt)
        for slot in self.quarantined():
            if slot.is_ring:
                slot.free()


class TakesARingForAWholeSlot(Slots):
    def reclaim(self, attempt: Attempt) -> None:
        super().reclaim(attempt)
        for slot in self.values():
            if slot.state == "free":
                slot.is_ring, slot.capacity_bytes = False, self.on(0).capacity_bytes


@pytest.mark.parametrize(
    "broken",
    [
        ForgetsTheNewest,
        ForgetsWhatIsRestored,
        ForgetsWhatIsPersisted,
        ForgetsWhoMayStillWrite,
        ForgetsThatASlotWasGivenAway,
        TakesOneRanksWordForAnother,
        TakesAProcessForItsSuccessor,
        TakesAQuarantinedRing,
        TakesARingForAWholeSlot,
    ],
)
def test_slots_given_away_by_a_known_mistake_are_found_out(broken: type[Slots]) -> None:
    class Broken(Handoff):
        slots = broken

    expect_to_be_found_out(Broken)


class BelievesEveryCopierStopped(Coordinator):
    def join(
        self,
        rank: int,
        writer: SlotWriter,
        *,
        is_copying: bool = True,
        order: m.StandingOrder = m.NO_ORDER,
    ) -> list[Action]:
        return super().join(rank, writer, is_copying=False, order=order)


def test_a_keeper_that_believes_every_copier_stopped_is_found_out() -> None:
    class Broken(Handoff):
        coordinator = BelievesEveryCopierStopped

    expect_to_be_found_out(Broken)


class TakesRanksOfDifferentUpdates(Coordinator):
    def _why_apart(self, asks: Mapping[int, m.RequestCapture]) -> str:
        return ""


class LooksAtTwoRanksOnly(Coordinator):
    def _why_apart(self, asks: Mapping[int, m.RequestCapture]) -> str:
        return super()._why_apart({rank: asks[rank] for rank in sorted(asks)[:2]})


@pytest.mark.parametrize("broken", [TakesRanksOfDifferentUpdates, LooksAtTwoRanksOnly])
def test_a_keeper_that_mixes_ranks_of_different_updates_is_found_out(
    broken: type[Coordinator],
) -> None:
    class Broken(Handoff):
        coordinator = broken

    expect_to_be_found_out(Broken)


def with_lifecycle(broken: type[AttemptLifecycle]) -> type[Coordinator]:
    class Mistaken(Coordinator):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.lifecycle.__class__ = broken

    return Mistaken


class CallsARingASnapshot(AttemptLifecycle):
    def captured(self, rank: int, seal: m.Captured, now_s: float) -> list[Action]:
        actions = super().captured(rank, seal, now_s)
        attempt = self.attempts.get(seal.attempt)
        if attempt is not None and attempt.phase == "draining":
            attempt.phase, self.attempts.newest = "complete", attempt.id
        return actions


class PromisesWhatStorageCouldNotTake(AttemptLifecycle):
    def persist_failed(self, attempt_id: str, reason: str) -> list[Action]:
        attempt = self.attempts.get(attempt_id)
        if attempt is not None and attempt.phase == "draining":
            return self.persisted(attempt_id)
        return super().persist_failed(attempt_id, reason)


class ForgetsAllThatRingsMadeDurable(AttemptLifecycle):
    def write_broke(self, attempt_id: str, reason: str) -> list[Action]:
        if attempt_id in self.attempts and self.attempts[attempt_id].is_ring:
            del self.attempts[attempt_id]
        return []


@pytest.mark.parametrize(
    "broken",
    [CallsARingASnapshot, PromisesWhatStorageCouldNotTake, ForgetsAllThatRingsMadeDurable],
)
def test_a_keeper_that_is_mistaken_about_rings_is_found_out(
    broken: type[AttemptLifecycle],
) -> None:
    class Broken(Handoff):
        coordinator = with_lifecycle(broken)

    expect_to_be_found_out(Broken)


class WaitsForWhoIsNotThere(Coordinator):
    def _skip_waiting(self, reason: str) -> list[Action]:
        return []


def test_a_keeper_that_has_ranks_wait_for_one_that_is_not_there_is_found_out() -> None:
    class Broken(Handoff):
        coordinator = WaitsForWhoIsNotThere

    expect_to_be_found_out(Broken)


class BelievesThatWhatIsBegunIsPaid(DurabilityQueue):
    def start(self, attempt: Attempt) -> list[Action]:
        actions = super().start(attempt)
        self.order = self.order.pay(attempt.step)
        return actions


class ForgetsWhatWasAborted(DurabilityQueue):
    def aborted(self, attempt: Attempt) -> list[Action]:
        self.order = self.order.pay(attempt.step)
        return super().aborted(attempt)


class TakesOlderSnapshotsForPayment(DurabilityQueue):
    def persisted(self, attempt: Attempt) -> list[Action]:
        actions = super().persisted(attempt)
        self.order = m.NO_ORDER
        return actions


class ForgetsWhatAnEarlierKeeperWasTold(DurabilityQueue):
    def add(self, order: m.StandingOrder) -> None:
        super().add(order if order.first == order.last else m.NO_ORDER)


@pytest.mark.parametrize(
    "broken",
    [
        BelievesThatWhatIsBegunIsPaid,
        ForgetsWhatWasAborted,
        TakesOlderSnapshotsForPayment,
        ForgetsWhatAnEarlierKeeperWasTold,
    ],
)
def test_a_keeper_that_forgets_what_was_to_be_durable_is_found_out(
    broken: type[DurabilityQueue],
) -> None:
    class Forgetful(Coordinator):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.durability = self.lifecycle.durability = broken(self.attempts)

    class Broken(Handoff):
        coordinator = Forgetful

    expect_to_be_found_out(Broken)


class GivesRanksAnyHostsSlots(Slots):
    def begin(self, hosts: Mapping[int, int]) -> None:
        super().begin(dict.fromkeys(hosts, 0))


class KeepsCountingLostHosts(Slots):
    def lose(self, host: int) -> list[Slot]:
        return []


@pytest.mark.parametrize("broken", [GivesRanksAnyHostsSlots, KeepsCountingLostHosts])
def test_mistakes_about_whose_slots_they_are_are_found_out(broken: type[Slots]) -> None:
    class Broken(OnSeveralHosts):
        slots = broken

    expect_to_be_found_out(Broken)


class TakesGrantsThatLeftForUntold(AttemptLifecycle):
    def layout_not_stored(self, hash_: str, reason: str, host: int = 0) -> list[Action]:
        return super().layout_not_stored(hash_, reason)


def test_a_keeper_that_takes_grants_that_left_for_untold_is_found_out() -> None:
    class Broken(OnSeveralHosts):
        coordinator = with_lifecycle(TakesGrantsThatLeftForUntold)

    expect_to_be_found_out(Broken)


def expect_to_be_found_out(broken: type[Handoff]) -> None:
    # Sets of text come in another order in each process, so what is drawn is never quite the same.
    quick = settings(FAST, phases=[Phase.generate], max_examples=5000, print_blob=False)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(broken, settings=quick)
