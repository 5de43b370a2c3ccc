"""Whatever bytes come in, a server refuses and counts them, and goes on serving peers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.transport.server_connection import Limits
from holdfast.transport.wire import admission as refusals
from support.peers.peering import Caller, Served, random_file

REFUSED = [one.kind for one in refusals.ALL]
#: Nothing comes of what a test says for longer than this.
QUICK = Limits(request_s=0.5)
_fuzz = settings(
    max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@pytest.fixture
def fuzzed(arena_dir: Path) -> Iterator[tuple[Served, bytes]]:
    with Served(limits=QUICK) as served:
        data = random_file(arena_dir / "a", 100_000)
        served.offer("/a", arena_dir / "a")
        yield served, data


def say(served: Served, pieces: list[bytes], *, hang_up: bool) -> bytes:
    """All that the server answers to these bytes until the connection ends."""
    found = b""
    with socket.create_connection((served.host, served.port), timeout=10) as stranger:
        try:
            for piece in pieces:
                stranger.sendall(piece)
            if hang_up:
                stranger.shutdown(socket.SHUT_WR)
            while data := stranger.recv(65536):
                found += data
        except ConnectionError:
            return found
    return found


def check(fuzzed: tuple[Served, bytes], answer: bytes) -> None:
    """Nothing was given away, nothing broke, and a peer is served."""
    served, data = fuzzed
    assert data[:32] not in answer and b" 20" not in answer
    assert b"Holdfast-Signature" not in answer
    with Caller(served) as caller:
        assert caller.learn().status(span="bytes=100-199") == 206
        assert caller.body(100) == data[100:200]
    assert served.counts()["failed"] == 0


_HEADERS = st.sampled_from(
    [
        b"Host: a",
        b"Range: bytes=0-9",
        b"Holdfast-Peer: host-1",
        b"Holdfast-Counter: 1",
        b"Holdfast-Generation: 3-1200",
        b"Holdfast-Incarnation: 4",
        b"Content-Length: 3",
        b"Holdfast-Nonce: " + b"a" * 32,
        b"Holdfast-Signature: " + b"a" * 64,
        b"Expect: x",
        b"Holdfast-Challenge: " + b"a" * 32,
        b"If-Match: *",
        b"Transfer-Encoding: chunked",
        b"Connection: upgrade",
        b"",
        b" ",
        b"\t",
        b"X" * 3000,
    ]
)
_STARTS = st.sampled_from(
    [
        b"GET /a HTTP/1.1",
        b"HEAD /a HTTP/1.1",
        b"GET /../a HTTP/1.1",
        b"GET /a HTTP/1.0",
        b"PRI * HTTP/2.0",
        b"POST /a HTTP/1.1",
        b"\x16\x03\x01",
        b"GET  HTTP/1.1",
        b"",
    ]
)
_MOSTLY = st.integers(0, 9).map(bool)
_ENDS = st.sampled_from([b"\r\n\r\n", b"\n\n", b"\r\n", b"\r\n\r\nGET /a HTTP/1.1\r\n\r\n"])
_almost = st.builds(
    lambda start, headers, end: b"\r\n".join([start, *headers]) + end,
    _STARTS,
    st.lists(_HEADERS, max_size=12),
    _ENDS,
)


@_fuzz
@given(st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=4), _MOSTLY)
def test_any_bytes_are_refused(
    fuzzed: tuple[Served, bytes], pieces: list[bytes], hang_up: bool
) -> None:
    check(fuzzed, say(fuzzed[0], pieces, hang_up=hang_up))


@_fuzz
@given(st.lists(_almost, min_size=1, max_size=3), _MOSTLY)
def test_what_looks_like_requests_is_refused_and_counted(
    fuzzed: tuple[Served, bytes], pieces: list[bytes], hang_up: bool
) -> None:
    served, _ = fuzzed
    before = sum(served.counts()[kind] for kind in REFUSED)
    answer = say(served, pieces, hang_up=hang_up)
    if answer:
        assert sum(served.counts()[kind] for kind in REFUSED) > before
    check(fuzzed, answer)


@_fuzz
@given(st.data())
def test_a_signed_request_with_any_byte_changed_is_refused(
    fuzzed: tuple[Served, bytes], data: st.DataObject
) -> None:
    served, _ = fuzzed
    with Caller(served) as caller:
        raw = caller.learn().render(caller.request(span="bytes=0-99"))
    # What is not signed means nothing to us: how a header's name is written, and the host.
    text = raw.replace(b"Host: there\r\n", b"")
    at = data.draw(st.integers(0, len(text) - 5))
    new = data.draw(st.integers(0, 255).filter(lambda byte: byte != text[at]))
    damaged = text[:at] + bytes([new]) + text[at + 1 :]
    if damaged.lower() == text.lower():
        return
    line_end = damaged.index(b"\r\n") if b"\r\n" in damaged else 0
    damaged = damaged[:line_end] + b"\r\nHost: there" + damaged[line_end:]
    check(fuzzed, say(served, [damaged], hang_up=True))
