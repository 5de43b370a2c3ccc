"""Any change of the bits or of their order is another checksum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.offload import checksums
from holdfast.offload.checksums import checksum

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "signs": lambda tensor: tensor.neg_(),
    "order": lambda tensor: tensor.copy_(tensor.flip(0)),
    "two swapped": lambda tensor: tensor[:2].copy_(tensor[:2].flip(0)),
    "rows swapped": lambda tensor: tensor[:2048].copy_(tensor[:2048].roll(1024)),
    "the last": lambda tensor: tensor[-1:].mul_(2),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [4096, checksums._LONG, 5 * checksums._LONG + 13])
def test_a_change_shows(
    count: int, dtype: torch.dtype, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "_AT_ONCE", 2 * checksums._LONG)  # the longest in parts
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = checksum(tensor)
    assert torch.equal(before, checksum(tensor.clone()))
    CHANGES[what](tensor)
    assert not torch.equal(before, checksum(tensor))


def test_nothing_has_a_checksum_too() -> None:
    assert checksum(torch.zeros(0)) == 0
