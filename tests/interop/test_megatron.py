"""What Megatron-Core wrote as ``torch_dist`` is what its own loader gives, bit for bit."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.cli import main
from holdfast.errors import ForeignFormatError, HoldfastError, NotFound
from holdfast.interop.opening import open_source
from support.runs.launch import run_ranks

FOREIGN = Path(__file__).parents[1] / "golden" / "foreign"
GOLDEN, NEWEST = FOREIGN / "megatron-core-0.16.1", FOREIGN / "megatron-core-0.19.2"
KINDS = ("tp2-pp2", "tp2-dp2", "dp2-buckets", "ep2")
CASES = [golden / kind for golden in (GOLDEN, NEWEST) for kind in KINDS]


def here(name: str) -> str:
    """The name that a tensor of the file has as a leaf."""
    if name.startswith("optimizer.state."):
        kind, _, parameter = name.removeprefix("optimizer.state.").partition(".")
        return f"optimizer_state.{parameter}.{kind}"
    if name.startswith("optimizer.distributed."):
        return f"optimizer_buckets.{name}"
    return f"model.{name}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: the padding of buckets is memory as Megatron found it, and may be no number."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_each_tensor_is_what_its_own_loader_gives(case: Path) -> None:
    expected = load_file(case / "expected.safetensors")
    values = json.loads((case / "expected.json").read_text())
    with holdfast.open(case / "checkpoint") as opened:
        assert opened.step == 20
        assert set(opened.leaves) == {here(name) for name in expected}
        for name, tensor in expected.items():
            found = opened.read(here(name))
            assert found.dtype == tensor.dtype and torch.equal(bits(found), bits(tensor)), name
        state = {"notes": {}, "iteration": 0, "objects": {}}
        holdfast.load(case / "checkpoint", state, only=["notes", "iteration", "objects"])
    assert state["notes"] == values["notes"] and state["iteration"] == 20
    world = 4 if case.name.startswith("tp2") else 2
    places = state["objects"]["place"]  # type: ignore[index]
    assert [places[str(rank)]["rank"] for rank in range(world)] == list(range(world))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_commands_take_it_where_they_take_a_root(
    case: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(case / "checkpoint")
    for command in (["ls"], ["show"], ["verify"], ["verify", "--deep"]):
        assert main([command[0], where, *command[1:]]) == 0, capsys.readouterr()
    assert main(["dump", where, "model.output_layer.weight"]) == 0


def model_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        at = model
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, nn.Parameter(torch.zeros_like(tensor)))
    return model


def _filled(rank: int, world: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    for case in ("tp2-pp2", "ep2"):
        expected = load_file(GOLDEN / case / "expected.safetensors")
        model = model_of(expected)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                cut = [Shard(parameter.ndim - 1)]
                module.register_parameter(
                    name, nn.Parameter(distribute_tensor(parameter.data, mesh, cut))
                )
        holdfast.load(GOLDEN / case / "checkpoint", {"model": model})
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), expected[name]), name
    return "same"


def test_it_fills_a_model_that_is_cut_otherwise_on_two_ranks() -> None:
    assert run_ranks(2, _filled) == ["same", "same"]


def test_what_is_not_stored_of_an_optimizer_is_noted() -> None:
    groups = open_source(GOLDEN / "tp2-dp2" / "checkpoint" / "iter_0000020")
    assert any("which of 13 parameters are in which of 2 groups" in n for n in groups.notes)  # type: ignore[attr-defined]
    buckets = open_source(GOLDEN / "dp2-buckets" / "checkpoint" / "iter_0000020")
    assert any("dp_reshardable" in note for note in buckets.notes)  # type: ignore[attr-defined]


# ── wrong inputs ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "tp2-pp2" / "checkpoint", tmp_path / "run"))


def test_the_step_that_is_named_as_the_last_must_be_there(copied: Path) -> None:
    last = copied / "latest_checkpointed_iteration.txt"
    last.write_text("40\n")
    with pytest.raises(NotFound, match=r"names step 40, which is not there; .*iter_0000020"):
        holdfast.open(copied)
    shutil.copytree(copied / "iter_0000020", copied / "iter_0000030")  # not finished
    last.write_text("20\n")
    with holdfast.open(copied) as opened:
        assert opened.step == 20
    assert any("iter_0000030 is left out" in note for note in open_source(copied).notes)  # type: ignore[attr-defined]


def test_a_missing_file_of_a_rank_is_refused(copied: Path) -> None:
    inner = copied / "iter_0000020"
    (inner / "__1_0.distcp").unlink()
    expected = load_file(GOLDEN / "tp2-pp2" / "expected.safetensors")
    with pytest.raises(HoldfastError, match=r"the images hold box .* not at all; .*distcp "):
        holdfast.load(inner, {"model": model_of(expected)})
    assert main(["verify", str(inner)]) == 4


def test_a_checkpoint_without_its_common_state_is_refused(copied: Path) -> None:
    (copied / "iter_0000020" / "common.pt").unlink()
    with pytest.raises(ForeignFormatError, match="common state is missing"):
        holdfast.open(copied / "iter_0000020")


def test_other_backends_and_unfinished_saves_are_refused_by_name(copied: Path) -> None:
    inner = copied / "iter_0000020"
    (inner / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(holdfast.UsageError, match="written as 'zarr'; torch_dist is read"):
        holdfast.open(inner)
    (inner / ".metadata").unlink()
    with pytest.raises(holdfast.UsageError, match=r"iter_0000020, .* no \.metadata: the save"):
        holdfast.open(inner)


def test_a_model_with_other_shapes_is_refused_by_name(copied: Path) -> None:
    expected = load_file(GOLDEN / "tp2-pp2" / "expected.safetensors")
    expected["output_layer.weight"] = torch.zeros(17, 8)
    with pytest.raises(holdfast.StateMismatch, match=r"model\.output_layer\.weight"):
        holdfast.load(copied, {"model": model_of(expected)})


def test_an_object_and_parts_of_one_of_its_name_are_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "a": [1, 2], "a/shard_0_1": [3, 4]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"iteration": 20}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(ForeignFormatError, match=r"\.metadata has an object 'a', and parts of"):
        holdfast.open(tmp_path)


@pytest.mark.promise
def test_a_moment_that_two_optimizers_of_a_chain_have_is_refused(tmp_path: Path) -> None:
    names = [f"chained_{number}.optimizer.state.exp_avg.w" for number in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"w": torch.ones(2), **{name: torch.ones(2) for name in names}},
            checkpoint_id=tmp_path,
            no_dist=True,
        )
    torch.save({"iteration": 20}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(ForeignFormatError, match=r"\.metadata has the exp_avg of 'w' twice"):
        holdfast.open(tmp_path)


def test_common_state_whose_place_is_taken_is_noted(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(2), "a": [3]}, checkpoint_id=tmp_path, no_dist=True)
    common = {"iteration": 20, "model": {"x": 1}, "objects": [1], "optimizer_common": 2, "mine": 3}
    torch.save(common, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    store = open_source(tmp_path)
    notes = [note for note in store.notes if "of the common state is left out" in note]  # type: ignore[attr-defined]
    assert [note.split()[0] for note in notes] == ["model", "objects"]
    with holdfast.open(tmp_path) as opened:
        assert opened.values["mine"] == 3 and opened.values["optimizer_common"] == 2
