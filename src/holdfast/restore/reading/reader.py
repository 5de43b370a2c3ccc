"""Opens a checkpoint for reading: leaves, values, any box of any leaf. Needs no torch.

Where torch is loaded already, or a leaf has a dtype numpy lacks, ``read`` gives torch tensors;
otherwise numpy arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct

from holdfast.catalogue import NEW_LISTS
from holdfast.errors import NotFound, UsageError
from holdfast.format import values as codec
from holdfast.format.manifest import Manifest
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.layout import Layout
from holdfast.leases import ReadLease
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.restore.reading.read import (
    CARRIERS,
    Array,
    Destination,
    plan_reads,
    read_aliases,
    read_values,
    read_wants,
)
from holdfast.restore.reading.stored import choose_stored
from holdfast.storage.base import Store

NUMPY_NAMES = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U64": "u8",
    "U32": "u4",
    "U16": "u2",
    "U8": "u1",
    "BOOL": "?",
    "C64": "c8",
    "C128": "c16",
}


class LeafInfo(Struct, frozen=True):
    """Describes a leaf: ``dtype`` as in the safetensors format, ``shape`` of the whole leaf."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole leaf."""
        return Box.whole(self.shape).volume * ITEMSIZE[self.dtype]


class CheckpointReader:
    """One published checkpoint. Use as a context manager, or call ``close``.

    Its ``leaves`` are a mapping of names to what has ``name``, ``dtype``, ``shape`` and
    ``size_bytes``, and its ``manifest`` is the document that names the images.
    """

    def __init__(self, store: Store, step: int | str | None) -> None:
        self._url = store.url
        self._lease = ReadLease(store)
        self._lease.end_with(self)
        try:
            self.manifest: Manifest = _choose(store, step, self._lease)
            self._checkpoint: Checkpoint = from_manifest(store, self.manifest)
        except BaseException:
            self.close()
            raise
        self.leaves: dict[str, LeafInfo] = {
            leaf.name: LeafInfo(leaf.name, leaf.dtype, tuple(leaf.shape))
            for leaf in self.layout.leaves
        }

    def __repr__(self) -> str:
        return f"<CheckpointReader of step {self.step} in {self._url}, leaves: {len(self.leaves)}>"

    @property
    def step(self) -> int:
        """The step of the snapshot."""
        return self.manifest.step

    @property
    def layout(self) -> Layout:
        """The layout: which rank held, and which stored, which box of which leaf."""
        return self._checkpoint.layout

    @property
    def values(self) -> Mapping[str, Any]:
        """The plain values, as rank 0 had them, by the state's keys.

        Small tensors are what ``read`` gives; larger ones are a ``LeafRef`` with the leaf's name.
        """
        small = self._small

        def leaf(name: str) -> Any:
            return small[name] if name in small else codec.LeafRef(name)

        return {
            key: codec.decode(value, leaf=leaf, tensor=lambda one: small[one.name])
            for key, value in self._shared.items()
        }

    @property
    def checkpoint(self) -> Checkpoint:
        """Its images, for reads of several boxes at once."""
        return self._checkpoint

    @property
    def _shared(self) -> dict[str, Any]:
        shared: dict[str, Any] = read_values(self._checkpoint, 0).get("shared", {})
        return shared

    @cached_property
    def _small(self) -> dict[str, Any]:
        """The small tensors among the values, by name."""
        tensors: dict[str, Any] = {}
        for value in self._shared.values():
            codec.decode(value, tensor=lambda one: tensors.setdefault(one.name, _of_small(one)))
        return tensors

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors, mapped to the leaf they are stored as."""
        return read_aliases(self._checkpoint, read_values(self._checkpoint, 0))

    def document(self, rank: int) -> dict[str, Any]:
        """The values in the image of ``rank``, as encoded: ``shared``, ``own`` and ``aliases``."""
        return read_values(self._checkpoint, rank)

    def read_into(self, wants: Sequence[Want], destinations: Mapping[int, Destination]) -> int:
        """Read boxes of leaves into memory, verified; returns the bytes read.

        ``wants``: a ``Want`` for each box. ``destinations``: for the key of each, an array of its
        shape, of integers of the elements' size.

        Nothing of them may be used before it returns, nor after an error.
        """
        size_bytes = read_wants(self._checkpoint, wants, destinations)
        self._checkpoint.require_unchanged()
        return size_bytes

    def read(self, name: str, box: Box | Sequence[slice] | None = None) -> Any:
        """Read a leaf, or a box of it, verified: a torch tensor or numpy array of the box's shape.

        ``name``: a key of ``leaves``. ``box``: a Box, or slices without steps, one for each
        dimension; None for the whole leaf.

        Raises NotFound for an unknown name, UsageError for a box outside the leaf.
        """
        leaf = self.leaves.get(name) or self.leaves.get(self.aliases.get(name, ""))
        if leaf is None and name in self._small:
            small = self._small[name]
            whole = LeafInfo(name, "U8", tuple(small.shape))  # for its shape
            return small[box_in(box, whole).slices()] if small.shape else small
        if leaf is None:
            raise NotFound(f"step {self.step} has no leaf {name!r}; .leaves lists what it has")
        wanted = box_in(box, leaf)
        wants = [] if wanted.is_empty else [Want(leaf.name, wanted, 0)]
        batches = plan_reads(self._checkpoint, wants, flat=range(len(wants)))
        array: Array = np.empty(wanted.shape, dtype=CARRIERS[ITEMSIZE[leaf.dtype]])
        read_wants(self._checkpoint, wants, {0: array}, batches=batches)
        return _as_array(array, leaf.dtype)

    def close(self) -> None:
        """Release the lease, so that retention may remove the checkpoint. Nothing else is held
        open.
        """
        self._lease.end()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _choose(store: Store, step: int | str | None, lease: ReadLease) -> Manifest:
    """Resolve ``step`` and hold the lease; list the store again where retention was faster."""
    for _ in range(NEW_LISTS):
        found, fit = choose_stored(store, step)
        manifest = found.read[fit[0].generation]
        if lease.take(manifest):
            return manifest
    raise NotFound(
        f"{store.url} loses checkpoints faster than they can be listed: {manifest.generation} "
        "has gone too. Pin one, or keep more of them."
    )


def _are_slices(box: object) -> bool:
    return isinstance(box, (list, tuple)) and all(isinstance(one, slice) for one in box)


def box_in(box: Box | Sequence[slice] | None, leaf: LeafInfo) -> Box:
    """Return a box of a leaf from a Box or slices; UsageError for one that is not inside it."""
    whole = Box.whole(leaf.shape)
    if box is None:
        return whole
    if not isinstance(box, Box):
        if not (_are_slices(box) and len(box) == len(leaf.shape)):
            raise UsageError(f"{leaf.name} has {len(leaf.shape)} dimensions: give a slice for each")
        if any(one.step not in (None, 1) for one in box):
            raise UsageError(f"{leaf.name}: {list(box)} has a step: give slices without one")
        bounds = [s.indices(size)[:2] for s, size in zip(box, leaf.shape, strict=True)]
        box = Box(tuple(b[0] for b in bounds), tuple(max(b) for b in bounds))
    if not whole.contains(box):
        raise UsageError(f"{box.start}:{box.stop} is not inside {leaf.name}, which is {leaf.shape}")
    return box


def _of_small(small: codec.SmallTensor) -> Any:
    return _as_array(_carriers(bytearray(small.data), small.dtype, small.shape), small.dtype)


def _carriers(memory: bytearray, dtype: str, shape: tuple[int, ...]) -> Array:
    array: Array = np.frombuffer(memory, dtype=CARRIERS[ITEMSIZE[dtype]])
    return array.reshape(shape)


def _as_array(array: Array, dtype: str) -> Any:
    """Return a torch tensor where torch is loaded or numpy lacks the dtype; else a numpy array."""
    if "torch" in sys.modules or dtype not in NUMPY_NAMES:
        return tensor_of(array, dtype)
    return array.view(NUMPY_NAMES[dtype])


def tensor_of(array: Any, dtype: str) -> Any:
    """Return a torch tensor of the elements of ``array``, which has carriers of ``dtype``."""
    import importlib

    torch = importlib.import_module("torch")
    tensors = importlib.import_module("holdfast.state.tensors")
    return torch.from_numpy(array).view(tensors.TORCH_DTYPES[dtype])
