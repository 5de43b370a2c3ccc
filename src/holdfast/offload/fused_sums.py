"""Computes the bit checksums of many tensors in one launch, and reads each byte once.

Only a torch that brings Triton along can import this. ``bit_sums`` says what is computed, and
checks the kernel against torch's operators before its first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch
import triton
import triton.language as tl

from holdfast.accelerator.devices import memory_key, use_device
from holdfast.offload.bit_sums import BLOCK, DEPTH, FACTOR, LANES, LOW, MIX, STEP

#: Rows of a block that a program loads at once: enough bytes under way to hide the memory's delay.
_AT_ONCE = 4


def compiles_for(device_type: str) -> bool:
    """Return True if Triton compiles for devices of this type on this machine."""
    with suppress(RuntimeError):  # no driver, or more than one
        return bool(triton.runtime.driver.active.get_active_torch_device().type == device_type)
    return False


def fused(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the checksums of these tensors, on their device."""
    device = flats[0].device
    halves = [flat.numel() * flat.element_size() // 2 for flat in flats]
    first = list(accumulate((-(-one // (2 * BLOCK)) for one in halves), initial=0))
    addresses = map(memory_key, flats)
    table = torch.tensor(list(zip(addresses, halves, first, strict=False)), device="cpu")
    with use_device(device):
        results = torch.zeros(len(flats), dtype=torch.int64, device=device)
        if first[-1]:
            _kernel[(first[-1],)](
                table.to(device, non_blocking=True),
                results,
                len(flats),
                LANES,
                DEPTH,
                _AT_ONCE,
                FACTOR,
                STEP,
                MIX,
                LOW,
                num_warps=4,
            )
    return results


@triton.jit(do_not_specialize=["tensors"])
def _kernel(
    table: tl.tensor,
    results: tl.tensor,
    tensors: tl.tensor,
    lanes: tl.constexpr,
    depth: tl.constexpr,
    at_once: tl.constexpr,
    factor: tl.constexpr,
    step: tl.constexpr,
    mix: tl.constexpr,
    low: tl.constexpr,
) -> None:
    """Add the sum of one block to the result of its tensor.

    ``table``: address, number of 16-bit numbers and number of the first block, for each tensor.
    """
    program = tl.program_id(0)
    tensor, behind = tensors * 0, tensors + 0
    while behind - tensor > 1:
        middle = (tensor + behind) // 2
        is_behind = tl.load(table + 3 * middle + 2) > program
        tensor, behind = tl.where(is_behind, tensor, middle), tl.where(is_behind, middle, behind)
    address = tl.load(table + 3 * tensor)
    size = tl.load(table + 3 * tensor + 1)
    block = program - tl.load(table + 3 * tensor + 2)
    first = block * (lanes * depth)
    lane = tl.arange(0, lanes)
    columns = tl.zeros([lanes], tl.int64)
    weight = tl.full([], factor, tl.int64)
    if (address % 16 == 0) & (2 * (first + lanes * depth) <= size):
        words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)) + first, 16)
        for row in range(0, depth, at_once):
            for next_row in tl.static_range(at_once):
                word = tl.load(words + (row + next_row) * lanes + lane)
                columns += word.to(tl.int64) * weight
                weight *= factor
    else:  # the end of a tensor, or memory that is not aligned: two loads for a word
        halves = address.to(tl.pointer_type(tl.int16))
        rows = tl.minimum(tl.cdiv(size - 2 * first, 2 * lanes), depth)
        for line in range(rows):
            at = 2 * (first + line * lanes + lane)
            below = tl.load(halves + at, mask=at < size, other=0).to(tl.int64) & 0xFFFF
            above = tl.load(halves + at + 1, mask=at + 1 < size, other=0).to(tl.int64) << 16
            columns += (below | above) * weight
            weight *= factor
    mixed = columns + (block * lanes + lane) * step
    mixed = (mixed ^ ((mixed >> 32) & low)) * mix
    mixed = (mixed ^ ((mixed >> 32) & low)) * mix
    mixed = mixed ^ ((mixed >> 32) & low)
    total = tl.sum(tl.where(2 * (first + lane) < size, mixed, 0), axis=0)
    tl.atomic_add(results + tensor, total, sem="relaxed")
