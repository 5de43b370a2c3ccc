"""Makes the roll-ups of all hosts on a thread of the keeper that coordinates."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.observe.event_files import trails_in
from holdfast.observe.rollup_files import ROLLUPS

if TYPE_CHECKING:
    from holdfast.observe.run_rollup_writer import RunRollupWriter

#: Seconds between two roll-ups of all hosts: one has some MB for thousands of them, whatever else.
EVERY_S = 600.0
#: Seconds between two looks if this keeper coordinates, and for the last roll-up at its end.
_LOOK_S, _LAST_S = 30.0, 3.0


class RollupJoining:
    """Joins now and then on a thread of its own until ``close``; ``leads``: returns True while this
    keeper coordinates.
    """

    def __init__(
        self,
        events: Callable[[], Path],
        leads: Callable[[], bool],
        *,
        every_s: float = EVERY_S,
        look_s: float = _LOOK_S,
    ) -> None:
        self._events, self._leads = events, leads
        self._every_s, self._look_s = every_s, look_s
        self._writer: RunRollupWriter | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="holdfast-join", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        next_s = time.monotonic() + self._every_s
        while not self._stopping.wait(self._look_s):
            if not self._leads():
                continue
            if self._writer is None:  # what is lost is waited for from now on
                with suppress(Exception):
                    self._made_writer().look()
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + self._every_s
                self._join(math.inf)
        with suppress(OSError):
            # What one host rolled up is as quickly read, and a keeper's end is waited for.
            if self._leads() and len(trails_in(self._events() / ROLLUPS)) > 1:
                self._join(time.monotonic() + _LAST_S)

    def _join(self, until_s: float) -> None:
        """Joins until nothing is left, or the keeper ends."""
        with suppress(Exception):  # whatever it met, the next time may not meet it
            while self._made_writer().join() and time.monotonic() < until_s:
                if self._stopping.is_set():
                    until_s = min(until_s, time.monotonic() + _LAST_S)

    def _made_writer(self) -> RunRollupWriter:
        from holdfast.observe.run_rollup_writer import RunRollupWriter  # a start would wait for it

        self._writer = self._writer or RunRollupWriter(self._events)
        return self._writer

    def close(self) -> None:
        """Joins a last time, and stops; gives up after some seconds."""
        self._stopping.set()
        self._thread.join(_LAST_S)
