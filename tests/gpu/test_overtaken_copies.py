"""Updates beside copies from a device: those that are fenced are never reported, others always."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs.device_updates import AROUND, FENCED, UpdatedRun, outcomes

pytestmark = pytest.mark.gpu

SAVES = [4, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("way", FENCED)
def test_a_fenced_update_neither_tears_a_save_nor_costs_one(
    way: str, saves: int, tmp_path: Path, device: str
) -> None:
    assert outcomes(UpdatedRun(device, way), tmp_path, saves) == {"right": saves}


@pytest.mark.promise
@pytest.mark.unordered(".")
@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("way", AROUND)
def test_a_save_torn_by_an_update_around_the_fence_is_reported_and_never_loaded(
    way: str, saves: int, tmp_path: Path, device: str
) -> None:
    found = outcomes(UpdatedRun(device, way), tmp_path, saves)
    assert found["torn"] == 0
