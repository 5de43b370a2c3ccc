"""What a restore must not take from, or leave to, something that only looks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import rules as r
from holdfast.errors import StateMismatch

State = dict[str, Any]
HEAD = ["model.head.**", "optimizer.head.**"]


def weight(value: float, dtype: torch.dtype = torch.float32, rows: int = 2) -> nn.Linear:
    model = nn.Linear(4, rows, bias=False).to(dtype)
    model.weight.data.fill_(value)
    return model


def with_master(value: float, dtype: torch.dtype, **more: nn.Module) -> State:
    """A model, and an optimizer that updates a tensor of its own, which stands for it."""
    model = weight(value, dtype)
    master = torch.full((8,), value)
    holdfast.declare(master, holdfast.FlatShard((2, 4), 0, name="weight"))
    return {**more, "model": model, "optimizer": torch.optim.SGD([master], lr=0.1)}


def master_of(state: State) -> float:
    found: float = state["optimizer"].param_groups[0]["params"][0][0].item()
    return found


def value_of(module: nn.Linear) -> float:
    return module.weight[0, 0].item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_averaged_copy_is_not_taken_for_what_the_optimizer_has(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    holdfast.save(tmp_path, with_master(3.0, dtype, ema=weight(8.0)))
    state = with_master(1.0, dtype, ema=weight(0.0))
    holdfast.load(tmp_path, state)
    assert (value_of(state["model"]), master_of(state), value_of(state["ema"])) == (3, 3, 8)


def test_a_missing_averaged_copy_is_not_filled_from_a_master(tmp_path: Path) -> None:
    holdfast.save(tmp_path, with_master(3.0, torch.bfloat16))
    state = with_master(1.0, torch.bfloat16, ema=weight(0.0))
    with pytest.raises(StateMismatch, match=r"ema\.weight: in the model, but not in the check"):
        holdfast.load(tmp_path, state)


def test_a_missing_master_is_not_filled_from_an_averaged_copy(tmp_path: Path) -> None:
    model = weight(3.0, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    holdfast.save(tmp_path, {"model": model, "ema": weight(8.0), "optimizer": optimizer})
    state = with_master(1.0, torch.bfloat16, ema=weight(0.0))
    with pytest.raises(StateMismatch, match=r"optimizer\.weight\.master: in the model, but not"):
        holdfast.load(tmp_path, state)


@pytest.mark.parametrize("only", [None, ["model.**"]])
def test_a_module_and_the_optimizers_tensor_of_its_elements_are_both_filled(
    tmp_path: Path, only: Any
) -> None:
    holdfast.save(tmp_path, with_master(3.0, torch.float32))
    with holdfast.open(tmp_path) as checkpoint:
        assert set(checkpoint.leaves) == {"model.weight"}
    state = with_master(1.0, torch.float32)
    holdfast.load(tmp_path, state, only=only)
    assert (value_of(state["model"]), master_of(state)) == (3, 3)


def grouped(*names: str, rates: dict[str, float], steps: int = 0) -> State:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for each in names for name in each.split()})
    groups = [
        {"params": [p for n in each.split() for p in model[n].parameters()], "lr": rates[each]}
        for each in names
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(steps):
        sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def rates_of(state: State) -> list[float]:
    return [group["lr"] for group in state["optimizer"].param_groups]


def test_a_group_that_was_not_saved_keeps_its_rates_in_optimizer_and_scheduler(
    tmp_path: Path,
) -> None:
    holdfast.save(tmp_path, grouped("body", rates={"body": 1.0}, steps=1))
    state = grouped("body", "head", rates={"body": 8.0, "head": 4.0})
    holdfast.load(tmp_path, state, allow_missing=HEAD)
    assert rates_of(state) == [0.5, 4.0]
    assert state["scheduler"].base_lrs == [1.0, 4.0]
    assert state["scheduler"].get_last_lr() == [0.5, 4.0]


def test_a_group_that_was_not_saved_is_not_known_by_its_place(tmp_path: Path) -> None:
    saved = grouped("a", "b", rates={"a": 1.0, "b": 1.0})
    holdfast.save(tmp_path, saved)
    state = grouped("head", "a b", rates={"head": 4.0, "a b": 8.0})
    holdfast.load(tmp_path, state, allow_missing=HEAD)
    assert rates_of(state) == [4.0, 1.0]
    assert state["scheduler"].base_lrs == [4.0, 1.0]


class Around:
    """A scheduler inside of another object."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


def test_a_scheduler_inside_of_another_object_follows_the_groups(tmp_path: Path) -> None:
    rates = {"a": 1.0, "b": 2.0}
    saved, state = grouped("a", "b", rates=rates), grouped("b", "a", rates=rates)
    for each in (saved, state):
        each["scheduler"] = Around(each["scheduler"])
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, state)
    assert rates_of(state) == [2.0, 1.0]
    assert state["scheduler"].inner.base_lrs == [2.0, 1.0]


class Rates:
    """Not torch's, and its state is a tuple."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.rates = tuple(group["lr"] for group in optimizer.param_groups)

    def state_dict(self) -> Any:
        return {"rates": self.rates}

    def load_state_dict(self, state: Any) -> None:
        self.rates = state["rates"]


def test_a_tuple_that_may_go_by_groups_is_not_guessed_at(tmp_path: Path) -> None:
    rates = {"a": 1.0, "b": 2.0}
    saved, state = grouped("a", "b", rates=rates), grouped("b", "a", rates=rates)
    for each in (saved, state):
        each["scheduler"] = Rates(each["optimizer"])
    holdfast.save(tmp_path, saved)
    with pytest.raises(StateMismatch, match="scheduler: goes by the order of the groups"):
        holdfast.load(tmp_path, state)


def test_a_list_that_may_be_missing_stays_as_it_is(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": weight(1.0)})
    buffer = holdfast.SplitList([1, 2])
    model = weight(2.0)
    holdfast.load(tmp_path, {"model": model, "buffer": buffer}, allow_missing=["buffer"])
    assert buffer == [1, 2] and value_of(model) == 1


def test_the_second_name_of_a_tied_tensor_is_enough_to_have_it(tmp_path: Path) -> None:
    def tied(value: float) -> nn.ModuleDict:
        one = weight(value)
        both = nn.ModuleDict({"one": one, "two": nn.Linear(4, 2, bias=False)})
        both["two"].weight = one.weight
        return both

    holdfast.save(tmp_path, {"model": tied(1.0)})
    again: Any = tied(2.0)
    holdfast.load(tmp_path, {"model": again}, only=["model.two.weight"])
    assert value_of(again["two"]) == 1


FUSED = r.Rules([("qk.weight", r.fused(0, (2, 1), into=("q.weight", "k.weight")))])


def test_of_a_fused_tensor_only_the_part_that_is_wanted_is_filled(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"m": nn.ModuleDict({"q": weight(1.0), "k": weight(2.0, rows=1)})})
    fused: Any = nn.ModuleDict({"qk": weight(5.0, rows=3)})
    holdfast.load(tmp_path, {"m": fused}, rules=FUSED, only=["m.q.*"])
    assert fused["qk"].weight[:, 0].tolist() == [1, 1, 5]


def test_a_part_of_a_fused_tensor_may_be_missing_only_by_its_own_name(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"m": nn.ModuleDict({"q": weight(1.0)})})
    fused: Any = nn.ModuleDict({"qk": weight(5.0, rows=3)})
    with pytest.raises(StateMismatch, match=r"made of m\.k\.weight, which is not in the check"):
        holdfast.load(tmp_path, {"m": fused}, rules=FUSED, allow_missing=["m.qk.*"])
    assert fused["qk"].weight[:, 0].tolist() == [5, 5, 5]


def test_two_tensors_that_have_nothing_of_one_leaf_are_not_tied(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"m": nn.ModuleDict({"both": weight(1.0, rows=4)})})
    apart = nn.ParameterDict({name: nn.Parameter(torch.empty(0, 4)) for name in "pq"})
    for each in apart.values():
        holdfast.declare(each, holdfast.Shard((2, 4), (2, 0)))
    of_both = [
        (name, r.part_of("both.weight", 0, at=at, whole=4)) for name, at in (("p", 0), ("q", 2))
    ]
    holdfast.load(tmp_path, {"m": apart}, rules=r.Rules(of_both))


class Slow(torch.optim.SGD):
    """Keeps what it calls a master, which is the parameter's own memory or not."""

    own = False

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            here = parameter.detach()
            self.state[parameter].setdefault("master", here if self.own else here + 1).sub_(0.5)


@pytest.mark.parametrize("own", [True, False])
def test_state_that_an_optimizer_calls_master_comes_back_beside_a_choice(
    tmp_path: Path, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "own", own)
    states: list[State] = []
    for value in (3.0, 1.0):
        model = weight(value)
        states.append({"model": model, "optimizer": Slow(model.parameters(), lr=0.1)})
    saved, state = states
    saved["optimizer"].step()
    if not own:  # else it is known by what it was tied to
        state["optimizer"].step()
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, state, allow_missing=["nothing"])
    found, wanted = (each["optimizer"].state[each["model"].weight] for each in (state, saved))
    assert torch.equal(found["master"], wanted["master"])
