"""Values of optimizers follow the names of parameters: any stages and experts to any others."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, ReduceLROnPlateau, SequentialLR

import holdfast
from support.models.models import differences
from support.runs.launch import run_ranks
from support.runs.leftovers import end_keepers

WIDTH = 6
LAYERS = range(5)
Groups = list[dict[str, Any]]
State = dict[str, Any]


class Layer(nn.Module):
    """Two tied weights, and a number that is no tensor."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.up = nn.Linear(WIDTH, WIDTH + number)
        self.down = nn.Linear(WIDTH, WIDTH + number, bias=False)
        self.down.weight = self.up.weight
        self.seen = nn.Buffer(torch.tensor(number))
        self.number = number
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def get_extra_state(self) -> Any:
        return {"number": self.number}

    def set_extra_state(self, state: Any) -> None:
        self.number = state["number"]


class Stage(nn.Module):
    """The layers that one rank of a pipeline has; the names are those of the whole model."""

    def __init__(self, layers: list[int], *, blank: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): Layer(n) for n in layers})
        if blank:
            for layer in self.layers.values():
                assert isinstance(layer, Layer)
                layer.number = -1
                layer.seen.zero_()
            for parameter in self.parameters():
                parameter.data.zero_()


class Factored(torch.optim.Optimizer):
    """As Adafactor: a row and a column for a matrix, and counts that are no tensors."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": 1e-2, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                state["count"] = state.get("count", 0) + 1
                state.setdefault("seen", []).append(float(grad.abs().max()))
                if parameter.ndim == 2:
                    row, column = grad.square().mean(1), grad.square().mean(0)
                    state["row"] = state.get("row", 0) + row
                    state["column"] = state.get("column", 0) + column
                    grad = grad / (state["row"][:, None] * state["column"]).sqrt()
                parameter.sub_(group["lr"] * (grad + group["weight_decay"] * parameter))


class Momentum(torch.optim.Optimizer):
    """As Muon: one momentum, and a rate that is a tensor."""

    def __init__(self, groups: Groups) -> None:
        for group in groups:
            group["lr"] = torch.tensor(group["lr"])
        super().__init__(groups, {"weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(group["lr"] * state["momentum"])


OPTIMIZERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "plain sgd": lambda groups: torch.optim.SGD(groups),
    "factored": Factored,
    "momentum": Momentum,
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda o: LambdaLR(o, lambda step: 0.5**step),
    "sgd": lambda o: SequentialLR(o, [ConstantLR(o, 0.5, 3), LambdaLR(o, _halved)], [2]),
    "plain sgd": lambda o: ReduceLROnPlateau(o, patience=0, min_lr=1e-9),
    "factored": lambda o: LambdaLR(o, lambda step: 0.5**step),
}


def _halved(step: int) -> float:
    return 0.5**step


def build(layers: list[int], split: str, kind: str, *, blank: bool = False) -> State:
    """What one rank has: of a matrix the rate and decay are others than of a vector."""
    model = Stage(layers, blank=blank)
    scale = 7.0 if blank else 1.0
    by_group: dict[Any, Groups] = {}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2
        place = {"ndim": is_matrix, "turned": is_matrix, "each": name}[split]
        options = {"lr": (0.1 if is_matrix else 0.2) * scale, "weight_decay": 0.1 * is_matrix}
        group = by_group.setdefault(place, [{"params": [], **options}])[0]
        group["params"].append(parameter)
    groups = [by_group[place][0] for place in sorted(by_group, reverse=split == "turned")]
    optimizer = OPTIMIZERS[kind](groups)
    state = {"model": model, "optimizer": optimizer, "tokens": 0}
    if kind in SCHEDULERS:
        state["scheduler"] = SCHEDULERS[kind](optimizer)
    return state


def train(state: State, steps: range) -> None:
    """Gradients that only a parameter's name and the step decide."""
    for step in steps:
        for name, parameter in state["model"].named_parameters():
            number = sum(map(ord, name)) + 100 * step
            grad = torch.arange(parameter.numel(), dtype=torch.float32).add_(number).sin_()
            parameter.grad = grad.view(parameter.shape)
        state["optimizer"].step()
        scheduler = state.get("scheduler")
        if scheduler is not None:
            plateau = isinstance(scheduler, ReduceLROnPlateau)
            scheduler.step(*([1.0] if plateau else []))
        state["tokens"] += 1


def facts(state: State) -> dict[str, Any]:
    """All there is of every parameter, by its name; and what schedulers say of its group."""
    found: dict[str, Any] = {"tokens": state["tokens"]}
    optimizer, scheduler = state["optimizer"], state.get("scheduler")
    names = {id(p): n for n, p in state["model"].named_parameters()}
    for name, tensor in state["model"].state_dict().items():
        found[f"model {name}"] = tensor
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[id(parameter)]
            found[f"lr {name}"], found[f"decay {name}"] = group["lr"], group["weight_decay"]
            for kind, value in optimizer.state[parameter].items():
                found[f"state {name} {kind}"] = value
            for path, by_group in _by_group(scheduler):
                found[f"scheduler {path} {name}"] = by_group[number]
    return found


def _by_group(scheduler: Any) -> Iterator[tuple[str, list[Any]]]:
    for inner in getattr(scheduler, "_schedulers", []):
        for path, values in _by_group(inner):
            yield f"{type(inner).__name__}.{path}", values
    for name in ("base_lrs", "_last_lr", "min_lrs"):
        if hasattr(scheduler, name):
            yield name, getattr(scheduler, name)


def wrong(state: State, whole: dict[str, Any]) -> list[str]:
    """What is not as in the one process that has all layers."""
    found = facts(state)
    unknown = [name for name in found if name not in whole]
    return unknown + differences(found, {name: whole[name] for name in found if name in whole})


#: Which rank has which layers. "experts": layer 0 is on all of them, the others on one or two.
STAGES: dict[str, list[list[int]]] = {
    "one": [[0, 1, 2, 3, 4]],
    "half": [[0, 1, 2], [3, 4]],
    "late": [[0], [1, 2, 3, 4]],
    "crossed": [[3, 1], [4, 0, 2]],
    "twice": [[0, 1], [2, 3, 4], [0, 1], [2, 3, 4]],
    "experts": [[0, 1], [0, 2], [0, 3, 4], [0, 4]],
}
SAVED = {  # how it was saved: the stages and the groups
    1: [("one", "ndim")],
    2: [("half", "ndim"), ("late", "each")],
    4: [("twice", "turned"), ("experts", "each")],
}
RESTORED = {
    1: [("one", "ndim"), ("one", "each")],
    2: [("half", "each"), ("late", "turned"), ("crossed", "ndim")],
    4: [("twice", "ndim"), ("experts", "turned")],
}


def _save(rank: int, world: int, root: str) -> None:
    for kind in OPTIMIZERS:
        for stages, split in SAVED[world]:
            state = build(STAGES[stages][rank], split, kind)
            train(state, range(3))
            holdfast.save(f"{root}/{stages}-{split}/{kind}", state, step=3)
            if kind == "adamw" and stages == "half":
                with holdfast.Checkpointer(f"{root}/kept/{kind}", state, storage=None) as kept:
                    kept.restore()
                    kept.save(3, durable=True)


def _places(kind: str) -> list[str]:
    found = [f"{stages}-{split}" for some in SAVED.values() for stages, split in some]
    return [*found, "kept"] if kind == "adamw" else found


def _load(rank: int, world: int, root: str) -> list[str]:
    found = []
    for kind in OPTIMIZERS:
        before, after = torch.load(f"{root}/{kind}.truth", weights_only=False)
        for saved in _places(kind):
            for stages, split in RESTORED[world]:
                state = build(STAGES[stages][rank], split, kind, blank=True)
                holdfast.load(f"{root}/{saved}/{kind}", state)
                problems = wrong(state, before)
                train(state, range(3, 5))
                problems += [f"later {name}" for name in wrong(state, after)]
                if problems:
                    found.append(f"{kind} {saved} -> {stages}-{split}: {problems[:6]}")
    if world == 2:
        found += _refusals(rank, root)
    return found


def _refusals(rank: int, root: str) -> list[str]:
    """What each rank is told when something does not fit, wherever that is seen."""
    said = [f"{_refused(f'{root}/one-ndim/adamw', build([rank], 'ndim', 'adamw'))}"]
    joined = build(STAGES["half"][rank], "ndim", "adamw")
    del joined["scheduler"]
    if rank == 1:
        groups = joined["optimizer"].param_groups
        groups[0]["params"] += groups.pop()["params"]
    said.append(_refused(f"{root}/one-ndim/adamw", joined))
    more = build(STAGES["half"][rank], "ndim", "adamw")
    del more["scheduler"]
    more["model"].layers["9"] = Layer(9)
    more["optimizer"].add_param_group({"params": list(more["model"].layers["9"].parameters())})
    said.append(_refused(f"{root}/half-ndim/adamw", more))
    return [f"refused: {text}" for text in said]


def _refused(root: str, state: State) -> str:
    before = facts(state)
    with pytest.raises(holdfast.StateMismatch) as caught:
        holdfast.load(root, state)
    assert not differences(facts(state), before)
    return "\n".join(caught.value.fields["problems"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every optimizer, saved by 1, 2 and 4 ranks; and what one process has, then and later."""
    root = tmp_path_factory.mktemp("stages")
    for kind in OPTIMIZERS:
        state = build(list(LAYERS), "each", kind)
        train(state, range(3))
        before = facts(state)
        before = {name: _copied(value) for name, value in before.items()}
        train(state, range(3, 5))
        torch.save((before, facts(state)), root / f"{kind}.truth")
    _save(0, 1, str(root))
    arena = Path(tempfile.mkdtemp(prefix="hf-test-", dir="/dev/shm"))
    with pytest.MonkeyPatch.context() as patch:  # the fixture for one test is not there yet
        patch.setenv("HOLDFAST_ARENA_DIR", str(arena))
        for world in (2, 4):
            run_ranks(world, _save, str(root))
    end_keepers(arena, grace_s=5.0)
    shutil.rmtree(arena)
    return root


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def test_one_process_takes_the_place_of_a_pipeline(saved: Path) -> None:
    assert _load(0, 1, str(saved)) == []


def test_stages_are_restored_from_any_others_and_what_fits_none_is_refused_by_all(
    saved: Path,
) -> None:
    first, second = run_ranks(2, _load, str(saved))
    assert [text for text in first + second if not text.startswith("refused")] == []
    assert len(first) == 3
    nobodys, joined, unsaved = first
    assert "optimizer.layers.4.up.weight.exp_avg: in the checkpoint, but nothing" in nobodys
    assert "optimizer.layers.4.up.weight: saved, but not in this optimizer" in nobodys
    assert "model.layers.4: has extra state in the checkpoint, but none in the model" in nobodys
    assert not any(f"layers.{mine}." in nobodys for mine in (0, 1))
    assert "layers.9.up.weight: not in the saved optimizer" in unsaved
    assert "optimizer: group 0 joins parameters saved in groups that differ in" in second[1]
    assert "lr, weight_decay, as layers.3.up.bias and layers.3.up.weight do" in second[1]
    assert first[0] == second[0]
    assert joined == second[1]


def test_experts_and_replicated_stages_are_restored_from_any_others(saved: Path) -> None:
    assert run_ranks(4, _load, str(saved)) == [[], [], [], []]
