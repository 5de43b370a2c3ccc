"""Reads directories of ``torch.distributed.checkpoint``: metadata, shards, bytes items.

Each item of a ``.distcp`` file is a ``torch.save`` file, or a safetensors file, of its own. Where
in it the elements lie is looked up when a range of it is first read: planning opens no item.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, gt
from typing import Any, NamedTuple, TypeGuard

from holdfast.errors import ForeignFormatError, UsageError
from holdfast.geometry.box import Box
from holdfast.interop.arrange import MODEL, Orders, arrange, is_extra
from holdfast.interop.foreign import Extent, ForeignCheckpoint, ForeignLeaf, StoredBox
from holdfast.interop.pickle_records import (
    TORCH_NAMES,
    GlobalName,
    Opaque,
    Record,
    TorchDtype,
    shown,
)
from holdfast.interop.pickles import interpret
from holdfast.interop.safetensors_files import open_safetensors
from holdfast.interop.source_files import SourceFiles, checked_name
from holdfast.interop.torch_files import Tree, open_torch_file

METADATA = ".metadata"
SUFFIX = ".distcp"
MAX_METADATA_BYTES = 1 << 30
MAX_RANKS_SHOWN = 1 << 16
#: The files of one save, and of most copies, are written within so many seconds.
LATER_S = 60.0
_INT = frozenset((int,))
#: Boxes are known by what they were made of, for so many.
_MAX_ALIKE = 1 << 16
_PLACE = ("offset", "length", "relative_path")
_FILE = re.compile(r"__([0-9]{1,6})_([0-9]{1,6})\.distcp")


class _Item(NamedTuple):
    """Where one item of a checkpoint lies."""

    file: str
    offset: int
    size_bytes: int
    rank: int


def read_dcp(files: SourceFiles, prefix: str, step: int, orders: Orders) -> ForeignCheckpoint:
    """Read a directory of DCP below ``prefix`` ("" or one that ends with "/")."""
    tree = read_dcp_tree(files, prefix)
    found = arrange(tree.entries, orders, files.where(prefix + METADATA))
    return ForeignCheckpoint(
        "dcp",
        step,
        found.leaves,
        found.values,
        found.aliases,
        tuple(tree.notes + found.notes),
        tree.world,
    )


@dataclass(frozen=True, slots=True)
class DcpTree:
    """The state dict in a directory of DCP, with leaves in place of tensors."""

    entries: dict[str, Any]
    notes: list[str]
    world: int


def read_dcp_tree(files: SourceFiles, prefix: str, *, is_nested: bool = True) -> DcpTree:
    """What a directory of DCP holds. ``is_nested``: as it was before it was flattened."""
    return _DcpDirectory(files, prefix).read(is_nested)


class _DcpDirectory:
    def __init__(self, files: SourceFiles, prefix: str) -> None:
        self._files, self._prefix = files, prefix
        self._name = prefix + METADATA
        self._where = files.where(self._name)
        self._notes: list[str] = []
        #: The number of the image of each rank that has files.
        self._images: dict[int, int] = {}
        #: Boxes by the identity of what they were made of, which is kept.
        self._boxes: dict[tuple[int, int, tuple[int, ...]], tuple[Any, Any, Box]] = {}
        self._alike: dict[Box, Box] = {}

    def read(self, is_nested: bool) -> DcpTree:
        fields = self._metadata()
        described = self._dictionary(fields, "state_dict_metadata")
        paths = fields.get("planner_data")
        items = self._items(self._dictionary(fields, "storage_data"))
        missing = self._missing_files(items)
        self._note_later({item.file for item in items.values()} - missing)
        there = {item.rank for item in items.values() if item.file not in missing}
        self._images = {rank: number for number, rank in enumerate(sorted(there))}
        entries: dict[str, Any] = {}
        for name, about in described.items():
            if type(name) is not str:
                raise self._error("a name that is no text")
            try:
                entries[name] = self._entry(name, about, items, missing)
            except UsageError as error:
                raise self._error(f"{name!r:.200}: {error}") from None
        try:
            known = paths if isinstance(paths, dict) else {}
            tree = _nested(entries, known) if is_nested else entries
        except _PathTaken as error:
            raise self._error(str(error)) from None
        return DcpTree(tree, self._notes, max(1, len(self._images)))

    def _error(self, why: str, offset: int = 0) -> ForeignFormatError:
        text = f"{self._where}: {why}"
        return ForeignFormatError(text, path=self._where, offset=offset)

    def _metadata(self) -> dict[str, Any]:
        size = self._files.size_bytes(self._name)
        if size > MAX_METADATA_BYTES:
            raise self._error(f"{size} bytes are more than any metadata have")
        data = self._files.read(self._name, 0, size)
        pickled = interpret(data, self._where, size_bytes=self._data_bytes())
        value = pickled.value
        if not isinstance(value, Record) or value.kind != "Metadata":
            what = value.what if isinstance(value, Opaque) else type(value).__name__
            raise self._error(f"it holds no metadata of torch but {what!s:.100}")
        return value.fields

    def _data_bytes(self) -> int:
        """The bytes of all files of the directory: its metadata may take as much memory."""
        names = (name for name in self._files.names() if name.startswith(self._prefix))
        return sum(self._files.size_bytes(name) for name in names if name.endswith(SUFFIX))

    def _dictionary(self, fields: Mapping[str, Any], name: str) -> dict[Any, Any]:
        found = fields.get(name)
        if not isinstance(found, dict):
            raise self._error(f"its {name} is no dictionary")
        return found

    def _items(self, storage: dict[Any, Any]) -> dict[tuple[Any, ...], _Item]:
        """Where every item lies, by its name and its offset in the leaf, or None."""
        places: dict[Any, tuple[str, int]] = {}
        items: dict[tuple[Any, ...], _Item] = {}
        for key, info in storage.items():
            is_known = isinstance(info, Record) and info.kind == "_StorageInfo"
            is_index = type(key) is tuple and len(key) == 4 and key[0] == "MetadataIndex"
            if not is_known or not is_index:
                raise self._error("its storage_data is not that of a file system")
            where = info.fields
            if where.get("transform_descriptors"):
                raise self._error(
                    f"{key[1]!r:.200} was written through extensions "
                    f"({where['transform_descriptors']!s:.60}), which can't be read yet"
                )
            offset, size, path = map(where.get, _PLACE)
            if type(offset) is not int or type(size) is not int or offset < 0 or size < 0:
                raise self._error(f"{key[1]!r:.200} lies at no place of a file")
            found = places.get(path) if type(path) is str else None
            if found is None:
                found = places[path] = self._file(path)
            items[key[1], key[2]] = _Item(found[0], offset, size, found[1])
        if len(items) < len(storage):  # torch tells them apart by name and offset alone, too
            raise self._error(
                f"{len(storage) - len(items)} items are there twice, at two places: of two saves"
            )
        return items

    def _file(self, path: object) -> tuple[str, int]:
        """The name of a file that items lie in, and the rank that wrote it."""
        file = self._prefix + checked_name(path, self._where)
        matched = _FILE.fullmatch(file.rpartition("/")[2])
        rank = int(matched[1]) if matched else 0
        if rank >= MAX_RANKS_SHOWN:
            raise self._error(f"it names a file of rank {rank}")
        return file, rank

    def _missing_files(self, items: Mapping[Any, _Item]) -> set[str]:
        """The files that are not there, or are too short for what they should hold."""
        ends: dict[str, int] = {}
        for item in items.values():
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.size_bytes)
        there = set(self._files.names())
        missing: set[str] = set()
        for file, end in sorted(ends.items()):
            have = self._files.size_bytes(file) if file in there else None
            if have is None or have < end:
                missing.add(file)
                what = "is not there" if have is None else f"has {have} bytes, {end} are named"
                self._notes.append(f"{self._files.where(file)} {what}")
        return missing

    def _note_later(self, present: set[str]) -> None:
        """Note files that were written after the metadata, which a save writes last."""
        written_s = self._files.changed_s(self._name)
        after = {file: self._files.changed_s(file) - written_s for file in present}
        later = sorted(file for file, after_s in after.items() if after_s > LATER_S)
        if later:
            self._notes.append(
                f"{len(later)} files of {len(present)}, {self._files.where(later[0])} first, were "
                f"written up to {max(after.values()):.0f} s after {METADATA}, which a save writes "
                "last: if a save over this directory was stopped, its tensors are of two saves "
                "(a copy that does not keep the times of files looks the same)"
            )

    def _entry(
        self, name: str, about: Any, items: Mapping[tuple[Any, ...], _Item], missing: set[str]
    ) -> Any:
        kind = about.kind if isinstance(about, Record) else type(about).__name__
        if kind == "BytesStorageMetadata":
            item = items.get((name, None))
            if item is None or item.file in missing:
                return Opaque("not in the files", 0)
            return self._object(name, item)
        if kind != "TensorStorageMetadata":
            return Opaque(f"a {kind}", 0)
        properties, shape = about.fields.get("properties"), about.fields.get("size")
        chunks = about.fields.get("chunks")
        if not isinstance(properties, Record) or not _is_shape(shape) or type(chunks) is not list:
            raise self._error(f"{name!r:.200} has no dtype, size and chunks")
        dtype = properties.fields.get("dtype")
        if isinstance(dtype, GlobalName):
            at = next((item.file for key, item in items.items() if key[0] == name), METADATA)
            return Opaque(f"a tensor of {dtype!s:.60} in {self._files.where(at)}", 0)
        if not isinstance(dtype, TorchDtype):
            raise self._error(f"{name!r:.200} has {shown(dtype)} in place of a dtype")
        parts = []
        for chunk in chunks:
            box = self._box(name, chunk, shape)
            item = items.get((name, box.start))
            if item is None and len(chunks) == 1:
                item = items.get((name, None))
            if item is None:
                continue
            file, offset, size, rank = item
            if not size:
                raise self._error(f"{name!r:.200} lies in an item of 0 bytes")
            if file not in missing:
                extent = Extent(file, offset, None, size)
                parts.append(StoredBox(box, extent, self._images[rank]))
        return ForeignLeaf(TORCH_NAMES[dtype.name], shape, tuple(parts))

    def _box(self, name: str, chunk: Any, shape: tuple[int, ...]) -> Box:
        """The box of a shard; one object for all that are alike, as those of layers are."""
        fields = chunk.fields if isinstance(chunk, Record) else {}
        start, sizes = fields.get("offsets"), fields.get("sizes")
        # By identity, which costs no look at them: alike ones of a run of records are one object.
        key = id(start), id(sizes), shape
        if key in self._boxes:
            return self._boxes[key][2]
        if not (_is_shape(start) and _is_shape(sizes)) or {len(start), len(sizes)} != {len(shape)}:
            raise self._error(f"{name!r:.200} has a chunk without offsets and sizes")
        box = Box(start, tuple(map(add, start, sizes)))
        if any(map(gt, box.stop, shape)) and not box.is_empty:
            raise self._error(f"{name!r:.200} has a chunk outside of its shape {shape}")
        box = self._alike.setdefault(box, box)
        if len(self._boxes) < _MAX_ALIKE:
            self._boxes[key] = (start, sizes, box)
        return box

    def _object(self, name: str, item: _Item) -> Any:
        """The value of an item that is no tensor."""
        size = item.size_bytes
        file = open_torch_file(self._files, item.file, item.offset, size)
        return Tree(file).value()


def _is_shape(value: Any) -> TypeGuard[tuple[int, ...]]:
    # No loop in Python: there is one for each shard of each rank.
    return type(value) is tuple and _INT.issuperset(map(type, value)) and min(value, default=0) >= 0


def locate(files: SourceFiles, leaf: str, dtype: str, box: Box, extent: Extent) -> Extent:
    """The place of the elements in an item; ForeignFormatError unless it holds this very box."""
    where = files.where(extent.file)
    size = extent.item_bytes or 0
    if files.read(extent.file, extent.offset, min(2, size)) == b"PK":
        file = open_torch_file(files, extent.file, extent.offset, size)
        ref = file.value
        if getattr(ref, "shape", None) == box.shape and getattr(ref, "dtype", None) == dtype:
            return file.place(ref)
        found = f"{getattr(ref, 'dtype', type(ref).__name__)} {getattr(ref, 'shape', '')}"
    else:
        tensors = open_safetensors(files, extent.file, extent.offset, size).tensors
        one = next(iter(tensors.values()), ("nothing", (), 0))
        if len(tensors) == 1 and one[:2] == (dtype, box.shape):
            return Extent(extent.file, one[2])
        found = f"{len(tensors)} tensors, {one[0]} {one[1]}"
    raise ForeignFormatError(
        f"{where}, byte {extent.offset}: the metadata say {dtype} {box.shape} of {leaf!r:.200}, "
        f"here is {found}: they are of different saves",
        path=where,
        offset=extent.offset,
    )


def _nested(entries: dict[str, Any], paths: Mapping[Any, Any]) -> dict[str, Any]:
    """The state dict that was flattened: entries by the paths that DCP kept of them.

    Tensors at the top of a state that has no model of its own are that model.
    """
    tree: dict[Any, Any] = {}
    for name, value in entries.items():
        path = paths.get(name)
        keys: tuple[str | int, ...] = (name,)
        if type(path) is tuple and 0 < len(path) <= 64 and all(map(_is_key, path)):
            keys = path
        at = tree
        for key in keys[:-1]:
            at = at.setdefault(key, _Branch())
            if not isinstance(at, _Branch):
                raise _PathTaken(f"{name!r:.200} has the path {keys!r:.200}, on which a value lies")
        if keys[-1] in at:
            raise _PathTaken(f"{name!r:.200} has the path {keys!r:.200}, which another has too")
        at[keys[-1]] = value
    top = {str(key): _closed(value) for key, value in tree.items()}
    if len(top) != len(tree):
        raise _PathTaken("two entries at its top are called alike, one as a number")
    flat = {key: value for key, value in top.items() if isinstance(value, ForeignLeaf)}
    if flat and MODEL not in top:
        extras = {key: value for key, value in top.items() if is_extra(key)}
        rest = {k: v for k, v in top.items() if k not in flat and k not in extras}
        return {MODEL: flat | extras, **rest}
    return top


def _is_key(value: Any) -> bool:
    return type(value) in (str, int)


class _PathTaken(ValueError):
    """Two entries whose paths can't both be."""


class _Branch(dict[Any, Any]):
    """A dictionary or list of the state that was flattened."""


def _closed(value: Any) -> Any:
    """Branches as dictionaries, and as lists where all keys are the numbers from 0 on."""
    if not isinstance(value, _Branch):
        return value
    if (
        value
        and all(type(key) is int for key in value)
        and sorted(value) == list(range(len(value)))
    ):
        return [_closed(value[number]) for number in range(len(value))]
    return {key: _closed(item) for key, item in value.items()}
