"""Defines the contract of a store: a name is published whole and durable, or it does not exist.

All other packages use only the ``Store`` protocol, so every kind of store must refuse the same
things in the same words. ``holdfast.testing.store_suite.StoreSuite`` is
the executable form of this file; the functions below the protocols are shared by all stores.
"""

from __future__ import annotations

import enum
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from holdfast.errors import AlreadyPublished, RootBusy, StorageError, UsageError


class ImageSink(Protocol):
    """A new image being filled by several threads, in any order.

    An unfinished image may already be visible; only a manifest makes it count. After a failed
    write or finish the image can only be aborted.
    """

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Write all of ``data`` at ``offset_bytes``. Safe from several threads."""
        ...

    def finish(self) -> None:
        """Make the image durable: on return it survives a loss of power.

        Call it when every write has returned. Raises UsageError when bytes were never written.
        """
        ...

    def abort(self) -> None:
        """Remove the image, also while writes are running. Never raises.

        After a successful ``finish`` it does nothing.
        """
        ...


class Lock(Protocol):
    """A lock, held from its creation until ``release``, or until its process dies."""

    def release(self) -> None:
        """Release the lock. A second release does nothing."""
        ...

    def __enter__(self) -> Lock: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class ReadableStore(Protocol):
    """What is only read, as a tier beside a root is: see ``Store``."""

    @property
    def url(self) -> str: ...

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes: ...

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None: ...

    def size_bytes(self, path: str) -> int: ...

    def exists(self, path: str) -> bool: ...

    def list(self, prefix: str) -> list[str]: ...


class Store(Protocol):
    """A flat namespace of relative "/"-paths below a root.

    Names beginning with a dot belong to the store itself: they are refused in paths and never
    listed. Invalid paths raise UsageError, missing names NotFound, and errors of the medium
    StorageError.
    """

    @property
    def url(self) -> str:
        """The location, for people."""
        ...

    def identity(self) -> str:
        """Returns an id of this root, independent of its name: equal on all hosts, different for a
        copy.

        A short text. Raises NotFound where there is no ``holdfast.json``.
        """
        ...

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """Returns exactly ``size_bytes`` bytes (None: to the end); raises StorageError when there
        are fewer.
        """
        ...

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        """Fill the whole of ``buffer``; raises StorageError when there are fewer bytes.

        ``is_shared``: other processes of this host read the same bytes at about this time, and
        should find them in the machine's cache, if it has one.
        """
        ...

    def size_bytes(self, path: str) -> int:
        """Returns the length of a file."""
        ...

    def exists(self, path: str) -> bool:
        """True if there is a file of this name; directories do not count."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Returns the sorted names of files and directories directly below ``prefix`` ("": the
        root).

        Empty when there is none. A directory that became empty may be listed or not.
        """
        ...

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Give ``data`` a name, atomically, durable on return.

        Without ``replace`` a taken name raises AlreadyPublished, and of two racing writers
        exactly one succeeds. After any other error the name may or may not exist, but never
        with part of the data.
        """
        ...

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        """Returns a new image of known size to be filled; AlreadyPublished when the name is
        taken.

        ``aside``: a file of this name keeps it until the new one is durable, in ``finish``; then it
        has the name ``aside``, which must be free, and the new one takes its place at once.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file, durably. A missing one is fine."""
        ...

    def remove_tree(self, prefix: str) -> None:
        """Remove everything below a directory. A missing one is fine.

        Not atomic: after a stop in between, part of it may remain. Remove first the documents that
        name it.
        """
        ...

    def lock(self, name: str, owner: str) -> Lock:
        """Take the lock ``name`` and sign it with ``owner``; RootBusy quotes the holder's text."""
        ...


def settle_s(store: Store) -> float:
    """Returns for how many seconds a change may still take effect that nobody answered: 0 for a
    directory, whose process has ended or has its answer.
    """
    return float(getattr(store, "settle_s", 0.0))


def unsettled_s(store: Store) -> float:
    """Returns for how many seconds a request may still land that the holder of the root's lock
    cannot know of; 0 for a directory. Until then nothing is removed for being unnamed.
    """
    found = getattr(store, "unsettled_s", None)
    return 0.0 if found is None else float(found())


def is_lost(lock: Lock) -> bool:
    """Returns True for a lock that another has taken over, as happens to that of a bucket."""
    return bool(getattr(lock, "is_lost", False))


def holding(store: Store) -> str:
    """Returns what tells this holding of a bucket's lock from every other: what the holder has
    seen or written under it, no other has changed. "" where that is not known.
    """
    found = getattr(store, "holding", None)
    return "" if found is None else str(found())


def sync_names(store: Store, above: str) -> None:
    """Makes the names below a directory durable that are there, whoever gave them and may have died
    before they were. Changes nothing, so it may run beside what publishes and removes there.
    """
    found = getattr(store, "sync_names", None)
    if found is not None:
        found(above)


def publish_transient(store: Store, path: str, data: bytes) -> None:
    """Gives ``data`` a name as ``publish(replace=True)`` does, for what a living process says of
    itself: it need not survive a loss of power, so a directory waits for no disk.
    """
    found = getattr(store, "publish_transient", None)
    store.publish(path, data, replace=True) if found is None else found(path, data)


def remove_transient(store: Store, path: str) -> None:
    """Removes what ``publish_transient`` named; a loss of power may bring it back."""
    getattr(store, "remove_transient", store.remove)(path)


def remove_all(store: Store, files: Sequence[str], trees: Sequence[str]) -> None:
    """Removes files and all below directories; together, where a store can."""
    found = getattr(store, "remove_all", None)
    if found is not None:
        found(files, trees)
        return
    for path in files:
        store.remove(path)
    for path in trees:
        store.remove_tree(path)


def resume(store: Store, above: str, start: str) -> str:
    """Returns the name of a directory below ``above`` that begins with ``start`` and whose images
    can be gone on with; "" where there is none, and in stores that only write anew.
    """
    found = getattr(store, "resume", None)
    return "" if found is None else str(found(above, start))


def tags(store: Store, prefix: str) -> dict[str, str] | None:
    """Returns the names directly below ``prefix``, each with a text that another content would
    change, "" where the server gives none; None for a directory.
    """
    found = getattr(store, "tags", None)
    return None if found is None else dict(found(prefix))


def tag_pages(store: Store, prefix: str) -> Iterator[dict[str, str]]:
    """Yields what ``tags`` returns in pages, each listed when it is asked for."""
    found = getattr(store, "tag_pages", None)
    if found is not None:
        yield from found(prefix)
    elif (whole := tags(store, prefix)) is not None:
        yield whole


def heads(store: Store, prefix: str, end: str) -> list[str]:
    """Returns what the names directly below ``prefix`` begin with, up to the first ``end``: in a
    bucket by few requests, however many names there are.
    """
    found = getattr(store, "heads", None)
    names = store.list(prefix) if found is None else found(prefix, end)
    return sorted({name.partition(end)[0] for name in names})


def recall(store: Store, name: str, limit_bytes: int) -> bytes:
    """Returns a note that an earlier process left in a bucket for later ones; b"" for none, for one
    beyond ``limit_bytes``, and in a directory. Nothing may rest on it alone.
    """
    found = getattr(store, "recall", None)
    return b"" if found is None else bytes(found(name, limit_bytes))


def note(store: Store, name: str, data: bytes) -> None:
    """Leaves a note for ``recall``, in place of the one of this name; nothing in a directory."""
    found = getattr(store, "note", None)
    if found is not None:
        found(name, data)


def read_at_most(store: ReadableStore, path: str, limit_bytes: int) -> bytes | int:
    """Returns a whole file; its size, before memory is taken for it, beyond ``limit_bytes``."""
    found = getattr(store, "read_at_most", None)
    if found is not None:
        result: bytes | int = found(path, limit_bytes)
        return result
    size_bytes = store.size_bytes(path)
    return size_bytes if size_bytes > limit_bytes else store.read(path)


class MappedBytes(Protocol):
    """The bytes of a published image as memory of the caller's own, read as they are used."""

    memory: memoryview

    def load(self, start: int, stop: int) -> None:
        """Read a range from storage; OSError where that fails."""
        ...


def mapped(store: ReadableStore, path: str) -> MappedBytes | None:
    """Returns an image as such memory; None where a mapping is not as good as a read."""
    found = getattr(store, "mapped", None)
    result: MappedBytes | None = None if found is None else found(path)
    return result


def free_bytes(store: Store) -> int | None:
    """Returns the bytes that are free for a user where the store is; None where nobody can say."""
    found = getattr(store, "free_bytes", None)
    result: int | None = None if found is None else found()
    return result


def unfinished(store: Store) -> list[str]:
    """Returns images that were begun and never finished, where no listing of files shows them.

    ``remove_tree`` of such a path ends what was begun, and leaves a file of this name alone.
    """
    found = getattr(store, "unfinished", None)
    return [] if found is None else list(found())


def source_facts(store: Store, path: str) -> list[str]:
    """Returns what tells the files of another writer that are shown as the checkpoint of this
    manifest from others of their names; nothing for a root of ours, where nothing is changed.
    """
    found = getattr(store, "facts", None)
    return [] if found is None else list(found(path))


def require_unchanged(store: Store, path: str) -> None:
    """Raises ForeignFormatError when one of these files is another by now than when it was read."""
    found = getattr(store, "require_unchanged", None)
    if found is not None:
        found(path)


def is_link(store: Store, path: str) -> bool:
    """True if the name is a link, which may lead out of the root; only directories have them."""
    found = getattr(store, "is_link", None)
    return False if found is None else bool(found(path))


def check_path(path: str) -> str:
    """Returns ``path`` itself when it is a plain relative name, raises UsageError otherwise."""
    parts = path.split("/")
    if "\0" in path or any(not part or part.startswith(".") for part in parts):
        raise UsageError(
            f"{path!r} is not a path in a store: it must be relative, with parts that are not "
            'empty and do not begin with "."',
            path=path,
        )
    return path


def check_prefix(prefix: str) -> str:
    """Checks a directory as ``check_path`` does; "" is the root."""
    return check_path(prefix) if prefix else prefix


def check_range(path: str, offset_bytes: int, size_bytes: int) -> None:
    """Raises UsageError for a range that begins before the file or has a negative length."""
    if offset_bytes < 0 or size_bytes < 0:
        raise UsageError(
            f"{path}: a range cannot begin at {offset_bytes} and have {size_bytes} bytes"
        )


def new_name(aside: str) -> str:
    """Returns the name of a file until it takes the place of the one that is then ``aside``."""
    return f"{aside}.new"


def flat(data: memoryview) -> memoryview:
    """Returns the same memory as plain bytes, whatever its items and shape are."""
    if data.nbytes == 0:  # cast refuses shapes with a zero
        return memoryview(b"")
    if not data.c_contiguous:
        raise UsageError("only contiguous memory can be read or written as it lies")
    return data.cast("B")


# Errors that go away by themselves, or by pruning, are worth another try; these need a person
# first.
_PERMANENT = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EFBIG,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
    }
)

_CANNOT = "The file system cannot do this: run `holdfast doctor`, or choose another root."
_ADVICE = {
    errno.ENOSPC: "Free some space or keep fewer checkpoints.",
    errno.EDQUOT: "Free some of the quota or keep fewer checkpoints.",
    errno.EACCES: "Give this user the right to write there, or choose another root.",
    errno.EPERM: "The file system or its mount does not allow this; choose another root.",
    errno.EOPNOTSUPP: _CANNOT,
    errno.ENOSYS: _CANNOT,
    errno.EROFS: "Mount it writable, or choose another root.",
    errno.EFBIG: "Raise the file size limit (ulimit -f), or choose another file system.",
    errno.ENAMETOOLONG: "Choose a shorter root.",
    errno.ENOTDIR: "Part of the path is a file; the root must be a directory.",
    errno.ENOENT: "A directory above it is missing, or a link leads to nothing.",
    errno.EIO: "The disk or the network file system fails; look at the system's log (dmesg).",
    errno.ESTALE: "The network file system was taken away meanwhile; mount it again.",
}


def os_failure(
    operation: str, path: str, url: str, cause: OSError, *, room: str = ""
) -> StorageError:
    """Returns the StorageError for an error of the operating system; raise it ``from`` the cause.

    ``room``: the bytes needed and free, where that is the reason.
    """
    code = cause.errno or 0
    reason = f"{os.strerror(code)} ({errno.errorcode.get(code, code)})" if code else str(cause)
    reason += f", {room}" if room else ""
    message = f"{operation} of {path} in {url} failed: {reason}. {_ADVICE.get(code, '')}".rstrip()
    error = StorageError(message, operation=operation, path=path, url=url, errno=code)
    error.retryable = code not in _PERMANENT
    return error


@contextmanager
def reporting(operation: str, path: str, url: str) -> Iterator[None]:
    """Turn every OSError inside into the store's own error, the cause kept."""
    try:
        yield
    except OSError as cause:
        raise os_failure(operation, path, url, cause) from cause


def already_published(path: str, url: str) -> AlreadyPublished:
    """Returns the error for a name that is taken."""
    return AlreadyPublished(
        f"{path} in {url} exists already and is never overwritten", path=path, url=url
    )


def another_root(url: str, lock: str) -> StorageError:
    """Returns the error for a root that is no longer the directory whose lock is held."""
    return StorageError(
        f"{url} is not the directory any more whose lock {lock!r} is held: it was moved, removed "
        "or replaced, or its file system is not mounted now. Nothing was written there. Bring it "
        "back as it was, or start this run again with the root's new name; or end it and start "
        "with another root.",
        url=url,
    )


def root_busy(name: str, url: str, owner: str) -> RootBusy:
    """Returns the error for a lock somebody else holds; ``owner`` is the holder's signature."""
    holder = owner or "somebody who has not signed it yet"
    return RootBusy(
        f"the lock {name!r} of {url} is held by {holder}. Wait until it ends, stop it, or choose "
        "another root.",
        name=name,
        url=url,
        owner=owner,
    )


def short_read(path: str, url: str, offset_bytes: int, size_bytes: int, have: int) -> StorageError:
    """Returns the error for a range that reaches past the end of a file."""
    error = StorageError(
        f"{path} in {url} ends at byte {have}; {size_bytes} bytes from {offset_bytes} were asked "
        "for. It was cut short, or what names it is wrong.",
        path=path,
        offset_bytes=offset_bytes,
        size_bytes=size_bytes,
        have_bytes=have,
    )
    error.retryable = False
    return error


def first_gap(spans: Iterable[tuple[int, int]], size_bytes: int) -> int | None:
    """Returns the first byte of ``0..size_bytes`` in none of the (start, stop) spans, or None."""
    reached = 0
    for start, stop in sorted(spans):
        if start > reached:
            return reached
        reached = max(reached, stop)
    return reached if reached < size_bytes else None


class _Phase(enum.Enum):
    FILLING = "being filled"
    FINISHING = "being finished"
    FINISHED = "finished"
    BROKEN = "broken"
    ABORTED = "aborted"


class SinkFill:
    """Makes the checks of every sink: a write outside, a write too late, an image with a hole.

    ``release`` is called once, when the image has ended one way or another *and* no write is
    running: a descriptor closed under a running write may by then be another file's.
    """

    def __init__(self, path: str, size_bytes: int, release: Callable[[], None]) -> None:
        check_range(path, 0, size_bytes)
        self._path = path
        self._size_bytes = size_bytes
        self._release = release
        self._lock = threading.Lock()
        self._phase = _Phase.FILLING
        self._running = 0
        self._spans: list[tuple[int, int]] = []
        self._why = ""
        """The reason why the image is broken, if it is."""

    @contextmanager
    def writing(self, offset_bytes: int, size_bytes: int) -> Iterator[None]:
        """Hold this around one write. A failure inside breaks the image."""
        check_range(self._path, offset_bytes, size_bytes)
        stop = offset_bytes + size_bytes
        if stop > self._size_bytes:
            raise UsageError(
                f"{self._path} has {self._size_bytes} bytes; {size_bytes} at {offset_bytes} "
                "reach past its end"
            )
        with self._lock:
            self._require_filling("write to")
            self._running += 1
        with self._running_until_done():
            yield
            self._spans.append((offset_bytes, stop))  # atomic by itself

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Hold this around making the image durable."""
        with self._lock:
            self._require_filling("finish")
            if self._running:
                raise UsageError(f"{self._path} cannot be finished while it is written to")
            gap = first_gap(self._spans, self._size_bytes)
            if gap is not None:
                raise UsageError(f"{self._path} cannot be finished: byte {gap} was never written")
            self._running += 1
            self._phase = _Phase.FINISHING
        with self._running_until_done():
            yield
            with self._lock:
                if self._phase is _Phase.ABORTED:
                    raise StorageError(f"{self._path} was aborted while it was finished")
                self._phase = _Phase.FINISHED

    def abort(self) -> bool:
        """End the image; True when the caller must now remove it."""
        with self._lock:
            if self._phase in (_Phase.FINISHED, _Phase.ABORTED):
                return False
            was_filling = self._phase is _Phase.FILLING
            self._phase = _Phase.ABORTED
            if was_filling and not self._running:
                self._release()
            return True

    def _require_filling(self, what: str) -> None:
        if self._phase is _Phase.BROKEN:
            why = f": {self._why}" if self._why else ""
            raise StorageError(
                f"cannot {what} {self._path}: an earlier write or finish failed{why}"
            )
        if self._phase is not _Phase.FILLING:
            raise UsageError(f"cannot {what} {self._path}: it is {self._phase.value}")

    @contextmanager
    def _running_until_done(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._why = self._why or str(error)
                if self._phase is not _Phase.ABORTED:
                    self._phase = _Phase.BROKEN  # for good: a second fsync would report success
            raise
        finally:
            with self._lock:
                self._running -= 1
                if not self._running and self._phase is not _Phase.FILLING:
                    self._release()
