"""Work that comes while a root is released, or its lock is taken anew, is refused or done: never
forgotten.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.format.manifest import Incarnation
from holdfast.keeper.executor import Executor
from holdfast.keeper.jobs import Background
from holdfast.keeper.persister import Persister
from holdfast.persist import commit
from holdfast.policy.when import Keep
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from support.checkpoints.keeper_roots import job_at, root_access


@pytest.mark.promise
def test_work_that_comes_while_a_root_is_released_is_not_taken_by_what_ends(tmp_path: Path) -> None:
    commit.open_root(LocalStore(tmp_path / "root"), "run")

    async def run() -> None:
        background, access = Background(), root_access(tmp_path / "root", "run run, here")
        access.cache_path = str(tmp_path / "cache")
        persister, gate = await access.open(), threading.Event()
        access.drains.tick(time.monotonic())
        persister.submit(lambda: cast(None, gate.wait()))  # a long write
        access.drains.wake()
        access.drains.tick(time.monotonic() + 100)
        ended = asyncio.ensure_future(background.in_thread(access.detach()))
        await asyncio.sleep(0)
        assert access.cache is None and access.persister is None
        access.drains.wake()
        access.drains.tick(time.monotonic() + 100)
        gate.set()
        await ended
        await access.open()
        deadline_s = time.monotonic() + 10
        while access.is_draining and time.monotonic() < deadline_s:
            access.drains.tick(time.monotonic() + 100)
            await asyncio.sleep(0.01)
        assert not access.is_draining
        access.release()

    asyncio.run(run())


@pytest.mark.promise
def test_a_root_is_released_in_the_middle_of_a_drain(tmp_path: Path) -> None:
    commit.open_root(LocalStore(tmp_path / "root"), "run")
    ended: list[str] = []

    async def run() -> None:
        access = root_access(tmp_path / "root", "run run, here")
        access.cache_path = str(tmp_path / "cache")
        persister, begun = await access.open(), threading.Event()
        tier = access.cache
        assert tier is not None

        def copy_much(*_: object) -> None:
            begun.set()
            deadline_s = time.monotonic() + 5
            while not tier._drain._pace.gives_way():
                if time.monotonic() > deadline_s:
                    ended.append("copied all")
                    return
                time.sleep(0.01)
            ended.append("gave way")

        tier._drain.__dict__["copy_files"] = copy_much
        nothing = cast(Any, SimpleNamespace(images=()))
        for _ in range(2):
            persister.submit(lambda: tier.drain_own(nothing, lambda _: None))
        assert begun.wait(10)
        access.release()

    asyncio.run(run())
    assert ended == ["gave way", "gave way"]


def test_an_attempt_that_comes_after_the_stop_fails_at_once() -> None:
    failed: list[tuple[str, str | None]] = []
    persister = Persister(MemoryStore("root"), done=lambda *one: failed.append(one), keep=Keep())
    persister.stop()
    job = job_at(1)
    persister.submit(job)
    persister.submit(lambda: failed.append(("call", None)))
    assert failed == [(job.attempt, "its thread has ended")]


@pytest.mark.promise
def test_a_write_to_the_cache_that_was_to_be_aborted_and_succeeded_is_not_told_durable() -> None:
    told: list[str] = []
    lifecycle = SimpleNamespace(
        cached=lambda _: told.extend(["cached"]),
        persisted=lambda _: told.extend(["durable"]),
    )
    job = job_at(1)
    job.abort("hosts are renumbered")
    executor = Executor.__new__(Executor)
    executor.coordinator = cast(Any, SimpleNamespace(attempts={"a": object()}, lifecycle=lifecycle))
    executor.root = cast(
        Any, SimpleNamespace(drains=SimpleNamespace(wake=lambda: told.append("woken")))
    )
    executor.agent = cast(Any, SimpleNamespace(writes=SimpleNamespace(end=lambda _: None)))
    executor._jobs, executor._direct, executor.refusals = {"a": job}, set(), {}
    executor.__dict__["carry_out"] = lambda _: None
    executor._settle_cached("a", None)
    assert told == ["woken", "cached"]


@pytest.mark.promise
def test_a_number_that_a_cache_has_is_known_while_the_cache_cannot_be_locked(
    tmp_path: Path,
) -> None:
    cache = LocalStore(tmp_path / "cache")
    commit.open_root(cache, "run")
    commit.record_incarnation(
        cache, Incarnation(run_id="run", n=7, nonce="a", parent=None, world=1)
    )

    async def run() -> None:
        access = root_access(tmp_path / "root", "run run, here")
        access.cache_path = str(tmp_path / "cache")
        assert access.cache is None and access.cache_numbers() == ["7.json"]
        access.cache_path = str(tmp_path / "none")
        assert access.cache_numbers() == []

    asyncio.run(run())
