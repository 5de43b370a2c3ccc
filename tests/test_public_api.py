"""What users may rely on: these names, and that looking at the package costs no torch."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from contracts import modules_of
from holdfast import errors

PROJECT = Path(__file__).parents[1]

PUBLIC_NAMES = [
    "AlreadyPublished",
    "ArenaError",
    "CaptureOvertaken",
    "Checkpointer",
    "ChecksumMismatch",
    "CoverageError",
    "DeadlineExceeded",
    "Event",
    "Every",
    "Fenced",
    "FlatBuffer",
    "FlatRange",
    "FlatShard",
    "FormatError",
    "HoldfastError",
    "Keep",
    "KeeperError",
    "NewerFormat",
    "NotFound",
    "NotProtected",
    "PeerError",
    "PersistFailed",
    "Preempted",
    "RestoreError",
    "RestorePlan",
    "Restored",
    "ResumableSampler",
    "Rng",
    "RootBusy",
    "SaveError",
    "SaveHandle",
    "Shard",
    "SnapshotSkipped",
    "SplitList",
    "StateMismatch",
    "StatePoisoned",
    "StorageError",
    "TooManyLost",
    "UnsupportedState",
    "UsageError",
    "__version__",
    "declare",
    "load",
    "offload",
    "open",
    "plan_restore",
    "register_enum",
    "register_tensor",
    "rules",
    "save",
    "subscribe",
]


IMPORT_ONE = """
import importlib, sys
importlib.import_module(sys.argv[1])
print("torch" in sys.modules)
"""
IMPORT_ALL_BELOW = """
import importlib, pkgutil, sys
module = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(getattr(module, "__path__", ()), module.__name__ + "."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
print("torch" in sys.modules)
"""


def _loads_torch(program: str, module: str) -> bool:
    """Whether a fresh interpreter has torch loaded after ``program`` imported ``module``.

    The import contract reads imports; this also sees what the packages above a module do.
    """
    environment = {**os.environ, "PYTHONPATH": str(PROJECT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program, module], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "True"


def test_the_public_names_are_these() -> None:
    assert holdfast.__all__ == PUBLIC_NAMES
    assert set(PUBLIC_NAMES) <= set(dir(holdfast))


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(holdfast, name) is not None


def test_every_error_is_public() -> None:
    names = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.HoldfastError)
    }
    assert names <= set(holdfast.__all__)


def test_a_name_that_is_not_public_is_refused() -> None:
    with pytest.raises(AttributeError, match="Chekpointer"):
        getattr(holdfast, "Chekpointer")  # noqa: B009  (a type checker would refuse the plain form)


def test_load_stays_a_function_beside_the_package_of_that_name() -> None:
    package = importlib.import_module("holdfast.load")
    assert inspect.ismodule(package)
    assert inspect.isfunction(holdfast.load)


@pytest.mark.parametrize("module", ["holdfast", "holdfast.keeper.__main__"])
def test_looking_at_the_package_or_starting_a_keeper_loads_no_torch(module: str) -> None:
    assert not _loads_torch(IMPORT_ONE, module)


@pytest.mark.parametrize("module", modules_of("torch-free"))
def test_what_the_keeper_and_the_command_line_use_loads_no_torch(module: str) -> None:
    assert not _loads_torch(IMPORT_ALL_BELOW, module)
