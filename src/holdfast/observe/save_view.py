"""Prints one save across its ranks, and all saves by rank or host."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.errors import NotFound
from holdfast.observe.phases import OF_SAVES
from holdfast.observe.report import Report, Save
from holdfast.observe.text import moment_text, rate_text, seconds_text, size_text

_NAMED_RANKS = 4


def find_save(report: Report, generation: str) -> Save:
    """Returns a save by its step, the newest of several, or by "incarnation-step".

    Raises NotFound.
    """
    for save in reversed(report.saves):
        if generation in (str(save.step), f"{save.incarnation}-{save.step}"):
            return save
    few = ", ".join(f"{save.incarnation}-{save.step}" for save in report.saves[-3:])
    raise NotFound(
        f"no save {generation} in the events of {report.root}: the newest are {few or 'none'}",
        root=report.root,
    )


def render_save(report: Report, save: Save, console: Console) -> None:
    """Prints a save: its state, its critical path, and each phase over the ranks."""
    host_of = report.hosts_at(save.incarnation)
    when = moment_text(save.time_s or 0.0)
    size, speed = size_text(save.size_bytes), rate_text(save.throughput_bytes_per_s)
    console.print(
        f"save {save.incarnation}-{save.step} of {when}: {save.state}, {size} at {speed}",
        markup=False,
    )
    if save.reason:
        console.print(save.reason, markup=False)
    for line in critical_path(save, host_of):
        console.print(line, markup=False)
    table = Table(title="Phases over ranks", title_justify="left")
    table.add_column("phase")
    for name in ("ranks", "median", "90 %", "99 %", "largest"):
        table.add_column(name, justify="right")
    table.add_column("slowest")
    for phase, of in OF_SAVES.items():
        if (spread := save.phases.get(phase)) is None:
            continue
        figures = (spread.median_s, spread.p90_s, spread.p99_s, spread.largest_s)
        slowest = ", ".join(_name(rank, host_of) for rank, _ in spread.slowest[:_NAMED_RANKS])
        table.add_row(of.label, str(spread.ranks), *map(seconds_text, figures), escape(slowest))
    console.print(table)


def critical_path(save: Save, host_of: Mapping[int, str]) -> Iterator[str]:
    """Yields what the save waited for, one after the other."""
    if save.late_s:
        who = _name(save.late_rank, host_of)
        yield f"{who} called save last, {seconds_text(save.late_s)} after the first"
    if save.captured_s is not None:
        yield f"captured after {seconds_text(save.captured_s)}{_slowest(save, 'copy_s', host_of)}"
    if save.protect_s is not None:
        yield f"protected in {seconds_text(save.protect_s)} from when parity was begun"
    for what, ranks in (("copied", save.uncopied), ("written", save.unwritten)):
        if ranks:
            names = ", ".join(_name(rank, host_of) for rank in ranks)
            yield f"not {what}: the image of {names}"
    if save.durable_s is not None:
        yield f"durable after {seconds_text(save.durable_s)}{_slowest(save, 'write_s', host_of)}"


def _slowest(save: Save, phase: str, host_of: Mapping[int, str]) -> str:
    spread = save.phases.get(phase)
    if spread is None:
        return ""
    rank, elapsed_s = spread.slowest[0]
    return (
        f": {_name(rank, host_of)} was last in {OF_SAVES[phase].label}, {seconds_text(elapsed_s)}"
    )


def _name(rank: int, host_of: Mapping[int, str]) -> str:
    if rank < 0:
        return "coordinator"
    host = host_of.get(rank, "")
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def rows_by(report: Report, by: str) -> Callable[[Save, int], Sequence[str]]:
    """Returns what tells the rows of a table that a rank belongs to in a save.

    ``by``: "rank", "host", or "mesh": of each axis the row of its coordinate there. Raises NotFound
    where no mesh is known.
    """
    hosts = {n: report.hosts_at(n) for n in {save.incarnation for save in report.saves}}
    if by == "rank":
        return lambda save, rank: (_name(rank, hosts[save.incarnation]),)
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


def render_by(report: Report, by: str, console: Console, *, last: int = 20) -> None:
    """Prints the saves by rank, host or axis of the mesh: the slowest first, ``last`` of them, all
    for 0.
    """
    values, rows_of = values_by(report, by), rows_by(report, by)
    times: Counter[str] = Counter()
    for save in report.saves:
        for phase in ("copy_s", "write_s"):
            if spread := save.phases.get(phase):
                times.update(rows_of(save, spread.slowest[0][0]))

    def place(name: str) -> tuple[float, float, str]:
        # Each rank is in a row of every axis: the slowest one says nothing of which axis it is.
        work, often = _work_of(values[name]), -times[name]
        return (work, often, name) if by == "mesh" else (often, work, name)

    order = sorted(values, key=place)
    shown = order[:last] if last else order
    table = Table(title=f"Saves by {by}: medians, where among the 16 slowest", title_justify="left")
    table.add_column(by)
    table.add_column("times slowest", justify="right")
    seen = [phase for phase in OF_SAVES if any(any(one.get(phase, ())) for one in values.values())]
    for phase in seen:
        table.add_column(OF_SAVES[phase].label, justify="right")
    sizes = bytes_by_rank(report) if by == "rank" else {}
    for label in sizes:
        table.add_column(label, justify="right")
    for name in shown:
        cells = [seconds_text(_median(values[name].get(phase))) for phase in seen]
        cells += [size_text(_median(of_ranks.get(name))) for of_ranks in sizes.values()]
        table.add_row(escape(name or "unknown host"), str(times[name]), *cells)
    console.print(table)
    if len(shown) < len(order):
        console.print(f"{len(order) - len(shown)} more: --last 0 shows all")


def bytes_by_rank(report: Report) -> dict[str, dict[str, list[float]]]:
    """Returns the bytes that each rank captured and wrote, of the saves in which they are known."""
    found: dict[str, dict[str, list[float]]] = {}
    rows_of = rows_by(report, "rank")
    for label, phase in (("bytes captured", "copy_s"), ("bytes written", "write_s")):
        by_name: dict[str, list[float]] = defaultdict(list)
        for save in report.saves:
            for rank, size_bytes in save.bytes_of(phase).items():
                by_name[rows_of(save, rank)[0]].append(size_bytes)
        if by_name:
            found[label] = by_name
    return found


def _work_of(phases: Mapping[str, Sequence[float]]) -> float:
    return -sum(_median(phases.get(name)) or 0.0 for name in ("copy_s", "write_s"))


def _median(values: Sequence[float] | None) -> float | None:
    return statistics.median(values) if values else None
