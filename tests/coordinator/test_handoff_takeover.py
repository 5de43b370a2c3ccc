"""What a keeper makes of slots that an earlier one left, in the middle of an incarnation."""

from __future__ import annotations

import pytest

from holdfast.coordinator.actions import Action, AgreeLayout, StartPersist
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.layouts import LAYOUTS, Agreement, agree_layout
from holdfast.coordinator.slots import Slot, SlotWriter
from holdfast.geometry.layout import LeafEntry, deflate, table_hash
from holdfast.protocol import messages as m
from support.coordinator.coordinators import (
    CAPTURE_S,
    GRANT_S,
    Keeper,
    declared,
    granted,
    of,
    remembers_nothing,
    table,
    told,
)


def left(*images: tuple[int, int], capacity_bytes: int = 2 << 20) -> Coordinator:
    """A new coordinator of one rank over these generations, whole in memory."""
    coordinator = Coordinator(keeper="l", grant_deadline_s=GRANT_S, capture_deadline_s=CAPTURE_S)
    slots, attempts = [], []
    for number, (incarnation, step) in enumerate(images):
        name = f"{incarnation}-{step}"
        slots.append(Slot(number, capacity_bytes, "captured", name, 0, 4096))
        attempts.append(Attempt(name, incarnation, step, 1, "layout", slots={0: number}))
    coordinator.discovered(slots, attempts)
    return coordinator


def kept(coordinator: Coordinator) -> set[str]:
    return {s.attempt for s in coordinator.slots.values() if coordinator.slots.is_retained(s)}


# ── what the incarnation went on from ────────────────────────────────────────────────────────


@pytest.mark.promise
def test_the_generation_an_incarnation_went_on_from_stays_until_it_has_one_of_its_own() -> None:
    c = left((1, 10), (1, 20), (1, 30))
    c.resume(2, "n", 1, (1, 10), 0.0)  # an older step was restored by name
    assert kept(c) == {"1-10", "1-30"}
    keeper = Keeper(1)
    keeper.c = c
    c.join(0, keeper.writer(0))
    first = granted(keeper.ask_all(11))
    assert keeper.slots(first) == {1}  # not the parent's, though that one is the oldest
    assert kept(c) >= {"1-10"}
    keeper.seal(0, first)
    assert kept(c) == {first}


def test_a_generation_of_its_own_releases_what_an_incarnation_went_on_from() -> None:
    c = left((1, 10), (1, 20), (2, 11))
    c.resume(2, "n", 1, (1, 10), 0.0)
    assert kept(c) == {"2-11"}


@pytest.mark.parametrize("parent", [None, (1, 15)])
def test_a_parent_that_is_not_in_memory_leaves_the_newest_pinned(
    parent: tuple[int, int] | None,
) -> None:
    c = left((1, 10), (1, 20))
    c.resume(2, "n", 1, parent, 0.0)
    assert (kept(c), c.attempts.pinned) == ({"1-20"}, "1-20")


# ── what an earlier keeper owed ──────────────────────────────────────────────────────────────


def take_over(c: Coordinator, *ordered: int) -> list[list[Action]]:
    """A keeper goes on with incarnation 1 of this many ranks; what follows as each joins."""
    c.resume(1, "n", len(ordered), None, 0.0)
    return [
        c.join(rank, SlotWriter(100 + rank, 7), order=m.StandingOrder(step, step))
        for rank, step in enumerate(ordered)
    ]


def test_what_a_keeper_owed_when_it_died_is_made_durable_by_the_next() -> None:
    c = left((1, 10), (1, 19))
    (actions,) = take_over(c, 15)
    assert [start.attempt for start in of(actions, StartPersist)] == ["1-19"]
    assert [d.step for d in told(c.lifecycle.persisted("1-19"), m.Durable)] == [19]
    assert not of(c.tick(1.0), StartPersist)  # once


def test_nothing_is_made_durable_that_nobody_was_promised() -> None:
    c = left((1, 10), (1, 19))
    assert take_over(c, -1) == [[]]
    assert c.tick(1.0) == []


def test_what_was_owed_is_made_durable_when_all_ranks_can_hear_of_it() -> None:
    c = Coordinator(keeper="l", grant_deadline_s=GRANT_S, capture_deadline_s=CAPTURE_S)
    slots = [Slot(rank, 2 << 20, "captured", "a", rank, 4096) for rank in range(2)]
    c.discovered(slots, [Attempt("a", 1, 19, 2, "layout", slots={0: 0, 1: 1})])
    c.resume(1, "n", 2, None, 0.0)
    assert c.join(0, SlotWriter(100, 7), order=m.StandingOrder(19, 19)) == []
    assert of(c.join(1, SlotWriter(101, 7)), StartPersist)


@pytest.mark.promise
def test_what_the_arena_says_was_to_be_durable_is_so_though_no_rank_repeats_it() -> None:
    c = left((1, 10), (1, 19))
    c.resume(1, "n", 1, None, 0.0, order=m.StandingOrder(12, 12))
    assert of(c.join(0, SlotWriter(100, 7)), StartPersist)


@pytest.mark.promise
def test_what_is_older_than_the_order_is_not_made_durable_for_it() -> None:
    c = left((1, 10), (1, 19))
    assert take_over(c, 20) == [[]]
    assert c.tick(1.0) == [] and c.durability.is_requested


def test_what_was_owed_is_owed_by_the_next_snapshot_when_none_is_left() -> None:
    keeper = Keeper(1)
    keeper.c = left((1, 10))
    keeper.c.resume(2, "n", 1, (1, 10), 0.0)
    assert keeper.c.join(0, keeper.writer(0), order=m.StandingOrder(11, 11)) == []
    assert of(keeper.ask_all(11), StartPersist)


def test_a_rank_whose_line_broke_orders_nothing_that_is_durable_already() -> None:
    c = left((1, 10), (1, 19))
    take_over(c, 19)
    c.lifecycle.persisted("1-19")
    assert c.join(0, SlotWriter(100, 7), order=m.StandingOrder(19, 19)) == []
    assert c.tick(1.0) == []


def test_a_rank_whose_line_broke_before_its_request_came_through_repeats_its_order() -> None:
    c = left((1, 10), (1, 19))
    take_over(c, -1)
    assert of(c.join(0, SlotWriter(100, 7), order=m.StandingOrder(12, 12)), StartPersist)


# ── copiers that have stopped ────────────────────────────────────────────────────────────────


def after_a_keeper_died(keeper: Keeper, deaths: int, *, do_they_say: bool) -> list[int]:
    """How many slots there are after each death in the middle of a capture."""
    counts = []
    for death in range(deaths):
        attempt = granted(keeper.ask_all(100 + 2 * death))
        old, keeper.c = (
            keeper.c,
            Coordinator(keeper=f"k{death}", grant_deadline_s=GRANT_S, capture_deadline_s=CAPTURE_S),
        )
        slots = []
        for slot in old.slots.values():
            if slot.attempt == attempt:
                slot.state = "quarantined"
            slots.append(slot)
        keeper.c.discovered(slots, [a for a in old.attempts.values() if a.phase == "complete"])
        keeper.c.resume(1, "00000001", keeper.world, None, 0.0)
        for rank in range(keeper.world):
            keeper.c.join(rank, keeper.writer(rank), is_copying=not do_they_say)
        keeper.capture(101 + 2 * death)
        counts.append(len(keeper.c.slots))
    return counts


def test_a_rank_that_asks_again_and_copies_no_more_frees_what_was_kept_from_others() -> None:
    """Its copy ended after it had joined a new keeper: no message of its own says so."""
    keeper = Keeper(2)
    attempt = granted(keeper.ask_all(5))
    keeper.c.lost(1)
    keeper.c.join(1, keeper.writer(1))  # it still copies
    (slot,) = [s for s in keeper.c.slots.values() if s.rank == 1]
    assert (slot.state, slot.attempt) == ("quarantined", attempt)
    keeper.ask(1, 6)
    assert slot.state == "quarantined"
    keeper.ask(1, 7, is_copying=False)
    assert slot.state == "free"


def test_memory_does_not_grow_when_one_keeper_after_the_other_dies_during_a_capture() -> None:
    keeper = Keeper(2)
    keeper.capture(0)
    keeper.with_memory(keeper.c.lifecycle.preallocate())
    assert after_a_keeper_died(keeper, 3, do_they_say=True) == [6, 6, 6]
    assert "quarantined" not in keeper.states()


def test_slots_stay_quarantined_when_nobody_says_that_it_stopped() -> None:
    keeper = Keeper(2)
    keeper.capture(0)
    keeper.with_memory(keeper.c.lifecycle.preallocate())
    assert after_a_keeper_died(keeper, 2, do_they_say=False) == [6, 8]
    assert keeper.states().count("quarantined") == 4
    attempt = granted(keeper.ask_all(104))
    keeper.c.lost(0)
    keeper.c.lost(1)
    for rank in range(2):
        keeper.c.join(rank, keeper.writer(rank))
    assert keeper.states().count("quarantined") == 6, attempt
    (skip, *_) = told(keeper.ask_all(105), m.Skip)  # memory is not taken for them without end
    assert "may still be written to by ranks [0, 1]" in skip.reason
    assert len(keeper.c.slots) == 8


@pytest.mark.parametrize("other", ["rank", "process", "incarnation"])
def test_only_the_rank_that_copied_can_say_that_it_stopped(other: str) -> None:
    keeper = Keeper(2)
    attempt = granted(keeper.ask_all(5))
    keeper.c.lost(1)  # its line broke; nobody knows whether it still copies
    (slot,) = [s for s in keeper.c.slots.values() if s.rank == 1]
    assert (slot.state, slot.attempt) == ("quarantined", attempt)
    writer = keeper.writer(1)
    if other == "incarnation":  # the same process, but it began the run again
        keeper.begin(2, 2)
    if other == "process":
        writer = SlotWriter(writer.pid, writer.start + 1)
    keeper.c.join(0 if other == "rank" else 1, writer, is_copying=False)
    assert slot.state == "quarantined"


def test_a_save_that_waits_for_a_slot_gets_the_one_whose_copier_stopped() -> None:
    keeper = Keeper(1)
    keeper.capture(0, durable=True, exact=True)
    keeper.capture(1, durable=True, exact=True)
    busy = granted(keeper.ask_all(2, durable=True, exact=True))
    keeper.c.lost(0)
    keeper.c.join(0, keeper.writer(0), is_copying=True)
    assert keeper.states().count("quarantined") == 1
    keeper.c.join(0, keeper.writer(0), is_copying=False)
    assert granted(keeper.ask_all(3, durable=True, exact=True)) != busy
    assert len(keeper.c.slots) == 3


def test_a_copier_that_is_out_of_control_keeps_its_slot_from_everybody() -> None:
    keeper = Keeper(1)
    attempt = granted(keeper.ask_all(5))
    keeper.c.lifecycle.abort_capture(
        0, m.AbortCapture(attempt=attempt, reason="CUDA error", has_stopped=False)
    )
    assert keeper.states() == ["quarantined"]
    keeper.c.lifecycle.abort_capture(
        0, m.AbortCapture(attempt=attempt, reason="CUDA error", has_stopped=False)
    )
    assert keeper.states() == ["quarantined"]


# ── what grows ───────────────────────────────────────────────────────────────────────────────


def test_two_thousand_generations_leave_nothing_behind() -> None:
    keeper = Keeper(2)
    busy = ""
    for step in range(2000):
        attempt = keeper.capture(step, durable=step % 7 == 0)
        if busy and step % 5 == 0:
            keeper.c.lifecycle.persisted(busy) if step % 2 else keeper.c.lifecycle.persist_failed(
                busy, "disk full"
            )
        busy = next((a.id for a in keeper.c.attempts.values() if a.persisting), "")
        if step % 11 == 0:
            keeper.c.cancel_request(0, step + 1)
            keeper.c.decline(1, step + 10_000, "a lambda")
        keeper.with_memory(keeper.c.lifecycle.preallocate())
        assert attempt in keeper.c.attempts
        assert len(keeper.c.slots) <= 6
        assert len(keeper.c.attempts) <= 3
    assert len(keeper.c._requests._declined) <= 8
    assert len(keeper.c._requests._by_step) == 0
    assert len(keeper.c._layouts._held) == 1


def test_tables_that_change_at_every_step_are_forgotten_but_those_in_use_are_not() -> None:
    keeper = Keeper(2)
    for step in range(300):
        leaves = [LeafEntry("w", "F32", (1,), "split", None)]
        tables = [declared(leaves), declared([*leaves, LeafEntry("v", "F32", (step,), "split")])]
        for rank, data in enumerate(tables):
            ask = m.RequestCapture(
                step=step, table=table_hash(data), values_bytes=10, durable=False
            )
            actions = keeper.with_memory(keeper.c.request_capture(rank, ask, 0.0))
        wanted = [asked.hash for asked in told(actions, m.RequestTable)]
        assert wanted == [table_hash(tables[1])] or not step, "the other one is held"
        for rank in range(2):
            keeper.seal(rank, granted(actions))
    assert len(keeper.c._layouts._held) == 2
    assert len(keeper.c._layouts._agreed) <= LAYOUTS


def test_a_table_that_nobody_asked_for_is_not_kept() -> None:
    keeper = Keeper(1)
    assert keeper.c.table("0" * 32, b"", 0.0) == []
    assert not keeper.c._layouts._held


def test_a_table_under_another_name_ends_the_save_and_is_asked_for_again() -> None:
    keeper = Keeper(1)
    data = table(1)
    ask = m.RequestCapture(step=1, table=table_hash(data), values_bytes=10, durable=False)
    (order,) = of(keeper.c.request_capture(0, ask, 0.0), AgreeLayout)
    keeper.c.layout_agreed(order.tables, Agreement(), 0.0)
    other = deflate(table(1, "F64"))
    (order,) = of(keeper.c.table(ask.table, other, 0.0), AgreeLayout)
    agreement = agree_layout(remembers_nothing, order.tables, order.held)
    (skip,) = told(keeper.c.layout_agreed(order.tables, agreement, 0.0), m.Skip)
    assert f"the document named {ask.table} is" in skip.reason and not skip.is_passing
    asked = keeper.ask(0, 2)
    assert told(asked, m.RequestTable) and granted(asked)
