"""Reads safetensors files: one, several with an index, and the sharded ones that DCP writes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.errors import ForeignFormatError, FormatError
from holdfast.format.image import header_size, volume
from holdfast.geometry.box import ITEMSIZE, STORED_AS_BYTES, Box
from holdfast.geometry.codec import unique
from holdfast.geometry.leaves import MAX_DIMS
from holdfast.interop.foreign import Extent, ForeignLeaf, StoredBox
from holdfast.interop.source_files import SourceFiles, checked_name, refuse_hollow

METADATA = "__metadata__"
#: What DCP's writer puts into the metadata of its sharded files.
SHARDING = "DCP_SHARDING_INFO"


class _RawTensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The header of one file: tensors by name, where each begins in the file, the metadata."""

    where: str
    tensors: dict[str, tuple[str, tuple[int, ...], int]]
    metadata: dict[str, str]


def open_safetensors(
    files: SourceFiles, name: str, begin: int = 0, size_bytes: int | None = None
) -> SafetensorsFile:
    """Read and check the header of a file, or of one that lies in a file from ``begin`` on."""
    where = files.where(name)
    size = files.size_bytes(name) - begin if size_bytes is None else size_bytes
    files.require(name, begin, min(size, 8))
    try:
        start = header_size(files.read(name, begin, min(size, 8)), where, size)
    except FormatError as error:
        raise _error(where, begin, str(error)) from None
    document = _decode(files.read(name, begin + 8, start - 8), where, begin)
    metadata = document.pop(METADATA, {})
    if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
        raise _error(where, begin + 8, "its metadata are not texts")
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    spans: list[tuple[int, int, str]] = []
    for tensor, raw in document.items():
        dtype, shape, first, stop = _tensor(raw, f"{where}: {tensor!r:.200}", begin + 8)
        spans.append((first, stop, tensor))
        tensors[tensor] = dtype, shape, begin + start + first
    _refuse_gaps(spans, size - start, where, begin + start)
    return SafetensorsFile(where, tensors, metadata)


def _error(where: str, offset: int, why: str) -> ForeignFormatError:
    return ForeignFormatError(f"{where}, byte {offset}: {why}", path=where, offset=offset)


def _decode(raw: bytes, where: str, begin: int) -> dict[str, Any]:
    try:
        document = json.loads(refuse_hollow(raw, where).decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _error(where, begin + 8, f"no header of safetensors: {error!s:.200}") from None
    if not isinstance(document, dict):
        raise _error(where, begin + 8, "no header of safetensors")
    return document


def _tensor(raw: Any, where: str, at: int) -> tuple[str, tuple[int, ...], int, int]:
    try:
        one = msgspec.convert(raw, _RawTensor)
    except msgspec.ValidationError as error:
        raise _error(where, at, str(error)) from None
    if one.dtype not in ITEMSIZE or one.dtype in STORED_AS_BYTES:
        raise _error(where, at, f"the dtype {one.dtype!r:.50} can't be read yet")
    if len(one.shape) > MAX_DIMS or any(size < 0 for size in one.shape):
        raise _error(where, at, f"no tensor has the shape {one.shape!r:.50}")
    first, stop = one.data_offsets
    if first < 0 or stop - first != volume(one.shape) * ITEMSIZE[one.dtype]:
        raise _error(where, at, f"it has bytes {first} to {stop}, its shape needs others")
    return one.dtype, tuple(one.shape), first, stop


def _refuse_gaps(spans: list[tuple[int, int, str]], size: int, where: str, at: int) -> None:
    expected = 0
    for first, stop, name in sorted(spans):
        if first != expected:
            raise _error(where, at + first, f"{name!r:.200} leaves a gap or overlaps another")
        expected = stop
    if expected != size:
        raise _error(
            where,
            at + expected,
            f"{size} bytes of data, its tensors have {expected}: it was cut short, or is damaged",
        )


def read_safetensors(files: SourceFiles, names: list[str]) -> tuple[dict[str, ForeignLeaf], int]:
    """The leaves of several files, each shown as an image, and how many there are."""
    whole: dict[str, ForeignLeaf] = {}
    boxes: dict[str, list[tuple[str, Box, StoredBox]]] = {}
    for rank, name in enumerate(names):
        file = open_safetensors(files, name)
        offsets = _sharding(file)
        for tensor, (dtype, shape, offset) in file.tensors.items():
            extent = Extent(name, offset)
            start = offsets.get(tensor)
            if start is None:
                if tensor in whole or tensor in boxes:
                    raise _error(file.where, offset, f"{tensor!r:.200} is in two files")
                whole[tensor] = ForeignLeaf(
                    dtype, shape, (StoredBox(Box.whole(shape), extent, rank),)
                )
                continue
            if len(start) != len(shape) or tensor in whole:
                raise _error(file.where, offset, f"{tensor!r:.200} has no such offsets")
            box = Box.whole(shape).shift(start)
            boxes.setdefault(tensor, []).append((dtype, box, StoredBox(box, extent, rank)))
    for tensor, some in boxes.items():
        if len({dtype for dtype, *_ in some}) > 1:
            raise _error(files.where(names[0]), 8, f"{tensor!r:.200} has two dtypes")
        ends = zip(*(box.stop for _, box, _ in some), strict=True)
        shape = tuple(max(dim) for dim in ends)
        whole[tensor] = ForeignLeaf(some[0][0], shape, tuple(part for *_, part in some))
    return whole, len(names)


_NUMBERED = re.compile(r"(?:shard-[0-9]+-)?(.*?)([0-9]+)-of-([0-9]+)\.safetensors")


def refuse_without_siblings(files: SourceFiles, names: list[str]) -> None:
    """Refuse files that are called N of M where others of the M are not there.

    The shards of one file, as DCP names them, count as one.
    """
    there: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if matched := _NUMBERED.fullmatch(name):
            there.setdefault((matched[1], matched[3]), set()).add(int(matched[2]))
    for (stem, of), numbers in there.items():
        if len(numbers) != int(of):
            raise _error(
                files.where(names[0]),
                0,
                f"of {of} files {stem}N-of-{of}.safetensors, {len(numbers)} are there: give the "
                "directory with all of them",
            )


def _sharding(file: SafetensorsFile) -> dict[str, tuple[int, ...]]:
    """Where the tensors of a sharded file of DCP begin in the whole ones."""
    text = file.metadata.get(SHARDING)
    if text is None:
        return {}
    try:
        document = json.loads(refuse_hollow(text.encode(), file.where))
        found = {name: tuple(one["saved_offsets"]) for name, one in document.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _error(file.where, 8, f"its {SHARDING} is malformed") from None
    if any(type(at) is not int or at < 0 for start in found.values() for at in start):
        raise _error(file.where, 8, f"its {SHARDING} is malformed")
    return found


def indexed_names(files: SourceFiles, index: str) -> list[str]:
    """The files that an index names, each below the directory; it must name some."""
    where = files.where(index)
    try:
        document = json.loads(refuse_hollow(files.read(index), where), object_pairs_hook=unique)
        mapped = document["weight_map"]
        names = sorted({checked_name(name, where) for name in mapped.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _error(where, 0, f"no index of safetensors files: {error!s:.200}") from None
    if not names:
        raise _error(where, 0, "it names no file")
    return names


def check_index(files: SourceFiles, index: str, leaves: dict[str, ForeignLeaf]) -> None:
    """Refuse an index that names a tensor that no file has."""
    mapped = json.loads(files.read(index))["weight_map"]
    missing = sorted(mapped.keys() - leaves.keys())
    if missing:
        raise _error(
            files.where(index), 0, f"it names {missing[0]!r:.200}, which is in none of its files"
        )
