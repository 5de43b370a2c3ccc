"""A save whose layout did not change plans nothing: not on the trainer, not on the coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Checkpointer
from holdfast.capture import copier as mapped
from holdfast.coordinator import layouts
from holdfast.coordinator.actions import (
    Action,
    AgreeLayout,
    AllocateSlots,
    PlanImages,
    StoreLayout,
)
from holdfast.coordinator.coordinator import PLANNING
from holdfast.coordinator.layouts import agree_layout
from holdfast.geometry.layout import Layout, deflate, table_hash
from holdfast.geometry.ownership import WriteOwners
from holdfast.protocol import image_plan
from holdfast.protocol import messages as m
from holdfast.protocol.client import KeeperClient
from holdfast.state import describe
from support.coordinator.coordinators import GRANT_S, TABLES, Keeper, granted, of, table, told


class Counts(Counter[str]):
    """How often functions are called that are watched."""

    def watch(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self[name] += 1
            return function(*args, **kwargs)

        patch.setattr(owner, name, counted)


@pytest.fixture
def coordinators_plans(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts = Counts()
    for name in ("table_from_json", "merge", "image_items", "plan_image"):
        counts.watch(monkeypatch, image_plan if "image" in name else layouts, name)
    counts.watch(monkeypatch, WriteOwners, "__init__")
    counts.watch(monkeypatch, WriteOwners, "of_rank")
    return counts


def test_the_coordinator_plans_once_for_all_saves_of_a_layout(coordinators_plans: Counts) -> None:
    keeper = Keeper(3)
    first = keeper.ask_all(0)
    assert len(of(first, PlanImages)) == len(of(first, StoreLayout)) == 1
    planned = Counter(coordinators_plans)
    assert planned == {
        "table_from_json": 1,
        "merge": 1,
        "image_items": 3,
        "plan_image": 3,
        "__init__": 1,
        "of_rank": 3,
    }
    for step in range(1, 6):
        attempt = granted(first)
        for rank in range(3):
            keeper.seal(rank, attempt)
        first = keeper.ask_all(step, values=10 + step)
        assert granted(first) != attempt
        assert not of(first, PlanImages) and not of(first, StoreLayout)
    assert coordinators_plans == planned


def test_another_form_of_the_state_is_planned_anew(coordinators_plans: Counts) -> None:
    keeper = Keeper(2)
    keeper.ask_all(0)
    before = coordinators_plans["merge"]
    changed = [keeper.ask(rank, 1, dtype="F64") for rank in range(2)]
    assert coordinators_plans["merge"] == before + 1
    assert of(changed[1], StoreLayout)
    back = [keeper.ask(rank, 2) for rank in range(2)]
    assert of(back[1], StoreLayout) and not of(back[1], PlanImages)
    assert coordinators_plans["merge"] == before + 1


def test_the_coordinator_plans_no_image_and_each_host_those_of_its_ranks(
    coordinators_plans: Counts,
) -> None:
    """64 hosts, 512 ranks and 3,000 leaves were 20 s of one turn: all lines broke, and no save."""
    hosts = [m.HostEntry(id=f"h{n}", ranks=tuple(range(8 * n, 8 * n + 8))) for n in range(64)]
    keeper = Keeper(512)
    keeper.has_memory = False
    keeper.c.begin(2, "00000002", 512, hosts)
    for number in range(1, 64):
        keeper.c.attach(number, (), ())
    for rank in range(512):
        keeper.c.join(rank, keeper.writer(rank))
    keeper.c.adopt(0.0)
    data = table(512)
    actions: list[Action] = []
    for rank in range(512):
        ask = m.RequestCapture(step=3, table=table_hash(data), values_bytes=10, durable=False)
        actions += keeper.c.request_capture(rank, ask, 0.0)
    actions = agreed(keeper, actions)
    plans = of(actions, PlanImages)
    assert {plan.host: plan.ranks for plan in plans} == {
        number: host.ranks for number, host in enumerate(hosts)
    }
    assert keeper.c.explain(3) == PLANNING
    assert coordinators_plans["plan_image"] == coordinators_plans["of_rank"] == 0
    for plan in plans:
        before = coordinators_plans["plan_image"]
        sizes = image_plan.plan_sizes(plan.layout, plan.ranks)
        assert coordinators_plans["plan_image"] == before + 8
        assert not of(actions, AllocateSlots)
        actions = keeper.c.images_planned(plan.layout.hash, sizes, 1.0)
    assert len(of(actions, AllocateSlots)) == 512


@pytest.mark.parametrize("is_passing", [True, False])
def test_images_that_a_host_cannot_plan_end_the_save_with_its_reason(is_passing: bool) -> None:
    keeper = Keeper(1)
    (plan,) = of(agreed(keeper, ask_first(keeper)), PlanImages)
    failed = image_plan.ImageSizes({}, "no room for the layout", is_passing)
    (skip,) = told(keeper.c.images_planned(plan.layout.hash, failed, 0.0), m.Skip)
    assert (skip.reason, skip.is_passing) == ("no room for the layout", is_passing)
    assert keeper.c.images_planned("another", failed, 0.0) == []
    assert granted(keeper.ask(0, 1))


def test_who_waits_no_longer_for_images_to_be_planned_ends_the_wait_of_all() -> None:
    keeper = Keeper(1)
    assert of(agreed(keeper, ask_first(keeper)), PlanImages)
    (skip,) = told(keeper.c.cancel_request(0, 0), m.Skip)
    assert skip.reason.endswith(PLANNING) and skip.is_passing


def test_a_host_that_plans_for_too_long_ends_the_save() -> None:
    keeper = Keeper(1)
    (plan,) = of(agreed(keeper, ask_first(keeper)), PlanImages)
    assert keeper.c.tick(GRANT_S) == []
    (skip,) = told(keeper.c.tick(GRANT_S + 0.1), m.Skip)
    assert skip.reason.startswith(PLANNING) and skip.is_passing
    again = agreed(keeper, ask_first(keeper))
    assert not of(again, PlanImages), "the host plans already"
    sizes = image_plan.plan_sizes(plan.layout, plan.ranks)
    assert of(keeper.c.images_planned(plan.layout.hash, sizes, 0.0), AllocateSlots)


def test_a_lost_host_is_told_again_what_it_has_not_planned() -> None:
    keeper = Keeper(2)
    keeper.has_memory = False
    hosts = [m.HostEntry(id=f"h{n}", ranks=(n,)) for n in range(2)]
    keeper.c.begin(2, "00000002", 2, hosts)
    keeper.c.attach(1, (), ())
    for rank in range(2):
        keeper.c.join(rank, keeper.writer(rank))
    keeper.c.adopt(0.0)
    data = table(2)
    for told_again in ([0, 1], [], [0, 1]):
        actions: list[Action] = []
        for rank in range(2):
            ask = m.RequestCapture(step=3, table=table_hash(data), values_bytes=10, durable=False)
            actions += keeper.c.request_capture(rank, ask, 0.0)
        actions = agreed(keeper, actions)
        assert [plan.host for plan in of(actions, PlanImages)] == told_again
        keeper.c.cancel_request(0, 3)
        if not told_again:
            keeper.c.detach(1, "h1")
            keeper.c.attach(1, (), ())
            keeper.c.join(1, keeper.writer(1))


def test_a_layout_that_cannot_be_divided_costs_no_save_of_another() -> None:
    keeper = Keeper(1)
    (plan,) = of(agreed(keeper, ask_first(keeper)), PlanImages)
    assert told(keeper.c.cancel_request(0, 0), m.Skip)
    other = table(1, "F64")
    ask = m.RequestCapture(step=1, table=table_hash(other), values_bytes=10, durable=False)
    (second,) = of(agreed(keeper, keeper.c.request_capture(0, ask, 0.0)), PlanImages)
    failed = image_plan.ImageSizes({}, "no room for the layout")
    assert keeper.c.images_planned(plan.layout.hash, failed, 0.0) == []
    sizes = image_plan.plan_sizes(second.layout, second.ranks)
    assert of(keeper.c.images_planned(second.layout.hash, sizes, 0.0), AllocateSlots)


def ask_first(keeper: Keeper) -> list[Action]:
    data = table(keeper.world)
    ask = m.RequestCapture(step=0, table=table_hash(data), values_bytes=10, durable=False)
    return keeper.c.request_capture(0, ask, 0.0)


def agreed(keeper: Keeper, actions: list[Action]) -> list[Action]:
    """What follows when the tables are sent and the layout is agreed; no image is planned."""
    for order in of(actions, AgreeLayout):
        agreement = agree_layout(keeper.remembered, order.tables, order.held)
        return agreed(keeper, keeper.c.layout_agreed(order.tables, agreement, 0.0))
    for wanted in told(actions, m.RequestTable):
        said = deflate(TABLES[wanted.hash])
        return agreed(keeper, keeper.c.table(wanted.hash, said, 0.0))
    return actions


def test_a_table_is_asked_for_and_decoded_once_for_all_ranks_that_declare_it(
    coordinators_plans: Counts,
) -> None:
    keeper = Keeper(300)
    actions = keeper.ask_all(1)
    assert len(told(actions, m.RequestTable)) == 1
    assert coordinators_plans["table_from_json"] == 1
    assert coordinators_plans["plan_image"] == 300


def test_a_trainer_describes_and_plans_once_and_is_told_the_layout_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts()
    counts.watch(monkeypatch, mapped, "plan_copies")
    counts.watch(monkeypatch, describe, "table_to_json")
    counts.watch(monkeypatch, describe, "leaf_entry")
    counts.watch(monkeypatch, Layout, "from_json")
    said: list[type[m.Message]] = []
    send = KeeperClient.send

    def listen(self: KeeperClient, message: m.Message, seq: int = 0) -> None:
        said.append(type(message))
        send(self, message, seq)

    monkeypatch.setattr(KeeperClient, "send", listen)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path, state, storage=None) as checkpointer:
        for step in range(6):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            checkpointer.save(step).wait_captured(timeout_s=60)
            if step == 1:  # the first saves alone are of a state that has its moments
                planned = Counter(counts)
    assert planned["plan_copies"] == planned["from_json"] == 1
    assert planned["table_to_json"] and planned["leaf_entry"]
    assert counts == planned
    assert Counter(said)[m.LeafTable] == 1
    assert Counter(said)[m.RequestCapture] == 6
