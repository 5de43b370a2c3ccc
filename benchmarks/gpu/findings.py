"""Findings of a day with a GPU: one line of JSON each, compared with its target."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kit import markdown

#: Names of findings that say how a section ended.
ENDED = "ended"


class Target(NamedTuple):
    """At most, or at least, so much."""

    bound: float
    is_most: bool = True

    def is_met(self, value: float) -> bool:
        """Whether the value is on the right side."""
        return value <= self.bound if self.is_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'at most' if self.is_most else 'at least'} {self.bound:g}"


def at_most(bound: float) -> Target:
    """A target for values that are better the smaller they are."""
    return Target(bound)


def at_least(bound: float) -> Target:
    """A target for values that are better the larger they are."""
    return Target(bound, is_most=False)


@dataclass(frozen=True, slots=True)
class Finding:
    """One value, and all that must stand beside it.

    ``met`` None: there is no target, or the value says nothing about it, as on a simulated device.
    """

    section: str
    name: str
    value: Any
    unit: str
    target: str
    met: bool | None
    note: str
    date: str
    device: str
    torch: str
    driver: str

    def line(self) -> str:
        """The finding as a line of JSON."""
        return json.dumps(asdict(self))


def read(path: Path) -> list[Finding]:
    """The findings in a file, of each section those of its last run; a line that was cut off is
    left out.
    """
    runs: dict[str, list[Finding]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            one = Finding(**json.loads(line))
        except (ValueError, TypeError):
            continue
        run = runs.setdefault(one.section, [])
        if run and run[-1].name == ENDED:
            run.clear()
        run.append(one)
    return [one for run in runs.values() for one in run]


def ended_sections(found: list[Finding]) -> set[str]:
    """The sections that ran to their end, or found out that they cannot run here."""
    return {one.section for one in found if one.name == ENDED and one.value in ("done", "unseen")}


def ending(section: str, how: str, note: str, about: dict[str, str]) -> Finding:
    """How a section ended: done, unseen, failed or out of time."""
    return Finding(section, ENDED, how, "", "", None, note, time.strftime("%Y-%m-%d"), **about)


def table(found: list[Finding]) -> str:
    """All findings as a table, in the order in which they were made."""
    head = ["section", "finding", "value", "target", "", "note"]
    rows = [
        [
            one.section,
            one.name,
            f"{_short(one.value)} {one.unit}".strip(),
            one.target,
            {True: "met", False: "**missed**", None: ""}[one.met],
            one.note.replace("|", "/"),
        ]
        for one in found
        if one.name != ENDED or one.value != "done"
    ]
    return markdown.table(head, rows)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
