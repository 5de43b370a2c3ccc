"""Defines the report of a run (the cost of saving, losses, restores), and prints it as tables.

``observe.report_builder`` makes it from the events that the run left behind. Tables and lines are
of strings, never ``Text``: a command's console makes only strings printable.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.observe.log import Divergence, lines_of
from holdfast.observe.text import (
    count_text,
    counts_text,
    moment_text,
    on_one_line,
    rate_text,
    seconds_text,
    shared_text,
    size_text,
)


@dataclass(frozen=True, slots=True)
class Start:
    """One incarnation as its trainers announced it."""

    incarnation: int
    world: int
    hosts: tuple[str, ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class Save:
    """One save of all ranks. Times are None where nothing was recorded.

    ``held_s`` and ``fence_s`` are those of the slowest rank: all ranks wait for it.
    ``captured_s`` and ``durable_s`` count from the call of ``save``, ``persist_s`` from when
    the keeper began to write.
    """

    incarnation: int
    step: int
    state: str
    """durable | protected | captured | missed | unfinished (the ranks ended before it was)"""
    ranks: int
    held_s: float | None
    fence_s: float | None
    captured_s: float | None
    durable_s: float | None
    persist_s: float | None
    size_bytes: int
    reason: str = ""
    reused_bytes: int | None = None
    """Bytes of ``size_bytes`` that were stored before, if any: frozen and unchanged."""
    ring_bytes: int = 0
    """Bytes of the rings through which its images went to storage, if memory kept none of them."""

    @property
    def throughput_bytes_per_s(self) -> float | None:
        """Bytes written and made durable per second of writing."""
        written_bytes = self.size_bytes - (self.reused_bytes or 0)
        return written_bytes / self.persist_s if self.persist_s else None


@dataclass(frozen=True, slots=True)
class Restore:
    """One restore of all ranks: of generation (``parent_incarnation``, ``step``).

    Together the ranks read ``read_bytes`` from the source, and received ``received_bytes`` from
    each other.
    """

    incarnation: int
    parent_incarnation: int
    step: int
    sources: tuple[str, ...]
    elapsed_s: float
    size_bytes: int
    saved_world: int
    world: int
    time_s: float
    read_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KeeperLoss:
    """A lost keeper, counted once however many ranks noticed."""

    incarnation: int
    host: str
    reason: str
    time_s: float


@dataclass(frozen=True, slots=True)
class ProtectionFigures:
    """The losses of hosts that the protected snapshots of an incarnation survive, in words.

    ``missing``: the protection that was asked for and not reached, a sentence each.
    """

    incarnation: int
    parity: int
    hosts: int
    survives: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefusedAtDoor:
    """Requests that the keeper of a host refused at its ``socket``, ``peers`` or ``control``
    port.
    """

    host: str
    door: str
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that changed in a host's memory after they were sealed; see ``events.DamageFound``."""

    incarnation: int
    step: int
    host: str
    what: str
    name: str
    size_bytes: int
    outcome: str
    reason: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One quantity over all saves that have it."""

    count: int
    total: float
    median: float
    largest: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything in a run's events, saves in the order of their generations."""

    root: str
    files: int
    torn_lines: int
    unknown_lines: int
    starts: tuple[Start, ...]
    saves: tuple[Save, ...]
    restores: tuple[Restore, ...]
    keeper_losses: tuple[KeeperLoss, ...]
    persist_failures: tuple[str, ...]
    warnings: tuple[str, ...]
    pruned: int
    divergences: tuple[Divergence, ...] = ()
    protection: tuple[ProtectionFigures, ...] = ()
    unprotected: tuple[str, ...] = ()
    """Snapshots of which no parity could be made, with the reason."""
    refused: tuple[RefusedAtDoor, ...] = ()
    """Requests and connections that keepers refused."""
    damages: tuple[Damage, ...] = ()
    """Damage found in memory, in the order of discovery."""
    late_hosts: dict[str, int] = field(default_factory=dict)
    """Hosts that the others waited for in vain, and at how many saves."""

    @property
    def misses(self) -> tuple[Save, ...]:
        """Returns the saves that gave no generation."""
        return tuple(save for save in self.saves if save.state == "missed")

    @property
    def figures(self) -> dict[str, Figures]:
        """Returns sum, median and largest of every quantity that was recorded at all."""
        kept = {name: _values(self.saves, name) for name in QUANTITIES}
        return {
            name: Figures(len(values), sum(values), statistics.median(values), max(values))
            for name, values in kept.items()
            if values
        }


QUANTITIES = (
    "held_s",
    "fence_s",
    "captured_s",
    "durable_s",
    "persist_s",
    "size_bytes",
    "reused_bytes",
    "throughput_bytes_per_s",
)


def _values(saves: Iterable[Save], quantity: str) -> list[float]:
    values = (getattr(save, quantity) for save in saves)
    return [value for value in values if value is not None]


def to_json(report: Report) -> dict[str, Any]:
    """Returns the report as plain values, with its sums, for ``--json``."""
    document = dataclasses.asdict(report)
    for record, save in zip(document["saves"], report.saves, strict=True):
        record["throughput_bytes_per_s"] = save.throughput_bytes_per_s
    document["figures"] = {name: dataclasses.asdict(f) for name, f in report.figures.items()}
    return document


def render(report: Report, console: Console, *, last: int = 20) -> None:
    """Prints the report as tables; only the ``last`` saves one by one, all of them for 0."""
    console.print(_heading(report), markup=False)
    if report.protection:
        newest = report.protection[-1]
        survives = f"protected snapshots of the last start survive {newest.survives}"
        console.print(survives, markup=False)
    if report.saves:
        console.print(_save_table(report.saves[-last:] if last else report.saves))
        hidden = len(report.saves) - last if last else 0
        if hidden > 0:
            console.print(f"{hidden} earlier saves are in the sums only")
        console.print(_figure_table(report.figures))
    if report.restores:
        console.print(_restore_table(report.restores))
    for line in _troubles(report):
        console.print(on_one_line(line), style="yellow", markup=False)


def _heading(report: Report) -> str:
    states = [save.state for save in report.saves]
    counts = (
        f"{states.count(state)} {state}"
        for state in ("durable", "protected", "cached", "captured", "missed", "unfinished")
        if state in states
    )
    starts = count_text(len(report.starts), "incarnation")
    saves = count_text(len(states), "save")
    return f"{report.root}: {starts}, {saves} ({', '.join(counts) or 'none'})"


def _save_table(saves: Iterable[Save]) -> Table:
    table = _table("Saves", "generation", "state", "held", "fence", "captured", "durable")
    table.add_column("size", justify="right")
    table.add_column("throughput", justify="right")
    for save in saves:
        table.add_row(
            f"{save.incarnation}-{save.step}",
            save.state + (f", ring of {size_text(save.ring_bytes)}" if save.ring_bytes else ""),
            *map(seconds_text, (save.held_s, save.fence_s, save.captured_s, save.durable_s)),
            shared_text(save.size_bytes, save.reused_bytes or 0),
            rate_text(save.throughput_bytes_per_s),
        )
    return table


#: quantity -> (its name for people, the format of its values)
_SHOWN = {
    "held_s": ("host time in save", seconds_text),
    "fence_s": ("fence wait", seconds_text),
    "captured_s": ("time to captured", seconds_text),
    "durable_s": ("time to durable", seconds_text),
    "persist_s": ("of it, writing", seconds_text),
    "size_bytes": ("size", size_text),
    "reused_bytes": ("of it, not written again", size_text),
    "throughput_bytes_per_s": ("throughput to storage", rate_text),
}


def _figure_table(figures: dict[str, Figures]) -> Table:
    table = _table("All saves", "quantity", "count", "median", "largest", "sum")
    for name, of in figures.items():
        label, text = _SHOWN[name]
        # Rates do not add up.
        total = "" if name == "throughput_bytes_per_s" else text(of.total)
        table.add_row(label, str(of.count), text(of.median), text(of.largest), total)
    return table


def _restore_table(restores: Iterable[Restore]) -> Table:
    table = _table(
        "Restores", "when", "incarnation", "generation", "source", "took", "size", "read"
    )
    table.add_column("ranks", justify="right")
    for restore in restores:
        table.add_row(
            moment_text(restore.time_s),
            str(restore.incarnation),
            f"{restore.parent_incarnation}-{restore.step}",
            escape(", ".join(restore.sources)),
            seconds_text(restore.elapsed_s),
            size_text(restore.size_bytes),
            size_text(restore.read_bytes) if restore.read_bytes else "",
            f"{restore.saved_world} to {restore.world}",
        )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name in ("state", "source") else "right")
    return table


def _troubles(report: Report) -> list[str]:
    lines = [f"missed {s.incarnation}-{s.step}: {s.reason}" for s in report.misses]
    lines += [
        f"waited for {host} in vain at {count_text(saves, 'save')}"
        for host, saves in report.late_hosts.items()
    ]
    lines += [
        f"keeper lost {moment_text(loss.time_s)}{' on ' + loss.host if loss.host else ''}"
        f" (incarnation {loss.incarnation}): {loss.reason}"
        for loss in report.keeper_losses
    ]
    lines += [f"storage trouble at {failure}" for failure in report.persist_failures]
    lines += [f"not protected {failure}" for failure in report.unprotected]
    lines += [missing for one in report.protection[-1:] for missing in one.missing]
    lines += [
        f"damaged in the memory of {one.host}: {one.what} ({one.name}) of "
        f"{one.incarnation}-{one.step}, {size_text(one.size_bytes)}: {one.outcome}"
        + (f", {one.reason}" if one.reason else "")
        for one in report.damages
    ]
    lines += lines_of(report.divergences)
    lines += [
        f"refused by the keeper of {at.host} ({at.door}): {counts_text(at.counts)}"
        for at in report.refused
    ]
    lines += [f"warning: {message}" for message in report.warnings]
    if report.torn_lines:
        lines.append(f"{report.torn_lines} torn lines were skipped (left by killed processes)")
    if report.unknown_lines:
        lines.append(f"{report.unknown_lines} records of a newer version were skipped")
    return lines
