"""Caches of several hosts: each takes and drains the images of its own ranks, real keepers."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.catalogue import catalogue
from holdfast.events import PersistBroke
from holdfast.observe.log import read_events
from holdfast.storage.local import LocalStore
from holdfast.testing.faults import Hosts, wait_until
from support.checkpoints.roots import whole
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives

HOSTS = ("a", "b")


@pytest.fixture
def ending_keepers(arena_dir: Path) -> Iterator[None]:
    """For runs that leave a keeper behind on purpose: it is told to stop, and waited for."""
    yield
    for log in sorted(arena_dir.glob("*/*/keeper.log")):
        print(log.parent.name, log.read_text(errors="replace"), sep=":\n")
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)
    until_s = time.monotonic() + 60
    while keeper_pids(arena_dir) and time.monotonic() < until_s:
        time.sleep(0.1)


def cache_of(tmp_path: Path, host: str) -> LocalStore:
    (place,) = (tmp_path / "cache").glob(f"*@{host}")
    return LocalStore(place)


def images_in(store: LocalStore) -> set[int]:
    """The ranks of which there are images."""
    found = catalogue(store).manifests
    return {ref.rank for m in found for ref in m.images if store.exists(ref.path)}


def steps_in(store: LocalStore) -> list[int]:
    return [manifest.step for manifest in catalogue(store).manifests]


def refuse(root: Path) -> None:
    """Let the root take no image."""
    if (root / "steps").exists():
        (root / "steps").rename(root / "steps-away")
    (root / "steps").touch()


def accept(root: Path) -> None:
    (root / "steps").unlink()
    if (root / "steps-away").exists():
        (root / "steps-away").rename(root / "steps")


def start(lives: Lives, tmp_path: Path, world: int, steps: int, **other: Any) -> None:
    options = {"cache": str(tmp_path / "cache")} | other.pop("options", {})
    lives.start(world, steps, storage=other.pop("storage", 5), options=options, **other)


@pytest.mark.timeout(120)
def test_each_host_caches_and_drains_its_own_images_and_all_are_durable(
    tmp_path: Path, ending_keepers: None
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=31) as lives:
        start(lives, tmp_path, 2, 21, hosts=HOSTS)
        lives.wait_restored(2)
        lives.wait_end()
    assert whole(LocalStore(root))
    newest = steps_in(LocalStore(root))[-1]
    for rank, host in enumerate(HOSTS):
        cache = cache_of(tmp_path, host)
        assert images_in(cache) == {rank}
        assert newest in steps_in(cache)
        for manifest in catalogue(cache).manifests:
            assert manifest in catalogue(LocalStore(root)).manifests
            ref = manifest.images[rank]
            assert cache.read(ref.path) == LocalStore(root).read(ref.path)


def cache_some(
    lives: Lives, tmp_path: Path, root: Path, arena_dir: Path, *, durable: bool = False
) -> int:
    """Train while the root refuses, then lose all memory; the newest step that is cached."""
    start(lives, tmp_path, 2, 100_000, hosts=HOSTS)
    lives.wait_restored(2)
    lives.wait_progress(2, 8)
    if durable:
        wait_until(lambda: steps_in(LocalStore(root)), timeout_s=60, what="a durable step")
    refuse(root)
    reached = lives.wait_progress(2, 10)

    def is_cached() -> bool:
        stores = [cache_of(tmp_path, host) for host in HOSTS]
        return all(max(steps_in(store), default=-1) > reached + 5 for store in stores)

    wait_until(is_cached, timeout_s=60, what="steps that the root lacks")
    lives.end(2)
    Hosts(arena_dir).lose(*HOSTS)
    return min(steps_in(cache_of(tmp_path, host))[-1] for host in HOSTS)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("hosts", [("a", "b"), ("b", "a"), ("a", "b", "b")])
def test_what_only_the_caches_have_is_restored_and_drained_wherever_the_ranks_are(
    tmp_path: Path, arena_dir: Path, ending_keepers: None, hosts: tuple[str, ...]
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=32) as lives:
        cached = cache_some(lives, tmp_path, root, arena_dir)
        assert cached not in steps_in(LocalStore(root))
        start(lives, tmp_path, len(hosts), 100_000, hosts=hosts, storage=1_000_000)
        step, source = lives.wait_restored(len(hosts))  # the root refuses still
        assert step >= cached and source == "storage"
        accept(root)
        wait_drained(lives, root, step)
        lives.end(len(hosts))
    assert whole(LocalStore(root))


def wait_drained(lives: Lives, root: Path, step: int) -> None:
    def is_drained() -> bool:
        lives.raise_errors()
        return step in steps_in(LocalStore(root))

    wait_until(is_drained, timeout_s=90, what=f"step {step} in the root")


def reasons(root: Path) -> str:
    """All that the keepers said went wrong."""
    return "\n".join(found.reason for found in read_events(root, PersistBroke))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lost", ["b", "a", "ab"])
def test_hosts_that_are_lost_amid_a_drain_go_on_with_it_when_they_are_back_with_their_caches(
    tmp_path: Path, arena_dir: Path, ending_keepers: None, lost: str
) -> None:
    root = tmp_path / "run"
    slow = ({"HOLDFAST_DRAIN_BYTES_S": "2000000"},) * 2
    with Lives(root, seed=33) as lives:
        start(lives, tmp_path, 2, 100_000, hosts=HOSTS, settings=slow)
        lives.wait_restored(2)

        def is_draining() -> bool:
            known = [set(steps_in(cache_of(tmp_path, host))) for host in HOSTS]
            begun = {int(path.name.split("-")[1]) for path in root.glob("steps/*")}
            left = begun - set(steps_in(LocalStore(root)))
            return bool(left & known[0] & known[1])

        lives.wait_progress(2, 12)
        wait_until(is_draining, timeout_s=60, what="a drain")
        lives.end(2)
        Hosts(arena_dir).lose(*lost)
        both = [set(steps_in(cache_of(tmp_path, host))) for host in HOSTS]
        cached = max(both[0] & both[1])
        start(lives, tmp_path, 2, 100_000, hosts=HOSTS, storage=1_000_000)
        step, _ = lives.wait_restored(2)
        assert step >= cached  # memory of a host alone has nothing newer
        wait_drained(lives, root, cached)
        lives.end(2)
    assert whole(LocalStore(root))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a"), ("b", "b")])
def test_without_the_cache_of_a_host_the_run_goes_on_from_what_is_durable_and_says_what_is_lost(
    tmp_path: Path, arena_dir: Path, ending_keepers: None, hosts: tuple[str, ...]
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=34) as lives:
        cached = cache_some(lives, tmp_path, root, arena_dir, durable=True)
        accept(root)
        durable = steps_in(LocalStore(root))[-1]
        assert durable < cached
        if hosts == ("a", "b"):
            shutil.rmtree(str(cache_of(tmp_path, "b").url).removeprefix("file://"))
        start(lives, tmp_path, 2, 100_000, hosts=hosts, storage=50)
        assert lives.wait_restored(2) == (durable, "storage")
        lives.wait_progress(2, durable + 10)
        missing = 0 if hosts == ("b", "b") else 1
        wait_until(
            lambda: f"images of ranks [{missing}] are in no cache" in reasons(root),
            timeout_s=30,
            what="word of what is lost",
        )
        wait_until(
            lambda: steps_in(LocalStore(root))[-1] > durable,
            timeout_s=60,
            what="a durable step",
        )
        lives.end(2)
    assert whole(LocalStore(root))
