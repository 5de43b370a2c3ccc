"""The wheel built from the tree works where nothing but its declared dependencies is installed.

Nothing is downloaded: the environment is empty, the wheel is installed into it, and of the
packages of this environment those that the wheel requires are linked into it, and no others.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[1]
SOURCE = PROJECT / "src" / "holdfast"
#: Parts of the package that ask for more than it requires, and say so.
ASKS_FOR_MORE = {
    "demo": {"matplotlib"},
    # The frameworks, and what these bring themselves.
    "integrations": {
        *("accelerate", "deepspeed", "lightning", "megatron", "pyarrow", "ray"),
        *("torchdata", "torchft", "torchmetrics", "torchtitan", "transformers", "tyro"),
    },
    "observe": {"opentelemetry", "perfetto", "prometheus_client", "pyarrow"},
    "offload": {"triton"},  # where torch has it
    "testing": {"pytest"},
}

SAVE_AND_LOAD = """
import importlib.util, pathlib, sys
import torch
import holdfast

assert pathlib.Path(holdfast.__file__).is_relative_to(sys.prefix), holdfast.__file__
assert all(importlib.util.find_spec(name) is None for name in ("hypothesis", "pytest", "mypy"))
assert all(getattr(holdfast, name) is not None for name in holdfast.__all__)
model = torch.nn.Linear(3, 2)
with holdfast.Checkpointer("run", {"model": model, "tokens": 7}) as ckpt:
    ckpt.step(0)
    ckpt.save(1, durable=True).wait_durable()
read = {"model": torch.nn.Linear(3, 2), "tokens": 0}
assert holdfast.load("run", read).step == 1
assert read["tokens"] == 7 and torch.equal(read["model"].weight, model.weight)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built as `pip wheel .` does, by the build backend that is here."""
    directory = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(directory)]
    _pip("wheel", *options, str(PROJECT))
    (built,) = directory.glob("*.whl")
    return built


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it requires."""
    return _environment(wheel, tmp_path_factory.mktemp("plain") / "venv", extra="")


def _environment(wheel: Path, home: Path, *, extra: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = str(home / "bin" / "python")
    _pip("--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    (packages,) = home.glob("lib/python*/site-packages")
    (own,) = packages.glob("*.dist-info")
    for name in _closure(metadata.PathDistribution(own), extra):
        for entry in _entries(name):
            if not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    return home


def _closure(top: metadata.Distribution, extra: str) -> set[str]:
    """The names of all distributions that ``top`` requires, and that these require."""
    names: set[str] = set()
    waiting = list(_required(top, extra))
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            waiting += _required(metadata.distribution(name), "")
    return names


def _required(of: metadata.Distribution, extra: str) -> Iterator[str]:
    for text in of.requires or ():
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            yield re.sub(r"[-_.]+", "-", one.name).lower()


def _entries(name: str) -> set[Path]:
    """The files and directories of a distribution at the top of this environment's packages."""
    found = metadata.distribution(name)
    tops = {file.parts[0] for file in found.files or () if file.parts[0] != ".."}
    return {Path(str(found.locate_file(top))) for top in tops - {"__pycache__"}}


def _run(home: Path, directory: Path, *command: str) -> str:
    """The output of a command of the environment, started without any path of this tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [str(home / "bin" / command[0]), *command[1:]],
        cwd=directory,
        env={**kept, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_code_imports_what_the_wheel_requires_and_nothing_else(wheel: Path) -> None:
    (own,) = (one for one in zipfile.Path(wheel).iterdir() if one.name.endswith(".dist-info"))
    required = set(_required(metadata.PathDistribution(own), ""))
    imported: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0]
        imported |= set(_imports(path)) - ASKS_FOR_MORE.get(package, set())
    assert imported - sys.stdlib_module_names - {"holdfast"} == required


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_a_run_is_saved_and_loaded_by_the_wheel_with_its_requirements_alone(
    home: Path, tmp_path: Path
) -> None:
    assert _run(home, tmp_path, "holdfast", "--version").startswith("holdfast ")
    _run(home, tmp_path, "python", "-c", SAVE_AND_LOAD)
    assert "1-1" in _run(home, tmp_path, "holdfast", "ls", "run")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    home = _environment(wheel, tmp_path / "venv", extra="demo")
    said = _run(home, tmp_path, "holdfast", "demo", "--out", str(tmp_path / "demo"))
    assert "kept" in said and "BROKEN" not in said.upper()
    assert (tmp_path / "demo" / "losses.png").is_file()
