"""A bucket in memory behind the real client: requests are answered, lost, late, refused or stepped.

Everything above single tries is the code that speaks to servers; only the way to one is replaced.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

import pytest
from msgspec.structs import replace

from holdfast.events import subscribe
from holdfast.storage import objects
from holdfast.storage.bucket import Outcome
from holdfast.storage.checksums import Body
from holdfast.storage.lease_lock import LeaseTimes
from holdfast.storage.objects import ObjectStore
from holdfast.storage.s3 import S3Bucket
from holdfast.storage.wrap import Patience

#: Years behind any machine that tests run on.
_EPOCH_S = 1_000_000_000.0
#: What happens to a request: done and answered; done, and the answer lost; lost, and done when
#: ``land`` is called; never done; refused because the server is busy; so answered, and done when
#: ``land`` is called; late, over a connection that had been kept. A number: not done, and answered
#: with this status.
FAULTS = ("lost", "late", "dropped", "busy", "queued", "stale")


@dataclass
class World:
    """What the server has, and what is to happen to which request."""

    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[tuple[str, str], dict[int, bytes]] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)
    fault: Callable[[str, str], str] = lambda method, key: ""
    before: Callable[[], None] = lambda: None
    late: list[Callable[[], object]] = field(default_factory=list)
    ignores_conditions: bool = False
    now_s: float = 0.0
    """What the server's clock says, which is no other machine's."""
    listed: list[str] | None = None
    """The keys that lists show, where they lag behind; None: those there are."""
    page: int = 1000
    """How many keys one answer lists."""
    made_s: dict[str, float] = field(default_factory=dict)
    number: int = field(default_factory=itertools.count().__next__)
    """No other world of this process has it: what is known of a server is kept by its name."""
    lock: Any = field(default_factory=threading.RLock)

    def time_s(self) -> float:
        """Returns what the server's clock says, in seconds since 1970."""
        return _EPOCH_S + self.now_s

    def date(self, key: str = "") -> str:
        """Returns when the object was written, without a key the time now, as a header says it."""
        return formatdate(self.made_s.get(key, _EPOCH_S) if key else self.time_s(), usegmt=True)

    def keep(self, key: str, data: bytes) -> None:
        """Has an object from now on."""
        self.objects[key] = data
        self.made_s[key] = self.time_s()

    def land(self) -> None:
        """Has late requests take their effect now."""
        late, self.late = self.late, []
        for request in late:
            request()

    def answer(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        data: bytes,
    ) -> Outcome:
        """Does what an S3 server does."""
        there = self.objects
        if "uploadId" in query or "uploads" in query:
            return self._upload(method, key, query, data)
        if method == "POST":
            try:
                named = [one.text or "" for one in xml.fromstring(data).iter("Key")]
            except xml.ParseError:
                return Outcome(400, "MalformedXML")
            for one in named:
                there.pop(one, None)
            return Outcome(200, body=b"<DeleteResult/>")
        if "list-type" in query:
            return self._list(query)
        if method in ("PUT", "DELETE"):
            if not self.ignores_conditions and self.refuses(key, headers):
                is_there = key in there or "if-match" not in headers
                return Outcome(412, "PreconditionFailed") if is_there else Outcome(404, "NoSuchKey")
            if method == "PUT":
                self.keep(key, data)
                return Outcome(200, headers={"etag": self.tag(key)})
            there.pop(key, None)
            return Outcome(204)
        if key not in there:
            return Outcome(404, "NoSuchKey")
        return self._content(key, headers.get("range", ""), is_head=method == "HEAD")

    def refuses(self, key: str, headers: Mapping[str, str]) -> bool:
        """True where the condition of a write is not so."""
        is_taken = "if-none-match" in headers and key in self.objects
        return is_taken or ("if-match" in headers and headers["if-match"] != self.tag(key))

    def tag(self, key: str) -> str:
        """Returns what conditions name an object by."""
        return _tag(self.objects.get(key))

    def _content(self, key: str, range_: str, *, is_head: bool) -> Outcome:
        made = self.date(key)
        return _content(self.objects[key], self.tag(key), made, range_, is_head=is_head)

    def _list(self, query: Mapping[str, str]) -> Outcome:
        prefix, found = query["prefix"], self.listed or sorted(self.objects)
        keys = [key for key in found if key.startswith(prefix)]
        keys = [key for key in keys if key >= query.get("continuation-token", "")]
        keys, rest = keys[: self.page], keys[self.page :]
        if "delimiter" in query:
            end = query["delimiter"]
            below = {key[len(prefix) :].partition(end) for key in keys}
            keys = [prefix + name for name, slash, _ in below if not slash]
            above = "".join(
                f"<CommonPrefixes><Prefix>{quote(prefix + name)}{end}</Prefix></CommonPrefixes>"
                for name, slash, _ in below
                if slash
            )
        else:
            above = ""
        listed = "".join(
            f"<Contents><Key>{quote(key)}</Key><LastModified>{self._made(key)}</LastModified>"
            f"<ETag>{escape(self.tag(key))}</ETag><Size>{len(self.objects.get(key, b''))}</Size>"
            "</Contents>"
            for key in keys
        )
        if rest:
            above += f"<NextContinuationToken>{escape(rest[0])}</NextContinuationToken>"
            above += "<IsTruncated>true</IsTruncated>"
        return Outcome(200, body=_document("ListBucketResult", listed + above))

    def _made(self, key: str) -> str:
        made_s = self.made_s.get(key, _EPOCH_S)
        return datetime.fromtimestamp(made_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")

    def _upload(self, method: str, key: str, query: Mapping[str, str], data: bytes) -> Outcome:
        parts = self.parts
        if "uploads" in query:
            if method == "POST":
                id_ = f"upload-{len(self.log)}"
                parts[key, id_] = {}
                return Outcome(
                    200,
                    body=_document("InitiateMultipartUploadResult", f"<UploadId>{id_}</UploadId>"),
                )
            listed = "".join(
                f"<Upload><Key>{quote(one)}</Key><UploadId>{id_}</UploadId></Upload>"
                for one, id_ in parts
                if one.startswith(query["prefix"])
            )
            return Outcome(200, body=_document("ListMultipartUploadsResult", listed))
        there = key, query["uploadId"]
        if there not in parts:
            return Outcome(404, "NoSuchUpload")
        if method == "PUT":
            parts[there][int(query["partNumber"])] = data
            return Outcome(200, headers={"etag": _tag(data)})
        if method == "DELETE":
            del parts[there]
            return Outcome(204)
        if method == "GET":
            listed = "".join(
                f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(_tag(one))}</ETag>"
                f"<Size>{len(one)}</Size></Part>"
                for n, one in sorted(parts[there].items())
            )
            return Outcome(200, body=_document("ListPartsResult", listed))
        return self.complete(key, query["uploadId"], data)

    def complete(self, key: str, upload: str, data: bytes) -> Outcome:
        """Makes an object of the parts of an upload, where there is none."""
        if key in self.objects:
            return Outcome(412, "PreconditionFailed")
        found = self.parts.pop((key, upload))
        self.keep(key, b"".join(found[number] for number in sorted(found)))
        return Outcome(200, body=b"<R/>")


class ModelBucket(S3Bucket):
    """The client of a ``World``."""

    def __init__(self, world: World, name: str, url: str, patience: Patience) -> None:
        super().__init__(name, url, patience=patience)
        self.world = world
        self.server = f"model-{world.number}"

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
        world, data = self.world, b"".join(body)
        self.require_allowed(method)
        world.before()
        with world.lock:
            world.log.append((kind, key))
            fault = world.fault(kind, key)
            if fault in ("late", "queued", "stale"):
                world.late.append(lambda: world.answer(method, key, query, headers, data))
            if fault in ("busy", "queued"):
                return Outcome(503, "SlowDown", "slow down"), True
            if fault in ("dropped", "late", "stale"):
                return Outcome(0, "", "no answer", is_stale=fault == "stale" and not is_new), True
            if fault.isdecimal():
                return Outcome(int(fault), "", "no"), int(fault) >= 500
            outcome = world.answer(method, key, query, headers, data)
            date = {"date": world.date()}
            outcome = replace(outcome, headers=dict(outcome.headers or {}) | date)
            if fault == "lost":
                return Outcome(0, "", "no answer"), True
        if into is not None and outcome.is_done:
            into[: len(outcome.body)] = outcome.body
            outcome = Outcome(206, headers=outcome.headers, size_bytes=len(outcome.body))
        return outcome, False


def _document(tag: str, content: str) -> bytes:
    return f"<{tag}>{content}</{tag}>".encode()


def _tag(data: bytes | None) -> str:
    return "" if data is None else f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _content(data: bytes, tag: str, made: str, range_: str, *, is_head: bool) -> Outcome:
    headers = {
        "etag": tag,
        "content-length": str(len(data)),
        "last-modified": made,
    }
    if not range_ or is_head:
        return Outcome(200, headers=headers, body=b"" if is_head else data)
    first, _, last = range_.removeprefix("bytes=").partition("-")
    if int(first) >= len(data):
        return Outcome(416, "InvalidRange")
    part = data[int(first) : int(last) + 1 if last else None]
    end = int(first) + len(part) - 1
    headers["content-range"] = f"bytes {first}-{end}/{len(data)}"
    return Outcome(206, headers=headers, body=part)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collects what a person is warned of."""
    told = list[str]()
    stop = subscribe(lambda event, _: told.append(getattr(event, "message", "")))
    try:
        yield told
    finally:
        stop()


def model_store(
    world: World,
    patch: pytest.MonkeyPatch,
    prefix: str = "root",
    *,
    part_bytes: int = 1 << 20,
    tries_s: float = 0.02,
    lease: LeaseTimes | None = None,
) -> ObjectStore:
    """Returns a store on the model; requests are tried again for ``tries_s``."""
    patch.setenv("AWS_ACCESS_KEY_ID", "key")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patience = Patience(total_s=tries_s, first_s=0.001, longest_s=0.002)

    def bucket(name: str, url: str, **_: object) -> ModelBucket:
        return ModelBucket(world, name, url, patience)

    patch.setattr(objects, "open_bucket", bucket)
    return ObjectStore("model", prefix, least_part_bytes=part_bytes, lease=lease)
