"""Pull ranges of what peers offer straight into memory, from several of them at once.

    puller = Puller(secret, incarnation=4)
    puller.pull([Wanted(peer, "/slots/3", "4-1200", 0, memory)])

Every wait has an end, and every byte a peer behind it that could sign. That the bytes are the ones
that were captured is for the block checksums of the image to say: verify them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import UsageError
from holdfast.peers.calling import Caller, Peer, Task, failed
from holdfast.peers.cutting import cut
from holdfast.peers.line import Broken, Busy, Line, Patience
from holdfast.peers.lines import Lines, Pauses
from holdfast.peers.pull import Pull, Share
from holdfast.peers.resources import NO_GENERATION
from holdfast.peers.signing import digest
from holdfast.peers.stream import Stream
from holdfast.peers.wire import check_names

CHUNK_BYTES = 8 << 20
CONNECTIONS = 4
MOST_DOCUMENT_BYTES = 64 << 20
_NO_END_S = float("inf")


@dataclass(frozen=True, slots=True)
class Wanted:
    """``len(into)`` bytes from ``start`` of what a peer offers under a path."""

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
    """A client of any number of peers; its connections are kept until ``close``.

    ``connections``: to each peer, for all threads together, and as many for streams.
    ``incarnation``: the one this process belongs to. A later one needs another puller.
    """

    def __init__(
        self, secret: bytes, *, incarnation: int, connections: int = CONNECTIONS,
        chunk_bytes: int = CHUNK_BYTES, patience: Patience | None = None,
    ) -> None:  # fmt: skip
        self._caller = Caller(secret, incarnation=incarnation, patience=patience or Patience())
        self._connections, self._chunk_bytes = connections, chunk_bytes
        self._lines = Lines(self._caller, connections)
        # A stream has its line while its reader waits for other things, pulls among them.
        self._stream_lines = Lines(self._caller, connections)

    def pull(self, wanted: Sequence[Wanted], *, within_s: float | None = None) -> None:
        """Fill the memory of all that is wanted. PeerError of the first peer that failed."""
        for failure in self.begin(wanted, within_s=within_s).wait().values():
            raise failure

    def begin(self, wanted: Sequence[Wanted], *, within_s: float | None = None) -> Pull:
        """The same in the background: ``wait`` for it, or ``cancel`` it.

        The memory belongs to the pull until ``wait`` has returned. ``within_s`` bounds all of it,
        beside the bounds of each request.
        """
        until_s = _NO_END_S if within_s is None else time.monotonic() + within_s
        by_peer: dict[Peer, list[Wanted]] = {}
        for one in wanted:
            if one.into.nbytes:
                by_peer.setdefault(one.peer, []).append(one)
        return Pull([
            Share(
                peer, self._tasks(of_peer), self._caller, self._lines,
                connections=self._connections, until_s=until_s,
            )
            for peer, of_peer in by_peer.items()
        ])  # fmt: skip

    def stream(self, peer: Peer, path: str, generation: str, *, start: int) -> Stream:
        """Bytes of a file from ``start`` on, to be asked for and read piece by piece."""
        check_names(path, generation)
        return Stream(self._caller, self._stream_lines, peer, path, generation, start=start)

    def _tasks(self, wanted: Sequence[Wanted]) -> list[Task]:
        chunks = cut(
            [one.into.nbytes for one in wanted],
            chunk_bytes=self._chunk_bytes,
            connections=self._connections,
        )
        return [
            Task(
                "GET", one.path, one.generation,
                span=f"bytes={one.start + chunk.start}-{one.start + chunk.stop - 1}",
                into=one.into[chunk.start : chunk.stop],
            )
            for chunk in chunks
            for one in [wanted[chunk.wanted]]
        ]  # fmt: skip

    def document(
        self, peer: Peer, path: str, *, generation: str = NO_GENERATION,
        most_bytes: int = MOST_DOCUMENT_BYTES,
    ) -> bytes:  # fmt: skip
        """All of a document that a peer offers, as that peer signed for it.

        PeerError when it does not come, or is larger than ``most_bytes``: no memory is taken then.
        """
        check_names(path, generation)
        task = Task("GET", path, generation)
        pauses = Pauses(self._caller.patience, _NO_END_S)
        for turn in itertools.count():
            line, pause_s = None, 0.0
            try:
                line = self._lines.take(
                    peer, fresh=turn > 0, until_s=_NO_END_S, is_over=lambda: False
                )
                assert line is not None
                data = self._document(line, peer, task, most_bytes)
            except Busy:
                pause_s = pauses.next_s(peer, task)
            except Broken as broken:
                if line is None or not line.is_reused:
                    raise failed(peer, task, broken.phase, broken.reason) from broken
            else:
                self._lines.give_back(peer, line)
                line = None
                return data
            finally:
                if line is not None:
                    self._lines.drop(peer, line)
            time.sleep(pause_s)
        raise AssertionError("a fresh line is not a reused one")

    def _document(self, line: Line, peer: Peer, task: Task, most_bytes: int) -> bytes:
        until_s = time.monotonic() + self._caller.patience.request_s
        answer = None
        while answer is None:
            signature = self._caller.ask(line, peer, task)
            answer = self._caller.hear(line, peer, task, signature, until_s)
        if answer.length_bytes > most_bytes:
            size = answer.length_bytes
            raise failed(peer, task, "answer", f"it has {size} bytes, {most_bytes} are allowed")
        data = bytearray(answer.length_bytes)
        line.fill(memoryview(data), until_s)
        if digest(data) != answer.digest:
            raise failed(peer, task, "body", "its bytes are not those that were signed")
        return bytes(data)

    def close(self) -> None:
        """Close what is idle; pulls that are under way go on, and close theirs."""
        self._lines.close()
        self._stream_lines.close()
