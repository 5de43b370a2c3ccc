"""An image is written while it arrives, and counts only if it is what was sealed."""

from __future__ import annotations

import struct
import threading
import time

import pytest

from holdfast.errors import ChecksumMismatch, HoldfastError, PersistFailed
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import parse_header
from holdfast.geometry.layout import Layout
from holdfast.persist import writer
from holdfast.persist.writer import Arrival, RingImage, WrittenImage, write_image
from holdfast.storage.base import ImageSink
from holdfast.storage.memory import MemoryStore
from support.checkpoints.images import images_of, random_leaf, seals, split_leaf

SHAPE = (5, 300_000)  # six blocks of float32


def image_of(seed: int = 0) -> bytearray:
    layout = Layout(1, (split_leaf("w", "F32", SHAPE, 1),))
    return images_of(layout, {"w": random_leaf("F32", SHAPE, seed)})[0]


def write(image: bytearray, arrival: Arrival) -> tuple[MemoryStore, WrittenImage]:
    store = MemoryStore()
    sink = store.create("image", len(image))
    written = write_image(sink, memoryview(image), arrival, "image")
    sink.finish()
    return store, written


def arrived(image: bytearray) -> Arrival:
    arrival = Arrival()
    arrival.copied(len(image))
    return arrival


def test_what_is_stored_is_what_was_sealed() -> None:
    image = image_of()
    store, written = write(image, arrived(image))
    assert store.read("image") == bytes(image)
    assert (written.header_xxh3, written.table_xxh3) == seals(image)


@pytest.mark.parametrize("chunk_bytes", [BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_no_byte_is_written_before_it_arrived(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CHUNK_BYTES", chunk_bytes)
    final = image_of()
    image = bytearray(len(final))  # nothing of it is there yet
    arrival = Arrival()

    def copy() -> None:
        for stop in range(700_001, len(final) + 700_001, 700_001):
            stop = min(stop, len(final))
            image[:stop] = final[:stop]
            arrival.copied(stop)
            time.sleep(0.002)

    copier = threading.Thread(target=copy)
    copier.start()
    store, _ = write(image, arrival)
    copier.join()
    assert store.read("image") == bytes(final)


@pytest.mark.promise
@pytest.mark.parametrize("block", [0, 2, 5])
def test_a_bit_that_changes_between_seal_and_write_is_found(block: int) -> None:
    image = image_of()
    at = 4096 + block * BLOCK_BYTES + 77
    image[at] ^= 8
    with pytest.raises(ChecksumMismatch, match=f"block {block} "):
        write(image, arrived(image))


class _Restoring:
    """A sink that puts a byte right again as soon as it has stored the wrong one."""

    def __init__(self, sink: ImageSink, image: bytearray, at: int) -> None:
        self.sink, self.image, self.at = sink, image, at

    def write(self, offset_bytes: int, data: memoryview) -> None:
        self.sink.write(offset_bytes, data)
        if offset_bytes <= self.at < offset_bytes + len(data):
            self.image[self.at] ^= 1

    def finish(self) -> None:
        self.sink.finish()

    def abort(self) -> None:
        self.sink.abort()


@pytest.mark.parametrize("block", [0, 5])
def test_what_counts_is_what_was_handed_to_the_store_not_what_is_in_memory_later(
    block: int,
) -> None:
    image = image_of()
    (length,) = struct.unpack_from("<Q", image)
    at = 8 + length + block * BLOCK_BYTES + 100
    sink = _Restoring(MemoryStore().create("image", len(image)), image, at)
    image[at] ^= 1
    with pytest.raises(ChecksumMismatch, match=f"block {block} of image"):
        write_image(sink, memoryview(image), arrived(image), "image")


@pytest.mark.promise
def test_a_ring_is_freed_only_up_to_the_first_byte_that_storage_has_not_taken() -> None:
    image = image_of()
    (length,) = struct.unpack_from("<Q", image)
    header = parse_header(bytes(image[: 8 + length]), "image", len(image))
    start, ring_bytes = header.data_start, 2 * BLOCK_BYTES
    freed: list[int] = []
    ring = RingImage(
        memoryview(image)[:start], memoryview(bytearray(ring_bytes)), len(image), freed.append
    )
    ring.begin(header)
    first, second, third = (start + n * BLOCK_BYTES for n in range(3))
    ring.stored(second, third)  # of several writers the later one may be done first
    assert freed == [start]
    ring.stored(first, second)
    assert freed == [start, third]


def test_a_changed_table_is_found() -> None:
    image = image_of()
    image[-4096] ^= 1
    with pytest.raises(ChecksumMismatch):
        write(image, arrived(image))


def test_a_changed_header_is_found_or_told() -> None:
    image = image_of()
    expected = seals(image)
    image[image.index(b'"step"') + 1] ^= 1
    try:
        _, written = write(image, arrived(image))
    except HoldfastError:
        return
    assert (written.header_xxh3, written.table_xxh3) != expected  # what the keeper compares


def test_a_writer_that_waits_in_vain_ends_with_the_reason() -> None:
    image = image_of()
    arrival = Arrival()
    arrival.copied(2 * BLOCK_BYTES)
    threading.Timer(0.1, lambda: arrival.abort("rank 1 went away")).start()
    with pytest.raises(PersistFailed, match="rank 1 went away"):
        write(image, arrival)
