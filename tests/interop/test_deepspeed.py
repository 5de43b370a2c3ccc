"""DeepSpeed's checkpoints: every element as its own loader gives it, or refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.errors import ForeignFormatError, HoldfastError, UsageError
from holdfast.interop import deepspeed_directories
from holdfast.interop.foreign_store import ForeignStore
from holdfast.interop.opening import open_source
from holdfast.interop.source_files import SourceFiles
from support.runs.launch import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign" / "deepspeed-0.19.8"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def test_the_golden_checkpoints_are_those_that_were_written() -> None:
    for line in (GOLDEN / "SHA256SUMS").read_text().splitlines():
        known, name = line.split("  ")
        assert hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() == known


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("zero0")])
def test_every_element_is_what_deepspeeds_own_loader_gives(case: str) -> None:
    expected = load_file(GOLDEN / case / "expected.safetensors")
    with holdfast.open(GOLDEN / case / "checkpoint") as opened:
        assert set(opened.leaves) == set(expected)
        for name, tensor in expected.items():
            found = opened.read(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(11, 6), nn.Linear(6, 9)
        self.norm, self.frozen = nn.LayerNorm(9), nn.Linear(9, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))


@pytest.mark.parametrize("case", ["zero1-fp32-2", "zero0-fp32-2"])
def test_a_live_model_and_optimizer_take_parameters_moments_and_hyperparameters(case: str) -> None:
    model = Net()
    groups: list[dict[str, Any]] = [
        {"params": [one for one in model.parameters() if one.requires_grad and one.ndim > 1]},
        {"params": [one for one in model.parameters() if one.requires_grad and one.ndim == 1]},
    ]
    optimizer = torch.optim.AdamW(groups)
    state = {"model": model, "optimizer": optimizer, "note": ""}
    holdfast.load(GOLDEN / case / "checkpoint", state)
    expected = load_file(GOLDEN / case / "expected.safetensors")
    values = json.loads((GOLDEN / case / "expected.json").read_text())
    for name, one in model.named_parameters():
        assert torch.equal(one, expected[f"model.{name}"])
        for kind, item in optimizer.state.get(one, {}).items():
            assert torch.equal(item, expected[f"optimizer.{name}.{kind}"])
    assert len(optimizer.state) == 5 and state["note"] == "x"
    for group, known in zip(optimizer.param_groups, values["groups"], strict=True):
        assert (group["lr"], group["weight_decay"]) == (known["lr"], known["weight_decay"])
        assert list(group["betas"]) == known["betas"]


def _sharded(rank: int, world: int, source: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = Net()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    holdfast.load(source, {"model": model})
    expected = load_file(Path(source).parent / "expected.safetensors")
    for name, one in model.named_parameters():
        whole = one.full_tensor() if isinstance(one, DTensor) else one
        assert torch.equal(whole, expected[f"model.{name}"])


def test_two_ranks_of_fsdp_take_what_two_ranks_of_zero_wrote() -> None:
    run_ranks(2, _sharded, str(GOLDEN / "zero1-fp32-2" / "checkpoint"))


def notes_of(root: Path) -> tuple[str, ...]:
    store = open_source(root)
    assert isinstance(store, ForeignStore)
    return tuple(store.notes)


def change(file: Path, **entries: Any) -> None:
    """Write a file of ``torch.save`` again with other entries."""
    torch.save({**torch.load(file, weights_only=False), **entries}, file)


def copied(tmp_path: Path, case: str) -> Path:
    return Path(shutil.copytree(GOLDEN / case / "checkpoint", tmp_path / case))


@pytest.mark.promise
@pytest.mark.parametrize(
    ("case", "file"),
    [
        ("zero2-bf16-4", "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"),
        ("zero3-fp16-4", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("zero3-fp16-4", "zero_pp_rank_3_mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_file_of_a_rank_is_refused_by_name(tmp_path: Path, case: str, file: str) -> None:
    root = copied(tmp_path, case)
    (root / "global_step3" / file).unlink()
    with pytest.raises(ForeignFormatError, match=rf"{file}: it is not there"):
        holdfast.open(root)


@pytest.mark.promise
def test_a_ranks_file_of_another_save_is_refused(tmp_path: Path) -> None:
    root = copied(tmp_path, "zero1-fp32-2")
    file = root / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    raw = file.read_bytes()
    at = raw.index(b"\x00\x00@@")  # the step, 3.0
    file.write_bytes(raw[:at] + b"\x00\x00\x80@" + raw[at + 4 :])
    with pytest.raises(HoldfastError, match="two saves are mixed"):
        holdfast.open(root)


def test_latest_that_names_an_absent_tag_and_several_tags_without_it_are_refused(
    tmp_path: Path,
) -> None:
    root = copied(tmp_path, "zero1-fp32-2")
    (root / "latest").write_text("global_step9")
    with pytest.raises(holdfast.UsageError, match=r"latest names 'global_step9'.*global_step3"):
        holdfast.open(root)
    (root / "latest").unlink()
    shutil.copytree(root / "global_step3", root / "global_step2")
    with pytest.raises(holdfast.UsageError, match="global_step2, global_step3: give the path"):
        holdfast.open(root)
    with holdfast.open(root / "global_step3") as opened:
        assert "model.up.weight" in opened.leaves


def test_one_file_of_a_checkpoint_is_refused_with_what_to_give() -> None:
    file = GOLDEN / "zero1-fp32-2/checkpoint/global_step3/mp_rank_00_model_states.pt"
    with pytest.raises(holdfast.UsageError, match="give its directory"):
        holdfast.open(file)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mp_rank_01_model_states.pt", r"mp_rank_01_model_states\.pt.*no torch\.save file"),
        ("mp_rank_02_model_states.pt", r"mp_rank_01_model_states\.pt: it is not there, of 3 ranks"),
    ],
)
def test_files_of_tensor_parallel_ranks_that_are_none_or_missing_are_refused_by_name(
    tmp_path: Path, name: str, words: str
) -> None:
    root = copied(tmp_path, "zero1-fp32-2")
    (root / "global_step3" / name).write_bytes(b"")
    with pytest.raises(HoldfastError, match=words):
        holdfast.open(root)


@pytest.mark.promise
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("*mp_rank_01_model_states.pt", r"mp_rank_01_model_states\.pt: it is not there, of 2"),
        ("*mp_rank_01_*", r"mp_rank_01_model_states\.pt: it is not there, of 2"),
        ("zero_pp_rank_1_mp_rank_01_optim_states.pt", "it is not there, of 2 ranks' files"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "it is not there, of 2 ranks' files"),
    ],
)
def test_a_file_of_a_tensor_parallel_rank_that_is_missing_is_named(
    tmp_path: Path, name: str, words: str
) -> None:
    root = copied(tmp_path, "tensor-zero1-fp32-4")
    for file in (root / "global_step3").glob(name):
        file.unlink()
    with pytest.raises(ForeignFormatError, match=words):
        holdfast.open(root)


@pytest.mark.promise
def test_each_file_of_zero_3_on_tensor_parallel_ranks_is_named_when_it_is_missing(
    tmp_path: Path,
) -> None:
    root = copied(tmp_path, "tensor-zero3-bf16-4")
    files = sorted((root / "global_step3").iterdir())
    assert len(files) == 8
    for file in files:
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(ForeignFormatError, match=rf"{file.name}: it is not there"):
            holdfast.open(root)
        file.write_bytes(data)
    with holdfast.open(root) as opened:
        assert len(opened.leaves) == 30


@pytest.mark.promise
@pytest.mark.parametrize(
    ("case", "name", "words"),
    [
        ("pipeline-fp32-2", "mp_rank_01_model_states.pt", "it is not there, of 2 ranks' files"),
        ("pipeline-fp32-2", "layer_01-model_states.pt", r"1\.num_batches_tracked is in no file"),
        ("pipeline-zero1-fp32-2", "layer_03-model_states.pt", r"3\.bias is in no file"),
        ("pipeline-zero1-fp32-2", "zero_pp_rank_0_mp_rank_01_optim_states.pt", "not there, of 1"),
        ("pipeline-zero1-fp32-2", "mp_rank_01_model_states.pt", "not there, of 2 ranks' files"),
    ],
)
def test_a_file_of_a_stage_or_layer_that_is_missing_is_named(
    tmp_path: Path, case: str, name: str, words: str
) -> None:
    root = copied(tmp_path, case)
    (root / "global_step3" / name).unlink()
    with pytest.raises(HoldfastError, match=words):
        holdfast.open(root)


@pytest.mark.promise
def test_stages_whose_layers_are_cut_or_tied_are_refused(tmp_path: Path) -> None:
    cut = copied(tmp_path / "a", "pipeline-fp32-2") / "global_step3"
    shutil.copy(cut / "layer_03-model_states.pt", cut / "layer_03-model_01-model_states.pt")
    with pytest.raises(UsageError, match="with tensor-parallel ranks can't be read yet"):
        holdfast.open(cut)
    tied = copied(tmp_path / "b", "pipeline-zero1-fp32-2") / "global_step3"
    for rank in range(2):
        file = tied / f"mp_rank_0{rank}_model_states.pt"
        state = torch.load(file, weights_only=False)
        state["param_shapes"][0]["tied_modules.embed.weight"] = torch.Size([2, 2])
        torch.save(state, file)
    with pytest.raises(UsageError, match="with tied layers can't be read yet"):
        holdfast.open(tied)


@pytest.mark.promise
def test_tensor_parallel_ranks_of_which_no_file_says_how_they_join_are_refused(
    tmp_path: Path,
) -> None:
    root = copied(tmp_path, "tensor-zero1-fp32-4")
    file = root / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    del state["universal_checkpoint_info"]
    torch.save(state, file)
    with pytest.raises(UsageError, match="nothing else says along which dimension"):
        holdfast.open(root)


@pytest.mark.promise
def test_hyperparameters_without_end_are_compared_in_bounded_time() -> None:
    def doubled() -> list[Any]:
        found: list[Any] = [1]
        for _ in range(60):
            found = [found, found]
        return found

    def state() -> dict[str, Any]:
        inner = {"state": {0: {"more": doubled()}}, "param_groups": [{"betas": doubled()}]}
        return {"base_optimizer_state": inner}

    tag = "global_step3/"
    files = SourceFiles(GOLDEN / "tensor-zero1-fp32-4" / "checkpoint")
    checkpoint = deepspeed_directories._Checkpoint(files, tag)
    checkpoint._refuse_mixed(["a", "b"], [state(), state()], "base_optimizer_state")
    assert not checkpoint._unfit


def test_files_of_tensor_parallel_ranks_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    root = copied(tmp_path, "tensor-zero1-fp32-4")
    file = root / "global_step3" / "mp_rank_01_model_states.pt"
    state = torch.load(file, weights_only=False)
    torch.save({**state, "global_steps": 4}, file)
    with pytest.raises(ForeignFormatError, match="of another save"):
        holdfast.open(root)


@pytest.mark.promise
def test_a_universal_checkpoint_without_steps_is_said_to_have_none(tmp_path: Path) -> None:
    root = copied(tmp_path, "universal-zero3-bf16-2")
    (root / "global_step3_universal" / "zero" / "optimizer_state.pt").unlink()
    with holdfast.open(root) as opened:
        assert not any(name.endswith(".step") for name in opened.leaves)


@pytest.mark.promise
@pytest.mark.parametrize(
    "name", ["global_step1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero/w/fp32.pt"]
)
def test_files_without_a_model_state_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ForeignFormatError, match=r"mp_rank_00_model_states\.pt: it is not there"):
        holdfast.open(tmp_path)


@pytest.mark.promise
@pytest.mark.parametrize("case", ["zero0-fp32-2", "zero1-fp32-2"])
def test_a_client_state_called_model_takes_the_place_of_no_parameter(
    tmp_path: Path, case: str
) -> None:
    root = copied(tmp_path, case)
    change(root / "global_step3" / "mp_rank_00_model_states.pt", model={"up": {"weight": "mine"}})
    expected = load_file(GOLDEN / case / "expected.safetensors")
    with holdfast.open(root) as opened:
        for name, tensor in expected.items():
            assert name not in opened.leaves or torch.equal(opened.read(name), tensor)
        assert {"model.up.weight", "model.norm.bias"} <= set(opened.leaves)
    assert any("model of the client state is left out" in note for note in notes_of(root))


@pytest.mark.promise
def test_tags_beside_the_one_that_latest_names_are_noted(tmp_path: Path) -> None:
    root = copied(tmp_path, "zero0-fp32-2")
    shutil.copytree(root / "global_step3", root / "global_step6")
    assert ["global_step6 is another checkpoint" in note for note in notes_of(root)].count(
        True
    ) == 1
    with holdfast.open(root) as opened:
        assert opened.step == 3


@pytest.mark.promise
def test_directories_of_the_trainer_with_tags_in_them_are_its_steps(tmp_path: Path) -> None:
    for step in (3, 6):
        inner = tmp_path / f"checkpoint-{step}"
        shutil.copytree(GOLDEN / "zero0-fp32-2" / "checkpoint", inner)
        (inner / "global_step3").rename(inner / f"global_step{step}")
        (inner / "latest").write_text(f"global_step{step}")
        change(inner / f"global_step{step}" / "mp_rank_00_model_states.pt", global_steps=step)
        (inner / "trainer_state.json").write_text("{}")
    for asked, step in ((None, 6), (3, 3)):
        with holdfast.open(tmp_path, step=asked) as opened:
            assert opened.step == step and "model.up.weight" in opened.leaves
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with holdfast.open(tmp_path) as opened:
        assert set(opened.leaves) == {"model.w"}


@pytest.mark.promise
def test_a_parameter_that_no_rank_holds_is_refused(tmp_path: Path) -> None:
    root = copied(tmp_path, "zero1-bf16-2")
    file = root / "global_step3" / "mp_rank_00_model_states.pt"
    groups = torch.load(file, weights_only=False)["param_shapes"]
    groups[1]["frozen.weight"] = torch.Size([6, 9])
    change(file, param_shapes=groups)
    with pytest.raises(ForeignFormatError, match=r"'frozen\.weight' is in no flat group"):
        holdfast.open(root)


@pytest.mark.promise
def test_flat_groups_of_zero_3_with_other_parameters_are_refused(tmp_path: Path) -> None:
    """Each parameter lies behind those before it: with one fewer all others would be others."""
    root = copied(tmp_path, "zero3-bf16-2")
    for file in (root / "global_step3").glob("*_model_states.pt"):
        groups = torch.load(file, weights_only=False)["param_shapes"]
        groups[0].pop(next(iter(groups[0])))
        change(file, param_shapes=groups)
    with pytest.raises(
        ForeignFormatError, match=r"elements in its flat group, and by .* parameters"
    ):
        holdfast.open(root)


@pytest.mark.promise
def test_an_atom_of_a_parameter_that_the_model_does_not_name_is_refused(tmp_path: Path) -> None:
    root = copied(tmp_path, "universal-zero1-bf16-2")
    zero = root / "global_step3_universal" / "zero"
    shutil.copytree(zero / "norm.bias", zero / "other.bias")
    with pytest.raises(
        ForeignFormatError, match=r"zero/other\.bias/fp32\.pt: .* does not name its"
    ):
        holdfast.open(root)


@pytest.mark.promise
def test_runs_of_a_frozen_parameter_of_two_types_are_refused(tmp_path: Path) -> None:
    root = copied(tmp_path, "zero3-bf16-2")
    file = root / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    runs = torch.load(file, weights_only=False)["frozen_param_fragments"]
    change(file, frozen_param_fragments={name: one.float() for name, one in runs.items()})
    with pytest.raises(ForeignFormatError, match=r"rank_1_.*'frozen\.weight' is F32, not BF16"):
        holdfast.open(root)


@pytest.mark.promise
def test_a_placeholder_of_zero_3_that_no_file_fills_is_noted(tmp_path: Path) -> None:
    root = copied(tmp_path, "zero3-bf16-2")
    for file in (root / "global_step3").glob("*_model_states.pt"):
        module = torch.load(file, weights_only=False)["module"]
        change(file, module={**module, "lost.weight": torch.empty(0)})
    (note,) = [note for note in notes_of(root) if "lost.weight" in note]
    assert "is left out: no rank's file has its elements" in note
    assert not any("head.weight" in note for note in notes_of(root))


def test_sub_groups_of_zero_3_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    read = deepspeed_directories._Checkpoint._zero_state

    def cut(self: deepspeed_directories._Checkpoint, name: str) -> dict[str, Any]:
        state = read(self, name)
        return state | {"fp32_flat_groups": state["fp32_flat_groups"] * 2}

    monkeypatch.setattr(deepspeed_directories._Checkpoint, "_zero_state", cut)
    with pytest.raises(UsageError, match=r"ZeRO-3 has cut its . groups into . \(sub_group_size\)"):
        holdfast.open(GOLDEN / "zero3-bf16-2" / "checkpoint")


@pytest.mark.promise
@pytest.mark.parametrize("case", ["zero1-fp32-2", "zero3-bf16-2"])
def test_an_optimizer_of_other_steps_than_the_model_is_noted(tmp_path: Path, case: str) -> None:
    root = copied(tmp_path, case)
    assert not any("has taken" in note for note in notes_of(root))
    for file in (root / "global_step3").glob("*_model_states.pt"):
        change(file, global_steps=5, skipped_steps=1)
    assert any("has taken 3 steps" in note and "says 4" in note for note in notes_of(root))
    for file in (root / "global_step3").glob("*_model_states.pt"):
        change(file, global_steps=5, skipped_steps=2)
    assert not any("has taken" in note for note in notes_of(root))


@pytest.mark.promise
@pytest.mark.parametrize("size", [16, 100])
def test_state_that_is_not_one_number_for_each_element_is_taken_for_no_moment(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """As the code books of 8-bit optimizers: a part of one would be some parameter's moment."""
    read = deepspeed_directories._Checkpoint._zero_state

    def with_book(self: deepspeed_directories._Checkpoint, name: str) -> dict[str, Any]:
        found = read(self, name)
        kinds = found["base_optimizer_state"]["state"][0]
        kinds["qmap"] = replace(kinds["exp_avg"], shape=(size,))
        return found

    root = GOLDEN / "zero1-fp32-2" / "checkpoint"
    monkeypatch.setattr(deepspeed_directories._Checkpoint, "_zero_state", with_book)
    with holdfast.open(root) as opened:
        assert {name.partition(".")[0] for name in opened.leaves} == {"model"}
    assert any("'qmap' of group 0" in note and f"({size},)" in note for note in notes_of(root))
    model = Net()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(holdfast.StateMismatch, match="optimizer"):
        holdfast.load(root, state)


@pytest.mark.parametrize("key", ["fp32_groups", "fp32_groups_flat"])
def test_masters_without_names_are_said_to_be_left_out(tmp_path: Path, key: str) -> None:
    root = copied(tmp_path, "zero0-fp32-2")
    file = root / "global_step3" / "mp_rank_00_model_states.pt"
    inner = torch.load(file, weights_only=False)["optimizer"]
    change(file, optimizer={key: [torch.ones(3)], "optimizer_state_dict": inner})
    assert any(f"{key} of mp_rank_00_model_states.pt" in note for note in notes_of(root))
    with holdfast.open(root) as opened:
        assert {name.partition(".")[0] for name in opened.leaves} == {"model"}


def test_what_accelerate_keeps_beside_deepspeeds_folder_comes_along() -> None:
    """The schedule, and the generators of each rank."""
    case = GOLDEN / "accelerate-zero2-2"
    values = json.loads((case / "expected.json").read_text())
    assert notes_of(case / "checkpoint") == ()
    model = Net()
    schedule = torch.optim.lr_scheduler.LinearLR(torch.optim.AdamW(model.parameters()))
    holdfast.load(case / "checkpoint", {"scheduler": schedule})
    assert json.loads(json.dumps(schedule.state_dict())) == values["scheduler"]
    assert run_ranks(2, _drawn, str(case / "checkpoint")) == values["drawn"]


def _drawn(rank: int, world: int, source: str) -> list[float]:
    holdfast.load(source, {"rng": holdfast.Rng()})
    return list(torch.rand(3).tolist())


def test_what_the_trainer_says_beside_deepspeeds_folder_comes_along(tmp_path: Path) -> None:
    root = copied(tmp_path, "accelerate-zero2-2")
    (root / "trainer_state.json").write_text('{"global_step": 3, "epoch": 0.5}')
    torch.save({"scale": 2.0}, root / "scaler.pt")
    save_file({"w": torch.ones(2)}, root / "model.safetensors")
    state: dict[str, Any] = {"trainer_state": {}, "scaler": {}}
    holdfast.load(root, state)
    assert state == {"trainer_state": {"global_step": 3, "epoch": 0.5}, "scaler": {"scale": 2.0}}
    (note,) = notes_of(root)
    assert "model.safetensors is not read" in note
