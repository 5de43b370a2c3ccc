"""docs/sizing.md shows what the calculator prints, and names what is in the code."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.persist.commit import SWEPT_AFTER
from support.project.code_blocks import blocks

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"


def test_the_table_is_what_the_command_above_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    command, table = blocks(PAGE)[:2]
    assert main(shlex.split(command.text)[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == table.text.splitlines()


def test_every_function_and_constant_that_is_named_is_in_its_file() -> None:
    named = re.findall(r"`src/holdfast/([\w/]+)\.py`((?:, `\w+`)+)", PAGE.read_text())
    assert len(named) > 8
    for path, names in named:
        module = importlib.import_module(f"holdfast.{path.replace('/', '.')}")
        assert all(hasattr(module, name) for name in re.findall(r"\w+", names)), path


def test_the_formula_of_retention_is_what_the_code_does() -> None:
    assert f"| k + {SWEPT_AFTER + 1} checkpoints |" in PAGE.read_text()
