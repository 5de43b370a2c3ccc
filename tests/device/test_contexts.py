"""Threads make no context on a device that their process does not use."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from device.vendor import add_simulated_vendor
from holdfast.offload import HybridAdamW
from support.runs.device_updates import UpdatedRun

INDEX = 1


@pytest.fixture
def second(sim: Any) -> Any:
    """The simulated device as a process on its second one uses it."""
    add_simulated_vendor(sim)
    torch.accelerator.set_device_index(INDEX)
    yield sim
    torch.accelerator.set_device_index(0)


def test_a_save_and_a_restore_make_contexts_on_the_device_of_the_state_alone(
    tmp_path: Path, second: Any
) -> None:
    run = UpdatedRun(f"sim:{INDEX}", "loop")
    truth = run.content()
    second.forget_contexts()
    with holdfast.Checkpointer(tmp_path, run.state, storage=None) as checkpointer:
        for step in range(2):
            checkpointer.save(step, durable=True).wait_durable(60)
            run.step()
        assert set(second.contexts()) == {INDEX}
    second.forget_contexts()
    holdfast.load(tmp_path, run.state, 0)
    assert set(second.contexts()) == {INDEX}
    assert all(torch.equal(run.content()[name], truth[name]) for name in truth)


def test_threads_of_an_optimizer_make_contexts_on_the_device_of_its_parameters_alone(
    second: Any,
) -> None:
    parameter = nn.Parameter(torch.ones(5000, device=f"sim:{INDEX}"))
    optimizer = HybridAdamW([parameter], device_share=0.5, subgroup_elements=1700)
    gc.collect()  # what tests on the other device left
    second.forget_contexts()
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    del optimizer
    gc.collect()
    assert set(second.contexts()) == {INDEX}
