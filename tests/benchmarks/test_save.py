"""The benchmark of a save still runs, and knows where its systems are made."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from support.project.code_blocks import PROJECT

BENCHMARKS = PROJECT / "benchmarks"
SYSTEMS = BENCHMARKS / "systems"


def entries() -> dict[str, str]:
    """Every contender's "module:function", by name; their modules need not be installed."""
    tree = ast.parse((SYSTEMS / "contenders.py").read_text())
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTENDERS"
    )
    assert isinstance(table, ast.Dict)
    found = {}
    for key, value in zip(table.keys, table.values, strict=True):
        assert key is not None and isinstance(value, ast.Call)
        found[ast.unparse(key)] = str(ast.literal_eval(value.args[0]))
    return found


def functions(module: str) -> set[str]:
    tree = ast.parse((SYSTEMS / f"{module}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_contender_names_a_function_that_makes_it() -> None:
    missing = {}
    for name, made in entries().items():
        module, _, function = made.partition(":")
        if function not in functions(module):
            missing[name] = made
    assert not missing


def pins(path: Path) -> dict[str, str]:
    found = (re.match(r"([\w.-]+)==(\S+)", line) for line in path.read_text().splitlines())
    return {one[1].lower(): one[2] for one in found if one}


def test_the_rivals_do_not_ask_for_other_versions_than_this_tree_is_tested_with() -> None:
    ours, theirs = pins(PROJECT / "constraints.txt"), pins(BENCHMARKS / "rivals.txt")
    assert theirs
    assert not {
        name: version for name, version in theirs.items() if ours.get(name, version) != version
    }
    assert not [name for name in theirs if name == "torch" or "cuda" in name or name == "triton"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_benchmark_measures_what_holdfast_and_torch_save_store(
    tmp_path: Path, arena_dir: Path, bench: Callable[..., CompletedProcess[str]]
) -> None:
    ended = bench(
        *("save", "--quick", "--python", sys.executable, "--out", str(tmp_path)),
        *("--systems", "Holdfast", "torch.save"),
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| Holdfast |" in ended.stdout and "| torch.save |" in ended.stdout
    assert ended.stdout.count("exact") >= 2
    assert len(list(tmp_path.glob("save-tensors-*.svg"))) == 3
