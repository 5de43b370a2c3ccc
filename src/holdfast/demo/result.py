"""What came of a demo, as one value: the table, the curves, and how it is written down."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.demo.verdict import TOLERANCE, Row


@dataclass(frozen=True, slots=True)
class Curve:
    """The losses one incarnation made, by step."""

    label: str
    losses: Mapping[int, float]
    is_bitwise: bool = True
    """Whether it was to be the reference's bit for bit."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A kill: the step it came after, and the step training went on from."""

    what: str
    at: int
    back_to: int


@dataclass(slots=True)
class Result:
    """Everything the demo found. The first curve is the reference."""

    seed: int
    hosts: int | None = None
    """On how many simulated hosts; None: on this one."""
    rows: list[Row] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    falls: list[Fall] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def is_as_promised(self) -> bool:
        """Whether the demo came to its end and every line of the table is as promised."""
        return not self.failure and not any(row.broken for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values; losses as hexadecimal floats."""
        return {
            "as_promised": self.is_as_promised,
            "failure": self.failure,
            "seed": self.seed,
            "hosts": self.hosts,
            "tolerance": TOLERANCE,
            "rows": [asdict(row) for row in self.rows],
            "phases_s": {name: round(elapsed_s, 2) for name, elapsed_s in self.phases_s.items()},
            "losses": {
                curve.label: {str(step): loss.hex() for step, loss in curve.losses.items()}
                for curve in self.curves
            },
            "machine": {
                "python": platform.python_version(),
                "torch": importlib.metadata.version("torch"),
                "cores": os.cpu_count(),
            },
        }
