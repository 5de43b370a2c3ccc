"""A save after the first notices every kind of change, and makes nothing anew without one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast.capture.copy_plan import CopyPlan, plan_copies
from holdfast.capture.volatile_copies import stage
from holdfast.format.values import from_bytes
from holdfast.geometry.layout import merge, table_from_json
from holdfast.state import describe as describe_module
from holdfast.state import subclasses
from holdfast.state.describe import Describer, Description
from support.models.state_changes import CHANGES, Net, State, build, step
from support.runs.launch import run_ranks

INSERTED = ("_orig_mod.", "module.")


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, list[int], bytes]:
    """What a tensor is, bit for bit."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    flat = local.detach().resolve_conj().resolve_neg().clone().contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return tensor.dtype, list(tensor.shape), data


class Saves:
    """What one Describer's saves store, with the plan of copies kept as a Saver keeps it."""

    def __init__(self, state: State, world: int = 1) -> None:
        self.describer = Describer(state, 0, world)
        self.plan: CopyPlan | None = None
        self._planned_for: object = None
        self.walks = 0

    def save(self) -> tuple[Description, dict[str, bytes]]:
        found = self.describer.describe()
        stage(found.bindings.volatile)
        if self._planned_for is not found.bindings:
            self.walks += 1
            layout = merge([table_from_json(found.table)])
            self.plan, self._planned_for = plan_copies(layout, 0, found.bindings), found.bindings
        assert self.plan is not None
        return found, {copy.leaf: raw(copy.source)[2] for copy in self.plan.copies}


def truth(state: State) -> dict[str, bytes]:
    """The tensors of modules and optimizers by every name of theirs, as torch tells them."""
    found = {}
    names: dict[int, str] = {}
    for key in [key for key, item in state.items() if isinstance(item, nn.Module)]:
        for name, tensor in state[key].state_dict(keep_vars=True).items():
            for inserted in INSERTED:
                name = name.replace(inserted, "")
            if isinstance(tensor, torch.Tensor):
                found[f"{key}.{name}"] = raw(tensor)[2]
                if isinstance(tensor, nn.Parameter):
                    names.setdefault(id(tensor), name)
    for parameter, kept in state["optimizer"].state.items():
        for kind, tensor in kept.items() if isinstance(kept, dict) else ():
            if isinstance(tensor, torch.Tensor):
                found[f"optimizer.{names[id(parameter)]}.{kind}"] = raw(tensor)[2]
    return found


def facts(found: Description) -> list[Any]:
    made_anew = "holder.history"
    return [
        (b.name, b.lazy, b.is_hooked, b.entry, b.name == made_anew or b.tensor.data_ptr())
        for b in found.bindings
    ]


def check(saves: Saves, state: State) -> None:
    """The next save stores what is there now, and what one that never saw the state before does."""
    state["holder"].count += 1
    try:
        expected, expected_bytes = Saves(state, saves.describer.world).save()
    except holdfast.HoldfastError as error:
        with pytest.raises(type(error)):
            saves.save()
        return
    found, stored = saves.save()
    assert facts(found) == facts(expected)
    assert (found.table, found.table_hash) == (expected.table, expected.table_hash)
    assert found.values == expected.values
    assert stored == expected_bytes
    aliases = from_bytes(found.values, "here").get("aliases", {})
    for name, data in truth(state).items():
        assert stored.get(aliases.get(name, name), b"") == data, name


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_the_next_save_stores(name: str, world: int) -> None:
    state = build()
    saves = Saves(state, world)
    for _ in range(2):
        check(saves, state)
    for _ in range(2):
        CHANGES[name](state)
        check(saves, state)
        check(saves, state)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(st.sampled_from(sorted(CHANGES)), max_size=3), max_size=12), st.data())
def test_any_sequence_of_changes_is_stored_as_if_the_state_was_never_seen_before(
    rounds: list[list[str]], data: st.DataObject
) -> None:
    state = build()
    saves = Saves(state, data.draw(st.sampled_from([1, 2])))
    for names in rounds:
        for name in names:
            with suppress(Exception):  # it needs what an earlier one took away
                CHANGES[name](state)
        check(saves, state)


def test_every_change_in_one_run_is_found_in_storage(tmp_path: Path) -> None:
    """The same through everything: describing, staging, copying by a plan that is kept."""
    state = build()
    with holdfast.Checkpointer(tmp_path, state, memory=None, storage=None) as checkpointer:
        for number, name in enumerate(CHANGES):
            with suppress(Exception):
                CHANGES[name](state)
            expected = truth(state)
            checkpointer.save(number, durable=True).wait_durable(60)
            with holdfast.open(tmp_path, number) as stored:
                for leaf, data in expected.items():
                    there = stored.read(stored.aliases.get(leaf, leaf))
                    assert raw(there)[2] == data, (name, leaf)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often a state was walked whole."""
    made: list[str] = []
    real: Any = vars(describe_module)["Walk"]

    def walk(*arguments: Any, **options: Any) -> Any:
        made.append("walk")
        return real(*arguments, **options)

    monkeypatch.setattr(describe_module, "Walk", walk)
    return made


UNSEEN = [
    "nothing",
    "optimizer_step",
    "option_changed",
    "extra_state_changed",
    "number_changed",
    "value_tensor_written",
    "value_tensor_anew",
    "value_tensor_is_a_parameter",
    "state_number",
]


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_read_anyway_makes_no_walk(name: str, walks: list[str]) -> None:
    state = build()
    CHANGES[name](state)  # a number that comes to be is one; one that grows is none
    saves = Saves(state)
    for _ in range(4):
        check(saves, state)
        CHANGES[name](state)
    assert len(walks) == 1 + 4  # the others are those of the truth
    assert saves.walks == 1


def test_a_value_tensor_made_anew_costs_itself_alone(walks: list[str]) -> None:
    state = build()
    saves = Saves(state)
    first, _ = saves.save()
    for _ in range(3):
        state["plain"]["x"] = torch.rand(3)
        found, stored = saves.save()
        assert stored["plain.x"] == raw(state["plain"]["x"])[2]
        assert found.bindings is first.bindings and found.table is first.table
    assert len(walks) == 1


def test_unfreezing_makes_a_walk(walks: list[str]) -> None:
    state = build()
    saves = Saves(state)
    for learns in (False, False, True, True, False):
        state["model"].head.weight.requires_grad_(learns)
        saves.save()
    assert len(walks) == 3


def test_a_default_device_hides_nothing(walks: list[str]) -> None:
    state = build()
    saves = Saves(state)
    with torch.device("cpu"):
        for name in ("nothing", "data_transposed", "nothing"):
            CHANGES[name](state)
            check(saves, state)
    assert len(walks) == 2 + 3


def test_a_save_makes_no_thousands_of_objects_for_the_collector() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(500))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    step(state)
    describer = Describer(state, 0)
    describer.describe()
    gc.collect()
    gc.disable()  # counted all the same
    try:
        before = gc.get_count()[0]
        held = [describer.describe() for _ in range(5)]
        made = gc.get_count()[0] - before
    finally:
        gc.enable()
    assert len(held) == 5
    assert made < 700  # at which the collector would begin


# ── tensors of other kinds ───────────────────────────────────────────────────────────────────


class Pair(torch.Tensor):
    """Two tensors in the place of one."""

    @staticmethod
    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.one, self.other = one, other

    def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


class Same(torch.Tensor):
    """Its own elements."""


@pytest.fixture
def _registry() -> Iterator[None]:
    there = dict(subclasses._registered)
    yield
    subclasses._registered.clear()
    subclasses._registered.update(there)


def _replace(pair: Any) -> None:
    pair.one = torch.rand(3)


def _move(pair: Any) -> None:
    pair.other.data = pair.other.data.clone() + 1


def _write(pair: Any) -> None:
    pair.one.add_(1)


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize("change", [_replace, _move, _write])
def test_parts_of_a_registered_subclass_are_looked_at(change: Callable[[Any], None]) -> None:
    holdfast.register_tensor(Pair, partial(_some, ["one", "other"]))
    pair = Pair(torch.ones(3), torch.zeros(3))
    model = nn.Module()
    model.register_buffer("pair", pair)
    saves = Saves({"model": model})
    for _ in range(3):
        _, stored = saves.save()
        assert stored == {
            "model.pair.one": raw(pair.one)[2],
            "model.pair.other": raw(pair.other)[2],
        }
        change(pair)


def _some(names: list[str], pair: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(pair, name) for name in names}


@pytest.mark.usefixtures("_registry")
def test_a_subclass_registered_otherwise_is_stored_otherwise() -> None:
    model = nn.Module()
    model.register_buffer("pair", Pair(torch.ones(3), torch.zeros(3)))
    saves = Saves({"model": model})
    for names in (["one", "other"], ["other"]):
        holdfast.register_tensor(Pair, partial(_some, names))
        assert saves.save()[1].keys() == {f"model.pair.{name}" for name in names}


@pytest.mark.usefixtures("_registry")
def test_a_kind_of_tensor_registered_late_is_stored_by_its_parts() -> None:
    saves = Saves({"model": nn.Linear(2, 2, bias=False)})
    assert saves.save()[1].keys() == {"model.weight"}
    holdfast.register_tensor(nn.Parameter, lambda tensor: {"value": tensor.detach()})
    assert saves.save()[1].keys() == {"model.weight.value"}


@pytest.mark.usefixtures("_registry")
def test_a_subclass_of_its_own_elements_makes_no_walk(walks: list[str]) -> None:
    holdfast.register_tensor(Same)
    model = nn.Module()
    model.same = torch.rand(3).as_subclass(Same)
    model.register_buffer("held", model.same)
    saves = Saves({"model": model})
    for _ in range(3):
        with torch.no_grad():
            model.same.add_(1)
        assert saves.save()[1] == {"model.held": raw(model.same.as_subclass(torch.Tensor))[2]}
    assert len(walks) == 1
    model.same.data = torch.rand(3)
    assert saves.save()[1] == {"model.held": raw(model.same.as_subclass(torch.Tensor))[2]}


def sharded(rank: int, world: int) -> list[str]:
    """What differs from the truth after each change of DTensors; walks made without one."""
    mesh = init_device_mesh("cpu", (world,))
    model: Any = nn.Module()
    model.spread = nn.Parameter(DTensor.from_local(torch.rand(2, 2), mesh, [Shard(0)]))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}

    def local_replaced() -> None:
        model.spread._local_tensor = torch.rand(2, 2)

    def local_moved() -> None:
        model.spread._local_tensor.data = torch.rand(2, 2)

    def placed_otherwise() -> None:
        other = DTensor.from_local(model.spread._local_tensor, mesh, [Replicate()])
        model.spread._spec = other._spec

    describer = Describer(state, rank, world)
    describer.describe()
    wrong = []
    changes: list[Callable[[], None]] = [local_replaced, local_moved, placed_otherwise]
    for change in changes:
        with torch.no_grad():
            change()
        before = describer.describe()
        if describer.describe().bindings is not before.bindings:
            wrong.append("walked for nothing")
        fresh = Describer(state, rank, world).describe()
        pairs = zip(before.bindings, fresh.bindings, strict=True)
        same = all(one.local.data_ptr() == other.local.data_ptr() for one, other in pairs)
        if before.table != fresh.table or not same:
            wrong.append(change.__name__)
    return wrong


def fully_sharded(rank: int, world: int) -> list[str]:
    """The same of FSDP2: applied between two saves, and left gathered by a forward."""
    model: Any = Net().head
    state: State = {"model": model}
    describer = Describer(state, rank, world)
    describer.describe()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    state["optimizer"] = torch.optim.AdamW(model.parameters())
    wrong = []
    for _ in range(3):
        found = describer.describe()
        if found.table != Describer(state, rank, world).describe().table:
            wrong.append("fully_shard")
        if not all(isinstance(binding.tensor, DTensor) for binding in found.bindings):
            wrong.append("gathered")
        model(torch.rand(1, 4))
    return wrong


def test_sharded_tensors_are_looked_at() -> None:
    assert run_ranks(1, sharded) == [[]]
    assert run_ranks(2, fully_sharded) == [[], []]
