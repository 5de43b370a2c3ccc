"""PURE. Computes the signatures of requests and answers; admission judges them.

A signature is HMAC-SHA256 over lines of text. The first line names the kind: a request cannot be
passed off as an answer. No line contains a line break (``http`` refuses them), so no two different
requests have the same text. The text of an answer begins with the signature of the request, and so
with all that was asked: it answers nothing else.

The bytes of a file are not signed, because they are too many: the block checksums of the image,
which are no signature, detect changes. A document is signed: its digest is in its answer.
"""

from __future__ import annotations

import hashlib
import hmac

from msgspec import Struct

from holdfast.errors import UsageError
from holdfast.format.checksum import Buffer

LEAST_SECRET_BYTES = 16


class HttpRequest(Struct, frozen=True):
    """A request: the resource, the client that asks, and the server that is meant."""

    method: str
    peer: str
    """The name of the server that is meant: another one refuses."""
    path: str
    generation: str
    """The generation of the bytes, not of the client: a run restores older generations."""
    incarnation: int
    """The client's incarnation: if older than the server's, the client is fenced."""
    nonce: str
    """The client's id: one for each client, never used again."""
    counter: int
    challenge: str = ""
    """The server's challenge; "" before it is known."""
    span: str = ""
    """``bytes=FIRST-LAST`` as it stands in the request; "" asks for all of it."""
    tag: str = ""
    """Answer only if the resource still has this tag; "" for any."""

    def text(self) -> bytes:
        """Return the signed text."""
        lines = (
            "holdfast-request-1",
            self.method,
            self.peer,
            self.path,
            self.span,
            self.generation,
            self.tag,
            str(self.incarnation),
            self.challenge,
            self.nonce,
            str(self.counter),
        )
        return "\n".join(lines).encode()


class HttpAnswer(Struct, frozen=True):
    """The head of a server's answer to a request, in front of the bytes."""

    status: int
    incarnation: int = 0
    """The server's incarnation: an answer older than the client's is stale, and not believed."""
    length_bytes: int = 0
    span: str = ""
    """``FIRST-LAST/TOTAL``."""
    tag: str = ""
    """The tag of this offer; offered again, the resource gets another."""
    digest: str = ""
    """SHA-256 of a document, "" for a range of a file."""
    challenge: str = ""

    def text(self, request_signature: str) -> bytes:
        """Return the text signed for the request with that signature."""
        lines = (
            "holdfast-answer-1",
            request_signature,
            str(self.status),
            str(self.incarnation),
            str(self.length_bytes),
            self.span,
            self.tag,
            self.digest,
            self.challenge,
        )
        return "\n".join(lines).encode()


def check_secret(secret: bytes) -> None:
    """Raise UsageError for a secret that is too short."""
    if len(secret) < LEAST_SECRET_BYTES:
        raise UsageError(
            f"the run's secret has {len(secret)} bytes, it needs {LEAST_SECRET_BYTES} or more. "
            "Make one with: head -c 32 /dev/urandom | base64"
        )


class Signer:
    """Signs with the secret of the run, and never shows it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        check_secret(secret)
        self._secret = bytes(secret)

    def of_request(self, request: HttpRequest) -> str:
        """Return the signature of a request, 64 hexadecimal digits."""
        return hmac.digest(self._secret, request.text(), "sha256").hex()

    def of_answer(self, answer: HttpAnswer, request_signature: str) -> str:
        """Return the signature of the answer to the request with that signature."""
        return hmac.digest(self._secret, answer.text(request_signature), "sha256").hex()


def is_same(given: str, expected: str) -> bool:
    """Compare two signatures in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def digest(document: Buffer) -> str:
    """Return the digest of a document, which the signed text of its answer contains."""
    return hashlib.sha256(document).hexdigest()
