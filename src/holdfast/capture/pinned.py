"""Pinned shared memory: a GPU copies into it at full speed and without the processor's help."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

from holdfast.events import Warned, emit
from holdfast.snapshot.arena import IMAGE_START, SlotFile


def pin_memory(slot: SlotFile) -> bool:
    """Register a slot's pages with the CUDA driver; without it copies work, only slower."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(slot.map))
    size = slot.capacity_bytes + IMAGE_START
    status = register(address, size)
    if status:
        emit(Warned(
            message=f"{size >> 20} MiB of shared memory could not be pinned (CUDA error "
            f"{status}): copies from the GPU will be slow. Raise the memlock limit."
        ))  # fmt: skip
        return False
    slot.is_pinned = True
    return True


def register(address: int, size_bytes: int) -> int:
    """Pin memory by the driver itself; 0, or the number of the error that it gave.

    The driver keeps an error for whoever asks next, which is the next kernel launched: so one that
    nobody needs is launched, and the error is gone.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    if status:
        with suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
    return status


def unpin_memory(slot: SlotFile) -> None:
    """Undo ``pin_memory``; required before the mapping goes."""
    if slot.is_pinned:
        address = ctypes.addressof(ctypes.c_char.from_buffer(slot.map))
        torch.cuda.cudart().cudaHostUnregister(address)
        slot.is_pinned = False
