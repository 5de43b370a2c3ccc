"""The table of leaves that a rank declares, put together from all that its tensors are.

Several tensors may be parts of one stored leaf, and one tensor of several leaves; whoever copies
is told where each part lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import torch

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.layout import LeafEntry
from holdfast.geometry.listing import Held
from holdfast.state.binding import Binding, Bindings, Source
from holdfast.state.sight import Part
from holdfast.state.tensors import DTYPE_NAMES, TINY_BYTES
from holdfast.state.views import View


def declare_all(bindings: Bindings) -> list[LeafEntry]:
    """What this rank declares of each stored leaf, by name; ``bindings.sources`` is set to match.

    UsageError when two tensors are the same elements of one leaf, or do not agree what it is.
    """
    entries: list[LeafEntry] = []
    parts: dict[str, list[tuple[Binding, Part]]] = {}
    for binding in bindings:
        if binding.sight is None:
            entries.append(binding.entry)
            bindings.sources[binding.entry.name] = (Source(binding),)
        elif not binding.sight.is_copy:
            for part in binding.sight.parts:
                parts.setdefault(part.leaf, []).append((binding, part.as_stored()))
    for leaf, found in parts.items():
        if len(found) > 1 and all(one.is_whole and math.prod(one.shape) == 1 for _, one in found):
            numbers = [Source(binding, one.views[0], one.boxes[0]) for binding, one in found]
            bindings.joined.append((leaf, numbers))
            _require_all_alike(leaf, found)
            found = found[:1]
        entry, sources = _declare(leaf, found)
        entries.append(entry)
        bindings.sources[leaf] = sources
    entries.sort(key=lambda entry: entry.name)
    for one, other in pairwise(entries):
        if one.name == other.name:
            raise UsageError(
                f"two tensors of the state are both called {one.name!r}, by themselves or by rules"
            )
    return entries


def entry_of(part: Part, dtype: str, spread: str, *, is_frozen: bool = False) -> LeafEntry:
    """What a rank declares of a leaf of which it has this part. It has no element twice."""
    if part.instance is not None:
        return LeafEntry(part.leaf, dtype, part.shape, spread, part.instance, is_frozen)
    size_bytes = math.prod(part.shape) * ITEMSIZE[dtype]
    spread = "lowest" if size_bytes <= TINY_BYTES else spread
    held = None if part.is_whole or not size_bytes else Held(part.boxes)
    return LeafEntry(part.leaf, dtype, part.shape, spread, held, is_frozen)


def _declare(leaf: str, found: list[tuple[Binding, Part]]) -> tuple[LeafEntry, tuple[Source, ...]]:
    first, part = found[0]
    is_frozen = all(binding.entry.is_frozen for binding, _ in found)
    assert first.sight is not None
    spread = first.sight.spread or first.spread
    dtype = DTYPE_NAMES[first.tensor.dtype]
    _require_all_alike(leaf, found)
    if part.instance is not None:
        if len(found) > 1:
            raise _same(leaf, (binding for binding, _ in found))
        return entry_of(part, dtype, spread, is_frozen=is_frozen), (Source(first, part.views[0]),)
    sources = [Source(binding, view, box) for binding, one in found for box, view in _once(one)]
    sources.sort(key=_start)
    boxes = tuple(source.box for source in sources if source.box is not None)
    try:
        entry = entry_of(Part(leaf, part.shape, boxes, ()), dtype, spread, is_frozen=is_frozen)
    except UsageError as error:
        raise _same(leaf, (binding for binding, _ in found)) from error
    return entry, tuple(sources) or (Source(first, _nothing_of(first.local)),)


def _nothing_of(tensor: torch.Tensor) -> View:
    none = (0,) * tensor.ndim
    return View(Box(none, none), tuple(range(tensor.ndim)))


def _once(part: Part) -> list[tuple[Box, View]]:
    """Boxes and their views; elements that the tensor has several times are stored from the first.

    A rank that holds a tensor whole in which others have copies has each of them.
    """
    found: list[tuple[Box, View]] = []
    for box, view in zip(part.boxes, part.views, strict=True):
        if all(box != other for other, _ in found):
            found.append((box, view))
    return found


def _start(source: Source) -> tuple[int, ...]:
    return () if source.box is None else source.box.start


def _require_all_alike(leaf: str, found: list[tuple[Binding, Part]]) -> None:
    first, part = found[0]
    for binding, other in found[1:]:
        _require_alike(leaf, first, part, binding, other)


def _require_alike(leaf: str, one: Binding, part: Part, other: Binding, theirs: Part) -> None:
    if (part.shape, one.tensor.dtype) != (theirs.shape, other.tensor.dtype):
        raise UsageError(
            f"{one.name} and {other.name} are both seen as parts of {leaf}, the one "
            f"{one.tensor.dtype} of shape {list(part.shape)}, the other {other.tensor.dtype} of "
            f"shape {list(theirs.shape)}: change the rules so that they agree",
            leaf=leaf,
        )


def _same(leaf: str, bindings: Iterable[Binding]) -> UsageError:
    names = ", ".join(dict.fromkeys(binding.name for binding in bindings))
    return UsageError(
        f"{names} are the same elements of {leaf} by the rules or by what was declared: of two "
        "tensors one would be lost. Change the rule, or say which is a copy with rules.tied",
        leaf=leaf,
    )
