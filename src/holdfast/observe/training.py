"""Records the training of one process: its steps, the phases that it declares, what it is doing.

Steps are summed, so that records are as many for steps of a millisecond as for those of a minute.
What the process is doing stands in shared memory, where it is found after a SIGKILL; noting it is
no record, no system call and no lock.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.events import PhaseEnded, RunEnded, StepsDone, emit
from holdfast.observe.error_file import error_line
from holdfast.observe.event_ring import PHASES, EventRing

#: Seconds between two records of steps.
EVERY_S = 1.0
#: Phases that are shorter are summed.
SHORT_S = 0.1
#: A step is reported at once that takes so many times longer than the median of the last ones.
SLOW_TIMES = 5.0
_REMEMBERED = 21
#: Before its first step a process is training, or declares a phase: ``silence`` is patient then.
RESTORING, TRAINING, SAVING, ENDED, DECLARED = range(2, len(PHASES))


class TrainingRecorder:
    """Called on the training thread. ``is_reporting``: this rank's steps are recorded.

    ``ring``: that of the process; None where it has none: then nothing is known of its death.
    """

    def __init__(
        self,
        rank: int,
        incarnation: int,
        *,
        is_reporting: bool,
        ring: EventRing | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._incarnation = rank, incarnation
        self._is_reporting, self._ring, self._clock = is_reporting, ring, clock
        self._step, self._steps, self._tokens, self._longest_s = -1, 0, 0, 0.0
        self._is_first = True
        self._recent_s: list[float] = []
        self._short: dict[str, tuple[float, int]] = {}
        self.begin()

    def begin(self) -> None:
        """Training begins here: the first step counts from now on."""
        self._last_s = self._reported_s = self._clock()
        self.enter(TRAINING)

    def enter(self, phase: int, name: str = "") -> None:
        """Notes what the process is doing."""
        self._since_s = self._clock()
        self._is_saving = phase == SAVING
        ring = self._ring.ring if self._ring is not None else None
        if ring is not None:
            encoded = name.encode(errors="replace") if name else b""
            ring.note_doing(phase, self._step, self._incarnation, encoded)

    def step(self, step: int, tokens: int = 0) -> None:
        """Takes the end of a step, and that the process saves now."""
        now_s = self._clock()
        taken_s, self._last_s = now_s - self._last_s, now_s
        self._steps += 1 if self._is_first else max(1, step - self._step)
        self._step = step
        self._tokens += tokens
        self._longest_s = max(self._longest_s, taken_s)
        self.enter(SAVING)
        if not self._is_reporting:
            return
        recent_s = self._recent_s
        is_slow = len(recent_s) > 2 and taken_s > SLOW_TIMES * sorted(recent_s)[len(recent_s) // 2]
        self._recent_s = [*recent_s[1 - _REMEMBERED :], taken_s]
        if self._is_first or is_slow or now_s - self._reported_s >= EVERY_S:
            self.report()

    def report(self) -> None:
        """Reports what was not yet."""
        if not self._is_reporting:
            return
        for name, (elapsed_s, times) in self._short.items():
            self._tell(name, elapsed_s, times)
        self._short.clear()
        if not self._steps:
            return
        emit(
            StepsDone(
                incarnation=self._incarnation,
                step=self._step,
                rank=self._rank,
                steps=self._steps,
                elapsed_s=max(0.0, self._last_s - self._reported_s),
                longest_s=self._longest_s,
                tokens=self._tokens,
                is_first=self._is_first,
            )
        )
        self._reported_s, self._is_first = self._last_s, False
        self._steps, self._tokens, self._longest_s = 0, 0, 0.0

    def ended(self, outcome: str) -> RunEnded:
        """Reports what was not yet; returns the end of the run, which waited since ``enter``."""
        self.report()
        return RunEnded(
            incarnation=self._incarnation,
            rank=self._rank,
            outcome=outcome,
            reason="" if outcome == "closed" else _error_under_way(),
            closing_s=max(0.0, self._clock() - self._since_s) if self._is_saving else 0.0,
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is done inside is no training."""
        started_s = self._clock()
        self.enter(DECLARED, name)
        try:
            yield
        finally:
            elapsed_s = max(0.0, self._clock() - started_s)
            self.enter(TRAINING)
            if elapsed_s >= SHORT_S:
                self._tell(name, elapsed_s, 1)
            elif self._is_reporting:
                before_s, times = self._short.get(name, (0.0, 0))
                self._short[name] = before_s + elapsed_s, times + 1

    def _tell(self, name: str, elapsed_s: float, times: int) -> None:
        emit(
            PhaseEnded(
                incarnation=self._incarnation,
                step=self._step,
                rank=self._rank,
                name=name,
                elapsed_s=elapsed_s,
                times=times,
            )
        )


def _error_under_way() -> str:
    """Returns the error that is being handled, in a line; "" if there is none."""
    error = sys.exc_info()[1]
    return "" if error is None else error_line(error)
