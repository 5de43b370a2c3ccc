"""This host's cache at the orders of a coordinator elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.catalogue import catalogue
from holdfast.format.manifest import Generation, Manifest
from holdfast.keeper.cache_tier import CacheTier
from holdfast.keeper.hosts import cache_agent
from holdfast.keeper.hosts.cache_agent import CacheAgent
from holdfast.keeper.hosts.cache_messages import DrainImages, PublishCached, deflate_manifest
from holdfast.keeper.hosts.followers import FollowerRegistry
from holdfast.keeper.hosts.host_messages import WriteEnded
from holdfast.keeper.jobs import RemoteImages
from holdfast.persist import commit
from holdfast.policy.when import Keep
from holdfast.protocol.facts import Fact
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import wait_until
from support.checkpoints.keeper_roots import save_steps


class Tier:
    """A cache whose drains wait, and note whether they were cancelled."""

    drain_lost = ""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.were_cancelled: list[bool] = []

    def drain_own(
        self,
        _: Manifest,
        done: Callable[[int], None],
        is_cancelled: Callable[[], bool],
        progressed: Callable[[], None],
    ) -> None:
        self.begun.set()
        assert self.may_end.wait(10)
        self.were_cancelled.append(is_cancelled())


@pytest.mark.promise
def test_an_order_that_is_cancelled_while_it_waits_for_another_is_not_carried_out() -> None:
    store = MemoryStore()
    save_steps(store, [0])
    manifest = deflate_manifest(catalogue(store).manifests[0])
    tier, told = Tier(), list[Fact]()
    agent = CacheAgent(cast(Any, None), cast(Any, SimpleNamespace(from_thread=lambda call: call())))
    agent.tier_of = lambda: cast(Any, tier)
    agent.serve(told.append)
    for directory in ("one", "two"):
        agent.do(DrainImages(directory=directory, manifest=manifest))
    assert tier.begun.wait(10)
    agent.cancel("two")
    tier.may_end.set()
    wait_until(lambda: len(told) == 2, timeout_s=10)
    assert tier.were_cancelled == [False, True] and not agent.is_busy


@pytest.mark.promise
def test_a_drain_of_one_large_image_is_waited_for_while_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_agent, "PROGRESS_S", 0.0)
    cache, root = MemoryStore("cache"), MemoryStore("root")
    save_steps(cache, [0])
    commit.open_root(root, "r")
    (manifest,) = catalogue(cache).manifests
    tier = CacheTier(cache, root, "r", "test", Keep(), lambda *_: None, lambda _: None, tuple)
    agent = CacheAgent(cast(Any, None), cast(Any, SimpleNamespace(from_thread=lambda call: call())))
    agent.tier_of = lambda: tier
    followers = FollowerRegistry.__new__(FollowerRegistry)
    session = cast(Any, SimpleNamespace(shares={}))
    told: list[str] = []

    def report(fact: Fact) -> None:
        told.append(type(fact).__name__)
        share._moved_s = float("-inf")  # nothing was heard for hours before
        followers._handle_writing(session, cast(Any, fact))
        assert not share.stalled()

    def begin() -> None:
        session.shares["one"] = share
        agent.do(DrainImages(directory="one", manifest=deflate_manifest(manifest)))

    agent.serve(report)
    share = RemoteImages("b", {0, 1}, begin, lambda _: None, stall_s=60.0)
    try:
        share.write(lambda _: None)
        wait_until(lambda: share.has_ended, timeout_s=30)
    finally:
        tier.close()
    assert share.stored.keys() == {0, 1}
    first, last = told.index("ImageWritten"), told.pop()
    assert "WriteProgressed" in told[:first] and "WriteProgressed" in told[first:]
    assert last == "WriteEnded"


@pytest.mark.promise
def test_what_was_written_to_a_cache_that_went_is_not_published_in_the_next() -> None:
    def cache() -> Any:
        return SimpleNamespace(
            is_taking=True,
            expect=lambda _: None,
            persister=SimpleNamespace(submit=lambda _: submitted.append(1)),
        )

    submitted: list[int] = []
    told: list[Fact] = []
    agent = CacheAgent(cast(Any, None), cast(Any, None))
    agent.serve(told.append)
    first = cache()
    agent.tier_of = lambda: first
    order = SimpleNamespace(
        attempt_id=SimpleNamespace(generation=Generation(1, 5)), directory="one"
    )
    agent.begin_write(cast(Any, order))
    second = cache()
    agent.tier_of = lambda: second
    agent.do(PublishCached(directory="one", manifest=b"", record=b""))
    (ended,) = told
    assert isinstance(ended, WriteEnded) and "lost" in ended.reason and not submitted
