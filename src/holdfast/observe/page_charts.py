"""Draws the charts of the page of a report: heat maps, and one save over time.

They are drawings in the page, without a script: radio buttons choose which heat map shows. All text
of records is escaped here, whatever it is.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from holdfast.observe.phases import OF_SAVES
from holdfast.observe.report import Report, RunMesh, Save
from holdfast.observe.spans import RunSpans, Span
from holdfast.observe.text import on_one_line, printable, seconds_text, shortened, size_text

WIDTH = 900
#: Rows of a heat map, and lanes of a timeline: of more, the slowest are shown.
MOST_ROWS = 64
#: What a row of a heat map is of.
_ROWS = ("rank", "host", "mesh")
#: Room for the names of rows on the left of a drawing, and for their figures on the right.
_NAMES, _MEANS = 150, 110
#: Saves that are named below a drawing.
_TICKS = 6
#: Cells of a table as short as this are never broken.
_SHORT_CELL = 24
#: Cells of a heat map that have a text each; shades of them; the height of a row.
MOST_TITLED, _LEVELS, _ROW = 1000, 16, 14
#: Lines of the table of a timeline.
_MOST_SPANS = 200
#: What is told of a row of a heat map.
_FIGURES = "rank", "host", "saves", "mean", "largest", "at"
#: Characters of a host's name in a cell.
_SHORT = 40


def escaped(text: object) -> str:
    """Returns text that is nothing but text in HTML, wherever it stands."""
    return html.escape(shortened(printable(on_one_line(str(text)))), quote=True)


def svg(height: float, title: str, parts: Iterable[str]) -> str:
    """Returns a drawing; ``title``: what it shows, for who does not see it."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escaped(title)}">'
        f"{''.join(parts)}</svg>"
    )


def table(names: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Returns a table; all columns but the first ``texts`` are of numbers."""

    def style(at: int, value: str) -> str:
        if at >= texts:
            return " class=n"
        return " class=s" if len(value) <= _SHORT_CELL else ""

    def cells(tag: str, values: Sequence[str]) -> str:
        scope = " scope=col" if tag == "th" else ""
        return "".join(
            f"<{tag}{scope}{style(at, value)}>{escaped(value)}</{tag}>"
            for at, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', names)}</tr></thead>"
    return f'<div class="scroll" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'


def _details(names: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Returns the figures of a drawing as a table, for who does not see it, or wants them all."""
    return f"<details><summary>As a table</summary>{table(names, rows, texts)}</details>"


class _Cell(NamedTuple):
    """One cell of a heat map; ``level``: how dark it is."""

    column: int
    line: int
    level: int
    text: str


def save_ticks(saves: Sequence[Save], left: float, right: float, y: float) -> Iterator[str]:
    """Yields the names of a few saves below a drawing that has a column for each."""
    every = max(1, math.ceil(len(saves) / _TICKS))
    width = (right - left) / max(1, len(saves))
    for at in range(0, len(saves), every):
        name = f"{saves[at].incarnation}-{saves[at].step}"
        yield f'<text x="{left + at * width:.1f}" y="{y:.0f}">{name}</text>'


# ── heat maps ────────────────────────────────────────────────────────────────────────────────────


def rows_of(report: Report) -> Sequence[str]:
    """Returns what the rows of heat maps can be of."""
    return _ROWS if report.mesh is not None else _ROWS[:-1]


def map_style(maps: Sequence[str], of: Sequence[str]) -> str:
    """Returns the rules by which the buttons show one heat map and no other."""
    return "".join(
        f"main:has(#map-{phase}:checked):has(#rows-{rows}:checked) .map-{phase}.rows-{rows}"
        "{display:block}"
        for phase in maps
        for rows in of
    )


def heat_maps(report: Report, saves: Sequence[Save], maps: Sequence[str], first: str) -> str:
    """Returns the heat maps of all phases by rank, by host and over the mesh, and their buttons;
    ``first``: the phase that shows.
    """
    phases = sorted(maps, key=lambda name: (name != first, name != "copy_s"))
    buttons = _buttons("map", "phase", {phase: phase_label(phase) for phase in phases})
    buttons += _buttons("rows", "rows", {rows: f"by {rows}" for rows in rows_of(report)})
    host_of = {n: report.hosts_at(n) for n in {save.incarnation for save in saves}}

    def one(phase: str, rows: str) -> str:
        if rows == "mesh" and report.mesh is not None:
            return _mesh_map(saves, phase, report.mesh)
        return _heat_map(saves, phase, rows, host_of)

    drawn = "".join(
        f'<div class="map map-{phase} rows-{rows}">{one(phase, rows)}</div>'
        for phase in maps
        for rows in rows_of(report)
    )
    note = (
        "Of each save the 16 slowest ranks are known; an empty cell is a rank that was not one. A "
        "host has the time of its slowest rank. On the right: the mean, and the bytes of a rank."
    )
    return f"{buttons}{drawn}<p class=soft>{note}</p>"


def phase_label(phase: str) -> str:
    """Returns the name of a phase by itself: ``writing: fsync`` for a part of one."""
    one = OF_SAVES[phase]
    whole = "".join(each.label for each in OF_SAVES.values() if each.name == one.within)
    if not whole:
        return one.label.removesuffix(", altogether")
    return f"{whole.removesuffix(', altogether')}: {one.label.removeprefix('of it, ')}"


def _buttons(name: str, legend: str, labels: Mapping[str, str]) -> str:
    buttons = "".join(
        f'<label><input type="radio" name="{name}" id="{name}-{value}"'
        f"{' checked' if at == 0 else ''}> {escaped(label)}</label>"
        for at, (value, label) in enumerate(labels.items())
    )
    return f"<fieldset><legend>{legend}</legend>{buttons}</fieldset>"


def _heat_map(
    saves: Sequence[Save], phase: str, rows: str, host_of: Mapping[int, Mapping[int, str]]
) -> str:
    columns = [_column(save, phase, rows, host_of[save.incarnation]) for save in saves]
    totals: dict[tuple[int, str], float] = {}
    for column in columns:
        for row, value in column.items():
            totals[row] = totals.get(row, 0.0) + value
    slowest = sorted(totals, key=lambda row: -totals[row])[:MOST_ROWS]
    largest = max((value for column in columns for value in column.values()), default=0.0)
    parts, cells = [], []
    for line, row in enumerate(sorted(slowest)):
        rank, host = row
        name = host or "?" if rank < 0 else f"rank {rank}" + (f" on {host}" if host else "")
        parts.append(f'<text x="0" y="{line * _ROW + 11}">{escaped(name[:24])}</text>')
        mean = _mean_text(row, columns, saves, phase)
        parts.append(
            f'<text x="{WIDTH - _MEANS + 8}" y="{line * _ROW + 11}">{escaped(mean)}</text>'
        )
        who = f"rank {rank}" if rank >= 0 else f"host {host[:_SHORT]}"
        if OF_SAVES[phase].side == "coordinator":
            who = "coordinator"
        for at, column in enumerate(columns):
            if row in column:
                part = math.sqrt(column[row] / largest) if largest > 0 else 0.0
                save, took = saves[at], seconds_text(column[row])
                text = f"{who} at {save.incarnation}-{save.step}: {took}"
                cells.append(_Cell(at, line, round(part * (_LEVELS - 1)), text))
    parts += _cells(cells, (WIDTH - _NAMES - _MEANS) / max(1, len(saves)))
    height = max(1, len(slowest)) * _ROW + 14
    parts += save_ticks(saves, _NAMES, WIDTH - _MEANS, height - 2)
    label = f"{phase_label(phase)}, by {rows} and save; darkest {seconds_text(largest)}"
    drawn = svg(height, label, parts)
    left_out = int(rows == "host")  # the rank
    figures = _details(
        _FIGURES[left_out:],
        (_figures(row, columns, saves)[left_out:] for row in slowest),
        texts=2 - left_out,
    )
    return f'<p class="soft">{escaped(label)}</p>{drawn}{figures}'


def _mean_text(
    row: tuple[int, str],
    columns: Sequence[Mapping[tuple[int, str], float]],
    saves: Sequence[Save],
    phase: str,
) -> str:
    """Formats ``80.1 ms, 262 MB``: the mean of a row, and the bytes of its rank."""
    mean_s = statistics.fmean(column[row] for column in columns if row in column)
    found = (save.bytes_of(phase).get(row[0]) for save in reversed(saves))
    size_bytes = next((known for known in found if known is not None), None)
    return seconds_text(mean_s) + ("" if size_bytes is None else f", {size_text(size_bytes)}")


def _figures(
    row: tuple[int, str], columns: Sequence[Mapping[tuple[int, str], float]], saves: Sequence[Save]
) -> tuple[str, ...]:
    """Returns the figures of a row of a heat map, as ``_FIGURES`` names them."""
    rank, host = row
    known = [(column[row], at) for at, column in enumerate(columns) if row in column]
    largest_s, at = max(known)
    mean_s = statistics.fmean(value for value, _ in known)
    where = f"{saves[at].incarnation}-{saves[at].step}"
    who = f"rank {rank}" if rank >= 0 else ""
    return who, host or "?", str(len(known)), seconds_text(mean_s), seconds_text(largest_s), where


def _mesh_map(saves: Sequence[Save], phase: str, mesh: RunMesh) -> str:
    """Returns a heat map over the coordinates of a mesh: its last axis runs to the right, all other
    axes downwards. A cell has the mean of the saves in which its rank was among the slowest.
    """
    every: dict[int, list[float]] = {}
    for save in saves:
        for rank, value in save.phases[phase].slowest if phase in save.phases else ():
            every.setdefault(rank, []).append(value)
    where = mesh.coordinates()
    known = {where[rank]: (rank, statistics.fmean(s)) for rank, s in every.items() if rank in where}
    lines: dict[tuple[int, ...], float] = {}
    for at, (_, value) in known.items():
        lines[at[:-1]] = max(value, lines.get(at[:-1], 0.0))
    shown = sorted(sorted(lines, key=lambda line: -lines[line])[:MOST_ROWS])
    largest = max(lines.values(), default=0.0)
    parts, cells = [], []
    for n, line in enumerate(shown):
        name = _axes_text(mesh.names[:-1], line) or "all"
        parts.append(f'<text x="0" y="{n * _ROW + 11}">{escaped(name[:24])}</text>')
        for at, (rank, value) in known.items():
            if at[:-1] == line:
                part = math.sqrt(value / largest) if largest > 0 else 0.0
                text = f"{_axes_text(mesh.names, at)}, rank {rank}: {seconds_text(value)}"
                cells.append(_Cell(at[-1], n, round(part * (_LEVELS - 1)), text))
    parts += _cells(cells, (WIDTH - _NAMES) / mesh.sizes[-1])
    label = (
        f"{phase_label(phase)} over the mesh, {mesh.names[-1]} to the right; darkest "
        f"{seconds_text(largest)}"
    )
    drawn = svg(max(1, len(shown)) * _ROW, label, parts)
    slowest = sorted(known.items(), key=lambda one: -one[1][1])[:MOST_ROWS]
    rows = (
        (_axes_text(mesh.names, place), f"rank {rank}", seconds_text(value))
        for place, (rank, value) in slowest
    )
    figures = _details(("where", "rank", "mean"), rows, texts=2)
    return f'<p class="soft">{escaped(label)}</p>{drawn}{figures}'


def _axes_text(names: Sequence[str], at: Sequence[int]) -> str:
    """Formats ``dp 3, tp 1``."""
    return ", ".join(f"{name} {n}" for name, n in zip(names, at, strict=True))


def _cells(cells: Sequence[_Cell], width: float) -> Iterator[str]:
    """Yields the cells of a heat map: each with its text, or, of very many, all of a shade as one
    drawing.
    """
    yield f'<g class="cell" transform="translate({_NAMES} 0) scale({width:.3f} {_ROW})">'
    if len(cells) <= MOST_TITLED:
        for one in cells:
            yield (
                f'<path d="{_square(one)}" fill-opacity="{_shade(one.level)}">'
                f"<title>{escaped(one.text)}</title></path>"
            )
    else:
        for level in sorted({one.level for one in cells}):
            drawn = "".join(_square(one) for one in cells if one.level == level)
            yield f'<path d="{drawn}" fill-opacity="{_shade(level)}"/>'
    yield "</g>"


def _square(one: _Cell) -> str:
    return f"M{one.column} {one.line}h.9v.93h-.9z"


def _shade(level: int) -> str:
    return f"{0.06 + 0.94 * level / (_LEVELS - 1):.2f}"


def _column(
    save: Save, phase: str, rows: str, host_of: Mapping[int, str]
) -> dict[tuple[int, str], float]:
    """Returns the seconds of each row in one save: (rank, host), or (-1, host)."""
    column: dict[tuple[int, str], float] = {}
    for rank, value in save.phases[phase].slowest if phase in save.phases else ():
        host = host_of.get(rank, "") if rank >= 0 else "coordinator"
        row = (rank, host) if rows == "rank" else (-1, host)
        column[row] = max(value, column.get(row, 0.0))
    return column


# ── one save ─────────────────────────────────────────────────────────────────────────────────────


def save_timeline(found: RunSpans) -> str:
    """Returns a drawing of what each rank and keeper did, from when to when."""
    first_s = min(span.start_s for span in found.spans)
    span_s = max(1e-6, max(span.end_s for span in found.spans) - first_s)
    lanes = _lanes(found.spans)
    height, scale = 18, (WIDTH - _NAMES - 10) / span_s
    parts = list(_ruler(span_s, scale, len(lanes) * height))
    for line, ((host, rank), spans) in enumerate(lanes.items()):
        name = f"keeper of {host or '?'}" if rank < 0 else f"rank {rank} on {host or '?'}"
        parts.append(f'<text x="0" y="{line * height + 13}">{escaped(name[:24])}</text>')
        for span in spans:
            parts += _bar(span, _NAMES + (span.start_s - first_s) * scale, line * height, scale)
    label = f"what ranks and keepers did in the {seconds_text(span_s)} of this save"
    shown = {span.phase.report_name: span.phase.sign for span in found.spans if span.phase.sign}
    key = ", ".join(f"{sign} {phase_label(phase)}" for phase, sign in sorted(shown.items()))
    note = (
        ""
        if len(lanes) < MOST_ROWS
        else f" Of all lanes the {MOST_ROWS} that took longest are here."
    )
    drawn = svg(len(lanes) * height + 22, label, parts)
    every = sorted((span for spans in lanes.values() for span in spans), key=lambda s: s.start_s)
    rows = (
        (
            f"keeper of {span.host or '?'}" if span.rank < 0 else f"rank {span.rank}",
            span.name,
            seconds_text(span.start_s - first_s),
            seconds_text(span.length_s),
        )
        for span in every[:_MOST_SPANS]
    )
    figures = _details(("who", "phase", "after", "took"), rows, texts=2)
    return f'<p class="soft">{escaped(label)}: {escaped(key)}.{note}</p>{drawn}{figures}'


def _lanes(spans: Iterable[Span]) -> dict[tuple[str, int], list[Span]]:
    """Returns the spans by host and rank, in order; of too many lanes those that took longest."""
    lanes: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        lanes.setdefault((span.host, span.rank), []).append(span)
    longest = sorted(lanes, key=lambda lane: -max(span.length_s for span in lanes[lane]))
    return {lane: lanes[lane] for lane in sorted(longest[:MOST_ROWS])}


def _bar(span: Span, x: float, y: float, scale: float) -> Iterator[str]:
    sign, style = span.phase.sign, span.phase.style
    width = max(1.0, span.length_s * scale)
    title = f"{span.name}: {seconds_text(span.length_s)}"
    within = ", ".join(f"{one.name} {seconds_text(one.length_s)}" for one in span.inner)
    yield (
        f"<g><title>{escaped(title + (f' ({within})' if within else ''))}</title>"
        f'<rect class="{style}" fill-opacity="0.8" x="{x:.1f}" y="{y + 1}" width="{width:.1f}" '
        'height="15"/>'
    )
    for one in span.inner:
        start = x + (one.start_s - span.start_s) * scale
        yield (
            f'<rect class="inner" x="{start:.1f}" y="{y + 1}" '
            f'width="{max(0.5, one.length_s * scale):.1f}" height="5"/>'
        )
    if width > 12:
        yield f'<text class="sign" x="{x + 3:.1f}" y="{y + 13}">{sign}</text>'
    yield "</g>"


def _ruler(span_s: float, scale: float, height: float) -> Iterator[str]:
    """Yields a line at each of a few round moments."""
    unit = 10.0 ** math.floor(math.log10(span_s))
    every = next(unit * part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if span_s / (unit * part) <= 10)
    for n in range(int(span_s / every) + 1):
        x = _NAMES + n * every * scale
        yield f'<path class="grid" d="M{x:.1f} 0V{height}"/>'
        yield f'<text x="{x + 2:.1f}" y="{height + 14}">{escaped(seconds_text(n * every))}</text>'
