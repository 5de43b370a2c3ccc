"""PURE. What two keepers of a run say over one connection: sealed, in order, each thing once.

Both sides know the run's secret. They first tell each other a nonce, their names and the
incarnation, and prove over all of it that they know the secret; from it each direction gets a key
of its own. A frame is ``length | body | seal``; the seal is over a count that is never sent, the
length and the body. So a frame that is forged, changed, left out, repeated or moved breaks the
line, one of another line or of the other direction too.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from holdfast.errors import FormatError

MAGIC = b"holdfast-control-1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
SEAL_BYTES = 16
LENGTH_BYTES = 4
MOST_NAME_BYTES = 128
MOST_HELLO_BYTES = len(MAGIC) + NONCE_BYTES + 8 + 2 + 2 * MOST_NAME_BYTES
_HEAD = struct.Struct("<QBB")  # incarnation, lengths of the caller's name and of who is meant
_COUNT = struct.Struct("<QI")
_ACCEPTED, _OLDER, _NEWER, _ANOTHER = b"y", b"o", b"n", b"a"
VERDICTS = {
    _OLDER: "it serves a newer incarnation",
    _NEWER: "it still serves an older incarnation",
    _ANOTHER: "it goes by another name",
}


@dataclass(frozen=True, slots=True)
class Hello:
    """Who calls, whom it means, and the incarnation that it is of."""

    nonce: bytes
    name: str
    peer: str
    incarnation: int

    def pack(self) -> bytes:
        """As it is sent; the proof follows."""
        name, peer = self.name.encode(), self.peer.encode()
        return MAGIC + self.nonce + _HEAD.pack(self.incarnation, len(name), len(peer)) + name + peer


FIXED_HELLO_BYTES = len(MAGIC) + NONCE_BYTES + _HEAD.size


def rest_of_hello(fixed: bytes) -> int:
    """How many bytes of names follow. FormatError when this is no hello of ours."""
    if len(fixed) != FIXED_HELLO_BYTES or not fixed.startswith(MAGIC):
        raise FormatError("what calls is no keeper, or one of another version")
    _, name, peer = _HEAD.unpack(fixed[len(MAGIC) + NONCE_BYTES :])
    if max(name, peer) > MOST_NAME_BYTES:
        raise FormatError("a keeper calls by a name that is too long")
    return int(name + peer)


def parse_hello(fixed: bytes, names: bytes) -> Hello:
    """The hello in these bytes. FormatError when its names are none."""
    incarnation, name, _ = _HEAD.unpack(fixed[len(MAGIC) + NONCE_BYTES :])
    nonce = fixed[len(MAGIC) : len(MAGIC) + NONCE_BYTES]
    try:
        return Hello(nonce, names[:name].decode(), names[name:].decode(), incarnation)
    except UnicodeDecodeError:
        raise FormatError("the name of a keeper that calls is no text") from None


def judge(hello: Hello, *, name: str, incarnation: int) -> bytes:
    """What is answered to a caller that knows the secret: one byte."""
    if hello.peer != name:
        return _ANOTHER
    if hello.incarnation != incarnation:
        return _OLDER if hello.incarnation < incarnation else _NEWER
    return _ACCEPTED


def is_accepted(verdict: bytes) -> bool:
    """Whether the line stands."""
    return verdict == _ACCEPTED


class Keys:
    """What follows from the secret for one line alone, of these two nonces and this hello."""

    def __init__(self, secret: bytes, server_nonce: bytes, hello: Hello) -> None:
        self._secret = secret
        self._said = server_nonce + hello.pack()

    def caller_proof(self) -> bytes:
        """Shows that the caller knows the secret."""
        return self._mac(b"caller")

    def server_proof(self, verdict: bytes) -> bytes:
        """Shows that the server does, and that ``verdict`` is its own."""
        return self._mac(b"server" + verdict)

    def to_server(self) -> Seals:
        """For what the caller says."""
        return Seals(self._mac(b"to server"))

    def to_caller(self) -> Seals:
        """For what the server says."""
        return Seals(self._mac(b"to caller"))

    def _mac(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, MAGIC + purpose + b"\n" + self._said, "sha256")


class Seals:
    """The seals of one direction, each for its own place in the order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, body: bytes) -> bytes:
        """The seal of the next frame, which has this body."""
        head = _COUNT.pack(self._count, len(body))
        self._count += 1
        return hmac.digest(self._key, head + body, "sha256")[:SEAL_BYTES]

    def frame(self, body: bytes) -> bytes:
        """The next frame, as it is sent."""
        return len(body).to_bytes(LENGTH_BYTES, "little") + body + self.next(body)


def is_same(given: bytes, expected: bytes) -> bool:
    """Whether two proofs are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(given, expected)
