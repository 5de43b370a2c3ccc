"""Images and parity in the memory of other hosts, read range by range from their keepers.

What a keeper gives was offered all the time that it was copied, or nothing came of it. Whether it
is what was captured, the block checksums say: nothing here looks at the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from holdfast.errors import FormatError
from holdfast.format.image import Header, header_size
from holdfast.load.holdings import Image, image_name
from holdfast.load.source import checked_header, checked_table
from holdfast.peers.calling import Peer
from holdfast.peers.client import Puller, Wanted
from holdfast.peers.names import image_path

#: Most headers are shorter: header and its length then come in one request.
_FIRST_BYTES = 64 << 10


class Ranges(Protocol):
    """Bytes that are read in ranges; ``name`` as errors call them."""

    name: str
    size_bytes: int
    is_mapped: bool

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """See ``holdfast.load.source.ImageFile``."""
        ...


class PeerRanges:
    """What a peer offers under ``path``, of a generation named as in 3-1200.

    Its reads raise PeerError when the peer does not give it, Fenced when this incarnation is over.
    Any number of threads may read.
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
        if not 0 <= start <= stop <= self.size_bytes:
            raise FormatError(
                f"{self.name} has {self.size_bytes} bytes; bytes {start} to {stop} were asked for"
            )
        if len(staging) < stop - start:
            staging = bytearray(stop - start)
        view = memoryview(staging)[: stop - start]
        wanted = Wanted(self._peer, self._path, self._generation, start, view)
        self._puller.pull([wanted])
        return view


class PeerImage(PeerRanges):
    """An image in a slot of another host's arena: an ``ImageFile``."""

    def __init__(
        self, puller: Puller, peer: Peer, attempt: str, generation: str, image: Image
    ) -> None:
        super().__init__(
            puller, peer, image_path(attempt, image.rank), generation, image.image_bytes,
            image_name(peer.name, attempt, image.rank),
        )  # fmt: skip
        self.header_xxh3, self.table_xxh3 = image.header_xxh3, image.table_xxh3

    def check_length(self) -> None:
        """See ``ImageFile``: a peer gives no range beyond what it offers."""

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

    def block_name(self, number: int) -> str:
        """See ``ImageFile``."""
        return f"block {number} of {self.name}"
