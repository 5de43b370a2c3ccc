"""Maps stored leaves to the memory to fill, and copies to devices through staging buffers.

Tensors that are made of several leaves, or are parts of one, are filled part by part through views
of their memory, without an intermediate copy.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace

from holdfast.accelerator import devices
from holdfast.geometry.box import HAVE_A_MEAN, ITEMSIZE, Box
from holdfast.geometry.layout import HolderBoxes, LeafEntry
from holdfast.geometry.mesh import REPLICATE, Instance
from holdfast.restore.averages import AveragedCopies as StoredCopies
from holdfast.restore.averages import AveragedLeaf, as_carrier, average
from holdfast.restore.planning.plan import BATCH_BYTES, Want
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import Destination
from holdfast.state.bindings import entry_of
from holdfast.state.mapped.checkpoint_view import CheckpointView
from holdfast.state.mapped.tensor_parts import LeafPart
from holdfast.state.tensors import TORCH_DTYPES, empty, leaf_entry, local_of


class _CopyRequest(Struct):
    """The boxes of one stored leaf that this rank wants."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[Box]
    entry: LeafEntry | None = None


class Destinations:
    """Destinations of one restore on this rank. ``view``: the checkpoint by the names here."""

    def __init__(
        self, tensors: Sequence[tuple[str, torch.Tensor]], rank: int, view: CheckpointView
    ) -> None:
        self.wants: list[Want] = []
        self.destinations: dict[int, Destination] = {}
        self.zeros: list[torch.Tensor] = []
        """The padding of tensors."""
        self.shared: set[int] = set()
        """The keys of wants that other ranks have too."""
        self.size_bytes = 0
        self._rank, self._view = rank, view
        self._asked: dict[str, _CopyRequest] = {}
        self._means: list[AveragedLeaf] = []
        locals_ = [local_of(tensor) for _, tensor in tensors]
        self.copies = DeviceCopies({local.device for local in locals_})
        for (name, tensor), local in zip(tensors, locals_, strict=True):
            self._add(name, tensor, local)
        self.entries = [_entry(leaf, asked) for leaf, asked in self._asked.items()]

    def _add(self, name: str, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """Want all boxes of ``tensor`` that this rank holds."""
        sight = self._view.sight(name, tensor)
        if sight is None:
            entry = leaf_entry(name, tensor, self._rank, "split")
            match = self._view.find(name)
            if match is not None and match[0] != name:
                entry = replace(entry, name=match[0])
            self._add_entry(entry, local)
            return
        for part in sight.parts:
            match = self._view.find(part.leaf)
            if match is not None:
                self._add_part(replace(part, leaf=match[0]), *match[1], local)
        self.zeros += [view.of(local) for view in sight.padding]

    def _add_part(
        self, part: LeafPart, dtype: str, shape: tuple[int, ...], local: torch.Tensor
    ) -> None:
        if part.instance is not None:
            self._add_entry(entry_of(part, dtype, "split"), part.views[0].of(local))
            return
        has_rows = part.rows > 0 and shape != part.shape
        is_mean = has_rows and shape[0] != part.rows
        if is_mean and dtype not in HAVE_A_MEAN:  # they are known to be equal: read the first
            part, is_mean = replace(part, rows=shape[0], row=0).as_stored(), False
        elif has_rows and not is_mean:
            part = part.as_stored()
        asked = self._asked.setdefault(part.leaf, _CopyRequest(dtype, shape, []))
        for box, view in zip(part.boxes, part.views, strict=True):
            if is_mean:
                copies = StoredCopies(part.leaf, dtype, shape[0], box)
                self._means.append(AveragedLeaf(copies, view.of(local)))
            else:
                asked.boxes.append(box)
                asked.entry = None
                if part.is_whole:
                    self.shared.add(len(self.wants))
                self._want(part.leaf, box, view.of(local), dtype)

    def _add_entry(self, entry: LeafEntry, local: torch.Tensor) -> None:
        """Want the part of a leaf that a plain tensor, or one on a mesh, holds."""
        boxes = entry.boxes(self._rank)
        asked = self._asked.get(entry.name)
        if asked is None:
            asked = self._asked[entry.name] = _CopyRequest(entry.dtype, entry.shape, [], entry)
        else:
            asked.entry = None
        asked.boxes += [box for box, _ in boxes]
        if _is_replicated(entry):
            self.shared.update(range(len(self.wants), len(self.wants) + len(boxes)))
        for whole, inside in boxes:
            is_all = inside.shape == tuple(local.shape)
            self._want(entry.name, whole, local if is_all else local[inside.slices()], entry.dtype)

    def _want(self, leaf: str, box: Box, into: torch.Tensor, dtype: str) -> None:
        key = len(self.wants)
        self.wants.append(Want(leaf, box, key))
        self.size_bytes += box.volume * ITEMSIZE[dtype]
        stored = TORCH_DTYPES[dtype]
        is_late = into.device.type != "cpu" or into.is_conj() or into.is_neg()
        if _is_cast(into, dtype):
            self.destinations[key] = DeviceTensor(into, self.copies, stored)
        elif is_late:
            self.destinations[key] = DeviceTensor(into, self.copies)
        else:
            self.destinations[key] = as_carrier(into)

    def average(self, checkpoint: Checkpoint) -> int:
        """Fill the destinations that are means of several copies; return the bytes read."""
        return average(checkpoint, self._means)

    def pad(self) -> None:
        """Set the padding to zero."""
        for zeros in self.zeros:
            zeros.zero_()


def _is_replicated(entry: LeafEntry) -> bool:
    """Return whether the entry shows that other ranks hold the same elements as this one."""
    instance = entry.instance
    if not isinstance(instance, Instance):
        return instance is None
    cuts = zip(instance.mesh.shape, instance.placements, strict=True)
    return any(size > 1 and placement == REPLICATE for size, placement in cuts)


def _is_cast(into: torch.Tensor, dtype: str) -> bool:
    """Return whether the elements are converted. Carriers always have the stored dtype."""
    return into.dtype not in (TORCH_DTYPES[dtype], _copyable_dtype(dtype))


@functools.cache
def _copyable_dtype(dtype: str) -> torch.dtype:
    """Return the dtype as which torch copies elements that it cannot copy as they are."""
    return local_of(empty((0,), dtype)).dtype  # torch.empty warns for some dtypes


def _entry(leaf: str, asked: _CopyRequest) -> LeafEntry:
    """Return what this rank wants of a leaf, in the form in which it would declare it."""
    if asked.entry is not None and len(asked.boxes) == len(set(asked.boxes)):
        return asked.entry
    boxes: list[Box] = []
    for box in sorted(set(asked.boxes), key=lambda box: -box.volume):
        left = [box]
        for taken in boxes:
            left = [part for one in left for part in one.subtract(taken)]
        boxes += [part for part in left if not part.is_empty]
    boxes.sort(key=lambda box: box.start)
    held = None if boxes == [Box.whole(asked.shape)] else HolderBoxes(tuple(boxes))
    return LeafEntry(leaf, asked.dtype, asked.shape, "split", held)


# Copies verified bytes to tensors that the host cannot write directly, through staging buffers.
#
# Tensors on a GPU are filled by copies on a side stream, out of a bounded amount of pinned memory,
# while the next bytes are read. On the CPU the same path serves tensors stored in another form than
# they are shown (conjugated or negated views). Host memory does not grow with the state.
#
# The order of copies makes this safe: a side stream starts after all earlier work of the caller's
# stream; a staging buffer is lent again only when the copies out of it are done; and the caller's
# stream continues after the last copy.


Array = np.ndarray[Any, Any]


class DeviceCopies:
    """Copies on a side stream of each GPU; copies between host tensors are made at once."""

    def __init__(self, used: Iterable[torch.device]) -> None:
        self._devices = [device for device in used if devices.is_streamed(device)]
        self._streams: dict[torch.device, torch.Stream] = {}

    def begin(self) -> None:
        """Prepare for the first copy, on the thread whose work uses the tensors."""
        for device in self._devices:
            with devices.use_device(device):
                stream = devices.make_stream(device)
                stream.wait_stream(devices.current_stream(device))
            self._streams[device] = stream

    def memory(self, size_bytes: int) -> torch.Tensor:
        """Allocate host memory that can be copied from while the host continues."""
        with devices.work_beside(self._devices):
            if self._devices:
                return devices.empty_pinned(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Fill ``to``, of the same shape; ``source`` is read until a later mark has been waited
        for.

        Where their dtypes differ it is converted.
        """
        if to.device not in self._streams:
            to.copy_(source)
            return
        with devices.use_stream(self._streams[to.device]):
            if to.dtype != source.dtype:  # converted there, in this stream's own memory
                source = source.to(to.device, non_blocking=True)
            to.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """Return a function that waits until all copies requested so far are done."""
        events = [devices.record_event(stream) for stream in self._streams.values()]

        def wait() -> None:
            for event in events:
                devices.await_event(event)

        return wait

    def end(self) -> None:
        """Wait for all copies; later device work of that thread comes after them."""
        for device, stream in self._streams.items():
            stream.synchronize()  # raises the error of a failed copy
            with devices.use_device(device):
                devices.current_stream(device).wait_stream(stream)


class DeviceTensor:
    """A tensor as a destination (``holdfast.restore.reading.read.DeferredCopy``).

    ``stored``: the dtype it is converted from, where that is another one.
    """

    def __init__(
        self, tensor: torch.Tensor, copies: DeviceCopies, stored: torch.dtype | None = None
    ) -> None:
        self._tensor, self._copies = tensor, copies
        self._dtype = stored or tensor.dtype
        is_as_it_lies = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        self.is_flat = is_as_it_lies and stored in (None, tensor.dtype)

    def write(self, at: int, data: memoryview) -> None:
        """See ``DeferredCopy``."""
        to = self._tensor.reshape(-1).view(torch.uint8)[at : at + len(data)]
        self._copies.copy(to, torch.from_numpy(np.frombuffer(data, np.uint8)))

    def write_box(self, box: Box, data: Array) -> None:
        """See ``DeferredCopy``."""
        to = self._tensor[box.slices()] if box.ndim else self._tensor
        self._copies.copy(to, torch.from_numpy(data).view(self._dtype))


class _StagingBuffer(NamedTuple):
    memory: torch.Tensor | None
    wait: Callable[[], None]


class Staging:
    """A bounded amount of memory, lent in buffers: each again only when its copies are done."""

    def __init__(
        self, copies: DeviceCopies, size_bytes: int, part_bytes: int | None = None
    ) -> None:
        self._copies = copies
        self._part_bytes = part_bytes or BATCH_BYTES
        self._free: queue.SimpleQueue[_StagingBuffer] = queue.SimpleQueue()
        for _ in range(max(2, size_bytes // self._part_bytes)):
            self._free.put(_StagingBuffer(None, _nothing))

    @contextmanager
    def borrow(self, size_bytes: int) -> Iterator[memoryview]:
        """Lend a buffer of this size; its content may be copied from until it is lent again."""
        memory, wait = self._free.get()
        try:
            wait()
            wait = _nothing
            if memory is None or memory.nbytes < size_bytes:
                memory = self._copies.memory(max(size_bytes, self._part_bytes))
            yield memory.numpy().data[:size_bytes]
            wait = self._copies.mark()
        except BaseException:
            memory = None  # copies may still read it: do not lend it again
            raise
        finally:
            self._free.put(
                _StagingBuffer(memory, wait)
            )  # always, because other threads wait for a buffer


def _nothing() -> None:
    """Wait for nothing: no copy is under way."""
