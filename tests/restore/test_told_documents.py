"""However many hosts restore, few bytes of manifest and layout are read, and all have the same."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import msgspec
import pytest

from holdfast.format.manifest import FRONT_BYTES, Generation
from holdfast.geometry.layout import Layout
from holdfast.meeting import host_id
from holdfast.restore import sources
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.stored import catalogue_of, stored
from holdfast.restore.sources import StorageHold, StoredSources
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import PassingStore
from support.checkpoints.images import images_of, publish_checkpoint, random_leaf, split_leaf
from support.runs.thread_worlds import Ranks, ThreadWorld

PER_HOST = 2


class Counting(PassingStore):
    """Counts the bytes that all ranks read of each file."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.read_bytes: Counter[str] = Counter()
        self._turn = threading.Lock()

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        found = super().read(path, offset_bytes, size_bytes)
        with self._turn:
            self.read_bytes[path] += len(found)
        return found


@pytest.mark.parametrize("hosts", [1, 2, 32, 33, 70])
def test_the_manifest_is_read_once_by_however_many_hosts(
    hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: ContextVar[str] = ContextVar("here")
    monkeypatch.setattr(sources, "host_id", here.get)
    inner, world = MemoryStore(), hosts * PER_HOST
    saved = Layout(world, (split_leaf("w", "F32", (world, 7), world),))
    publish_checkpoint(inner, saved, images_of(saved, {"w": random_leaf("F32", (world, 7), 1)}))
    store, ranks = Counting(inner), Ranks(world)

    def restore(rank: int) -> Checkpoint:
        here.set(f"host-{rank // PER_HOST}")
        offers = StoredSources(store, rank)
        (found,) = offers.first(ThreadWorld(ranks, rank), None, timeout_s=30)
        ranks.barrier.wait()
        try:
            return offers.open(found)
        finally:
            offers.let_go()

    with ThreadPoolExecutor(ranks.size) as pool:
        opened = list(pool.map(restore, range(ranks.size)))
    (manifest,) = (f"manifests/{name}" for name in inner.list("manifests"))
    size_bytes = inner.size_bytes(manifest)
    elsewhere = world - PER_HOST  # these look whether they see the same one
    assert store.read_bytes[manifest] == size_bytes + FRONT_BYTES * elsewhere
    assert store.read_bytes[manifest] <= size_bytes * (hosts if hosts <= 32 else -(-hosts // 32))
    layout = f"layouts/{saved.hash}.json"
    assert store.read_bytes[layout] == inner.size_bytes(layout)
    assert all(one.layout == saved and one.identity == opened[0].identity for one in opened)


def flipped(data: bytes) -> bytes:
    half = len(data) // 2
    return data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]


@pytest.mark.promise
@pytest.mark.parametrize("way", ["as it is", "manifest", "layout", "another", "nothing", "noise"])
def test_what_is_told_counts_only_where_it_is_what_rank_0_chose(way: str) -> None:
    store = Counting(MemoryStore())
    saved = Layout(2, (split_leaf("w", "F32", (4, 7), 2),))
    for step in (3, 4):
        images = images_of(
            saved,
            {"w": random_leaf("F32", (4, 7), step)},
            generation=Generation(1, step),
            attempt=f"a{step}",
        )
        publish_checkpoint(store, saved, images, Generation(1, step), attempt=f"a{step}")
    other, chosen = stored(catalogue_of(store))
    manifest, layout = (
        store.read(path) for path in ("manifests/1-4.json", f"layouts/{saved.hash}.json")
    )
    if way in ("manifest", "another"):
        manifest = flipped(manifest) if way == "manifest" else store.read("manifests/1-3.json")
    if way == "layout":
        layout = flipped(layout)
    told = zlib.compress(msgspec.msgpack.encode((host_id(), manifest, layout)))
    hold = StorageHold(store)
    hold.take(other if way == "nothing" else chosen, b"noise" if way == "noise" else told)
    store.read_bytes.clear()
    opened = hold.open(chosen, 1)
    assert opened.layout == saved and opened.identity["step"] == "4"
    assert opened.header(1).metadata["attempt"] == "a4"
    read = {path.split("/")[0] for path in store.read_bytes}
    assert (
        read
        == {
            "as it is": set(),
            "manifest": {"manifests", "layouts"},
            "another": {"manifests", "layouts"},
            "layout": {"layouts"},
            "nothing": {"manifests", "layouts"},
            "noise": {"manifests", "layouts"},
        }[way]
    )
