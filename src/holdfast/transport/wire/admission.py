"""PURE. Authenticates requests between keepers; limits their rate and cuts ranges into chunks.

No clock is used, so a clock that jumps admits nobody. Newness follows from two numbers. Each client
counts its requests, and each counter is accepted once, in any order within ``REACH`` (a client has
several connections). And each request is signed over the server's challenge, a random value that
the server makes when it starts, and again when it has seen so many clients that it must forget
them. A request signed over an older challenge is never served again, so a recorded request is
refused by a restarted server and by one that has forgotten clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from holdfast.transport.wire.signing import HttpRequest, Signer, is_same

REACH = 1024
"""The largest distance of an accepted counter behind the highest counter of its client."""
MOST_CLIENTS = 4096
_MASK = (1 << REACH) - 1


class Window:
    """Tracks the used counters of one client: each is accepted once."""

    __slots__ = ("_highest", "_used")

    def __init__(self) -> None:
        self._highest, self._used = -1, 0

    def admit(self, counter: int) -> bool:
        """Return whether ``counter`` is new, and mark it as used."""
        ahead = counter - self._highest
        if ahead > 0:
            self._used = (self._used << ahead | 1) & _MASK if ahead < REACH else 1
            self._highest = counter
            return True
        if -ahead >= REACH or self._used >> -ahead & 1:
            return False
        self._used |= 1 << -ahead
        return True


class Admission:
    """Admission state of one server. ``mint`` makes random values of 32 hexadecimal digits."""

    def __init__(
        self,
        signer: Signer,
        *,
        name: str,
        incarnation: int,
        mint: Callable[[], str],
        most_clients: int = MOST_CLIENTS,
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self.challenge = mint()
        self._signer, self._mint, self._most_clients = signer, mint, most_clients
        self._windows: dict[str, Window] = {}

    @property
    def clients(self) -> int:
        """The number of remembered clients, at most ``most_clients``."""
        return len(self._windows)

    def begin(self, incarnation: int) -> None:
        """From now on refuse older incarnations. The incarnation never goes back."""
        self.incarnation = max(self.incarnation, incarnation)

    def judge(self, request: HttpRequest, signature: str) -> AdmissionRefused | None:
        """Return the reason to refuse the request; None when it may be served, once."""
        if not is_same(signature, self._signer.of_request(request)):
            return FORGED
        if request.peer != self.name:
            return MISDIRECTED
        if request.incarnation != self.incarnation:
            is_older = request.incarnation < self.incarnation
            return FENCED if is_older else BEHIND
        if request.challenge != self.challenge:
            return CHALLENGED
        return self._count(request)

    def _count(self, request: HttpRequest) -> AdmissionRefused | None:
        window = self._windows.get(request.nonce)
        if window is None:
            if len(self._windows) >= self._most_clients:
                # Forgetting one client would admit its requests again: a new challenge voids all
                # instead.
                self._windows.clear()
                self.challenge = self._mint()
                return CHALLENGED
            window = self._windows[request.nonce] = Window()
        return None if window.admit(request.counter) else REPLAYED


# PURE. Lists every refusal of a request, with its counter and its HTTP status.


class AdmissionRefused(msgspec.Struct, frozen=True):
    """A request that is not served."""

    kind: str
    """The counter of this refusal."""
    status: int
    is_known: bool = False
    """The request was signed with our secret: its answer is signed, and the connection stays open.
    """


MALFORMED = AdmissionRefused("malformed", 400)
SLOW = AdmissionRefused("slow", 408)
BODY = AdmissionRefused("body", 413)
METHOD = AdmissionRefused("method", 405)
TOO_LARGE = AdmissionRefused("too_large", 431)
CROWDED = AdmissionRefused("crowded", 503)
UNSIGNED = AdmissionRefused("unsigned", 401)
FORGED = AdmissionRefused("forged", 401)
MISDIRECTED = AdmissionRefused("misdirected", 421, is_known=True)
FENCED = AdmissionRefused("fenced", 403, is_known=True)
BEHIND = AdmissionRefused("behind", 403, is_known=True)
"""The caller belongs to a newer incarnation than this server, which then must not serve."""
CHALLENGED = AdmissionRefused("challenged", 401, is_known=True)
"""Signed over no challenge, or over an old one: the answer brings the current one."""
REPLAYED = AdmissionRefused("replayed", 409, is_known=True)
UNKNOWN = AdmissionRefused("unknown", 404, is_known=True)
WITHDRAWN = AdmissionRefused("withdrawn", 410, is_known=True)
BAD_RANGE = AdmissionRefused("bad_range", 416, is_known=True)

ALL = (
    MALFORMED,
    SLOW,
    BODY,
    METHOD,
    TOO_LARGE,
    CROWDED,
    UNSIGNED,
    FORGED,
    MISDIRECTED,
    FENCED,
    BEHIND,
    CHALLENGED,
    REPLAYED,
    UNKNOWN,
    WITHDRAWN,
    BAD_RANGE,
)


# PURE. Limits the send rate over any period with a token bucket.


LEAST_BYTES = 64 << 10
"""The smallest grant, because less is not worth a system call; a smaller request is granted whole.
"""
BURST_S = 0.05


class TokenBucket:
    """Fills with time, at ``rate_bytes_s`` up to ``burst_bytes``; a rate of None means no limit.

    In any period of ``t`` seconds at most ``burst_bytes + rate_bytes_s * t`` are granted. A clock
    that goes back adds nothing.
    """

    def __init__(self, rate_bytes_s: int | None, now_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s
        self._filled_s = now_s
        self._tokens = float(self.burst_bytes)

    @property
    def burst_bytes(self) -> int:
        """The bytes that may leave at once after a pause."""
        return max(LEAST_BYTES, int((self.rate_bytes_s or 0) * BURST_S))

    def set_rate(self, rate_bytes_s: int | None, now_s: float) -> None:
        """Change the rate from now on."""
        self._fill(now_s)
        self.rate_bytes_s = rate_bytes_s
        self._tokens = min(self._tokens, self.burst_bytes)

    def acquire(self, wanted: int, now_s: float) -> tuple[int, float]:
        """Return (bytes granted, 0), at most ``wanted``; or (0, seconds after which to ask
        again).
        """
        if self.rate_bytes_s is None:
            return wanted, 0.0
        self._fill(now_s)
        least = min(wanted, LEAST_BYTES)
        if self._tokens < least:
            return 0, (least - self._tokens) / self.rate_bytes_s
        granted = int(min(wanted, self._tokens))
        self._tokens -= granted
        return granted, 0.0

    def refund(self, count: int) -> None:
        """Return granted bytes that were not sent."""
        self._tokens = min(self._tokens + count, self.burst_bytes)

    def _fill(self, now_s: float) -> None:
        gone_s, self._filled_s = max(0.0, now_s - self._filled_s), now_s
        gained = gone_s * (self.rate_bytes_s or 0)
        self._tokens = min(self._tokens + gained, self.burst_bytes)


# PURE. Cuts ranges into chunks that keep every connection busy, each byte in exactly one chunk.


PAGE_BYTES = 4096
LEAST_CHUNK_BYTES = 256 << 10
"""The smallest chunk: below this the request takes longer than the bytes."""


class Chunk(msgspec.Struct, frozen=True):
    """Bytes ``start`` to ``stop`` of the range number ``wanted``."""

    wanted: int
    start: int
    stop: int


def cut(lengths: Sequence[int], *, chunk_bytes: int, connections: int) -> list[Chunk]:
    """Cut ranges into about ``connections`` chunks or more, of at most about ``chunk_bytes``, in
    order.

    Chunks of one range differ by two pages at most and begin at whole pages, so no small remainder
    delays the end.
    """
    share = -(-sum(lengths) // max(1, connections))
    size = min(chunk_bytes, max(share, LEAST_CHUNK_BYTES))
    return [chunk for n, length in enumerate(lengths) for chunk in _cut_one(n, length, size)]


def _cut_one(wanted: int, length: int, size: int) -> list[Chunk]:
    count = -(-length // size)
    bounds = [length * n // count // PAGE_BYTES * PAGE_BYTES for n in range(count)] + [length]
    return [Chunk(wanted, start, stop) for start, stop in pairwise(bounds) if start < stop]
