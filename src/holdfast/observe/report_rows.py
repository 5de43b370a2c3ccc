"""PURE. Computes the rows of the tables by which saves and links are compared, for every view.

A row is of a rank, a host or a coordinate of the device mesh, or of a link between two hosts. The
slowest come first.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import NotFound
from holdfast.observe.report import Report, Save


class SaveRow(msgspec.Struct, frozen=True):
    """What saves took of one rank, host or coordinate of the mesh.

    ``name``: as a report names it, such as "rank 3 on b", "b" or "tp 1"; "" where the host is not
    known. ``times_slowest``: how often it was the slowest at copying or writing. ``median_s``: the
    median of each phase, in seconds, over the saves in which it was among the 16 slowest;
    ``longest_s``: the longest. ``captured_bytes``, ``written_bytes``: medians, of ranks alone.
    """

    name: str
    times_slowest: int
    median_s: dict[str, float]
    longest_s: dict[str, float]
    captured_bytes: float | None = None
    written_bytes: float | None = None


class LinkRow(msgspec.Struct, frozen=True):
    """What short messages between the keepers of two hosts take, there and back, in seconds.

    ``count``: how often it was measured. ``newest_s``: lately. ``ahead_s``: how far the clock of
    ``host`` is ahead, ``error_s``: give or take; null where that is not known.
    """

    host: str
    other: str
    count: int
    newest_s: float
    median_s: float
    largest_s: float
    ahead_s: float | None = None
    error_s: float | None = None


class SaveTable(msgspec.Struct, frozen=True):
    """All saves ``by`` "rank", "host" or "mesh", for ``--json``."""

    root: str
    by: str
    rows: list[SaveRow]


class LinkTable(msgspec.Struct, frozen=True):
    """All links between keepers, for ``--json``; ``by``: "link"."""

    root: str
    by: str
    rows: list[LinkRow]


class SizeColumn(NamedTuple):
    """The bytes of a rank that are known from a phase."""

    label: str
    phase: str


BYTES = {
    "captured_bytes": SizeColumn("bytes captured", "copy_s"),
    "written_bytes": SizeColumn("bytes written", "write_s"),
}


def table_by(report: Report, by: str) -> dict[str, Any]:
    """Returns the table ``by`` "rank", "host", "mesh" or "link" as plain values, all of its rows.

    ``docs/format/report-by-v1.schema.json`` describes them. Raises NotFound as ``rows_by``.
    """
    table = (
        LinkTable(report.root, by, link_rows(report))
        if by == "link"
        else SaveTable(report.root, by, save_rows(report, by))
    )
    plain: dict[str, Any] = msgspec.to_builtins(table)
    return plain


def link_rows(report: Report) -> list[LinkRow]:
    """Returns what messages between keepers take, the slowest first."""
    clocks = {one.host: (one.ahead_s, one.error_s) for one in report.clocks}
    return [
        LinkRow(
            one.host,
            one.other,
            one.count,
            one.newest_s,
            one.median_s,
            one.largest_s,
            *clocks.get(one.host, ()),
        )
        for one in sorted(report.links, key=lambda one: (-one.newest_s, one.host))
    ]


def save_rows(report: Report, by: str) -> list[SaveRow]:
    """Returns the saves by rank, host or axis of the mesh, the slowest first. Raises NotFound."""
    values, rows_of = values_by(report, by), rows_by(report, by)
    times: Counter[str] = Counter()
    for save in report.saves:
        for phase in ("copy_s", "write_s"):
            if spread := save.phases.get(phase):
                times.update(rows_of(save, spread.slowest[0][0]))
    sizes = bytes_by_rank(report) if by == "rank" else {}
    rows = [
        SaveRow(
            name,
            times[name],
            {phase: statistics.median(each) for phase, each in phases.items()},
            {phase: max(each) for phase, each in phases.items()},
            **{of: statistics.median(known[name]) for of, known in sizes.items() if name in known},
        )
        for name, phases in values.items()
    ]

    def place(row: SaveRow) -> tuple[float, float, str]:
        # Each rank is in a row of every axis: the slowest one says nothing of which axis it is.
        often = -row.times_slowest
        work = -sum(row.median_s.get(name, 0.0) for name in ("copy_s", "write_s"))
        return (work, often, row.name) if by == "mesh" else (often, work, row.name)

    return sorted(rows, key=place)


def rows_by(report: Report, by: str) -> Callable[[Save, int], Sequence[str]]:
    """Returns what tells the rows of a table that a rank belongs to in a save.

    ``by``: "rank", "host", or "mesh": of each axis the row of its coordinate there. Raises NotFound
    where no mesh is known.
    """
    hosts = {n: report.hosts_at(n) for n in {save.incarnation for save in report.saves}}
    if by == "rank":
        return lambda save, rank: (rank_text(rank, hosts[save.incarnation]),)
    if by == "host":
        return lambda save, rank: (hosts[save.incarnation].get(rank, ""),)
    if report.mesh is None:
        raise NotFound(
            f"no device mesh is known of {report.root}: a run reports one whose state has DTensors "
            "on it; give --mesh dp=4,tp=2 otherwise, the last running fastest",
            root=report.root,
        )
    names, coordinates = report.mesh.names, report.mesh.coordinates()
    rows = {
        rank: tuple(f"{name} {at}" for name, at in zip(names, where, strict=True))
        for rank, where in coordinates.items()
    }
    return lambda _, rank: rows.get(rank, ("not on the mesh",))


def values_by(report: Report, by: str) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of each phase by the rows of ``rows_by``, those of the 16 slowest in each
    save. A host has the time of its slowest rank, a coordinate of a mesh the mean of its ranks.
    """
    rows_of = rows_by(report, by)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for save in report.saves:
        for phase, spread in save.phases.items():
            seen: dict[str, list[float]] = defaultdict(list)
            for rank, elapsed_s in spread.slowest:
                if rank < 0:
                    continue
                for name in rows_of(save, rank):
                    seen[name].append(elapsed_s)
            for name, each_s in seen.items():
                found[name][phase].append(statistics.fmean(each_s) if by == "mesh" else max(each_s))
    return {name: dict(phases) for name, phases in found.items()}


def bytes_by_rank(report: Report) -> dict[str, dict[str, list[float]]]:
    """Returns for each of ``BYTES`` those of every rank, of the saves in which they are known."""
    found: dict[str, dict[str, list[float]]] = {}
    rows_of = rows_by(report, "rank")
    for of, (_, phase) in BYTES.items():
        by_name: dict[str, list[float]] = defaultdict(list)
        for save in report.saves:
            for rank, size_bytes in save.bytes_of(phase).items():
                by_name[rows_of(save, rank)[0]].append(size_bytes)
        if by_name:
            found[of] = by_name
    return found


def rank_text(rank: int, host_of: Mapping[int, str]) -> str:
    if rank < 0:
        return "coordinator"
    host = host_of.get(rank, "")
    return f"rank {rank} on {host}" if host else f"rank {rank}"
