"""Single acts on files and directories that must not be half done.

Each raises OSError, which the store turns into its own error, with the path the user knows.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

FILE_MODE = 0o666  # the umask decides


def write_once(descriptor: int, offset_bytes: int, data: memoryview) -> int:
    """One positional write; how much of ``data`` it took, at least one byte."""
    count = os.pwritev(descriptor, [data], offset_bytes)
    if not count:
        raise OSError(errno.EIO, "nothing was written")
    return count


def write_durably(target: str, data: bytes) -> None:
    """A new file with this content, fsynced; its name is not durable yet."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    try:
        done = 0
        while done < len(data):
            done += write_once(descriptor, done, memoryview(data)[done:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(source: str, target: str) -> bool:
    """Give ``source`` the name ``target``; False when the name belongs to another file."""
    try:
        os.link(source, target)
    except FileExistsError:
        # NFS may have linked it, lost the answer, and been asked again.
        return os.path.samefile(source, target)
    return True


def sync_directory(directory: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems keep directories elsewhere and have nothing to sync here.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def remove_tree(directory: str) -> None:
    """Remove a directory and all below it, without following links out of it."""
    with suppress(FileNotFoundError):  # somebody else may be removing it too
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    remove_tree(entry.path)
                else:
                    with suppress(FileNotFoundError):
                        os.unlink(entry.path)
        os.rmdir(directory)
