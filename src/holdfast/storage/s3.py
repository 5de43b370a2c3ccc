"""Speaks to one bucket by the S3 protocol: single requests, each with its condition and its end.

What is not known stays so here: an answer that was lost makes an ``Outcome`` that says it, and the
store above decides by reading back.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import time
import urllib.parse
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime

from holdfast.errors import StorageError, UsageError
from holdfast.storage.credentials import CredentialSource, region, server_of
from holdfast.storage.http_client import Answer, Connections, NoAnswer
from holdfast.storage.signing import (
    UNSIGNED,
    Body,
    checksum_algorithm,
    encoded_path,
    encoded_query,
    sha256,
    signed_headers,
)
from holdfast.storage.wrap import BUSY, Patience, RateLimit, RequestCounts

UNSIGNED_VARIABLE = "HOLDFAST_BUCKET_UNSIGNED"
RATE_VARIABLE = "HOLDFAST_BUCKET_BYTES_S"
_BULK = 1000
_ADVICE = {
    "NoSuchBucket": "Make the bucket, or correct its name.",
    "AccessDenied": "Give these credentials the right to do that on this bucket.",
    "InvalidAccessKeyId": "Correct the credentials.",
    "SignatureDoesNotMatch": "Correct the credentials.",
    "ExpiredToken": "Renew the credentials.",
    "PermanentRedirect": "Set AWS_REGION to the bucket's region.",
    "AuthorizationHeaderMalformed": "Set AWS_REGION to the bucket's region.",
    "RequestTimeTooSkewed": "Set this machine's clock.",
    "NotImplemented": "This server lacks what a root needs; use another.",
    "QuotaExceeded": "Free some of the quota or keep fewer checkpoints.",
}
#: Answers that blame the request for what happened to it on the way.
_ON_THE_WAY = frozenset({"RequestTimeout", "BadDigest"})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request, after all its tries.

    ``is_first_try``: False where an earlier try may have had its effect. ``status`` 0: no answer,
    or none but that the server is busy: whether it had its effect is not known.
    """

    status: int
    code: str = ""
    message: str = ""
    headers: Mapping[str, str] | None = None
    body: bytes = b""
    size_bytes: int = 0
    is_first_try: bool = True

    @property
    def is_done(self) -> bool:
        """True for an answer of success."""
        return 200 <= self.status < 300

    @property
    def may_be_tried_again(self) -> bool:
        """True where the same request may succeed later."""
        return not self.status or self.status in BUSY or self.code in _ON_THE_WAY

    def header(self, name: str) -> str:
        """Returns a header of the answer."""
        return (self.headers or {}).get(name, "")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an unfinished upload. ``checksum``: header and value, where the server keeps it."""

    number: int
    etag: str
    size_bytes: int = 0
    checksum: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that was begun and not yet ended."""

    key: str
    id: str


class S3Bucket:
    """One bucket. Safe from several threads and in forked children; keys are whole."""

    def __init__(
        self,
        bucket: str,
        url: str,
        *,
        patience: Patience | None = None,
        answer_s: float = 60.0,
    ) -> None:
        self.name, self.url = bucket, url
        self.patience = patience or Patience()
        self.traffic = RequestCounts(url)
        self._region = region()
        server, self._before = server_of(bucket, self._region)
        self._connections = Connections(server, answer_s=answer_s)
        self._credentials = CredentialSource()
        self.server = server.name
        self._is_unsigned = server.is_secure or bool(os.environ.get(UNSIGNED_VARIABLE))
        self._rate = RateLimit(_rate())
        self.guard: Callable[[], None] = lambda: None
        """Called before every try of a request that changes something; raises to refuse it."""
        self.unanswered_s = -math.inf
        """When the last try of a change was made that may have its effect later."""

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
        headers = {"if-none-match": "*"} if if_none else {}
        headers |= {"if-match": if_match} if if_match else {}
        return self.send("PUT", key, headers=headers, body=body)

    def delete(self, key: str, *, if_match: str = "") -> Outcome:
        """Removes an object; a missing one is fine."""
        return self.send("DELETE", key, headers={"if-match": if_match} if if_match else {})

    def delete_many(self, keys: Sequence[str]) -> None:
        """Removes objects, a thousand by one request. StorageError names the first that stays."""
        for start in range(0, len(keys), _BULK):
            some = keys[start : start + _BULK]
            objects = "".join(f"<Object><Key>{_escaped(key)}</Key></Object>" for key in some)
            body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
            md5 = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            query, headers = {"delete": ""}, {"content-md5": md5, "content-type": "text/xml"}
            outcome = self.send("POST", "", query=query, headers=headers, body=[body])
            self.require(outcome, "removal", some[0])
            for failed in _parsed(outcome.body).iter("Error"):
                code, message = _text(failed, "Code"), _text(failed, "Message")
                if code != "NoSuchKey":
                    found = Outcome(400, code, message)
                    raise self.failure(found, "removal", _text(failed, "Key"))

    def keys(self, prefix: str) -> Iterator[str]:
        """Yields every key that begins with ``prefix``."""
        for page in self._pages({"list-type": "2", "prefix": prefix, "encoding-type": "url"}):
            yield from (_decoded(_text(one, "Key")) for one in page.iter("Contents"))

    def names(self, prefix: str) -> Iterator[str]:
        """Yields what follows ``prefix``, up to the next "/", of every key."""
        query = {"list-type": "2", "prefix": prefix, "delimiter": "/", "encoding-type": "url"}
        for page in self._pages(query):
            for one in page.iter("Contents"):
                yield _decoded(_text(one, "Key"))[len(prefix) :]
            for one in page.iter("CommonPrefixes"):
                yield _decoded(_text(one, "Prefix"))[len(prefix) :].rstrip("/")

    def youngest_s(self, prefix: str) -> float:
        """Returns how long ago the newest object below ``prefix`` was written, by the server's own
        clock; infinity where there is none, 0 where it does not say so.
        """
        found = math.inf
        for page, answer in self._answers({"list-type": "2", "prefix": prefix}):
            for one in page.iter("Contents"):
                found = min(found, _age_s(_text(one, "LastModified"), answer.header("date")))
        return found

    def _pages(self, query: dict[str, str]) -> Iterator[xml.Element]:
        return (page for page, _ in self._answers(query))

    def _answers(self, query: dict[str, str]) -> Iterator[tuple[xml.Element, Outcome]]:
        while True:
            outcome = self.send("GET", "", query=query)
            self.require(outcome, "list", query["prefix"])
            page = _parsed(outcome.body, "ListBucketResult")
            yield page, outcome
            following = _following(page, query, {"continuation-token": "NextContinuationToken"})
            if not following:
                return
            query = {**query, **following}

    # Uploads in parts.

    def begin_upload(self, key: str) -> str:
        """Begins an upload and returns its id."""
        headers = {"x-amz-checksum-algorithm": checksum_algorithm()}
        if checksum_algorithm() == "CRC64NVME":
            headers["x-amz-checksum-type"] = "FULL_OBJECT"
        outcome = self.send("POST", key, query={"uploads": ""}, headers=headers)
        self.require(outcome, "create", key)
        return _text(_parsed(outcome.body, "InitiateMultipartUploadResult"), "UploadId")

    def put_part(
        self, key: str, upload: str, number: int, body: Body, checksum: tuple[str, str]
    ) -> Outcome:
        """Sends one part; ``checksum`` is what ``checksum_header`` returned for it."""
        query = {"partNumber": str(number), "uploadId": upload}
        return self.send("PUT", key, query=query, headers=dict([checksum]), body=body)

    def end_upload(
        self, key: str, upload: str, parts: Iterable[Part], *, if_match: str = ""
    ) -> Outcome:
        """Makes the object of its parts, where there is none of this name, or the one with this
        tag.
        """
        listed = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber><ETag>{_escaped(part.etag)}</ETag>"
            f"{_checksum_element(part)}</Part>"
            for part in parts
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        condition = {"if-match": if_match} if if_match else {"if-none-match": "*"}
        headers = condition | {"content-type": "text/xml"}
        return self.send("POST", key, query={"uploadId": upload}, headers=headers, body=[body])

    def abort_upload(self, key: str, upload: str) -> Outcome:
        """Ends an upload and removes its parts; one that is not there is fine."""
        return self.send("DELETE", key, query={"uploadId": upload})

    def uploads(self, prefix: str) -> list[Upload]:
        """Returns the unfinished uploads of keys that begin with ``prefix``."""
        found: list[Upload] = []
        query = {"uploads": "", "prefix": prefix, "encoding-type": "url"}
        while True:
            outcome = self.send("GET", "", query=query)
            self.require(outcome, "list", prefix)
            page = _parsed(outcome.body, "ListMultipartUploadsResult")
            found += [
                Upload(_decoded(_text(one, "Key")), _text(one, "UploadId"))
                for one in page.iter("Upload")
            ]
            names = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
            following = _following(page, query, names)
            if not following:
                return [one for one in found if one.key.startswith(prefix)]
            query |= following

    def parts(self, upload: Upload) -> list[Part]:
        """Returns the parts of an unfinished upload that the server has."""
        found: list[Part] = []
        query = {"uploadId": upload.id}
        while True:
            outcome = self.send("GET", upload.key, query=query)
            if outcome.status == 404:
                return []
            self.require(outcome, "list", upload.key)
            page = _parsed(outcome.body, "ListPartsResult")
            found += [_part(one) for one in page.iter("Part")]
            following = _following(page, query, {"part-number-marker": "NextPartNumberMarker"})
            if not following:
                return found
            query |= following

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
        is_first, is_renewed, last = True, False, Outcome(0)
        for number in self.patience.pauses():
            if number > 1:
                self.traffic.again(kind, last.message or last.code or f"status {last.status}")
            self._rate.wait(size_bytes)
            last, may_have_effect = self._try(kind, method, key, query, headers, body, into)
            is_first = is_first and not may_have_effect
            if may_have_effect and method not in ("GET", "HEAD"):
                self.unanswered_s = time.monotonic()
            if last.code in _EXPIRED and not is_renewed:
                self._credentials.forget()
                is_renewed = True
            elif not last.may_be_tried_again:
                break
        is_known = last.status and last.status not in BUSY
        return _with(last, status=last.status if is_known else 0, is_first_try=is_first)

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

        ``is_new``: over a new connection, as is tried at once where a kept one had ended.
        """
        credentials = self._credentials.current()
        size_bytes = sum(len(piece) for piece in body)
        path = self._before + key
        payload = UNSIGNED if self._is_unsigned and size_bytes else sha256(body)
        signed = signed_headers(
            credentials,
            self._region,
            time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
            method,
            path,
            query,
            {"host": self._connections.server.name, **headers},
            payload,
        )
        if size_bytes or method in ("PUT", "POST"):
            signed["content-length"] = str(size_bytes)
        target = encoded_path(path) + (f"?{encoded_query(query)}" if query else "")
        self.require_allowed(method)  # at the very last: to hash a large body takes long
        try:
            answer = self._connections.send(method, target, signed, body, into, is_new=is_new)
        except NoAnswer as error:
            if error.is_stale:
                again = self._try(kind, method, key, query, headers, body, into, is_new=True)
                return again[0], True
            return Outcome(0, "", credentials.hidden_in(str(error))), error.is_sent
        self.traffic.count(kind, size_bytes, answer.size_bytes + len(answer.body))
        outcome = _outcome(answer, is_completion=kind == "POST uploadId")
        may_have_effect = not outcome.status or outcome.status >= 500
        return _with(outcome, message=credentials.hidden_in(outcome.message)), may_have_effect

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
                f"{where} failed: {reason}. It was tried for {self.patience.total_s:.0f} s; look "
                "whether the server can be reached and is well."
            )
        else:
            code = outcome.code or f"status {outcome.status}"
            said = f": {outcome.message}" if outcome.message else ""
            right = outcome.header("x-amz-bucket-region")
            advice = _ADVICE.get(outcome.code) or _ADVICE.get(
                _BY_STATUS.get(outcome.status, ""), ""
            )
            if right and right != self._region:
                advice = f"The bucket is in {right}: set AWS_REGION={right}."
            text = f"{where} failed: {code}{said}. {advice}".rstrip()
        error = StorageError(text, operation=operation, path=key, url=self.url, errno=0)
        error.retryable = not outcome.status or outcome.status in BUSY
        return error


_BY_STATUS = {301: "PermanentRedirect", 401: "AccessDenied", 403: "AccessDenied"}


def _rate() -> float:
    text = os.environ.get(RATE_VARIABLE) or "0"
    if not text.isdecimal():
        raise UsageError(f"{RATE_VARIABLE}={text!r} is no number of bytes a second")
    return float(text)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _with(outcome: Outcome, **changed: object) -> Outcome:
    found = {name: getattr(outcome, name) for name in Outcome.__dataclass_fields__}
    return Outcome(**{**found, **changed})


def _kind(method: str, query: Mapping[str, str]) -> str:
    names = [name for name in query if name in ("uploads", "uploadId", "list-type", "delete")]
    return f"{method} {names[0]}" if names else method


def _outcome(answer: Answer, *, is_completion: bool) -> Outcome:
    body, status, code, message = answer.body, answer.status, "", ""
    # A completion is answered with 200 before it is done, and its end is in the body.
    if status >= 300 or is_completion:
        try:
            found = _parsed(body.strip())
        except StorageError:
            found = None
        tag = "" if found is None else found.tag
        if found is not None and tag == "Error":
            code, message = _text(found, "Code"), _text(found, "Message")
            status = status if status >= 300 else _status_of(code)
        elif status < 300 and tag != "CompleteMultipartUploadResult":
            status, message = 0, "the answer does not say whether the upload was completed"
    return Outcome(status, code, message, answer.headers, body, answer.size_bytes)


def _status_of(code: str) -> int:
    known = {"PreconditionFailed": 412, "ConditionalRequestConflict": 409, "NoSuchUpload": 404}
    return known.get(code, 500 if code in ("InternalError", "SlowDown") else 400)


def _following(
    page: xml.Element, query: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, str]:
    """Returns what to ask for the page after this one; nothing where it is the last. ``names``: of
    the markers in the answer, by those of the query.
    """
    if _text(page, "IsTruncated") != "true":
        return {}
    found = {asked: _text(page, name) for asked, name in names.items()}
    if "key-marker" in found:
        found["key-marker"] = _decoded(found["key-marker"])
    if not any(found.values()) or all(query.get(asked) == one for asked, one in found.items()):
        raise StorageError("the server's list is cut short, and does not say where it goes on")
    return found


def _parsed(body: bytes, root: str = "") -> xml.Element:
    """``root``: the tag that it must have."""
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
        raise StorageError("the server's answer declares entities, as none of an object store does")
    try:
        found = xml.fromstring(body)
    except xml.ParseError as error:
        raise StorageError(f"the server's answer is no XML of an object store: {error}") from None
    for element in found.iter():
        element.tag = element.tag.rpartition("}")[2]
    if root and found.tag != root:
        raise StorageError(f"the server's answer is no {root}, but {found.tag[:40]!r}")
    return found


def _text(element: xml.Element, name: str) -> str:
    return element.findtext(name) or ""


def _age_s(made: str, now: str) -> float:
    """Returns the seconds between the moment that a list gives and that of its answer."""
    try:
        return (parsedate_to_datetime(now) - datetime.fromisoformat(made)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def _decoded(key: str) -> str:
    return urllib.parse.unquote_plus(key)


_CHECKSUMS = {
    "ChecksumCRC64NVME": "x-amz-checksum-crc64nvme",
    "ChecksumCRC32": "x-amz-checksum-crc32",
}


def _part(element: xml.Element) -> Part:
    kept = ((header, _text(element, name)) for name, header in _CHECKSUMS.items())
    checksum = next((one for one in kept if one[1]), ("", ""))
    size_bytes = int(_text(element, "Size") or 0)
    number = int(_text(element, "PartNumber") or 0)
    return Part(number, _text(element, "ETag"), size_bytes, checksum)


def _checksum_element(part: Part) -> str:
    for name, header in _CHECKSUMS.items():
        if part.checksum[0] == header:
            return f"<{name}>{part.checksum[1]}</{name}>"
    return ""
