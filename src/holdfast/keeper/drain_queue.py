"""Has checkpoints of a cache drained one after the other, and paces them while storage refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from holdfast.format.manifest import Generation

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Drained(NamedTuple):
    """What came of one generation. ``reason``: why it is not in the root; "" if it is."""

    generation: Generation
    attempt: str
    reason: str = ""
    is_lost: bool = False
    """The cache has it no more as its manifest names it, or another start has its number."""
    is_superseded: bool = False
    """It was not drained: the root has newer ones, and its retention would remove it at once."""


class DrainQueue:
    """Has the root's thread drain one generation after the other. On the keeper's loop."""

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], None],
        drain: Callable[[Mapping[tuple[int, int], str]], Drained | None],
        expected: Callable[[], Mapping[tuple[int, int], str]],
        told: Callable[[Drained], None],
        call_on_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        self._submit, self._drain, self._told = submit, drain, told
        self._expected = expected
        self._call_on_loop = call_on_loop
        self._is_running, self._is_woken = False, True
        self._pause_s, self._next_s = _FIRST_PAUSE_S, 0.0
        self.is_failing = False
        """True after storage refused, until it has taken something again."""

    @property
    def is_busy(self) -> bool:
        """Return True while something is drained, or is about to be."""
        return self._is_running or (self._is_woken and not self.is_failing)

    @property
    def is_running(self) -> bool:
        """Return True while something is drained."""
        return self._is_running

    def wake(self) -> None:
        """Look for something to drain at the next tick."""
        self._is_woken = True

    def tick(self, now_s: float) -> None:
        """Begin with the next generation, unless storage refused one a moment ago."""
        if self._is_running or not self._is_woken or now_s < self._next_s:
            return
        self._is_running, self._is_woken = True, False
        expected = self._expected()
        self._submit(lambda: self._run(expected))

    def reset(self) -> None:
        """Begin anew: the thread that was to drain has ended, and there is another."""
        self._is_running, self._is_woken, self.is_failing = False, True, False
        self._pause_s, self._next_s = _FIRST_PAUSE_S, 0.0

    def rest(self) -> None:
        """Handle that nothing can be drained now."""
        self._is_running = False

    def _run(self, expected: Mapping[tuple[int, int], str]) -> None:
        try:
            drained = self._drain(expected)
        except Exception as error:  # the next one may succeed; this thread must go on
            drained = Drained(Generation(0, -1), "", str(error))
        self._call_on_loop(lambda: self._ended(drained))

    def _ended(self, drained: Drained | None) -> None:
        self._is_running = False
        if drained is None:
            self.is_failing = False
            return
        self._is_woken = True
        self.is_failing = bool(drained.reason) and not drained.is_lost
        if self.is_failing:
            self._next_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        else:
            self._pause_s = _FIRST_PAUSE_S
        self._told(drained)
