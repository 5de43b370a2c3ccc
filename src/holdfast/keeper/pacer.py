"""The coordinator watches how long steps take, and says how fast parity may be made.

A rank asks for its snapshot when its step is done, so two of its requests are as many steps apart
as their numbers say. No message is needed for it, and nobody measures anything.
"""

from __future__ import annotations

import time

from holdfast.redundancy.pacing import LEAST, Pacing


class Pacer:
    """Of one incarnation. On the keeper's loop."""

    def __init__(self) -> None:
        self._pacing = Pacing()
        self._asked: tuple[int, float, float] | None = None
        """Of the last request: its step, when it came, and ``_coded_s`` then."""
        self._interval_s = 0.0
        self._began_s: float | None = None
        self._moved_bytes = 0
        self._coded_s = 0.0
        """For how long parity has been made, all in all."""
        self._rest_until_s = 0.0

    @property
    def rate_bytes_s(self) -> int | None:
        """What each host may pull for the next generation; None: no bound."""
        return self._pacing.rate_bytes_s

    def asked(self, step: int) -> None:
        """A rank, always the same one, asks for a snapshot of this step."""
        now_s = time.monotonic()
        coded_s = self._coded_s + (0.0 if self._began_s is None else now_s - self._began_s)
        if self._asked is not None:
            last_step, last_s, last_coded_s = self._asked
            if step > last_step and now_s > last_s:
                self._interval_s = now_s - last_s
                self._pacing = self._pacing.stepped(
                    self._interval_s / (step - last_step),
                    (coded_s - last_coded_s) / self._interval_s,
                )
        self._asked = step, now_s, coded_s

    def begun(self, moved_bytes: int) -> None:
        """Hosts make parity from now on; each pulls so many bytes at most."""
        self._began_s, self._moved_bytes = time.monotonic(), moved_bytes

    def ended(self, *, is_made: bool) -> None:
        """They do so no more."""
        if self._began_s is None:
            return
        now_s, began_s, self._began_s = time.monotonic(), self._began_s, None
        self._coded_s += now_s - began_s
        if is_made:
            took_s = max(now_s - began_s, 1e-6)
            self._pacing = self._pacing.made(self._moved_bytes, took_s)
        self._rest_until_s = now_s + (LEAST + 1) * self._interval_s

    def may_begin(self) -> bool:
        """Whether parity may be made now: not for some steps, where none pass without it."""
        return not self._pacing.needs_rest or time.monotonic() >= self._rest_until_s
