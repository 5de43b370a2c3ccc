"""Every optimizer of torch, in every way it computes, goes on as if it had never stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import holdfast
from holdfast.errors import StateMismatch, UnsupportedState
from holdfast.rules import Rules, rename
from support.models.models import differences

Make = Callable[[Any], Optimizer]
o = torch.optim
WAYS: dict[str, Make] = {
    "ASGD": lambda p: o.ASGD(p, lr=0.1, t0=2),
    "ASGD foreach": lambda p: o.ASGD(p, lr=0.1, foreach=True),
    "Adadelta": lambda p: o.Adadelta(p),
    "Adadelta foreach": lambda p: o.Adadelta(p, foreach=True),
    "Adafactor": lambda p: o.Adafactor(p, lr=0.1),
    "Adafactor foreach": lambda p: o.Adafactor(p, lr=0.1, foreach=True),
    "Adagrad": lambda p: o.Adagrad(p, lr_decay=0.1, initial_accumulator_value=0.5),
    "Adagrad fused": lambda p: o.Adagrad(p, fused=True),
    "Adam": lambda p: o.Adam(p, amsgrad=True),
    "Adam foreach": lambda p: o.Adam(p, foreach=True),
    "Adam fused": lambda p: o.Adam(p, fused=True, amsgrad=True),
    "Adam tensor lr": lambda p: o.Adam(p, lr=torch.tensor(1e-2), fused=True),
    "AdamW": lambda p: o.AdamW(p, weight_decay=0.1),
    "AdamW foreach": lambda p: o.AdamW(p, foreach=True, maximize=True),
    "AdamW fused": lambda p: o.AdamW(p, fused=True),
    "Adamax": lambda p: o.Adamax(p),
    "Adamax foreach": lambda p: o.Adamax(p, foreach=True),
    "LBFGS": lambda p: o.LBFGS(p, lr=0.1, max_iter=3, history_size=3),
    "LBFGS wolfe": lambda p: o.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": lambda p: o.Muon([x for x in p if x.ndim == 2], lr=0.1),
    "NAdam": lambda p: o.NAdam(p, decoupled_weight_decay=True),
    "NAdam foreach": lambda p: o.NAdam(p, foreach=True),
    "RAdam": lambda p: o.RAdam(p),
    "RAdam foreach": lambda p: o.RAdam(p, foreach=True),
    "RMSprop": lambda p: o.RMSprop(p, momentum=0.9, centered=True),
    "RMSprop foreach": lambda p: o.RMSprop(p, foreach=True),
    "Rprop": lambda p: o.Rprop(p),
    "Rprop foreach": lambda p: o.Rprop(p, foreach=True),
    "SGD": lambda p: o.SGD(p, lr=0.1),
    "SGD momentum": lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: o.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD foreach": lambda p: o.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SparseAdam": lambda p: o.SparseAdam([next(iter(p))]),
}


class Net(nn.Module):
    """An embedding first: one optimizer takes sparse gradients only."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, sparse=sparse)
        self.body = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(torch.tanh(self.embed(tokens))).square().mean()
        return out


def build(make: Make, seed: int, **options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net(**options)
    return {"model": model, "optimizer": make(model.parameters())}


def train(state: dict[str, Any], steps: range) -> list[float]:
    model, optimizer = state["model"], state["optimizer"]
    losses = []
    for step in steps:
        tokens = torch.randint(0, 7, (6,), generator=torch.Generator().manual_seed(step))

        def closure(tokens: torch.Tensor = tokens) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(tokens)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def contents(state: dict[str, Any]) -> dict[str, Any]:
    """All of the optimizer's state and the parameters, by torch's own numbering."""
    saved = state["optimizer"].state_dict()
    found: dict[str, Any] = dict(state["model"].state_dict())
    for number, kinds in saved["state"].items():
        for kind, value in kinds.items():
            items = enumerate(value) if isinstance(value, list) else [("", value)]
            found.update({f"{number}.{kind}.{place}": item for place, item in items})
    return found | {f"group {n}": g for n, g in enumerate(saved["param_groups"])}


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_goes_on_as_if_it_had_never_stopped(way: str, tmp_path: Path) -> None:
    sparse = way == "SparseAdam"
    whole = build(WAYS[way], 1, sparse=sparse)
    train(whole, range(4))
    holdfast.save(tmp_path, whole, step=3)
    back = build(WAYS[way], 2, sparse=sparse)
    holdfast.load(tmp_path, back)
    assert differences(contents(back), contents(whole)) == []
    assert train(back, range(4, 7)) == train(whole, range(4, 7))
    assert differences(contents(back), contents(whole)) == []


def test_every_optimizer_of_torch_is_tried() -> None:
    of_torch = {
        name
        for name in dir(o)
        if isinstance(getattr(o, name), type)
        and issubclass(getattr(o, name), Optimizer)
        and name != "Optimizer"
    }
    assert {way.split()[0] for way in WAYS} == of_torch


@pytest.mark.parametrize("way", ["Adam tensor lr", "LBFGS", "Adafactor", "SGD momentum"])
def test_what_a_running_checkpointer_captures_is_what_was_there(way: str, tmp_path: Path) -> None:
    state = build(WAYS[way], 1)
    with holdfast.Checkpointer(tmp_path / "run", state, storage=None) as checkpointer:
        checkpointer.restore()
        for step in range(3):
            train(state, range(step, step + 1))
            expected = copy.deepcopy(contents(state))
            handle = checkpointer.save(step, durable=step == 2)
            handle.wait_captured(timeout_s=60)
        handle.wait_durable(timeout_s=60)
    train(state, range(3, 5))
    holdfast.load(tmp_path / "run", state)
    assert differences(contents(state), expected) == []


@pytest.mark.parametrize("way", ["AdamW", "LBFGS", "Adagrad"])
def test_an_optimizer_saved_before_its_first_step_is_brought_back_to_having_no_state(
    way: str, tmp_path: Path
) -> None:
    fresh = build(WAYS[way], 1)
    holdfast.save(tmp_path, fresh)
    used = build(WAYS[way], 2)
    train(used, range(3))
    holdfast.load(tmp_path, used)
    assert differences(contents(used), contents(fresh)) == []
    assert train(used, range(3)) == train(fresh, range(3))


def test_groups_made_in_another_order_are_matched_by_their_parameters_names(
    tmp_path: Path,
) -> None:
    def grouped(seed: int, *, turned: bool) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = Net()
        one = {"params": [model.embed.weight], "lr": 0.5, "weight_decay": 0.0}
        two = {"params": [model.body.bias, model.body.weight], "lr": 0.25}
        groups = [two, one] if turned else [one, two]
        return {"model": model, "optimizer": torch.optim.AdamW(groups, lr=0.1 if turned else 9.0)}

    saved, back = grouped(1, turned=False), grouped(2, turned=True)
    train(saved, range(3))
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    assert [group["lr"] for group in back["optimizer"].param_groups] == [0.25, 0.5]
    assert train(back, range(3, 6)) == train(saved, range(3, 6))


def test_a_parameter_that_joined_or_left_the_optimizer_is_named(tmp_path: Path) -> None:
    saved = build(lambda p: torch.optim.AdamW(list(p)[:2]), 1)
    train(saved, range(2))
    holdfast.save(tmp_path, saved)
    other = build(lambda p: torch.optim.AdamW(list(p)[1:]), 2)
    before = contents(other)
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(tmp_path, other)
    text = str(caught.value)
    assert "optimizer.body.bias: not in the saved optimizer" in text
    assert "optimizer.embed.weight: saved, but not in this optimizer" in text
    assert differences(contents(other), before) == []


def test_groups_that_were_joined_are_taken_only_if_their_options_are_the_same(
    tmp_path: Path,
) -> None:
    def grouped(lrs: list[float]) -> dict[str, Any]:
        model = Net()
        groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), lrs, strict=True)]
        return {"model": model, "optimizer": torch.optim.SGD(groups)}

    holdfast.save(tmp_path / "same", grouped([0.5, 0.5, 0.5]))
    joined = build(lambda p: torch.optim.SGD(p, lr=1.0), 1)
    holdfast.load(tmp_path / "same", joined)
    assert joined["optimizer"].param_groups[0]["lr"] == 0.5
    holdfast.save(tmp_path / "other", grouped([0.5, 0.25, 0.5]))
    with pytest.raises(StateMismatch, match=r"group 0 joins parameters .* differ in lr"):
        holdfast.load(tmp_path / "other", joined)
    assert joined["optimizer"].param_groups[0]["lr"] == 0.5


def test_how_an_update_is_computed_is_the_restoring_programs_choice(tmp_path: Path) -> None:
    saved = build(lambda p: torch.optim.AdamW(p, fused=True), 1)
    train(saved, range(2))
    holdfast.save(tmp_path, saved)
    back = build(lambda p: torch.optim.AdamW(p, foreach=True), 2)
    holdfast.load(tmp_path, back)
    group = back["optimizer"].param_groups[0]
    assert (group["fused"], group["foreach"]) == (None, True)
    train(back, range(2, 4))


def test_one_optimizer_may_own_several_modules_and_several_optimizers_one(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        one, two, three = Net(), Net(), Net()
        return {
            "one": one,
            "two": two,
            "three": three,
            "both": torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=0.1),
            "weights": torch.optim.SGD([three.embed.weight], lr=0.1, momentum=0.9),
            "rest": torch.optim.Adam(three.body.parameters()),
        }

    def learn(state: dict[str, Any], step: int) -> Any:
        tokens = torch.randint(0, 7, (6,), generator=torch.Generator().manual_seed(step))
        loss = state["one"](tokens) + state["two"](tokens) * state["three"](tokens)
        loss.backward()
        for name in ("both", "weights", "rest"):
            state[name].step()
            state[name].zero_grad()
        return loss.item()

    saved, back = make(1), make(2)
    for step in range(3):
        learn(saved, step)
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    assert [learn(back, s) for s in range(3, 6)] == [learn(saved, s) for s in range(3, 6)]
    with holdfast.open(tmp_path) as checkpoint:
        assert "both.two.body.weight.exp_avg" in checkpoint.leaves
        assert "weights.embed.weight.momentum_buffer" in checkpoint.leaves


def test_adding_an_averaged_copy_renames_no_state_of_the_optimizer(tmp_path: Path) -> None:
    saved = build(WAYS["AdamW"], 1)
    train(saved, range(2))
    holdfast.save(tmp_path, saved)
    later = build(WAYS["AdamW"], 2)
    with_average = {"average": torch.optim.swa_utils.AveragedModel(later["model"]), **later}
    holdfast.load(tmp_path, {key: with_average[key] for key in ("model", "optimizer")})
    holdfast.save(tmp_path, with_average, step=1)
    with holdfast.open(tmp_path) as checkpoint:
        assert "optimizer.body.weight.exp_avg" in checkpoint.leaves
        assert "average.module.body.weight" in checkpoint.leaves


class Noting(torch.optim.SGD):
    """Keeps state under a key that is no parameter, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        loose: Any = self.state
        loose["calls"]["count"] = loose["calls"].get("count", 0) + 1
        return super().step(closure)


def test_state_that_belongs_to_no_parameter_is_kept(tmp_path: Path) -> None:
    saved, back = build(lambda p: Noting(p), 1), build(lambda p: Noting(p), 2)
    train(saved, range(3))
    train(back, range(1))
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    assert back["optimizer"].state["calls"] == {"count": 3}


class Telling(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "secret": 1}


def test_an_optimizer_that_keeps_more_than_every_optimizer_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedState, match=r"'optimizer', a Telling, has secret beside"):
        holdfast.save(tmp_path, build(lambda p: Telling(p), 1))


def test_an_optimizer_made_before_its_parameters_were_replaced_is_refused(tmp_path: Path) -> None:
    state = build(WAYS["AdamW"], 1)
    train(state, range(1))
    group = state["optimizer"].param_groups[0]
    state["model"].body.bias = nn.Parameter(torch.zeros(4))
    group["params"] = list(state["model"].parameters())
    with pytest.raises(UnsupportedState, match=r"state for 1 tensors .* first of shape \[4\]"):
        holdfast.save(tmp_path, state)


@pytest.mark.parametrize("through_rules", [False, True])
def test_state_tensors_that_were_one_are_one_again(tmp_path: Path, through_rules: bool) -> None:
    def share(state: dict[str, Any]) -> None:
        train(state, range(1))
        kinds = list(state["optimizer"].state.values())
        for kind in kinds[1:]:
            kind["step"] = kinds[0]["step"]

    saved, back = build(WAYS["AdamW"], 1), build(WAYS["AdamW"], 2)
    share(saved)
    rules = Rules([("body.weight", rename("other.weight"))]) if through_rules else None
    holdfast.save(tmp_path, saved, rules=rules)
    holdfast.load(tmp_path, back, rules=rules)
    steps = {id(kind["step"]) for kind in back["optimizer"].state.values()}
    assert len(steps) == 1
    assert train(back, range(1, 3)) == train(saved, range(1, 3))


def test_groups_are_told_apart_whatever_their_parameters_are_called(tmp_path: Path) -> None:
    """Parameter "1" is in the first group, and group 1 has no parameters to be called by."""

    def state(rate: float) -> dict[str, Any]:
        model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))])
        groups = [
            {"params": [model[1]], "lr": torch.tensor(rate)},
            {"params": [], "lr": torch.tensor(2 * rate)},
        ]
        return {"model": model, "optimizer": torch.optim.Adam(groups)}

    holdfast.save(tmp_path, state(0.25))
    back = state(1.0)
    holdfast.load(tmp_path, back)
    assert [float(group["lr"]) for group in back["optimizer"].param_groups] == [0.25, 0.5]
