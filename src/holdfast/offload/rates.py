"""PURE. How fast a machine moves and updates optimizer state, measured once and kept current.

A schedule is only as good as its rates, and rates change: other processes come, a link is shared,
clocks fall. So an estimate moves with what is measured, a little each time and by the logarithm;
of the last few durations the one in the middle counts, so that single ones say nothing.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, fields, replace
from statistics import median_low
from typing import Any, Literal

from holdfast.errors import UsageError

Kind = Literal["h2d", "d2h", "host_update", "device_update", "host_cast"]

#: Of so many durations the one in the middle counts: two of them may be anything. It makes up half
#: of an estimate when there is but one, and a sixth in the end.
RECENT = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """What the model needs to know of a machine, for one process and its device.

    Bytes and elements a second while nothing else runs. The fields in ``_bytes`` say what one
    element costs to move.
    """

    h2d_bytes_s: float
    d2h_bytes_s: float
    host_update_elements_s: float
    device_update_elements_s: float
    #: From the master's type to the parameters'; ``inf`` where the update does it on the way.
    host_cast_elements_s: float = math.inf
    #: What is left of one direction's rate while the other is used: 1 duplex, 0.5 one shared link.
    both_ways: float = 1.0
    #: What the host's memory gives to updates and copies together: both go through it.
    host_memory_bytes_s: float = math.inf
    #: Master, both moments: 12 bytes; 16 with amsgrad.
    state_in_bytes: int = 12
    state_out_bytes: int = 12
    gradient_bytes: int = 2
    parameter_bytes: int = 2
    #: What each copy and each update costs beside its bytes or elements.
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value, (least, most) = getattr(self, one.name), _BOUNDS.get(one.name, _FINITE)
            is_rate = one.name.endswith(("bytes_s", "elements_s"))
            if not least <= value <= most or (is_rate and not value):
                raise UsageError(f"{one.name}={value!r} is no rate, share or size to plan with")

    @property
    def host_elements_s(self) -> float:
        """What the host updates and casts, one after the other, while nothing else runs."""
        return 1 / (1 / self.host_update_elements_s + 1 / self.host_cast_elements_s)

    @property
    def update_traffic_bytes(self) -> int:
        """What the host's update of one element reads and writes."""
        return (
            self.state_in_bytes + self.state_out_bytes + self.gradient_bytes + self.parameter_bytes
        )


_FINITE = (0.0, sys.float_info.max)
_BOUNDS = {
    "both_ways": (0.1, 1.0),
    "host_cast_elements_s": (0.0, math.inf),
    "host_memory_bytes_s": (0.0, math.inf),
}
_FIELDS: dict[Kind, str] = {
    "h2d": "h2d_bytes_s",
    "d2h": "d2h_bytes_s",
    "host_update": "host_update_elements_s",
    "device_update": "device_update_elements_s",
    "host_cast": "host_cast_elements_s",
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate, and the last few that were measured."""

    rate: float
    recent: tuple[float, ...] = ()

    def after(self, work: float, elapsed_s: float) -> Estimate:
        """With one more duration: ``work`` bytes or elements in ``elapsed_s``.

        Where nothing was done, or the clock did not move, nothing is learned.
        """
        if not (work > 0 and elapsed_s > 0 and 0 < work / elapsed_s < math.inf):
            return self
        recent = (*self.recent, work / elapsed_s)[-RECENT:]
        weight = 1 / (len(recent) + 1)
        return Estimate(self.rate ** (1 - weight) * median_low(recent) ** weight, recent)


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates, and what was learned of each since: a value, replaced by what follows from it."""

    first: Rates
    estimates: dict[Kind, Estimate] = field(default_factory=dict)

    def after(
        self, kind: Kind, work: float, elapsed_s: float, *, overhead: bool = True
    ) -> Measured:
        """With one more duration of this kind; the overhead of one copy or update is taken off."""
        spent_s = elapsed_s - self.first.overhead_s * overhead
        known = self.estimates.get(kind) or Estimate(getattr(self.first, _FIELDS[kind]))
        if math.isinf(known.rate):
            return self  # said to take no time: it is part of another duration
        return replace(self, estimates={**self.estimates, kind: known.after(work, spent_s)})

    @property
    def rates(self) -> Rates:
        """The rates by now."""
        learned: dict[str, Any] = {_FIELDS[kind]: one.rate for kind, one in self.estimates.items()}
        return replace(self.first, **learned)
