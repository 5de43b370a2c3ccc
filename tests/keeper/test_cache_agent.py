"""This host's cache at the orders of a coordinator elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.catalogue import catalogue
from holdfast.format.manifest import Manifest
from holdfast.keeper.hosts.cache_agent import CacheAgent
from holdfast.keeper.hosts.cache_messages import DrainImages, deflate_manifest
from holdfast.keeper.hosts.facts import Fact
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
        self, _: Manifest, done: Callable[[int], None], is_cancelled: Callable[[], bool]
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
