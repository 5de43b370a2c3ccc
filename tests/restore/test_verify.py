"""Verification: silent about a good checkpoint, and never silent about a damaged one."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from holdfast.catalogue import layout_path
from holdfast.format import checksum
from holdfast.format.manifest import Manifest
from holdfast.geometry.layout import Layout
from holdfast.geometry.ownership import Owned
from holdfast.restore.planning import plan
from holdfast.restore.reading import read, verify
from holdfast.restore.reading.images import from_manifest
from holdfast.storage.memory import MemoryStore
from support.checkpoints.images import images_of, publish_checkpoint, random_leaf, split_leaf

LAYOUT = Layout(2, (split_leaf("b", "BF16", (6,), 2), split_leaf("w", "F32", (40, 50), 2)))
LEAVES = {"b": random_leaf("BF16", (6,), 1), "w": random_leaf("F32", (40, 50), 2)}


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (checksum, plan, read):
            patch.setattr(module, "BLOCK_BYTES", 256)
        yield


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def manifest(store: MemoryStore) -> Manifest:
    return publish_checkpoint(store, LAYOUT, images_of(LAYOUT, LEAVES))


def faults(store: MemoryStore, manifest: Manifest, *, deep: bool = False) -> str:
    """The one fault found, in words; "" when there is none."""
    found = verify.verify(store, manifest, deep=deep).faults
    assert len(found) <= 1, found
    return "".join(found)


def flip(store: MemoryStore, path: str, at: int) -> None:
    data = bytearray(store.read(path))
    data[at] ^= 0x40
    store.publish(path, bytes(data), replace=True)


def test_a_good_checkpoint_has_no_faults(store: MemoryStore, manifest: Manifest) -> None:
    for deep in (False, True):
        report = verify.verify(store, manifest, deep=deep)
        assert report.faults == ()
        assert report.images == 2
    data_bytes = sum(from_manifest(store, manifest).header(rank).table.offset for rank in (0, 1))
    assert report.size_bytes == data_bytes
    assert report.blocks == data_bytes // 256


def test_a_deep_check_tells_how_far_it_is(store: MemoryStore, manifest: Manifest) -> None:
    heard: list[tuple[int, int]] = []
    report = verify.verify(store, manifest, deep=True, progress=lambda *at: heard.append(at))
    assert heard == sorted(heard)
    assert len(heard) > 2
    assert heard[-1] == (report.size_bytes, report.size_bytes)


# ── what a shallow check finds, and a deep one too ───────────────────────────────────────────


@pytest.fixture(params=[False, True], ids=["shallow", "deep"])
def deep(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_missing_image(store: MemoryStore, manifest: Manifest, deep: bool) -> None:
    store.remove(manifest.images[1].path)
    assert manifest.images[1].path in faults(store, manifest, deep=deep)


@pytest.mark.parametrize("change", [-1, -4096, 1, 4096])
def test_an_image_of_another_length(
    store: MemoryStore, manifest: Manifest, deep: bool, change: int
) -> None:
    path, size = manifest.images[1].path, manifest.images[1].size_bytes
    resized = store.read(path)[: size + change].ljust(size + change, b"\0")
    store.publish(path, resized, replace=True)
    said = faults(store, manifest, deep=deep)
    assert path in said
    assert f"{size + change} bytes" in said and f"{size}" in said


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_header_length_that_changed(
    store: MemoryStore, manifest: Manifest, deep: bool, at: int
) -> None:
    flip(store, manifest.images[0].path, at)
    assert manifest.images[0].path in faults(store, manifest, deep=deep)


@pytest.mark.parametrize("at", [8, 40, 300, 4000])
def test_a_header_that_changed(store: MemoryStore, manifest: Manifest, deep: bool, at: int) -> None:
    flip(store, manifest.images[0].path, at)
    assert f"header of {manifest.images[0].path}" in faults(store, manifest, deep=deep)


@pytest.mark.parametrize("at", [-1, -2000, -4096])
def test_a_block_table_that_changed(
    store: MemoryStore, manifest: Manifest, deep: bool, at: int
) -> None:
    flip(store, manifest.images[1].path, at)
    assert f"block table of {manifest.images[1].path}" in faults(store, manifest, deep=deep)


def test_plain_values_that_changed(store: MemoryStore, manifest: Manifest, deep: bool) -> None:
    header = from_manifest(store, manifest).header(0)
    flip(store, manifest.images[0].path, header.data_start + header.values.offset)
    assert "block" in faults(store, manifest, deep=deep)


def test_plain_values_that_are_not_an_object(store: MemoryStore, deep: bool) -> None:
    images = images_of(LAYOUT, LEAVES, values=b"[1]")
    found = verify.verify(store, publish_checkpoint(store, LAYOUT, images), deep=deep).faults
    assert ["Expected `object`" in fault for fault in found] == [True, True]


def test_a_missing_layout(store: MemoryStore, manifest: Manifest, deep: bool) -> None:
    store.remove(layout_path(manifest.layout))
    assert layout_path(manifest.layout) in faults(store, manifest, deep=deep)


def test_a_layout_that_changed_at_any_byte_is_refused_or_means_the_same(
    store: MemoryStore, manifest: Manifest
) -> None:
    path = layout_path(manifest.layout)
    for at in range(len(LAYOUT.to_json())):
        flip(store, path, at)
        assert faults(store, manifest) or from_manifest(store, manifest).layout == LAYOUT
        flip(store, path, at)
    assert not faults(store, manifest)


def test_an_image_without_a_piece_it_should_have(store: MemoryStore, deep: bool) -> None:
    # Every checksum is right, and the image calls itself of this layout; a leaf is not in it.
    fewer = Layout(2, LAYOUT.leaves[:1])
    images = images_of(LAYOUT, LEAVES) | {1: claiming(images_of(fewer, LEAVES)[1], fewer)}
    said = faults(store, publish_checkpoint(store, LAYOUT, images), deep=deep)
    assert "its part of w is missing" in said and "00001" in said


def claiming(image: bytearray, written_for: Layout) -> bytearray:
    """The image with the hash of LAYOUT in place of its own."""
    return image.replace(written_for.hash.encode(), LAYOUT.hash.encode())


def test_a_piece_of_another_size(store: MemoryStore, deep: bool) -> None:
    doubles = Layout(2, (LAYOUT.leaves[0], split_leaf("w", "F64", (40, 50), 2)))
    wide = LEAVES | {"w": random_leaf("F64", (40, 50), 2)}
    images = images_of(LAYOUT, LEAVES) | {0: claiming(images_of(doubles, wide)[0], doubles)}
    assert "its part of w is" in faults(store, publish_checkpoint(store, LAYOUT, images), deep=deep)


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda owned: owned[1:], "is not stored"), (lambda owned: (*owned, owned[0]), "twice")],
)
def test_an_element_stored_twice_or_not_at_all(
    store: MemoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    change: object,
    said: str,
) -> None:
    right = Layout.owners

    def wrong(layout: Layout, leaf_index: int) -> Owned:
        owned: Owned = change(right(layout, leaf_index))  # type: ignore[operator]
        return owned if leaf_index == 1 else right(layout, leaf_index)

    monkeypatch.setattr(Layout, "owners", wrong)
    assert said in faults(store, manifest)


def test_an_image_of_another_rank(store: MemoryStore, manifest: Manifest, deep: bool) -> None:
    first, _ = manifest.images
    swapped = msgspec.structs.replace(
        manifest, images=(first, msgspec.structs.replace(first, rank=1))
    )
    assert "is of rank '0', '1' was expected" in faults(store, swapped, deep=deep)


def test_a_manifest_that_names_no_image_of_a_rank(
    store: MemoryStore, manifest: Manifest, deep: bool
) -> None:
    short = msgspec.structs.replace(manifest, images=manifest.images[:1])
    assert faults(store, short, deep=deep)


def test_every_damaged_image_is_told_of(store: MemoryStore, manifest: Manifest) -> None:
    for image in manifest.images:
        flip(store, image.path, 20)
    found = verify.verify(store, manifest, deep=True).faults
    assert [image.path in fault for image, fault in zip(manifest.images, found, strict=True)]


# ── what only a deep check finds ─────────────────────────────────────────────────────────────


def test_a_deep_check_finds_a_flipped_bit_anywhere_in_the_data(
    store: MemoryStore, manifest: Manifest
) -> None:
    header = from_manifest(store, manifest).header(1)
    for at in [*range(0, header.table.offset, 97), header.table.offset - 1]:
        flip(store, manifest.images[1].path, header.data_start + at)
        assert f"block {at // 256} of" in faults(store, manifest, deep=True)
        flip(store, manifest.images[1].path, header.data_start + at)
    assert not faults(store, manifest, deep=True)


def test_a_shallow_check_reads_no_tensors(store: MemoryStore, manifest: Manifest) -> None:
    header = from_manifest(store, manifest).header(1)
    flip(store, manifest.images[1].path, header.data_start)
    report = verify.verify(store, manifest, deep=False)
    assert (report.faults, report.blocks, report.size_bytes) == ((), 0, 0)


def test_a_deep_check_goes_on_behind_a_stretch_with_a_fault(
    store: MemoryStore, manifest: Manifest
) -> None:
    header = from_manifest(store, manifest).header(0)
    for at in (0, 10 * 256, 11 * 256):
        flip(store, manifest.images[0].path, header.data_start + at)
    found = verify.verify(store, manifest, deep=True).faults
    assert [fault.split(" of ")[0] for fault in found] == ["block 0", "block 10"]
