"""Connections to each peer: a few at once, however many threads ask for one.

A peer bounds how many it takes from one host, and all processes of a host share that bound. So
whoever finds all of this process's lines in use waits until one is given back, in the order in
which they came; and whoever is turned away by a peer leaves it in peace for a while.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable

from holdfast.peers import refusals
from holdfast.peers.calling import Caller, Peer, Task, failed
from holdfast.peers.line import Broken, Line, Patience

_LONGEST_WAIT_S = 3600.0
_CHANCE = random.Random()
"""Our own: a process that trains draws from the common one, and has its state restored."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Lines:
    """At most ``most`` to each peer, in use and idle together. For any number of threads.

    Nobody who has one may wait for another one to the same peer.
    """

    def __init__(self, caller: Caller, most: int) -> None:
        self._caller, self._most = caller, most
        self._idle: dict[Peer, list[Line]] = {}
        self._used: Counter[Peer] = Counter()
        self._queues: defaultdict[Peer, deque[object]] = defaultdict(deque)
        self._changed = threading.Condition()

    def take(
        self, peer: Peer, *, fresh: bool, until_s: float, is_over: Callable[[], bool]
    ) -> Line | None:
        """One that is idle, or a new one, as soon as there may be one. Broken when there is none.

        None when ``is_over`` says so while it waits; it is looked at again after ``wake``.
        """
        if not self._enter(peer, until_s, is_over):
            return None
        try:
            kept = self._kept(peer)
            if kept is not None and not fresh:
                return kept
            if kept is not None:
                kept.close()
            return Line(peer.host, peer.port, self._caller.patience)
        except BaseException:
            self._leave(peer)
            raise

    def give_back(self, peer: Peer, line: Line) -> None:
        """Nothing is under way on it."""
        line.is_reused = True
        if not line.is_quiet:
            self.drop(peer, line)
            return
        with self._changed:
            self._idle.setdefault(peer, []).append(line)
            self._leave(peer)

    def drop(self, peer: Peer, line: Line) -> None:
        """It is of no use any more."""
        line.close()
        self._leave(peer)

    def wake(self) -> None:
        """For some who wait, all may be over."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close those that are idle."""
        with self._changed:
            closed = [line for idle in self._idle.values() for line in idle]
            self._idle.clear()
        for line in closed:
            line.close()

    def _enter(self, peer: Peer, until_s: float, is_over: Callable[[], bool]) -> bool:
        """Wait for one's turn; whether it came before all was over."""
        ticket = object()
        with self._changed:
            queue = self._queues[peer]
            queue.append(ticket)
            try:
                while self._used[peer] >= self._most or queue[0] is not ticket:
                    left_s = until_s - time.monotonic()
                    if is_over():
                        return False
                    if left_s <= 0:
                        raise Broken("connect", "all connections to it were in use until the end")
                    self._changed.wait(min(left_s, _LONGEST_WAIT_S))
                self._used[peer] += 1
                return True
            finally:
                queue.remove(ticket)
                self._changed.notify_all()

    def _kept(self, peer: Peer) -> Line | None:
        with self._changed:
            idle = self._idle.get(peer)
            return idle.pop() if idle else None

    def _leave(self, peer: Peer) -> None:
        with self._changed:
            self._used[peer] -= 1
            self._changed.notify_all()


class Pauses:
    """How long to leave a peer in peace that has no place for another connection.

    Longer each time, and never twice the same: whoever is turned away at once with others does not
    come back with them.
    """

    def __init__(self, patience: Patience, until_s: float) -> None:
        self._patience, self._until_s = patience, until_s
        self._began_s = 0.0
        self._next_s = _FIRST_PAUSE_S

    def next_s(self, peer: Peer, task: Task | None) -> float:
        """So many seconds. PeerError when it has been too long."""
        now_s = time.monotonic()
        self._began_s = self._began_s or now_s
        left_s = min(self._until_s, self._began_s + self._patience.request_s) - now_s
        if left_s <= 0:
            raise failed(
                peer, task, "answer", "it had no place for another connection for "
                f"{now_s - self._began_s:.1f} s", status=refusals.CROWDED.status,
            )  # fmt: skip
        pause_s = self._next_s * _CHANCE.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, _LONGEST_PAUSE_S)
        return min(pause_s, left_s)
