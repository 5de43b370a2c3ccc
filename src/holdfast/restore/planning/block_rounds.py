"""PURE. Assigns every wanted block to one host that reads it, and to a round of the exchange.

Each host computes its own part of this from what its ranks want, and all parts are consistent: the
reader and the round of a block depend only on the ranks that want it, and on the other blocks that
ranks of just the same hosts want. Blocks travel whole, so that each rank verifies those it uses
with the checkpoint's own checksum, as if it had read them itself.

Reading once and passing on is ByteCheckpoint's method (arXiv 2407.20143).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import msgpack
from msgspec.structs import replace

from holdfast.errors import CoverageError
from holdfast.format.checksum import BLOCK_BYTES, checksum
from holdfast.format.image import Entry, Header, piece_name
from holdfast.geometry.box import ITEMSIZE, Box, flat
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
        those = set(ranks)
        for box, by in _held_boxes(shape, ranks, instance).items():
            if not box.is_empty:
                ranks_of.setdefault(box, set()).update(those.intersection(by))
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


class BlockRange(NamedTuple):
    """Consecutive blocks of one image."""

    image: int
    first: int
    stop: int


def _runs(some: Iterable[tuple[int, int]]) -> tuple[BlockRange, ...]:
    runs: list[BlockRange] = []
    for image, block in some:
        if runs and (runs[-1].image, runs[-1].stop) == (image, block):
            runs[-1] = runs[-1]._replace(stop=block + 1)
        else:
            runs.append(BlockRange(image, block, block + 1))
    return tuple(runs)


class BlockPool(NamedTuple):
    """The blocks that exactly these ranks want."""

    ranks: Ranks
    runs: tuple[BlockRange, ...]

    @property
    def size(self) -> int:
        """The number of its blocks."""
        return sum(run.stop - run.first for run in self.runs)


def wanted_pools(
    rank: int, headers: Mapping[int, Header], layout: Layout, wanted: Mapping[str, Demand]
) -> list[BlockPool]:
    """Return the pools of all blocks that ``rank`` wants, from the images of these headers."""
    meeting, unions = _MeetingBoxes(), _Unions()
    pools: dict[int, tuple[Ranks, list[tuple[int, int]]]] = {}
    for image, header in sorted(headers.items()):
        found: dict[int, dict[int, Ranks]] = {}
        for piece in layout.pieces(image):
            leaf, box = layout.leaves[piece.leaf], piece.box
            demand = wanted.get(leaf.name)
            parts = meeting.parts(demand, box) if demand is not None else ()
            if demand is None or not parts:
                continue
            entry = find_entry(header, image, leaf.name, leaf.dtype, leaf.shape, box)
            for inner, ranks in parts:
                for block in touched(inner, box.shape, demand.item_bytes, entry.offset):
                    found.setdefault(block, {})[id(ranks)] = ranks
        for block, by_id in sorted(found.items()):
            ranks, members = unions.of(by_id)
            if rank in members:
                pools.setdefault(id(ranks), (ranks, []))[1].append((image, block))
    return [BlockPool(ranks, _runs(blocks)) for ranks, blocks in pools.values()]


class _MeetingBoxes:
    """Finds the demanded boxes that a piece meets: once for leaves that are alike."""

    def __init__(self) -> None:
        self._sorted: dict[int, tuple[list[Box], list[int], int]] = {}
        self._known: dict[tuple[int, Box], list[tuple[Box, Ranks]]] = {}

    def parts(self, demand: Demand, piece: Box) -> list[tuple[Box, Ranks]]:
        """Return the demanded parts of a piece, relative to it, each with its ranks."""
        key = id(demand.boxes), piece
        if key not in self._known:
            self._known[key] = [
                (part.relative_to(piece), demand.boxes[box])
                for box in self._near(demand, piece)
                if (part := piece.intersect(box)) is not None
            ]
        return self._known[key]

    def _near(self, demand: Demand, piece: Box) -> Sequence[Box]:
        """Return the boxes that may meet a piece, by their first dimension."""
        if not piece.ndim:
            return [*demand.boxes]
        if id(demand.boxes) not in self._sorted:
            boxes = sorted(demand.boxes, key=lambda box: box.start)
            longest = max((box.shape[0] for box in boxes), default=0)
            self._sorted[id(demand.boxes)] = boxes, [box.start[0] for box in boxes], longest
        boxes, starts, longest = self._sorted[id(demand.boxes)]
        first = bisect_left(starts, piece.start[0] - longest + 1)
        return boxes[first : bisect_left(starts, piece.stop[0])]


class _Unions:
    """Joins sets of ranks; equal results are one object."""

    def __init__(self) -> None:
        self._of_ids: dict[tuple[int, ...], tuple[Ranks, frozenset[int]]] = {}
        self._equal: dict[Ranks, tuple[Ranks, frozenset[int]]] = {}

    def of(self, by_id: Mapping[int, Ranks]) -> tuple[Ranks, frozenset[int]]:
        """Return the ranks that are in any of these tuples, which stay alive, in order."""
        key = tuple(sorted(by_id))
        if key not in self._of_ids:
            members = frozenset().union(*by_id.values())
            ranks = tuple(sorted(members))
            self._of_ids[key] = self._equal.setdefault(ranks, (ranks, members))
        return self._of_ids[key]


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


def counted(pools: Sequence[BlockPool]) -> tuple[int, float]:
    """Return how many blocks the rank of these pools wants, and how many of them others read for
    it, on average over all ranks of a pool.
    """
    wanted = sum(pool.size for pool in pools)
    return wanted, wanted - sum(pool.size / len(pool.ranks) for pool in pools)


def rounds_needed(wanted: int, room_blocks: int) -> int:
    """Return in how many rounds a rank gets its blocks, with room for those of two rounds."""
    return max(1, -(-wanted // max(1, room_blocks // 2)))


def pack_pools(pools: Sequence[BlockPool]) -> bytes:
    """Encode pools for other ranks of this host."""
    return msgpack.encode(pools)


def join_pools(packed: Iterable[bytes]) -> list[BlockPool]:
    """Return the pools of several ranks, each once, in an order that all of them get."""
    said = (pool for data in packed for pool in msgpack.decode(data, type=list[BlockPool]))
    return sorted({pool.ranks: pool for pool in said}.values())


# ── readers and rounds ───────────────────────────────────────────────────────────────────────
#
# Pools of ranks on the same hosts are cut into as many rounds as all ranks agreed on. In each round
# the hosts read an equal share of its blocks. They lie in slots of one block each: those that a
# host reads in its outbox, those that it takes from other hosts in its inbox.

#: A pool with fewer blocks than hosts is read once for each so many of its hosts: all of thousands
#: would else ask one of them for the same block.
MOST_TAKERS = 64
Slots = np.ndarray[Any, np.dtype[np.int64]]
_IMAGE = 1 << 40  # a block as one number: of which image times this, and its own


class SlotRun(NamedTuple):
    """Consecutive blocks in consecutive slots."""

    blocks: BlockRange
    slot: int


class HostShare(NamedTuple):
    """Blocks that ``host`` reads for a set of hosts in one round.

    They lie in ``length`` slots from ``slot`` on. ``name``: that of the set of hosts.
    """

    host: int
    name: str
    slot: int
    length: int


class SlotTable(msgspec.Struct, frozen=True):
    """The blocks in the slots of an outbox or inbox, in one round."""

    shares: list[HostShare] = msgspec.field(default_factory=list)
    blocks: list[Slots] = msgspec.field(default_factory=list)
    """Of each share, its blocks in the order of their slots."""
    pools: list[Slots] = msgspec.field(default_factory=list)
    """Of each share, the number of each block's pool."""

    @property
    def count(self) -> int:
        """The number of slots in use."""
        return sum(share.length for share in self.shares)

    def runs(self, chosen: Slots) -> list[SlotRun]:
        """Return the blocks in these slots, in order."""
        if not len(chosen):
            return []
        blocks = np.concatenate(self.blocks)[chosen]
        ends = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(chosen) != 1)) + 1
        starts, stops = [0, *ends.tolist()], [*ends.tolist(), len(chosen)]
        return [
            SlotRun(BlockRange(first // _IMAGE, first % _IMAGE, last % _IMAGE + 1), slot)
            for first, last, slot in zip(
                blocks[starts].tolist(),
                blocks[[stop - 1 for stop in stops]].tolist(),
                chosen[starts].tolist(),
                strict=True,
            )
        ]

    def of_pools(self, numbers: Slots) -> Slots:
        """Return the slots with blocks of these pools."""
        if not self.pools:
            return np.empty(0, np.int64)
        return np.flatnonzero(np.isin(np.concatenate(self.pools), numbers))


class HostRound(msgspec.Struct, frozen=True):
    """One round of one host. ``readers``: for each slot of the outbox, the rank that reads it."""

    outbox: SlotTable
    inbox: SlotTable
    readers: Slots


class _HostPools:
    """All pools whose ranks are on the same hosts, cut into rounds."""

    def __init__(self, hosts: Ranks, rounds: int) -> None:
        self.hosts, self._rounds = hosts, rounds
        self.name = f"{_hash(hosts):016x}"
        self._pools: list[tuple[int, Slots, int]] = []

    def add(self, number: int, pool: BlockPool) -> None:
        """Add a pool. Those with fewer blocks than there are rounds begin at different rounds."""
        blocks = [run.image * _IMAGE + np.arange(run.first, run.stop) for run in pool.runs]
        phase = _hash(pool.ranks) % self._rounds
        self._pools.append((number, np.concatenate(blocks).astype(np.int64), phase))

    def before(self, round_: int | Slots) -> Any:
        """Return the number of blocks in earlier rounds."""
        return sum((len(b) * round_ + phase) // self._rounds for _, b, phase in self._pools)

    def share(self, host: int, round_: int | Slots) -> Any:
        """Return how many blocks a host reads in a round: over all, one more than another at
        most.
        """
        first, size = self.before(round_), len(self.hosts)
        more, rest = divmod(self.before(round_ + 1) - first, size)
        return more + ((self.hosts.index(host) - first) % size < rest)

    def blocks(self, round_: int) -> tuple[Slots, Slots]:
        """Return the blocks of a round, in order, and the number of each one's pool."""
        parts, numbers = [], []
        for number, blocks, phase in self._pools:
            cut = [(len(blocks) * n + phase) // self._rounds for n in (round_, round_ + 1)]
            parts.append(blocks[cut[0] : cut[1]])
            numbers.append(np.full(len(parts[-1]), number))
        found = np.concatenate(parts)
        order = np.argsort(found)
        return found[order], np.concatenate(numbers)[order]

    def shares(self, round_: int) -> Iterator[tuple[int, slice]]:
        """Yield each host with its part of the blocks of a round."""
        before, at = self.before(round_), 0
        first, (more, rest) = (
            before % len(self.hosts),
            divmod(self.before(round_ + 1) - before, len(self.hosts)),
        )
        for number, host in enumerate((*self.hosts[first:], *self.hosts[:first])):
            count = more + (number < rest)
            yield host, slice(at, at + count)
            at += count


def _hash(numbers: Ranks) -> int:
    return checksum(msgpack.encode(numbers))


class HostRounds:
    """The rounds of one host, whose ranks want these pools. ``hosts``: the host of each rank.

    Each round has about an equal part of each pool. Of a pool with fewer blocks than there are
    rounds it depends on the pool's ranks which rounds have one.
    """

    def __init__(
        self, pools: Sequence[BlockPool], hosts: Sequence[int], host: int, rounds: int
    ) -> None:
        self.pools, self.host, self.count = pools, host, rounds
        self.ranks = tuple(rank for rank, of in enumerate(hosts) if of == host)
        here = set(self.ranks)
        self._members = [tuple(r for r in pool.ranks if r in here) for pool in pools]
        self._turns: dict[Ranks, int] = {}
        groups: dict[Ranks, _HostPools] = {}
        for number, pool in enumerate(pools):
            on = self._sharing(sorted({hosts[rank] for rank in pool.ranks}), pool.size)
            groups.setdefault(on, _HostPools(on, rounds)).add(number, pool)
        self._groups = [group for _, group in sorted(groups.items())]

    def _sharing(self, hosts: Sequence[int], size: int) -> Ranks:
        """Return the hosts that share the reading of a pool of this size with this one."""
        if size >= len(hosts) or len(hosts) <= MOST_TAKERS:
            return tuple(hosts)
        first = bisect_left(hosts, self.host) // MOST_TAKERS * MOST_TAKERS
        return tuple(hosts[first : first + MOST_TAKERS])

    @property
    def peers(self) -> list[int]:
        """The other hosts that blocks come from or go to."""
        return sorted({host for group in self._groups for host in group.hosts} - {self.host})

    def slots(self) -> tuple[int, int]:
        """Return the most slots that any round needs, in the outbox and in the inbox."""
        if not self._groups:
            return 0, 0
        rounds: Slots = np.arange(self.count)
        own = [group.share(self.host, rounds) for group in self._groups]
        all_ = [group.before(rounds + 1) - group.before(rounds) for group in self._groups]
        outbox = np.sum(own, axis=0)
        return int(np.max(outbox)), int(np.max(np.sum(all_, axis=0) - outbox))

    def wanted_by(self, rank: int) -> Slots:
        """Return the numbers of the pools that a rank wants."""
        return np.array([n for n, ranks in enumerate(self._members) if rank in ranks], np.int64)

    def rounds(self) -> Iterator[HostRound]:
        """Yield the rounds. Only once: readers of one block take turns."""
        for number in range(self.count):
            outbox, inbox = SlotTable(), SlotTable()
            for group in self._groups:
                blocks, pools = group.blocks(number)
                shares = sorted(group.shares(number), key=self._distance)
                for host, part in shares:
                    table = outbox if host == self.host else inbox
                    count = part.stop - part.start
                    if count:
                        share = HostShare(host, group.name, table.count, count)
                        table.shares.append(share)
                        table.blocks.append(blocks[part])
                        table.pools.append(pools[part])
            yield HostRound(outbox, inbox, self._readers(outbox))

    def _distance(self, share: tuple[int, slice]) -> tuple[bool, int]:
        """Order hosts from the next one on: so not all ask the same one first."""
        return share[0] < self.host, share[0]

    def _readers(self, outbox: SlotTable) -> Slots:
        """Divide the slots of a pool over its ranks on this host, in turns."""
        readers: Slots = np.empty(outbox.count, np.int64)
        for share, pools in zip(outbox.shares, outbox.pools, strict=True):
            for number in np.unique(pools).tolist():
                slots = share.slot + np.flatnonzero(pools == number)
                ranks = self._members[number]
                first = self._turns.get(ranks, 0)
                self._turns[ranks] = first + len(slots)
                at = 0
                for turn in range(len(ranks)):
                    count = len(slots) // len(ranks) + (turn < len(slots) % len(ranks))
                    readers[slots[at : at + count]] = ranks[(first + turn) % len(ranks)]
                    at += count
        return readers
