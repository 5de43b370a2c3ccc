"""A registered tensor subclass is stored as the plain tensors inside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from holdfast.errors import StateMismatch, UnsupportedState, UsageError
from holdfast.state import subclasses
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


def zeros_like(parameter: torch.Tensor, stored: Any) -> TwoTensor | None:
    assert stored.name == "momentum_buffer"
    if set(stored.parts) != {"a", "b"}:
        return None
    made = (torch.zeros(shape, dtype=dtype) for dtype, shape in stored.parts.values())
    return TwoTensor(*made)


def test_make_gives_an_optimizer_that_has_not_stepped_its_state(tmp_path: Path) -> None:
    holdfast.register_tensor(TwoTensor, make=zeros_like)
    saved, back = state_of(1, steps=2), state_of(5)
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    momenta = [s["optimizer"].state[s["model"].w]["momentum_buffer"] for s in (back, saved)]
    assert same(*momenta)
    gradient = two(9)
    for state in (saved, back):
        state["model"].w.grad = gradient
        state["optimizer"].step()
    assert same(back["model"].w, saved["model"].w)


BAD_MAKE: dict[str, tuple[Any, type[Exception], str]] = {
    "of nothing": (lambda p, s: None, StateMismatch, r"take one optimizer step.*make="),
    "of other shapes": (
        lambda p, s: TwoTensor(torch.zeros(2), torch.zeros(2)),
        StateMismatch,
        r"take one optimizer step.*make=",
    ),
    "of another class": (
        lambda p, s: torch.zeros_like(p.a),
        UsageError,
        r"momentum_buffer: the make= .* for TwoTensor returned a Tensor",
    ),
    "that raises": (
        lambda p, s: s.parts["c"],
        UsageError,
        r"momentum_buffer: the make= .* for TwoTensor raised KeyError: 'c'",
    ),
}


@pytest.mark.parametrize("what", BAD_MAKE)
def test_a_make_that_does_not_fit_changes_nothing(what: str, tmp_path: Path) -> None:
    make, error, message = BAD_MAKE[what]
    holdfast.register_tensor(TwoTensor, make=make)
    holdfast.save(tmp_path, state_of(1, steps=1))
    back = state_of(2)
    before = halves(back["model"].w)
    with pytest.raises(error, match=message):
        holdfast.load(tmp_path, back)
    assert all(torch.equal(a, b) for a, b in zip(halves(back["model"].w), before, strict=True))
    assert not back["optimizer"].state


def test_two_classes_that_make_the_same_parts_are_not_told_apart(tmp_path: Path) -> None:
    class Other(TwoTensor):
        pass

    def other(parameter: torch.Tensor, stored: Any) -> Any:
        kind: Any = Other
        return kind(*(torch.zeros(shape) for _, shape in stored.parts.values()))

    holdfast.register_tensor(TwoTensor, make=zeros_like)
    holdfast.register_tensor(Other, make=other)
    holdfast.save(tmp_path, state_of(1, steps=1))
    with pytest.raises(UsageError, match=r"could be made by TwoTensor and .*Other"):
        holdfast.load(tmp_path, state_of(2))


def test_functions_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match="make=3 is not a function"):
        holdfast.register_tensor(TwoTensor, make=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="parts='a' is not a function"):
        holdfast.register_tensor(TwoTensor, "a")  # type: ignore[arg-type]


BLOCK = 4


class Packed(torch.Tensor):
    """As 8-bit moments are kept: a code for each element, and a scale for each block of them."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, *_: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> None:
        self.codes, self.scale, self.table = codes, scale, table

    @classmethod
    def zeros(cls, shape: Any) -> Any:
        codes = torch.zeros(shape, dtype=torch.uint8)
        return cls(codes, torch.zeros(codes.numel() // BLOCK), torch.arange(3))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.view.default:
            return cls(args[0].codes.view(args[1]), args[0].scale, args[0].table)
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].table)
        raise NotImplementedError(str(func))


def packed_parts(tensor: Any) -> dict[str, torch.Tensor]:
    return {"codes": tensor.codes, "scale": tensor.scale}


def make_packed(parameter: torch.Tensor, stored: Any) -> Any:
    is_ours = set(stored.parts) == {"codes", "scale"}
    return Packed.zeros(parameter.shape) if is_ours else None


class Packing(torch.optim.Optimizer):
    """Adds up the gradients in codes, block by block."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            local, grad = (one.to_local() for one in (parameter, parameter.grad))
            state = self.state[parameter]
            if not state:
                state["moment"] = sharded_like(parameter, Packed.zeros(local.shape))
            moment = state["moment"]._local_tensor
            blocks = grad.reshape(-1, BLOCK)
            moment.scale.mul_(0.9).add_(blocks.abs().amax(1))
            moment.codes.add_(
                (blocks / moment.scale[:, None] * 20)
                .to(torch.int8)
                .view(torch.uint8)
                .view(local.shape)
            )
            local.sub_(moment.codes.float() * 0.01)


def sharded_like(parameter: Any, local: torch.Tensor) -> Any:
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def sharded_state(seed: int, world: int, rows: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(rows, 8, generator=generator)
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    return {"model": model, "optimizer": Packing(model.parameters())}


def learn(state: dict[str, Any], seed: int) -> None:
    w = state["model"].w
    gradient = torch.randn(w.shape, generator=torch.Generator().manual_seed(seed))
    w.grad = distribute_tensor(gradient, w.device_mesh, w.placements)
    state["optimizer"].step()


def _sharded_save(rank: int, world: int, root: str) -> list[float]:
    holdfast.register_tensor(Packed, packed_parts, make=make_packed)
    state = sharded_state(1, world)
    with holdfast.Checkpointer(root, state) as checkpointer:
        checkpointer.restore()
        for step in range(3):
            learn(state, step)
            checkpointer.save(step, durable=True).wait_durable(timeout_s=60)
    learn(state, 3)
    found: list[float] = state["model"].w.full_tensor().flatten().tolist()
    return found


def _sharded_load(rank: int, world: int, root: str) -> list[float]:
    holdfast.register_tensor(Packed, packed_parts, make=make_packed)
    state = sharded_state(2, world)
    holdfast.load(root, state)
    learn(state, 3)
    found: list[float] = state["model"].w.full_tensor().flatten().tolist()
    return found


def test_a_dtensor_of_a_registered_subclass_comes_back_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    (whole, _) = run_ranks(2, _sharded_save, str(tmp_path))
    for world in (2, 1):
        for found in run_ranks(world, _sharded_load, str(tmp_path)):
            assert found == whole
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.leaves["optimizer.w.moment.codes"].shape == (8, 8)
        assert checkpoint.leaves["optimizer.w.moment.scale"].shape == (16,)


def _replaced(rank: int, world: int, root: str) -> list[bool]:
    holdfast.register_tensor(Packed, packed_parts, make=make_packed)
    state = sharded_state(1, world)
    with holdfast.Checkpointer(root, state) as checkpointer:
        checkpointer.restore()
        learn(state, 0)
        checkpointer.save(0, durable=True).wait_durable(timeout_s=60)
        (moment,) = (kept["moment"]._local_tensor for kept in state["optimizer"].state.values())
        moment.codes.data = torch.full_like(moment.codes, 7)
        checkpointer.save(1, durable=True).wait_durable(timeout_s=60)
    with holdfast.open(root) as checkpoint:
        stored = checkpoint.read("optimizer.w.moment.codes").flatten().tolist()
    moment.codes.data = torch.full_like(moment.codes, 9)
    holdfast.load(root, state)
    return [set(stored) == {7}, set(moment.codes.flatten().tolist()) == {7}]


def test_a_part_in_a_dtensor_with_other_memory_is_stored_and_filled_there(tmp_path: Path) -> None:
    assert run_ranks(1, _replaced, str(tmp_path)) == [[True, True]]


def _refused(rank: int, world: int, root: str) -> list[str]:
    found: list[str] = []
    for parts, rows in ((None, 8), (packed_parts, 8), (packed_parts, 5), (lambda t: vars(t), 8)):
        subclasses._registered.pop(Packed, None)
        if parts is not None:
            holdfast.register_tensor(Packed, parts)
        state = sharded_state(1, world, rows)
        learn(state, 0)
        try:
            holdfast.save(root, state, step=len(found))
            found.append("saved")
        except UnsupportedState as error:
            found.append(str(error))
    return found


def test_a_dtensor_whose_parts_are_not_known_by_element_is_refused(tmp_path: Path) -> None:
    for unknown, known, uneven, table in run_ranks(2, _refused, str(tmp_path)):
        assert "a tensor subclass whose inner tensors" in unknown
        assert "holdfast.register_tensor" in unknown
        assert known == "saved"
        assert "optimizer.w.moment.scale: this rank holds a part of shape" in uneven
        assert "optimizer.w.moment.table is of shape [3] in a DTensor of Packed" in table
