"""Train models whose state is saved: real parameters, gradients and AdamW moments, on the CPU.

The update is fused AdamW: it overwrites parameters and moments in place without moving their
version counters, so no system can notice it. Whoever copies too late has stored something else,
and the fingerprints show it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 2887  # divides by nothing a system may like: neither 2, nor 64, nor a page
LAYERS = 16
BLOCKS, HEADS, VOCABULARY, CONTEXT = 62, 8, 5003, 64
Fingerprints = dict[str, str]


class Layers(nn.Module):
    """``LAYERS`` square weights, nothing else: 16 x 33.3 MB, and twice that in moments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        self._width = width

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values) * 1.7)
        return values

    def batch(self, rows: int) -> Tensor:
        return torch.randn(rows, self._width)

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()


class Block(nn.Module):
    """Attention and a feed-forward part: 12 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        rows, length, width = values.shape
        parts = self.qkv(self.before_attention(values)).view(rows, length, 3, HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return values + self.down(functional.gelu(self.up(self.before_mlp(values))))


class Gpt(nn.Module):
    """A deep, narrow GPT: 750 parameters, so 3,000 leaves with the optimizer's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def batch(self, rows: int) -> Tensor:
        return torch.randint(VOCABULARY, (rows, CONTEXT + 1))

    def loss(self, batch: Tensor) -> Tensor:
        values = self.tokens(batch[:, :-1]) + self.positions.weight
        for block in self.blocks:
            values = block(values)
        return functional.cross_entropy(self.head(self.last(values)).mT, batch[:, 1:])


@dataclass(frozen=True, slots=True)
class Kind:
    """How a state is made, and how its width follows from its bytes (weights and two moments)."""

    make: Callable[[int], nn.Module]
    rows: int


KINDS = {"layers": Kind(Layers, 8), "gpt": Kind(Gpt, 1)}


class Training:
    """The state, and the work of a step."""

    def __init__(self, width: int = WIDTH, kind: str = "layers") -> None:
        torch.manual_seed(0)
        self.model = KINDS[kind].make(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.use_batch(KINDS[kind].rows)
        self.forward_backward()
        self.update()
        self.leaves = leaves_of(self.model, self.optimizer)
        self.size_bytes = sum(leaf.nbytes for leaf in self.leaves.values())

    def forward_backward(self) -> None:
        """The part of a step that only reads parameters and moments."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()  # kept: allocating anew costs page faults
        self.model.loss(self._batch).backward()

    def update(self) -> None:
        """The part that overwrites them all."""
        self.optimizer.step()

    def step(self) -> None:
        """One whole step."""
        self.forward_backward()
        self.update()

    def use_batch(self, rows: int) -> None:
        """Take a batch of this many rows from now on."""
        self.rows = rows
        self._batch = self.model.batch(rows)

    def enlarge_batch(self, wanted_s: float) -> float:
        """Make forward and backward last ``wanted_s`` or more; the time they last."""
        while True:
            found = min(self._time_forward_backward() for _ in range(3))
            if found >= wanted_s:
                return found
            self.use_batch(round(self.rows * min(2.0, 1.1 * wanted_s / found)) + 1)

    def _time_forward_backward(self) -> float:
        began = time.perf_counter()
        self.forward_backward()
        return time.perf_counter() - began

    def fingerprints(self) -> Fingerprints:
        """What the state is now, bit for bit."""
        return fingerprints(self.leaves.items())


def leaves_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of a state, by the names that Holdfast gives them."""
    leaves: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        leaves[f"model.{name}"] = parameter.data
        for key, moment in optimizer.state[parameter].items():
            leaves[f"optimizer.{name}.{key}"] = moment
    return leaves


def fingerprints(leaves: Iterable[tuple[str, Tensor]]) -> Fingerprints:
    """xxh3-128 of every leaf: equal for equal bits."""
    found: Fingerprints = {}
    for name, leaf in leaves:
        raw = leaf.detach().reshape(-1).view(torch.uint8)
        found[name] = (
            f"{leaf.dtype} {tuple(leaf.shape)} {xxhash.xxh3_128_hexdigest(raw.numpy().data)}"
        )
    return found


def verdict(stored: Fingerprints, saved: Fingerprints, updated: Fingerprints) -> str:
    """What was stored: "exact", or how it differs from the state that was saved."""
    if stored == saved:
        return "exact"
    if stored.keys() != saved.keys():
        return "leaves missing"
    if stored == updated:
        return "the next step's state"
    wrong = sum(stored[name] != saved[name] for name in saved)
    return f"torn: {wrong} of {len(saved)} leaves"
