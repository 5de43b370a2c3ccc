"""One thing that doctor says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "warn", "bad"]
ORDER: tuple[Severity, ...] = ("ok", "warn", "bad")


@dataclass(frozen=True, slots=True)
class Finding:
    """``text`` says what is so; ``remedy`` what to run or set, whenever it is not "ok"."""

    severity: Severity
    about: str
    text: str
    remedy: str = ""


def worst(findings: list[Finding]) -> Severity:
    """The severity of the whole."""
    return max((one.severity for one in findings), key=ORDER.index, default="ok")
