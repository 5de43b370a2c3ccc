"""A range read piece by piece is what was offered, all of it and at one time, or an error."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import PeerError, UsageError
from holdfast.transport.client import Puller, WantedRange
from holdfast.transport.pull import PeerDownload
from holdfast.transport.server_connection import Limits
from holdfast.transport.wire.signing import HttpRequest
from support.peers.peering import (
    GENERATION,
    SECRET,
    Scripted,
    Served,
    puller,
    random_file,
    wait_for,
)

SIZE = 300_000


def stream_of(
    served: Served | Scripted, *, start: int = 0, client: Puller | None = None
) -> PeerDownload:
    return (client or puller()).stream(served.peer, "/a", GENERATION, start=start)


def read(stream: PeerDownload, count: int) -> bytes:
    into = bytearray(count)
    stream.read(memoryview(into))
    return bytes(into)


def test_pieces_come_in_order_however_they_are_asked_for_and_read(
    served: Served, data: bytes
) -> None:
    draw, client = random.Random(3), puller()
    for _ in range(20):
        start = at = draw.randrange(SIZE)
        stream, asked = stream_of(served, start=start, client=client), start
        while at < SIZE:
            if asked == at or (asked < SIZE and draw.random() < 0.6):
                count = draw.randint(1, min(70_000, SIZE - asked))
                stream.ask(count)
                asked += count
            count = draw.randint(1, asked - at)
            assert read(stream, count) == data[at : at + count]
            at += count
        stream.confirm()
        stream.close()
    assert served.counts()["connections"] == 2, "one learns the challenge, one is used again"
    assert served.counts()["confirmed"] == 20


def shut_all(served: Served) -> None:
    for one in served.server._connections:
        one.shut()


def test_a_line_that_was_closed_while_it_was_idle_is_no_fault(served: Served, data: bytes) -> None:
    client = puller()
    for _ in range(3):
        stream = stream_of(served, client=client)
        for _ in range(2):
            stream.ask(SIZE // 2)
        assert read(stream, SIZE) == data
        stream.confirm()
        served.do(shut_all, served)
        wait_for(lambda: not served.counts()["open_connections"], "the end of all lines")
    assert served.counts()["connections"] == 4


def idle(served: Served) -> bool:
    """Whether the server takes every reader for one that wants nothing more."""
    return all(one.idle_since_s is not None for one in served.server._connections)


@pytest.mark.parametrize("more", [(), (1000, 1000)])
def test_a_reader_that_takes_its_time_is_given_up_as_idle_and_reads_on(
    arena_dir: Path, more: tuple[int, ...]
) -> None:
    data = random_file(arena_dir / "a", SIZE)
    with Served(limits=Limits(idle_s=0.2)) as served:
        served.offer("/a", arena_dir / "a")
        stream = stream_of(served)
        for count in (8000, 8000):
            stream.ask(count)
        got = read(stream, 1000)
        served.until("open_connections")
        wait_for(lambda: not served.counts()["open_connections"], "the end of an idle line")
        for count in more:
            stream.ask(count)  # of which the server hears nothing
        got += read(stream, 15_000 + sum(more))
        assert got == data[: len(got)]
        stream.confirm()
        assert served.counts()["confirmed"] == 1


def test_bytes_that_have_not_arrived_keep_a_line_from_being_given_up(arena_dir: Path) -> None:
    size = 256 << 10  # more than the kernel takes in for who does not read, less than it keeps
    data = random_file(arena_dir / "a", size)
    with Served(limits=Limits(connections_of_one=1, spared_s=0.05)) as served:
        served.offer("/a", arena_dir / "a")
        stream = stream_of(served)
        stream.ask(size - 1000)
        got = read(stream, 1000)
        wait_for(lambda: bool(served.counts()["ranges"]) and idle(served), "the last byte's way")
        into = memoryview(bytearray(1000))
        other = puller().begin([WantedRange(served.peer, "/a", GENERATION, 0, into)])
        served.until("crowded", 3)
        stream.ask(1000)
        got += read(stream, size - 1000)
        stream.confirm()  # and after that, there is a place
        assert got == data and not other.wait() and into == data[:1000]


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 206 "])
def test_a_peer_that_ends_every_line_without_an_answer_is_given_up(said: bytes) -> None:
    def ends(
        peer: Scripted, connected: socket.socket, request: HttpRequest, signature: str
    ) -> None:
        if len(peer.requests) == 1:
            peer.send(connected, peer.good(request), signature, bytes(10))
        else:
            connected.sendall(said)
            connected.shutdown(socket.SHUT_RDWR)

    with Scripted(ends) as peer:
        stream = stream_of(peer)
        stream.ask(10)
        read(stream, 10)
        with pytest.raises(PeerError, match="it ended the connection"):
            stream.confirm()
        assert len(peer.requests) == 3
        stream.close()


def test_a_challenge_is_learned_with_several_requests_under_way(
    served: Served, data: bytes
) -> None:
    stream = stream_of(served)
    for _ in range(5):
        stream.ask(1000)
    assert read(stream, 5000) == data[:5000]
    stream.confirm()
    assert served.counts()["challenged"]


def test_a_challenge_that_others_learn_meanwhile_changes_no_order(
    served: Served, data: bytes
) -> None:
    """The second request is signed over it, and answered; the first is not."""
    client = puller()
    stream = stream_of(served, client=client)
    stream.ask(1000)
    with pytest.raises(PeerError):
        client.document(served.peer, "/b")
    stream.ask(1000)
    assert read(stream, 2000) == data[:2000]
    stream.confirm()


@pytest.mark.parametrize("after", [0, 1000])
def test_what_is_withdrawn_or_offered_anew_is_not_taken_for_whole(
    served: Served, data: bytes, arena_dir: Path, after: int
) -> None:
    stream = stream_of(served)
    stream.ask(SIZE - 1000)
    assert read(stream, SIZE - 1000) == data[:-1000]
    served.offer("/a", arena_dir / "a")

    def end() -> None:
        if after:
            stream.ask(after)
            read(stream, after)
        stream.confirm()

    with pytest.raises(PeerError, match="keeper host-1"):  # or the line broke, by the withdrawal
        end()
    stream.close()


def test_a_withdrawal_in_the_middle_of_a_piece_ends_it(arena_dir: Path) -> None:
    size = 64 << 20
    random_file(arena_dir / "a", size)
    with Served() as served:
        served.offer("/a", arena_dir / "a")
        stream = stream_of(served)
        stream.ask(size)
        read(stream, 1000)
        served.do(served.server.withdraw, "/a")
        with pytest.raises(PeerError, match="host-1"):
            read(stream, size - 1000)
        stream.close()


def test_another_thread_can_end_it(arena_dir: Path) -> None:
    def silent(_: Scripted, connected: socket.socket, request: HttpRequest, signature: str) -> None:
        """It never answers."""

    with Scripted(silent) as peer:
        stream = stream_of(peer)
        stream.ask(10)
        threading.Timer(0.2, stream.cancel).start()
        with pytest.raises(PeerError):
            read(stream, 10)
        with pytest.raises(PeerError, match="cancelled"):
            stream.ask(10)
        stream.close()


Script = Callable[[Scripted, socket.socket, HttpRequest, str], None]


def answered(**fields: object) -> Script:
    def script(peer: Scripted, to: socket.socket, request: HttpRequest, signature: str) -> None:
        peer.send(to, peer.good(request, **fields), signature, bytes(10))

    return script


@pytest.mark.parametrize(
    "script",
    [
        answered(length_bytes=9),
        answered(span="1-10/1000000"),
        answered(status=200),
        answered(incarnation=3),
        lambda peer, to, request, signature: to.close(),
    ],
)
def test_an_answer_to_something_else_is_not_believed(script: Script) -> None:
    with Scripted(script) as peer:
        stream = stream_of(peer)
        stream.ask(10)
        with pytest.raises(PeerError, match="host-1"):
            read(stream, 10)
        stream.close()


def test_what_was_offered_anew_between_two_pieces_is_not_taken_for_one() -> None:
    tags = iter("abc")

    def script(peer: Scripted, to: socket.socket, request: HttpRequest, signature: str) -> None:
        peer.send(to, peer.good(request, tag=next(tags) * 16), signature, bytes(10))

    with Scripted(script) as peer:
        stream = stream_of(peer)
        stream.ask(10)
        assert read(stream, 10) == bytes(10)
        stream.ask(10)
        with pytest.raises(PeerError, match="offered anew while it was pulled"):
            read(stream, 10)
        stream.close()


def test_a_peer_that_is_not_there_is_named(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    peer = type(served.peer)("host-1", "127.0.0.1", port)
    stream = puller().stream(peer, "/a", GENERATION, start=0)
    with pytest.raises(PeerError, match="connect"):
        stream.ask(1)
    with pytest.raises(UsageError, match="cannot be asked for"):
        Puller(SECRET, incarnation=4).stream(peer, "a", GENERATION, start=0)
