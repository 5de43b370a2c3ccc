"""Reads directories of ``torch.distributed.checkpoint``: metadata, shards, bytes items.

Each item of a ``.distcp`` file is a ``torch.save`` file, or a safetensors file, of its own. Where
in it the elements lie is looked up when a range of it is first read: planning opens no item.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import ForeignFormatError, UsageError
from holdfast.geometry.box import Box
from holdfast.interop.arrange import MODEL, Orders, arrange, is_extra
from holdfast.interop.dcp_items import ChunkBoxes, Item, Items, Wrong, is_shape
from holdfast.interop.foreign import Extent, ForeignCheckpoint, ForeignLeaf, MissingFile
from holdfast.interop.pickle_records import (
    TORCH_NAMES,
    GlobalName,
    Opaque,
    Record,
    TorchDtype,
    shown,
)
from holdfast.interop.pickles import interpret
from holdfast.interop.record_runs import MANY_BYTES
from holdfast.interop.safetensors_files import open_safetensors
from holdfast.interop.source_files import SourceFiles, checked_name
from holdfast.interop.torch_files import Tree, open_torch_file
from holdfast.state.parameter_order import LiveOrders
from holdfast.storage.direct import aligned_memory

METADATA = ".metadata"
SUFFIX = ".distcp"
MAX_METADATA_BYTES = 1 << 30
MAX_RANKS_SHOWN = 1 << 16
#: The files of one save, and of most copies, are written within so many seconds.
LATER_S = 60.0
_FILE = re.compile(r"__([0-9]{1,6})_([0-9]{1,6})\.distcp")
_NUMBER = re.compile(r"[0-9]{1,15}")
#: What a MultiStepLR has besides its milestones.
_MULTI_STEP = {"last_epoch", "gamma", "base_lrs"}


def read_dcp(files: SourceFiles, prefix: str, step: int, orders: Orders) -> ForeignCheckpoint:
    """Read a directory of DCP below ``prefix`` ("" or one that ends with "/")."""
    tree = read_dcp_tree(files, prefix)
    for path, keys in orders.milestones if isinstance(orders, LiveOrders) else ():
        _lose_without_milestones(tree.entries, path.split("."), keys)
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
        #: Files by number, and the rank that wrote each.
        self._names: list[str] = []
        self._ranks: list[int] = []
        self._numbers: dict[str, int] = {}
        #: Of each file: if it is not there or too short, and the number of its rank's image.
        self._is_missing = np.zeros(0, np.bool_)
        self._images = np.zeros(0, np.int64)
        self._boxes = ChunkBoxes()

    def read(self, is_nested: bool) -> DcpTree:
        fields = self._metadata()
        described = self._dictionary(fields, "state_dict_metadata")
        paths = fields.get("planner_data")
        entries: dict[str, Any] = {}
        name: Any = None
        try:
            items = Items(self._dictionary(fields, "storage_data"), self._file)
            items.require_once()
            items.require_apart()
            world = self._look_at_files(items)
            for name, about in described.items():
                if type(name) is not str:
                    raise self._error("a name that is no text")
                entries[name] = self._entry(name, about, items)
            known = paths if isinstance(paths, dict) else {}
            tree = _nested(entries, known) if is_nested else entries
        except (Wrong, _PathTaken) as error:
            raise self._error(str(error)) from None
        except UsageError as error:
            raise self._error(f"{name!r:.200}: {error}") from None
        return DcpTree(tree, self._notes, world)

    def _error(self, why: str, offset: int = 0) -> ForeignFormatError:
        text = f"{self._where}: {why}"
        return ForeignFormatError(text, path=self._where, offset=offset)

    def _metadata(self) -> dict[str, Any]:
        size = self._files.size_bytes(self._name)
        if size > MAX_METADATA_BYTES:
            raise self._error(f"{size} bytes are more than any metadata have")
        data = memoryview(aligned_memory(max(1, size)))[:size]
        self._files.read_into(self._name, 0, data)
        pickled = interpret(
            data,
            self._where,
            size_bytes=self._data_bytes(),
            as_rows=size >= MANY_BYTES,
        )
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

    def _file(self, path: object) -> int:
        """The number of a file that items lie in."""
        file = self._prefix + checked_name(path, self._where)
        number = self._numbers.setdefault(file, len(self._names))
        if number == len(self._names):
            matched = _FILE.fullmatch(file.rpartition("/")[2])
            rank = int(matched[1]) if matched else 0
            if rank >= MAX_RANKS_SHOWN:
                raise self._error(f"it names a file of rank {rank}")
            self._names.append(file)
            self._ranks.append(rank)
        return number

    def _look_at_files(self, items: Items) -> int:
        """Note the files that are not there, or are too short for what they should hold.

        Returns the number of images: of the ranks that have files.
        """
        ends, there = items.ends(len(self._names)), set(self._files.names())
        missing: dict[str, bool] = {}
        for file, end in sorted(zip(self._names, ends, strict=True)):
            have = self._files.size_bytes(file) if file in there else None
            missing[file] = have is None or have < end
            if missing[file]:
                what = "is not there" if have is None else f"has {have} bytes, {end} are named"
                self._notes.append(MissingFile(f"{self._files.where(file)} {what}"))
        self._is_missing = np.array([missing[file] for file in self._names], np.bool_)
        self._note_later({file for file, is_missing in missing.items() if not is_missing})
        ranks = np.array(self._ranks, np.int64)
        present = np.unique(ranks[~self._is_missing])
        self._images = np.searchsorted(present, ranks)
        return max(1, len(present))

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

    def _entry(self, name: str, about: Any, items: Items) -> Any:
        kind = about.kind if isinstance(about, Record) else type(about).__name__
        if kind == "BytesStorageMetadata":
            row = items.whole(name)
            if row is None or self._is_missing[items.item(row).file]:
                return Opaque("not in the files", 0)
            return self._object(items.item(row))
        if kind != "TensorStorageMetadata":
            return Opaque(f"a {kind}", 0)
        properties, shape = about.fields.get("properties"), about.fields.get("size")
        chunks = about.fields.get("chunks")
        if not isinstance(properties, Record) or not is_shape(shape) or type(chunks) is not list:
            raise Wrong(f"{name!r:.200} has no dtype, size and chunks")
        dtype = properties.fields.get("dtype")
        if isinstance(dtype, GlobalName):
            file = items.first_file(name)
            at = METADATA if file is None else self._names[file]
            return Opaque(f"a tensor of {dtype!s:.60} in {self._files.where(at)}", 0)
        if not isinstance(dtype, TorchDtype):
            raise Wrong(f"{name!r:.200} has {shown(dtype)} in place of a dtype")
        try:
            starts, boxes = self._boxes.of(chunks, shape)
        except Wrong as error:
            raise Wrong(f"{name!r:.200} {error}") from None
        rows, begins = items.of(name, len(shape))
        if not np.array_equal(starts, begins):
            # By bytes: anyone can make numbers whose tuples have one hash.
            there = dict(zip((at.tobytes() for at in begins), rows.tolist(), strict=True))
            whole = items.whole(name) if len(boxes) == 1 else None
            found = [there.get(start.tobytes(), whole) for start in starts]
            boxes = [box for box, row in zip(boxes, found, strict=True) if row is not None]
            rows = np.array([row for row in found if row is not None], np.int64)
        if not items.sizes(rows).all():
            raise Wrong(f"{name!r:.200} lies in an item of 0 bytes")
        is_missing = self._is_missing[items.files(rows)]
        if is_missing.any():
            boxes = [
                box for box, lacks in zip(boxes, is_missing.tolist(), strict=True) if not lacks
            ]
            rows = rows[~is_missing]
        parts = items.parts(rows, boxes, self._names, self._images)
        return ForeignLeaf(TORCH_NAMES[dtype.name], shape, parts)

    def _object(self, item: Item) -> Any:
        """The value of an item that is no tensor."""
        name = self._names[item.file]
        return Tree(open_torch_file(self._files, name, item.offset, item.size_bytes)).value()


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
        items = [_closed(value[number]) for number in range(len(value))]
        return next((item for item in items if isinstance(item, _Lost)), items)
    return _as_it_was({key: _closed(item) for key, item in value.items()})


class _Lost(Opaque):
    """A schedule that can't be told from what DCP kept of it."""


def _as_it_was(found: dict[Any, Any]) -> dict[Any, Any] | _Lost:
    """A dictionary with what paths do not keep: numbers that were keys are texts in them, and an
    empty dictionary has none.
    """
    groups, state = found.get("param_groups"), found.get("state", {})
    if isinstance(groups, list) and isinstance(state, dict):
        members = [one.get("params") if isinstance(one, dict) else None for one in groups]
        if all(isinstance(some, list) for some in members):
            is_numbered = any(type(one) is int for some in members for one in some or ())
            return {**found, "state": _by_numbers(state) if is_numbered else state}
    if "last_epoch" in found:
        return _schedule_as_it_was(found)
    return found


def _by_numbers(value: dict[Any, Any]) -> dict[Any, Any]:
    """The same with numbers as keys; as it is where some key is none."""
    known = {int(key): one for key, one in value.items() if _NUMBER.fullmatch(str(key))}
    return known if len(known) == len(value) else value


def _schedule_as_it_was(found: dict[Any, Any]) -> dict[Any, Any] | _Lost:
    """A schedule with the counter that a MultiStepLR has; whole, or lost."""
    lost = next((item for item in found.values() if isinstance(item, _Lost)), None)
    milestones = found.get("milestones")
    if lost is not None or not isinstance(milestones, dict) or not found.keys() >= _MULTI_STEP:
        return lost or found
    numbers = {key: _number_of(key) for key in milestones}
    if all(number is None for number in numbers.values()):
        return found  # another schedule's own
    counter = Counter({numbers[key]: times for key, times in milestones.items()})
    is_whole = len(counter) == len(milestones) and None not in counter
    if is_whole and all(type(times) is int and times > 0 for times in counter.values()):
        return {**found, "milestones": counter}
    return _Lost("a schedule whose milestones DCP kept as texts that are not all numbers", 0)


def _lose_without_milestones(
    tree: dict[str, Any], path: Sequence[str], keys: Sequence[str | int]
) -> None:
    """Put _Lost for the schedule at ``path`` if it has no milestones at ``keys``, and should."""
    home: Any = tree
    try:
        for key in path[:-1]:
            home = home[key]
        found = home[path[-1]]
        for inner in keys:
            found = found[inner]
    except (KeyError, IndexError, TypeError):
        return  # another state, which says so itself
    if isinstance(found, dict) and found.keys() >= _MULTI_STEP and "milestones" not in found:
        home[path[-1]] = _Lost(
            "a schedule without milestones, where that to be filled has some: DCP keeps nothing of "
            "what is empty, nor the class",
            0,
        )


def _number_of(key: Any) -> int | float | None:
    """The number that a text is as Python writes it."""
    text = str(key)
    if _NUMBER.fullmatch(text.removeprefix("-")):
        return int(text)
    try:
        return number if str(number := float(text)) == text else None
    except ValueError:
        return None
