"""Says which elements of each parameter a data-parallel rank has in its flat groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast.interop.pickle_records import Record

#: A parameter, where its elements begin in the flat, which is the first, and how many.
Cut = tuple[str, int, int, int]


class PartitionError(ValueError):
    """A file that does not say which elements it has."""


def partition_cuts(group: Mapping[str, tuple[int, ...]], rank: int, world: int) -> list[Cut]:
    """Those of a rank after ZeRO-3: an equal share of each parameter."""
    begin, found = 0, []
    for name, shape in group.items():
        volume = math.prod(shape)
        each = -(-volume // world)
        start = min(volume, rank * each)
        found.append((name, begin, start, min(each, volume - start)))
        begin += each
    return found


def mapped_cuts(state: Mapping[str, Any], number: int) -> list[Cut]:
    """Those after ZeRO-1 and -2, by the addresses that a file has; which elements come first, the
    ranks before it tell. PartitionError where there are none.
    """
    mappings = state.get("param_slice_mappings")
    if not isinstance(mappings, list) or number >= len(mappings):
        raise PartitionError("it has no param_slice_mappings: DeepSpeed before 0.7 wrote it")
    found = []
    for name, address in mappings[number].items():
        fields = address.fields if isinstance(address, Record) else {}
        begin, count = fields.get("start"), fields.get("numel")
        if type(begin) is not int or type(count) is not int or begin < 0 or count < 0:
            raise PartitionError(f"{name!r:.200} has no address")
        found.append((name, begin, 0, count))
    return found
