"""PURE. Sets the rate at which parity is made from measured step times, and computes its memory.

Steps that run while parity is made are compared with steps that run without. Where the former are
slower by more than ``TOO_SLOW``, and by more than chance explains, the next generation is coded at
half the rate; otherwise the rate rises again. So the rate stays within a factor of the point where
training begins to slow down. The rate never falls so low that a generation would take more than
``MOST_STEPS`` steps, because the protected snapshot would be too old.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import ArenaError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.parity.planning.groups import Division
from holdfast.parity.planning.placement import StripePlacement
from holdfast.policy.arguments import LEAST_PARITY_RATE

TOO_SLOW = 0.02
LEAST, MOST = 8, 32
"""Steps of each kind: the minimum for a comparison, and how many are remembered."""
MOST_STEPS = 100
STALE = 256
"""After so many consecutive steps with parity, the times of steps without parity are discarded."""
HALF_CODED = 0.25
"""A step counts as coding when parity was made during at least this part of it."""
_FASTER, _UNBOUND = 1.25, 4.0
_OF_NORMAL = 1.4826 * 1.2533
"""Factor from the median deviation of values to the error of their median, before its 1/sqrt(n)."""


class StepPacing(Struct, frozen=True):
    """Step times of a run, and the rate that follows. Every event returns a new value."""

    rate_bytes_s: int | None = None
    """The rate at which each host may pull for the next generation; None: no limit."""
    without: tuple[float, ...] = ()
    coding: tuple[float, ...] = ()
    since: int = 0
    """Steps with parity since the last step without."""

    def stepped(self, step_s: float, coded: float) -> StepPacing:
        """Record a step of ``step_s`` seconds, during the part ``coded`` of which parity was
        made.
        """
        if coded == 0:
            return replace(self, without=(*self.without, step_s)[-MOST:], since=0)
        if coded < HALF_CODED:
            return self
        without = self.without if self.since < STALE else ()
        coding = (*self.coding, step_s)[-MOST:]
        return replace(self, without=without, coding=coding, since=self.since + 1)

    def made(self, moved_bytes: int, took_s: float) -> StepPacing:
        """Record a coded generation, for which a host pulled ``moved_bytes``; set the next rate."""
        if min(len(self.without), len(self.coding)) < LEAST:
            return self
        speed = moved_bytes / took_s
        rate = self._slower(speed) if self.is_felt else self._faster(speed)
        if rate is not None:
            rate = max(rate, self._floor(moved_bytes))
        if rate == self.rate_bytes_s:
            return self
        return replace(self, rate_bytes_s=rate, coding=())  # those had another rate

    @property
    def is_felt(self) -> bool:
        """Return whether steps are slower while parity is made."""
        if min(len(self.without), len(self.coding)) < LEAST:
            return False
        usual = median(self.without)
        excess = median(self.coding) - usual
        by_chance = 2 * math.hypot(_standard_error(self.without), _standard_error(self.coding))
        return excess > max(TOO_SLOW * usual, by_chance)

    @property
    def needs_rest(self) -> bool:
        """Return whether steps without parity must be measured before a comparison is possible."""
        return len(self.coding) >= LEAST > len(self.without)

    def _slower(self, speed: float) -> int:
        rate = self.rate_bytes_s
        is_kept = rate is not None and speed > rate / 2  # else the rate limit is not the bottleneck
        return int((rate if is_kept and rate is not None else speed) / 2)

    def _faster(self, speed: float) -> int | None:
        if self.rate_bytes_s is None or self.rate_bytes_s > _UNBOUND * speed:
            return None
        return int(self.rate_bytes_s * _FASTER)

    def _floor(self, moved_bytes: int) -> int:
        return max(LEAST_PARITY_RATE, int(moved_bytes / (MOST_STEPS * median(self.without))))


def _standard_error(values: Sequence[float]) -> float:
    """Return the statistical error of the median of ``values``."""
    middle = median(values)
    return _OF_NORMAL * median(abs(one - middle) for one in values) / math.sqrt(len(values))


# PURE. Computes the memory that parity takes on each host, before the first snapshot.
#
# The memory is allocated once, for the smallest group, whose share is the largest, and for the host
# with the most bytes. So hosts that change groups, or replace others, find enough memory.


DEPTH = 2
"""Windows of a parity shard in transfer at once: one is pulled while the next is made."""
HALVES = 2
"""Parity buffers, one generation each: one is protected, one is being coded."""
WINDOW_BYTES = 8 << 20
"""Size of one window: the unit in which a parity shard is transferred."""

PIECE_BYTES = 2 * BLOCK_BYTES
"""Bytes of a column received, compared and coded at once: fastest by measurement, see docs/log.md.
"""


def staging_bytes(columns: int) -> int:
    """Return the memory for received data until it is coded: one piece of each column."""
    return columns * PIECE_BYTES


def passing_bytes(parity: int) -> int:
    """Return the memory, in a file, for parity shards in transfer; 0 with a parity of 1."""
    return DEPTH * (parity - 1) * WINDOW_BYTES


class Capacity(Struct, frozen=True):
    """The memory that each host needs, in bytes."""

    rows: int
    """The parity shards of one generation."""
    shared: int
    """Shared memory: the parity shards of two generations, and the windows in transfer."""
    private: int
    """Private memory of the keeper: the staging memory for pulled data."""


def capacity(division: Division) -> Capacity:
    """Return the memory that a division needs on every host.

    ``GroupHost.image_bytes`` are the coded bytes of its images.
    """
    parity = division.groups[0].parity
    if not parity:
        return Capacity(0, 0, 0)
    columns = min(len(group.hosts) for group in division.groups) - parity
    placement = StripePlacement(((),) * (columns + parity), parity)
    hosts = [host for group in division.groups for host in group.hosts]
    row = max(sum(map(placement.segment_bytes, host.image_bytes)) for host in hosts)
    shared = HALVES * parity * row + passing_bytes(parity)
    return Capacity(parity * row, shared, staging_bytes(columns))


def check_room(division: Division, free_bytes: Mapping[str, int]) -> None:
    """Raise ArenaError for a division whose parity does not fit into the free memory of each
    host.
    """
    needed = capacity(division)
    for group in division.groups:
        for host in group.hosts:
            if free_bytes[host.id] < needed.shared:
                raise _too_small(division, host.id, needed, free_bytes[host.id])


def _too_small(division: Division, host: str, needed: Capacity, free: int) -> ArenaError:
    smallest = min(len(group.hosts) for group in division.groups)
    return ArenaError(
        f"parity={division.asked} in groups of {smallest} takes {needed.shared >> 20} MiB of "
        f"shared memory on each host: {HALVES} generations of {needed.rows >> 20} MiB, and what is "
        f"handed on. {host} has {free >> 20} MiB free. Enlarge it (docker: --shm-size, Kubernetes: "
        "an emptyDir with medium Memory), train on more hosts, or take a smaller parity.",
        needed_bytes=needed.shared,
        free_bytes=free,
    )
