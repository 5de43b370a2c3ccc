"""Lets the ranks of a restore read each block from storage once and pass it on, where that is
faster.

The exchange is an optimization, never a condition: where it would not pay, or fails on the way,
every rank reads what it wants for itself, as if nothing had been tried.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct, msgpack

from holdfast.errors import UsageError
from holdfast.events import Warned, emit
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.geometry.index import ITEMSIZE
from holdfast.geometry.layout import table_from_json, table_to_json
from holdfast.meeting import host_id
from holdfast.restore.destinations import Destinations
from holdfast.restore.exchange.block_exchange import (
    BlockExchange,
    BlockScatter,
    ExchangeBroke,
    OtherFailed,
    Pending,
    RankLost,
    Traffic,
)
from holdfast.restore.planning.block_rounds import (
    Demand,
    ExchangeRound,
    counted,
    demands,
    find_entry,
    plan_rounds,
    same_demands,
    touched,
    wanted_blocks,
)
from holdfast.restore.planning.plan import BUDGET_BYTES, Fetch, Want, plan_fetches
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import Array, BorrowBuffer
from holdfast.transport.wire.rank_tree import Range, in_ranges, ranks_in, union
from holdfast.world import World, all_said_or_raise, reduce_or_raise

SETTING = "HOLDFAST_EXCHANGE"
MODES = ("auto", "always", "never")
#: Below this many blocks, connecting the ranks costs more than reading again.
WORTH_BYTES = 64 << 20
#: The smallest part of all reads that must be shared: a rank that reads for itself reads straight
#: into its tensors.
WORTH_PART = 1 / 10
#: The part of the timeout that a rank waits for the rest after it has lost another: most often the
#: other one has died and does not return.
_PATIENCE_LEFT = 0.1


class _ExchangeReply(Struct, array_like=True, frozen=True, order=True):
    """What a rank says of itself, as others of its host do."""

    mode: str
    host: str
    can_connect: bool


class _DividedReads(Struct, array_like=True, frozen=True):
    """The number of blocks that ranks want, and how many of them other ranks would read for
    them.
    """

    wanted: int
    spared: int

    def joined(self, other: _DividedReads) -> _DividedReads:
        return _DividedReads(self.wanted + other.wanted, self.spared + other.spared)


class _ImageDemand(Struct, array_like=True, frozen=True):
    """The images that ranks want most of, and the blocks they want of others, at most.

    Where no image is wanted by two ranks, no more than these blocks could be read for another.
    """

    images: list[Range]
    reads: _DividedReads
    are_shared: bool = False


class _ExchangeFailure(Struct, array_like=True, frozen=True, order=True):
    """The reason why a rank lacks part of what it wants; the least one is told."""

    is_of_another: bool
    rank: int
    reason: str


def own_reply(world: int, checkpoint: Checkpoint, wants: Callable[[], Sequence[Want]]) -> bytes:
    """Encode what this rank says of itself, and from which images it will want something.

    The images are not named where too little could be read for others, whoever reads it.
    """
    blocks = sum(-(-file.size_bytes // BLOCK_BYTES) for file in checkpoint.files.values())
    is_much = world * blocks * BLOCK_BYTES >= WORTH_BYTES
    demand = _ImageDemand([], _DividedReads(0, 0))
    if is_much:
        try:
            demand = _demand_of(checkpoint, wants())
        except Exception:  # what is wrong with it is found when it is read
            demand = _ImageDemand([], _DividedReads(0, 0), are_shared=True)
    return msgpack.encode(([_own_reply()], demand))


def _demand_of(checkpoint: Checkpoint, wants: Sequence[Want]) -> _ImageDemand:
    most, wanted_bytes, others = [], 0, 0
    for image, fetches in plan_fetches(wants, checkpoint.layout).items():
        size = -(-checkpoint.files[image].size_bytes // BLOCK_BYTES)
        blocks = min(size, sum(map(_most_blocks, fetches)))
        wanted_bytes += sum(fetch.part.volume * ITEMSIZE[fetch.dtype] for fetch in fetches)
        if 2 * blocks > size:
            most.append(image)
        else:
            others += blocks
    return _ImageDemand(in_ranges(most), _DividedReads(wanted_bytes // BLOCK_BYTES, others))


def _most_blocks(fetch: Fetch) -> int:
    """The blocks that a fetch reads at most, wherever its piece lies in the image."""
    inner = fetch.part.relative_to(fetch.piece)
    return 1 + sum(1 for _ in touched(inner, fetch.piece.shape, ITEMSIZE[fetch.dtype], 0))


def join_replies(one: bytes, other: bytes) -> bytes:
    """Join the replies of ranks: each different one once."""
    (some, a), (more, b) = _replies_in(one), _replies_in(other)
    images = union([*a.images, *b.images])
    is_overlap = _count(images) < _count(a.images) + _count(b.images)
    are_shared = a.are_shared or b.are_shared or is_overlap
    demand = _ImageDemand(images, a.reads.joined(b.reads), are_shared)
    return msgpack.encode((sorted({*some, *more}), demand))


def _replies_in(word: bytes) -> tuple[list[_ExchangeReply], _ImageDemand]:
    return msgpack.decode(word, type=tuple[list[_ExchangeReply], _ImageDemand])


def _count(images: Sequence[Range]) -> int:
    return sum(stop - first for first, stop in images)


def read_once(
    world: World,
    phase: str,
    checkpoint: Checkpoint,
    replies: bytes,
    prepare: Callable[[], tuple[Destinations, BorrowBuffer]],
    *,
    timeout_s: float,
) -> Traffic | None:
    """Fill ``destinations``, each block read by one rank only; None: every rank must read for
    itself.

    All ranks call it. ``replies``: what all say, see ``own_reply``. ``prepare``: makes the
    destinations, and lends memory as for ``read_wants``. An error of one rank's reading is raised
    on all ranks.
    """
    if world.size == 1:
        return None
    who, demand = _replies_in(replies)
    may_pay = demand.are_shared or _is_forced(who) or _is_worth_while(demand.reads)
    if not _is_wished(who) or not may_pay:
        return None
    prepared: list[tuple[Destinations, BorrowBuffer]] = []

    def ask() -> tuple[bytes, bytes]:
        prepared.append(prepare())
        name = uuid.uuid4().bytes if world.rank == 0 else b""
        return table_to_json(same_demands(prepared[0][0].entries)), name

    tables, names = all_said_or_raise(world, f"{phase}: prepared", ask, timeout_s=timeout_s)
    wanted = demands([(tuple(ranks_in(t.ranks)), table_from_json(t.value)) for t in tables])
    filling, borrow = prepared[0]
    wants = filling.wants
    planned: list[tuple[BlockScatter, list[ExchangeRound]]] = []

    def plan() -> bytes:
        scatter = BlockScatter(wants, filling.destinations, borrow)
        planned.append(_plan(checkpoint, wants, scatter, wanted, world.rank))
        return msgpack.encode(_DividedReads(*counted(planned[0][1], world.rank)))

    divided = reduce_or_raise(world, f"{phase}: divided", plan, _join_divided, timeout_s=timeout_s)
    if not _is_worth_while(_divided_in(divided), is_forced=_is_forced(who)):
        return None
    scatter, rounds = planned[0]
    exchange = BlockExchange(checkpoint, rounds, scatter, world.rank, timeout_s=timeout_s)
    return _run(world, f"{phase}: exchanged", exchange, names[0].value.hex(), timeout_s)


def _own_reply() -> _ExchangeReply:
    mode = os.environ.get(SETTING, "").strip().lower() or "auto"
    if mode not in MODES:
        raise UsageError(
            f"HOLDFAST_EXCHANGE is {mode!r}: say auto, always or never, or leave it unset"
        )
    return _ExchangeReply(mode, host_id(), can_connect())


def _is_wished(replies: Sequence[_ExchangeReply]) -> bool:
    """Return whether the exchange is possible and useful; one host shares its page cache anyway."""
    if any(one.mode == "never" or not one.can_connect for one in replies):
        return False
    return _is_forced(replies) or len({one.host for one in replies}) > 1


def _is_forced(replies: Sequence[_ExchangeReply]) -> bool:
    return any(one.mode == "always" for one in replies)


def _join_divided(one: bytes, other: bytes) -> bytes:
    return msgpack.encode(_divided_in(one).joined(_divided_in(other)))


def _divided_in(word: bytes) -> _DividedReads:
    return msgpack.decode(word, type=_DividedReads)


def _is_worth_while(blocks: _DividedReads, *, is_forced: bool = False) -> bool:
    """Return whether several ranks want enough of the same blocks.

    Whole blocks are counted: when a leaf is cut through columns no byte is wanted twice, but each
    block is wanted by all ranks.
    """
    if is_forced:
        return blocks.spared > 0
    is_much = blocks.spared * BLOCK_BYTES >= WORTH_BYTES
    return is_much and blocks.spared >= WORTH_PART * blocks.wanted


def _plan(
    checkpoint: Checkpoint,
    wants: Sequence[Want],
    scatter: BlockScatter,
    wanted: Mapping[str, Demand],
    rank: int,
) -> tuple[BlockScatter, list[ExchangeRound]]:
    """Plan where each fetch goes and who reads it. CoverageError when the images lack something."""
    layout = checkpoint.layout
    shapes = {leaf.name: leaf.shape for leaf in layout.leaves}
    fetches = plan_fetches(wants, layout)
    for image, some in fetches.items():
        header = checkpoint.header(image)
        for fetch in some:
            leaf = wants[fetch.want].leaf
            entry = find_entry(header, image, leaf, fetch.dtype, shapes[leaf], fetch.piece)
            inner = fetch.part.relative_to(fetch.piece)
            item = wanted[leaf].item_bytes
            scatter.add(fetch, entry.offset, touched(inner, fetch.piece.shape, item, entry.offset))
    blocks = {
        image: wanted_blocks(image, checkpoint.header(image), layout, wanted) for image in fetches
    }
    return scatter, plan_rounds(blocks, rank, room_blocks=max(4, BUDGET_BYTES // BLOCK_BYTES))


def _run(
    world: World, phase: str, exchange: BlockExchange, name: str, timeout_s: float
) -> Traffic | None:
    """Run the exchange and collect the result of all ranks; None when one of them lacks
    something.
    """
    lines: list[GlooWire] = []
    try:
        outcome = _attempt(world, exchange, lines, name, timeout_s)
        patience_s, was_connected = timeout_s, bool(lines)
        if not isinstance(outcome, Traffic):
            _close_all(lines)  # ranks that wait for this one must learn that it has given up
        if isinstance(outcome, RankLost) and was_connected:  # else others still try to connect
            patience_s *= _PATIENCE_LEFT
        failure = reduce_or_raise(
            world,
            phase,
            partial(_encode_failure, outcome, world.rank),
            _join_failures,
            timeout_s=patience_s,
        )
    finally:
        _close_all(lines)
    if failure and world.rank == 0:
        emit(
            Warned(
                rank=0,
                message=f"{phase}: {_failure_in(failure).reason}. Nothing that came this way is "
                "used: every rank reads all that it wants by itself.",
            )
        )
    return outcome if isinstance(outcome, Traffic) and not failure else None


def _attempt(
    world: World, exchange: BlockExchange, lines: list[GlooWire], name: str, timeout_s: float
) -> Traffic | BaseException:
    try:
        lines.append(GlooWire(world.rank, world.size, name, timeout_s))
        return exchange.run(lines[0])
    except BaseException as error:  # Ctrl-C, too: it is raised after the others were told
        return error


def _encode_failure(outcome: Traffic | BaseException, rank: int) -> bytes:
    if isinstance(outcome, BaseException) and not isinstance(outcome, ExchangeBroke):
        raise outcome
    if isinstance(outcome, Traffic):
        return b""
    return msgpack.encode(_ExchangeFailure(isinstance(outcome, OtherFailed), rank, str(outcome)))


def _join_failures(one: bytes, other: bytes) -> bytes:
    """Join the failures of ranks, b"" for none: one is told."""
    return min(one, other, key=_failure_in) if one and other else one or other


def _failure_in(word: bytes) -> _ExchangeFailure:
    return msgpack.decode(word, type=_ExchangeFailure)


def _close_all(lines: list[GlooWire]) -> None:
    while lines:
        lines.pop().close()


# Connects ranks over gloo connections of Holdfast's own.
#
# The connections are made for one restore and closed with it, so they share no tags, no order and
# no failure with the traffic of the training, and none stays open during training. They use gloo,
# between the addresses given by GLOO_SOCKET_IFNAME or the host names, whatever backend the training
# uses: the bytes lie in host memory, where they were read and are verified.


#: Timeout for connecting; without connections each rank reads for itself.
CONNECT_S = 30.0


def can_connect() -> bool:
    """Return whether this torch has the needed functions."""
    return dist.is_available() and dist.is_initialized() and dist.is_gloo_available()


class GlooWire:
    """Connections between all ranks. All ranks make one, with the same ``name``, used only once."""

    def __init__(self, rank: int, size: int, name: str, timeout_s: float) -> None:
        self._under_way: list[_ExchangeStart] = []
        store = dist.PrefixStore(
            f"holdfast/exchange/{name}", dist.distributed_c10d._get_default_store()
        )
        try:
            # Not dist.new_group: it counts groups, and ranks whose counts differ, because one of
            # them failed before, could never make another.
            self._group: Any = dist.ProcessGroupGloo(
                store, rank, size, timeout=timedelta(seconds=min(timeout_s, CONNECT_S))
            )
        except RuntimeError as error:
            raise RankLost(f"rank {rank} cannot reach all ranks: {error}") from error

    def send(self, rank: int, message: Array) -> Pending:
        """See ``Wire``."""
        return self._begin(_ExchangeStart(self._group.send, message, rank))

    def receive(self, rank: int, message: Array) -> Pending:
        """See ``Wire``."""
        return self._begin(_ExchangeStart(self._group.recv, message, rank))

    def _begin(self, message: _ExchangeStart) -> Pending:
        self._under_way = [other for other in self._under_way if not other.is_over]
        self._under_way.append(message)
        return message

    def close(self) -> None:
        """See ``Wire``."""
        # Neither shutdown() nor abort() of gloo closes a connection: only the destruction of the
        # last object that refers to it does, and messages under way refer to it.
        for message in self._under_way:
            message.drop()
        self._group = None


class _ExchangeStart:
    """One message; an error at its start is also raised by ``wait``."""

    def __init__(self, begin: Any, message: Array, rank: int) -> None:
        self._work: Any = None
        self._error: RuntimeError | None = None
        try:
            self._work = begin([torch.from_numpy(message)], rank, 0)
        except RuntimeError as error:
            self._error = error

    @property
    def is_over(self) -> bool:
        return self._work is None

    def drop(self) -> None:
        self._work = None

    def wait(self, timeout_s: float) -> None:
        """See ``Pending``."""
        try:
            if self._error is not None:
                raise self._error
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise RankLost(str(error)) from error
        self.drop()
