"""PURE. Whether a request is served at all: signed, meant for us, of this incarnation, and new.

Nothing here knows the time, so no clock that jumps lets anybody in. Newness comes from two
numbers. Each client counts its requests, and each counter counts once, in any order within
``REACH`` (a client has several connections). And each request is signed over the server's
challenge, a random value that a server makes when it starts and again when it has seen so many
clients that it must forget them: what was signed over an older one is never served again, so a
recorded request finds neither a restarted server nor a forgetful one.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.peers import refusals
from holdfast.peers.refusals import Refused
from holdfast.peers.signing import Request, Signer, is_same

REACH = 1024
"""How far behind the highest counter of a client another of its requests may come in."""
MOST_CLIENTS = 4096
_MASK = (1 << REACH) - 1


class Window:
    """Which counters of one client were used: each counts once."""

    __slots__ = ("_highest", "_used")

    def __init__(self) -> None:
        self._highest, self._used = -1, 0

    def admit(self, counter: int) -> bool:
        """Whether ``counter`` is new; it is used by that."""
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
    """The door of one server. ``mint`` makes random values: 32 hexadecimal digits."""

    def __init__(
        self, signer: Signer, *, name: str, incarnation: int, mint: Callable[[], str],
        most_clients: int = MOST_CLIENTS,
    ) -> None:  # fmt: skip
        self.name, self.incarnation = name, incarnation
        self.challenge = mint()
        self._signer, self._mint, self._most_clients = signer, mint, most_clients
        self._windows: dict[str, Window] = {}

    @property
    def clients(self) -> int:
        """How many it remembers, at most ``most_clients``."""
        return len(self._windows)

    def begin(self, incarnation: int) -> None:
        """From now on whoever is of an older incarnation is fenced. It never goes back."""
        self.incarnation = max(self.incarnation, incarnation)

    def judge(self, request: Request, signature: str) -> Refused | None:
        """Why the request is refused; None when it may be served, and never again."""
        if not is_same(signature, self._signer.of_request(request)):
            return refusals.FORGED
        if request.peer != self.name:
            return refusals.MISDIRECTED
        if request.incarnation != self.incarnation:
            is_older = request.incarnation < self.incarnation
            return refusals.FENCED if is_older else refusals.BEHIND
        if request.challenge != self.challenge:
            return refusals.CHALLENGED
        return self._count(request)

    def _count(self, request: Request) -> Refused | None:
        window = self._windows.get(request.nonce)
        if window is None:
            if len(self._windows) >= self._most_clients:
                # Forgetting one would let its requests in again: all are made void instead.
                self._windows.clear()
                self.challenge = self._mint()
                return refusals.CHALLENGED
            window = self._windows[request.nonce] = Window()
        return None if window.admit(request.counter) else refusals.REPLAYED
