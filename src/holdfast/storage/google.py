"""Speaks to a bucket of Google Cloud Storage, by its XML API.

A condition names the generation of an object. Uploads in parts take no condition there, so one is
completed under a name of its own below its key, and then named by a composition of this one object,
which takes a condition.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from holdfast.storage import checksums
from holdfast.storage.bucket import Outcome, Part, Signed, Upload
from holdfast.storage.checksums import Body
from holdfast.storage.google_identity import server, token_source
from holdfast.storage.http_client import Answer, refuse_plain
from holdfast.storage.listings import escaped
from holdfast.storage.signing import encoded_path, encoded_query
from holdfast.storage.tokens import LEAST_SETTLE_S
from holdfast.storage.wrap import Patience
from holdfast.storage.xml_bucket import XmlBucket

#: For so long a completion is waited for whose answer was lost.
COMPLETION_S = 300.0
_RIGHT = "Give this account the right to do that on this bucket (Storage Object Admin)."
_ADVICE = {
    "NoSuchBucket": "Make the bucket, or correct its name.",
    "AccessDenied": _RIGHT,
    "UserProjectAccountProblem": "Look at the project's billing account.",
    "401": "Correct or renew the credentials.",
    "403": _RIGHT,
}
#: What follows an image's key in that of an upload, with letters that no other upload has.
_PARTS = "/.parts-"
_LETTERS = re.compile(r"[0-9a-f]{12}")


class GoogleBucket(XmlBucket):
    """One bucket, with the credentials of the environment."""

    advice = _ADVICE
    settle_s = LEAST_SETTLE_S

    def __init__(
        self, name: str, url: str, *, patience: Patience | None = None, answer_s: float = 60.0
    ) -> None:
        address = server()
        super().__init__(name, url, address, patience=patience, answer_s=answer_s)
        self._tokens = token_source()
        if self._tokens is not None:
            refuse_plain(address, "The token of an account")

    def _signed(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: Body,
    ) -> Signed:
        target = encoded_path(f"/{self.name}/{key}" if key else f"/{self.name}")
        target += f"?{encoded_query(query)}" if query else ""
        all_ = {"host": self.server, **headers}
        if self._tokens is None:
            return Signed(target, all_, lambda text: text)
        token = self._tokens.current().text
        self.settle_s = self._tokens.settle_s
        all_["authorization"] = f"Bearer {token}"
        return Signed(target, all_, lambda text: text.replace(token, "***"))

    def _is_expired(self, outcome: Outcome) -> bool:
        return outcome.status == 401

    def _renew_credentials(self) -> None:
        if self._tokens is not None:
            self._tokens.forget()

    def _condition(self, *, if_none: bool, if_match: str) -> dict[str, str]:
        if if_none:
            return {"x-goog-if-generation-match": "0"}
        return {"x-goog-if-generation-match": if_match} if if_match else {}

    def _outcome(self, kind: str, answer: Answer) -> Outcome:
        outcome = super()._outcome(kind, answer)
        generation = outcome.header("x-goog-generation")
        if not generation:
            return outcome
        return replace(outcome, headers={**(outcome.headers or {}), "etag": generation})

    def checksum(self, body: Body) -> tuple[str, str]:
        found = checksums.crc32c(body)
        if found is not None:
            return "x-goog-hash", f"crc32c={checksums.text(found.to_bytes(4, 'big'))}"
        return "content-md5", checksums.text(checksums.md5(body))

    # Uploads in parts. An id says the letters of the name of its object, too.

    def begin_upload(self, key: str) -> str:
        letters = secrets.token_hex(6)
        return f"{letters}:{super().begin_upload(f'{key}{_PARTS}{letters}')}"

    def put_part(
        self, key: str, upload: str, number: int, body: Body, checksum: tuple[str, str]
    ) -> Outcome:
        below, id_ = _below(key, upload)
        return super().put_part(below, id_, number, body, checksum)

    def end_upload(
        self, key: str, upload: str, parts: Iterable[Part], *, if_match: str = ""
    ) -> Outcome:
        below, id_ = _below(key, upload)
        made = self._end(below, id_, parts, {})
        if not made.is_done:
            if made.is_first_try and made.status:
                return made
            if not self._comes_to_be(below):  # nobody else has this name
                return replace(made, is_first_try=False)
        condition = self._condition(if_none=not if_match, if_match=if_match)
        named = self._name(key, below, condition)
        if named.is_done:
            self.delete(below)
        return named

    def _comes_to_be(self, key: str) -> bool:
        """Looks for an object whose completion nobody answered: it may take minutes."""
        patience = Patience(total_s=min(COMPLETION_S, 2 * self.patience.total_s), first_s=1.0)
        return any(self.head(key).is_done for _ in patience.pauses())

    def _name(self, key: str, below: str, condition: Mapping[str, str]) -> Outcome:
        """Makes the object ``key`` of the one below it, on a condition."""
        part = f"<Component><Name>{escaped(below)}</Name></Component>"
        body = f"<ComposeRequest>{part}</ComposeRequest>".encode()
        headers = {**condition, "content-type": "text/xml"}
        outcome = self.send("PUT", key, query={"compose": ""}, headers=headers, body=[body])
        if outcome.is_done or (outcome.is_first_try and outcome.status):
            return outcome
        self._comes_to_be(key)
        there = self.head(key)
        is_same = there.is_done and _is_same(there, self.head(below))
        return there if is_same else replace(outcome, is_first_try=False)

    def abort_upload(self, key: str, upload: str) -> Outcome:
        below, id_ = _below(key, upload)
        outcome = super().abort_upload(below, id_)
        if below == key or not (outcome.is_done or outcome.status == 404):
            return outcome
        return self.delete(below)  # it may have been completed

    def uploads(self, prefix: str) -> list[Upload]:
        found = []
        for one in super().uploads(prefix):
            key, _, letters = one.key.rpartition(_PARTS)
            is_ours = _LETTERS.fullmatch(letters)
            found.append(Upload(key, f"{letters}:{one.id}") if is_ours else one)
        return found

    def is_begun(self, upload: Upload) -> bool:
        below, _ = _below(upload.key, upload.id)
        return super().is_begun(upload) or self.head(below).is_done

    def parts(self, upload: Upload) -> list[Part]:
        return super().parts(Upload(*_below(upload.key, upload.id)))


def _below(key: str, upload: str) -> tuple[str, str]:
    """Returns the key under which an upload was begun, and its id there."""
    letters, _, id_ = upload.partition(":")
    is_ours = _LETTERS.fullmatch(letters)
    return (f"{key}{_PARTS}{letters}", id_) if is_ours else (key, upload)


def _is_same(one: Outcome, other: Outcome) -> bool:
    """True for two objects of the same bytes, by their checksum."""
    names = ("content-length", "x-goog-hash")
    return all(one.header(name) and one.header(name) == other.header(name) for name in names)
