"""What is read is what was saved, bit for bit, or the reading ends with the reason."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.catalogue import find_manifest
from holdfast.errors import (
    ChecksumMismatch,
    CoverageError,
    FormatError,
    StorageError,
    UsageError,
)
from holdfast.format import checksum
from holdfast.format.image import fill_in, plan_image
from holdfast.format.manifest import Generation, Manifest
from holdfast.geometry import leaf_classes as forms
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.layout import Layout
from holdfast.geometry.ownership import Owned
from holdfast.protocol.arena import IMAGE_START, SlotFile
from holdfast.protocol.image_plan import image_items
from holdfast.protocol.messages import HoldingPart
from holdfast.restore.planning import plan
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading import read
from holdfast.restore.reading import read as move
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.restore.reading.read import CARRIERS, read_values, read_wants
from holdfast.restore.reading.stored import choose_stored, open_stored
from holdfast.restore.restore import sampled_ranks
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
from support.models.layouts import layouts

SMALL = Layout(2, (split_leaf("b", "BF16", (5,), 2), split_leaf("w", "F32", (6, 7), 2)))


def random_leaves(layout: Layout, seed: int = 0) -> dict[str, Array]:
    return {
        leaf.name: random_leaf(leaf.dtype, leaf.shape, seed + number)
        for number, leaf in enumerate(layout.leaves)
    }


def room_for(layout: Layout, wants: list[Want]) -> dict[int, Array]:
    dtypes = {leaf.name: leaf.dtype for leaf in layout.leaves}
    return {
        want.key: np.zeros(want.box.shape, CARRIERS[ITEMSIZE[dtypes[want.leaf]]]) for want in wants
    }


def all_of(layout: Layout) -> list[Want]:
    return [Want(leaf.name, Box.whole(leaf.shape), n) for n, leaf in enumerate(layout.leaves)]


def fetch(checkpoint: Checkpoint, layout: Layout) -> dict[str, bytes]:
    """Every leaf, whole, as bytes."""
    wants = all_of(layout)
    found = room_for(layout, wants)
    read_wants(checkpoint, wants, found)
    return {want.leaf: found[want.key].tobytes() for want in wants}


def as_bytes(leaves: dict[str, Array]) -> dict[str, bytes]:
    return {name: leaf.tobytes() for name, leaf in leaves.items()}


class WatchedStore(MemoryStore):
    """Remembers which bytes of which file were read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        self.reads.append((path, offset_bytes, offset_bytes + len(buffer)))
        super().read_into(path, offset_bytes, buffer, is_shared=is_shared)


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """Blocks of 256 bytes, batches of 1 KiB: small checkpoints have several of both."""
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, 256, 1024)
        yield


def set_sizes(patch: pytest.MonkeyPatch, block_bytes: int, batch_bytes: int) -> None:
    for module in (checksum, plan, read, move):
        patch.setattr(module, "BLOCK_BYTES", block_bytes)
    patch.setattr(plan, "BATCH_BYTES", batch_bytes)


# ── the same values as were saved ────────────────────────────────────────────────────────────


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, list[Want]]:
    layout = draw(layouts())
    assume(not any("@" in leaf.name for leaf in layout.leaves))
    size = sum(int(np.prod(leaf.shape)) * ITEMSIZE[leaf.dtype] for leaf in layout.leaves)
    assume(size < 300_000)
    chosen = draw(st.lists(st.sampled_from(layout.leaves), max_size=6)) if layout.leaves else []
    wants = []
    for number, leaf in enumerate(chosen):
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in leaf.shape]
        box = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
        wants.append(Want(leaf.name, box, 10 * number))
    return layout, wants


@settings(max_examples=80)
@given(
    cases(),
    st.integers(0, 1 << 30),
    st.sampled_from([(256, 1024), (1000, 4000), (4096, 9000), (1 << 20, 16 << 20)]),
    st.sampled_from([100, 64 << 10]),
)
def test_any_box_of_any_layout_equals_the_slice_of_what_was_saved(
    case: tuple[Layout, list[Want]], seed: int, sizes: tuple[int, int], part_bytes: int
) -> None:
    layout, wants = case
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, *sizes)
        patch.setattr(forms, "PART_BYTES", part_bytes)
        leaves = random_leaves(layout, seed)
        store = MemoryStore()
        manifest = publish_checkpoint(store, layout, images_of(layout, leaves))
        found, heard = room_for(layout, wants), list[int]()
        size = read_wants(from_manifest(store, manifest), wants, found, on_bytes=heard.append)
    for want in wants:
        expected = leaves[want.leaf][want.box.slices()]
        assert found[want.key].tobytes() == expected.tobytes()
    assert sum(heard) == size
    assert size >= max((found[want.key].nbytes for want in wants), default=0)


def test_large_leaves_are_read_in_several_batches_by_several_threads() -> None:
    layout = Layout(2, (split_leaf("w", "F32", (3000, 1500), 2),))  # 18 MB
    leaves = random_leaves(layout)
    store = WatchedStore()
    manifest = publish_checkpoint(store, layout, images_of(layout, leaves))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "BATCH_BYTES", 4 << 20)
        checkpoint = from_manifest(store, manifest)
        assert fetch(checkpoint, layout) == as_bytes(leaves)
    assert len([1 for _, start, stop in store.reads if stop - start > 1 << 20]) >= 4
    assert all(stop - start <= 4 << 20 for _, start, stop in store.reads)


def test_the_plain_values_come_back() -> None:
    store = MemoryStore()
    values = b'{"shared":{"lr":0.5},"own":{}}'
    images = images_of(SMALL, random_leaves(SMALL), values=values)
    checkpoint = from_manifest(store, publish_checkpoint(store, SMALL, images))
    assert read_values(checkpoint, 1) == {"shared": {"lr": 0.5}, "own": {}, "aliases": {}}


# ── nothing is read unless everything is there ───────────────────────────────────────────────


class Holed(Layout):
    """Its last piece is missing, or there twice."""

    twice = False

    def owners(self, leaf_index: int) -> Owned:
        owned = super().owners(leaf_index)
        return (*owned, owned[-1]) if self.twice else owned[:-1]

    def owners_meeting(self, leaf_index: int, box: Box) -> Owned:
        return self.owners(leaf_index)  # what is wanted there is all of a leaf


class Doubled(Holed):
    twice = True


@pytest.mark.parametrize("kind", [Holed, Doubled])
def test_missing_or_overlapping_pieces_are_found_before_the_first_read(kind: type[Layout]) -> None:
    store = WatchedStore()
    manifest = publish_checkpoint(store, SMALL, images_of(SMALL, random_leaves(SMALL)))
    good = from_manifest(store, manifest)
    broken = Checkpoint(kind(2, SMALL.leaves), good.files, 2, good.identity)
    wants = all_of(SMALL)
    found = room_for(SMALL, wants)
    with pytest.raises(CoverageError):
        read_wants(broken, wants, found)
    assert store.reads == []
    assert not any(array.any() for array in found.values())


def test_a_piece_missing_from_an_image_is_found_before_any_data_are_read() -> None:
    store = WatchedStore()
    fewer = Layout(2, SMALL.leaves[:1])
    leaves = random_leaves(SMALL)
    manifest = publish_checkpoint(store, fewer, images_of(fewer, leaves))
    partial = from_manifest(store, manifest)
    checkpoint = Checkpoint(SMALL, partial.files, 2, partial.identity)
    wants = all_of(SMALL)
    found = room_for(SMALL, wants)
    with pytest.raises(CoverageError, match="no piece"):
        read_wants(checkpoint, wants, found)
    for rank in range(2):
        header = checkpoint.header(rank)
        data = header.data_start, header.data_start + header.table.offset
        for path, start, stop in store.reads:
            if path == checkpoint.files[rank].name:
                assert stop <= data[0] or start >= data[1]
    assert not any(array.any() for array in found.values())


def test_an_image_the_manifest_does_not_name_is_missed_before_any_data_are_read() -> None:
    store = WatchedStore()
    manifest = publish_checkpoint(store, SMALL, images_of(SMALL, random_leaves(SMALL)))
    short = msgspec.structs.replace(manifest, images=manifest.images[:1])
    wants = all_of(SMALL)
    found = room_for(SMALL, wants)
    with pytest.raises(FormatError, match="no image of rank 1"):
        read_wants(from_manifest(store, short), wants, found)
    assert not any(array.any() for array in found.values())


# ── damage ───────────────────────────────────────────────────────────────────────────────────


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@pytest.mark.usefixtures("small_blocks")
def test_a_flipped_bit_is_found_wherever_it_is() -> None:
    layout = Layout(1, (split_leaf("w", "F32", (30, 34), 1),))
    store = MemoryStore()
    manifest = publish_checkpoint(store, layout, images_of(layout, random_leaves(layout)))
    (image,) = manifest.images
    good = store.read(image.path)
    data_start = from_manifest(store, manifest).header(0).data_start
    table_start = data_start + from_manifest(store, manifest).header(0).table.offset
    read_stop = -(-layout.leaves[0].shape[0] * 34 * 4 // 256) * 256 + data_start
    header_text = good.index(b"}}") + 2
    for at in [*range(header_text), *range(header_text, len(good), 7), len(good) - 1]:
        store.publish(image.path, flipped(good, at, at % 8), replace=True)
        if read_stop <= at < table_start:
            continue  # in no block that is read: see test_verify
        with pytest.raises(FormatError) as caught:
            fetch(from_manifest(store, manifest), layout)
        if at >= 8:  # before that, the length of the header is nonsense
            assert isinstance(caught.value, ChecksumMismatch)
            assert image.path in str(caught.value)
    store.publish(image.path, good, replace=True)
    fetch(from_manifest(store, manifest), layout)


@pytest.mark.usefixtures("small_blocks")
def test_a_flipped_byte_in_the_values_is_found() -> None:
    store = MemoryStore()
    manifest = publish_checkpoint(store, SMALL, images_of(SMALL, random_leaves(SMALL)))
    image = manifest.images[0]
    good = store.read(image.path)
    header = from_manifest(store, manifest).header(0)
    for at in range(header.values.offset, header.values.stop):
        damaged = flipped(good, header.data_start + at)
        store.publish(image.path, damaged, replace=True)
        with pytest.raises(ChecksumMismatch, match=r"block \d+ of"):
            read_values(from_manifest(store, manifest), 0)


@pytest.mark.promise
@pytest.mark.usefixtures("small_blocks")
def test_the_block_that_changed_is_named() -> None:
    layout = Layout(1, (split_leaf("w", "U8", (2000,), 1),))
    store = MemoryStore()
    manifest = publish_checkpoint(store, layout, images_of(layout, random_leaves(layout)))
    path, good = manifest.images[0].path, store.read(manifest.images[0].path)
    start = from_manifest(store, manifest).header(0).data_start
    store.publish(path, flipped(good, start + 5 * 256 + 3), replace=True)
    with pytest.raises(ChecksumMismatch) as caught:
        fetch(from_manifest(store, manifest), layout)
    assert caught.value.fields == {"block": 5, "image": path}


@pytest.mark.parametrize("length", [0, 7, 8, 4095, 4096, 5000, -1])
def test_an_image_cut_short_is_refused(length: int) -> None:
    store = MemoryStore()
    manifest = publish_checkpoint(store, SMALL, images_of(SMALL, random_leaves(SMALL)))
    path = manifest.images[1].path
    store.publish(path, store.read(path)[:length], replace=True)
    with pytest.raises((FormatError, StorageError)):
        fetch(from_manifest(store, manifest), SMALL)


def test_a_size_that_cannot_be_true_is_refused_before_memory_is_taken() -> None:
    store = MemoryStore()
    manifest = publish_checkpoint(store, SMALL, images_of(SMALL, random_leaves(SMALL)))
    path, huge = manifest.images[1].path, 1 << 60
    true = fill_in(plan_image(image_items(SMALL, 1)), {}, 2)
    metadata = from_manifest(store, manifest).header(1).metadata
    claimed = fill_in(plan_image([*image_items(SMALL, 1), ("more", "U8", (huge,))]), metadata, 2)
    store.publish(path, claimed.header + bytes(true.size_bytes), replace=True)
    seal = checksum.text(checksum.checksum(claimed.header))
    ref = msgspec.structs.replace(
        manifest.images[1], size_bytes=claimed.size_bytes, header_xxh3=seal
    )
    manifest = msgspec.structs.replace(manifest, images=(manifest.images[0], ref))
    with pytest.raises(FormatError, match=r"has \d+ bytes, the manifest says"):
        from_manifest(store, manifest).table(1)


@pytest.mark.usefixtures("small_blocks")
def test_after_a_damaged_source_was_refused_the_next_one_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read, "_thread", threading.local())  # a thread that never read before
    # All in this thread, the first error kept: as whoever tries one source after another does.
    little = Layout(1, (split_leaf("w", "U8", (100,), 1),))
    more = Layout(1, (split_leaf("w", "U8", (900,), 1),))
    store, leaves = MemoryStore(), random_leaves(more)
    bad = publish_checkpoint(store, little, images_of(little, random_leaves(little)))
    images = images_of(more, leaves, generation=Generation(1, 1))
    good = publish_checkpoint(store, more, images, Generation(1, 1))
    path = bad.images[0].path
    start = from_manifest(store, bad).header(0).data_start
    store.publish(path, flipped(store.read(path), start), replace=True)
    with pytest.raises(ChecksumMismatch) as kept:
        fetch(from_manifest(store, bad), little)
    assert fetch(from_manifest(store, good), more) == as_bytes(leaves)
    assert kept.value.fields["block"] == 0


# ── an image is the one it is said to be ─────────────────────────────────────────────────────


def named_as(manifest: Manifest, rank: int, other: Manifest, other_rank: int) -> Manifest:
    """``manifest`` with its image of ``rank`` replaced, seals and all."""
    image = msgspec.structs.replace(other.images[other_rank], rank=rank)
    images = [image if ref.rank == rank else ref for ref in manifest.images]
    return msgspec.structs.replace(manifest, images=tuple(images))


def two_steps(store: MemoryStore) -> tuple[Manifest, Manifest]:
    first = images_of(SMALL, random_leaves(SMALL, 1), generation=Generation(1, 4))
    second = images_of(SMALL, random_leaves(SMALL, 2), generation=Generation(1, 8), attempt="a1")
    return (
        publish_checkpoint(store, SMALL, first, Generation(1, 4)),
        publish_checkpoint(store, SMALL, second, Generation(1, 8), attempt="a1"),
    )


def test_the_image_of_another_step_is_refused_though_all_its_checksums_are_right() -> None:
    store = MemoryStore()
    old, new = two_steps(store)
    with pytest.raises(FormatError, match="is of step '4', '8' was expected") as caught:
        fetch(from_manifest(store, named_as(new, 1, old, 1)), SMALL)
    assert type(caught.value) is FormatError


def test_the_image_of_another_rank_is_refused_though_all_its_checksums_are_right() -> None:
    store = MemoryStore()
    _, new = two_steps(store)
    with pytest.raises(FormatError, match="is of rank '0', '1' was expected"):
        fetch(from_manifest(store, named_as(new, 1, new, 0)), SMALL)


@pytest.mark.promise
@pytest.mark.parametrize(
    ("name", "other"), [("incarnation", 2), ("attempt", "b7"), ("world", 3), ("step", 9)]
)
def test_an_image_of_another_identity_is_refused(name: str, other: object) -> None:
    store = MemoryStore()
    _, new = two_steps(store)
    changed = msgspec.structs.replace(new, **{name: other})
    with pytest.raises(FormatError, match=f"is of {name} "):
        fetch(from_manifest(store, changed), SMALL)


def test_an_image_file_put_in_the_place_of_another_is_refused() -> None:
    store = MemoryStore()
    old, new = two_steps(store)
    store.publish(new.images[1].path, store.read(old.images[1].path), replace=True)
    with pytest.raises(ChecksumMismatch, match="header of"):
        fetch(from_manifest(store, new), SMALL)


@pytest.mark.promise
def test_a_layout_file_put_in_the_place_of_another_is_refused() -> None:
    store = MemoryStore()
    _, new = two_steps(store)
    other = Layout(2, SMALL.leaves[:1])
    store.publish(f"layouts/{new.layout}.json", other.to_json(), replace=True)
    with pytest.raises(ChecksumMismatch, match="layout"):
        from_manifest(store, new)


# ── the same from memory ─────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class Held:
    directory: Path
    generation: HoldingPart
    slots: list[SlotFile]


@pytest.fixture
def held(arena_dir: Path) -> Held:
    images = images_of(SMALL, random_leaves(SMALL), generation=Generation(1, 3))
    generation, slots = slots_in(arena_dir, SMALL, images, Generation(1, 3))
    return Held(arena_dir, generation, slots)


def test_a_generation_in_memory_is_read_like_a_stored_one(held: Held) -> None:
    found = fetch(from_memory(held.directory, held.generation), SMALL)
    assert found == as_bytes(random_leaves(SMALL))


def test_a_bit_flipped_in_memory_is_found(held: Held) -> None:
    start = from_memory(held.directory, held.generation).header(1).data_start
    memory = held.slots[1].image
    for at in (0, 8, 100, start, start + 40, len(memory) - 8 * 512, len(memory) - 1):
        memory[at] ^= 0x10
        with pytest.raises(FormatError):
            fetch(from_memory(held.directory, held.generation), SMALL)
        memory[at] ^= 0x10
    assert fetch(from_memory(held.directory, held.generation), SMALL)


def test_a_slot_filled_anew_with_another_step_is_refused(held: Held) -> None:
    later = images_of(SMALL, random_leaves(SMALL), generation=Generation(1, 4))[1]
    held.slots[1].image[: len(later)] = later
    with pytest.raises(FormatError):
        fetch(from_memory(held.directory, held.generation), SMALL)


def test_a_slot_shorter_than_its_image_is_refused(held: Held) -> None:
    first, second = held.generation.images
    room = held.slots[1].capacity_bytes
    longer = msgspec.structs.replace(second, image_bytes=room + 1)
    claimed = msgspec.structs.replace(held.generation, images=(first, longer))
    with pytest.raises(FormatError, match="shorter than the image"):
        from_memory(held.directory, claimed)
    assert held.slots[1].path.stat().st_size == IMAGE_START + room


# ── of many images only those that have something of it ──────────────────────────────────────


def test_only_the_headers_of_images_that_the_plan_needs_are_read() -> None:
    layout = Layout(64, tuple(split_leaf(f"w{n}", "F32", (128, 3), 64) for n in range(3)))
    leaves, store = random_leaves(layout), WatchedStore()
    manifest = publish_checkpoint(store, layout, images_of(layout, leaves))
    checkpoint = from_manifest(store, manifest)
    store.reads.clear()
    wants = [Want(f"w{n}", Box((39, 1), (44, 2)), n) for n in range(3)]
    found = room_for(layout, wants)
    read_wants(checkpoint, wants, found)
    assert all((found[n] == leaves[f"w{n}"][39:44, 1:2]).all() for n in range(3))
    assert {path for path, _, _ in store.reads} == {manifest.images[n].path for n in range(19, 22)}
    assert sorted(checkpoint._headers) == [19, 20, 21]


class Listening(MemoryStore):
    """Remembers which files were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        self.opened.append(path)
        return super().read(path, offset_bytes, size_bytes)


def test_a_rank_that_was_told_what_to_restore_reads_that_manifest_and_no_other() -> None:
    store, images = Listening(), images_of(SMALL, random_leaves(SMALL))
    for step in range(5):
        publish_checkpoint(store, SMALL, images, Generation(1, step), attempt=f"a{step}")
    _, candidates = choose_stored(store, None)
    store.opened.clear()
    opened = open_stored(store, candidates[1], 3)
    assert store.opened == ["manifests/1-3.json", f"layouts/{SMALL.hash}.json"]
    assert opened.files[1].name.startswith("steps/1-3-a3/")


@pytest.mark.promise
@pytest.mark.parametrize(("attempt", "seed"), [("b7", 0), ("a0", 1)])
def test_a_rank_that_finds_another_manifest_than_rank_0_under_the_same_name_refuses(
    attempt: str, seed: int
) -> None:
    generation, mine, theirs = Generation(1, 3), MemoryStore(), MemoryStore()
    images = images_of(SMALL, random_leaves(SMALL))
    publish_checkpoint(mine, SMALL, images, generation, attempt="a0")
    others = images_of(SMALL, random_leaves(SMALL, seed))
    publish_checkpoint(theirs, SMALL, others, generation, attempt=attempt)
    _, (chosen,) = choose_stored(mine, None)
    assert open_stored(mine, chosen, 0).world == SMALL.world
    with pytest.raises(UsageError, match="the ranks see different directories"):
        open_stored(theirs, chosen, 1)


def test_a_manifest_under_anothers_name_is_not_taken_for_it() -> None:
    store, images = MemoryStore(), images_of(SMALL, random_leaves(SMALL))
    publish_checkpoint(store, SMALL, images, Generation(1, 3))
    store.publish("manifests/1-4.json", store.read("manifests/1-3.json"))
    assert find_manifest(store, Generation(1, 3)) is not None
    assert find_manifest(store, Generation(1, 4)) is None
    assert find_manifest(store, Generation(1, 5)) is None


@pytest.mark.parametrize(("world", "count"), [(1, 0), (2, 1), (64, 63), (65, 63), (16384, 63)])
def test_few_saved_ranks_are_all_looked_at_and_of_many_some(world: int, count: int) -> None:
    ranks = list(sampled_ranks(world))
    assert len(set(ranks)) == len(ranks) == count
    assert all(0 < rank < world for rank in ranks)
    assert world > 65 or max(ranks, default=world - 1) >= world - 2
