"""Keeps the token that requests to a cloud carry, and renews it before it ends.

A token is asked for once and used by all threads; a forked child asks anew. Nothing of a token, or
of what it is asked for with, is in a message: an answer is told by its status and its error's name.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from holdfast.errors import StorageError
from holdfast.storage.http_client import Answer, Connections, NoAnswer, Server, refuse_plain
from holdfast.storage.wrap import BUSY, Patience, renew_in_child

#: A token is renewed when it has less than this left, as the clouds' own libraries do.
RENEW_S = 225.0
#: A token does not say when a request was made: one may land for so long at least.
LEAST_SETTLE_S = 3660.0
#: While the token is valid, another is asked for no more often than this.
_AGAIN_S = 30.0
_ANSWER_S = 10.0
_PATIENCE = Patience(total_s=20.0)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")


@dataclass(frozen=True, slots=True)
class Token:
    """What a request carries, and for how many seconds it is valid; it is never shown."""

    text: str = field(repr=False)
    lasts_s: float


class TokenSource:
    """Gives a token that is valid now. Safe from several threads, and after a fork."""

    def __init__(
        self, fetch: Callable[[], Token], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fetch, self._clock = fetch, clock
        self.longest_s = 0.0
        """For how long a token was valid at most: a request that carries it may land until then."""
        self.in_child()
        renew_in_child(self)

    def in_child(self) -> None:
        """Begins without a token: the lock may be held by a thread that is not here."""
        self._lock = threading.Lock()
        self._state = threading.Lock()
        self._token: Token | None = None
        self._ends_s, self._asked_s = 0.0, float("-inf")

    def current(self) -> Token:
        """Returns a valid token. StorageError where none is to be had."""
        token, is_due = self._kept()
        if token is not None and not is_due:
            return token
        # One thread asks, and the others go on with the token that there is.
        if not self._lock.acquire(blocking=token is None):
            assert token is not None
            return token
        try:
            token, is_due = self._kept()  # another may have asked meanwhile
            return self._renewed(token) if token is None or is_due else token
        finally:
            self._lock.release()

    def _kept(self) -> tuple[Token | None, bool]:
        """Returns the token that is valid, and whether another is to be asked for now."""
        with self._state:
            now_s = self._clock()
            token = self._token if now_s < self._ends_s else None
            is_due = self._ends_s - now_s < RENEW_S and now_s - self._asked_s >= _AGAIN_S
            return token, is_due

    def _renewed(self, token: Token | None) -> Token:
        begun_s = self._asked_s = self._clock()
        try:
            found = self._fetch()
        except StorageError:
            if token is None:
                raise
            return token
        with self._state:
            self._token, self._ends_s = found, begun_s + found.lasts_s
            self.longest_s = max(self.longest_s, found.lasts_s)
        return found

    @property
    def settle_s(self) -> float:
        """For how long a request may land that carries a token."""
        return max(LEAST_SETTLE_S, self.longest_s + 60.0)

    def forget(self) -> None:
        """Has the token asked for anew: a server says that it has expired."""
        with self._state:
            self._token = None


def fetch_token(
    method: str,
    url: str,
    *,
    what: str,
    headers: Mapping[str, str] | None = None,
    form: Mapping[str, str] | None = None,
) -> Token:
    """Asks for a token. StorageError, which calls its source ``what``, where there is none."""
    answer = _answer(method, url, what, headers or {}, form)
    try:
        said = json.loads(answer.body)
        if answer.status == 200:
            return Token(str(said["access_token"]), float(said["expires_in"]))
        name = said.get("error", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        name = ""
    shown = name if isinstance(name, str) and _NAME.fullmatch(name) else "no token in its answer"
    raise no_token(what, f"status {answer.status}, {shown}", retryable=answer.status in BUSY)


def fetch_machine_token(url: str, *, what: str, headers: Mapping[str, str], advice: str) -> Token:
    """Asks this machine for a token. StorageError, with ``advice``, where there is none."""
    try:
        return fetch_token("GET", url, what=what, headers=headers)
    except StorageError as error:
        again = StorageError(f"{error} {advice}")
        again.retryable = error.retryable
        raise again from None


def no_token(what: str, why: str, *, retryable: bool = False) -> StorageError:
    """Returns the error for a source that gives no token."""
    error = StorageError(f"{what} gave no token for object stores: {why}.")
    error.retryable = retryable
    return error


def _answer(
    method: str, url: str, what: str, headers: Mapping[str, str], form: Mapping[str, str] | None
) -> Answer:
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise no_token(what, "its address is no URL")
    server = Server(parts.hostname, parts.port or (443 if is_secure else 80), is_secure)
    if form is not None:
        refuse_plain(server, "What proves an identity")
    connections = Connections(server, answer_s=_ANSWER_S)
    body = urlencode(form).encode() if form is not None else b""
    all_ = {"host": server.name, "accept": "application/json", **headers}
    if form is not None:
        all_ |= {
            "content-type": "application/x-www-form-urlencoded",
            "content-length": str(len(body)),
        }
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    found, reason = None, ""
    for _ in _PATIENCE.pauses():
        try:
            found = connections.send(method, target or "/", all_, [body] if body else ())
        except NoAnswer as error:
            reason = type(error.__cause__).__name__
            if not error.is_sent:  # nobody is there: that does not change
                break
            continue
        if found.status not in BUSY:
            break
    if found is None:
        raise no_token(what, f"it cannot be reached ({reason})", retryable=True)
    return found
