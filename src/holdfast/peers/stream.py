"""A range of what a peer offers, read piece by piece and in order over one connection.

For whoever works on the bytes as they come: what was just received is still in the processor's
cache, and no thread hands it to another. Bytes are asked for ahead of being read, so that the
peer and the kernel go on meanwhile.

A peer that has sent all it was asked for finds us idle, whatever the kernel still keeps for a slow
reader, and may end the connection. What was not answered by then is asked for anew.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

from holdfast.errors import PeerError
from holdfast.peers.calling import Caller, Peer, Task, failed
from holdfast.peers.line import Broken, Busy, Ended, Line
from holdfast.peers.lines import Lines, Pauses


class _Asked(NamedTuple):
    """A request that was sent, and its signature."""

    task: Task
    signature: str


class Stream:
    """Bytes from ``start`` on, as many as ``ask`` asks for; ``read`` them, ``confirm`` at the end.

    For one thread; ``cancel`` is for any. PeerError when the peer does not deliver; the stream is
    of no use then, but to be closed.
    """

    def __init__(
        self, caller: Caller, lines: Lines, peer: Peer, path: str, generation: str, *, start: int
    ) -> None:
        self._caller, self._lines, self.peer = caller, lines, peer
        self._path, self._generation, self._next = path, generation, start
        self._asked: deque[_Asked] = deque()
        self._left = 0
        self._tag = ""
        self._is_cancelled = threading.Event()
        self._line: Line | None = None
        self._is_answered = False
        """Whether an answer came over this line."""

    def ask(self, count: int) -> None:
        """Ask for the next ``count`` bytes; a few requests may be under way."""
        if self._line is not None and not self._asked and not self._left:
            self._line.is_reused = True  # it was idle, and may have been closed by that
        first, self._next = self._next, self._next + count
        task = Task("GET", self._path, self._generation, span=f"bytes={first}-{self._next - 1}",
                    size_bytes=count)  # fmt: skip
        self._send(task)

    def read(self, into: memoryview) -> None:
        """The next bytes of those asked for: all of ``into``."""
        at = 0
        while at < len(into):
            if not self._left:
                self._left = self._hear()
            count = min(self._left, len(into) - at)
            try:
                self._open().fill(into[at : at + count], self._until_s())
            except Broken as broken:
                raise self._failed(broken, None) from broken
            at, self._left = at + count, self._left - count

    def confirm(self) -> None:
        """PeerError unless what was read is what the peer offers still, and has been all along.

        All that was asked for has been read.
        """
        self._send(Task("HEAD", self._path, self._generation, tag=self._tag))
        self._hear()
        line, self._line = self._line, None
        if line is not None:
            self._lines.give_back(self.peer, line)

    def cancel(self) -> None:
        """End it, from any thread: whoever reads finds it broken."""
        self._is_cancelled.set()
        self._lines.wake()
        if (line := self._line) is not None:
            line.shut()

    def close(self) -> None:
        """Give the connection up, unless ``confirm`` has given it back."""
        line, self._line = self._line, None
        self._is_answered = False
        if line is not None:
            self._lines.drop(self.peer, line)

    def _open(self, *, fresh: bool = False) -> Line:
        if self._line is None:
            self._line = self._lines.take(
                self.peer, fresh=fresh, until_s=self._until_s(), is_over=self._is_cancelled.is_set
            )
        if self._line is None or self._is_cancelled.is_set():
            raise Broken("cancelled", "the pull was cancelled")
        return self._line

    def _send(self, task: Task) -> None:
        signature = ""
        try:
            signature = self._caller.ask(self._open(), self.peer, task)
        except Broken as broken:
            if not self._may_renew(broken):
                raise self._failed(broken, task) from broken
            # What came before the end is still to be read; after it, this is asked for anew.
        self._asked.append(_Asked(task, signature))

    def _hear(self) -> int:
        """The head of the next answer; how many bytes follow."""
        pauses = Pauses(self._caller.patience, self._until_s())
        while True:
            task, signature = self._asked[0]
            try:
                line, until_s = self._open(), self._until_s()
                answer = self._caller.hear(line, self.peer, task, signature, until_s)
            except Busy:
                self.close()
                self._is_cancelled.wait(pauses.next_s(self.peer, task))
                self._renew()
                continue
            except Broken as broken:
                if not self._may_renew(broken):
                    raise self._failed(broken, task) from broken
                self._renew()
                continue
            if answer is None:  # signed over no challenge; those behind it may be answered
                self._renew()
                continue
            self._asked.popleft()
            self._is_answered = True
            if self._tag not in ("", answer.tag):
                raise failed(self.peer, task, "body", "it was offered anew while it was pulled")
            self._tag = answer.tag
            return task.size_bytes

    def _until_s(self) -> float:
        """For the next piece: who reads may take its time between two of them."""
        return time.monotonic() + self._caller.patience.request_s

    def _may_renew(self, broken: Broken) -> bool:
        """Whether the line may have been ended while it was idle, in which no fault is.

        One that brought no answer was not, unless others had it before.
        """
        if self._line is None or self._is_cancelled.is_set():
            return False
        return self._line.is_reused or (self._is_answered and isinstance(broken, Ended))

    def _renew(self) -> None:
        """Ask for all that was not answered over a fresh line, in order."""
        self.close()
        tasks = [asked.task for asked in self._asked]
        self._asked.clear()
        try:
            self._open(fresh=True)
        except Broken as broken:
            raise self._failed(broken, tasks[0]) from broken
        for task in tasks:
            self._send(task)

    def _failed(self, broken: Broken, task: Task | None) -> PeerError:
        if task is None:
            task = Task("GET", self._path, self._generation)
        return failed(self.peer, task, broken.phase, broken.reason)
