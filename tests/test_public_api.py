"""What users may rely on: these names, and that looking at the package costs no torch."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast import errors
from support.project.contracts import modules_of

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
    "ForeignFormatError",
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
    "dcp",
    "declare",
    "derived",
    "events",
    "load",
    "loader",
    "loggers",
    "offload",
    "open",
    "plan_restore",
    "register_enum",
    "register_tensor",
    "register_value",
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


def _prints(program: str, *arguments: str) -> str:
    """Run ``program`` in a fresh interpreter; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT / "src")}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _loads_torch(program: str, module: str) -> bool:
    """Whether a fresh interpreter has torch loaded after ``program`` imported ``module``.

    The import contract reads imports; this also sees what the packages above a module do.
    """
    return _prints(program, module) == "True"


def test_the_public_names_are_these() -> None:
    assert holdfast.__all__ == PUBLIC_NAMES
    assert set(PUBLIC_NAMES) <= set(dir(holdfast))


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(holdfast, name) is not None


def test_an_event_is_found_in_holdfast_events_without_an_import_of_its_own() -> None:
    assert _prints("import holdfast; print(holdfast.events.CheckpointPublished.__name__)") == (
        "CheckpointPublished"
    )
    assert inspect.signature(holdfast.subscribe).parameters.keys() == {"sink"}


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


def test_no_module_takes_the_name_of_a_public_function() -> None:
    package = Path(holdfast.__file__).parent
    modules = {path.stem for path in package.iterdir()}
    assert modules & set(PUBLIC_NAMES) <= {"dcp", "events", "loggers", "offload", "rules"}
    assert inspect.isfunction(holdfast.load)


@pytest.mark.parametrize("module", ["holdfast", "holdfast.keeper.__main__"])
def test_looking_at_the_package_or_starting_a_keeper_loads_no_torch(module: str) -> None:
    assert not _loads_torch(IMPORT_ONE, module)


@pytest.mark.parametrize("module", modules_of("torch-free"))
def test_what_the_keeper_and_the_command_line_use_loads_no_torch(module: str) -> None:
    assert not _loads_torch(IMPORT_ALL_BELOW, module)


COUNTS_COLLECTIONS = """
import gc, sys
def count(phase, info):
    counted.append(info["generation"])
def show():
    print(len(counted) < 3, gc.isenabled(), gc.get_freeze_count() > 10_000, flush=True)
counted = []
"""
IMPORTS_BESIDE_TORCH = f"""{COUNTS_COLLECTIONS}
import torch, holdfast
gc.callbacks.append(count)
holdfast.Checkpointer
show()
"""
STARTS_A_KEEPER = f"""{COUNTS_COLLECTIONS}
import asyncio
from holdfast.keeper import __main__
def run(served):
    gc.callbacks.remove(count)
    served.close()
    show()
asyncio.run = run
gc.callbacks.append(count)
__main__.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [(IMPORTS_BESIDE_TORCH, "True True False"), (STARTS_A_KEEPER, "True True True")],
)
def test_no_garbage_is_looked_for_while_modules_are_imported(
    arena_dir: Path, program: str, expected: str
) -> None:
    options = f"--arena {arena_dir}/run --run-id run --root {arena_dir} --host-id a".split()
    command = [sys.executable, "-c", program, *options]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout.strip() == expected
