"""Every test starts without Holdfast settings, with an arena of its own, and leaves no keeper."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.project import devices, sample
from support.runs.leftovers import end_keepers
from support.servers import object_servers

pytest_collection_modifyitems = sample.pytest_collection_modifyitems
pytest_generate_tests = devices.pytest_generate_tests


def pytest_addoption(parser: pytest.Parser) -> None:
    sample.pytest_addoption(parser)
    devices.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    sample.pytest_configure(config)
    devices.pytest_configure(config)


def pytest_collection_finish() -> None:
    """Leaves torch, pytest and all tests out of collections of garbage: a quarter of a run."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = (sample.pytest_report_header(config), devices.pytest_report_header(config))
    return [line for line in lines if line is not None]


seaweedfs_server = object_servers.seaweedfs_server
moto_server = object_servers.moto_server
azurite_server = object_servers.azurite_server
google_server = object_servers.google_server

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no fault of the code.
settings.register_profile("holdfast", deadline=None)
settings.load_profile("holdfast")

CLOSING_GRACE_S = 5.0  # a keeper told to stop may still be writing its last snapshot


@pytest.fixture(autouse=True)
def arena_dir() -> Iterator[Path]:
    """This test's ``HOLDFAST_ARENA_DIR``, in shared memory; every other setting is taken away."""
    # A short name, because the keeper's socket lies below it and may have 107 bytes in all.
    directory = Path(tempfile.mkdtemp(prefix="hf-test-", dir="/dev/shm"))
    # Not the fixture `monkeypatch`: that one would still be in force while this one cleans up.
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
            patch.delenv(name)
        patch.setenv("HOLDFAST_ARENA_DIR", str(directory))
        yield directory
    left = end_keepers(directory, grace_s=CLOSING_GRACE_S)
    shutil.rmtree(directory)
    if left:
        pytest.fail("keepers were left running and were killed:\n  " + "\n  ".join(left))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The type of the accelerator of this run; nothing unordered is reported of a simulated one."""
    allowed = request.node.get_closest_marker("unordered")
    pattern = str(allowed.args[0]) if allowed else ""
    yield from devices.provide(request.config, request.param, pattern)
