"""Whether the ranks of a restore read for each other, and how they find that out together.

Reading once is an economy, never a condition: where it is not worth its while, or breaks on the
way, every rank reads what it wants, as if nothing had been tried.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec import Struct, msgpack

from holdfast.errors import UsageError
from holdfast.events import Warned, emit
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.geometry.layout import LeafEntry, table_from_json, table_hash, table_to_json
from holdfast.load import wire
from holdfast.load.exchange import Exchange, ExchangeBroke, OtherFailed, RankLost, Traffic
from holdfast.load.landing import Landing
from holdfast.load.move import Destination
from holdfast.load.plan import BUDGET_BYTES, Want, plan_fetches
from holdfast.load.read import Lend
from holdfast.load.sharing import (
    Demand,
    Ranks,
    Turn,
    alike,
    counted,
    demands,
    find_entry,
    plan_turns,
    touched,
    wanted_blocks,
)
from holdfast.load.source import Checkpoint
from holdfast.world import World, agree, host_id

SETTING = "HOLDFAST_EXCHANGE"
MODES = ("auto", "always", "never")
#: Below this it costs more to connect the ranks than to read again.
WORTH_BYTES = 64 << 20
#: Nor is it worth while for less than this part of all that is read: one that reads for itself
#: reads straight into its tensors.
WORTH_PART = 1 / 10
#: A rank that has lost another waits for the rest no longer than this part of its patience: most
#: often the other one has died, and comes no more.
_PATIENCE_LEFT = 0.1


class _Said(Struct, array_like=True, frozen=True):
    """What each rank says first. ``name``: of the connections, if any; rank 0's counts."""

    mode: str
    host: str
    can_connect: bool
    table_hash: str
    name: str


class _Divided(Struct, array_like=True, frozen=True):
    """How many blocks a rank wants, and how many of them others would read for it."""

    wanted: int
    spared: int


class _Broke(Struct, array_like=True, frozen=True):
    """Why a rank does not hold all that it wants."""

    is_of_another: bool
    reason: str


def read_once(
    world: World,
    phase: str,
    checkpoint: Checkpoint,
    entries: Sequence[LeafEntry],
    wants: Sequence[Want],
    destinations: Mapping[int, Destination],
    lend: Lend,
    *,
    timeout_s: float,
) -> Traffic | None:
    """Fill ``destinations`` with every block read by one rank only; None: read for yourself.

    All ranks call it. ``entries`` are the leaves this rank wants, as it holds them; ``wants`` and
    ``destinations`` and ``lend`` as for ``read_wants``. Raises on all ranks what the reading of one
    raised.
    """
    if world.size == 1:
        return None
    meet = partial(agree, world, timeout_s=timeout_s)
    table = table_to_json(alike(entries))
    heard = meet(f"{phase}: asked", lambda: msgpack.encode(_say(table)))
    said = [msgpack.decode(each, type=_Said) for each in heard]
    if not _is_wished(said):
        return None
    first = [one.table_hash for one in said].index(said[world.rank].table_hash)
    tables = meet(f"{phase}: described", lambda: table if first == world.rank else b"")
    wanted = demands(_with_ranks(said, tables))
    planned: list[tuple[Landing, list[Turn]]] = []

    def plan() -> bytes:
        landing = Landing(wants, destinations, lend)
        planned.append(_plan(checkpoint, wants, landing, wanted, world.rank))
        return msgpack.encode(_Divided(*counted(planned[0][1], world.rank)))

    divided = [msgpack.decode(each, type=_Divided) for each in meet(f"{phase}: divided", plan)]
    if not _is_worth_while(divided, is_forced=_is_forced(said)):
        return None
    landing, turns = planned[0]
    exchange = Exchange(checkpoint, turns, landing, world.rank, timeout_s=timeout_s)
    return _run(world, f"{phase}: exchanged", exchange, said[0].name, timeout_s)


def _say(table: bytes) -> _Said:
    mode = os.environ.get(SETTING, "").strip().lower() or "auto"
    if mode not in MODES:
        raise UsageError(
            f"HOLDFAST_EXCHANGE is {mode!r}: say auto, always or never, or leave it unset"
        )
    return _Said(mode, host_id(), wire.can_connect(), table_hash(table), uuid.uuid4().hex)


def _is_wished(said: Sequence[_Said]) -> bool:
    """On one host a block that was read comes from the page cache for the next who reads it."""
    if any(one.mode == "never" or not one.can_connect for one in said):
        return False
    return _is_forced(said) or len({one.host for one in said}) > 1


def _is_forced(said: Sequence[_Said]) -> bool:
    return any(one.mode == "always" for one in said)


def _is_worth_while(divided: Sequence[_Divided], *, is_forced: bool) -> bool:
    """Whether enough blocks are wanted by several ranks.

    Whole blocks are counted: of a cut through columns no byte is wanted twice, but each block is
    by all ranks.
    """
    wanted, spared = sum(one.wanted for one in divided), sum(one.spared for one in divided)
    if is_forced:
        return spared > 0
    return spared * BLOCK_BYTES >= WORTH_BYTES and spared >= WORTH_PART * wanted


def _with_ranks(
    said: Sequence[_Said], tables: Sequence[bytes]
) -> list[tuple[Ranks, tuple[LeafEntry, ...]]]:
    """Each different table, and the ranks that it is of."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(said):
        ranks.setdefault(one.table_hash, []).append(rank)
    return [(tuple(some), table_from_json(tables[some[0]])) for some in ranks.values()]


def _plan(
    checkpoint: Checkpoint,
    wants: Sequence[Want],
    landing: Landing,
    wanted: Mapping[str, Demand],
    rank: int,
) -> tuple[Landing, list[Turn]]:
    """Where everything goes, and who reads it. CoverageError when the images lack something."""
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
            landing.add(fetch, entry.offset, touched(inner, fetch.piece.shape, item, entry.offset))
    blocks = {
        image: wanted_blocks(image, checkpoint.header(image), layout, wanted) for image in fetches
    }
    return landing, plan_turns(blocks, rank, room_blocks=max(4, BUDGET_BYTES // BLOCK_BYTES))


def _run(
    world: World, phase: str, exchange: Exchange, name: str, timeout_s: float
) -> Traffic | None:
    """The exchange, and what all ranks say of it; None when one of them lacks something."""
    lines: list[wire.GlooWire] = []
    try:
        found = _attempt(world, exchange, lines, name, timeout_s)
        patience_s, was_connected = timeout_s, bool(lines)
        if not isinstance(found, Traffic):
            _hang_up(lines)  # should anybody still wait for this rank: it has given up
        if isinstance(found, RankLost) and was_connected:  # else others still try to connect
            patience_s *= _PATIENCE_LEFT
        told = agree(world, phase, partial(_tell, found), timeout_s=patience_s)
    finally:
        _hang_up(lines)
    broken = [msgpack.decode(each, type=_Broke) for each in told if each]
    if broken and world.rank == 0:
        first = min(broken, key=lambda each: each.is_of_another)
        emit(Warned(
            rank=0, message=f"{phase}: {first.reason}. Nothing that came this way is used: every "
            "rank reads all that it wants by itself.",
        ))  # fmt: skip
    return found if isinstance(found, Traffic) and not broken else None


def _attempt(
    world: World, exchange: Exchange, lines: list[wire.GlooWire], name: str, timeout_s: float
) -> Traffic | BaseException:
    try:
        lines.append(wire.GlooWire(world.rank, world.size, name, timeout_s))
        return exchange.run(lines[0])
    except BaseException as error:  # Ctrl-C, too: it is raised when the others were told
        return error


def _tell(found: Traffic | BaseException) -> bytes:
    if isinstance(found, BaseException) and not isinstance(found, ExchangeBroke):
        raise found
    if isinstance(found, Traffic):
        return b""
    return msgpack.encode(_Broke(isinstance(found, OtherFailed), str(found)))


def _hang_up(lines: list[wire.GlooWire]) -> None:
    while lines:
        lines.pop().close()
