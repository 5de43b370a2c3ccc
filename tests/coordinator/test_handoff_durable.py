"""Saves that are to be durable: started, carried to a later step, or told to have failed."""

from __future__ import annotations

import pytest

from holdfast.coordinator.actions import (
    AbortPersist,
    AllocateRings,
    AllocateSlots,
    GrantSlot,
    SendMessage,
    StartPersist,
)
from holdfast.coordinator.slots import NO_SLOT
from holdfast.protocol import messages as m
from support.coordinator.coordinators import CAPTURE_S, GRANT_S, Actions, Keeper, granted, of, told


def started(actions: Actions) -> list[str]:
    return [action.attempt for action in of(actions, StartPersist)]


def durable(actions: Actions) -> list[int]:
    """The steps that are told to be durable: each pays every order up to it."""
    return [message.step for message in told(actions, m.Durable)]


def test_an_image_is_written_as_soon_as_its_slot_is_granted() -> None:
    keeper = Keeper()
    actions = keeper.ask_all(5, durable=True)
    assert started(actions) == [granted(actions)]
    for rank in range(2):
        keeper.seal(rank, granted(actions))
    assert durable(keeper.c.lifecycle.persisted(granted(actions))) == [5]
    assert not keeper.c.is_busy()


def test_one_rank_that_wants_it_durable_is_enough() -> None:
    keeper = Keeper(3)
    keeper.ask(0, 5)
    keeper.ask(1, 5, durable=True)
    assert started(keeper.ask(2, 5))


@pytest.mark.promise
def test_an_image_being_written_keeps_its_slot() -> None:
    keeper = Keeper(1)
    busy = keeper.capture(0, durable=True)
    for step in range(1, 9):
        attempt = keeper.capture(step)
        assert keeper.slots(attempt).isdisjoint(keeper.slots(busy))
    keeper.c.lifecycle.persisted(busy)
    keeper.capture(9)
    keeper.capture(10)
    assert busy not in keeper.c.attempts


def test_what_comes_to_nothing_leaves_no_trace_in_storage_and_is_owed() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5, durable=True))
    actions = keeper.c.lost(1)
    assert [a.attempt for a in of(actions, AbortPersist)] == [attempt]
    assert told(actions, m.Aborted)
    assert keeper.c.lifecycle.persist_failed(attempt, "aborted") == []
    keeper.c.join(1, keeper.writer(1))
    assert started(keeper.ask_all(6))


# ── storage that is busy ─────────────────────────────────────────────────────────────────────


def test_due_saves_wait_while_storage_is_busy_and_the_newest_stands_for_them() -> None:
    keeper = Keeper(1)
    first = keeper.capture(0, durable=True)
    for step in (10, 20):
        assert started(keeper.ask_all(step, durable=True)) == []
        keeper.seal(0, list(keeper.c.attempts)[-1])
    newest = keeper.capture(25)
    actions = keeper.c.lifecycle.persisted(first)
    assert durable(actions) == [0]
    assert started(actions) == [newest]
    assert durable(keeper.c.lifecycle.persisted(newest)) == [25]
    assert not keeper.c.durability.is_requested


def test_an_exact_save_does_not_wait_for_storage_and_stands_for_those_before() -> None:
    keeper = Keeper(1)
    keeper.capture(0, durable=True)
    keeper.capture(10, durable=True)
    actions = keeper.ask_all(20, durable=True, exact=True)
    attempt = granted(actions)
    assert started(actions) == [attempt]
    keeper.seal(0, attempt)
    assert durable(keeper.c.lifecycle.persisted(attempt)) == [20]


def test_a_save_that_stood_for_others_owes_them_when_it_comes_to_nothing() -> None:
    keeper = Keeper(1)
    first = keeper.capture(0, durable=True)
    keeper.capture(10, durable=True)
    attempt = granted(keeper.ask_all(20, durable=True, exact=True))
    keeper.c.lifecycle.abort_capture(0, m.AbortCapture(attempt=attempt, reason="no"))
    actions = keeper.c.lifecycle.persisted(first)
    (second,) = started(actions)
    assert durable(keeper.c.lifecycle.persisted(second)) == [10]


def test_what_is_owed_starts_when_its_own_capture_is_done_after_storage_was() -> None:
    keeper = Keeper(1)
    first = keeper.capture(0, durable=True)
    attempt = granted(keeper.ask_all(10, durable=True))
    assert started(keeper.c.lifecycle.persisted(first)) == []
    assert started(keeper.seal(0, attempt)) == [attempt]
    assert durable(keeper.c.lifecycle.persisted(attempt)) == [10]


def test_what_is_owed_starts_also_when_the_save_before_it_failed() -> None:
    keeper = Keeper(1)
    first = keeper.capture(0, durable=True)
    second = keeper.capture(10, durable=True)
    actions = keeper.c.lifecycle.persist_failed(first, "disk full")
    assert [(n.step, n.reason) for n in told(actions, m.NotDurable)] == [(0, "disk full")]
    assert started(actions) == [second]


def test_a_failed_save_tells_all_it_stood_for_and_is_not_tried_again_by_itself() -> None:
    keeper = Keeper(1)
    first = keeper.capture(0, durable=True)
    keeper.capture(10, durable=True)
    keeper.capture(11)
    (newest,) = started(keeper.c.lifecycle.persisted(first))
    (failed,) = told(keeper.c.lifecycle.persist_failed(newest, "disk full"), m.NotDurable)
    assert (failed.step, failed.since) == (11, 0)
    assert keeper.c.tick(1.0) == []
    actions = keeper.ask_all(12)
    assert started(actions) == [granted(actions)]


# ── waiting for a slot ───────────────────────────────────────────────────────────────────────


def full(keeper: Keeper) -> list[str]:
    """Every image in memory is being written."""
    return [keeper.capture(step, durable=True, exact=True) for step in range(3)]


def test_a_snapshot_is_skipped_when_every_slot_is_being_written() -> None:
    keeper = Keeper(1)
    full(keeper)
    (skip,) = told(keeper.ask_all(3), m.Skip)
    assert (skip.step, skip.reason, skip.is_passing) == (3, NO_SLOT, True)
    (skip,) = told(keeper.ask_all(4, durable=True), m.Skip)
    assert skip.step == 4


def test_an_exact_save_waits_until_one_is_free() -> None:
    keeper = Keeper(1)
    busy = full(keeper)
    actions = keeper.ask_all(3, durable=True, exact=True, now_s=10.0)
    assert not told(actions, m.Skip)
    assert keeper.c.explain(3) == NO_SLOT
    assert keeper.c.tick(10.0 + GRANT_S) == []
    actions = keeper.c.lifecycle.persisted(busy[0])
    assert started(actions) == [granted(actions)]
    assert keeper.c.tick(10.1 + GRANT_S) == []


def test_an_exact_save_does_not_wait_for_ever() -> None:
    keeper = Keeper(1)
    busy = full(keeper)
    keeper.ask_all(3, durable=True, exact=True, now_s=10.0)
    (skip,) = told(keeper.c.tick(10.1 + GRANT_S), m.Skip)
    assert (skip.step, skip.reason) == (3, NO_SLOT)
    assert not of(keeper.c.lifecycle.persisted(busy[0]), GrantSlot)


def test_an_exact_save_does_not_wait_for_a_rank_that_went_away_or_gave_up() -> None:
    for leave in ("lost", "withdraw"):
        keeper = Keeper(2)
        busy = full(keeper)
        keeper.ask_all(3, durable=True, exact=True)
        actions = keeper.c.lost(1) if leave == "lost" else keeper.c.cancel_request(1, 3)
        (skip,) = told(actions, m.Skip)
        assert skip.step == 3
        assert "rank 1" in skip.reason
        assert not of(keeper.c.lifecycle.persisted(busy[0]), GrantSlot)


def test_an_exact_save_does_not_wait_once_a_rank_has_closed() -> None:
    keeper = Keeper(2)
    busy = full(keeper)
    keeper.ask_all(3, durable=True, exact=True)
    (skip,) = told(keeper.c.leaving(1), m.Skip)
    assert (skip.step, skip.is_passing) == (3, False)
    assert "ranks [1] have closed" in skip.reason
    assert not of(keeper.c.lifecycle.persisted(busy[0]), GrantSlot)


# ── asked for afterwards ─────────────────────────────────────────────────────────────────────


def test_a_captured_step_is_made_durable_after_all() -> None:
    keeper = Keeper(1)
    attempt = keeper.capture(5)
    assert started(keeper.c.durability.make_durable(5)) == [attempt]
    assert keeper.c.durability.make_durable(5) == []
    assert durable(keeper.c.lifecycle.persisted(attempt)) == [5]


def test_a_step_being_captured_is_made_durable_with_the_rest_of_it() -> None:
    keeper = Keeper(1)
    keeper.has_memory = False
    (slot,) = of(keeper.ask_all(5), AllocateSlots)
    assert keeper.c.durability.make_durable(5) == []
    assert started(keeper.c.lifecycle.allocated(slot.slot))
    other = Keeper(1)
    attempt = granted(other.ask_all(5))
    assert started(other.c.durability.make_durable(5)) == [attempt]


def test_who_asks_for_what_is_durable_already_is_told_so() -> None:
    keeper = Keeper(1)
    attempt = keeper.capture(5, durable=True)
    keeper.c.lifecycle.persisted(attempt)
    assert durable(keeper.c.durability.make_durable(5)) == [5]


def test_what_is_no_longer_in_memory_cannot_be_made_durable_and_the_next_step_is() -> None:
    keeper = Keeper(1)
    (failed,) = told(keeper.c.durability.make_durable(4), m.NotDurable)
    assert failed.step == 4
    actions = keeper.ask_all(5)
    assert started(actions) == [granted(actions)]


# ── the end, and another beginning ───────────────────────────────────────────────────────────


def test_at_the_end_the_newest_is_made_durable_unless_it_is() -> None:
    keeper = Keeper(1)
    assert keeper.c.durability.not_durable() == ""
    assert keeper.c.durability.start_newest() == []
    attempt = keeper.capture(5)
    assert keeper.c.durability.not_durable() == attempt
    assert started(keeper.c.durability.start_newest()) == [attempt]
    assert keeper.c.durability.start_newest() == []
    keeper.c.lifecycle.persist_failed(attempt, "disk full")
    assert keeper.c.durability.not_durable() == attempt
    assert started(keeper.c.durability.start_newest()) == [attempt]
    keeper.c.lifecycle.persisted(attempt)
    assert keeper.c.durability.not_durable() == ""


def test_what_an_earlier_incarnation_made_durable_is_not_told_under_the_same_step() -> None:
    for ends in ("persisted", "failed"):
        keeper = Keeper(1)
        attempt = keeper.capture(5, durable=True)
        keeper.begin(2, 1)
        keeper.c.adopt(0.0)
        if ends == "persisted":
            actions = keeper.c.lifecycle.persisted(attempt)
        else:
            actions = keeper.c.lifecycle.persist_failed(attempt, "disk full")
        assert not of(actions, SendMessage)
        assert not keeper.c.is_busy()


def test_a_new_incarnation_owes_nothing_of_the_old_one() -> None:
    keeper = Keeper(1)
    first = keeper.capture(0, durable=True)
    keeper.capture(10, durable=True)
    keeper.begin(2, 1)
    keeper.c.adopt(0.0)
    assert started(keeper.c.lifecycle.persisted(first)) == []
    attempt = keeper.capture(10, durable=True)
    assert durable(keeper.c.lifecycle.persisted(attempt)) == [10]


def test_what_an_earlier_incarnation_captured_does_not_stand_for_saves_of_this_one() -> None:
    keeper = Keeper(1)
    busy = keeper.capture(20, durable=True)
    keeper.capture(30)
    keeper.begin(2, 1)
    keeper.c.adopt(0.0)
    attempt = granted(keeper.ask_all(10, durable=True))
    assert started(keeper.c.lifecycle.persist_failed(busy, "disk full")) == []
    assert started(keeper.seal(0, attempt)) == [attempt]
    assert durable(keeper.c.lifecycle.persisted(attempt)) == [10]


def test_what_is_made_durable_at_the_end_stands_only_for_saves_of_its_own_incarnation() -> None:
    keeper = Keeper(1)
    busy = keeper.capture(20, durable=True, exact=True)
    newest = keeper.capture(30)
    keeper.begin(2, 1)
    keeper.c.adopt(0.0)
    granted(keeper.ask_all(10, durable=True))
    assert started(keeper.c.durability.start_newest()) == [newest]
    keeper.c.lifecycle.persisted(busy)
    assert durable(keeper.c.lifecycle.persisted(newest)) == []
    assert keeper.c.durability.is_requested  # it is owed still


def test_a_capture_that_is_late_is_owed_like_any_other() -> None:
    keeper = Keeper(1)
    granted(keeper.ask_all(5, durable=True))
    assert told(keeper.c.tick(CAPTURE_S + 1), m.Aborted)
    keeper.c.lifecycle.writer_gone(0)
    assert started(keeper.ask_all(6))


# ── what changes by itself in memory ─────────────────────────────────────────────────────────


def test_an_image_that_is_damaged_while_it_is_written_is_lost_when_that_is_over() -> None:
    for ended in ("persisted", "failed"):
        keeper = Keeper()
        older = keeper.capture(1)
        newest = keeper.capture(2, durable=True)
        slots = keeper.slots(newest)
        for slot in slots:
            assert keeper.c.lifecycle.image_lost(slot, newest) == []
        assert keeper.c.attempts.newest == newest
        assert all(keeper.c.slots.is_retained(keeper.c.slots[slot]) for slot in slots), (
            "they are read"
        )
        if ended == "persisted":
            keeper.c.lifecycle.persisted(newest)
        else:
            keeper.c.lifecycle.persist_failed(newest, "it is damaged")
        assert keeper.c.attempts.newest == older and newest not in keeper.c.attempts
        assert {keeper.c.slots[slot].state for slot in slots} == {"free"}
        assert keeper.slots(keeper.capture(3)).isdisjoint(keeper.slots(older))


def test_an_image_that_is_damaged_before_the_others_are_captured_ends_the_attempt() -> None:
    keeper = Keeper()
    older = keeper.capture(1)
    attempt = granted(keeper.ask_all(2))
    keeper.seal(1, attempt)
    slot = keeper.c.attempts[attempt].slots[1]
    (aborted,) = told(keeper.c.lifecycle.image_lost(slot, attempt), m.Aborted)
    assert aborted.reason == "the image of rank 1 changed in memory by itself"
    assert keeper.c.slots[slot].state == "free"
    assert attempt not in keeper.c.attempts and keeper.c.attempts.newest == older
    assert keeper.c.lifecycle.image_lost(slot, attempt) == []


# ── through rings ────────────────────────────────────────────────────────────────────────────


def without_room(keeper: Keeper, step: int) -> Actions:
    """What follows a durable save for which there is no memory but rings."""
    keeper.has_memory = False
    actions = keeper.ask_all(step, durable=True, exact=True)
    for slot in of(actions, AllocateSlots):
        actions = keeper.c.lifecycle.allocation_failed(slot.slot, "too small")
    return actions


def made(keeper: Keeper, actions: Actions) -> str:
    """The rings that these actions ask for are there: the attempt that is granted."""
    (rings,) = of(actions, AllocateRings)
    return granted(
        keeper.c.lifecycle.slots_made(
            {n.slot: (n.head_bytes + (2 << 20), 2 << 20) for n in rings.needs}
        )
    )


def test_what_passed_through_a_ring_is_durable_and_no_longer_in_memory() -> None:
    keeper = Keeper(1)
    attempt = made(keeper, without_room(keeper, 5))
    keeper.seal(0, attempt)
    assert "no memory keeps it" in keeper.c.explain(5) and keeper.c.is_busy()
    assert durable(keeper.c.lifecycle.persisted(attempt)) == [5]
    assert attempt not in keeper.c.attempts and not keeper.c.is_whole(5)
    assert durable(keeper.c.durability.make_durable(5)) == [5], (
        "it is, though memory has it no more"
    )
    assert told(keeper.c.durability.make_durable(4), m.NotDurable)


@pytest.mark.promise
def test_none_passes_through_a_ring_while_a_drain_keeps_the_root_from_taking_it() -> None:
    keeper = Keeper(1)
    keeper.c.durability.is_root_taken = lambda: True
    actions = without_room(keeper, 5)
    assert not of(actions, AllocateRings) and keeper.c.lifecycle.is_waiting(5)
    keeper.c.durability.is_root_taken = lambda: False
    assert made(keeper, keeper.c.tick(0.1))


def test_a_capture_through_a_ring_is_late_only_when_storage_takes_nothing_more() -> None:
    keeper = Keeper(1)
    attempt = made(keeper, without_room(keeper, 5))
    keeper.c.lifecycle.ring_progressed("another", 10.0)
    keeper.c.lifecycle.ring_progressed(attempt, 10.0)
    assert not told(keeper.c.tick(10.0 + CAPTURE_S), m.Aborted)
    (aborted,) = told(keeper.c.tick(10.1 + CAPTURE_S), m.Aborted)
    assert aborted.attempt == attempt


def test_of_two_saves_through_rings_the_newer_counts_whichever_storage_finishes_first() -> None:
    keeper = Keeper(1)
    asked = [without_room(keeper, step) for step in (5, 6)]
    older, newer = (made(keeper, actions) for actions in asked)
    for attempt in (older, newer):
        keeper.seal(0, attempt)
    assert durable(keeper.c.lifecycle.persisted(newer)) == [6]
    assert durable(keeper.c.lifecycle.persisted(older)) == [5]
    assert durable(keeper.c.durability.make_durable(6)) == [6]
