"""Tells the accelerator package what torch has no common name for on the simulated device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from holdfast.accelerator.vendors import Vendor, add_vendor


class SimulatedEvent(torch.Event):
    """An event of a vendor's own class, as CUDA's: what torch's common calls look at in there is
    never recorded, so ``torch.Stream.wait_event`` waits for nothing.
    """

    recorded: torch.Event

    def __new__(cls, recorded: torch.Event) -> SimulatedEvent:
        made: SimulatedEvent = super().__new__(cls, recorded.device)
        made.recorded = recorded
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device it was recorded on, as ``torch.cuda.Event`` says it."""
        return self.recorded.device

    def synchronize(self) -> None:
        self.recorded.synchronize()

    def query(self) -> bool:
        return self.recorded.query()


class SimulatedVendor(Vendor):
    """As a maker of devices would tell it."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim

    def register(self, address: int, size_bytes: int) -> int:
        return int(self._sim.host_register(address, size_bytes))

    def unregister(self, address: int) -> None:
        self._sim.host_unregister(address)

    def clear_error(self, device: torch.device) -> None:
        with suppress(RuntimeError):
            torch.ones(1, device=device).add_(1)

    def make_own_stream(self, device: torch.device) -> torch.Stream:
        made, index = torch.Stream(device), device.index or 0
        return torch.Stream(
            stream_id=self._sim.own_stream(), device_index=index, device_type=made.device_type
        )

    def record_event(self, stream: torch.Stream, event: torch.Event | None = None) -> torch.Event:
        if isinstance(event, SimulatedEvent):
            event.recorded = stream.record_event(event.recorded)
            return event
        return SimulatedEvent(stream.record_event())

    def wait_event(self, stream: torch.Stream, event: torch.Event) -> None:
        assert isinstance(event, SimulatedEvent)
        stream.wait_event(event.recorded)

    def copy_to_host(self, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(places), list(sources), non_blocking=True)

    @contextmanager
    def relax_capture(self) -> Iterator[None]:
        before = self._sim.relaxed(True)
        try:
            yield
        finally:
            self._sim.relaxed(before)

    def delay(self, seconds: float) -> None:
        self._sim.sleep(seconds)


def add_simulated_vendor(sim: Any) -> None:
    """Have it asked about tensors of the simulated device."""
    add_vendor("sim", SimulatedVendor(sim))
