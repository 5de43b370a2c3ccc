"""Declare layouts of large runs: the tables of thousands of ranks, without these ranks.

A model of the shapes of a large transformer with AdamW: of each parameter the weights, both
moments and a step count, which is a plain tensor on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from holdfast.geometry.layout import REPLICATE, Instance, LeafEntry, Mesh, Placement

WIDTH, HIDDEN, WORDS = 8192, 28672, 128256
ROWS, COLUMNS = Placement(0), Placement(1)
#: (name, shape, dimension that tensor parallelism cuts; -1: none)
EXPERT = ("gate", "up", "down")
EXPERTS = 60  # on 64 ranks: some have none
LAYER = [
    ("q", (WIDTH, WIDTH), 0),
    ("k", (1024, WIDTH), 0),
    ("v", (1024, WIDTH), 0),
    ("o", (WIDTH, WIDTH), 1),
    ("gate", (HIDDEN, WIDTH), 0),
    ("up", (HIDDEN, WIDTH), 0),
    ("down", (WIDTH, HIDDEN), 1),
    ("norm1", (WIDTH,), -1),
    ("norm2", (WIDTH,), -1),
]

#: The instance that a rank declares of a parameter: (rank, layer, name, dimension to cut).
Where = Callable[[int, int, str, int], Instance | None]


@dataclass(frozen=True)
class Kind:
    """How a run of ``world`` ranks is cut. ``table_of``: which ranks declare the same."""

    name: str
    world: int
    where: Where
    table_of: Callable[[int], int]
    has_layer: Callable[[int, int], bool] = lambda rank, layer: True
    experts: Sequence[str] = ()
    """Parameters that there are of every expert, as one tensor."""
    own: Sequence[str] = ()
    """Parameters that each of 64 sets of ranks has under names of its own."""

    def table(self, rank: int, leaves: int) -> list[LeafEntry]:
        """What ``rank`` declares in a run with about so many leaves."""
        return sorted(self._entries(rank, leaves // 4), key=lambda entry: entry.name)

    def _entries(self, rank: int, parameters: int) -> Iterator[LeafEntry]:
        layers = parameters // len(LAYER)
        named = [(n, *each) for n in range(layers) for each in LAYER]
        named += [(0, "embedding", (WORDS, WIDTH), 0), (layers - 1, "head", (WORDS, WIDTH), 0)]
        for layer, name, shape, dim in named:
            if not self.has_layer(rank, layer * 16 // max(1, layers)):
                continue
            instance = self.where(rank, layer, name, dim)
            if name in self.experts:
                shape = (EXPERTS, *shape)
            own = f".rank{rank % 64}" if name in self.own else ""
            full = f"{layer:04d}.{name}{own}"
            for part in ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq"):
                yield LeafEntry(part.format(full), "F32", shape, "split", instance)
            yield LeafEntry(f"optimizer.{full}.step", "F32", (), "lowest")


@cache
def _mesh(first: int, step: int, *shape: int) -> Mesh:
    count = 1
    for extent in shape:
        count *= extent
    return Mesh(shape, tuple(range(first, first + count * step, step)))


@cache
def _on(first: int, step: int, shape: tuple[int, ...], *placements: Placement) -> Instance:
    return Instance(_mesh(first, step, *shape), placements)


def kinds(world: int) -> list[Kind]:
    """The ways to cut that are measured, for ``world`` ranks: a multiple of 1,024."""

    def fsdp(rank: int, layer: int, name: str, dim: int) -> Instance:
        return _on(0, 1, (world,), ROWS)

    def hsdp(rank: int, layer: int, name: str, dim: int) -> Instance:
        return _on(0, 1, (world // 256, 256), REPLICATE, ROWS)

    def tp(rank: int, layer: int, name: str, dim: int) -> Instance:
        if dim == -1:  # its shards lie on the ranks with the same place in tensor parallelism
            return _on(rank % 8, 8, (world // 8,), ROWS)
        cut = Placement(0, 8) if dim == 0 else ROWS
        return _on(0, 1, (world // 8, 8), cut, Placement(dim))

    def pipeline(rank: int, layer: int, name: str, dim: int) -> Instance:
        each = world // 16
        return _on(rank // each * each, 1, (each,), ROWS)

    def experts(rank: int, layer: int, name: str, dim: int) -> Instance:
        if name in EXPERT:  # each expert on one in 64 ranks, its rows cut for these
            return _on(0, 1, (world // 64, 64), COLUMNS, ROWS)
        return _on(0, 1, (world,), ROWS)

    def own(rank: int, layer: int, name: str, dim: int) -> Instance:
        if name in EXPERT:
            return _on(rank % 64, 64, (world // 64,), ROWS)
        return _on(0, 1, (world,), ROWS)

    each = world // 16
    return [
        Kind(f"FSDP {world}", world, fsdp, lambda rank: 0),
        Kind(f"HSDP {world // 256} x 256", world, hsdp, lambda rank: 0),
        Kind(f"TP 8 x FSDP {world // 8}", world, tp, lambda rank: rank % 8),
        Kind(
            f"PP 16 x FSDP {each}",
            world,
            pipeline,
            lambda rank: rank // each,
            has_layer=lambda rank, sixteenth: rank // each == sixteenth,
        ),
        Kind(
            f"MoE {EXPERTS} experts on 64 x FSDP {world // 64}",
            world,
            experts,
            lambda rank: 0,
            experts=EXPERT,
        ),
        Kind(f"DDP {world}", world, lambda *_: None, lambda rank: 0),
        Kind(
            f"64 sets of names x FSDP {world // 64}", world, own, lambda rank: rank % 64, own=EXPERT
        ),
    ]
