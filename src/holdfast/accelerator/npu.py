"""Calls the runtime of Ascend NPUs, as ``torch_npu`` hands it out."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.accelerator.vendors import Vendor


class NpuVendor(Vendor):
    """Ascend NPUs."""

    def register(self, address: int, size_bytes: int) -> int:
        return int(_runtime().npuHostRegister(address, size_bytes))

    def unregister(self, address: int) -> None:
        _runtime().npuHostUnregister(address)


def _runtime() -> Any:
    return torch.get_device_module("npu").npurt()


def make_vendor() -> Vendor:
    """Return what is known about NPUs."""
    return NpuVendor()
