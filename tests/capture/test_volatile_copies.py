"""Large volatile leaves are copied out to the host, and the device waits for it before training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capture.test_through_ring import bits, form
from holdfast.accelerator import devices
from holdfast.accelerator.pinnable_pages import allocate, memory_of
from holdfast.capture import staging, volatile_copies
from holdfast.capture.pinning import Pins
from holdfast.capture.volatile_copies import stage
from holdfast.format.checksum import BLOCK_BYTES
from support.models.late_devices import PIECE, LateDevice, late_device

late = late_device


class Training:
    """The stream that the state is computed on: notes behind which work it goes on."""

    def __init__(self, side: LateDevice) -> None:
        self.side = side
        self.waited: list[Any] = []

    device = torch.device("cpu")

    def record_event(self, event: Any = None) -> Any:
        return SimpleNamespace(is_computation=True)

    def wait_event(self, event: Any) -> None:
        assert event._upto == len(self.side.work), "the update is behind a part of the copies"
        self.waited.append(event)


@pytest.fixture
def training(late: LateDevice, monkeypatch: pytest.MonkeyPatch) -> Training:
    made = Training(late)
    monkeypatch.setattr(devices, "current_stream", lambda _: made)
    monkeypatch.setattr(volatile_copies, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(volatile_copies, "GROUP_BYTES", 2 * PIECE)
    monkeypatch.setattr(volatile_copies, "pin_beside", lambda *_: None)
    return made


def leaf(local: torch.Tensor, pinned_bytes: int = 0) -> Any:
    staged = allocate(local.shape, local.dtype)
    if pinned_bytes:
        memory = memory_of(staged)
        memory.pins = Pins(memory, local.device)
        memory.pins.pinned_bytes = pinned_bytes
        memory.unpin = lambda: True
    return SimpleNamespace(
        name="average", local=local, staged=staged, lazy=False, is_copied_out=True
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


@pytest.mark.promise
@pytest.mark.parametrize("how", ["plain", "transposed", "conjugate"])
@pytest.mark.parametrize("pinned_bytes", [0, 3 * BLOCK_BYTES, 1 << 40])
def test_a_leaf_is_copied_out_bit_for_bit_and_training_goes_on_behind_it(
    training: Training, late: LateDevice, pinned_bytes: int, how: str
) -> None:
    local = form(bits(6 * 200_000, torch.complex64, 1), how)
    before = raw(local).clone()
    one = leaf(local, pinned_bytes)
    stage([one])
    assert late.waited, "copied before the computation that makes it"
    if pinned_bytes > local.nbytes:
        assert late.landed < len(late.work), "the host waited for copies into pinned memory"
    (last,) = training.waited
    last.synchronize()
    local.fill_(7)
    assert torch.equal(raw(one.staged), before)
    if pinned_bytes:
        pins: Any = memory_of(one.staged).pins
        assert pins.last is last


def test_what_is_not_pinned_is_not_written_by_the_device(
    training: Training, late: LateDevice
) -> None:
    stage([leaf(bits(5 * BLOCK_BYTES, torch.uint8, 1))])
    assert late.landed == len(late.work) == 3
    assert staging.pieces._made >= 1
