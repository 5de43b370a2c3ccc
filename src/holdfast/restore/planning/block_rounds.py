"""Every block that anybody wants is read from storage once, by one of those who want it.

Each rank computes its own part of this from what all ranks want, without asking the others, and
all parts fit: who reads a block depends only on the block, the ranks that want it, and the other
blocks that just these ranks want. Blocks travel whole, so that whoever receives one checks it
against the checkpoint's own checksum of it, as if it had read it.

Reading once and passing on is ByteCheckpoint's (arXiv 2407.20143).
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
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.layout import Held, Instance, Layout, LeafEntry
from holdfast.geometry.placements import holders
from holdfast.geometry.rows import flat

Ranks = tuple[int, ...]


class Demand(NamedTuple):
    """The boxes of one leaf that are wanted, and by whom. They may overlap."""

    item_bytes: int
    boxes: Mapping[Box, Ranks]


# ── what all ranks want ──────────────────────────────────────────────────────────────────────


def alike(entries: Sequence[LeafEntry]) -> list[LeafEntry]:
    """``entries`` of one rank, such that ranks that hold the same in the same way say the same.

    One on a mesh of this rank alone is held as a plain tensor is.
    """
    return [replace(e, instance=None) if _is_alone(e.instance) else e for e in entries]


def _is_alone(instance: Instance | Held | None) -> bool:
    return isinstance(instance, Instance) and len(instance.mesh.ranks) == 1


def demands(tables: Sequence[tuple[Ranks, Sequence[LeafEntry]]]) -> dict[str, Demand]:
    """What is wanted of each leaf, from the tables (see ``alike``) and the ranks of each."""
    named: dict[str, list[tuple[int, LeafEntry]]] = {}
    for number, (_, entries) in enumerate(tables):
        for entry in entries:
            named.setdefault(entry.name, []).append((number, entry))
    # Most leaves are cut like another one, by instances that are the same objects.
    known: dict[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], dict[Box, Ranks]] = {}
    found = {}
    for name, declared in named.items():
        shape = declared[0][1].shape
        key = (shape, tuple((number, id(entry.instance)) for number, entry in declared))
        if key not in known:
            known[key] = _wanted_boxes(shape, [(tables[n][0], e.instance) for n, e in declared])
        found[name] = Demand(ITEMSIZE[declared[0][1].dtype], known[key])
    return found


def _wanted_boxes(
    shape: tuple[int, ...], declared: Sequence[tuple[Ranks, Instance | Held | None]]
) -> dict[Box, Ranks]:
    found: dict[Box, set[int]] = {}
    for ranks, instance in declared:
        for box, by in _held_boxes(shape, ranks, instance).items():
            if not box.is_empty:
                found.setdefault(box, set()).update(set(by) & set(ranks))
    return {box: tuple(sorted(ranks)) for box, ranks in found.items() if ranks}


def _held_boxes(
    shape: tuple[int, ...], ranks: Ranks, instance: Instance | Held | None
) -> dict[Box, Ranks]:
    if isinstance(instance, Held):
        return dict.fromkeys(instance.boxes, ranks)
    return {Box.whole(shape): ranks} if instance is None else holders(shape, instance)


# ── which blocks that is ─────────────────────────────────────────────────────────────────────


def find_entry(header: Header, image: int, leaf: str, dtype: str, shape: Ranks, box: Box) -> Entry:
    """Where the piece ``box`` of a leaf lies in an image; CoverageError when it does not."""
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
    """The blocks of one image that are wanted, and by whom."""
    found: dict[int, set[int]] = {}
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
                    found.setdefault(block, set()).update(ranks)
    return {block: tuple(sorted(ranks)) for block, ranks in found.items()}


def touched(inner: Box, shape: Sequence[int], item_bytes: int, offset: int) -> Iterator[int]:
    """The blocks in which a box of an array lies, whose first element is at ``offset``.

    Rows shorter than a block are not looked at one by one.
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


# ── who reads which block, and when ──────────────────────────────────────────────────────────


class Run(NamedTuple):
    """Blocks of one image that follow each other."""

    image: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Blocks that the same ranks want, and pass to each other at one time.

    ``shares[n]`` is what ``ranks[n]`` reads and gives to all others of them.
    """

    ranks: Ranks
    shares: tuple[tuple[Run, ...], ...]

    def share_of(self, rank: int) -> tuple[Run, ...]:
        """What ``rank`` reads."""
        return self.shares[self.ranks.index(rank)]


def plan_turns(
    blocks: Mapping[int, Mapping[int, Ranks]], rank: int, *, room_blocks: int
) -> list[Turn]:
    """The turns that ``rank`` takes part in, for the wanted ``blocks`` by image.

    A rank holds at most ``room_blocks`` (at least 4) at a time: a quarter is for its share of one
    turn, a quarter for that of the next, half for what comes from others.
    Of the turns of any two ranks, both have those they share in the same order, so that no ranks
    wait for each other in a circle.
    """
    pools: dict[Ranks, list[tuple[int, int]]] = {}
    for image, wanted in sorted(blocks.items()):
        for block, ranks in sorted(wanted.items()):
            if rank in ranks:
                pools.setdefault(ranks, []).append((image, block))
    # Those that nobody waits for come last.
    ordered = sorted(pools.items(), key=lambda pool: (len(pool[0]) == 1, pool[0]))
    return [turn for ranks, pool in ordered for turn in _turns(ranks, pool, room_blocks // 4)]


def counted(turns: Sequence[Turn], rank: int) -> tuple[int, int]:
    """How many blocks ``rank`` wants in its turns, and how many of them others read for it."""
    wanted = sum(_count(share) for turn in turns for share in turn.shares)
    return wanted, wanted - sum(_count(turn.share_of(rank)) for turn in turns)


def _count(share: Sequence[Run]) -> int:
    return sum(run.stop - run.first for run in share)


def _turns(ranks: Ranks, pool: Sequence[tuple[int, int]], share: int) -> Iterator[Turn]:
    others = len(ranks) - 1
    each = min(share, 2 * share // others) if others else share
    size = each * len(ranks) or 2 * share
    first = 0  # whose turn it is to begin: with more ranks than blocks, not always the same
    for at in range(0, len(pool), size):
        some = pool[at : at + size]
        readers = min(len(some), len(ranks))
        shares: list[tuple[Run, ...]] = [()] * len(ranks)
        for number in range(readers):
            cut = slice(len(some) * number // readers, len(some) * (number + 1) // readers)
            shares[(first + number) % len(ranks)] = _runs(some[cut])
        first = (first + readers) % len(ranks)
        yield Turn(ranks, tuple(shares))


def _runs(some: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    found: list[Run] = []
    for image, block in some:
        if found and (found[-1].image, found[-1].stop) == (image, block):
            found[-1] = found[-1]._replace(stop=block + 1)
        else:
            found.append(Run(image, block, block + 1))
    return tuple(found)
