"""Its state is saved and restored like any other's: by parameter, to and from torch's AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.offload import HybridAdamW, HybridSGD
from support.models import hybrids

SMALL: dict[str, Any] = {"subgroup_elements": 700, "device_share": 0.5}


def hybrid_state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    model = hybrids.tiny(dtype, seed)
    return {"model": model, "optimizer": HybridAdamW(hybrids.groups(model), 1e-2, **SMALL)}


def torch_state(seed: int) -> dict[str, Any]:
    model = hybrids.tiny(seed=seed)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(hybrids.groups(model), 1e-2, fused=True),
    }


MAKERS = {"hybrid": hybrid_state, "torch": torch_state}


def train(state: dict[str, Any], steps: range) -> list[float]:
    return hybrids.train(state["model"], state["optimizer"], steps)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return hybrids.differences(
        (one["model"], one["optimizer"]), (other["model"], other["optimizer"])
    )


@pytest.mark.parametrize("saved_by", MAKERS)
@pytest.mark.parametrize("loaded_by", MAKERS)
def test_either_optimizer_goes_on_from_the_others_checkpoint(
    tmp_path: Path, saved_by: str, loaded_by: str
) -> None:
    there = MAKERS[saved_by](0)
    train(there, range(3))
    holdfast.save(tmp_path, there, step=2)
    here = MAKERS[loaded_by](1)
    holdfast.load(tmp_path, here)
    assert differences(here, there) == []
    assert train(here, range(3, 6)) == train(there, range(3, 6))
    assert differences(here, there) == []


@pytest.mark.parametrize("only", [None, ["model.**", "optimizer.**"]], ids=["whole", "chosen"])
def test_a_restore_into_a_new_optimizer_reads_straight_into_its_rows(
    tmp_path: Path, only: list[str] | None
) -> None:
    there, here = hybrid_state(0, torch.bfloat16), hybrid_state(1, torch.bfloat16)
    train(there, range(3))
    holdfast.save(tmp_path, there, step=2)
    holdfast.load(tmp_path, here, only=only)
    for row, place in here["optimizer"]._places.values():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            kept = here["optimizer"].state[place.parameter][kind]
            assert kept.data_ptr() == row.flat(kind, place).data_ptr()


def test_a_restore_reads_into_the_rows_and_an_optimizer_that_stepped_follows_it(
    tmp_path: Path,
) -> None:
    there, here = hybrid_state(0), hybrid_state(1)
    train(there, range(3))
    holdfast.save(tmp_path, there, step=2)
    train(here, range(5))
    rows = [row.memory("exp_avg").data_ptr() for row, _ in here["optimizer"]._places.values()]
    holdfast.load(tmp_path, here)
    after = [row.memory("exp_avg").data_ptr() for row, _ in here["optimizer"]._places.values()]
    assert rows == after
    for row, place in here["optimizer"]._places.values():
        kept = here["optimizer"].state[place.parameter]["exp_avg"]
        assert kept.data_ptr() == row.flat("exp_avg", place).data_ptr()
    assert train(here, range(3, 6)) == train(there, range(3, 6))
    assert differences(here, there) == []


def test_a_model_restored_without_the_optimizer_is_what_is_trained_on(tmp_path: Path) -> None:
    there, here = torch_state(0), hybrid_state(1)
    holdfast.save(tmp_path, there, step=2)
    train(here, range(2))
    for parameter in here["model"].parameters():
        here["optimizer"].state[parameter].clear()
    holdfast.load(tmp_path, here, only=["model.**"])
    assert train(here, range(3)) == train(there, range(3))


def test_masters_of_16_bits_are_leaves_and_the_run_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path,
) -> None:
    there, here = hybrid_state(0, torch.bfloat16), hybrid_state(1, torch.bfloat16)
    train(there, range(3))
    holdfast.save(tmp_path, there, step=2)
    with holdfast.open(tmp_path) as checkpoint:
        found = {name: str(leaf.dtype) for name, leaf in checkpoint.leaves.items()}
    assert {name for name in found if name.startswith("optimizer.0.weight.")} == {
        f"optimizer.0.weight.{kind}" for kind in ("exp_avg", "exp_avg_sq", "master", "step")
    }
    holdfast.load(tmp_path, here)
    assert train(here, range(3, 6)) == train(there, range(3, 6))
    assert differences(here, there) == []


def test_masters_that_were_not_stored_are_the_restored_parameters(tmp_path: Path) -> None:
    """A checkpoint without masters, into an optimizer that has others by now."""
    there, here = hybrid_state(0, torch.bfloat16), hybrid_state(1, torch.bfloat16)
    train(there, range(3))
    for parameter in there["model"].parameters():
        del there["optimizer"].state[parameter]["master"]
    holdfast.save(tmp_path, there, step=2)
    train(here, range(3))
    holdfast.load(tmp_path, here)
    train(here, range(3, 4))
    train(there, range(3, 4))
    assert differences(here, there) == []


def test_a_checkpointer_takes_it_behind_training_and_a_restart_finds_it(tmp_path: Path) -> None:
    state = hybrid_state(0, torch.bfloat16)
    truth: dict[int, dict[str, torch.Tensor]] = {}
    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        for step in range(6):
            train(state, range(step, step + 1))
            truth[step] = _content(state)
            checkpointer.save(step, durable=True)
    for step in truth:
        again = hybrid_state(1, torch.bfloat16)
        holdfast.load(tmp_path, again, step)
        found = _content(again)
        assert found.keys() == truth[step].keys()
        assert [name for name in found if not hybrids.same(found[name], truth[step][name])] == []


def _content(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {name: p.detach().clone() for name, p in state["model"].named_parameters()}
    for name, parameter in state["model"].named_parameters():
        for kind, tensor in state["optimizer"].state[parameter].items():
            found[f"{name}.{kind}"] = tensor.clone()
    return found


def test_every_leaf_of_it_is_copied_behind_the_next_forward(tmp_path: Path) -> None:
    from holdfast.state.describe import Describer

    state = hybrid_state(0, torch.bfloat16)
    train(state, range(1))
    bindings = Describer(state, 0).describe().bindings
    assert bindings and not bindings.volatile


def test_sgd_goes_on_too(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model = hybrids.tiny(seed=seed)
        optimizer = HybridSGD(model.parameters(), 0.05, momentum=0.9, dampening=0.5, **SMALL)
        return {"model": model, "optimizer": optimizer}

    there, here = make(0), make(1)
    train(there, range(3))
    holdfast.save(tmp_path, there, step=2)
    holdfast.load(tmp_path, here)
    assert train(here, range(3, 6)) == train(there, range(3, 6))
    plain = nn.ModuleList([hybrids.tiny(seed=2)])[0]
    optimizer = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9, dampening=0.5, fused=True)
    holdfast.load(tmp_path, {"model": plain, "optimizer": optimizer})
    again = make(5)
    holdfast.load(tmp_path, again)
    assert hybrids.train(plain, optimizer, range(3, 6)) == train(again, range(3, 6))
