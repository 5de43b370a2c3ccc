"""Every element type arrives with all its bits, also those of NaNs, however large a tensor is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from capture.test_through_ring import bits
from holdfast.capture.copy_plan import SMALL_BYTES
from holdfast.state.tensors import DTYPE_NAMES

pytestmark = pytest.mark.gpu


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def of_all_types(seed: int, device: str) -> dict[str, torch.Tensor]:
    """Tensors with random bits: small ones and large ones of every type."""
    made = {}
    for dtype, name in DTYPE_NAMES.items():
        item, form = dtype.itemsize, torch.uint8 if dtype is not torch.bool else torch.bool
        for elements in (3, 40, SMALL_BYTES // item + 8, 5 * SMALL_BYTES // item):
            seed += 1
            made[f"{name}.{elements}"] = bits(elements * item, form, seed).to(device).view(dtype)
    return made


def state_of(seed: int, device: str) -> dict[str, Any]:
    weight = nn.Parameter(torch.zeros(4, device=device))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    optimizer.state[weight] = dict(of_all_types(seed, device))
    module = nn.Module()
    module.weight = weight
    return {"module": module, "optimizer": optimizer, "plain": of_all_types(seed + 1000, device)}


def contents(state: dict[str, Any]) -> dict[str, bytes]:
    (kept,) = state["optimizer"].state.values()
    lazy = {f"lazy.{name}": raw(one) for name, one in kept.items()}
    return lazy | {name: raw(one) for name, one in state["plain"].items()}


@pytest.mark.promise
@pytest.mark.untimed
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_type_are_loaded_with_the_bits_that_were_saved(
    tmp_path: Path, device: str
) -> None:
    state = state_of(1, device)
    truth = contents(state)
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    for step in range(4):  # each samples other tensors
        checkpointer.save(step, durable=True).wait_durable(60)
    checkpointer.close()
    assert contents(state) == truth
    again = state_of(5000, device)
    holdfast.load(tmp_path, again)
    found = contents(again)
    assert [name for name, one in found.items() if one != truth[name]] == []
