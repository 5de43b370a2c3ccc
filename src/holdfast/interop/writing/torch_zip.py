"""Lays out ``torch.save`` files: a zip with a pickle, and the elements of each storage as they are.

The data of every entry begin on 64 bytes, as torch has it. Checksums of the storages are known when
all of them were written; then they are put where they belong.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import UnsupportedState
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.interop.pickle_records import STORAGES, TORCH_NAMES, GlobalName
from holdfast.interop.pickle_writer import (
    PersistentId,
    PickledCall,
    replace_native,
    write_pickle,
)
from holdfast.interop.writing.planned_files import Finish, KnownBytes, LeafBytes

ALIGNMENT_BYTES = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LONG, _MANY = 0xFFFFFFFF, 0xFFFF
_VERSION, _UTF8, _1980 = 45, 0x800, 0x21
#: Where in a local header the checksum stands; the field that fills up the extra field.
_CRC_AT, _PADDING = 14, b"FB"
_TOP = "archive"

#: The types that torch has, by their names here.
TORCH_TYPES: Mapping[str, str] = {dtype: name for name, dtype in TORCH_NAMES.items()} | {
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C32": "complex32",
}
_CLASSES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


@dataclass(frozen=True, slots=True, eq=False)
class TorchTensor:
    """A tensor in a value that is written: a box of a leaf, or its elements. One that a value has
    twice is written once.
    """

    dtype: str
    shape: tuple[int, ...]
    leaf: str = ""
    box: Box | None = None
    data: bytes = b""

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return Box.whole(self.shape).volume * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class TorchZipPlan:
    """One such file: its parts, and what is written when the checksums of its data are known."""

    parts: tuple[KnownBytes | LeafBytes, ...]
    size_bytes: int
    leaves: int
    finish: Finish


def plan_torch_zip(value: Any, begin: int = 0) -> TorchZipPlan:
    """The file that holds ``value``, whose tensors are TorchTensor, from ``begin`` on in another.

    Raises UnsupportedState for a value that no pickle has.
    """
    storages: dict[TorchTensor, str] = {}

    def replace(found: Any) -> Any:
        if isinstance(found, TorchTensor):
            return _rebuilt(found, storages.setdefault(found, str(len(storages))))
        return replace_native(found)

    zipped = _Zip(begin)
    zipped.add("data.pkl", write_pickle(value, replace))
    zipped.add(".format_version", b"1")
    zipped.add(".storage_alignment", str(ALIGNMENT_BYTES).encode())
    zipped.add("byteorder", b"little")
    for tensor, key in storages.items():
        if tensor.box is not None and tensor.size_bytes:
            zipped.add_leaf(f"data/{key}", tensor.leaf, tensor.box, tensor.dtype)
        else:
            zipped.add(f"data/{key}", tensor.data)
    zipped.add("version", b"3\n")
    return zipped.plan()


def _rebuilt(tensor: TorchTensor, key: str) -> PickledCall:
    """The call that makes a tensor of its storage, as torch writes it."""
    strides, step = [0] * len(tensor.shape), 1
    for dim in reversed(range(len(tensor.shape))):
        strides[dim] = step
        step *= tensor.shape[dim] or 1
    view = (0, tensor.shape, tuple(strides), False, OrderedDict[Any, Any]())
    name = _CLASSES.get(tensor.dtype)
    if name is not None:
        kind, elements = GlobalName("torch", name), Box.whole(tensor.shape).volume
        stored = PersistentId(("storage", kind, key, "cpu", elements))
        return PickledCall(GlobalName("torch._utils", "_rebuild_tensor_v2"), (stored, *view))
    if tensor.dtype not in TORCH_TYPES:
        raise UnsupportedState(f"a tensor of {tensor.dtype}, which torch has no name for")
    kind = GlobalName("torch.storage", "UntypedStorage")
    stored = PersistentId(("storage", kind, key, "cpu", tensor.size_bytes))
    dtype = GlobalName("torch", TORCH_TYPES[tensor.dtype])
    return PickledCall(GlobalName("torch._utils", "_rebuild_tensor_v3"), (stored, *view, dtype))


@dataclass(slots=True)
class _Entry:
    name: bytes
    header: int
    size_bytes: int
    crc: int
    leaf: int | None
    """The number of the LeafBytes it is; None for known bytes."""


@dataclass(slots=True)
class _Zip:
    """A zip that grows; offsets of its headers count from ``begin``, those of parts from the file's
    start.
    """

    begin: int
    at: int = 0
    parts: list[KnownBytes | LeafBytes] = field(default_factory=list)
    entries: list[_Entry] = field(default_factory=list)
    leaves: int = 0

    def add(self, name: str, data: bytes) -> None:
        start = self._header(name, len(data), zlib.crc32(data), None)
        if data:
            self.parts.append(KnownBytes(start, data))
        self.at += len(data)

    def add_leaf(self, name: str, leaf: str, box: Box, dtype: str) -> None:
        size = box.volume * ITEMSIZE[dtype]
        start = self._header(name, size, 0, self.leaves)
        self.parts.append(LeafBytes(start, leaf, box, dtype))
        self.leaves += 1
        self.at += size

    def _header(self, name: str, size: int, crc: int, leaf: int | None) -> int:
        """Add a local header; returns where in the file the data begin."""
        raw = f"{_TOP}/{name}".encode()
        extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LONG else b""
        room = self.begin + self.at + _LOCAL.size + len(raw) + len(extra) + 4
        gap = -room % ALIGNMENT_BYTES
        extra += _PADDING + struct.pack("<H", gap) + b"Z" * gap
        short = min(size, _LONG)
        head = _LOCAL.pack(
            b"PK\3\4", _VERSION, _UTF8, 0, 0, _1980, crc, short, short, len(raw), len(extra)
        )
        self.entries.append(_Entry(raw, self.at, size, crc, leaf))
        self.parts.append(KnownBytes(self.begin + self.at, head + raw + extra))
        self.at += len(head) + len(raw) + len(extra)
        return self.begin + self.at

    def plan(self) -> TorchZipPlan:
        entries, begin, start = tuple(self.entries), self.begin, self.at

        def finish(sums: Sequence[int]) -> Iterator[tuple[int, bytes]]:
            for entry in entries:
                if entry.leaf is not None:
                    entry.crc = sums[entry.leaf]
                    yield begin + entry.header + _CRC_AT, struct.pack("<I", entry.crc)
            yield begin + start, _directory(entries, start)

        size = start + len(_directory(entries, start))
        return TorchZipPlan(tuple(self.parts), size, self.leaves, finish)


def _directory(entries: Sequence[_Entry], start: int) -> bytes:
    """The end of a zip: its directory, which begins at ``start``, and where that is."""
    found = bytearray()
    for entry in entries:
        values = [entry.size_bytes, entry.size_bytes, entry.header]
        long = b"".join(struct.pack("<Q", value) for value in values if value >= _LONG)
        extra = struct.pack("<HH", 1, len(long)) + long if long else b""
        size, packed, header = (min(value, _LONG) for value in values)
        found += _CENTRAL.pack(
            b"PK\1\2",
            _VERSION,
            _VERSION,
            _UTF8,
            0,
            0,
            _1980,
            entry.crc,
            packed,
            size,
            len(entry.name),
            len(extra),
            0,
            0,
            0,
            0,
            header,
        )
        found += entry.name + extra
    size, count = len(found), len(entries)
    if count >= _MANY or start >= _LONG or size >= _LONG:
        stop = start + size
        found += _END64.pack(
            b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, start
        )
        found += _LOCATOR.pack(b"PK\6\7", 0, stop, 1)
    short = min(count, _MANY)
    found += _END.pack(b"PK\5\6", 0, 0, short, short, min(size, _LONG), min(start, _LONG), 0)
    return bytes(found)
