"""Headers that follow from the layout are computed, and are those that would have been read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ChecksumMismatch, FormatError, NotFound
from holdfast.format.manifest import Manifest
from holdfast.geometry.box import ITEMSIZE
from holdfast.geometry.layout import Layout
from holdfast.geometry.leaves import MIN_FROZEN_BYTES
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.restore.reading.read import read_values
from holdfast.storage.memory import MemoryStore
from support.checkpoints.images import (
    images_of,
    publish_checkpoint,
    random_leaf,
    split_leaf,
)
from support.models.layouts import layouts

SMALL = Layout(3, (split_leaf("b", "BF16", (5,), 3), split_leaf("w", "F32", (6, 7), 3)))


class Noting(MemoryStore):
    """Notes where each read begins, and how long it is."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        self.reads.append((path, offset_bytes, buffer.nbytes))
        super().read_into(path, offset_bytes, buffer, is_shared=is_shared)

    def heads(self, opened: Checkpoint) -> int:
        """How many images were read before their data."""
        starts = {opened.files[rank].name: opened.header(rank).data_start for rank in opened.files}
        noted, self.reads = list(self.reads), []
        return len({path for path, at, _ in noted if at < starts[path]})


def save(store: MemoryStore, layout: Layout, lengths: Sequence[int]) -> Manifest:
    leaves = {one.name: random_leaf(one.dtype, one.shape, 1) for one in layout.leaves}
    images = {}
    for rank, length in enumerate(lengths):
        values = b'{"own":{}}' + b" " * (length - 10)
        images[rank] = images_of(layout, leaves, values=values)[rank]
    return publish_checkpoint(store, layout, images)


def same(one: Checkpoint, other: Checkpoint) -> bool:
    return all(
        (one.header(rank), one.table(rank), read_values(one, rank))
        == (other.header(rank), other.table(rank), read_values(other, rank))
        for rank in one.files
    )


@given(layouts(), st.integers(10, 9000), st.data())
def test_a_computed_header_is_the_one_that_is_stored(
    layout: Layout, length: int, data: st.DataObject
) -> None:
    near = st.integers(max(10, length - 60), length + 60)
    lengths = data.draw(st.lists(near, min_size=layout.world, max_size=layout.world))
    store = Noting()
    manifest = save(store, layout, lengths)
    opened = from_manifest(store, manifest, plans_headers=True)
    assert same(opened, from_manifest(store, manifest))
    store.reads.clear()
    again = from_manifest(store, manifest, plans_headers=True)
    for rank in again.files:
        again.header(rank)
    reads = list(store.reads)
    assert store.heads(again) <= 1 + _far_apart(lengths)
    tables = [size for path, at, size in reads if at >= again.header(0).data_start]
    assert len(tables) == len(lengths)


def _far_apart(lengths: Sequence[int]) -> int:
    """How many lengths are too different from the one before to be tried."""
    return sum(abs(a - b) >= 64 for a, b in pairwise(lengths))


def test_where_values_are_much_longer_than_those_before_the_header_is_read() -> None:
    store = Noting()
    opened = from_manifest(store, save(store, SMALL, [500, 9000, 9010]), plans_headers=True)
    assert [opened.header(rank).values.size_bytes for rank in range(3)] == [500, 9000, 9010]
    assert store.heads(opened) == 2
    assert same(opened, from_manifest(store, save(Noting(), SMALL, [500, 9000, 9010])))


def test_a_header_that_another_writer_wrote_in_another_way_is_read() -> None:
    store = Noting()
    manifest = save(store, SMALL, [500] * 3)
    other = Layout(3, (split_leaf("b", "BF16", (5,), 3), split_leaf("w", "F32", (7, 6), 3)))
    opened = from_manifest(store, manifest, other, plans_headers=True)
    plain = from_manifest(store, manifest)
    assert all(opened.header(rank) == plain.header(rank) for rank in range(3))
    assert store.heads(opened) == 3


def test_what_is_left_beside_a_frozen_part_is_read() -> None:
    rows = MIN_FROZEN_BYTES // ITEMSIZE["F32"] // 4 * 3
    frozen = split_leaf("f", "F32", (rows, 8), 2, is_frozen=True)
    layout, store = Layout(2, (frozen, split_leaf("w", "F32", (6, 7), 2))), Noting()
    manifest = save(store, layout, [500] * 2)
    assert len(manifest.parts) == 2
    opened = from_manifest(store, manifest, plans_headers=True)
    assert same(opened, from_manifest(store, manifest))


@pytest.mark.promise
def test_an_image_whose_header_is_computed_is_held_to_its_length_and_its_table() -> None:
    store = Noting()
    manifest = save(store, SMALL, [500] * 3)
    path = manifest.images[1].path
    good = store.read(path)
    for bad, error, says in (
        (good + b"\0", FormatError, "the manifest says"),
        (good[:-1], FormatError, "the manifest says"),
        (good[:-4096] + b"\1" + good[-4095:], ChecksumMismatch, "block table"),
        (None, NotFound, path),
    ):
        store.remove(path)
        if bad is not None:
            store.publish(path, bad)
        opened = from_manifest(store, manifest, plans_headers=True)
        opened.header(0)
        with pytest.raises(error, match=says):
            opened.header(1)
    flipped = bytearray(good)
    flipped[opened.header(0).data_start + 3] ^= 1
    store.publish(path, bytes(flipped))
    opened = from_manifest(store, manifest, plans_headers=True)
    opened.header(0)
    with pytest.raises(ChecksumMismatch, match="block 0"):
        read_values(opened, 1)
