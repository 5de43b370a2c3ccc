"""An image that no host has any more, read range by range out of what is left of its group.

The header is in every record of the group's parity. The block table is decoded first, and checked
against its seal; then every block that is decoded is checked against the table. So whatever is
wrong in a source is found, and by ``decoding`` replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from holdfast.errors import ChecksumMismatch, FormatError
from holdfast.format.checksum import BLOCK_BYTES, block_count, blocks, checksum, text
from holdfast.format.image import Header, round_up
from holdfast.load.decoding import GroupReader, scratch
from holdfast.load.holdings import Coded
from holdfast.load.plan import BATCH_BYTES
from holdfast.load.source import checked_header, checked_table


class _Opened(NamedTuple):
    header: Header
    sums: tuple[int, ...]
    table: bytes


class DegradedImage:
    """Image ``image`` of ``member`` of a group: an ``ImageFile``.

    ``read_head`` gives its header's bytes. Reads raise TooManyLost when too few members are left.
    """

    is_mapped = False

    def __init__(
        self, group: GroupReader, member: int, image: int, coded: Coded,
        read_head: Callable[[], bytes], name: str,
    ) -> None:  # fmt: skip
        self._group, self._member, self._image = group, member, image
        self._data_start, self._read_head = coded.data_start, read_head
        self.name, self.size_bytes = name, coded.image.image_bytes
        self.header_xxh3, self.table_xxh3 = coded.image.header_xxh3, coded.image.table_xxh3
        self._head = b""
        self._opened: _Opened | None = None

    def check_length(self) -> None:
        """See ``ImageFile``: of a lost image, the header must be as long as its record says."""
        self._head = self._head or self._read_head()
        if len(self._head) != self._data_start:
            raise FormatError(
                f"{self.name}: its header has {len(self._head)} bytes, {self._data_start} were "
                "captured",
                image=self.name,
            )

    def open(self, expected: Mapping[str, str]) -> tuple[Header, tuple[int, ...]]:
        """See ``ImageFile``."""
        self.check_length()
        header = checked_header(self, self._head, expected)
        table = bytearray(header.table.size_bytes)
        with memoryview(table) as into:
            self._decode(
                header.table.offset, header.table.stop, into, "its block table",
                lambda: text(checksum(into)) == self.table_xxh3,
            )  # fmt: skip
        sums = checked_table(self, header, bytes(table))
        self._opened = _Opened(header, sums, bytes(table))
        return header, sums

    def block_name(self, number: int) -> str:
        """See ``ImageFile``."""
        return f"block {number} of {self.name}"

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """See ``ImageFile``."""
        assert self._opened is not None
        header, table = self._opened.header, self._opened.table
        if not 0 <= start <= stop <= self.size_bytes:
            raise FormatError(
                f"{self.name} has {self.size_bytes} bytes; bytes {start} to {stop} were asked for"
            )
        if len(staging) < stop - start:
            staging = bytearray(stop - start)
        into = memoryview(staging)[: stop - start]
        data, end = self._data_start, self._data_start + header.table.offset
        for begin, known in ((0, self._head), (end, table)):
            first, last = max(start, begin), min(stop, begin + len(known))
            if first < last:
                into[first - start : last - start] = known[first - begin : last - begin]
        first, last = max(start, data), min(stop, end)
        if first < last:
            self._read_data(first - data, last - data, into[first - start : last - start])
        return into

    def _read_data(self, start: int, stop: int, into: memoryview) -> None:
        """Whole blocks where they belong, others by way of memory for whole blocks."""
        at, data_stop = start, self._table_offset
        while at < stop:
            first = at - at % BLOCK_BYTES
            end = min(stop, first + BATCH_BYTES)
            last = min(round_up(end, BLOCK_BYTES), data_stop)
            target = into[at - start : end - start]
            if (first, last) == (at, end):
                self._decode_blocks(first, last, target)
            else:
                whole = scratch("window", last - first)
                self._decode_blocks(first, last, whole)
                target[:] = whole[at - first : end - first]
            at = end

    @property
    def _table_offset(self) -> int:
        assert self._opened is not None
        return self._opened.header.table.offset

    def _decode_blocks(self, start: int, stop: int, into: memoryview) -> None:
        """Whole blocks, each equal to its checksum."""
        assert self._opened is not None
        sums = self._opened.sums
        first, last = start // BLOCK_BYTES, block_count(stop)

        def wrong() -> list[int]:
            return [
                number
                for number, begin, end in blocks(first, last, self._table_offset)
                if checksum(into[begin - start : end - start]) != sums[number]
            ]

        self._decode(start, stop, into, f"its blocks {first} to {last - 1}", lambda: not wrong())

    def _decode(
        self, start: int, stop: int, into: memoryview, what: str, is_right: Callable[[], bool]
    ) -> None:
        """Fill ``into`` out of sources that give what is right; TooManyLost when there are none."""
        if self._group.decode(
            lambda: self._group.steps(self._member, self._image, start, stop), start, into, is_right
        ):  # fmt: skip
            return
        raise ChecksumMismatch(
            f"{self.name}: {what} cannot be decoded, though every source is as its checksums say: "
            "the parity is not of these images. Another source is used; please report this.",
            image=self.name,
        )
