"""Every writer's checkpoints come into 1, 2 and 4 ranks of FSDP2, tensor parallelism and DDP, and
training goes on over the border as if there were none.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast
from holdfast.cli import main
from support.checkpoints.megatron_names import give_extra_state, rank_files_expected
from support.runs.launch import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"
#: Each with the number of its cases. Files of Megatron's ranks and of experts are for `slow` alone.
WRITERS = {
    "accelerate-1.15.0": 2,
    "deepspeed-0.19.8": 23,
    "lightning-2.6.6": 3,
    "megatron-core-0.16.1": 8,
    "transformers-5.23.0": 2,
}
LAYOUTS = ("fsdp", "tp", "ddp")
#: The modules of DeepSpeed's net in the order in which it has them, which numbers follow.
_NET = ("embed", "up", "norm", "frozen", "mean", "count")
#: What decides how an update is computed is the restoring program's.
_OPTIONS = {"params", "fused", "foreach", "capturable", "differentiable"}


SLOW = ("ranks-", "experts-")


def cases(writer: str, world: int) -> list[Path]:
    found = sorted(path for path in (GOLDEN / writer).iterdir() if path.is_dir())
    return [path for path in found if world != 2 or not path.name.startswith(SLOW)]


def expected_of(case: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """By the names of leaves: what the writer's own loader gave."""
    tensors = load_file(case / "expected.safetensors")
    values = json.loads((case / "expected.json").read_text())
    if case.name.startswith("ranks-"):
        tensors = rank_files_expected(case)
        moved = [name for name in tensors if name.endswith(".exp_avg")]
        step = torch.tensor(values["step"])
        tensors |= {name.removesuffix("exp_avg") + "step": step for name in moved}
    elif case.parent.name.startswith("megatron"):
        model = {name: one for name, one in tensors.items() if not name.startswith("optimizer.")}
        tensors = {f"model.{name}": one for name, one in model.items()}
    return tensors, values


def _place(name: str) -> tuple[Any, ...]:
    """Where a module has a parameter: weights come before biases."""
    path, _, last = name.rpartition(".")
    top = path.partition(".")[0] or last
    first = _NET.index(top) if top in _NET else int(top == "lm_head")
    return (first, path, last != "weight", last)


def module_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module that has these tensors, with other numbers in them; tied as those of the writer."""
    names = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    model = nn.Module()
    for name in sorted(names, key=_place):
        *path, last = name.split(".")
        at = model
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        other = torch.full_like(tensors[f"model.{name}"], 7)
        if other.is_floating_point() and last not in ("mean", "count"):
            at.register_parameter(last, nn.Parameter(other))
        else:
            at.register_buffer(last, other)
    if {"lm_head.weight", "transformer.wte.weight"} <= names:
        head: Any = model.lm_head
        head.weight = model.get_parameter("transformer.wte.weight")
    return model


def groups_of(
    model: nn.Module, tensors: dict[str, torch.Tensor], values: dict[str, Any]
) -> list[dict[str, Any]]:
    """The groups that the writer had, with options of their own."""
    trained = {n: p for n, p in model.named_parameters() if f"optimizer.{n}.exp_avg" in tensors}
    known = [group.get("params") for group in values.get("groups", ())]
    if not all(known) or not known:
        kinds = [(routed, wide) for routed in (False, True) for wide in (True, False)]
        flat = [
            [n for n, p in trained.items() if ("experts" in n, p.ndim > 1) == kind]
            for kind in kinds
        ]
        known = [some for some in flat if some]
    by_name = dict(model.named_parameters())
    return [{"params": [by_name[name] for name in names]} for names in known]


def cut(model: nn.Module, layout: str, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    if layout == "fsdp":
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        held = {id(p): p for p in model.parameters()}
        new = {
            key: nn.Parameter(distribute_tensor(one.data, mesh, [Shard((one.ndim - 1) * (n % 2))]))
            for n, (key, one) in enumerate(held.items())
        }
        for module in model.modules():
            for name, one in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, new[id(one)])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    raw = (one.contiguous().reshape(-1).view(torch.uint8) for one in (whole(found), wanted))
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(*raw)


def load_into(case: Path, layout: str, world: int) -> list[str]:
    """Load a case into a new model; what differs from what its writer's own loader gave."""
    tensors, values = expected_of(case)
    model = module_of(tensors)
    if case.name.startswith("ranks-"):
        give_extra_state(model, case)
    groups = groups_of(model, tensors, values)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [{"params": [names[id(p)] for p in group["params"]]} for group in groups]
    cut(model, layout, world)
    now = dict(model.named_parameters())
    groups = [{"params": [now[name] for name in group["params"]]} for group in groups]
    state: dict[str, Any] = {"model": model}
    optimizer = None
    if any(name.startswith("optimizer.") for name in tensors):
        optimizer = state["optimizer"] = torch.optim.AdamW(groups, lr=9.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holdfast.load(case / "checkpoint", state)
    where = f"{case.parent.name}/{case.name} into {layout} on {world}"
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    found = {f"model.{name}": one for name, one in held.items()}
    if optimizer is not None:
        for name, parameter in now.items():
            for kind, one in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}.{kind}"] = one
    wrong = [f"{where}: {name}" for name in found.keys() ^ tensors.keys()]
    wrong += [
        f"{where}: {n}" for n in found.keys() & tensors.keys() if not same(found[n], tensors[n])
    ]
    if optimizer is not None:
        for number, wanted in enumerate(values.get("groups", ())):
            mine = optimizer.param_groups[number]
            for key in wanted.keys() & mine.keys() - _OPTIONS:
                if json.loads(json.dumps(mine[key])) != wanted[key]:
                    wrong.append(f"{where}: {key} of group {number} is {mine[key]}")
    return wrong


def _load_all(rank: int, world: int, writer: str) -> tuple[int, list[str]]:
    done, wrong = 0, []
    for case in cases(writer, world):
        for layout in LAYOUTS:
            wrong += load_into(case, layout, world)
            done += 1
    return done, wrong


@pytest.mark.promise
@pytest.mark.timeout(400)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_every_writers_checkpoint_comes_into_every_layout_as_its_own_loader_gives_it(
    writer: str, world: int
) -> None:
    """Parameters, moments, steps and hyperparameters, bit for bit."""
    count = len(cases(writer, world))
    assert len(cases(writer, 1)) == WRITERS[writer]
    for done, wrong in run_ranks(world, _load_all, writer):
        assert wrong == [] and done == len(LAYOUTS) * count


# ── training goes on ─────────────────────────────────────────────────────────────────────────────


def built(layout: str, seed: int) -> dict[str, Any]:
    """A small model of even sizes, in numbers that keep a sum in whatever order it is made."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    if layout == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    weights = [one for one in model.parameters() if one.ndim > 1]
    biases = [one for one in model.parameters() if one.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return {"model": model, "optimizer": optimizer, "scheduler": schedule}


def train(state: dict[str, Any], steps: range) -> list[float]:
    """Some real steps; the same numbers on all ranks, so that every layout learns alike."""
    losses = []
    for step in steps:
        rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).double()
        loss = (state["model"](rows) - rows.roll(1, 0)).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        losses.append(loss.item())
    return losses


def reached(state: dict[str, Any]) -> dict[str, Any]:
    """All tensors and hyperparameters, whole."""
    names = {id(p): name for name, p in state["model"].named_parameters()}
    found: dict[str, Any] = {name: whole(p) for name, p in state["model"].named_parameters()}
    for one, kinds in state["optimizer"].state.items():
        found |= {f"{names[id(one)]}.{kind}": whole(item) for kind, item in kinds.items()}
    groups = [{**group, "params": None} for group in state["optimizer"].param_groups]
    found |= {f"group {n}": repr(sorted(group.items())) for n, group in enumerate(groups)}
    return found | {"scheduler": repr(sorted(state["scheduler"].state_dict().items()))}


def _state_dicts(state: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    return {"model": model, "optimizer": optimizer, "scheduler": state["scheduler"].state_dict()}


def _unbroken(rank: int, world: int, layout: str, root: str) -> tuple[list[float], dict[str, Any]]:
    """Save by DCP after 3 steps, and go on: the losses of steps 3 to 8."""
    state = built(layout, seed=1)
    train(state, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_state_dicts(state), checkpoint_id=root)
    return train(state, range(3, 9)), reached(state)


def _over(rank: int, world: int, layout: str, root: str, ours: str) -> list[float]:
    """Go on from what DCP saved; a checkpoint of ours after 3 more steps."""
    state = built(layout, seed=2)
    holdfast.load(root, state)
    losses = train(state, range(3, 6))
    holdfast.save(ours, state, step=6)
    return losses


def _back(rank: int, world: int, layout: str, root: str) -> tuple[list[float], dict[str, Any]]:
    """Go on by DCP from what was exported."""
    state = built(layout, seed=3)
    train(state, range(1))  # so that the optimizer has the state that is filled
    there = _state_dicts(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(there, checkpoint_id=root)
        set_state_dict(
            state["model"],
            state["optimizer"],
            model_state_dict=there["model"],
            optim_state_dict=there["optimizer"],
        )
    state["scheduler"].load_state_dict(there["scheduler"])
    return train(state, range(6, 9)), reached(state)


@pytest.mark.slow
@pytest.mark.promise
@pytest.mark.parametrize(
    ("layout", "world", "then", "others"),
    [("fsdp", 2, "fsdp", 2), ("tp", 2, "tp", 2), ("fsdp", 2, "tp", 4), ("tp", 2, "plain", 1)],
)
def test_training_goes_on_over_the_border_and_back(
    tmp_path: Path, layout: str, world: int, then: str, others: int
) -> None:
    """With the losses of the run that never left: the same bits in the same layout."""
    source, ours, out = (str(tmp_path / name) for name in ("step-3", "ours", "out"))
    unbroken, end = run_ranks(world, _unbroken, layout, source)[0]
    over = run_ranks(others, _over, then, source, ours)[0]
    assert main(["export", ours, out, "--to", "dcp"]) == 0
    back, there = run_ranks(others, _back, then, out)[0]
    if (layout, world) == (then, others):
        assert over + back == unbroken
        assert there.keys() == end.keys()
        for name, one in end.items():
            assert same(there[name], one) if isinstance(one, torch.Tensor) else there[name] == one
    else:
        assert over + back == pytest.approx(unbroken, rel=1e-6)
