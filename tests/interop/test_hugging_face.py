"""What the Trainer, Accelerate, PEFT and Lightning wrote is what their own loaders give."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import holdfast
from holdfast.cli import main
from holdfast.errors import ForeignFormatError, HoldfastError, NotFound
from holdfast.interop import hugging_face
from holdfast.interop.opening import open_source
from holdfast.interop.state_files import named_step
from holdfast.interop.writing.chosen_leaves import LeafReader
from support.runs.launch import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"
TRAINER = GOLDEN / "transformers-5.23.0"
ACCELERATE = GOLDEN / "accelerate-1.15.0"
LIGHTNING = GOLDEN / "lightning-2.6.6"
ADAPTER = GOLDEN / "peft-0.21.2" / "lora"


def expected(case: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return load_file(case / "expected.safetensors"), json.loads(
        (case / "expected.json").read_text()
    )


class Gpt2(nn.Module):
    """As GPT2LMHeadModel of transformers, by names and shapes; its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.ModuleDict(
            {"ln_1": nn.LayerNorm(4), "attn": nn.Module(), "ln_2": nn.LayerNorm(4)}
        )
        block["mlp"] = nn.Module()
        for part, name, size in (
            ("attn", "c_attn", (4, 12)),
            ("attn", "c_proj", (4, 4)),
            ("mlp", "c_fc", (4, 16)),
            ("mlp", "c_proj", (16, 4)),
        ):
            block[part].add_module(name, _turned(*size))
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(12, 4),
                "wpe": nn.Embedding(8, 4),
                "h": nn.ModuleList([block]),
                "ln_f": nn.LayerNorm(4),
            }
        )
        self.lm_head = nn.Linear(4, 12, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]


def _turned(rows: int, columns: int) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(rows, columns))
    module.bias = nn.Parameter(torch.randn(columns))
    return module


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3, bias=False))


class Small(nn.Module):
    """As the module of the golden files of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
        self.head = nn.Linear(6, 2)


def optimizer_of(model: nn.Module, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer with groups as they were, and other options."""
    by_name = dict(model.named_parameters())
    mine: list[dict[str, Any]] = [
        {"params": [by_name[name] for name in group["params"]]} for group in groups
    ]
    return torch.optim.AdamW(mine, lr=9.0)


def check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
    groups: list[dict[str, Any]],
) -> None:
    """All tensors and options are those expected, bit for bit."""
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole(tensor), tensors[f"model.{name}"]), name
    count = 0
    for name, parameter in model.named_parameters():
        for kind, moment in optimizer.state[parameter].items():
            assert torch.equal(whole(moment), tensors[f"optimizer.{name}.{kind}"]), (name, kind)
            count += 1
    assert count == sum(name.startswith("optimizer.") for name in tensors)
    for found, group in zip(optimizer.param_groups, groups, strict=True):
        for key in group.keys() & found.keys() - {"params", "fused"}:
            assert json.loads(json.dumps(found[key])) == group[key], key


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    found: torch.Tensor = full() if full is not None else tensor
    return found


def drawn() -> dict[str, list[float]]:
    return {
        "python": [random.random() for _ in range(3)],
        "numpy": [float(one) for one in np.random.rand(3)],
        "torch": torch.rand(3).tolist(),
    }


@pytest.mark.parametrize("case", ["steps", "shards"])
def test_a_checkpoint_of_the_trainer_comes_as_it_loads_it(case: str) -> None:
    tensors, values = expected(TRAINER / case)
    model = Gpt2()
    optimizer = optimizer_of(model, values["groups"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0] * 2)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": schedule,
        "rng": holdfast.Rng(),
        "trainer_state": {},
    }
    restored = holdfast.load(TRAINER / case / "checkpoint", state)
    assert restored.step == 4 and state["trainer_state"]["global_step"] == 4
    assert drawn() == values["drawn"]
    check(model, optimizer, tensors, values["groups"])
    for key, value in values["scheduler"].items():
        assert key == "lr_lambdas" or schedule.state_dict()[key] == value, key


def test_the_newest_of_several_steps_is_taken_or_the_one_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = TRAINER / "steps" / "checkpoint"
    with holdfast.open(where) as newest, holdfast.open(where / "checkpoint-4") as last:
        assert newest.step == last.step == 4
    with holdfast.open(where, step=2) as earlier:
        assert earlier.step == 2
        assert earlier.read("optimizer.0.step") == 2
    with pytest.raises(NotFound, match=r"no step 3; there are checkpoint-2 \(step 2\)"):
        holdfast.open(where, step=3)
    assert main(["ls", str(where)]) == 0
    shown = capsys.readouterr().out
    assert "0-2" in shown and "0-4" in shown and "newest" in shown
    copy = shutil.copytree(where, tmp_path / "run")
    (copy / "checkpoint-6").mkdir()
    (copy / "checkpoint-6" / "config.json").write_text("{}")  # stopped before it had anything
    with holdfast.open(copy) as opened:
        assert opened.step == 4


@pytest.mark.parametrize(
    "where",
    [
        TRAINER / "steps" / "checkpoint",
        TRAINER / "shards" / "checkpoint",
        ACCELERATE / "one" / "checkpoint",
        ACCELERATE / "fsdp2" / "checkpoint",
        ADAPTER / "checkpoint",
        LIGHTNING / "file" / "checkpoint",
        LIGHTNING / "sharded" / "checkpoint",
    ],
    ids=lambda path: f"{path.parents[1].name}-{path.parent.name}",
)
def test_commands_take_each_where_they_take_a_root(
    where: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["ls"], ["show"], ["verify"], ["verify", "--deep"]):
        assert main([command[0], str(where), *command[1:]]) == 0, capsys.readouterr()
    with holdfast.open(where) as opened:
        leaf = next(iter(opened.leaves))
    capsys.readouterr()
    assert main(["dump", str(where), leaf]) == 0, capsys.readouterr()


def test_what_accelerate_saved_of_one_process_comes_as_it_loads_it() -> None:
    tensors, values = expected(ACCELERATE / "one")
    model = sequential()
    optimizer = optimizer_of(model, values["groups"])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": schedule, "rng": holdfast.Rng()}
    holdfast.load(ACCELERATE / "one" / "checkpoint", state)
    assert drawn() == values["drawn"][0]
    check(model, optimizer, tensors, values["groups"])
    assert json.loads(json.dumps(schedule.state_dict())) == values["scheduler"]


def _on_ranks(rank: int, world: int) -> str:
    """Fill FSDP2 models on these ranks from several writers; the faults that were found."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for case, build, key in (
        (ACCELERATE / "fsdp2", sequential, "scheduler"),
        (ACCELERATE / "one", sequential, "scheduler"),
        (LIGHTNING / "file", Small, "lr_scheduler"),
        (LIGHTNING / "sharded", Small, "lr_scheduler"),
        (TRAINER / "shards", Gpt2, None),
    ):
        tensors, values = expected(case)
        model = build()
        fully_shard(model, mesh=mesh)
        optimizer = optimizer_of(model, values["groups"])
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if key:
            state[key] = torch.optim.lr_scheduler.LinearLR(optimizer)
        if case.name == "fsdp2":
            state["rng"] = holdfast.Rng()
        holdfast.load(case / "checkpoint", state)
        if case.name == "fsdp2":
            assert drawn() == values["drawn"][rank]
        check(model, optimizer, tensors, values["groups"])
        if key:
            assert json.loads(json.dumps(state[key].state_dict())) == values[key]
    return "same"


def test_all_of_them_fill_sharded_models_on_two_ranks() -> None:
    assert run_ranks(2, _on_ranks) == ["same", "same"]


@pytest.mark.parametrize("case", ["file", "groups"])
def test_a_file_of_lightning_comes_as_it_loads_it(case: str) -> None:
    tensors, values = expected(LIGHTNING / case)
    model = Small()
    optimizer = optimizer_of(model, values["groups"])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}
    assert holdfast.load(LIGHTNING / case / "checkpoint", state).step == 4
    check(model, optimizer, tensors, values["groups"])
    assert json.loads(json.dumps(schedule.state_dict())) == values["lr_scheduler"]


def test_moments_that_are_numbered_are_never_taken_for_those_of_reordered_groups() -> None:
    """Lightning's file has the head's group first; with groups the other way round nothing fits."""
    _, values = expected(LIGHTNING / "groups")
    model = Small()
    optimizer = optimizer_of(model, values["groups"][::-1])
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(holdfast.StateMismatch, match="optimizer"):
        holdfast.load(LIGHTNING / "groups" / "checkpoint", {"model": model, "optimizer": optimizer})
    assert all(map(torch.equal, before, model.parameters()))


def test_an_adapter_has_the_names_of_its_file_and_of_its_model() -> None:
    tensors, values = expected(ADAPTER)
    with holdfast.open(ADAPTER / "checkpoint") as opened:
        assert len(opened.leaves) == len(tensors) == len(opened.aliases)
        for alias, name in opened.aliases.items():
            assert torch.equal(opened.read(name), tensors[alias]), alias
    model = _module({name: torch.zeros(3) for name in values["names"]})
    for name, tensor in tensors.items():
        _set(model, name.removeprefix("model."), torch.zeros_like(tensor))
    holdfast.load(ADAPTER / "checkpoint", {"model": model}, only=list(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(model.state_dict()[name.removeprefix("model.")], tensor), name


def test_an_adapter_of_dora_has_the_names_of_its_model(tmp_path: Path) -> None:
    """PEFT 0.21 leaves out the end of one name, too: these are those it has in file and model."""
    inner = "base_model.model.0."
    names = {
        f"{inner}lora_A.weight": f"{inner}lora_A.default.weight",
        f"{inner}lora_B.weight": f"{inner}lora_B.default.weight",
        f"{inner}lora_magnitude_vector": f"{inner}lora_magnitude_vector.default.weight",
    }
    tensors = {name: torch.full((2,), float(n)) for n, name in enumerate(names)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "use_dora": True, "modules_to_save": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model = _module({name: torch.zeros(2) for name in names.values()})
    holdfast.load(tmp_path, {"model": model}, only=[f"model.{name}" for name in names.values()])
    for name, there in names.items():
        assert torch.equal(model.state_dict()[there], tensors[name]), there


def _module(tensors: dict[str, torch.Tensor]) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        _set(model, name, tensor)
    return model


def _set(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    *path, last = name.split(".")
    at = model
    for part in path:
        if part not in dict(at.named_children()):
            at.add_module(part, nn.Module())
        at = at.get_submodule(part)
    at.register_parameter(last, nn.Parameter(tensor))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=0-val_loss=1.20-step=20.ckpt", 20),
        ("epoch=3-step=20-train_loss_step=0.35.ckpt", 20),
        ("step=20-v1.ckpt", 20),
        ("epoch=0-val_loss=1.20.ckpt", None),
        ("epoch=7.ckpt", None),
        ("loss_step=3.ckpt", None),
        ("last.ckpt", None),
        ("llama-3.1-8B", None),
        ("llama-3.1", None),
        ("checkpoint-500", 500),
        ("global_step3", 3),
        ("state-100.pt", 100),
    ],
)
def test_a_step_in_a_name_is_no_epoch_no_metric_and_no_version(name: str, step: int | None) -> None:
    assert named_step(name) == step


def lightning_at(path: Path, step: int | None) -> None:
    """A file of Lightning of a step; None: a state of another writer."""
    state: dict[str, Any] = {"state_dict": {"w": torch.full((2,), float(step or 0))}}
    if step is not None:
        state |= {"pytorch-lightning_version": "2.6.6", "global_step": step}
    torch.save(state, path)


@pytest.mark.promise
def test_files_of_lightning_without_a_step_in_their_names_have_their_own(tmp_path: Path) -> None:
    lightning_at(tmp_path / "epoch=1-step=20.ckpt", 20)
    lightning_at(tmp_path / "epoch=1-val_loss=1.20.ckpt", 30)
    lightning_at(tmp_path / "last.ckpt", 40)
    for step in (20, 30, 40):
        with holdfast.open(tmp_path, step=step) as opened:
            assert opened.step == step and opened.read("model.w")[0] == step
    with holdfast.open(tmp_path) as newest:
        assert newest.step == 40 and newest.read("model.w")[0] == 40
    lightning_at(tmp_path / "last.ckpt", 20)
    lightning_at(tmp_path / "other.ckpt", None)
    (tmp_path / "torn.ckpt").write_bytes(b"PK")
    notes = open_source(tmp_path).notes  # type: ignore[attr-defined]
    assert [one for one in notes if "other.ckpt is left out: nothing in its name" in one]
    assert [one for one in notes if "torn.ckpt is left out" in one] and len(notes) == 2
    with holdfast.open(tmp_path) as newest:
        assert newest.step == 30


@pytest.mark.promise
def test_the_step_that_a_checkpoint_says_goes_before_that_of_its_name(tmp_path: Path) -> None:
    lightning_at(tmp_path / "step=7.ckpt", 70)
    lightning_at(tmp_path / "step=8.ckpt", 70)
    with holdfast.open(tmp_path, step=None) as opened:
        assert opened.step == 70
    notes = open_source(tmp_path).notes  # type: ignore[attr-defined]
    assert ["it is of step 70, as another is" in note for note in notes] == [True]


# ── wrong inputs ─────────────────────────────────────────────────────────────────────────────────


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    copy = shutil.copytree(TRAINER / "shards" / "checkpoint" / "checkpoint-4", tmp_path / "c-4")
    (copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(HoldfastError, match=r"model-00002-of-00002.safetensors is not there"):
        holdfast.open(copy)


def test_a_model_of_other_shapes_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    with pytest.raises(holdfast.StateMismatch, match=r"model\.0\.weight"):
        holdfast.load(ACCELERATE / "one" / "checkpoint", {"model": model})


def test_random_states_of_some_ranks_only_are_left_out(tmp_path: Path) -> None:
    copy = shutil.copytree(ACCELERATE / "fsdp2" / "checkpoint", tmp_path / "c")
    (copy / "random_states_0.pkl").unlink()
    store = open_source(copy)
    assert any("random states of the ranks 1" in note for note in store.notes)  # type: ignore[attr-defined]
    with pytest.raises(holdfast.StateMismatch, match="rng"):
        holdfast.load(copy, {"model": sequential(), "rng": holdfast.Rng()})


def test_shards_of_two_saves_are_refused(tmp_path: Path) -> None:
    """The shard of another save has other sizes of items: what is there is not what is named."""
    copy = shutil.copytree(ACCELERATE / "fsdp2" / "checkpoint", tmp_path / "c")
    sharded = copy / "pytorch_model_fsdp_0"
    shutil.copy(copy / "optimizer_0" / "__0_0.distcp", sharded / "__0_0.distcp")
    model = sequential()
    with pytest.raises(HoldfastError, match=r"different saves|no torch.save file|zip"):
        holdfast.load(copy, {"model": model})


def test_a_file_of_lightning_without_its_shards_is_refused(tmp_path: Path) -> None:
    sharded = LIGHTNING / "sharded" / "checkpoint" / "epoch=0-step=4.ckpt"
    copy = shutil.copytree(sharded, tmp_path / "a.ckpt")
    (copy / "__1_0.distcp").unlink()
    with pytest.raises(HoldfastError, match=r"the images hold box .* not at all; .*distcp "):
        holdfast.load(copy, {"model": Small()})
    (copy / ".metadata").unlink()
    with pytest.raises(HoldfastError, match=r"no \.metadata"):
        holdfast.open(copy)


def test_single_numbers_and_integers_come_through_safetensors(tmp_path: Path) -> None:
    """DCP's own writer of safetensors flattens them; a reader that trusts names would too."""
    from safetensors.torch import save_file

    tensors = {"step": torch.tensor(7), "scale": torch.tensor(2.0), "ids": torch.arange(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with holdfast.open(tmp_path) as opened:
        for name, tensor in tensors.items():
            found = opened.read(f"model.{name}")
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)


def test_a_trainer_state_without_a_step_is_an_error(tmp_path: Path) -> None:
    copy = shutil.copytree(TRAINER / "steps" / "checkpoint" / "checkpoint-4", tmp_path / "c")
    (copy / "trainer_state.json").write_text('{"global_step": "four"}')
    with pytest.raises(ForeignFormatError, match="global_step is 'four'"):
        holdfast.open(copy)


def test_a_download_of_hugging_face_is_no_save_without_collectives(tmp_path: Path) -> None:
    copy = shutil.copytree(ADAPTER / "checkpoint", tmp_path / "c")
    cache = copy / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (cache / "tokenizer_config.json.metadata").write_text("0\n")
    with holdfast.open(copy) as opened:
        assert opened.leaves
    (copy / "__0.metadata").write_bytes(b"")
    with pytest.raises(holdfast.UsageError, match=r"__0\.metadata .*saved without collect"):
        holdfast.open(copy)


def test_small_tensors_of_one_block_are_read_with_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.ModuleDict({f"n{number}": torch.nn.Linear(3, 5) for number in range(20)})
    holdfast.save(tmp_path, {"model": model}, step=1)
    read: list[int] = []
    fill = LeafReader.fill

    def counted(self: LeafReader, wants: Any) -> int:
        read.append(fill(self, wants))
        return read[-1]

    monkeypatch.setattr(LeafReader, "fill", counted)
    found = hugging_face.state_dict(tmp_path, copy=True)
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor)
    assert sum(read) <= 1 << 20, "one block"
