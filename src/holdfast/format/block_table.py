"""Locates the block table of an image, and checks bytes of the image against it.

Both work without the header: a peer that pulls a part of an image knows only its size and the
checksum of its table, and uses no byte that was not checked. See docs/format/v1.md.
"""

from __future__ import annotations

from holdfast.errors import ChecksumMismatch, FormatError
from holdfast.format.checksum import BLOCK_BYTES, Buffer, block_count, checksum, text, unpack_table
from holdfast.format.image import PAGE_BYTES

_COVERED_BYTES = PAGE_BYTES // 8 * BLOCK_BYTES  # by one page of a table


def table_offset(data_bytes: int) -> int:
    """Returns the offset of the block table in an image's data, given the size of all data.

    Raises FormatError for a size that no image has.
    """
    pages = max(1, -(-data_bytes // (_COVERED_BYTES + PAGE_BYTES)))
    offset = data_bytes - pages * PAGE_BYTES
    is_one = offset > (pages - 1) * _COVERED_BYTES or (offset, pages) == (0, 1)
    if offset % PAGE_BYTES or not is_one:
        raise FormatError(f"no image has {data_bytes} bytes of data with their block table")
    return offset


class BlockTable:
    """The block checksums of one image, trusted because the image's seal has the table's own
    checksum.

    ``data_bytes`` counts the data with the table, as offsets do: from the first block on.
    """

    def __init__(self, table: Buffer, *, data_bytes: int, table_xxh3: str, where: str) -> None:
        self.offset = table_offset(data_bytes)
        self._table, self._where = bytes(table), where
        found = text(checksum(self._table))
        if len(self._table) != data_bytes - self.offset or found != table_xxh3:
            raise ChecksumMismatch(
                f"the block table of {where}: stored checksum {table_xxh3}, read {found} of "
                f"{len(self._table)} bytes; its bytes changed after they were written",
                image=where,
            )
        self._sums = unpack_table(self._table, block_count(self.offset))

    def check(self, start: int, data: memoryview) -> None:
        """Raises ChecksumMismatch unless ``data``, from byte ``start`` on, equals the captured
        bytes.

        ``start`` is where a block begins, and ``data`` ends with one, or with the image.
        """
        stop = start + len(data)
        for number in range(start // BLOCK_BYTES, block_count(min(stop, self.offset))):
            first = number * BLOCK_BYTES
            last = min(first + BLOCK_BYTES, self.offset)
            found = checksum(data[first - start : last - start])
            if found != self._sums[number]:
                raise self._mismatch(f"block {number}", text(self._sums[number]), text(found))
        if stop > self.offset:
            first = max(start, self.offset)
            if data[first - start :] != self._table[first - self.offset : stop - self.offset]:
                raise self._mismatch("the block table", "one", "another")

    def _mismatch(self, what: str, stored: str, found: str) -> ChecksumMismatch:
        return ChecksumMismatch(
            f"{what} of {self._where}: stored {stored}, read {found}; its bytes changed after they "
            "were written, or on their way",
            image=self._where,
        )
