"""The coordinator's transitions: what is asked, granted and sealed, and what comes to nothing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.coordinator import layouts
from holdfast.coordinator.actions import (
    AbortPersist,
    AgreeLayout,
    AllocateSlots,
    GrantSlot,
    PlanImages,
    ReportOutcome,
    SendMessage,
    StartPersist,
    StoreLayout,
)
from holdfast.coordinator.layouts import Agreement
from holdfast.coordinator.slots import SLACK_BYTES
from holdfast.geometry.layout import merge, table_from_json, table_hash
from holdfast.protocol import messages as m
from support.coordinator.coordinators import (
    CAPTURE_S,
    GRANT_S,
    Actions,
    Keeper,
    declared,
    granted,
    of,
    table,
    told,
)

# ── asking ───────────────────────────────────────────────────────────────────────────────────


def test_a_step_is_granted_when_every_rank_has_asked_and_every_slot_is_there() -> None:
    keeper = Keeper()
    keeper.has_memory = False
    assert keeper.ask(0, 5) == []
    actions = keeper.ask(1, 5)
    first, second = of(actions, AllocateSlots)
    assert not of(actions, GrantSlot)
    assert keeper.c.lifecycle.allocated(first.slot) == []
    given = of(keeper.c.lifecycle.allocated(second.slot), GrantSlot)
    assert [(give.slot, give.rank) for give in given] == [(first.slot, 0), (second.slot, 1)]


@pytest.mark.promise
def test_ranks_at_different_updates_are_not_captured_together_and_the_next_step_is() -> None:
    keeper = Keeper(3)
    keeper.ask(0, 5, updates={"optimizer": 7, "embedding": 7})
    keeper.ask(1, 5, updates={"optimizer": 7})
    actions = keeper.ask(2, 5, updates={"optimizer": 8})
    (skip,) = told(actions, m.Skip)
    assert not of(actions, GrantSlot)
    assert skip.is_passing, "a durable save is not carried to the next step"
    assert skip.reason == (
        "the ranks are not at the same update (whole updates of 'optimizer': rank 0: 7, rank 1: 7, "
        "rank 2: 8)"
    )
    keeper.ask(0, 6, updates={"optimizer": 8, "embedding": 8})
    keeper.ask(1, 6, updates={"optimizer": 8})
    assert granted(keeper.ask(2, 6, updates={"optimizer": 8}))


def test_ranks_with_optimizers_that_others_have_not_are_compared_by_those_they_share() -> None:
    keeper = Keeper()
    keeper.ask(0, 5, updates={"first stage": 7})
    assert granted(keeper.ask(1, 5, updates={"second stage": 9}))


def test_a_slot_has_room_for_the_image_and_for_values_that_grow() -> None:
    keeper = Keeper(1)
    (allocate,) = of(keeper.ask_all(0, values=5_000_000), AllocateSlots)
    slot = keeper.c.slots[allocate.slot]
    assert slot.image_bytes + SLACK_BYTES <= slot.capacity_bytes == allocate.capacity_bytes
    assert slot.capacity_bytes < 2 * slot.image_bytes


def test_nothing_is_granted_before_the_parent_is_recorded() -> None:
    keeper = Keeper(adopted=False)
    assert keeper.ask_all(5, now_s=1.0) == []
    assert keeper.c.tick(1000.0) == []
    actions = keeper.with_memory(keeper.c.adopt(1000.0))
    attempt = granted(actions)
    assert keeper.c.tick(1000.0 + CAPTURE_S) == []
    assert keeper.c.attempts[attempt].phase == "capturing"


def test_who_asked_early_still_has_the_whole_deadline_after_the_parent_is_recorded() -> None:
    keeper = Keeper(adopted=False)
    keeper.ask(0, 5, now_s=1.0)
    keeper.c.adopt(1000.0)
    assert keeper.c.tick(1000.0 + GRANT_S) == []
    assert told(keeper.c.tick(1001.0 + GRANT_S), m.Skip)


@pytest.mark.promise
def test_a_rank_that_does_not_ask_is_named_when_the_deadline_is_over() -> None:
    keeper = Keeper(3)
    keeper.ask(1, 5, now_s=10.0)
    assert keeper.c.tick(10.0 + GRANT_S) == []
    (skip,) = told(keeper.c.tick(10.1 + GRANT_S), m.Skip)
    assert (skip.step, skip.is_passing) == (5, True)
    assert "ranks [0, 2] did not ask" in skip.reason
    assert keeper.c.tick(1000.0) == []


def test_ranks_that_save_different_steps_are_told_and_can_meet_at_the_later_one() -> None:
    keeper = Keeper()
    keeper.ask(0, 5)
    actions = keeper.ask(1, 6)
    (skip,) = told(actions, m.Skip)
    assert skip.step == 5
    assert "rank 0: 5, rank 1: 6" in skip.reason
    assert granted(keeper.ask(0, 6))


def test_states_that_do_not_fit_each_other_are_told_and_not_tried_again() -> None:
    keeper = Keeper()
    keeper.ask(0, 5, dtype="F32")
    (skip,) = told(keeper.ask(1, 5, dtype="I64"), m.Skip)
    assert not skip.is_passing
    assert "dtype" in skip.reason
    assert not keeper.c.attempts


def test_leaves_that_a_rank_does_not_tell_are_a_reason_to_skip_and_not_to_fall_over() -> None:
    keeper = Keeper()
    keeper.ask(0, 5)
    ask = m.RequestCapture(step=5, table="unheard of", values_bytes=10, durable=True)
    (order,) = of(keeper.c.request_capture(1, ask, 0.0), AgreeLayout)
    asked = keeper.c.layout_agreed(order.tables, Agreement(), 0.0)
    assert asked == [
        SendMessage(m.RequestTable(hash=hash_), rank) for rank, hash_ in enumerate(order.tables)
    ]
    (skip,) = told(keeper.c.tick(GRANT_S + 1), m.Skip)
    assert skip.reason.startswith("ranks [0, 1] have not sent their tables of leaves")


def test_a_rank_that_cannot_save_a_step_keeps_nobody_waiting() -> None:
    keeper = Keeper()
    keeper.ask(0, 5)
    (skip,) = told(keeper.c.decline(1, 5, "a lambda"), m.Skip)
    assert (skip.step, skip.is_passing) == (5, False)
    assert "rank 1" in skip.reason
    assert "a lambda" in skip.reason
    assert keeper.c.decline(1, 6, "a lambda") == []
    (skip,) = told(keeper.ask(0, 6), m.Skip)
    assert skip.step == 6
    for step in range(7, 100):
        keeper.c.decline(1, step, "a lambda")
    assert len(keeper.c._requests._declined) < 20


def test_what_a_rank_declines_because_its_keeper_died_it_may_ask_for_again() -> None:
    keeper = Keeper()
    keeper.ask(0, 5)
    (skip,) = told(keeper.c.decline(1, 5, "its keeper went away", is_passing=True), m.Skip)
    assert (skip.step, skip.is_passing) == (5, True)
    assert keeper.ask(1, 5) == []
    assert granted(keeper.ask(0, 5))
    for step in range(6, 100):
        keeper.c.decline(1, step, "its keeper went away", is_passing=True)
    assert len(keeper.c._requests._notified) < 20


def test_nobody_waits_for_a_rank_that_has_closed_unless_it_comes_back() -> None:
    keeper = Keeper()
    keeper.ask(0, 5)
    (skip,) = told(keeper.c.leaving(1), m.Skip)
    assert (skip.step, skip.is_passing) == (5, False)
    assert "ranks [1] have closed" in skip.reason
    (skip,) = told(keeper.ask(0, 6), m.Skip)
    assert (skip.step, skip.is_passing) == (6, False)
    keeper.c.join(1, keeper.writer(1))
    keeper.ask(0, 7)
    assert granted(keeper.ask(1, 7))
    keeper.c.leaving(1)
    keeper.begin(2, 2)
    keeper.c.adopt(0.0)
    keeper.ask(0, 7)
    assert granted(keeper.ask(1, 7))


# ── ranks that are not there ─────────────────────────────────────────────────────────────────


def test_a_rank_that_is_stopped_costs_the_others_one_wait_until_it_is_back() -> None:
    keeper = Keeper(3)
    keeper.capture(4)
    keeper.ask(0, 5, now_s=10.0)
    keeper.ask(1, 5, now_s=10.0)
    keeper.c.tick(15.0)
    (skip,) = told(keeper.c.cancel_request(0, 5), m.Skip)
    assert "rank 0 stopped waiting for ranks [2]" in skip.reason
    reasons = set()
    for step in range(6, 200):
        for rank in (0, 1):
            (skip,) = told(keeper.ask(rank, step, durable=True, exact=True, now_s=16.0), m.Skip)
            assert (skip.step, skip.is_passing) == (step, True)
            reasons.add(skip.reason)
    (reason,) = reasons  # the same at every step, so that a report can count them
    assert "ranks [2] let the others wait in vain" in reason
    # It goes on where it was stopped: it is told at once that the others are gone from there.
    for step in (5, 6, 199):
        (skip,) = told(keeper.ask(2, step, now_s=20.0), m.Skip)
        assert (skip.step, skip.is_passing) == (step, True)
    assert keeper.ask(0, 200) == keeper.ask(1, 200) == []
    assert granted(keeper.ask(2, 200))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_rank_that_asks_for_a_step_far_ahead_once_does_not_end_all_saving(
    order: tuple[int, int],
) -> None:
    keeper = Keeper()
    keeper.ask(1, 1 << 60)
    keeper.c.tick(GRANT_S + 1)
    for rank in order:
        keeper.ask(rank, 5)
    assert not of(keeper.ask(order[0], 6), GrantSlot)
    assert granted(keeper.ask(order[1], 6))


def test_the_keepers_own_deadline_is_waited_for_once() -> None:
    keeper = Keeper()
    keeper.ask(0, 5, durable=True, now_s=10.0)
    (skip,) = told(keeper.c.tick(10.1 + GRANT_S), m.Skip)
    assert "ranks [1] did not ask within 30 s" in skip.reason
    (skip,) = told(keeper.ask(0, 6, durable=True, now_s=41.0), m.Skip)
    assert "ranks [1] let the others wait in vain" in skip.reason


def test_who_ends_its_wait_at_once_blames_nobody() -> None:
    keeper = Keeper()
    keeper.ask(0, 5, now_s=10.0)
    keeper.c.tick(10.1)
    assert told(keeper.c.cancel_request(0, 5), m.Skip)
    assert keeper.ask(0, 6, now_s=10.2) == []
    assert granted(keeper.ask(1, 6, now_s=10.3))


def test_who_waits_for_another_step_is_there_and_is_not_blamed() -> None:
    keeper = Keeper(3)
    keeper.ask(1, 4, now_s=9.0)
    keeper.ask(0, 5, now_s=10.0)
    keeper.c.tick(15.0)
    skips = told(keeper.c.cancel_request(0, 5), m.Skip)
    assert [skip.step for skip in skips] == [5, 4]  # rank 1 is not left to wait for rank 2
    assert "ranks [2] let the others wait in vain" in skips[1].reason
    (skip,) = told(keeper.ask(0, 6, now_s=16.0), m.Skip)
    assert "ranks [2]" in skip.reason


def test_nobody_waits_for_a_rank_whose_line_closed_until_it_takes_its_place_again() -> None:
    keeper = Keeper()
    keeper.ask(0, 5)
    (skip,) = told(keeper.c.lost(1), m.Skip)
    assert (skip.step, skip.is_passing) == (5, True)
    assert skip.reason == "ranks [1] went away; no rank captures until they are back"
    (again,) = told(keeper.ask(0, 6), m.Skip)
    assert again.reason == skip.reason
    assert keeper.c.absence.has_lost
    keeper.c.join(1, keeper.writer(1))
    assert not keeper.c.absence.has_lost
    assert keeper.ask(0, 7) == []
    assert granted(keeper.ask(1, 7))


def test_a_step_that_nobody_asks_for_any_more_makes_nobody_absent() -> None:
    keeper = Keeper()
    keeper.ask(0, 5)
    keeper.c.join(0, keeper.writer(0))  # its line broke: what it asked is forgotten
    keeper.c.tick(2 * GRANT_S)
    keeper.ask(0, 6, now_s=2 * GRANT_S)
    assert granted(keeper.ask(1, 6, now_s=2 * GRANT_S))


def test_a_new_start_has_nobody_absent() -> None:
    keeper = Keeper()
    keeper.c.lost(1)
    keeper.begin(2, 2)
    keeper.c.adopt(0.0)
    assert keeper.ask(0, 7) == []
    assert granted(keeper.ask(1, 7))


def test_a_rank_waits_for_one_step_at_a_time_so_that_what_is_undecided_stays_little() -> None:
    keeper = Keeper(3)
    keeper.ask(1, 0)
    for step in range(20_000):
        keeper.ask(0, step)
    assert keeper.c._requests.steps() == [19_999]
    assert len(keeper.c._requests._declined) < 20
    # Who waited for a step that is waited for no more was told.
    keeper.ask(1, 20_001)
    (skip,) = told(keeper.ask(1, 20_002), m.Skip)
    assert (skip.step, skip.reason) == (20_001, "rank 1 waits for step 20002 instead")


def test_who_leaves_in_the_middle_of_a_capture_ends_it_for_all() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    keeper.seal(0, attempt)
    assert not told(keeper.c.leaving(0), m.Aborted)  # it has done its part
    (aborted,) = told(keeper.c.leaving(1), m.Aborted)
    assert (aborted.step, aborted.reason) == (5, "ranks [0, 1] have closed their Checkpointer")
    assert not keeper.c.is_busy()


def test_slots_that_a_rank_never_lets_go_are_not_replaced_without_end() -> None:
    keeper = Keeper()
    reasons = set()
    for step in range(200):
        actions = keeper.ask_all(step)
        reasons |= {skip.reason for skip in told(actions, m.Skip)}
        for attempt in {give.attempt for give in of(actions, GrantSlot)}:
            given_up = m.AbortCapture(attempt=attempt, reason="its GPU hangs", has_stopped=False)
            keeper.c.lifecycle.abort_capture(0, given_up)
            stopped = m.Captured(attempt=attempt, image_bytes=1, header_xxh3="h", table_xxh3="t")
            keeper.c.lifecycle.captured(1, stopped, 0.0)
    assert len(keeper.c.slots) <= 2 * keeper.world * keeper.c.slots.per_image
    (reason,) = reasons
    assert "may still be written to by ranks [0]" in reason
    for slot in keeper.c.slots.quarantined():  # its process ended
        keeper.c.lifecycle.writer_gone(slot.id)
    assert keeper.capture(200)


# ── announcing ───────────────────────────────────────────────────────────────────────────────


def announced(actions: Actions) -> list[tuple[int, str]]:
    return [(one.step, one.which) for one in told(actions, m.Announced)]


def test_a_save_is_announced_only_when_every_rank_hears_of_it() -> None:
    keeper = Keeper()
    assert announced(keeper.c.announce(8, "storage")) == [(8, "storage")]
    keeper.c.lost(1)
    assert keeper.c.announce(10, "storage") == []
    assert keeper.c.announce(10, m.MISSED) == []
    assert announced(keeper.c.announce(10, m.PREEMPTED)) == [(10, m.PREEMPTED)]
    keeper.c.join(1, keeper.writer(1))
    assert announced(keeper.c.announce(10, m.MISSED)) == [(10, m.MISSED)]


def test_what_several_ranks_missed_is_announced_once_until_it_was_asked_for() -> None:
    keeper = Keeper()
    assert announced(keeper.c.announce(10, m.MISSED)) == [(10, m.MISSED)]
    assert keeper.c.announce(11, m.MISSED) == []
    assert announced(keeper.c.announce(11, "memory")) == [(11, "memory")]
    keeper.ask(0, 9)
    assert keeper.c.announce(12, m.MISSED) == []
    keeper.ask(0, 10)
    assert announced(keeper.c.announce(12, m.MISSED)) == [(12, m.MISSED)]
    keeper.begin(2, 2)
    assert announced(keeper.c.announce(3, m.MISSED)) == [(3, m.MISSED)]
    keeper.c.leaving(1)  # that step comes to nothing, and another is to be announced
    keeper.ask(0, 3)
    assert announced(keeper.c.announce(5, m.MISSED)) == [(5, m.MISSED)]
    keeper.c.decline(0, 5, "a lambda")
    assert announced(keeper.c.announce(7, m.MISSED)) == [(7, m.MISSED)]


def test_who_was_skipped_because_another_is_at_a_later_step_is_told_which() -> None:
    keeper = Keeper()
    keeper.ask(0, 23)
    actions = keeper.ask(1, 24)
    assert announced(actions) == [(24, m.MISSED)]
    (skip,) = told(actions, m.Skip)
    assert skip.step == 23
    assert granted(keeper.ask(0, 24))


def test_what_was_declined_for_good_holds_for_whoever_was_told_it_would_pass() -> None:
    keeper = Keeper()
    keeper.ask(0, 5)
    keeper.c.decline(1, 5, "its keeper went away", is_passing=True)
    keeper.c.decline(1, 5, "a lambda")
    (skip,) = told(keeper.ask(0, 5), m.Skip)
    assert not skip.is_passing and "a lambda" in skip.reason


def test_the_layout_is_told_once_and_again_to_a_rank_that_came_back() -> None:
    keeper = Keeper()
    actions = keeper.ask_all(0)
    (layout,) = of(actions, StoreLayout)
    assert layout.data == merge([table_from_json(table(2))] * 2).to_json()
    assert [plan.layout.hash for plan in of(actions, PlanImages)] == [layout.hash]
    for rank in range(2):
        keeper.seal(rank, granted(actions))
    assert not of(keeper.ask_all(1), StoreLayout)
    keeper.c.join(1, keeper.writer(1))
    again = keeper.ask_all(2)
    assert of(again, StoreLayout) and not of(again, PlanImages)


def test_who_has_no_place_in_the_run_is_not_heard() -> None:
    keeper = Keeper()
    keeper.c.lost(1)
    assert keeper.ask(1, 5) == []
    assert not of(keeper.ask(0, 5), GrantSlot)


def test_who_waits_no_longer_ends_the_wait_of_all() -> None:
    keeper = Keeper(3)
    keeper.ask(0, 5)
    keeper.ask(1, 5)
    (skip,) = told(keeper.c.cancel_request(1, 5), m.Skip)
    assert skip.step == 5
    assert "rank 1 stopped waiting for ranks [2]" in skip.reason
    (skip,) = told(keeper.ask(2, 5), m.Skip)  # nobody is there for it
    assert (skip.step, skip.is_passing) == (5, True)
    assert keeper.c.cancel_request(1, 5) == []


def test_who_stops_waiting_for_a_slot_ends_the_attempt() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    actions = keeper.c.cancel_request(1, 5)
    (aborted,) = told(actions, m.Aborted)
    assert (aborted.step, aborted.attempt) == (5, attempt)
    assert "rank 1" in aborted.reason
    assert not keeper.c.attempts


def test_who_stops_waiting_for_another_step_or_has_sealed_ends_nothing() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    assert keeper.c.cancel_request(0, 6) == []
    keeper.seal(1, attempt)
    assert keeper.c.cancel_request(1, 5) == []
    assert told(keeper.seal(0, attempt), m.Complete)


def test_a_layout_that_the_arena_has_no_room_for_ends_its_attempt_and_is_told_again() -> None:
    keeper = Keeper()
    held = keeper.capture(0)
    keeper.with_memory(keeper.c.lifecycle.preallocate())
    keeper.ask(0, 1, dtype="BF16", durable=True)
    (keep,) = of(keeper.ask(1, 1, dtype="BF16"), StoreLayout)
    actions = keeper.c.lifecycle.layout_not_stored(keep.hash, "no room for the layout")
    (aborted,) = told(actions, m.Aborted)
    assert (aborted.step, aborted.reason) == (1, "no room for the layout")
    assert of(actions, AbortPersist) == [AbortPersist(aborted.attempt)]
    # Nobody was told of these slots, so nobody writes to them.
    assert keeper.states() == ["captured"] * 2 + ["free"] * 4
    assert list(keeper.c.attempts) == [held]
    keeper.ask(0, 2, dtype="BF16")
    again = keeper.ask(1, 2, dtype="BF16")
    assert of(again, StoreLayout) == [keep]
    assert of(again, StartPersist)  # the save that came to nothing was to be durable


def test_who_still_copies_under_a_layout_that_was_lost_keeps_its_slot_from_others() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    keeper.seal(1, attempt)
    copied = keeper.c.attempts[attempt].slots[0]
    keeper.c.join(1, keeper.writer(1))  # it lost its line, and has to be told the layout again
    (keep,) = of(keeper.ask_all(6), StoreLayout)
    actions = keeper.c.lifecycle.layout_not_stored(keep.hash, "no room for the layout")
    assert {aborted.step for aborted in told(actions, m.Aborted)} == {5, 6}
    assert keeper.states() == ["free"] * 3 + ["quarantined"]
    assert keeper.c.slots[copied].state == "quarantined"


def test_a_capture_under_another_layout_goes_on_when_one_cannot_be_kept() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    keeper.ask(0, 6, dtype="BF16")
    (keep,) = of(keeper.ask(1, 6, dtype="BF16"), StoreLayout)
    (aborted,) = told(keeper.c.lifecycle.layout_not_stored(keep.hash, "no room"), m.Aborted)
    assert aborted.step == 6
    keeper.seal(0, attempt)
    assert told(keeper.seal(1, attempt), m.Complete)


# ── capturing ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise
def test_a_generation_is_complete_when_the_last_rank_has_sealed() -> None:
    keeper = Keeper(3)
    attempt = granted(keeper.ask_all(5, now_s=10.0))
    assert keeper.seal(2, attempt) == []
    assert keeper.seal(0, attempt) == []
    assert keeper.c.attempts.complete() == []
    actions = keeper.seal(1, attempt, now_s=12.5)
    assert told(actions, m.Complete) == [m.Complete(step=5, attempt=attempt, durable=False)]
    (note,) = of(actions, ReportOutcome)
    assert (note.what, note.step, note.elapsed_s) == ("complete", 5, 2.5)
    assert [a.id for a in keeper.c.attempts.complete()] == [attempt]
    assert keeper.c.attempts.newest == attempt
    assert not keeper.c.is_busy()


def test_a_seal_of_another_size_than_agreed_ends_the_attempt() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    seal = m.Captured(attempt=attempt, image_bytes=5, header_xxh3="h", table_xxh3="t")
    (aborted,) = told(keeper.c.lifecycle.captured(0, seal, 0.0), m.Aborted)
    assert "rank 0 sealed 5 bytes" in aborted.reason
    # It says itself that it is done; the other is not known to have stopped.
    assert keeper.states() == ["free", "quarantined"]


def test_what_a_rank_says_again_of_its_sealed_image_changes_nothing() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    keeper.seal(0, attempt)
    again = m.Captured(attempt=attempt, image_bytes=5, header_xxh3="other", table_xxh3="other")
    assert keeper.c.lifecycle.captured(0, again, 0.0) == []
    assert told(keeper.seal(1, attempt), m.Complete)
    slot = keeper.c.slots[keeper.c.attempts[attempt].slots[0]]
    assert (slot.header_xxh3, slot.table_xxh3) == ("h", "t")


def test_what_one_rank_gives_up_comes_to_nothing_on_all() -> None:
    keeper = Keeper(3)
    attempt = granted(keeper.ask_all(5))
    keeper.seal(0, attempt)
    message = m.AbortCapture(attempt=attempt, reason="it moved", leaf="model.w")
    actions = keeper.c.lifecycle.abort_capture(1, message)
    (aborted,) = told(actions, m.Aborted)
    assert (aborted.reason, aborted.overtaken, aborted.leaf) == ("it moved", True, "model.w")
    (note,) = of(actions, ReportOutcome)
    assert (note.what, note.overtaken, note.leaf) == ("missed", True, "model.w")
    assert keeper.states() == ["free", "free", "quarantined"]
    assert keeper.c.attempts.complete() == []


@pytest.mark.promise
def test_a_slot_whose_writer_may_live_is_free_when_that_one_says_so_or_is_dead() -> None:
    keeper = Keeper(3)
    attempt = granted(keeper.ask_all(5))
    keeper.c.lifecycle.abort_capture(0, m.AbortCapture(attempt=attempt, reason="no"))
    assert keeper.states() == ["free", "quarantined", "quarantined"]
    kept = {slot.rank: slot for slot in keeper.c.slots.values() if slot.state == "quarantined"}
    assert kept[1].writer == keeper.writer(1)
    keeper.c.lifecycle.abort_capture(2, m.AbortCapture(attempt="another", reason="no"))
    assert kept[2].state == "quarantined"
    late = m.Captured(attempt=attempt, image_bytes=1, header_xxh3="h", table_xxh3="t")
    assert keeper.c.lifecycle.captured(2, late, 0.0) == []
    assert (kept[1].state, kept[2].state) == ("quarantined", "free")
    keeper.c.lifecycle.writer_gone(kept[1].id)
    assert keeper.states() == ["free", "free", "free"]


def test_the_death_of_a_writer_that_had_stopped_takes_the_slot_from_nobody() -> None:
    keeper = Keeper(1)
    attempt = granted(keeper.ask_all(5))
    (slot_id,) = keeper.slots(attempt)
    keeper.c.lifecycle.abort_capture(
        0, m.AbortCapture(attempt=attempt, reason="it moved", has_stopped=True)
    )
    again = granted(keeper.ask_all(6))
    assert keeper.slots(again) == {slot_id}
    keeper.c.lifecycle.writer_gone(slot_id)
    assert keeper.c.slots[slot_id].state == "granted"
    assert told(keeper.seal(0, again), m.Complete)


def test_a_rank_that_went_away_ends_what_it_had_not_sealed() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    (aborted,) = told(keeper.c.lost(1), m.Aborted)
    assert "rank 1 went away" in aborted.reason
    assert attempt not in keeper.c.attempts


def test_a_rank_that_went_away_after_sealing_does_no_harm() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    keeper.seal(1, attempt)
    assert keeper.c.lost(1) == []
    assert told(keeper.seal(0, attempt), m.Complete)


def test_a_rank_that_comes_back_unannounced_ends_what_it_had_not_sealed() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    keeper.ask(1, 6)
    (aborted,) = told(keeper.c.join(1, keeper.writer(1)), m.Aborted)
    assert aborted.attempt == attempt
    assert keeper.ask(0, 6) == []  # what it asked on its old line does not count either


@pytest.mark.promise
def test_what_is_not_captured_in_time_is_given_up_and_who_is_late_is_named() -> None:
    keeper = Keeper(3)
    attempt = granted(keeper.ask_all(5, now_s=10.0))
    keeper.seal(1, attempt)
    assert keeper.c.tick(10.0 + CAPTURE_S) == []
    (aborted,) = told(keeper.c.tick(10.1 + CAPTURE_S), m.Aborted)
    assert "ranks [0, 2] did not finish" in aborted.reason


def test_slots_of_a_capture_under_way_are_not_free_although_one_rank_is_done() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    keeper.seal(0, attempt)
    for slot in keeper.slots(attempt):
        assert keeper.c.slots.is_retained(keeper.c.slots[slot])


# ── questions ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", [4, 5, 6])
def test_it_can_say_what_a_save_waits_for(step: int) -> None:
    keeper = Keeper()
    keeper.capture(4, durable=True)
    attempt = granted(keeper.ask_all(5))
    keeper.seal(0, attempt)
    keeper.ask(0, 6)
    expected = {4: "being written", 5: "ranks [1] have not sealed", 6: "ranks [1] have not asked"}
    assert expected[step] in keeper.c.explain(step)
    assert keeper.c.is_busy()


def test_it_says_so_when_it_waits_for_memory_or_for_nothing() -> None:
    keeper = Keeper(1)
    keeper.has_memory = False
    keeper.ask_all(5)
    assert "allocated" in keeper.c.explain(5)
    assert "knows nothing" in keeper.c.explain(6)
    keeper = Keeper(1)
    keeper.capture(5)
    assert "captured" in keeper.c.explain(5)


def test_a_step_is_whole_in_memory_when_every_rank_has_sealed_it_in_this_incarnation() -> None:
    keeper = Keeper()
    attempt = granted(keeper.ask_all(5))
    keeper.seal(0, attempt)
    assert not keeper.c.is_whole(5)
    keeper.seal(1, attempt)
    assert keeper.c.is_whole(5) and not keeper.c.is_whole(4)
    keeper.begin(2, 2)
    assert not keeper.c.is_whole(5), "the same step of another incarnation is another state"


@pytest.mark.parametrize("fault", [MemoryError(), ImportError("no numpy")])
def test_a_layout_that_cannot_be_divided_now_costs_this_save_and_no_later_one(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise fault

    keeper = Keeper()
    with monkeypatch.context() as patched:
        patched.setattr(layouts, "merge", fail)
        (skip,) = told(keeper.ask_all(5), m.Skip)
    assert (skip.step, skip.is_passing) == (5, True)
    assert "could not be divided" in skip.reason and repr(fault) in skip.reason
    assert granted(keeper.ask_all(6))


def test_other_tables_of_the_same_layout_are_granted_as_planned_before() -> None:
    keeper = Keeper(1)
    keeper.capture(1)
    leaves = table_from_json(table(1))
    data = declared([replace(one, is_frozen=True) for one in leaves])
    assert table_hash(data) != table_hash(table(1))
    request = m.RequestCapture(
        step=2, table=table_hash(data), values_bytes=10, durable=False, is_copying=False
    )
    assert granted(keeper.with_memory(keeper.c.request_capture(0, request, 0.0)))
