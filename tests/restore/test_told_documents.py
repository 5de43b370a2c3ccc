"""However many hosts restore, few bytes of manifest and layout are read, and all have the same."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import msgspec
import pytest

from holdfast.errors import NotFound, UsageError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.manifest import FRONT_BYTES, Generation
from holdfast.geometry.layout import Layout
from holdfast.meeting import host_id
from holdfast.restore import storage_hold
from holdfast.restore.planning.holdings import Recovery
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.restore.reading.read import read_values
from holdfast.restore.reading.stored import overview_of, stored
from holdfast.restore.sources import StoredSources
from holdfast.restore.storage_hold import StorageHold
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import PassingStore
from support.checkpoints.images import images_of, publish_checkpoint, random_leaf, split_leaf
from support.runs.thread_worlds import Ranks, ThreadWorld

PER_HOST = 2
VALUES = b'{"shared":{"n":5},"own":{},"aliases":{}}'


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

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        super().read_into(path, offset_bytes, buffer, is_shared=is_shared)
        with self._turn:
            self.read_bytes[path] += buffer.nbytes


@pytest.mark.parametrize("hosts", [1, 2, 32, 33, 70])
def test_the_manifest_is_read_once_by_however_many_hosts(
    hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: ContextVar[str] = ContextVar("here")
    monkeypatch.setattr(storage_hold, "host_id", here.get)
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
    other, chosen = stored(overview_of(store))
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
    read = {path.split("/")[0] for path in store.read_bytes}
    assert opened.header(1).metadata["attempt"] == "a4"
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


@pytest.mark.parametrize("ranks", [1, 2, 3, 40])
def test_where_ranks_are_not_as_many_as_saved_the_first_image_is_read_for_all(ranks: int) -> None:
    """Its header, its block table and its values: every rank needs them."""
    saved, inner = Layout(2, (split_leaf("w", "F32", (2000, 301), 2),)), MemoryStore()
    leaves = {"w": random_leaf("F32", (2000, 301), 1)}
    manifest = publish_checkpoint(inner, saved, images_of(saved, leaves, values=VALUES))
    first = manifest.images[0]
    store, told = Counting(inner), Ranks(ranks)

    def restore(rank: int) -> object:
        offers = StoredSources(store, rank)
        (found,) = offers.first(ThreadWorld(told, rank), None, timeout_s=30)
        opened = offers.open(found)
        offers.let_go()
        return read_values(opened, 0), opened.header(0), opened.table(0)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(restore, range(ranks)))
    plain = from_manifest(inner, manifest)
    assert all(one == (read_values(plain, 0), plain.header(0), plain.table(0)) for one in found)
    header, most = plain.header(0), BLOCK_BYTES + header_bytes(plain)
    once = header_bytes(plain) + header.table.offset % BLOCK_BYTES
    if ranks == 2:  # each reads its own image, as a rule: here all read the first
        assert once < store.read_bytes[first.path] <= ranks * most
    else:
        assert store.read_bytes[first.path] <= once + header_bytes(plain)


def header_bytes(checkpoint: Checkpoint) -> int:
    """Header and block table of the first image, and 8 bytes that are read before them."""
    header = checkpoint.header(0)
    return 8 + header.data_start + header.table.size_bytes


@pytest.mark.promise
@pytest.mark.parametrize("part", ["header", "values", "table"])
def test_a_first_image_that_rank_0_finds_damaged_is_told_to_nobody(part: str) -> None:
    saved, store = Layout(2, (split_leaf("w", "F32", (2000, 301), 2),)), MemoryStore()
    leaves = {"w": random_leaf("F32", (2000, 301), 1)}
    manifest = publish_checkpoint(store, saved, images_of(saved, leaves, values=VALUES))
    path, header = manifest.images[0].path, from_manifest(store, manifest).header(0)
    at = {
        "header": 90,
        "values": header.data_start + header.values.offset + 3,
        "table": header.data_start + header.table.offset,
    }[part]

    class Damaging(PassingStore):
        """What is read for the second time is damaged, as memory may be, and later it is not."""

        reads = 0

        def read_into(
            self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
        ) -> None:
            super().read_into(path, offset_bytes, buffer, is_shared=is_shared)
            if offset_bytes <= at < offset_bytes + buffer.nbytes:
                self.reads += 1
                buffer[at - offset_bytes] ^= self.reads == (1 if part == "values" else 2)

    (chosen,) = stored(overview_of(store))
    hold = StorageHold(Damaging(store))
    _, documents = msgspec.msgpack.decode(hold.tell(Recovery(chosen), 3), type=tuple[bytes, bytes])
    hold.take(chosen, documents)
    opened = hold.open(chosen, 0)
    assert read_values(opened, 0) == read_values(from_manifest(store, manifest), 0)
    good = StorageHold(store)
    _, sound = msgspec.msgpack.decode(good.tell(Recovery(chosen), 3), type=tuple[bytes, bytes])
    assert len(sound) > len(documents) > 0
    store.remove(path)
    good.take(chosen, sound)
    with pytest.raises(NotFound):  # it is looked whether it is there
        good.open(chosen, 1).header(0)


@pytest.mark.promise
def test_rank_0_neither_tells_nor_opens_a_manifest_that_took_the_place_of_the_chosen_one() -> None:
    saved = Layout(2, (split_leaf("w", "F32", (4, 7), 2),))
    mine, theirs = MemoryStore(), MemoryStore()
    for store, seed in ((mine, 1), (theirs, 2)):
        leaves = {"w": random_leaf("F32", (4, 7), seed)}
        publish_checkpoint(store, saved, images_of(saved, leaves))
    (chosen,) = stored(overview_of(mine))
    hold = StorageHold(theirs)
    assert hold.acquire(chosen)
    assert hold.tell(Recovery(chosen), 2) == StorageHold(MemoryStore()).tell(Recovery(chosen), 2)
    with pytest.raises(UsageError, match="the ranks see different directories"):
        hold.open(chosen, 0)
