"""What ``tests/gpu`` need of ``tests/conftest.py``, without what a machine for a day may lack."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.project import devices, sample
from support.runs.leftovers import end_keepers

_CLOSING_GRACE_S = 5.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of samples and of devices."""
    sample.pytest_addoption(parser)
    devices.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Load the simulated device, where it is asked for."""
    sample.pytest_configure(config)
    devices.pytest_configure(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on the chosen device."""
    devices.pytest_generate_tests(metafunc)


@pytest.fixture(autouse=True)
def arena_dir() -> Iterator[Path]:
    """This test's ``HOLDFAST_ARENA_DIR``."""
    parent = os.environ.get("HOLDFAST_ARENA_DIR", "/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="t-", dir=parent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_ARENA_DIR", str(directory))
        yield directory
    end_keepers(directory, grace_s=_CLOSING_GRACE_S)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def device(request: Any) -> Iterator[str]:
    """The type of the accelerator of this run."""
    allowed = request.node.get_closest_marker("unordered")
    pattern = str(allowed.args[0]) if allowed else ""
    yield from devices.provide(request.config, request.param, pattern)
