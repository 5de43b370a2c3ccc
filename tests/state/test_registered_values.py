"""An object of a registered class is stored as data, and made of it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.cli.value_tree import changes, find
from holdfast.errors import RestoreError, StateMismatch, UnsupportedState, UsageError
from holdfast.format import native_types
from holdfast.format.native_types import StoredObject
from holdfast.format.values import LeafRef, decode, encode


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    there = dict(native_types._classes)
    yield
    native_types._classes.clear()
    native_types._classes.update(there)


class Projector:
    """As GaLore's: a setting, a count, and a matrix that is made at its first use."""

    def __init__(self, rank: int) -> None:
        self.rank, self.uses = rank, 0
        self.matrix: torch.Tensor | None = None

    def project(self, grad: torch.Tensor) -> torch.Tensor:
        if self.uses % 3 == 0:
            self.matrix = torch.linalg.svd(grad, full_matrices=False)[2][: self.rank]
        self.uses += 1
        assert self.matrix is not None
        return grad @ self.matrix.T @ self.matrix


def give(data: dict[str, Any]) -> Projector:
    made = Projector(data["rank"])
    made.uses, made.matrix = data["uses"], data["matrix"]
    return made


def register() -> None:
    holdfast.register_value(Projector, vars, give)


class Projected(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["projector"], state["moment"] = Projector(2), torch.zeros_like(parameter)
            state["moment"].mul_(0.9).add_(state["projector"].project(parameter.grad))
            parameter.sub_(state["moment"], alpha=0.1)


def state_of(seed: int, width: int = 6) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(width, width, bias=False)
    return {"model": model, "optimizer": Projected(model.parameters())}


def train(state: dict[str, Any], steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        state["optimizer"].zero_grad()
        (state["model"](x) - x.flip(1)).square().mean().backward()
        state["optimizer"].step()


def test_an_optimizer_with_objects_in_its_state_goes_on_when_made_anew(tmp_path: Path) -> None:
    register()
    saved, back = state_of(1), state_of(2)
    train(saved, range(2))
    holdfast.save(tmp_path, saved)
    train(saved, range(2, 6))  # the object is in use, and its matrix is made again
    holdfast.load(tmp_path, back)
    (kept,) = back["optimizer"].state.values()
    assert (type(kept["projector"]), kept["projector"].uses) == (Projector, 2)
    train(back, range(2, 6))
    assert torch.equal(back["model"].weight, saved["model"].weight)


def test_snapshots_follow_what_the_object_becomes(tmp_path: Path) -> None:
    register()
    saved = state_of(1)
    with holdfast.Checkpointer(tmp_path, saved) as checkpointer:
        checkpointer.restore()
        for step in range(5):
            train(saved, range(step, step + 1))
            checkpointer.save(step, durable=True).wait_durable(timeout_s=60)
    for step in range(5):
        back = state_of(2)
        holdfast.load(tmp_path, back, step=step)
        train(back, range(step + 1, 5))
        assert torch.equal(back["model"].weight, saved["model"].weight), step


def test_an_object_is_stored_as_its_name_and_data_and_shown_without_its_class(
    tmp_path: Path,
) -> None:
    register()
    saved = state_of(1)
    train(saved, range(1))
    saved["projectors"] = [Projector(3)]
    holdfast.save(tmp_path, saved)
    native_types._classes.clear()
    with holdfast.open(tmp_path) as checkpoint:
        (shown,) = checkpoint.values["projectors"]
        assert shown == StoredObject("Projector", {"rank": 3, "uses": 0, "matrix": None})
        inside = checkpoint.values["optimizer"]["state"]["weight"]["projector"].value
        leaf = inside["matrix"]
        name = leaf.name if isinstance(leaf, LeafRef) else "optimizer.state.weight.projector.matrix"
        assert torch.equal(
            checkpoint.read(name),
            saved["optimizer"].state[saved["model"].weight]["projector"].matrix,
        )


def test_a_class_that_is_not_registered_is_asked_for_before_anything_changes(
    tmp_path: Path,
) -> None:
    register()
    saved = state_of(1)
    train(saved, range(1))
    holdfast.save(tmp_path, saved)
    native_types._classes.clear()
    with pytest.raises(UnsupportedState, match=r"optimizer\.state\.weight\.projector.*register_v"):
        holdfast.save(tmp_path, saved, step=1)
    back = state_of(2)
    before = back["model"].weight.detach().clone()
    with pytest.raises(UsageError, match=r"an object of Projector.*holdfast\.register_value"):
        holdfast.load(tmp_path, back)
    assert torch.equal(back["model"].weight, before)


def test_a_program_that_cannot_make_the_object_says_so_by_name(tmp_path: Path) -> None:
    register()
    holdfast.save(tmp_path, {"projector": Projector(3)})

    def other(data: dict[str, Any]) -> Projector:
        return Projector(data["width"])

    holdfast.register_value(Projector, vars, other)
    with pytest.raises(UsageError, match=r"give= .* for Projector .*KeyError: 'width'"):
        holdfast.load(tmp_path, {"projector": None})


def test_a_give_that_raises_is_reported_before_anything_changes(tmp_path: Path) -> None:
    register()
    saved, back = state_of(1), state_of(2)
    train(saved, range(2))
    holdfast.save(tmp_path, saved)
    train(back, range(1))
    before = back["model"].weight.detach().clone()
    moment = back["optimizer"].state[back["model"].weight]["moment"].clone()

    def other(data: dict[str, Any]) -> Projector:
        return Projector(data["width"])

    holdfast.register_value(Projector, vars, other)
    with pytest.raises(StateMismatch, match=r"optimizer: the give= .*KeyError: 'width'"):
        holdfast.load(tmp_path, back)
    assert torch.equal(back["model"].weight, before)
    assert torch.equal(back["optimizer"].state[back["model"].weight]["moment"], moment)


def test_a_give_that_raises_for_the_stored_elements_does_not_say_that_nothing_changed(
    tmp_path: Path,
) -> None:
    register()
    holdfast.save(tmp_path, {"projector": Projector(3)})
    calls = []

    def once(data: dict[str, Any]) -> Projector:
        calls.append(data)
        return give(data if len(calls) == 1 else {})

    holdfast.register_value(Projector, vars, once)
    with pytest.raises(RestoreError, match=r"KeyError: 'rank'.*filled already"):
        holdfast.load(tmp_path, {"projector": None})


def test_registrations_that_mean_nothing_are_refused() -> None:
    register()
    with pytest.raises(UsageError, match="is not a class"):
        holdfast.register_value(Projector(1), vars, give)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"take=None is not a function"):
        holdfast.register_value(Projector, None, give)  # type: ignore[arg-type]
    other = type("Projector", (), {"__module__": "elsewhere"})
    with pytest.raises(UsageError, match="another name="):
        holdfast.register_value(other, vars, give)
    holdfast.register_value(other, vars, give, name="elsewhere.Projector")


def test_a_class_that_was_loaded_again_takes_the_place_of_the_old_one() -> None:
    register()
    again = type("Projector", (), {"__module__": Projector.__module__})
    again.__qualname__ = Projector.__qualname__
    holdfast.register_value(again, vars, lambda _: again())
    made = decode(encode(again()), makes_objects=True)
    assert type(made) is again
    assert native_types.registered_class(Projector) is None


def test_an_object_that_contains_itself_is_refused() -> None:
    register()
    projector: Any = Projector(1)
    projector.matrix = projector
    with pytest.raises(UnsupportedState, match="contains itself"):
        encode(projector, "it")


@pytest.mark.parametrize("hold", [lambda one: {one: 1}, lambda one: {one}, lambda one: {(one,)}])
def test_an_object_as_a_key_is_refused_at_the_save(hold: Any) -> None:
    register()
    with pytest.raises(UnsupportedState, match=r"of it.* is an object of Projector.*no key"):
        encode(hold(Projector(1)), "it")


def test_an_object_that_is_stored_as_a_key_is_read() -> None:
    register()
    (stored,) = encode([Projector(1)], "it")
    document = {"$dict": [[stored, 1], [stored, 2]]}
    assert [key.type for key in decode(document)] == ["Projector"] * 2
    assert [key.rank for key in decode(document, makes_objects=True)] == [1, 1]


def test_a_take_that_raises_is_named_at_the_save(tmp_path: Path) -> None:
    def take(projector: Projector) -> Any:
        raise KeyError("gone")

    holdfast.register_value(Projector, take, give)
    with pytest.raises(UnsupportedState, match=r"kept\.p: the take= .* Projector raised KeyError"):
        holdfast.save(tmp_path, {"kept": {"p": Projector(1)}})


def test_a_take_that_raises_does_not_stop_a_restore(tmp_path: Path) -> None:
    register()
    holdfast.save(tmp_path, {"kept": {"p": Projector(1)}})

    def take(projector: Projector) -> Any:
        raise KeyError("gone")

    holdfast.register_value(Projector, take, give)
    state: dict[str, Any] = {"kept": {"p": Projector(2)}}
    holdfast.load(tmp_path, state)
    assert state["kept"]["p"].rank == 1


def test_two_objects_differ_by_what_is_in_them() -> None:
    register()
    one, other = (encode({"p": Projector(rank)}) for rank in (1, 2))
    assert [(c.path, c.a, c.b) for c in changes(one, other)] == [("p.rank", 1, 2)]
    assert find(one, "p.rank") == 1
    renamed = {"p": {"$object": {**one["p"]["$object"], "type": "Other"}}}
    assert [c.path for c in changes(one, renamed)] == ["p"]
