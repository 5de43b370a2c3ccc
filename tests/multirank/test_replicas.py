"""Real ranks, one of which has a bit that is not right: the save says which leaf and which rank."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast import events
from holdfast.observe.log import NoticeSink
from holdfast.observe.report_builder import read_report
from holdfast.observe.run_report import to_json
from support.models.models import build, train
from support.models.models import tensors as tensors_of
from support.runs.launch import run_ranks
from support.runs.mishaps import build as build_large
from support.runs.mishaps import listening
from support.runs.mishaps import train as train_large

#: In so many saves all is compared.
SAVES = 4
ARENA_BYTES = 24 << 20


def flip(tensor: torch.Tensor, at: int = 0) -> None:
    """Change one bit of what this rank holds of a tensor."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    local.view(-1).view(torch.int32)[at] ^= 1 << 20  # not one that the next update rounds away


def differing(heard: list[events.Event]) -> list[tuple[int, str, tuple[int, ...], int, bool]]:
    return [
        (each.step, each.leaf, each.ranks, each.replicas, each.is_known_which)
        for each in heard
        if isinstance(each, events.ReplicasDiffer)
    ]


def _data_parallel(rank: int, world: int, root: str) -> dict[str, Any]:
    model, state = build("ddp", seed=1)
    log = io.StringIO()
    holdfast.subscribe(NoticeSink(rank, stream=log))
    checkpointer = holdfast.Checkpointer(root, state, storage=None, compare_replicas=SAVES)
    found: dict[str, Any] = {"handles": []}
    with listening() as heard:
        for step in range(2 * SAVES):
            train(model, state, range(step, step + 1))
            with torch.no_grad():  # as batch statistics may, and nobody is to hear of it
                model.get_submodule("module.norm").get_buffer("running_mean").add_(rank)
            checkpointer.save(step).wait_captured(60)
        found["while all is well"] = differing(heard)
        assert not log.getvalue()
        for step in range(2 * SAVES, 4 * SAVES):
            train(model, state, range(step, step + 1))
            if step == 2 * SAVES and rank == 2:
                checkpointer.before_update()
                flip(dict(tensors_of(state))["blocks.1.up.weight"], 3)
            handle = checkpointer.save(step)
            handle.wait_captured(60)
            found["handles"] += [(handle.step, handle.differing)] if handle.differing else []
        found["then"] = differing(heard)
        found["compared"] = [
            each.compared_bytes for each in heard if isinstance(each, events.ImageCaptured)
        ]
    found["log"] = log.getvalue()
    checkpointer.close()
    return found


def test_one_bit_of_one_rank_is_found_within_as_many_saves_as_were_asked_for(
    tmp_path: Path,
) -> None:
    found = run_ranks(3, _data_parallel, str(tmp_path))
    leaf = "model.blocks.1.up.weight"
    assert all(each["while all is well"] == [] for each in found)
    told = found[0]["then"]
    # Twice all has been compared. From one turn of the leaf to the next its moments, and at once
    # the gradients of all ranks, are as they were: nothing else differs.
    assert [step for step, *_ in told] == [told[0][0], told[0][0] + SAVES]
    assert {each[1:] for each in told} == {(leaf, (2,), 3, True)}
    assert found[2]["then"] == told  # who is meant hears of it
    assert found[1]["then"] == []
    for each in found:
        assert each["handles"] == [(step, {leaf: (2,)}) for step, *_ in told]
        assert all(each["compared"])
    said = f"replicas differ: {leaf} on rank 2 is not what most of its 3 replicas hold"
    assert said in found[0]["log"] and not found[1]["log"] and not found[2]["log"]
    report = read_report(tmp_path)
    (divergence,) = report.divergences
    assert (divergence.leaf, divergence.ranks, divergence.saves) == (leaf, (2,), 2)
    assert to_json(report)["divergences"][0]["ranks"] == (2,)


def _hybrid(rank: int, world: int, root: str) -> list[Any]:
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    checkpointer = holdfast.Checkpointer(root, state, storage=None, compare_replicas=SAVES)
    with listening() as heard:
        for step in range(3 * SAVES):
            model(torch.ones(4, 7) + rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2 * SAVES and rank == 3:
                checkpointer.before_update()
                flip(optimizer.state[model[0].weight]["exp_avg_sq"])
            checkpointer.save(step).wait_captured(60)
    checkpointer.close()
    return differing(heard)


def test_under_hybrid_sharding_the_ranks_of_one_shard_are_named(tmp_path: Path) -> None:
    found = run_ranks(4, _hybrid, str(tmp_path))
    assert {leaf for _, leaf, *_ in found[0]} <= {
        "optimizer.0.weight.exp_avg_sq",
        "model.0.weight",  # it is updated by that
    }
    first = min(found[0])
    assert 2 * SAVES <= first[0] < 3 * SAVES
    assert {each[2:] for each in found[0]} == {((1, 3), 2, False)}
    assert found[1] == found[3] == found[0]
    assert found[2] == []


def _through_rings(rank: int, world: int, root: str) -> dict[str, Any]:
    state = build_large(wide=2170, layers=2)
    checkpointer = holdfast.Checkpointer(
        root, state, memory=None, storage=None, compare_replicas=SAVES
    )
    with listening() as heard:
        for step in range(2 * SAVES):
            train_large(state, step)
            if step == SAVES and rank == 1:
                checkpointer.before_update()
                flip(state["model"][3].bias)
            checkpointer.save(step, durable=True).wait_durable(60)
    checkpointer.close()
    return {
        "differ": differing(heard),
        "kinds": {type(each).__name__ for each in heard},
        "compared": sum(e.compared_bytes for e in heard if isinstance(e, events.ImagePassed)),
    }


def test_what_passes_through_rings_is_compared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ARENA_BYTES", str(ARENA_BYTES))
    found = run_ranks(2, _through_rings, str(tmp_path))
    for each in found:
        assert "ImagePassed" in each["kinds"] and "ImageCaptured" not in each["kinds"]
        assert each["compared"] > ARENA_BYTES
        assert {ranks for _, _, ranks, *_ in each["differ"]} == {(0, 1)}
        assert min(step for step, *_ in each["differ"]) >= SAVES


def _not_wanted(rank: int, world: int, root: str) -> list[Any]:
    model, state = build("ddp", seed=1)
    checkpointer = holdfast.Checkpointer(root, state, storage=None, compare_replicas=0)
    train(model, state, range(1))
    if rank:
        for _, tensor in tensors_of(state):
            with torch.no_grad():
                tensor.add_(1)
    with listening() as heard:
        handle = checkpointer.save(0)
        handle.wait_captured(60)
    checkpointer.close()
    (captured,) = [each for each in heard if isinstance(each, events.ImageCaptured)]
    return [*differing(heard), *handle.differing, *([captured] if captured.compared_bytes else [])]


def test_nothing_is_compared_where_that_is_not_wanted(tmp_path: Path) -> None:
    assert run_ranks(2, _not_wanted, str(tmp_path)) == [[], []]
