"""Count what a restore reads when ranks read for each other, and the hosts that each connects to.

Nothing is read and nothing connected: one host plans as its ranks would, then each host that it
would exchange blocks with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from benchmarks.plan.meshes import Kind
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import Header, fill_in, parse_header, plan_image
from holdfast.geometry.layout import Layout, LeafEntry
from holdfast.protocol.image_plan import image_items
from holdfast.restore.exchange.host_memory import SERVING, TAKING
from holdfast.restore.planning.block_rounds import (
    BlockPool,
    HostRounds,
    counted,
    demands,
    join_pools,
    pack_pools,
    rounds_needed,
    same_demands,
    wanted_pools,
)
from holdfast.restore.planning.plan import BUDGET_BYTES, Want, plan_fetches

T = TypeVar("T")


def timed(act: Callable[[], T]) -> tuple[float, T]:
    """Processor seconds of this process, and what came of it."""
    began = time.process_time()
    found = act()
    return time.process_time() - began, found


def count_reads(kind: Kind, layout: Layout, leaves: int, host_ranks: int = 8) -> dict[str, Any]:
    """Of the first host and those that it exchanges with: blocks, hosts, seconds of planning."""
    tables: dict[int, tuple[list[int], Sequence[LeafEntry]]] = {}
    for rank in range(kind.world):
        key = kind.table_of(rank)
        if key not in tables:
            tables[key] = [], same_demands(kind.table(rank, leaves))
        tables[key][0].append(rank)
    hosts = [rank // host_ranks for rank in range(kind.world)]
    said = [(tuple(ranks), entries) for ranks, entries in tables.values()]
    demand_s, wanted = timed(lambda: demands(said))
    pool_s, of_ranks = [], []
    for rank in range(host_ranks):
        headers = _headers(layout, tables[kind.table_of(rank)][1], rank)
        seconds, pools = timed(partial(wanted_pools, rank, headers, layout, wanted))
        pool_s.append(seconds)
        of_ranks.append(pools)
    count = max(rounds_needed(counted(pools)[0], BUDGET_BYTES // BLOCK_BYTES) for pools in of_ranks)
    known = join_pools(pack_pools(pools) for pools in of_ranks)

    def plan() -> HostRounds:
        rounds = HostRounds(known, hosts, 0, count)
        rounds.slots()
        return rounds

    rounds_s, rounds = timed(plan)
    turns_s, _ = timed(lambda: list(rounds.rounds()))
    return {
        "rounds": count,
        "plan_s": demand_s + max(pool_s) + rounds_s,
        "rounds_s": turns_s,
        "hosts": len(set(hosts)),
        "peers": len(rounds.peers),
        "at_once": min(len(rounds.peers), TAKING) + min(len(rounds.peers), SERVING),
        **_reads(known, hosts, count),
    }


def _headers(layout: Layout, entries: Sequence[LeafEntry], rank: int) -> dict[int, Header]:
    """Of the images that a rank reads from: made here, not read."""
    wants = [
        Want(entry.name, box, 0)
        for entry in entries
        for box, _ in entry.boxes(rank)
        if not box.is_empty
    ]
    headers = {}
    for image in plan_fetches(wants, layout):
        made = fill_in(plan_image(image_items(layout, image)), {}, 2)
        headers[image] = parse_header(made.header, "image", made.size_bytes)
    return headers


def _reads(pools: Sequence[BlockPool], hosts: Sequence[int], count: int) -> dict[str, float]:
    """What all hosts read over what there is to read: exchanging, and each rank for itself.

    Every host is in as many pools like these as the first one: each counts for those it stands for.
    """
    unique = read = alone = 0.0
    for pool in pools:
        on = sorted({hosts[rank] for rank in pool.ranks})
        like = len(set(hosts)) / len(on)
        outboxes = sum(
            sum(one.outbox.count for one in HostRounds([pool], hosts, host, count).rounds())
            for host in on
        )
        unique += pool.size * like
        read += outboxes * like
        alone += pool.size * len(pool.ranks) * like
    return {"read_over_unique": read / unique, "alone_over_unique": alone / unique}
