"""Roots that the tests of several commands look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.storage.local import LocalStore
from support.checkpoints.commands import save_on_ranks, state_in
from support.checkpoints.roots import fill
from support.runs.launch import run_ranks


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": torch.nn.Linear(2000, 300), "tokens": 7}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 and 20, made by ``holdfast.save``."""
    directory = tmp_path / "run"
    for step in (10, 20):
        holdfast.save(str(directory), state(), step=step)
    return directory


@pytest.fixture
def fallen_back(tmp_path: Path) -> Path:
    """Incarnation 1 saved 10, 20, 30; 2 went on from 10 and saved 20 again."""
    directory = tmp_path / "fallen-back"
    fill(LocalStore(directory), ((1, 10), (1, 20), (1, 30), (2, 20)))
    return directory


@pytest.fixture(scope="session")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state saved by 4 ranks in each layout, by 1 rank, and a weight repeated and cut (hsdp).

    One launch for all tests: nobody changes what lies here.
    """
    directory = tmp_path_factory.mktemp("by-ranks")
    run_ranks(4, save_on_ranks, str(directory))
    holdfast.save(str(directory / "plain"), state_in("plain"), step=2)
    return directory
