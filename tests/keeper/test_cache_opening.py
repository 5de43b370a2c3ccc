"""A follower's cache that cannot be opened, or is gone, is tried again while a start goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.events import Warned
from holdfast.format.manifest import Generation
from holdfast.keeper.cache_tier import CacheTier
from holdfast.keeper.drain_queue import Drained
from holdfast.persist import commit
from holdfast.storage.local import LocalStore
from support.checkpoints.keeper_roots import root_access, save_steps
from support.runs.mishaps import listening


@pytest.mark.promise
def test_a_followers_cache_that_could_not_be_opened_is_tried_again_after_a_pause(
    tmp_path: Path,
) -> None:
    root, disk = tmp_path / "root", tmp_path / "disk"
    commit.open_root(LocalStore(root), "r")
    disk.touch()  # where its disk is to be mounted
    opened: list[bool] = []

    async def run() -> None:
        access = root_access(root, "run r, host b", cache_opened=lambda: opened.append(True))
        access.tend_cache()
        assert access.cache is None  # there is to be none
        access.cache_path = str(disk / "cache")
        access.share_cache(None, is_shared=True)
        await access.open_cache()
        assert access.cache is None
        disk.unlink()
        disk.mkdir()

        async def tick_until(is_so: Callable[[], bool]) -> None:
            access._next_cache_s = 0.0  # it is time
            for _ in range(1000):
                access.tend_cache()
                await asyncio.sleep(0.01)
                if is_so():
                    return
            raise TimeoutError("nothing came of it")

        for _ in range(20):
            access.tend_cache()
            await asyncio.sleep(0.01)
        assert access.cache is None  # not yet
        await tick_until(lambda: opened == [True])
        assert access.cache is not None and access.persister is None
        (disk / "cache").rename(disk / "away")
        await tick_until(lambda: access.cache is None)
        assert not (disk / "cache").exists()
        await tick_until(lambda: opened == [True, True])
        assert access.cache is not None
        access.release()

    with listening() as told:
        asyncio.run(run())
    assert len([one for one in told if isinstance(one, Warned)]) == 1


@pytest.mark.promise
def test_what_is_cached_is_not_told_lost_while_its_cache_is_only_being_opened(
    tmp_path: Path,
) -> None:
    root, cache = tmp_path / "root", tmp_path / "cache"
    save_steps(LocalStore(cache), [5])
    commit.open_root(LocalStore(root), "r")
    told: list[Drained] = []

    async def run() -> None:
        known = {(1, 5): "a1x5"}
        access = root_access(root, "run r, host a", drained=told.append, draining=known)
        access.cache_path = str(cache)
        lock_cache = access._lock_cache

        def lock_slowly() -> CacheTier:  # it reads the root first, which may take long
            time.sleep(0.3)
            return lock_cache()

        access._lock_cache = lock_slowly  # type: ignore[method-assign]
        opening = asyncio.create_task(access.open())  # as after a lock of a bucket was lost
        for _ in range(1000):
            access.drains.tick(time.monotonic())
            await asyncio.sleep(0.01)
            if told:
                break
        await opening
        await asyncio.to_thread(access.release)

    asyncio.run(run())
    assert told[0] == Drained(Generation(1, 5), "a1x5")
