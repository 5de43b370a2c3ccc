"""Of a torch optimizer inside of an object nothing is lost: it is refused, or seen through."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import SnapshotSkipped, StateMismatch, UnsupportedState
from holdfast.state import describe as describe_module
from holdfast.state import hidden_state as inner_module
from holdfast.state.describe import Describer
from holdfast.state.objects import sort_objects
from support.models.models import differences


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def learn(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=generator)).square().mean().backward()
        optimizer.step()


class Hiding:
    """As frameworks' optimizers are: it steps one of torch's, and gives of it the groups."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": self.optimizer.state_dict()["param_groups"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Chained(Hiding):
    """One that holds several."""

    def __init__(self, optimizer: Any) -> None:
        self.chained = [Hiding(optimizer)]

    def zero_grad(self) -> None:
        self.chained[0].zero_grad()

    def step(self) -> None:
        self.chained[0].step()

    def state_dict(self) -> dict[str, Any]:
        return {"each": [one.state_dict() for one in self.chained]}


class Outer(torch.optim.SGD):
    """One of torch's itself, with a state of its own beside another's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], lr=0.1)
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


HIDING: dict[str, tuple[Callable[[Any], Any], str]] = {
    "holding one": (Hiding, r"^o\.optimizer is a torch AdamW, of which 8 tensors"),
    "holding several": (Chained, r"^o\.chained\[0\]\.optimizer is a torch AdamW"),
    "an optimizer": (Outer, r"^o\.inner is a torch AdamW"),
}


@pytest.mark.parametrize("how", HIDING)
def test_moments_that_nobody_gives_are_refused_by_name(how: str, tmp_path: Path) -> None:
    make, said = HIDING[how]
    model = net()
    outer = make(torch.optim.AdamW(model.parameters()))
    holdfast.save(tmp_path / "before", {"m": model, "o": outer})  # there are no moments yet
    learn(model, outer)
    with pytest.raises(UnsupportedState, match=said) as caught:
        holdfast.save(tmp_path, {"m": model, "o": outer})
    assert "exp_avg of shape [8, 4]" in str(caught.value)
    assert "holdfast.declare" in str(caught.value)


def test_the_first_step_of_a_run_decides_anew(tmp_path: Path) -> None:
    model = net()
    hiding = Hiding(torch.optim.AdamW(model.parameters()))
    with holdfast.Checkpointer(tmp_path, {"m": model, "o": hiding}) as ckpt:
        ckpt.save(0).wait_captured()
        learn(model, hiding)
        handle = ckpt.step(1)
        assert handle is not None
        with pytest.raises(SnapshotSkipped, match=r"o\.optimizer is a torch AdamW"):
            handle.wait_captured()
        ckpt.state["inner"] = hiding.optimizer  # the remedy that is named
        ckpt.save(2).wait_captured()


def test_masters_that_nobody_gives_are_refused_before_the_first_step(tmp_path: Path) -> None:
    model = net()
    masters = [p.detach().double() for p in model.parameters()]
    hiding = Hiding(torch.optim.AdamW(masters))
    with pytest.raises(UnsupportedState, match=r"the first: a parameter of shape \[8, 4\]"):
        holdfast.Checkpointer(tmp_path, {"m": model, "o": hiding})


def given_whole(o: Any) -> Any:
    return o.state_dict()


def given_copied(o: Any) -> Any:
    kept = o.state_dict()["state"]
    return {n: {k: t.clone().half() for k, t in each.items()} for n, each in kept.items()}


def given_as_bytes(o: Any) -> Any:
    there = io.BytesIO()
    torch.save(o.state_dict(), there)
    return there.getvalue()


def given_as_arrays(o: Any) -> Any:
    kept = o.state_dict()["state"]
    return {n: {k: t.numpy() for k, t in each.items()} for n, each in kept.items()}


@pytest.mark.parametrize("give", [given_whole, given_copied, given_as_bytes, given_as_arrays])
@pytest.mark.parametrize("with_model", [True, False])
def test_an_object_that_gives_its_moments_in_any_form_is_stored(
    give: Callable[[Any], Any], with_model: bool, tmp_path: Path
) -> None:
    class Giving(Hiding):
        def state_dict(self) -> dict[str, Any]:
            model = {} if with_model else {"model": model_.state_dict()}
            return {"inner": give(self.optimizer), **model}

    model_ = net()
    giving = Giving(torch.optim.AdamW(model_.parameters()))
    learn(model_, giving)
    holdfast.save(tmp_path, {"o": giving, **({"m": model_} if with_model else {})})


@pytest.mark.parametrize(("rank", "is_stored"), [(0, False), (1, True)])
def test_on_other_ranks_a_gathered_state_may_be_empty(rank: int, is_stored: bool) -> None:
    class Gathered(Hiding):
        def state_dict(self) -> dict[str, Any]:
            return {"optimizer": {}, "groups": []}

    model = net()
    gathered = Gathered(torch.optim.AdamW(model.parameters()))
    learn(model, gathered)
    describer = Describer({"m": model, "o": gathered}, rank, 2)
    if is_stored:
        describer.describe()
        describer = Describer({"m": model, "o": Hiding(gathered.optimizer)}, rank, 2)
    with pytest.raises(UnsupportedState, match=r"o\.optimizer is a torch AdamW"):
        describer.describe()


def test_what_is_stored_elsewhere_may_be_held_by_anything(tmp_path: Path) -> None:
    class Loop:
        def __init__(self, optimizer: Any, scheduler: Any) -> None:
            self.parts = {"optimizer": optimizer, "scheduler": scheduler, "numbers": [1] * 100_000}
            self.loop, self.epoch = self, 3

        def state_dict(self) -> dict[str, Any]:
            return {"epoch": self.epoch}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.epoch = state["epoch"]

    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    learn(model, optimizer)
    loop = Loop(optimizer, scheduler)
    holdfast.save(tmp_path / "1", {"m": model, "o": optimizer, "s": scheduler, "loop": loop})
    holdfast.save(tmp_path / "2", {"m": model, "s": scheduler})  # a scheduler owns nothing
    with pytest.raises(UnsupportedState, match=r"^loop\.parts\['optimizer'\] is a torch AdamW"):
        holdfast.save(tmp_path / "3", {"m": model, "loop": loop})


def test_it_is_looked_for_again_only_when_what_is_kept_is_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Giving(Hiding):
        def state_dict(self) -> dict[str, Any]:
            return dict(self.optimizer.state_dict())

    walks: list[int] = []
    anew = inner_module.refuse_unstored

    def counted(*given: Any) -> None:
        walks.append(1)
        anew(*given)

    monkeypatch.setattr(describe_module, "refuse_unstored", counted)
    model = net()
    giving = Giving(torch.optim.AdamW(model.parameters()))
    describer = Describer({"m": model, "o": giving}, 0)
    for steps, expected in ((0, 1), (0, 1), (1, 2), (3, 2), (0, 2)):
        learn(model, giving, steps)
        describer.describe()
        assert len(walks) == expected
    giving.optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(8, 4)
    describer.describe()
    giving.optimizer = torch.optim.AdamW(model.parameters())
    describer.describe()
    assert len(walks) == 4


class Unready(Chained):
    """One whose state_dict fails before the first step, as Megatron's distributed optimizer's."""

    def state_dict(self) -> dict[str, Any]:
        if not self.chained[0].optimizer.state:
            raise AssertionError("no steps")
        return {}


def test_one_whose_state_dict_fails_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    model = net()
    state = {"model": model, "optimizer": Unready(torch.optim.Adam(model.parameters()))}
    with pytest.raises(UnsupportedState, match=r"no steps.*chained\[0\].optimizer is a torch Adam"):
        holdfast.save(tmp_path, state)

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("its own")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    with pytest.raises(ValueError, match="its own"):
        holdfast.save(tmp_path, {"model": model, "mine": Broken()})


# ── wrappers ─────────────────────────────────────────────────────────────────────────────────


class ByProperty(torch.optim.Optimizer):
    """Nothing of its own: the state and the groups are the inner optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)
    defaults = property(lambda self: self.inner.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class ByClass:
    """It takes on the class of what it holds, as some do for isinstance's sake."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        name = f"Our{type(inner).__name__}"
        self.__class__ = type(name, (type(self), type(inner)), {})

    def step(self, closure: Any = None) -> Any:
        return self._inner.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "": lambda optimizer: optimizer,
    "by property": ByProperty,
    "by class": ByClass,
    "twice": lambda optimizer: ByProperty(ByProperty(optimizer)),
}


def state_of(seed: int, how: str) -> dict[str, Any]:
    model = net(seed)
    return {"m": model, "o": WRAPPERS[how](torch.optim.AdamW(model.parameters()))}


@pytest.mark.parametrize("after", WRAPPERS)
@pytest.mark.parametrize("before", WRAPPERS)
def test_an_optimizer_goes_on_in_any_wrapper_or_in_none(
    before: str, after: str, tmp_path: Path
) -> None:
    saved, back = state_of(1, before), state_of(2, after)
    learn(saved["m"], saved["o"], 2)
    holdfast.save(tmp_path, saved)
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.values["o"]["class"] == "AdamW"
    holdfast.load(tmp_path, back)
    for state in (saved, back):
        learn(state["m"], state["o"], 2)
    assert differences(back["m"].state_dict(), saved["m"].state_dict()) == []


def test_what_a_wrapper_steps_is_captured_behind_the_next_forward() -> None:
    state = state_of(1, "twice")
    learn(state["m"], state["o"])
    bindings = Describer(state, 0).describe().bindings
    assert {b.name.partition(".")[0] for b in bindings.lazy} == {"m", "o"}
    assert not bindings.volatile


def test_a_checkpoint_that_has_a_wrappers_name_is_read_into_such_a_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = state_of(1, "by property")
    learn(saved["m"], saved["o"])
    with monkeypatch.context() as patch:  # as it was written once
        patch.setattr("holdfast.state.values.class_of", lambda _: "ByProperty")
        holdfast.save(tmp_path, saved)
    back = state_of(2, "by property")
    holdfast.load(tmp_path, back)
    assert differences(back["m"].state_dict(), saved["m"].state_dict()) == []
    with pytest.raises(StateMismatch, match="o is a AdamW, saved was ByProperty"):
        holdfast.load(tmp_path, state_of(2, ""))


def test_what_a_wrapper_adds_to_the_state_dict_is_not_lost(tmp_path: Path) -> None:
    class Adding(ByProperty):
        def state_dict(self) -> dict[str, Any]:
            return {**self.inner.state_dict(), "quorum": 3}

    model = net()
    with pytest.raises(UnsupportedState, match=r"state_dict of 'o', a .*Adding, has quorum"):
        holdfast.save(tmp_path, {"m": model, "o": Adding(torch.optim.AdamW(model.parameters()))})


def test_one_that_shares_only_the_groups_is_no_wrapper() -> None:
    class Perturbing(torch.optim.SGD):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, lr=0.1)
            self.inner = inner
            self.param_groups = inner.param_groups

    outer = Perturbing(torch.optim.AdamW(net().parameters()))
    objects = sort_objects({"o": outer})
    assert objects.optimizers["o"] is outer
    assert [one.path for one in objects.inner()] == ["o.inner"]


def test_a_scheduler_around_a_wrapper_follows_its_optimizers_groups(tmp_path: Path) -> None:
    def make(names: list[str]) -> dict[str, Any]:
        model = net()
        groups = [{"params": dict(model.named_parameters())[n], "lr": 0.1} for n in names]
        wrapper = ByProperty(torch.optim.SGD(groups, momentum=0.9))
        return {
            "m": model,
            "o": wrapper,
            "s": torch.optim.lr_scheduler.MultiplicativeLR(wrapper, [lambda _: 0.5] * len(names)),
        }

    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    saved, back = make(names), make(names[::-1])
    saved["o"].param_groups[0]["lr"] = 0.7
    saved["s"].base_lrs = [1.0, 2.0, 3.0, 4.0]
    learn(saved["m"], saved["o"])
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    assert back["s"].base_lrs == [4.0, 3.0, 2.0, 1.0]
    with holdfast.Checkpointer(tmp_path, back) as ckpt:  # without the optimizer it follows none
        assert ckpt.restore(only=["m.**", "s"]) is not None
