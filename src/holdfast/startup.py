"""Starts a run: its ranks agree on every setting that must be equal, and connect to their keeper.

Any error here is raised on every rank, and is the user's to fix.
"""

from __future__ import annotations

import errno
import glob
import os
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.capture.copier import device_rate
from holdfast.capture.saver import Saver
from holdfast.capture.staging import prepare_pieces
from holdfast.capture.task import RankIdentity, Timeouts
from holdfast.catalogue import ROOT, is_root, read_document
from holdfast.errors import HoldfastError, StorageError, UsageError
from holdfast.events import warn
from holdfast.format.manifest import Root
from holdfast.geometry.rank_ranges import ranks_in
from holdfast.hosts import LATER_S, HostFact, HostTable, hosts_of, secret_word
from holdfast.meeting import given_host_id, host_id
from holdfast.overview import UNSEEN, Overview, read_newest
from holdfast.persist import commit
from holdfast.policy.when import Every, Keep
from holdfast.protocol import messages as m
from holdfast.protocol.arena import ROOT_NAME, arena_dir, parse_arena_name
from holdfast.protocol.client import KeeperClient, find_or_start
from holdfast.restore.cluster_sources import ClusterSources
from holdfast.restore.reading.stored import run_id_of
from holdfast.restore.sources import RestoreSources
from holdfast.rules import Rules
from holdfast.state.describe import Describer
from holdfast.state.mapped.mapper import require_all_used
from holdfast.state.objects import State, require_state
from holdfast.storage.base import Store
from holdfast.storage.files import common_identity
from holdfast.storage.local import LocalStore
from holdfast.storage.tiered import TieredStore, cache_place
from holdfast.transport.wire.rank_tree import Said
from holdfast.world import World, all_said_or_raise

#: What an error says of a cache's place that cannot be right, on whatever disk.
_NO_PLACE = frozenset({errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})
#: Seconds for which a failed start waits for its own threads to end.
_HANG_UP_S = 5.0


class RunOptions(Struct, frozen=True):
    """The options that must be equal on all ranks."""

    root: str
    memory: Every | None
    storage: Every | None
    keep: Keep
    timeout_s: float
    rules: Rules | None = None
    compare_replicas: int | None = None
    parity: int = 0
    grace_s: float | None = None
    cache: str = ""
    """The directory that the caches of runs are in; "" for none."""
    cache_keep: Keep = Keep()
    check_settings: Callable[[], object] = tuple
    """Raises for a setting of this machine that has no meaning, before a keeper is started."""


#: Rules are compared by what they do (``require_all_used``), settings of a machine are its own.
_NOT_COMPARED = frozenset({"rules", "check_settings"})
#: A keeper compares it with that of its own host's ranks alone, and passes on what they send.
_PROTOCOL = "the protocol of keepers"


class StartedRun(Struct, frozen=True):
    """A started run, on one rank."""

    run_id: str
    incarnation: int
    may_restore: bool
    saver: Saver
    offers: RestoreSources
    arena: Path
    """The directory in shared memory of the run on this host."""


def start_run(
    world: World,
    store: Store,
    state: State,
    options: RunOptions,
    describer: Describer | None = None,
) -> StartedRun:
    """Agrees with the other ranks on run, host and incarnation, and joins it at the keeper.

    ``describer``: of the state, where it is not one of objects.
    """
    timeout_s = options.timeout_s
    describer = describer or Describer(
        state, world.rank, world.size, mark_frozen=True, rules=options.rules
    )
    run_id, seen, hosts, listed = _agree(world, store, state, describer, options)
    root_id = _root_of_host(seen, hosts.own_ranks)
    arena = arena_dir(run_id, host_id(), root_id)
    cache = options.cache and cache_place(options.cache, run_id, root_id, given_host_id())
    if hosts.speaks_for(world.rank):
        _warn_of_copies(arena, options.root)
    place = RankIdentity(run_id, 0, world.nonce, world.rank, world.size, root_id)
    connect = partial(_connect, options, arena, hosts, cache)
    parity = options.parity if hosts.are_several else 0
    saver = Saver(
        describer, place, connect, _patience(timeout_s), parity=parity, has_cache=bool(cache)
    )
    prepare_pieces(describer.parameters())
    if cache:
        store = TieredStore(LocalStore(cache), store)
    request = partial(saver.request, timeout_s=timeout_s)
    offers = (
        RestoreSources(store, world.rank, arena, request, listed)
        if hosts.is_alone
        else ClusterSources(store, world.rank, arena, request, hosts, listed)
    )
    try:
        incarnation = offers.incarnation = _begin(
            world, saver, hosts, timeout_s, lambda: _make_cache(cache, run_id)
        )
        saver.place = replace(place, incarnation=incarnation)
        may_restore = _join(world, saver, offers, timeout_s)
    except BaseException:
        # A keeper with an open connection would hold the root against the next try.
        saver.close(timeout_s=_HANG_UP_S, say_goodbye=False)
        raise
    hosts.within_s = LATER_S
    if options.parity > parity and world.rank == 0:
        warn(
            f"parity={options.parity}, and all ranks are on one host: it has nobody to keep its "
            "parity, only storage protects its snapshots"
        )
    return StartedRun(run_id, incarnation, may_restore, saver, offers, arena)


class _RunTerms(NamedTuple):
    """What the ranks agree on before there is a keeper.

    ``seen``: the identities of the root as the ranks see it that find it. ``listed``: on rank 0,
    what was in storage before.
    """

    run_id: str
    seen: list[Said]
    hosts: HostTable
    listed: Overview


def _agree(
    world: World, store: Store, state: State, describer: Describer, options: RunOptions
) -> _RunTerms:
    """Agrees on the settings and the root, which rank 0 opens when nothing speaks against it."""
    listed, own = UNSEEN, list[bytes]()

    def say() -> tuple[bytes, ...]:
        plan, usage = _plan(state, describer, options)
        fact = msgspec.json.encode(HostFact.of_this(world.size))
        own[:] = _identify(store)
        return plan, usage, fact, secret_word(world.rank), *own

    def open_root(columns: Sequence[Sequence[Said]]) -> bytes:
        try:
            _hosts_of_one_plan(columns, world.rank, options)
        except HoldfastError:  # every rank finds the same, and raises it
            return b""
        nonlocal listed
        run_id, listed = _open_root(store, options, found=own[0].decode())
        return run_id.encode()

    said = all_said_or_raise(
        world, "start: state", say, timeout_s=options.timeout_s, conclude=open_root
    )
    hosts = _hosts_of_one_plan(said, world.rank, options)
    *_, secret, runs, identities, [opened] = said
    run_id = opened.value.decode()
    if not runs[0].value:  # rank 0 has just made the root

        def identify() -> tuple[bytes, bytes]:
            return _identify(store, must_find=world.rank == 0)

        runs, identities = all_said_or_raise(
            world, "start: identity", identify, timeout_s=options.timeout_s
        )
    _require_one_root(runs, run_id, options)
    seen = [said for said in identities if said.value]
    if not hosts.is_alone:
        of_all = common_identity(said.value.decode() for said in seen)
        hosts.take_secret(secret, f"{run_id}\n{of_all}")
    return _RunTerms(run_id, seen, hosts, listed)


def _hosts_of_one_plan(
    columns: Sequence[Sequence[Said]], rank: int, options: RunOptions
) -> HostTable:
    """The hosts of the ranks; raises UsageError unless all ranks give the same settings."""
    plans, usages, facts, *_ = columns
    _require_one_plan(plans)
    require_all_used([usage.value for usage in usages])
    of_hosts = [(msgspec.json.decode(said.value, type=HostFact), said.ranks) for said in facts]
    return hosts_of(of_hosts, rank, were_more=options.parity > 0)


def _plan(state: State, describer: Describer, options: RunOptions) -> tuple[bytes, bytes]:
    """Encodes the settings that must be equal on all ranks, and the use of rules; raises for a
    state that cannot be saved, and for a setting of this machine that has no meaning.
    """
    require_state(state)
    usage = describer.usage()
    describer.describe()
    device_rate()
    options.check_settings()
    names = (name for name in options.__struct_fields__ if name not in _NOT_COMPARED)
    plan = {_PROTOCOL: str(m.PROTOCOL)} | {name: str(getattr(options, name)) for name in names}
    return msgspec.json.encode(plan), usage


def _require_one_plan(plans: Sequence[Said]) -> None:
    first, *others = (msgspec.json.decode(plan.value, type=dict[str, str]) for plan in plans)
    for said, plan in zip(plans[1:], others, strict=True):
        for name in first | plan:  # those of another version may lack one
            one, other = first.get(name, "unknown"), plan.get(name, "unknown")
            if one != other:
                what = "Install one version of Holdfast on all hosts."
                if name != _PROTOCOL:
                    what = "Give every rank's Checkpointer the same arguments."
                raise UsageError(
                    f"the ranks disagree: {name} is {one} on rank 0 and {other} on rank "
                    f"{said.first}. {what}"
                )


def _open_root(store: Store, options: RunOptions, found: str) -> tuple[str, Overview]:
    """Returns the run of the root, which is made where there is none. ``found``: the run that this
    rank has just read there, "" for none.
    """
    wanted, listed = os.environ.get("HOLDFAST_RUN_ID", ""), UNSEEN
    if not found:
        # The run's id stands in its checkpoints, too: a root may have lost its holdfast.json.
        listed = UNSEEN if wanted or is_root(store) else read_newest(store)
        before = wanted or run_id_of(listed)
        found = commit.open_root(store, before or uuid.uuid4().hex[:12]).run_id
    if wanted and found != wanted:
        raise UsageError(
            f"{options.root} belongs to run {found}, HOLDFAST_RUN_ID says {wanted}: unset "
            "it, or use another root"
        )
    return found, listed


def _identify(store: Store, *, must_find: bool = False) -> tuple[bytes, bytes]:
    """The run and the identity of the root as this rank sees it; nothing if it does not find it.

    That is let be: a network file system may show it a while later.
    """
    try:
        found = read_document(store, Root, ROOT).run_id
        return found.encode(), store.identity().encode()
    except HoldfastError:
        if must_find:
            raise
        return b"", b""


def _require_one_root(runs: Sequence[Said], run_id: str, options: RunOptions) -> None:
    """Raises UsageError when ranks see the roots of different runs."""
    for run in runs:
        if run.value not in (b"", run_id.encode()):
            raise UsageError(
                f"the ranks see different directories at {options.root}: on rank 0 it is the root "
                f"of run {run_id}, on rank {run.first} that of run {run.value.decode()}. Give a "
                "directory that all ranks reach, and not one of each node's own."
            )


def _root_of_host(seen: Sequence[Said], ranks: Collection[int]) -> str:
    """The identity of the root on the host of these ranks: its memory and keeper are known by it.

    As that host sees it, and not as all hosts of this start do: another start has other hosts, and
    is to find the same memory. As all do where none of its ranks finds the root now.
    """
    own = [said for said in seen if not set(ranks).isdisjoint(ranks_in(said.ranks))]
    return common_identity(said.value.decode() for said in own or seen)


def _make_cache(place: str, run_id: str) -> None:
    """Makes the run's cache on this host. A disk that is dead or read-only costs a warning: the run
    goes on without. Raises StorageError for a place that no directory can be at.
    """
    if not place:
        return
    try:
        commit.open_root(LocalStore(place), run_id)
        commit.require_root(LocalStore(place), run_id)
    except StorageError as error:
        if error.fields.get("errno") in _NO_PLACE:
            raise
        warn(f"the cache {place} is not used while its disk refuses: {error}")


def _warn_of_copies(arena: Path, root: str) -> None:
    """Warns of a copied root, which has the same run id: a start with either reports the other, if
    it is here.
    """
    run_id, _, host = parse_arena_name(arena.name)
    for other in sorted(arena.parent.glob(f"*@{glob.escape(host)}")):
        run, key, _ = parse_arena_name(other.name)
        if run != run_id or other.name == arena.name or other.name.startswith("."):
            continue
        try:
            path = os.fsdecode((other / ROOT_NAME).read_bytes()).strip()
        except OSError:  # it may be going away
            continue
        warn(
            (
                f"run {run_id} has more than one root: {root}, and {path}, whose memory is on this "
                f"host too ({other}). One is a copy of the other, or took its place. Each goes on "
                "from its own snapshots; nothing of the other is used or changed here"
            )
            if key
            else (
                f"an older version of Holdfast left {other}, the memory of run {run_id} at {path}: "
                "it is not known to be that of this root, and not used (`holdfast doctor` shows it)"
            )
        )


def _patience(timeout_s: float) -> Timeouts:
    usual = Timeouts()
    return Timeouts(
        first_grant_s=2.5 * timeout_s,
        grant_s=min(usual.grant_s, timeout_s),
        durable_grant_s=min(usual.durable_grant_s, timeout_s),
        room_s=min(usual.room_s, timeout_s),
    )


def _begin(
    world: World, saver: Saver, hosts: HostTable, timeout_s: float, prepare: Callable[[], None]
) -> int:
    """Begins an incarnation at rank 0's keeper, once those of all hosts listen; returns its number.

    Other keepers get their role in it when ranks of their host join. ``prepare`` is called on one
    rank of each host before.
    """
    request = partial(saver.request, timeout_s=timeout_s)

    def probe() -> tuple[bytes]:
        if hosts.speaks_for(world.rank):
            prepare()
        return (b"" if hosts.is_alone else hosts.probe(world.rank, request),)

    def begin(columns: Sequence[Sequence[Said]]) -> bytes:
        newest = hosts.take_ports(columns[0])
        table = () if hosts.is_alone else hosts.table
        message = m.Begin(nonce=world.nonce, world=world.size, hosts=table, after=newest)
        return str(saver.request(message, m.Begun, timeout_s=timeout_s).incarnation).encode()

    known, [begun] = all_said_or_raise(
        world, "start: keepers", probe, timeout_s=timeout_s, conclude=begin
    )
    hosts.take_ports(known)
    hosts.within_s = timeout_s / 2
    return int(begun.value)


def _join(world: World, saver: Saver, offers: RestoreSources, timeout_s: float) -> bool:
    """Joins the incarnation on every rank; returns whether there is something to restore."""

    def join() -> tuple[()]:
        saver.reconnect()
        return ()

    [[found]] = all_said_or_raise(
        world,
        "start: join",
        join,
        timeout_s=timeout_s,
        conclude=lambda _: offers.survey(world.size),
    )
    return offers.learn(found.value)


def _connect(
    options: RunOptions,
    arena: Path,
    hosts: HostTable,
    cache: str,
    place: RankIdentity,
    is_copying: bool,
    order: m.StandingOrder,
    listener: Callable[[m.Message], None],
    on_lost: Callable[[str], None],
) -> KeeperClient:
    """Connects to this host's keeper, and joins this rank to the incarnation on it."""
    line = find_or_start(
        arena,
        run_id=place.run_id,
        root=options.root,
        host_id=host_id(),
        timeout_s=options.timeout_s,
        root_id=place.root_id,
    )
    client = KeeperClient(line, listener, on_lost)
    try:
        hello = m.Hello(run_id=place.run_id, root=options.root, root_id=place.root_id, cache=cache)
        client.request(hello, m.Welcome, timeout_s=options.timeout_s)
        if place.incarnation and not hosts.is_alone:
            part = hosts.part(place.incarnation, place.nonce)
            client.request(part, m.Done, timeout_s=options.timeout_s)
        if place.incarnation:
            join = m.Join(
                incarnation=place.incarnation,
                nonce=place.nonce,
                rank=place.rank,
                keep=m.KeepTerms(**asdict(options.keep)),
                cache_keep=m.KeepTerms(**asdict(options.cache_keep)),
                persist_at_end=options.storage is not None,
                is_copying=is_copying,
                order=order,
                compare_replicas=options.compare_replicas,
                parity=options.parity,
            )
            client.request(join, m.Done, timeout_s=options.timeout_s)
    except HoldfastError:
        client.close()
        raise
    return client
