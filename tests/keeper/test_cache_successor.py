"""A keeper that is started in the middle of an incarnation shares its cache with other hosts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.keeper.hosts.follower_caches import FollowerCaches
from holdfast.keeper.hosts.role import HostRole
from holdfast.keeper.trainer_api import TrainerApi


async def resume(hosts: tuple[Any, ...]) -> tuple[list[object], FollowerCaches]:
    """Have a keeper take over an incarnation; return what its root was told, and its view of the
    other caches.
    """
    told: list[object] = []
    caches = FollowerCaches(
        cast(Any, SimpleNamespace(away=lambda: ["b"])),
        cast(Any, None),
        lambda: None,
        lambda *_: None,
    )

    async def open_root() -> None:
        told.append("open")

    async def resumable(_: object) -> object:
        return SimpleNamespace(n=1, nonce="a", world=2, parent=None)

    api: Any = TrainerApi.__new__(TrainerApi)
    api.root = SimpleNamespace(
        open=open_root,
        share_cache=lambda others, *, is_shared: told.append((others, is_shared)),
        may_open=False,
    )
    api.incarnations = SimpleNamespace(resumable=resumable, current=None)
    api.coordinator = SimpleNamespace(resume=lambda *_: [])
    api.memory = SimpleNamespace(order=lambda *_: None)
    api.executor = SimpleNamespace(
        caches=caches,
        agent=SimpleNamespace(hosts=hosts),
        carry_out=lambda _: None,
        coordinator=api.coordinator,
        memory=api.memory,
        ranks=None,
        background=None,
        incarnations=api.incarnations,
        root=api.root,
    )
    api._join_reports = lambda: None
    nobody: Any = None
    api.role = HostRole("a", api.executor, nobody, nobody)
    assert await api._resume(None)
    assert api.root.may_open
    return told, caches


@pytest.mark.promise
def test_a_successor_shares_its_cache_before_it_opens_it_and_waits_for_the_followers() -> None:
    told, caches = asyncio.run(resume((SimpleNamespace(id="a"), SimpleNamespace(id="b"))))
    assert told == [(caches, True), "open"]
    assert caches.are_gathering and not caches._has_begun


@pytest.mark.promise
def test_a_successor_on_one_host_shares_its_cache_with_nobody() -> None:
    told, _ = asyncio.run(resume(()))
    assert told == [(None, False), "open"]
