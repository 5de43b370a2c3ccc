"""Leaves seen through rules, as arrays: what numpy says of the same patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.geometry.box import Box
from holdfast.geometry.leaf_maps import LocalPatch, Patch, Seen
from holdfast.rules import Local

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Shape = tuple[int, ...]

UNKNOWN = -1  # an element that nothing here is


def numbered(shape: Shape, first: int = 1) -> Array:
    """Every element another number."""
    return np.arange(first, first + int(np.prod(shape, dtype=int))).reshape(shape)


def put(patches: Sequence[Patch], values: Array, canonical: Arrays) -> None:
    """The leaves that ``values`` is made of, as far as it is."""
    for patch in patches:
        _put(patch, patch.leaf_shape, values[patch.here.slices()], canonical)


def _put(patch: Patch | LocalPatch, shape: Shape, values: Array, canonical: Arrays) -> None:
    leaf = canonical.setdefault(patch.leaf, np.full(shape, UNKNOWN))
    assert leaf.shape == shape
    there = leaf[_at(patch.box)].transpose(_order(patch))
    block = values.reshape(there.shape)
    assert ((there == UNKNOWN) | (there == block)).all(), "two elements seen as one"
    there[...] = block


def take(seen: Seen, canonical: Mapping[str, Array]) -> Array:
    """The leaf again, from those it is made of."""
    values = np.full(seen.shape, UNKNOWN)
    for patch in seen.patches:
        assert (values[patch.here.slices()] == UNKNOWN).all(), "patches are disjoint"
        values[patch.here.slices()] = _taken(patch, canonical, patch.here.shape)
    for box in seen.padding:
        assert (values[box.slices()] == UNKNOWN).all(), "padding is in no patch"
        values[box.slices()] = 0
    return values


def _taken(patch: Patch | LocalPatch, canonical: Mapping[str, Array], shape: Shape) -> Array:
    block = canonical[patch.leaf][_at(patch.box)]
    taken: Array = block.transpose(_order(patch)).reshape(shape)
    return taken


def _order(patch: Patch | LocalPatch) -> list[int]:
    """The dimensions of the box in the order of those here, and those that are not here last."""
    named = [dim for dim in patch.dims if dim >= 0]
    rest = [dim for dim in range(patch.box.ndim) if dim not in named]
    assert all(patch.box.shape[dim] == 1 for dim in rest)
    return named + rest


def _at(box: Box) -> Any:
    """What an array is indexed with, to get an array also where the box is one element."""
    return (*box.slices(), ...)


def view_of(local: Local, part: int, tensor: Array) -> Array:
    """What the second boxes of a part are counted in."""
    if local.offsets is None or part < 0:
        return tensor
    begin, shape = local.offsets[part], local.held[part][1].shape
    return tensor[begin : begin + int(np.prod(shape, dtype=int))].reshape(shape)


def put_local(local: Local, tensor: Array, canonical: Arrays) -> None:
    """The leaves that a rank's tensor is made of, as far as it is."""
    for patch in local.patches:
        values = view_of(local, patch.part, tensor)[patch.local.slices()]
        _put(patch, patch.leaf_shape, values, canonical)


def take_local(local: Local, shape: Shape, canonical: Mapping[str, Array]) -> Array:
    """A rank's tensor again, from the leaves it is made of."""
    tensor = np.full(shape, UNKNOWN)
    for patch in local.patches:
        there = view_of(local, patch.part, tensor)[_at(patch.local)]
        assert (there == UNKNOWN).all(), "patches are disjoint"
        there[...] = _taken(patch, canonical, patch.local.shape)
    for part, box in local.padding:
        there = view_of(local, part, tensor)[_at(box)]
        assert (there == UNKNOWN).all(), "padding is in no patch"
        there[...] = 0
    return tensor


def is_covered(seen: Seen) -> bool:
    """Whether every element is in one patch, or is padding."""
    count = np.zeros(seen.shape, dtype=int)
    for box in (*(patch.here for patch in seen.patches), *seen.padding):
        count[box.slices()] += 1
    return bool((count == 1).all())


def without_padding(seen: Seen, values: Array) -> Array:
    """The same with zeros where padding is."""
    values = values.copy()
    for box in seen.padding:
        values[box.slices()] = 0
    return values
