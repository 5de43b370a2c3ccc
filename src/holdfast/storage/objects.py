"""Uses a bucket as a store: a name appears whole by one conditional request, or it does not exist.

A request whose outcome is not known is read back and compared byte for byte: the same is success,
another content means that the name is taken, and where there is none the outcome stays unknown.
See docs/invariants.md (1, 3) and docs/design/0017-buckets.md.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

from holdfast.errors import NotFound, StorageError, UsageError
from holdfast.storage.base import (
    ImageSink,
    Lock,
    already_published,
    check_path,
    check_prefix,
    check_range,
    flat,
    short_read,
)
from holdfast.storage.bucket import Bucket, Outcome
from holdfast.storage.files import PINS, ROOT_FILE, WRITER
from holdfast.storage.lease_lock import (
    ONE_WRITER,
    LeaseTimes,
    LeaseView,
    ObjectLease,
    SoleWriter,
    quiet_s,
    take_lease,
)
from holdfast.storage.probe import Kept, require_conditions
from holdfast.storage.providers import open_bucket
from holdfast.storage.removals import Removals, changed_under, named_again
from holdfast.storage.uploads import PART_BYTES, ComparingSink, UploadSink, part_bytes
from holdfast.storage.wrap import Patience

#: A larger range is read by several requests at once.
_PIECE_BYTES = 16 << 20
_READERS = 4
#: The letters at the end of a directory's name that tell one write of an attempt from another.
_RANDOM = 6
#: Directories whose names end in random letters: nobody has an object of such a name.
_RANDOM_NAME = re.compile(r"(steps|parts)/[0-9]+-[0-9]+-[0-9A-Za-z_-]{8,}")
#: What a run writes below its root while it saves.
_WRITTEN = "events", "incarnations", "layouts", "manifests", "parts", "steps"
_PAGE = 1000
_READERS_LEASES = "readers/"
#: The lease object of an older root that has none was removed by somebody: a new one has had none.
_YOUNG_S = 60.0
#: Directories below which there are no images.
_DOCUMENTS = frozenset({"incarnations", "layouts", "manifests", PINS, "readers"})
#: Directories of a root, which nobody takes for objects.
_OWN = _DOCUMENTS | {"parts", "steps"}
#: For so long what was just read of the root's file counts as what is there.
_FRESH_S = 1.0


class ObjectStore:
    """The objects of ``bucket`` below ``prefix``. Safe from several threads and in forked children.

    Names that begin with a dot are the store's own: its locks, and what it probes a server with.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        scheme: str = "s3",
        patience: Patience | None = None,
        answer_s: float = 60.0,
        least_part_bytes: int = PART_BYTES,
        lease: LeaseTimes | None = None,
    ) -> None:
        self._url = f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
        self._below = f"{prefix}/" if prefix else ""
        self._bucket = open_bucket(bucket, self._url, patience=patience, answer_s=answer_s)
        self._bucket.guard = self._require_held
        self._part_bytes = least_part_bytes
        self._lease_times = lease or LeaseTimes()
        self._lock = threading.Lock()
        self._no_files = set(_OWN)
        """Names above others that are known to be no objects."""
        self._made = 0.0, ""
        """When the root's file was read last, and of which moment it was."""
        self._uploads: frozenset[str] | None = None
        self._resumed: set[str] = set()
        """Directories whose unfinished images are gone on with."""
        self._kept: Kept | None = None
        self._held: list[ObjectLease] = []
        self._removals = Removals(self._bucket, self._below)

    def __repr__(self) -> str:
        return f"ObjectStore({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def bucket(self) -> Bucket:
        """The bucket, and what was sent to it."""
        return self._bucket

    @property
    def settle_s(self) -> float:
        """For how many seconds a change may still take effect that nobody answered."""
        return self._bucket.settle_s

    @property
    def probe_prefix(self) -> str:
        """What the names of the objects begin with that a server is probed with."""
        return f"{self._below}.probe-"

    def identity(self) -> str:
        read_s, made = self._made
        if not made or time.monotonic() > read_s + _FRESH_S:
            outcome = self._found(self._bucket.head(self._below + ROOT_FILE), ROOT_FILE)
            made = outcome.header("last-modified")
        return f"bucket {self._bucket.name} {self._below or '/'} {made}"

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        check_range(path, offset_bytes, size_bytes or 0)
        key = self._key(path)
        if size_bytes == 0:
            have = self.size_bytes(path)
            if offset_bytes > have:
                raise short_read(path, self.url, offset_bytes, 0, have)
            return b""
        last = None if size_bytes is None else offset_bytes + size_bytes - 1
        outcome = self._bucket.get(key, offset_bytes, last)
        if outcome.status == 416:
            return self._read_past_end(path, offset_bytes, size_bytes)
        data = self._found(outcome, path).body
        self._require_range(outcome, path, offset_bytes, last is not None or offset_bytes > 0)
        if size_bytes is not None and len(data) < size_bytes:
            raise short_read(path, self.url, offset_bytes, size_bytes, offset_bytes + len(data))
        return data

    def _read_past_end(self, path: str, offset_bytes: int, size_bytes: int | None) -> bytes:
        have = self.size_bytes(path)
        if size_bytes is None and offset_bytes == have:
            return b""
        raise short_read(path, self.url, offset_bytes, size_bytes or 0, have)

    def _require_range(self, outcome: Outcome, path: str, offset: int, is_range: bool) -> None:
        starts = outcome.header("content-range").removeprefix("bytes ").partition("-")[0]
        if is_range and (outcome.status != 206 or starts != str(offset)):
            raise StorageError(
                f"read of {path} in {self.url} failed: the server ignores ranges. A root needs "
                "one that keeps them.",
                operation="read",
                path=path,
                url=self.url,
            )

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        check_range(path, offset_bytes, buffer.nbytes)
        into, key = flat(buffer), self._key(path)
        if not into:
            self.read(path, offset_bytes, 0)
            return
        starts = range(0, len(into), _PIECE_BYTES)
        if len(starts) == 1:
            self._fill(path, key, offset_bytes, into)
            return
        with ThreadPoolExecutor(min(_READERS, len(starts))) as pool:
            pieces = [
                pool.submit(
                    self._fill, path, key, offset_bytes + start, into[start : start + _PIECE_BYTES]
                )
                for start in starts
            ]
            for piece in pieces:
                piece.result()

    def _fill(self, path: str, key: str, offset_bytes: int, into: memoryview) -> None:
        outcome = self._bucket.get(key, offset_bytes, offset_bytes + len(into) - 1, into)
        if outcome.status == 416:
            raise short_read(path, self.url, offset_bytes, len(into), self.size_bytes(path))
        self._found(outcome, path)
        self._require_range(outcome, path, offset_bytes, True)
        if outcome.size_bytes < len(into):
            have = offset_bytes + outcome.size_bytes
            raise short_read(path, self.url, offset_bytes, len(into), have)

    def size_bytes(self, path: str) -> int:
        if path.startswith(tuple(f"{one}/" for one in self._removals.refused)):
            raise NotFound(f"{path} in {self.url} is to be removed", path=path)
        return int(self._found(self._bucket.head(self._key(path)), path).header("content-length"))

    def read_at_most(self, path: str, limit_bytes: int) -> bytes | int:
        """Returns a whole object, by one request; its size where that is beyond ``limit_bytes``."""
        outcome = self._bucket.get(self._key(path), 0, limit_bytes)
        if path == ROOT_FILE:
            self._made = (
                time.monotonic(),
                outcome.header("last-modified") if outcome.is_done else "",
            )
        if outcome.status == 416:  # it is empty
            return b""
        data = self._found(outcome, path).body
        self._require_range(outcome, path, 0, True)
        have = int(outcome.header("content-range").rpartition("/")[2])
        return data if len(data) == have else have

    def exists(self, path: str) -> bool:
        outcome = self._bucket.head(self._key(path))
        if outcome.status != 404:
            self._bucket.require(outcome, "look-up", path)
        return outcome.is_done

    def tag_pages(self, prefix: str) -> Iterator[dict[str, str]]:
        """Yields what ``tags`` returns, a page at a time."""
        names = self._bucket.tagged_names(self._prefix(prefix))
        while page := dict(islice(names, _PAGE)):
            hidden = self._hidden(prefix, page)
            yield {name: tag for name, tag in page.items() if name not in hidden}

    def heads(self, prefix: str, end: str) -> list[str]:
        """Returns what the names below ``prefix`` begin with, up to the first ``end``."""
        return [name for name, _ in self._bucket.tagged_names(self._prefix(prefix), end)]

    def list(self, prefix: str) -> list[str]:
        below = self._prefix(prefix)
        found = set(self._bucket.names(below))
        # An image that was begun and never finished is in no list of objects.
        for key in self._unfinished() if prefix not in _DOCUMENTS else ():
            if key.startswith(below):
                found.add(key[len(below) :].partition("/")[0])
        return sorted(found - self._hidden(prefix, found))

    def tags(self, prefix: str) -> dict[str, str]:
        """Returns the names directly below ``prefix``, each with its tag; "" for none."""
        found = dict(self._bucket.tagged_names(self._prefix(prefix)))
        hidden = self._hidden(prefix, found)
        return {name: found[name] for name in sorted(found) if name not in hidden}

    def _hidden(self, prefix: str, names: Iterable[str]) -> set[str]:
        """Returns the names that no list shows: the store's own, and what counts as removed. (A pin
        keeps its checkpoint while it is there: another may have set it again.)
        """
        above, refused = f"{prefix}/" if prefix else "", set[str]()
        if prefix != PINS:
            refused = {path.removeprefix(above) for path in self._removals.refused}
        return refused.union(name for name in names if not name or name.startswith("."))

    def recall(self, name: str, limit_bytes: int) -> bytes:
        """Returns a note that an earlier process left here; b"" for none."""
        outcome = self._bucket.get(self._note_key(name), 0, limit_bytes - 1)
        end = outcome.header("content-range").rpartition("/")[2]
        return outcome.body if outcome.is_done and end == str(len(outcome.body)) else b""

    def note(self, name: str, data: bytes) -> None:
        """Leaves a note for later processes, in place of the one of this name."""
        self._may_change()
        outcome = self._bucket.put(self._note_key(name), [data])
        self._bucket.require(outcome, "publish", name)

    def _note_key(self, name: str) -> str:
        return f"{self._below}.{check_path(name)}"

    def _unfinished(self) -> frozenset[str]:
        """Returns the keys of unfinished uploads: listed once, and again after each of our own."""
        if self._uploads is None:
            self._uploads = frozenset(one.key for one in self._bucket.uploads(self._below))
        return self._uploads

    def unfinished(self) -> tuple[str, ...]:
        """Returns the paths of all images that were begun and not finished."""
        return tuple(sorted(key[len(self._below) :] for key in self._unfinished()))

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        key = self._key(path)
        self._may_change([path])
        self._removals.finish(self._lease())
        self._removals.name_again(path, self._held)
        self._require_room(path)
        tag = self._tag(key, path) if replace else ""
        is_new = not replace or (self._is_compared(path) and not tag)
        outcome = self._bucket.put(key, [data], if_none=is_new, if_match=tag)
        if outcome.is_done:
            self._require_held()  # else it came after another's take-over, who does not know of it
            return
        if outcome.status == 412 and outcome.is_first_try and not replace:
            raise already_published(path, self.url)
        if outcome.status and outcome.status != 412:
            raise self._bucket.failure(outcome, "publish", path)
        self._settle(outcome, path, data, replace=replace)

    def _is_compared(self, path: str) -> bool:
        """True where a replacement names what it replaces: a try of it that nobody answered would
        undo the next one. (A reader has its lease for itself.)
        """
        return self._kept is not None and self._kept.replace and not _is_readers(path)

    def _tag(self, key: str, path: str) -> str:
        """Returns the tag of the object that is about to be replaced; "" for none."""
        if not self._is_compared(path):
            return ""
        found = self._bucket.head(key)
        if not found.is_absent:
            self._bucket.require(found, "look-up", path)
        return found.header("etag") if found.is_done else ""

    def _settle(self, outcome: Outcome, path: str, data: bytes, *, replace: bool) -> None:
        """Finds out by reading back what came of a request that may have had its effect."""
        found = self._bucket.get(self._key(path))
        if found.is_done and found.body == data:
            self._require_held()
            return
        if found.is_done and not replace:
            raise already_published(path, self.url)
        if outcome.status == 412 and outcome.is_first_try:
            text = f"publish of {path} in {self.url} failed: another wrote it meanwhile"
            raise StorageError(text, operation="publish", path=path, url=self.url, errno=0)
        error = self._bucket.failure(outcome, "publish", path)
        if found.status == 404 or found.is_done:
            raise StorageError(
                f"{error} Whether it was published is not known: it is not there now, and may be "
                "later.",
                **error.fields,
            )
        raise error

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        check_range(path, 0, size_bytes)
        key = self._key(path)
        self._may_change()
        self._removals.finish(self._lease())
        self._require_not_refused(path)
        self._require_room(path)
        is_resumed = path.split("/")[-2:][0] in self._resumed
        if aside:
            return self._create_over(key, path, size_bytes, aside)
        if self.exists(path):
            if is_resumed and self.size_bytes(path) == size_bytes:
                return ComparingSink(self, path, size_bytes)
            raise already_published(path, self.url)
        if size_bytes > self._part_bytes:
            self._uploads = None
        begun = [one for one in self._bucket.uploads(key) if one.key == key] if is_resumed else []
        return UploadSink(
            self._bucket,
            key,
            path,
            size_bytes,
            self._may_change,
            part_bytes=part_bytes(size_bytes, self._part_bytes),
            found=(begun[0], self._bucket.parts(begun[0])) if begun else None,
        )

    def resume(self, above: str, start: str) -> str:
        """Finds a directory below ``above`` that a writer left who has ended since: its images are
        gone on with. Returns its name, "" for none.

        ``start``: what its name begins with, but for the last six letters.
        """
        lease = self._lease()
        if lease is None or not lease.is_alone:  # who left it may go on with it
            return ""
        below, own = f"{self._prefix(above)}{start}", f"{above}/{start}"
        begun = (key[len(below) :] for key in self._unfinished() if key.startswith(below))
        ends = {*self._bucket.names(below), *(key.partition("/")[0] for key in begun)}
        refused = self._removals.refused
        fit = (end for end in ends if len(end) == _RANDOM and f"{own}{end}" not in refused)
        found = min((f"{start}{end}" for end in fit), default="")
        if found:
            self._resumed.add(found)
        return found

    def _create_over(self, key: str, path: str, size_bytes: int, aside: str) -> ImageSink:
        """An upload that takes the place of what has the name now, and of nothing else."""
        outcome = self._bucket.head(key)
        if outcome.status != 404:
            self._bucket.require(outcome, "look-up", path)
            self._copy_to(path, int(outcome.header("content-length")), aside)
        return UploadSink(
            self._bucket,
            key,
            path,
            size_bytes,
            self._may_change,
            part_bytes=part_bytes(size_bytes, self._part_bytes),
            over=outcome.header("etag") if outcome.is_done else "",
        )

    def _copy_to(self, path: str, size_bytes: int, aside: str) -> None:
        sink = self.create(aside, size_bytes)
        try:
            for start in range(0, size_bytes, _PIECE_BYTES):
                wanted = min(_PIECE_BYTES, size_bytes - start)
                sink.write(start, memoryview(self.read(path, start, wanted)))
            sink.finish()
        except BaseException:
            sink.abort()
            raise

    def remove(self, path: str) -> None:
        self._key(path)
        self.remove_all([path], [])

    def remove_tree(self, prefix: str) -> None:
        self.remove_all([], [prefix])

    def remove_all(self, files: Sequence[str], trees: Sequence[str]) -> None:
        """Removes objects and all below directories, by few requests for all of them."""
        for path in (*files, *trees):
            check_path(path)
        if not files and not trees:
            return
        self._may_change([*files, *trees])
        self._removals.finish(self._lease())
        self._removals.remove(files, trees, self._lease())
        if trees and self._uploads is not None:
            below = tuple(f"{self._below}{path}/" for path in trees)
            there = (key for key in self._uploads if not f"{key}/".startswith(below))
            self._uploads = frozenset(there)

    @property
    def refused(self) -> frozenset[str]:
        """Paths that the server refuses to remove."""
        return self._removals.refused

    def holding(self) -> str:
        """Returns what tells this holding of the root's lock from every other; "" for none."""
        lease = self._lease()
        return "" if lease is None or lease.is_lost else lease.nonce

    def lock(self, name: str, owner: str) -> Lock:
        key = self._lock_key(name)
        self._may_change()
        if os.environ.get(ONE_WRITER):
            return SoleWriter()
        if self._kept is not None and not self._kept.replace:
            raise _no_lease(self.url, self._kept.server)
        times = self._lease_times
        patience = Patience(total_s=times.renew_s, is_strict=True)
        bucket = open_bucket(
            self._bucket.name, self.url, patience=patience, answer_s=max(1.0, times.renew_s / 2)
        )
        lease = take_lease(bucket, key, name, owner, times)
        of_next, own = changed_under(self._below, name), named_again(self._below, name)
        lease.unanswered_s = partial(self._unanswered_s, of_next)
        lease.late_removals_s = partial(self._unanswered_s, own)
        try:
            with self._lock:
                self._held = [one for one in self._held if one.is_held] + [lease]
            if name == WRITER and self._is_older(lease):
                lease.distrust()
            self._removals.adopt(lease)
        except BaseException:
            lease.release()
            raise
        return lease

    def _is_older(self, lease: ObjectLease) -> bool:
        """True where a root without a lease object was there well before this lease, and where
        nothing says that it was not: the next holder trusts what this one releases.
        """
        made = self._made[1] if self._made[0] + _FRESH_S > time.monotonic() else ""
        if lease.began is not None and not made:
            outcome = self._bucket.head(self._below + ROOT_FILE)
            if not outcome.is_done:
                return not outcome.is_absent
            made = outcome.header("last-modified")
        said = Outcome(200, headers={"date": lease.began or "", "last-modified": made})
        return quiet_s(said) > _YOUNG_S

    def _unanswered_s(self, above: tuple[str, ...]) -> float:
        """Returns for how long a request of this process may land whose end is not known."""
        return max(0.0, self._bucket.unanswered_s(above) + self.settle_s - time.monotonic())

    def unsettled_s(self) -> float:
        """Returns for how long a request may land that what the holder of the lock names does not
        wait for: of holders before it, or of the one that a root without a lease is told to have;
        or a removal of its own that was answered at a later try.
        """
        lease = self._lease()
        if lease is not None:
            return lease.unsettled_s
        if not os.environ.get(ONE_WRITER):
            return 0.0
        ages = (self._bucket.youngest_s(f"{self._below}{above}/") for above in _WRITTEN)
        return max(0.0, self.settle_s - min(ages))

    def view_lock(self, name: str) -> LeaseView:
        """Returns the lock as others see it; takes nothing."""
        return LeaseView(self._bucket, self._lock_key(name), name, self._lease_times)

    def _lock_key(self, name: str) -> str:
        before, _, last = check_path(name).rpartition("/")
        return f"{self._below}{before}{'/' if before else ''}.{last}.lock"

    def _lease(self) -> ObjectLease | None:
        return next((lease for lease in self._held if lease.is_held), None)

    def _may_change(self, paths: Iterable[str] = ()) -> None:
        """Called before each change: it is refused when a lock of this store was lost. A reader's
        leases have names of their own, and ask nothing of the server.
        """
        self._require_held()
        is_lease = any(paths) and all(map(_is_readers, paths))
        if self._kept is None and not is_lease:
            self._kept = require_conditions(self._bucket, self.probe_prefix)

    def _require_held(self) -> None:
        for lease in tuple(self._held):
            lease.require_held()

    def _require_not_refused(self, path: str) -> None:
        """Raises StorageError below a directory that the server did not let go: the next holder of
        the lock removes it.
        """
        for above in self._removals.refused:
            if path.startswith(f"{above}/"):
                error = StorageError(
                    f"{path} in {self.url} cannot be written: {above} is to be removed, which the "
                    "server refuses",
                    operation="create",
                    path=path,
                    url=self.url,
                )
                error.retryable = False
                raise error

    def _require_room(self, path: str) -> None:
        """Refuses a name below that of an object, as a directory does."""
        parts = path.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if above in self._no_files or _RANDOM_NAME.fullmatch(above):
                continue
            if self.exists(above):
                raise StorageError(
                    f"publish of {path} in {self.url} failed: {above} is an object, and no name "
                    "can be below it",
                    operation="publish",
                    path=path,
                    url=self.url,
                    errno=0,
                )
            self._no_files.add(above)

    def _key(self, path: str) -> str:
        if len((self._below + check_path(path)).encode()) > 1024:
            raise UsageError(f"{path[:40]}... is longer than the 1024 bytes of a key", path=path)
        return self._below + path

    def _prefix(self, prefix: str) -> str:
        return f"{self._below}{check_prefix(prefix)}/" if prefix else self._below

    def _found(self, outcome: Outcome, path: str) -> Outcome:
        """Returns the outcome of a read; NotFound, or StorageError where it failed."""
        if outcome.is_absent:
            raise NotFound(f"there is no {path} in {self.url}", path=path)
        self._bucket.require(outcome, "read", path)
        return outcome


def _is_readers(path: str) -> bool:
    return path.startswith(_READERS_LEASES)


def _no_lease(url: str, server: str) -> StorageError:
    error = StorageError(
        f"{url} cannot be locked: its server ({server}) does not refuse a replacement of what "
        "another has replaced (If-Match), so two runs could write there at once. Use another "
        f"server; or make sure that only one process ever writes there, and set {ONE_WRITER}=1.",
        operation="lock",
        url=url,
    )
    error.retryable = False
    return error
