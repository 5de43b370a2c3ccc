"""Four ranks hold one set of leaves in eight ways; what one saves, each other restores."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
import shardings
from holdfast import events
from holdfast import rules as r
from launch import run_ranks

WORLD = 4


def _from_each_to_each(rank: int, world: int, root: str) -> list[str]:
    """What differs from the whole leaves, for every pair of layouts."""
    found: list[str] = []
    layouts = {name: make(rank, world) for name, make in shardings.LAYOUTS.items()}
    for name, layout in layouts.items():
        state = shardings.build(layout, filled=True)
        holdfast.save(f"{root}/{name}", state, rules=layout.rules)
    for saved, here in product(layouts, layouts):
        layout = layouts[here]
        state = shardings.build(layout, filled=False)
        try:
            holdfast.load(f"{root}/{saved}", state, rules=layout.rules)
        except holdfast.HoldfastError as error:
            found.append(f"{saved} -> {here}: {type(error).__name__}: {error}")
            continue
        found += [f"{saved} -> {here}: {one}" for one in shardings.differences(layout, state)]
    return found


def _through_memory(rank: int, world: int, root: str) -> list[str]:
    """The same out of the keeper's memory, from one to the next in a ring of layouts."""
    found: list[str] = []
    names = list(shardings.LAYOUTS)
    for number, (saved, here) in enumerate(zip(names, names[1:] + names[:1], strict=True)):
        place = f"{root}/{number}"
        layout = shardings.LAYOUTS[saved](rank, world)
        before = shardings.build(layout, filled=True)
        first = holdfast.Checkpointer(place, before, storage=None, rules=layout.rules)
        first.save(0).wait_captured(30)
        first._hang_up()
        layout = shardings.LAYOUTS[here](rank, world)
        after = shardings.build(layout, filled=False)
        second = holdfast.Checkpointer(place, after, storage=None, rules=layout.rules)
        restored = second.restore()
        if restored is None or restored.source != "memory":
            found.append(f"{saved} -> {here}: {restored}")
        found += [f"{saved} -> {here}: {one}" for one in shardings.differences(layout, after)]
        second.close()
    return found


def _copies_that_differ(rank: int, world: int, root: str) -> dict[str, Any]:
    """Averaged copies; then what is exchanged between ranks, and what no rank holds."""
    rules = r.Rules([("free", r.averaged)], {"dp": world})
    model = nn.ParameterDict({"free": nn.Parameter(_copy_of(rank)), "same": torch.ones(3)})
    optimizer = torch.optim.SGD([model["free"]], lr=0.5, momentum=0.5)
    optimizer.state[model["free"]]["momentum_buffer"] = -_copy_of(rank)
    holdfast.save(f"{root}/averaged", {"model": model, "optimizer": optimizer}, rules=rules)
    again = nn.ParameterDict({"free": nn.Parameter(torch.zeros(7)), "same": torch.zeros(3)})
    there = torch.optim.SGD([again["free"]], lr=0.1, momentum=0.5)
    holdfast.load(f"{root}/averaged", {"model": again, "optimizer": there}, rules=rules)
    momentum = there.state[again["free"]]["momentum_buffer"]
    found: dict[str, Any] = {
        "own": torch.equal(again["free"], model["free"]) and torch.equal(momentum, -_copy_of(rank))
    }

    os.environ["HOLDFAST_EXCHANGE"] = "always"
    heard: list[events.Restored] = []
    holdfast.subscribe(
        lambda event, _: heard.append(event) if isinstance(event, events.Restored) else None
    )
    found["exchanged"] = []
    for saved, here in (("zero3", "tp2"), ("tp4", "zero1"), ("mesh", "turned"), ("zero1", "mesh")):
        layout = shardings.LAYOUTS[saved](rank, world)
        before = shardings.build(layout, filled=True)
        holdfast.save(f"{root}/{saved}", before, rules=layout.rules)
        layout = shardings.LAYOUTS[here](rank, world)
        state = shardings.build(layout, filled=False)
        holdfast.load(f"{root}/{saved}", state, rules=layout.rules)
        found["exchanged"] += shardings.differences(layout, state)
    found["received"] = [event.received_bytes > 0 for event in heard]

    part = holdfast.declare(torch.zeros(2), holdfast.Shard((8,), (2 * (rank % 3),)))
    try:
        holdfast.save(f"{root}/holes", {"part": part})
        found["holes"] = "saved"
    except holdfast.StateMismatch as error:
        found["holes"] = str(error)
    return found


def _copy_of(rank: int) -> torch.Tensor:
    return torch.rand(7, generator=torch.Generator().manual_seed(rank))


def test_copies_that_differ_are_each_ones_own_or_their_mean(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(WORLD, _copies_that_differ, str(tmp_path))):
        assert found["own"], f"rank {rank}"
        assert found["exchanged"] == [], f"rank {rank}"
        assert found["received"] == [True] * 4, f"rank {rank}"
        assert "part" in found["holes"] and "no rank holds" in found["holes"]
    alone = nn.ParameterDict({"free": nn.Parameter(torch.zeros(7)), "same": torch.zeros(3)})
    optimizer = torch.optim.SGD([alone["free"]], lr=0.1, momentum=0.5)
    rules = r.Rules([("free", r.averaged)], {"dp": 1})
    state = {"model": alone, "optimizer": optimizer}
    holdfast.load(tmp_path / "averaged", state, rules=rules)
    mean = torch.stack([_copy_of(rank) for rank in range(WORLD)]).double().mean(0).float()
    assert torch.equal(alone["free"].detach(), mean)
    assert torch.equal(optimizer.state[alone["free"]]["momentum_buffer"], -mean)
    with holdfast.open(tmp_path / "averaged") as checkpoint:
        assert checkpoint.leaves["model.free"].shape == (WORLD, 7)
        assert checkpoint.leaves["model.same"].shape == (3,)


def test_what_one_layout_saved_each_other_restores_bit_for_bit(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(WORLD, _from_each_to_each, str(tmp_path))):
        assert found == [], f"rank {rank}"


def test_layouts_follow_each_other_out_of_memory(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(WORLD, _through_memory, str(tmp_path))):
        assert found == [], f"rank {rank}"
