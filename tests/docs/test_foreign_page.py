"""The commands that the page on other writers shows run on what these wrote."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("world", SECTIONS)
def test_two_commands_show_what_it_wrote(world: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory, shown, step = SECTIONS[world]
    _, section = re.split(rf"^## I have an? {world} checkpoint$", PAGE, flags=re.MULTILINE)
    section = section.partition("\n## ")[0]
    (block,) = re.findall(r"```(?:ba)?sh\n(.*?)```", section, re.S)
    commands = [shlex.split(line, comments=True) for line in block.splitlines() if line]
    assert len(commands) == 2
    for program, command, where, *options in commands:
        assert (program, where) == ("holdfast", shown)
        here = ["4" if one == step else one for one in options]
        assert main([command, str(GOLDEN / Path(directory)), *here]) == 0, capsys.readouterr()
