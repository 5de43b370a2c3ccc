"""Four ranks hold one set of leaves in eight ways; what one saves, each other restores."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import events
from holdfast import rules as r
from support.models import curves, shardings
from support.runs.launch import run_ranks

WORLD = 4
#: What is trained on, after the steps that are in the checkpoints.
FURTHER = range(shardings.STEPS, shardings.STEPS + 3)
#: The layouts from which a training that is cut over the ranks goes on.
SHARDED = {
    "fsdp": ("tp4", "zero1", "stages", "turned"),
    "hsdp": ("tp2", "mesh"),
    "fsdp_tp": ("zero3", "plain"),
    "ddp": ("tp4", "zero3"),
}
#: Sums over ranks are made in another order than on one, so the losses may differ in their last
#: bits: by at most 1.4e-7 of them, as measured, where a float32 tells 1.2e-7 apart.
REORDERED = 1e-6


def _from_each_to_each(rank: int, world: int, root: str) -> list[str]:
    """What differs from the whole leaves, for every pair of layouts."""
    found: list[str] = []
    layouts = {name: make(rank, world) for name, make in shardings.LAYOUTS.items()}
    for name, layout in layouts.items():
        state = shardings.build(layout, shardings.RANDOM)
        holdfast.save(f"{root}/{name}", state, rules=layout.rules)
    for saved, here in product(layouts, layouts):
        layout = layouts[here]
        state = shardings.build(layout, None)
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
        before = shardings.build(layout, shardings.RANDOM)
        first = holdfast.Checkpointer(place, before, storage=None, rules=layout.rules)
        first.save(0).wait_captured(30)
        first._hang_up()
        layout = shardings.LAYOUTS[here](rank, world)
        after = shardings.build(layout, None)
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
        before = shardings.build(layout, shardings.RANDOM)
        holdfast.save(f"{root}/{saved}", before, rules=layout.rules)
        layout = shardings.LAYOUTS[here](rank, world)
        state = shardings.build(layout, None)
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


def _trained_on(rank: int, world: int, root: str) -> dict[str, Any]:
    """A training is stored in every layout; from each it goes on, alone and cut over the ranks."""
    original = curves.make("alone", seed=0)
    original.train(range(shardings.STEPS))
    stopped = original.whole()
    for name, make in shardings.LAYOUTS.items():
        layout = make(rank, world)
        holdfast.save(f"{root}/{name}", shardings.build(layout, stopped), rules=layout.rules)
    curve = original.train(FURTHER)
    wrong = [
        f"{name} -> alone: {one}"
        for name in shardings.LAYOUTS
        for one in _goes_on(f"{root}/{name}", "alone", curve, original.whole())
    ]
    sharded = {}
    for kind, names in SHARDED.items():
        unstopped = curves.make(kind, seed=1)
        unstopped.fill(stopped)
        sharded[kind] = unstopped.train(FURTHER)
        for name in names:
            found = _goes_on(f"{root}/{name}", kind, sharded[kind], unstopped.held())
            wrong += [f"{name} -> {kind}: {one}" for one in found]
        holdfast.save(f"{root}/{kind}", unstopped.state, rules=unstopped.rules)
        alone = curves.make("alone", seed=3)
        holdfast.load(f"{root}/{kind}", alone.state, rules=alone.rules)
        different = curves.differences(alone.whole(), unstopped.whole())
        wrong += [f"{kind} -> alone: {one}" for one in different]
    return {"curve": curve, "sharded": sharded, "wrong": wrong}


def _goes_on(place: str, kind: str, curve: list[float], ended: shardings.Whole) -> list[str]:
    """What differs when a training of ``kind`` is restored and goes on."""
    again = curves.make(kind, seed=2, rate=1.0)
    holdfast.load(place, again.state, rules=again.rules)
    losses = again.train(FURTHER)
    found = [] if losses == curve else [f"the losses are {losses}, not {curve}"]
    return found + curves.differences(again.whole() if kind == "alone" else again.held(), ended)


def test_training_goes_on_from_every_layout_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(WORLD, _trained_on, str(tmp_path))):
        assert found["wrong"] == [], f"rank {rank}"
        assert found["curve"][-1] < 0.9 * found["curve"][0]
        for kind, curve in found["sharded"].items():
            assert curve == pytest.approx(found["curve"], rel=REORDERED), f"rank {rank}: {kind}"


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
