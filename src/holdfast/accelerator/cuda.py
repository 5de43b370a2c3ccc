"""Calls the CUDA runtime, or ROCm's, which answers to the same names in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from holdfast.accelerator.vendors import Vendor

#: Cycles of a GPU in a second, roughly: delays need not be exact.
_CYCLES = 1.5e9
#: ``cudaStreamCaptureModeRelaxed``.
_RELAXED = 2
#: ``cudaStreamNonBlocking``: it does not wait for the default stream.
_NON_BLOCKING = 1


class CudaVendor(Vendor):
    """NVIDIA's and AMD's GPUs."""

    def __init__(self) -> None:
        self._exchange = _function("ThreadExchangeStreamCaptureMode")
        self._create = _function("StreamCreateWithFlags")
        self._take_error = _function("GetLastError")

    def register(self, address: int, size_bytes: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def pci_address(self, device: torch.device) -> str:
        found: Any = torch.cuda.get_device_properties(device)
        if not hasattr(found, "pci_domain_id"):
            return ""
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

    def clear_error(self, device: torch.device) -> None:
        if self._take_error is not None:
            self._take_error()
            return
        with suppress(RuntimeError):  # a launch takes it, where the device has room for one
            torch.ones(1, device=device).add_(1)

    def make_own_stream(self, device: torch.device) -> torch.Stream:
        made = ctypes.c_void_p()
        if self._create is None or self._create(ctypes.byref(made), _NON_BLOCKING):
            return torch.Stream(device)
        return torch.cuda.ExternalStream(made.value, device)

    def record_event(self, stream: torch.Stream, event: torch.Event | None = None) -> torch.Event:
        if not isinstance(event, torch.cuda.Event):
            event = torch.cuda.Event(blocking=True)
        event.record(self.stream_of(stream))
        return event

    def wait_event(self, stream: torch.Stream, event: torch.Event) -> None:
        # ``torch.Stream.wait_event`` takes an event of this class and waits for nothing: what it
        # looks at in there is never recorded (torch 2.11 to 2.13).
        if isinstance(event, torch.cuda.Event):
            event.wait(self.stream_of(stream))
        else:
            stream.wait_event(event)

    def copy_to_host(self, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        # Not batched by the device, as it would be on one: a loop in C++, which lets Python's lock
        # go once and not for each copy.
        torch._foreach_copy_(list(places), list(sources), non_blocking=True)

    def is_capturing(self, stream: torch.Stream) -> bool:
        if hasattr(stream, "is_capturing"):
            return bool(stream.is_capturing())
        with torch.cuda.stream(self.stream_of(stream)):
            return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def relax_capture(self) -> Iterator[None]:
        if self._exchange is None:
            yield
            return
        mode = ctypes.c_int(_RELAXED)
        self._exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            self._exchange(ctypes.byref(mode))

    def delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES))

    def stream_of(self, stream: torch.Stream) -> torch.cuda.Stream:
        if isinstance(stream, torch.cuda.Stream):
            return stream
        return torch.cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )


def _function(name: str) -> Any:
    """Return a function of the runtime that torch has loaded; None if it is not found."""
    name = ("hip" if torch.version.hip else "cuda") + name
    with suppress(OSError, AttributeError):
        return getattr(ctypes.CDLL(_runtime_path()), name)
    return None


def _runtime_path() -> str | None:
    """Return the path of the runtime's library in this process; None: among its global names."""
    wanted = "libamdhip64" if torch.version.hip else "libcudart"
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[5].strip() if line.count("/") else ""
            if wanted in path:
                return path
    return None


def make_vendor() -> Vendor:
    """Return what is known about CUDA devices."""
    return CudaVendor()
