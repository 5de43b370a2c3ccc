"""Compares what several ranks have of one value, where a checkpoint shows that of one of them.

Ranks hold copies of whatever is not cut between them. Copies that are not the same bytes are of two
saves, or training has gone apart: neither may be taken for all without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from holdfast.errors import ForeignFormatError
from holdfast.geometry.box import ITEMSIZE, Box, flat_boxes
from holdfast.interop.extent_reader import WINDOW_BYTES, extent_of, read_extent
from holdfast.interop.foreign import Extent, ForeignLeaf, StoredBox
from holdfast.interop.pickle_records import Record
from holdfast.interop.source_files import SourceFiles

Locate = Callable[[str, str, Box, Extent], Extent]


class RankCopies:
    """Compares tensors and values in the files of one checkpoint.

    ``locate``: finds the elements of a box of a leaf in an item of DCP.
    """

    def __init__(self, files: SourceFiles, locate: Locate | None = None) -> None:
        self._files, self._locate = files, locate

    def require_same(
        self,
        leaf: str,
        dtype: str,
        box: Box,
        begin: int,
        data: memoryview,
        copies: Sequence[StoredBox],
    ) -> None:
        """ForeignFormatError unless all ``copies`` have the bytes that were read of a box.

        ``begin``: how many bytes of the box, row by row, are before ``data``.
        """
        item = ITEMSIZE[dtype]
        first = begin // item
        at = 0
        for part in flat_boxes(box.shape, first, first + len(data) // item):
            size = part.volume * item
            mine = np.frombuffer(data[at : at + size], np.uint8).reshape(*part.shape, item)
            at += size
            here = part.shift(box.start)
            for copy in copies:
                common = here.intersect(copy.box)
                if common is None:
                    continue
                theirs = bytearray(common.volume * item)
                extent = extent_of(self._placed(leaf, dtype, copy), common, dtype)
                read_extent(self._files, extent, common.shape, dtype, 0, memoryview(theirs))
                if mine[common.relative_to(here).slices()].tobytes() != theirs:
                    raise self._differs(leaf, common, copy.extent)

    def _placed(self, leaf: str, dtype: str, part: StoredBox) -> StoredBox:
        """The same part with the place of its elements, where that is not known yet."""
        if part.extent.item_bytes is None or self._locate is None:
            return part
        return structs.replace(part, extent=self._locate(leaf, dtype, part.box, part.extent))

    def _differs(self, leaf: str, box: Box, extent: Extent) -> ForeignFormatError:
        where = self._files.where(extent.file)
        return ForeignFormatError(
            f"{where}: {leaf!r:.200} is on several ranks, which should have it alike, or under "
            f"several names, and has other bytes here than on the first, in its box {box.start} to "
            f"{box.stop}: files of two saves are mixed, or the ranks' training has gone apart. "
            "Give a checkpoint whose ranks agree, or leave this tensor out",
            path=where,
            offset=extent.offset,
        )

    def faults(self, leaves: Mapping[str, ForeignLeaf]) -> Iterator[str]:
        """The first difference of each leaf whose copies differ, in words."""
        for name, leaf in leaves.items():
            if not leaf.copies:
                continue
            try:
                for part in (self._placed(name, leaf.dtype, one) for one in leaf.parts):
                    for begin, data in self._windows(part, leaf.dtype):
                        self.require_same(name, leaf.dtype, part.box, begin, data, leaf.copies)
            except ForeignFormatError as error:
                yield str(error)

    def _windows(self, part: StoredBox, dtype: str) -> Iterator[tuple[int, memoryview]]:
        size = part.box.volume * ITEMSIZE[dtype]
        for begin in range(0, size, WINDOW_BYTES):
            data = memoryview(bytearray(min(WINDOW_BYTES, size - begin)))
            read_extent(self._files, part.extent, part.box.shape, dtype, begin, data)
            yield begin, data

    def differing(self, values: Iterable[Mapping[str, Any]]) -> list[str]:
        """The keys under which not all ``values`` have the same as the first, and have something.

        What a rank has not is no difference: some values are written by one rank alone.
        """
        first, *others = values
        return [
            key
            for key, value in first.items()
            if any(key in one and not self._is_same(value, one[key]) for one in others)
        ]

    def _is_same(self, value: Any, its_copy: Any) -> bool:
        """Not by recursion: a file may nest its values as deep as it likes."""
        left, seen = [(value, its_copy)], set()
        while left:
            one, other = left.pop()
            if isinstance(one, ForeignLeaf):
                if not (isinstance(other, ForeignLeaf) and self._is_same_leaf(one, other)):
                    return False
                continue
            if type(one) is not type(other):
                return False
            if isinstance(one, Record):
                one, other = {one.kind: one.fields}, {other.kind: other.fields}
            elif not isinstance(one, (dict, list, tuple)):
                if one != other and not (one != one and other != other):
                    return False
                continue
            elif one is other or (id(one), id(other)) in seen:
                continue  # compared before, or is being compared: a list may contain itself
            else:
                seen.add((id(one), id(other)))
            if len(one) != len(other):
                return False
            if isinstance(one, dict):
                if one.keys() != other.keys():
                    return False
                left += [(one[key], other[key]) for key in one]
            else:
                left += zip(one, other, strict=True)
        return True

    def _is_same_leaf(self, one: ForeignLeaf, other: ForeignLeaf) -> bool:
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        sums = sum_of(one), sum_of(other)
        if None not in sums:
            return sums[0] == sums[1]
        return not [*self.faults({"": replace(one, copies=other.parts)})]


def sum_of(leaf: ForeignLeaf) -> tuple[int, int] | None:
    """The checksum that a writer left of a tensor and of nothing else."""
    if len(leaf.parts) != 1:
        return None
    extent = leaf.parts[0].extent
    size = math.prod(leaf.shape) * ITEMSIZE[leaf.dtype]
    known = extent.sum
    if known is None or extent.strides is not None:
        return None
    return (size, known.crc) if (known.offset, known.size_bytes) == (extent.offset, size) else None
