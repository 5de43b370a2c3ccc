"""PURE. How much memory parity takes on each host, known before the first snapshot.

It is taken once, for the smallest group, whose share is the largest, and for the host with the most
bytes: so hosts that change groups, or come in the place of others, find it large enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import ArenaError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.redundancy.groups import Division
from holdfast.redundancy.stripes import Placement

DEPTH = 2
"""Windows of a row that are handed on at once: one is pulled while the next is made."""
HALVES = 2
"""Generations: one is protected, one is being coded."""
WINDOW_BYTES = 8 << 20
"""As much of a row is handed on at once."""

PIECE_BYTES = 2 * BLOCK_BYTES
"""As much of a column is received, compared and coded at once: measured best, see docs/log.md."""


def staging_bytes(columns: int) -> int:
    """Memory for what is received, until it is coded: a piece of each column."""
    return columns * PIECE_BYTES


def passing_bytes(parity: int) -> int:
    """Memory, in a file, for the rows that are handed on; none with a parity of 1."""
    return DEPTH * (parity - 1) * WINDOW_BYTES


@dataclass(frozen=True, slots=True)
class Capacity:
    """What each host takes, in bytes."""

    rows: int
    """The rows of one generation."""
    shared: int
    """Shared memory: the rows of two generations, and what is handed on."""
    private: int
    """Of the keeper itself: what is pulled."""


def capacity(division: Division) -> Capacity:
    """What a division takes of every host; ``Host.image_bytes`` are what is coded of its images."""
    parity = division.groups[0].parity
    if not parity:
        return Capacity(0, 0, 0)
    columns = min(len(group.hosts) for group in division.groups) - parity
    placement = Placement(((),) * (columns + parity), parity)
    hosts = [host for group in division.groups for host in group.hosts]
    row = max(sum(map(placement.segment_bytes, host.image_bytes)) for host in hosts)
    shared = HALVES * parity * row + passing_bytes(parity)
    return Capacity(parity * row, shared, staging_bytes(columns))


def check_room(division: Division, free_bytes: Mapping[str, int]) -> None:
    """ArenaError for a division whose parity does not fit into what each host has free."""
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
