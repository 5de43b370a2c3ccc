"""Which slots are given away, which are kept, and what a later keeper makes of them."""

from __future__ import annotations

import pytest

from holdfast.coordinator.actions import (
    AgreeLayout,
    AllocateRings,
    AllocateSlots,
    PlanImages,
    RemoveSlot,
)
from holdfast.coordinator.attempt_lifecycle import ONLY_DURABLE
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.layouts import Agreement
from holdfast.coordinator.slots import BEING_MADE, Slot, SlotWriter
from holdfast.format.manifest import ImageId
from holdfast.geometry.layout import merge, table_from_json, table_hash
from holdfast.protocol import messages as m
from holdfast.protocol.arena import IMAGE_START
from holdfast.protocol.image_plan import plan_sizes, share
from support.coordinator.coordinators import CAPTURE_S, GRANT_S, Keeper, granted, of, table, told

# ── slots ────────────────────────────────────────────────────────────────────────────────────


def test_a_slot_tells_the_image_that_was_found_in_it() -> None:
    slot, image = Slot(3, 8192, "captured"), ImageId(1, 4096, "h", "t")
    slot.image = image
    assert slot.image == image
    assert (slot.id, slot.capacity_bytes, slot.state) == (3, 8192, "captured")


@pytest.mark.promise
def test_the_newest_generation_stays_and_the_oldest_goes_first() -> None:
    keeper = Keeper(1)
    attempts = [keeper.capture(step) for step in range(2)]
    keeper.with_memory(keeper.c.lifecycle.preallocate())
    attempts.append(keeper.capture(2))
    one, two, three = (keeper.slots(attempt) for attempt in attempts)
    assert len(one | two | three) == 3
    newest = granted(keeper.ask_all(3))
    assert keeper.slots(newest) == one
    assert [a.step for a in keeper.c.attempts.complete()] == [1, 2]


@pytest.mark.promise
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_the_first_slots_leave_room_for_rings_and_take_all_else(ranks: int) -> None:
    """Without it a run whose memory has room for one snapshot, and for little more, would keep its
    first one, and make nothing durable ever after.
    """
    keeper = Keeper(ranks)
    left = {made.leave_bytes for made in of(keeper.ask_all(1), AllocateSlots)}
    (attempt,) = keeper.c.attempts
    for rank in range(ranks):
        keeper.seal(rank, attempt)
    keeper.has_memory = False
    actions = []
    for refused in of(keeper.ask_all(2, durable=True), AllocateSlots):
        actions += keeper.c.lifecycle.allocation_failed(refused.slot, "no room")
    (rings,) = of(actions, AllocateRings)
    (left_bytes,) = left
    assert share(left_bytes, rings.needs, IMAGE_START), "a durable save would find no room"
    assert not share(left_bytes - (2 << 20), rings.needs, IMAGE_START), "too much is left"


@pytest.mark.promise
def test_what_parity_is_of_stays_however_many_come_after_it() -> None:
    keeper = Keeper(1)
    keeper.c.attempts.protects = True
    protected = keeper.capture(0)
    keeper.c.attempts.pinned_by_parity = frozenset({protected})
    slots = keeper.slots(protected)
    for step in range(1, 6):
        newer = keeper.capture(step)
        keeper.with_memory(keeper.c.lifecycle.preallocate())
        assert keeper.slots(newer).isdisjoint(slots)
    assert keeper.slots(protected) == slots
    keeper.c.attempts.pinned_by_parity = frozenset()
    keeper.capture(6)
    assert protected not in keeper.c.attempts


def test_three_slots_an_image_are_made_and_no_more() -> None:
    keeper = Keeper()
    keeper.capture(0)
    assert len(of(keeper.with_memory(keeper.c.lifecycle.preallocate()), AllocateSlots)) == 4
    for step in range(1, 10):
        assert not of(keeper.ask_all(step), AllocateSlots)
        for rank in range(2):
            keeper.seal(rank, list(keeper.c.attempts)[-1])
        assert keeper.c.lifecycle.preallocate() == []
    assert len(keeper.c.slots) == 6


def test_values_that_grow_over_the_next_size_of_a_slot_do_not_double_the_memory() -> None:
    keeper = Keeper(1)
    capacities = set()
    for step in range(20):
        actions = keeper.ask_all(step, values=1_000_000 if step % 2 else 1_040_000)
        capacities |= {keeper.c.slots.on(0).capacity_bytes}
        keeper.seal(0, granted(actions))
        keeper.with_memory(keeper.c.lifecycle.preallocate())
        assert len(keeper.c.slots) == 3
        assert not of(actions, RemoveSlot)
    assert len(capacities) == 2


def test_slots_that_have_become_too_small_make_room_for_larger_ones() -> None:
    keeper = Keeper(1)
    small = keeper.capture(0)
    keeper.with_memory(keeper.c.lifecycle.preallocate())
    actions = keeper.ask_all(1, values=30_000_000)
    assert len(of(actions, RemoveSlot)) == 2
    assert of(actions, AllocateSlots)[0].capacity_bytes > 30_000_000
    assert keeper.slots(small) <= set(keeper.c.slots)  # the newest stays, whatever its size


def test_a_run_on_fewer_ranks_goes_on_and_gives_the_memory_of_the_others_back() -> None:
    keeper = Keeper(4)
    keeper.capture(0)
    keeper.with_memory(keeper.c.lifecycle.preallocate())
    keeper.begin(2, 1)
    keeper.c.adopt(0.0)
    for step in range(1, 6):
        keeper.capture(step)
    assert len(keeper.c.slots) == 3


def test_a_run_on_fewer_ranks_goes_on_although_two_old_generations_must_stay() -> None:
    keeper = Keeper(2)
    old = keeper.capture(0)
    keeper.begin(2, 1)
    keeper.c.adopt(0.0)
    newest = keeper.capture(1)
    keeper.begin(3, 1)
    assert keeper.c.pin(old)
    keeper.c.adopt(0.0)
    granted(keeper.ask_all(1))
    assert {a.id for a in keeper.c.attempts.complete()} == {old, newest}


def test_memory_that_cannot_be_had_is_told_with_the_reason() -> None:
    keeper = Keeper()
    keeper.has_memory = False
    one, two = of(keeper.ask_all(5), AllocateSlots)
    actions = keeper.c.lifecycle.allocation_failed(one.slot, "shared memory too small")
    (aborted,) = told(actions, m.Aborted)
    assert (aborted.step, aborted.reason) == (5, f"shared memory too small {ONLY_DURABLE}")
    assert keeper.c.lifecycle.allocated(two.slot) == []
    assert keeper.states() == ["free"]


def test_spares_that_cannot_be_had_are_not_asked_for_again() -> None:
    keeper = Keeper(1)
    keeper.capture(0)
    for spare in of(keeper.c.lifecycle.preallocate(), AllocateSlots):
        assert keeper.c.lifecycle.allocation_failed(spare.slot, "no") == []
    assert keeper.c.lifecycle.preallocate() == []


def test_a_save_takes_spares_that_are_still_being_made() -> None:
    keeper = Keeper(1)
    keeper.capture(0)
    keeper.has_memory = False
    spare, _ = of(keeper.c.lifecycle.preallocate(), AllocateSlots)
    actions = keeper.ask_all(1)
    assert not told(actions, m.Skip)
    assert not of(actions, AllocateSlots)
    assert granted(keeper.c.lifecycle.allocated(spare.slot))


def slow_memory() -> tuple[Keeper, list[int]]:
    """A keeper of two ranks that gave up waiting for the first slots, and those slots."""
    keeper = Keeper()
    keeper.has_memory = False
    slots = [allocate.slot for allocate in of(keeper.ask_all(1), AllocateSlots)]
    assert told(keeper.c.cancel_request(0, 1), m.Aborted)
    return keeper, slots


def test_slots_that_were_waited_for_in_vain_are_not_made_a_second_time() -> None:
    keeper, slots = slow_memory()
    for slot in slots:
        assert keeper.c.lifecycle.allocated(slot) == []
    assert keeper.states() == ["free", "free"]
    assert keeper.slots(granted(keeper.ask_all(2))) == set(slots)
    assert len(keeper.c.slots) == 2


def test_no_step_is_held_for_memory_that_was_waited_for_in_vain() -> None:
    keeper, (one, two) = slow_memory()
    keeper.c.lifecycle.allocated(one)
    for step in range(2, 5):
        actions = keeper.ask_all(step)
        assert [skip.reason for skip in told(actions, m.Skip)] == [BEING_MADE]
        assert not of(actions, AllocateSlots)
    assert not keeper.c.is_busy()
    keeper.c.lifecycle.allocated(two)
    assert keeper.slots(granted(keeper.ask_all(5))) == {one, two}


def test_a_save_that_must_be_durable_waits_for_memory_that_is_late() -> None:
    keeper, slots = slow_memory()
    assert not told(keeper.ask_all(2, durable=True, exact=True), m.Skip)
    for slot in slots:
        keeper.c.lifecycle.allocated(slot)
    assert keeper.slots(granted(keeper.c.tick(1.0))) == set(slots)


def test_memory_that_was_late_and_cannot_be_had_is_asked_for_again() -> None:
    keeper, slots = slow_memory()
    for slot in slots:
        keeper.c.lifecycle.allocation_failed(slot, "shared memory too small")
    assert len(of(keeper.ask_all(2), AllocateSlots)) == 2


def test_a_new_incarnation_waits_for_slots_an_older_one_waited_for_in_vain() -> None:
    keeper, slots = slow_memory()
    keeper.begin(2, 2)
    keeper.c.adopt(0.0)
    assert not told(keeper.ask_all(1), m.Skip)
    assert keeper.c.lifecycle.allocated(slots[0]) == []
    assert granted(keeper.c.lifecycle.allocated(slots[1]))


def test_a_spare_that_is_not_begun_is_dropped_but_not_one_that_is_waited_for() -> None:
    keeper = Keeper(1)
    keeper.capture(0)
    keeper.has_memory = False
    spares = [allocate.slot for allocate in of(keeper.c.lifecycle.preallocate(), AllocateSlots)]
    keeper.ask_all(1)
    assert [keeper.c.lifecycle.drop_spare(slot) for slot in spares] == [False, True]
    assert set(keeper.c.slots) == {0, spares[0]}
    assert (
        len(of(keeper.c.lifecycle.preallocate(), AllocateSlots)) == 1
    )  # it is made when it is needed


# ── incarnations ─────────────────────────────────────────────────────────────────────────────


def test_a_new_incarnation_ends_what_the_old_one_was_capturing() -> None:
    keeper = Keeper()
    done = keeper.capture(4)
    begun = granted(keeper.ask_all(5))
    keeper.ask(0, 6)
    actions = keeper.begin(2, 2)
    assert [a.attempt for a in told(actions, m.Aborted)] == [begun]
    assert [a.id for a in keeper.c.attempts.complete()] == [done]
    assert keeper.c.attempts.pinned == done
    keeper.c.adopt(0.0)
    assert keeper.ask(1, 6) == []


def test_what_was_restored_from_stays_until_a_new_generation_is_complete() -> None:
    keeper = Keeper(1)
    keeper.capture(0)
    keeper.with_memory(keeper.c.lifecycle.preallocate())
    old, newest = keeper.capture(1), keeper.capture(2)
    keeper.begin(2, 1)
    assert not keeper.c.pin("nonsense")
    assert keeper.c.pin(old)
    keeper.c.adopt(0.0)
    first = keeper.capture(2)
    assert keeper.slots(first).isdisjoint(keeper.slots(old) | keeper.slots(newest))
    second = granted(keeper.ask_all(3))
    assert old not in keeper.c.attempts
    assert keeper.slots(second).isdisjoint(keeper.slots(first))


def test_only_what_is_complete_can_be_restored_from() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    keeper.seal(0, attempt)
    assert not keeper.c.pin(attempt)


# ── what another keeper left ─────────────────────────────────────────────────────────────────


def found(*images: tuple[str, int, int], world: int = 2) -> Coordinator:
    """A new coordinator over slots with these images: (attempt, step, rank)."""
    slots: list[Slot] = []
    attempts: dict[str, Attempt] = {}
    for number, (name, step, rank) in enumerate(images):
        slots.append(Slot(number, 2 << 20, "captured", name, rank, 4096))
        attempt = attempts.setdefault(name, Attempt(name, 1, step, world, "layout"))
        attempt.slots[rank] = number
    coordinator = Coordinator(keeper="l", grant_deadline_s=GRANT_S, capture_deadline_s=CAPTURE_S)
    coordinator.discovered(slots, attempts.values())
    return coordinator


def test_what_all_ranks_captured_is_found_and_the_newest_of_it_is_kept() -> None:
    c = found(("a", 7, 0), ("a", 7, 1), ("b", 6, 1), ("b", 6, 0), ("c", 8, 0))
    assert [a.id for a in c.attempts.complete()] == ["b", "a"]
    assert c.attempts.newest == "a"
    assert [c.slots.is_retained(c.slots[n]) for n in range(5)] == [True, True, False, False, False]
    assert c.slots[4].state == "free"
    assert not c.is_busy()


def test_slots_made_later_do_not_take_the_place_of_those_found() -> None:
    c = found(("a", 7, 0), ("a", 7, 1))
    c.begin(2, "00000002", 1)
    c.join(0, SlotWriter(1, 1))
    c.adopt(0.0)
    ask = m.RequestCapture(step=8, table=table_hash(table(1)), values_bytes=10, durable=False)
    (order,) = of(c.request_capture(0, ask, 0.0), AgreeLayout)
    agreement = Agreement(merge([table_from_json(table(1))]))
    (plan,) = of(c.layout_agreed(order.tables, agreement, 0.0), PlanImages)
    planned = c.images_planned(plan.layout.hash, plan_sizes(plan.layout, plan.ranks), 0.0)
    assert [a.slot for a in of(planned, AllocateSlots)] == [2]


def test_keepers_of_one_incarnation_do_not_call_two_attempts_by_one_name() -> None:
    names = set()
    for name in ("k1", "k2"):
        keeper = Keeper(1)
        keeper.c.lifecycle.keeper = name
        names |= {keeper.capture(step) for step in range(3)}
    assert len(names) == 6


def test_a_slot_is_awaited_while_a_save_waits_for_it_and_after_it_waited_in_vain() -> None:
    keeper = Keeper(1)
    keeper.capture(0)
    keeper.has_memory = False
    spares = [allocate.slot for allocate in of(keeper.c.lifecycle.preallocate(), AllocateSlots)]
    assert [keeper.c.lifecycle.is_awaited(slot) for slot in spares] == [False, False]
    keeper.ask_all(1)
    assert [keeper.c.lifecycle.is_awaited(slot) for slot in spares] == [True, False]
    assert told(keeper.c.cancel_request(0, 1), m.Aborted)
    assert [keeper.c.lifecycle.is_awaited(slot) for slot in spares] == [True, False]


def test_an_image_that_no_rank_writes_gets_the_least_valuable_slot_with_room_or_a_new_one() -> None:
    keeper = Keeper(1)
    older = keeper.capture(1)
    keeper.with_memory(keeper.c.lifecycle.preallocate())
    keeper.capture(2)
    slots, (held,) = keeper.c.slots, keeper.slots(older)
    size_bytes = slots[held].capacity_bytes
    found = slots.spare_for(0, size_bytes)
    assert found is not None and found.state == "free", "before one that holds a snapshot"
    assert slots.spare_for(0, size_bytes + 1) is None, "it has not got that much room"
    found.state = "granted"
    found = slots.spare_for(0, size_bytes)
    assert found is slots[held], "the older snapshot before the newest, which stays"
    found.state = "granted"
    assert slots.spare_for(0, size_bytes) is None
    assert slots.spare_for(1, 1) is slots.spare_for(0, size_bytes + 1) is None
    made = slots.make_for(0, size_bytes + 1)
    assert made.capacity_bytes > size_bytes and made.capacity_bytes % (2 << 20) == 0
    assert slots.spare_for(0, size_bytes + 1) is None, "it is being made"
    keeper.c.lifecycle.allocated(made.slot)
    assert slots.spare_for(0, size_bytes + 1) is slots[made.slot]
