"""Torch's documented uses of DCP, first with its own files, then with one argument changed."""

from __future__ import annotations

import dataclasses
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from holdfast.errors import HoldfastError
from support.checkpoints.dcp_ways import WAYS, Way, differs, quietly


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    return Way(request.param, tmp_path)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(self.first(x)))


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 3e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01 * (seed + 1), betas=(0.8, 0.9))
    model(torch.randn(9, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def emptied(value: Any) -> Any:
    """A state dict of the same form with nothing of the same content."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 1)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [emptied(item) for item in value]
    return None


def test_tensors_of_every_kind_come_back_bit_for_bit(way: Way) -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    tensors = {f"t{n}": torch.arange(12).reshape(3, 4).to(dtype) for n, dtype in enumerate(dtypes)}
    raw = torch.arange(16, dtype=torch.uint8)
    tensors |= {
        "float8": raw.view(torch.float8_e4m3fn),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "none": torch.empty(0, 3),
        "number": torch.tensor(7),
        "turned": torch.arange(24.0).reshape(4, 6).T,
        "part": torch.arange(100.0)[3:90:7],
        "conjugate": torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj(),
        "large": torch.arange(3 << 19, dtype=torch.float32).reshape(3, -1),
    }
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    way.save(tensors, 1)
    found = way.load({k: torch.zeros_like(t).contiguous() for k, t in expected.items()}, 1)
    expected["conjugate"] = expected["conjugate"].resolve_conj()
    assert differs(found, expected) == []


def test_nested_dictionaries_lists_and_values_come_back(way: Way) -> None:
    state = {
        "step": 7,
        "rate": 1e-3,
        "deep": {"a": {"b": [1, {"c": torch.ones(3), "d": "text"}], "none": None}, "n": 2**70},
        "list": [torch.zeros(2), torch.ones(2)],
        "plain": [1, 2.5, "x", True],
        "tuple": (1, ("y", b"bytes"), torch.arange(4)),
        "numbers": {"1": 2, "x.y": {"z": float("inf")}},
        "sets": {1, 2},
        "ordered": OrderedDict(b=1, a=torch.ones(1)),
        "dtype": torch.bfloat16,
    }
    way.save(state, 3)
    found = way.load(emptied(state), 3)
    assert differs(found, {**state, "ordered": dict(state["ordered"])}) == []  # type: ignore[call-overload]


@pytest.mark.parametrize("form", ["nested", "flat", "numbered"])
def test_a_model_and_its_optimizer_come_back_in_each_form(way: Way, form: str) -> None:
    def state_of(seed: int) -> tuple[dict[str, Any], nn.Module, torch.optim.Optimizer]:
        model, optimizer = trained(seed)
        if form == "numbered":
            found = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            return found, model, optimizer
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        weights, moments = get_state_dict(model, optimizer, options=options)
        return {"model": weights, "optimizer": moments}, model, optimizer

    state, model, optimizer = state_of(0)
    way.save(state, 1)
    found, other, its_optimizer = state_of(1)
    way.load(found, 1)
    assert differs(found, state) == []
    if form != "numbered":
        set_state_dict(
            other,
            its_optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=form == "flat"),
        )
        assert differs(other.state_dict(), model.state_dict()) == []
        assert differs(its_optimizer.state_dict(), optimizer.state_dict()) == []


class App:
    """The ``AppState`` of torch's tutorial."""

    def __init__(self, seed: int) -> None:
        self.model, self.optimizer = trained(seed)

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def test_stateful_objects_are_saved_and_loaded(way: Way) -> None:
    one, other = App(0), App(1)
    way.save({"app": one, "step": 3}, 1)
    found = way.load({"app": other, "step": 0}, 1)
    assert differs(other.model.state_dict(), one.model.state_dict()) == []
    assert differs(other.optimizer.state_dict(), one.optimizer.state_dict()) == []
    assert found["step"] == 3


def test_a_part_is_loaded_and_the_rest_stays(way: Way) -> None:
    way.save({"a": torch.ones(4), "b": {"c": torch.arange(4), "d": 1}}, 1)
    assert differs(way.load({"b": {"d": 0}}, 1), {"b": {"d": 1}}) == []
    some = {"a": torch.zeros(4), "new": torch.full((2,), 5.0)}
    way.load(some, 1, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert differs(some, {"a": torch.ones(4), "new": torch.full((2,), 5.0)}) == []


def test_what_is_not_there_and_what_has_another_shape_is_refused(way: Way) -> None:
    way.save({"a": torch.ones(4), "v": 1}, 1)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: b"):
        way.load({"b": torch.ones(4)}, 1)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        way.load({"a": torch.ones(5)}, 1)


def test_a_tensor_of_another_type_is_converted(way: Way) -> None:
    way.save({"a": torch.tensor([1.5, 2.25, 1e-3])}, 1)
    found = way.load({"a": torch.zeros(3, dtype=torch.bfloat16)}, 1)
    assert differs(found, {"a": torch.tensor([1.5, 2.25, 1e-3]).bfloat16()}) == []


def test_a_step_saved_again_is_the_later_one(way: Way) -> None:
    way.save({"a": torch.ones(4), "b": torch.ones(2)}, 1)
    way.save({"a": torch.full((4,), 2.0), "b": torch.ones(2)}, 1)
    assert differs(way.load({"a": torch.zeros(4)}, 1), {"a": torch.full((4,), 2.0)}) == []


def test_several_saves_in_a_row_are_each_their_own(way: Way) -> None:
    for step in range(4):
        way.save({"a": torch.full((3,), float(step)), "step": step}, step)
    for step in (2, 0, 3, 1):
        found = way.load({"a": torch.zeros(3), "step": -1}, step)
        assert differs(found, {"a": torch.full((3,), float(step)), "step": step}) == []


class Renaming(DefaultSavePlanner):
    """From torch's documentation: every key gets a prefix."""

    def set_up_planner(self, state_dict: Any, *args: Any, **options: Any) -> None:
        super().set_up_planner({f"foo_{k}": v for k, v in state_dict.items()}, *args, **options)


class Halving(DefaultSavePlanner):
    """From torch's documentation: tensors are written in another type."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        found: Any = super().resolve_data(write_item)
        is_value = write_item.type is WriteItemType.BYTE_IO
        return found if is_value else found.to(torch.float16)


class Counting(DefaultSavePlanner):
    """Changes values on their way."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, int):
            data = io.BytesIO()
            torch.save(object + 1, data)
            return data
        return super().transform_object(write_item, object)


def test_planners_of_ones_own_decide_what_is_saved(way: Way) -> None:
    state = {"a": torch.tensor([1.0, 2.5]), "n": 3}
    way.save(dict(state), 1, planner=Renaming())
    found = way.load({"foo_a": torch.zeros(2), "foo_n": 0}, 1)
    assert differs(found, {"foo_a": state["a"], "foo_n": 3}) == []
    way.save(dict(state), 2, planner=Halving())
    found = way.load({"a": torch.zeros(2, dtype=torch.float16), "n": 0}, 2)
    assert differs(found, {"a": torch.tensor([1.0, 2.5]).half(), "n": 3}) == []
    way.save(dict(state), 3, planner=Counting())
    assert way.load({"n": 0}, 3) == {"n": 4}
    flat = DefaultSavePlanner(flatten_state_dict=False)
    way.save({"a.b": state["a"], "n": {"deep": 1}}, 4, planner=flat)
    found = {"a.b": torch.zeros(2), "n": None}
    way.load(found, 4, planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert differs(found["a.b"], state["a"]) == []  # torch leaves values out of this form


class Doubling(DefaultLoadPlanner):
    """Loads tensors into memory of its own, and hands them on."""

    def resolve_tensor(self, read_item: Any) -> Any:
        self.room = torch.zeros_like(super().resolve_tensor(read_item))
        return self.room

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(2 * tensor)


def test_planners_of_ones_own_decide_where_it_is_loaded(way: Way) -> None:
    way.save({"a": torch.tensor([1.0, 2.5])}, 1)
    found = way.load({"a": torch.zeros(2)}, 1, planner=Doubling())
    assert differs(found, {"a": torch.tensor([2.0, 5.0])}) == []


def loaded_whole(way: Way, step: int, keys: set[str] | None = None) -> dict[str, Any]:
    """What ``dcp_to_torch_save`` and its like load."""
    found: dict[str, Any] = {}
    planner, reader = _EmptyStateDictLoadPlanner(keys=keys), way.reader(step)
    quietly(_load_state_dict, found, storage_reader=reader, planner=planner, no_dist=True)
    return found


def test_a_whole_state_dict_is_loaded_without_knowing_it(way: Way) -> None:
    state = {"model": {"w.x": torch.ones(2, 3), "b": torch.zeros(3)}, "n": {"m": [1, 2]}, "s": 4}
    way.save(state, 1)
    assert differs(loaded_whole(way, 1), state) == []
    assert differs(loaded_whole(way, 1, {"n"}), {"n": state["n"]}) == []


def test_tensors_at_the_top_stay_there_and_are_the_model(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    weights, moments = get_state_dict(model, optimizer)
    for name in WAYS:
        way = Way(name, tmp_path / name)
        way.save({**weights, "optimizer": moments, "train": {"step": 3}}, 1)
        expected = {**weights, "optimizer": moments, "train": {"step": 3}}
        assert differs(loaded_whole(way, 1), expected) == []
    other, its_optimizer = trained(1)
    state = {"model": other, "optimizer": its_optimizer, "train": {"step": 0}}
    holdfast.load(tmp_path / "holdfast", state)
    assert differs(other.state_dict(), model.state_dict()) == []
    assert differs(its_optimizer.state_dict(), optimizer.state_dict()) == []
    nested = {"model": emptied(weights)}
    way.load(nested, 1)
    assert differs(nested, {"model": dict(weights)}) == []


def test_keys_that_look_like_names_below_others_stay_apart(way: Way) -> None:
    state = {
        "net": {"x.w": torch.ones(3), "x._extra_state": {"k": 2}},
        "net.x": 5,
        "model.layer": {"w": torch.zeros(2)},
        "optimizer.state": {"a": 1, "b": torch.tensor(2.0)},
    }
    way.save(state, 1)
    assert differs(way.load(emptied(state), 1), state) == []


def test_directories_that_dcp_wrote_are_read_through_the_reader_too(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "n": {"epoch": 3}}
    Way("torch", tmp_path).save(state, 4)
    other = get_state_dict(*trained(1))
    found: dict[str, Any] = {"model": other[0], "optimizer": other[1], "n": {"epoch": 0}}
    quietly(dcp.load, found, storage_reader=holdfast.dcp.Reader(tmp_path / "step-4"))
    assert differs(found, state) == []
    found["n"]["epoch"] = 0
    quietly(holdfast.dcp.load, found, checkpoint_id=tmp_path / "step-4")
    assert differs(found, state) == []


def test_metadata_describe_what_was_saved(way: Way) -> None:
    way.save({"a": torch.ones(3, 4, dtype=torch.float16), "n": {"x": 1}}, 1)
    found = way.reader(1).read_metadata()
    described = found.state_dict_metadata
    assert set(described) == {"a", "n.x"} and found.planner_data["n.x"] == ("n", "x")
    assert described["a"].size == (3, 4) and described["a"].properties.dtype is torch.float16
    assert type(described["n.x"]).__name__ == "BytesStorageMetadata"


def test_a_save_in_the_background_copies_before_it_returns(way: Way) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = {"a": torch.arange(1000.0), "n": 1}
        expected = {"a": state["a"].clone(), "n": 1}  # type: ignore[attr-defined]
        future = quietly(dcp.async_save, state, storage_writer=way.writer(1))
        state["a"].zero_()  # type: ignore[attr-defined]
        future.result()
        assert differs(way.load({"a": torch.zeros(1000), "n": 0}, 1), expected) == []
    finally:
        dist.destroy_process_group()


# ── what only Holdfast promises ──────────────────────────────────────────────────────────────


@dataclasses.dataclass
class Strange:
    x: int = 1


def test_values_that_cannot_be_inert_are_refused_by_name_and_nothing_is_stored(
    tmp_path: Path,
) -> None:
    way = Way("holdfast", tmp_path)
    for bad in (Strange(), lambda: 0, {"deep": Strange()}):
        with pytest.raises(CheckpointException, match=r"UnsupportedState.*args|args.*cannot"):
            way.save({"w": torch.ones(2), "args": bad}, 1)
    with pytest.raises(HoldfastError):
        holdfast.open(tmp_path)


def test_a_checkpoint_of_a_checkpointer_is_read_in_each_form(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    state = {"model": model, "optimizer": optimizer, "step": 5, "notes": {"a": [1, (2, "x")]}}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        checkpointer.save(5, durable=True).wait_durable(60)
    way = Way("holdfast", tmp_path)
    rest = {"step": 5, "notes": {"a": [1, (2, "x")]}}
    for options in (StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)):
        weights, moments = get_state_dict(model, optimizer, options=options)
        other = get_state_dict(*trained(1), options=options)
        found = way.load(
            {"model": other[0], "optimizer": other[1], "step": 0, "notes": {"a": 0}}, 5
        )
        assert differs(found, {"model": weights, "optimizer": moments, **rest}) == []
        called = way.load({"optim": get_state_dict(*trained(1), options=options)[1]}, 5)
        assert differs(called, {"optim": moments}) == []
    other_model, numbered = trained(1)
    found = way.load({"model": other_model.state_dict(), "optimizer": numbered.state_dict()}, 5)
    assert differs(found["optimizer"], optimizer.state_dict()) == []
    bare_numbered = way.load(trained(1)[1].state_dict(), 5)
    assert differs(bare_numbered, optimizer.state_dict()) == []
    bare = way.load(dict(get_state_dict(*trained(1))[1]), 5)
    assert differs(bare, dict(get_state_dict(model, optimizer)[1])) == []


@pytest.mark.parametrize("flat", [False, True])
def test_what_dcp_saves_is_restored_by_a_checkpointer(tmp_path: Path, flat: bool) -> None:
    model, optimizer = trained(0)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(model, optimizer, options=options)
    way = Way("holdfast", tmp_path)
    way.save({"model": weights, "optimizer": moments, "notes": {"epoch": 3}}, 8)
    other, its_optimizer = trained(1)
    state = {"model": other, "optimizer": its_optimizer, "notes": {"epoch": 0}}
    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 8
    assert differs(other.state_dict(), model.state_dict()) == []
    assert differs(its_optimizer.state_dict(), optimizer.state_dict()) == []
    assert state["notes"] == {"epoch": 3}


def test_older_checkpoints_are_removed_by_the_policy_given(tmp_path: Path) -> None:
    keep = holdfast.Keep(last=2)
    for step in range(5):
        writer = holdfast.dcp.Writer(tmp_path, step=step, keep=keep)
        quietly(dcp.save, {"a": torch.ones(2)}, storage_writer=writer)
    assert sorted(each.name for each in (tmp_path / "manifests").iterdir()) == [
        "4-3.json",
        "5-4.json",
    ]


@pytest.mark.promise
def test_changed_bytes_are_never_loaded(tmp_path: Path) -> None:
    way = Way("holdfast", tmp_path)
    way.save({"a": torch.arange(1e6)}, 1)
    (image,) = tmp_path.rglob("*.safetensors")
    raw = bytearray(image.read_bytes())
    raw[5000] ^= 1
    image.chmod(0o600)
    image.write_bytes(bytes(raw))
    with pytest.raises(CheckpointException, match="ChecksumMismatch"):
        way.load({"a": torch.zeros(1_000_000)}, 1)


def test_torchs_own_names_may_be_made_to_mean_these_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program does whose library imports ``save`` and ``load`` from torch by itself."""
    for name in ("save", "async_save", "load"):
        monkeypatch.setattr(dcp, name, getattr(holdfast.dcp, name))
    state = {"w": torch.ones(3), "n": 4}
    quietly(dcp.save, state, checkpoint_id=tmp_path / "root" / "step-1", no_dist=True)
    found = {"w": torch.zeros(3), "n": 0}
    quietly(dcp.load, found, checkpoint_id=tmp_path / "root" / "step-1", no_dist=True)
    assert differs(found, state) == [] and holdfast.open(tmp_path / "root").step == 1
