"""Pulls ranges of the bytes that peers offer straight into memory, from several peers at once.

    puller = Puller(secret, incarnation=4)
    puller.pull([WantedRange(peer, "/slots/3", "4-1200", 0, memory)])

Every wait has a timeout, and every byte comes from a peer that knows the run's secret. Whether the
bytes are those that were captured, the block checksums of the image tell: verify them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from msgspec import Struct

from holdfast.errors import UsageError
from holdfast.transport.client_connection import (
    ClientConnection,
    ClientTimeouts,
    ConnectionBroken,
    ConnectionPool,
    Peer,
    RetryPauses,
    ServerBusy,
    SignedCaller,
    SignedRequest,
    failed,
)
from holdfast.transport.pull import PeerDownload, PullOperation, PullShare
from holdfast.transport.resources import NO_GENERATION
from holdfast.transport.wire.admission import cut
from holdfast.transport.wire.http import check_names
from holdfast.transport.wire.signing import digest

CHUNK_BYTES = 8 << 20
CONNECTIONS = 4
MOST_DOCUMENT_BYTES = 64 << 20
_NO_END_S = float("inf")


class WantedRange(Struct, frozen=True):
    """Asks for ``len(into)`` bytes from ``start`` of what a peer offers under a path."""

    peer: Peer
    path: str
    generation: str
    start: int
    into: memoryview

    def __post_init__(self) -> None:
        into = self.into
        if into.readonly or not into.c_contiguous or (into.format, into.ndim) != ("B", 1):
            raise UsageError("bytes of a peer can only go into a writable memoryview of bytes")
        if self.start < 0:
            raise UsageError(f"bytes of a peer begin at 0 or later, not at {self.start}")
        check_names(self.path, self.generation)


class Puller:
    """A client of any number of peers; its connections stay open until ``close``.

    ``connections``: the limit for each peer, for all threads together, and the same again for
    streams. ``incarnation``: the one this process belongs to. A later one needs another puller.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        incarnation: int,
        connections: int = CONNECTIONS,
        chunk_bytes: int = CHUNK_BYTES,
        patience: ClientTimeouts | None = None,
    ) -> None:
        self._caller = SignedCaller(
            secret, incarnation=incarnation, patience=patience or ClientTimeouts()
        )
        self._connections, self._chunk_bytes = connections, chunk_bytes
        self._pool = ConnectionPool(self._caller, connections)
        # A stream occupies its connection while its reader waits for other things, pulls among
        # them.
        self._stream_pool = ConnectionPool(self._caller, connections)

    def pull(self, wanted: Sequence[WantedRange], *, within_s: float | None = None) -> None:
        """Fill the memory of all ``wanted`` ranges. PeerError of the first peer that failed."""
        for failure in self.begin(wanted, within_s=within_s).wait().values():
            raise failure

    def begin(
        self, wanted: Sequence[WantedRange], *, within_s: float | None = None
    ) -> PullOperation:
        """Start a pull in the background: ``wait`` for it, or ``cancel`` it.

        The memory belongs to the pull until ``wait`` has returned. ``within_s`` limits the whole
        pull, in addition to the timeouts of each request.
        """
        until_s = _NO_END_S if within_s is None else time.monotonic() + within_s
        by_peer: dict[Peer, list[WantedRange]] = {}
        for one in wanted:
            if one.into.nbytes:
                by_peer.setdefault(one.peer, []).append(one)
        return PullOperation(
            [
                PullShare(
                    peer,
                    self._tasks(of_peer),
                    self._caller,
                    self._pool,
                    connections=self._connections,
                    until_s=until_s,
                )
                for peer, of_peer in by_peer.items()
            ]
        )

    def stream(self, peer: Peer, path: str, generation: str, *, start: int) -> PeerDownload:
        """Open a download of a file from ``start`` on, to be requested and read piece by piece."""
        check_names(path, generation)
        return PeerDownload(self._caller, self._stream_pool, peer, path, generation, start=start)

    def _tasks(self, wanted: Sequence[WantedRange]) -> list[SignedRequest]:
        chunks = cut(
            [one.into.nbytes for one in wanted],
            chunk_bytes=self._chunk_bytes,
            connections=self._connections,
        )
        return [
            SignedRequest(
                "GET",
                one.path,
                one.generation,
                span=f"bytes={one.start + chunk.start}-{one.start + chunk.stop - 1}",
                into=one.into[chunk.start : chunk.stop],
            )
            for chunk in chunks
            for one in [wanted[chunk.wanted]]
        ]

    def document(
        self,
        peer: Peer,
        path: str,
        *,
        generation: str = NO_GENERATION,
        most_bytes: int = MOST_DOCUMENT_BYTES,
    ) -> bytes:
        """Fetch a whole document, verified by the peer's signature.

        PeerError when it does not arrive, or is larger than ``most_bytes``: no memory is allocated
        then.
        """
        check_names(path, generation)
        task = SignedRequest("GET", path, generation)
        pauses = RetryPauses(self._caller.patience, _NO_END_S)
        for turn in itertools.count():
            connection, pause_s = None, 0.0
            try:
                connection = self._pool.acquire(
                    peer, fresh=turn > 0, until_s=_NO_END_S, is_over=lambda: False
                )
                assert connection is not None
                data = self._document(connection, peer, task, most_bytes)
            except ServerBusy:
                pause_s = pauses.next_s(peer, task)
            except ConnectionBroken as broken:
                if connection is None or not connection.is_reused:
                    raise failed(peer, task, broken.phase, broken.reason) from broken
            else:
                self._pool.release(peer, connection)
                connection = None
                return data
            finally:
                if connection is not None:
                    self._pool.drop(peer, connection)
            time.sleep(pause_s)
        raise AssertionError("a fresh line is not a reused one")

    def _document(
        self, connection: ClientConnection, peer: Peer, task: SignedRequest, most_bytes: int
    ) -> bytes:
        until_s = time.monotonic() + self._caller.patience.request_s
        answer = None
        while answer is None:
            signature = self._caller.send_request(connection, peer, task)
            answer = self._caller.receive_answer(connection, peer, task, signature, until_s)
        if answer.length_bytes > most_bytes:
            size = answer.length_bytes
            raise failed(peer, task, "answer", f"it has {size} bytes, {most_bytes} are allowed")
        data = bytearray(answer.length_bytes)
        connection.fill(memoryview(data), until_s)
        if digest(data) != answer.digest:
            raise failed(peer, task, "body", "its bytes are not those that were signed")
        return bytes(data)

    def close(self) -> None:
        """Close the idle connections; pulls under way continue, and close theirs."""
        self._pool.close()
        self._stream_pool.close()
