"""A state saved under any parallelism is restored under any other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from support.models.models import (
    LAYOUTS,
    build,
    differences,
    fill_with_numbers,
    make_optimizer_state,
    truth,
)
from support.runs.launch import run_ranks

WORLDS = sorted(LAYOUTS)


def _save(rank: int, world: int, root: str) -> None:
    for layout in LAYOUTS[world]:
        _, state = build(layout, seed=world)
        make_optimizer_state(state)
        fill_with_numbers(state)
        holdfast.save(f"{root}/{world}-{layout}", state, step=2)
        expected = truth(state)
        if rank == 0:
            torch.save(expected, f"{root}/{world}-{layout}.truth")


def _load(rank: int, world: int, root: str) -> list[str]:
    problems = []
    for saved_world in WORLDS:
        for saved_layout in LAYOUTS[saved_world]:
            source = f"{saved_world}-{saved_layout}"
            expected = torch.load(f"{root}/{source}.truth", weights_only=False)
            for layout in LAYOUTS[world]:
                _, state = build(layout, seed=100)
                restored = holdfast.load(f"{root}/{source}", state)
                found = differences(truth(state), expected)
                if found or restored.step != 2:
                    problems.append(f"{source} -> {world}-{layout}: {found[:5]}")
    return problems


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("matrix")
    for world in WORLDS:
        run_ranks(world, _save, str(root))
    return root


@pytest.mark.parametrize("world", WORLDS)
def test_any_layout_is_restored_under_any_other(world: int, saved: Path) -> None:
    problems: list[Any] = run_ranks(world, _load, str(saved))
    assert problems == [[] for _ in range(world)]
