"""PURE. Encodes and parses the strict HTTP/1.1 between peers: heads of requests and answers.

Strict, because signed content must have one form only. Lines end in CRLF, no header comes twice, a
path consists of plain characters, a range has both ends. Anything else is refused, never guessed.
"""

from __future__ import annotations

import re
from http import HTTPStatus

from holdfast.errors import UsageError
from holdfast.format.manifest import Generation
from holdfast.transport.wire import admission as refusals
from holdfast.transport.wire.admission import AdmissionRefused
from holdfast.transport.wire.signing import HttpAnswer, HttpRequest

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
    """Raise UsageError for a name that no host can have."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a host to its peers{_PLAIN_NAMES}")


def check_names(path: str, generation: str) -> None:
    """Raise UsageError for a path or generation that no request can name."""
    if not _PATH.fullmatch(path):
        raise UsageError(
            f"{path!r} cannot be asked for: give a path that begins with / and has letters, "
            "digits and ._~@=+,:/- only",
            path=path,
        )
    if not _NAME.fullmatch(generation):
        raise UsageError(f"{generation!r} cannot name a generation to peers{_PLAIN_NAMES}")


# ── requests ─────────────────────────────────────────────────────────────────────────────────


def render_request(request: HttpRequest, signature: str, host: str) -> bytes:
    """Return the head of a request; requests have no body."""
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


def parse_request(raw: bytes, most_headers: int) -> tuple[HttpRequest, str] | AdmissionRefused:
    """Parse a head that ends in an empty line: (request, its signature), or the refusal."""
    first, *fields = raw[: -len(END)].decode("latin-1").split("\r\n")
    match = _REQUEST_LINE.fullmatch(first)
    if not match:
        return refusals.MALFORMED
    if len(fields) > most_headers:
        return refusals.TOO_LARGE
    headers = _headers(fields)
    if headers is None or "host" not in headers or not _PATH.fullmatch(match[2]):
        return refusals.MALFORMED
    if match[1] not in ("GET", "HEAD"):
        return refusals.METHOD
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        return refusals.BODY
    return _signed(match[1], match[2], headers)


def _signed(
    method: str, path: str, headers: dict[str, str]
) -> tuple[HttpRequest, str] | AdmissionRefused:
    if not _OURS.keys() <= headers.keys():
        return refusals.UNSIGNED
    for name, form in (_OURS | _MAY_BE).items():
        if name in headers and not form.fullmatch(headers[name]):
            return refusals.MALFORMED
    request = HttpRequest(
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
    """Return (start, stop) of the requested range, or the whole without one; None: outside the
    resource.

    A range beyond the end is an error and is not shortened: peers know the size they ask for.
    """
    if not text:
        return 0, length_bytes
    match = _RANGE.fullmatch(text)
    if not match:
        return None
    start, stop = int(match[1]), int(match[2]) + 1
    return (start, stop) if start < stop <= length_bytes else None


# ── answers ──────────────────────────────────────────────────────────────────────────────────


def render_answer(answer: HttpAnswer, signature: str = "", *, is_last: bool = False) -> bytes:
    """Return the head of an answer; ``is_last``: the connection closes after it."""
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


def parse_answer(raw: bytes) -> tuple[HttpAnswer, str] | None:
    """Parse (answer, its signature, "" without one); None when this is no answer of a peer.

    Only the form of numbers is checked: the rest means nothing unless the signature is right.
    """
    first, *fields = raw[: -len(END)].decode("latin-1").split("\r\n")
    match = _STATUS_LINE.fullmatch(first)
    headers = _headers(fields)
    if not match or headers is None:
        return None
    length, incarnation = headers.get("content-length"), headers.get("holdfast-incarnation", "0")
    if length is None or not (_NUMBER.fullmatch(length) and _NUMBER.fullmatch(incarnation)):
        return None
    answer = HttpAnswer(
        status=int(match[1]),
        incarnation=int(incarnation),
        length_bytes=int(length),
        span=headers.get("content-range", "").removeprefix("bytes "),
        tag=headers.get("etag", "").strip('"'),
        digest=headers.get("holdfast-digest", ""),
        challenge=headers.get("holdfast-challenge", ""),
    )
    return answer, headers.get("holdfast-signature", "")


def _headers(lines: list[str]) -> dict[str, str] | None:
    """Return the headers by lower-case name; None for an invalid or repeated one."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        is_plain = _LINE.fullmatch(line) and _TOKEN.fullmatch(name)
        if not (colon and is_plain) or name in headers:
            return None
        headers[name] = value.strip(" ")
    return headers


# PURE. Defines the paths under which keepers offer resources to each other.
#
# Keepers of one run may have two versions, so these paths never change.


INVENTORY = "/inventory"
"""A document: ``holdfast.protocol.messages.Inventory``, as MessagePack."""


CACHE = "/cache"
"""A document: paths and sizes of the files that a host's cache offers, as MessagePack."""


def cache_path(path: str) -> str:
    """A file of a host's cache, by its path there."""
    return f"{CACHE}/{path}"


def generation_name(generation: Generation) -> str:
    """Return the name of a generation in requests."""
    return f"{generation.incarnation}-{generation.step}"


def image_path(attempt: str, rank: int) -> str:
    """A rank's image, from its first byte to its last."""
    return f"/images/{attempt}/{rank}"


def layout_path(hash_: str) -> str:
    """A document: the bytes of a layout."""
    return f"/layouts/{hash_}"


def parity_path(attempt: str, stripe: int, row: int) -> str:
    """The bytes of a parity shard, once it is sealed. A shard without bytes is not offered."""
    return f"/parity/{attempt}/{stripe}/{row}"


def record_path(attempt: str, stripe: int, row: int) -> str:
    """A document: the sealed record of the parity shard."""
    return f"/records/{attempt}/{stripe}/{row}"


def members_path(attempt: str, round_id: int) -> str:
    """A document: a host's images in one parity round, as ``parity.exchange.terms`` lists them."""
    return f"/members/{attempt}/{round_id}"


def manifest_path(attempt: str, round_id: int, stripe: int, row: int) -> str:
    """A document: the manifest of the windows of a parity shard in the making that can be fetched
    now.

    ``round_id``: the number of the round. So a manifest of an earlier round is never mistaken for
    this one.
    """
    return f"/windows/{attempt}/{round_id}/{stripe}/{row}"


def window_path(attempt: str, round_id: int, stripe: int, row: int, window: int) -> str:
    """One window of a parity shard in the making."""
    return f"{manifest_path(attempt, round_id, stripe, row)}/{window}"
