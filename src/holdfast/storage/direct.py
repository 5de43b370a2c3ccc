"""An image on its way to the disk, past the page cache wherever that is possible.

Direct I/O takes whole aligned pages out of aligned memory, straight from the arena; the page cache
would copy every byte once more and write it when it likes. What direct I/O cannot take (the ends
of a chunk, memory the device finds unaligned, a file system without it) goes another way into the
same file, so callers need no rule about alignment, only the advice: align, and it is fast.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress

from holdfast.storage.base import Filling, flat, reporting
from holdfast.storage.files import FILE_MODE, sync_directory, write_once

ALIGNMENT_BYTES = 4096
_BOUNCE_BYTES = 4 << 20


class _Descriptors:
    """Two ways into one new file: past the page cache where that is taken, and through it.

    They are closed when forgotten, so that an abandoned image costs nothing but its file.
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
    """A new file ``target``, written to anywhere the best way; FileExistsError if there is one.

    The directory must exist. Every method raises OSError.
    """

    def __init__(self, target: str) -> None:
        self._descriptors = _Descriptors(target)
        self._is_direct = self._descriptors.direct is not None

    @property
    def buffered(self) -> int:
        """A descriptor of it that goes through the page cache."""
        return self._descriptors.buffered

    def reserve(self, size_bytes: int) -> None:
        """Give it this length, and the room for that."""
        _reserve(self._descriptors.buffered, size_bytes)

    def close(self) -> None:
        """Let go of it."""
        self._descriptors.close()

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Write all of ``data``, flat bytes."""
        while data:
            count = self._write_some(offset_bytes, data)
            offset_bytes += count
            data = data[count:]

    def _write_some(self, offset_bytes: int, data: memoryview) -> int:
        """Write a first part of ``data`` the best way it can go; returns its length.

        The pages at the ends that ``data`` fills only in part go through the page cache, all
        whole pages go past it.
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
        """Write from memory that is certainly aligned; if that is refused too, never ask again.

        Whether the caller's memory is aligned enough only the kernel knows (the rule differs
        between devices, and Python does not tell the address of read-only memory), so direct I/O
        is tried first and this is where EINVAL leads.
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
    """A new file ``target`` of known size, to be filled; FileExistsError when the name is taken.

    The directory must exist. Errors show ``path`` and ``url``.
    """

    def __init__(self, target: str, size_bytes: int, *, path: str, url: str) -> None:
        self._path = path
        self._url = url
        self._target = target
        self._file = DirectFile(target)
        try:
            self._file.reserve(size_bytes)
        except BaseException:
            self._file.close()
            os.unlink(target)
            raise
        self._filling = Filling(path, size_bytes, self._file.close)

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

    def abort(self) -> None:
        if self._filling.abort():
            with suppress(OSError):
                os.unlink(self._target)


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Take the room now: a full disk is found before any byte is copied, and threads that write
    far apart do not extend the file one after the other."""
    if not size_bytes:
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size_bytes)
