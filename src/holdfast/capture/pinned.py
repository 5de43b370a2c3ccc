"""Pins shared memory for CUDA, so that GPU copies run at full speed by DMA."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

from holdfast.events import Warned, emit
from holdfast.protocol.arena import IMAGE_START, SlotFile


def pin_memory(slot: SlotFile) -> bool:
    """Register a slot's pages with the CUDA driver; without this, copies work but are slower."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(slot.map))
    size = slot.capacity_bytes + IMAGE_START
    status = register(address, size)
    if status:
        emit(
            Warned(
                message=f"{size >> 20} MiB of shared memory could not be pinned (CUDA error "
                f"{status}): copies from the GPU will be slow. Raise the memlock limit."
            )
        )
        return False
    slot.is_pinned = True
    return True


def register(address: int, size_bytes: int) -> int:
    """Pin memory through the driver; return 0, or the driver's error number.

    The driver keeps an error for the next caller, which is the next kernel launch: a dummy kernel
    is launched here to clear the error.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    if status:
        with suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
    return status


def unpin_memory(slot: SlotFile) -> None:
    """Undo ``pin_memory``; required before the mapping is removed."""
    if slot.is_pinned:
        address = ctypes.addressof(ctypes.c_char.from_buffer(slot.map))
        torch.cuda.cudart().cudaHostUnregister(address)
        slot.is_pinned = False
