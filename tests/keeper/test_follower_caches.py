"""What the cache of a host that was away has is compared with what happened meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.catalogue import catalogue, read_incarnation
from holdfast.format.manifest import Generation, seal
from holdfast.keeper.executor import Executor
from holdfast.keeper.hosts import follower_caches
from holdfast.keeper.hosts.cache_messages import (
    CacheDocuments,
    CacheFound,
    MarkDrained,
    TellCached,
    deflate_manifest,
)
from holdfast.keeper.hosts.follower_caches import FollowerCaches
from holdfast.protocol.facts import Fact
from holdfast.storage.memory import MemoryStore
from support.checkpoints.keeper_roots import save_steps
from support.coordinator.coordinators import Keeper

PASSED, NEW = Generation(1, 5), Generation(1, 9)


@pytest.mark.promise
def test_what_was_passed_over_while_a_host_was_away_is_not_drained_from_its_cache() -> None:
    sent: list[Fact] = []
    tier = SimpleNamespace(  # its own cache has dropped all it had, with the marks
        waiting=tuple, is_drained=lambda *_: False, try_lost_again=lambda: None, store=None
    )
    caches = FollowerCaches(
        cast(Any, SimpleNamespace(broadcast=lambda _: None)),
        cast(Any, SimpleNamespace(from_thread=lambda call: call())),
        lambda: cast(Any, tier),
        lambda *_: None,
    )
    caches.drained(cast(Any, SimpleNamespace(generation=PASSED, attempt="a")))
    waiting = [(*PASSED, "a"), (*PASSED, "b"), (*NEW, "c")]
    caches._compare(cast(Any, tier), sent.append, waiting)
    unknown = TellCached(generations=((1, 5), (1, 9)))
    assert sent == [MarkDrained(drained=((1, 5, "a"),)), unknown]


def caches_of(
    found: Callable[[Iterable[tuple[Generation, str]], bool], None], sent: list[Fact]
) -> FollowerCaches:
    """Those of a keeper whose own cache has nothing, and publishes what it learns."""
    tier = SimpleNamespace(
        waiting=tuple,
        is_drained=lambda *_: False,
        try_lost_again=lambda: None,
        publish=lambda *_: None,
        store=None,
        persister=SimpleNamespace(submit=lambda act: act()),
    )
    return FollowerCaches(
        cast(Any, SimpleNamespace(broadcast=lambda _: None)),
        cast(Any, SimpleNamespace(from_thread=lambda call: call())),
        lambda: cast(Any, tier),
        found,
    )


@pytest.mark.promise
@pytest.mark.parametrize(("begins", "reports", "is_exact"), [(0, 1, 1), (0, 2, 0), (1, 1, 0)])
def test_what_a_successor_first_hears_of_must_be_durable_itself(
    begins: int, reports: int, is_exact: int
) -> None:
    store = MemoryStore()
    save_steps(store, [0])
    (manifest,) = catalogue(store).manifests
    told: list[tuple[list[tuple[Generation, str]], bool]] = []
    sent: list[Fact] = []
    caches = caches_of(lambda found, exact: told.append((list(found), exact)), sent)
    host = cast(Any, SimpleNamespace(name="b", send=sent.append))
    if begins:
        caches.begin()
    for _ in range(reports):  # of the second it knows: it was away while this keeper led
        caches.handle(host, CacheFound(waiting=((*manifest.generation, manifest.attempt),)))
    record = seal(read_incarnation(store, manifest.incarnation))
    documents = CacheDocuments(manifest=deflate_manifest(manifest), record=record, layout=b"")
    caches.handle(host, documents)
    assert told[-1] == ([(manifest.generation, manifest.attempt)], bool(is_exact))


@pytest.mark.promise
def test_what_a_host_tells_before_the_coordinators_cache_is_open_is_handled_once_it_is() -> None:
    sent: list[Fact] = []
    caches = caches_of(lambda *_: None, sent)
    tier, caches._tier = caches._tier, lambda: None
    host = cast(Any, SimpleNamespace(name="b", send=sent.append))
    caches.handle(host, CacheFound(waiting=((1, 7, "a"),)))
    caches.handle(host, CacheFound(waiting=((1, 9, "c"),)))  # it attached once more
    assert not sent
    caches._tier = tier
    caches.opened()
    caches.opened()
    assert sent == [TellCached(generations=((1, 9),))]


@pytest.mark.promise
def test_what_was_drained_before_a_start_is_still_known_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower_caches, "_REMEMBERED", 3)
    sent: list[Fact] = []
    caches = caches_of(lambda *_: None, sent)
    for step in range(9):
        caches.drained(cast(Any, SimpleNamespace(generation=Generation(1, step), attempt="a")))
    caches.begin()
    waiting = tuple((1, step, "a") for step in (0, 7, 8))
    caches.handle(
        cast(Any, SimpleNamespace(name="b", send=sent.append)), CacheFound(waiting=waiting)
    )
    marked = MarkDrained(drained=((1, 7, "a"), (1, 8, "a")))
    assert sent == [marked, TellCached(generations=((1, 0),))]


@pytest.mark.promise
def test_what_another_host_has_may_be_replaced_by_something_newer() -> None:
    keeper = Keeper(1)
    executor = Executor.__new__(Executor)
    executor.coordinator = keeper.c
    executor.root = cast(Any, SimpleNamespace(drains=SimpleNamespace(wake=lambda: None)))
    executor._found_cached([(PASSED, "a")])
    assert keeper.c.durability.draining == {PASSED: "a"}
    assert keeper.c.durability.exact == set()
    keeper.c.durability.found_cached([(NEW, "c")])  # its own cache
    assert keeper.c.durability.exact == {NEW}
    executor._found_cached([(PASSED, "a")], True)
    assert keeper.c.durability.exact == {NEW, PASSED}


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("drains", [True, False])
def test_a_ring_waits_for_a_drain_only_where_the_cache_refuses_it(
    takes: bool, drains: bool
) -> None:
    keeper = Keeper(1)
    executor = Executor.__new__(Executor)
    executor.coordinator, executor.followers = keeper.c, cast(Any, SimpleNamespace())
    executor.agent = cast(Any, SimpleNamespace(caches=SimpleNamespace()))
    executor.memory = cast(Any, SimpleNamespace(root_id=""))
    executor.background = cast(Any, None)
    root = SimpleNamespace(
        cache=SimpleNamespace(is_taking=takes),
        drains=SimpleNamespace(is_running=drains, is_busy=True),
        store=MemoryStore(),
    )
    executor.connect(cast(Any, root), cast(Any, None))
    assert keeper.c.durability.is_storage_busy == (drains and not takes)


@pytest.mark.promise
def test_what_a_host_has_that_came_during_a_drain_is_not_lost() -> None:
    there: dict[int, str] = {}
    followers = SimpleNamespace(
        attached=lambda: dict(there), away=lambda: [] if there else ["b"], broadcast=lambda _: None
    )
    caches = FollowerCaches(cast(Any, followers), cast(Any, None), lambda: None, lambda *_: None)
    store = MemoryStore()
    save_steps(store, [0])
    (manifest,) = catalogue(store).manifests
    assert caches.drain(manifest) == []
    there[1] = "b"  # it attaches while the others copy
    _, may_come = caches.explain(manifest, [1])
    assert may_come
    assert len(caches.drain(manifest)) == 1
    _, may_come = caches.explain(manifest, [1])
    assert not may_come
