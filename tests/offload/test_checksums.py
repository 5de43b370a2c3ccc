"""Any change of the bits or of their order is another checksum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.offload import checksums
from holdfast.offload.checksums import Bits, are_same, checksum, sums

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "signs": lambda tensor: tensor.neg_(),
    "order": lambda tensor: tensor.copy_(tensor.flip(0)),
    "two swapped": lambda tensor: tensor[:2].copy_(tensor[:2].flip(0)),
    "rows swapped": lambda tensor: tensor[:2048].copy_(tensor[:2048].roll(1024)),
    "the last": lambda tensor: tensor[-1:].mul_(2),
}


@pytest.mark.parametrize("of", [checksum, sums])
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [4096, checksums._LONG, 5 * checksums._LONG + 13])
def test_a_change_shows(
    count: int, dtype: torch.dtype, what: str, of: Callable[[torch.Tensor], Bits]
) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = of(tensor)
    assert are_same([before], [of(tensor.clone())]) == [True]
    CHANGES[what](tensor)
    assert are_same([before], [of(tensor)]) == [False]


def test_nothing_has_a_checksum_too() -> None:
    assert checksum(torch.zeros(0)) == sums(torch.zeros(0)) == 0


def test_numbers_of_the_host_and_of_a_device_are_compared_each_where_it_is() -> None:
    before: list[Bits] = [7, torch.tensor(8), 9, torch.tensor(10), 11]
    now: list[Bits] = [7, torch.tensor(8), 8, torch.tensor(11), torch.tensor(11)]
    assert are_same(before, now) == [True, True, False, False, True]
    assert are_same([], []) == []
