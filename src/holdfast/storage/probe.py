"""Finds out, before the first write, whether a server keeps the conditions that a root rests on.

Several servers that speak S3 accept a create under a taken name. With such a one two writers could
publish one checkpoint, so it is refused by name.
"""

from __future__ import annotations

import contextlib
import copy
import secrets

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.bucket import Bucket
from holdfast.storage.wrap import Patience

_ONE, _OTHER = b"holdfast probe 1", b"holdfast probe 2"
_TRIES = 3


class Kept(Struct, frozen=True):
    """What a server kept of what was tried."""

    server: str
    create: bool
    """A create under a taken name is refused."""
    replace: bool
    """A replacement of what was replaced meanwhile is refused."""
    list_after_put: bool
    ranges: bool
    part_checksums: bool
    """A part that is not what its checksum says is refused."""

    @property
    def table(self) -> tuple[tuple[str, bool], ...]:
        """Returns what was tried, in words, and whether it is kept."""
        return (
            ("refuses a create under a taken name", self.create),
            ("refuses to replace what was replaced meanwhile", self.replace),
            ("lists what was written", self.list_after_put),
            ("reads ranges", self.ranges),
            ("refuses a part that is not what its checksum says", self.part_checksums),
        )

    @property
    def lacks(self) -> tuple[str, ...]:
        """Returns what a root needs and this server does not keep."""
        needed = {
            "a create under a taken name (If-None-Match) is not refused": self.create,
            "an object is not listed after it was written": self.list_after_put,
            "a range is not read (Range)": self.ranges,
        }
        return tuple(text for text, is_kept in needed.items() if not is_kept)


def probe(bucket: Bucket, prefix: str) -> Kept:
    """Tries the conditions on a new object, whose name begins with ``prefix``; it is removed.

    An answer that was lost tells nothing about the server: then all is tried again on another.
    """
    for _ in range(_TRIES - 1):
        found = _probe_once(bucket, prefix, is_last=False)
        if found is not None:
            return found
    found = _probe_once(bucket, prefix, is_last=True)
    assert found is not None
    return found


def _probe_once(bucket: Bucket, prefix: str, *, is_last: bool) -> Kept | None:
    """Returns what was kept; None where an answer was lost, unless this try is the last."""
    key = f"{prefix}{secrets.token_hex(6)}"
    try:
        first = bucket.put(key, [_ONE], if_none=True)
        if not first.is_done and not first.is_first_try and not is_last:
            return None
        bucket.require(first, "write", key)
        taken = bucket.put(key, [_OTHER], if_none=True)
        tag = first.header("etag") or '"0"'
        second = bucket.put(key, [_ONE], if_match=tag)
        bucket.put(key, [_OTHER])
        stale = bucket.put(key, [_ONE], if_match=tag)
        if not is_last and not all(one.is_first_try for one in (taken, second, stale)):
            return None
        part = bucket.get(key, 9, 13)
        kept = Kept(
            server=first.header("server") or "a server without a name",
            create=taken.status == 412,
            replace=second.is_done and stale.status == 412,
            list_after_put=key in set(bucket.keys(key)),
            ranges=part.status == 206 and part.body == _OTHER[9:14],
            part_checksums=False,
        )
        try:
            refuses = _refuses_wrong_part(bucket, prefix, key)
        except StorageError:
            if not kept.lacks:  # else that is what to tell
                raise
            refuses = False
        return replace(kept, part_checksums=refuses)
    finally:
        with contextlib.suppress(HoldfastError):
            bucket.delete(key)


def _refuses_wrong_part(bucket: Bucket, prefix: str, key: str) -> bool:
    for left in bucket.uploads(prefix):  # of a process that was killed here
        bucket.abort_upload(left.key, left.id)
    upload = bucket.begin_upload(key + "-parts")
    try:
        once = copy.copy(bucket)  # what changed on the way is sent again, but this is on purpose
        once.patience = Patience(total_s=0.0)
        wrong = bucket.checksum([_OTHER])
        return 400 <= once.put_part(key + "-parts", upload, 1, [_ONE], wrong).status < 500
    finally:
        with contextlib.suppress(HoldfastError):
            bucket.abort_upload(key + "-parts", upload)


_known: dict[tuple[str, str], Kept] = {}


def require_conditions(bucket: Bucket, prefix: str) -> Kept:
    """Raises StorageError, which names the server, where it does not keep what a root needs.

    A bucket is probed once in a process.
    """
    place = bucket.server, bucket.name
    found = _known.get(place) or probe(bucket, prefix)
    if found.lacks:
        error = StorageError(
            f"{bucket.url} cannot be a root, because its server ({found.server}) does not do what "
            f"keeps a checkpoint whole: {'; '.join(found.lacks)}. Nothing was written there. Use "
            "another server (docs/operations/object-stores.md lists what each keeps), or a "
            "directory.",
            operation="probe",
            url=bucket.url,
        )
        error.retryable = False
        raise error
    _known[place] = found
    return found
