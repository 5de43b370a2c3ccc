"""Checkpoints of other writers in a bucket are read as those in a directory, by ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.cli import main
from holdfast.errors import ForeignFormatError, HoldfastError, NotFound, StorageError, UsageError
from support.checkpoints.commands import error_of, text_of
from support.servers.bucket_model import World, model_store

Out = pytest.CaptureFixture[str]
GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"
URL = "s3://model/given"
SOURCES = {
    "dcp": GOLDEN / "accelerate-1.15.0" / "fsdp2" / "checkpoint" / "pytorch_model_fsdp_0",
    "accelerate": GOLDEN / "accelerate-1.15.0" / "fsdp2" / "checkpoint",
    "trainer": GOLDEN / "transformers-5.23.0" / "shards" / "checkpoint" / "checkpoint-4",
    "lightning directory": GOLDEN
    / "lightning-2.6.6"
    / "sharded"
    / "checkpoint"
    / "epoch=0-step=4.ckpt",
    "lightning file": GOLDEN / "lightning-2.6.6" / "file" / "checkpoint" / "epoch=0-step=4.ckpt",
    "megatron": GOLDEN / "megatron-core-0.16.1" / "tp2-pp2" / "checkpoint" / "iter_0000020",
    "deepspeed": GOLDEN / "deepspeed-0.19.8" / "zero2-fp16-2" / "checkpoint",
    "adapter": GOLDEN / "peft-0.21.2" / "lora" / "checkpoint",
}


class CountingWorld(World):
    """Counts the bytes of objects that are asked for."""

    read_bytes = 0

    def answer(self, method: str, *given: Any) -> Any:
        outcome = super().answer(method, *given)
        if method == "GET" and not given[1]:
            self.read_bytes += len(outcome.body)
        return outcome


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> CountingWorld:
    world = CountingWorld()
    model_store(world, monkeypatch)
    return world


def keep(world: World, source: Path, below: str = "given") -> None:
    """Puts a file or directory into the bucket."""
    files = [source] if source.is_file() else [one for one in source.rglob("*") if one.is_file()]
    for file in files:
        name = "" if source.is_file() else f"/{file.relative_to(source)}"
        world.keep(f"{below}{name}", file.read_bytes())


def all_of(opened: Any) -> dict[str, Any]:
    return {
        name: (leaf.dtype, leaf.shape, opened.read(name).reshape(-1).view(torch.uint8).tolist())
        for name, leaf in opened.leaves.items()
    }


@pytest.mark.parametrize("kind", SOURCES)
def test_a_checkpoint_in_a_bucket_is_what_it_is_in_a_directory(
    kind: str, world: CountingWorld
) -> None:
    keep(world, SOURCES[kind], "given/step-4.ckpt" if "file" in kind else "given")
    url = f"{URL}/step-4.ckpt" if "file" in kind else URL
    with holdfast.open(url) as there, holdfast.open(SOURCES[kind]) as here:
        assert all_of(there) == all_of(here)
        assert there.values == here.values


def test_only_the_ranges_that_are_wanted_are_read(world: CountingWorld, tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.randn(256, 1024) for number in range(4)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    keep(world, tmp_path)
    with holdfast.open(URL) as opened:
        assert world.read_bytes <= 4 * (64 << 10)
        world.read_bytes = 0
        assert torch.equal(opened.read("model.w2"), tensors["w2"])
        assert world.read_bytes <= 1.02 * tensors["w2"].nbytes + (64 << 10)


def test_it_fills_a_state_and_is_imported_and_shown(
    world: CountingWorld, tmp_path: Path, capsys: Out
) -> None:
    weights = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    torch.save(weights, tmp_path / "m.pt")
    keep(world, tmp_path / "m.pt", "given/m.pt")
    model = torch.nn.Linear(4, 3)
    holdfast.load(f"{URL}/m.pt", {"model": model})
    assert torch.equal(model.weight, weights["weight"])
    assert "model.weight" in text_of(capsys, "show", f"{URL}/m.pt")
    assert main(["import", f"{URL}/m.pt", str(tmp_path / "root")]) == 0
    with holdfast.open(tmp_path / "root") as opened:
        assert torch.equal(opened.read("model.bias"), weights["bias"])
        assert opened.values["imported_from"]["source"] == f"{URL}/m.pt"
    said = error_of(capsys, "import", URL, str(tmp_path / "other"), code=2)
    assert "m.pt" in said or "no checkpoint" in said


def test_an_object_that_is_replaced_meanwhile_is_not_used(
    world: CountingWorld, tmp_path: Path
) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        save_file({"w": torch.randn(256, 1024)}, tmp_path / f"{seed}.safetensors")
    keep(world, tmp_path / "0.safetensors", "given/m.safetensors")
    with holdfast.open(f"{URL}/m.safetensors") as opened:
        world.keep("given/m.safetensors", (tmp_path / "1.safetensors").read_bytes())
        with pytest.raises(HoldfastError, match="was changed while it was read"):
            opened.read("model.w")


def test_mistakes_are_named(world: CountingWorld, tmp_path: Path, capsys: Out) -> None:
    with pytest.raises(NotFound):
        holdfast.open("s3://model/nothing-here")
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    for step in (1, 2):
        keep(world, tmp_path / "m.safetensors", f"given/checkpoint-{step}/m.safetensors")
    with pytest.raises(UsageError, match="give the prefix of one"):
        holdfast.open(URL)
    holdfast.save("s3://model/ours", {"w": torch.ones(2)})
    said = error_of(capsys, "import", "s3://model/ours", str(tmp_path / "root"), code=2)
    assert "is a root of ours already" in said


def test_a_cut_or_missing_object_is_refused(world: CountingWorld, tmp_path: Path) -> None:
    data = torch.zeros(3)
    save_file({"w": data}, tmp_path / "m.safetensors")
    world.keep("given/m.safetensors", (tmp_path / "m.safetensors").read_bytes()[:-4])
    with pytest.raises(ForeignFormatError, match="s3://model/given"):
        holdfast.open(f"{URL}/m.safetensors")
    world.fault = lambda kind, key: "busy"
    with pytest.raises(StorageError):
        holdfast.open(URL)
