"""Says which elements of each parameter a data-parallel rank has in its flat groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast.interop.pickle_records import Record

_MAX_RANKS = 1 << 16
#: A parameter, where its elements begin in the flat, which is the first, and how many.
Cut = tuple[str, int, int, int]


class PartitionError(ValueError):
    """A file that does not say which elements it has."""


def model_ranks(main: Mapping[str, Any]) -> int:
    """The tensor-parallel ranks and stages that a model's file says there are; 0 for none."""
    sizes = main.get("checkpoint_parallel_dimensions")
    both = [*sizes.values()] if isinstance(sizes, dict) else []
    said = [main.get("mp_world_size"), *both]
    if any(type(one) is not int or not 0 < one < _MAX_RANKS for one in said):
        return 0
    found: int = max(said[0], math.prod(both))
    return found


def group_shapes(main: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the parameters of each group, that a model's file has."""
    shapes = main.get("param_shapes") or []
    if not isinstance(shapes, list) or not all(isinstance(one, dict) for one in shapes):
        raise PartitionError("its param_shapes are no list of groups")
    for name, shape in ((n, s) for group in shapes for n, s in group.items()):
        if type(name) is not str or type(shape) is not tuple:
            raise PartitionError(f"no shape of {name!r:.100}")
    return shapes


def partition_cuts(
    group: Mapping[str, tuple[int, ...]], rank: int, world: int, size: int | None = None
) -> list[Cut]:
    """Those of a rank after ZeRO-3: an equal share of each parameter. PartitionError where they are
    not all of the ``size`` elements that it has: then they are others.
    """
    begin, found = 0, []
    for name, shape in group.items():
        volume = math.prod(shape)
        each = -(-volume // world)
        start = min(volume, rank * each)
        found.append((name, begin, start, min(each, volume - start)))
        begin += each
    if size not in (None, begin):
        raise PartitionError(
            f"it has {size} elements in its flat group, and by the model's file the {len(group)} "
            f"parameters of the group have {begin}"
        )
    return found


def mapped_cuts(state: Mapping[str, Any], number: int) -> list[Cut]:
    """Those after ZeRO-1 and -2, by the addresses that a file has; which elements come first, the
    ranks before it tell. PartitionError where there are none, or they do not follow each other.
    """
    mappings = state.get("param_slice_mappings")
    if not isinstance(mappings, list) or number >= len(mappings):
        raise PartitionError("it has no param_slice_mappings: DeepSpeed before 0.7 wrote it")
    addresses = mappings[number]
    if not isinstance(addresses, dict):
        raise PartitionError(f"its param_slice_mappings have no addresses of group {number}")
    found = []
    for name, address in addresses.items():
        fields = address.fields if isinstance(address, Record) else {}
        begin, count = fields.get("start"), fields.get("numel")
        if type(begin) is not int or type(count) is not int or begin < 0 or count < 0:
            raise PartitionError(f"{name!r:.200} has no address")
        found.append((name, begin, 0, count))
    at = 0
    for name, begin, _, count in sorted(found, key=lambda cut: (cut[1], cut[3])):
        if begin != at:
            raise PartitionError(
                f"{name!r:.200} begins at element {begin} of its flat group, and what is before it "
                f"ends at {at}: its addresses were changed, give a checkpoint that is whole"
            )
        at += count
    return found
