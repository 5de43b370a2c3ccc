"""Runs on a device that are saved before each of many updates, made in one of all the ways."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.accelerator import devices

WIDTH = 64
_PAUSES_S = (0.0, 0.0, 0.002, 0.01)


def captured(work: Callable[[], object], device: str) -> Callable[[], object]:
    """Captures ``work`` into a graph of the device, and returns what replays it."""
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay
    import simdev  # type: ignore[import-not-found]

    where = torch.device(device, 0)
    before, stream = devices.current_stream(where), torch.Stream(where)
    stream.wait_stream(before)
    with devices.use_stream(stream):
        recorded = simdev.begin_capture()
        try:
            work()
        finally:
            simdev.end_capture(recorded)
    return lambda: simdev.replay(recorded)


class UpdatedRun:
    """A model, its optimizer, and gradients that stay."""

    def __init__(self, device: str, way: str, width: int = WIDTH) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)]
        self.device, self.model = device, nn.Sequential(*layers).to(device)
        self.parameters = list(self.model.parameters())
        self.optimizers = self._optimizers(way)
        self.gradients = [torch.full_like(one, 0.5) for one in self.parameters]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.others = [torch.full_like(one, 0.25) for one in self.parameters]
        self.checkpointer: holdfast.Checkpointer | None = None
        self.update: Callable[[], object] = WAYS[way](self)

    def _optimizers(self, way: str) -> dict[str, torch.optim.Optimizer]:
        if way == "in backward":
            return {
                f"optimizer{n}": torch.optim.SGD([one], 0.001, momentum=0.5)
                for n, one in enumerate(self.parameters)
            }
        is_fused, on_device = way == "fused", self.device != "cpu"
        optimizer = torch.optim.AdamW(
            self.parameters, 0.01, fused=is_fused, capturable=on_device and not is_fused
        )
        return {"optimizer": optimizer}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, **self.optimizers}

    def step(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.step()

    @torch.no_grad()
    def loop(self) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.add_(gradient, alpha=-0.1)

    def content(self) -> dict[str, torch.Tensor]:
        """The bytes of all leaves."""
        found = {name: _bytes(one.detach()) for name, one in self.model.named_parameters()}
        for optimizer in self.optimizers.values():
            for number, state in enumerate(optimizer.state.values()):
                for kind, one in state.items():
                    found[f"{kind} {len(found)} {number}"] = _bytes(one)
        return found

    def fence(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.before_update()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().clone().reshape(-1).view(torch.uint8)


def _in_backward(run: UpdatedRun) -> Callable[[], object]:
    for parameter, optimizer in zip(run.parameters, run.optimizers.values(), strict=True):

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()

        parameter.register_post_accumulate_grad_hook(step)
    data = torch.ones(4, run.parameters[0].shape[1], device=run.device)
    return lambda: run.model(data).square().mean().backward()


def _by_data(run: UpdatedRun) -> Callable[[], object]:
    def update() -> None:
        for parameter, gradient in zip(run.parameters, run.gradients, strict=True):
            parameter.data.add_(gradient, alpha=-0.1)

    return update


def _swapped(run: UpdatedRun) -> Callable[[], object]:
    @torch.no_grad()
    def update() -> None:
        for parameter, other in zip(run.parameters, run.others, strict=True):
            kept = parameter.clone()
            parameter.copy_(other)
            other.copy_(kept)

    return update


def _replayed(run: UpdatedRun) -> Callable[[], object]:
    return captured(run.step, run.device)


def _behind_fence(update: Callable[[UpdatedRun], Callable[[], object]]) -> Any:
    def make(run: UpdatedRun) -> Callable[[], object]:
        inner = update(run)

        def fenced() -> None:
            run.fence()
            inner()

        return fenced

    return make


#: Updates that are held until the copies are done: none of them may be reported.
FENCED: Mapping[str, Callable[[UpdatedRun], Callable[[], object]]] = {
    "foreach": lambda run: run.step,
    "fused": lambda run: run.step,
    "compiled": lambda run: torch.compile(run.step, backend="eager"),
    "in backward": _in_backward,
    "by hand": _behind_fence(lambda run: run.loop),
    "replayed": _replayed,
    "replayed behind a fence": _behind_fence(_replayed),
}
#: Updates that call nothing of Holdfast.
AROUND: Mapping[str, Callable[[UpdatedRun], Callable[[], object]]] = {
    "loop": lambda run: run.loop,
    "by data": _by_data,
    "swapped": _swapped,
    "loop in a graph": lambda run: captured(run.loop, run.device),
}
WAYS = {**FENCED, **AROUND}


def outcomes(run: UpdatedRun, root: Path, saves: int, seed: int = 0) -> Counter[str]:
    """Saves before each of so many updates, and counts the saves that are right, told to be
    overtaken, and torn without a word.
    """
    found: Counter[str] = Counter()
    chance = random.Random(seed)
    again = UpdatedRun("cpu", "foreach" if len(run.optimizers) == 1 else "in backward")
    run.checkpointer = holdfast.Checkpointer(root, run.state, storage=None)
    with suppress(holdfast.CaptureOvertaken), run.checkpointer:
        _save_all(run, run.checkpointer, again, root, saves, chance, found)
    return found


def _save_all(
    run: UpdatedRun,
    checkpointer: holdfast.Checkpointer,
    again: UpdatedRun,
    root: Path,
    saves: int,
    chance: random.Random,
    found: Counter[str],
) -> None:
    for step in range(saves):
        truth = run.content()
        handle = checkpointer.save(step, durable=True)
        time.sleep(chance.choice(_PAUSES_S))
        run.update()
        try:
            handle.wait_durable(60)
        except holdfast.CaptureOvertaken:
            found["told"] += 1
            continue
        holdfast.load(root, again.state, step)
        loaded = again.content()
        is_right = all(torch.equal(loaded[name], truth[name]) for name in truth)
        found["right" if is_right else "torn"] += 1
