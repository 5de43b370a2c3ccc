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
from holdfast.coordinator.actions import StoreLayout
from holdfast.geometry.layout import Layout, table_hash
from holdfast.geometry.ownership import WriteOwners
from holdfast.protocol import image_plan
from holdfast.protocol import messages as m
from holdfast.protocol.client import KeeperClient
from holdfast.state import describe
from support.coordinator.coordinators import Keeper, granted, of, table, told


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
    assert len(told(first, m.LayoutAgreed)) == len(of(first, StoreLayout)) == 1
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
        assert not told(first, m.LayoutAgreed) and not of(first, StoreLayout)
    assert coordinators_plans == planned


def test_another_form_of_the_state_is_planned_anew(coordinators_plans: Counts) -> None:
    keeper = Keeper(2)
    keeper.ask_all(0)
    before = coordinators_plans["merge"]
    changed = [keeper.ask(rank, 1, dtype="F64") for rank in range(2)]
    assert coordinators_plans["merge"] == before + 1
    assert told(changed[1], m.LayoutAgreed)


def test_a_table_is_decoded_once_for_all_ranks_that_declare_it(coordinators_plans: Counts) -> None:
    known = layouts.LayoutRegistry()
    data = table(300)
    for _ in range(2):
        for rank in range(300):
            known.learn(rank, table_hash(data), data)
    agreed = known.agree([table_hash(data)] * 300)
    assert coordinators_plans["table_from_json"] == 1
    assert agreed.image_bytes(7, 10) > 4096
    assert coordinators_plans["plan_image"] == 1


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
