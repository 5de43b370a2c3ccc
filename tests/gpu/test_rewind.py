"""The generators of a device are set again with the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.accelerator.generators import generator_states, seed_generators, set_generator_states

pytestmark = pytest.mark.gpu


def test_dropout_on_a_device_is_drawn_again_after_a_rewind(tmp_path: Path, device: str) -> None:
    dropout, x = torch.nn.Dropout(0.5), torch.ones(1000, device=device)
    torch.manual_seed(3)
    state = {"rng": holdfast.Rng()}
    holdfast.save(tmp_path, state)
    expected = dropout(x)
    restored = holdfast.load(tmp_path, state)
    dropout(x)  # an evaluation, say
    restored.rewind()
    assert torch.equal(dropout(x), expected)


def test_each_device_goes_on_with_its_numbers_and_the_one_in_use_with_those_of_its_rank(
    device: str,
) -> None:
    def draw(index: int) -> torch.Tensor:
        return torch.rand(100, device=f"{device}:{index}").cpu()

    seed_generators(7)
    count = torch.accelerator.device_count()
    states = generator_states()
    assert len(states) == count
    expected = [draw(index) for index in range(count)]
    set_generator_states(states, 0)
    assert all(torch.equal(draw(index), expected[index]) for index in range(count))
    torch.rand(5, device=f"{device}:{count - 1}")
    states = generator_states()
    wanted = draw(count - 1)
    set_generator_states(states, count - 1)  # the device that the saved rank had in use
    assert torch.equal(draw(torch.accelerator.current_device_index()), wanted)
