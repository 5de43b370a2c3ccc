"""Train a GPT on real text on the CPU, alone or cut over ranks.

It is byte-level: bytes of the interpreter's standard library in, the next byte out. The update is
fused AdamW, which overwrites parameters and moments in place and moves no version counter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.kit.training import Fingerprints, fingerprints
from holdfast.demo.train import corpus

BYTES = 256
#: 42.0 million parameters: with both moments of AdamW 0.50 GB.
WIDTH, BLOCKS, CONTEXT = 512, 13, 128
HEAD_WIDTH = 64
KINDS = ("plain", "ddp", "fsdp")


class Block(nn.Module):
    """Causal self-attention and MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.norm1(x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return found


class GPT(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.position(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x))
        return found


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the model is, and how long a step is to take."""

    width: int
    blocks: int
    step_s: float


FULL = Scale(WIDTH, BLOCKS, 1.4)
QUICK = Scale(192, 3, 0.06)


class GptTraining:
    """One rank's share of a training; every rank makes one, of the same kind and scale."""

    def __init__(self, kind: str, scale: Scale) -> None:
        torch.manual_seed(0)
        self.raw = GPT(scale.width, scale.blocks)
        self.model: nn.Module = self.raw
        if kind == "ddp":
            self.model = DistributedDataParallel(self.raw)
        if kind == "fsdp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in self.raw.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.raw, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.raw.parameters(), lr=1e-4, fused=True)
        self._text = corpus()
        self._chosen = torch.Generator().manual_seed(dist.get_rank())
        self.sequences = 1
        for _ in range(5):
            self.step()
        self._enlarge_batch(scale.step_s)
        self.leaves = self._name_leaves()

    @property
    def size_bytes(self) -> int:
        """Of the whole state, each leaf once."""
        return sum(leaf.numel() * leaf.element_size() for leaf in self.leaves.values())

    def forward_backward(self) -> None:
        """The part of a step that only reads parameters and moments, on the next real batch."""
        starts = torch.randint(
            len(self._text) - CONTEXT - 1, (self.sequences, 1), generator=self._chosen
        )
        text = self._text[starts + torch.arange(CONTEXT + 1)].long()
        guessed = self.model(text[:, :-1])
        F.cross_entropy(guessed.flatten(0, 1), text[:, 1:].flatten()).backward()

    def update(self) -> None:
        """The part that overwrites them all."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # kept: allocating costs page faults

    def step(self) -> None:
        """One whole step."""
        self.forward_backward()
        self.update()

    def fingerprints(self) -> Fingerprints:
        """What the state is now, bit for bit and whole; all ranks call it."""
        return fingerprints((name, whole(leaf)) for name, leaf in self.leaves.items())

    def _enlarge_batch(self, wanted_s: float) -> None:
        """As many sequences as make a step last ``wanted_s``, the same number on every rank."""
        found = self._time_step()
        while found < wanted_s:
            growth = min(2.0, 1.05 * wanted_s / found)
            self.sequences = max(self.sequences + 1, round(self.sequences * growth))
            found = self._time_step()

    def _time_step(self) -> float:
        self.step()
        times = []
        for _ in range(5):
            began = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - began)
        return agreed(min(times))

    def _name_leaves(self) -> dict[str, Tensor]:
        leaves: dict[str, Tensor] = {}
        for name, parameter in self.raw.named_parameters():
            leaves[f"model.{name}"] = parameter.detach()
            for key, moment in self.optimizer.state[parameter].items():
                leaves[f"optimizer.{name}.{key}"] = moment
        return leaves


def whole(leaf: Tensor) -> Tensor:
    """The leaf, of all ranks' shards."""
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def agreed(value: float) -> float:
    """Rank 0's value, on every rank."""
    told = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(told, 0)
    return float(told)
