"""Tells by its first elements whether a master in F32 is that of a parameter, which was rounded.

Writers number the parameters of an optimizer. Where the numbers are matched by a rule of theirs, a
master that is not its parameter's says that the rule is another one. To compare all elements would
read the whole model before it is opened; parameters whose first elements are alike, as the weights
of norms that are still ones, are not told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.geometry.box import ITEMSIZE
from holdfast.interop.extent_reader import read_extent
from holdfast.interop.foreign import ForeignLeaf
from holdfast.interop.source_files import SourceFiles

#: The element types that parameters with masters have.
NARROW = frozenset(("BF16", "F16"))
_COMPARED = 64


def is_master_of(files: SourceFiles, master: ForeignLeaf, leaf: ForeignLeaf) -> bool:
    """True if the first elements of ``master``, rounded, are those of ``leaf``."""
    if master.dtype != "F32" or master.shape != leaf.shape:
        return False
    wide = np.frombuffer(start_of(files, master), np.float32)
    raw = start_of(files, leaf)[: len(wide) * ITEMSIZE[leaf.dtype]]
    wide = wide[: len(raw) // ITEMSIZE[leaf.dtype]]
    if leaf.dtype == "F32":
        return wide.tobytes() == raw
    if leaf.dtype == "F16":
        with np.errstate(over="ignore"):
            rounded = wide.astype(np.float16).tobytes()
    else:
        bits = wide.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    return rounded == raw or bool(np.isnan(wide).any())


def differing_copies(
    files: SourceFiles, masters: Mapping[str, ForeignLeaf], model: Mapping[str, Any]
) -> list[str]:
    """A note of the first of ``masters`` that is not that of its copy in ``model``, if one is not.
    Copies in files of another form, as shards of the whole, are not compared.
    """
    differing = [
        name
        for name, master in masters.items()
        if isinstance(leaf := model.get(name), ForeignLeaf)
        and master.dtype == "F32"
        and leaf.dtype in (*NARROW, "F32")
        and leaf.shape == master.shape
        and not is_master_of(files, master, leaf)
    ]
    if not differing:
        return []
    (part, *_), (copy, *_) = masters[differing[0]].parts, model[differing[0]].parts
    return [
        f"{differing[0]:.200} in {files.where(part.extent.file)} is not that of its copy in "
        f"{files.where(copy.extent.file)}, nor are {len(differing) - 1} others of {len(masters)}: "
        "files of two saves may be mixed"
    ]


def start_of(files: SourceFiles, leaf: ForeignLeaf) -> bytearray:
    """The first elements, as far as they lie in the first box of it."""
    some = [part for part in leaf.parts if not part.box.is_empty]
    if not some:
        return bytearray()
    part = min(some, key=lambda one: one.box.start)
    data = bytearray(min(_COMPARED, part.box.volume) * ITEMSIZE[leaf.dtype])
    read_extent(files, part.extent, part.box.shape, leaf.dtype, 0, memoryview(data))
    return data
