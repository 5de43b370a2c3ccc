"""Moments that are keyed by numbers are those of the right parameters, or refused by name."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import holdfast
from holdfast.cli import main
from holdfast.interop.opening import open_source
from support.checkpoints.commands import error_of
from support.runs.launch import run_ranks

Out = pytest.CaptureFixture[str]
SIZE = 4


class Blocks(nn.Module):
    """Two layers of one shape, registered in the order that is given."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(SIZE, SIZE))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            inputs = layer(inputs)
        return inputs


def groups_of(model: nn.Module, *options: dict[str, Any]) -> list[dict[str, Any]]:
    """A group for each layer; one for all without options."""
    if not options:
        return [{"params": list(model.parameters())}]
    layers = list(model.children())
    return [
        {"params": list(layer.parameters()), **one}
        for layer, one in zip(layers, options, strict=True)
    ]


def trained(model: nn.Module, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for number in range(2):
        torch.manual_seed(number)
        model(torch.randn(3, SIZE)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def saved(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def refused(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Why the optimizer is not filled; the model stays as it was."""
    before = [one.clone() for one in model.parameters()]
    heard: list[str] = []
    stop = holdfast.subscribe(lambda event, _: heard.append(str(event)))
    try:
        with pytest.raises(holdfast.StateMismatch, match="optimizer") as error:
            holdfast.load(path, {"model": model, "optimizer": optimizer})
    finally:
        stop()
    (why,) = error.value.__notes__
    assert "optimizer is left out: its state is keyed by numbers" in why
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    (said,) = (text for text in heard if "keyed by numbers" in text)
    assert "--parameters" in said or "get_state_dict" in said
    return said


def filled(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    holdfast.load(path, {"model": model, "optimizer": optimizer})


@pytest.mark.promise
@pytest.mark.parametrize(
    "options",
    [
        ({"weight_decay": 0.1}, {"weight_decay": 0.0}),
        ({"lr": 0.5}, {"lr": 0.25}),
        ({"betas": (0.8, 0.9)}, {"betas": (0.9, 0.99)}),
    ],
)
def test_groups_that_have_changed_places_are_refused(
    tmp_path: Path, options: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """The groups have equal sizes and shapes: torch itself would give each the other's moments."""
    model = Blocks("a", "b")
    path = saved(tmp_path / "a.pt", model, trained(model, groups_of(model, *options)))
    other = Blocks("a", "b")
    wrong = torch.optim.AdamW(groups_of(other, *options)[::-1], lr=0.1)
    assert "its group 0 has the options of group 1" in refused(path, other, wrong)
    right = torch.optim.AdamW(groups_of(other, *options), lr=9.0)
    filled(path, other, right)
    assert set(right.state) == set(other.parameters())


@pytest.mark.promise
def test_a_schedule_does_not_make_groups_look_like_others(tmp_path: Path) -> None:
    """Its rates have met by the time of the save; those it began with are compared."""
    options: tuple[dict[str, Any], ...] = ({"lr": 0.5}, {"lr": 0.25})
    model = Blocks("a", "b")
    optimizer = trained(model, groups_of(model, *options))
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    first, second = optimizer.param_groups
    first["lr"], second["lr"] = 0.25, 0.5  # as if each had come where the other began
    path = saved(tmp_path / "a.pt", model, optimizer)
    other = Blocks("a", "b")
    there = torch.optim.AdamW(groups_of(other, *options))
    torch.optim.lr_scheduler.ExponentialLR(there, 0.5)
    filled(path, other, there)
    assert [group["lr"] for group in there.param_groups] == [0.25, 0.5]


def test_other_options_alone_are_no_other_order(tmp_path: Path) -> None:
    model = Blocks("a", "b")
    options = ({"weight_decay": 0.1}, {"weight_decay": 0.0})
    path = saved(tmp_path / "a.pt", model, trained(model, groups_of(model, *options)))
    other = Blocks("a", "b")
    there = torch.optim.AdamW(groups_of(other, {"weight_decay": 0.3}, {"weight_decay": 0.3}))
    filled(path, other, there)
    assert [group["weight_decay"] for group in there.param_groups] == [0.1, 0.0]


@pytest.mark.promise
def test_parameters_that_are_registered_in_another_order_are_refused(tmp_path: Path) -> None:
    model = Blocks("a", "b")
    path = saved(tmp_path / "a.pt", model, trained(model, groups_of(model)))
    other = Blocks("b", "a")
    said = refused(path, other, torch.optim.AdamW(other.parameters()))
    assert "has 'b.weight', 'model' in the file has 'a.weight': a number" in said


@pytest.mark.promise
def test_a_module_of_another_order_beside_the_optimizers_own_decides_nothing(
    tmp_path: Path,
) -> None:
    """The two of a GAN have layers of the same names, each in an order of its own."""

    def build() -> tuple[dict[str, Any], list[tuple[nn.Module, torch.optim.Optimizer]]]:
        pairs = [(one := Blocks(*names), trained(one, groups_of(one))) for names in orders]
        state = {f"net{n}": one for n, (one, _) in enumerate(pairs)}
        return state | {f"opt{n}": one for n, (_, one) in enumerate(pairs)}, list(pairs)

    orders = [("fc", "conv1"), ("conv1", "fc", "more")]
    state, pairs = build()
    torch.save({key: one.state_dict() for key, one in state.items()}, tmp_path / "a.pt")
    other, there = build()
    holdfast.load(tmp_path / "a.pt", other)
    for (model, optimizer), (mine, filled_one) in zip(pairs, there, strict=True):
        for one, live in zip(model.parameters(), mine.parameters(), strict=True):
            for kind, tensor in optimizer.state[one].items():
                assert torch.equal(tensor, filled_one.state[live][kind])


@pytest.mark.promise
@pytest.mark.parametrize("first", ["ema", "model"])
def test_averages_that_are_stored_by_sorted_names_decide_nothing(
    tmp_path: Path, first: str
) -> None:
    model = Blocks("b", "a")
    optimizer = trained(model, groups_of(model))
    averages = {name: one * 2 for name, one in sorted(model.state_dict().items())}
    held: dict[str, Any] = {"ema": averages, "model": model.state_dict()}
    held = {first: held[first], **held, "optimizer": optimizer.state_dict()}
    torch.save(held, tmp_path / "a.pt")
    other, ema = Blocks("b", "a"), Blocks("b", "a")
    there = torch.optim.AdamW(other.parameters())
    holdfast.load(tmp_path / "a.pt", {"model": other, "ema": ema, "optimizer": there})
    for one, mine in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], there.state[mine]["exp_avg"])
    turned = Blocks("a", "b")  # as the averages are sorted, and the model was not
    said = refused(tmp_path / "a.pt", turned, torch.optim.AdamW(turned.parameters()))
    assert "has 'a.weight', 'model' in the file has 'b.weight'" in said


@pytest.mark.promise
def test_an_optimizer_of_two_modules_is_refused_where_one_has_another_order(
    tmp_path: Path,
) -> None:
    def build(*names: str) -> tuple[dict[str, Any], torch.optim.AdamW]:
        nets = {"left": Blocks("a", "b"), "right": Blocks(*names)}
        parameters = [one for net in nets.values() for one in net.parameters()]
        optimizer = torch.optim.AdamW(parameters)
        for net in nets.values():
            net(torch.ones(1, SIZE)).sum().backward()
        optimizer.step()
        return {"right": nets["right"], "left": nets["left"], "optimizer": optimizer}, optimizer

    state, optimizer = build("a", "b")
    torch.save({key: one.state_dict() for key, one in state.items()}, tmp_path / "a.pt")
    turned, _ = build("b", "a")
    heard: list[str] = []
    stop = holdfast.subscribe(lambda event, _: heard.append(str(event)))
    with pytest.raises(holdfast.StateMismatch, match="optimizer"):
        holdfast.load(tmp_path / "a.pt", turned)
    stop()
    (said,) = (text for text in heard if "keyed by numbers" in text)
    assert "'right.b.weight', one of the modules in the file has 'right.a.weight'" in said
    same, right = build("a", "b")
    holdfast.load(tmp_path / "a.pt", same)
    moments = [[one["exp_avg"] for one in some.state.values()] for some in (optimizer, right)]
    assert all(map(torch.equal, *moments))


def test_an_order_of_its_own_is_no_matter_where_the_model_has_the_same(tmp_path: Path) -> None:
    model = Blocks("a", "b")
    backwards = [{"params": list(model.parameters())[::-1]}]
    optimizer = trained(model, backwards)
    path = saved(tmp_path / "a.pt", model, optimizer)
    other = Blocks("a", "b")
    there = torch.optim.AdamW([{"params": list(other.parameters())[::-1]}])
    filled(path, other, there)
    for one, mine in zip(model.parameters(), other.parameters(), strict=True):
        for kind, tensor in optimizer.state[one].items():
            assert torch.equal(tensor, there.state[mine][kind])


@pytest.mark.promise
def test_names_of_other_shapes_are_refused_in_an_import(tmp_path: Path, capsys: Out) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    path, names = saved(tmp_path / "a.pt", model, optimizer), tmp_path / "names.json"
    names.write_text(json.dumps([["1.weight", "1.bias", "0.weight", "0.bias"]]))
    said = error_of(capsys, "import", path, tmp_path / "root", "--parameters", names, code=2)
    assert "0 would be '1.weight': its exp_avg has the shape (3, 2), the parameter (2, 3)" in said
    assert not (tmp_path / "root").exists()


def test_safetensors_have_no_order_that_could_be_another(tmp_path: Path) -> None:
    """They are sorted by name; the Trainer's groups are told by their sizes and options alone."""
    model = Blocks("b", "a")
    optimizer = trained(model, groups_of(model))
    save_file(OrderedDict(model.state_dict()), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 2}')
    other = Blocks("b", "a")
    there = torch.optim.AdamW(other.parameters())
    filled(tmp_path, other, there)
    assert set(there.state) == set(other.parameters())
    open_source(tmp_path)  # without an optimizer numbers stay numbers


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {
        f"{name}.{kind}": value
        for name, one in named
        for kind, value in optimizer.state[one].items()
    }


def _require_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one and one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def _saved_by_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=path, no_dist=not torch.distributed.is_initialized())


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_order_that_one_writer_left_in_dcp_is_compared(tmp_path: Path) -> None:
    model = Blocks("q", "k")
    optimizer = trained(model, groups_of(model))
    _saved_by_dcp(model, optimizer, tmp_path / "dcp")
    turned = Blocks("k", "q")
    said = refused(tmp_path / "dcp", turned, torch.optim.AdamW(turned.parameters()))
    assert "has 'k.weight', 'model' in the file has 'q.weight'" in said
    other = Blocks("q", "k")
    there = torch.optim.AdamW(other.parameters())
    filled(tmp_path / "dcp", other, there)
    _require_same(_moments(model, optimizer), _moments(other, there))


def _replicas(rank: int, world: int, root: str) -> dict[str, torch.Tensor]:
    """Each rank has the same, so DCP gives each a share to write."""
    torch.manual_seed(0)
    alike = Blocks("q", "k", "v")
    optimizer = trained(alike, groups_of(alike))
    _saved_by_dcp(alike, optimizer, Path(root, "alike"))
    unlike = nn.Sequential(nn.Linear(SIZE, 3), nn.Linear(3, 2))
    _saved_by_dcp(unlike, trained(unlike, groups_of(unlike)), Path(root, "unlike"))
    return _moments(alike, optimizer)


@pytest.mark.promise
def test_the_order_that_several_writers_left_nowhere_in_dcp_is_asked_for(tmp_path: Path) -> None:
    expected = run_ranks(2, _replicas, str(tmp_path))[0]
    model = Blocks("q", "k", "v")
    optimizer = torch.optim.AdamW(model.parameters())
    said = refused(tmp_path / "alike", model, optimizer)
    assert "'q.weight' and 'k.weight' both have the shape (4, 4)" in said
    names = tmp_path / "names.json"
    names.write_text(json.dumps([[name for name, _ in model.named_parameters()]]))
    source, root = str(tmp_path / "alike"), str(tmp_path / "root")
    assert main(["import", source, root, "--parameters", str(names)]) == 0
    filled(Path(root), model, optimizer)
    _require_same(expected, _moments(model, optimizer))
    # Where no two of a group have one shape, a number stands for one alone.
    unlike = nn.Sequential(nn.Linear(SIZE, 3), nn.Linear(3, 2))
    there = torch.optim.AdamW(unlike.parameters())
    filled(tmp_path / "unlike", unlike, there)
    assert set(there.state) == set(unlike.parameters())
    # In another order the shapes do not fit.
    turned = nn.Sequential()
    turned.add_module("1", nn.Linear(3, 2))
    turned.add_module("0", nn.Linear(SIZE, 3))
    said = refused(tmp_path / "unlike", turned, torch.optim.AdamW(turned.parameters()))
    assert "keyed by numbers" in said


def _stages(rank: int, world: int, root: str) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential()
    model.add_module(str(rank), nn.Linear(SIZE, SIZE, bias=False))
    optimizer = trained(model, groups_of(model))
    _saved_by_dcp(model, optimizer, Path(root, "one"))
    state = {f"stage{rank}": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=Path(root, "apart"))


@pytest.mark.promise
@pytest.mark.parametrize("rank", [0, 1])
def test_the_numbers_that_stages_have_in_common_fill_none_of_them(
    tmp_path: Path, rank: int
) -> None:
    run_ranks(2, _stages, str(tmp_path))
    model = nn.Sequential()
    model.add_module(str(rank), nn.Linear(SIZE, SIZE, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    said = refused(tmp_path / "one", model, optimizer)
    assert f"has no 'model.{1 - rank}.weight', which is in the file: each stage" in said
    heard: list[str] = []
    stop = holdfast.subscribe(lambda event, _: heard.append(str(event)))
    with pytest.raises(holdfast.StateMismatch, match="optimizer"):
        holdfast.load(tmp_path / "apart", {f"stage{rank}": model, "optimizer": optimizer})
    stop()
    assert any(f"has no 'stage{1 - rank}.{1 - rank}.weight', which is" in one for one in heard)
    assert not optimizer.state
