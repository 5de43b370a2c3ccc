"""The commands that read take checkpoints of other writers, and load no torch for it."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

import holdfast
from support.checkpoints.commands import error_of, json_of, run_alone, text_of

Out = pytest.CaptureFixture[str]


@pytest.fixture
def dcp_root(tmp_path: Path) -> Path:
    root = tmp_path / "step-7"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5)}, "n": 3},
            checkpoint_id=root,
            no_dist=True,
        )
    return root


@pytest.mark.parametrize(
    "argv", [("ls",), ("show",), ("show", "model.w"), ("verify", "--deep"), ("dump", "model.w")]
)
def test_no_command_loads_torch_for_a_foreign_directory(
    dcp_root: Path, argv: tuple[str, ...]
) -> None:
    done = run_alone(argv[0], str(dcp_root), *argv[1:])
    assert done.returncode == 0, done.stderr


def test_a_foreign_directory_is_shown(dcp_root: Path, capsys: Out) -> None:
    (row,) = json_of(capsys, "ls", dcp_root)["checkpoints"]
    assert (row["checkpoint"], row["step"], row["world"]) == ("0-7", 7, 1)
    shown = json_of(capsys, "show", dcp_root)
    assert [leaf["name"] for leaf in shown["leaves"]] == ["model.b", "model.w"]
    assert shown["values"] == {"n": 3} and "notes" not in shown
    assert "11" in text_of(capsys, "dump", dcp_root, "model.w")


def test_a_foreign_directory_is_compared_with_ours(
    dcp_root: Path, tmp_path: Path, capsys: Out
) -> None:
    model = torch.nn.ParameterDict(
        {"w": torch.nn.Parameter(torch.zeros(3, 4)), "b": torch.nn.Parameter(torch.zeros(5))}
    )
    state = {"model": model, "n": 0}
    holdfast.load(dcp_root, state)
    holdfast.save(tmp_path / "ours", state, step=7)
    assert "identical" in text_of(capsys, "diff", dcp_root, tmp_path / "ours")
    with torch.no_grad():
        model["w"][1, 1] += 1
    holdfast.save(tmp_path / "other", state, step=7)
    assert "model.w" in text_of(capsys, "diff", dcp_root, tmp_path / "other", code=1)


def test_verify_says_that_nobody_left_checksums(dcp_root: Path, capsys: Out) -> None:
    assert "unverified: its writer left no checksums" in text_of(capsys, "verify", dcp_root)
    (row,) = json_of(capsys, "verify", dcp_root, "--deep")["checkpoints"]
    assert row["faults"] == [] and "unverified" in row


def test_verify_finds_what_no_file_has(dcp_root: Path, capsys: Out) -> None:
    raw = pickle.loads((dcp_root / ".metadata").read_bytes())
    raw.state_dict_metadata["model.w"].chunks[0].sizes = torch.Size([2, 4])
    (dcp_root / ".metadata").write_bytes(pickle.dumps(raw))
    said = text_of(capsys, "verify", dcp_root, code=4)
    assert "model.w: box (2, 0):(3, 4) is not stored" in said


def test_verify_finds_short_and_missing_files(dcp_root: Path, capsys: Out) -> None:
    file = dcp_root / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    said = text_of(capsys, "verify", dcp_root, code=4)
    assert "__0_0.distcp has" in said and "is not stored" in said
    file.unlink()
    assert "__0_0.distcp is not there" in text_of(capsys, "verify", dcp_root, code=4)


def test_verify_deep_finds_shards_of_another_save(
    dcp_root: Path, tmp_path: Path, capsys: Out
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = {"model": {"w": torch.ones(4, 3), "b": torch.ones(5)}, "n": 3}
        dcp.save(other, checkpoint_id=tmp_path / "other", no_dist=True)
    os.replace(tmp_path / "other" / "__0_0.distcp", dcp_root / "__0_0.distcp")
    said = text_of(capsys, "verify", dcp_root, "--deep", code=4)
    assert "different saves" in said


@pytest.mark.promise
def test_a_save_over_another_that_was_stopped_is_said_by_verify_and_by_a_load(
    dcp_root: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP writes over the shards of an older save, and leaves that one's metadata if it stops."""
    said = text_of(capsys, "verify", dcp_root)
    assert "two saves" not in said
    old = (dcp_root / ".metadata").stat().st_mtime - 300
    os.utime(dcp_root / ".metadata", (old, old))

    def stopped(*_: object) -> None:
        raise OSError("stopped")

    monkeypatch.setattr(FileSystemWriter, "finish", stopped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        newer = {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(5)}, "n": 4}
        with pytest.raises(CheckpointException):
            dcp.save(newer, checkpoint_id=dcp_root, no_dist=True)
    assert "a save over this directory was stopped" in text_of(capsys, "verify", dcp_root)
    heard: list[str] = []
    stop = holdfast.subscribe(lambda event, _: heard.append(str(event)))
    try:
        holdfast.open(dcp_root).close()
    finally:
        stop()
    assert any("its tensors are of two saves" in text for text in heard)


def test_commands_that_write_refuse_it(dcp_root: Path, tmp_path: Path, capsys: Out) -> None:
    for argv in (
        ("copy", dcp_root, tmp_path / "out"),
        ("repair", dcp_root),
        ("pin", dcp_root, "7"),
    ):
        assert "no holdfast.json" in error_of(capsys, *argv, code=3)


def test_one_file_is_shown_too(tmp_path: Path, capsys: Out) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    assert "model.w" in text_of(capsys, "show", tmp_path / "m.safetensors")
    (tmp_path / "other.txt").write_text("x")
    assert "no checkpoints" in error_of(capsys, "show", tmp_path / "other.txt", code=3)
