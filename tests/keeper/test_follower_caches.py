"""What the cache of a host that was away has is compared with what happened meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.format.manifest import Generation
from holdfast.keeper.executor import Executor
from holdfast.keeper.hosts.cache_messages import MarkDrained, TellCached
from holdfast.keeper.hosts.facts import Fact
from holdfast.keeper.hosts.follower_caches import FollowerCaches
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
        lambda _: None,
    )
    caches.drained(cast(Any, SimpleNamespace(generation=PASSED, attempt="a")))
    waiting = [(*PASSED, "a"), (*PASSED, "b"), (*NEW, "c")]
    caches._compare(cast(Any, tier), sent.append, waiting)
    unknown = TellCached(generations=((1, 5), (1, 9)))
    assert sent == [MarkDrained(drained=((1, 5, "a"),)), unknown]


@pytest.mark.promise
def test_what_another_host_has_may_be_replaced_by_something_newer() -> None:
    keeper = Keeper(1)
    executor = Executor.__new__(Executor)
    executor._coordinator = keeper.c
    executor._root = cast(Any, SimpleNamespace(drains=SimpleNamespace(wake=lambda: None)))
    executor._found_cached([(PASSED, "a")])
    assert keeper.c.durability.draining == {PASSED: "a"}
    assert keeper.c.durability.exact == set()
    keeper.c.lifecycle.found_cached([(NEW, "c")])  # its own cache
    assert keeper.c.durability.exact == {NEW}
