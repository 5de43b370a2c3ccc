"""Writes directories of ``torch.distributed.checkpoint``, as it writes ``get_state_dict``'s result.

Large tensors are cut along their first dimension: its own reader takes a whole item at a time, so
that a rank which wants a part of a tensor would otherwise read all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.interop.pickle_records import GlobalName
from holdfast.interop.pickle_writer import PickledCall, PickledObject, write_pickle
from holdfast.interop.writing.planned_files import (
    Finish,
    FormatPlan,
    KnownBytes,
    LeafBytes,
    PlannedFile,
    require_types,
)
from holdfast.interop.writing.state_tree import SavedState, state_tree
from holdfast.interop.writing.torch_format import with_tensors
from holdfast.interop.writing.torch_zip import TORCH_TYPES, TorchTensor, plan_torch_zip

METADATA = ".metadata"
#: A tensor is cut into items of about this size; items begin on this many bytes.
ITEM_BYTES, ALIGNMENT_BYTES = 64 << 20, 64
_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = GlobalName("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_VERSION = "1.0.0"


def plan_dcp(saved: SavedState, file_bytes: int) -> FormatPlan:
    """The directory; its files have at most ``file_bytes`` each, or one item."""
    require_types(saved.leaves, TORCH_TYPES, "torch.distributed.checkpoint")
    tree = state_tree(saved, numbered=False)
    planning = ItemPlanning(file_bytes)
    for path, value in flattened(with_tensors(tree.state, saved)):
        planning.add(path, value)
    data = planning.metadata()
    files = planning.files()
    metadata = PlannedFile(METADATA, len(data), (KnownBytes(0, data),))
    return FormatPlan((*files, metadata), notes=tree.notes)


Path = tuple[str | int, ...]


def flattened(tree: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """(path, value) of each entry of a flat state dict, as DCP flattens one."""
    for key, value in tree.items():
        yield from _flat((str(key),), value)


def _flat(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat((*path, str(key)), item)
    elif isinstance(value, list) and not _is_terminal(value):
        for number, item in enumerate(value):
            yield from _flat((*path, number), item)
    else:
        yield path, value


def _is_terminal(value: list[Any]) -> bool:
    """True for a list that is stored as one object: there is no tensor or dictionary in it."""
    return not any(
        isinstance(item, (TorchTensor, Mapping))
        or (isinstance(item, list) and not _is_terminal(item))
        for item in value
    )


@dataclass(slots=True)
class _GrowingFile:
    """A file of items: their parts and what ends each."""

    path: str
    size_bytes: int = 0
    parts: list[KnownBytes | LeafBytes] = field(default_factory=list)
    ends: list[tuple[int, Finish]] = field(default_factory=list)

    def planned(self, top: str) -> PlannedFile:
        ends = tuple(self.ends)

        def finish(sums: Sequence[int]) -> Iterator[tuple[int, bytes]]:
            at = 0
            for count, end in ends:
                yield from end(sums[at : at + count])
                at += count

        return PlannedFile(top + self.path, self.size_bytes, tuple(self.parts), finish)


class ItemPlanning:
    """Places items in files, and describes them.

    ``has_paths``: whether the metadata say how the state dict was nested.
    """

    def __init__(self, file_bytes: int, *, has_paths: bool = True) -> None:
        self._has_paths = has_paths
        self._file_bytes = file_bytes
        self._files: list[_GrowingFile] = []
        self._described: dict[str, Any] = {}
        self._stored: dict[Any, Any] = {}
        self._paths: dict[str, Path] = {}
        self._sizes: dict[tuple[int, ...], PickledCall] = {}
        self._properties: dict[str, PickledObject] = {}

    def add(self, path: Path, value: Any) -> None:
        """Add a tensor, or a value as one item. Raises UsageError for a name that is there."""
        name = ".".join(map(str, path))
        if name in self._described:
            raise UsageError(
                f"two entries would both be called {name!r} in torch.distributed.checkpoint: "
                "rename one, or leave it out with --only",
                leaf=name,
            )
        self._paths[name] = path
        if isinstance(value, TorchTensor):
            self._add_tensor(name, value)
        else:
            self._described[name] = _made("BytesStorageMetadata", {})
            self._place({"fqn": name, "offset": None, "index": None}, value)

    def _add_tensor(self, name: str, tensor: TorchTensor) -> None:
        boxes = _items(tensor.shape, tensor.size_bytes)
        chunks = []
        for number, box in enumerate(boxes):
            offset, sizes = self._size(box.start), self._size(box.shape)
            chunks.append(_made("ChunkStorageMetadata", {"offsets": offset, "sizes": sizes}))
            part = tensor
            if tensor.box is not None:
                part = replace(tensor, shape=box.shape, box=box)
            self._place({"fqn": name, "offset": offset, "index": number}, part)
        self._described[name] = _made(
            "TensorStorageMetadata",
            {
                "properties": self._properties_of(tensor.dtype),
                "size": self._size(tensor.shape),
                "chunks": chunks,
            },
        )

    def _place(self, index: dict[str, Any], value: Any) -> None:
        if not self._files or self._files[-1].size_bytes >= self._file_bytes:
            self._files.append(_GrowingFile(f"__0_{len(self._files)}.distcp"))
        file = self._files[-1]
        begin = -(-file.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        zipped = plan_torch_zip(value, begin)
        file.parts += zipped.parts
        file.ends.append((zipped.leaves, zipped.finish))
        file.size_bytes = begin + zipped.size_bytes
        info = {"relative_path": file.path, "offset": begin, "length": zipped.size_bytes}
        self._stored[_made("MetadataIndex", index)] = PickledObject(_STORAGE_INFO, info)

    def _size(self, value: tuple[int, ...]) -> PickledCall:
        if value not in self._sizes:
            self._sizes[value] = PickledCall(GlobalName("torch", "Size"), (value,))
        return self._sizes[value]

    def _properties_of(self, dtype: str) -> PickledObject:
        if dtype not in self._properties:
            layout = PickledCall(
                GlobalName("torch.serialization", "_get_layout"), ("torch.strided",)
            )
            memory = PickledCall(GlobalName(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
            name = GlobalName("torch", TORCH_TYPES[dtype])
            self._properties[dtype] = _made(
                "TensorProperties", (name, layout, False, memory, False)
            )
        return self._properties[dtype]

    def files(self, top: str = "") -> tuple[PlannedFile, ...]:
        """The files of items, in the directory ``top``, which ends with "/"."""
        return tuple(file.planned(top) for file in self._files)

    def metadata(self) -> bytes:
        """The pickle that names everything."""
        return write_pickle(
            _made(
                "Metadata",
                {
                    "state_dict_metadata": self._described,
                    "planner_data": self._paths if self._has_paths else None,
                    "storage_data": self._stored,
                    "storage_meta": None,
                    "version": _VERSION,
                },
            )
        )


def _made(name: str, state: Any) -> PickledObject:
    return PickledObject(GlobalName(_MODULE, name), state)


def _items(shape: tuple[int, ...], size_bytes: int) -> Iterator[Box]:
    """The boxes that a tensor is stored in."""
    whole = Box.whole(shape)
    count = min(-(-size_bytes // ITEM_BYTES), shape[0] if shape else 1)
    if count < 2:
        yield whole
        return
    for number in range(count):
        yield whole.part(0, count, number)
