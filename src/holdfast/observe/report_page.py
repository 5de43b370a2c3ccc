"""Writes a report as one page of HTML that needs nothing else: no request, no script.

What comes out of records is escaped, in text and in attributes alike, with characters that act made
visible. Charts are drawings in the page; which phase a heat map shows is chosen by radio buttons,
so that mouse and keyboard do it without a script. Colour never stands alone: a title, a sign or a
figure says the same.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence

from holdfast.observe.blame import find_slow
from holdfast.observe.findings import RunFinding
from holdfast.observe.ledger import Ledger
from holdfast.observe.page_charts import (
    WIDTH,
    escaped,
    heat_maps,
    map_style,
    rows_of,
    save_ticks,
    save_timeline,
    svg,
    table,
)
from holdfast.observe.phases import OF_SAVES
from holdfast.observe.report import Report, Save
from holdfast.observe.restore_view import time_text
from holdfast.observe.spans import RunSpans
from holdfast.observe.summary import (
    INTERRUPTION_NAMES,
    PARTS,
    error_lines,
    findings_by_cause,
    health_text,
    interruption_rows,
    parts_text,
    reliability_lines,
)
from holdfast.observe.tables import FIGURE_NAMES, figure_rows
from holdfast.observe.text import (
    moment_text,
    rate_text,
    seconds_text,
    size_text,
    zone_text,
)
from holdfast.observe.trouble_lines import trouble_lines

#: Saves of a chart, and lines of a table; of more the newest are shown.
MOST_SAVES, MOST_LINES = 240, 200
_HEIGHT, _LEFT, _BOTTOM = 220, 70, 24

_OF_FIGURES = "Of each save the slowest rank counts; which: the save, and the rank, of the largest."
_OF_SAVES = (
    "held: what save kept the training waiting for; fence: what an update waited for copies; "
    "captured, durable: how long after the call of save; throughput: to storage."
)
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--paper:#fff;--line:#d0d7de;
--bad:#b42318;--warn:#8a5300;--a:#0b62c4;--b:#a3431f;--h:11,98,196}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9ba5b0;--paper:#0d1117;
--line:#30363d;--bad:#ff8d80;--warn:#f0b35e;--a:#6cb2ff;--b:#ff9d76;--h:108,178,255}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1000px;padding:16px;background:var(--paper);
color:var(--ink);font:15px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}.verdict{font-size:17px}
.zone{font:13px system-ui,sans-serif;color:var(--soft)}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:28px 0 8px}
table{border-collapse:collapse;width:100%;font-size:13px}th,td{border-bottom:1px solid var(--line);
padding:3px 6px;text-align:left;vertical-align:top}td.n,th.n{text-align:right}
td.n,td.s,th{white-space:nowrap}
li{margin-bottom:6px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:11px}
svg text.sign{fill:#fff;font-weight:700}
.soft{color:var(--soft)}.critical{color:var(--bad);font-weight:600}.warning{color:var(--warn);
font-weight:600}.scroll{overflow-x:auto}.grid{stroke:var(--line)}.axis{stroke:var(--soft)}
.a{stroke:var(--a);fill:var(--a)}.b{stroke:var(--b);fill:var(--b)}.cell{fill:rgb(var(--h))}
.none{fill:none;stroke:var(--line)}.cross{stroke:var(--bad);stroke-width:2;fill:none}
.map{display:none}fieldset{border:1px solid var(--line);
margin:0 0 8px;padding:4px 8px;min-width:0}label{margin-right:12px;display:inline-block}
:focus-visible{outline:2px solid var(--a);outline-offset:2px}
.productive{fill:#2da44e}.blocking{fill:#8250df}.first_step{fill:#b8860b}.stall{fill:#cf222e}
.declared{fill:#0598bc}.lost_work{fill:#e16f24}.detection{fill:#bf3989}.restart{fill:#6e7781}
.start_up{fill:#57a0d3}.waiting{fill:#a475f9}.restore{fill:#1f6feb}.absent{fill:#444c56}
.away{fill:#8b949e}.unknown{fill:#767676}.inner{fill:#fff;fill-opacity:.35}
.bar text{fill:#fff;font-weight:700}
@media print{body{max-width:none;font-size:11px}h2{break-after:avoid}svg,tr,li{break-inside:avoid}
.scroll{overflow:visible}table{font-size:9px}fieldset,details{display:none}}
"""


def render_page(
    report: Report, findings: Sequence[RunFinding], one_save: RunSpans | None = None
) -> str:
    """Returns the page. ``one_save``: the spans of a save that is drawn over time."""
    maps = [phase for phase in OF_SAVES if any(phase in save.phases for save in report.saves)]
    style = _STYLE + map_style(maps, rows_of(report))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    body = "\n".join(_body(report, findings, maps, one_save))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(report.root)}: report</title>\n<style>{style}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _body(
    report: Report,
    findings: Sequence[RunFinding],
    maps: Sequence[str],
    one_save: RunSpans | None,
) -> Iterator[str]:
    severity = findings[0].severity if findings else "healthy"
    zone = f'<span class="zone">Times are {zone_text(report.last_s)}.</span>'
    yield f"<h1>{escaped(report.root)} {zone}</h1>"
    yield f'<p class="{severity} verdict">{escaped(health_text(report, findings))}</p>'
    has_ledger = report.ledger is not None and report.ledger.elapsed_s > 0
    if report.ledger is not None and has_ledger:
        yield _ledger_bar(report.ledger)
        yield f'<p class="soft">{escaped(parts_text(report.ledger))}</p>'
    yield "<h2>Findings</h2>"
    yield _findings(findings)
    if len(report.starts) > 1:
        yield "<h2>Interruptions</h2>"
        yield _timeline(report)
        yield _interruptions(report)
    if report.ledger is not None and has_ledger:
        yield "<h2>Where the time went</h2>"
        yield _ledger_table(report.ledger)
    if report.reliability is not None:
        yield from (f"<p>{escaped(line)}</p>" for line in reliability_lines(report.reliability))
    if report.interference is not None:
        yield f"<p>{escaped(report.interference.sentence)}</p>"
    if one_save is not None and one_save.spans:
        first = one_save.spans[0]
        yield f"<h2>Save {first.incarnation}-{first.step} over time</h2>"
        yield save_timeline(one_save)
    if report.restores:
        yield "<h2>Restores</h2>"
        yield _restores(report)
    saves = report.saves[-MOST_SAVES:]
    if saves:
        yield "<h2>Ranks and hosts by saves</h2>"
        yield heat_maps(report, saves, maps, _slow_phase(report, findings))
        yield "<h2>Saves over time</h2>"
        yield _chart(saves)
        yield "<h2>All saves</h2>"
        yield table(FIGURE_NAMES, figure_rows(report.figures), texts=2)
        yield f'<p class="soft">{_OF_FIGURES}</p>'
        yield "<h2>Saves</h2>"
        yield _save_table(report, saves[-MOST_LINES:])
        yield f'<p class="soft">{_OF_SAVES}</p>'
    troubles = "".join(f"<li>{escaped(line)}</li>" for line in trouble_lines(report))
    if troubles:
        yield f"<h2>What else happened</h2><ul>{troubles}</ul>"


def _slow_phase(report: Report, findings: Sequence[RunFinding]) -> str:
    """Returns the phase whose heat map shows the worst slow place: of a stall that in which all
    others wait.
    """
    found = find_slow(report.saves, report.ranks_by_host)
    is_stalled = any(one.cause == "stalled" for one in findings)
    return next((one.phase for one in found if one.phase), "grant_s" if is_stalled else "")


def _ledger_bar(ledger: Ledger) -> str:
    at, parts = 0.0, []
    for name, (label, sign) in PARTS.items():
        width = WIDTH * ledger.seconds[name] / ledger.elapsed_s
        if width <= 0:
            continue
        title = f"{label}: {seconds_text(ledger.seconds[name])}"
        parts.append(
            f'<g><title>{escaped(title)}</title><rect class="{name}" x="{at:.2f}" y="0" '
            f'width="{max(width, 0.5):.2f}" height="36"/>'
        )
        if width > 14:
            parts.append(f'<text x="{at + 4:.1f}" y="22">{escaped(sign)}</text>')
        parts.append("</g>")
        at += width
    drawn = svg(36, "the run's time by what it went into", parts)
    return f'<div class="bar">{drawn}</div>'


def _ledger_table(ledger: Ledger) -> str:
    whole = ledger.elapsed_s * ledger.ranks
    rows = [
        (
            f"{sign} {label}",
            seconds_text(ledger.seconds[name]),
            f"{100 * ledger.seconds[name] / ledger.elapsed_s:.1f} %",
            seconds_text(ledger.rank_seconds[name]),
            f"{100 * ledger.rank_seconds[name] / whole:.1f} %",
        )
        for name, (label, sign) in PARTS.items()
        if ledger.seconds[name] or ledger.rank_seconds[name]
    ]
    names = ("part", "wall time", "part of it", "summed over ranks", "part of it")
    return table(names, rows)


def _findings(findings: Sequence[RunFinding]) -> str:
    if not findings:
        return "<p>Nothing is wrong.</p>"
    items = []
    for some, more in findings_by_cause(findings):
        items += [
            f'<li><span class="{one.severity}">{escaped(one.severity)} {escaped(one.cause)}'
            "</span>: "
            f"{escaped(one.evidence)}"
            + (f" (since {escaped(moment_text(one.since_s))})" if one.since_s else "")
            + f'<br><span class="soft">{escaped(one.remedy)}</span></li>'
            for one in some
        ]
        items += [f"<li>{escaped(more)}</li>"] if more else []
    return f"<ul>{''.join(items)}</ul>"


def _timeline(report: Report) -> str:
    """Draws the starts of a run one after the other, and where each was interrupted."""
    starts = report.starts
    # A keeper is there for longer than who trained.
    last_s = max(report.trained_s or report.last_s, starts[-1].time_s)
    if last_s <= starts[0].time_s:
        return ""
    first_s, span_s = starts[0].time_s, last_s - starts[0].time_s
    ends = [start.time_s - (start.down_s or 0.0) for start in starts[1:]] + [last_s]
    parts = []
    for start, end_s in zip(starts, ends, strict=True):
        at = WIDTH * (start.time_s - first_s) / span_s
        width = max(1.0, WIDTH * (end_s - start.time_s) / span_s - 2)
        title = f"start {start.incarnation}: {start.world} ranks, {start.ended}"
        parts.append(
            f'<g><title>{escaped(title)}</title><rect class="start_up" x="{at:.1f}" y="4" '
            f'width="{width:.1f}" height="20"/><text x="{at + 3:.1f}" y="40">'
            f"{start.incarnation}</text></g>"
        )
    for one in report.reliability.interruptions if report.reliability is not None else ():
        at = min(WIDTH - 2, max(2.0, WIDTH * (one.at_s - first_s) / span_s))
        who = f"rank {one.rank} on {one.host}" if one.rank >= 0 else "not seen who"
        lost = "not known how many" if one.lost_steps is None else one.lost_steps
        title = f"{moment_text(one.at_s)}: {who}, {lost} steps lost"
        parts.append(
            f'<g><title>{escaped(title)}</title><path class="stall" '
            f'd="M{at - 5:.1f} 0h10l-5 12z"/></g>'
        )
    when = f"from {moment_text(first_s)} to {moment_text(last_s)}"
    key = f'<p class="soft">Starts by number, {when}; a triangle is an interruption.</p>'
    return key + svg(46, "starts and interruptions over time", parts)


def _interruptions(report: Report) -> str:
    found = report.reliability.interruptions if report.reliability is not None else ()
    if not found:
        return "<p>None.</p>"
    shown = found[-MOST_LINES:]
    errors = "".join(f"<p>{escaped(line)}</p>" for line in error_lines(shown))
    return table(INTERRUPTION_NAMES, interruption_rows(shown), texts=3) + errors


def _restores(report: Report) -> str:
    rows = [
        (
            moment_text(one.time_s),
            f"{one.parent_incarnation}-{one.step}",
            ", ".join(one.sources),
            time_text(one, report.hosts_at(one.incarnation)) or "-",
            seconds_text(one.elapsed_s),
            size_text(one.size_bytes),
            f"{one.saved_world} to {one.world}",
        )
        for one in report.restores[-MOST_LINES:]
    ]
    names = ("when", "generation", "source", "where its time went", "took", "size", "ranks")
    return table(names, rows, texts=4)


def _chart(saves: Sequence[Save]) -> str:
    """Draws the time to captured and to durable of each save, on one scale of powers of ten, and
    which of them gave nothing.
    """
    series = {
        "captured": ("a", [(i, s.captured_s) for i, s in enumerate(saves) if s.captured_s]),
        "durable": ("b", [(i, s.durable_s) for i, s in enumerate(saves) if s.durable_s]),
    }
    values = [value for _, points in series.values() for _, value in points if value]
    if not values:
        return "<p>No times were recorded.</p>"
    low = math.floor(math.log10(max(1e-6, min(values))))
    high = max(low + 1, math.ceil(math.log10(max(values))))

    def y(value: float) -> float:
        part = (math.log10(max(1e-6, value)) - low) / (high - low)
        return 8 + (_HEIGHT - _BOTTOM - 8) * (1 - part)

    def x(at: int) -> float:
        return _LEFT + (WIDTH - _LEFT - 10) * (at + 0.5) / len(saves)

    parts = []
    for power in range(low, high + 1):
        line = y(10.0**power)
        parts.append(
            f'<path class="grid" d="M{_LEFT} {line:.1f}H{WIDTH}"/><text x="4" y="{line + 4:.1f}">'
            f"{escaped(seconds_text(10.0**power))}</text>"
        )
    for name, (style, points) in series.items():
        for at, value in points:
            save = saves[at]
            title = f"{save.incarnation}-{save.step} {name} after {seconds_text(value)}"
            place = x(at), y(value or low)
            mark = (
                f'<circle class="{style}" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="3"/>'
                if style == "a"
                else f'<rect class="{style}" x="{place[0] - 3:.1f}" y="{place[1] - 3:.1f}" '
                'width="6" height="6"/>'
            )
            parts.append(f"<g><title>{escaped(title)}</title>{mark}</g>")
    for at, save in enumerate(saves):
        if save.state == "missed":
            title = f"{save.incarnation}-{save.step} gave nothing"
            parts.append(
                f'<g><title>{title}</title><path class="cross" '
                f'd="M{x(at) - 4:.1f} {_HEIGHT - 36}l8 8m0-8l-8 8"/></g>'
            )
    parts += save_ticks(saves, _LEFT, WIDTH - 10, _HEIGHT - 6)
    missed = "; &#215; gave nothing" if any(save.state == "missed" for save in saves) else ""
    key = f'<p class="soft">&#9679; captured, &#9632; durable, since the call of save{missed}</p>'
    return key + svg(_HEIGHT, "seconds to captured and durable, by save", parts)


def _save_table(report: Report, saves: Sequence[Save]) -> str:
    hosts = {n: report.hosts_at(n) for n in {save.incarnation for save in saves}}

    def slowest(save: Save, phase: str) -> str:
        rank = save.slowest.get(phase, -1)
        host = hosts[save.incarnation].get(rank, "")
        return "" if rank < 0 else f"rank {rank}" + (f" on {host}" if host else "")

    rows = [
        (
            f"{save.incarnation}-{save.step}",
            save.state + (f": {save.reason}" if save.reason else ""),
            slowest(save, "copy_s"),
            slowest(save, "write_s"),
            *map(seconds_text, (save.held_s, save.fence_s, save.captured_s, save.durable_s)),
            size_text(save.size_bytes or None),
            rate_text(save.throughput_bytes_per_s),
        )
        for save in reversed(saves)
    ]
    names = ("generation", "state", "slowest to copy", "to write", "held", "fence", "captured")
    return table((*names, "durable", "size", "throughput"), rows, texts=4)
