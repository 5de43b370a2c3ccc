"""What is imported is a checkpoint of ours in every sense, with the bits of its source."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import holdfast
from holdfast.catalogue import catalogue
from holdfast.interop.writing import import_state
from holdfast.storage.local import LocalStore
from support.checkpoints.commands import error_of, json_of, run_alone, text_of

Out = pytest.CaptureFixture[str]


def save_dcp(path: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def trained(steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.linspace(0, 1, 30).reshape(6, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(steps: int) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = trained(steps)
    parameters, state = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": state, "n": steps}


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """Two steps of DCP below one directory."""
    for step in (2, 10):
        save_dcp(tmp_path / "run" / f"step-{step}", state_of(step))
    return tmp_path / "run"


def restored(root: Path, step: int | None = None) -> tuple[int, dict[str, Any]]:
    model, optimizer = trained(1)
    state = {"model": model, "optimizer": optimizer, "n": 0}
    return holdfast.load(root, state, step=step).step, state


def assert_is(state: dict[str, Any], steps: int) -> None:
    model, optimizer = trained(steps)
    assert state["n"] == steps
    for name, one in model.state_dict().items():
        assert torch.equal(one, state["model"].state_dict()[name]), name
    mine, theirs = optimizer.state_dict(), state["optimizer"].state_dict()
    for number, kinds in mine["state"].items():
        for kind, one in kinds.items():
            assert torch.equal(one, theirs["state"][number][kind]), kind


def test_all_steps_become_checkpoints_in_their_order(
    steps: Path, tmp_path: Path, capsys: Out
) -> None:
    root = tmp_path / "root"
    said = json_of(capsys, "import", steps, root)
    assert said["imported"] == ["1-2", "2-10"]
    rows = json_of(capsys, "ls", root)["checkpoints"]
    assert [(row["checkpoint"], row["state"]) for row in rows] == [
        ("1-2", "kept"),
        ("2-10", "newest"),
    ]
    text_of(capsys, "verify", root, "--deep")
    for step in (2, 10):
        found, state = restored(root, step)
        assert found == step
        assert_is(state, step)
    assert restored(root)[0] == 10
    shown = json_of(capsys, "show", root)["values"]["imported_from"]
    assert shown == {"source": str(steps / "step-10"), "format": "dcp", "step": 10}


@pytest.mark.promise
def test_steps_that_are_not_finished_or_can_not_be_read_are_left_out_with_a_note(
    steps: Path, tmp_path: Path, capsys: Out
) -> None:
    shutil.copytree(steps / "step-10", steps / "tmp-step-12")
    shutil.copytree(steps / "step-10", steps / ".step-13")
    shutil.copytree(steps / "step-10", steps / "step-14")
    (steps / "step-14" / ".metadata").write_bytes(b"torn")
    shutil.copytree(steps / "step-10", steps / "step-15")
    (steps / "step-15" / ".metadata").unlink()
    state = {"pytorch-lightning_version": "2.6.6", "global_step": 5}
    torch.save({**state, "state_dict": {"w": torch.ones(2)}}, steps / "last.ckpt")
    said = json_of(capsys, "import", steps, tmp_path / "root", "--dry-run")
    assert [one["step"] for one in said["checkpoints"]] == [2, 5, 10]
    assert len(said["notes"]) == 2
    assert all(f"step-{15 - n} is left out" in one for n, one in enumerate(said["notes"]))
    assert "step-14 is left out" in text_of(capsys, "import", steps, tmp_path / "root")
    assert restored(tmp_path / "root")[0] == 10


@pytest.mark.promise
def test_a_step_behind_the_one_that_is_named_as_the_last_is_left_out(
    steps: Path, tmp_path: Path, capsys: Out
) -> None:
    (steps / "latest_checkpointed_iteration.txt").write_text("2\n")
    said = json_of(capsys, "import", steps, tmp_path / "root")
    assert said["imported"] == ["1-2"]
    assert ["step-10 is left out" in note for note in said["notes"]] == [True]


def test_what_is_imported_has_the_boxes_of_its_source_and_checksums(
    steps: Path, tmp_path: Path, capsys: Out
) -> None:
    text_of(capsys, "import", steps / "step-2", tmp_path / "root")
    said = json_of(capsys, "diff", steps / "step-2", tmp_path / "root", code=1)
    assert said["values"] and not said["leaves"]
    assert all("imported_from" in str(one) for one in said["values"])
    image = next((tmp_path / "root" / "steps").rglob("*.safetensors"))
    data = bytearray(image.read_bytes())
    data[4096] ^= 1
    image.write_bytes(data)
    assert "stored" in text_of(capsys, "verify", tmp_path / "root", "--deep", code=4)


def test_an_import_again_makes_nothing_twice(steps: Path, tmp_path: Path, capsys: Out) -> None:
    root = tmp_path / "root"
    text_of(capsys, "import", steps, root, "--step", "2")
    said = json_of(capsys, "import", steps, root)
    assert (said["there"], said["imported"]) == (["1-2"], ["2-10"])
    before = contents(root)
    assert json_of(capsys, "import", steps, root)["imported"] == []
    assert contents(root) == before


def contents(root: Path) -> dict[str, bytes]:
    found = (one for one in root.rglob("*") if one.is_file() and not one.name.startswith("."))
    return {str(one.relative_to(root)): one.read_bytes() for one in found}


def test_a_run_goes_on_from_what_was_imported(steps: Path, tmp_path: Path, capsys: Out) -> None:
    root = tmp_path / "root"
    text_of(capsys, "import", steps, root)
    _, state = restored(root)
    holdfast.save(root, state, step=11)
    assert restored(root)[0] == 11
    assert len(catalogue(LocalStore(root)).lineage) == 3


def test_only_cast_and_rules_are_applied(tmp_path: Path, capsys: Out) -> None:
    source = tmp_path / "model.safetensors"
    tensors = {"a.w": torch.randn(6, 4), "a.b": torch.arange(3), "c": torch.randn(2, 4)}
    save_file(tensors, source)
    (tmp_path / "rules.py").write_text(
        "from holdfast import rules as r\n"
        "rules = [('a.w', r.part_of('joined', 0, at=0, whole=8)),\n"
        "         ('c', r.transpose(0, 1), r.part_of('joined', 0, at=6, whole=8)),\n"
        "         ('a.b', r.rename('count'))]\n"
    )
    root = tmp_path / "root"
    argv = ("--rules", tmp_path / "rules.py", "--cast", "model.joined=bf16")
    text_of(capsys, "import", source, root, *argv)
    with holdfast.open(root) as found:
        assert sorted(found.leaves) == ["model.count", "model.joined"]
        joined = torch.cat([tensors["a.w"], tensors["c"]]).bfloat16()
        assert torch.equal(found.read("model.joined"), joined)
        assert torch.equal(found.read("model.count"), tensors["a.b"])
    text_of(capsys, "import", source, tmp_path / "part", "--only", "model.a.*")
    with holdfast.open(tmp_path / "part") as found:
        assert sorted(found.leaves) == ["model.a.b", "model.a.w"]


def test_shards_of_several_ranks_stay_images_of_their_own(tmp_path: Path, capsys: Out) -> None:
    """Two files of DCP, as two ranks write them."""
    import pickle

    source = save_dcp(tmp_path / "step-3", {"model": {"w": torch.arange(12.0).reshape(4, 3)}})
    other = save_dcp(tmp_path / "other", {"model": {"w": torch.arange(6.0).reshape(2, 3) + 6}})
    metadata = pickle.loads((source / ".metadata").read_bytes())
    (entry,) = metadata.state_dict_metadata.values()
    half = copy.deepcopy(entry.chunks[0])
    entry.chunks[0].sizes = half.sizes = torch.Size((2, 3))
    half.offsets = torch.Size((2, 0))
    entry.chunks.append(half)
    first = save_dcp(tmp_path / "first", {"model": {"w": torch.arange(6.0).reshape(2, 3)}})
    (source / "__0_0.distcp").write_bytes((first / "__0_0.distcp").read_bytes())
    (source / "__1_0.distcp").write_bytes((other / "__0_0.distcp").read_bytes())
    ((index, info),) = metadata.storage_data.items()
    info.length = (first / "__0_0.distcp").stat().st_size
    second = dcp.metadata.MetadataIndex(index.fqn, (2, 0), 1)
    metadata.storage_data[second] = copy.deepcopy(info)
    metadata.storage_data[second].relative_path = "__1_0.distcp"
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    root = tmp_path / "root"
    text_of(capsys, "import", source, root)
    (manifest,) = catalogue(LocalStore(root)).manifests
    assert manifest.world == 2
    with holdfast.open(root) as found:
        assert torch.equal(found.read("model.w"), torch.arange(12.0).reshape(4, 3))


def test_windows_of_any_size_give_the_same_images(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(900, 1300), "v": torch.randn(77, 5000), "n": torch.ones(1)}, source)
    text_of(capsys, "import", source, tmp_path / "one")
    monkeypatch.setattr(import_state, "window_bytes", lambda *_: 1 << 20)
    text_of(capsys, "import", source, tmp_path / "other")
    images = [contents(tmp_path / name) for name in ("one", "other")]
    for path, data in images[0].items():
        if path.startswith("steps/"):
            assert images[1][path] == data
    text_of(capsys, "verify", tmp_path / "other", "--deep")


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────


def test_a_dry_run_shows_names_and_bytes_and_makes_nothing(
    steps: Path, tmp_path: Path, capsys: Out
) -> None:
    shown = json_of(capsys, "import", steps, tmp_path / "root", "--dry-run")
    assert [one["step"] for one in shown["checkpoints"]] == [2, 10]
    assert "model.0.weight" in shown["checkpoints"][0]["leaves"]
    assert not (tmp_path / "root").exists()
    assert "model.0.weight" in text_of(capsys, "import", steps, tmp_path / "root", "--dry-run")


def test_a_source_that_changes_meanwhile_makes_no_checkpoint(
    steps: Path, tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = steps / "step-2" / "__0_0.distcp"
    run = import_state._ImageWriting.run

    def change(self: Any, *args: Any) -> Any:
        found = run(self, *args)
        os.utime(file, (1, 1))
        return found

    monkeypatch.setattr(import_state._ImageWriting, "run", change)
    said = error_of(capsys, "import", steps / "step-2", tmp_path / "root", code=4)
    assert "was changed while it was read" in said
    assert not catalogue(LocalStore(tmp_path / "root")).manifests


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_source_without_rights_is_one_error(steps: Path, tmp_path: Path, capsys: Out) -> None:
    (steps / "step-2" / "__0_0.distcp").chmod(0)
    error_of(capsys, "import", steps / "step-2", tmp_path / "root", code=5)


def test_mistakes_are_one_error_each(steps: Path, tmp_path: Path, capsys: Out) -> None:
    root = tmp_path / "root"
    assert "no step 3" in error_of(capsys, "import", steps, root, "--step", "3", code=3)
    assert "is not there" in error_of(capsys, "import", tmp_path / "no", root, code=3)
    (tmp_path / "empty").mkdir()
    assert "no checkpoint" in error_of(capsys, "import", tmp_path / "empty", root, code=3)
    assert not root.exists()
    text_of(capsys, "import", steps / "step-10", root)
    before = contents(root)
    said = error_of(capsys, "import", steps / "step-2", root, code=2)
    assert "a checkpoint that is imported is the newest" in said and contents(root) == before
    file = steps / "step-10" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-900])
    error_of(capsys, "import", steps / "step-10", tmp_path / "short", code=4)
    assert not catalogue(LocalStore(tmp_path / "short")).manifests


def test_no_torch_is_loaded(steps: Path, tmp_path: Path) -> None:
    done = run_alone("import", str(steps), str(tmp_path / "root"))
    assert done.returncode == 0, done.stderr


def test_every_type_comes_in_as_it_was(tmp_path: Path, capsys: Out) -> None:
    tensors = {
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "bool": torch.tensor([True, False, True]),
        "float8": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "wide": torch.arange(4, dtype=torch.int64).reshape(2, 2) - (1 << 62),
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }
    torch.save(tensors, tmp_path / "state.pt")
    text_of(capsys, "import", tmp_path / "state.pt", tmp_path / "root")
    text_of(capsys, "verify", tmp_path / "root", "--deep")
    with holdfast.open(tmp_path / "root") as found:
        for name, one in tensors.items():
            read = found.read(f"model.{name}")
            assert (read.dtype, read.shape) == (one.dtype, one.shape), name
            assert raw(read) == raw(one), name


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def test_numbered_parameters_need_names(tmp_path: Path, capsys: Out) -> None:
    model, optimizer = trained(2)
    source, root = tmp_path / "state.pt", tmp_path / "root"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n": 2}, source)
    said = error_of(capsys, "import", source, root, code=2)
    assert "--parameters FILE" in said and not root.exists()
    text_of(capsys, "import", source, tmp_path / "part", "--only", "model.**")
    names = tmp_path / "names.json"
    names.write_text(json.dumps([[name for name, _ in model.named_parameters()]]))
    text_of(capsys, "import", source, root, "--parameters", names)
    assert_is(restored(root)[1], 2)
    names.write_text(json.dumps([["0.weight"]]))
    said = error_of(capsys, "import", source, root, "--parameters", names, code=2)
    assert "groups of [4] parameters" in said
    names.write_text("[1]")
    said = error_of(capsys, "import", source, root, "--parameters", names, code=2)
    assert "is no list of lists of names" in said


def test_numbered_parameters_leave_by_numbers(tmp_path: Path, capsys: Out) -> None:
    model, optimizer = trained(2)
    source = tmp_path / "state.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    text_of(capsys, "export", source, tmp_path / "again.pt", "--to", "torch")
    read = torch.load(tmp_path / "again.pt", weights_only=True)["optimizer"]
    wanted = optimizer.state_dict()
    assert read["param_groups"] == wanted["param_groups"]
    for number, kinds in wanted["state"].items():
        assert all(torch.equal(one, read["state"][number][kind]) for kind, one in kinds.items())
    said = error_of(capsys, "export", source, tmp_path / "dcp", "--to", "dcp", code=2)
    assert "by numbers" in said


def test_a_root_of_ours_is_no_source_and_a_bucket_no_place_for_an_export(
    steps: Path, tmp_path: Path, capsys: Out
) -> None:
    text_of(capsys, "import", steps, tmp_path / "root")
    said = error_of(capsys, "import", tmp_path / "root", tmp_path / "other", code=2)
    assert "`holdfast copy`" in said
    argv = ("export", tmp_path / "root", "s3://a/b", "--to", "dcp")
    assert "goes to a directory" in error_of(capsys, *argv, code=2)
    assert "no place for" in error_of(
        capsys, "export", tmp_path / "root", "/", "--to", "dcp", code=2
    )


def test_what_each_rank_has_of_its_own_comes_along(tmp_path: Path, capsys: Out) -> None:
    source = tmp_path / "checkpoint-3"
    source.mkdir()
    save_file({"w": torch.ones(2)}, source / "model.safetensors")
    states = []
    for rank in range(2):
        torch.manual_seed(40 + rank)
        states.append(torch.get_rng_state())
        numbers = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": states[-1]}
        torch.save(numbers, source / f"rng_state_{rank}.pth")
    text_of(capsys, "import", source, tmp_path / "root")
    with holdfast.open(source) as theirs, holdfast.open(tmp_path / "root") as ours:
        assert ours.manifest.world == theirs.manifest.world == 2
        for rank in range(2):
            own = ours.document(rank)["own"]
            assert own == theirs.document(rank)["own"] and own["rng"]
        assert ours.document(0)["own"] != ours.document(1)["own"]
    text_of(capsys, "import", source, tmp_path / "part", "--only", "model.**")
    with holdfast.open(tmp_path / "part") as ours:
        assert ours.document(0)["own"] == {}


def test_casts_leave_the_steps_of_optimizers_as_they_are(tmp_path: Path, capsys: Out) -> None:
    model, optimizer = trained(2)
    for kinds in optimizer.state.values():
        kinds["step"] += 1000
    holdfast.save(tmp_path / "root", {"model": model, "optimizer": optimizer})
    for cast, dtype in (("BF16", "F32"), ("optimizer.**.step=BF16", "BF16")):
        out = tmp_path / dtype
        text_of(capsys, "export", tmp_path / "root", out, "--to", "dcp", "--cast", cast)
        with holdfast.open(out) as found:
            assert found.leaves["optimizer.0.weight.step"].dtype == dtype
            average = found.leaves["optimizer.0.weight.exp_avg"].dtype
            assert average == ("BF16" if cast == "BF16" else "F32")
