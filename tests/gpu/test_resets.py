"""An object that resets its tensors on a device before it takes the stored ones has the stored
ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.state import restore_targets

pytestmark = [pytest.mark.gpu, pytest.mark.untimed]
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.complex128)


class Sums:
    """Tensors of several types, which are set to zero before they are added to."""

    def __init__(self, begin: int, size: int, device: str) -> None:
        drawn = torch.arange(begin, begin + size) % 250
        self.sums = {f"{dtype}": drawn.to(dtype).to(device) for dtype in TYPES}
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.sums)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.calls += 1
        for name, own in self.sums.items():
            own.zero_()
            own.logical_or_(saved[name]) if own.dtype is torch.bool else own.add_(saved[name])


@pytest.mark.parametrize(("spare_bytes", "calls"), [(0, 2), (restore_targets.SPARE_BYTES, 1)])
@pytest.mark.parametrize("size", [5, 100_000])
def test_sums_on_a_device_that_are_reset_before_they_are_taken_are_those_that_were_saved(
    size: int,
    spare_bytes: int,
    calls: int,
    tmp_path: Path,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restore_targets, "SPARE_BYTES", spare_bytes)
    holdfast.save(tmp_path, {"sums": Sums(1, size, device)})
    again, expected = Sums(7, size, device), Sums(1, size, device)
    holdfast.load(tmp_path, {"sums": again})
    assert again.calls == calls
    for name, found in again.sums.items():
        assert found.device.type == device and torch.equal(found, expected.sums[name]), name


class Buffer:
    """A tensor that a device copies from, and that is replaced by what is given."""

    def __init__(self, begin: int) -> None:
        self.tensor = torch.arange(begin, begin + 100_000).pin_memory()

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.tensor = saved["tensor"]


def test_a_tensor_that_a_device_copies_from_stays_pinned(tmp_path: Path, device: str) -> None:
    torch.ones(1, device=device)
    holdfast.save(tmp_path, {"buffer": Buffer(1)})
    again = Buffer(7)
    holdfast.load(tmp_path, {"buffer": again})
    assert again.tensor.is_pinned() and torch.equal(again.tensor, Buffer(1).tensor)
