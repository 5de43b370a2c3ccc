"""Pulls from several peers at once, each independently: a peer that fails stops no other.

When ``wait`` returns, no thread writes into the memory any more, whatever happened. Bytes from a
peer that did not fail are complete and of one moment: after the last byte of a path was copied, the
client asks the peer whether that offer is still valid.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import Fenced, PeerError
from holdfast.transport.client_connection import (
    ClientConnection,
    ConnectionBroken,
    ConnectionEnded,
    ConnectionPool,
    Peer,
    RetryPauses,
    ServerBusy,
    SignedCaller,
    SignedRequest,
    failed,
)
from holdfast.transport.wire.signing import HttpAnswer

DEPTH = 2
"""Requests under way on one connection: the next answer begins where the one before ends."""


class PullShare:
    """Pulls everything that comes from one peer, over several connections, one thread each."""

    def __init__(
        self,
        peer: Peer,
        tasks: Sequence[SignedRequest],
        caller: SignedCaller,
        pool: ConnectionPool,
        *,
        connections: int,
        until_s: float,
    ) -> None:
        self.peer = peer
        self.threads = min(connections, len(tasks))
        self.failure: PeerError | Fenced | None = None
        self.received_bytes = 0
        self._todo = deque(tasks)
        self._left = Counter((task.path, task.generation) for task in tasks)
        self._tags: dict[tuple[str, str], str] = {}
        self._caller, self._pool, self._until_s = caller, pool, until_s
        self._open: set[ClientConnection] = set()
        self._lock = threading.Lock()
        self._at_work = self.threads
        self._is_failed = threading.Event()

    def work(self) -> None:
        """Send requests and receive until none is left; the loop of one thread."""
        # A signal would begin the kernel's wait for a piece of a body anew.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        fresh = False
        pauses = RetryPauses(self._caller.patience, self._until_s)
        try:
            while not self._use_connection(fresh, pauses):
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
        """Cancel the pull from this peer, unless all of it has arrived."""
        if self._at_work:
            self.fail(failed(self.peer, None, "cancelled", "the pull was cancelled"))

    def fail(self, error: PeerError | Fenced) -> None:
        """End the pull from this peer: the first error counts, and every connection ends."""
        with self._lock:
            if self.failure is None:
                self.failure = error
            self._todo.clear()
            open_connections = list(self._open)
        self._is_failed.set()
        self._pool.wake()
        for connection in open_connections:
            connection.shut()

    def _use_connection(self, fresh: bool, pauses: RetryPauses) -> bool:
        """Work over one connection; False: it was closed while idle, or at once, and another is
        needed.
        """
        if not self._todo:  # the other connections do the rest
            return True
        asked: deque[tuple[SignedRequest, str]] = deque()
        connection = None
        try:
            connection = self._acquire(fresh)
            if connection is not None:
                self._pipeline(connection, asked)
        except ServerBusy:
            assert connection is not None
            self._return_connection(connection, is_sound=False)
            connection = None
            self._requeue(asked)
            self._is_failed.wait(pauses.next_s(self.peer, asked[0][0]))
            return False
        except ConnectionBroken as broken:
            if connection is not None and connection.is_reused and self.failure is None:
                self._requeue(asked)
                return False
            task = asked[0][0] if asked else None
            raise failed(self.peer, task, broken.phase, broken.reason) from broken
        else:
            if connection is not None:
                self._return_connection(connection, is_sound=self.failure is None)
                connection = None
            return True
        finally:
            if connection is not None:
                self._return_connection(connection, is_sound=False)

    def _acquire(self, fresh: bool) -> ClientConnection | None:
        """Acquire a connection; None when the other connections have done everything meanwhile."""
        connection = self._pool.acquire(
            self.peer, fresh=fresh, until_s=self._until_s, is_over=lambda: not self._todo
        )
        return connection if connection is None else self._enter(connection)

    def _requeue(self, asked: deque[tuple[SignedRequest, str]]) -> None:
        """Queue unanswered requests again, unless the pull has ended."""
        with self._lock:
            if self.failure is None:
                self._todo.extendleft(task for task, _ in reversed(asked))

    def _enter(self, connection: ClientConnection) -> ClientConnection:
        with self._lock:
            self._open.add(connection)
            failure = self.failure
        if failure is not None:
            self._return_connection(connection, is_sound=False)
            raise failure
        return connection

    def _return_connection(self, connection: ClientConnection, *, is_sound: bool) -> None:
        """Return or drop a connection that no thread uses any more."""
        with self._lock:
            self._open.discard(connection)
        if is_sound:
            self._pool.release(self.peer, connection)
        else:
            self._pool.drop(self.peer, connection)

    def _pipeline(
        self, connection: ClientConnection, asked: deque[tuple[SignedRequest, str]]
    ) -> None:
        while True:
            while (task := self._next(len(asked))) is not None:
                connection.is_reused |= connection.has_received and not asked  # idle at this moment
                asked.append((task, ""))  # before sending: a connection that breaks then lost it
                asked[-1] = (task, self._caller.send_request(connection, self.peer, task))
            if not asked:
                return
            self._settle(connection, *asked[0])
            asked.popleft()

    def _next(self, under_way: int) -> SignedRequest | None:
        """Return the next request for this connection; a second one ahead only while all
        connections have one.
        """
        with self._lock:
            enough = 1 if under_way == 0 else self.threads + 1
            if under_way >= DEPTH or len(self._todo) < enough:
                return None
            task, is_last = self._todo.popleft(), not self._todo
        if is_last:
            self._pool.wake()
        return task

    def _settle(self, connection: ClientConnection, task: SignedRequest, signature: str) -> None:
        until_s = min(self._until_s, time.monotonic() + self._caller.patience.request_s)
        answer = self._caller.receive_answer(connection, self.peer, task, signature, until_s)
        if answer is None:
            with self._lock:
                self._todo.appendleft(task)
        elif task.into is not None:
            connection.fill(task.into, until_s)
            self._filled(task, answer)

    def _filled(self, task: SignedRequest, answer: HttpAnswer) -> None:
        key = task.path, task.generation
        with self._lock:
            self.received_bytes += answer.length_bytes
            is_the_same = self._tags.setdefault(key, answer.tag) == answer.tag
            self._left[key] -= 1
            if not self._left[key]:
                self._todo.append(SignedRequest("HEAD", *key, tag=answer.tag))
        if not is_the_same:
            raise failed(self.peer, task, "body", "it was offered anew while it was pulled")


class PullOperation:
    """A pull that has begun."""

    def __init__(self, shares: Sequence[PullShare]) -> None:
        self._shares = shares
        self._threads = [
            threading.Thread(
                target=share.work, name=f"holdfast-pull-{share.peer.name}", daemon=True
            )
            for share in shares
            for _ in range(share.threads)
        ]
        started: list[threading.Thread] = []
        try:
            for thread in self._threads:
                thread.start()
                started.append(thread)
        except BaseException:  # whoever has begun writes into memory no more
            self.cancel()
            for thread in started:
                thread.join()
            raise

    @property
    def received_bytes(self) -> int:
        """The bytes received so far."""
        return sum(share.received_bytes for share in self._shares)

    def cancel(self) -> None:
        """Cancel the pull, from any thread; ``wait`` reports each peer that was not done."""
        for share in self._shares:
            share.cancel()

    def wait(self) -> dict[Peer, PeerError]:
        """Wait for the end; return the peers that failed, with their errors. All other data is
        complete.

        Fenced when a newer incarnation has begun. The memory of a failed peer's ranges is
        undefined.
        """
        for thread in self._threads:
            thread.join()
        failures = {s.peer: s.failure for s in self._shares if s.failure is not None}
        for failure in failures.values():
            if isinstance(failure, Fenced):
                raise failure
        return {peer: error for peer, error in failures.items() if isinstance(error, PeerError)}


# Downloads a range piece by piece and in order over one connection.
#
# For callers that process the bytes as they arrive: received bytes are still in the processor's
# cache, and no thread hands them to another. Requests are sent ahead of reading, so that the peer
# and the kernel continue meanwhile.
#
# A peer that has sent every requested byte sees an idle connection, although a slow reader still
# has bytes in its buffers, and may close it. Unanswered requests are then sent again.


class _RangeRequest(NamedTuple):
    """A request that was sent, and its signature."""

    task: SignedRequest
    signature: str


class PeerDownload:
    """Downloads bytes from ``start`` on: ``ask`` for them, ``read`` them, ``confirm`` at the end.

    For one thread; ``cancel`` is for any. PeerError when the peer does not deliver; then only
    ``close`` may be called.
    """

    def __init__(
        self,
        caller: SignedCaller,
        pool: ConnectionPool,
        peer: Peer,
        path: str,
        generation: str,
        *,
        start: int,
    ) -> None:
        self._caller, self._pool, self.peer = caller, pool, peer
        self._path, self._generation, self._next = path, generation, start
        self._asked: deque[_RangeRequest] = deque()
        self._left = 0
        self._tag = ""
        self._is_cancelled = threading.Event()
        self._connection: ClientConnection | None = None
        self._is_answered = False
        """True if an answer came over this connection."""

    def ask(self, count: int) -> None:
        """Request the next ``count`` bytes; a few requests may be under way."""
        if self._connection is not None and not self._asked and not self._left:
            self._connection.is_reused = True  # it was idle, and the peer may have closed it
        first, self._next = self._next, self._next + count
        task = SignedRequest(
            "GET",
            self._path,
            self._generation,
            span=f"bytes={first}-{self._next - 1}",
            size_bytes=count,
        )
        self._send(task)

    def read(self, into: memoryview) -> None:
        """Read the next requested bytes: all of ``into``."""
        at = 0
        while at < len(into):
            if not self._left:
                self._left = self._read_head()
            count = min(self._left, len(into) - at)
            try:
                self._open().fill(into[at : at + count], self._until_s())
            except ConnectionBroken as broken:
                raise self._failed(broken, None) from broken
            at, self._left = at + count, self._left - count

    def confirm(self) -> None:
        """Raise PeerError unless the peer's offer is still valid, and has been all along.

        All requested bytes must have been read.
        """
        self._send(SignedRequest("HEAD", self._path, self._generation, tag=self._tag))
        self._read_head()
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(self.peer, connection)

    def cancel(self) -> None:
        """End the download, from any thread: the reader gets an error."""
        self._is_cancelled.set()
        self._pool.wake()
        if (connection := self._connection) is not None:
            connection.shut()

    def close(self) -> None:
        """Drop the connection, unless ``confirm`` has given it back."""
        connection, self._connection = self._connection, None
        self._is_answered = False
        if connection is not None:
            self._pool.drop(self.peer, connection)

    def _open(self, *, fresh: bool = False) -> ClientConnection:
        if self._connection is None:
            self._connection = self._pool.acquire(
                self.peer, fresh=fresh, until_s=self._until_s(), is_over=self._is_cancelled.is_set
            )
        if self._connection is None or self._is_cancelled.is_set():
            raise ConnectionBroken("cancelled", "the pull was cancelled")
        return self._connection

    def _send(self, task: SignedRequest) -> None:
        signature = ""
        try:
            signature = self._caller.send_request(self._open(), self.peer, task)
        except ConnectionBroken as broken:
            if not self._may_renew(broken):
                raise self._failed(broken, task) from broken
            # Bytes sent before the close are still readable; after them, this is requested again.
        self._asked.append(_RangeRequest(task, signature))

    def _read_head(self) -> int:
        """Read the head of the next answer; return the length of its body."""
        pauses = RetryPauses(self._caller.patience, self._until_s())
        while True:
            task, signature = self._asked[0]
            try:
                connection, until_s = self._open(), self._until_s()
                answer = self._caller.receive_answer(
                    connection, self.peer, task, signature, until_s
                )
            except ServerBusy:
                self.close()
                self._is_cancelled.wait(pauses.next_s(self.peer, task))
                self._renew()
                continue
            except ConnectionBroken as broken:
                if not self._may_renew(broken):
                    raise self._failed(broken, task) from broken
                self._renew()
                continue
            if answer is None:  # signed over no challenge; later requests may be answered
                self._renew()
                continue
            self._asked.popleft()
            self._is_answered = True
            if self._tag not in ("", answer.tag):
                raise failed(self.peer, task, "body", "it was offered anew while it was pulled")
            self._tag = answer.tag
            return task.size_bytes

    def _until_s(self) -> float:
        """Return the deadline of the next piece: the reader may pause between two pieces."""
        return time.monotonic() + self._caller.patience.request_s

    def _may_renew(self, broken: ConnectionBroken) -> bool:
        """Return whether the connection may have ended while it was idle, which is no error.

        A connection that brought no answer was not idle, unless others had used it before.
        """
        if self._connection is None or self._is_cancelled.is_set():
            return False
        return self._connection.is_reused or (
            self._is_answered and isinstance(broken, ConnectionEnded)
        )

    def _renew(self) -> None:
        """Send all unanswered requests again over a new connection, in order."""
        self.close()
        tasks = [asked.task for asked in self._asked]
        self._asked.clear()
        try:
            self._open(fresh=True)
        except ConnectionBroken as broken:
            raise self._failed(broken, tasks[0]) from broken
        for task in tasks:
            self._send(task)

    def _failed(self, broken: ConnectionBroken, task: SignedRequest | None) -> PeerError:
        if task is None:
            task = SignedRequest("GET", self._path, self._generation)
        return failed(self.peer, task, broken.phase, broken.reason)
