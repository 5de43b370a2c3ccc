"""A file without a name: room for what does not fit in memory, gone with the process.

Nobody can remove it, cut it short or find it later, and whatever ends the process frees its room.
What is in it is no state of record: nothing is fsynced.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress

from holdfast.storage.base import os_failure, reporting, short_read
from holdfast.storage.direct import DirectFile
from holdfast.storage.past_cache import fill_past_cache


class Scratch:
    """``size_bytes`` of zeros in a file in ``directory``, that is made if need be.

    Past the page cache where that is possible: one thread reads, one writes. StorageError for what
    the system refuses; at once where there is no room. ``what`` is what errors call it.
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
        """Of the file, to be mapped."""
        return self._file.buffered

    def read(self, offset_bytes: int, buffer: memoryview) -> None:
        """Fill all of ``buffer``, flat bytes."""
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
        """Write all of ``data``, flat bytes."""
        with reporting("write", self._what, self._directory):
            self._file.write(offset_bytes, data)

    def close(self) -> None:
        """Let go of it; a mapping of it stays."""
        self._file.close()
        with suppress(OSError):
            os.close(self._read)


def _free_bytes(directory: str) -> int:
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
