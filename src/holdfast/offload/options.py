"""What an optimizer with its state in host memory is given, beside what torch's is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypedDict

import torch

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class Options(TypedDict, total=False):
    """Where and how it updates; nothing of it changes what is computed, but for last bits."""

    device_share: float | None
    """The part of all elements updated on the device: 0 to 1. None: what is fastest by measure.

    With a number each step updates the same elements in the same place, so runs are reproducible:
    a GPU's kernels and the CPU's differ in last bits. On the CPU None is 0.
    Ranks with the same parameters agree on it in their first step, which waits for all of them,
    unless it is 0.
    """
    subgroup_elements: int
    """How many elements are updated in one place at a time."""
    device_slots: int
    """For the state of how many subgroups there is room on the device, during a step."""
    threads: int | None
    """Of the CPU, for updates. None: this rank's share of the cores, less two; without a GPU, all
    that torch uses."""
    early_gradients: bool | None
    """Whether gradients go to the host during the backward. None: where they are complete then."""
    host_memory_bytes: int | None
    """How much of the masters and moments is in memory at a time; the rest is in ``storage_path``.

    Every step then works through them in the opposite order of the one before. None: all of it.
    """
    storage_path: str | os.PathLike[str] | None
    """A directory on a fast disk of this host: files without a name there hold all the state."""
    lane_delay_s: float
    """For tests: everything begins up to so much later, by chance."""


#: The names of all of them.
KNOWN = frozenset(Options.__annotations__)
