"""These tests show the rules of the simulated device itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from device import simulator
from support.project.devices import check_simulated


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the simulated device not even its name can be used: it has a run of its own."""
    is_test = collection_path.name.startswith("test_")
    return True if is_test and config.getoption("--device") is None else None


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The simulated device without delays, faults and reports, on its first default stream."""
    check_simulated(request.config)
    loaded = simulator.load()
    simulator.calm()
    loaded.reports()
    loaded.counts()
    stream = torch.accelerator.current_stream("sim:0")
    yield loaded
    simulator.calm()
    torch.accelerator.set_stream(stream)
