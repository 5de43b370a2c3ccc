"""Reads ``torch.save`` files: what they hold, and where in the file each tensor's bytes lie.

A tensor in such a file is stored as it is, so a range of it is a range of the file. Files of
torch before 1.6 (a tar, or bare pickles) are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.errors import ForeignFormatError
from holdfast.geometry.box import ITEMSIZE
from holdfast.interop.arrange import MAX_NODES
from holdfast.interop.foreign import Extent, ForeignLeaf, StoredSum, tensor_parts
from holdfast.interop.pickle_records import Record, TensorRef
from holdfast.interop.pickles import FIRST, Pickled, interpret
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.zip_entries import ZipEntry, ZipFile

_PICKLE = "/data.pkl"
#: The first words of pickles that older versions of torch wrote without a zip.
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True)
class TorchFile:
    """An opened file: the value of its pickle, and the entry of each storage.

    ``written_as``: the name that its writer gave it, without the ending; "archive" if it gave none.
    """

    name: str
    where: str
    written_as: str
    pickled: Pickled
    storages: dict[str, ZipEntry]
    has_sums: bool

    @property
    def value(self) -> Any:
        """What was saved, with TensorRef for tensors."""
        return self.pickled.value

    def place(self, ref: TensorRef) -> Extent:
        """Where the first element of a tensor lies; ForeignFormatError when it is not there."""
        entry = self.storages.get(ref.storage.key)
        item = ITEMSIZE[ref.dtype]
        need = ref.storage.elements * item
        if entry is None or entry.size_bytes < need or ref.last * item > entry.size_bytes:
            have = "not there" if entry is None else f"of {entry.size_bytes} bytes"
            raise ForeignFormatError(
                f"{self.where}: storage {ref.storage.key!r:.50} is {have}, its tensors need "
                f"{max(need, ref.last * item)}",
                path=self.where,
                offset=0 if entry is None else entry.offset,
            )
        known = StoredSum(entry.offset, entry.size_bytes, entry.crc) if self.has_sums else None
        return Extent(self.name, entry.offset + ref.offset * item, ref.strides, sum=known)


def open_torch_file(
    files: SourceFiles, name: str, begin: int = 0, size_bytes: int | None = None
) -> TorchFile:
    """Read everything of a ``torch.save`` file but its tensors.

    ``begin`` and ``size_bytes``: where it lies in a file that has several.
    """
    where = files.where(name)
    size = files.size_bytes(name) - begin if size_bytes is None else size_bytes
    files.require(name, begin, size)
    _refuse_others(files.read(name, begin, min(size, 512)), where, begin)
    zipped = ZipFile(lambda at, count: files.read(name, at, count), begin, size, where)
    pickles = [entry for entry in zipped.entries if entry.endswith(_PICKLE)]
    if len(pickles) != 1 or pickles[0].count("/") != 1:
        raise ForeignFormatError(
            f"{where}: a zip with {len(pickles)} pickles is no torch.save file",
            path=where,
            offset=begin,
        )
    top = pickles[0].removesuffix("data.pkl")
    if top + "constants.pkl" in zipped.entries:
        raise ForeignFormatError(
            f"{where} is a TorchScript archive, a program and not a state: save the state_dict of "
            "the module",
            path=where,
            offset=begin,
        )
    order = top + "byteorder"
    if order in zipped.entries and zipped.read(order) != b"little":
        raise ForeignFormatError(
            f"{where} was written on a big-endian machine, whose numbers can't be read yet",
            path=where,
            offset=zipped.entries[order].offset,
        )
    pickled = interpret(zipped.read(pickles[0]), where, size_bytes=size)
    prefix = top + "data/"
    storages = {
        entry.removeprefix(prefix): found
        for entry, found in zipped.entries.items()
        if entry.startswith(prefix)
    }
    return TorchFile(name, where, top[:-1], pickled, storages, zipped.has_sums)


def _refuse_others(first: bytes, where: str, begin: int) -> None:
    if first[:2] == b"PK":
        return
    what = "is no torch.save file"
    if _LEGACY in first[:64]:
        what = (
            "was written by torch.save in the form of torch before 1.6, which can't be read: load "
            "it with torch and save it again"
        )
    elif first[257:262] == b"ustar" or first[:6] == b"././@L":
        what = (
            "is a tar, as torch.save wrote before torch 0.2, which can't be read: load it with "
            "torch and save it again"
        )
    elif first[:2] in FIRST:
        what = "is a bare pickle and no torch.save file, which can't be read as a checkpoint"
    raise ForeignFormatError(f"{where} {what}", path=where, offset=begin)


class Tree:
    """The value of a file with leaves in place of tensors: one leaf for tied tensors."""

    def __init__(self, file: TorchFile) -> None:
        self._file = file
        self._leaves: dict[TensorRef, ForeignLeaf] = {}
        self._left = MAX_NODES
        #: What containers became, by their id: a pickle can name one in many places.
        self._made: dict[int, Any] = {}

    def value(self) -> Any:
        """Return the whole value."""
        return self._of(self._file.value, 0)

    def _of(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ForeignFormatError(
                f"{self._file.where}: its pickle has more than {MAX_NODES} values, or names some "
                "again and again",
                path=self._file.where,
                offset=0,
            )
        if isinstance(value, TensorRef):
            return self._leaf(value)
        if depth > _MAX_DEPTH or not isinstance(value, (dict, list, tuple, Record)):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._container(value, depth + 1)
        return self._made[id(value)]

    def _container(self, value: Any, depth: int) -> Any:
        if isinstance(value, tuple):  # which contains itself only through one of the others
            return tuple(self._of(item, depth) for item in value)
        if isinstance(value, list):
            items = self._made[id(value)] = []
            items.extend(self._of(item, depth) for item in value)
            return items
        if isinstance(value, Record):
            record = self._made[id(value)] = Record(value.kind, {})
            record.fields = self._of(value.fields, depth)
            return record
        found: dict[Any, Any] = type(value)()
        self._made[id(value)] = found
        for key, item in value.items():
            found[key] = self._of(item, depth)
        return found

    def _leaf(self, ref: TensorRef) -> ForeignLeaf:
        if ref not in self._leaves:
            extent = self._file.place(ref)
            parts = tensor_parts(ref.dtype, ref.shape, extent, self._file.where)
            self._leaves[ref] = ForeignLeaf(ref.dtype, ref.shape, parts)
        return self._leaves[ref]


_MAX_DEPTH = 66
