"""A process that trains on two devices: each copy is waited for on its own device's stream."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from device import simulator
from device.vendor import add_simulated_vendor
from holdfast.capture import device_copies
from holdfast.capture.landing import LandingJob
from holdfast.events import ImageCaptured, MemoryPinned
from support.runs.mishaps import listening


class TwoDevices:
    """Parameters that lie side by side in an image and on different devices; each update adds 1."""

    def __init__(self, sizes: list[int]) -> None:
        self.model = nn.ParameterList(
            nn.Parameter(torch.full((size,), float(100 * n), device=f"sim:{n % 2}"))
            for n, size in enumerate(sizes)
        )
        for parameter in self.model:
            parameter.grad = torch.full_like(parameter, -1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def is_of(self, step: int) -> bool:
        return all(
            torch.equal(one, torch.full_like(one, 100 * n + step))
            for n, one in enumerate(self.model)
        )


@pytest.mark.promise
def test_what_two_devices_copy_is_checksummed_when_both_have(tmp_path: Path, sim: Any) -> None:
    add_simulated_vendor(sim)
    two = TwoDevices([300_000, 900, 6_000_000, 40, 20_000, 5_000_000])
    simulator.use_profile("down", 1, 0.7)
    saves = 6
    with listening() as heard, holdfast.Checkpointer(tmp_path, two.state, storage=None) as ckpt:
        for step in range(saves):
            handle = ckpt.save(step, durable=True)
            two.optimizer.step()
            handle.wait_durable(60)
            if step == 2:  # the next ones are copied to their places
                until_s = time.monotonic() + 30
                while sum(isinstance(e, MemoryPinned) for e in heard) < 3:
                    assert time.monotonic() < until_s
                    time.sleep(0.01)
    assert sum(isinstance(event, ImageCaptured) for event in heard) == saves
    simulator.calm()
    for step in range(saves):
        holdfast.load(tmp_path, two.state, step)
        assert two.is_of(step)


def test_a_copy_waits_for_no_device_that_copied_nothing_of_it(
    tmp_path: Path, sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_simulated_vendor(sim)
    found: list[int] = []

    def seen(segment: Any, events: Any = (), *rest: Any, **how: Any) -> Any:
        found.append(len(events))
        return LandingJob(segment, events, *rest, **how)

    monkeypatch.setattr(device_copies, "LandingJob", seen)
    # Into pieces: spans in place may be of both devices.
    sim.fail(registration=1, registrations=100)
    two = TwoDevices([8 << 20, 8 << 20])  # two segments of each
    with holdfast.Checkpointer(tmp_path, two.state, storage=None) as ckpt:
        ckpt.save(0, durable=True).wait_durable(60)
    assert found == [1, 1, 1, 1]
