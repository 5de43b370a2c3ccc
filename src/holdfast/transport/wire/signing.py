"""PURE. Only who holds the run's secret is answered, and only what such a one says is believed.

A signature is HMAC-SHA256 over lines of text, of which the first says what they are: a request
cannot be passed off as an answer. No line holds a line break (``wire`` lets none through), so no
two different requests have the same text. The text of an answer begins with the signature of the
request, and so with all that was asked: it answers nothing else.

The bytes of a file are not signed, they are too many: a change of them is found by the block
checksums of the image, which are no signature. A document is: its digest is in its answer.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from holdfast.errors import UsageError

LEAST_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, by whom, and of whom."""

    method: str
    peer: str
    """The name of the server that is meant: another one refuses."""
    path: str
    generation: str
    """Of the bytes asked for. Not the asker's: a run restores what is older than itself."""
    incarnation: int
    """The asker's: of an older one than the server's, it is fenced."""
    nonce: str
    """Names the asker: one for each client, never used again."""
    counter: int
    challenge: str = ""
    """What the server gave out; "" before it is known."""
    span: str = ""
    """``bytes=FIRST-LAST`` as it stands in the request; "" asks for all of it."""
    tag: str = ""
    """Only if the resource is still this very one."""

    def text(self) -> bytes:
        """What is signed."""
        lines = (
            "holdfast-request-1", self.method, self.peer, self.path, self.span, self.generation,
            self.tag, str(self.incarnation), self.challenge, self.nonce, str(self.counter),
        )  # fmt: skip
        return "\n".join(lines).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says of a request, in front of the bytes."""

    status: int
    incarnation: int = 0
    """The server's: one that is older than the asker's is a zombie, and not believed."""
    length_bytes: int = 0
    span: str = ""
    """``FIRST-LAST/TOTAL``."""
    tag: str = ""
    """Names this resource as it was offered; offered again, it gets another."""
    digest: str = ""
    """SHA-256 of a document, "" for a range of a file."""
    challenge: str = ""

    def text(self, request_signature: str) -> bytes:
        """What is signed, to whom asked with that signature."""
        lines = (
            "holdfast-answer-1", request_signature, str(self.status), str(self.incarnation),
            str(self.length_bytes), self.span, self.tag, self.digest, self.challenge,
        )  # fmt: skip
        return "\n".join(lines).encode()


class Signer:
    """Signs with the secret of the run, and never shows it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) < LEAST_SECRET_BYTES:
            raise UsageError(
                f"the run's secret has {len(secret)} bytes, it needs {LEAST_SECRET_BYTES} or more. "
                "Make one with: head -c 32 /dev/urandom | base64"
            )
        self._secret = bytes(secret)

    def of_request(self, request: Request) -> str:
        """The signature of a request, 64 hexadecimal digits."""
        return hmac.digest(self._secret, request.text(), "sha256").hex()

    def of_answer(self, answer: Answer, request_signature: str) -> str:
        """The signature of the answer to the request with that signature."""
        return hmac.digest(self._secret, answer.text(request_signature), "sha256").hex()


def is_same(given: str, expected: str) -> bool:
    """Whether two signatures are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())


def digest(document: bytes | bytearray) -> str:
    """What stands for a document in the signed text of its answer."""
    return hashlib.sha256(document).hexdigest()
