"""The leaves of one GPT held by four ranks in many ways, each cut here by torch's own means.

Nothing of the package computes what a rank should hold: layouts are compared with these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast import rules as r

WIDE, VOCABULARY, PADDED = 8, 13, 16
HEADS, KV_HEADS, HEAD = 4, 2, 3
HIDDEN, EXPERTS, EXPERT, LAYERS = 12, 8, 3, 2
STEPS, RATE = 3, 1 / 64
#: What padding holds before a save. It must come back as zeros.
GARBAGE = 7.5
MOMENTS = ("exp_avg", "exp_avg_sq")

Truth = Mapping[str, torch.Tensor]
Whole = Mapping[str, Truth]
"""The whole leaves of a model: its parameters, and each of its moments."""
State = dict[str, Any]
Part = Callable[[Truth, float], torch.Tensor]


def shapes() -> dict[str, tuple[int, ...]]:
    """Every leaf as it is stored."""
    found: dict[str, tuple[int, ...]] = {"embed.weight": (VOCABULARY, WIDE), "norm": (WIDE,)}
    for n in range(LAYERS):
        layer = {
            "q": (HEADS * HEAD, WIDE),
            "k": (KV_HEADS * HEAD, WIDE),
            "v": (KV_HEADS * HEAD, WIDE),
            "o": (WIDE, HEADS * HEAD),
            "gate": (HIDDEN, WIDE),
            "up": (HIDDEN, WIDE),
            "down": (WIDE, HIDDEN),
            "router": (EXPERTS, WIDE),
        }
        found.update({f"layers.{n}.{name}": shape for name, shape in layer.items()})
        found.update({f"layers.{n}.experts.{e}.w": (3 * EXPERT, WIDE) for e in range(EXPERTS)})
    return found


def random_leaves() -> Whole:
    """Parameters and moments that are all different."""
    found = {}
    for which in ("parameters", *MOMENTS):
        generator = torch.Generator().manual_seed(sum(map(ord, which)))
        found[which] = {
            name: torch.randn(shape, generator=generator) for name, shape in shapes().items()
        }
    return found


RANDOM = random_leaves()


@dataclass(frozen=True)
class Layout:
    """How this rank holds the leaves: by the names here, what each tensor is, and the rules."""

    parts: dict[str, Part]
    rules: r.Rules | None = None
    declared: Mapping[str, Any] | None = None
    flat: Part | None = None
    """One buffer of everything, which the optimizer has instead of the parameters."""
    ranges: Any = None
    on_mesh: bool = False


def leaf(name: str) -> Part:
    return lambda leaves, _: leaves[name]


def _chunk(part: Part, dim: int, count: int, index: int) -> Part:
    return lambda leaves, pad: part(leaves, pad).chunk(count, dim)[index]


def padded(part: Part, rows: int) -> Part:
    def made(leaves: Truth, pad: float) -> torch.Tensor:
        there = part(leaves, pad)
        rest = torch.full((rows - there.shape[0], *there.shape[1:]), pad)
        return torch.cat([there, rest])

    return made


def joined(*parts: Part, dim: int = 0) -> Part:
    return lambda leaves, pad: torch.cat([part(leaves, pad) for part in parts], dim)


def plain(rank: int, world: int) -> Layout:
    return Layout({name: leaf(name) for name in shapes()})


def tensor_parallel(tp: int) -> Callable[[int, int], Layout]:
    """Fused QKV by heads, KV heads repeated where there are too few; SwiGLU fused; vocabulary."""

    def build(rank: int, world: int) -> Layout:
        at = rank % tp
        parts: dict[str, Part] = {
            "embed.weight": _chunk(padded(leaf("embed.weight"), PADDED), 0, tp, at),
            "norm": leaf("norm"),
        }
        shared = min(tp, KV_HEADS)
        for n in range(LAYERS):
            name = f"layers.{n}."
            parts[name + "qkv"] = joined(
                _chunk(leaf(name + "q"), 0, tp, at),
                _chunk(leaf(name + "k"), 0, shared, at * shared // tp),
                _chunk(leaf(name + "v"), 0, shared, at * shared // tp),
            )
            parts[name + "gate_up"] = joined(
                *(_chunk(leaf(name + which), 0, tp, at) for which in ("gate", "up"))
            )
            parts[name + "o"] = _chunk(leaf(name + "o"), 1, tp, at)
            parts[name + "down"] = _chunk(leaf(name + "down"), 1, tp, at)
            parts.update(routed(name))
        heads = (HEADS, KV_HEADS, KV_HEADS)
        rules = r.Rules(
            [
                ("embed.weight", r.shard(0, "tp"), r.padded(0, VOCABULARY)),
                (
                    "layers.{i}.qkv",
                    r.fused(
                        0,
                        [count * HEAD for count in heads],
                        into=[f"layers.{{i}}.{which}" for which in "qkv"],
                        over="tp",
                        units=heads,
                    ),
                ),
                (
                    "layers.{i}.gate_up",
                    r.fused(
                        0, (HIDDEN, HIDDEN), into=("layers.{i}.gate", "layers.{i}.up"), over="tp"
                    ),
                ),
                ("layers.{i}.o", r.shard(1, "tp")),
                ("layers.{i}.down", r.shard(1, "tp")),
            ],
            {"dp": world // tp, "tp": tp},
        )
        return Layout(parts, rules)

    return build


def routed(name: str) -> dict[str, Part]:
    """The router and the experts of the layer ``name``, as they are stored."""
    names = [f"{name}router", *(f"{name}experts.{e}.w" for e in range(EXPERTS))]
    return {one: leaf(one) for one in names}


def _flat_part(name: str, rank: int, world: int) -> tuple[Part, int]:
    """A rank's run of a flattened leaf, padded so that all are as long; where it begins."""
    size = torch.Size(shapes()[name]).numel()
    each = -(-size // world)

    def made(leaves: Truth, pad: float) -> torch.Tensor:
        rest = torch.full((each * world - size,), pad)
        return torch.cat([leaves[name].reshape(-1), rest])[rank * each : (rank + 1) * each]

    return made, rank * each


def zero3(rank: int, world: int) -> Layout:
    """Every parameter flattened and cut by itself."""
    found = {name: _flat_part(name, rank, world) for name in shapes()}
    declared = {
        name: holdfast.FlatShard(shapes()[name], start) for name, (_, start) in found.items()
    }
    return Layout({name: part for name, (part, _) in found.items()}, declared=declared)


def zero1(rank: int, world: int) -> Layout:
    """Whole parameters, and an optimizer that has its run of all of them put in a row."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes().items()}
    each = -(-sum(sizes.values()) // world)
    begin, end = rank * each, (rank + 1) * each

    def flat(leaves: Truth, pad: float) -> torch.Tensor:
        rest = torch.full((each * world - sum(sizes.values()),), pad)
        return torch.cat([*(leaves[name].reshape(-1) for name in sizes), rest])[begin:end]

    ranges, at = [], 0
    for name, size in sizes.items():
        start, stop = max(begin, at), min(end, at + size)
        length = max(0, stop - start)
        begins = start - at if length else 0
        offset = start - begin if length else 0
        ranges.append(holdfast.FlatRange(name, shapes()[name], begins, length, offset))
        at += size
    return Layout({name: leaf(name) for name in sizes}, flat=flat, ranges=ranges)


def on_mesh(rank: int, world: int) -> Layout:
    """DTensors, as FSDP2 has them, of fused and padded tensors."""
    parts: dict[str, Part] = {
        "embed.weight": padded(leaf("embed.weight"), PADDED + 1),
        "norm": leaf("norm"),
    }
    for n in range(LAYERS):
        name = f"layers.{n}."
        parts[name + "qkv"] = joined(*(leaf(name + which) for which in "qkv"))
        for which in ("o", "gate", "up", "down"):
            parts[name + which] = leaf(name + which)
        parts.update(routed(name))
    widths = [count * HEAD for count in (HEADS, KV_HEADS, KV_HEADS)]
    into = [f"layers.{{i}}.{which}" for which in "qkv"]
    rules = r.Rules(
        [
            ("embed.weight", r.padded(0, VOCABULARY)),
            ("layers.{i}.qkv", r.fused(0, widths, into)),
        ]
    )
    return Layout(parts, rules, on_mesh=True)


def stages_and_experts(rank: int, world: int) -> Layout:
    """Two stages that number their layers from 0, and in each two halves of the experts."""
    stage, half = divmod(rank, 2)
    parts: dict[str, Part] = {}
    if stage == 0:
        parts["embed.weight"] = leaf("embed.weight")
    else:
        parts["norm"] = leaf("norm")
    name = f"layers.{stage}."
    for which in ("q", "k", "v", "o", "gate", "up", "down", "router"):
        parts[f"layers.0.{which}"] = leaf(name + which)
    each = EXPERTS // 2
    mine = [f"{name}experts.{e}.w" for e in range(half * each, half * each + each)]
    parts["layers.0.moe.experts"] = lambda leaves, _: torch.stack([leaves[one] for one in mine])
    rules = r.Rules(
        [
            (
                "layers.{i}.moe.experts",
                r.shard(0, "ep"),
                r.unstack(0, into=f"layers.{{i+{stage}}}.experts.{{n}}.w"),
            ),
            ("layers.{i}.{which}", r.rename(f"layers.{{i+{stage}}}.{{which}}")),
        ],
        {"pp": 2, "ep": 2},
    )
    return Layout(parts, rules)


def turned(rank: int, world: int) -> Layout:
    """Layers in one tensor each, and a vocabulary that is transposed and padded."""
    parts: dict[str, Part] = {
        "table": lambda leaves, pad: padded(leaf("embed.weight"), PADDED)(leaves, pad).T,
        "norm": leaf("norm"),
    }
    for which in ("q", "k", "v", "o", "gate", "up", "down"):
        names = [f"layers.{n}.{which}" for n in range(LAYERS)]
        parts[f"all.{which}"] = lambda leaves, _, names=names: torch.stack(  # type: ignore[misc]
            [leaves[name] for name in names], 1
        )
    for n in range(LAYERS):
        parts.update(routed(f"layers.{n}."))
    rules = r.Rules(
        [
            ("table", r.transpose(1, 0), r.padded(0, VOCABULARY), r.rename("embed.weight")),
            ("all.{which}", r.unstack(1, into="layers.{n}.{which}")),
        ]
    )
    return Layout(parts, rules)


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "plain": plain,
    "tp2": tensor_parallel(2),
    "tp4": tensor_parallel(4),
    "zero3": zero3,
    "zero1": zero1,
    "mesh": on_mesh,
    "stages": stages_and_experts,
    "turned": turned,
}


def build(layout: Layout, whole: Whole | None) -> State:
    """A module and an optimizer with these leaves; None: as they are before a restore."""
    module = nn.Module()
    for name, part in layout.parts.items():
        tensor = _local(layout, part, whole, "parameters")
        parameter = nn.Parameter(tensor)
        if layout.declared is not None:
            holdfast.declare(parameter, layout.declared[name])
        _put(module, name, parameter)
    named = dict(module.named_parameters())
    parameters: list[tuple[Part, torch.Tensor]] = [
        (part, named[name]) for name, part in layout.parts.items()
    ]
    if layout.flat is not None:
        flat = nn.Parameter(_local(layout, layout.flat, whole, "parameters"))
        holdfast.declare(flat, holdfast.FlatBuffer(layout.ranges))
        parameters = [(layout.flat, flat)]
    optimizer = torch.optim.AdamW([one for _, one in parameters], RATE if whole else 1.0)
    for part, owner in parameters if whole else ():
        moments = {which: _local(layout, part, whole, which) for which in MOMENTS}
        optimizer.state[owner] = {"step": torch.tensor(float(STEPS)), **moments}
    return {"model": module, "optimizer": optimizer, "seen": 5 if whole else 0}


def _local(layout: Layout, part: Part, whole: Whole | None, which: str) -> torch.Tensor:
    if whole is None:
        found = torch.full_like(part(RANDOM[which], 0.0), -1.0)
    else:
        found = part(whole[which], GARBAGE)
    if not layout.on_mesh:
        return found.clone()  # as it lies: one that was transposed is not contiguous
    return distribute_tensor(found.contiguous(), _mesh(), [Shard(0)])


@functools.cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for step in path:
        if step not in module._modules:
            module.add_module(step, nn.Module())
        module = module._modules[step]  # type: ignore[assignment]
    module.register_parameter(last, parameter)


def differences(layout: Layout, state: State) -> list[str]:
    """What of a restored state is not what the whole leaves say it should be."""
    found = [] if state["seen"] == 5 else [f"seen is {state['seen']}"]
    optimizer = state["optimizer"]
    if optimizer.param_groups[0]["lr"] != RATE:
        found.append(f"the rate is {optimizer.param_groups[0]['lr']}")
    named = dict(state["model"].named_parameters())
    for name, part in layout.parts.items():
        found += _differing(layout, part, "parameters", name, named[name])
    owners: Iterator[tuple[str, Part, torch.Tensor]] = (
        (name, part, named[name]) for name, part in layout.parts.items()
    )
    if layout.flat is not None:
        (flat,) = optimizer.param_groups[0]["params"]
        found += _differing(layout, layout.flat, "parameters", "the buffer", flat)
        owners = iter([("the buffer", layout.flat, flat)])
    for name, part, owner in owners:
        kept = optimizer.state[owner]
        if kept["step"].item() != STEPS:
            found.append(f"{name} was stepped {kept['step'].item()} times")
        for which in MOMENTS:
            found += _differing(layout, part, which, f"{which} of {name}", kept[which])
    return found


def _differing(
    layout: Layout, part: Part, which: str, name: str, tensor: torch.Tensor
) -> list[str]:
    wanted = part(RANDOM[which], 0.0)
    if layout.on_mesh:
        wanted = distribute_tensor(wanted.contiguous(), _mesh(), [Shard(0)]).to_local()
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    return [] if torch.equal(tensor.detach(), wanted) else [name]
