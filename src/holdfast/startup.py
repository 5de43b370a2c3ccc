"""How a run begins: its ranks agree on everything that must be alike, and reach their keeper.

Whatever goes wrong here is raised on every rank, and is the user's to mend.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from msgspec import msgpack

from holdfast.errors import HoldfastError, UsageError
from holdfast.events import Warned, emit
from holdfast.load.host_offers import HostOffers
from holdfast.load.offers import Offers
from holdfast.load.stored import run_id_of
from holdfast.persist import commit
from holdfast.policy.interval import Every
from holdfast.policy.retention import Keep
from holdfast.rules import Rules
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import arena_dir
from holdfast.snapshot.client import KeeperClient, find_or_start
from holdfast.snapshot.hosts import LATER_S, HostFact, Hosts, hosts_of
from holdfast.snapshot.saver import Saver
from holdfast.snapshot.underway import Patience, Place
from holdfast.state.describe import Describer
from holdfast.state.objects import State
from holdfast.state.usage import refuse_unused
from holdfast.storage.base import Store
from holdfast.world import World, agree, host_id, tell_all

#: How long a start that failed waits for its own threads to end.
_HANG_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks say alike when they begin."""

    root: str
    memory: Every | None
    storage: Every | None
    keep: Keep
    timeout_s: float
    rules: Rules | None = None
    compare_replicas: int | None = None
    parity: int = 0
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has begun, on one rank."""

    run_id: str
    incarnation: int
    may_restore: bool
    saver: Saver
    offers: Offers


def meet(world: World, store: Store, state: State, terms: Terms) -> Run:
    """Agree with the other ranks on run, host and incarnation, and take a place at the keeper."""
    timeout_s = terms.timeout_s
    describer = Describer(state, world.rank, world.size, tells_frozen=True, rules=terms.rules)
    told = agree(world, "start: state", lambda: _plan(state, describer, terms), timeout_s=timeout_s)
    plans = [msgpack.decode(each, type=tuple[bytes, bytes, bytes]) for each in told]
    _require_one_plan([plan for plan, _, _ in plans])
    refuse_unused([usage for _, usage, _ in plans])
    facts = [msgspec.json.decode(fact, type=HostFact) for _, _, fact in plans]
    hosts = hosts_of(facts, world.rank, were_more=terms.parity > 0)
    opened = tell_all(world, "start: root", lambda: _open_root(store, terms), timeout_s=timeout_s)
    run_id = opened.decode()
    arena = arena_dir(run_id, host_id())
    place = Place(run_id, 0, world.nonce, world.rank, world.size)
    connect = partial(_connect, terms, arena, hosts)
    parity = terms.parity if hosts is not None and hosts.are_several else 0
    saver = Saver(describer, place, connect, _patience(timeout_s), parity=parity)
    request = partial(saver.request, timeout_s=timeout_s)
    offers = (
        Offers(store, world.rank, arena, request)
        if hosts is None
        else HostOffers(store, world.rank, arena, request, hosts)
    )
    try:
        if hosts is None:
            begin = partial(_begin, world, saver, offers, timeout_s)
            begun = tell_all(world, "start: incarnation", begin, timeout_s=timeout_s)
        else:
            begun = _begin_on_hosts(world, hosts, saver, offers, timeout_s)
        incarnation, may_restore = msgspec.json.decode(begun, type=tuple[int, bool])
        offers.incarnation = incarnation
        saver.place = Place(run_id, incarnation, world.nonce, world.rank, world.size)
        agree(world, "start: join", lambda: _join(saver), timeout_s=timeout_s)
    except BaseException:
        # A keeper that still hears from us would hold the root against the next try.
        saver.close(timeout_s=_HANG_UP_S, say_goodbye=False)
        raise
    if hosts is not None:
        hosts.within_s = LATER_S
    if terms.parity > parity and world.rank == 0:
        emit(Warned(message=(
            f"parity={terms.parity}, and all ranks are on one host: it has nobody to keep its "
            "parity, only storage protects its snapshots"
        )))  # fmt: skip
    return Run(run_id, incarnation, may_restore, saver, offers)


def _plan(state: State, describer: Describer, terms: Terms) -> bytes:
    """What must be alike on all ranks; raises for a state that cannot be saved."""
    if not isinstance(state, dict) or not state:
        raise UsageError("the state is a dict from names to objects, and not empty")
    usage = describer.usage()
    describer.describe()
    plan = msgspec.json.encode({
        "root": terms.root, "memory": str(terms.memory), "storage": str(terms.storage),
        "keep": str(terms.keep), "timeout_s": str(terms.timeout_s),
        "compare_replicas": str(terms.compare_replicas), "parity": str(terms.parity),
        "grace_s": str(terms.grace_s),
    })  # fmt: skip
    return msgpack.encode((plan, usage, msgspec.json.encode(HostFact.of_this(describer.world))))


def _require_one_plan(plans: list[bytes]) -> None:
    ranks = [msgspec.json.decode(plan, type=dict[str, str]) for plan in plans]
    for rank, plan in enumerate(ranks):
        for name, value in plan.items():
            if value != ranks[0][name]:
                raise UsageError(
                    f"the ranks disagree: {name} is {ranks[0][name]} on rank 0 and {value} on "
                    f"rank {rank}. Give every rank's Checkpointer the same arguments."
                )


def _open_root(store: Store, terms: Terms) -> bytes:
    wanted = os.environ.get("HOLDFAST_RUN_ID", "")
    before = wanted or run_id_of(store)  # of a root that lost its holdfast.json
    found = commit.open_root(store, before or uuid.uuid4().hex[:12])
    if wanted and found.run_id != wanted:
        raise UsageError(
            f"{terms.root} belongs to run {found.run_id}, HOLDFAST_RUN_ID says {wanted}: unset "
            "it, or use another root"
        )
    return found.run_id.encode()


def _patience(timeout_s: float) -> Patience:
    usual = Patience()
    return Patience(
        first_grant_s=2.5 * timeout_s, grant_s=min(usual.grant_s, timeout_s),
        durable_grant_s=min(usual.durable_grant_s, timeout_s), keeper_s=timeout_s,
        room_s=min(usual.room_s, timeout_s),
    )  # fmt: skip


def _begin(world: World, saver: Saver, offers: Offers, timeout_s: float) -> bytes:
    """On rank 0: the number of this start, and whether there is something to restore."""
    message = m.Begin(nonce=world.nonce, world=world.size)
    begun = saver.request(message, m.Begun, timeout_s=timeout_s)
    return msgspec.json.encode((begun.incarnation, offers.is_there_any()))


def _begin_on_hosts(
    world: World, hosts: Hosts, saver: Saver, offers: Offers, timeout_s: float
) -> bytes:
    """The same where ranks are on several hosts, whose keepers are told of each other first."""
    request = partial(saver.request, timeout_s=timeout_s)
    hosts.agree_on_secret(world, timeout_s)
    newest = hosts.survey(world, request, timeout_s)

    def begin(after: int) -> int:
        message = m.Begin(nonce=world.nonce, world=world.size, hosts=hosts.table, after=after)
        return saver.request(message, m.Begun, timeout_s=timeout_s).incarnation

    n = offers.incarnation = hosts.begin(world, begin, request, newest, timeout_s)
    return tell_all(
        world, "start: sources", lambda: msgspec.json.encode((n, offers.is_there_any())),
        timeout_s=timeout_s,
    )  # fmt: skip


def _join(saver: Saver) -> bytes:
    saver.reconnect()
    return b""


def _connect(
    terms: Terms,
    arena: Path,
    hosts: Hosts | None,
    place: Place,
    is_copying: bool,
    owes_durable: bool,
    listener: Callable[[m.Message], None],
    on_lost: Callable[[str], None],
) -> KeeperClient:
    """A line to this host's keeper, and this rank's place in the incarnation on it."""
    line = find_or_start(
        arena, run_id=place.run_id, root=terms.root, host_id=host_id(), timeout_s=terms.timeout_s
    )
    client = KeeperClient(line, listener, on_lost)
    try:
        hello = m.Hello(run_id=place.run_id, root=terms.root)
        client.request(hello, m.Welcome, timeout_s=terms.timeout_s)
        if place.incarnation and hosts is not None:
            part = hosts.part(place.incarnation, place.nonce)
            client.request(part, m.Done, timeout_s=terms.timeout_s)
        if place.incarnation:
            join = m.Join(
                incarnation=place.incarnation, nonce=place.nonce, rank=place.rank,
                keep_last=terms.keep.last, keep_every=terms.keep.every,
                persist_at_end=terms.storage is not None, is_copying=is_copying,
                owes_durable=owes_durable, compare_replicas=terms.compare_replicas,
                parity=terms.parity,
            )  # fmt: skip
            client.request(join, m.Done, timeout_s=terms.timeout_s)
    except HoldfastError:
        client.close()
        raise
    return client
