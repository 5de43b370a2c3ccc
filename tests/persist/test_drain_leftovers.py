"""What attempts and drains that were broken off left in a root becomes no checkpoint there."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.catalogue import catalogue
from holdfast.errors import StorageError
from holdfast.format.manifest import Generation
from holdfast.persist.pins import mend, pin
from holdfast.storage.base import ImageSink
from holdfast.storage.local import LocalStore
from holdfast.testing.faults import PassingStore, Stopped
from persist.test_drains import drain_all, open_tiers
from support.checkpoints.keeper_roots import all_contents, paths_in, save_steps


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
