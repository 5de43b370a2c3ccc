"""Ranks that hold the same parameters update the same subgroups in the same place.

A GPU's kernels and the CPU's differ in last bits, and nobody averages parameters: replicas of
which one is updated here and one there drift apart for good. So they agree, once, on what the
schedule is made of.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from holdfast.offload.rates import Rates
from holdfast.offload.rows import Place


@dataclass(frozen=True, slots=True)
class Said:
    """What one rank plans with."""

    rates: Rates | None
    """None: it has nothing to measure, or does not need to."""
    slots: int
    """For so many subgroups its device has room."""
    layout: str
    """The same where parameters lie in the same places of the same rows; ``AT_ODDS``: elsewhere."""


#: What is said of layouts that differ.
AT_ODDS = ""


def is_replicated(place: Place) -> bool:
    """Whether other ranks have the same elements of it, as far as can be told: see below."""
    return bool(groups_with_replicas([place]))


def groups_with_replicas(places: Iterable[Place]) -> list[dist.ProcessGroup]:
    """The groups of ranks in which others have the same elements of any of these parameters.

    Of a plain parameter that is every rank: nothing tells which.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    found: list[dist.ProcessGroup] = []
    for place in places:
        if not isinstance(place.parameter, DTensor):
            everyone = dist.group.WORLD
            return [everyone] if everyone is not None and everyone.size() > 1 else []
        mesh = place.parameter.device_mesh
        if mesh.get_coordinate() is None:
            continue  # this rank has none of it
        for number, placement in enumerate(place.parameter.placements):
            if placement.is_replicate() and mesh.size(number) > 1:
                group = mesh.get_group(number)
                if all(group is not one for one in found):
                    found.append(group)
    return found


def agree(said: Said, groups: Iterable[dist.ProcessGroup], device: torch.device) -> Said:
    """The rates of the first rank that has some, the fewest slots, and whether layouts are one.

    Every rank has to ask.
    """
    for group in groups:
        heard: list[Said] = [said] * group.size()
        # A group of GPUs brings objects to whichever is current.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            dist.all_gather_object(heard, said, group=group)
        rates = next((one.rates for one in heard if one.rates is not None), None)
        layout = said.layout if len({one.layout for one in heard}) == 1 else AT_ODDS
        said = Said(rates, min(one.slots for one in heard), layout)
    return said
