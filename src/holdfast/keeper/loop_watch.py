"""Notices when the keeper's loop is held: meanwhile no trainer and no other host is answered.

``PYTHONASYNCIODEBUG=1`` in a keeper's environment names the callbacks that hold it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from holdfast.events import LoopHeld, emit

#: Nothing may hold the loop for longer.
MOST_S = 0.05
#: Seconds between two reports; the first comes at once.
_REPORT_S = 60.0


class LoopWatch:
    """Times the pauses of a keeper's ticks. Belongs to the thread of the loop.

    The time for which the thread waited for a processor does not count: a busy machine is no fault
    of the keeper.
    """

    def __init__(
        self, host: str, *, clock: Callable[[], float] = time.monotonic, report_s: float = _REPORT_S
    ) -> None:
        self._host, self._clock, self._report_s = host, clock, report_s
        self._times, self._longest_s = 0, 0.0
        self._reported_s = -report_s
        self._schedule: int | None = None

    async def pause(self, seconds: float) -> None:
        """Sleep, and note by how much longer than that the loop kept the ticks waiting."""
        asyncio.get_running_loop().slow_callback_duration = MOST_S
        began_s, waited_s = self._clock(), self._waited_s()
        await asyncio.sleep(seconds)
        now_s = self._clock()
        held_s = now_s - began_s - seconds
        if held_s > MOST_S:  # a tick in time costs no second look at the kernel's count
            held_s -= self._waited_s() - waited_s
        if held_s > MOST_S:
            self._times, self._longest_s = self._times + 1, max(self._longest_s, held_s)
        if self._times and now_s - self._reported_s >= self._report_s:
            emit(LoopHeld(host=self._host, times=self._times, longest_s=self._longest_s))
            self._times, self._longest_s, self._reported_s = 0, 0.0, now_s

    def _waited_s(self) -> float:
        """Seconds for which this thread has waited for a processor, as the kernel counts them."""
        try:
            if self._schedule is None:
                self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._schedule, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # a kernel that does not count it
            return 0.0

    def close(self) -> None:
        """End the watch."""
        if self._schedule is not None:
            os.close(self._schedule)
            self._schedule = None
