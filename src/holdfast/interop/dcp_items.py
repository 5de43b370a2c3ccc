"""Tells by columns where DCP's items lie, and which boxes the chunks of a tensor are.

Metadata name an item for each tensor and rank. They are kept as rows of arrays, whether they came
as records or as ``Rows``; boxes of chunks that are alike, as those of layers, are one object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from holdfast.geometry.box import Box
from holdfast.geometry.leaves import MAX_DIMS
from holdfast.interop.foreign import BoxColumns
from holdfast.interop.pickle_records import Record, shown
from holdfast.interop.record_runs import Numbers, Rows, Sizes

_INT = frozenset((int,))
#: The number of dimensions of an item that is no tensor.
_NO_TENSOR = -1
#: The sum of two is a number of 64 bits.
_MAX_SIZE = (1 << 62) - 1
_PLACE = ("offset", "length", "relative_path")
#: Boxes are known by all chunks of a tensor until these are so many.
_MAX_KNOWN = 1 << 21


class Wrong(ValueError):
    """Metadata that no save writes, in words."""


class Item(NamedTuple):
    """Where one item of a checkpoint lies. ``file``: its number."""

    file: int
    offset: int
    size_bytes: int


class Items:
    """Where every item lies. ``file``: gives the number of a file by what the metadata call it."""

    def __init__(self, storage: Mapping[Any, Any], file: Callable[[object], int]) -> None:
        all_rows = [key for key in storage if type(key) is Rows]
        columns = all_rows[0].columns if all_rows else None
        count = len(storage) + sum(rows.stop - rows.first - 1 for rows in all_rows)
        self._names = dict(columns.numbers) if columns else {}
        singles = [key for key in storage if type(key) is tuple and len(key) == 4]
        width = max((len(key[2]) for key in singles if type(key[2]) is tuple), default=0)
        if width > MAX_DIMS:
            raise Wrong(f"it has an item of {width} dimensions")
        width = max(width, columns.offsets.values.shape[1] if columns else 0)
        self._name, self._file, self._offset, self._size, self._ndim = np.zeros((5, count), "i8")
        self._start = np.zeros((count, width), np.int64)
        known: dict[Any, int] = {}
        at = 0
        for key, info in storage.items():
            if type(key) is Rows:
                stop = at + key.stop - key.first
                self._take_rows(slice(at, stop), key)
                at = stop
                continue
            offset, size, path = _place(key, info)
            number = known.get(path) if type(path) is str else None
            if number is None:
                number = known[path] = file(path)
            start = key[2]
            if start is not None and not is_shape(start):
                raise Wrong(f"{key[1]!r:.200} has an item without an offset")
            self._name[at] = self._names.setdefault(key[1], len(self._names))
            self._file[at] = number
            try:
                self._offset[at], self._size[at] = offset, size
                self._ndim[at] = _NO_TENSOR if start is None else len(start)
                self._start[at, : len(start or ())] = start or ()
            except OverflowError:
                raise Wrong(f"{key[1]!r:.200} lies at no place of a file") from None
            at += 1
        if columns:
            self._number_files(all_rows, file)
        self._order = np.argsort(self._name, kind="stable")
        self._bounds = np.searchsorted(self._name[self._order], np.arange(len(self._names) + 1))

    def _take_rows(self, into: slice, rows: Rows) -> None:
        columns, there = rows.columns, slice(rows.first, rows.stop)
        name, _, start, file, offset, size = columns.parts
        self._name[into], self._file[into] = name.number[there], ~file.number[there]
        self._offset[into], self._size[into] = offset[there], size[there]
        self._ndim[into] = start.ndim[there]
        self._start[into, : start.values.shape[1]] = start.values[there]

    def _number_files(self, all_rows: list[Rows], file: Callable[[object], int]) -> None:
        """Give the files of rows their numbers in place of those of their texts."""
        texts, is_text = all_rows[0].columns.texts, self._file < 0
        used, which = np.unique(~self._file[is_text], return_inverse=True)
        numbers = np.array([file(texts[number]) for number in used.tolist()], np.int64)
        self._file[is_text] = numbers[which.reshape(-1)]

    def ends(self, files: int) -> list[int]:
        """Behind the last byte that is named of each of the ``files``."""
        found = np.zeros(files, np.int64)
        np.maximum.at(found, self._file, self._offset + self._size)
        return found.tolist()

    def of(self, name: str, ndim: int) -> tuple[Numbers, Numbers]:
        """The rows of a tensor's items, and where their boxes begin."""
        rows = self._all_of(name)
        if len(rows) and (self._ndim[rows] != ndim).any():
            rows = rows[self._ndim[rows] == ndim]
        return rows, self._start[rows, :ndim]

    def _all_of(self, name: str) -> Numbers:
        number = self._names.get(name)
        if number is None:
            return self._order[:0]
        return self._order[self._bounds[number] : self._bounds[number + 1]]

    def whole(self, name: str) -> int | None:
        """The row of the item of ``name`` that has no place in a tensor."""
        rows = self._all_of(name)
        found = rows[self._ndim[rows] == _NO_TENSOR]
        return int(found[-1]) if len(found) else None

    def item(self, row: int) -> Item:
        """The place of one item."""
        return Item(int(self._file[row]), int(self._offset[row]), int(self._size[row]))

    def first_file(self, name: str) -> int | None:
        """The number of a file that has a part of ``name``."""
        rows = self._all_of(name)
        return int(self._file[rows[0]]) if len(rows) else None

    def require_apart(self) -> None:
        """Wrong where two items have bytes in common: each is written behind the one before."""
        order = np.lexsort((self._offset, self._file))
        file, offset = self._file[order], self._offset[order]
        common = (file[1:] == file[:-1]) & (offset[1:] < (offset + self._size[order])[:-1])
        if common.any():
            at = int(common.argmax())
            one, other = ([*self._names][self._name[order[n]]] for n in (at, at + 1))
            raise Wrong(
                f"{one!r:.200} and {other!r:.200} lie on the same bytes, from {offset[at + 1]} on"
            )

    def require_once(self) -> None:
        """Wrong where two items are of one name and offset: torch tells them apart by these."""
        for name, number in self._names.items():
            rows = self._order[self._bounds[number] : self._bounds[number + 1]]
            if len(rows) < 2:
                continue
            start, ndim = self._start[rows], self._ndim[rows]
            if (ndim == ndim[0]).all() and (np.diff(start[:, :1], axis=0) > 0).any(1).all():
                continue
            # Sorted: anyone can make numbers whose tuples have one hash.
            twice = len(rows) - len(np.unique(np.column_stack([ndim, start]), axis=0))
            if twice:
                raise Wrong(
                    f"{twice} items of {name!r:.200} are there twice, at two places: of two saves"
                )

    def parts(
        self, rows: Numbers, boxes: list[Box], names: list[str], images: Numbers
    ) -> BoxColumns:
        """The boxes of a leaf with their extents. ``names``: of files, ``images``: of each."""
        files = self._file[rows]
        return BoxColumns(boxes, names, files, self._offset[rows], self._size[rows], images[files])

    def sizes(self, rows: Numbers) -> Numbers:
        """The bytes of items."""
        return self._size[rows]

    def files(self, rows: Numbers) -> Numbers:
        """The numbers of the files that items lie in."""
        return self._file[rows]


def _place(key: Any, info: Any) -> tuple[int, int, object]:
    """Where one record says that its item lies."""
    is_known = isinstance(info, Record) and info.kind == "_StorageInfo"
    is_index = type(key) is tuple and len(key) == 4 and key[0] == "MetadataIndex"
    if not is_known or not is_index or type(key[1]) is not str:
        raise Wrong("its storage_data is not that of a file system")
    where = info.fields
    if where.get("transform_descriptors"):
        raise Wrong(
            f"{key[1]!r:.200} was written through extensions "
            f"({_listed(where['transform_descriptors'])}), which can't be read yet"
        )
    offset, size, path = map(where.get, _PLACE)
    is_place = type(offset) is int and type(size) is int
    if not is_place or not 0 <= offset <= _MAX_SIZE or not 0 <= size <= _MAX_SIZE:
        raise Wrong(f"{key[1]!r:.200} lies at no place of a file")
    return offset, size, path


def _listed(value: Any) -> str:
    """What a value is, of a list its first items: others may contain themselves."""
    return ", ".join(map(shown, value[:4])) if type(value) in (list, tuple) else shown(value)


class ChunkBoxes:
    """The boxes of the chunks of tensors; one object for all that are alike."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Numbers, list[Box]]] = {}
        self._known_chunks = 0
        #: By their numbers as bytes, of which nobody can make many with one hash.
        self._alike: dict[bytes, Box] = {}

    def of(self, chunks: list[Any], shape: tuple[int, ...]) -> tuple[Numbers, list[Box]]:
        """Where the boxes begin, and the boxes. Wrong for what is none of a tensor's."""
        ndim = len(shape)
        if max(shape, default=0) > _MAX_SIZE:
            raise Wrong("has a shape that no tensor has")
        if not chunks:
            return np.zeros((0, ndim), np.int64), []
        start, sizes = (np.concatenate(some) for some in zip(*_corners(chunks, ndim), strict=True))
        key = shape, start.tobytes(), sizes.tobytes()
        if key in self._known:
            return self._known[key]
        stop = start + sizes
        numbers, width = np.hstack([start, stop]).tobytes(), 16 * ndim
        corners = zip(map(tuple, start.tolist()), map(tuple, stop.tolist()), strict=True)
        boxes = [
            self._alike.setdefault(numbers[at * width : (at + 1) * width], Box(*pair))
            for at, pair in enumerate(corners)
        ]
        if (stop > np.array(shape, np.int64)).any():
            outside = next(
                (b for b in boxes if not b.is_empty and not Box.whole(shape).contains(b)), None
            )
            if outside is not None:
                raise Wrong(f"has a chunk outside of its shape {shape}")
        if self._known_chunks + len(boxes) <= _MAX_KNOWN:
            self._known_chunks += len(boxes)
            self._known[key] = start, boxes
        return start, boxes


def _corners(chunks: list[Any], ndim: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Where chunks begin and their sizes, of one or of many at a time."""
    for chunk in chunks:
        if type(chunk) is Rows:
            there = slice(chunk.first, chunk.stop)
            start, sizes = (_rows_of(one, there, ndim) for one in chunk.columns.parts)
        else:
            fields = chunk.fields if isinstance(chunk, Record) else {}
            start, sizes = (_row_of(fields.get(name), ndim) for name in ("offsets", "sizes"))
        if start is None or sizes is None:
            raise Wrong("has a chunk without offsets and sizes")
        yield start, sizes


def _rows_of(some: Sizes, there: slice, ndim: int) -> Numbers | None:
    fits = (some.ndim[there] == ndim).all()
    return some.values[there, :ndim] if fits else None


def _row_of(value: Any, ndim: int) -> Numbers | None:
    if not is_shape(value) or len(value) != ndim or max(value, default=0) > _MAX_SIZE:
        return None
    return np.array([value], np.int64).reshape(1, ndim)


def is_shape(value: Any) -> TypeGuard[tuple[int, ...]]:
    """True for what a shape or an offset is."""
    return type(value) is tuple and _INT.issuperset(map(type, value)) and min(value, default=0) >= 0
