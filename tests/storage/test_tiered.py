"""One root in two tiers: whose start a number is, and what is read when a tier does not answer."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.catalogue import catalogue, manifest_path
from holdfast.errors import StorageError
from holdfast.format.manifest import Generation, Incarnation, seal
from holdfast.storage.base import Store
from holdfast.storage.memory import MemoryStore
from holdfast.storage.tiered import TieredStore
from support.checkpoints.keeper_roots import Unreachable, save_steps


def cached(*steps: int) -> MemoryStore:
    store = MemoryStore("cache")
    save_steps(store, steps)
    return store


def start(store: Store, n: int, nonce: str, parent: tuple[int, int] | None = None) -> None:
    record = Incarnation(run_id="r", n=n, nonce=nonce, parent=parent, world=1, created_s=float(n))
    store.publish(f"incarnations/{n}.json", seal(record))


@pytest.mark.promise
def test_where_the_root_cannot_say_whose_start_it_is_that_is_its_error_and_not_absence() -> None:
    root, cache = Unreachable(MemoryStore("root")), cached(0)
    tiered = TieredStore(cache, root)
    path = manifest_path(Generation(1, 0))
    is_there = root.inner.exists

    def lose_the_root(path: str) -> bool:
        root.is_away = True  # between its answer that it has no manifest, and its record
        return is_there(path)

    root.inner.__dict__["exists"] = lose_the_root
    with pytest.raises(StorageError, match="503"):
        tiered.exists(path)
    root.is_away = False
    del root.inner.__dict__["exists"]
    assert tiered.exists(path)


@pytest.mark.promise
def test_of_two_starts_of_one_number_that_the_root_has_no_record_of_one_is_read() -> None:
    root, near, far = MemoryStore("root"), cached(0), MemoryStore("far")
    save_steps(far, [0, 1])
    path = "incarnations/1.json"
    far.remove(path)
    start(far, 1, "another")
    tiered = TieredStore(near, root)
    tiered.read_also(far, far)
    assert catalogue(tiered).manifests == catalogue(near).manifests
    assert tiered.read(path) == near.read(path)
    assert not tiered.exists(manifest_path(Generation(1, 1)))
    near.remove(path)  # now only the other says whose it is
    fresh = TieredStore(near, root)
    fresh.read_also(far, far)
    assert fresh.exists(manifest_path(Generation(1, 1)))


@pytest.mark.promise
def test_a_run_of_thousands_of_starts_is_read_from_its_cache_each_record_once() -> None:
    count = 3000
    root, cache = MemoryStore("root"), MemoryStore("cache")
    for n in range(1, count + 1):
        parent = (n - 1, n) if n > 1 else None
        for store in (root, cache):
            start(store, n, str(n), parent)
    for n in range(count - 5, count + 1):
        cache.publish(manifest_path(Generation(n, n)), b"")
    reads = Counter[str]()
    read = root.read
    root.__dict__["read"] = lambda path, *given: (reads.update([path]), read(path, *given))[1]
    tiered = TieredStore(cache, root)
    assert len(tiered.list("manifests")) == 6
    assert max(reads.values()) == 1 and len(reads) == count
