"""PURE. Lays out what a run is doing now, in lines for a terminal of any size from 80 by 24 on."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from holdfast.events import HostSampled
from holdfast.observe.live_run import STATES, LiveRun
from holdfast.observe.phases import PHASES
from holdfast.observe.silence import OF_STEPS
from holdfast.observe.text import (
    count_text,
    printable,
    rate_text,
    seconds_text,
    size_text,
)

#: Lines that say what is wrong, the worst first: made of the state and the present.
Findings = Callable[[LiveRun, float], Sequence[str]]
_QUIET_S = 60.0
#: Lines of the screen that findings take, and one of them.
_MOST_FINDINGS, _MOST_OF_ONE = 8, 3
_TROUBLE_S = 900.0
#: Phases of restores that are shown.
_RESTORE_PARTS = 3
#: Phases that are shown however small the screen is.
_LEAST_PHASES = 3


def findings_of(run: LiveRun, now_s: float) -> list[str]:
    """Returns the last troubles, the newest first, and that nothing was heard for a while."""
    lines = []
    if run.last_s and now_s - run.last_s > _QUIET_S:
        lines.append(f"no record for {seconds_text(now_s - run.last_s)}: the run ended, or stands")
    recent = [(at_s, text) for at_s, text in run.troubles if now_s - at_s < _TROUBLE_S]
    lines += [f"{seconds_text(max(0.0, now_s - at_s))} ago: {text}" for at_s, text in recent[::-1]]
    return lines


def screen_lines(
    root: str,
    run: LiveRun,
    now_s: float,
    *,
    width: int = 80,
    height: int = 24,
    findings: Findings = findings_of,
) -> list[str]:
    """Returns the lines of the screen: never more than ``height``, never wider than ``width``."""
    troubles = list(islice(_wrapped(findings(run, now_s), width), _MOST_FINDINGS))
    head = [*_head(root, run, now_s), ""]
    tail = ["", *(troubles or ["no trouble in the last 15 minutes"])]
    head += _phases(run, max(_LEAST_PHASES, height - len(head) - len(tail) - 1))
    room = height - len(head) - len(tail)
    hosts = _hosts(run, room - 1)
    lines = head + (["", *hosts] if hosts and room > 2 else []) + tail
    return [_cut(printable(line), width) for line in lines[:height]]


def _wrapped(findings: Sequence[str], width: int) -> Iterator[str]:
    """Yields the lines of findings: each over a few lines at most, indented from the second on."""
    for one in findings:
        shown = printable(one)[: _MOST_OF_ONE * width]
        lines = textwrap.wrap(shown, width, subsequent_indent="  ", break_on_hyphens=False)
        yield from lines[:_MOST_OF_ONE]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def _head(root: str, run: LiveRun, now_s: float) -> Iterator[str]:
    hosts = f" on {count_text(len(run.hosts), 'host')}" if run.hosts else ""
    starts = f"incarnation {run.incarnation}, {count_text(run.world, 'rank')}{hosts}"
    if not run.records:
        yield f"{root}: no records yet"
        return
    yield f"{root}: {starts}, last record {_age(now_s, run.last_s)}"
    reached, given_up = run.reached, run.given_up
    for state in STATES:
        if state in reached:
            at = reached[state]
            age = "restored " * at.is_restored + _age(now_s, run.moment_s(at.at))
            yield f"{state:<10}{at.incarnation}-{at.step:<10} {age}"
        elif state in given_up:
            yield f"{state:<10}not known: the run went back further than its newest saves"
    newest = run.newest
    if newest is not None:
        parts = [f"saved by {len(newest.saved)}", f"copied by {len(newest.copied)}"]
        if newest.written:
            parts.append(f"written of {len(newest.written)}")
        state = next((s for s in reversed(STATES) if s in newest.states), "")
        end = f"missed: {newest.missed}" if newest.missed else state or "under way"
        yield f"newest    {newest.incarnation}-{newest.step}: {', '.join(parts)}; {end}"
    held = run.held_part()
    part = "" if held is None else f", saves hold training {100 * held:.2f} % of the time"
    restored = _restore_text(run)
    if restored:
        yield f"restore   {restored}"
    yield (
        f"rates     {run.captures_per_minute():.0f} snapshots a minute, "
        f"{rate_text(run.stored_bytes_per_s())} to storage{part}"
    )
    doing = sum((Counter(one.doing) for one in run.hosts.values()), Counter[str]())
    if doing.keys() - OF_STEPS:
        each = ", ".join(f"{count} in {phase}" for phase, count in doing.most_common())
        yield f"ranks     {each}"
    copies = run.slowest_ranks(3)
    slowest = [f"{rank} on {host or '?'} {times:.1f}x" for rank, host, times in copies]
    if slowest:
        yield f"slow      copies of a byte, against the median: rank {', '.join(slowest)}"


def _restore_text(run: LiveRun) -> str:
    """Formats ``14.2 s: read 11.0 s, verify 2.10 s``: the longest of the last restores of ranks,
    and of what was done in them.
    """
    longest = {
        name: max(values)[0] for name, values in run.phases.items() if name.startswith("restore")
    }
    took_s = longest.pop("restore", 0.0)
    parts = sorted(((s, name) for name, s in longest.items() if s > 0), reverse=True)[
        :_RESTORE_PARTS
    ]
    shown = ", ".join(f"{name.removeprefix('restore_')} {seconds_text(s)}" for s, name in parts)
    return f"{seconds_text(took_s)}: {shown}" if shown else ""


def _age(now_s: float, time_s: float) -> str:
    return f"{seconds_text(max(0.0, now_s - time_s))} ago"


def _phases(run: LiveRun, most: int) -> Iterator[str]:
    """Yields the phases, those that took longest where there is room for so few."""
    yield f"{'phase':<15}{'median':>10}{'99 %':>10}{'largest':>10}  rank"
    figures = phase_figures(run)
    longest = sorted(figures, key=lambda name: -figures[name][3])[:most]
    for name, (count, median_s, high_s, largest_s, rank) in figures.items():
        if count and largest_s and name in longest:
            who = str(rank) if rank >= 0 else "-"
            shown = "".join(f"{seconds_text(v):>10}" for v in (median_s, high_s, largest_s))
            yield f"{name:<15}{shown}  {who}"


def phase_figures(run: LiveRun) -> dict[str, tuple[int, float, float, float, int]]:
    """Returns count, median, 99 %, largest and its rank of the last lengths of each phase."""
    found = {}
    for phase in PHASES:
        if phase.within or phase.name not in run.phases:
            continue
        values = list(run.phases[phase.name])
        lengths = sorted(length_s for length_s, _ in values)
        largest_s, rank = max(values)
        high_s = lengths[-(-len(lengths) * 99 // 100) - 1]
        found[phase.name] = len(values), statistics.median(lengths), high_s, largest_s, rank
    return found


def _hosts(run: LiveRun, room: int) -> list[str]:
    """Returns the hosts with the longest queues and the most pressure, as many as there is room."""
    if not run.hosts or room < 2:
        return []
    lines = [
        f"{'host':<15}{'ranks':>6}{'memory':>10}{'free shm':>10}{'queue':>10}{'for':>10}"
        f"{'fsync':>9}{'io':>6}"
    ]
    worst = sorted(run.hosts.values(), key=lambda h: (-h.queued_s, -h.io_pressure, h.host))
    return lines + [_host(each) for each in worst[: room - 1]]


def _host(of: HostSampled) -> str:
    pressure = f"{100 * of.io_pressure:.0f} %" if of.io_pressure >= 0 else "-"
    queued = seconds_text(of.queued_s) if of.queued_jobs else "-"
    return (
        f"{_cut(printable(of.host), 15):<15}{of.trainers:>6}{size_text(of.trainers_bytes):>10}"
        f"{size_text(of.free_bytes):>10}{size_text(of.queued_bytes):>10}{queued:>10}"
        f"{seconds_text(of.finish_s):>9}{pressure:>6}"
    )


def to_plain(run: LiveRun, now_s: float, findings: Findings = findings_of) -> dict[str, Any]:
    """Returns the same as plain values, for ``--json``."""
    newest = run.newest
    return {
        "incarnation": run.incarnation,
        "world": run.world,
        "last_record_s": run.last_s,
        "reached": {
            state: {
                "incarnation": at.incarnation,
                "step": at.step,
                "time_s": run.moment_s(at.at),
                "is_restored": at.is_restored,
            }
            for state, at in run.reached.items()
        },
        "newest": newest
        and {
            "incarnation": newest.incarnation,
            "step": newest.step,
            "saved": len(newest.saved),
            "copied": len(newest.copied),
            "written": len(newest.written),
            "states": sorted(newest.states),
            "missed": newest.missed,
        },
        "captures_per_minute": run.captures_per_minute(),
        "stored_bytes_per_s": run.stored_bytes_per_s(),
        "held_part": run.held_part(),
        "slowest_ranks": [list(each) for each in run.slowest_ranks(16)],
        "phases": {
            name: dict(zip(("count", "median_s", "p99_s", "largest_s", "rank"), each, strict=True))
            for name, each in phase_figures(run).items()
        },
        "hosts": {
            name: {f: getattr(one, f) for f in HostSampled.__struct_fields__[3:]}
            for name, one in sorted(run.hosts.items())
        },
        "findings": list(findings(run, now_s)),
    }
