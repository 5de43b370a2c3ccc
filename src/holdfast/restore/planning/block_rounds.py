"""PURE. Assigns every wanted block to one reader, and groups the exchange of blocks into rounds.

Each rank computes its own part of this from what all ranks want, without asking the others, and all
parts are consistent: the reader of a block depends only on the block, the ranks that want it, and
the other blocks that just these ranks want. Blocks travel whole, so that the receiver verifies each
with the checkpoint's own checksum, as if it had read the block itself.

Reading once and passing on is ByteCheckpoint's method (arXiv 2407.20143).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from holdfast.errors import CoverageError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import Entry, Header, piece_name
from holdfast.geometry.box import Box
from holdfast.geometry.index import ITEMSIZE, flat
from holdfast.geometry.layout import HolderBoxes, Instance, Layout, LeafEntry
from holdfast.geometry.mesh import holders

Ranks = tuple[int, ...]


class Demand(NamedTuple):
    """The wanted boxes of one leaf, each with its ranks. Boxes may overlap."""

    item_bytes: int
    boxes: Mapping[Box, Ranks]


# ── demands of all ranks ─────────────────────────────────────────────────────────────────────


def same_demands(entries: Sequence[LeafEntry]) -> list[LeafEntry]:
    """Normalize ``entries`` of one rank, so that ranks that hold the same in the same way compare
    equal.

    An entry on a mesh of this rank alone is held as a plain tensor is.
    """
    return [replace(e, instance=None) if _is_alone(e.instance) else e for e in entries]


def _is_alone(instance: Instance | HolderBoxes | None) -> bool:
    return isinstance(instance, Instance) and len(instance.mesh.ranks) == 1


def demands(tables: Sequence[tuple[Ranks, Sequence[LeafEntry]]]) -> dict[str, Demand]:
    """Return the demands of each leaf, from the tables (see ``same_demands``) and their ranks."""
    named: dict[str, list[tuple[int, LeafEntry]]] = {}
    for number, (_, entries) in enumerate(tables):
        for entry in entries:
            named.setdefault(entry.name, []).append((number, entry))
    # Most leaves are cut like another one, by instances that are the same objects.
    known: dict[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], dict[Box, Ranks]] = {}
    result = {}
    for name, declared in named.items():
        shape = declared[0][1].shape
        key = (shape, tuple((number, id(entry.instance)) for number, entry in declared))
        if key not in known:
            known[key] = _wanted_boxes(shape, [(tables[n][0], e.instance) for n, e in declared])
        result[name] = Demand(ITEMSIZE[declared[0][1].dtype], known[key])
    return result


def _wanted_boxes(
    shape: tuple[int, ...], declared: Sequence[tuple[Ranks, Instance | HolderBoxes | None]]
) -> dict[Box, Ranks]:
    ranks_of: dict[Box, set[int]] = {}
    for ranks, instance in declared:
        for box, by in _held_boxes(shape, ranks, instance).items():
            if not box.is_empty:
                ranks_of.setdefault(box, set()).update(set(by) & set(ranks))
    return {box: tuple(sorted(ranks)) for box, ranks in ranks_of.items() if ranks}


def _held_boxes(
    shape: tuple[int, ...], ranks: Ranks, instance: Instance | HolderBoxes | None
) -> dict[Box, Ranks]:
    if isinstance(instance, HolderBoxes):
        return dict.fromkeys(instance.boxes, ranks)
    return {Box.whole(shape): ranks} if instance is None else holders(shape, instance)


# ── wanted blocks ────────────────────────────────────────────────────────────────────────────


def find_entry(header: Header, image: int, leaf: str, dtype: str, shape: Ranks, box: Box) -> Entry:
    """Return the position of the piece ``box`` of a leaf in an image; CoverageError when it is
    missing.
    """
    name = piece_name(leaf, shape, box)
    entry = header.piece(name, dtype, box.shape)
    if entry is None:
        how = "another size or dtype of" if name in header.entries else "no"
        raise CoverageError(
            f"image {image} has {how} piece {name!r} that its layout names; nothing was read",
            leaf=name,
        )
    return entry


def wanted_blocks(
    image: int, header: Header, layout: Layout, wanted: Mapping[str, Demand]
) -> dict[int, Ranks]:
    """Return the wanted blocks of one image, each with its ranks."""
    ranks_of: dict[int, set[int]] = {}
    for piece in layout.pieces(image):
        leaf, box = layout.leaves[piece.leaf], piece.box
        demand = wanted.get(leaf.name)
        if demand is None:
            continue
        entry = find_entry(header, image, leaf.name, leaf.dtype, leaf.shape, box)
        for asked, ranks in demand.boxes.items():
            part = box.intersect(asked)
            if part is not None:
                inner = part.relative_to(box)
                for block in touched(inner, box.shape, demand.item_bytes, entry.offset):
                    ranks_of.setdefault(block, set()).update(ranks)
    return {block: tuple(sorted(ranks)) for block, ranks in ranks_of.items()}


def touched(inner: Box, shape: Sequence[int], item_bytes: int, offset: int) -> Iterator[int]:
    """Return the blocks that a box of an array overlaps; the array's first element is at
    ``offset``.

    Rows shorter than a block are not examined one by one.
    """
    row_bytes = math.prod(shape[1:]) * item_bytes
    is_one_run = inner.shape[1:] == tuple(shape[1:])
    if shape and row_bytes > BLOCK_BYTES and not is_one_run:
        rest = Box(inner.start[1:], inner.stop[1:])
        for row in range(inner.start[0], inner.stop[0]):
            yield from touched(rest, shape[1:], item_bytes, offset + row * row_bytes)
        return
    start = offset + flat(inner.start, shape) * item_bytes
    stop = offset + (flat([n - 1 for n in inner.stop], shape) + 1) * item_bytes
    yield from range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))


# ── readers and rounds ───────────────────────────────────────────────────────────────────────


class BlockRange(NamedTuple):
    """Consecutive blocks of one image."""

    image: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class ExchangeRound:
    """Blocks that the same ranks want, and send to each other at one time.

    ``shares[n]`` is what ``ranks[n]`` reads and sends to all others of them.
    """

    ranks: Ranks
    shares: tuple[tuple[BlockRange, ...], ...]

    def share_of(self, rank: int) -> tuple[BlockRange, ...]:
        """Return the blocks that ``rank`` reads."""
        return self.shares[self.ranks.index(rank)]


def plan_rounds(
    blocks: Mapping[int, Mapping[int, Ranks]], rank: int, *, room_blocks: int
) -> list[ExchangeRound]:
    """Plan the rounds that ``rank`` takes part in, for the wanted ``blocks`` by image.

    A rank holds at most ``room_blocks`` (at least 4) at a time: a quarter for its share of one
    round, a quarter for that of the next, half for blocks from others. Any two ranks have their
    common rounds in the same order, so that no ranks wait for each other in a circle.
    """
    pools: dict[Ranks, list[tuple[int, int]]] = {}
    for image, wanted in sorted(blocks.items()):
        for block, ranks in sorted(wanted.items()):
            if rank in ranks:
                pools.setdefault(ranks, []).append((image, block))
    # Rounds that no other rank waits for come last.
    ordered = sorted(pools.items(), key=lambda pool: (len(pool[0]) == 1, pool[0]))
    return [round_ for ranks, pool in ordered for round_ in _rounds(ranks, pool, room_blocks // 4)]


def counted(rounds: Sequence[ExchangeRound], rank: int) -> tuple[int, int]:
    """Return how many blocks ``rank`` wants in its rounds, and how many of them others read for
    it.
    """
    wanted = sum(_count(share) for round_ in rounds for share in round_.shares)
    return wanted, wanted - sum(_count(round_.share_of(rank)) for round_ in rounds)


def _count(share: Sequence[BlockRange]) -> int:
    return sum(run.stop - run.first for run in share)


def _rounds(ranks: Ranks, pool: Sequence[tuple[int, int]], share: int) -> Iterator[ExchangeRound]:
    others = len(ranks) - 1
    each = min(share, 2 * share // others) if others else share
    size = each * len(ranks) or 2 * share
    first = 0  # the rank that begins; it rotates, for rounds with more ranks than blocks
    for at in range(0, len(pool), size):
        some = pool[at : at + size]
        readers = min(len(some), len(ranks))
        shares: list[tuple[BlockRange, ...]] = [()] * len(ranks)
        for number in range(readers):
            cut = slice(len(some) * number // readers, len(some) * (number + 1) // readers)
            shares[(first + number) % len(ranks)] = _runs(some[cut])
        first = (first + readers) % len(ranks)
        yield ExchangeRound(ranks, tuple(shares))


def _runs(some: Sequence[tuple[int, int]]) -> tuple[BlockRange, ...]:
    runs: list[BlockRange] = []
    for image, block in some:
        if runs and (runs[-1].image, runs[-1].stop) == (image, block):
            runs[-1] = runs[-1]._replace(stop=block + 1)
        else:
            runs.append(BlockRange(image, block, block + 1))
    return tuple(runs)
