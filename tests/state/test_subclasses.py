"""A registered tensor subclass is stored as the plain tensors inside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from holdfast.errors import StateMismatch, UnsupportedState, UsageError
from holdfast.state import tensors as subclasses
from support.runs.launch import run_ranks


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    there = dict(subclasses._registered)
    yield
    subclasses._registered.clear()
    subclasses._registered.update(there)


class Named(torch.Tensor):
    """Only adds a method."""

    def hello(self) -> str:
        return "hello"


def two(seed: int) -> TwoTensor:
    generator = torch.Generator().manual_seed(seed)
    return TwoTensor(torch.randn(300, 300, generator=generator), torch.randn(300, 300))


def state_of(seed: int, *, steps: int = 0) -> dict[str, Any]:
    model = nn.Module()
    model.w = nn.Parameter(two(seed))
    model.register_buffer("scale", TwoTensor(torch.ones(2), torch.zeros(2) + seed))
    optimizer = torch.optim.SGD([model.w], lr=0.5, momentum=0.9)
    for _ in range(steps):
        model.w.grad = two(seed + 1)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def halves(tensor: Any) -> list[torch.Tensor]:
    inner: Any = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    return [inner.a.detach().clone(), inner.b.detach().clone()]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(halves(one), halves(other), strict=True))


def test_parameters_buffers_and_optimizer_state_of_a_subclass_come_back(tmp_path: Path) -> None:
    holdfast.register_tensor(TwoTensor)
    saved, back = state_of(1, steps=2), state_of(5, steps=1)
    with holdfast.Checkpointer(tmp_path, saved) as checkpointer:
        checkpointer.restore()
        checkpointer.save(0, durable=True).wait_durable(timeout_s=60)
    holdfast.load(tmp_path, back)
    assert same(back["model"].w, saved["model"].w)
    assert same(back["model"].scale, saved["model"].scale)
    momenta = [s["optimizer"].state[s["model"].w]["momentum_buffer"] for s in (back, saved)]
    assert same(*momenta)
    with holdfast.open(tmp_path) as checkpoint:
        assert {"model.w.a", "model.w.b", "optimizer.w.momentum_buffer.a"} <= set(checkpoint.leaves)


def test_state_that_only_the_optimizer_can_make_is_asked_for(tmp_path: Path) -> None:
    holdfast.register_tensor(TwoTensor)
    holdfast.save(tmp_path, state_of(1, steps=1))
    back = state_of(2)
    before = halves(back["model"].w)
    with pytest.raises(StateMismatch, match=r"w\.momentum_buffer\.a: .*take one optimizer step"):
        holdfast.load(tmp_path, back)
    assert all(torch.equal(a, b) for a, b in zip(halves(back["model"].w), before, strict=True))


def test_a_subclass_that_only_adds_methods_is_its_own_elements(tmp_path: Path) -> None:
    holdfast.register_tensor(Named)
    saved, back = ({"model": nn.Module()} for _ in range(2))
    saved["model"].register_buffer("x", torch.arange(3.0).as_subclass(Named))
    back["model"].register_buffer("x", torch.zeros(3).as_subclass(Named))
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    found = back["model"].get_buffer("x")
    assert found.tolist() == [0, 1, 2]
    assert isinstance(found, Named)


def test_parts_that_are_copies_are_refused_for_a_restore_would_fill_nothing(tmp_path: Path) -> None:
    keep = []

    def copies(tensor: Any) -> dict[str, torch.Tensor]:
        keep.append(tensor.a.clone())
        return {"a": keep[-1]}

    holdfast.register_tensor(TwoTensor, copies)
    with pytest.raises(UnsupportedState, match=r"model\.w\.a.*made anew at each call"):
        holdfast.save(tmp_path, state_of(1))


def test_what_is_no_tensor_class_or_gives_no_plain_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a subclass of"):
        holdfast.register_tensor(int)  # type: ignore[arg-type]
    holdfast.register_tensor(TwoTensor, lambda tensor: {"all": tensor})
    with pytest.raises(UnsupportedState, match=r"part 'all' of model\.w is a TwoTensor"):
        holdfast.save(tmp_path, state_of(1))


def test_a_subclass_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedState, match=r"TwoTensor.*register_tensor"):
        holdfast.save(tmp_path, state_of(1))


def _in_a_dtensor(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from holdfast.state.tensors import leaf_entry

    holdfast.register_tensor(TwoTensor)
    sharded = DTensor.from_local(two(1), init_device_mesh("cpu", (world,)), [Shard(0)])
    with pytest.raises(UnsupportedState) as caught:
        leaf_entry("moments", sharded, rank, "split")
    assert "is a DTensor of" in str(caught.value)
    assert "registered or not" in str(caught.value)


def test_a_registered_subclass_inside_a_dtensor_is_not_told_to_be_registered() -> None:
    run_ranks(2, _in_a_dtensor)
