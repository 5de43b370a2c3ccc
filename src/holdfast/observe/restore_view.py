"""PURE. Says where the time of a restore went, and which rank the others waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from holdfast.observe.report import Report, Restore
from holdfast.observe.rollups import PhaseSpread
from holdfast.observe.text import seconds_text


class _Work(NamedTuple):
    """What a rank does in a phase, in words, and where to look if it takes one rank longer than the
    others; "" where only rank 0 does it, or all go through it together.
    """

    does: str
    look: str


_WORK = {
    "restore_inventory": _Work("asking what there is", ""),
    "restore_choose": _Work("choosing", ""),
    "restore_plan": _Work(
        "opening images and comparing the state", "the load of its CPU, and its way to storage"
    ),
    "restore_allocate": _Work("making room in the state", "free memory and swap of its host"),
    "restore_dropped": _Work("on sources that failed", ""),
    "restore_read": _Work("reading", "its disk, and its link to storage and to the other hosts"),
    "restore_decode": _Work(
        "decoding images of lost hosts",
        "the load of its CPU, and its link to the hosts of its group",
    ),
    "restore_verify": _Work("comparing checksums", "the load of its CPU, and its memory"),
    "restore_copy": _Work("copying into the state", "the load of its CPU, and its memory"),
    "restore_exchange": _Work("passing on what was read", "its link to the other hosts"),
    "restore_device": _Work("copying to devices", "the link of its device (nvidia-smi -q)"),
    "restore_set": _Work("setting objects", "what load_state_dict of its objects does"),
}
_WAITING = "restore_meet"
#: The least time, and part of a restore, that others waited for one rank, or that went into sources
#: that failed, to be told of.
_LEAST_S, _LEAST_PART = 1.0, 0.25
#: Below this part of a restore a phase is not named.
_SHOWN_PART = 0.02


def time_text(restore: Restore, hosts: Mapping[int, str]) -> str:
    """Formats ``reading 11.0 s (rank 5 on c, median 2.10 s), ...; ranks waited 9.00 s for others``:
    of each phase the rank that was in it for longest, the longest first.
    """
    found = [
        (spread.largest_s, name, spread)
        for name, spread in restore.phases.items()
        if name in _WORK and spread.largest_s >= _SHOWN_PART * restore.elapsed_s
    ]
    parts = [_phase_text(name, spread, hosts) for _, name, spread in sorted(found, reverse=True)]
    waiting = restore.phases.get(_WAITING)
    if waiting is not None and waiting.median_s >= _SHOWN_PART * restore.elapsed_s:
        parts.append(f"half of the ranks waited {seconds_text(waiting.median_s)} for others")
    return ", ".join(parts)


def _phase_text(name: str, spread: PhaseSpread, hosts: Mapping[int, str]) -> str:
    text = f"{_WORK[name].does} {seconds_text(spread.largest_s)}"
    if spread.ranks < 2:
        return text
    (rank, _), *_ = spread.slowest
    is_of_all = bool(_WORK[name].look)
    median = f", median {seconds_text(spread.median_s)}" if is_of_all else ""
    return f"{text} ({rank_text(rank, hosts)}{median})"


def rank_text(rank: int, hosts: Mapping[int, str]) -> str:
    """Formats ``rank 5 on c``; without the host where it is not known."""
    return f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}"


def restore_lines(report: Report, last: int = 20) -> list[str]:
    """Returns where the time of the ``last`` restores went, a line each; of all for 0."""
    shown = report.restores[-last:] if last else report.restores
    return [
        f"restore of {one.parent_incarnation}-{one.step}, {seconds_text(one.elapsed_s)}: {text}"
        for one in shown
        if (text := time_text(one, report.hosts_at(one.incarnation)))
    ]


def complaints(restore: Restore, hosts: Mapping[int, str]) -> list[str]:
    """Returns what made a restore slow that need not have been: a sentence each."""
    name = f"{restore.parent_incarnation}-{restore.step}"
    took = f"the restore of {name} took {seconds_text(restore.elapsed_s)}"
    least_s = max(_LEAST_S, _LEAST_PART * restore.elapsed_s)
    found = []
    dropped = restore.phases.get("restore_dropped")
    if dropped is not None and dropped.largest_s >= least_s:
        found.append(
            f"{took}, {seconds_text(dropped.largest_s)} of it with sources that failed or did not "
            "verify: they are named among the sources that were dropped"
        )
    for phase, work in _WORK.items():
        spread = restore.phases.get(phase)
        if spread is None or not work.look or spread.ranks < 2:
            continue
        (rank, longest_s), *_ = spread.slowest
        if longest_s - spread.median_s >= max(least_s, spread.median_s):
            found.append(
                f"{took}: {rank_text(rank, hosts)} was {work.does} for {seconds_text(longest_s)}, "
                f"half of the ranks for {seconds_text(spread.median_s)} or less, and all waited "
                f"for it; look at {work.look}"
            )
    return found
