"""The kernel that reads each byte once computes what torch does, and both what is defined.

Triton's interpreter runs the kernel without a GPU: ``make kernels``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.events import Event, subscribe
from holdfast.offload import bit_sums
from holdfast.offload.bit_sums import BLOCK, DEPTH, FACTOR, LANES, LOW, MIX, STEP, sums

needs_kernel = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1: make kernels",
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Elements: none, one, about a row, a block, several.
SIZES = [0, 1, 2, 3, LANES - 1, LANES + 1, 2 * LANES + 1, BLOCK - 1, BLOCK, BLOCK + 1]
SIZES += [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 77]


def random_bits(elements: int, dtype: torch.dtype, offset: int, seed: int) -> torch.Tensor:
    """Any bits, NaNs of all payloads among them, ``offset`` elements behind an aligned address."""
    chance = torch.Generator().manual_seed(seed)
    size_bytes = (offset + elements) * dtype.itemsize
    made = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=chance)
    return made.view(dtype)[offset:]


def defined(flat: torch.Tensor) -> int:
    """The checksum by the words of its definition, in numbers without an end."""
    data = flat.view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 4)
    words = [
        int.from_bytes(data[at : at + 4], "little", signed=True) for at in range(0, len(data), 4)
    ]
    columns: dict[int, int] = {}
    for number, word in enumerate(words):
        row, lane = number % BLOCK // LANES, number // BLOCK * LANES + number % LANES
        columns[lane] = columns.get(lane, 0) + word * FACTOR ** (row + 1)
    total, all_ = 0, (1 << 64) - 1
    for lane, column in columns.items():
        mixed = (column + lane * STEP) & all_
        for _ in range(2):
            mixed = ((mixed ^ (mixed >> 32)) * MIX) & all_
        total += mixed ^ (mixed >> 32)
    total &= all_
    return total - ((total >> 63) << 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [0, 1, 7, LANES + 3, 3 * LANES, BLOCK + 5])
def test_the_sum_is_that_of_its_definition(elements: int, dtype: torch.dtype) -> None:
    for offset in (0, 1):
        flat = random_bits(elements, dtype, offset, elements)
        assert sums(flat).item() == defined(flat), offset


def test_the_numbers_of_the_definition_are_odd_and_no_power_of_a_row_comes_twice() -> None:
    assert all(one % 2 for one in (FACTOR, STEP, MIX)) and LOW == 2**32 - 1
    assert len({pow(FACTOR, row + 1, 1 << 64) for row in range(DEPTH)}) == DEPTH


def test_payloads_of_nans_are_told_apart() -> None:
    bits = torch.tensor([0x7FC00000, 0x7FC00001, -0x00400000], dtype=torch.int32)
    nans = bits.view(torch.float32)
    assert nans.isnan().all()
    assert len({sums(one).item() for one in nans.split(1)}) == 3


@needs_kernel
@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(SIZES) | st.integers(0, 3 * BLOCK),
            st.sampled_from(DTYPES),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**32),
)
def test_kernel_and_operators_compute_the_same(
    tensors: list[tuple[int, torch.dtype, int]], seed: int
) -> None:
    from holdfast.offload.fused_sums import fused

    flats = [random_bits(*one, seed + n) for n, one in enumerate(tensors)]
    assert fused(flats).tolist() == [sums(flat).item() for flat in flats]


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", SIZES)
def test_kernel_and_operators_compute_the_same_at_every_edge(
    elements: int, dtype: torch.dtype
) -> None:
    from holdfast.offload.fused_sums import fused

    flats = [random_bits(elements, dtype, offset, offset) for offset in (0, 1, 2, 3, 8)]
    assert fused(flats).tolist() == [sums(flat).item() for flat in flats]


@needs_kernel
def test_the_kernel_passes_the_check_before_its_first_use() -> None:
    from holdfast.offload.fused_sums import compiles_for, fused

    assert bit_sums._problem(fused, torch.device("cpu")) == ""
    assert not compiles_for("meta")


def chosen(
    monkeypatch: pytest.MonkeyPatch, fused: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None
) -> tuple[object, list[Event]]:
    """What is chosen where Triton's kernel is this one (None: there is no Triton), and said."""
    made = None if fused is None else SimpleNamespace(fused=fused, compiles_for=lambda _: True)
    monkeypatch.setitem(sys.modules, "holdfast.offload.fused_sums", made)
    if made is None:
        monkeypatch.delattr("holdfast.offload.fused_sums", raising=False)
    else:
        monkeypatch.setattr("holdfast.offload.fused_sums", made, raising=False)
    said: list[Event] = []
    end = subscribe(lambda event, _: said.append(event))
    bit_sums._kernel.cache_clear()
    try:
        return bit_sums._kernel("cpu"), said
    finally:
        end()
        bit_sums._kernel.cache_clear()


def right(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([sums(flat) for flat in flats])


def wrong(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    return right(flats) + (torch.arange(len(flats)) == 1)


def failing(_: Sequence[torch.Tensor]) -> torch.Tensor:
    raise RuntimeError("no C compiler")


def test_a_kernel_that_is_right_is_used_and_one_that_is_not_there_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chosen(monkeypatch, right) == (right, [])
    assert chosen(monkeypatch, None) == (None, [])


@pytest.mark.parametrize(
    ("kernel", "why"), [(wrong, "it computes other numbers"), (failing, "no C compiler")]
)
def test_a_kernel_that_is_wrong_or_does_not_compile_is_said_and_left_out(
    kernel: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, said = chosen(monkeypatch, kernel)
    assert found is None and len(said) == 1 and why in str(said[0])


def test_a_device_that_is_full_leaves_the_choice_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Sequence[torch.Tensor]) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        chosen(monkeypatch, full)
    assert chosen(monkeypatch, right) == (right, [])
