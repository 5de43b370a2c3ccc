"""Holds what torch has no common name for, by device type: where a new vendor is added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module

import torch

#: Status of a registration that nobody on this machine can carry out.
UNKNOWN = -1


class Vendor:
    """What a device does that torch offers for it alone; this base knows none of it.

    Every method is called with the device entered.
    """

    def register(self, address: int, size_bytes: int) -> int:
        """Pin memory that exists, so that the device copies it by itself; return 0, or the number
        of the driver's error.
        """
        return UNKNOWN

    def unregister(self, address: int) -> None:
        """Undo ``register``."""

    def pci_address(self, device: torch.device) -> str:
        """Return the address of ``device`` on its bus, as the system names it; "" if not known."""
        return ""

    def clear_error(self, device: torch.device) -> None:
        """Take back the error of a refused call, which the driver keeps for the next launch."""

    def make_own_stream(self, device: torch.device) -> torch.Stream:
        """Return a new stream; one that torch lends to nobody else, where the device has such."""
        return torch.Stream(device)

    def record_event(self, stream: torch.Stream, event: torch.Event | None = None) -> torch.Event:
        """Return an event behind the work of ``stream`` that the host waits for asleep, where the
        device can do that; ``event``, if given, recorded again.
        """
        return stream.record_event(event)

    def wait_event(self, stream: torch.Stream, event: torch.Event) -> None:
        """Let later work of ``stream`` begin behind an event of ``record_event``."""
        stream.wait_event(event)

    def copy_to_host(self, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Enqueue a copy from each source to its place in pinned memory, on the current stream."""
        for place, source in zip(places, sources, strict=True):
            place.copy_(source, non_blocking=True)

    def is_capturing(self, stream: torch.Stream) -> bool:
        """Return True if work on ``stream`` is recorded into a graph instead of executed."""
        return bool(stream.is_capturing()) if hasattr(stream, "is_capturing") else False

    def relax_capture(self) -> AbstractContextManager[None]:
        """Let this thread call what would break a graph that another thread captures."""
        return _nothing()

    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for about so long."""

    def stream_of(self, stream: torch.Stream) -> torch.Stream:
        """Return ``stream`` as the class that the vendor's own calls take."""
        return stream


@contextmanager
def _nothing() -> Iterator[None]:
    yield


_vendors: dict[str, Vendor] = {}
#: Files of this package that know a vendor, loaded when the first tensor of its type is met.
_KNOWN = ("cuda", "npu")


def add_vendor(device_type: str, vendor: Vendor) -> None:
    """Have ``vendor`` asked about devices of this type."""
    _vendors[device_type] = vendor


def vendor_of(device: torch.device) -> Vendor:
    """Return what is known about the maker of ``device``."""
    found = _vendors.get(device.type)
    if found is None:
        found = Vendor()
        if device.type in _KNOWN:
            found = import_module(f"holdfast.accelerator.{device.type}").make_vendor()
        _vendors[device.type] = found
    return found
