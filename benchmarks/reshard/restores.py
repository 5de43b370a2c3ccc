"""Restore a state on one rank: the layouts, what the rank holds in them, and the figures.

Every element of the state is computed from its leaf and place, so each rank makes what it should
hold by itself, and no library that is compared has any part in it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import holdfast
from benchmarks.kit import disk, machine, processes
from benchmarks.kit.ranks import machine_alone
from holdfast.events import Event, Restored

HOLDFAST, EXCHANGING, DCP = "Holdfast", "Holdfast, exchanging", "DCP"
LAYERS = 4
MOMENTS = ("model", "exp_avg", "exp_avg_sq")
#: Rows and columns of the matrices, in widths; those that tensor parallelism cuts by columns.
MATRICES = {
    "q": (1, 1),
    "k": (0.25, 1),
    "v": (0.25, 1),
    "o": (1, 1),
    "gate": (3, 1),
    "up": (3, 1),
    "down": (1, 3),
}
BY_COLUMNS = ("o", "down")
VOCABULARY = 8  # widths
_MALLOC = ctypes.CDLL(None)


# ── layouts ──────────────────────────────────────────────────────────────────────────────────


def by_rows(name: str) -> list[Placement]:
    """As FSDP2 cuts everything."""
    return [Shard(0)]


def by_columns(name: str) -> list[Placement]:
    """The last dimension of everything: a column cut touches every row."""
    return [Shard(0 if "norm" in name else 1)]


def by_heads(name: str) -> list[Placement]:
    """As tensor parallelism cuts a transformer."""
    if "norm" in name:
        return [Replicate()]
    return [Shard(1 if name.rpartition(".")[2] in BY_COLUMNS else 0)]


def in_two_dimensions(name: str) -> list[Placement]:
    """FSDP over tensor parallelism."""
    return [Shard(0), *by_heads(name)]


@dataclass(frozen=True, slots=True)
class Cut:
    """How the leaves lie on a mesh."""

    mesh: tuple[int, ...]
    placements: Callable[[str], list[Placement]]


CUTS = {
    "FSDP 4": Cut((4,), by_rows),
    "FSDP 2": Cut((2,), by_rows),
    "TP 4": Cut((4,), by_heads),
    "columns 4": Cut((4,), by_columns),
    "FSDP 2 x TP 2": Cut((2, 2), in_two_dimensions),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """What is saved in one layout and restored in another."""

    saved: str
    restored: str

    @property
    def name(self) -> str:
        return f"{self.saved} → {self.restored}"

    @property
    def world(self) -> int:
        """The number of ranks that restore."""
        size = 1
        for extent in CUTS[self.restored].mesh:
            size *= extent
        return size


PAIRS = (
    Pair("FSDP 4", "FSDP 2"),
    Pair("FSDP 4", "TP 4"),
    Pair("FSDP 4", "FSDP 2 x TP 2"),
    Pair("FSDP 4", "columns 4"),
    Pair("columns 4", "FSDP 4"),
)


# ── the state ────────────────────────────────────────────────────────────────────────────────


def shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Parameters and both moments of a small transformer."""
    found: dict[str, tuple[int, ...]] = {}
    for kind in MOMENTS:
        found[f"{kind}.embed"] = (VOCABULARY * width, width)
        for layer in range(LAYERS):
            for name, (rows, columns) in MATRICES.items():
                shape = (round(rows * width), round(columns * width))
                found[f"{kind}.layers.{layer}.{name}"] = shape
            found[f"{kind}.layers.{layer}.norm"] = (width,)
    return found


def width_of(size_bytes: int) -> int:
    """The width that makes a state of about this size: odd, so that nothing divides evenly."""
    squares = VOCABULARY + LAYERS * sum(rows * columns for rows, columns in MATRICES.values())
    return round((size_bytes / (4 * len(MOMENTS) * squares)) ** 0.5) | 1


def build(cut: Cut, width: int, *, is_filled: bool) -> dict[str, DTensor]:
    """This rank's part of the state: as it was saved, or zeros."""
    mesh = init_device_mesh("cpu", cut.mesh)
    found = {}
    for number, (name, shape) in enumerate(shapes(width).items()):
        placements = cut.placements(name)
        extent, start = compute_local_shape_and_global_offset(shape, mesh, placements)
        box = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
        local = whole_leaf(number, shape)[box].clone() if is_filled else torch.zeros(extent)
        stride = (shape[1], 1) if len(shape) == 2 else (1,)
        found[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
    return found


def whole_leaf(number: int, shape: tuple[int, ...]) -> Tensor:
    """The elements of a leaf: any bits that are a number."""
    count = torch.Size(shape).numel()
    bits = torch.arange(count, dtype=torch.int32).mul_(-1640531527).add_(number * 7919)
    return bits.bitwise_and_(0x3FFF_FFFF).view(torch.float32).view(shape)


# ── saving ───────────────────────────────────────────────────────────────────────────────────


def save_all(root: Path, width: int) -> None:
    """The state in every layout that is restored from, by both systems."""
    for name in dict.fromkeys(pair.saved for pair in PAIRS):
        state = build(CUTS[name], width, is_filled=True)
        holdfast.save(place(root, HOLDFAST, name), state)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place(root, DCP, name), thread_count=2))
    dist.barrier()


def place(root: Path, system: str, layout: str) -> Path:
    """Where a system has what was saved in a layout."""
    return root / system.partition(",")[0] / layout.replace(" ", "-")


# ── a restore ────────────────────────────────────────────────────────────────────────────────


class Bench:
    """What one rank restores into, and what it must hold then."""

    def __init__(self, pair: Pair, root: Path, width: int, patience_s: float) -> None:
        self._pair, self._root, self._patience_s = pair, root, patience_s
        self.state = build(CUTS[pair.restored], width, is_filled=True)
        self._expected = [tensor.to_local().clone() for tensor in self.state.values()]
        self.size_bytes = sum(tensor.numel() * 4 for tensor in self.state.values())
        self.wanted_bytes = int(total(sum(tensor.nbytes for tensor in self._expected)))
        self._heard: list[Restored] = []
        holdfast.subscribe(self._hear)

    def _hear(self, event: Event, _: Any) -> None:
        if isinstance(event, Restored):
            self._heard.append(event)

    def bound_bytes(self) -> int:
        """What a restore promises to take at most beyond what it restores into, on any rank."""
        planned = holdfast.plan_restore(self._place(HOLDFAST), self.state)
        (mine,) = planned.ranks
        return int(largest(mine.memory_bytes - mine.wanted_bytes))

    def restore(self, system: str, *, is_cold: bool) -> tuple[dict[str, float], str]:
        """One restore by all ranks: its figures, and what it made of the state."""
        with machine_alone():
            self._prepare(system, is_cold=is_cold)
            before, read = self._take_stock()
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            self._load(system)
            elapsed, worked = time.perf_counter() - began, time.process_time() - worked
            after, now = processes.memory(os.getpid()), io_bytes()
        asked = now["rchar"] - read["rchar"]
        if system != DCP:  # a message from another rank is read, too, but not from a file
            asked = self._heard.pop().read_bytes
        figures = {
            "seconds": largest(elapsed),
            "processor": total(worked),
            "storage": total(now["read_bytes"] - read["read_bytes"]),
            "asked": total(asked),
            "memory": largest(after["highest"] - before),
        }
        wrong = total(self._differing())
        return figures, "exact" if not wrong else f"{wrong:.0f} parts differ"

    def _place(self, system: str) -> Path:
        return place(self._root, system, self._pair.saved)

    def _prepare(self, system: str, *, is_cold: bool) -> None:
        """Other bytes in every tensor, and all or nothing of the files in the page cache.

        What is there was brought there just now, by one rank: as warm for every system.
        """
        for tensor in self.state.values():
            tensor.to_local().fill_(-1)
        dist.barrier()
        if dist.get_rank() == 0:
            files = [path for path in self._place(system).rglob("*") if path.is_file()]
            disk.drop(files, cold=True)
            if not is_cold:
                disk.warm(files)
            if self._patience_s:
                machine.wait_until_idle(self._patience_s)
        os.environ["HOLDFAST_EXCHANGE"] = "always" if system == EXCHANGING else "auto"
        dist.barrier()

    def _take_stock(self) -> tuple[int, dict[str, int]]:
        """Resident bytes, from which on the highest are counted, and what was read so far."""
        gc.collect()
        _MALLOC.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the highest begins anew
        found = processes.memory(os.getpid())
        return sum(found[kind] for kind in ("private", "shared", "files")), io_bytes()

    def _load(self, system: str) -> None:
        if system == DCP:
            dcp.load(self.state, storage_reader=dcp.FileSystemReader(self._place(DCP)))
        else:
            holdfast.load(self._place(system), self.state)

    def _differing(self) -> int:
        pairs = zip(self.state.values(), self._expected, strict=True)
        return sum(not torch.equal(tensor.to_local(), whole) for tensor, whole in pairs)


def io_bytes() -> dict[str, int]:
    """What this process read: ``rchar`` by calls, ``read_bytes`` from the storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(":") for line in lines)}


def total(value: float) -> float:
    """Of all ranks."""
    return _reduced(value, dist.ReduceOp.SUM)


def largest(value: float) -> float:
    """Of any rank."""
    return _reduced(value, dist.ReduceOp.MAX)


def _reduced(value: float, how: Any) -> float:
    told = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(told, how)
    return float(told)
