"""Every benchmark is found by its name, and a name that is none is refused."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from subprocess import CompletedProcess
from types import ModuleType

import pytest

Bench = Callable[..., CompletedProcess[str]]


@pytest.fixture
def door(importable: None) -> ModuleType:
    return importlib.import_module("benchmarks.__main__")


def test_every_name_has_a_main_and_a_line_in_the_list(door: ModuleType) -> None:
    lines = door.listed().splitlines()
    for name, path in door.found().items():
        tree = ast.parse(path.read_text())  # not imported: torch, and what it sets for the process
        assert "main" in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert len(line) <= 120, name


def test_help_names_the_door(bench: Bench) -> None:
    ended = bench("plan", "--help")
    assert ended.returncode == 0
    assert ended.stdout.startswith("usage: python -m benchmarks plan ")


def test_a_name_that_is_none_is_refused_with_the_list(bench: Bench) -> None:
    ended = bench("sav")
    assert ended.returncode == 2
    assert "there is no benchmark 'sav'" in ended.stderr and "  save " in ended.stderr
