"""A user's mistake with another writer's checkpoint: what is wrong, where, and what to give."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.cli import main
from holdfast.errors import HoldfastError, NotFound, StateMismatch, UsageError
from holdfast.rules import Rules, rename

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"
DEEPSPEED, MEGATRON = GOLDEN / "deepspeed-0.19.8", GOLDEN / "megatron-core-0.16.1"
SHARDED = GOLDEN / "accelerate-1.15.0" / "fsdp2" / "checkpoint" / "optimizer_0"

#: What is copied, what of it is given, the error, and what it says to give.
LEVELS: dict[str, tuple[Path, str, type[HoldfastError], str]] = {
    "a folder around": (DEEPSPEED / "zero1-fp32-2", "..", NotFound, "below it: give {}/run"),
    "two folders around": (DEEPSPEED / "zero1-fp32-2", "../..", NotFound, "below it: give {}/run"),
    "a folder around Megatron's": (MEGATRON / "tp2-pp2", "..", NotFound, "below it: give {}/run"),
    "a rank's file of DeepSpeed": (
        DEEPSPEED / "zero1-fp32-2",
        "global_step3/mp_rank_00_model_states.pt",
        UsageError,
        "give its directory",
    ),
    "the file that names the tag": (
        DEEPSPEED / "zero1-fp32-2",
        "latest",
        NotFound,
        "a part of one in {}/run: give that",
    ),
    "the atoms": (
        DEEPSPEED / "universal-zero1-bf16-2",
        "global_step3_universal/zero",
        NotFound,
        "a part of one in {}/run/global_step3_universal: give that",
    ),
    "the atoms of one parameter": (
        DEEPSPEED / "universal-zero3-bf16-2",
        "global_step3_universal/zero/up.bias",
        NotFound,
        "a part of one in {}/run/global_step3_universal: give that",
    ),
    "the folder of a rank of Megatron": (
        MEGATRON / "ranks-tp2",
        "iter_0000020/mp_rank_01",
        NotFound,
        "a part of one in {}/run/iter_0000020: give that",
    ),
    "the file of a rank of Megatron": (
        MEGATRON / "ranks-tp2-pp2",
        "iter_0000020/mp_rank_01_000/model_optim_rng.pt",
        UsageError,
        "one file of a checkpoint of Megatron: give {}/run/iter_0000020",
    ),
    "a shard of DCP": (
        MEGATRON / "tp2-pp2",
        "iter_0000020/__0_0.distcp",
        UsageError,
        "one file of a checkpoint of torch.distributed.checkpoint: give {}/run/iter_0000020",
    ),
    "the metadata of DCP": (
        MEGATRON / "tp2-pp2",
        "iter_0000020/.metadata",
        UsageError,
        "one file of a checkpoint of torch.distributed.checkpoint: give {}/run/iter_0000020",
    ),
}


@pytest.mark.promise
@pytest.mark.parametrize("kind", LEVELS)
def test_a_wrong_level_is_an_error_that_names_the_right_one(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, level, error, words = LEVELS[kind]
    around = tmp_path / "runs" / "one"
    run = Path(shutil.copytree(case / "checkpoint", around / "run"))
    given = (run / level).resolve()
    said = re.escape(words.format(around))
    for way in (holdfast.open, lambda path: holdfast.load(path, {"model": nn.Linear(2, 2)})):
        with pytest.raises(error, match=rf"^{re.escape(str(given))}.*{said}$"):
            way(given)
    for command in (["show", str(given)], ["import", str(given), str(tmp_path / "root")]):
        assert main(command) in (2, 3)
        assert re.search(said, capsys.readouterr().err), command
    assert not (tmp_path / "root").exists()


def test_what_is_near_no_checkpoint_is_told_as_before(tmp_path: Path) -> None:
    """Links lead anywhere, and a directory of this name is no pointer of DeepSpeed."""
    (tmp_path / "mine" / "latest").mkdir(parents=True)
    (tmp_path / "latest").symlink_to(DEEPSPEED / "zero1-fp32-2" / "checkpoint")
    with pytest.raises(NotFound, match="It holds other things: latest"):
        holdfast.open(tmp_path / "mine")


class Other(nn.Module):
    """Its first weight has another shape than the one that is stored."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, rows)


@pytest.mark.promise
def test_a_model_of_other_shapes_is_told_by_tensor_with_both_shapes_and_the_directory() -> None:
    root = DEEPSPEED / "zero1-fp32-2" / "checkpoint"
    model = Other(10)
    before = model.up.weight.clone()
    words = r"up\.weight: the checkpoint has F32 \[9, 6\], the model F32 \[10, 6\](.|\n)*Build the"
    with pytest.raises(StateMismatch, match=rf"^{re.escape(str(root))}: (.|\n)*{words}"):
        holdfast.load(root, {"model": model})
    assert torch.equal(model.up.weight, before)


@pytest.mark.promise
def test_names_that_no_rule_maps_are_listed_with_the_directory() -> None:
    root = DEEPSPEED / "zero1-fp32-2" / "checkpoint"
    rules = Rules([("up.weight", rename("above.weight"))])
    words = r"up\.weight: nothing is seen as this leaf on the other side of the rules\. Give a rule"
    with pytest.raises(UsageError, match=rf"^{re.escape(str(root))}: {words}"):
        holdfast.load(root, {"model": Other(9)}, stored_rules=rules)
    model = nn.ModuleDict({"over": nn.Linear(6, 9)})
    words = r"model\.over\.bias: in the model, but not in the checkpoint(.|\n)*allow_missing="
    with pytest.raises(StateMismatch, match=rf"^{re.escape(str(root))}: (.|\n)*{words}"):
        holdfast.load(root, {"model": model}, rules=Rules([("over.weight", rename("up.weight"))]))


OUT: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a directory with files": ("dcp", lambda out: out.mkdir(), "has files in it, which are never"),
    "a file for a directory": ("dcp", lambda out: out.write_bytes(b"x"), "is a file, and a direc"),
    "a file": ("torch", lambda out: out.write_bytes(b"x"), "exists already and is never written"),
    "no directory to write in": ("dcp", lambda out: out.parent.rmdir(), "is no directory: make it"),
}


@pytest.mark.promise
@pytest.mark.parametrize("kind", OUT)
def test_an_export_over_what_is_there_is_refused_and_leaves_it(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to, make, words = OUT[kind]
    out = tmp_path / "place" / "out"
    out.parent.mkdir()
    make(out)
    if out.is_dir():
        (out / "mine").write_bytes(b"x")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    source = DEEPSPEED / "zero1-fp32-2" / "checkpoint"
    assert main(["export", str(source), str(out), "--to", to]) == 2
    said = capsys.readouterr().err
    assert words in said and "give another place" in said and str(out.parent) in said
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
