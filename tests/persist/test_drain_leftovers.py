"""What attempts and drains that were broken off left in a root becomes no checkpoint there."""

from __future__ import annotations

import errno
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from holdfast.catalogue import catalogue
from holdfast.errors import StorageError
from holdfast.events import Warned
from holdfast.format.manifest import Generation
from holdfast.keeper.persister import Persister
from holdfast.persist.pins import mend, pin
from holdfast.policy.when import Keep
from holdfast.storage.base import ImageSink, Store
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import PassingStore, Stopped
from persist.test_drains import drain_all, open_tiers
from support.checkpoints.keeper_roots import all_contents, change, job_at, paths_in, save_steps
from support.checkpoints.roots import whole
from support.runs.mishaps import listening


class NoManifests(PassingStore):
    """A root that refuses manifests."""

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        if path.startswith("manifests/"):
            raise StorageError("EIO", operation="publish", path=path, url=self.url)
        self.inner.publish(path, data, replace=replace)


class KilledInAFile(PassingStore):
    """A root whose writer is killed when it has begun its n-th file."""

    def __init__(self, inner: LocalStore, left: int) -> None:
        super().__init__(inner)
        self.left = left

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        self.left -= 1
        sink = self.inner.create(path, size_bytes, aside=aside)
        if not self.left:
            raise Stopped
        return sink


@pytest.mark.promise
@pytest.mark.parametrize("file", [1, 2, 3, 4])
def test_a_pin_brings_nothing_back_that_a_killed_drain_was_writing_anew(
    tmp_path: Path, file: int
) -> None:
    root, cache = LocalStore(tmp_path / "root"), LocalStore(tmp_path / "cache")
    save_steps(cache, [0])
    pin(cache, Generation(1, 0))
    truth = all_contents(cache)
    with open_tiers(NoManifests(root), cache) as (tier, persister):
        assert [one.is_lost for one in drain_all(tier, persister)] == [False]
    with suppress(Stopped), open_tiers(KilledInAFile(root, file), cache) as (tier, persister):
        tier.drain_one(persister, {})
    again = LocalStore(tmp_path / "root")
    mend(again, catalogue(again))
    assert [m.generation for m in catalogue(again).manifests] in ([], [Generation(1, 0)])
    assert all_contents(again) in ({}, truth)
    with open_tiers(again, cache) as (tier, persister):
        drain_all(tier, persister)
    assert all_contents(again) == truth
    aside = [path for path in paths_in(again) if path.startswith("damaged/")]
    assert [path for path in aside if not path.endswith(".new")] == []  # that one is for prune


class Small(PassingStore):
    """A root with room for so many bytes of images."""

    def __init__(self, inner: LocalStore, room_bytes: int) -> None:
        super().__init__(inner)
        self.room_bytes = room_bytes

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        if image_bytes(self.inner) + size_bytes > self.room_bytes:
            raise StorageError(
                "full", operation="create", path=path, url=self.url, errno=errno.ENOSPC
            )
        return self.inner.create(path, size_bytes, aside=aside)


class KilledAtTheManifest(PassingStore):
    """A root whose writer is killed before it publishes."""

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        if path.startswith("manifests/"):
            raise Stopped
        self.inner.publish(path, data, replace=replace)


def image_bytes(store: Store) -> int:
    files = [path for path in paths_in(store) if path.endswith(".safetensors")]
    return sum(store.size_bytes(path) for path in files)


def outcomes(store: Store, *steps: int) -> list[bool]:
    """Which of these steps one start of a keeper publishes; a minute lies between two saves."""
    told: list[bool] = []
    persister = Persister(store, Keep(last=1), lambda _, reason: told.append(reason is None))
    now_s = count(0.0, 60.0)
    for step in steps:
        persister.clock = partial(float, next(now_s))
        persister.work_one(job_at(step))
    persister.stop()
    return told


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """Room for one that stays, two that wait to be swept, one that is written: docs/sizing.md."""
    disk = LocalStore(tmp_path / "root")
    save_steps(disk, [0])
    live = sum(disk.size_bytes(path) for path in paths_in(disk, "steps"))
    root = Small(disk, image_bytes(disk) + 3 * live)
    assert outcomes(root, 1, 2, 3, 4, 5) == [True] * 5
    return root


def test_what_a_killed_keeper_was_writing_does_not_take_the_room_for_good(small: Small) -> None:
    with suppress(Stopped):
        outcomes(KilledAtTheManifest(small), 6)
    assert outcomes(small, *range(7, 13)) == [False] * 3 + [True] * 3
    assert whole(small) == ["1-12"]


def test_what_waits_to_be_swept_when_a_keeper_ends_does_not_take_the_room_for_good(
    small: Small,
) -> None:
    assert outcomes(small, 6) == [True]
    assert outcomes(small, *range(7, 14)) == [False] * 3 + [True] * 4
    assert whole(small) == ["1-13"]


def test_a_policy_that_keeps_less_makes_room_on_a_full_disk(tmp_path: Path) -> None:
    disk = LocalStore(tmp_path / "root")
    save_steps(disk, range(6))
    full = Small(disk, image_bytes(disk))
    assert outcomes(full, *range(6, 11)) == [False] * 3 + [True] * 2


def test_a_full_disk_costs_none_of_the_last_checkpoints(tmp_path: Path) -> None:
    disk = LocalStore(tmp_path / "root")
    save_steps(disk, range(3))
    full = Small(disk, 0)
    assert outcomes(full, *range(3, 8)) == [False] * 5
    assert whole(disk) == ["1-2"]


def test_what_a_drain_left_does_not_take_the_room_of_a_newer_one(tmp_path: Path) -> None:
    disk, cache = LocalStore(tmp_path / "root"), LocalStore(tmp_path / "cache")
    save_steps(cache, [0])
    with open_tiers(disk, cache) as (tier, persister):
        drain_all(tier, persister)
    save_steps(cache, [1])
    with open_tiers(NoManifests(disk), cache) as (tier, persister):
        assert [one.is_lost for one in drain_all(tier, persister)] == [False]
    save_steps(cache, [2])
    with open_tiers(Small(disk, image_bytes(disk)), cache) as (tier, persister):
        reasons = []
        for minute in range(4):
            persister.clock = partial(float, 60 * minute)
            reasons += [one.reason and "full" for one in drain_all(tier, persister)[:1]]
    assert reasons == ["full"] * 3 + [""]
    assert whole(disk) == ["1-0", "1-2"]


class Refusing(PassingStore):
    """A root that takes no more files from the n-th on; it notes what was begun."""

    def __init__(self, inner: LocalStore, left: int) -> None:
        super().__init__(inner)
        self.left = left
        self.begun: list[str] = []

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        if not self.left:
            raise StorageError("EIO", operation="create", path=path, url=self.url)
        self.left -= 1
        self.begun.append(path)
        return self.inner.create(path, size_bytes, aside=aside)


def test_what_is_copied_of_a_checkpoint_that_waits_stays_while_newer_ones_are_published(
    tmp_path: Path,
) -> None:
    root, cache = LocalStore(tmp_path / "root"), LocalStore(tmp_path / "cache")
    save_steps(cache, [0])
    truth = all_contents(cache)
    failing = Refusing(root, 3)  # of four
    with open_tiers(failing, cache) as (tier, persister):
        assert [one.is_lost for one in drain_all(tier, persister)] == [False]
        failing.left = 100
        for step in range(1, 6):
            persister.work_one(job_at(step))
        failing.begun.clear()
        assert [one.reason for one in drain_all(tier, persister)] == [""]
    assert len(failing.begun) == 1
    assert truth.items() <= all_contents(root).items()


def test_it_is_told_once_that_a_damaged_manifest_keeps_all_files_from_removal() -> None:
    root = MemoryStore("root")
    save_steps(root, [0])
    change(root, "manifests/1-0.json", 50)
    with listening() as heard:
        assert outcomes(root, *range(1, 6)) == [True] * 5
    (told,) = [one.message for one in heard if isinstance(one, Warned)]
    assert "manifests/1-0.json" in told and "holdfast repair" in told
    assert len(root.list("steps")) == 6


@pytest.mark.promise
@pytest.mark.parametrize("has_root", [True, False])
def test_a_layout_that_is_damaged_in_the_cache_is_the_roots_or_the_checkpoint_is_lost(
    has_root: bool,
) -> None:
    root, cache = MemoryStore("root"), MemoryStore("cache")
    save_steps(cache, [0])
    if has_root:
        with open_tiers(root, cache) as (tier, persister):
            drain_all(tier, persister)
    save_steps(cache, [1])
    (layout,) = cache.list("layouts")
    change(cache, f"layouts/{layout}", 100)
    with open_tiers(root, cache) as (tier, persister):
        found = drain_all(tier, persister)
    assert [one.is_lost for one in found] == ([False] if has_root else [True, True])
    assert [m.step for m in catalogue(root).manifests] == ([0, 1] if has_root else [])
