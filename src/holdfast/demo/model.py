"""A byte-level GPT, small but whole, and the two ways the demo cuts it over ranks."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from holdfast.demo.text import CONTEXT

Layout = Literal["fsdp", "fsdp_tp"]

BYTES = 256
WIDTH = 128
HEADS = 4
BLOCKS = 4
#: Two tensor parallel ranks halve it; shards of it over 3 ranks, and over 2 x 2, are uneven.
HIDDEN = 350


class Attention(nn.Module):
    """Causal self-attention over however many heads this rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(sequences, bytes, WIDTH) to the same."""
        query, key, value = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(sequences, bytes, WIDTH) to the same."""
        x = x + self.attention(self.norm1(x))
        found: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return found


class GPT(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(sequences, bytes) to logits (sequences, bytes, BYTES)."""
        x = self.embed(text) + self.position(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


def make_mesh(layout: Layout, world: int) -> DeviceMesh:
    """The mesh of a layout, its first dimension the data ranks."""
    if layout == "fsdp":
        return init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))


def make_model(mesh: DeviceMesh, seed: int) -> GPT:
    """The model with its first weights, cut over ``mesh``; the same weights on every mesh."""
    torch.manual_seed(seed)
    model = GPT()
    if mesh.ndim > 1:
        _cut_tensors(model, mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def _cut_tensors(model: GPT, mesh: DeviceMesh) -> None:
    block_plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
