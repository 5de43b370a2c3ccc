"""Every kind of change between two saves that the second must notice, as functions of a state."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

State = dict[str, Any]
Change = Callable[[State], None]
CHANGES: dict[str, Change] = {}


class Kept(nn.Linear):
    """Has a value of its own."""

    note: Any = "a"

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


class OtherKept(Kept):
    """The same, stored otherwise."""

    def get_extra_state(self) -> Any:
        return ["other", self.note]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(4, 4)
        self.kept = Kept(4, 4)
        self.register_buffer("mask", torch.arange(4.0))
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("seen", self._buffers["wave"].imag)  # type: ignore[union-attr]
        self.register_buffer("none", None)
        self.register_buffer("void", torch.empty(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.inner = Inner()
        self.head = nn.Linear(4, 6, bias=False)
        self.norm = nn.BatchNorm1d(4)


class Holder:
    """Gives its state itself: a tensor made anew each time among it."""

    def __init__(self) -> None:
        self.count = 0
        self.dtype, self.size = torch.float32, 5
        self.more: Any = None

    def state_dict(self) -> State:
        return {
            "history": torch.full((self.size,), self.count, dtype=self.dtype),
            "more": self.more,
        }

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError


def _unhooked() -> type:
    """One whose step runs no hooks; made anew, for torch may yet hook it."""
    return type("Unhooked", (torch.optim.AdamW,), {"step": lambda *_: None})


def step(state: State) -> None:
    """An optimizer's step, as after a backward."""
    for number, parameter in enumerate(state["model"].parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * number + 0.1)
    state["optimizer"].step()


def build() -> State:
    """A state with something of everything."""
    torch.manual_seed(0)
    model = Net()
    weights: list[Any] = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[State] = [{"params": weights, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state: State = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "holder": Holder(),
        "average": deepcopy(model),
        "tokens": 0,
        "plain": {"list": [1, 2.5], "x": torch.ones(3)},
    }
    step(state)
    return state


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


def _weight(state: State) -> nn.Parameter:
    found: nn.Parameter = state["model"].inner.square.weight
    return found


def _moments(state: State) -> State:
    found: State = state["optimizer"].state[state["model"].inner.kept.weight]
    return found


# ── tensors ──────────────────────────────────────────────────────────────────────────────────


@change
def nothing(state: State) -> None:
    """But what changes by itself."""


@change
def optimizer_step(state: State) -> None:
    step(state)


@change
def data_moved(state: State) -> None:
    _weight(state).data = _weight(state).data.clone() + 1


@change
def data_transposed(state: State) -> None:
    _weight(state).data = _weight(state).data.t()


@change
def data_reshaped(state: State) -> None:
    mask = state["model"].inner.mask
    mask.data = mask.data.view(2, 2) if mask.ndim == 1 else mask.data.view(4)


@change
def data_retyped(state: State) -> None:
    mask = state["model"].inner.mask
    other = torch.int32 if mask.dtype == torch.float32 else torch.float32
    mask.data = mask.data.view(other)


@change
def data_conjugated(state: State) -> None:
    wave = state["model"].inner.wave
    wave.data = wave.data.conj()


@change
def data_negated(state: State) -> None:
    inner = state["model"].inner
    inner.seen.data = inner.wave.resolve_conj().conj().imag
    inner.wave.data = inner.wave.data.resolve_conj()


@change
def seen_through_its_conjugate(state: State) -> None:
    inner = state["model"].inner
    if not inner.wave.is_conj():
        inner.seen.data = inner.wave.data.conj().imag


@change
def moment_moved(state: State) -> None:
    _moments(state)["exp_avg"].data = _moments(state)["exp_avg"].data.clone() * 2


@change
def storage_resized(state: State) -> None:
    mask = state["model"].inner.mask
    mask.untyped_storage().resize_(1 << 20)
    mask.fill_(7)


@change
def module_doubled(state: State) -> None:
    state["model"].double()


@change
def part_halved(state: State) -> None:
    state["average"].inner.square.half()


@change
def buffer_resized(state: State) -> None:
    state["average"].norm.running_mean.resize_(2)


@change
def frozen(state: State) -> None:
    _weight(state).requires_grad_(not _weight(state).requires_grad)


# ── modules ──────────────────────────────────────────────────────────────────────────────────


@change
def parameter_replaced(state: State) -> None:
    """By one of the same elements, as a setter may do, and in the optimizer too."""
    old = state["model"].head.weight
    new = state["model"].head.weight = nn.Parameter(old.detach().clone())
    for group in state["optimizer"].param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    if old in state["optimizer"].state:
        state["optimizer"].state[new] = state["optimizer"].state.pop(old)


@change
def parameter_added(state: State) -> None:
    if not hasattr(state["model"].inner, "added"):
        state["model"].inner.added = nn.Parameter(torch.ones(3))


@change
def parameter_removed(state: State) -> None:
    if hasattr(state["average"].inner, "kept"):
        state["average"].inner.kept.bias = None


@change
def parameter_renamed(state: State) -> None:
    norm = state["model"].norm
    held = norm._parameters.pop("bias", None)
    if held is not None:
        norm.register_parameter("shift", held)


@change
def parameter_passed_on(state: State) -> None:
    """From the end of one dict to the beginning of the next: the same keys in the same order."""
    embed, inner = state["average"].embed, state["average"].inner
    if "weight" in embed._parameters:
        inner._parameters["weight"] = embed._parameters.pop("weight")


@change
def dict_replaced(state: State) -> None:
    inner = state["average"].inner.square
    inner._parameters = {"weight": nn.Parameter(torch.randn(4, 4))}


@change
def buffer_replaced(state: State) -> None:
    state["model"].inner.mask = torch.rand(4)


@change
def buffer_added(state: State) -> None:
    state["model"].head.register_buffer("late", torch.rand(2))


@change
def buffer_removed(state: State) -> None:
    state["model"].norm._buffers.pop("num_batches_tracked", None)


@change
def buffer_not_saved(state: State) -> None:
    inner = state["average"].inner
    inner.register_buffer("mask", inner.mask, persistent=False)


@change
def buffer_saved_again(state: State) -> None:
    inner = state["average"].inner
    inner.register_buffer("mask", inner.mask, persistent=True)


@change
def none_filled(state: State) -> None:
    state["model"].inner.none = torch.rand(2)


@change
def module_replaced(state: State) -> None:
    state["average"].inner.square = nn.Linear(4, 4)


@change
def module_added(state: State) -> None:
    state["average"].inner.late = nn.Linear(2, 2)


@change
def module_removed(state: State) -> None:
    state["average"].inner._modules.pop("late", None)
    state["average"]._modules.pop("norm", None)


@change
def module_renamed(state: State) -> None:
    modules = state["average"]._modules
    for name, other in (("head", "tail"), ("tail", "head")):
        if name in modules:
            modules[other] = modules.pop(name)
            return


@change
def modules_swapped(state: State) -> None:
    inner = state["average"].inner
    inner.square, inner.kept = inner.kept, inner.square


@change
def module_wrapped(state: State) -> None:
    if isinstance(state["model"].inner, Inner):
        state["model"].inner = torch.compile(state["model"].inner, backend="eager")


@change
def model_wrapped(state: State) -> None:
    state["average"] = nn.DataParallel(state["average"])


@change
def class_changed(state: State) -> None:
    inner = state["model"].inner
    inner.kept.__class__ = OtherKept if type(inner.kept) is Kept else Kept
    inner.square.__class__ = Kept if type(inner.square) is nn.Linear else nn.Linear


@change
def extra_state_changed(state: State) -> None:
    state["model"].inner.kept.note += "b"


@change
def renormalised(state: State) -> None:
    embed = state["model"].embed
    embed.max_norm = 1.0 if embed.max_norm is None else None


@change
def tied(state: State) -> None:
    state["average"].head.weight = state["average"].embed.weight


@change
def untied(state: State) -> None:
    model = state["average"]
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone() + 1)


@change
def tied_by_memory(state: State) -> None:
    state["average"].head.weight.data = state["average"].embed.weight.data


@change
def untied_by_memory(state: State) -> None:
    state["average"].head.weight.data = state["average"].head.weight.data.clone() + 1


# ── optimizers ───────────────────────────────────────────────────────────────────────────────


@change
def optimizer_loaded(state: State) -> None:
    state["optimizer"].load_state_dict(deepcopy(state["optimizer"].state_dict()))
    step(state)


@change
def state_cleared(state: State) -> None:
    state["optimizer"].state.clear()


@change
def state_of_one_gone(state: State) -> None:
    state["optimizer"].state.pop(state["model"].inner.kept.weight, None)


@change
def state_key_added(state: State) -> None:
    _moments(state)["max_exp_avg_sq"] = torch.rand(4, 4)


@change
def state_key_removed(state: State) -> None:
    _moments(state).pop("max_exp_avg_sq", None)
    _moments(state).pop("note", None)


@change
def state_key_renamed(state: State) -> None:
    kept = _moments(state)
    if "exp_avg" in kept:
        kept["ema"] = kept.pop("exp_avg")
    elif "ema" in kept:
        kept["exp_avg"] = kept.pop("ema")


@change
def state_number(state: State) -> None:
    """Where there was none, then one that grows."""
    kept = _moments(state)
    kept["note"] = kept["note"] + 1 if type(kept.get("note")) is int else 1


@change
def state_number_made_a_tensor(state: State) -> None:
    _moments(state)["note"] = torch.rand(2) if "note" in _moments(state) else 1


@change
def tensor_beside_a_number_replaced(state: State) -> None:
    kept = _moments(state)
    kept["note"] = 1
    kept["exp_avg_sq"] = torch.rand(4, 4)


@change
def state_passed_on(state: State) -> None:
    """First added at the end of one, then given to the next: the same tensors in the same order."""
    held = state["optimizer"].state
    one, other = list(held)[:2]
    if "late" in held[one]:
        held[other] = {"late": held[one].pop("late"), **held[other]}
    else:
        held[one]["late"] = torch.rand(2)


@change
def states_exchanged(state: State) -> None:
    """Between two parameters, each state where it was in the order of all."""
    held = state["optimizer"].state
    square, kept = state["model"].inner.square.weight, state["model"].inner.kept.weight
    to = {square: kept, kept: square}
    pairs = [(to.get(key, key), kept) for key, kept in held.items()]
    held.clear()
    held.update(pairs)


@change
def loose_state(state: State) -> None:
    kept = state["optimizer"].state
    kept["rounds"] = kept["rounds"] + 1 if "rounds" in kept else 1


@change
def group_added(state: State) -> None:
    if len(state["optimizer"].param_groups) < 4:
        extra = nn.Parameter(torch.rand(3))
        state["model"].register_parameter(f"extra{len(state['optimizer'].param_groups)}", extra)
        state["optimizer"].add_param_group({"params": [extra], "lr": 0.5})


@change
def parameter_left_a_group(state: State) -> None:
    state["optimizer"].param_groups[0]["params"].pop()
    for gone in list(state["optimizer"].state):
        groups = state["optimizer"].param_groups
        known = {id(p) for group in groups for p in group["params"]}
        if isinstance(gone, torch.Tensor) and id(gone) not in known:
            del state["optimizer"].state[gone]


@change
def parameter_changed_group(state: State) -> None:
    first, second, *_ = state["optimizer"].param_groups
    second["params"].insert(0, first["params"].pop())


@change
def group_reordered(state: State) -> None:
    state["optimizer"].param_groups[0]["params"].reverse()


@change
def option_changed(state: State) -> None:
    state["optimizer"].param_groups[0]["lr"] *= 0.5


@change
def option_added(state: State) -> None:
    state["optimizer"].param_groups[0]["note"] = [1, 2]


@change
def option_made_a_tensor(state: State) -> None:
    state["optimizer"].param_groups[0]["lr"] = torch.rand(())


@change
def option_made_a_buffer(state: State) -> None:
    """A module's tensor that is met in a value before; then one like it in its place."""
    group, mean = state["optimizer"].param_groups[1], state["model"].norm.running_mean
    group["scale"] = mean.clone() + 1 if group.get("scale") is mean else mean


@change
def hook_gone(state: State) -> None:
    is_hooked = type(state["optimizer"]) is torch.optim.AdamW
    state["optimizer"].__class__ = _unhooked() if is_hooked else torch.optim.AdamW


@change
def optimizer_replaced(state: State) -> None:
    old = state["optimizer"].param_groups
    groups = [{"params": list(group["params"])} for group in old]
    state["optimizer"] = torch.optim.AdamW(groups, lr=0.3)


# ── the state itself ─────────────────────────────────────────────────────────────────────────


@change
def model_replaced(state: State) -> None:
    state["average"] = Net()


@change
def key_added(state: State) -> None:
    state["more"] = nn.Linear(2, 2)


@change
def key_removed(state: State) -> None:
    state.pop("more", None)
    state.pop("plain", None)


@change
def key_renamed(state: State) -> None:
    state["mean"] = state.pop("average")
    state["average"] = state["mean"]
    del state["mean"]


@change
def number_changed(state: State) -> None:
    state["tokens"] += 1


@change
def list_grown(state: State) -> None:
    state.setdefault("plain", {}).setdefault("list", []).append(1 << 60)


@change
def value_tensor_anew(state: State) -> None:
    state["plain"] = {"x": torch.rand(3)}


@change
def value_tensor_written(state: State) -> None:
    state.setdefault("plain", {}).setdefault("x", torch.ones(3)).add_(1)


@change
def value_tensor_reshaped(state: State) -> None:
    state["holder"].size += 1


@change
def value_tensor_retyped(state: State) -> None:
    state["holder"].dtype = torch.int64


@change
def value_tensor_is_a_parameter(state: State) -> None:
    state["holder"].more = state["model"].embed.weight


@change
def value_tensor_is_another_parameter(state: State) -> None:
    state["holder"].more = state["model"].head.weight.detach()


@change
def value_tensor_is_its_own_again(state: State) -> None:
    state["holder"].more = torch.rand(2)


@change
def value_tensors_are_one(state: State) -> None:
    state["plain"] = [torch.rand(2)] * 2


@change
def value_tensor_moved(state: State) -> None:
    """The same tensors the other way round."""
    plain = state.get("plain")
    state["plain"] = plain[::-1] if isinstance(plain, list) else [torch.rand(2), torch.rand(2)]
