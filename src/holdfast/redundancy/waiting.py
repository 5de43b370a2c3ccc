"""All threads of one exchange end together, and none waits without end.

Whatever one of them finds wrong ends the exchange of this generation, and nothing else: the first
reason counts, pulls that are under way are cancelled, whoever waits wakes up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from holdfast.errors import UsageError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.peers.calling import Peer
from holdfast.peers.client import Puller, Wanted
from holdfast.peers.rate import TokenBucket
from holdfast.peers.stream import Stream

MOST_PIECE_BYTES = 16 << 20
_NAP_S = 0.1
"""How long a wait for the budget sleeps at most: rates change."""


class Ended(Exception):
    """The exchange is over; the reason is in its ``Halt``."""


class Budget:
    """How many bytes a second all exchanges of a keeper may pull; for any number of threads.

    In any stretch of t seconds no more pulls begin than for rate * t bytes, a twentieth of the
    rate and one window.
    """

    def __init__(self, rate_bytes_s: int | None = None) -> None:
        self._lock = threading.Lock()
        self._bucket = TokenBucket(None, time.monotonic())
        self.set_rate(rate_bytes_s)

    @property
    def rate_bytes_s(self) -> int | None:
        """The rate now; None: no bound."""
        return self._bucket.rate_bytes_s

    def set_rate(self, rate_bytes_s: int | None) -> None:
        """Another rate from now on, also for what is under way. UsageError for one below 1."""
        if rate_bytes_s is not None and rate_bytes_s < 1:
            raise UsageError(
                f"parity cannot be made from {rate_bytes_s} bytes a second: give 1 or more, or None"
            )
        with self._lock:
            self._bucket.set_rate(rate_bytes_s, time.monotonic())

    def take(self, wanted: int) -> tuple[int, float]:
        """(bytes granted, 0), or (0, seconds after which to ask again)."""
        with self._lock:
            return self._bucket.take(wanted, time.monotonic())

    def seconds(self, count: int) -> float:
        """How long so many bytes take at the rate of now, at least."""
        rate = self.rate_bytes_s
        return 0.0 if rate is None else count / rate


class Cancelled(Protocol):
    """What is under way, and can be ended from any thread."""

    def cancel(self) -> None:
        """Whoever waits for it is woken, with an error."""
        ...


class Halt:
    """Whether an exchange goes on; ``changed`` wakes whoever waits for something in it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.reason: BaseException | None = None
        self._pulls: set[Cancelled] = set()

    def stop(self, reason: BaseException) -> None:
        """End it: the first reason counts. From any thread."""
        with self.changed:
            if self.reason is None:
                self.reason = reason
            pulls = list(self._pulls)
            self.changed.notify_all()
        for pull in pulls:
            pull.cancel()

    def check(self) -> None:
        """Ended when it is over."""
        if self.reason is not None:
            raise Ended

    def wait(
        self, is_ready: Callable[[], bool], within_s: float, late: Callable[[], Exception]
    ) -> None:
        """Wait until ``is_ready``, which ``changed`` tells of. Ended, or ``late`` is raised."""
        until_s = time.monotonic() + within_s
        with self.changed:
            while not is_ready():
                self.check()
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise late()
                self.changed.wait(left_s)
        self.check()

    def sleep(self, seconds: float) -> None:
        """Wait so long. Ended as soon as it is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.reason is not None, seconds)
        self.check()

    def add(self, pull: Cancelled) -> None:
        """It is cancelled when the exchange ends."""
        with self.changed:
            self._pulls.add(pull)
            is_over = self.reason is not None
        if is_over:
            pull.cancel()

    def remove(self, pull: Cancelled) -> None:
        """It has ended."""
        with self.changed:
            self._pulls.discard(pull)


class Fetcher:
    """Pulls within the budget, for one exchange. ``patience`` says how long each may take."""

    def __init__(
        self, puller: Puller, budget: Budget, halt: Halt, *, patience: Callable[[], float]
    ) -> None:
        self.puller, self._budget, self._halt = puller, budget, halt
        self._patience = patience
        self.pulled_bytes = 0

    def pull(self, wanted: Sequence[Wanted]) -> None:
        """Fill the memory of all that is wanted. PeerError of the first peer that failed."""
        self.spend(sum(one.into.nbytes for one in wanted))
        pull = self.puller.begin(wanted, within_s=self._patience())
        self._halt.add(pull)
        try:
            failures = pull.wait()
        finally:
            self._halt.remove(pull)
        self._halt.check()
        for failure in failures.values():
            raise failure

    @contextmanager
    def stream(self, peer: Peer, path: str, generation: str, start: int) -> Iterator[Stream]:
        """To be read within this; ``spend`` for what is asked."""
        stream = self.puller.stream(peer, path, generation, start=start)
        self._halt.add(stream)
        try:
            yield stream
        finally:
            self._halt.remove(stream)
            stream.close()

    @property
    def piece_bytes(self) -> int:
        """How much to ask for at once: little, where a rate is to be kept."""
        return MOST_PIECE_BYTES if self._budget.rate_bytes_s is None else BLOCK_BYTES

    def spend(self, count: int) -> None:
        """Wait until the budget allows so many bytes. Ended when all is over."""
        self._halt.check()
        self.pulled_bytes += count
        left = count
        while left:
            granted, wait_s = self._budget.take(left)
            left -= granted
            if not granted:
                self._halt.sleep(min(wait_s, _NAP_S))
