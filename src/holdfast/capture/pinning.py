"""Pins slots for the accelerator, so that it copies into shared memory by itself at full speed."""

from __future__ import annotations

import ctypes

import torch

from holdfast.accelerator.devices import explain, register, unregister
from holdfast.events import Warned, emit
from holdfast.protocol.arena import IMAGE_START, SlotFile


def pin_memory(slot: SlotFile, device: torch.device) -> bool:
    """Register a slot's pages with the driver of ``device``; without this, copies work but are
    slower.
    """
    size = slot.capacity_bytes + IMAGE_START
    status = register(_address(slot), size, device)
    if status:
        emit(
            Warned(
                message=f"{size >> 20} MiB of shared memory could not be pinned "
                f"({explain(status)}): copies from the device will be slow. Raise the memlock "
                "limit."
            )
        )
        return False
    slot.pinned_for = device
    return True


def unpin_memory(slot: SlotFile) -> None:
    """Undo ``pin_memory``; required before the mapping is removed."""
    if isinstance(slot.pinned_for, torch.device):
        unregister(_address(slot), slot.pinned_for)
        slot.pinned_for = None


def _address(slot: SlotFile) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot.map))
