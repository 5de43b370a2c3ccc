"""Client side of one peer connection: requests, signed answers, and a pool of connections.

Bytes go straight into the destination memory. Calls block, so a connection belongs to one thread at
a time; every wait has a timeout, and ``shut`` ends any wait from any thread.
"""

from __future__ import annotations

import itertools
import random
import secrets
import socket
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable

from msgspec import Struct

from holdfast.errors import Fenced, PeerError
from holdfast.transport.wire import admission as refusals
from holdfast.transport.wire.http import END, check_peer, parse_answer, render_request
from holdfast.transport.wire.signing import HttpAnswer, HttpRequest, Signer, is_same

_READ_BYTES = 2048
"""Size of one read of a head. A head is about 300 bytes; body bytes read with it are copied again.
"""
_MOST_HEAD_BYTES = 8192
_PIECE_BYTES = 1 << 20
"""Bytes of a body that one call waits for: shorter calls cost a thread more than the bytes."""


class ClientTimeouts(Struct, frozen=True):
    """Timeouts of a client that waits for a peer."""

    connect_s: float = 5.0
    answer_s: float = 10.0
    """For the head of an answer."""
    progress_s: float = 10.0
    """The longest wait without a single byte."""
    request_s: float = 120.0
    """For one answer with all its bytes."""


class ConnectionBroken(Exception):
    """The connection cannot be used any more."""

    def __init__(self, phase: str, reason: str) -> None:
        super().__init__(reason)
        self.phase, self.reason = phase, reason


class ConnectionEnded(ConnectionBroken):
    """The peer closed the connection, in both directions."""


class ServerBusy(ConnectionBroken):
    """The peer has no place for another connection; it has not read the request."""


class ClientConnection:
    """A connection that may send one or more requests ahead of their answers."""

    def __init__(self, host: str, port: int, patience: ClientTimeouts) -> None:
        self.patience = patience
        self.is_reused = False
        """The connection was idle: the peer may have closed it meanwhile, which is no error."""
        self._rest = bytearray()
        self.has_received = False
        """The peer has sent at least one byte."""
        try:
            self._socket = socket.create_connection((host, port), timeout=patience.connect_s)
        except TimeoutError:
            raise ConnectionBroken(
                "connect", f"no connection in {patience.connect_s:g} s"
            ) from None
        except OSError as error:
            raise ConnectionBroken("connect", _reason(error)) from error
        self._patience_s = patience.connect_s
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            self._socket.close()
            raise ConnectionBroken("connect", _reason(error)) from error

    def send(self, data: bytes) -> None:
        """Send a head. It always fits into the socket buffer, so the call does not wait for the
        peer.
        """
        self._set_patience(self.patience.progress_s)
        try:
            self._socket.sendall(data)
        except OSError as error:
            if isinstance(error, ConnectionError) and not self.has_received:
                return  # the peer closed at once; its last answer is still readable
            raise _broken("request", error) from error

    def head(self, until_s: float) -> bytes:
        """Return the next head, with the empty line at its end."""
        until_s = min(until_s, time.monotonic() + self.patience.answer_s)
        while (end := self._rest.find(END)) < 0:
            if len(self._rest) > _MOST_HEAD_BYTES:
                raise ConnectionBroken("answer", f"no end of its head in {_MOST_HEAD_BYTES} bytes")
            try:
                self._wait(until_s)
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                if isinstance(error, _TIMED_OUT):
                    raise ConnectionBroken("answer", "no answer in time") from error
                raise _broken("answer", error) from error
            if not data:
                raise ConnectionEnded("answer", "it ended the connection")
            self.is_reused, self.has_received = False, True
            self._rest += data
        raw = bytes(self._rest[: end + len(END)])
        del self._rest[: len(raw)]
        return raw

    def fill(self, into: memoryview, until_s: float) -> None:
        """Read the body that follows a head, all of ``into``."""
        at, size = min(len(self._rest), len(into)), len(into)
        into[:at] = self._rest[:at]
        del self._rest[:at]
        try:
            while at < size:
                self._wait(until_s)
                piece = into[at : at + _PIECE_BYTES]
                got = self._socket.recv_into(piece, 0, socket.MSG_WAITALL)
                if not got:
                    raise ConnectionBroken("body", f"it ended after {at} of {size} bytes")
                at += got
        except OSError as error:
            why = self._why(error, until_s)
            raise ConnectionBroken("body", f"{why}, after {at} of {size} bytes") from error

    def _wait(self, until_s: float) -> None:
        """Set the timeout of the next receive."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._set_patience(min(left_s, self.patience.progress_s))

    def _set_patience(self, seconds: float) -> None:
        if seconds != self._patience_s:  # each change is a system call
            # Not ``settimeout``, after which no call waits for more than the first bytes.
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))
            self._patience_s = seconds

    def _why(self, error: OSError, until_s: float) -> str:
        if not isinstance(error, _TIMED_OUT):
            return _reason(error)
        if time.monotonic() >= until_s:
            return "its time was over"
        return f"not a byte came in {self.patience.progress_s:g} s"

    @property
    def is_quiet(self) -> bool:
        """Return whether no unrequested bytes arrived."""
        return not self._rest

    def shut(self) -> None:
        """End the connection, from any thread: a waiting thread gets ConnectionBroken."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer closed it first

    def close(self) -> None:
        """Close the descriptor. Only for the thread that uses the connection."""
        self._socket.close()


#: What a call raises whose time is over; the second where the kernel counts it.
_TIMED_OUT = (TimeoutError, BlockingIOError)


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))


def _broken(phase: str, error: OSError) -> ConnectionBroken:
    is_ended = isinstance(error, ConnectionError)
    return (ConnectionEnded if is_ended else ConnectionBroken)(phase, _reason(error))


def _reason(error: OSError) -> str:
    return "timed out" if isinstance(error, _TIMED_OUT) else error.strerror or str(error)


# Signs requests with the run's secret and accepts only signed answers.
#
# A peer whose answer is not signed, does not match this request, or belongs to an old incarnation
# is not asked again.


_MOST_TRIES = 5
_REASONS = {
    refusals.UNKNOWN.status: "it has nothing of that name",
    refusals.WITHDRAWN.status: "it has withdrawn that, or has another generation under that name",
    refusals.BAD_RANGE.status: "it has fewer bytes there",
    refusals.MISDIRECTED.status: "it goes by another name",
    refusals.REPLAYED.status: "it has seen this request before",
}


class Peer(Struct, frozen=True):
    """A keeper on another host: its name and its address."""

    name: str
    host: str
    port: int

    def __post_init__(self) -> None:
        check_peer(self.name)

    def __str__(self) -> str:
        return f"{self.name} at {self.host} port {self.port}"


class SignedRequest(Struct, eq=False):
    """One request, until it is answered."""

    method: str
    path: str
    generation: str
    span: str = ""
    into: memoryview | None = None
    """Destination of the range; exactly so many bytes must arrive."""
    size_bytes: int = 0
    """The number of bytes that must arrive, where their destination is chosen later."""
    tag: str = ""
    tries: int = 0

    @property
    def what(self) -> str:
        """The request in words, for messages."""
        return f"{self.span.replace('=', ' ') or 'all'} of {self.path}"


def failed(
    peer: Peer, task: SignedRequest | None, phase: str, reason: str, *, status: int = 0
) -> PeerError:
    """Return the PeerError that names the peer, the request and the reason."""
    what = task.what if task else "anything"
    return PeerError(
        f"keeper {peer} does not give {what} ({phase}): {reason}. Nothing of it is used: take "
        "another source, and look at that host.",
        peer=peer.name,
        address=f"{peer.host}:{peer.port}",
        path=task.path if task else "",
        range=task.span if task else "",
        phase=phase,
        status=status,
    )


class SignedCaller:
    """Signs the requests of one client. Thread-safe."""

    def __init__(self, secret: bytes, *, incarnation: int, patience: ClientTimeouts) -> None:
        self.incarnation, self.patience = incarnation, patience
        self._signer = Signer(secret)
        self._nonce = secrets.token_hex(16)
        self._counters = itertools.count(1)
        self._challenges: dict[Peer, str] = {}

    def send_request(self, connection: ClientConnection, peer: Peer, task: SignedRequest) -> str:
        """Send the request; return its signature."""
        request = HttpRequest(
            method=task.method,
            peer=peer.name,
            path=task.path,
            generation=task.generation,
            incarnation=self.incarnation,
            nonce=self._nonce,
            counter=next(self._counters),
            challenge=self._challenges.get(peer, ""),
            span=task.span,
            tag=task.tag,
        )
        signature = self._signer.of_request(request)
        connection.send(render_request(request, signature, f"{peer.host}:{peer.port}"))
        return signature

    def receive_answer(
        self,
        connection: ClientConnection,
        peer: Peer,
        task: SignedRequest,
        signature: str,
        until_s: float,
    ) -> HttpAnswer | None:
        """Read and verify the head of the answer; None: the request must be sent again.

        PeerError when the answer is not the one requested, Fenced when this run continues
        elsewhere. ServerBusy when the peer has no place for this connection. The peer sends that
        before it knows the caller, and so without a signature: an attacker on the network can delay
        us with it, and no more.
        """
        parsed = parse_answer(connection.head(until_s))
        if parsed is None:
            raise failed(peer, task, "answer", "what answers there is no keeper")
        answer, given = parsed
        if not given and answer.status == refusals.CROWDED.status:
            raise ServerBusy("answer", "it has no place for another connection")
        if not is_same(given, self._signer.of_answer(answer, signature)):
            raise failed(
                peer,
                task,
                "answer",
                f"its answer {answer.status} is not signed with this run's "
                "secret: another secret, another run, or somebody in between",
            )
        self._check_incarnation(peer, task, answer)
        if answer.status == refusals.CHALLENGED.status:
            self._learn(peer, task, answer)
            return None
        expected = 206 if task.span else 200
        if answer.status != expected:
            reason = _REASONS.get(answer.status, "that is no answer to it")
            raise failed(
                peer, task, "answer", f"{reason} (answer {answer.status})", status=answer.status
            )
        self._check_length(peer, task, answer)
        return answer

    def _check_incarnation(self, peer: Peer, task: SignedRequest, answer: HttpAnswer) -> None:
        if answer.incarnation > self.incarnation:
            raise Fenced(
                f"incarnation {self.incarnation} is over, {answer.incarnation} has begun, says "
                f"keeper {peer}: this process belongs to an older start and must end"
            )
        if answer.incarnation < self.incarnation:
            raise failed(
                peer,
                task,
                "answer",
                f"it is still in incarnation {answer.incarnation}, which is "
                f"over: {self.incarnation} has begun",
            )

    def _learn(self, peer: Peer, task: SignedRequest, answer: HttpAnswer) -> None:
        task.tries += 1
        if task.tries >= _MOST_TRIES:
            raise failed(peer, task, "answer", "it gives out challenge after challenge")
        self._challenges[peer] = answer.challenge

    def _check_length(self, peer: Peer, task: SignedRequest, answer: HttpAnswer) -> None:
        size = task.size_bytes if task.into is None else len(task.into)
        if not size:
            return
        span = answer.span.partition("/")[0]
        if (f"bytes={span}", answer.length_bytes) != (task.span, size):
            raise failed(
                peer,
                task,
                "answer",
                f"it answers with {answer.length_bytes} bytes, {span or 'no range'}",
            )


# Pools connections: a few to each peer, however many threads ask for one.
#
# A peer limits the connections from one host, and all processes of a host share that limit. So a
# thread that finds all of this process's connections in use waits in a queue until one is given
# back, and a client that a peer turns away pauses before it tries again.


_LONGEST_WAIT_S = 3600.0
_CHANCE = random.Random()
"""A generator of our own: a training process uses the global one, and restores its state."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class ConnectionPool:
    """At most ``most`` connections to each peer, in use and idle together. Thread-safe.

    A thread that has one must not wait for another one to the same peer.
    """

    def __init__(self, caller: SignedCaller, most: int) -> None:
        self._caller, self._most = caller, most
        self._idle: dict[Peer, list[ClientConnection]] = {}
        self._used: Counter[Peer] = Counter()
        self._queues: defaultdict[Peer, deque[object]] = defaultdict(deque)
        self._changed = threading.Condition()

    def acquire(
        self, peer: Peer, *, fresh: bool, until_s: float, is_over: Callable[[], bool]
    ) -> ClientConnection | None:
        """Acquire an idle connection or a new one, as soon as allowed. ConnectionBroken when none
        opens.

        None when ``is_over`` returns true during the wait; ``wake`` makes waiting threads check it
        again.
        """
        if not self._enter(peer, until_s, is_over):
            return None
        try:
            kept = self._kept(peer)
            if kept is not None and not fresh:
                return kept
            if kept is not None:
                kept.close()
            return ClientConnection(peer.host, peer.port, self._caller.patience)
        except BaseException:
            self._release_place(peer)
            raise

    def release(self, peer: Peer, connection: ClientConnection) -> None:
        """Return a connection with no request under way."""
        connection.is_reused = True
        if not connection.is_quiet:
            self.drop(peer, connection)
            return
        with self._changed:
            self._idle.setdefault(peer, []).append(connection)
            self._release_place(peer)

    def drop(self, peer: Peer, connection: ClientConnection) -> None:
        """Close a connection that cannot be used any more."""
        connection.close()
        self._release_place(peer)

    def wake(self) -> None:
        """Make all waiting threads check ``is_over`` again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close the idle connections."""
        with self._changed:
            closed = [connection for idle in self._idle.values() for connection in idle]
            self._idle.clear()
        for connection in closed:
            connection.close()

    def _enter(self, peer: Peer, until_s: float, is_over: Callable[[], bool]) -> bool:
        """Wait in the queue; return whether a place came free before ``is_over``."""
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
                        raise ConnectionBroken(
                            "connect", "all connections to it were in use until the end"
                        )
                    self._changed.wait(min(left_s, _LONGEST_WAIT_S))
                self._used[peer] += 1
                return True
            finally:
                queue.remove(ticket)
                self._changed.notify_all()

    def _kept(self, peer: Peer) -> ClientConnection | None:
        with self._changed:
            idle = self._idle.get(peer)
            return idle.pop() if idle else None

    def _release_place(self, peer: Peer) -> None:
        with self._changed:
            self._used[peer] -= 1
            self._changed.notify_all()


class RetryPauses:
    """Pauses before the next attempt to connect to a busy peer.

    Each pause is longer and random, so clients that were turned away together do not return
    together.
    """

    def __init__(self, patience: ClientTimeouts, until_s: float) -> None:
        self._patience, self._until_s = patience, until_s
        self._began_s = 0.0
        self._next_s = _FIRST_PAUSE_S

    def next_s(self, peer: Peer, task: SignedRequest | None) -> float:
        """Return the next pause in seconds. PeerError when the total has become too long."""
        now_s = time.monotonic()
        self._began_s = self._began_s or now_s
        left_s = min(self._until_s, self._began_s + self._patience.request_s) - now_s
        if left_s <= 0:
            raise failed(
                peer,
                task,
                "answer",
                f"it had no place for another connection for {now_s - self._began_s:.1f} s",
                status=refusals.CROWDED.status,
            )
        pause_s = self._next_s * _CHANCE.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, _LONGEST_PAUSE_S)
        return min(pause_s, left_s)
