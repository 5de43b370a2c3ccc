"""A tensor that a live model has under two names takes that of a file with both, or with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
import holdfast.dcp
from holdfast.cli import main
from holdfast.errors import HoldfastError, StateMismatch
from support.runs.launch import run_ranks


class Tied(nn.Module):
    def __init__(self, seed: int, *, is_tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 5, bias=False)
        if is_tied:
            self.lm_head.weight = self.embed.weight


def trained(seed: int, steps: int) -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for step in range(steps):
        model.lm_head(model.norm(model.embed(torch.tensor([step, 3])))).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("writer", ["dcp", "export"])
def test_both_names_of_a_tied_weight_in_dcp_fill_one(tmp_path: Path, writer: str) -> None:
    one, optimizer = trained(1, 2)
    other, there = trained(2, 0)
    if writer == "dcp":
        weights, moments = get_state_dict(one, optimizer)
        assert {"embed.weight", "lm_head.weight"} <= weights.keys()
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "dcp")
    else:
        holdfast.save(tmp_path / "root", {"model": one, "optimizer": optimizer}, step=1)
        assert main(["export", str(tmp_path / "root"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    holdfast.load(tmp_path / "dcp", {"model": other, "optimizer": there})
    assert other.lm_head.weight is other.embed.weight
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    for mine, theirs in zip(optimizer.state.values(), there.state.values(), strict=True):
        assert all(torch.equal(mine[kind], theirs[kind]) for kind in mine)
    # A model whose weights are two takes each by its own name.
    apart = Tied(3, is_tied=False)
    holdfast.load(tmp_path / "dcp", {"model": apart}, only=["model.**"])
    assert torch.equal(apart.lm_head.weight, apart.embed.weight)


def root_of(kind: str, path: Path, held: dict[str, Any]) -> Path:
    """A root with both names of a tied weight, as an import and the drop-in calls leave it."""
    if kind == "import":
        dcp.save(held, checkpoint_id=path / "dcp", no_dist=True)
        assert main(["import", str(path / "dcp"), str(path / "root")]) == 0
    else:
        holdfast.dcp.save(held, checkpoint_id=path / "root" / "1", no_dist=True)
    return path / "root"


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["import", "calls"])
def test_both_names_of_a_tied_weight_in_a_root_fill_one(tmp_path: Path, kind: str) -> None:
    one, optimizer = trained(1, 2)
    weights, moments = get_state_dict(one, optimizer)
    root = root_of(kind, tmp_path, {"model": weights, "optimizer": moments})
    for only in (None, ["**"]):
        other, there = trained(2, 0)
        holdfast.load(root, {"model": other, "optimizer": there}, only=only)
        assert other.lm_head.weight is other.embed.weight
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])
        for mine, theirs in zip(optimizer.state.values(), there.state.values(), strict=True):
            assert all(torch.equal(mine[kind], theirs[kind]) for kind in mine)
    plan = holdfast.plan_restore(root, {"model": other, "optimizer": there})
    assert not plan.problems
    said = "model.embed.weight and model.lm_head.weight, one tensor here, have the same bytes"
    assert said in plan.assumptions
    apart = Tied(3, is_tied=False)
    holdfast.load(root, {"model": apart}, only=["model.**"])
    assert torch.equal(apart.lm_head.weight, apart.embed.weight)


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("elements", [3, 1 << 22])
@pytest.mark.parametrize("at", [(0, 0), (2, 1), (4, 3)])
def test_two_weights_of_a_root_never_fill_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int, at: tuple[int, int]
) -> None:
    monkeypatch.setattr("holdfast.restore.averages._ELEMENTS", elements)
    weights = {name: one.clone() for name, one in Tied(1).state_dict().items()}
    weights["embed.weight"][at] = 0.0
    weights["lm_head.weight"][at] = -0.0  # equal as a number
    root = root_of("import", tmp_path, {"model": weights})
    for only in (None, ["model.**"]):
        other = Tied(2)
        before = {name: one.clone() for name, one in other.state_dict().items()}
        with pytest.raises(
            StateMismatch,
            match=r"model\.lm_head\.weight: tied to model\.embed\.weight in the model, but not in "
            r"the checkpoint, where model\.lm_head\.weight has other bytes",
        ):
            holdfast.load(root, {"model": other}, only=only)
        assert all(torch.equal(one, before[name]) for name, one in other.state_dict().items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_weights_of_other_types_are_never_one(tmp_path: Path) -> None:
    weights = {name: one.clone() for name, one in Tied(1).state_dict().items()}
    weights["lm_head.weight"] = weights["lm_head.weight"].double()
    root = root_of("import", tmp_path, {"model": weights})
    with pytest.raises(StateMismatch, match=r"model\.lm_head\.weight: the checkpoint has F64"):
        holdfast.load(root, {"model": Tied(2)})


def _on_ranks(rank: int, world: int, roots: dict[str, str], layout: str) -> list[str]:
    """What is said of a root whose weights are the same, and of one where an element of the last
    rank's part is not.
    """
    said = []
    for root in roots.values():
        model: Any = Tied(2)
        if layout == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        else:
            model = nn.parallel.DistributedDataParallel(model)
        state = {"model": model.module if layout == "ddp" else model}
        before = {name: one.clone() for name, one in model.state_dict().items()}
        try:
            holdfast.load(root, state)
        except StateMismatch as error:
            after = model.state_dict()
            assert all(torch.equal(one, after[name]) for name, one in before.items())
            said.append(str(error))
            continue
        for name, expected in Tied(1).state_dict().items():
            found = state["model"].state_dict()[name]
            full = found.full_tensor() if layout == "fsdp" else found
            assert torch.equal(full, expected), name
        said.append("")
    return said


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_both_names_of_a_tied_weight_fill_one_on_two_ranks(tmp_path: Path, layout: str) -> None:
    roots = {}
    for name, value in (("same", 0.0), ("other", 1.0)):
        weights = {name: one.clone() for name, one in Tied(1).state_dict().items()}
        weights["lm_head.weight"][4, 3] += value
        (tmp_path / name).mkdir()
        roots[name] = str(root_of("import", tmp_path / name, {"model": weights}))
    for same, other in run_ranks(2, _on_ranks, roots, layout):
        assert not same
        assert "model.lm_head.weight has other bytes" in other


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_weights_never_fill_one(tmp_path: Path) -> None:
    weights = {name: one.clone() for name, one in Tied(1).state_dict().items()}
    weights["lm_head.weight"][4, 3] += 1
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(HoldfastError, match="under several names, and has other bytes here"):
        holdfast.load(tmp_path / "dcp", {"model": Tied(2)})
    weights["lm_head.weight"] = torch.ones(6, 4)
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(
        StateMismatch, match=r"model\.lm_head\.weight: the checkpoint has F32 \[6, 4\]"
    ):
        holdfast.load(tmp_path / "other", {"model": Tied(2)})


@pytest.mark.parametrize("kept", ["embed.weight", "lm_head.weight"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_one_name_that_safetensors_keep_may_be_either(
    tmp_path: Path, kept: str, prefix: str
) -> None:
    one, other = Tied(1), Tied(2)
    held: dict[str, Any] = {
        f"{prefix}{name}": tensor
        for name, tensor in one.state_dict().items()
        if name == kept or not name.endswith(("embed.weight", "lm_head.weight"))
    }
    save_file(held, tmp_path / "model.safetensors")
    holdfast.load(tmp_path / "model.safetensors", {"model": other})
    assert other.lm_head.weight is other.embed.weight
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def _on_one_alone(rank: int, world: int, path: str) -> tuple[str, bool]:
    """Rank 1 ties two names, as in a schedule that has the first and the last layer on one."""
    torch.distributed.barrier()
    model = Tied(2, is_tied=rank == 1)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    try:
        holdfast.load(path, {"model": model})
    except StateMismatch as error:
        after = model.state_dict()
        return str(error), all(torch.equal(one, after[name]) for name, one in before.items())
    return "", False


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_names_that_some_ranks_tie_alone_are_refused_by_their_names(
    tmp_path: Path, kind: str
) -> None:
    weights = Tied(1).state_dict()
    if kind == "dcp":
        dcp.save({"model": weights}, checkpoint_id=tmp_path / "a", no_dist=True)
    else:
        (tmp_path / "a").mkdir()
        save_file({n: w.clone() for n, w in weights.items()}, tmp_path / "a/model.safetensors")
    for said, is_as_before in run_ranks(2, _on_one_alone, str(tmp_path / "a")):
        assert "embed.weight and model.lm_head.weight are one tensor on rank 1 and not on" in said
        assert is_as_before


def _numbered_apart(rank: int, world: int, path: str) -> str:
    model = nn.Linear(3, 3) if rank else nn.ModuleDict({"a": nn.Linear(3, 3)})
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        holdfast.load(path, {f"model{rank}": model, "optimizer": optimizer})
    except StateMismatch as error:
        return str(error)
    return ""


@pytest.mark.promise
def test_numbers_that_are_other_parameters_on_another_rank_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    own = {"model0": {f"a.{n}": t for n, t in model.state_dict().items()}}
    held = {**own, "model1": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(held, tmp_path / "a.pt")
    for said in run_ranks(2, _numbered_apart, str(tmp_path / "a.pt")):
        assert "rank 0 and rank 1 make different things of it" in said
