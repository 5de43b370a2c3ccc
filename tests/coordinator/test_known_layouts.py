"""A layout is agreed once: tables and layouts are known by their hashes, and asked for if not."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.coordinator import layouts
from holdfast.coordinator.actions import Action, AgreeLayout, GrantSlot, PlanImages, StoreLayout
from holdfast.coordinator.coordinator import PLANNING
from holdfast.coordinator.layouts import Agreement, Tables, agree_layout, agreement_id
from holdfast.coordinator.slots import NO_SLOT
from holdfast.events import Event, LoopHeld, subscribe
from holdfast.geometry.layout import LeafEntry, deflate, merge, table_from_json, table_hash
from holdfast.keeper.jobs import Background
from holdfast.keeper.loop_watch import LoopWatch
from holdfast.protocol import messages as m
from support.coordinator.coordinators import (
    GRANT_S,
    TABLES,
    Keeper,
    declared,
    granted,
    of,
    remembers_nothing,
    table,
    told,
)


def ask(keeper: Keeper, rank: int, step: int, dtype: str = "F32") -> list[Action]:
    """What the coordinator answers; nobody does anything about it."""
    hash_ = table_hash(table(keeper.world, dtype))
    request = m.RequestCapture(step=step, table=hash_, values_bytes=10, durable=False)
    return keeper.c.request_capture(rank, request, 0.0)


def merged(world: int, dtype: str = "F32") -> Agreement:
    return Agreement(merge([table_from_json(table(world, dtype))] * world))


def order_of(actions: list[Action]) -> AgreeLayout:
    (order,) = of(actions, AgreeLayout)
    return order


def asked(keeper: Keeper, step: int = 1) -> AgreeLayout:
    """All ranks have asked; the order to agree their layout."""
    *_, last = [ask(keeper, rank, step) for rank in range(keeper.world)]
    return order_of(last)


def test_a_start_whose_layout_is_remembered_asks_for_no_table() -> None:
    keeper = Keeper(2)
    first = keeper.ask_all(1)
    (stored,) = of(first, StoreLayout)
    assert len(told(first, m.RequestTable)) == 1
    keeper.remembered = {stored.tables: stored.data}.get
    keeper.begin(2, 2)
    keeper.c.adopt(0.0)
    again = keeper.ask_all(2)
    assert not told(again, m.RequestTable) and granted(again)
    assert of(again, StoreLayout) == [stored], "hosts are told its hash"


def test_a_table_is_asked_for_once_of_the_first_rank_that_has_it() -> None:
    keeper = Keeper(4)
    wanted = {}
    for rank in range(4):
        actions = ask(keeper, rank, 1, ["F32", "F64", "F64", "F32"][rank])
    order = order_of(actions)
    for action in keeper.c.layout_agreed(order.tables, Agreement(), 0.0):
        wanted[action.message.hash] = action.rank  # type: ignore[union-attr]
    assert wanted == {table_hash(table(4)): 0, table_hash(table(4, "F64")): 1}
    first, second = wanted
    assert keeper.c.table(first, deflate(TABLES[first]), 0.0) == []
    assert keeper.c.table(first, deflate(TABLES[first]), 0.0) == [], "said twice"
    assert keeper.c.explain(1) == f"ranks [{wanted[second]}] have not sent their tables of leaves"
    order = order_of(keeper.c.table(second, deflate(TABLES[second]), 0.0))
    assert order.held.keys() == {first, second}
    agreement = agree_layout(remembers_nothing, order.tables, order.held)
    (skip,) = told(keeper.c.layout_agreed(order.tables, agreement, 0.0), m.Skip)
    assert "dtype" in skip.reason and not skip.is_passing


def test_while_a_layout_is_agreed_nothing_is_decided_and_nobody_waits_for_ever() -> None:
    keeper = Keeper(2)
    order = asked(keeper)
    assert keeper.c.tick(GRANT_S) == [] and keeper.c.explain(1) == PLANNING
    (skip,) = told(keeper.c.tick(GRANT_S + 0.1), m.Skip)
    assert skip.reason.startswith(PLANNING) and skip.is_passing
    assert [ask(keeper, rank, 2) for rank in range(2)] == [[], []], "it is being agreed"
    plans = of(keeper.c.layout_agreed(order.tables, merged(2), 0.0), PlanImages)
    assert [plan.ranks for plan in plans] == [(0, 1)]


@pytest.mark.parametrize("loss", ["gone", "withdrawn", "late"])
def test_a_rank_that_did_not_send_its_table_is_asked_again(loss: str) -> None:
    keeper = Keeper(2)
    order = asked(keeper)
    assert told(keeper.c.layout_agreed(order.tables, Agreement(), 0.0), m.RequestTable)
    match loss:
        case "gone":
            assert told(keeper.c.lost(0), m.Skip)
            keeper.c.join(0, keeper.writer(0))
        case "withdrawn":
            assert told(keeper.c.cancel_request(0, 1), m.Skip)
        case "late":
            assert told(keeper.c.tick(GRANT_S + 1), m.Skip)
    again = [action for rank in range(2) for action in ask(keeper, rank, 2)]
    assert [wanted.hash for wanted in told(again, m.RequestTable)] == [order.tables[0]]
    assert granted(keeper.with_memory(again))


def test_a_host_that_was_lost_plans_its_images_again_before_its_ranks_may_copy() -> None:
    """Its next keeper may lack the layout, and has it when it has planned."""
    keeper = Keeper(2)
    hosts = [m.HostEntry(id=f"h{n}", ranks=(n,)) for n in range(2)]
    keeper.c.begin(2, "00000002", 2, hosts)
    keeper.c.attach(1, (), ())
    for rank in range(2):
        keeper.c.join(rank, keeper.writer(rank))
    keeper.c.adopt(0.0)
    first = keeper.ask_all(1)
    for rank in range(2):
        keeper.seal(rank, granted(first))
    keeper.c.detach(1, "h1")
    keeper.c.attach(1, (), ())
    keeper.c.join(1, keeper.writer(1))
    again = [action for rank in range(2) for action in ask(keeper, rank, 2)]
    assert [plan.host for plan in of(again, PlanImages)] == [1]
    assert not of(again, GrantSlot) and of(again, StoreLayout)
    assert granted(keeper.with_memory(again))


def test_hosts_keep_every_layout_under_which_slots_may_be_granted_at_once() -> None:
    keeper = Keeper(1)
    stored = [
        of(keeper.ask(0, step, dtype=d), StoreLayout) for step, d in enumerate(["F32", "F64"])
    ]
    for attempt in list(keeper.c.attempts):
        keeper.c.lifecycle.abort_capture(0, m.AbortCapture(attempt=attempt, reason="enough"))
    assert not keeper.c.attempts
    assert keeper.c.used_layouts == {layout.hash for (layout,) in stored}


def test_the_layout_of_other_tables_ends_no_wait() -> None:
    keeper = Keeper(1)
    before = order_of(ask(keeper, 0, 1))
    assert told(keeper.c.cancel_request(0, 1), m.Skip)
    order = order_of(ask(keeper, 0, 2, "F64"))
    assert keeper.c.layout_agreed(before.tables, merged(1), 0.0) == []
    assert keeper.c.layout_agreed(before.tables, Agreement(reason="no"), 0.0) == []
    assert of(keeper.c.layout_agreed(order.tables, merged(1, "F64"), 0.0), PlanImages)


def test_what_was_begun_for_an_earlier_start_decides_nothing_before_this_one_may_save() -> None:
    keeper = Keeper(1)
    order = asked(keeper)
    keeper.begin(2, 1)
    assert ask(keeper, 0, 1) == []
    for agreement in (merged(1), Agreement(), Agreement(reason="no")):
        assert keeper.c.layout_agreed(order.tables, agreement, 0.0) == []
    assert granted(keeper.with_memory(keeper.c.adopt(0.0)))


def test_a_layout_that_cannot_be_agreed_ends_the_saves_that_wait_for_it_and_no_other() -> None:
    keeper = Keeper(1)
    order = asked(keeper)
    failed = Agreement(reason="no memory", is_passing=True)
    (skip,) = told(keeper.c.layout_agreed(order.tables, failed, 0.0), m.Skip)
    assert (skip.reason, skip.is_passing) == ("no memory", True)
    assert granted(keeper.ask(0, 2))


def test_an_agreement_is_known_by_its_tables_in_the_order_of_ranks_and_by_its_layout() -> None:
    known = agreement_id(("a", "b"), "f" * 32)
    assert known == agreement_id(("a", "b"), "f" * 32)
    others = [(("b", "a"), "f" * 32), (("a",), "f" * 32), (("a", "b"), "e" * 32)]
    assert len({known, *(agreement_id(*other) for other in others)}) == 4


def test_an_exact_save_whose_layout_was_replaced_waits_on_and_does_not_hold_up_a_later_one() -> (
    None
):
    keeper = Keeper(2)
    for step in range(3):
        busy = keeper.capture(step, durable=True, exact=True)
    assert not told(keeper.ask_all(3, durable=True, exact=True), m.Skip), "it waits for a slot"
    for step, dtype in enumerate(["F64", "F16"], 4):
        skips = [told(keeper.ask(rank, step, dtype=dtype), m.Skip) for rank in range(2)]
        assert [each.reason for each in skips[1]] == [NO_SLOT]
    keeper.ask(0, 6)
    assert not told(keeper.c.tick(1.0), m.Skip)
    assert keeper.c.lifecycle.is_waiting(3)
    (skip,) = told(keeper.ask(1, 6), m.Skip)
    assert skip.reason == NO_SLOT, "step 6 was decided"
    layout = keeper.c.attempts[busy].layout
    freed: list[Action] = []
    while not of(freed, GrantSlot):
        freed = keeper.c.lifecycle.persisted(next(iter(keeper.c.attempts)))
    assert keeper.c.lifecycle.layout_sent == layout, "for step 6, and no other since"
    assert keeper.c.attempts[granted(freed)].layout == layout
    assert layout in keeper.c.used_layouts


def test_before_a_start_knows_what_it_goes_on_from_nothing_is_decided_and_it_says_so() -> None:
    keeper = Keeper(1, adopted=False)
    assert ask(keeper, 0, 1) == []
    assert keeper.c.explain(1) == "it is not known yet what the run goes on from"
    assert keeper.c.tick(2 * GRANT_S) == []


def test_an_answer_about_tables_that_others_have_taken_the_place_of_changes_nothing() -> None:
    registry = layouts.LayoutRegistry()
    registry.begin(("a", "a"), 0.0)
    registry.begin(("b", "b"), 1.0)
    registry.agreed_on(("b", "b"), Agreement())  # nobody here knows it
    assert registry.missing(("b", "b")) == {"b": 0}
    registry.agreed_on(("a", "a"), Agreement(reason="of an earlier start", is_passing=False))
    assert registry.missing(("b", "b")) == {"b": 0}
    assert registry.learn("b", b"") == ("b", "b")


def test_an_agreement_that_never_ends_is_begun_again() -> None:
    registry = layouts.LayoutRegistry()
    registry.begin(("a",), 0.0)
    assert registry.is_under_way(("a",), layouts.ORDER_AGAIN_S - 1)
    assert not registry.is_under_way(("a",), layouts.ORDER_AGAIN_S)


def test_a_remembered_layout_of_another_version_is_agreed_anew() -> None:
    hash_ = table_hash(table(1))
    tables, held = (hash_,), {hash_: deflate(TABLES[hash_])}
    for remembered in (b"{}", b"", merged(1).layout.to_json()[:-1]):  # type: ignore[union-attr]
        assert agree_layout(lambda _, data=remembered: data, tables, {}) == Agreement()  # type: ignore[misc]
        found = agree_layout(lambda _, data=remembered: data, tables, held)  # type: ignore[misc]
        assert found.layout == merged(1).layout


# ── beside the loop ──────────────────────────────────────────────────────────────────────────


def sets_of_names(sets: int, leaves: int, world: int) -> tuple[Tables, Mapping[str, bytes]]:
    """Tables of ranks in so many groups, each with leaves of its own."""
    found = [
        declared([LeafEntry(f"g{group:03}.w{n:05}", "F32", (8,), "split") for n in range(leaves)])
        for group in range(sets)
    ]
    hashes = [table_hash(data) for data in found]
    held = {hash_: deflate(data) for hash_, data in zip(hashes, found, strict=True)}
    return tuple(hashes[rank * sets // world] for rank in range(world)), held


def test_tables_are_read_and_merged_on_a_helper_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 ranks with 64 sets of names of 3,000 leaves took 0.8 s of the loop."""
    threads: dict[str, set[str]] = {}

    def watched(name: str) -> None:
        function = getattr(layouts, name)

        def call(*arguments: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            assert not gc.isenabled(), "the collector would hold the loop too"
            return function(*arguments)

        monkeypatch.setattr(layouts, name, call)

    for name in ("inflate", "table_from_json", "merge", "deflate"):
        watched(name)
    tables, held = sets_of_names(64, 30, 1024)

    async def play() -> Agreement:
        return await Background().agree_layout(remembers_nothing, tables, held)

    agreement = asyncio.run(play())
    assert agreement.layout is not None and len(agreement.layout.leaves) == 64 * 30
    assert gc.isenabled()
    assert threads.keys() == {"inflate", "table_from_json", "merge", "deflate"}
    names = set().union(*threads.values())
    assert all(name.startswith("holdfast-keeper") for name in names), names


def test_the_coordinator_itself_never_reads_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(8)
    order = asked(keeper)
    for name in ("inflate", "table_from_json", "merge", "deflate"):
        monkeypatch.setattr(layouts, name, None)
    keeper.c.layout_agreed(order.tables, Agreement(), 0.0)
    hash_ = order.tables[0]
    order = order_of(keeper.c.table(hash_, b"whatever it is", 0.0))
    monkeypatch.undo()
    plans = of(keeper.c.layout_agreed(order.tables, merged(8), 0.0), PlanImages)
    assert plans and not of(plans, GrantSlot)


@pytest.mark.slow
def test_a_loop_is_hardly_held_while_a_large_layout_is_agreed_beside_it() -> None:
    tables, held = sets_of_names(64, 3000, 1024)
    reports: list[Event] = []
    spent_s: list[float] = []

    async def play() -> None:
        background, watch = Background(), LoopWatch("a", report_s=0.0)
        working = asyncio.create_task(background.agree_layout(remembers_nothing, tables, held))
        began_s = time.monotonic()
        while not working.done():
            await watch.pause(0.01)
        spent_s.append(time.monotonic() - began_s)
        watch.close()
        assert working.result().layout is not None

    unsubscribe = subscribe(lambda event, _: reports.append(event))
    try:
        asyncio.run(play())
    finally:
        unsubscribe()
    longest_s = max((one.longest_s for one in reports if isinstance(one, LoopHeld)), default=0.0)
    assert longest_s < spent_s[0] / 4, f"held for {longest_s} of {spent_s} s"
