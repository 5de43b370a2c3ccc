"""Random generators: they go on where they were, and what new ranks draw is a rule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.state.rng import seeds_of


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    rng = holdfast.Rng()
    before = rng.state_dict()
    yield
    rng.load_state_dict(before)


def _draws() -> tuple[list[float], list[float], list[float]]:
    return [random.random() for _ in range(3)], np.random.rand(3).tolist(), torch.rand(3).tolist()


def test_generators_go_on_where_they_were() -> None:
    rng = holdfast.Rng()
    np.random.normal()  # of which there is always a pair
    saved = rng.state_dict()
    expected = _draws()
    _draws()
    rng.load_state_dict(saved)
    assert _draws() == expected


def _derived(saved: dict[str, Any], rank: int) -> Any:
    holdfast.Rng().derive(saved, rank)
    return _draws()


def test_a_new_rank_draws_the_same_at_every_restore_and_other_numbers_than_any_rank() -> None:
    saved = holdfast.Rng().state_dict()
    drawn = [_draws(), *(_derived(saved, rank) for rank in range(1, 40))]
    _draws()
    assert _derived(saved, 7) == drawn[7]
    for of_kind in zip(*drawn, strict=True):
        assert len(set(map(tuple, of_kind))) == len(drawn)


@pytest.mark.parametrize("kind", range(3))
def test_whatever_rank_0_has_drawn_since_new_ranks_draw_other_numbers(kind: int) -> None:
    """Else ranks that come, go and come again would draw what they had drawn before."""
    saved = holdfast.Rng().state_dict()
    draw: Any = [random.random, np.random.rand, lambda: torch.rand(1)][kind]
    draw()
    later = holdfast.Rng().state_dict()
    for a, b in zip(_derived(saved, 3), _derived(later, 3), strict=True):
        assert a != b


def test_no_two_new_ranks_and_no_two_generators_are_seeded_alike() -> None:
    saved = holdfast.Rng().state_dict()
    seeds = [seeds_of(saved, rank) for rank in range(300)]
    for kind in ("python", "numpy", "torch", "cuda"):
        assert len({one[kind] for one in seeds}) == 300
        assert all(0 <= one[kind] < 2**32 for one in seeds)
    assert len(set(seeds[0].values())) == 4


def test_numpy_and_torch_do_not_draw_the_same_bits_on_a_new_rank() -> None:
    """Seeded alike they would: both are the Mersenne twister."""
    holdfast.Rng().derive(holdfast.Rng().state_dict(), 5)
    ours = set(torch.randint(0, 2**32, (1000,)).tolist())
    assert len(ours & set(np.random.randint(0, 2**32, 2000).tolist())) < 3


class Gpus:
    """Stands for torch.cuda of a host with so many GPUs, in what the generators ask of it."""

    def __init__(self, count: int, used: int) -> None:
        self.states = [torch.full((16,), device, dtype=torch.uint8) for device in range(count)]
        self.used = used

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("is_available", "is_initialized"):
            patch.setattr(torch.cuda, name, lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        patch.setattr(torch.cuda, "current_device", lambda: self.used)
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: self.states)
        patch.setattr(torch.cuda, "set_rng_state", self._set)

    def _set(self, state: torch.Tensor, device: int | None = None) -> None:
        self.states[self.used if device is None else device] = state


def test_the_gpu_in_use_goes_on_with_what_the_gpu_in_use_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Gpus(4, used=3).install(monkeypatch)
    saved = holdfast.Rng().state_dict()
    there = Gpus(2, used=1)
    there.install(monkeypatch)
    holdfast.Rng().load_state_dict(saved)
    assert [int(state[0]) for state in there.states] == [0, 3]
    del saved["cuda_device"]  # saved by a version that did not tell
    holdfast.Rng().load_state_dict(saved)
    assert [int(state[0]) for state in there.states] == [0, 1]
