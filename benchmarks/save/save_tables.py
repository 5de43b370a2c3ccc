"""Results as markdown: what ``results/README.md`` shows."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.kit import charts, markdown
from benchmarks.systems.contenders import OURS

NONE = "–"
Found = dict[str, Any]


# ── what a result says ───────────────────────────────────────────────────────────────────────


def is_sound(state: Found) -> bool:
    """Whether Holdfast, if it was measured, stored what was saved, every time."""
    return bool(state["systems"].get(OURS, {"exact": True}).get("exact", False))


def median(entry: Found, figure: str) -> float:
    return float(entry["figures"][figure]["median"])


def held(entry: Found, *, training: bool) -> float | None:
    """How long a system holds the training; None for one that stored something else."""
    if not entry["exact"]:
        return None
    return median(entry, "blocked in training" if training and entry["is_async"] else "blocked")


def rivals(state: Found) -> dict[str, Found]:
    """The systems that are not ours and did not fail."""
    return {
        name: entry
        for name, entry in state["systems"].items()
        if name != OURS and "failed" not in entry
    }


def targets(state: Found) -> list[list[str]]:
    """What issue and design ask of a save: got, target, met."""
    ours = state["systems"].get(OURS, {"failed": "not measured"})
    if "failed" in ours:
        return [["Holdfast", f"failed: {ours['failed']}", "", "no"]]
    host = max(median(ours, "host"), median(ours, "host in training"))
    memory = ours["memory"]["private"]["median"] * 1e6 / (1 << 20)
    share = _of_direct_write(state, ours)
    rows = [
        _row(
            "host time of `save`, after the first", f"{host * 1e3:.1f} ms", "≤ 4 ms", host <= 4e-3
        ),
    ]
    others = {name: held(entry, training=True) for name, entry in rivals(state).items()}
    right = {name: value for name, value in others.items() if value is not None}
    if right:
        best = min(right, key=right.__getitem__)
        ratio = median(ours, "blocked in training") / right[best]
        rows.append(
            _row(
                f"blocking behind forward and backward, of the best consistent rival's ({best})",
                f"{ratio:.1%}",
                "≤ 5 %",
                ratio <= 0.05,
            )
        )
    rows.append(_row("raw direct write, of time to durable", f"{share:.2f}", "≥ 0.9", share >= 0.9))
    rows.append(
        _row(
            "extra memory of the trainer, beyond the arena",
            f"{memory:.0f} MiB",
            "≤ 64 MiB",
            memory <= 64,
        )
    )
    return rows


def _of_direct_write(state: Found, ours: Found) -> float:
    """The median of the rounds' ratios."""
    writes = state["limits"]["figures"]["direct write"]["values"]
    durable = ours["figures"]["durable"]["values"]
    if len(writes) != len(durable):
        return statistics.median(writes) / statistics.median(durable)
    return statistics.median(write / own for write, own in zip(writes, durable, strict=True))


def _row(what: str, got: str, target: str, met: bool) -> list[str]:
    return [what, got, target, "yes" if met else "**no**"]


# ── images ───────────────────────────────────────────────────────────────────────────────────


def images(result: dict[str, Any]) -> dict[str, str]:
    """The images of one run, by file name."""
    drawn: dict[str, str] = {}
    for name, state in result["states"].items():
        entries = {
            title: entry for title, entry in state["systems"].items() if "failed" not in entry
        }
        title = state["title"]
        blocked = {system: held(entry, training=True) for system, entry in entries.items()}
        drawn[f"save-{name}-blocked.svg"] = charts.bars(
            f"Training held by a save behind forward and backward, seconds ({title})", blocked
        )
        drawn[f"save-{name}-durable.svg"] = charts.bars(
            f"Time to durable, seconds ({title})",
            {system: median(entry, "durable") for system, entry in entries.items()},
            limit=("direct write", state["limits"]["figures"]["direct write"]["median"]),
        )
        drawn[f"save-{name}-memory.svg"] = charts.bars(
            f"Extra private memory of the trainer, GB ({title})",
            {
                system: max(0.0, entry["memory"]["private"]["median"]) / 1e3
                for system, entry in entries.items()
            },
        )
    return drawn


# ── tables ───────────────────────────────────────────────────────────────────────────────────


def save(result: Found, facts: dict[str, str]) -> str:
    """The tables of one run."""
    parts = [f"{markdown.heading(facts)}. Medians (lowest–highest), in seconds."]
    for state in result["states"].values():
        parts += _state(state)
    return "\n\n".join(parts)


def _state(state: Found) -> list[str]:
    idle = state["idle_before"]
    entries = state["systems"]
    worked = {name: entry for name, entry in entries.items() if "failed" not in entry}
    set_ = "".join(f", {key}={value}" for key, value in state["environment"].items())
    alone = worked.get(OURS) or next(iter(worked.values()), None)
    parts = [
        f"### A state of {state['title']}",
        f"{state['size_bytes'] / 1e9:.2f} GB in {state['leaves']} leaves{set_}; {state['rounds']} "
        f"round{'s' * (state['rounds'] != 1)} of {state['repeat']} measurements. Before each the "
        f"processors were {idle['median']:.0%} idle ({idle['min']:.0%}–{idle['max']:.0%}).",
        markdown.table(
            [
                "",
                "the call",
                "blocked, update at once",
                "blocked, in training",
                "lost in training",
                "captured",
                "durable",
                "durable, in training",
                "blocked at the first saves",
                "what was stored",
            ],
            [
                [name, *(_times(entry) if name in worked else _failure(entry, 9))]
                for name, entry in entries.items()
            ],
        ),
        markdown.table(
            [
                "",
                "settings",
                "extra memory of the trainer, MB: private",
                "shared",
                "processor seconds: trainer",
                "other processes",
                "an update that does not wait",
                "blocked then",
                "what was stored then",
            ],
            [[name, *_costs(entry)] for name, entry in worked.items()],
        ),
        markdown.table(
            ["limit, same series", "seconds", "rate"],
            [
                [name, markdown.spread(found), _rate(state["size_bytes"], found)]
                for name, found in state["limits"]["figures"].items()
            ],
        ),
        f"Direct I/O: {state['limits']['settings']}.",
        markdown.table(["target", "got", "wanted", "met"], targets(state)),
    ]
    if alone:
        figures = alone["figures"]
        parts.append(
            f"A training step alone takes {figures['step, alone']['median']:.2f} s, of which "
            f"forward and backward {figures['forward and backward, alone']['median']:.2f} s."
        )
    return parts


def _failure(entry: Found, columns: int) -> list[str]:
    return [*[NONE] * (columns - 1), f"failed: {_cell(entry['failed'])}"]


def _times(entry: Found) -> list[str]:
    figures = entry["figures"]
    same = "the same"

    def cell(figure: str, otherwise: str = NONE) -> str:
        return markdown.spread(figures[figure]) if figure in figures else otherwise

    first = figures.get("blocked, first saves")
    return [
        _milliseconds(figures["host in training" if entry["is_async"] else "host"]),
        cell("blocked"),
        cell("blocked in training", same),
        cell("lost", same),
        cell("captured") if entry["is_async"] else NONE,
        cell("durable"),
        cell("durable in training", same),
        f"{first['median']:.2f} (highest {first['max']:.2f})" if first else NONE,
        entry["stored"],
    ]


def _costs(entry: Found) -> list[str]:
    figures, memory = entry["figures"], entry["memory"]
    not_waiting = figures.get("blocked, not waiting")
    rounded: Callable[[str], str] = lambda kind: f"{memory[kind]['median']:.0f}"  # noqa: E731
    return [
        _cell(entry["settings"]),
        rounded("private"),
        rounded("shared"),
        f"{figures['processor, trainer']['median']:.2f}",
        f"{figures['processor, others']['median']:.2f}",
        _cell(entry["early"]) or NONE,
        markdown.spread(not_waiting) if not_waiting else NONE,
        entry["stored early"] or NONE,
    ]


def _rate(size_bytes: int, found: Found) -> str:
    return f"{size_bytes / found['median'] / 1e9:.1f} GB/s"


def _milliseconds(found: Found) -> str:
    return f"{found['median'] * 1e3:.1f} ms"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
