"""Store a state with every system, and measure restores of it."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import holdfast
from benchmarks.kit import disk, machine
from benchmarks.kit.training import LAYERS, WIDTH, Fingerprints, fingerprints, leaves_of
from benchmarks.systems.saving import DcpSave

clock = time.perf_counter
STATES = ("48 tensors", "3,000 leaves")


# ── states ───────────────────────────────────────────────────────────────────────────────────


def build(kind: str, share: float, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with AdamW moments; ``share`` of the full size of 1.6 GB."""
    torch.manual_seed(seed)
    if kind == STATES[0]:
        width = round(WIDTH * share**0.5)
        model: nn.Module = nn.Sequential(
            *(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        )
    else:
        # 62 blocks of 12 parameters and 6 more: 750, and with moments and step counts 3,000.
        width = round(424 * share**0.5)
        blocks = [_gpt_block(width) for _ in range(62)]
        ends = [nn.Embedding(600, width), nn.Embedding(64, width), nn.Linear(width, 600)]
        model = nn.Sequential(*blocks, *ends, nn.LayerNorm(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _gpt_block(width: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 3 * width),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.Linear(4 * width, width),
    )


# ── one state and its copies ─────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Bench:
    """A state, where it is stored, and what was measured: ``found[system]`` in seconds."""

    kind: str
    root: Path
    share: float
    patience_s: float
    found: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    verdicts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    leaves: dict[str, Tensor] = field(init=False)
    saved: Fingerprints = field(init=False)

    def __post_init__(self) -> None:
        self.model, self.optimizer = build(self.kind, self.share, 0)
        self.leaves = leaves_of(self.model, self.optimizer)
        self.saved = fingerprints(self.leaves.items())
        self.root.mkdir()

    @property
    def size_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def save_all(self) -> None:
        """The state as every system stores it."""
        holdfast.save(self.root / "holdfast", self.state)
        torch.save(self.leaves, self.root / "torch.pt")
        safetensors.torch.save_file(self.leaves, self.root / "state.safetensors")
        DcpSave(self.root, self.leaves, threads=2).save(0)
        os.sync()

    def image(self) -> Path:
        return next((self.root / "holdfast" / "steps").rglob("*.safetensors"))

    def files(self) -> list[Path]:
        return [path for path in self.root.rglob("*") if path.is_file()]

    def scribble(self) -> None:
        """Other bytes in every tensor: what is not restored is seen."""
        with torch.no_grad():
            for leaf in self.leaves.values():
                leaf.fill_(-1)

    def measure(self, name: str, act: Callable[[], Any], *, cold: bool = False) -> None:
        """One restore into the state's own tensors, and what it made of them."""
        self.scribble()
        self.limit(name, act, cold=cold)
        now = fingerprints(self.leaves.items())
        wrong = sum(now[leaf] != self.saved[leaf] for leaf in now)
        self.verdicts[name].append("exact" if not wrong else f"{wrong} leaves differ")

    def limit(self, name: str, act: Callable[[], Any], *, cold: bool = False) -> None:
        """One measurement of what the machine can do."""
        disk.drop(self.files(), cold=cold)
        machine.wait_until_idle(self.patience_s)
        began = clock()
        act()
        self.found[name].append(clock() - began)
