"""Sends single requests to a bucket: base class of all clients, and how a request can end.

What is a cloud's own is in the classes below: how a request is signed and its condition said, and
the shapes of lists and of uploads in parts. The store above knows none of it. What is not known
stays so here: an answer that was lost makes an ``Outcome`` that says it, and the store decides by
reading back.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import StorageError
from holdfast.policy.arguments import bytes_per_second
from holdfast.storage.checksums import Body
from holdfast.storage.http_client import Answer, Connections, NoAnswer, Server
from holdfast.storage.wrap import BUSY, Patience, RateLimit, RequestCounts, renew_in_child

RATE_VARIABLE = "HOLDFAST_BUCKET_BYTES_S"
#: A request that is signed with its time is refused 15 minutes after that by the server's clock,
#: behind which ours may be as much ahead; nothing of ours lands later.
SETTLE_S = 2 * 900.0 + 60.0
_REMOVERS = 8
#: What a request that removes many objects is noted as, where it may land later.
BULK = "POST delete "
_OPERATIONS = frozenset({"uploads", "uploadId", "list-type", "delete", "compose"})


#: Answers that blame the request for what happened to it on the way.
ON_THE_WAY = frozenset({"RequestTimeout", "BadDigest", "Md5Mismatch", "Crc64Mismatch"})
NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})


class Outcome(Struct, frozen=True):
    """What came of a request, after all its tries.

    ``is_first_try``: False where an earlier try may have had its effect. ``status`` 0: no answer,
    or none but that the server is busy: whether it had its effect is not known. ``is_stale``: a
    connection that had been kept failed, so a new one may well do. 412: what the condition asked
    for is not so. The header "etag" is what later conditions name.
    """

    status: int
    code: str = ""
    message: str = ""
    headers: Mapping[str, str] | None = None
    body: bytes = b""
    size_bytes: int = 0
    is_first_try: bool = True
    is_stale: bool = False

    @property
    def is_done(self) -> bool:
        """True for an answer of success."""
        return 200 <= self.status < 300

    @property
    def is_absent(self) -> bool:
        """True where there is a bucket, and no such object in it."""
        return self.status == 404 and self.code not in NO_BUCKET

    @property
    def may_be_tried_again(self) -> bool:
        """True where the same request may succeed later."""
        return not self.status or self.status in BUSY or self.code in ON_THE_WAY

    def header(self, name: str) -> str:
        """Returns a header of the answer."""
        return (self.headers or {}).get(name, "")


class Part(Struct, frozen=True):
    """A part of an unfinished upload. ``checksum``: header and value, where the server keeps it."""

    number: int
    etag: str
    size_bytes: int = 0
    checksum: tuple[str, str] = ("", "")


class Upload(Struct, frozen=True):
    """An upload that was begun and not yet ended."""

    key: str
    id: str


@dataclass(frozen=True, slots=True)
class Signed:
    """A request as it is sent. ``hidden_in`` returns a text without anything of its credentials."""

    target: str = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    hidden_in: Callable[[str], str]


class Bucket(ABC):
    """One bucket. Safe from several threads and in forked children; keys are whole."""

    settle_s = SETTLE_S
    """For how long a request may still take its effect that nobody answered."""
    advice: ClassVar[Mapping[str, str]] = {}
    """What to do, by the code of an error or its status."""
    reach_advice = "look whether the server can be reached and is well"

    def __init__(
        self,
        name: str,
        url: str,
        server: Server,
        *,
        patience: Patience | None,
        answer_s: float,
        ca_file: str = "",
    ) -> None:
        self.name, self.url = name, url
        self.server = server.name
        self.patience = patience or Patience()
        self.traffic = RequestCounts(url)
        self._connections = Connections(server, answer_s=answer_s, ca_file=ca_file)
        self._lock = threading.Lock()
        renew_in_child(self)
        self._rate = RateLimit(bytes_per_second(RATE_VARIABLE, os.environ.get(RATE_VARIABLE, "")))
        self.guard: Callable[[], None] = lambda: None
        """Called before every try of a request that changes something; raises to refuse it."""
        self._unanswered: dict[str, float] = {}
        """When the last change was tried that may land later, by its kind and what is above its
        key: "DELETE root/pins/".
        """
        self._under_way: Counter[tuple[int, str]] = Counter()
        """How many such changes each process has sent and not seen the end of."""

    def in_child(self) -> None:
        """Makes a new lock."""
        self._lock = threading.Lock()

    def unanswered_s(self, above: tuple[str, ...] = ("",)) -> float:
        """When the last try of a change was made that may have its effect later, of those that
        begin with one of these: the kind and the key.
        """
        process = os.getpid()
        with self._lock:
            begun = (at for (pid, at), count in self._under_way.items() if count and pid == process)
            if any(at.startswith(above) for at in begun):
                return time.monotonic()
            times = (at_s for at, at_s in self._unanswered.items() if at.startswith(above))
            return max(times, default=-math.inf)

    # What is a cloud's own.

    @abstractmethod
    def _signed(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: Body,
    ) -> Signed:
        """Signs a request with the credentials of this moment."""

    @abstractmethod
    def _is_expired(self, outcome: Outcome) -> bool:
        """True where the credentials were refused that may be found anew."""

    @abstractmethod
    def _renew_credentials(self) -> None:
        """Has the credentials found anew."""

    @abstractmethod
    def _outcome(self, kind: str, answer: Answer) -> Outcome:
        """Reads an answer."""

    def _condition(self, *, if_none: bool, if_match: str) -> dict[str, str]:
        """Returns the headers that say the condition of a write."""
        headers = {"if-none-match": "*"} if if_none else {}
        return headers | ({"if-match": if_match} if if_match else {})

    @abstractmethod
    def checksum(self, body: Body) -> tuple[str, str]:
        """Returns the header with the checksum of a body that this server compares."""

    @abstractmethod
    def keys(self, prefix: str) -> Iterator[str]:
        """Yields every key that begins with ``prefix``."""

    def names(self, prefix: str) -> Iterator[str]:
        """Yields what follows ``prefix``, up to the next "/", of every key."""
        return (name for name, _ in self.tagged_names(prefix))

    @abstractmethod
    def tagged_names(self, prefix: str, end: str = "/") -> Iterator[tuple[str, str]]:
        """Yields what follows ``prefix``, up to the next ``end``, of every key; with what another
        content of the object would change, "" for what goes on and where the server says nothing.
        """

    @abstractmethod
    def youngest_s(self, prefix: str) -> float:
        """Returns how long ago the newest object below ``prefix`` was written, by the server's own
        clock; infinity where there is none, 0 where it does not say so.
        """

    @abstractmethod
    def begin_upload(self, key: str) -> str:
        """Begins an upload and returns its id."""

    @abstractmethod
    def put_part(
        self, key: str, upload: str, number: int, body: Body, checksum: tuple[str, str]
    ) -> Outcome:
        """Sends one part; ``checksum`` is what ``checksum`` returned for it."""

    @abstractmethod
    def end_upload(
        self, key: str, upload: str, parts: Iterable[Part], *, if_match: str = ""
    ) -> Outcome:
        """Makes the object of its parts, where there is none of this name, or the one with this
        tag.
        """

    @abstractmethod
    def abort_upload(self, key: str, upload: str) -> Outcome:
        """Ends an upload and removes its parts; one that is not there is fine."""

    @abstractmethod
    def uploads(self, prefix: str) -> list[Upload]:
        """Returns the unfinished uploads of keys that begin with ``prefix``."""

    @abstractmethod
    def parts(self, upload: Upload) -> list[Part]:
        """Returns the parts of an unfinished upload that the server has."""

    def is_begun(self, upload: Upload) -> bool:
        """True while an upload has not become an object, and was not ended otherwise."""
        return upload in self.uploads(upload.key)

    # Objects.

    def get(
        self, key: str, first: int = 0, last: int | None = None, into: memoryview | None = None
    ) -> Outcome:
        """Reads an object, or its bytes from ``first`` to ``last``, both included."""
        is_range = first or last is not None
        headers = {"range": f"bytes={first}-{'' if last is None else last}"} if is_range else {}
        return self.send("GET", key, headers=headers, into=into)

    def head(self, key: str) -> Outcome:
        """Looks an object up."""
        return self.send("HEAD", key)

    def put(self, key: str, body: Body, *, if_none: bool = False, if_match: str = "") -> Outcome:
        """Writes an object whole. ``if_none``: only where there is none; ``if_match``: only in the
        place of the one with this tag.
        """
        condition = self._condition(if_none=if_none, if_match=if_match)
        headers = {**condition, **dict([self.checksum(body)])}
        return self.send("PUT", key, headers=headers, body=body)

    def delete(self, key: str) -> Outcome:
        """Removes an object; a missing one is fine."""
        outcome = self.send("DELETE", key)
        return replace(outcome, status=204) if outcome.is_absent else outcome

    def delete_many(self, keys: Sequence[str]) -> None:
        """Removes objects, each whatever came of the others. StorageError names one that stays, and
        is ``retryable`` where the server did not say of each of these that it does.
        """
        if not keys:
            return
        with ThreadPoolExecutor(min(_REMOVERS, len(keys))) as pool:
            outcomes = list(pool.map(self.delete, keys))
        of_all = zip(keys, outcomes, strict=True)
        # What may yet go before what is refused: nothing is named while that is not known.
        for key, outcome in sorted(of_all, key=lambda one: not one[1].may_be_tried_again):
            self.require(outcome, "removal", key)

    # One request, tried again where that may help.

    def send(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body = (),
        into: memoryview | None = None,
    ) -> Outcome:
        """Sends a request until it is answered or the patience is over. Each try is signed, then
        allowed by ``guard``, then sent.
        """
        query, headers = query or {}, headers or {}
        size_bytes = sum(len(piece) for piece in body)
        kind = _kind(method, query)
        request = kind, method, key, query, headers, body, into
        is_first, is_renewed, last = True, False, Outcome(0)
        for number in self.patience.pauses():
            if number > 1:
                self.traffic.again(kind, last.message or last.code or f"status {last.status}")
            for is_new in (False, True):  # at once over a new connection where a kept one failed
                self._rate.wait(size_bytes)
                last, may_have_effect = self._try_noted(*request, is_new=is_new)
                is_first = is_first and not may_have_effect
                if not last.is_stale:
                    break
                self.traffic.again(kind, last.message, is_told=False)
            if not is_renewed and self._is_expired(last):
                self._renew_credentials()
                is_renewed = True
            elif not last.may_be_tried_again:
                break
        if is_first and last.is_done:
            return last
        is_known = last.status and last.status not in BUSY
        return replace(last, status=last.status if is_known else 0, is_first_try=is_first)

    def _try_noted(
        self,
        kind: str,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: Body,
        into: memoryview | None,
        *,
        is_new: bool,
    ) -> tuple[Outcome, bool]:
        """As ``_try``; a change counts as unanswered unless its answer came, also if it raises."""
        if method in ("GET", "HEAD"):
            return self._try(kind, method, key, query, headers, body, into, is_new=is_new)
        above, may_have_effect = f"{kind} {key[: key.rfind('/') + 1]}", True
        begun = os.getpid(), above
        with self._lock:
            self._under_way[begun] += 1
        try:
            outcome, may_have_effect = self._try(
                kind, method, key, query, headers, body, into, is_new=is_new
            )
            return outcome, may_have_effect
        finally:
            if may_have_effect:
                self.note_unanswered(above)
            with self._lock:
                self._under_way[begun] -= 1
                if not self._under_way[begun]:
                    del self._under_way[begun]

    def note_unanswered(self, above: str) -> None:
        """Notes that a change may land later, from now on for as long as the server takes it."""
        with self._lock:
            now_s, before = time.monotonic(), self._unanswered.items()
            may_land = {at: at_s for at, at_s in before if at_s + self.settle_s > now_s}
            self._unanswered = may_land | {above: now_s}

    def _try(
        self,
        kind: str,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: Body,
        into: memoryview | None,
        *,
        is_new: bool = False,
    ) -> tuple[Outcome, bool]:
        """Returns what came of one try, and whether it may have had its effect unanswered.

        ``is_new``: over a new connection.
        """
        size_bytes = sum(len(piece) for piece in body)
        signed = self._signed(method, key, query, headers, body)
        if size_bytes or method in ("PUT", "POST"):
            signed.headers["content-length"] = str(size_bytes)
        self.require_allowed(method)  # at the very last: to hash a large body takes long
        try:
            answer = self._connections.send(
                method, signed.target, signed.headers, body, into, is_new=is_new
            )
        except NoAnswer as error:
            reason = signed.hidden_in(str(error))
            return Outcome(0, "", reason, is_stale=error.is_stale), error.is_sent
        self.traffic.count(kind, size_bytes, answer.size_bytes + len(answer.body))
        outcome = self._outcome(kind, answer)
        may_have_effect = not outcome.status or outcome.status >= 500
        if outcome.message:
            outcome = replace(outcome, message=signed.hidden_in(outcome.message))
        return outcome, may_have_effect

    def require_allowed(self, method: str) -> None:
        """Raises what ``guard`` raises, for a request that changes something."""
        if method not in ("GET", "HEAD"):
            self.guard()

    # Errors.

    def require(self, outcome: Outcome, operation: str, key: str) -> None:
        """Raises StorageError unless the request succeeded."""
        if not outcome.is_done:
            raise self.failure(outcome, operation, key)

    def failure(self, outcome: Outcome, operation: str, key: str) -> StorageError:
        """Returns the error for a request that did not succeed."""
        where = f"{operation} of {key} in {self.url}" if key else f"{operation} in {self.url}"
        if not outcome.status:
            reason = outcome.message or outcome.code or "the server is busy"
            text = (
                f"{where} failed: {reason}. It was tried for {self.patience.total_s:.0f} s; "
                f"{self.reach_advice}."
            )
        else:
            code = outcome.code or f"status {outcome.status}"
            said = f": {outcome.message}" if outcome.message else ""
            text = f"{where} failed: {code}{said}. {self._advice(outcome)}".rstrip()
        error = StorageError(text, operation=operation, path=key, url=self.url, errno=0)
        error.retryable = outcome.may_be_tried_again
        return error

    def _advice(self, outcome: Outcome) -> str:
        other = f"`holdfast doctor {self.url}` shows what this server can do."
        return self.advice.get(outcome.code) or self.advice.get(str(outcome.status), other)


def _kind(method: str, query: Mapping[str, str]) -> str:
    if "comp" in query:
        return f"{method} {query['comp']}"
    names = [name for name in query if name in _OPERATIONS]
    return f"{method} {names[0]}" if names else method
