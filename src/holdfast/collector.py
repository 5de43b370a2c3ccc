"""Pauses Python's garbage collector while many objects are made that are kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no garbage meanwhile: what is made has no circles, or few.

    Each collection scans the whole process, 0.1 to 0.2 s each time beside torch (measured), and
    thousands of new objects are the sign for one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
