"""Write results as markdown: tables, summaries in cells, and the line about the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.kit import results

_OF_MACHINE = ("processor", "cores", "memory", "disk", "kernel", "python")


def heading(facts: Mapping[str, str], *, is_short: bool = False) -> str:
    """The date, the machine and the versions of packages; short: without memory, disk, kernel."""
    packages = [f"{name} {facts[name]}" for name in facts if name not in _OF_MACHINE]
    machine = f"{facts['processor']}, {facts['cores']} cores"
    if not is_short:
        machine += f", {facts['memory']}, {facts['disk']}; Linux {facts['kernel']}"
    return f"{results.today()}: " + ", ".join([machine, f"Python {facts['python']}", *packages])


def spread(found: Mapping[str, Any], digits: int = 3) -> str:
    """A summary in a cell: the median, the lowest and the highest."""
    median, low, high = (f"{found[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} ({low}–{high})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; the first column is text, the others are figures."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
