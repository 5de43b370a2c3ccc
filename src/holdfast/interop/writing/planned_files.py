"""Files as they will be, before a byte is written: some bytes that are known, and boxes of leaves.

This is the one form that every format is written through. A format says what its files are; the
bytes are then read, checked and written by windows, in any order and by any number of threads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.errors import UsageError
from holdfast.geometry.box import ITEMSIZE, Box, flat_boxes
from holdfast.interop.writing.chosen_leaves import ChosenLeaf


@dataclass(frozen=True, slots=True)
class KnownBytes:
    """Bytes at ``offset`` of a file that need no read."""

    offset: int
    data: bytes

    @property
    def stop(self) -> int:
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True)
class LeafBytes:
    """A box of a leaf at ``offset`` of a file, row by row."""

    offset: int
    leaf: str
    box: Box
    dtype: str

    @property
    def stop(self) -> int:
        return self.offset + self.box.volume * ITEMSIZE[self.dtype]


#: Given the CRC-32 of each LeafBytes of a file, in their order: what is written last, and where.
Finish = Callable[[Sequence[int]], Iterable[tuple[int, bytes]]]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file: ``parts`` by their offset, with gaps of zeros between them.

    ``finish``: None where nothing in the file depends on checksums of its data.
    """

    path: str
    size_bytes: int
    parts: tuple[KnownBytes | LeafBytes, ...]
    finish: Finish | None = field(default=None, compare=False)

    def in_range(self, start: int, stop: int) -> Iterator[tuple[int, KnownBytes | LeafBytes]]:
        """The parts that have bytes from ``start`` to ``stop``, with their numbers."""
        at = max(0, bisect_right(self.parts, start, key=lambda part: part.offset) - 1)
        while at < len(self.parts) and self.parts[at].offset < stop:
            if self.parts[at].stop > start:
                yield at, self.parts[at]
            at += 1

    def facts(self) -> Iterator[str]:
        """All that the file depends on beside the elements, as text."""
        yield f"{self.path} {self.size_bytes}"
        for part in self.parts:
            if isinstance(part, KnownBytes):
                yield f"{part.offset} {part.data!r}"
            else:
                yield f"{part.offset} {part.leaf!r} {part.box} {part.dtype}"


class FillLeaves(Protocol):
    """Fills memory with boxes of leaves, as ``LeafReader.fill`` does."""

    def __call__(self, wants: Sequence[tuple[str, Box, memoryview]]) -> int:
        """Returns the bytes that were read."""
        ...


def fill_window(
    file: PlannedFile, start: int, into: memoryview, fill: FillLeaves
) -> list[tuple[int, int, int]]:
    """Fill ``into`` with the bytes of a file from ``start`` on.

    Returns (number of the part, begin, stop) of all bytes of leaves, counted in ``into``.
    """
    stop = start + len(into)
    wants: list[tuple[str, Box, memoryview]] = []
    runs: list[tuple[int, int, int]] = []
    at = 0
    for number, part in file.in_range(start, stop):
        first, last = max(part.offset, start), min(part.stop, stop)
        _zero(into[at : first - start])
        at = last - start
        if isinstance(part, KnownBytes):
            into[first - start : at] = part.data[first - part.offset : last - part.offset]
        else:
            wants += _wants(part, first, last, into[first - start : at], fill)
            runs.append((number, first - start, at))
    _zero(into[at:])
    fill(wants)
    return runs


def _zero(memory: memoryview) -> None:
    memory[:] = bytes(len(memory))


def _wants(
    part: LeafBytes, first: int, stop: int, into: memoryview, fill: FillLeaves
) -> Iterator[tuple[str, Box, memoryview]]:
    """The boxes that the bytes ``first`` to ``stop`` of a file are. Elements that stand in two
    windows are read for both.
    """
    item, offset = ITEMSIZE[part.dtype], first - part.offset
    begin, end = offset // item, -(-(stop - part.offset) // item)
    if begin * item != offset or end * item != stop - part.offset:
        whole = memoryview(bytearray((end - begin) * item))
        fill(list(_boxes(part, begin, end, whole)))
        at = offset - begin * item
        into[:] = whole[at : at + len(into)]
        return
    yield from _boxes(part, begin, end, into)


def _boxes(
    part: LeafBytes, begin: int, end: int, into: memoryview
) -> Iterator[tuple[str, Box, memoryview]]:
    item = ITEMSIZE[part.dtype]
    at = 0
    for inner in flat_boxes(part.box.shape, begin, end):
        size = inner.volume * item
        yield part.leaf, inner.shift(part.box.start), into[at : at + size]
        at += size


# What a format is, and the checks that formats share.


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """The files that a format makes of a checkpoint.

    ``is_file``: they are one file, whose name is the place that was given. ``notes``: what is left
    out, in words.
    """

    files: tuple[PlannedFile, ...]
    is_file: bool = False
    notes: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


def require_types(
    leaves: Mapping[str, ChosenLeaf], known: Mapping[str, str] | frozenset[str], format_: str
) -> None:
    """Raises UsageError for a leaf whose type the format has no name for."""
    for name, leaf in sorted(leaves.items()):
        if leaf.dtype not in known:
            raise UsageError(
                f"{name} is {leaf.dtype}, which {format_} has no name for: leave it out with "
                "--only, or take another format",
                leaf=name,
            )
