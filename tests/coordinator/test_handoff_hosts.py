"""Ranks on several hosts: each is given slots of its own host, all are given one or none is."""

from __future__ import annotations

import pytest

from holdfast.coordinator.actions import (
    Action,
    AllocateRings,
    AllocateSlots,
    GrantSlot,
    StartPersist,
    StoreLayout,
)
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.slots import Slot, host_of, number_of, slot_id_of
from holdfast.protocol import messages as m
from support.coordinator.coordinators import CAPTURE_S, Actions, Keeper, granted, of, told

PLACES = (
    m.HostEntry(id="a", ranks=(0, 3)),
    m.HostEntry(id="b", ranks=(1,)),
    m.HostEntry(id="c", ranks=(2,)),
)
HOST = {0: 0, 3: 0, 1: 1, 2: 2}


class OnHosts(Keeper):
    """A keeper of four ranks on hosts a, b and c, of which a is its own."""

    def begin(self, incarnation: int, world: int) -> Actions:
        self.world = world
        actions = self.c.begin(incarnation, f"{incarnation:08x}", world, PLACES)
        for host in (1, 2):
            self.c.attach(host, (), ())
        for rank in range(world):
            self.c.join(rank, self.writer(rank))
        return actions

    def held_by(self, host: int, *, keep: bool = True) -> tuple[list[Slot], list[Attempt]]:
        """What the slots of a host say now."""
        slots: list[Slot] = []
        attempts: dict[str, Attempt] = {}
        for slot in self.c.slots.values():
            if host_of(slot.id) == host and keep:
                attempt = self.c.attempts.get(slot.attempt)
                again = Slot(slot.id, slot.capacity_bytes, "free")
                slots.append(again)
                if slot.state == "captured" and attempt is not None:
                    again.state, again.attempt, again.rank = "captured", slot.attempt, slot.rank
                    said = Attempt(attempt.id, attempt.incarnation, attempt.step, 4, attempt.layout)
                    attempts.setdefault(attempt.id, said).slots[slot.rank] = slot.id
        return slots, list(attempts.values())


@pytest.fixture
def keeper() -> OnHosts:
    return OnHosts(4)


def test_a_slots_number_tells_its_host_and_its_number_there() -> None:
    assert [slot_id_of(0, n) for n in range(3)] == [0, 1, 2]
    for host, number in ((1, 0), (3, 77), (1000, (1 << 24) - 1)):
        id_ = slot_id_of(host, number)
        assert (host_of(id_), number_of(id_)) == (host, number)


def test_every_rank_is_given_a_slot_of_its_own_host(keeper: OnHosts) -> None:
    for step in range(1, 8):
        attempt = keeper.capture(step)
        slots = keeper.c.attempts[attempt].slots
        assert {rank: host_of(slot) for rank, slot in slots.items()} == HOST
        keeper.with_memory(keeper.c.lifecycle.preallocate())
    counts = [sum(host_of(slot) == host for slot in keeper.c.slots) for host in range(3)]
    assert counts == [6, 3, 3]


def test_slots_of_each_host_are_as_large_as_its_own_images() -> None:
    keeper = OnHosts(4)
    for rank, values in ((0, 10), (1, 10_000_000), (2, 10), (3, 10)):
        keeper.ask(rank, 1, values=values)
    sizes = {host_of(id_): slot.capacity_bytes for id_, slot in keeper.c.slots.items()}
    assert sizes[0] == sizes[2] < sizes[1]


def test_no_room_on_one_host_is_no_slot_for_anybody(keeper: OnHosts) -> None:
    keeper.has_memory = False
    needed = of(keeper.ask_all(1), AllocateSlots)
    by_host = {host_of(each.slot): each.slot for each in needed}
    assert by_host.keys() == {0, 1, 2}
    keeper.c.lifecycle.allocated(by_host[0])
    actions = keeper.c.lifecycle.allocation_failed(by_host[1], "on host b: too small")
    assert not of(actions, GrantSlot)
    (aborted,) = told(actions, m.Aborted)
    assert "on host b" in aborted.reason
    assert not keeper.c.attempts


def granted_rings(keeper: OnHosts, step: int) -> list[Action]:
    """What follows when host c has room for rings alone, and rings are made on all."""
    keeper.has_memory = False
    made = of(keeper.ask_all(step, durable=True, exact=True), AllocateSlots)
    actions: list[Action] = []
    for each in made:
        if host_of(each.slot) == 2:
            actions += keeper.c.lifecycle.allocation_failed(each.slot, "on host c: too small")
        else:
            actions += keeper.c.lifecycle.allocated(each.slot)
    rings = [action for action in actions if isinstance(action, AllocateRings)]
    assert sorted(host_of(ring.needs[0].slot) for ring in rings) == [0, 1, 2]
    assert {host_of(n.slot) for ring in rings for n in ring.needs} == {0, 1, 2}
    for ring in rings:
        last = keeper.c.lifecycle.slots_made(
            {n.slot: (n.head_bytes + (2 << 20), 2 << 20) for n in ring.needs}
        )
    return last


def test_a_durable_save_takes_rings_on_all_hosts_when_one_has_no_room(keeper: OnHosts) -> None:
    last = granted_rings(keeper, 1)
    assert {host_of(give.slot) for give in of(last, GrantSlot)} == {0, 1, 2}


def test_it_is_durable_before_old_ones_are_pruned_and_the_next_one_waits_for_that(
    keeper: OnHosts,
) -> None:
    """A ring that is granted while storage deletes stands full, and its rank with it."""
    attempt = granted(granted_rings(keeper, 1))
    for rank in HOST:
        keeper.seal(rank, attempt)
    (durable,) = told(keeper.c.lifecycle.persisted(attempt), m.Durable)
    assert durable.step == 1
    assert not of(keeper.ask_all(2, durable=True, exact=True), GrantSlot)
    assert of(keeper.c.lifecycle.persist_ended(attempt), GrantSlot)


# ── a host is lost ───────────────────────────────────────────────────────────────────────────


def test_what_is_being_captured_comes_to_nothing_when_a_host_is_lost(keeper: OnHosts) -> None:
    attempt = granted(keeper.ask_all(1))
    keeper.seal(1, attempt)
    actions = keeper.c.detach(1, "b")
    (aborted,) = told(actions, m.Aborted)
    assert "the keeper of b is out of reach" in aborted.reason
    assert {host_of(slot) for slot in keeper.c.slots} == {0, 2}


def test_whoever_asks_while_a_host_is_away_is_answered_at_once(keeper: OnHosts) -> None:
    keeper.ask(0, 5)
    (waited,) = told(keeper.c.detach(2, "c"), m.Skip)
    assert (waited.step, waited.is_passing) == (5, True)
    (skip,) = told(keeper.ask(3, 6, durable=True, exact=True), m.Skip)
    assert "the keeper of c" in skip.reason and skip.is_passing
    # Back, and its rank asks for what the others were refused: it is not to wait for them.
    keeper.c.attach(2, (), ())
    keeper.c.join(2, keeper.writer(2))
    (late,) = told(keeper.ask(2, 6), m.Skip)
    assert late.is_passing
    assert granted(keeper.ask_all(7))


def test_nothing_is_complete_while_a_part_of_it_is_out_of_reach(keeper: OnHosts) -> None:
    first, second = keeper.capture(1), keeper.capture(2)
    held = keeper.held_by(1)
    keeper.c.detach(1, "b")
    assert keeper.c.attempts.complete() == []
    assert keeper.c.durability.not_durable() == ""
    assert not of(keeper.c.durability.make_durable(2), StartPersist)
    assert {part.id for part in keeper.c.attempts.incomplete()} == {first, second}
    keeper.c.attach(1, *held)
    assert [whole.id for whole in keeper.c.attempts.complete()] == [first, second]
    assert keeper.c.attempts.newest == second


def test_a_host_without_room_for_a_layout_says_so_when_its_ranks_may_be_copying(
    keeper: OnHosts,
) -> None:
    keeper.capture(1)
    keeper.with_memory(keeper.c.lifecycle.preallocate())
    keeper.c.join(1, keeper.writer(1))  # the layout is told again
    actions = keeper.ask_all(2)
    (kept,), attempt = of(actions, StoreLayout), granted(actions)
    given = keeper.slots(attempt)
    (aborted,) = told(
        keeper.c.lifecycle.layout_not_stored(kept.hash, "on host b: no room", 1), m.Aborted
    )
    assert (aborted.attempt, aborted.reason) == (attempt, "on host b: no room")
    assert {keeper.c.slots[slot].state for slot in given} == {"quarantined"}
    assert not given & keeper.slots(granted(keeper.ask_all(3)))
    for rank in range(4):
        keeper.c.lifecycle.abort_capture(rank, m.AbortCapture(attempt=attempt, reason="given up"))
    assert {keeper.c.slots[slot].state for slot in given} == {"free"}


def test_a_host_without_room_for_a_layout_frees_slots_nobody_was_told_of(keeper: OnHosts) -> None:
    keeper.has_memory = False
    actions = keeper.ask_all(1)
    (kept,) = of(actions, StoreLayout)
    first, *others = [made.slot for made in of(actions, AllocateSlots)]
    keeper.c.lifecycle.allocated(first)
    assert told(keeper.c.lifecycle.layout_not_stored(kept.hash, "on host b: no room", 1), m.Aborted)
    assert keeper.c.slots[first].state == "free"
    assert all(keeper.c.slots[other].is_spare for other in others)


def test_what_a_host_has_lost_is_given_up_when_captures_go_on(keeper: OnHosts) -> None:
    keeper.capture(1)
    lost = keeper.capture(2)
    keeper.c.detach(1, "b")
    keeper.c.attach(1, (), (), 7)
    keeper.c.join(1, keeper.writer(1))
    for step in (3, 4, 5):
        keeper.capture(step)
        keeper.with_memory(keeper.c.lifecycle.preallocate())
    assert lost not in keeper.c.attempts
    assert keeper.c.attempts.incomplete() == []
    assert min(number_of(id_) for id_ in keeper.c.slots if host_of(id_) == 1) >= 7


def test_an_attempt_is_not_completed_by_parts_of_another(keeper: OnHosts) -> None:
    attempt = keeper.capture(1)
    slots, parts = keeper.held_by(1)
    keeper.c.detach(1, "b")
    for wrong in (
        Attempt(attempt, 1, 2, 4, parts[0].layout, slots=dict(parts[0].slots)),  # another step
        Attempt(attempt, 1, 1, 4, parts[0].layout, slots={0: parts[0].slots[1]}),  # a rank twice
    ):
        keeper.c.attach(1, slots, [wrong])
        assert keeper.c.attempts.complete() == []
        assert keeper.c.slots[slots[0].id].state == "free"
        slots[0].state = "captured"
        keeper.c.detach(1, "b")


def test_a_checkpoint_whose_receipts_were_all_in_counts_though_a_host_was_lost_since(
    keeper: OnHosts,
) -> None:
    attempt = keeper.capture(1, durable=True)
    keeper.c.detach(1, "b")
    (durable,) = told(keeper.c.lifecycle.persisted(attempt), m.Durable)
    assert durable.step == 1
    assert not keeper.c.is_busy()


@pytest.mark.parametrize("returns", [True, False])
def test_a_save_that_waits_for_storage_is_not_waited_for_for_ever_when_a_host_is_lost(
    keeper: OnHosts, *, returns: bool
) -> None:
    first = keeper.capture(1, durable=True)
    waiting = keeper.capture(2, durable=True)  # is to be durable when storage is free
    keeper.c.tick(0.0)
    held = keeper.held_by(1)
    keeper.c.detach(1, "b")
    assert not of(keeper.c.lifecycle.persisted(first), StartPersist), "it is not all in reach"
    assert not told(keeper.c.tick(CAPTURE_S), m.NotDurable)
    if returns:
        keeper.c.attach(1, *held)
        assert of(keeper.c.tick(CAPTURE_S + 1), StartPersist) == [StartPersist(waiting)]
        return
    (lost,) = told(keeper.c.tick(CAPTURE_S + 1), m.NotDurable)
    assert (lost.step, lost.since) == (2, 1) and "the keeper of b is out of reach" in lost.reason
    assert not told(keeper.c.tick(CAPTURE_S + 2), m.NotDurable)
    assert keeper.c.durability.is_requested, "the next snapshot is made durable for it"


# ── another start, another keeper ────────────────────────────────────────────────────────────


def test_an_incarnation_finds_what_all_hosts_hold_when_they_come(keeper: OnHosts) -> None:
    attempt = keeper.capture(1)
    held = {host: keeper.held_by(host) for host in (1, 2)}
    keeper.c.begin(2, "00000002", 4, PLACES)
    assert set(keeper.c.away.values()) == {"b", "c"}
    assert keeper.c.attempts.complete() == []
    for host, (slots, parts) in held.items():
        keeper.c.attach(host, slots, parts)
    assert [whole.id for whole in keeper.c.attempts.complete()] == [attempt]
    assert keeper.c.attempts.pinned == attempt
    assert not keeper.c.away


def test_what_is_restored_from_stays_pinned_when_a_host_goes_and_comes_back_meanwhile(
    keeper: OnHosts,
) -> None:
    older, newest = keeper.capture(1), keeper.capture(2)
    held = {host: keeper.held_by(host) for host in (1, 2)}
    keeper.c.begin(2, "00000002", 4, PLACES)
    for host in (1, 2):
        keeper.c.attach(host, *held[host])
    assert keeper.c.attempts.pinned == newest
    assert keeper.c.pin(older)
    keeper.c.detach(1, "b")
    keeper.c.attach(1, *held[1])
    assert (keeper.c.attempts.pinned, keeper.c.attempts.newest) == (older, newest)
    keeper.c.begin(3, "00000003", 4, PLACES)
    for host in (1, 2):
        keeper.c.attach(host, *held[host])
    assert keeper.c.attempts.pinned == newest


def test_a_start_on_one_host_drops_what_is_only_a_part(keeper: OnHosts) -> None:
    attempt = keeper.capture(1)
    keeper.c.begin(2, "00000002", 1)
    assert attempt not in keeper.c.attempts
    assert {slot.state for slot in keeper.c.slots.values()} == {"free"}


def test_a_keeper_that_takes_over_keeps_what_the_incarnation_went_on_from(
    keeper: OnHosts,
) -> None:
    parent, newest = keeper.capture(1), keeper.capture(2)
    held = {host: keeper.held_by(host) for host in range(3)}
    later = OnHosts(4).c
    later.start_over(*held[0], 50)
    later.resume(2, "n", 4, (1, 1), 0.0, PLACES)
    for host in (1, 2):
        later.attach(host, *held[host])
    assert (later.attempts.newest, later.attempts.pinned) == (newest, parent)
    for rank in range(4):
        later.join(
            rank, keeper.writer(rank), order=m.StandingOrder(2, 2) if rank == 2 else m.NO_ORDER
        )
    assert not later.away


def test_a_keeper_that_takes_over_keeps_a_part_that_the_incarnation_went_on_from(
    keeper: OnHosts,
) -> None:
    parent = keeper.capture(1)
    held = {host: keeper.held_by(host) for host in range(2)}  # the third host is lost
    places = (m.HostEntry(id="a", ranks=(0, 2)), m.HostEntry(id="b", ranks=(1,)))
    later = OnHosts(4).c
    later.start_over(*held[0], 50)
    later.resume(2, "n", 3, (1, 1), 0.0, places)
    later.attach(1, *held[1])
    assert later.attempts[parent].is_incomplete
    assert later.attempts.pinned == parent and later.attempts.is_retained(later.attempts[parent])


def test_where_hosts_keep_parity_a_capture_alone_does_not_free_what_was_restored_from(
    keeper: OnHosts,
) -> None:
    parent = keeper.capture(1)
    held = {host: keeper.held_by(host) for host in (1, 2)}
    keeper.c.resume(2, "n", 4, (1, 1), 0.0, PLACES)
    for host in (1, 2):
        keeper.c.attach(host, *held[host])
    own = Attempt("own", 2, 2, 1, "l", phase="complete", slots={0: 99})
    keeper.c.attempts["own"] = own
    keeper.c.attempts.protects = True
    keeper.c.attempts.pinned = None
    keeper.c.pin_again()
    assert keeper.c.attempts.pinned == parent
    keeper.c.attempts.protects = False
    keeper.c.pin_again()
    assert keeper.c.attempts.pinned is None
    keeper.c.begin(3, "o", 4, PLACES)
    keeper.c.attempts.protects = True
    keeper.c.attempts.pinned = None
    keeper.c.pin_again()
    assert keeper.c.attempts.pinned is None, "nothing was taken over: the ranks say it"


def test_a_keeper_that_decides_again_uses_no_number_twice(keeper: OnHosts) -> None:
    keeper.c.start_over((), (), 9)
    keeper.c.begin(2, "00000002", 4, PLACES)
    for host in (1, 2):
        keeper.c.attach(host, (), (), 5)
    for rank in range(4):
        keeper.c.join(rank, keeper.writer(rank))
    keeper.c.adopt(0.0)
    made = of(keeper.ask_all(1), AllocateSlots)
    assert sorted(made_slot.slot for made_slot in made) == [
        9,
        10,
        slot_id_of(1, 5),
        slot_id_of(2, 5),
    ]


def test_a_start_on_one_host_keeps_what_storage_is_still_writing(keeper: OnHosts) -> None:
    attempt = keeper.capture(1, durable=True)
    keeper.c.begin(2, "00000002", 1)
    assert keeper.c.attempts[attempt].is_incomplete
    keeper.c.lifecycle.persist_failed(attempt, "a host is gone")
    assert not keeper.c.is_busy()
    assert attempt not in keeper.c.attempts
    assert {slot.state for slot in keeper.c.slots.values()} == {"free"}


def test_on_the_one_host_that_is_left_a_part_outlives_what_storage_makes_of_it(
    keeper: OnHosts,
) -> None:
    attempt = keeper.capture(1, durable=True)
    keeper.c.begin(2, "00000002", 1, (m.HostEntry(id="a", ranks=(0,)),))  # with parity
    assert keeper.c.pin(attempt)
    keeper.c.lifecycle.persist_failed(attempt, "a host is gone")
    assert keeper.c.attempts[attempt].is_incomplete and keeper.c.pin(attempt)
    assert keeper.c.attempts.is_retained(keeper.c.attempts[attempt])
    assert "free" not in {
        keeper.c.slots[n].state for n in keeper.c.attempts[attempt].slots.values()
    }


def test_an_attempt_is_forgotten_when_storage_has_it_and_nothing_of_it_is_in_reach(
    keeper: OnHosts,
) -> None:
    slot = Slot(slot_id_of(1, 0), 2 << 20, "captured", "old", 0, 4096)
    keeper.c.attach(1, [slot], [Attempt("old", 1, 0, 1, "layout", slots={0: slot.id})])
    assert of(keeper.c.durability.start_newest(), StartPersist)
    keeper.c.detach(1, "b")
    assert keeper.c.attempts["old"].persisting
    keeper.c.lifecycle.persisted("old")
    assert "old" not in keeper.c.attempts


def test_only_a_part_newer_than_all_that_is_whole_or_durable_is_worth_keeping(
    keeper: OnHosts,
) -> None:
    keeper.capture(1)
    assert not keeper.c.holds_newest_part()
    keeper.c.detach(1, "b")
    assert keeper.c.holds_newest_part()
    keeper.c.attach(1, (), (), 7)
    keeper.c.join(1, keeper.writer(1))
    keeper.with_memory(keeper.c.lifecycle.preallocate())
    second = keeper.capture(2, durable=True)
    assert keeper.c.attempts.incomplete()
    assert not keeper.c.holds_newest_part()
    keeper.c.detach(1, "b")
    assert keeper.c.holds_newest_part()  # storage has not taken it yet
    keeper.c.lifecycle.persisted(second)
    assert not keeper.c.holds_newest_part()


def test_an_attempt_of_which_nothing_is_in_reach_is_forgotten(keeper: OnHosts) -> None:
    slot = Slot(slot_id_of(1, 0), 2 << 20, "captured", "old", 0, 4096)
    keeper.c.attach(1, [slot], [Attempt("old", 1, 0, 2, "layout", slots={0: slot.id})])
    assert "old" in keeper.c.attempts
    keeper.c.detach(1, "b")
    assert "old" not in keeper.c.attempts


def test_no_spare_is_made_on_a_host_whose_slots_could_not_be_made(keeper: OnHosts) -> None:
    attempt = granted(keeper.ask_all(1))
    for rank in range(4):
        keeper.seal(rank, attempt)
    spares = of(keeper.c.lifecycle.preallocate(), AllocateSlots)
    on_b = [spare.slot for spare in spares if host_of(spare.slot) == 1]
    keeper.c.lifecycle.allocation_failed(on_b[0], "full")
    assert all(
        host_of(each.slot) != 1 for each in of(keeper.c.lifecycle.preallocate(), AllocateSlots)
    )


def test_what_loses_an_image_while_it_is_written_is_a_part_when_that_is_over(
    keeper: OnHosts,
) -> None:
    attempt = keeper.capture(5, durable=True)
    slot = keeper.c.attempts[attempt].slots[1]
    keeper.c.lifecycle.image_lost(slot, attempt)
    keeper.c.lifecycle.persist_failed(attempt, "the image of rank 1 is damaged")
    assert keeper.c.attempts[attempt].lacks() == [1] and keeper.c.slots[slot].state == "free"
    assert keeper.c.attempts.newest is None


def test_an_image_that_was_damaged_on_a_host_that_came_back_meanwhile_is_forgotten(
    keeper: OnHosts,
) -> None:
    attempt = keeper.capture(5, durable=True)
    slot = keeper.c.attempts[attempt].slots[1]
    keeper.c.lifecycle.image_lost(slot, attempt)
    keeper.c.detach(1, "b")
    keeper.c.attach(1, [Slot(slot, 1 << 20, "free")], ())  # it says itself that it is damaged
    keeper.c.slots[slot].state, keeper.c.slots[slot].attempt = "granted", "another"
    keeper.c.lifecycle.persist_failed(attempt, "the keeper of b is out of reach")
    assert keeper.c.slots[slot].state == "granted"
