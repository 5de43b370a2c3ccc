"""Lets the ranks of a restore read each block from storage once and pass it on, where that is
faster.

The exchange is an optimization, never a condition: where it would not pay, or fails on the way,
every rank reads what it wants for itself, as if nothing had been tried.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing

from msgspec import Struct, msgpack

from holdfast.errors import UsageError
from holdfast.events import Warned, emit
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.geometry.box import ITEMSIZE
from holdfast.geometry.layout import table_from_json, table_to_json
from holdfast.geometry.rank_ranges import Range, in_ranges, ranks_in, union
from holdfast.meeting import host_id
from holdfast.restore.destinations import Destinations
from holdfast.restore.exchange.block_exchange import BlockExchange, BlockScatter, Traffic
from holdfast.restore.exchange.host_memory import (
    ExchangeBroke,
    ExchangeMemory,
    HostLead,
    HostServer,
    OfferedBlocks,
    memory_domain,
)
from holdfast.restore.planning.block_rounds import (
    BlockPool,
    Demand,
    HostRounds,
    counted,
    demands,
    find_entry,
    join_pools,
    pack_pools,
    rounds_needed,
    same_demands,
    touched,
    wanted_pools,
)
from holdfast.restore.planning.plan import BUDGET_BYTES, Fetch, Want
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import BorrowBuffer
from holdfast.restore.restore_clock import RestoreClock
from holdfast.transport.wire.rank_tree import Said, by_rank
from holdfast.world import World, all_said_or_raise, reduce_or_raise

SETTING = "HOLDFAST_EXCHANGE"
MODES = ("auto", "always", "never")
#: Below this many bytes, connecting the hosts costs more than reading again.
WORTH_BYTES = 64 << 20
#: The smallest part of all reads that must be shared: a rank that reads for itself reads straight
#: into its tensors.
WORTH_PART = 1 / 10
_SECRET_BYTES = 32


class _ExchangeReply(Struct, array_like=True, frozen=True, order=True):
    """What a rank says of itself, as others of its host do."""

    mode: str
    host: str


class _DividedReads(Struct, array_like=True, frozen=True):
    """The number of blocks that ranks want, and how many of them other ranks would read for
    them; the rounds that the one needs which wants most; the size of the largest note.
    """

    wanted: int
    spared: float
    rounds: int = 0
    note_bytes: int = 0
    leads: list[HostLead] = []

    def joined(self, other: _DividedReads) -> _DividedReads:
        return _DividedReads(
            self.wanted + other.wanted,
            self.spared + other.spared,
            max(self.rounds, other.rounds),
            max(self.note_bytes, other.note_bytes),
            sorted([*self.leads, *other.leads]),
        )


class _ImageDemand(Struct, array_like=True, frozen=True):
    """The images that ranks want most of, and the blocks they want of others, at most.

    Where no image is wanted by two ranks, no more than these blocks could be read for another.
    """

    images: list[Range]
    reads: _DividedReads
    are_shared: bool = False


class _ExchangeFailure(Struct, array_like=True, frozen=True, order=True):
    """The reason why a rank lacks part of what it wants; the least one is told."""

    rank: int
    reason: str


def own_reply(world: int, checkpoint: Checkpoint, wants: Callable[[], Sequence[Want]]) -> bytes:
    """Encode what this rank says of itself, and from which images it will want something.

    The images are not named where too little could be read for others, whoever reads it.
    """
    # From the layout: to open all images would ask every host for them.
    leaves = checkpoint.layout.leaves
    size_bytes = sum(math.prod(leaf.shape) * ITEMSIZE[leaf.dtype] for leaf in leaves)
    is_much = world * (size_bytes + len(checkpoint.files) * BLOCK_BYTES) >= WORTH_BYTES
    demand = _ImageDemand([], _DividedReads(0, 0))
    if is_much:
        try:
            demand = _demand_of(checkpoint, wants())
        except Exception:  # what is wrong with it is found when it is read
            demand = _ImageDemand([], _DividedReads(0, 0), are_shared=True)
    return msgpack.encode(([_own_reply()], demand))


def _demand_of(checkpoint: Checkpoint, wants: Sequence[Want]) -> _ImageDemand:
    most, wanted_bytes, others = [], 0, 0
    for image, fetches in checkpoint.fetches(wants).items():
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
    clock: RestoreClock,
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

    def ask() -> tuple[bytes, ...]:
        prepared.append(prepare())
        secret = secrets.token_bytes(_SECRET_BYTES) if world.rank == 0 else b""
        return table_to_json(same_demands(prepared[0][0].entries)), secret, memory_domain()

    with clock.during("meet"):
        tables, keys, hosts = all_said_or_raise(
            world, f"{phase}: prepared", ask, timeout_s=timeout_s
        )
    wanted = demands([(tuple(ranks_in(t.ranks)), table_from_json(t.value)) for t in tables])
    filling, borrow = prepared[0]
    scatter = BlockScatter(filling.wants, filling.destinations, borrow)
    secret = next(each.value for each in keys if each.value)
    with _ExchangeSetup(world, _numbers_of(hosts), secret) as setup:

        def plan() -> bytes:
            with clock.during("plan"):
                return setup.divide(_plan(checkpoint, filling.wants, scatter, wanted, world.rank))

        with clock.during("meet"):
            word = reduce_or_raise(
                world, f"{phase}: divided", plan, _join_divided, timeout_s=timeout_s
            )
        divided = _divided_in(word)
        if not _is_worth_while(divided, is_forced=_is_forced(who)):
            return None
        setup.divided = divided
        return _run(world, f"{phase}: exchanged", setup, checkpoint, scatter, timeout_s, clock)


def _own_reply() -> _ExchangeReply:
    mode = os.environ.get(SETTING, "").strip().lower() or "auto"
    if mode not in MODES:
        raise UsageError(
            f"HOLDFAST_EXCHANGE is {mode!r}: say auto, always or never, or leave it unset"
        )
    return _ExchangeReply(mode, host_id())


def _is_wished(replies: Sequence[_ExchangeReply]) -> bool:
    """Return whether the exchange is useful; one host shares its page cache anyway."""
    if any(one.mode == "never" for one in replies):
        return False
    return _is_forced(replies) or len({one.host for one in replies}) > 1


def _is_forced(replies: Sequence[_ExchangeReply]) -> bool:
    return any(one.mode == "always" for one in replies)


def _numbers_of(hosts: Sequence[Said]) -> list[int]:
    """Return the host of each rank, by number: of the ranks that can share memory."""
    names = by_rank(hosts)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


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
) -> list[BlockPool]:
    """Plan where each fetch goes, and find who wants the same blocks.

    CoverageError when the images lack something.
    """
    layout = checkpoint.layout
    shapes = {leaf.name: leaf.shape for leaf in layout.leaves}
    fetches = checkpoint.fetches(wants)
    for image, some in fetches.items():
        header = checkpoint.header(image)
        for fetch in some:
            leaf = wants[fetch.want].leaf
            entry = find_entry(header, image, leaf, fetch.dtype, shapes[leaf], fetch.piece)
            inner = fetch.part.relative_to(fetch.piece)
            item = wanted[leaf].item_bytes
            scatter.add(fetch, entry.offset, touched(inner, fetch.piece.shape, item, entry.offset))
    headers = {image: checkpoint.header(image) for image in fetches}
    return wanted_pools(rank, headers, layout, wanted)


class _ExchangeSetup:
    """What one rank has open for the exchange. A context: closed when all ranks have ended it."""

    def __init__(self, world: World, hosts: Sequence[int], secret: bytes) -> None:
        self._world, self._hosts, self._secret = world, hosts, secret
        self._host = hosts[world.rank]
        self._ranks = [rank for rank, host in enumerate(hosts) if host == self._host]
        self._note = b""
        self._why = "another rank of this host cannot serve blocks"
        self._server: HostServer | None = None
        self._open = ExitStack()
        self.divided: _DividedReads

    def __enter__(self) -> _ExchangeSetup:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def are_several(self) -> bool:
        """True if there is another host."""
        return max(self._hosts) > 0

    def divide(self, pools: Sequence[BlockPool]) -> bytes:
        """Return this rank's word of ``_DividedReads``; the first of a host makes its memory."""
        self._note = pack_pools(pools)
        if self._world.rank == self._ranks[0]:
            self._serve()
        wanted, spared = counted(pools)
        rounds = rounds_needed(wanted, BUDGET_BYTES // BLOCK_BYTES)
        leads = [self._server.lead] if self._server else []
        return msgpack.encode(_DividedReads(wanted, spared, rounds, len(self._note), leads))

    def _serve(self) -> None:
        try:
            server = HostServer(
                self._host, self._world.address, self._secret, are_several=self.are_several
            )
        except (OSError, RuntimeError) as error:  # no descriptor, no thread
            self._why = f"rank {self._world.rank} cannot serve blocks: {error}"
        else:
            self._server = self._open.enter_context(closing(server))

    def share_memory(self) -> None:
        """Open the memory of this host, and tell its ranks what this one wants."""
        place = self._ranks.index(self._world.rank)
        lead = next((lead for lead in self.divided.leads if lead.host == self._host), None)
        if lead is None:
            raise ExchangeBroke(self._why)
        memory = ExchangeMemory(lead, place, len(self._ranks), self.divided.note_bytes)
        self._memory = self._open.enter_context(closing(memory))
        self._memory.write_note(self._note)

    def begin(self, checkpoint: Checkpoint, scatter: BlockScatter) -> BlockExchange:
        """Plan the rounds from what all ranks of this host want."""
        pools = join_pools(self._memory.notes())
        rounds = HostRounds(pools, self._hosts, self._host, self.divided.rounds)
        self._memory.grow(*rounds.slots())
        offered = None
        if rounds.peers:
            leads = {lead.host: lead for lead in self.divided.leads if lead.host in rounds.peers}
            offers = self._server.offers if self._server else None
            place = self._ranks.index(self._world.rank)
            offered = self._open.enter_context(
                closing(
                    OfferedBlocks(
                        self._memory,
                        self._secret,
                        leads,
                        offers,
                        place=place,
                        ranks=len(self._ranks),
                    )
                )
            )
        rank = self._world.rank
        exchange = BlockExchange(checkpoint, rounds, scatter, rank, self._memory, offered)
        return self._open.enter_context(exchange)


def _run(
    world: World,
    phase: str,
    setup: _ExchangeSetup,
    checkpoint: Checkpoint,
    scatter: BlockScatter,
    timeout_s: float,
    clock: RestoreClock,
) -> Traffic | None:
    """Run the exchange step by step; None when a rank lacks something.

    Each round is read in one step, and taken and applied in the next; what comes from other hosts
    is applied one step later.
    """
    failure = _together(world, phase, setup.share_memory, timeout_s, clock)
    begun: list[BlockExchange] = []
    steps = setup.divided.rounds + (2 if setup.are_several else 1)
    for number in range(steps):
        if failure:
            break

        def step(is_last: bool = number == steps - 1) -> None:
            if not begun:
                begun.append(setup.begin(checkpoint, scatter))
            begun[0].step(clock)
            if is_last:
                begun[0].finish()

        failure = _together(world, phase, step, timeout_s, clock)
    if failure is None:
        return begun[0].finish()
    if world.rank == 0:
        emit(
            Warned(
                rank=0,
                message=f"{phase}: {failure.reason}. Nothing that came this way is "
                "used: every rank reads all that it wants by itself.",
            )
        )
    return None


def _together(
    world: World, phase: str, act: Callable[[], None], timeout_s: float, clock: RestoreClock
) -> _ExchangeFailure | None:
    """Run ``act`` on every rank; return why the exchange broke on one of them, or None."""

    def run() -> bytes:
        try:
            with clock.during("exchange"):
                act()
        except ExchangeBroke as broke:
            return msgpack.encode(_ExchangeFailure(world.rank, str(broke)))
        return b""

    with clock.during("meet"):
        word = reduce_or_raise(world, phase, run, _join_failures, timeout_s=timeout_s)
    return _failure_in(word) if word else None


def _join_failures(one: bytes, other: bytes) -> bytes:
    """Join the failures of ranks, b"" for none: that of the lowest is told."""
    return min(one, other, key=_failure_in) if one and other else one or other


def _failure_in(word: bytes) -> _ExchangeFailure:
    return msgpack.decode(word, type=_ExchangeFailure)
