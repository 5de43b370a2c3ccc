"""A GPT that learns on one rank, or cut over four by torch: FSDP2, tensor parallelism, DDP.

Fused QKV with fewer KV heads, SwiGLU, stacked experts behind a router, a padded vocabulary: in
the checkpoint its leaves are those of ``shardings``. What is to be restored and what was trained
without a stop both come from here, and are filled by torch, not by the package.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from holdfast import rules as r
from support.models.shardings import (
    EXPERT,
    EXPERTS,
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MOMENTS,
    RATE,
    STEPS,
    VOCABULARY,
    WIDE,
    Part,
    Truth,
    Whole,
    joined,
    leaf,
    padded,
)

CHOSEN = 2  # experts of each token
ROWS = VOCABULARY + 4  # padded: 17 rows, which divide by neither 2 nor 4
QKV = [count * HEAD for count in (HEADS, KV_HEADS, KV_HEADS)]
SEQUENCES, LENGTH = 8, 12


# ── the model ────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    """Attention, a dense SwiGLU part that every token takes, and experts that a router chooses."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.is_fused = is_fused
        if is_fused:
            self.qkv, self.gate_up = linear(WIDE, sum(QKV)), linear(WIDE, 2 * HIDDEN)
        else:
            self.q, self.k, self.v = (linear(WIDE, width) for width in QKV)
            self.gate, self.up = linear(WIDE, HIDDEN), linear(WIDE, HIDDEN)
        self.o, self.down = linear(HEADS * HEAD, WIDE), linear(HIDDEN, WIDE)
        self.router = linear(WIDE, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 3 * EXPERT, WIDE) / WIDE**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(F.rms_norm(x, (WIDE,)))
        y = F.rms_norm(x, (WIDE,))
        gate, up = self.gate_up(y).chunk(2, -1) if self.is_fused else (self.gate(y), self.up(y))
        dense: torch.Tensor = self.down(F.silu(gate) * up)
        return x + dense + self._mix(y)

    def _attend(self, y: torch.Tensor) -> Any:
        parts = self.qkv(y).split(QKV, -1) if self.is_fused else (self.q(y), self.k(y), self.v(y))
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _mix(self, y: torch.Tensor) -> torch.Tensor:
        best = self.router(y).topk(CHOSEN)
        weights = y.new_zeros(*y.shape[:-1], EXPERTS)
        weights = weights.scatter(-1, best.indices, best.values.softmax(-1))
        gate, up, down = self.experts.split(EXPERT, 1)
        inner = F.silu(torch.einsum("stw,efw->stef", y, gate))
        inner = inner * torch.einsum("stw,efw->stef", y, up) * weights[..., None]
        return torch.einsum("stef,efw->stw", inner, down)


class Gpt(nn.Module):
    """Predicts each token from those before it; rows of padding take no part in it."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDE)
        self.layers = nn.ModuleList(Block(is_fused=is_fused) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDE)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight[:VOCABULARY])


def _parts(*, is_fused: bool) -> dict[str, Part]:
    """What each parameter is of the whole leaves."""
    found: dict[str, Part] = {
        "embed.weight": padded(leaf("embed.weight"), ROWS),
        "norm.weight": leaf("norm"),
    }
    for n in range(LAYERS):
        name = f"layers.{n}."
        for which in ("o", "down", "router"):
            found[f"{name}{which}.weight"] = leaf(name + which)
        found[name + "experts"] = _stacked([f"{name}experts.{e}.w" for e in range(EXPERTS)])
        if is_fused:
            found[name + "qkv.weight"] = joined(*(leaf(name + which) for which in "qkv"))
            found[name + "gate_up.weight"] = joined(leaf(name + "gate"), leaf(name + "up"))
        else:
            for which in ("q", "k", "v", "gate", "up"):
                found[f"{name}{which}.weight"] = leaf(name + which)
    return found


def _stacked(names: list[str]) -> Part:
    return lambda leaves, _: torch.stack([leaves[name] for name in names])


def _leaves(named: Mapping[str, torch.Tensor]) -> Truth:
    """The other way: the whole leaves, from the parameters or what is like them."""
    found = {"embed.weight": named["embed.weight"][:VOCABULARY], "norm": named["norm.weight"]}
    for name, tensor in named.items():
        layer, _, last = name.removesuffix(".weight").rpartition(".")
        if last == "qkv":
            each = zip("qkv", tensor.split(QKV), strict=True)
            found.update({f"{layer}.{which}": part for which, part in each})
        elif last == "gate_up":
            found[f"{layer}.gate"], found[f"{layer}.up"] = tensor.chunk(2)
        elif last == "experts":
            found.update({f"{name}.{e}.w": one for e, one in enumerate(tensor)})
        elif layer.startswith("layers."):
            found[f"{layer}.{last}"] = tensor
    return {name: tensor.clone() for name, tensor in found.items()}


def _rules(*, is_fused: bool) -> r.Rules:
    plain = ["o", "down", "router"] + ([] if is_fused else ["q", "k", "v", "gate", "up"])
    into = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")} if is_fused else {}
    widths = {"qkv": QKV, "gate_up": [HIDDEN, HIDDEN]}
    return r.Rules(
        [
            ("embed.weight", r.padded(0, VOCABULARY)),
            ("norm.weight", r.rename("norm")),
            ("layers.{i}.experts", r.unstack(0, into="layers.{i}.experts.{n}.w")),
            *((f"layers.{{i}}.{name}.weight", r.rename(f"layers.{{i}}.{name}")) for name in plain),
            *(
                (
                    f"layers.{{i}}.{name}.weight",
                    r.fused(0, widths[name], [f"layers.{{i}}.{one}" for one in names]),
                )
                for name, names in into.items()
            ),
        ]
    )


# ── a training ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Training:
    """A model and its optimizer on this rank, and which share of the sequences it learns from."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rules: r.Rules
    parts: Mapping[str, Part]
    share: tuple[int, int]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "seen": 0}

    @property
    def named(self) -> dict[str, nn.Parameter]:
        inner = self.model
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
        return dict(inner.named_parameters())

    def train(self, steps: range) -> list[float]:
        """The loss of every step, over the sequences of all ranks."""
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        index, count = self.share
        text = sequences(step).chunk(count)[index]
        guessed = self.model(text[:, :-1])
        loss = F.cross_entropy(guessed.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        told = loss.detach()
        if count > 1:
            dist.all_reduce(told)  # where ranks learn alike each counts as often as the others
            told /= dist.get_world_size()
        return told.item()

    def fill(self, whole: Whole) -> None:
        """Parameters and moments as they are after ``STEPS`` steps, by torch alone."""
        for name, parameter in self.named.items():
            part = self.parts[name]
            with torch.no_grad():
                _assign(parameter, part(whole["parameters"], 0.0))
                moments = {which: torch.zeros_like(parameter) for which in MOMENTS}
                for which, moment in moments.items():
                    _assign(moment, part(whole[which], 0.0))
            self.optimizer.state[parameter] = {"step": torch.tensor(float(STEPS)), **moments}

    def _tensors(self) -> Whole:
        named, state = self.named, self.optimizer.state
        moments = {
            which: {name: state[one][which] for name, one in named.items()} for which in MOMENTS
        }
        return {"parameters": named, **moments}

    def held(self) -> Whole:
        """What this rank has of parameters and moments, as it has them: with their padding."""
        return {
            which: {name: _local(one).clone() for name, one in tensors.items()}
            for which, tensors in self._tensors().items()
        }

    def whole(self) -> Whole:
        """The leaves, gathered by torch; all ranks call it."""
        return {
            which: _leaves({name: _gathered(one) for name, one in tensors.items()})
            for which, tensors in self._tensors().items()
        }


def sequences(step: int) -> torch.Tensor:
    """The text of a step: each token decides the next, but for the first of a sequence."""
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(0, VOCABULARY, (SEQUENCES,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
    return torch.stack(tokens, 1)


def make(kind: str, seed: int, rate: float = RATE) -> Training:
    """A training that has not begun; ``seed`` makes its weights.

    "alone"; or on four ranks "fsdp", "hsdp", "fsdp_tp" or "ddp", where ranks that do not compute
    one thing together learn from their own share of the sequences.
    """
    torch.manual_seed(seed)
    rank = dist.get_rank() if dist.is_initialized() else 0
    is_fused = kind != "fsdp_tp"
    model: nn.Module = Gpt(is_fused=is_fused)
    share = (0, 1) if kind == "alone" else (rank, dist.get_world_size())
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        _shard(model, _mesh(4))
    elif kind == "hsdp":
        _shard(model, _mesh(2, 2))
    elif kind == "fsdp_tp":
        grid = _mesh(2, 2)
        for block in model.layers:  # type: ignore[union-attr]
            _parallelize(block, grid["tp"])
        _shard(model, grid["dp"])
        share = (rank // 2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return Training(model, optimizer, _rules(is_fused=is_fused), _parts(is_fused=is_fused), share)


@functools.cache
def _mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def _shard(model: Any, mesh: Any) -> None:
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _parallelize(block: nn.Module, mesh: Any) -> None:
    columns = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    parallelize_module(block, mesh, columns | {"o": RowwiseParallel(), "down": RowwiseParallel()})


def _assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        everywhere = [Replicate()] * tensor.device_mesh.ndim
        placed = distribute_tensor(value, tensor.device_mesh, everywhere)
        value = placed.redistribute(placements=tensor.placements).to_local()
    _local(tensor).copy_(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def differences(found: Whole, expected: Whole) -> list[str]:
    """Tensors that are not bit for bit the same."""
    return [
        f"{which} of {name}"
        for which in expected
        for name, tensor in expected[which].items()
        if not torch.equal(found[which][name], tensor)
    ]
