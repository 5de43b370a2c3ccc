"""Numbers of which one is stored for several tensors: differing ones end a copy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from holdfast.capture.copy_plan import SlotTarget
from holdfast.capture.copy_slot import copy_image
from holdfast.capture.progress import CopyProgress
from holdfast.capture.replica_samples import ScalarAgreement
from holdfast.errors import UsageError
from holdfast.state.bindings import LeafSource
from holdfast.storage.memory import MemoryStore
from support.models.fake_devices import Elsewhere, fake_streams
from support.runs.ring_runs import FakeGpu, Through


def state(*numbers: float) -> Through:
    """A large leaf, and numbers that are stored as one."""
    tensors = {f"n{at}": torch.tensor(number) for at, number in enumerate(numbers)}
    through = Through({"large": torch.ones(1 << 20), **tensors})
    found = [binding for binding in through.bindings if binding.name.startswith("n")]
    through.bindings.joined = [("n", [LeafSource(binding) for binding in found])]
    through.overtaking.agreeing = ScalarAgreement(through.bindings.joined)
    return through


def into_memory(through: Through) -> None:
    memory = memoryview(bytearray(through.image.size_bytes))
    progress = CopyProgress(check=lambda: None, copied=lambda _: None, enqueued=lambda _: None)
    target = SlotTarget(memory, through.plan)
    copy_image(target, through.image, through.values, through.overtaking, progress, 0, {})


def through_a_ring(through: Through) -> None:
    through.run(2 << 20, MemoryStore())


@pytest.fixture(params=["memory", "ring", "ring from a GPU"])
def copied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param != "ring from a GPU":
        return into_memory if request.param == "memory" else through_a_ring
    fake_streams(monkeypatch)

    def from_a_gpu(through: Through) -> None:
        gpu = FakeGpu()
        monkeypatch.setattr("holdfast.capture.device_copies.side_stream", lambda _: gpu)
        through.run(2 << 20, MemoryStore(), ready={gpu.device: object()}, gpu=gpu)

    return from_a_gpu


def test_equal_numbers_are_copied(copied: Callable[[Through], None]) -> None:
    copied(state(3.0, 3.0, 3.0))
    copied(state(float("nan"), float("nan")))


@pytest.mark.parametrize("other", [4.0, -0.0])
def test_differing_numbers_end_the_copy(copied: Callable[[Through], None], other: float) -> None:
    with pytest.raises(UsageError, match=rf"n0 is 0\.0 and n2 is {other}, .* both are n, "):
        copied(state(0.0, 0.0, other))


def test_what_is_on_a_device_is_copied_from_it_and_compared() -> None:
    through = state(1.0, 2.0)
    device = torch.device("cpu")  # where a copy that was enqueued is there at once
    agreeing = ScalarAgreement(through.bindings.joined)
    agreeing.enqueue(device)
    with pytest.raises(UsageError, match=r"n0 is 1\.0 and n1 is 2\.0"):
        agreeing.check()
    same = state(2.0, 2.0)
    agreeing = ScalarAgreement(same.bindings.joined)
    agreeing.enqueue(device)
    same.bindings.joined[0][1][0].memory.fill_(7.0)  # an update behind the copy
    agreeing.check()


@pytest.mark.parametrize("other", [2.0, 3.0])
def test_numbers_on_a_device_without_streams_are_fetched_and_compared(other: float) -> None:
    sources = []
    for number in (2.0, other):
        binding = SimpleNamespace(
            source=Elsewhere(torch.tensor(number)), name=str(number), tensor=torch.tensor(number)
        )
        sources.append(SimpleNamespace(binding=binding, memory=binding.source))
    agreeing = ScalarAgreement([("n", cast(list[LeafSource], sources))])
    agreeing.read_on_host()
    with nullcontext() if other == 2.0 else pytest.raises(UsageError, match=r"is 2.* is 3"):
        agreeing.check()
