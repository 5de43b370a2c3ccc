"""PURE. Authenticates the frames of a channel: each frame is sealed, in order, and accepted once.

Both sides know the run's secret. They first exchange a nonce, their names and the incarnation, and
prove over all of it that they know the secret; each direction derives a key of its own from it. A
frame is ``length | body | seal``; the seal covers a frame counter that is never sent, the length
and the body. So a frame that is forged, changed, dropped, repeated or moved breaks the channel, and
so does a frame of another channel or of the other direction.
"""

from __future__ import annotations

import hmac
import struct

from msgspec import Struct

from holdfast.errors import FormatError

MAGIC = b"holdfast-control-4\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
SEAL_BYTES = 16
LENGTH_BYTES = 4
MOST_NAME_BYTES = 128
_HEAD = struct.Struct("<QBB")  # incarnation, lengths of the caller's and the callee's name
_COUNT = struct.Struct("<QI")
_ACCEPTED, _OLDER, _NEWER, _ANOTHER = b"y", b"o", b"n", b"a"
VERDICTS = {
    _OLDER: "it serves a newer incarnation",
    _NEWER: "it still serves an older incarnation",
    _ANOTHER: "it goes by another name",
}


class ChannelHello(Struct, frozen=True):
    """Names the caller, the host it means to reach, and its incarnation."""

    nonce: bytes
    name: str
    peer: str
    incarnation: int

    def pack(self) -> bytes:
        """Encode the hello; the proof follows it."""
        name, peer = self.name.encode(), self.peer.encode()
        return MAGIC + self.nonce + _HEAD.pack(self.incarnation, len(name), len(peer)) + name + peer


FIXED_HELLO_BYTES = len(MAGIC) + NONCE_BYTES + _HEAD.size


def rest_of_hello(fixed: bytes) -> int:
    """Return the length of the names that follow. FormatError for bytes that are no hello."""
    if len(fixed) != FIXED_HELLO_BYTES or not fixed.startswith(MAGIC):
        raise FormatError("what calls is no keeper, or one of another version")
    _, name, peer = _HEAD.unpack(fixed[len(MAGIC) + NONCE_BYTES :])
    if max(name, peer) > MOST_NAME_BYTES:
        raise FormatError("a keeper calls by a name that is too long")
    return int(name + peer)


def parse_hello(fixed: bytes, names: bytes) -> ChannelHello:
    """Decode a hello. FormatError when its names are invalid."""
    incarnation, name, _ = _HEAD.unpack(fixed[len(MAGIC) + NONCE_BYTES :])
    nonce = fixed[len(MAGIC) : len(MAGIC) + NONCE_BYTES]
    try:
        return ChannelHello(nonce, names[:name].decode(), names[name:].decode(), incarnation)
    except UnicodeDecodeError:
        raise FormatError("the name of a keeper that calls is no text") from None


def judge(hello: ChannelHello, *, name: str, incarnation: int) -> bytes:
    """Return the verdict, one byte, for a caller that knows the secret."""
    if hello.peer != name:
        return _ANOTHER
    if hello.incarnation != incarnation:
        return _OLDER if hello.incarnation < incarnation else _NEWER
    return _ACCEPTED


def is_accepted(verdict: bytes) -> bool:
    """Return whether a verdict opens the channel."""
    return verdict == _ACCEPTED


class Keys:
    """Keys of one channel, derived from the secret, both nonces and the hello."""

    def __init__(self, secret: bytes, server_nonce: bytes, hello: ChannelHello) -> None:
        self._secret = secret
        self._said = server_nonce + hello.pack()

    def caller_proof(self) -> bytes:
        """Proves that the caller knows the secret."""
        return self._mac(b"caller")

    def server_proof(self, verdict: bytes) -> bytes:
        """Proves that the server knows the secret, and that ``verdict`` is its own."""
        return self._mac(b"server" + verdict)

    def to_server(self) -> FrameMac:
        """The key for frames from the caller."""
        return FrameMac(self._mac(b"to server"))

    def to_caller(self) -> FrameMac:
        """The key for frames from the server."""
        return FrameMac(self._mac(b"to caller"))

    def _mac(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, MAGIC + purpose + b"\n" + self._said, "sha256")


class FrameMac:
    """Computes the seals of one direction, one for each frame in order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, body: bytes) -> bytes:
        """Return the seal of the next frame, which has this body."""
        head = _COUNT.pack(self._count, len(body))
        self._count += 1
        return hmac.digest(self._key, head + body, "sha256")[:SEAL_BYTES]

    def frame(self, body: bytes) -> bytes:
        """Return the next frame as it is sent."""
        return len(body).to_bytes(LENGTH_BYTES, "little") + body + self.next(body)


def is_same(given: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(given, expected)
