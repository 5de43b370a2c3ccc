"""Every way from an image to a destination gives the bytes that were saved, or an error."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import ChecksumMismatch, StorageError
from holdfast.format import checksum
from holdfast.format.manifest import Generation
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.layout import Layout
from holdfast.restore.destinations import DeviceTensor, Staging
from holdfast.restore.planning import plan
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading import read
from holdfast.restore.reading import read as move
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.restore.reading.read import CARRIERS, read_wants
from holdfast.storage import direct as past_cache
from holdfast.storage import local
from holdfast.storage.base import Store
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from support.checkpoints.images import (
    Array,
    from_memory,
    images_of,
    publish_checkpoint,
    random_leaf,
    slots_in,
    split_leaf,
)

DTYPES = ("F32", "BF16", "U8", "F64", "C128")
_numbers = itertools.count()


# ── sources: where the bytes lie ─────────────────────────────────────────────────────────────


@dataclass
class Source:
    """A checkpoint, its damage, and what must be patched for its way."""

    checkpoint: Callable[[], Checkpoint]
    flip: Callable[[int, int], None]  # (rank, byte of the data)


def in_store(directory: Path, layout: Layout, leaves: dict[str, Array], kind: str) -> Source:
    store: Store = MemoryStore()
    if kind != "in memory":
        home = Path(os.environ["HOLDFAST_ARENA_DIR"]) if kind == "buffered" else directory
        store = LocalStore(home / f"root-{next(_numbers)}")
    manifest = publish_checkpoint(store, layout, images_of(layout, leaves))

    def flip(rank: int, at: int) -> None:
        path = manifest.images[rank].path
        at += from_manifest(store, manifest).header(rank).data_start
        byte = bytes([store.read(path, at, 1)[0] ^ 4])
        if isinstance(store, LocalStore):
            with open(store.url.removeprefix("file://") + "/" + path, "r+b") as file:
                file.seek(at)
                file.write(byte)
        else:
            data = store.read(path)
            store.publish(path, data[:at] + byte + data[at + 1 :], replace=True)

    return Source(lambda: from_manifest(store, manifest), flip)


def in_arena(_directory: Path, layout: Layout, leaves: dict[str, Array], _: str) -> Source:
    arena = Path(os.environ["HOLDFAST_ARENA_DIR"]) / f"arena-{next(_numbers)}"
    images = images_of(layout, leaves, generation=Generation(1, 3))
    held, slots = slots_in(arena, layout, images, Generation(1, 3))

    def flip(rank: int, at: int) -> None:
        slots[rank].image[from_memory(arena, held).header(rank).data_start + at] ^= 4

    return Source(lambda: from_memory(arena, held), flip)


SOURCES = {"in memory": in_store, "buffered": in_store, "direct": in_store, "arena": in_arena}


@contextmanager
def ways(
    kind: str, block_bytes: int, blocks: int, straight: int = 2, run_bytes: int = 64
) -> Iterator[None]:
    """Sizes so small that every way is taken; a cache that has everything, or nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (checksum, plan, read, move):
            patch.setattr(module, "BLOCK_BYTES", block_bytes)
        patch.setattr(plan, "BATCH_BYTES", block_bytes * blocks)
        patch.setattr(plan, "STRAIGHT_BLOCKS", straight)
        patch.setattr(plan, "RUN_BYTES", run_bytes)
        patch.setattr(local, "_DIRECT_BYTES", 1)
        patch.setattr(local, "is_cached", lambda *_: kind != "direct")
        yield


# ── destinations: where they go ──────────────────────────────────────────────────────────────


class Deferred:
    """Copies that are made at the last moment their order allows, as a slow device would."""

    def __init__(self) -> None:
        self._asked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._done = 0
        self.taken_bytes = 0
        self.is_begun = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        self.is_begun = True

    def memory(self, size_bytes: int) -> torch.Tensor:
        self.taken_bytes += size_bytes
        return torch.full((size_bytes,), 0x5A, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert self.is_begun
        assert to.shape == source.shape
        assert to.dtype == source.dtype
        self._asked.append((to, source))

    def mark(self) -> Callable[[], None]:
        stop = len(self._asked)
        return lambda: self._run(stop)

    def end(self) -> None:
        self._run(len(self._asked))

    def _run(self, stop: int) -> None:
        with self._lock:  # a device does one after the other
            while self._done < stop:
                to, source = self._asked[self._done]
                to.copy_(source)
                self._done += 1


def room(kind: str, box: Box, itemsize: int, copies: Deferred) -> tuple[Any, Callable[[], Array]]:
    """A destination for ``box``, and what to call for its elements when it is filled."""
    dtype = np.dtype(CARRIERS[itemsize])
    shape = box.shape
    if kind in ("late", "late turned"):
        turned = torch.zeros(shape[::-1], dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
        plain = torch.zeros(shape, dtype=turned.dtype)
        tensor = (
            turned.permute(tuple(reversed(range(len(shape))))) if kind == "late turned" else plain
        )
        return DeviceTensor(tensor, cast(Any, copies)), lambda: tensor.numpy()
    if kind == "unaligned":
        raw = np.zeros(box.volume * itemsize + 1, np.uint8)[1:]
        array: Array = raw.view(np.uint8)
        array = np.ndarray(shape, dtype, buffer=raw.data)
    elif kind == "turned":
        array = np.zeros(shape[::-1], dtype).T
    elif kind == "with gaps":
        array = np.zeros((*shape, 2), dtype)[..., 0]
    else:
        array = np.zeros(shape, dtype)
    return array, lambda: array


ROOMS = ("plain", "unaligned", "turned", "with gaps", "late", "late turned")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, list[tuple[Want, str]]]:
    world = draw(st.integers(1, 3))
    leaves = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 40), max_size=3)))
        leaves.append(split_leaf(f"w{number}", draw(st.sampled_from(DTYPES)), shape, world))
    wants: list[tuple[Want, str]] = []
    for leaf in draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=5)):
        box = Box.whole(leaf.shape)
        if draw(st.booleans()):
            ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in leaf.shape]
            box = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
        wants.append((Want(leaf.name, box, 3 * len(wants)), draw(st.sampled_from(ROOMS))))
    return Layout(world, tuple(leaves)), wants


Case = tuple[Layout, list[tuple[Want, str]]]


def fill(checkpoint: Checkpoint, case: Case, *, parts: int = 2) -> dict[int, Array]:
    """What ``read_wants`` makes of the case's destinations."""
    layout, wants = case
    item = {leaf.name: ITEMSIZE[leaf.dtype] for leaf in layout.leaves}
    copies: Any = Deferred()
    rooms = {want.key: room(kind, want.box, item[want.leaf], copies) for want, kind in wants}
    staging = Staging(copies, parts * plan.BATCH_BYTES, plan.BATCH_BYTES)
    copies.begin()
    destinations = {key: found for key, (found, _) in rooms.items()}
    try:
        read_wants(checkpoint, [want for want, _ in wants], destinations, borrow=staging.borrow)
    finally:
        copies.end()
    assert copies.taken_bytes <= parts * plan.BATCH_BYTES
    return {key: found() for key, (_, found) in rooms.items()}


def random_leaves(layout: Layout, seed: int) -> dict[str, Array]:
    return {
        leaf.name: random_leaf(leaf.dtype, leaf.shape, seed + number)
        for number, leaf in enumerate(layout.leaves)
    }


SIZES = st.sampled_from([(64, 4), (256, 4), (1000, 6), (4096, 8)])


@pytest.mark.parametrize("kind", SOURCES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cases(), SIZES, st.integers(1, 3), st.sampled_from([1, 64, 1 << 20]), st.integers(0, 99))
def test_any_destination_is_filled_with_what_was_saved(
    kind: str,
    tmp_path: Path,
    case: Case,
    sizes: tuple[int, int],
    straight: int,
    run: int,
    seed: int,
) -> None:
    layout, wants = case
    with ways(kind, *sizes, straight=straight, run_bytes=run):
        leaves = random_leaves(layout, seed)
        found = fill(SOURCES[kind](tmp_path, layout, leaves, kind).checkpoint(), case)
    for want, _ in wants:
        expected = leaves[want.leaf][want.box.slices()]
        assert found[want.key].tobytes() == expected.tobytes()


# ── damage is found on every way ─────────────────────────────────────────────────────────────

ONE = Layout(
    1,
    (
        split_leaf("large", "U8", (100, 40), 1),  # nearly 16 blocks: edges, and whole ones
        split_leaf("little", "U8", (30,), 1),
        split_leaf("more", "U8", (30,), 1),
    ),
)
WHOLE = [Want(leaf.name, Box.whole(leaf.shape), n) for n, leaf in enumerate(ONE.leaves)]
HALF = [Want("large", Box((0, 20), (100, 40)), 0)]


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("place", ROOMS)
@pytest.mark.parametrize("wants", [WHOLE, HALF], ids=["whole", "half of each row"])
@pytest.mark.parametrize("run_bytes", [1, 1 << 20], ids=["as runs", "as boxes"])
def test_a_flipped_byte_is_found_on_every_way(
    kind: str, place: str, wants: list[Want], run_bytes: int, tmp_path: Path
) -> None:
    leaves = random_leaves(ONE, 7)
    with ways(kind, 256, 4, run_bytes=run_bytes):
        case = ONE, [(want, place) for want in wants]
        source = SOURCES[kind](tmp_path, ONE, leaves, kind)
        found = fill(source.checkpoint(), case)
        assert all(
            found[w.key].tobytes() == leaves[w.leaf][w.box.slices()].tobytes() for w in wants
        )
        read_blocks = range(0, 4060 if wants is WHOLE else 4000, 256)
        for at in (block + 30 for block in read_blocks):
            source.flip(0, at)
            with pytest.raises(ChecksumMismatch, match=f"block {at // 256} of"):
                fill(source.checkpoint(), case)
            source.flip(0, at)
        fill(source.checkpoint(), case)


@pytest.mark.parametrize("kind", ["buffered", "direct"])
def test_a_file_cut_while_it_is_read_is_an_error(kind: str, tmp_path: Path) -> None:
    layout = Layout(1, (split_leaf("w", "U8", (50_000,), 1),))
    store = LocalStore(tmp_path)
    case = layout, [(Want("w", Box.whole((50_000,)), 0), "unaligned")]
    with ways(kind, 4096, 4):
        manifest = publish_checkpoint(store, layout, images_of(layout, random_leaves(layout, 1)))
        checkpoint = from_manifest(store, manifest)
        start = checkpoint.header(0).data_start
        path = tmp_path / manifest.images[0].path
        path.write_bytes(path.read_bytes()[: start + 21_000])
        with pytest.raises(StorageError, match="ends at byte"):
            fill(checkpoint, case)


# ── what a way costs ─────────────────────────────────────────────────────────────────────────


class WatchedStore(MemoryStore):
    """Remembers what was read, and into how much memory that was not the destination's."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[int, int, int]] = []

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        address = np.frombuffer(buffer, np.uint8).ctypes.data if len(buffer) else 0
        self.reads.append((address, offset_bytes, len(buffer)))
        super().read_into(path, offset_bytes, buffer, is_shared=is_shared)


def test_blocks_that_lie_whole_in_one_tensor_are_read_into_it_and_none_is_read_twice() -> None:
    layout = Layout(1, tuple(split_leaf(f"w{n}", "F32", (3 << 20,), 1) for n in range(3)))
    layout = Layout(1, (*layout.leaves, split_leaf("z", "U8", (100_000,), 1)))
    store, leaves = WatchedStore(), random_leaves(layout, 3)
    checkpoint = from_manifest(store, publish_checkpoint(store, layout, images_of(layout, leaves)))
    wants = [Want(leaf.name, Box.whole(leaf.shape), n) for n, leaf in enumerate(layout.leaves)]
    rooms: dict[int, Array] = {
        w.key: np.zeros(w.box.shape, CARRIERS[4 if w.key < 3 else 1]) for w in wants
    }
    header = checkpoint.header(0)
    store.reads.clear()
    read_wants(checkpoint, wants, rooms)
    assert all(rooms[w.key].tobytes() == leaves[w.leaf].tobytes() for w in wants)
    spans = [(room.ctypes.data, room.ctypes.data + room.nbytes) for room in rooms.values()]
    straight = sum(
        size for at, _, size in store.reads if any(a <= at and at + size <= b for a, b in spans)
    )
    blocks = sorted(
        block
        for _, offset, size in store.reads
        for block in range(
            (offset - header.data_start) >> 20, -(-(offset - header.data_start + size) >> 20)
        )
    )
    assert straight == 36 << 20
    assert blocks == list(range(37))


class SharingStore(LocalStore):
    """Remembers of which file bytes it was said that others read them too."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.said: list[tuple[int, bool]] = []

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        self.said.append((len(buffer), is_shared))
        super().read_into(path, offset_bytes, buffer, is_shared=is_shared)


@pytest.mark.parametrize(
    ("shared", "expected"), [(None, {False}), ({0}, {False, True}), ({0, 1, 2}, {True})]
)
def test_what_other_ranks_of_the_host_read_too_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: set[int] | None, expected: set[bool]
) -> None:
    monkeypatch.setattr(local, "is_cached", lambda *_: False)
    past: list[int] = []
    real = past_cache.fill_past_cache

    def fill(descriptor: int, offset_bytes: int, buffer: memoryview) -> int:
        past.append(len(buffer))
        return real(descriptor, offset_bytes, buffer)

    monkeypatch.setattr(local, "fill_past_cache", fill)
    layout = Layout(1, tuple(split_leaf(f"w{n}", "F32", (4, 2 << 20), 1) for n in range(3)))
    store, leaves = SharingStore(tmp_path), random_leaves(layout, 3)
    checkpoint = from_manifest(store, publish_checkpoint(store, layout, images_of(layout, leaves)))
    checkpoint.header(0)
    # One leaf that is wanted whole, and one of which others want the other columns.
    columns = Box((0, 0), (4, 1 << 18))
    boxes = [Box.whole((4, 2 << 20)), Box.whole((4, 2 << 20)), columns]
    wants = [
        Want(leaf.name, box, n)
        for n, (leaf, box) in enumerate(zip(layout.leaves, boxes, strict=True))
    ]
    rooms: dict[int, Array] = {w.key: np.zeros(w.box.shape, CARRIERS[4]) for w in wants}
    store.said.clear()
    past.clear()
    read_wants(checkpoint, wants, rooms, shared=shared)
    for want in wants:
        whole: Array = leaves[want.leaf].view(CARRIERS[4]).reshape(4, 2 << 20)
        assert np.array_equal(rooms[want.key], whole[want.box.slices()])
    assert {is_shared for _, is_shared in store.said} == expected
    assert sum(past) == sum(size for size, is_shared in store.said if not is_shared)


def test_memory_beside_the_destinations_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the process has at its peak: 200 MB in pieces of every kind, past the cache."""
    monkeypatch.setattr(local, "is_cached", lambda *_: False)
    leaves = [
        split_leaf("large", "U8", (120 << 20,), 1),
        split_leaf("rows", "U8", (40 << 10, 1 << 10), 1),
    ]
    leaves += [split_leaf(f"small{n:03}", "U8", (200_001,), 1) for n in range(200)]
    layout = Layout(1, tuple(leaves))
    store = LocalStore(tmp_path)
    values = {leaf.name: random_leaf("U8", leaf.shape, 1) for leaf in leaves}
    manifest = publish_checkpoint(store, layout, images_of(layout, values))
    wants = [Want(leaf.name, Box.whole(leaf.shape), n) for n, leaf in enumerate(layout.leaves)]
    rooms = {n: np.full(leaf.shape, 1, np.uint8) for n, leaf in enumerate(layout.leaves)}
    rooms[1] = np.full((*layout.leaves[1].shape, 2), 1, np.uint8)[..., 0]
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    read_wants(from_manifest(store, manifest), wants, rooms)
    assert _peak_bytes() - before < 64 << 20
    assert all(np.array_equal(rooms[w.key], values[w.leaf]) for w in wants)


def _peak_bytes() -> int:
    line = next(n for n in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in n)
    return int(line.split()[1]) << 10
