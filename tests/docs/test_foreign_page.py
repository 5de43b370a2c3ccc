"""The commands that the page on other writers shows run on what these wrote."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.cli import main
from support.project.code_blocks import PROJECT

PAGE = (PROJECT / "docs" / "foreign-checkpoints.md").read_text()
GOLDEN = PROJECT / "tests" / "golden" / "foreign"
#: The golden directory of each section, and the names in the page that stand for it.
SECTIONS = {
    "Trainer": ("transformers-5.23.0/steps/checkpoint", "out", ""),
    "Accelerate": ("accelerate-1.15.0/fsdp2/checkpoint", "checkpoints/checkpoint_3", ""),
    "Lightning": ("lightning-2.6.6/file/checkpoint", "checkpoints", "20"),
    "Megatron": ("megatron-core-0.16.1/tp2-dp2/checkpoint", "run", ""),
}


def commands_of(world: str) -> list[list[str]]:
    """The commands that the section of a writer shows."""
    _, section = re.split(rf"^## I have an? {world} (?:checkpoint|run)$", PAGE, flags=re.MULTILINE)
    section = section.partition("\n## ")[0]
    (block,) = re.findall(r"```(?:ba)?sh\n(.*?)```", section, re.S)
    return [shlex.split(line, comments=True) for line in block.splitlines() if line]


@pytest.mark.parametrize("case", ["zero1-bf16-2", "zero2-fp16-2", "zero3-bf16-2"])
def test_a_deepspeed_run_comes_in_and_leaves_again(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = GOLDEN / "deepspeed-0.19.8" / case
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(golden / "checkpoint")
    commands = commands_of("DeepSpeed")
    names = [command for _, command, *_ in commands]
    assert names == ["ls", "verify", "import", "export", "export"]
    for program, *rest in commands:
        assert program == "holdfast"
        assert main(rest) == 0, capsys.readouterr()
    expected = load_file(golden / "expected.safetensors")
    weights = {n.removeprefix("model."): t for n, t in expected.items() if n.startswith("model.")}
    weights["head.weight"] = weights["embed.weight"]  # tied
    read = torch.load("gpt.pt", weights_only=True)
    for found in (read["model"], load_file("gpt-hf/model.safetensors")):
        assert found and all(torch.equal(tensor, weights[name]) for name, tensor in found.items())
    assert weights.keys() <= read["model"].keys()
    groups = json.loads((golden / "expected.json").read_text())["groups"]
    assert [one["lr"] for one in read["optimizer"]["param_groups"]] == [one["lr"] for one in groups]
    for group in read["optimizer"]["param_groups"]:
        for name, number in zip(group["param_names"], group["params"], strict=True):
            moment = read["optimizer"]["state"][number]["exp_avg"]
            assert torch.equal(moment, expected[f"optimizer.{name}.exp_avg"])


@pytest.mark.parametrize("world", SECTIONS)
def test_two_commands_show_what_it_wrote(world: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory, shown, step = SECTIONS[world]
    commands = commands_of(world)
    assert len(commands) == 2
    for program, command, where, *options in commands:
        assert (program, where) == ("holdfast", shown)
        here = ["4" if one == step else one for one in options]
        assert main([command, str(GOLDEN / Path(directory)), *here]) == 0, capsys.readouterr()


def test_the_commands_of_the_table_run_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = PAGE.partition("## Which command do I run\n")[2].partition("\n## ")[0]
    commands = [shlex.split(one) for one in re.findall(r"`(holdfast [a-z].*?)`", table)]
    names = [name for _, name, *_ in commands]
    assert names == ["ls", "show", "verify", "import", "diff", "export"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").symlink_to(GOLDEN / SECTIONS["Accelerate"][0])
    for _, *rest in commands:
        assert main(rest) == 0, capsys.readouterr()
    assert torch.load("out", weights_only=True)["model"]
