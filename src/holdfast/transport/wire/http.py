"""PURE. HTTP/1.1 as peers speak it: heads of requests and answers, to bytes and back.

Strict: what a signature covers must have one form only. Lines end in CRLF, no header comes twice,
a path is one of plain characters, a range has both ends. What is not so is refused, never guessed.
"""

from __future__ import annotations

import re
from http import HTTPStatus

from holdfast.errors import UsageError
from holdfast.peers import refusals
from holdfast.peers.refusals import Refused
from holdfast.peers.signing import Answer, Request

END = b"\r\n\r\n"
_PLAIN_NAMES = ": give letters, digits and ._:@- only, at most 128"
_LINE = re.compile(r"[\x20-\x7e]*")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) ([\x21-\x7e]+) HTTP/1\.1")
_STATUS_LINE = re.compile(r"HTTP/1\.1 ([1-5][0-9][0-9])( .*)?")
_PATH = re.compile(r"/[A-Za-z0-9._~@=+,:/-]{0,511}")
_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
_NONCE = re.compile(r"[0-9a-f]{32}")
_SIGNATURE = re.compile(r"[0-9a-f]{64}")
_QUOTED = re.compile(r'"([0-9a-f]{16})"')
_ANY = re.compile(r"[\x21-\x7e]{1,64}")
_OURS = {
    "holdfast-signature": _SIGNATURE,
    "holdfast-peer": _NAME,
    "holdfast-generation": _NAME,
    "holdfast-incarnation": _NUMBER,
    "holdfast-nonce": _NONCE,
    "holdfast-counter": _NUMBER,
}
_MAY_BE = {"holdfast-challenge": _NONCE, "range": _ANY, "if-match": _QUOTED}


def check_peer(name: str) -> None:
    """UsageError when no host can be meant by this name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a host to its peers{_PLAIN_NAMES}")


def check_names(path: str, generation: str) -> None:
    """UsageError when nothing can be asked for by these."""
    if not _PATH.fullmatch(path):
        raise UsageError(
            f"{path!r} cannot be asked for: give a path that begins with / and has letters, "
            "digits and ._~@=+,:/- only",
            path=path,
        )
    if not _NAME.fullmatch(generation):
        raise UsageError(f"{generation!r} cannot name a generation to peers{_PLAIN_NAMES}")


# ── requests ─────────────────────────────────────────────────────────────────────────────────


def render_request(request: Request, signature: str, host: str) -> bytes:
    """The head of a request; it has no body."""
    lines = [
        f"{request.method} {request.path} HTTP/1.1",
        f"Host: {host}",
        f"Holdfast-Peer: {request.peer}",
        f"Holdfast-Generation: {request.generation}",
        f"Holdfast-Incarnation: {request.incarnation}",
        f"Holdfast-Nonce: {request.nonce}",
        f"Holdfast-Counter: {request.counter}",
        f"Holdfast-Signature: {signature}",
    ]
    if request.span:
        lines.append(f"Range: {request.span}")
    if request.tag:
        lines.append(f'If-Match: "{request.tag}"')
    if request.challenge:
        lines.append(f"Holdfast-Challenge: {request.challenge}")
    return "\r\n".join(lines).encode() + END


def parse_request(raw: bytes, most_headers: int) -> tuple[Request, str] | Refused:
    """(request, its signature) of a head that ends in an empty line, or why it is refused."""
    first, *fields = raw[: -len(END)].decode("latin-1").split("\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if not found:
        return refusals.MALFORMED
    if len(fields) > most_headers:
        return refusals.TOO_LARGE
    headers = _headers(fields)
    if headers is None or "host" not in headers or not _PATH.fullmatch(found[2]):
        return refusals.MALFORMED
    if found[1] not in ("GET", "HEAD"):
        return refusals.METHOD
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        return refusals.BODY
    return _signed(found[1], found[2], headers)


def _signed(method: str, path: str, headers: dict[str, str]) -> tuple[Request, str] | Refused:
    if not _OURS.keys() <= headers.keys():
        return refusals.UNSIGNED
    for name, form in (_OURS | _MAY_BE).items():
        if name in headers and not form.fullmatch(headers[name]):
            return refusals.MALFORMED
    request = Request(
        method=method,
        peer=headers["holdfast-peer"],
        path=path,
        generation=headers["holdfast-generation"],
        incarnation=int(headers["holdfast-incarnation"]),
        nonce=headers["holdfast-nonce"],
        counter=int(headers["holdfast-counter"]),
        challenge=headers.get("holdfast-challenge", ""),
        span=headers.get("range", ""),
        tag=headers.get("if-match", "").strip('"'),
    )
    return request, headers["holdfast-signature"]


def span_of(text: str, length_bytes: int) -> tuple[int, int] | None:
    """(start, stop) that a range asks for, all of it without one; None: not there as a whole.

    Peers know what they ask for: a range that reaches beyond the end is wrong, not shortened.
    """
    if not text:
        return 0, length_bytes
    found = _RANGE.fullmatch(text)
    if not found:
        return None
    start, stop = int(found[1]), int(found[2]) + 1
    return (start, stop) if start < stop <= length_bytes else None


# ── answers ──────────────────────────────────────────────────────────────────────────────────


def render_answer(answer: Answer, signature: str = "", *, is_last: bool = False) -> bytes:
    """The head of an answer; ``is_last``: the connection ends after it."""
    lines = [
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
        f"Content-Length: {answer.length_bytes}",
        "Accept-Ranges: bytes",
        f"Holdfast-Incarnation: {answer.incarnation}",
    ]
    if answer.span:
        lines.append(f"Content-Range: bytes {answer.span}")
    if answer.tag:
        lines.append(f'ETag: "{answer.tag}"')
    if answer.digest:
        lines.append(f"Holdfast-Digest: {answer.digest}")
    if answer.challenge:
        lines.append(f"Holdfast-Challenge: {answer.challenge}")
    if answer.status == HTTPStatus.UNAUTHORIZED:
        lines.append("WWW-Authenticate: Holdfast")
    if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    if signature:
        lines.append(f"Holdfast-Signature: {signature}")
    if is_last:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode() + END


def parse_answer(raw: bytes) -> tuple[Answer, str] | None:
    """(answer, its signature, "" without one); None when it is no answer of a peer at all.

    Only numbers are looked at: the rest means nothing unless the signature is right.
    """
    first, *fields = raw[: -len(END)].decode("latin-1").split("\r\n")
    found = _STATUS_LINE.fullmatch(first)
    headers = _headers(fields)
    if not found or headers is None:
        return None
    length, incarnation = headers.get("content-length"), headers.get("holdfast-incarnation", "0")
    if length is None or not (_NUMBER.fullmatch(length) and _NUMBER.fullmatch(incarnation)):
        return None
    answer = Answer(
        status=int(found[1]),
        incarnation=int(incarnation),
        length_bytes=int(length),
        span=headers.get("content-range", "").removeprefix("bytes "),
        tag=headers.get("etag", "").strip('"'),
        digest=headers.get("holdfast-digest", ""),
        challenge=headers.get("holdfast-challenge", ""),
    )
    return answer, headers.get("holdfast-signature", "")


def _headers(lines: list[str]) -> dict[str, str] | None:
    """By name in small letters; None when a line is none, or comes twice."""
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        is_plain = _LINE.fullmatch(line) and _TOKEN.fullmatch(name)
        if not (colon and is_plain) or name in found:
            return None
        found[name] = value.strip(" ")
    return found
