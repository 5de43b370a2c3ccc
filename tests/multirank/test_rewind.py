"""On another number of ranks a new rank's generators are seeded: that is what is set again."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

import holdfast
from support.runs.launch import run_ranks


def _draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def _save(rank: int, world: int, root: str) -> None:
    holdfast.save(root, {"rng": holdfast.Rng()})


def _load(rank: int, world: int, root: str) -> list[tuple[float, float, float]]:
    restored = holdfast.load(root, {"rng": holdfast.Rng()})
    drawn = [_draws()]
    for _ in range(2):
        restored.rewind()
        drawn.append(_draws())
    return drawn


def test_a_rank_that_was_not_saved_is_set_again_as_it_was_seeded(tmp_path: Path) -> None:
    run_ranks(1, _save, str(tmp_path))
    drawn = run_ranks(3, _load, str(tmp_path))
    assert [len(set(of_rank)) for of_rank in drawn] == [1, 1, 1]
    assert len({of_rank[0] for of_rank in drawn}) == 3
