"""``plan_restore``: what a restore would do, asked before there is any memory for it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import events
from holdfast.errors import UsageError
from holdfast.geometry.box import Box


def state(sizes: tuple[int, ...] = (700, 600, 500), *, stepped: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    if stepped:
        model(torch.zeros(1, sizes[0])).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "large": torch.ones(400_000), "tokens": 3}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    holdfast.save(tmp_path, state(), step=5)
    return tmp_path


def meta(sizes: tuple[int, ...] = (700, 600, 500)) -> dict[str, Any]:
    with torch.device("meta"):
        found = state(sizes, stepped=False)
    return found | {"large": 0}


def test_a_state_on_the_meta_device_is_planned_as_a_real_one_is_restored(root: Path) -> None:
    plan = holdfast.plan_restore(root, meta())
    heard: list[events.Event] = []
    stop = holdfast.subscribe(lambda event, _: heard.append(event))
    holdfast.load(root, state(stepped=False))
    stop()
    (restored,) = [event for event in heard if isinstance(event, events.Restored)]
    assert plan.fits
    assert (plan.step, plan.world, plan.saved_world) == (5, 1, 1)
    assert plan.read_bytes == restored.read_bytes
    assert plan.wanted_bytes == plan.most_bytes == restored.size_bytes
    assert plan.ranks[0].images == 1
    assert plan.balance == 1.0


def test_all_that_does_not_fit_is_listed_and_nothing_is_raised(root: Path) -> None:
    plan = holdfast.plan_restore(root, meta((700, 600, 400)) | {"more": 1})
    assert not plan.fits
    text = "\n".join(plan.problems)
    assert "model.1.weight: the checkpoint has F32 [500, 600], the model F32 [400, 600]" in text
    assert "more: not in the checkpoint" in text
    del (less := meta())["large"], less["tokens"]
    less["model"] = nn.Sequential(less["model"][0])
    less["optimizer"] = torch.optim.AdamW(less["model"].parameters())
    problems = holdfast.plan_restore(root, less).problems
    assert "model.1.weight: in the checkpoint, but nothing in the state takes it" in problems
    assert "optimizer.1.bias: saved, but not in this optimizer" in problems


def test_ranks_that_take_different_parts_fit_together(root: Path) -> None:
    whole = meta()["model"]
    stages = []
    for number in ("0", "1"):
        model = nn.ModuleDict({number: whole[int(number)]})
        stages.append({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    plan = holdfast.plan_restore(root, stages)
    assert plan.problems == ()
    assert [one.rank for one in plan.ranks] == [0, 1]
    parameters = [700 * 600 + 600, 600 * 500 + 500]
    assert [one.wanted_bytes for one in plan.ranks] == [12 * n + 2 * 4 for n in parameters]
    assert not holdfast.plan_restore(root, stages[:1]).fits
    assert holdfast.plan_restore(root, stages[0], world=3).world == 3


def test_a_table_says_which_boxes_of_which_leaves_each_rank_wants(root: Path) -> None:
    rows = [{"model.0.weight": (slice(300 * n, 300 * n + 300), slice(None))} for n in (0, 1)]
    plan = holdfast.plan_restore(root, rows)
    assert plan.fits
    assert [one.wanted_bytes for one in plan.ranks] == [300 * 700 * 4] * 2
    assert plan.read_once_bytes is not None and plan.read_bytes is not None
    assert plan.read_once_bytes < plan.read_bytes  # a block in the middle holds rows of both
    both = holdfast.plan_restore(root, [{"model.0.bias": None}, {"model.0.bias": Box((0,), (9,))}])
    assert both.balance == pytest.approx(600 / 304.5)
    assert holdfast.plan_restore(root, {"lost": None}).problems == ("lost: not in the checkpoint",)
    with pytest.raises(UsageError, match=r"not inside model\.0\.bias"):
        holdfast.plan_restore(root, {"model.0.bias": Box((0,), (601,))})


def test_a_parallelism_may_be_named(root: Path) -> None:
    plan = holdfast.plan_restore(root, "dp=2,fsdp=2", step=5)
    assert (plan.world, plan.different) == (4, 2)
    assert plan.fits
    for wrong in (
        {"world": 3, "what": "dp=2"},
        {"world": 0, "what": {}},
        {"world": 3, "what": [{}]},
    ):
        with pytest.raises(UsageError):
            holdfast.plan_restore(root, wrong["what"], world=wrong["world"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a int is nothing to plan a restore for"):
        holdfast.plan_restore(root, 5)  # type: ignore[arg-type]
