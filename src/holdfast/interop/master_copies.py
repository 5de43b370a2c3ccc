"""Tells by its first elements whether a master in F32 is that of a parameter, which was rounded.

Writers number the parameters of an optimizer. Where the numbers are matched by a rule of theirs, a
master that is not its parameter's says that the rule is another one. To compare all elements would
read the whole model before it is opened; parameters whose first elements are alike, as the weights
of norms that are still ones, are not told apart.
"""

from __future__ import annotations

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
    wide = np.frombuffer(_start_of(files, master), np.float32)
    raw = _start_of(files, leaf)[: len(wide) * ITEMSIZE[leaf.dtype]]
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


def _start_of(files: SourceFiles, leaf: ForeignLeaf) -> bytearray:
    """The first elements, as far as they lie in the first box of it."""
    some = [part for part in leaf.parts if not part.box.is_empty]
    if not some:
        return bytearray()
    part = min(some, key=lambda one: one.box.start)
    data = bytearray(min(_COMPARED, part.box.volume) * ITEMSIZE[leaf.dtype])
    read_extent(files, part.extent, part.box.shape, leaf.dtype, 0, memoryview(data))
    return data
