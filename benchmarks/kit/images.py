"""Make sealed images as a capture makes them, with the facts that their rank tells of them."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.format.checksum import blocks, checksum, pack_table, text
from holdfast.format.image import Image
from holdfast.parity.planning.record import ImageFact


def sealed(
    image: Image, rank: int, fill: Callable[[memoryview], object]
) -> tuple[bytearray, ImageFact]:
    """The bytes of an image whose data are written by ``fill``, and its facts."""
    memory = bytearray(image.size_bytes)
    memory[: image.data_start] = image.header
    data = memoryview(memory)[image.data_start :]
    fill(data[: image.table_offset])
    sums = [checksum(data[a:b]) for _, a, b in blocks(0, image.blocks, image.table_offset)]
    data[image.table_offset :] = pack_table(sums, image.table_entries)
    return memory, ImageFact(
        rank,
        image.size_bytes,
        image.data_start,
        text(checksum(image.header)),
        text(checksum(data[image.table_offset :])),
        memoryview(image.header),
    )
