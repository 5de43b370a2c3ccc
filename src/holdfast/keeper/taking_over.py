"""What is there of attempts and of their parity, as a coordinator begins with it.

It says so in the words of ``redundancy.takeover``, which decides what is protected.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from holdfast.format.manifest import Generation
from holdfast.keeper.parity_facts import HeldRows
from holdfast.redundancy.protection import Captured, Protection
from holdfast.redundancy.takeover import HostRow, Present, Taken, take_over
from holdfast.snapshot import messages as m
from holdfast.snapshot.attempts import Attempt, Attempts

HostRows = Mapping[str, Sequence[HeldRows]]
"""The rows that each host keeps."""


def captured_of(attempt: Attempt) -> Captured:
    """What was captured by this attempt."""
    return Captured(Generation(*attempt.generation), attempt.id)


def taken_over(
    attempts: Attempts, rows: HostRows, hosts: Sequence[m.HostPlace], incarnation: int
) -> Taken:
    """What is protected, and in which half of the memory it lies."""
    there = (*attempts.parts(), *attempts.complete())
    return take_over(
        frozenset(host.id for host in hosts),
        [Present(captured_of(one), one.world, one.is_whole) for one in there],
        [
            HostRow(
                host, one.half, one.attempt, one.parity, frozenset(one.members),
                frozenset(one.images),
            )
            for host, held in rows.items() for one in held
        ],
        restored=attempts.pinned or "", incarnation=incarnation, turn=secrets.randbelow(1 << 30),
    )  # fmt: skip


def newest_whole(attempts: Attempts, incarnation: int) -> Attempt | None:
    """What is to be protected first: the newest of this incarnation, or what it went on from."""
    whole = attempts.newest_complete()
    if whole is None or whole.incarnation != incarnation:
        pinned = attempts.get(attempts.pinned or "", whole)
        whole = pinned if pinned is not None and pinned.is_whole else None
    return whole


def rows_for(state: Protection, attempt: str, rows: HostRows) -> HostRows:
    """Of what is protected, only the rows that are: the other half may have some of a turn that
    was cut short."""
    if state.protected is None or state.protected.captured.attempt != attempt:
        return rows
    return {
        host: tuple(one for one in held if one.half == state.half) for host, held in rows.items()
    }


def has_earlier(state: Protection, rows: HostRows) -> bool:
    """Whether all hosts have protected something anew, and have its earlier rows besides."""
    cover = state.protected
    return cover is not None and cover.members == state.members and any(
        (one.attempt, one.half) == (cover.captured.attempt, 1 - state.half)
        for held in rows.values() for one in held
    )  # fmt: skip
