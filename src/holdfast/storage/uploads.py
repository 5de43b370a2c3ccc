"""Sends an image to a bucket while it is written, as numbered parts of one size.

A write that completes a part is sent from the memory that it was given; only what a write leaves of
an unfinished part is copied. An image of one part is one object, put when it is finished.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol

from msgspec import Struct, field

from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.base import SinkFill, Store, already_published, flat
from holdfast.storage.bucket import Bucket, Outcome, Part, Upload
from holdfast.storage.checksums import Body, md5

#: As the writer's chunks, so that a part is a chunk but for the header before the first.
PART_BYTES = 8 << 20
MAX_PARTS = 10_000


def part_bytes(size_bytes: int, least: int = PART_BYTES) -> int:
    """Returns the size of the parts of an image: ``least``, doubled until they are few enough."""
    found = least
    while -(-size_bytes // found) > MAX_PARTS:
        found *= 2
    return found


class Changes(Protocol):
    """Asked before anything in the bucket is changed; raises where that is not allowed."""

    def __call__(self) -> None: ...


class _Filling(Struct):
    """The bytes of a part that are there, by their place in it."""

    size_bytes: int
    pieces: dict[int, memoryview | bytes] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        return self.size_bytes - sum(len(piece) for piece in self.pieces.values())

    def body(self) -> list[memoryview | bytes]:
        return [self.pieces[start] for start in sorted(self.pieces)]


class UploadSink:
    """An image being filled; see ``ImageSink``. A byte is written once, or its part whole.

    ``over``: the tag of the object whose place it takes; "" where there must be none.
    """

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        path: str,
        size_bytes: int,
        may_change: Changes,
        *,
        part_bytes: int,
        found: tuple[Upload, list[Part]] | None = None,
        over: str = "",
    ) -> None:
        self._bucket, self._key, self._path = bucket, key, path
        self._size_bytes, self._part_bytes = size_bytes, part_bytes
        self._may_change = may_change
        self._over = over
        self._filling = SinkFill(path, size_bytes, self._released)
        self._lock = threading.Lock()
        self._parts: dict[int, _Filling] = {}
        self._sent: dict[int, Part] = {}
        self._upload = found[0].id if found else ""
        self._there = {part.number: part for part in found[1]} if found else {}
        self._is_aborted = self._is_wrong = False
        self.resumed_bytes = 0

    def write(self, offset_bytes: int, data: memoryview) -> None:
        source = flat(data)
        with self._filling.writing(offset_bytes, len(source)):
            try:
                self._write(offset_bytes, source)
            except StorageError:
                if not self._is_aborted:  # whose parts were refused because the upload is gone
                    raise

    def _write(self, offset_bytes: int, source: memoryview) -> None:
        at, complete = 0, []
        while at < len(source):
            number, start = divmod(offset_bytes + at, self._part_bytes)
            piece = source[at : at + self._part_bytes - start]
            at += len(piece)
            with self._lock:
                filling = self._parts.setdefault(number, _Filling(self._size_of(number)))
                is_last = self._add(filling, start, piece)
                if is_last and not self._is_small:
                    complete.append((number, self._parts.pop(number)))
        # After every copy was made: the next write may complete a part with what this one left.
        for number, filling in complete:
            self._send(number + 1, filling)

    def _add(self, filling: _Filling, start: int, piece: memoryview) -> bool:
        """Adds a piece to its part; True when that is all of it."""
        # Written again, in whole or in part: what was there is replaced.
        for at, old in list(filling.pieces.items()):
            low, high = max(at, start), min(at + len(old), start + len(piece))
            if low < high:
                del filling.pieces[at]
                if at < low:
                    filling.pieces[at] = old[: low - at]
                if high < at + len(old):
                    filling.pieces[high] = old[high - at :]
        is_last = filling.missing == len(piece)
        filling.pieces[start] = piece if is_last and not self._is_small else bytes(piece)
        return is_last

    @property
    def _is_small(self) -> bool:
        return self._size_bytes <= self._part_bytes

    def _size_of(self, number: int) -> int:
        return min(self._part_bytes, self._size_bytes - number * self._part_bytes)

    def _send(self, number: int, filling: _Filling) -> None:
        if self._is_aborted:
            return
        body = filling.body()
        there = self._there.get(number)
        checksum = self._bucket.checksum(body)
        if there is not None and _is_same(there, filling.size_bytes, checksum, body):
            self._sent[number] = there
            self.resumed_bytes += filling.size_bytes
            return
        self._may_change()
        upload = self._begun()
        outcome = self._bucket.put_part(self._key, upload, number, body, checksum)
        self._bucket.require(outcome, "write", self._path)
        self._sent[number] = Part(number, outcome.header("etag"), checksum=checksum)

    def _begun(self) -> str:
        with self._lock:
            if not self._upload:
                self._upload = self._bucket.begin_upload(self._key)
            return self._upload

    def finish(self) -> None:
        with self._filling.finishing():
            self._may_change()
            if self._is_small:
                self._put()
            else:
                self._complete()

    def _put(self) -> None:
        filling = self._parts.get(0)
        body = filling.body() if filling else []
        outcome = self._bucket.put(self._key, body, if_none=not self._over, if_match=self._over)
        if outcome.status == 412 or not outcome.status:
            self._settle(outcome, b"".join(body))
        else:
            self._bucket.require(outcome, "write", self._path)

    def _settle(self, outcome: Outcome, data: bytes) -> None:
        if outcome.status == 412 and outcome.is_first_try:
            raise already_published(self._path, self._bucket.url)
        found = self._bucket.get(self._key)
        if not found.is_done or found.body != data:
            raise self._bucket.failure(outcome, "write", self._path)

    def _complete(self) -> None:
        parts = [self._sent[number] for number in sorted(self._sent)]
        outcome = self._bucket.end_upload(self._key, self._upload, parts, if_match=self._over)
        if outcome.status == 412 and outcome.is_first_try:
            raise already_published(self._path, self._bucket.url)
        # An answer may have been lost, and a second try finds that the upload has ended. Nobody
        # else has this upload, and it is not listed any more once it has become an object.
        found = self._bucket.head(self._key)
        is_whole = found.is_done and int(found.header("content-length") or -1) == self._size_bytes
        is_whole = is_whole and not (self._over and found.header("etag") == self._over)
        if outcome.is_done and is_whole:
            return
        self._is_wrong = found.is_done and outcome.is_done and outcome.is_first_try
        is_known = outcome.is_done or (outcome.is_first_try and outcome.status)
        if is_known or not is_whole or self._is_unfinished():
            raise self._bucket.failure(outcome, "finish", self._path)

    def _is_unfinished(self) -> bool:
        return self._bucket.is_begun(Upload(self._key, self._upload))

    def abort(self) -> None:
        if self._filling.abort():
            self._is_aborted = True
            self._discard()

    def _released(self) -> None:
        """Called when no write runs any more: parts that landed since are removed too."""
        if self._is_aborted:
            self._discard()

    def _discard(self) -> None:
        """Ends the upload. An object of which it is not known whether this made it stays: a removal
        that nobody announced could land when another has gone on with it.
        """
        with contextlib.suppress(HoldfastError):
            self._may_change()
            if self._upload:
                self._bucket.abort_upload(self._key, self._upload)
            if self._is_wrong and not self._over:
                self._bucket.delete(self._key)


class ComparingSink:
    """Takes an image that is stored already, whole: what is written is compared with it."""

    def __init__(self, store: Store, path: str, size_bytes: int) -> None:
        self._store, self._path = store, path
        self._filling = SinkFill(path, size_bytes, lambda: None)

    def write(self, offset_bytes: int, data: memoryview) -> None:
        source = flat(data)
        with self._filling.writing(offset_bytes, len(source)):
            if self._store.read(self._path, offset_bytes, len(source)) != source:
                raise StorageError(
                    f"{self._path} in {self._store.url} was stored by an earlier try, with other "
                    "bytes: it is written anew",
                    operation="write",
                    path=self._path,
                    url=self._store.url,
                    errno=0,
                )

    def finish(self) -> None:
        with self._filling.finishing():
            pass

    def abort(self) -> None:
        self._filling.abort()  # what is stored stays: another's manifest may name it


def _is_same(there: Part, size_bytes: int, checksum: tuple[str, str], body: Body) -> bool:
    """True if the server has this very part: by its checksum, else by the MD5 that is its tag."""
    if there.size_bytes != size_bytes:
        return False
    if there.checksum[0]:
        return there.checksum == checksum
    return there.etag.strip('"') == md5(body).hex()
