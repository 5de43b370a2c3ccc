"""A device whose work is done as late as it may be, in memory of the host; with small pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from holdfast.accelerator import devices
from holdfast.capture import device_copies, staging, transfers
from holdfast.capture.staging import GatherBuffers, StagingPieces
from holdfast.capture.transfers import SmallTensors, Transfer
from holdfast.format.checksum import BLOCK_BYTES
from support.models.fake_devices import fake_streams

HOST = torch.device("cpu")
PIECE = 2 * BLOCK_BYTES


class Event:
    def __init__(self, device: LateDevice, upto: int) -> None:
        self.device, self._late, self._upto = HOST, device, upto

    def synchronize(self) -> None:
        self._late.land(self._upto)


class LateDevice:
    """The host's memory as a device's; work of its one stream is done when it is waited for."""

    def __init__(self) -> None:
        self.device = HOST
        self.work: list[Callable[[], object]] = []
        self.targets: list[int] = []
        """Where the memory begins that each work writes to."""
        self.landed = 0
        self.lock = threading.RLock()
        self.is_broken = self.waited = False

    def wait_event(self, _: object) -> None:
        assert not self.work, "copies were enqueued before the computation was waited for"
        self.waited = True

    def record_event(self, event: Event | None = None) -> Event:
        return Event(self, len(self.work))

    def synchronize(self) -> None:
        if self.is_broken:
            raise RuntimeError("an illegal memory access")
        self.land(len(self.work))

    def forget(self) -> None:
        """Begin anew: no work was enqueued."""
        self.work.clear()
        self.targets.clear()
        self.landed = 0

    def writes_to(self, piece: torch.Tensor) -> bool:
        """Whether work in flight writes to the memory of ``piece``."""
        with self.lock:
            return piece.untyped_storage().data_ptr() in self.targets[self.landed :]

    def land(self, upto: int) -> None:
        with self.lock:
            while self.landed < upto:
                self.work[self.landed]()
                self.landed += 1


@pytest.fixture
def late_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    device = LateDevice()
    fake_streams(monkeypatch, is_streamed=lambda _: True)
    monkeypatch.setattr(
        devices, "record_event", lambda stream, event=None: stream.record_event(event)
    )
    monkeypatch.setattr(device_copies, "side_stream", lambda _: device)
    monkeypatch.setattr(transfers, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(transfers, "GROUP_BYTES", 2 * PIECE)
    monkeypatch.setattr(device_copies, "GROUP_BYTES", 2 * PIECE)
    monkeypatch.setattr(staging, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(staging, "gathered", GatherBuffers())
    pieces = StagingPieces(4)
    monkeypatch.setattr(staging, "pieces", pieces)
    monkeypatch.setattr(devices, "empty_pinned", partial(torch.empty, dtype=torch.uint8))
    for kind in (Transfer, SmallTensors):
        real: Any = kind.enqueue

        def enqueue(self: Any, into: torch.Tensor, real: Any = real) -> None:
            with device.lock:
                device.targets.append(into.untyped_storage().data_ptr())
                device.work.append(lambda: real(self, into))

        monkeypatch.setattr(kind, "enqueue", enqueue)

    def copy_to_host(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for place, source in zip(places, sources, strict=True):
            with device.lock:
                device.targets.append(place.untyped_storage().data_ptr())
                device.work.append(partial(place.copy_, source))

    monkeypatch.setattr(devices, "copy_to_host", copy_to_host)
    yield device
    assert pieces._made == len(pieces._free), "a piece was never given back"
