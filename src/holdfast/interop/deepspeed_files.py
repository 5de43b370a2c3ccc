"""Opens the files of one DeepSpeed checkpoint, each once, and finds the elements of flat groups."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from msgspec.structs import replace

from holdfast.errors import ForeignFormatError, UsageError
from holdfast.geometry.box import ITEMSIZE, flat_boxes
from holdfast.interop.deepspeed_tags import is_of_another_rank
from holdfast.interop.foreign import StoredBox
from holdfast.interop.pickle_records import TensorRef
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.torch_files import TorchFile, Tree, open_torch_file

#: Of the element types that a count of steps has.
_CODES = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}


class TagFiles:
    """The files in the folder ``tag`` ("" or with "/" at its end), by their names below it."""

    def __init__(self, files: SourceFiles, tag: str) -> None:
        self.files, self._tag = files, tag
        self.names = {name.removeprefix(tag) for name in files.names() if name.startswith(tag)}
        self._opened: dict[str, TorchFile] = {}
        self._of_atoms = {name.rpartition("/")[2] for name in self.names if name[:5] == "zero/"}

    def where(self, name: str) -> str:
        """The file, for messages."""
        return self.files.where(self._tag + name)

    def error(self, name: str, why: str) -> ForeignFormatError:
        """What is wrong with a file."""
        return ForeignFormatError(f"{self.where(name)}: {why}", path=self.where(name), offset=0)

    def missing(self, name: str, of: str) -> ForeignFormatError:
        """A file is not there, of those that belong together."""
        return self.error(
            name,
            f"it is not there, of {of}. Copy it from where they were written, or give a checkpoint "
            "that is whole",
        )

    def unread(self, name: str, what: str) -> UsageError:
        """A file, or with "" the folder, is of a kind that can't be read yet."""
        return UsageError(
            f"{self.where(name)}: {what} can't be read yet. Load it with DeepSpeed and save the "
            "state from there"
        )

    def numbered(self, pattern: re.Pattern[str]) -> dict[tuple[int, ...], str]:
        """The files whose names have numbers by ``pattern``; an error where two have the same."""
        found: dict[tuple[int, ...], str] = {}
        for name in sorted(self.names):
            if matched := pattern.fullmatch(name):
                numbers = tuple(-1 if one is None else int(one) for one in matched.groups())
                if (other := found.setdefault(numbers, name)) != name:
                    raise self.error(
                        name, f"{other} is of this rank, too: files of two saves are mixed"
                    )
        return found

    def open(self, name: str) -> TorchFile:
        """A ``torch.save`` file."""
        if name not in self._opened:
            opened = open_torch_file(self.files, self._tag + name)
            other = f"{opened.written_as}.pt"
            last = name.rpartition("/")[2]
            is_misplaced = name.startswith("zero/") and last != other in self._of_atoms
            if is_misplaced or is_of_another_rank(last, other):
                raise self.error(
                    name,
                    f"it was written as {other}: files were renamed, or put in each other's place. "
                    "Give each its own name",
                )
            self._opened[name] = opened
        return self._opened[name]

    def value(self, name: str) -> dict[str, Any]:
        """The dictionary in a file."""
        value = self.open(name).value
        if not isinstance(value, dict):
            raise self.error(name, "it holds no dictionary of a state")
        return value

    def tree(self, name: str) -> Any:
        """What is in a file, with leaves in place of tensors."""
        return Tree(self.open(name)).value()

    def run(
        self,
        name: str,
        ref: Any,
        begin: int,
        start: int,
        count: int,
        shape: tuple[int, ...],
        rank: int,
    ) -> list[StoredBox]:
        """Elements ``start`` on of a parameter, which lie from ``begin`` on in a flat tensor."""
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or ref.strides != (1,):
            raise self.error(name, "a flat group that is no row of elements")
        if begin + count > ref.shape[0] or start + count > math.prod(shape):
            raise self.error(name, f"{count} elements from {begin} on are not in its flat group")
        extent = replace(self.open(name).place(ref), strides=None)
        at, found = extent.offset + begin * ITEMSIZE[ref.dtype], []
        for box in flat_boxes(shape, start, start + count):
            found.append(StoredBox(box, replace(extent, offset=at), rank))
            at += box.volume * ITEMSIZE[ref.dtype]
        return found

    def number(self, name: str, value: Any) -> float | None:
        """A number, or the one in a tensor of one element; None for anything else."""
        if isinstance(value, TensorRef) and value.shape == () and value.dtype in _CODES:
            raw = bytes.fromhex(self.single(name, value))
            return float(struct.unpack(_CODES[value.dtype], raw)[0])
        return value if type(value) in (int, float) else None

    def single(self, name: str, value: Any) -> Any:
        """The bytes of a tensor with one element, in hexadecimal digits, or a plain value."""
        if not isinstance(value, TensorRef) or value.shape != ():
            return value
        extent = self.open(name).place(value)
        return self.files.read(extent.file, extent.offset, ITEMSIZE[value.dtype]).hex()


def named_options(options: list[dict[str, Any]], groups: list[list[str]]) -> list[dict[str, Any]]:
    """The groups of an optimizer with the names of their parameters."""
    return [{**one, "params": names} for one, names in zip(options, groups, strict=True)]
