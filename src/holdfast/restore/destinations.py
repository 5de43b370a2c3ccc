"""Where all that is read belongs: boxes of stored leaves, each with the memory it goes into.

Tensors that are made of several leaves, or are parts of one, are filled part by part through
views of their memory: nothing is put together elsewhere first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from holdfast.geometry.box import Box
from holdfast.geometry.dtypes import HAVE_A_MEAN, ITEMSIZE
from holdfast.geometry.layout import Held, LeafEntry
from holdfast.geometry.placements import REPLICATE, Instance
from holdfast.load.late import Copies, LateTensor, StreamCopies
from holdfast.load.means import Copies as StoredCopies
from holdfast.load.means import Mean, as_carrier, average
from holdfast.load.move import Destination
from holdfast.load.plan import Want
from holdfast.load.source import Checkpoint
from holdfast.state.entries import entry_of
from holdfast.state.offer import Offer
from holdfast.state.sight import Part
from holdfast.state.tensors import TORCH_DTYPES, empty, leaf_entry, local_of


@dataclass(slots=True)
class _Asked:
    """What this rank wants of one stored leaf."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[Box]
    entry: LeafEntry | None = None


class Filling:
    """Destinations of one restore on this rank. ``offer``: None where nothing is seen by rules."""

    def __init__(
        self, tensors: Sequence[tuple[str, torch.Tensor]], rank: int, offer: Offer | None = None
    ) -> None:
        self.wants: list[Want] = []
        self.destinations: dict[int, Destination] = {}
        self.zeros: list[torch.Tensor] = []
        """What of the tensors is padding."""
        self.shared: set[int] = set()
        """The keys of wants that other ranks have too."""
        self.size_bytes = 0
        self._rank, self._offer = rank, offer
        self._asked: dict[str, _Asked] = {}
        self._means: list[Mean] = []
        locals_ = [local_of(tensor) for _, tensor in tensors]
        self.copies: Copies = StreamCopies({local.device for local in locals_})
        for (name, tensor), local in zip(tensors, locals_, strict=True):
            self._add(name, tensor, local)
        self.entries = [_entry(leaf, asked) for leaf, asked in self._asked.items()]

    def _add(self, name: str, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """Want all boxes of ``tensor`` that this rank holds."""
        sight = None if self._offer is None else self._offer.sight(name, tensor)
        if sight is None:
            entry = leaf_entry(name, tensor, self._rank, "split")
            found = None if self._offer is None else self._offer.find(name)
            self._add_entry(replace(entry, name=found[0]) if found else entry, local)
            return
        assert self._offer is not None
        for part in sight.parts:
            found = self._offer.find(part.leaf)
            if found is not None:
                self._add_part(replace(part, leaf=found[0]), *found[1], local)
        self.zeros += [view.of(local) for view in sight.padding]

    def _add_part(
        self, part: Part, dtype: str, shape: tuple[int, ...], local: torch.Tensor
    ) -> None:
        if part.instance is not None:
            self._add_entry(entry_of(part, dtype, "split"), part.views[0].of(local))
            return
        has_rows = part.rows > 0 and shape != part.shape
        is_mean = has_rows and shape[0] != part.rows
        if is_mean and dtype not in HAVE_A_MEAN:  # they were found to be equal: the first is each
            part, is_mean = replace(part, rows=shape[0], row=0).as_stored(), False
        elif has_rows and not is_mean:
            part = part.as_stored()
        asked = self._asked.setdefault(part.leaf, _Asked(dtype, shape, []))
        for box, view in zip(part.boxes, part.views, strict=True):
            if is_mean:
                copies = StoredCopies(part.leaf, dtype, shape[0], box)
                self._means.append(Mean(copies, view.of(local)))
            else:
                asked.boxes.append(box)
                asked.entry = None
                if part.is_whole:
                    self.shared.add(len(self.wants))
                self._want(part.leaf, box, view.of(local), dtype)

    def _add_entry(self, entry: LeafEntry, local: torch.Tensor) -> None:
        """Want what a plain tensor, or one on a mesh, is of a leaf."""
        boxes = entry.boxes(self._rank)
        asked = self._asked.get(entry.name)
        if asked is None:
            asked = self._asked[entry.name] = _Asked(entry.dtype, entry.shape, [], entry)
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
            self.destinations[key] = LateTensor(into, self.copies, stored)
        elif is_late:
            self.destinations[key] = LateTensor(into, self.copies)
        else:
            self.destinations[key] = as_carrier(into)

    def average(self, checkpoint: Checkpoint) -> int:
        """Fill what is the mean of several copies, each of which is read; how many bytes."""
        return average(checkpoint, self._means)

    def pad(self) -> None:
        """Make the padding zero."""
        for zeros in self.zeros:
            zeros.zero_()


def _is_replicated(entry: LeafEntry) -> bool:
    """Whether other ranks hold what this one holds, as far as the leaf itself tells."""
    instance = entry.instance
    if not isinstance(instance, Instance):
        return instance is None
    cuts = zip(instance.mesh.shape, instance.placements, strict=True)
    return any(size > 1 and placement == REPLICATE for size, placement in cuts)


def _is_cast(into: torch.Tensor, dtype: str) -> bool:
    """Whether the elements are converted. Carriers are of the stored dtype, whatever they are."""
    return into.dtype not in (TORCH_DTYPES[dtype], _seen_as(dtype))


@functools.cache
def _seen_as(dtype: str) -> torch.dtype:
    """What torch copies elements of a dtype as, where it cannot copy them as they are."""
    return local_of(empty((0,), dtype)).dtype  # torch.empty warns of some


def _entry(leaf: str, asked: _Asked) -> LeafEntry:
    """What this rank wants of a leaf, as it would declare what it holds."""
    if asked.entry is not None and len(asked.boxes) == len(set(asked.boxes)):
        return asked.entry
    boxes: list[Box] = []
    for box in sorted(set(asked.boxes), key=lambda box: -box.volume):
        left = [box]
        for taken in boxes:
            left = [part for one in left for part in one.subtract(taken)]
        boxes += [part for part in left if not part.is_empty]
    boxes.sort(key=lambda box: box.start)
    held = None if boxes == [Box.whole(asked.shape)] else Held(tuple(boxes))
    return LeafEntry(leaf, asked.dtype, asked.shape, "split", held)
