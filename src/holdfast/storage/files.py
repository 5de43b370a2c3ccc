"""Performs single operations on files and directories that must not be left half done.

Each raises OSError, which the store turns into its own error, with the path the user knows.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

FILE_MODE = 0o666  # the umask decides
#: Linux 5.14 has it, and Python no name for it.
_MADV_POPULATE_READ = 22
MOUNTS = Path("/proc/self/mountinfo")
#: File systems whose files can be read as memory: a page that is there once fails only with its
#: disk, and a file that loses its name keeps its bytes for who has it open.
MAPPABLE = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay")
)


def write_once(descriptor: int, offset_bytes: int, data: memoryview) -> int:
    """Makes one positional write; returns how much of ``data`` it took, at least one byte."""
    count = os.pwritev(descriptor, [data], offset_bytes)
    if not count:
        raise OSError(errno.EIO, "nothing was written")
    return count


def write_file(target: str, data: bytes, *, is_durable: bool = True) -> None:
    """Writes a new file with this content, fsynced if it is to be durable; its name is not yet."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    try:
        done = 0
        while done < len(data):
            done += write_once(descriptor, done, memoryview(data)[done:])
        if is_durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(source: str, target: str) -> bool:
    """Gives ``source`` the name ``target``; False when the name belongs to another file."""
    try:
        os.link(source, target)
    except FileExistsError:
        # NFS may have made the link, lost the answer, and received the request again.
        return os.path.samefile(source, target)
    return True


def replace_file(new: str, target: str, aside: str) -> None:
    """Gives the durable file ``new`` the name ``target``, and what had that name ``aside``.

    At no moment is there no file of the name.
    """
    with suppress(FileNotFoundError):
        os.link(target, aside)
        sync_directory(os.path.dirname(aside))
    os.replace(new, target)
    sync_directory(os.path.dirname(target))


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


def allocate(descriptor: int, size_bytes: int) -> None:
    """Allocate a file's blocks and set its length. OSError with EOPNOTSUPP where that is not
    possible.

    Not ``os.posix_fallocate``: where the file system cannot allocate (NFSv3, FUSE), glibc writes
    one byte into each block instead, 16,384 writes for 64 MiB.
    """
    while _libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


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


# Identifies a root by inode and birth time of its ``holdfast.json``, whatever the root is called.
#
# Both stay when the directory is renamed, linked to or mounted elsewhere, and a copy has its own.
# The device number is not used: it differs between hosts and between mounts. Where a file system
# reports no birth time, the inode stands alone.


#: The file that identifies a root; ``holdfast.catalogue`` defines its content.
ROOT_FILE = "holdfast.json"
#: The lock of a run, and that of the pins, which is also the directory that has them.
WRITER, PINS = "writer", "pins"
#: The identity of a root whose hosts agree on no part of it.
UNKNOWN = "unknown"
_BORN = " born "
_AT_FDCWD = -100
_STATX_INO, _STATX_BTIME = 0x100, 0x800
_STATX_BYTES = 256
_MASK, _INODE, _BIRTH = struct.Struct("@I"), struct.Struct("@Q"), struct.Struct("@qI")
_INODE_AT, _BIRTH_AT = 32, 80
_libc = ctypes.CDLL(None, use_errno=True)


def file_identity(path: str) -> str:
    """Returns a file's identity: its inode, and its birth time where the file system reports one.
    Raises OSError.
    """
    inode, born = _statx(path)
    return f"inode {inode:x}" + (f"{_BORN}{born[0]}.{born[1]:09d}" if any(born) else "")


def common_identity(seen: Iterable[str]) -> str:
    """Returns what all of these views of one root have in common; UNKNOWN where that is nothing.

    Of two hosts that share a directory one may report no birth time. Where the inodes differ as
    well, each host numbers files by itself, and the numbers mean nothing.
    """
    views = set(seen)
    if len(views) > 1:
        views = {view.partition(_BORN)[0] for view in views}
    return views.pop() if len(views) == 1 else UNKNOWN


def views(identity: str) -> tuple[str, ...]:
    """Returns all identities on which hosts that see this root may have agreed, the most specific
    first.
    """
    return identity, identity.partition(_BORN)[0], UNKNOWN


def may_be_same(one: str, other: str) -> bool:
    """True if two views of a root do not contradict each other."""
    if one == other or UNKNOWN in (one, other):
        return True
    is_told = _BORN in one and _BORN in other  # and then it differs
    return not is_told and common_identity((one, other)) != UNKNOWN


def _statx(path: str) -> tuple[int, tuple[int, int]]:
    """Returns (inode, (seconds, nanoseconds) of birth, zeros for unknown); Python has no call for
    it.
    """
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    wanted = _STATX_INO | _STATX_BTIME
    try:
        failed = _libc.statx(_AT_FDCWD, os.fsencode(path), 0, wanted, buffer)
    except AttributeError:  # a C library of before 2018
        failed = -1
    if failed:
        return os.stat(path).st_ino, (0, 0)  # or the error, in its own words
    data = buffer.raw
    (mask,) = _MASK.unpack_from(data)
    (inode,) = _INODE.unpack_from(data, _INODE_AT)
    if not mask & _STATX_BTIME:
        return inode, (0, 0)
    seconds, nanoseconds = _BIRTH.unpack_from(data, _BIRTH_AT)
    return inode, (seconds, nanoseconds)


def mounted_at(path: str | Path, mounts: Path = MOUNTS) -> tuple[str, str]:
    """Returns the type of file system that ``path`` is on, and its mount point."""
    real, best = os.path.realpath(path), ("", "")
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return best
    for line in lines:  # "36 35 98:0 /root /mount rw,noatime master:1 - ext4 /dev/vda rw"
        before, _, after = line.partition(" - ")
        mount = before.split()[4].encode().decode("unicode_escape")
        covers = real == mount or real.startswith(mount.rstrip("/") + "/")
        if covers and len(mount) >= len(best[1]):  # of two on one place, the later hides the other
            best = (after.split()[0], mount)
    return best


class MappedFile:
    """A file as private memory: its pages are read when they are used, and writes stay here.

    ValueError or OSError where that cannot be, or where the kernel can't tell errors of the disk.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._map = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=access)
        self.load(0, 1)
        self.memory = memoryview(self._map)

    def load(self, start: int, stop: int) -> None:
        """Have the pages of a range in memory. OSError where they can't be read, for which the
        process would be killed if it used them.
        """
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._map.madvise(_MADV_POPULATE_READ, begin, stop - begin)
        except OSError as error:
            if error.errno == errno.EFAULT:  # as the kernel says it of pages
                raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
            raise
