"""Two hosts whose caches have one image, as of a cloned disk, publish nothing that is gone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.catalogue import catalogue
from holdfast.format.manifest import Manifest
from holdfast.keeper.cache_tier import CacheTier
from holdfast.keeper.jobs import RemoteImages
from holdfast.storage.memory import MemoryStore
from persist.test_shared_drains import open_pair
from support.checkpoints.keeper_roots import all_contents, change
from support.checkpoints.roots import whole


@pytest.mark.promise
def test_what_another_host_takes_away_with_its_damaged_copy_is_not_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, near, far = (MemoryStore(name) for name in ("root", "near", "far"))
    with open_pair(root, near, far) as pair:
        pair.cache(0)
        (manifest,) = catalogue(near).manifests
        image, copy_own, drain = manifest.images[1], CacheTier._copy_own, pair.other.drain
        near.publish(image.path, far.read(image.path))
        for part in manifest.parts[1:]:
            near.publish(part.path, far.read(part.path))
        change(far, image.path, 20_000)

        def drain_second(of: Manifest) -> Sequence[RemoteImages]:
            copy_own(pair.near, of, {0, 1})  # all of it is there when the other host begins
            return drain(of)

        monkeypatch.setattr(pair.other, "drain", drain_second)
        monkeypatch.setattr(CacheTier, "_copy_own", lambda *_: None)
        (failed,) = pair.drain_all()
        assert failed.reason and not failed.is_lost
        assert catalogue(root).manifests == ()
        monkeypatch.undo()
        pair.other.is_away = True
        assert [one.reason for one in pair.drain_all()] == [""]
    assert whole(root) == ["1-0"] and all_contents(root)
