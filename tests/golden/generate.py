"""Make the golden checkpoints of a version of Holdfast: once, and never again.

PYTHONPATH=tests python tests/golden/generate.py DIRECTORY     # v1, say; refused when it is there

A golden checkpoint is what some version really wrote. If a later one cannot read it, that later
one is wrong, and the file stays. What they must hold is written down in test_golden.py, not here.
Elements are numbers that depend on the leaf's name and on their own place only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections import Counter, OrderedDict, defaultdict
from enum import Enum, Flag
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast
from holdfast.catalogue import catalogue
from holdfast.format.manifest import Generation
from holdfast.geometry.box import Box, flat_boxes
from holdfast.geometry.layout import HolderBoxes, LeafEntry, merge
from holdfast.persist.commit import open_root
from holdfast.persist.pins import pin
from holdfast.state.tensors import DTYPE_NAMES
from holdfast.storage.open import open_store
from support.checkpoints.images import images_of, publish_checkpoint
from support.runs.launch import run_ranks

HERE = Path(__file__).resolve().parent
SUMS = HERE / "SHA256SUMS"


class Phase(Enum):
    WARMUP = 1
    STEADY = "two"


class Parts(Flag):
    HEAD = 1
    BODY = 2


class Tiny(nn.Module):
    """Extents that few numbers of ranks divide, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def fill(name: str, tensor: torch.Tensor) -> None:
    """Element i of the leaf is (sum of the bytes of its name + 3 i) mod 256, divided by 8."""
    numbers = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
    whole = ((numbers * 3 + sum(name.encode())) % 256 / 8).to(tensor.dtype)
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            placed = distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim)
            tensor._local_tensor.copy_(placed.redistribute(mesh, tensor.placements)._local_tensor)
        else:
            tensor.copy_(whole)


def state_of(model: nn.Module) -> dict[str, Any]:
    """The model with the state that AdamW has after one step, all numbers known."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.25)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        fill(f"model.{name}", parameter)
        for kind, tensor in optimizer.state[parameter].items():
            fill(f"optimizer.{name}.{kind}", tensor)
    for name, buffer in model.named_buffers():
        fill(f"model.{name}", buffer)
    return {"model": model, "optimizer": optimizer, "tokens": 1234, "rng": holdfast.Rng()}


# ── the checkpoints ──────────────────────────────────────────────────────────────────────────


def one_rank(root: Path) -> None:
    holdfast.save(root, state_of(Tiny()), step=7)


def element_types(root: Path) -> None:
    """A leaf of every element type: byte i is (7 i + 3) mod 251, and 0 or 1 for booleans."""
    raw = bytes((7 * i + 3) % 251 for i in range(96))
    tensors: dict[str, torch.Tensor] = {}
    for dtype, name in DTYPE_NAMES.items():
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if dtype is torch.bool:
            data %= 2
        tensors[name] = data.view(dtype).view(2, -1)
    tensors["empty"], tensors["scalar"] = torch.empty(0, 3), torch.tensor(1.5)
    holdfast.save(root, {"tensors": tensors}, step=0)


def value_tags(root: Path) -> None:
    holdfast.register_enum(Phase, name="golden.Phase")
    holdfast.register_enum(Parts, name="golden.Parts")
    ordered = OrderedDict([("z", 1), ("a", 2)])
    factories = defaultdict(list, {"k": [1]})
    values: dict[str, Any] = {
        "plain": [None, True, -5, 0.1, 1e300, "text é 名", [], {}],
        "floats": [float("inf"), float("-inf"), float("nan"), -0.0, 5e-324],
        "ints": [2**53, -(2**70), 2**9000],
        "bytes": b"\x00\xff",
        "bytearray": bytearray(b"ab"),
        "tuple": (1, (2, "x")),
        "set": {3, 1, 2},
        "frozenset": frozenset({"b", "a"}),
        "dict": {1: "one", (2, 3): None, "$x": 0},
        "ordered": ordered,
        "counter": Counter("abca"),
        "default": factories,
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "array": np.arange(6, dtype=">i2").reshape(2, 3),
        "scalar": np.float32(0.25),
        "strings": np.array(["a", "bcd"]),
        "enum": Phase.STEADY,
        "flag": Parts.HEAD | Parts.BODY,
        "tensor": torch.arange(3, dtype=torch.int16),
    }
    holdfast.save(root, {"values": values}, step=3)


class Projector:
    """An object that an optimizer may keep: a setting, and a matrix."""

    def __init__(self, rank: int, matrix: Any) -> None:
        self.rank, self.matrix = rank, matrix


def objects(root: Path) -> None:
    holdfast.register_value(
        Projector, vars, lambda data: Projector(**data), name="golden.Projector"
    )
    projector = Projector(2, torch.arange(6.0).view(2, 3))
    holdfast.save(root, {"values": {"projector": projector}}, step=4)


def history(root: Path) -> None:
    """Five incarnations, two abandoned generations, one of them pinned."""
    for step in (10, 20, 30, 15, 25):
        holdfast.save(root, {"w": torch.full((3,), float(step)), "step": step}, step=step)
    pin(open_store(root), Generation(2, 20), "before the fall")


def kept(root: Path) -> None:
    """Two lives of a run with a keeper: the second went back to step 0 of the first."""
    for life, steps in ((1, (0, 1)), (2, (1,))):
        weights = torch.zeros(2, 3)
        state: dict[str, Any] = {"w": weights, "life": life}
        with holdfast.Checkpointer(root, state, memory=None, storage=None) as checkpointer:
            checkpointer.restore(0 if life == 2 else None)
            for step in steps:
                weights.fill_(100 * life + step)
                state["life"] = life
                checkpointer.save(step, durable=True).wait_durable(timeout_s=60)
    shutil.rmtree(root / "events", ignore_errors=True)


def frozen(root: Path) -> None:
    """A large weight that is frozen and a small one that is not; two saves of a run with a keeper.

    The small weight is (step + 1) everywhere.
    """

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(torch.empty(510, 515), requires_grad=False)
            self.adapter = nn.Parameter(torch.empty(3, 5))

    model = Adapted()
    fill("model.base", model.base)
    state: dict[str, Any] = {"model": model, "tokens": 0}
    with holdfast.Checkpointer(root, state, memory=None, storage=None) as checkpointer:
        checkpointer.restore()
        for step in (0, 1):
            with torch.no_grad():
                model.adapter.fill_(step + 1)
            state["tokens"] += 1234
            checkpointer.save(step, durable=True).wait_durable(timeout_s=60)
    shutil.rmtree(root / "events", ignore_errors=True)


def fsdp_uneven(rank: int, world: int, root: str) -> None:
    model = Tiny()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    holdfast.save(root, state_of(model), step=7)


def fsdp_tensor_parallel(rank: int, world: int, root: str) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model = Tiny()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    holdfast.save(root, state_of(model), step=7)


def own_tensors(rank: int, world: int, root: str) -> None:
    """Small tensors in values, other ones on each rank."""
    own = torch.arange(4, dtype=torch.bfloat16) + 10 * rank
    counts = torch.tensor([], dtype=torch.int64)
    holdfast.save(root, {"own": own, "again": [own], "counts": counts, "rank": rank}, step=1)


#: The leaves of ``listed`` on four ranks, each with what rank 0, 1, 2 and 3 holds of it.
FLAT, SQUARE, STACK = (5, 7), (6, 8), (4, 3, 5)
LISTED: dict[str, tuple[tuple[int, ...], list[tuple[Box, ...] | None]]] = {
    "columns": (SQUARE, [(Box((0, 2 * n), (6, 2 * n + 2)),) for n in range(4)]),
    "copies": (FLAT, [flat_boxes(FLAT, *ends) for ends in ((0, 11), (11, 35), (0, 20), (20, 35))]),
    "flat": (FLAT, [flat_boxes(FLAT, *ends) for ends in ((0, 9), (9, 10), (10, 33), (33, 35))]),
    "half": (SQUARE, [(Box((0, 0), (3, 8)),), (Box((3, 0), (6, 8)),), (), None]),
    "rows": (
        SQUARE,
        [
            (Box((n, 0), (n + 1, 8)), Box((n + 4, 0), (n + 5, 8)))
            if n < 2
            else (Box((n, 0), (n + 1, 8)),)
            for n in range(4)
        ],
    ),
    "scalar": ((), [(Box((), ()),), (), (), ()]),
    "stack": (STACK, [(Box((0, 0, 0), (2, 3, 3)),), (Box((2, 0, 0), (4, 3, 3)),)] * 2),
    "stack.rest": (STACK, [(Box((0, 0, 0), (4, 3, 5)),), (Box((0, 1, 0), (4, 3, 5)),), None, ()]),
}


def listed(root: Path) -> None:
    """Leaves that no mesh describes, put together by the parts that a save is made of.

    None: the rank has all of it. ``stack`` lacks its last columns on these ranks; a fifth has them.
    """
    tables = [
        [
            LeafEntry(name, "F32", shape, "split", None if boxes is None else HolderBoxes(boxes))
            for name, (shape, held) in LISTED.items()
            for boxes in [held[rank]]
        ]
        for rank in range(4)
    ]
    rest = HolderBoxes((Box((0, 0, 3), (4, 3, 5)),))
    layout = merge([*tables, [LeafEntry("stack", "F32", STACK, "split", rest)]])
    arrays = {}
    for name, (shape, _) in LISTED.items():
        tensor = torch.empty(shape)
        fill(name, tensor)
        arrays[name] = tensor.numpy()
    images = images_of(layout, arrays, generation=Generation(1, 5))
    publish_checkpoint(open_store(root), layout, images, Generation(1, 5))
    open_root(open_store(root), "r")


ALONE = {
    "one-rank": one_rank,
    "element-types": element_types,
    "value-tags": value_tags,
    "objects": objects,
    "history": history,
    "kept": kept,
    "frozen": frozen,
    "listed": listed,
}
TOGETHER = {
    "fsdp-uneven": (3, fsdp_uneven),
    "fsdp-tensor-parallel": (4, fsdp_tensor_parallel),
    "own-tensors": (2, own_tensors),
}
#: What each directory was made with; what is new gets a directory of its own.
MADE = {
    "v1": [
        "one-rank",
        "element-types",
        "value-tags",
        "history",
        "kept",
        "fsdp-uneven",
        "fsdp-tensor-parallel",
    ],
    "v1-small-tensors": ["own-tensors"],
    "v1-frozen-parts": ["frozen"],
    "v1-listings": ["listed"],
    "v1-objects": ["objects"],
}


def main(version: str) -> None:
    target = HERE / version
    if target.exists():
        raise SystemExit(f"{target} is there, and golden checkpoints are never made again")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as arena:
        os.environ["HOLDFAST_ARENA_DIR"] = arena
        for name in MADE[version]:
            if name in ALONE:
                ALONE[name](target / name)
            else:
                world, function = TOGETHER[name]
                run_ranks(world, function, str(target / name))
    for path in target.rglob(".*"):
        path.unlink()  # locks, and whose they were
    for root in target.iterdir():
        assert not catalogue(open_store(root)).broken
    _write_sums(target)


def _write_sums(target: Path) -> None:
    files = sorted(path for path in target.rglob("*") if path.is_file())
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(HERE)}\n"
        for path in files
    ]
    with SUMS.open("a") as sums:
        sums.writelines(lines)
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files)} files of {size} bytes in {target}; now they are never changed")


if __name__ == "__main__":
    import generate  # type: ignore[import-not-found]  # so that ranks find the functions by a name that can be imported

    generate.main(sys.argv[1])
