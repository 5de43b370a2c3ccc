"""Reads the objects of a foreign checkpoint in a bucket by ranges, as files below a directory."""

from __future__ import annotations

import functools
import threading
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from holdfast.errors import ForeignFormatError, NotFound, StorageError, UsageError
from holdfast.interop.source_files import MAX_DEPTH, MAX_FILES, SourceFiles, checked_name
from holdfast.storage.open import is_bucket, open_bucket_of

if TYPE_CHECKING:
    from holdfast.storage.bucket import Bucket, Outcome

#: Small reads take a piece of an object that holds what is read next, too; these are kept.
_PIECE_BYTES = 64 << 10
_PIECES = 128
#: One request asks for at most so much.
_REQUEST_BYTES = 16 << 20


def files_at(place: Path | str) -> SourceFiles:
    """The files of a foreign checkpoint at a path, or at the URL of a bucket and a prefix."""
    text = str(place)
    return BucketFiles(text) if is_bucket(text) else SourceFiles(Path(place))


class BucketFiles(SourceFiles):
    """The objects below a prefix, or one object alone. StorageError where the server refuses."""

    def __init__(self, url: str) -> None:
        self.path = url
        self._bucket, self._prefix = open_bucket_of(url)
        self._facts: dict[str, tuple[int, int, int]] = {}
        self._changed_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._piece = functools.lru_cache(_PIECES)(self._read_piece)
        self._names = self._listed()
        self._is_file = self._names is None

    @property
    def bucket(self) -> Bucket:
        """The bucket, and what was sent to it."""
        return self._bucket

    def _listed(self) -> list[str] | None:
        """The names below the prefix; None where the prefix is the key of an object."""
        below, found = f"{self._prefix}/" if self._prefix else "", []
        for key in self._bucket.keys(below):
            name = key.removeprefix(below)
            if name and not name.endswith("/") and name.count("/") <= MAX_DEPTH:
                found.append(name)
            if len(found) > MAX_FILES:
                raise ForeignFormatError(
                    f"{self.path} has more than {MAX_FILES} objects: no checkpoint has so many, "
                    "give a prefix further down",
                    path=str(self.path),
                    offset=0,
                )
        is_object = not found and self._prefix and self._bucket.head(self._prefix).is_done
        return None if is_object else sorted(found)

    def names(self) -> list[str]:
        """The sorted names of all objects; hidden ones too."""
        return [self.name] if self._names is None else self._names

    def where(self, name: str) -> str:
        """The object, for messages."""
        return str(self.path) if self._is_file else f"{self.path}/{name}"

    def _key(self, name: str) -> str:
        if self._is_file:
            return self._prefix
        name = checked_name(name, str(self.path))
        return f"{self._prefix}/{name}" if self._prefix else name

    def size_bytes(self, name: str) -> int:
        """The length of an object."""
        with self._lock:
            known = self._facts.get(name)
        if known is None:
            self._note(name, self._bucket.head(self._key(name)))
        return self._facts[name][1]

    def changed_s(self, name: str) -> float:
        """When the object was written; 0 for one that is not there."""
        try:
            self.size_bytes(name)
        except (NotFound, StorageError, ForeignFormatError):
            return 0.0
        return self._changed_s.get(name, 0.0)

    def require_unchanged(self) -> None:
        """Raise ForeignFormatError when an object that was read is another one by now."""
        for name in self.facts():
            self._note(name, self._bucket.head(self._key(name)))

    def _note(self, name: str, outcome: Outcome) -> None:
        """Note what an object is; ForeignFormatError when it was another one before."""
        self._require(name, outcome)
        size_bytes = int(outcome.header("content-length") or 0)
        tag = _tag(outcome)
        with self._lock:
            known = self._facts.setdefault(name, (0, size_bytes, tag))
            self._changed_s.setdefault(name, _seconds(outcome.header("last-modified")))
        if known != (0, size_bytes, tag):
            self._refuse_changed(name)

    def _require(self, name: str, outcome: Outcome) -> None:
        if outcome.is_absent:
            raise NotFound(
                f"{self.where(name)} is not there, which the checkpoint names", path=name
            )
        self._bucket.require(outcome, "read", name)

    def _refuse_changed(self, name: str) -> None:
        raise ForeignFormatError(
            f"{self.where(name)} was changed while it was read: what was made of it may be a "
            "mixture, and is not used. Start again when nothing writes there",
            path=self.where(name),
            offset=0,
        )

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset_bytes`` on."""
        self.require(name, offset_bytes, len(buffer))
        if len(buffer) <= _PIECE_BYTES // 4:
            self._copy_pieces(name, offset_bytes, buffer)
            return
        for start in range(0, len(buffer), _REQUEST_BYTES):
            part = buffer[start : start + _REQUEST_BYTES]
            self._get(name, offset_bytes + start, part)

    def _copy_pieces(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            at = offset_bytes + done
            piece = self._piece(name, at // _PIECE_BYTES)
            part = piece[at % _PIECE_BYTES : at % _PIECE_BYTES + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)

    def _read_piece(self, name: str, number: int) -> bytes:
        start = number * _PIECE_BYTES
        piece = bytearray(min(_PIECE_BYTES, self.size_bytes(name) - start))
        self._get(name, start, memoryview(piece))
        return bytes(piece)

    def _get(self, name: str, offset_bytes: int, into: memoryview) -> None:
        stop = offset_bytes + len(into)
        outcome = self._bucket.get(self._key(name), offset_bytes, stop - 1, into)
        if outcome.status == 416:
            self._refuse_changed(name)  # it had these bytes when it was looked up
        self._require(name, outcome)
        tag = _tag(outcome)
        if outcome.header("etag") and tag != self._facts[name][2]:
            self._refuse_changed(name)
        starts = outcome.header("content-range").removeprefix("bytes ").partition("-")[0]
        if outcome.status != 206 or starts != str(offset_bytes) or outcome.size_bytes < len(into):
            raise StorageError(
                f"read of {self.where(name)} failed: the server gave other bytes than those from "
                f"{offset_bytes} to {stop}",
                operation="read",
                path=name,
            )


def _tag(outcome: Outcome) -> int:
    """A number that another content of the object would change."""
    return xxhash.xxh3_64_intdigest(outcome.header("etag").encode())


def _seconds(text: str) -> float:
    """The time that a header says; 0 for none."""
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError):
        return 0.0


def refuse_steps(files: SourceFiles) -> None:
    """Raise UsageError for a prefix with objects, none of which is a checkpoint by itself."""
    if files.names():
        raise UsageError(
            f"{files.path} has objects and no checkpoint of a kind that is read: give the prefix "
            "of one. In a bucket, those of several steps are not looked for"
        )
