"""Reads images and parity shards in the memory of other hosts range by range from their keepers.

A keeper's offer was valid during the whole copy, or the read fails. Whether the bytes are those
captured, the block checksums tell: this module does not examine the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from holdfast.errors import FormatError
from holdfast.format.image import Header, header_size
from holdfast.format.manifest import ImageId
from holdfast.restore.planning.holdings import image_name
from holdfast.restore.reading.images import ImageFile, checked_header, checked_table
from holdfast.transport.client import Puller, WantedRange
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.http import image_path

#: Size of the first request: most headers are shorter, and arrive together with their length.
_FIRST_BYTES = 64 << 10


class Ranges(Protocol):
    """Bytes that are read in ranges; ``name`` as in errors."""

    name: str
    size_bytes: int
    is_mapped: bool

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """See ``holdfast.restore.reading.images.ImageFile``."""
        ...


def staged(source: Ranges, start: int, stop: int, staging: bytearray | memoryview) -> memoryview:
    """Return memory for these bytes of ``source``: in ``staging`` where it has room for them."""
    if not 0 <= start <= stop <= source.size_bytes:
        raise FormatError(
            f"{source.name} has {source.size_bytes} bytes; bytes {start} to {stop} were asked for"
        )
    if len(staging) < stop - start:
        staging = bytearray(stop - start)
    return memoryview(staging)[: stop - start]


class PeerRanges:
    """A resource that a peer offers under ``path``, of a generation named as in 3-1200.

    Reads raise PeerError when the peer does not deliver, Fenced when this incarnation is over.
    Thread-safe.
    """

    is_mapped = False

    def __init__(
        self, puller: Puller, peer: Peer, path: str, generation: str, size_bytes: int, name: str
    ) -> None:
        self.name, self.size_bytes = name, size_bytes
        self._puller, self._peer = puller, peer
        self._path, self._generation = path, generation

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """See ``ImageFile``."""
        view = staged(self, start, stop, staging)
        wanted = WantedRange(self._peer, self._path, self._generation, start, view)
        self._puller.pull([wanted])
        return view


class PeerImage(PeerRanges, ImageFile):
    """An image in a slot of another host's arena: an ``ImageFile``."""

    def __init__(
        self, puller: Puller, peer: Peer, attempt: str, generation: str, image: ImageId
    ) -> None:
        super().__init__(
            puller,
            peer,
            image_path(attempt, image.rank),
            generation,
            image.image_bytes,
            image_name(peer.name, attempt, image.rank),
        )
        self.header_xxh3, self.table_xxh3 = image.header_xxh3, image.table_xxh3

    def check_length(self) -> None:
        """See ``ImageFile``: a peer refuses a range beyond its offer."""

    def open(self, expected: Mapping[str, str]) -> tuple[Header, tuple[int, ...]]:
        """See ``ImageFile``."""
        first = bytes(self.view(0, min(_FIRST_BYTES, self.size_bytes), bytearray()))
        data_start = header_size(first[:8], self.name, self.size_bytes)
        raw = first[:data_start]
        if len(raw) < data_start:
            raw += bytes(self.view(len(raw), data_start, bytearray()))
        header = checked_header(self, raw, expected)
        table = self.view(data_start + header.table.offset, self.size_bytes, bytearray())
        return header, checked_table(self, header, bytes(table))
