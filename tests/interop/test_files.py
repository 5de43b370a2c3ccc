"""Files of torch.save and safetensors: read by ranges, into live models, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import holdfast
from holdfast.cli import main
from holdfast.errors import ForeignFormatError, HoldfastError
from holdfast.interop import extent_reader, foreign_store
from holdfast.interop.opening import open_source
from holdfast.interop.pickle_records import Record
from holdfast.interop.pickles import Pickled
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.torch_files import TorchFile, Tree


def build(seed: int, steps: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1), **options)
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_model_and_optimizer_of_one_torch_file_are_loaded(tmp_path: Path) -> None:
    model, optimizer = build(0, steps=3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "a.pt")
    other, other_optimizer = build(1)
    loaded: dict[str, Any] = {"model": other, "optimizer": other_optimizer, "epoch": 0}
    holdfast.load(tmp_path / "a.pt", loaded)
    assert same(other.state_dict(), model.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    assert loaded["epoch"] == 3


def test_numbers_stand_for_positions_in_the_groups_as_in_torch(tmp_path: Path) -> None:
    model, _ = build(0)
    first, *rest = model.parameters()
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": [first], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    other, wrong = build(1)
    heard: list[str] = []
    stop = holdfast.subscribe(lambda event, _: heard.append(str(event)))
    try:
        with pytest.raises(holdfast.StateMismatch, match="optimizer"):
            holdfast.load(tmp_path / "a.pt", {"model": other, "optimizer": wrong})
    finally:
        stop()
    assert any("keyed by numbers" in text for text in heard)
    mine, *others = other.parameters()
    there = torch.optim.AdamW([{"params": others}, {"params": [mine]}], lr=9.0)
    holdfast.load(tmp_path / "a.pt", {"model": other, "optimizer": there})
    assert same(other.state_dict(), model.state_dict())
    assert same(there.state_dict(), optimizer.state_dict())


def test_parameters_are_told_by_the_names_in_the_groups(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [{"params": named[2:]}, {"params": named[:2], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.randn(4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    there = torch.optim.AdamW(
        [{"params": list(other[0].parameters())}, {"params": list(other[1].parameters())}], lr=9.0
    )
    holdfast.load(tmp_path / "a.pt", {"model": other, "optimizer": there})
    for (name, parameter), (_, mine) in zip(named, other.named_parameters(), strict=True):
        for kind, tensor in optimizer.state[parameter].items():
            assert torch.equal(tensor, there.state[mine][kind]), (name, kind)
    assert [group["lr"] for group in there.param_groups] == [0.5, 0.1]


def test_views_ties_and_strange_types_come_back(tmp_path: Path) -> None:
    base = torch.arange(1000.0).reshape(10, 100)
    tied = torch.randn(3)
    tensors = {
        "turned": base.T,
        "part": base[2:5, 10:20],
        "steps": base[:, ::7],
        "spread": torch.ones(1).expand(5, 4),
        "tied": tied,
        "again": tied,
        "zero": torch.tensor(2, dtype=torch.int8),
        "none": torch.zeros(0, 3),
        "half": torch.randn(5).to(torch.float8_e4m3fn),
        "yes": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex64),
    }
    torch.save(tensors, tmp_path / "a.pt")
    with holdfast.open(tmp_path / "a.pt") as opened:
        for name, tensor in tensors.items():
            found = opened.read(f"model.{name}")
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            assert torch.equal(
                found.view(torch.uint8) if name == "half" else found,
                tensor.view(torch.uint8) if name == "half" else tensor,
            ), name
        assert opened.aliases == {"model.again": "model.tied"}


@pytest.mark.parametrize("window", [40, 4 << 20])
def test_large_strided_tensors_are_read_by_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(extent_reader, "WINDOW_BYTES", window)
    monkeypatch.setattr(extent_reader, "_ELEMENTS_AT_ONCE", 100)
    whole = torch.arange(64 * 48 * 5).reshape(64, 48, 5).permute(2, 0, 1)
    torch.save({"w": whole}, tmp_path / "a.pt")
    with holdfast.open(tmp_path / "a.pt") as opened:
        assert torch.equal(opened.read("model.w"), whole)
        box = (slice(1, 4), slice(3, 60), slice(7, 9))
        assert torch.equal(opened.read("model.w", box), whole[box])


def test_a_range_is_read_and_not_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.arange(1 << 24, dtype=torch.uint8).reshape(1 << 12, 1 << 12)
    torch.save({"w": rows}, tmp_path / "a.pt")
    taken: list[int] = []
    real = SourceFiles.read_into

    def counted(self: SourceFiles, name: str, at: int, into: memoryview) -> None:
        taken.append(len(into))
        real(self, name, at, into)

    with holdfast.open(tmp_path / "a.pt") as opened:
        monkeypatch.setattr(SourceFiles, "read_into", counted)
        found = opened.read("model.w", (slice(100, 110), slice(0, 1 << 12)))
    assert torch.equal(found, rows[100:110])
    assert sum(taken) <= 2 << 20


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_module_that_was_wrapped_when_it_was_saved_fills_one_that_is_not(
    tmp_path: Path, prefix: str
) -> None:
    """As DistributedDataParallel and torch.compile name parameters; exports keep these names."""
    model, optimizer = build(0)
    named = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": named, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    other, there = build(1)
    holdfast.load(tmp_path / "a.pt", {"model": other, "optimizer": there})
    assert same(other.state_dict(), model.state_dict())
    assert same(there.state_dict(), optimizer.state_dict())
    if prefix == "module.":  # a module that has a part of this name keeps it
        wrapped, (inner, moments) = nn.Module(), build(2)
        wrapped.module = inner
        holdfast.load(tmp_path / "a.pt", {"model": wrapped})
        assert same(inner.state_dict(), model.state_dict())
        wrapped.module, moments = build(3)
        holdfast.load(tmp_path / "a.pt", {"model": wrapped, "optimizer": moments})
        assert same(wrapped.state_dict(), named) and same(
            moments.state_dict(), optimizer.state_dict()
        )
    with holdfast.open(tmp_path / "a.pt") as opened:
        assert {n for n in opened.leaves if n.startswith("model.")} == {f"model.{n}" for n in named}


def test_values_that_name_tensors_below_a_wrappers_name_stay_as_they_are(tmp_path: Path) -> None:
    model, optimizer = build(0)
    held = {"module": {"optim": optimizer.state_dict(), "model": model.state_dict()}}
    plain = {"module": {"a": {"b": {"x": torch.ones(2)}}, "n": 1}}
    torch.save({"app": held, "plain": plain}, tmp_path / "a.pt")
    other, there = build(1)
    state: dict[str, Any] = {
        "app": {"module": {"optim": there, "model": other}},
        "plain": {"module": {"a": {"b": {"x": torch.zeros(2)}}, "n": 0}},
    }
    holdfast.load(tmp_path / "a.pt", state)
    assert same(other.state_dict(), model.state_dict())
    assert same(there.state_dict(), optimizer.state_dict())
    assert state["plain"]["module"]["n"] == 1
    assert torch.equal(state["plain"]["module"]["a"]["b"]["x"], torch.ones(2))


def test_safetensors_with_an_index_fill_a_model(tmp_path: Path) -> None:
    model, _ = build(0)
    tensors = dict(model.state_dict())
    names = sorted(tensors)
    files = {"m-1-of-2.safetensors": names[:3], "m-2-of-2.safetensors": names[3:]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, tmp_path / file, {"format": "pt"})
    weights = {name: file for file, some in files.items() for name in some}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    other, _ = build(1)
    holdfast.load(tmp_path, {"model": other})
    assert same(other.state_dict(), model.state_dict())
    weights["ghost"] = "m-1-of-2.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ForeignFormatError, match="'ghost', which is in none of its files"):
        holdfast.open(tmp_path)


def test_a_sharded_safetensors_of_dcp_is_put_together(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    for rank in range(2):
        info = {"w": {"saved_offsets": [3 * rank, 0]}}
        save_file(
            {"w": whole[3 * rank : 3 * rank + 3].clone()},
            tmp_path / f"shard-{rank:05d}-model-00001-of-00001.safetensors",
            {"DCP_SHARDING_INFO": json.dumps(info)},
        )
    with holdfast.open(tmp_path) as opened:
        assert torch.equal(opened.read("model.w"), whole)


def test_the_last_shard_of_dcp_that_is_there_is_named(tmp_path: Path) -> None:
    """No file says how many there were: a model of the right shape refuses the smaller tensor."""
    whole = torch.randn(6, 4)
    for rank in range(2):
        info = {"w": {"saved_offsets": [2 * rank, 0]}}
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        part = whole[2 * rank : 2 * rank + 2].clone()
        save_file({"w": part}, tmp_path / name, {"DCP_SHARDING_INFO": json.dumps(info)})
    notes = open_source(tmp_path).notes  # type: ignore[attr-defined]
    assert any(f"{name} is the last shard that is there" in note for note in notes)
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(6, 4)))
    with pytest.raises(HoldfastError, match=r"model\.w.*\[6, 4\]|model\.w.*\(6, 4\)|model\.w"):
        holdfast.load(tmp_path, {"model": model})


def trainer_directory(root: Path) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """As the Trainer of transformers writes it."""
    model, optimizer = build(0, steps=2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    root.mkdir(exist_ok=True)
    save_file(dict(model.state_dict()), root / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), root / "optimizer.pt")
    torch.save(scheduler.state_dict(), root / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state(), "python": (3, (1, 2), None)}, root / "rng_state.pth")
    (root / "trainer_state.json").write_text(json.dumps({"global_step": 50, "epoch": 0.5}))
    torch.save({"made": "up"}, root / "training_args.bin")
    return model, optimizer, scheduler


def test_a_directory_of_the_trainer_is_loaded(tmp_path: Path) -> None:
    model, optimizer, scheduler = trainer_directory(tmp_path / "checkpoint-50")
    other, there = build(1)
    schedule = torch.optim.lr_scheduler.LinearLR(there)
    state: dict[str, Any] = {"model": other, "optimizer": there, "scheduler": schedule}
    assert holdfast.load(tmp_path / "checkpoint-50", state).step == 50
    assert same(other.state_dict(), model.state_dict())
    assert same(there.state_dict(), optimizer.state_dict())
    assert schedule.state_dict() == scheduler.state_dict()


def test_a_lightning_file_is_loaded(tmp_path: Path) -> None:
    model, optimizer = build(0, steps=2)
    document = {
        "pytorch-lightning_version": "2.5.0",
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "epoch": 1,
        "global_step": 40,
    }
    torch.save(document, tmp_path / "x.ckpt")
    other, there = build(1)
    state: dict[str, Any] = {"model": other, "optimizer": there, "epoch": 0}
    assert holdfast.load(tmp_path / "x.ckpt", state).step == 40
    assert same(there.state_dict(), optimizer.state_dict()) and state["epoch"] == 1


def test_older_files_of_torch_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ForeignFormatError, match="of torch before"):
        holdfast.open(tmp_path / "a.pt")


def flip(path: Path, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[raw.index(data) + 4] ^= 1
    path.write_bytes(raw)


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_dcp", [False, True])
def test_a_flipped_bit_in_a_tensor_is_found(tmp_path: Path, is_dcp: bool) -> None:
    whole = torch.arange(6.0)
    path = tmp_path / ("dcp" if is_dcp else "a.pt")
    if is_dcp:
        dcp.save({"w": whole}, checkpoint_id=path, no_dist=True)
    else:
        torch.save({"w": whole}, path)
    assert main(["verify", str(path), "--deep"]) == 0
    flip(path / "__0_0.distcp" if is_dcp else path, whole.numpy().tobytes())
    with holdfast.open(path) as opened, pytest.raises(HoldfastError, match="another checksum"):
        opened.read("model.w")
    with pytest.raises(HoldfastError, match="another checksum"):
        holdfast.load(path, {"model": nn.ParameterDict({"w": nn.Parameter(torch.zeros(6))})})
    assert main(["verify", str(path), "--deep"]) == 4


@pytest.mark.promise
def test_a_deep_check_compares_what_no_read_covers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = torch.arange(9.0)
    torch.save({"part": base[::2]}, tmp_path / "a.pt")
    flip(tmp_path / "a.pt", base.numpy().tobytes())
    assert main(["verify", str(tmp_path / "a.pt"), "--deep"]) == 4
    assert "another checksum" in capsys.readouterr().out


def test_a_file_without_checksums_is_read_and_says_so(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(6.0)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with holdfast.open(tmp_path / "a.pt") as opened:
        assert torch.equal(opened.read("model.w"), torch.arange(6.0))
    found = open_source(tmp_path / "a.pt")
    assert isinstance(found, foreign_store.ForeignStore)
    assert "unverified by its writer" in found.notes[0]


def test_nothing_is_written_to_a_foreign_directory(tmp_path: Path) -> None:
    trainer_directory(tmp_path / "a")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "a").rglob("*"))
    other, _ = build(1)
    holdfast.load(tmp_path / "a", {"model": other})
    with holdfast.open(tmp_path / "a") as opened:
        opened.read("model.0.weight")
    assert sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "a").rglob("*")) == before


@pytest.mark.promise
def test_one_file_of_several_is_no_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00003.safetensors"
    save_file({"w": torch.ones(2)}, path)
    for where in (path, tmp_path):
        with pytest.raises(ForeignFormatError, match=r"of 00003 files .* 1 are there"):
            holdfast.open(where)
    for number in (2, 3):
        save_file(
            {f"w{number}": torch.ones(2)}, tmp_path / f"model-0000{number}-of-00003.safetensors"
        )
    with holdfast.open(tmp_path) as opened:
        assert torch.equal(opened.read("model.w3"), torch.ones(2))


def test_a_list_that_names_another_often_is_walked_once() -> None:
    inside: Any = []
    for _ in range(60):
        inside = [inside, inside, (inside,)]
    circle: Any = {"a": inside}
    circle["b"] = Record("Namespace", {"me": circle, "again": [circle]})
    file = TorchFile("f", "f", "f", Pickled(circle, (), 0), {}, True)
    found = Tree(file).value()
    assert found["b"].fields["me"] is found and found["a"][0] is found["a"][1]
