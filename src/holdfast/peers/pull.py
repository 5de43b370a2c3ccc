"""What is under way from several peers at once, each on its own: one that fails stops no other.

When ``wait`` returns, nobody writes into the memory any more, whatever happened. What came from a
peer without a failure is what that peer offered, all of it and at one time: after the last byte
of a path was copied, the peer is asked whether what it offered there still stands.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from holdfast.errors import Fenced, PeerError
from holdfast.peers.calling import Caller, Peer, Task, failed
from holdfast.peers.line import Broken, Busy, Line
from holdfast.peers.lines import Lines, Pauses
from holdfast.peers.signing import Answer

DEPTH = 2
"""Requests under way on one connection: the next answer begins where the one before ends."""


class Share:
    """What comes from one peer, over several lines, one thread each."""

    def __init__(
        self, peer: Peer, tasks: Sequence[Task], caller: Caller, lines: Lines, *,
        connections: int, until_s: float,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.threads = min(connections, len(tasks))
        self.failure: PeerError | Fenced | None = None
        self.received_bytes = 0
        self._todo = deque(tasks)
        self._left = Counter((task.path, task.generation) for task in tasks)
        self._tags: dict[tuple[str, str], str] = {}
        self._caller, self._lines, self._until_s = caller, lines, until_s
        self._open: set[Line] = set()
        self._lock = threading.Lock()
        self._at_work = self.threads
        self._is_failed = threading.Event()

    def work(self) -> None:
        """Ask and receive until nothing is left to ask: what one thread does."""
        fresh = False
        pauses = Pauses(self._caller.patience, self._until_s)
        try:
            while not self._over_one_line(fresh, pauses):
                fresh = True
        except (PeerError, Fenced) as error:
            self.fail(error)
        except Exception as error:
            self.fail(failed(self.peer, None, "client", f"a fault here: {error!r}"))
            raise
        finally:
            with self._lock:
                self._at_work -= 1

    def cancel(self) -> None:
        """Give this peer up, unless all of it has come."""
        if self._at_work:
            self.fail(failed(self.peer, None, "cancelled", "the pull was cancelled"))

    def fail(self, error: PeerError | Fenced) -> None:
        """Give this peer up: the first reason counts, and every line ends."""
        with self._lock:
            if self.failure is None:
                self.failure = error
            self._todo.clear()
            lines = list(self._open)
        self._is_failed.set()
        self._lines.wake()
        for line in lines:
            line.shut()

    def _over_one_line(self, fresh: bool, pauses: Pauses) -> bool:
        """Whether all was done; False: the line was closed while idle, or at once: take another."""
        if not self._todo:  # the other lines do it
            return True
        asked: deque[tuple[Task, str]] = deque()
        line = None
        try:
            line = self._take(fresh)
            if line is not None:
                self._take_turns(line, asked)
        except Busy:
            assert line is not None
            self._leave(line, is_sound=False)
            line = None
            self._put_back(asked)
            self._is_failed.wait(pauses.next_s(self.peer, asked[0][0]))
            return False
        except Broken as broken:
            if line is not None and line.is_reused and self.failure is None:
                self._put_back(asked)
                return False
            task = asked[0][0] if asked else None
            raise failed(self.peer, task, broken.phase, broken.reason) from broken
        else:
            if line is not None:
                self._leave(line, is_sound=self.failure is None)
                line = None
            return True
        finally:
            if line is not None:
                self._leave(line, is_sound=False)

    def _take(self, fresh: bool) -> Line | None:
        """None when the other lines have done it all meanwhile."""
        line = self._lines.take(
            self.peer, fresh=fresh, until_s=self._until_s, is_over=lambda: not self._todo
        )
        return line if line is None else self._enter(line)

    def _put_back(self, asked: deque[tuple[Task, str]]) -> None:
        """They were not answered; unless all was given up."""
        with self._lock:
            if self.failure is None:
                self._todo.extendleft(task for task, _ in reversed(asked))

    def _enter(self, line: Line) -> Line:
        with self._lock:
            self._open.add(line)
            failure = self.failure
        if failure is not None:
            self._leave(line, is_sound=False)
            raise failure
        return line

    def _leave(self, line: Line, *, is_sound: bool) -> None:
        """No thread has it any more."""
        with self._lock:
            self._open.discard(line)
        if is_sound:
            self._lines.give_back(self.peer, line)
        else:
            self._lines.drop(self.peer, line)

    def _take_turns(self, line: Line, asked: deque[tuple[Task, str]]) -> None:
        while True:
            while (task := self._next(len(asked))) is not None:
                line.is_reused |= line.has_heard and not asked  # it is idle at this moment
                asked.append((task, ""))  # before it is sent: a line that breaks then lost it
                asked[-1] = (task, self._caller.ask(line, self.peer, task))
            if not asked:
                return
            self._settle(line, *asked[0])
            asked.popleft()

    def _next(self, under_way: int) -> Task | None:
        """The next request for this line; a second one ahead only while there is one for all."""
        with self._lock:
            enough = 1 if under_way == 0 else self.threads + 1
            if under_way >= DEPTH or len(self._todo) < enough:
                return None
            task, is_last = self._todo.popleft(), not self._todo
        if is_last:
            self._lines.wake()
        return task

    def _settle(self, line: Line, task: Task, signature: str) -> None:
        until_s = min(self._until_s, time.monotonic() + self._caller.patience.request_s)
        answer = self._caller.hear(line, self.peer, task, signature, until_s)
        if answer is None:
            with self._lock:
                self._todo.appendleft(task)
        elif task.into is not None:
            line.fill(task.into, until_s)
            self._filled(task, answer)

    def _filled(self, task: Task, answer: Answer) -> None:
        key = task.path, task.generation
        with self._lock:
            self.received_bytes += answer.length_bytes
            is_the_same = self._tags.setdefault(key, answer.tag) == answer.tag
            self._left[key] -= 1
            if not self._left[key]:
                self._todo.append(Task("HEAD", *key, tag=answer.tag))
        if not is_the_same:
            raise failed(self.peer, task, "body", "it was offered anew while it was pulled")


class Pull:
    """A pull that is under way, from its beginning on."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self._shares = shares
        self._threads = [
            threading.Thread(
                target=share.work, name=f"holdfast-pull-{share.peer.name}", daemon=True
            )
            for share in shares
            for _ in range(share.threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def received_bytes(self) -> int:
        """How many came until now."""
        return sum(share.received_bytes for share in self._shares)

    def cancel(self) -> None:
        """End it, from any thread; ``wait`` tells of each peer that was not done."""
        for share in self._shares:
            share.cancel()

    def wait(self) -> dict[Peer, PeerError]:
        """Wait for the end; who failed, and why. Everything from all others is whole.

        Fenced when a newer incarnation has begun. What a failed peer was to fill holds anything.
        """
        for thread in self._threads:
            thread.join()
        failures = {s.peer: s.failure for s in self._shares if s.failure is not None}
        for failure in failures.values():
            if isinstance(failure, Fenced):
                raise failure
        return {peer: error for peer, error in failures.items() if isinstance(error, PeerError)}
