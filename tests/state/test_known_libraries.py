"""Types of other libraries are registered when they are loaded: stand-ins of their structure."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import UnsupportedState
from holdfast.format import native_types
from holdfast.state import known_libraries, subclasses
from support.runs.launch import run_ranks


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    tensors, classes = dict(subclasses._registered), dict(native_types._classes)
    yield
    for registry, there in (
        (subclasses._registered, tensors),
        (native_types._classes, classes),
    ):
        registry.clear()
        registry.update(there)  # type: ignore[arg-type]


class Packed(torch.Tensor):
    """As torchao's OptimState8bit: codes like the tensor, a scale for each block, a table."""

    per_code, code, has_sign = 1, torch.uint8, True

    @staticmethod
    def __new__(cls, shape: Any, *_: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, shape: Any, codes: Any, scale: Any, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed
        self.qmap = torch.linspace(-1 if signed else 0, 1, 256)

    @classmethod
    def zeros(
        cls,
        shape: Any,
        signed: bool = True,
        block_size: int = 256,
        device: Any = None,
        dtype: Any = None,
    ) -> Any:
        count = math.prod(shape)
        form = shape if cls.per_code == 1 else count // cls.per_code
        codes = torch.zeros(form, dtype=torch.uint8).view(cls.code)
        return cls(shape, codes, torch.zeros(count // block_size), signed)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(func))


class Packed4(Packed):
    per_code = 2


class Packed8(Packed):
    code = torch.float8_e4m3fn

    @classmethod
    def zeros(  # type: ignore[override]
        cls, shape: Any, block_size: int = 256, device: Any = None, dtype: Any = None
    ) -> Any:
        return super().zeros(shape, True, block_size)


PACKED = {
    "8 bits": ("torchao.optim.subclass_8bit", "OptimState8bit", Packed),
    "4 bits": ("torchao.optim.subclass_4bit", "OptimState4bit", Packed4),
    "fp8": ("torchao.optim.subclass_fp8", "OptimStateFp8", Packed8),
}
BLOCK = 8


class PackedAdam(torch.optim.Optimizer):
    """Moments in codes. What it computes is of no use, and depends on every bit of them."""

    def __init__(self, parameters: Any, kind: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kind = kind

    def new(self, parameter: torch.Tensor, *, signed: bool) -> Any:
        sign = () if self.kind is Packed8 else (signed,)
        return self.kind.zeros(tuple(parameter.shape), *sign, BLOCK)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self.new(parameter, signed=True)
                state["exp_avg_sq"] = self.new(parameter, signed=False)
            state["step"] += 1
            for name in ("exp_avg", "exp_avg_sq"):
                moment = state[name]
                blocks = parameter.grad.view(-1, BLOCK)
                moment.scale.mul_(0.9).add_(blocks.abs().amax(1))
                raw = moment.codes.view(torch.uint8)
                raw.view(-1).add_(
                    (blocks.view(-1)[: raw.numel()] * 50).to(torch.int8).view(torch.uint8)
                )
                seen = moment.qmap[raw.view(-1).long()].sum() * moment.scale.sum() * 1e-4
                parameter.sub_(seen * (1 if moment.signed else -1))


def load(monkeypatch: pytest.MonkeyPatch, module: str, **content: Any) -> None:
    """As if the program had imported a library that has this module."""
    made = ModuleType(module)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, module, made)


def trained(state: dict[str, Any], steps: range) -> torch.Tensor:
    model, optimizer = state["model"], state["optimizer"]
    for step in steps:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def goes_on(root: Path, make: Callable[[nn.Module], Any]) -> None:
    """A run from a checkpoint, with everything made anew, comes to what an unbroken one does."""

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(16, 16)
        return {"model": model, "optimizer": make(model)}

    saved, back = build(1), build(2)
    trained(saved, range(3))
    holdfast.save(root, saved)
    whole = trained(saved, range(3, 6))
    holdfast.load(root, back)
    assert torch.equal(trained(back, range(3, 6)), whole)


@pytest.mark.parametrize("which", PACKED)
def test_packed_moments_go_on_in_an_optimizer_made_anew(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, kind = PACKED[which]
    with pytest.raises(UnsupportedState, match=r"holdfast\.register_tensor"):
        goes_on(tmp_path / "before", lambda model: PackedAdam(model.parameters(), kind))
    for module, name, kind in PACKED.values():
        load(monkeypatch, module, **{name: kind})
    goes_on(tmp_path / "after", lambda model: PackedAdam(model.parameters(), PACKED[which][2]))
    with holdfast.open(tmp_path / "after") as checkpoint:
        moments = {leaf for leaf in checkpoint.leaves if ".exp_avg." in leaf}
    assert moments == {
        f"optimizer.{p}.exp_avg.{part}" for p in ("weight", "bias") for part in ("codes", "scale")
    }


@pytest.mark.parametrize("has_sign", [True, False])
def test_codes_of_a_moment_of_another_name_are_made_only_where_they_need_no_sign(
    has_sign: bool,
) -> None:
    kind, code = (Packed, torch.uint8) if has_sign else (Packed8, torch.float8_e4m3fn)
    make = known_libraries._make_packed(kind, 1, code, has_sign)
    parts = {"codes": (code, (16,)), "scale": (torch.float32, (2,))}
    for name, is_made in (("exp_avg", True), ("exp_inf", not has_sign)):
        made = make(torch.zeros(16), subclasses.StoredTensor(name, parts))
        assert (made is not None) is is_made, name


class CastWeight(torch.Tensor):
    """As torchao's weight that is cast when it is gathered: a tensor, and a scale now and then."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, scale: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad
        )

    def __init__(self, tensor: torch.Tensor, scale: Any = None) -> None:
        self._tensor, self._precomputed_scale = tensor, scale

    def __tensor_flatten__(self) -> Any:
        return ["_tensor", *(["_precomputed_scale"] if self._precomputed_scale else [])], {}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._tensor)
        args = [one._tensor if isinstance(one, cls) else one for one in args]
        return func(*args, **(kwargs or {}))


def test_a_weight_that_is_cast_is_stored_under_its_own_name_and_read_as_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(monkeypatch, "torchao.float8.fsdp_utils", WeightWithDynamicFloat8CastTensor=CastWeight)
    cast, plain = nn.Module(), nn.Module()
    cast.weight = nn.Parameter(CastWeight(torch.arange(6.0).view(2, 3)))
    plain.weight = nn.Parameter(torch.zeros(2, 3))
    holdfast.save(tmp_path, {"model": cast})
    with holdfast.open(tmp_path) as checkpoint:
        assert set(checkpoint.leaves) == {"model.weight"}
    holdfast.load(tmp_path, {"model": plain})
    assert plain.weight.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    with torch.no_grad():
        plain.weight.mul_(2)
    holdfast.save(tmp_path, {"model": plain}, step=1)
    weight: Any = cast.weight
    holdfast.load(tmp_path, {"model": cast})
    assert weight._tensor.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


class Partitioner:
    def __init__(self, shape: torch.Size) -> None:
        self.shape, self.splits = shape, [(0, [8])]


class PreConditioner:
    """As pytorch_optimizer's: settings, sizes, another object, and matrices."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.original_shape, self.transformed_shape = parameter.shape, list(parameter.shape)
        self.partitioner = Partitioner(parameter.shape)
        self.statistics = [torch.eye(parameter.shape[0])]
        self.ortho: tuple[torch.Tensor, ...] | None = None

    def applied(self, grad: torch.Tensor) -> torch.Tensor:
        assert type(self.original_shape) is type(self.partitioner.shape) is torch.Size
        self.statistics[0].mul_(0.9).add_(grad.reshape(grad.shape[0], -1).abs().sum(1))
        self.ortho = (self.statistics[0].sum(0), grad.clone())
        return (self.statistics[0] @ grad).view(self.original_shape) * 0.1


class Preconditioned(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["pre_conditioner"] = PreConditioner(parameter)
            parameter.sub_(state["pre_conditioner"].applied(parameter.grad), alpha=0.01)


UTILS = "pytorch_optimizer.optimizer.utils"


def load_pytorch_optimizer(patch: pytest.MonkeyPatch) -> None:
    load(patch, f"{UTILS}.preconditioner", PreConditioner=PreConditioner)
    load(patch, f"{UTILS}.partition", BlockPartitioner=Partitioner)


def test_preconditioners_go_on_in_an_optimizer_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedState, match=r"holdfast\.register_value"):
        goes_on(tmp_path / "before", lambda model: Preconditioned(model.parameters()))
    load_pytorch_optimizer(monkeypatch)
    goes_on(tmp_path / "after", lambda model: Preconditioned(model.parameters()))


def test_what_the_program_registered_itself_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.register_value(
        PreConditioner, vars, lambda _: PreConditioner(torch.zeros(1)), name="mine"
    )
    holdfast.register_tensor(Packed, lambda tensor: {"all": tensor.codes})
    load_pytorch_optimizer(monkeypatch)
    load(monkeypatch, "torchao.optim.subclass_8bit", OptimState8bit=Packed)
    known_libraries.register_loaded()
    known = native_types.registered_class(PreConditioner)
    assert known is not None
    assert known.name == "mine"
    assert set(subclasses._registered[Packed].parts(Packed.zeros((8,), True, 8))) == {"all"}
    assert native_types.registered_class(Partitioner) is not None


def test_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    known_libraries.register_loaded()
    assert set(sys.modules) == before


def _plain_beside_shards(rank: int, world: int, root: str) -> str:
    from torch.distributed.fsdp import fully_shard

    class Keeping(torch.optim.SGD):
        """Keeps what it computed of its shard in an object, as a projector does."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["kept"] = PreConditioner(parameter.to_local())

    with pytest.MonkeyPatch.context() as patch:
        load_pytorch_optimizer(patch)
        model = nn.Linear(16, 16, bias=False)
        fully_shard(model)
        optimizer = Keeping(model.parameters(), lr=0.1)
        optimizer.step()
        try:
            holdfast.save(root, {"model": model, "optimizer": optimizer})
        except UnsupportedState as error:
            return str(error)
    return "saved"


def test_plain_tensors_in_objects_beside_a_sharded_parameter_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, _plain_beside_shards, str(tmp_path)):
        assert "optimizer.weight.kept.statistics.0 is a plain tensor of 64 elements" in message
