"""A training whose state is saved: real parameters, gradients and AdamW moments, on the CPU.

The update is fused AdamW: it overwrites parameters and moments in place without moving their
version counters, so no system can notice it. Whoever copies too late has stored something else,
and the fingerprints show it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor, nn

WIDTH = 2887  # divides by nothing a system may like: neither 2, nor 64, nor a page
LAYERS = 16
Fingerprints = dict[str, str]


class Layers(nn.Module):
    """``LAYERS`` square weights, nothing else: 16 x 33.3 MB, and twice that in moments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values) * 1.7)
        return values


class Training:
    """The state, and the work of a step."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.model = Layers(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self._batch = torch.randn(8, width)
        self.forward_backward()
        self.update()
        self.leaves = self._name_leaves()
        self.size_bytes = sum(leaf.nbytes for leaf in self.leaves.values())

    def _name_leaves(self) -> dict[str, Tensor]:
        leaves: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            leaves[f"model.{name}"] = parameter.data
            for key, moment in self.optimizer.state[parameter].items():
                leaves[f"optimizer.{name}.{key}"] = moment
        return leaves

    def forward_backward(self) -> None:
        """The part of a step that only reads parameters and moments."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()  # kept: allocating anew costs page faults
        self.model(self._batch).square().mean().backward()

    def update(self) -> None:
        """The part that overwrites them all."""
        self.optimizer.step()

    def step(self) -> None:
        """One whole step."""
        self.forward_backward()
        self.update()

    def enlarge_batch(self, wanted_s: float) -> float:
        """Make forward and backward last ``wanted_s`` or more; the time they last."""
        while True:
            found = min(self._time_forward_backward() for _ in range(3))
            if found >= wanted_s:
                return found
            rows = round(len(self._batch) * min(2.0, 1.1 * wanted_s / found)) + 1
            self._batch = torch.randn(rows, self._batch.shape[1])

    def _time_forward_backward(self) -> float:
        began = time.perf_counter()
        self.forward_backward()
        return time.perf_counter() - began

    def fingerprints(self) -> Fingerprints:
        """What the state is now, bit for bit."""
        return fingerprints(self.leaves.items())


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
