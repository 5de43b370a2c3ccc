"""A wrapper that gives another module's state_dict for its own leaves no trace in a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

import holdfast
from holdfast.errors import StateMismatch
from holdfast.state import modules as forwarding
from support.models.models import differences


class Block(nn.Module):
    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x) * self.scale)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Single(nn.Module):
    """As a framework's data parallelism: one child, whose state is all there is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("bucket", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)

    def state_dict(self, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)


class WithBuffers(Single):
    """As Megatron's data parallelism, which calls its gradient buffers ``buffers``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.buffers = [torch.zeros(3)]  # type: ignore[assignment]


class Twofold(nn.Module):
    """It calls one child, which is around the other, and gives the state of the other."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = DataParallel(module)
        self._original_module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward_module(x)

    def state_dict(self, **how: Any) -> Any:
        return self._original_module.state_dict(**how)


AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "": lambda module: module,
    "single": Single,
    "with buffers": WithBuffers,
    "twofold": Twofold,
    "both": lambda module: Single(Twofold(module)),
    "inside": lambda module: module,
}


def state_of(how: str, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), nn.Linear(4, 2))
    inner: Any = model[0]
    inner.seen = 7 + seed
    if how == "inside":
        model[0] = Twofold(inner)
    wrapped = AROUND[how](model)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    wrapped(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return {"model": wrapped, "optimizer": optimizer, "inner": {"seen": 0}}


def tensors(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = dict(enumerate(state["model"].parameters()))  # type: ignore[arg-type]
    kept = state["optimizer"].state
    for number, p in enumerate(state["model"].parameters()):
        found |= {f"{number} {kind}": tensor for kind, tensor in kept[p].items()}
    return found


def extra(state: dict[str, Any]) -> int:
    (block,) = [each for each in state["model"].modules() if isinstance(each, Block)]
    return block.seen


@pytest.mark.parametrize("after", AROUND)
@pytest.mark.parametrize("before", AROUND)
def test_a_module_is_stored_and_read_under_its_own_names(
    before: str, after: str, tmp_path: Path
) -> None:
    saved, back = state_of(before), state_of(after, 1)
    holdfast.save(tmp_path, saved)
    with holdfast.open(tmp_path) as checkpoint:
        names = {leaf for leaf in checkpoint.leaves if leaf.startswith("model.")}
    assert names == {
        f"model.{name}"
        for name in (
            "0.up.weight",
            "0.up.bias",
            "0.down.weight",
            "0.down.bias",
            "0.scale",
            "1.weight",
            "1.bias",
        )
    }
    holdfast.load(tmp_path, back)
    assert differences(tensors(back), tensors(saved)) == []
    assert extra(back) == extra(saved) == 7


@pytest.mark.parametrize("how", ["single", "twofold", "both", "inside"])
def test_a_checkpoint_that_has_a_wrappers_names_is_read_into_such_a_wrapper(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = state_of(how)
    with monkeypatch.context() as patch:  # as it was written once
        patch.setattr("holdfast.state.modules.spoken_for", lambda _: None)
        holdfast.save(tmp_path, saved)
    with holdfast.open(tmp_path) as checkpoint:
        assert "model.0.up.weight" not in checkpoint.leaves
    back = state_of(how, 1)
    with holdfast.Checkpointer(tmp_path, back) as ckpt:
        assert ckpt.restore() is not None
        assert differences(tensors(back), tensors(saved)) == []
        assert extra(back) == 7
        ckpt.save(9, durable=True).wait_durable()
    with holdfast.open(tmp_path) as checkpoint:
        assert "model.0.up.weight" in checkpoint.leaves
    plain = state_of("", 1)
    with pytest.raises(StateMismatch):
        holdfast.load(tmp_path, plain, step=0)


def changed(more: Callable[[Single], None]) -> nn.Module:
    module = Single(nn.Linear(4, 2))
    more(module)
    return module


class Renaming(Single):
    def state_dict(self, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        found = self.module.state_dict(keep_vars=keep_vars)
        return {f"net.{name}": value for name, value in found.items()}


class Silent(nn.Module):
    """One child and no word of its own about its state: its author's name counts."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


OWN: dict[str, Callable[[], nn.Module]] = {
    "a parameter": lambda: changed(
        lambda m: m.register_parameter("gain", nn.Parameter(torch.ones(2)))
    ),
    "a buffer": lambda: changed(lambda m: m.register_buffer("gain", torch.ones(2))),
    "another child": lambda: changed(lambda m: m.add_module("head", nn.Linear(2, 2))),
    "other names": lambda: Renaming(nn.Linear(4, 2)),
    "nothing said": Silent,
}


@pytest.mark.parametrize("what", OWN)
def test_a_module_with_anything_of_its_own_keeps_its_name(what: str) -> None:
    assert forwarding.spoken_for(OWN[what]()) is None


def test_it_is_asked_again_when_its_children_are_others() -> None:
    module = Single(nn.Linear(4, 2))
    assert forwarding.spoken_for(module) == "module"
    module.head = nn.Linear(2, 2)
    assert forwarding.spoken_for(module) is None
    del module.head
    assert forwarding.spoken_for(module) == "module"
