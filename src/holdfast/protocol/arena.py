"""Slot files in shared memory: create, map, lock and remove them, and read their records.

A slot file is ``[record][record][image]``: two 4 KiB pages that alternate in holding the slot's
record, then room for one image. The valid record with the higher sequence number counts, so that a
torn record leaves the previous one. The file is allocated whole when it is created: a full /dev/shm
is an error then, never a SIGBUS later. Slots are named files, not memfd or
``multiprocessing.shared_memory``: both die with their last or first holder.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import select
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.errors import ArenaError, UsageError
from holdfast.format.checksum import checksum, text
from holdfast.format.manifest import AttemptId, ImageId
from holdfast.geometry.layout import table_hash

PAGE_BYTES = 4096
IMAGE_START = 2 * PAGE_BYTES
SLOT_SUFFIX = ".slot"
#: File in an arena that names the path of the run's root, for human readers.
ROOT_NAME = "root"
_KEYED = re.compile(r"(.*)\+([0-9a-f]{16})")
_FRAME = struct.Struct("<8sQIQ")  # magic, sequence, length, xxh3 of sequence and payload
_MAGIC = b"HFSLOT1\0"
_NO_LIMIT_BYTES = 1 << 62
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25
_MPOL_PREFERRED, _MPOL_MF_MOVE = 1, 2
#: Number of the system call ``mbind``, which the C library does not have, by machine.
_MBIND = {"x86_64": 237, "aarch64": 235}
_NODES = 1024
_POPULATE_STEP_BYTES = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class SlotRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The metadata that a slot stores about its image, for a keeper that is started later."""

    state: str  # "free" | "writing" | "captured"
    boot_id: str = ""
    run_id: str = ""
    incarnation: int = 0
    nonce: str = ""
    step: int = -1
    attempt: str = ""
    rank: int = -1
    world: int = 0
    layout: str = ""
    image_bytes: int = 0
    header_xxh3: str = ""
    table_xxh3: str = ""
    writer_pid: int = 0
    writer_start: int = 0
    ring_bytes: int = 0
    """Size of the ring at the end of the slot that the image passes through; 0: no ring. A slot
    with a ring never holds a whole image.
    """
    hosts: int = 1
    """Number of hosts the ranks are on. With one host, an attempt without all its images is
    worthless.
    """
    root_id: str = ""
    """Identity of the root that the slot belongs to (``Store.identity``); a copied root has the
    same run id.
    """

    @property
    def attempt_id(self) -> AttemptId:
        """The attempt that the image is of."""
        return AttemptId(self.incarnation, self.step, self.attempt, self.world, self.layout)

    @property
    def image(self) -> ImageId:
        """The image in the slot."""
        return ImageId(self.rank, self.image_bytes, self.header_xxh3, self.table_xxh3)


class StoredSlot(msgspec.Struct, frozen=True, array_like=True):
    """A slot as its file describes it; ``record``: None if it has none of this run."""

    number: int
    capacity_bytes: int
    record: SlotRecord | None = None


def boot_id() -> str:
    """Return an id that changes at every boot of the machine: shared memory does not survive a
    boot.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_start(pid: int) -> int:
    """Return the start time of process ``pid`` in clock ticks since boot; 0 if there is no such
    process.

    Pid and start time together identify a process uniquely: pids are reused. Raises OSError if that
    cannot be determined now, for example because no descriptor is left.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError, IndexError, ValueError):
        return 0


def is_running(pid: int, start: int) -> bool:
    """Return True if any thread of the process (pid, start) may still run.

    Uses a pidfd: /proc shows a zombie as soon as the main thread ended, while other threads may
    still be inside a copy; a pidfd is readable only when the last thread is gone. Pid 0 is a
    process of another pid namespace: its state cannot be determined, so it counts as running, as
    does every process while no descriptor is left to look with.
    """
    if pid == 0:
        return True
    try:
        if process_start(pid) != start or not start:
            return False
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        return True
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return process_start(pid) == start and not ended.poll(0)
    except OSError:
        return True
    finally:
        os.close(descriptor)


def arena_home() -> Path:
    """Return the directory that contains all arenas of this user."""
    base = Path(os.environ.get("HOLDFAST_ARENA_DIR") or "/dev/shm")
    return base / f"holdfast-{os.getuid()}"


def arena_dir(run_id: str, host_id: str, root_id: str = "") -> Path:
    """Return the directory with the slots, the socket and the lock of one run on one host.

    ``root_id`` identifies the run's root (``Store.identity``).
    """
    root = f"+{root_key(root_id)}" if root_id else ""
    return arena_home() / f"{run_id}{root}@{host_id}"


def root_key(root_id: str) -> str:
    """Return the form of a root's identity that arena names use."""
    return text(checksum(root_id.encode()))


def parse_arena_name(name: str) -> tuple[str, str, str]:
    """Split an arena name into (run id, root key, host); the key is "" for arenas of older
    versions.
    """
    run, _, host_id = name.rpartition("@")
    keyed = _KEYED.fullmatch(run)
    return (run, "", host_id) if keyed is None else (keyed[1], keyed[2], host_id)


def make_private_dir(path: Path) -> None:
    """Create ``path`` with mode 0700, or check that an existing one is ours alone. Raises
    ArenaError.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ArenaError(
            f"cannot make the arena directory {path}: {error.strerror}. Set HOLDFAST_ARENA_DIR "
            "to a directory in memory (tmpfs) that this user can write to."
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ArenaError(
            f"{path} is not a directory that only this user can read (owner {found.st_uid}, "
            f"mode {stat.filemode(found.st_mode)}): remove it, or set HOLDFAST_ARENA_DIR."
        )


def layout_file(arena: Path, hash_: str) -> Path:
    """Return the path of a layout in an arena."""
    return arena / "layouts" / f"{hash_}.json"


def read_layout(arena: Path, hash_: str) -> bytes:
    """Return the bytes of a layout in an arena. ArenaError if it is missing or another one."""
    path = layout_file(arena, hash_)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArenaError(f"cannot read the layout {path}: {error.strerror}") from error
    if table_hash(data) != hash_:
        raise ArenaError(f"the bytes of layout {path} changed after they were written")
    return data


def room_left(directory: Path) -> int:
    """Return the free bytes of the directory's file system; a huge number where it has no limit."""
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize if room.f_blocks else _NO_LIMIT_BYTES


def arena_limit() -> int | None:
    """Return the size limit of an arena's slots from ``HOLDFAST_ARENA_BYTES``; None: no limit.

    Raises UsageError if the value is not a number of bytes.
    """
    said = os.environ.get("HOLDFAST_ARENA_BYTES", "").strip()
    if not said:
        return None
    if not (said.isascii() and said.isdigit() and int(said) > 0):
        raise UsageError(
            f"HOLDFAST_ARENA_BYTES is {said!r}: give how many bytes of shared memory the slots of "
            "a run may take on a host, such as 8589934592 for 8 GiB, or leave it unset"
        )
    return int(said)


def lock_dir(path: Path) -> int | None:
    """Lock the arena and return the lock's descriptor, or None if a living keeper holds the
    lock.
    """
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise
    return lock


def remove_arena(path: Path) -> None:
    """Remove an arena and all its files; missing files are ignored.

    The directory is renamed first: a run that starts again at this moment creates a directory of
    its own, and the removal cannot delete that run's files.
    """
    grave = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.rename(grave)
    except OSError:
        grave = path
    shutil.rmtree(grave, ignore_errors=True)


class SlotFile:
    """One mapped slot file. ``image`` is the memory behind the two records."""

    def __init__(self, path: Path, descriptor: int, size: int, *, writable: bool) -> None:
        self.path = path
        self.capacity_bytes = size - IMAGE_START
        self.inode = os.fstat(descriptor).st_ino
        self.size_bytes = size
        self.unpin: Callable[[], bool] = lambda: True
        """Undoes what pinned its pages, before they are unmapped; False: they must not be now."""
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        try:
            self.map = mmap.mmap(descriptor, size, access=access)
        except (OSError, MemoryError) as error:
            raise ArenaError(
                f"cannot map slot {path} of {size >> 20} MiB: {error}. Raise this process's limit "
                "of address space (ulimit -v), or free memory."
            ) from error
        finally:
            os.close(descriptor)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map)) if writable else 0
        """Address of the mapping; 0: not known of one that is only read."""
        self.image = memoryview(self.map)[IMAGE_START:]

    @classmethod
    def create(
        cls, path: Path, capacity_bytes: int, *, free_bytes: int | None = None, leave_bytes: int = 0
    ) -> SlotFile:
        """Create and fully allocate a slot file. Raises ArenaError if there is not enough memory.

        ``free_bytes`` is the available memory (None: what the file system has); ``leave_bytes`` of
        it must remain free.
        """
        size = IMAGE_START + capacity_bytes
        free = room_left(path.parent) if free_bytes is None else free_bytes
        if free < size + leave_bytes:
            raise _too_small(path, size, free)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise ArenaError(f"cannot make slot {path}: {error.strerror}") from error
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            if error.errno == errno.EFBIG:
                raise ArenaError(
                    f"slot {path.name} of {size >> 20} MiB is larger than this process may make a "
                    "file. Raise the limit where training is started (ulimit -f), and end the "
                    "keeper, which inherited it."
                ) from error
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _too_small(path, size, free) from error
            raise ArenaError(f"cannot allocate {path}: {error.strerror}") from error
        try:
            return cls(path, descriptor, size, writable=True)
        except ArenaError:
            path.unlink(missing_ok=True)  # no other process knows it; it is fully allocated
            raise

    @classmethod
    def open(cls, path: Path, *, writable: bool) -> SlotFile:
        """Map an existing slot. Raises ArenaError if the file is missing, foreign or too short."""
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except OSError as error:
            raise ArenaError(f"cannot open slot {path}: {error.strerror}") from error
        found = os.fstat(descriptor)
        is_private = found.st_uid == os.getuid() and not found.st_mode & 0o077
        if not (stat.S_ISREG(found.st_mode) and is_private and found.st_size > IMAGE_START):
            os.close(descriptor)
            raise ArenaError(
                f"{path} is not a slot of ours ({found.st_size} bytes, owner {found.st_uid}, mode "
                f"{stat.filemode(found.st_mode)})"
            )
        return cls(path, descriptor, found.st_size, writable=writable)

    def populate(self) -> None:
        """Map every page now, without holding the GIL, so that no copy waits for a page fault.

        This is an optimization: kernels before 5.14 refuse it, and map pages on first access.
        """
        for start in range(0, self.size_bytes, _POPULATE_STEP_BYTES):
            size = min(_POPULATE_STEP_BYTES, self.size_bytes - start)
            if _advise(self.address + start, size, _MADV_POPULATE_WRITE):
                return

    def place(self, start: int, size_bytes: int, node: int) -> None:
        """Map these pages now, on this NUMA node (-1: on any) and as large ones where the system
        makes them.

        All of it is an optimization that kernels may refuse.
        """
        address = self.address + start
        _advise(address, size_bytes, _MADV_HUGEPAGE)
        if _advise(address, size_bytes, _MADV_POPULATE_WRITE):
            return
        if node >= 0:
            _move_to(node, address, size_bytes)
        if not _advise(address, size_bytes, _MADV_COLLAPSE):
            _advise(address, size_bytes, _MADV_POPULATE_WRITE)

    def touch_end(self) -> int:
        """Read the last byte: SIGBUS ends this process if the file was truncated meanwhile."""
        return self.map[-1]

    def read_record(self) -> SlotRecord | None:
        """Return the newest intact record, or None if there is none."""
        return self._newest()[1]

    def _newest(self) -> tuple[int, SlotRecord | None]:
        pages = [found for page in (0, PAGE_BYTES) if (found := self._read_page(page)) is not None]
        return max(pages, key=lambda found: found[0], default=(-1, None))

    def write_record(self, record: SlotRecord) -> None:
        """Replace the record; a kill at any instant leaves either the old or the new record."""
        # Keeper and trainer both write records: the previous sequence number is read, never cached.
        sequence = self._newest()[0] + 1
        payload = msgspec.msgpack.encode(record)
        if len(payload) > PAGE_BYTES - _FRAME.size:
            raise ArenaError(f"a slot's record of {len(payload)} bytes does not fit its page")
        digest = checksum(sequence.to_bytes(8, "little") + payload)
        frame = _FRAME.pack(_MAGIC, sequence, len(payload), digest) + payload
        start = PAGE_BYTES * (sequence % 2)
        self.map[start : start + len(frame)] = frame

    def _read_page(self, start: int) -> tuple[int, SlotRecord] | None:
        magic, sequence, length, digest = _FRAME.unpack_from(self.map, start)
        if magic != _MAGIC or length > PAGE_BYTES - _FRAME.size:
            return None
        payload = bytes(self.map[start + _FRAME.size : start + _FRAME.size + length])
        if checksum(sequence.to_bytes(8, "little") + payload) != digest:
            return None
        try:
            return sequence, msgspec.msgpack.decode(payload, type=SlotRecord)
        except (ValueError, RecursionError):  # msgspec's own, or not UTF-8
            return None

    def close(self) -> None:
        """Unmap the memory as soon as no view of it is in use."""
        if not self.unpin():
            return  # closed again by who pins it
        try:
            self.image.release()
            self.map.close()
        except BufferError:
            return  # a reader still holds a view; the mapping is freed with the last view


def map_pages(address: int, size_bytes: int) -> None:
    """Map the pages of this range for writing now: many at once take less than a fault for each.

    This is an optimization: kernels before 5.14 refuse it.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    _advise(start, address + size_bytes - start, _MADV_POPULATE_WRITE)


def _advise(address: int, size_bytes: int, advice: int) -> int:
    memory = ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)
    return int(_libc.madvise(*memory, advice))


def _move_to(node: int, address: int, size_bytes: int) -> None:
    """Move pages that this process alone has mapped to a NUMA node, as far as it has room."""
    number = _MBIND.get(os.uname().machine)
    if number is None or node >= _NODES:
        return
    mask = (ctypes.c_uint8 * (_NODES // 8))()
    mask[node // 8] = 1 << node % 8
    memory = ctypes.c_void_p(address), ctypes.c_ulong(size_bytes)
    nodes = ctypes.byref(mask), ctypes.c_ulong(_NODES + 1)
    _libc.syscall(number, *memory, _MPOL_PREFERRED, *nodes, _MPOL_MF_MOVE)


def is_temporary(error: ArenaError) -> bool:
    """Return True if opening a slot failed for a temporary reason: the slot must be kept.

    Too many open files, or too little address space, say nothing about the slot's content.
    """
    reason = error.__cause__
    if isinstance(reason, OSError):
        return reason.errno not in (errno.ELOOP, errno.ENOENT)  # a symbolic link, or no file
    return isinstance(reason, MemoryError)


def _too_small(path: Path, size: int, free: int) -> ArenaError:
    return ArenaError(
        f"shared memory too small: slot {path.name} needs {size >> 20} MiB in {path.parent}, "
        f"{free >> 20} MiB are free. Three images per rank must fit: enlarge it (docker: "
        "--shm-size, Kubernetes: an emptyDir with medium Memory), set HOLDFAST_ARENA_DIR, or raise "
        "HOLDFAST_ARENA_BYTES where it is set.",
        needed_bytes=size,
        free_bytes=free,
    )
