"""Removes objects so that a holder of the lock who was stopped and woken again can do no harm.

A holder announces what it removes in an object of its own, then renews its lease, which the server
must take, and then removes it. Whoever takes the lease completes what others announced before it
names anything, so all that an earlier holder may still remove is gone by then, and known to be.
tests/storage/test_zombies.py searches all interleavings of two holders.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Collection, Iterable, Sequence

from holdfast.errors import HoldfastError, StorageError, UsageError
from holdfast.events import warn
from holdfast.storage.base import check_path
from holdfast.storage.bucket import BULK, Bucket
from holdfast.storage.files import PINS
from holdfast.storage.lease_lock import ObjectLease
from holdfast.storage.wrap import renew_in_child

#: Where removals are announced, below the name of each lock.
ANNOUNCED = ".removals"
#: A checkpoint's manifest, and what keeps it from removal: objects of one name in both.
_MANIFESTS, _PINS = "manifests/", f"{PINS}/"
_LAYOUTS = "layouts/"
#: An announcement that says nothing any more.
_NOTHING = b'{"files": [], "trees": []}'
#: For so long none is emptied where a server did not take that: each try costs all its patience.
_PAUSE_S = 600.0


class Removals:
    """The removals of one root. Safe from several threads."""

    def __init__(self, bucket: Bucket, below: str) -> None:
        self._bucket, self._below = bucket, below
        self._count = 0
        self._left: dict[str, tuple[list[str], list[str]]] = {}
        """What was announced and not removed, by its announcement."""
        self._over = set[str]()
        """Announcements that could not be taken back, of what was removed or is not to be removed:
        the next holder would carry them out, whatever has these names by then."""
        self._lands: dict[str, float] = {}
        """Until when a try that nobody answered may make an announcement where there is none."""
        self._emptied = set[str]()
        """Those of them that say nothing any more."""
        self._removed = set[str]()
        """Those that could not be emptied, and were removed."""
        self._next_s = -math.inf
        """When it is tried again to empty one, which was refused last."""
        self._refused: dict[str, tuple[str, ...]] = {}
        """Paths that the server refuses to remove, by the announcement where they stay."""
        self._failed: tuple[float, HoldfastError] | None = None
        """When ``finish`` failed last, and of what."""
        self.in_child()
        renew_in_child(self)

    def in_child(self) -> None:
        """Makes new locks."""
        self._lock, self._finishing = threading.Lock(), threading.RLock()

    @property
    def refused(self) -> frozenset[str]:
        """Paths that the server refuses to remove: they stay announced, and count as gone."""
        return frozenset(path for paths in tuple(self._refused.values()) for path in paths)

    def remove(self, files: Sequence[str], trees: Sequence[str], lease: ObjectLease | None) -> None:
        """Removes objects, and everything below directories. Without a lease nothing is announced:
        what is removed then is the caller's own.
        """
        if lease is None:
            self._remove(files, trees)
            return
        with self._lock:
            self._count += 1
            key = f"{self._of(lease)}{lease.nonce}-{self._count:08d}"
        said = _announcement(files, trees)
        what = [*files, *trees][0]
        self._lands[key] = math.inf
        try:
            outcome = self._bucket.put(key, [said], if_none=True)
            if outcome.is_first_try and outcome.status:
                del self._lands[key]
            if outcome.status != 412:  # by its name it is ours, of a try that nobody answered
                self._bucket.require(outcome, "removal", what)
            lease.require_renewed()
        except BaseException:  # nothing was removed, and nobody shall do it later
            self._take_back(key)
            raise
        try:
            self._remove(files, trees)
        except BaseException as error:
            if not self._note_refused(key, error, files, trees):
                self._left[key] = list(files), list(trees)
            raise
        self._take_back(key)

    def _take_back(self, key: str) -> None:
        """Removes an announcement now, and before anything is named unless it is surely gone."""
        self._over.add(key)
        with contextlib.suppress(HoldfastError), self._finishing:
            self._drop(key)

    def _drop(self, key: str) -> None:
        """Removes an announcement; or empties it where the server lets none go, and for as long as
        it may be made again where there is none. Where that is not to be had, it is removed each
        time.
        """
        may_land = self._may_land(key)
        if may_land:
            self._over.add(key)
            if key in self._emptied:
                return
            if time.monotonic() >= self._next_s:
                if self._bucket.put(key, [_NOTHING]).is_done:
                    if key not in self._removed:  # else a removal of it may land, and it after that
                        self._emptied.add(key)
                    return
                self._next_s = time.monotonic() + _PAUSE_S
            self._removed.add(key)
        outcome = self._bucket.delete(key)
        if not outcome.is_done and not self._bucket.failure(outcome, "removal", key).retryable:
            outcome = self._bucket.put(key, [_NOTHING])
        self._bucket.require(outcome, "removal", key)
        if not may_land:
            self._over.discard(key)

    def _may_land(self, key: str) -> bool:
        now_s = time.monotonic()
        until_s = min(self._lands.get(key, -math.inf), now_s + self._bucket.settle_s)
        if until_s <= now_s:
            return False
        self._lands[key] = until_s
        return True

    def finish(self, lease: ObjectLease | None) -> None:
        """Completes what this holder announced and could not remove, and takes back what it could
        not take back then. Called before it names anything again: the next holder would remove what
        this one has relied on since.
        """
        if lease is None or not (self._left or self._over):
            return
        begun_s = time.monotonic()
        with self._finishing:  # else another thread would remove what this one names next
            if self._failed is not None and self._failed[0] >= begun_s:
                raise self._failed[1]  # it was tried while this one waited
            try:
                self._finish(lease)
            except HoldfastError as error:
                self._failed = time.monotonic(), error
                raise

    def _finish(self, lease: ObjectLease) -> None:
        own = self._of(lease) + lease.nonce  # else who took the lease did it
        for key, (files, trees) in list(self._left.items()):
            if key.startswith(own):
                self._complete(key, files, trees, lease)
            self._left.pop(key, None)
        for key in list(self._over):
            if key.startswith(own) or key in self._lands:
                self._drop(key)
            else:
                self._over.discard(key)

    def adopt(self, lease: ObjectLease) -> None:
        """Completes what earlier holders of this lock announced, but for what was pinned since, and
        what nobody answered and landed when the next had the lock: nothing was removed for it.
        """
        own, left = self._of(lease), set()
        # What was refused under an earlier holding may have gone since, and been named again.
        for key in tuple(self._refused):
            if key.startswith(own):
                self._refused.pop(key, None)
        for key in list(self._bucket.keys(own)):
            if not lease.may_have_announced(key[len(own) :]):
                self._drop(key)
                continue
            found = self._bucket.get(key)
            if found.status == 404:
                continue
            self._bucket.require(found, "read", key)
            files, trees = self._read(key, found.body)
            if (files or trees) and not self._complete(key, files, trees, lease):
                left.add(key[len(own) :])
                if lease.unsettled_s:  # a try of an earlier holder may make it again
                    self._lands[key] = math.inf
        lease.note_completed(left)

    def _read(self, key: str, data: bytes) -> tuple[list[str], list[str]]:
        try:
            said = json.loads(data)
            if "path" in said:  # as an earlier version said it
                said = {"files": [], "trees": [], _kind(said): [said["path"]]}
            files, trees = ([check_path(one) for one in said[k]] for k in ("files", "trees"))
        except (ValueError, KeyError, TypeError, UsageError):
            error = StorageError(
                f"{key} in {self._bucket.url} announces a removal, and cannot be read: an earlier "
                "holder of the lock may still remove what is relied on. Use the newest version of "
                "Holdfast that wrote there; or remove this object once no such process runs.",
                operation="read",
                path=key,
                url=self._bucket.url,
                errno=0,
            )
            error.retryable = False
            raise error from None
        return files, trees

    def _complete(
        self, key: str, files: Sequence[str], trees: Sequence[str], lease: ObjectLease
    ) -> bool:
        """Removes what was announced; False where the server refuses that: it stays announced."""
        lease.require_renewed()
        left = [path for path in files if not self._is_pinned(path)]
        try:
            self._remove(left, trees)
        except StorageError as error:
            if not self._note_refused(key, error, left, trees):
                raise
            if pinned := set(files).difference(left):  # else who is next asks for its pin anew
                self._leave_out(key, pinned)
            warn(f"{error} It stays there, and counts as removed.")
            return False
        self._drop(key)
        return True

    def _note_refused(
        self, key: str, error: BaseException, files: Sequence[str], trees: Sequence[str]
    ) -> bool:
        """Notes paths as refused where the server answered so; False where that is not known."""
        if not isinstance(error, StorageError) or error.retryable:
            return False
        if error.fields.get("operation") != "removal":
            return False
        self._refused[key] = *files, *trees
        return True

    def name_again(self, path: str, leases: Iterable[ObjectLease]) -> None:
        """Takes a path out of what is announced and was refused. Called before it is published: the
        next holder would remove what is relied on since. StorageError where that is not known.
        """
        with self._finishing:
            for key, paths in tuple(self._refused.items()):
                if path not in paths:
                    continue
                self._leave_out(key, {path})
                left = tuple(one for one in paths if one != path)
                for lease in () if left else leases:
                    if lease.is_held and key.startswith(self._of(lease)):
                        lease.forget(key.rpartition("/")[2])
                self._refused[key] = left

    def _leave_out(self, key: str, paths: Collection[str]) -> None:
        """Writes an announcement anew without these paths, in the place of what was read and of
        nothing else: a try of it that nobody answered undoes no later one.
        """
        found = self._bucket.get(key)
        if found.is_absent:
            return
        self._bucket.require(found, "read", key)
        files, trees = (
            [one for one in named if one not in paths] for named in self._read(key, found.body)
        )
        if not files and not trees:
            self._drop(key)
            return
        said = _announcement(files, trees)
        outcome = self._bucket.put(key, [said], if_match=found.header("etag"))
        if not outcome.is_done and self._bucket.get(key).body != said:
            raise self._bucket.failure(outcome, "removal", key)

    def _is_pinned(self, path: str) -> bool:
        if not path.startswith(_MANIFESTS):
            return False
        pin = self._below + _PINS + path.removeprefix(_MANIFESTS)
        outcome = self._bucket.head(pin)
        if outcome.status != 404:
            self._bucket.require(outcome, "look-up", pin)
        return outcome.is_done

    def _of(self, lease: ObjectLease) -> str:
        return f"{self._below}{ANNOUNCED}/{lease.name}/"

    def _remove(self, files: Sequence[str], trees: Sequence[str]) -> None:
        if not files and not trees:
            return
        keys, above = ([self._below + path for path in paths] for paths in (files, trees))
        below = tuple(f"{key}/" for key in above)
        begun = self._bucket.uploads(os.path.commonpath(above)) if above else []
        refused = list[StorageError]()
        for upload in (one for one in begun if f"{one.key}/".startswith(below)):
            outcome = self._bucket.abort_upload(upload.key, upload.id)
            if not outcome.is_done and outcome.status != 404:
                refused.append(self._bucket.failure(outcome, "removal", upload.key))
                if refused[-1].retryable:  # it is not known
                    raise refused[-1]
        for key in above:
            there = self._bucket.keys(key + "/")
            named = [one for one in there if not _leads_away(one[len(key) :])]
            keys += _with_directories(named, key + "/")
        if len(keys) == 1 and files:
            self._bucket.require(self._bucket.delete(keys[0]), "removal", files[0])
        else:
            self._bucket.delete_many(keys)
        if refused:
            raise refused[0]


def changed_under(below: str, lock: str) -> tuple[str, ...]:
    """Returns what the requests begin with that the next holder of a lock needs to know of: who
    sets a pin, of late removals of pins. A pin that is set late harms none.
    """
    if lock != PINS:
        return ("",)
    announced = f"{below}{ANNOUNCED}/{lock}/"
    return *named_again(below, lock), f"PUT {announced}", f"DELETE {announced}"


def named_again(below: str, lock: str) -> tuple[str, ...]:
    """Returns what the removals begin with of what is made anew under its name, by the holder of a
    lock: pins, or layouts, which may be among the many that one request removes.
    """
    return (f"DELETE {below}{_PINS}",) if lock == PINS else (f"DELETE {below}{_LAYOUTS}", BULK)


def _announcement(files: Sequence[str], trees: Sequence[str]) -> bytes:
    return json.dumps({"files": list(files), "trees": list(trees)}).encode()


def _kind(said: dict[str, object]) -> str:
    return "trees" if said["is_tree"] else "files"


def _leads_away(key: str) -> bool:
    """True for a name with "." or ".." in it, as none of ours has: a server that takes it for a
    path would remove what that leads to.
    """
    return not {".", ".."}.isdisjoint(key.split("/"))


def _with_directories(keys: list[str], above: str) -> list[str]:
    """Adds the directories, deepest first: some servers keep and list those that became empty."""
    found = {above}
    for key in keys:
        parts = key[len(above) :].split("/")[:-1]
        found.update(above + "/".join(parts[: n + 1]) + "/" for n in range(len(parts)))
    return [*keys, *sorted(found - set(keys), key=lambda one: (-one.count("/"), one))]
