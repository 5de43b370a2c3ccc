"""Load one state by Holdfast and by others, from storage and from the arena."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import holdfast
from benchmarks.kit.disk import warm
from benchmarks.restore.stored_state import Bench
from holdfast.geometry.box import Box

PARTS = ("one leaf", "one box of one leaf")


# ── ways to load ─────────────────────────────────────────────────────────────────────────────


def fill(leaves: dict[str, Tensor], loaded: Iterable[tuple[str, Tensor]]) -> None:
    """Copy what was loaded into the state, as a user has to."""
    for name, tensor in loaded:
        leaves[name].copy_(tensor)


def load_torch(bench: Bench, *, mapped: bool) -> None:
    """``torch.load`` and the copy into the state."""
    fill(bench.leaves, torch.load(bench.root / "torch.pt", mmap=mapped).items())


def load_safetensors(bench: Bench) -> None:
    """``safe_open``, tensor by tensor into the state."""
    with safetensors.safe_open(bench.root / "state.safetensors", "pt") as file:
        fill(bench.leaves, ((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118


def load_dcp(bench: Bench) -> None:
    """``torch.distributed.checkpoint.load``, which fills the state's own tensors."""
    path = next(bench.root.glob("dcp-*/0"))
    dcp.load(bench.leaves, storage_reader=dcp.FileSystemReader(path))


def load_once(bench: Bench, label: str, load: Callable[[Bench], None], *, cold: bool) -> None:
    """One load, with all or nothing of the files in the page cache."""
    if not cold:
        warm(bench.files())
    bench.measure(label, lambda: load(bench), cold=cold)


def load_holdfast(bench: Bench) -> None:
    """``holdfast.load``."""
    holdfast.load(bench.root / "holdfast", bench.state)


def read_part(bench: Bench, name: str, box: Box | None) -> None:
    """``holdfast.open(...).read`` of one leaf, or a box of it."""
    with holdfast.open(bench.root / "holdfast") as checkpoint:
        found = checkpoint.read(name, box)
    expected = bench.leaves[name][box.slices()] if box else bench.leaves[name]
    label = "one leaf" if box is None else "one box of one leaf"
    bench.verdicts[label].append("exact" if torch.equal(found, expected) else "differs")


def load_ways(bench: Bench) -> dict[str, Callable[[], None]]:
    """Each system, measured once with a cold and once with a warm page cache."""
    loads: dict[str, Callable[[Bench], None]] = {
        "Holdfast": load_holdfast,
        "torch.load": partial(load_torch, mapped=False),
        "torch.load, mmap": partial(load_torch, mapped=True),
        "safetensors": load_safetensors,
        "DCP load": load_dcp,
    }
    return {
        f"{name}, {heat}": partial(load_once, bench, f"{name}, {heat}", load, cold=heat == "cold")
        for name, load in loads.items()
        for heat in ("cold", "warm")
    }


def part_ways(bench: Bench) -> dict[str, Callable[[], None]]:
    """Parts of the largest leaf, each measured once."""
    leaf = max(bench.leaves, key=lambda name: bench.leaves[name].nbytes)
    size = bench.leaves[leaf].shape
    box = Box((size[0] // 4, size[1] // 4), (size[0] // 2, size[1] // 2))
    return {
        name: partial(bench.limit, name, partial(read_part, bench, leaf, what))
        for name, what in zip(PARTS, (None, box), strict=True)
    }


# ── the arena ────────────────────────────────────────────────────────────────────────────────


class Arena:
    """A generation held by a real keeper; every restore is by a Checkpointer made anew."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._root = bench, bench.root / "run"
        checkpointer = self._open()
        checkpointer.save(1).wait_captured(120)
        checkpointer.__exit__(KeyboardInterrupt, None, None)  # as a crash leaves it

    def _open(self) -> holdfast.Checkpointer:
        return holdfast.Checkpointer(self._root, self._bench.state, memory=None, storage=None)

    def restore(self, name: str) -> None:
        """One restore, measured without the meeting of trainer and keeper."""
        checkpointer = self._open()

        def act() -> None:
            found = checkpointer.restore()
            assert found is not None and found.source == "memory"

        self._bench.measure(name, act)
        checkpointer.__exit__(KeyboardInterrupt, None, None)

    def close(self) -> None:
        """Let the keeper end."""
        checkpointer = self._open()
        checkpointer.restore()
        checkpointer.close()
