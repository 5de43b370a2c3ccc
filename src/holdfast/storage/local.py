"""Uses a directory as a store: calls return when data is durable, and no name belongs to half a
file.

A name becomes visible by ``link`` or ``rename`` of a file that was already fsynced, and its
directory is fsynced before the call returns; images are filled in place, because only a manifest
makes them valid. See docs/invariants.md (1, 3).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from holdfast.errors import NotFound
from holdfast.storage.base import (
    ImageSink,
    Lock,
    already_published,
    another_root,
    check_path,
    check_prefix,
    check_range,
    flat,
    new_name,
    os_failure,
    root_busy,
    short_read,
)
from holdfast.storage.direct import DirectSink, fill_past_cache, is_cached
from holdfast.storage.files import (
    FILE_MODE,
    MAPPABLE,
    ROOT_FILE,
    MappedFile,
    file_identity,
    link,
    mounted_at,
    remove_tree,
    replace_file,
    sync_directory,
    write_file,
)

_OWNER_BYTES = 4096
#: How long the signature of a lock that was just taken is waited for, and how often it is read.
_SIGNED_WITHIN_S, _LOOK_S = 1.0, 0.01
#: For shorter reads it is not worth asking whether the bytes are cached.
_DIRECT_BYTES = 256 << 10


class LocalStore:
    """The files below ``root``, which is made at the first write. Safe from several threads.

    A process killed while it publishes may leave a small file whose name begins with ".publish";
    it is never listed.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.fspath(root))
        # Directories whose own name is known to be durable. That a directory exists is not enough:
        # another process may have made it and not yet synced its parent.
        self._settled: set[str] = set()
        self._is_known = False
        """True if its root was seen here: then the root's directory is never created again."""
        self._held: weakref.WeakSet[_LocalLock] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def identity(self) -> str:
        with self._reporting("look-up", ROOT_FILE):
            try:
                found = file_identity(self._local(ROOT_FILE))
            except (FileNotFoundError, NotADirectoryError) as cause:
                raise NotFound(f"there is no {ROOT_FILE} in {self.url}", path=ROOT_FILE) from cause
        self._is_known = True
        return found

    def follow(self, root: str) -> None:
        """Use this name from now on for the root, which was renamed; its locks stay held.

        Operations under way with the old name fail.
        """
        self._root = os.path.abspath(root)
        self._settled = set()

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        check_range(path, offset_bytes, size_bytes or 0)
        with self._opened(path) as (descriptor, length):
            # The length is checked before memory is allocated: a size may come from a bad file.
            wanted = max(0, length - offset_bytes) if size_bytes is None else size_bytes
            if offset_bytes + wanted > length:
                raise short_read(path, self.url, offset_bytes, wanted, length)
            buffer = bytearray(wanted)
            self._fill(descriptor, path, offset_bytes, memoryview(buffer))
        return bytes(buffer)

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        check_range(path, offset_bytes, buffer.nbytes)
        with self._opened(path) as (descriptor, length):
            if offset_bytes + buffer.nbytes > length:
                raise short_read(path, self.url, offset_bytes, buffer.nbytes, length)
            into = flat(buffer)
            done = 0
            if len(into) >= _DIRECT_BYTES and not is_cached(descriptor, offset_bytes, len(into)):
                if is_shared:  # in large pieces, and all of them asked for at once
                    os.posix_fadvise(descriptor, offset_bytes, len(into), os.POSIX_FADV_WILLNEED)
                else:
                    done = fill_past_cache(descriptor, offset_bytes, into)
            self._fill(descriptor, path, offset_bytes + done, into[done:])

    def read_at_most(self, path: str, limit_bytes: int) -> bytes | int:
        """Returns a whole file, opened once; its size where that is beyond ``limit_bytes``."""
        with self._opened(path) as (descriptor, length):
            if length > limit_bytes:
                return length
            data = os.pread(descriptor, length, 0)
            if len(data) == length:
                return data
        return self.read(path)  # in pieces, or it was cut since

    def mapped(self, path: str) -> MappedFile | None:
        """See ``storage.base.mapped``. What is written to the memory does not reach the file."""
        with self._opened(path) as (descriptor, length):
            if mounted_at(self._local(path))[0] in MAPPABLE:
                with suppress(OSError, ValueError):  # no room for it, an old kernel, an empty file
                    return MappedFile(descriptor, length)
        return None

    def size_bytes(self, path: str) -> int:
        with self._opened(path) as (_, length):
            return length

    def exists(self, path: str) -> bool:
        with self._reporting("look-up", path):
            try:
                return stat.S_ISREG(os.stat(self._local(path)).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def is_link(self, path: str) -> bool:
        """True if the name itself is a symbolic link."""
        return os.path.islink(self._local(path))

    def list(self, prefix: str) -> list[str]:
        with self._reporting("list", prefix):
            root, directory = self._root, self._local_directory(prefix)
            try:
                names = os.listdir(directory)
            except (FileNotFoundError, NotADirectoryError):
                if self._is_known and not os.path.exists(os.path.join(root, ROOT_FILE)):
                    raise  # the root is gone: that says nothing of what is in it
                return []
        return sorted(name for name in names if not name.startswith("."))

    def sync_names(self, above: str) -> None:
        """Makes the names that are in a directory durable."""
        with self._reporting("fsync", above):
            sync_directory(self._local_directory(above))

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        target = self._local(path)
        directory = os.path.dirname(target)
        temporary = os.path.join(directory, f".publish-{secrets.token_hex(8)}")
        with self._reporting("publish", path, len(data)):
            self._require_locked_root()
            self._settle(directory)
            try:
                # A layout is published with each checkpoint: where it is, it is not written again.
                is_there = not replace and os.path.lexists(target)
                if not is_there:
                    write_file(temporary, data)
                if replace:
                    os.replace(temporary, target)
                elif is_there or not link(temporary, target):
                    # The first writer may have been killed before its name was durable, and readers
                    # of the name rely on it.
                    sync_directory(directory)
                    raise already_published(path, self.url)
            finally:
                with suppress(OSError):
                    os.unlink(temporary)
            sync_directory(directory)

    def publish_transient(self, path: str, data: bytes) -> None:
        """See ``storage.base.publish_transient``. The reader of a network file system sees it: its
        bytes are sent when the file is closed, before it has its name.
        """
        target = self._local(path)
        directory = os.path.dirname(target)
        temporary = os.path.join(directory, f".publish-{secrets.token_hex(8)}")
        with self._reporting("publish", path, len(data)):
            self._require_locked_root()
            if not os.path.isdir(directory):
                self._settle(directory)
            try:
                write_file(temporary, data, is_durable=False)
                os.replace(temporary, target)
            finally:
                with suppress(OSError):
                    os.unlink(temporary)

    def remove_transient(self, path: str) -> None:
        """See ``storage.base.remove_transient``."""
        with self._reporting("removal", path):
            self._require_locked_root()
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self._local(path))

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        check_range(path, 0, size_bytes)
        target = self._local(path)
        with self._reporting("create", path, size_bytes):
            self._require_locked_root()
            self._settle(os.path.dirname(target))
            if aside:
                return self._create_beside(path, size_bytes, aside)
            try:
                return DirectSink(target, size_bytes, path=path, url=self.url)
            except FileExistsError:
                raise already_published(path, self.url) from None

    def _create_beside(self, path: str, size_bytes: int, aside: str) -> ImageSink:
        old, new = self._local(aside), self._local(new_name(aside))
        if os.path.lexists(old):
            raise already_published(aside, self.url)
        self._settle(os.path.dirname(old))
        with suppress(FileNotFoundError):
            os.unlink(new)  # of a repair that was killed
        return DirectSink(
            new,
            size_bytes,
            path=path,
            url=self.url,
            then=lambda: replace_file(new, self._local(path), old),
        )

    def remove(self, path: str) -> None:
        target = self._local(path)
        with self._reporting("removal", path):
            self._require_locked_root()
            try:
                os.unlink(target)
            except (FileNotFoundError, NotADirectoryError):
                return
            # Otherwise a loss of power could bring a manifest back after its images are gone.
            sync_directory(os.path.dirname(target))

    def remove_tree(self, prefix: str) -> None:
        directory = self._local(prefix)  # never the root itself
        below = directory + "/"
        self._settled = {one for one in tuple(self._settled) if not (one + "/").startswith(below)}
        with self._reporting("removal", prefix), suppress(NotADirectoryError):
            self._require_locked_root()
            remove_tree(directory)

    def free_bytes(self) -> int | None:
        """See ``storage.base.free_bytes``."""
        try:
            found = os.statvfs(self._root)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def lock(self, name: str, owner: str) -> Lock:
        directory, last = os.path.split(self._local(name))
        file = os.path.join(directory, f".{last}.lock")
        with self._reporting("lock", name):
            self._settle(directory)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, FILE_MODE)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                signed = owner.encode()[:_OWNER_BYTES]
                os.pwrite(descriptor, signed, 0)  # whoever comes now reads this or the last owner
                os.ftruncate(descriptor, len(signed))
            except BlockingIOError:
                holder = _read_owner(descriptor)
                os.close(descriptor)
                raise root_busy(name, self.url, holder) from None
            except BaseException:
                os.close(descriptor)
                raise
        lock = _LocalLock(name, os.path.relpath(file, self._root), descriptor)
        self._held.add(lock)
        return lock

    def _local(self, path: str) -> str:
        return os.path.join(self._root, check_path(path))

    def _local_directory(self, prefix: str) -> str:
        return os.path.join(self._root, check_prefix(prefix)).rstrip("/") or "/"

    @contextmanager
    def _reporting(self, operation: str, path: str, needed_bytes: int = 0) -> Iterator[None]:
        """Turns every OSError inside into the store's own error; for a full disk with the missing
        space.
        """
        try:
            yield
        except OSError as cause:
            is_full = cause.errno in (errno.ENOSPC, errno.EDQUOT) and needed_bytes
            room = f"{needed_bytes} bytes needed, {self._free_bytes()} free" if is_full else ""
            raise os_failure(operation, path, self.url, cause, room=room) from cause

    def _free_bytes(self) -> int:
        found = os.statvfs(self._root)
        return found.f_bavail * found.f_frsize

    def _require_locked_root(self) -> None:
        """Allows changes, while a lock is held, only below the directory it was taken in.

        An unmounted file system leaves an empty directory of the same name, and a newly created
        directory is free for others to lock: data written there is lost or mixed with theirs.
        """
        for lock in tuple(self._held):
            if not lock.is_in_place(self._root):
                raise another_root(self.url, lock.name)

    @contextmanager
    def _opened(self, path: str) -> Iterator[tuple[int, int]]:
        """Opens the file for reading; yields a descriptor and its length."""
        with self._reporting("read", path):
            try:
                # Not blocking: a pipe in the place of a file would wait for its writer.
                descriptor = os.open(self._local(path), os.O_RDONLY | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError) as cause:
                raise NotFound(f"there is no {path} in {self.url}", path=path) from cause
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise NotFound(f"{path} in {self.url} is not a file", path=path)
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)

    def _fill(self, descriptor: int, path: str, offset_bytes: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset_bytes + done)
            if not count:  # cut since its length was looked at
                raise short_read(path, self.url, offset_bytes, len(buffer), offset_bytes + done)
            done += count

    def _settle(self, directory: str) -> None:
        """Makes the directory exist and its name durable.

        The root's parents are synced only when made here: the others may not be readable.
        """
        if directory in self._settled and os.path.isdir(directory):
            return
        parent = os.path.dirname(directory)
        is_below_root = directory.startswith(self._root.rstrip("/") + "/")
        if not is_below_root and self._is_known and not os.path.isdir(directory):
            # The root was moved or removed: no second, incomplete root may be created in its place.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
        if is_below_root or not os.path.isdir(parent):
            self._settle(parent)
        try:
            os.mkdir(directory)
            is_made = True
        except FileExistsError:
            is_made = False
        if is_made or is_below_root:
            sync_directory(parent)
        self._settled.add(directory)


def _read_owner(descriptor: int) -> str:
    """Read the signature of a lock's holder, who may have taken it just now; "" if it has none for
    long.
    """
    deadline_s = time.monotonic() + _SIGNED_WITHIN_S
    while not (owner := os.pread(descriptor, _OWNER_BYTES, 0)) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    return owner.decode(errors="replace")


class _LocalLock:
    """An flock, which the kernel releases when its process dies.

    A forked child does not keep it: the child may live longer.
    """

    def __init__(self, name: str, file: str, descriptor: int) -> None:
        self.name, self._file = name, file  # below the root, which may be renamed
        self._descriptor: int | None = descriptor
        _locks.add(self)

    def leave_to_parent(self) -> None:
        """Called in a forked child, which does not own the lock. It is closed, not released, and
        stays the parent's.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def is_in_place(self, root: str) -> bool:
        """True if the locked file still has its name, or the lock was released."""
        descriptor = self._descriptor
        if descriptor is None:
            return True
        try:
            # Without the device: a file system that was mounted again may have another number.
            return os.stat(os.path.join(root, self._file)).st_ino == os.fstat(descriptor).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return False

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            # Released explicitly: closing is not enough while a forked child has the descriptor
            # too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        # The file stays: unlinking it would let two others lock two files of the same name.
        os.close(descriptor)

    def __enter__(self) -> _LocalLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


_locks: weakref.WeakSet[_LocalLock] = weakref.WeakSet()


def _leave_locks_to_parent() -> None:
    for lock in tuple(_locks):
        lock.leave_to_parent()


os.register_at_fork(after_in_child=_leave_locks_to_parent)
