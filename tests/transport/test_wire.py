"""What is on the wire has one form, and everything else is refused, whatever it is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.transport.wire import admission as refusals
from holdfast.transport.wire.admission import AdmissionRefused
from holdfast.transport.wire.http import (
    END,
    check_names,
    check_peer,
    image_path,
    layout_path,
    manifest_path,
    members_path,
    parity_path,
    parse_answer,
    parse_request,
    record_path,
    render_answer,
    render_request,
    span_of,
    window_path,
)
from holdfast.transport.wire.signing import HttpAnswer, HttpRequest

REQUEST = HttpRequest(
    method="GET",
    peer="host-1",
    path="/slots/3",
    generation="3-1200",
    incarnation=4,
    nonce="a" * 32,
    counter=17,
    challenge="b" * 32,
    span="bytes=0-99",
    tag="c" * 16,
)
SIGNATURE = "d" * 64
RAW = render_request(REQUEST, SIGNATURE, "there:1")
LINES = RAW[: -len(END)].split(b"\r\n")


def raw(*, without: bytes = b"", line: bytes = b"", first: bytes = LINES[0]) -> bytes:
    """The request with one line left out, and one more."""
    kept = [one for one in LINES[1:] if not without or not one.lower().startswith(without)]
    return b"\r\n".join([first, *kept, *([line] if line else [])]) + END


_bare = st.builds(
    msgspec.structs.replace,
    st.just(REQUEST),
    method=st.sampled_from(["GET", "HEAD"]),
    counter=st.integers(0, 10**18 - 1),
    incarnation=st.integers(0, 10**18 - 1),
    challenge=st.sampled_from(["", "b" * 32]),
    span=st.sampled_from(["", "bytes=0-1", "bytes=17-18"]),
    tag=st.sampled_from(["", "c" * 16]),
    path=st.from_regex(r"/[a-z0-9/@=._-]{0,40}", fullmatch=True),
)


@given(_bare)
def test_a_request_is_read_as_it_was_written(request: HttpRequest) -> None:
    assert parse_request(render_request(request, SIGNATURE, "h"), 32) == (request, SIGNATURE)


_answers = st.builds(
    HttpAnswer,
    status=st.sampled_from([200, 206, 400, 401, 403, 404, 405, 409, 410, 416, 421, 431, 503]),
    incarnation=st.integers(0, 10**6),
    length_bytes=st.integers(0, 10**15),
    span=st.sampled_from(["", "0-9/10", "*/10"]),
    tag=st.sampled_from(["", "a" * 16]),
    digest=st.sampled_from(["", "b" * 64]),
    challenge=st.sampled_from(["", "c" * 32]),
)


@given(_answers, st.sampled_from(["", SIGNATURE]), st.booleans())
def test_an_answer_is_read_as_it_was_written(
    answer: HttpAnswer, signature: str, is_last: bool
) -> None:
    written = render_answer(answer, signature, is_last=is_last)
    assert parse_answer(written) == (answer, signature)
    assert (b"Connection: close" in written) == is_last


REFUSED = [
    (b"\r\n\r\n", refusals.MALFORMED),
    (raw(first=b"GET /slots/3"), refusals.MALFORMED),
    (raw(first=b"GET /slots/3 HTTP/1.0"), refusals.MALFORMED),
    (raw(first=b"GET /slots/3 HTTP/2"), refusals.MALFORMED),
    (raw(first=b"get /slots/3 HTTP/1.1"), refusals.MALFORMED),
    (raw(first=b"GET  /slots/3 HTTP/1.1"), refusals.MALFORMED),
    (raw(first=b"GET /slots/3 HTTP/1.1 "), refusals.MALFORMED),
    (raw(first=b"GET http://there/slots/3 HTTP/1.1"), refusals.MALFORMED),
    (raw(first=b"GET slots/3 HTTP/1.1"), refusals.MALFORMED),
    (raw(first=b"GET /%2e%2e/3 HTTP/1.1"), refusals.MALFORMED),
    (raw(first=b"GET /slots/3?a=b HTTP/1.1"), refusals.MALFORMED),
    (raw(first=b"GET /" + b"a" * 600 + b" HTTP/1.1"), refusals.MALFORMED),
    (raw(first="GET /ä HTTP/1.1".encode()), refusals.MALFORMED),
    (raw(first=b"\r\nGET /slots/3 HTTP/1.1"), refusals.MALFORMED),
    (raw(first=b"POST /slots/3 HTTP/1.1"), refusals.METHOD),
    (raw(first=b"DELETE /slots/3 HTTP/1.1"), refusals.METHOD),
    (raw(without=b"host"), refusals.MALFORMED),
    (raw(line=b"Host: another"), refusals.MALFORMED),
    (raw(line=b"hOLDFAST-cOUNTER: 18"), refusals.MALFORMED),
    (raw(line=b"Range: bytes=0-1"), refusals.MALFORMED),
    (raw(line=b"no colon"), refusals.MALFORMED),
    (raw(line=b": no name"), refusals.MALFORMED),
    (raw(line=b"Space : before"), refusals.MALFORMED),
    (raw(line=b" folded: line"), refusals.MALFORMED),
    (raw(line=b"A: \x00"), refusals.MALFORMED),
    (raw(line=b"A: tab\tin it"), refusals.MALFORMED),
    (raw(line=b"A: bare\nfeed"), refusals.MALFORMED),
    (raw(line=b"A: bare\rreturn"), refusals.MALFORMED),
    (raw(line="A: ä".encode()), refusals.MALFORMED),
    (raw(line=b"Content-Length: 5"), refusals.BODY),
    (raw(line=b"Content-Length: -1"), refusals.BODY),
    (raw(line=b"Transfer-Encoding: chunked"), refusals.BODY),
    (raw(without=b"holdfast-signature"), refusals.UNSIGNED),
    (raw(without=b"holdfast-nonce"), refusals.UNSIGNED),
    (raw(without=b"holdfast-peer"), refusals.UNSIGNED),
    (raw(without=b"holdfast-generation"), refusals.UNSIGNED),
    (raw(without=b"holdfast-counter", line=b"Holdfast-Counter: -1"), refusals.MALFORMED),
    (raw(without=b"holdfast-counter", line=b"Holdfast-Counter: 017"), refusals.MALFORMED),
    (raw(without=b"holdfast-counter", line=b"Holdfast-Counter: 1_7"), refusals.MALFORMED),
    (raw(without=b"holdfast-counter", line=b"Holdfast-Counter: 1e3"), refusals.MALFORMED),
    (raw(without=b"holdfast-counter", line=b"Holdfast-Counter: " + b"9" * 19), refusals.MALFORMED),
    (raw(without=b"holdfast-counter", line=b"Holdfast-Counter:"), refusals.MALFORMED),
    (raw(without=b"holdfast-nonce", line=b"Holdfast-Nonce: " + b"A" * 32), refusals.MALFORMED),
    (raw(without=b"holdfast-nonce", line=b"Holdfast-Nonce: a"), refusals.MALFORMED),
    (raw(without=b"holdfast-signature", line=b"Holdfast-Signature: d"), refusals.MALFORMED),
    (raw(without=b"holdfast-challenge", line=b"Holdfast-Challenge: x"), refusals.MALFORMED),
    (raw(without=b"if-match", line=b"If-Match: *"), refusals.MALFORMED),
    (raw(without=b"if-match", line=b"If-Match: " + b"c" * 16), refusals.MALFORMED),
    (raw(without=b"range", line=b"Range: bytes=0-1, 3-4"), refusals.MALFORMED),
]


@pytest.mark.parametrize(("head", "why"), REFUSED, ids=[repr(head[-60:]) for head, _ in REFUSED])
def test_what_is_not_a_request_of_a_peer_is_refused(head: bytes, why: AdmissionRefused) -> None:
    assert parse_request(head, 32) is why


def test_headers_that_mean_nothing_to_us_are_let_pass() -> None:
    many = raw(line=b"User-Agent: curl\r\nAccept: */*\r\nContent-Length: 0")
    assert parse_request(many, 32) == (REQUEST, SIGNATURE)


def test_no_more_headers_are_read_than_allowed() -> None:
    more = b"\r\n".join(b"X-%d: y" % n for n in range(30))
    assert parse_request(raw(line=more), 32) is refusals.TOO_LARGE
    assert parse_request(RAW, len(LINES) - 1) == (REQUEST, SIGNATURE)
    assert parse_request(RAW, len(LINES) - 2) is refusals.TOO_LARGE


@given(st.binary(max_size=400))
def test_any_bytes_are_read_as_a_refusal(data: bytes) -> None:
    assert isinstance(parse_request(data + END, 32), AdmissionRefused)


@given(st.integers(0, len(RAW) - 5), st.binary(min_size=1, max_size=3))
def test_what_is_read_of_a_damaged_request_has_one_form(at: int, new: bytes) -> None:
    damaged = RAW[: -len(END)][:at] + new + RAW[: -len(END)][at + len(new) :] + END
    found = parse_request(damaged, 32)
    if not isinstance(found, AdmissionRefused):
        assert parse_request(render_request(*found, "h"), 32) == found


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/1.1 999 No\r\nContent-Length: 0",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0",
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 200 OK\r\nContent-Length: x",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nfolded",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\ncontent-length: 1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nHoldfast-Incarnation: x",
        b"SSH-2.0-OpenSSH_9.2",
    ],
)
def test_what_is_not_an_answer_of_a_keeper_is_none(head: bytes) -> None:
    assert parse_answer(head + END) is None


@given(st.binary(max_size=400))
def test_any_bytes_can_be_read_as_an_answer_or_not(data: bytes) -> None:
    parsed = parse_answer(data + END)
    assert parsed is None or isinstance(parsed[0], HttpAnswer)


SPANS = [
    ("", (0, 100)),
    ("bytes=0-99", (0, 100)),
    ("bytes=99-99", (99, 100)),
    ("bytes=10-19", (10, 20)),
    ("bytes=0-100", None),
    ("bytes=100-100", None),
    ("bytes=20-10", None),
    ("bytes=5-", None),
    ("bytes=-5", None),
    ("bytes=", None),
    ("bytes=a-b", None),
    ("bytes=0-1,3-4", None),
    ("bytes=-1-5", None),
    ("items=0-1", None),
    ("bytes=0-9999999999999999999", None),
]


@pytest.mark.parametrize(("text", "span"), SPANS)
def test_a_range_is_all_there_or_refused(text: str, span: tuple[int, int] | None) -> None:
    assert span_of(text, 100) == span


@pytest.mark.parametrize("path", ["", "a", "/a b", "/a\r\nX: y", "/a?b", "/" + "a" * 600, "/ä"])
def test_a_path_that_cannot_be_asked_for_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="cannot be asked for"):
        check_names(path, "3-1200")


@pytest.mark.parametrize("name", ["", "a b", "a\n", "x" * 129, "ä"])
def test_a_name_that_cannot_be_said_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="name a generation"):
        check_names("/a", name)
    with pytest.raises(UsageError, match="name a host"):
        check_peer(name)


def test_plain_names_are_taken() -> None:
    check_names("/slots/3", "3-1200")
    check_peer("host-1.example:8@x")


def test_the_paths_of_resources_differ_and_can_be_asked_for() -> None:
    """Keepers of two versions ask each other for these."""
    expected = {
        image_path("a-1", 2): "/images/a-1/2",
        layout_path("f" * 32): f"/layouts/{'f' * 32}",
        parity_path("a-1", 2, 3): "/parity/a-1/2/3",
        record_path("a-1", 2, 3): "/records/a-1/2/3",
        members_path("a-1", 7): "/members/a-1/7",
        manifest_path("a-1", 7, 2, 3): "/windows/a-1/7/2/3",
        window_path("a-1", 7, 2, 3, 4): "/windows/a-1/7/2/3/4",
    }
    assert len(expected) == 7
    for path, text in expected.items():
        assert path == text
        check_names(path, "3-1200")
