"""Writes one file of a directory past the page cache (direct I/O), wherever that is possible.

Direct I/O takes whole aligned pages out of aligned memory, straight from the arena; the page cache
would copy every byte once more and write it at a time of its own. Bytes that direct I/O cannot take
(the ends of a chunk, memory the device finds unaligned, a file system without it) go another way
into the same file. So callers need no rule about alignment, only the advice: align, and it is fast.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress

from holdfast.storage.base import SinkFill, flat, os_failure, reporting, short_read
from holdfast.storage.files import (
    FILE_MODE,
    allocate,
    file_identity,
    sync_directory,
    write_once,
)

ALIGNMENT_BYTES = 4096
_BOUNCE_BYTES = 4 << 20


class _Descriptors:
    """Two descriptors of one new file: one past the page cache where that is possible, one through
    it.

    They are closed when garbage-collected, so that an abandoned image costs nothing but its file.
    """

    def __init__(self, target: str) -> None:
        self._open: list[int] = []  # first, for __del__
        self.direct: int | None = None
        self.buffered = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
        self._open.append(self.buffered)
        with suppress(OSError):  # EINVAL: a file system without direct I/O
            self.direct = os.open(target, os.O_WRONLY | os.O_DIRECT)
            self._open.append(self.direct)

    def close(self) -> None:
        while self._open:
            with suppress(OSError):  # what could be lost was fsynced, or is being thrown away
                os.close(self._open.pop())

    def __del__(self) -> None:
        self.close()


class DirectFile:
    """A new file ``target``, written at any offset the fastest way; raises FileExistsError if there
    is one.

    The directory must exist. Every method raises OSError.
    """

    def __init__(self, target: str) -> None:
        self._descriptors = _Descriptors(target)
        self._is_direct = self._descriptors.direct is not None

    @property
    def buffered(self) -> int:
        """The descriptor that goes through the page cache."""
        return self._descriptors.buffered

    def reserve(self, size_bytes: int) -> None:
        """Set the file's length and reserve the space for it."""
        _reserve(self._descriptors.buffered, size_bytes)

    def close(self) -> None:
        """Close the descriptors."""
        self._descriptors.close()

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Write all of ``data``, flat bytes."""
        while data:
            count = self._write_some(offset_bytes, data)
            offset_bytes += count
            data = data[count:]

    def _write_some(self, offset_bytes: int, data: memoryview) -> int:
        """Writes a first part of ``data`` the fastest way possible; returns its length.

        The pages at the ends that ``data`` fills only in part go through the page cache, all whole
        pages go past it.
        """
        in_page = offset_bytes % ALIGNMENT_BYTES
        whole = len(data) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if not self._is_direct:
            return self._write_buffered(offset_bytes, data)
        if in_page or not whole:
            return self._write_buffered(offset_bytes, data[: ALIGNMENT_BYTES - in_page])
        try:
            return self._write_direct(offset_bytes, data[:whole])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        return self._write_bounced(offset_bytes, data[:whole][:_BOUNCE_BYTES])

    def _write_bounced(self, offset_bytes: int, data: memoryview) -> int:
        """Writes from a buffer that is certainly aligned; if that is refused too, direct I/O is not
        tried again.

        Only the kernel knows whether the caller's memory is aligned enough (the rule differs
        between devices, and Python does not tell the address of read-only memory). So direct I/O is
        tried first, and EINVAL leads here.
        """
        with mmap.mmap(-1, len(data)) as bounce:
            bounce[:] = data
            with memoryview(bounce) as aligned:
                try:
                    return self._write_direct(offset_bytes, aligned)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
        self._is_direct = False
        return self._write_buffered(offset_bytes, data)

    def _write_direct(self, offset_bytes: int, data: memoryview) -> int:
        direct = self._descriptors.direct
        assert direct is not None
        return write_once(direct, offset_bytes, data)

    def _write_buffered(self, offset_bytes: int, data: memoryview) -> int:
        return write_once(self._descriptors.buffered, offset_bytes, data)


class DirectSink:
    """A new file ``target`` of known size, to be filled; raises FileExistsError when the name is
    taken.

    The directory must exist. Errors show ``path`` and ``url``. ``then`` ends ``finish``, when the
    file is durable.
    """

    def __init__(
        self,
        target: str,
        size_bytes: int,
        *,
        path: str,
        url: str,
        then: Callable[[], None] | None = None,
    ) -> None:
        self._path = path
        self._url = url
        self._target, self._then = target, then
        self._file = DirectFile(target)
        try:
            self._identity = file_identity(target)
            self._file.reserve(size_bytes)
        except BaseException:
            self._file.close()
            os.unlink(target)
            raise
        self._filling = SinkFill(path, size_bytes, self._file.close)

    def write(self, offset_bytes: int, data: memoryview) -> None:
        rest = flat(data)
        with (
            self._filling.writing(offset_bytes, len(rest)),
            reporting("write", self._path, self._url),
        ):
            self._file.write(offset_bytes, rest)

    def finish(self) -> None:
        with self._filling.finishing(), reporting("fsync", self._path, self._url):
            os.fsync(self._file.buffered)  # of the file, whichever way it was written
            sync_directory(os.path.dirname(self._target))
            if self._then is not None:
                self._then()

    def abort(self) -> None:
        if self._filling.abort():
            with suppress(OSError):
                # Where this one was removed, the name may by now be another's.
                if file_identity(self._target) == self._identity:
                    os.unlink(self._target)


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Reserves the space now: a full disk is detected before any byte is copied, and threads that
    write far apart do not extend the file one after the other.

    A file system that cannot reserve it must at least have it now.
    """
    if not size_bytes:
        return
    try:
        allocate(descriptor, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        room = os.fstatvfs(descriptor)
        if room.f_bavail * room.f_frsize < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        os.ftruncate(descriptor, size_bytes)


# Reads past the page cache: whole aligned pages, straight from the disk.
#
# The kernel copies every byte once more when it reads through its cache, and chooses its own
# readahead: measured on one disk, 1.0 to 1.9 GB/s where direct reads give 1.8 to 2.2. Bytes that
# direct I/O cannot take (memory it finds unaligned, the ends of a range) go through a small aligned
# buffer of the thread. So callers need no rule about alignment, only the advice: align, and one
# copy is saved.


BOUNCE_BYTES = 4 << 20
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_thread = threading.local()


def fill_past_cache(descriptor: int, offset_bytes: int, buffer: memoryview) -> int:
    """Fills ``buffer`` from its start as far as direct I/O goes; returns the number of bytes.

    Returns fewer than asked for where the file ends, and where direct I/O is refused: the caller
    reads the rest the plain way. ``descriptor`` must be the caller's alone; it reads through the
    cache again on return.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:  # a file system without direct I/O
        return 0
    try:
        return _fill(descriptor, offset_bytes, buffer)
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _fill(descriptor: int, offset_bytes: int, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        try:
            count = _read_some(descriptor, offset_bytes + done, buffer[done:])
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return done
        if not count:
            return done
        done += count
    return done


def _read_some(descriptor: int, offset_bytes: int, buffer: memoryview) -> int:
    """Reads a first part of ``buffer`` the fastest way possible; returns its length, 0 at the
    file's end.
    """
    whole = len(buffer) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    if whole and not offset_bytes % ALIGNMENT_BYTES and not _address(buffer) % ALIGNMENT_BYTES:
        return os.preadv(descriptor, [buffer[:whole]], offset_bytes)
    ahead = offset_bytes % ALIGNMENT_BYTES
    wanted = min(len(buffer), BOUNCE_BYTES - ahead)
    bounce = _bounce()
    pages = -(-(ahead + wanted) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    count = os.preadv(descriptor, [bounce[:pages]], offset_bytes - ahead)
    got = max(0, min(count - ahead, wanted))
    # Not by slices, which hold the GIL while they copy.
    ctypes.memmove(_address(buffer), _address(bounce) + ahead, got)
    return got


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _bounce() -> memoryview:
    """Returns this thread's buffer, allocated once and freed with the thread."""
    if not hasattr(_thread, "bounce"):
        _thread.bounce = memoryview(aligned_memory(BOUNCE_BYTES))
    found: memoryview = _thread.bounce
    return found


def aligned_memory(size_bytes: int) -> mmap.mmap:
    """Returns private memory that begins on a page, in large pages where there are any."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


# Asks without reading whether the page cache already has a file's bytes.
#
# Cached bytes are copied faster than any disk reads them; others are read faster past the cache.


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def is_cached(descriptor: int, offset_bytes: int, size_bytes: int) -> bool:
    """True if most pages of a range are in the page cache.

    True also where that cannot be known, for example for another user's file, which the kernel
    hides. Then it is read through the cache, which always works.
    """
    start = offset_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    length = offset_bytes + size_bytes - start
    # mincore, and not cachestat, which is younger than most kernels; and not a read that refuses
    # to wait (RWF_NOWAIT), which starts reading ahead into the cache before it refuses.
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address in (None, _MAP_FAILED):
        return True
    try:
        pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if _libc.mincore(address, length, pages):
            return True
        missing = pages.raw[: len(pages)].count(b"\0")
        return 2 * missing <= len(pages)
    finally:
        _libc.munmap(address, length)


# Provides a file without a name as space for data that does not fit in memory; it vanishes with the
# process.
#
# Nobody can remove it, truncate it or find it later, and whatever ends the process frees its space.
# Nothing in it must survive: nothing is fsynced.


class Scratch:
    """``size_bytes`` of zeros in a file in ``directory``, which is made if need be.

    Past the page cache where that is possible: one thread reads, one writes. Raises StorageError
    for errors of the system; at once where there is no space. ``what`` is its name in errors.
    """

    def __init__(self, directory: str, size_bytes: int, what: str) -> None:
        self.size_bytes = size_bytes
        self._what, self._directory = what, directory
        with reporting("make", what, directory):
            os.makedirs(directory, exist_ok=True)
            target = os.path.join(directory, f".holdfast-{uuid.uuid4().hex}.scratch")
            self._file = DirectFile(target)
            try:
                self._read = os.open(target, os.O_RDONLY)
            finally:
                os.unlink(target)  # before it has any length: a kill leaves nothing behind
        try:
            self._file.reserve(size_bytes)
        except OSError as cause:
            self.close()
            room = f"{size_bytes} bytes are needed, {_free_bytes(directory)} are free"
            raise os_failure("reserve", what, directory, cause, room=room) from cause

    @property
    def descriptor(self) -> int:
        """The file's descriptor, for mapping it."""
        return self._file.buffered

    def read(self, offset_bytes: int, buffer: memoryview) -> None:
        """Fills all of ``buffer``, flat bytes."""
        with reporting("read", self._what, self._directory):
            done = fill_past_cache(self._read, offset_bytes, buffer)
            while done < len(buffer):
                count = os.preadv(self._read, [buffer[done:]], offset_bytes + done)
                if not count:
                    raise short_read(
                        self._what, self._directory, offset_bytes, len(buffer), offset_bytes + done
                    )
                done += count

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Writes all of ``data``, flat bytes."""
        with reporting("write", self._what, self._directory):
            self._file.write(offset_bytes, data)

    def close(self) -> None:
        """Closes the file; a mapping of it stays."""
        self._file.close()
        with suppress(OSError):
            os.close(self._read)


def _free_bytes(directory: str) -> int:
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
