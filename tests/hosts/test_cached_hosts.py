"""Caches of several hosts: each takes and drains the images of its own ranks, real keepers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore
from holdfast.testing.faults import Hosts, wait_until
from support.checkpoints.roots import whole
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives

HOSTS = ("a", "b")


@pytest.fixture
def ending_keepers(arena_dir: Path) -> Iterator[None]:
    """For runs that leave a keeper behind on purpose: it is told to stop."""
    yield
    for log in sorted(arena_dir.glob("*/*/keeper.log")):
        print(log.parent.name, log.read_text(errors="replace"), sep=":\n")
    for pid in keeper_pids(arena_dir):
        os.kill(pid, signal.SIGTERM)


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


def cache_some(lives: Lives, tmp_path: Path, root: Path, arena_dir: Path) -> int:
    """Train while the root refuses, then lose all memory; the newest step that is cached."""
    start(lives, tmp_path, 2, 100_000, hosts=HOSTS)
    lives.wait_restored(2)
    lives.wait_progress(2, 8)
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
        assert (step, source) == (cached, "storage")
        accept(root)
        wait_drained(lives, root, cached)
        lives.end(len(hosts))
    assert whole(LocalStore(root))


def wait_drained(lives: Lives, root: Path, step: int) -> None:
    def is_drained() -> bool:
        lives.raise_errors()
        return step in steps_in(LocalStore(root))

    wait_until(is_drained, timeout_s=90, what=f"step {step} in the root")
