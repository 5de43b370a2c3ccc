"""Measure what a save asks of the training thread itself: describing, staging, the fence.

Copying is not in these figures: it runs behind the next forward and backward, which lies between
any two of these saves as it does in a training, and pushes what the save looks at out of the
processor's caches.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast
from benchmarks.kit import disk, machine, markdown, results, series
from benchmarks.kit.options import Parser
from benchmarks.kit.training import Layers
from holdfast.events import Event, SaveReturned

WARM_UP = 5
FIGURES = {
    "save": "save",
    "save, processor": "its processor time",
    "describe": "of it: describe",
    "volatile": "of it: volatile leaves",
    "fence": "fence",
}


class Block(nn.Module):
    """One layer of a GPT: 16 parameters in ten modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        mixed = nn.functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))
        x = x + self.out(mixed)
        y = self.down(torch.relu(self.up(self.other_norm(x))))
        return x + y


class Gpt(nn.Module):
    """Embeddings and ``layers`` blocks; with AdamW each parameter makes four leaves."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x: Tensor = self.norm(self.blocks(self.tokens(tokens) + self.places(places)))
        return x @ self.tokens.weight.T


def gpt(width: int, layers: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model and its loss on the same tokens each time."""
    model = Gpt(width, layers)
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    return model, lambda: nn.functional.cross_entropy(model(tokens).mT, tokens.roll(1, 1))


def large(width: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Sixteen square weights and a loss."""
    model, batch = Layers(width), torch.randn(8, width)
    return model, lambda: model(batch).square().mean()


def adapted(width: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Sixteen square weights that are frozen, a low-rank adapter for each, and a loss."""
    base, adapters = Layers(width), nn.ModuleList(nn.Linear(width, 4) for _ in range(16))
    base.requires_grad_(False)
    model, batch = nn.ModuleList([base, adapters]), torch.randn(8, width)
    return model, lambda: sum((a(base(batch)).square().mean() for a in adapters), torch.zeros(()))


class Case:
    """One training, its Checkpointer, and what each save of it cost in milliseconds."""

    def __init__(self, root: Path, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        self._loss = loss
        trained = [one for one in model.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self.found: dict[str, list[float]] = defaultdict(list)
        self.collections = self.steps = 0
        self._returned: list[SaveReturned] = []
        self._train()
        self._optimizer.step()
        state: dict[str, Any] = {
            "model": model,
            "optimizer": self._optimizer,
            "rng": holdfast.Rng(),
            "tokens": 0,
            "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, 1000),
        }
        self._checkpointer = holdfast.Checkpointer(root, state, storage=None)
        self._checkpointer.restore()
        self._stop = holdfast.subscribe(self._hear)
        for _ in range(WARM_UP):
            self.turn()
        self.found.clear()
        self.collections = 0

    def turn(self) -> None:
        """Save, train, and update behind the fence."""
        self.steps += 1
        self._checkpointer.state["tokens"] += 128
        gc.callbacks.append(self._collected)
        cpu, began = time.thread_time(), time.perf_counter()
        self._checkpointer.step(self.steps)
        self._note("save", time.perf_counter() - began)
        self._note("save, processor", time.thread_time() - cpu)
        gc.callbacks.remove(self._collected)
        self._note("describe", self._returned[-1].describe_s)
        self._note("volatile", self._returned[-1].volatile_s)
        self._train()
        self._checkpointer.before_update()  # of a copy longer than the step, that is no host time
        began = time.perf_counter()
        self._checkpointer.before_update()
        self._note("fence", time.perf_counter() - began)
        self._optimizer.step()

    def close(self) -> dict[str, Any]:
        """What was found."""
        self._stop()
        self._checkpointer.close()
        return {
            "leaves": self._returned[-1].leaves,
            "size_bytes": self._returned[-1].size_bytes,
            "collections": self.collections,
            "figures_ms": series.summaries(self.found),
        }

    def _train(self) -> None:
        self._optimizer.zero_grad(set_to_none=False)
        self._loss().backward()

    def _note(self, figure: str, elapsed_s: float) -> None:
        self.found[figure].append(1e3 * elapsed_s)

    def _hear(self, event: Event, _: float) -> None:
        if isinstance(event, SaveReturned):
            self._returned.append(event)

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        self.collections += phase == "start"


def shown(cases: dict[str, dict[str, Any]], facts: dict[str, str], rounds: int) -> str:
    """The figures as markdown."""
    rows: list[Sequence[str]] = []
    for name, found in cases.items():
        figures = [found["figures_ms"][key] for key in FIGURES]
        size = f"{found['size_bytes'] / 1e9:.2f} GB in {found['leaves']} leaves"
        cells = [markdown.spread(one, 2) for one in figures]
        rows.append([f"{name}: {size}", *cells, str(found["collections"])])
    return "\n\n".join(
        [
            f"{markdown.heading(facts, is_short=True)}. Milliseconds, medians of {rounds} saves "
            "(lowest–highest), each after a forward and a backward; the last column counts garbage "
            "collections begun in all of these saves.",
            markdown.table(["", *FIGURES.values(), "collections"], rows),
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Measure each state, one after the other."""
    parser = Parser("host", __doc__)
    parser.add_rounds(21, "saves measured per state")
    parser.add_argument("--width", type=int, default=384, help="width of the GPTs (384)")
    parser.add_argument("--wide", type=int, default=2887, help="width of the 16 layers (2887)")
    parser.add_directory("a directory for the roots")
    options = parser.parse(arguments)
    makers = {
        "48 tensors": lambda: large(options.wide),
        "adapters": lambda: adapted(options.wide),
        "3,000 leaves": lambda: gpt(options.width, 47),
        "4,000 leaves": lambda: gpt(options.width, 62),
    }
    found: dict[str, dict[str, Any]] = {}
    with disk.scratch(options.dir, 1 << 20) as root:
        facts = machine.facts(root, ["torch"])
        for name, make in makers.items():
            torch.manual_seed(0)
            case = Case(root / name, *make())
            for _ in range(options.rounds):
                case.turn()
            found[name] = case.close()
            del case
            gc.collect()
    text = shown(found, facts, options.rounds)
    print(text)
    results.keep("host", facts, {"cases": found}, text)
    return 0
