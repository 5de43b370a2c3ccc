"""Any change of the bits or of their order is another checksum."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.offload import bit_sums
from holdfast.offload.bit_sums import BLOCK, LANES, Bits, are_same, checksum, sums

#: Words that torch's operators sum at once.
PIECE = bit_sums._BLOCKS * BLOCK
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
@pytest.mark.parametrize("count", [4096, BLOCK, 5 * BLOCK + 13])
def test_a_change_shows(
    count: int, dtype: torch.dtype, what: str, of: Callable[[torch.Tensor], Bits]
) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = of(tensor)
    assert are_same([before], [of(tensor.clone())]) == [True]
    CHANGES[what](tensor)
    assert are_same([before], [of(tensor)]) == [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_that_change_show_wherever_they_lie_in_a_word(dtype: torch.dtype) -> None:
    count = 4 * BLOCK
    for every in (1, 2, 4, LANES, 2 * LANES, 4 * LANES, BLOCK, 2 * BLOCK):
        for first in (0, every - 1):
            tensor = torch.ones(count, dtype=dtype)
            before = sums(tensor)
            tensor[first::every].neg_()
            assert are_same([before], [sums(tensor)]) == [False], (every, first)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_on_a_device_one_element_that_changes_always_shows(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, 700, BLOCK - 1, 2 * BLOCK, PIECE + 1024, 2 * PIECE + 13]))
    at = data.draw(st.integers(0, count - 1))
    bits = data.draw(st.integers(1, 2**16 - 1))
    offset = data.draw(st.integers(0, 3))  # a view may begin anywhere
    whole = torch.zeros(count + 3, dtype=torch.int16)
    found = whole.view(torch.bfloat16)[offset : offset + count]
    before = sums(found)
    whole[offset + at] = bits - 2**16 * (bits >= 2**15)
    assert are_same([before], [sums(found)]) == [False]


@pytest.mark.parametrize("count", [BLOCK, PIECE - 1, PIECE, 3 * PIECE + 5 * 1024 + 7])
def test_sums_in_pieces_are_those_of_the_whole(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(bit_sums, "_BLOCKS", 1 << 40)
    whole = sums(tensor)
    monkeypatch.undo()
    assert torch.equal(sums(tensor), whole)


def test_no_copy_is_made_of_all_of_a_long_tensor() -> None:
    tensor = torch.zeros(4 * PIECE, dtype=torch.bfloat16)
    with torch.profiler.profile(record_shapes=True) as profile:
        sums(tensor)
    copied = [
        math.prod(shape)
        for event in profile.events() or []
        if event.name in ("aten::_to_copy", "aten::copy_")
        for shape in event.input_shapes[:1]
    ]
    assert max(copied) <= PIECE


def test_nothing_has_a_checksum_too() -> None:
    assert checksum(torch.zeros(0)) == sums(torch.zeros(0)) == 0


def test_numbers_of_the_host_and_of_a_device_are_compared_each_where_it_is() -> None:
    before: list[Bits] = [7, torch.tensor(8), 9, torch.tensor(10), 11]
    now: list[Bits] = [7, torch.tensor(8), 8, torch.tensor(11), torch.tensor(11)]
    assert are_same(before, now) == [True, True, False, False, True]
    assert are_same([], []) == []
