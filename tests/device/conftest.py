"""These tests show the rules of the simulated device itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from device import simulator
from support.project.devices import check_simulated


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
