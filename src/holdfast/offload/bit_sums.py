"""Computes bit checksums that detect changed memory, each where the memory is.

Tensor versions do not suffice: writes through ``.data`` and some of torch's own kernels do not
change them.

On a device a tensor is a row of 32-bit words, in blocks of ``DEPTH`` rows and ``LANES`` columns.
Each column of a block is summed with an odd weight for each row, mixed with its number, and all
columns are added: modulo 2**64, so nothing depends on the order of threads. Where Triton compiles
for the device one kernel reads each byte once; elsewhere torch's operators compute the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from holdfast.accelerator.devices import memory_key
from holdfast.events import warn
from holdfast.format import checksum as blocks

#: A checksum on the host, or one that a device is still computing.
Bits = int | torch.Tensor

LANES, DEPTH = 1024, 32
#: Words of a block.
BLOCK = LANES * DEPTH
#: The weight of a row is this odd number to the power of one more than the row's number in its
#: block.
FACTOR = 0x5851F42D4C957F2D
#: Two odd numbers, as signed ones: a column's number is multiplied by the first, all its bits by
#: the second.
STEP, MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64)
LOW = (1 << 32) - 1
#: Blocks summed at once by torch's operators: 32 MiB, because their products have 64 bits.
_BLOCKS = 128


def checksum(flat: torch.Tensor) -> Bits:
    """Return one integer over all bits and their order.

    Two different tensors have the same checksum with a probability of about one in 2**32; on a
    device a single changed element always shows.
    """
    return checksums([flat])[0]


def checksums(flats: Sequence[torch.Tensor]) -> list[Bits]:
    """Return the checksum of each of these tensors, which are on one device."""
    if not flats:
        return []
    device = flats[0].device
    if device.type == "cpu":
        return [_of_host(flat) for flat in flats]
    fused = _fused(device)
    if fused is not None:
        return list(fused(flats).unbind())
    return [sums(flat) for flat in flats]


def _of_host(flat: torch.Tensor) -> int:
    there: Any = flat.view(torch.uint8).numpy()  # 20 GB/s; the sums take 30 times as long on a CPU
    return blocks.checksum(memoryview(there)) if flat.numel() else 0


def are_same(before: Sequence[Bits], now: Sequence[Bits]) -> list[bool]:
    """Return which checksums are equal; waits for a device once."""
    there = [n for n, one in enumerate(now) if isinstance(one, torch.Tensor)]
    results = [isinstance(b, int) and bool(a == b) for a, b in zip(before, now, strict=True)]
    if there:
        pairs = [torch.stack([torch.as_tensor(of[n]) for n in there]) for of in (before, now)]
        for number, is_same in zip(there, (pairs[0] == pairs[1]).tolist(), strict=True):
            results[number] = is_same
    return results


def sums(flat: torch.Tensor) -> torch.Tensor:
    """Compute the checksum for any device by torch's operators."""
    halves = flat.view(torch.int16)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    whole = halves.numel() // (2 * BLOCK) * 2 * BLOCK
    for start in range(0, whole, 2 * BLOCK * _BLOCKS):
        piece = _words(halves[start : min(start + 2 * BLOCK * _BLOCKS, whole)])
        total += _sum_of(piece, start // (2 * DEPTH))
    rest = halves[whole:]
    if rest.numel():
        padded = rest.new_zeros(2 * BLOCK)
        padded[: rest.numel()] = rest
        total += _sum_of(_words(padded), whole // (2 * DEPTH), (rest.numel() + 1) // 2)
    return total


def _words(halves: torch.Tensor) -> torch.Tensor:
    """Return pairs of 16-bit numbers as words, the first number in the low bits."""
    if halves.storage_offset() % 2 == 0 and memory_key(halves) % 4 == 0:
        return halves.view(torch.int32)
    return (halves[::2].int() & 0xFFFF) | (halves[1::2].int() << 16)


def _sum_of(words: torch.Tensor, first: int, lanes: int | None = None) -> torch.Tensor:
    """Sum whole blocks, whose first column has the number ``first``; only so many columns."""
    table = words.view(-1, DEPTH, LANES)
    columns = (table * _weights(words.device)[:, None]).sum(1).flatten()[:lanes]
    numbers = torch.arange(first, first + columns.numel(), device=words.device)
    mixed = columns + numbers * STEP
    mixed = (mixed ^ ((mixed >> 32) & LOW)) * MIX
    mixed = (mixed ^ ((mixed >> 32) & LOW)) * MIX
    return (mixed ^ ((mixed >> 32) & LOW)).sum()


@lru_cache(maxsize=64)
def _weights(device: torch.device) -> torch.Tensor:
    powers = [pow(FACTOR, row + 1, 1 << 64) for row in range(DEPTH)]
    with torch.inference_mode(False):
        signed = [one - (1 << 64) * (one >> 63) for one in powers]
        return torch.tensor(signed, dtype=torch.int64, device="cpu").to(device)


# Chooses the kernel.


Fused = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def _fused(device: torch.device) -> Fused | None:
    """Return the function that computes many checksums in one launch; None: torch's operators."""
    return _kernel(device.type)


@cache
def _kernel(device_type: str) -> Fused | None:
    try:
        from holdfast.offload import fused_sums
    except ImportError:  # torch brings Triton along for some devices only
        return None
    if not fused_sums.compiles_for(device_type):
        return None
    try:
        found = _problem(fused_sums.fused, torch.device(device_type))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found:
        warn(
            f"Triton's kernel for checksums cannot be used on {device_type} ({found}): "
            "torch's operators read gradients several times instead, which takes longer."
        )
    return None if found else fused_sums.fused


def _problem(fused: Fused, device: torch.device) -> str:
    """Compare a kernel with torch's operators; return what is wrong."""
    words = torch.arange(3 * BLOCK, dtype=torch.int32, device=device) * 0x9E3779B1
    halves = words.view(torch.int16)
    samples = [words, halves[1:], halves[:77], halves[:0]]
    same = torch.stack([sums(one) for one in samples]) == fused(samples)
    return "" if bool(same.all()) else "it computes other numbers"
