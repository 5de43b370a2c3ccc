"""A client gets what peers offered, byte for byte, or an error that names who did not give what."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from holdfast.errors import Fenced, PeerError, UsageError
from holdfast.transport.client import WantedRange
from holdfast.transport.client_connection import ClientTimeouts, Peer
from holdfast.transport.server_connection import Limits
from holdfast.transport.wire.http import render_answer
from holdfast.transport.wire.signing import HttpAnswer, HttpRequest, Signer
from support.peers.peering import (
    GENERATION,
    IMPATIENT,
    INCARNATION,
    NAME,
    SECRET,
    Scripted,
    Served,
    puller,
    random_file,
    wait_for,
)

MIB = 1 << 20
PROJECT = Path(__file__).parents[2]


def wanted(peer: Peer, start: int, size: int, path: str = "/a") -> WantedRange:
    return WantedRange(peer, path, GENERATION, start, memoryview(bytearray(size)))


# ── what comes ───────────────────────────────────────────────────────────────────────────────


def test_ranges_of_several_peers_come_byte_for_byte(arena_dir: Path) -> None:
    numbers = np.random.default_rng(1)
    with ExitStack() as stack:
        asked: list[tuple[WantedRange, bytes]] = []
        for n in range(3):
            served = stack.enter_context(Served(name=f"host-{n}"))
            data = random_file(arena_dir / f"{n}", 24 * MIB, seed=n)
            served.offer("/a", arena_dir / f"{n}")
            for _ in range(6):
                start = int(numbers.integers(0, 20 * MIB))
                size = int(numbers.integers(1, 4 * MIB))
                asked.append((wanted(served.peer, start, size), data[start : start + size]))
            asked.append((wanted(served.peer, 0, len(data)), data))
        client = puller(chunk_bytes=MIB)
        client.pull([one for one, _ in asked])
        client.pull([])
        assert all(one.into == data for one, data in asked)


def test_pulls_from_many_threads_share_a_client(served: Served, data: bytes) -> None:
    client, found = puller(connections=2), list[bool]()

    def pull() -> None:
        for _ in range(10):
            one = wanted(served.peer, 5, 250_000)
            client.pull([one])
            found.append(one.into == data[5:250_005])

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [True] * 40
    assert served.counts()["replayed"] == 0


def test_connections_are_kept_and_taken_again(served: Served, data: bytes) -> None:
    client = puller(connections=1)
    for _ in range(5):
        client.pull([wanted(served.peer, 0, 1000)])
    assert served.counts()["connections"] == 1


def test_a_connection_that_was_closed_while_idle_is_made_again(arena_dir: Path) -> None:
    with Served(limits=Limits(idle_s=0.1)) as served:
        data = random_file(arena_dir / "a", 1000)
        served.offer("/a", arena_dir / "a")
        served.do(served.server.offer_document, "/d", b"hello")
        client = puller(connections=1)
        for turn in range(1, 4):
            one = wanted(served.peer, 0, 1000)
            client.pull([one])
            assert one.into == data
            wait_for(lambda: not served.counts()["open_connections"], "the end of an idle line")
            assert served.counts()["connections"] == turn
        assert client.document(served.peer, "/d") == b"hello"


def test_a_client_whose_challenge_is_over_learns_the_new_one(served: Served, data: bytes) -> None:
    client = puller()
    client.pull([wanted(served.peer, 0, 1000)])
    served.do(setattr, served.server._service.admission, "challenge", "f" * 32)
    one = wanted(served.peer, 0, len(data))
    client.pull([one])
    assert one.into == data


def test_all_connections_have_work_at_once(arena_dir: Path) -> None:
    with Served() as served:
        random_file(arena_dir / "a", 8 * MIB)
        served.offer("/a", arena_dir / "a")
        served.do(served.server.set_rate, 16 * MIB)
        client = puller(connections=4)
        pull = client.begin([wanted(served.peer, 0, 8 * MIB)])
        wait_for(lambda: served.counts()["open_connections"] == 4, "four connections")
        assert pull.wait() == {}
        assert pull.received_bytes == 8 * MIB


def test_a_document_comes_as_it_was_signed(served: Served) -> None:
    served.do(served.server.offer_document, "/d", b"x" * 700_000)
    client = puller()
    assert client.document(served.peer, "/d") == b"x" * 700_000
    with pytest.raises(PeerError, match="700000 bytes, 100 are allowed"):
        client.document(served.peer, "/d", most_bytes=100)
    with pytest.raises(PeerError, match="nothing of that name"):
        client.document(served.peer, "/e")


# ── who is not believed ──────────────────────────────────────────────────────────────────────

Script = Callable[[Scripted, socket.socket, HttpRequest, str], None]


def answer_with(**fields: Any) -> Script:
    """Signed rightly, with these fields changed, and with as many bytes as were asked for."""

    def script(peer: Scripted, to: socket.socket, request: HttpRequest, signature: str) -> None:
        good = peer.good(request)
        peer.send(to, replace(good, **fields), signature, bytes(good.length_bytes))

    return script


def sign_with(signer: Signer, over: str = "") -> Script:
    def script(peer: Scripted, to: socket.socket, request: HttpRequest, signature: str) -> None:
        answer = peer.good(request)
        given = signer.of_answer(answer, over or signature)
        to.sendall(render_answer(answer, given) + bytes(answer.length_bytes))

    return script


def unsigned(peer: Scripted, to: socket.socket, request: HttpRequest, _: str) -> None:
    to.sendall(render_answer(peer.good(request)) + bytes(1000))


def cut_short(peer: Scripted, to: socket.socket, request: HttpRequest, signature: str) -> None:
    peer.send(to, peer.good(request), signature, bytes(500))
    to.shutdown(socket.SHUT_RDWR)


def stops(peer: Scripted, to: socket.socket, request: HttpRequest, signature: str) -> None:
    peer.send(to, peer.good(request), signature, bytes(500))


def says_nothing(*_: object) -> None:
    return


def hangs_up(_: Scripted, to: socket.socket, *__: object) -> None:
    to.shutdown(socket.SHUT_RDWR)


def says(data: bytes) -> Script:
    return lambda _, to, *__: to.sendall(data)


def challenges_for_ever(peer: Scripted, to: socket.socket, request: HttpRequest, sig: str) -> None:
    peer.send(to, HttpAnswer(401, INCARNATION, challenge=f"{len(peer.requests):032x}"), sig)


def confirms_nothing(peer: Scripted, to: socket.socket, request: HttpRequest, sig: str) -> None:
    if request.method == "HEAD":
        peer.send(to, HttpAnswer(410, INCARNATION), sig)
    else:
        peer.send(to, peer.good(request), sig, bytes(1000))


@pytest.mark.parametrize(
    ("script", "reason", "phase"),
    [
        (answer_with(length_bytes=999), "with 999 bytes", "answer"),
        (answer_with(length_bytes=1001), "with 1001 bytes", "answer"),
        (answer_with(span="1-1000/1000000"), "with 1000 bytes, 1-1000", "answer"),
        (answer_with(span=""), "no range", "answer"),
        (answer_with(status=200, span=""), r"no answer to it \(answer 200\)", "answer"),
        (answer_with(status=500), r"answer 500", "answer"),
        (answer_with(status=404), "nothing of that name", "answer"),
        (answer_with(status=409), "seen this request before", "answer"),
        (answer_with(status=416), "fewer bytes", "answer"),
        (answer_with(status=421), "another name", "answer"),
        (answer_with(incarnation=3), "still in incarnation 3", "answer"),
        (sign_with(Signer(b"another secret entirely")), "not signed", "answer"),
        (sign_with(Signer(SECRET), over="0" * 64), "not signed", "answer"),
        (unsigned, "answer 206 is not signed", "answer"),
        (cut_short, "ended after 500 of 1000", "body"),
        (stops, "not a byte came.*after 500 of 1000", "body"),
        (says_nothing, "no answer in time", "answer"),
        (hangs_up, "ended the connection", "answer"),
        (says(b"SSH-2.0-OpenSSH\r\n\r\n"), "is no keeper", "answer"),
        (says(b"HTTP/1.1 200 OK\r\n\r\n"), "is no keeper", "answer"),
        (says(b"X" * 20_000), "no end of its head", "answer"),
        (challenges_for_ever, "challenge after challenge", "answer"),
        (confirms_nothing, "has withdrawn that", "answer"),
    ],
)
def test_a_peer_that_does_not_answer_as_it_must_is_dropped_with_a_reason(
    script: Script, reason: str, phase: str
) -> None:
    hasty = replace(IMPATIENT, answer_s=0.3, progress_s=0.3)
    with Scripted(script) as peer, pytest.raises(PeerError, match=reason) as caught:
        puller(patience=hasty).pull([wanted(peer.peer, 0, 1000)])
    error = caught.value
    assert f"{NAME} at 127.0.0.1 port {peer.peer.port}" in str(error)
    assert error.fields["peer"] == NAME
    assert error.fields["address"] == f"127.0.0.1:{peer.peer.port}"
    assert error.fields["path"] == "/a"
    assert error.fields["range"] in ("bytes=0-999", "")
    assert error.fields["phase"] == phase


def test_a_peer_that_trickles_ends_at_the_requests_deadline() -> None:
    def trickle(peer: Scripted, to: socket.socket, request: HttpRequest, signature: str) -> None:
        peer.send(to, peer.good(request), signature)
        for _ in range(100):
            to.sendall(b"x")
            time.sleep(0.02)

    with Scripted(trickle) as peer, pytest.raises(PeerError, match="its time was over"):
        puller(patience=replace(IMPATIENT, request_s=0.3)).pull([wanted(peer.peer, 0, 1000)])
    with Scripted(trickle) as peer, pytest.raises(PeerError, match="its time was over"):
        puller().pull([wanted(peer.peer, 0, 1000)], within_s=0.3)


def test_a_newer_incarnation_ends_this_one() -> None:
    over = "incarnation 4 is over, 5 has begun"
    with Scripted(answer_with(incarnation=5)) as peer, pytest.raises(Fenced, match=over):
        puller().pull([wanted(peer.peer, 0, 1000)])
    with Served(incarnation=5) as served, pytest.raises(Fenced):
        puller().document(served.peer, "/d")


def test_a_server_that_was_left_behind_is_not_believed(served: Served, data: bytes) -> None:
    with pytest.raises(PeerError, match="still in incarnation 4"):
        puller(incarnation=5).pull([wanted(served.peer, 0, 1000)])
    assert served.counts()["behind"] == 1
    assert served.counts()["sent_bytes"] == 0


def test_whoever_was_being_served_is_cut_off_when_a_newer_incarnation_begins(
    arena_dir: Path,
) -> None:
    with Served() as served:
        random_file(arena_dir / "a", 32 * MIB)
        served.offer("/a", arena_dir / "a")
        served.do(served.server.set_rate, 8 * MIB)
        pull = puller(chunk_bytes=MIB).begin([wanted(served.peer, 0, 32 * MIB)])
        served.until("open_connections")
        wait_for(lambda: pull.received_bytes > 0, "bytes")
        served.do(served.server.begin, 5)
        assert isinstance(pull.wait()[served.peer], PeerError)
        with pytest.raises(Fenced):
            puller().pull([wanted(served.peer, 0, 1000)])


def test_a_document_that_was_changed_on_its_way_is_refused() -> None:
    def script(peer: Scripted, to: socket.socket, request: HttpRequest, signature: str) -> None:
        answer = HttpAnswer(200, INCARNATION, 5, digest="0" * 64)
        peer.send(to, answer, signature, b"hello")

    with Scripted(script) as peer, pytest.raises(PeerError, match="not those that were signed"):
        puller().document(peer.peer, "/d")


# ── who fails, and who does not ──────────────────────────────────────────────────────────────


def test_a_peer_that_fails_costs_nothing_of_the_others(served: Served, data: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = Peer("host-9", "127.0.0.1", closed.getsockname()[1])
    good, bad = wanted(served.peer, 0, len(data)), wanted(nobody, 0, 1000)
    failures = puller().begin([bad, good]).wait()
    assert list(failures) == [nobody]
    assert failures[nobody].fields["phase"] == "connect"
    assert good.into == data


def test_a_peer_that_does_not_even_connect_ends_by_its_deadline() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        peer = Peer("host-9", *full.getsockname())
        began_s = time.monotonic()
        with pytest.raises(PeerError, match=r"no connection in 0\.3 s|no answer"):
            puller(patience=ClientTimeouts(connect_s=0.3, answer_s=0.3)).pull([wanted(peer, 0, 10)])
        assert time.monotonic() - began_s < 30
        for one in waiting:
            one.close()


def test_a_pull_can_be_cancelled_and_nothing_is_written_after_its_end(arena_dir: Path) -> None:
    with Served() as served:
        random_file(arena_dir / "a", 32 * MIB)
        served.offer("/a", arena_dir / "a")
        served.do(served.server.set_rate, MIB)
        one = wanted(served.peer, 0, 32 * MIB)
        pull = puller(chunk_bytes=MIB).begin([one])
        wait_for(lambda: pull.received_bytes > 0, "bytes")
        pull.cancel()
        began_s = time.monotonic()
        failures = pull.wait()
        assert time.monotonic() - began_s < 20, "all of it takes 32 s"
        assert failures[served.peer].fields["phase"] == "cancelled"
        before = bytes(one.into)
        time.sleep(0.1)
        assert one.into == before


def test_a_pull_that_is_over_cannot_be_cancelled(served: Served, data: bytes) -> None:
    pull = puller().begin([wanted(served.peer, 0, 1000)])
    assert pull.wait() == {}
    pull.cancel()
    assert pull.wait() == {}


KILLED = """
import asyncio, sys
from pathlib import Path
from holdfast.transport.server import PeerServer

async def main():
    server = PeerServer(sys.argv[1].encode(), name="host-1", incarnation=4)
    server.set_rate(8 << 20)
    file = Path(sys.argv[2])
    server.offer_file("/a", file, offset_bytes=0, length_bytes=file.stat().st_size,
                      generation="3-1200")
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_server_that_is_killed_in_the_middle_is_an_error_that_says_where(arena_dir: Path) -> None:
    random_file(arena_dir / "a", 32 * MIB)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, SECRET.decode(), str(arena_dir / "a")],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        peer = Peer(NAME, "127.0.0.1", int(process.stdout.readline()))
        pull = puller(chunk_bytes=MIB).begin([wanted(peer, 0, 32 * MIB)])
        wait_for(lambda: pull.received_bytes > 0, "bytes")
        process.send_signal(signal.SIGKILL)
        failure = pull.wait()[peer]
    assert failure.fields["phase"] in ("body", "answer")
    assert pull.received_bytes < 32 * MIB


def test_closing_a_server_ends_what_is_under_way(arena_dir: Path) -> None:
    with Served() as served:
        random_file(arena_dir / "a", 32 * MIB)
        served.offer("/a", arena_dir / "a")
        served.do(served.server.set_rate, 100_000)
        pull = puller(chunk_bytes=MIB).begin([wanted(served.peer, 0, 32 * MIB)])
        served.until("open_connections", 4)
    assert served.peer in pull.wait()


# ── calls that mean nothing ──────────────────────────────────────────────────────────────────


def test_memory_that_cannot_be_filled_is_refused() -> None:
    peer = Peer("host-1", "127.0.0.1", 1)
    for into in (
        memoryview(b"read only"),
        memoryview(bytearray(8))[::2],
        memoryview(bytearray(8)).cast("I"),
        memoryview(bytearray(8)).cast("B", (2, 4)),
    ):
        with pytest.raises(UsageError, match="writable memoryview of bytes"):
            WantedRange(peer, "/a", GENERATION, 0, into)
    with pytest.raises(UsageError, match="not at -1"):
        wanted(peer, -1, 8)
    with pytest.raises(UsageError, match="cannot be asked for"):
        wanted(peer, 0, 8, path="/a b")
    with pytest.raises(UsageError, match="cannot name a host"):
        Peer("a host", "127.0.0.1", 1)
