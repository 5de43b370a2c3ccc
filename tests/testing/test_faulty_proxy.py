"""What passes through the proxy is what was sent, but for what a rule says."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from holdfast.testing.faults.faulty_proxy import FaultyProxy, RequestFault, RequestRule

BODY = bytes(range(256)) * 1000


class Handler(BaseHTTPRequestHandler):
    """Keeps what is put, and gives it back with a length or in chunks."""

    protocol_version = "HTTP/1.1"
    kept: dict[str, bytes]

    def do_PUT(self) -> None:
        size = int(self.headers["Content-Length"])
        data = self.rfile.read(size)
        if len(data) < size:  # the connection ended
            self.close_connection = True
            return
        self.kept[self.path] = data
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        data = self.kept[self.path.partition("?")[0]]
        self.send_response(200)
        if "chunked" in self.path:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(data), 100_000):
                piece = data[start : start + 100_000]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.kept[self.path])))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def kept() -> dict[str, bytes]:
    return {}


@pytest.fixture
def proxy(kept: dict[str, bytes]) -> Iterator[FaultyProxy]:
    handler = type("Kept", (Handler,), {"kept": kept})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with FaultyProxy("127.0.0.1", server.server_address[1]) as made:
            yield made
        server.shutdown()


@pytest.fixture
def client(proxy: FaultyProxy) -> Iterator[http.client.HTTPConnection]:
    made = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    yield made
    made.close()


def ask(client: http.client.HTTPConnection, method: str, path: str, body: bytes = b"") -> bytes:
    client.request(method, path, body=body or None)
    answer = client.getresponse()
    data = answer.read()
    assert answer.status == 200, answer.status
    return data


def test_requests_on_one_connection_pass_unchanged(
    client: http.client.HTTPConnection, kept: dict[str, bytes]
) -> None:
    for _ in range(3):
        ask(client, "PUT", "/one", BODY)
        assert kept["/one"] == BODY
        assert ask(client, "HEAD", "/one") == b""
        assert ask(client, "GET", "/one") == ask(client, "GET", "/one?chunked") == BODY


def test_only_the_requests_that_a_rule_names_meet_it(
    proxy: FaultyProxy, client: http.client.HTTPConnection
) -> None:
    rule = RequestRule(RequestFault.ANSWER, 503, "PUT", "/two", first=2, last=2)
    number = proxy.add(rule)
    for method, path, status in [
        ("PUT", "/one", 200),
        ("PUT", "/two", 200),
        ("GET", "/two", 200),
        ("PUT", "/two", 503),
        ("PUT", "/two", 200),
    ]:
        client.request(method, path, body=BODY if method == "PUT" else None)
        answer = client.getresponse()
        answer.read()
        assert answer.status == status, (method, path)
    assert (proxy.seen(number), proxy.met(number)) == (3, 1)
    proxy.remove(number)
    ask(client, "PUT", "/two", BODY)
    assert proxy.seen(number) == 3


def test_what_is_refused_does_not_reach_the_server(
    proxy: FaultyProxy, client: http.client.HTTPConnection, kept: dict[str, bytes]
) -> None:
    proxy.add(RequestRule(RequestFault.ANSWER, 429))
    with pytest.raises(AssertionError, match="429"):
        ask(client, "PUT", "/one", BODY)
    assert kept == {}


@pytest.mark.parametrize("after", [0, 1, 70_000])
def test_a_request_that_is_cut_is_not_taken_and_an_answer_that_is_cut_was(
    proxy: FaultyProxy, client: http.client.HTTPConnection, kept: dict[str, bytes], after: int
) -> None:
    number = proxy.add(RequestRule(RequestFault.CUT_REQUEST, after, "PUT"))
    with pytest.raises((http.client.HTTPException, OSError)):
        ask(client, "PUT", "/one", BODY)
    assert kept == {} and proxy.met(number) == 1
    proxy.remove(number)
    client.close()
    proxy.add(RequestRule(RequestFault.CUT_ANSWER, 0, "PUT"))
    with pytest.raises((http.client.HTTPException, OSError)):
        ask(client, "PUT", "/one", BODY)
    assert kept == {"/one": BODY}
    client.close()
    proxy.add(RequestRule(RequestFault.CUT_ANSWER, 500 + after, "GET"))
    with pytest.raises((http.client.HTTPException, OSError)):
        ask(client, "GET", "/one")


@pytest.mark.parametrize("at", [0, 100_000, len(BODY) - 1])
def test_one_bit_is_flipped_in_either_direction(
    proxy: FaultyProxy, client: http.client.HTTPConnection, kept: dict[str, bytes], at: int
) -> None:
    changed = bytearray(BODY)
    changed[at] ^= 1
    number = proxy.add(RequestRule(RequestFault.FLIP_REQUEST, at))
    ask(client, "PUT", "/one", BODY)
    assert kept["/one"] == changed
    proxy.remove(number)
    kept["/one"] = BODY
    proxy.add(RequestRule(RequestFault.FLIP_ANSWER, at))
    assert ask(client, "GET", "/one") == changed


@pytest.mark.parametrize("query", ["", "?chunked"])
def test_half_of_an_answer_looks_whole(
    proxy: FaultyProxy, client: http.client.HTTPConnection, query: str
) -> None:
    ask(client, "PUT", "/one", BODY)
    proxy.add(RequestRule(RequestFault.HALVE_ANSWER, method="GET"))
    assert ask(client, "GET", f"/one{query}") == BODY[: len(BODY) // 2]
    assert ask(client, "HEAD", "/one") == b""


@pytest.mark.parametrize(
    ("fault", "value"),
    [
        (RequestFault.DELAY, 0.3),
        (RequestFault.DELAY_ANSWER, 0.3),
        (RequestFault.THROTTLE, len(BODY) / 0.3),
    ],
)
def test_it_takes_longer(
    proxy: FaultyProxy, client: http.client.HTTPConnection, fault: RequestFault, value: float
) -> None:
    proxy.add(RequestRule(fault, value))
    began = time.monotonic()
    ask(client, "PUT", "/one", BODY)
    assert time.monotonic() - began >= 0.3
