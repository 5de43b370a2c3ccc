"""What this keeper turns away, at its socket and at its two ports: bounded, counted and told.

Told by event soon after the first of it, and then ever more seldom: whoever knocks for a month
fills no trace with that.
"""

from __future__ import annotations

from collections import Counter

from holdfast.events import RequestsRefused, emit
from holdfast.keeper.connection import Connection
from holdfast.snapshot import messages as m

SOCKET, PEERS, CONTROL = "socket", "peers", "control"
MOST_SILENT = 256
"""Connections of processes of our user over which nothing was said yet that makes sense: more than
the ranks of a host, which may all come at once."""
FIRST_FRAME_BYTES = 1 << 20
"""Of the first message: it says who calls."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 600.0
#: What peers of the run meet with on an ordinary day.
_ORDINARY = frozenset({"challenged", "unknown", "withdrawn", "bad_range"})


class Doors:
    """Lives on the keeper's loop. ``host``: whose keeper this is."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._untold: dict[str, Counter[str]] = {}
        self._silent: dict[Connection, None] = {}
        self._next_s, self._pause_s = 0.0, FIRST_PAUSE_S

    def refused(self, door: str, kind: str) -> None:
        """Something was turned away there."""
        if kind not in _ORDINARY:
            self._untold.setdefault(door, Counter())[kind] += 1

    def tell(self, now_s: float) -> None:
        """Emit what was turned away since the last time, if it is time for that."""
        if not self._untold or now_s < self._next_s:
            return
        self._next_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        for door, counts in self._untold.items():
            emit(RequestsRefused(host=self._host, door=door, counts=dict(counts)))
        self._untold.clear()

    # ── the socket ───────────────────────────────────────────────────────────────────────

    def came(self, connection: Connection) -> None:
        """A process of our user calls. Of too many that say nothing the oldest is hung up on."""
        if len(self._silent) >= MOST_SILENT:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.hang_up()
            self.refused(SOCKET, "crowded")
        self._silent[connection] = None

    def most_bytes(self, connection: Connection) -> int:
        """How large its next message may be."""
        return FIRST_FRAME_BYTES if connection in self._silent else m.MAX_FRAME_BYTES

    def left(self, connection: Connection) -> None:
        """It said something that makes sense, or is gone."""
        self._silent.pop(connection, None)
