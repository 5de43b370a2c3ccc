"""Small trainings whose every step leaves another state, and saves aimed at the middle of one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import holdfast
from holdfast.offload import HybridAdamW, HybridSGD

Copy = dict[str, Any]
Hook = Callable[[], object]

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.1, foreach=False),
    "adamw foreach": lambda model: torch.optim.AdamW(model.parameters(), 0.1, foreach=True),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), 0.1, fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda model: torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, foreach=True
    ),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3),
    "hybrid adamw": lambda model: HybridAdamW(model.parameters(), 0.1),
    "hybrid sgd": lambda model: HybridSGD(model.parameters(), 0.1, momentum=0.9),
}


class Training:
    """A model, its optimizer, and a copy of both behind every step."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.optimizer = OPTIMIZERS[kind](self.model)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.copies: list[Copy] = []
        self.saves: list[tuple[int, holdfast.SaveHandle]] = []
        self._inputs = count(seed)

    def copy(self) -> Copy:
        """All that is trained, apart from it."""
        found = {f"model.{n}": p.detach().clone() for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for kind, held in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{kind}"] = _apart(held)
        return found

    def closure(self) -> torch.Tensor:
        """A loss with its gradients."""
        self.optimizer.zero_grad()
        x = torch.full((2, 5), float(self._input))
        loss: torch.Tensor = self.model(x).square().sum() + sum(
            p.sum() for p in self.model.parameters()
        )
        loss.backward()
        return loss.detach()

    def prepare(self) -> None:
        """The gradients of the next step."""
        self._input = 0.1 + 0.01 * next(self._inputs)
        self.closure()

    def call_step(self, inside: Hook | None = None) -> None:
        """Only the call; ``inside`` the closure, where it takes one."""

        def closure() -> torch.Tensor:
            loss = self.closure()
            if inside is not None:
                inside()
            return loss

        if inside is not None or self.kind == "lbfgs":
            self.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            self.optimizer.step()

    def step(self, inside: Hook | None = None) -> Copy:
        """A whole step, and what it leaves."""
        self.prepare()
        self.call_step(inside)
        self.copies.append(self.copy())
        return self.copies[-1]


def _apart(held: Any) -> Any:
    if isinstance(held, torch.Tensor):
        return held.detach().clone()
    if isinstance(held, list):
        return [_apart(one) for one in held]
    return held


def are_equal(one: Copy, other: Copy) -> bool:
    """Bit for bit, and by the same names."""
    return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)


def restored(root: Path, kind: str, step: int) -> Copy:
    """What is stored of a step, in a model and an optimizer made anew."""
    other = Training(kind, seed=99)
    other.step()
    holdfast.load(root, other.state, step=step)
    return other.copy()


@contextmanager
def at_bytecode(number: int, act: Hook) -> Iterator[Callable[[], int]]:
    """``act`` before the bytecode of this number that runs within, as a signal's handler does.

    Gives how many there were.
    """
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            seen += 1
            if seen == number:
                act()  # nothing is traced within
        return trace

    before = sys.gettrace()
    gc.disable()  # others' callbacks of the collector are no part of what runs within
    sys.settrace(trace)
    try:
        yield lambda: seen
    finally:
        sys.settrace(before)
        gc.enable()
