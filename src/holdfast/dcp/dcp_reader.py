"""Reads checkpoints of a root here for ``torch.distributed.checkpoint.load``.

The metadata are those that DCP would have had; where a state dict has another form than the saved
one, its names are found all the same. Every byte is verified before the call returns.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.dcp.checkpoint_ids import CheckpointPlace, note_known, place_below, refuse_prefix
from holdfast.dcp.stored_dict import StoredDict, dtype_of
from holdfast.errors import FormatError, NotFound, RestoreError
from holdfast.format import values as codec
from holdfast.format.native_types import StoredObject, make_object
from holdfast.geometry.box import Box
from holdfast.interop.opening import open_source
from holdfast.policy.arguments import wanted_step
from holdfast.restore.planning.plan import Want
from holdfast.restore.reading.read import CARRIERS, Array
from holdfast.restore.reading.reader import CheckpointReader
from holdfast.state.tensors import local_of
from holdfast.storage.open import normal_root


class Reader(StorageReader):
    """The ``storage_reader`` of ``dcp.load``: loads from a root, whoever saved there.

    ``root``: a directory or bucket that a Writer, ``holdfast.save`` or a Checkpointer saved to; or
    a checkpoint of another writer, as ``holdfast.open`` takes it. ``step``: the step to load, as
    there; None: the number at the end of ``checkpoint_id``, or, without one, the newest.

    Names are found in every form that a state dict has: optimizers nested, flattened or numbered.
    Values are inert: nothing that is stored is executed. Raises NotFound where there is no
    checkpoint, RestoreError when the ranks see different ones, ChecksumMismatch for changed bytes;
    then the state dict may hold a part of it and must not be used.
    """

    def __init__(self, root: str | os.PathLike[str], *, step: int | str | None = None) -> None:
        super().__init__()
        self.root = normal_root(root)
        self.step = wanted_step(step)
        self._place = CheckpointPlace(self.root, None, None)
        self._reader: CheckpointReader | None = None
        self._stored: StoredDict | None = None

    @property
    def checkpoint_id(self) -> str:
        """The root; as DCP's own readers name theirs."""
        return self.root

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See torch: always False, because torch would have to choose between two formats.

        ``checkpoint_id``: a path.
        """
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the step of the next load from an id.

        ``checkpoint_id``: a path that ends with the step, as ``step-500``; the root itself, or
        None, changes nothing. UsageError for any other.
        """
        self._close()
        if checkpoint_id is not None:
            place = place_below(checkpoint_id, self.root)
            if place.step is not None:
                self.step, self._place = place.step, place

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """See torch: what DCP would have written, from the manifest, the layout and the values."""
        self._close()
        reader = self._reader = CheckpointReader(open_source(self.root, step=self.step), self.step)
        stored = self._stored = StoredDict(reader)
        if self.step == self._place.step:
            refuse_prefix(stored.form.prefix, self._place)
        note_known(self.root)
        described = _DescribedItems(stored, reader)
        paths = {name: path for name, (path, _) in stored.items.items()}
        return Metadata(described, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See torch, which calls it.

        ``metadata``, ``is_coordinator``, ``args``, ``kwargs``: as torch gives them.
        """

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See torch, which calls it: every rank tells which checkpoint it reads.

        ``plan``: what this rank wants.
        """
        plan.storage_data = str(self._open().manifest.generation)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See torch, which calls it. RestoreError when the ranks read different checkpoints.

        ``plans``: what each rank wants.
        """
        seen = sorted({str(plan.storage_data) for plan in plans})
        if len(seen) > 1:
            raise RestoreError(
                f"the ranks see different checkpoints in {self.root}: {', '.join(seen)}. One was "
                "published meanwhile, or they see different directories: give a step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See torch, which calls it.

        ``plan``: what this rank wants. ``planner``: gives the tensors to fill, and takes values.
        """
        assert self._stored is not None
        try:
            prefixes = map(self._stored.numbered_prefix, map(_name, plan.items))
            numbered = {prefix for prefix in prefixes if prefix is not None}
            loading = _Loading(self._open(), self._stored, planner, numbered)
            loading.load(plan.items)
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open(self) -> CheckpointReader:
        assert self._reader is not None  # torch reads the metadata first
        return self._reader

    def _close(self) -> None:
        reader, self._reader, self._stored = self._reader, None, None
        if reader is not None:
            reader.close()


def _name(item: ReadItem) -> str:
    return item.storage_index.fqn


class _DescribedItems(dict[str, STORAGE_TYPES]):
    """The metadata of all items by name; names in another form than the saved one are found too."""

    def __init__(self, stored: StoredDict, reader: CheckpointReader) -> None:
        self._stored, self._reader = stored, reader
        super().__init__(
            {name: self._describe(name, item) for name, (_, item) in stored.items.items()}
        )

    def _describe(self, name: str, item: Any) -> STORAGE_TYPES:
        if isinstance(item, codec.LeafRef):
            leaf = self._reader.leaves[item.name]
            return _tensor(dtype_of(leaf.dtype), leaf.shape)
        if isinstance(item, torch.Tensor):
            return _tensor(item.dtype, tuple(item.shape))
        return BytesStorageMetadata()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and bool(self._find(name)))

    def __missing__(self, name: str) -> STORAGE_TYPES:
        found = self._find(name)
        if not found:
            raise KeyError(name)
        return self._describe(name, found[0])

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def _find(self, name: str) -> tuple[Any, ...]:
        return self._stored.find(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # it is sent to other processes as what it lists


def _tensor(dtype: torch.dtype, shape: Sequence[int]) -> TensorStorageMetadata:
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])


class _Loading:
    """One load on one rank: first all tensors at once, then the values."""

    def __init__(
        self,
        reader: CheckpointReader,
        stored: StoredDict,
        planner: LoadPlanner,
        numbered: set[str],
    ) -> None:
        self._reader, self._stored, self._planner = reader, stored, planner
        self._numbered = numbered
        self._wants: list[Want] = []
        self._arrays: dict[int, Array] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def load(self, items: Sequence[ReadItem]) -> None:
        tensors = [item for item in items if item.type is LoadItemType.TENSOR]
        targets = [self._want(item) for item in tensors]
        self._reader.read_into(self._wants, self._arrays)
        for target, source in self._copies:
            target.copy_(source)
        for item, target in zip(tensors, targets, strict=True):
            self._planner.commit_tensor(item, target)
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                self._load_value(item)

    def _found(self, item: ReadItem) -> Any:
        name = _name(item)
        numbered = name.startswith(tuple(self._numbered))
        found = self._stored.find(name, numbered=numbered)
        if not found:
            raise NotFound(f"{self._reader.manifest.generation} has no {name!r}")
        return found[0]

    def _want(self, item: ReadItem) -> torch.Tensor:
        """Note what is read for an item; the tensor that it is for."""
        found = self._found(item)
        target = self._planner.resolve_tensor(item).detach()
        start, sizes = tuple(item.storage_offsets), tuple(item.lengths)
        if tuple(target.shape) != sizes:
            raise FormatError(
                f"the planner gives a tensor of shape {list(target.shape)} for {list(sizes)} of "
                f"{_name(item)!r}"
            )
        box = Box(start, tuple(a + b for a, b in zip(start, sizes, strict=True)))
        if isinstance(found, torch.Tensor):
            self._copies.append((target, found[box.slices()] if box.ndim else found))
        elif isinstance(found, codec.LeafRef) and not box.is_empty:
            self._want_leaf(found.name, box, target)
        return target

    def _want_leaf(self, name: str, box: Box, target: torch.Tensor) -> None:
        dtype = dtype_of(self._reader.leaves[name].dtype)
        memory = target
        if not target.is_cpu or target.dtype != dtype or target.is_conj() or target.is_neg():
            memory = torch.empty(target.shape, dtype=dtype)
            self._copies.append((target, memory))
        number = len(self._wants)
        self._wants.append(Want(name, box, number))
        self._arrays[number] = _as_array(memory)

    def _load_value(self, item: ReadItem) -> None:
        value = _filled(self._found(item), self._reader)
        data = io.BytesIO()
        torch.save(value, data)  # what is loaded is what was decoded here, and no stored pickle
        data.seek(0)
        self._planner.load_bytes(item, data)


def _as_array(tensor: torch.Tensor) -> Array:
    """The memory of a tensor as an array of carriers."""
    local = local_of(tensor)
    bytes_ = local.element_size()
    if bytes_ == 16:
        return local.view(torch.complex128).numpy()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    array: Array = local.view(kinds[bytes_]).numpy()
    assert array.dtype == CARRIERS[bytes_]
    return array


def _filled(value: Any, reader: CheckpointReader) -> Any:
    """A value with its tensors in it."""
    if isinstance(value, codec.LeafRef):
        return reader.read(value.name)
    if type(value) in (list, tuple):
        return type(value)(_filled(item, reader) for item in value)
    if isinstance(value, dict):
        filled = value.copy()
        for key, item in value.items():
            filled[key] = _filled(item, reader)
        return filled
    if isinstance(value, StoredObject):
        return make_object(StoredObject(value.type, _filled(value.value, reader)))
    return value
