"""Tensors that are filled by copies: nothing is called good before all of it was verified."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import RestoreError
from holdfast.restore import destinations as late
from holdfast.restore.destinations import DeviceCopies
from holdfast.restore.reading.stored import choose_stored, open_stored
from holdfast.restore.restore import restore_first
from holdfast.storage import LocalStore, local
from holdfast.world import current_world
from support.models.fake_devices import fake_streams


def build(seed: int) -> dict[str, Any]:
    """Tensors for every way: large, small, turned, and shown in another form than stored."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return {
        "large": random(1500, 1000),
        "little": random(7),
        "turned": random(300, 200).t(),
        "conjugated": random(300, 200, dtype=torch.complex64).conj(),
        "negated": random(30, 20, dtype=torch.complex64).conj().imag,
    }


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_restore_that_meets_a_flipped_byte_never_calls_the_state_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    monkeypatch.setattr(local, "is_cached", lambda *_: is_cached)
    saved, state = build(1), build(2)
    holdfast.save(tmp_path, saved)
    store = LocalStore(tmp_path)
    found, candidates = choose_stored(store, None)
    image = tmp_path / found.read[candidates[0].generation].images[0].path
    good = image.read_bytes()
    start = int.from_bytes(good[:8], "little") + 8
    told: list[bool] = []

    def restore() -> None:
        told.clear()
        restore_first(
            current_world(timeout_s=10),
            state,
            candidates,
            lambda candidate: open_stored(store, candidate, 0),
            incarnation=0,
            timeout_s=10,
            on_poison=told.append,
        )

    size = sum(tensor.nbytes for tensor in saved.values())
    for at in range(start + 5, start + size, 1 << 20):
        image.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(RestoreError, match="bytes changed"):
            restore()
        assert told in ([True], [])  # the last block is read for the values, before all else
    assert told == []
    image.write_bytes(good)
    restore()
    assert told == [True, False]
    for name, tensor in saved.items():
        assert torch.equal(state[name].resolve_conj(), tensor.resolve_conj()), name


class Recorded:
    """What a GPU was asked for, in order, on a machine that has none."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Recorded) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Recorded:
        self.log.append(f"{self.name} marked")
        return self

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class Tensor:
    """On the device "cuda"."""

    device = torch.device("cuda", 0)
    dtype = torch.float32

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def copy_(self, source: object, non_blocking: bool = False) -> None:
        self.log.append(f"copy, {'later' if non_blocking else 'now'}")


def test_a_side_stream_begins_behind_the_current_one_which_goes_on_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    device = torch.device("cuda", 0)

    @contextmanager
    def entered(stream: Recorded) -> Any:
        log.append(f"on {stream.name}")
        yield

    fake_streams(
        monkeypatch,
        make_stream=lambda _: Recorded(log, "side"),
        current_stream=lambda _: Recorded(log, "current"),
        use_stream=entered,
    )
    copies = DeviceCopies([device, torch.device("cpu")])
    to: Any = Tensor(log)

    def restore_that_fails() -> None:
        copies.begin()
        try:
            copies.copy(to, torch.zeros(1))
            copies.mark()()
            raise KeyError
        finally:
            copies.end()

    with pytest.raises(KeyError):
        restore_that_fails()
    assert log == [
        "side waits for current",
        "on side",
        "copy, later",
        "side marked",
        "host waits for side",
        "host waits for side",
        "current waits for side",
    ]


def test_a_failed_copy_leaves_no_memory_that_is_lent_again_and_nobody_waiting() -> None:
    copies = DeviceCopies([])
    staging = late.Staging(copies, 0, 64)
    lent: list[memoryview] = []

    def fail() -> None:
        with staging.borrow(64) as memory:
            lent.append(memory)
            raise KeyError

    for _ in range(5):
        with pytest.raises(KeyError):
            fail()
    assert len({id(memory.obj) for memory in lent}) == 5
    with staging.borrow(64) as memory, staging.borrow(32) as other:
        assert len(memory) == 64 and len(other) == 32


def test_a_restore_that_fails_has_waited_for_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save(tmp_path, build(1))
    told: list[str] = []
    monkeypatch.setattr(DeviceCopies, "begin", lambda _: told.append("begin"))
    monkeypatch.setattr(DeviceCopies, "end", lambda _: told.append("end"))

    def fail(*_: object, **__: object) -> int:
        told.append("read")
        raise RestoreError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["holdfast.restore.restore"], "read_wants", fail)
        with pytest.raises(RestoreError, match="no more"):
            holdfast.load(tmp_path, build(2))
    assert told == ["begin", "read", "end"]
    holdfast.load(tmp_path, build(2))
    assert told[3:] == ["begin", "end"]
