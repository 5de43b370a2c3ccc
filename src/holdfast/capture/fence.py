"""Fences optimizer steps: no torch optimizer overtakes a running capture of this process."""

from __future__ import annotations

import atexit

from holdfast.state.step_calls import listeners

_AT_EXIT_S = 10.0

active_savers = listeners
"""Savers that are notified of every step (``step_calls``); a forked child has none."""


@atexit.register
def _end_captures() -> None:
    """Finish running captures when the interpreter ends; the keeper continues with them."""
    for each in tuple(active_savers):
        each.end_capture(timeout_s=_AT_EXIT_S)
