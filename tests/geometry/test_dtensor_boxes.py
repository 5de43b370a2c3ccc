"""The boxes of ranks are those of real DTensors on real ranks.

Every tensor is filled with its own flat index, so that an element says where it comes from: the
content of a rank's local tensor at a local box must be the index array at the global box.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.geometry.box import Box, cover_fault
from holdfast.geometry.layout import REPLICATE, Mesh, Placement, local_boxes, local_shape
from support.runs.launch import run_ranks

ROWS = (1, *range(7, 25))
Shape = tuple[int, ...]


class Held(NamedTuple):
    """What one rank found of one tensor."""

    tensor: str
    shape: Shape
    boxes: tuple[Box, ...]


def indices(shape: Shape) -> torch.Tensor:
    """A tensor whose elements are their own flat indices (exact in float32 up to 2**24)."""
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    return whole.reshape(shape)


def placement_of(placement: TorchPlacement) -> Placement:
    if isinstance(placement, _StridedShard):
        return Placement(placement.dim, int(placement.split_factor))
    return Placement(placement.dim) if isinstance(placement, Shard) else REPLICATE


def check(what: str, tensor: torch.Tensor, rank: int) -> Held:
    """Compare what the rank has with what it should have, element by element."""
    assert isinstance(tensor, DTensor)
    local, shape = tensor._local_tensor.detach(), tuple(tensor.shape)
    grid = tensor.device_mesh.mesh
    where = Mesh(tuple(grid.shape), tuple(grid.flatten().tolist()))
    placements = tuple(map(placement_of, tensor.placements))
    label = f"{what} {shape} {tensor.placements} on {grid.tolist()}"
    boxes = local_boxes(shape, where, placements, rank)
    whole = indices(shape)
    expected = local_shape(shape, where, placements, rank)
    assert expected is not None
    # What is empty has no certain shape: FSDP2 gives (0, 0) where only the second is cut to 0.
    assert expected == tuple(local.shape) or 0 == math.prod(expected) == local.numel(), label
    for box, inside in boxes:
        assert torch.equal(local[inside.slices()], whole[box.slices()]), f"{label}: {box}"
    tiles = Box.whole(tuple(local.shape))
    assert cover_fault(tiles, [inside for _, inside in boxes]) is None, label
    return Held(label if rank in where.ranks else "", shape, tuple(box for box, _ in boxes))


def check_together(ranks: list[list[Held]]) -> None:
    """What all ranks hold of a tensor is the whole of it."""
    # Labels of instances on different ranks differ by their mesh, so each is proved on its own.
    boxes: dict[tuple[str, Shape], set[Box]] = {}
    for held in ranks:
        for one in held:
            boxes.setdefault((one.tensor, one.shape), set()).update(one.boxes)
    assert boxes
    for (label, shape), found in boxes.items():
        assert cover_fault(Box.whole(shape), found) is None, label


# ── placements by hand ───────────────────────────────────────────────────────────────────────


def shapes(all_rows: Iterable[int]) -> Iterator[Shape]:
    for rows in all_rows:
        yield from [(rows,), (rows, 3), (2, rows), (2, rows, 5)]
    yield from [(), (0, 4), (1, 1, 1), (5, 6, 7)]


def distribute_all(rank: int, _: int) -> list[Held]:
    """Every combination of Shard and Replicate, for every shape."""
    held = []
    for mesh_shape in [(4,), (2, 2), (1, 4), (2, 1, 2)]:
        mesh = init_device_mesh("cpu", mesh_shape)
        for shape in shapes(ROWS if len(mesh_shape) < 3 else (1, 7, 12)):
            choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
            for placements in product(choices, repeat=len(mesh_shape)):
                # Every rank has the whole and takes its part: nothing is sent.
                tensor = distribute_tensor(indices(shape), mesh, placements, src_data_rank=None)
                held.append(check("distributed", tensor, rank))
    return held


def test_boxes_are_those_of_distributed_tensors() -> None:
    check_together(run_ranks(4, distribute_all))


def strided(dim: int, factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=factor)


STRIDED: dict[Shape, list[tuple[TorchPlacement, ...]]]
STRIDED = {
    (4,): [(strided(0, 2),), (strided(0, 3),), (strided(1, 4),)],
    (2, 2): [
        (strided(0, 2), Shard(0)),
        (strided(1, 2), Shard(1)),
        (strided(0, 2), Replicate()),
        (Replicate(), strided(0, 3)),
        (strided(0, 3), Shard(0)),
        (Shard(0), strided(0, 3)),
        (strided(0, 2), Shard(1)),
        (strided(0, 3), strided(1, 2)),
    ],
    (2, 1, 2): [
        (strided(0, 2), Replicate(), Shard(0)),
        (strided(0, 2), Shard(0), Shard(0)),
        (strided(0, 2), strided(0, 2), Shard(0)),
    ],
    # Only with three parts or more does the order of cuts show in uneven rows.
    (3, 2): [(strided(0, 2), Shard(0)), (strided(0, 5), Shard(0)), (Shard(0), strided(0, 2))],
}


def redistribute_strided(rank: int, world: int) -> list[Held]:
    held = []
    for mesh_shape, choices in STRIDED.items():
        if math.prod(mesh_shape) != world:
            continue
        mesh = init_device_mesh("cpu", mesh_shape)
        for rows, placements in product(ROWS, choices):
            # distribute_tensor refuses uneven strides; from a replicated tensor they are cut.
            whole = DTensor.from_local(
                indices((rows, 6)), mesh, [Replicate()] * len(mesh_shape), run_check=False
            )
            held.append(check("strided", whole.redistribute(placements=placements), rank))
    return held


@pytest.mark.parametrize("world", [4, 6])
def test_strided_shards_are_several_boxes(world: int) -> None:
    ranks = run_ranks(world, redistribute_strided)
    check_together(ranks)
    assert max(len(one.boxes) for held in ranks for one in held) > 1


# ── FSDP2 and tensor parallelism ─────────────────────────────────────────────────────────────


class Block(nn.Module):
    """Weights of one, two and three dimensions, and one of a single element."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(4, rows)
        self.down = nn.Linear(rows, 6)
        self.norm = nn.LayerNorm(rows)
        self.kernel = nn.Parameter(torch.empty(rows, 3, 2))
        self.one = nn.Parameter(torch.empty(1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(indices(tuple(parameter.shape)))


def check_parameters(what: str, module: nn.Module, rank: int) -> Iterable[Held]:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            yield check(f"{what} {name}", parameter, rank)


def shard_fully(rank: int, _: int) -> list[Held]:
    alone = init_device_mesh("cpu", (4,))
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    held: list[Held] = []
    for rows, (what, mesh) in product(ROWS, [("FSDP2", alone), ("HSDP", replicated)]):
        block = Block(rows)
        fully_shard(block, mesh=mesh)
        held += check_parameters(what, block, rank)
    return held


def test_boxes_are_those_of_fully_sharded_modules() -> None:
    ranks = run_ranks(4, shard_fully)
    check_together(ranks)
    assert any(not one.boxes for held in ranks for one in held), "no rank was left with nothing"


def cut_into_tensors(block: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, mesh, plan)


def parallelize(rank: int, _: int) -> list[Held]:
    mesh = init_device_mesh("cpu", (4,))
    held: list[Held] = []
    for rows in ROWS:
        block = Block(rows)
        cut_into_tensors(block, mesh)
        held += check_parameters("TP", block, rank)
    return held


def test_boxes_are_those_of_tensor_parallel_modules() -> None:
    check_together(run_ranks(4, parallelize))


def shard_after_parallelize(rank: int, _: int, mesh_shape: Shape) -> list[Held]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    held: list[Held] = []
    for rows in ROWS:
        block = Block(rows)
        cut_into_tensors(block, mesh["tp"])
        fully_shard(block, mesh=mesh["dp"])
        held += check_parameters("FSDP2 x TP", block, rank)
    return held


@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2)])
def test_boxes_are_those_of_fsdp_with_tensor_parallelism(mesh_shape: Shape) -> None:
    ranks = run_ranks(torch.Size(mesh_shape).numel(), shard_after_parallelize, mesh_shape)
    check_together(ranks)
    labels = {one.tensor for held in ranks for one in held}
    assert any("_StridedShard" in label for label in labels)
    # What tensor parallelism leaves alone is an instance of its own in every column.
    assert sum("norm.weight (7,)" in label for label in labels) == 2


def shard_fused(rank: int, _: int) -> list[Held]:
    """Three matrices in one, each cut for tensor parallelism by itself, then sharded by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    held: list[Held] = []
    for rows in (6, 12, 18, 24, 30):
        block = nn.Linear(4, rows, bias=False)
        fused = distribute_tensor(indices((rows, 4)), mesh["tp"], [strided(0, 3)])
        block.weight = nn.Parameter(fused)
        fully_shard(block, mesh=mesh["dp"])
        held += check_parameters("FSDP2 x fused TP", block, rank)
    return held


def test_boxes_are_those_of_fsdp_over_fused_tensor_parallel_weights() -> None:
    # torch itself does not put these together again: full_tensor() gives them in another order.
    ranks = run_ranks(4, shard_fused)
    check_together(ranks)
    assert max(len(one.boxes) for held in ranks for one in held) > 1
