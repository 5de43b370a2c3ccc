"""A keeper whose incarnation is over decides nothing from then on, and leaves the root alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.catalogue import LOCK
from holdfast.errors import Fenced, RootBusy
from holdfast.keeper.process import Keeper
from holdfast.persist import commit
from holdfast.storage.base import Lock
from holdfast.storage.local import LocalStore
from support.runs.keepers import RUN


def keeper(directory: Path) -> Keeper:
    """Not running: what it does is called here."""
    root, arena = directory / "root", directory / "arena"
    arena.mkdir()
    commit.open_root(LocalStore(root), RUN)
    return Keeper(arena, run_id=RUN, root=str(root), host_id="a", idle_s=60, stop_s=60)


def is_free(directory: Path) -> bool:
    try:
        LocalStore(directory / "root").lock(LOCK, "test").release()
    except RootBusy:
        return False
    return True


async def stood_down(one: Keeper, directory: Path) -> None:
    """The lock is given back by another thread, after all else."""
    one.role.superseded(2)
    async with asyncio.timeout(10):
        while one.coordinator.incarnation != 2 or not one.role.is_bystander:
            await asyncio.sleep(0.01)
        while one.root_access.persister is not None or not is_free(directory):
            await asyncio.sleep(0.01)


def test_it_decides_nothing_while_it_gives_the_lock_back_and_asks_for_it_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def life() -> None:
        one = keeper(tmp_path)
        one.coordinator.begin(1, "n", 1)
        await one.root_access.open()
        seen: list[tuple[int, int]] = []
        detach = one.root_access.detach

        def detach_and_look() -> Callable[[], None]:
            let_go = detach()

            def let_go_and_look() -> None:
                seen.append((one.coordinator.incarnation, one.coordinator.world))
                let_go()

            return let_go_and_look

        monkeypatch.setattr(one.root_access, "detach", detach_and_look)
        await stood_down(one, tmp_path)
        assert seen == [(2, 0)]
        assert is_free(tmp_path)
        with pytest.raises(Fenced):
            await one.root_access.open()
        assert is_free(tmp_path)
        await one.role.lead(3, ())  # its turn again
        await one.root_access.open()
        one.root_access.release()

    asyncio.run(life())


def test_a_lock_that_comes_after_its_time_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def life() -> None:
        one = keeper(tmp_path)
        one.coordinator.begin(1, "n", 1)
        is_asked, may_lock = threading.Event(), threading.Event()
        lock = one.root_access.store.lock

        def slowly(name: str, owner: str) -> Lock:
            is_asked.set()
            may_lock.wait(10)
            return lock(name, owner)

        monkeypatch.setattr(one.root_access.store, "lock", slowly)
        opening = asyncio.create_task(one.root_access.open())
        await asyncio.to_thread(is_asked.wait, 10)
        await stood_down(one, tmp_path)
        may_lock.set()
        with pytest.raises(Fenced):
            await opening
        assert is_free(tmp_path)

    asyncio.run(life())


def test_a_keeper_of_the_run_that_still_has_the_lock_is_waited_for(tmp_path: Path) -> None:
    """It learns of a newer start when its own ranks join that, as this one's do meanwhile."""

    async def life() -> None:
        one = keeper(tmp_path)
        lock = one.root_access.store.lock(LOCK, f"run {RUN}, keeper 7 on b")
        with pytest.raises(RootBusy, match="of this very run"):
            await one.root_access.open(0.3)
        opening = asyncio.create_task(one.root_access.open(60))
        await asyncio.sleep(0.5)
        assert not opening.done()
        lock.release()
        await asyncio.wait_for(opening, 20)
        assert not is_free(tmp_path)

    asyncio.run(life())


def test_a_lock_that_another_keeper_of_the_run_holds_names_it_and_the_remedy(
    tmp_path: Path,
) -> None:
    async def life() -> None:
        one = keeper(tmp_path)
        lock = one.root_access.store.lock(LOCK, f"run {RUN}, keeper 7 on b")
        with pytest.raises(RootBusy, match=r"keeper 7 on b\..*of this very run.*End that keeper"):
            await one.root_access.open()
        lock.release()
        lock = one.root_access.store.lock(LOCK, "another run")
        with pytest.raises(RootBusy) as caught:
            await one.root_access.open()
        assert "this very run" not in str(caught.value)
        lock.release()

    asyncio.run(life())
