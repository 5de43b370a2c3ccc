"""Times the phases of one restore: each moment of the thread that restores counts for one phase.

A phase that begins within another one interrupts it. Where several threads read, the time that they
took together is divided among the phases as these threads spent theirs.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

#: In this order they are told; ``events.Restored`` has a field for each.
PHASES = (
    "inventory",
    "choose",
    "plan",
    "allocate",
    "read",
    "decode",
    "verify",
    "copy",
    "exchange",
    "device",
    "set",
    "dropped",
    "meet",
)


class ThreadSeconds:
    """What threads that work side by side spent in each phase."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = defaultdict[str, float](float)

    def add(self, spent: Mapping[str, float]) -> None:
        """Adds what one thread spent, in seconds by phase."""
        with self._lock:
            for phase, seconds in spent.items():
                self._seconds[phase] += seconds

    def parts(self) -> dict[str, float]:
        """Returns the part of all that each phase has; empty where nothing was spent."""
        with self._lock:
            total = sum(self._seconds.values())
            return {name: s / total for name, s in self._seconds.items()} if total > 0 else {}


class RestoreClock:
    """The phases of one restore on one rank, by the monotonic clock, from when it was made."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_s = self._turned_s = now()
        self._phase = ""
        self._seconds = defaultdict[str, float](float)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Counts what follows for ``phase``, until it ends."""
        outer, _ = self._turn(phase)
        try:
            yield
        finally:
            self._turn(outer)

    @contextmanager
    def dividing(self, phase: str) -> Iterator[ThreadSeconds]:
        """Counts what follows for the phases that threads are in, as they tell; all of it for
        ``phase`` where they tell of none.
        """
        spent = ThreadSeconds()
        outer, _ = self._turn(phase)
        try:
            yield spent
        finally:
            _, elapsed_s = self._turn(outer)
            for name, part in spent.parts().items():
                self._seconds[name] += part * elapsed_s
                self._seconds[phase] -= part * elapsed_s

    @contextmanager
    def attempting(self) -> Iterator[None]:
        """Counts what follows for "dropped", whatever it was, if it ends with an error."""
        before = self._seconds.copy()
        try:
            yield
        except BaseException:
            self._turn(self._phase)
            lost_s = math.fsum(self._seconds.values()) - math.fsum(before.values())
            before["dropped"] += lost_s
            self._seconds = before
            raise

    def read(self) -> tuple[float, dict[str, float]]:
        """Returns the seconds since the beginning, and those of each phase of ``PHASES``."""
        self._turn(self._phase)
        elapsed_s = max(0.0, self._turned_s - self._began_s)
        return elapsed_s, {name: max(0.0, self._seconds[name]) for name in PHASES}

    def _turn(self, phase: str) -> tuple[str, float]:
        """Begins a phase; returns the one that it interrupts or ends, and for how long that was."""
        now_s = self._now()
        before, elapsed_s = self._phase, now_s - self._turned_s
        self._seconds[before] += elapsed_s
        self._phase, self._turned_s = phase, now_s
        return before, elapsed_s
