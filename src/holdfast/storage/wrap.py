"""Tries requests to a store again, limits their rate, and counts them: one place for all of it.

Nothing below tries again by itself. What went wrong is tried again only where the same request may
succeed later, with pauses that grow and vary, until a total deadline; what was tried again is told
by an event, at most once in a while.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from msgspec import Struct, field

from holdfast.events import warn

#: Never the generator of the program, which belongs to its state.
_draw = random.SystemRandom().random
#: The longest sleep of a wait for a rate, which may be ended meanwhile.
_NAP_S = 0.1
#: Answers that say: not now.
BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class InChild(Protocol):
    """What a forked child needs anew: a lock may be held there by a thread that is not."""

    def in_child(self) -> None: ...


_renewed: weakref.WeakSet[InChild] = weakref.WeakSet()


def renew_in_child(one: InChild) -> None:
    """Has ``in_child`` called in every forked child, before anything else runs there."""
    _renewed.add(one)


def _renew_all() -> None:
    for one in list(_renewed):
        one.in_child()


os.register_at_fork(after_in_child=_renew_all)


class Patience(Struct, frozen=True):
    """How long and how often a request is tried: pauses double from ``first_s`` to ``longest_s``,
    each of a random length up to that, and none begins that would end after ``total_s``. A request
    that took all of that time at its first try is tried once more, unless ``is_strict``; without
    any time it is tried once.
    """

    total_s: float = 120.0
    first_s: float = 0.1
    longest_s: float = 5.0
    is_strict: bool = False

    def pauses(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = _draw,
    ) -> Iterator[int]:
        """Yields 1 for the first try, 2 for the second after a pause, until the time is over."""
        ends_s, longest_s, number = clock() + self.total_s, self.first_s, 1
        while True:
            yield number
            pause_s = longest_s * (0.5 + 0.5 * draw())
            is_last_chance = number == 1 and clock() > ends_s and self.total_s > 0
            if clock() + pause_s > ends_s and (self.is_strict or not is_last_chance):
                return
            sleep(pause_s)
            longest_s, number = min(2 * longest_s, self.longest_s), number + 1


class RateLimit:
    """Bytes per second over all threads; 0: no limit."""

    def __init__(
        self,
        bytes_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_s, self._clock, self._sleep = bytes_s, clock, sleep
        self._lock = threading.Lock()
        self._free_s = 0.0
        renew_in_child(self)

    def in_child(self) -> None:
        """Makes a new lock."""
        self._lock = threading.Lock()

    def wait(self, size_bytes: int, check: Callable[[], None] = lambda: None) -> None:
        """Waits until ``size_bytes`` may be sent; ``check`` is called meanwhile, and may raise."""
        if not self._bytes_s or not size_bytes:
            return
        with self._lock:
            now_s = self._clock()
            begin_s = max(now_s, self._free_s)
            self._free_s = begin_s + size_bytes / self._bytes_s
        while now_s < begin_s:
            self._sleep(min(begin_s - now_s, _NAP_S))
            check()
            now_s = self._clock()


class RequestCounts(Struct, eq=False, weakref=True):
    """What was sent and tried again, by kind of request; safe from several threads."""

    url: str
    told_every_s: float = 60.0
    requests: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    received_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _told_s: float = float("-inf")
    _untold: int = 0

    def __post_init__(self) -> None:
        renew_in_child(self)

    def in_child(self) -> None:
        """Makes a new lock."""
        self._lock = threading.Lock()

    def count(self, kind: str, sent_bytes: int, received_bytes: int) -> None:
        """Counts one request."""
        with self._lock:
            self.requests[kind] += 1
            self.sent_bytes += sent_bytes
            self.received_bytes += received_bytes

    def again(self, kind: str, reason: str, *, is_told: bool = True) -> None:
        """Counts one more try, and tells of it by an event unless one was emitted a moment ago."""
        with self._lock:
            self.retries[kind] += 1
            if not is_told:
                return
            self._untold += 1
            now_s = time.monotonic()
            if now_s - self._told_s < self.told_every_s:
                return
            self._told_s, count, self._untold = now_s, self._untold, 0
        warn(
            f"{self.url} does not answer as it should, {count} requests are tried "
            f"again: {kind}: {reason}"
        )
