"""Find the arenas of this user, their keepers, and what they hold; clear those of dead runs.

An arena of a dead run is what the next start restores from, so it is only cleared on request: when
nobody holds its lock, nobody listens on its socket, no process has any of it mapped, and nothing in
it is newer than what storage has, unless that is to be lost.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from holdfast.catalogue import catalogue, is_root
from holdfast.cli.doctor.facts import Arena
from holdfast.cli.held import holders
from holdfast.errors import ArenaError, HoldfastError
from holdfast.format.manifest import Generation
from holdfast.keeper.__main__ import ROOT_NAME
from holdfast.redundancy.records import MAX_RECORD_BYTES, unseal
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import (
    SLOT_SUFFIX,
    SlotFile,
    SlotRecord,
    boot_id,
    is_running,
    lock_dir,
    remove_arena,
)
from holdfast.snapshot.client import connect_socket
from holdfast.storage.open import open_store

ANSWER_TIMEOUT_S = 2.0
NEWS = "it holds a snapshot that storage is not known to have, or a newer one"


def probe_arenas(home: Path) -> tuple[Arena, ...]:
    """Every arena below ``home``, by name."""
    try:
        found = sorted(path for path in home.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return ()
    return tuple(_probe(path) for path in found)


def _probe(path: Path) -> Arena:
    try:
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            mode = stat.filemode(status.st_mode)
            fault = f"not a directory that only this user can read ({mode}, owner {status.st_uid})"
            return Arena(str(path), fault=fault)
        return _look_into(path)
    except OSError as error:  # it may be going away at this moment
        return Arena(str(path), fault=str(error))


def _look_into(path: Path) -> Arena:
    size_bytes = sum(file.lstat().st_blocks * 512 for file in path.rglob("*"))
    if path.name.startswith("."):  # as remove_arena names what it removes
        return Arena(str(path), size_bytes=size_bytes, is_grave=True, users=_mapping(path))
    run_id, _, host_id = path.name.rpartition("@")
    keeper_pid = next(iter(holders(path / "lock")), 0) or _listener(path)
    root = _root_of(path, keeper_pid)
    records = list(_records(path))
    newest, part = _newest(records), _newest_part(path, records)
    return Arena(
        path=str(path), run_id=run_id, host_id=host_id, size_bytes=size_bytes,
        keeper_pid=keeper_pid, keeper_state=_state(keeper_pid) if keeper_pid else "",
        answers=_answers(path, run_id, root), root=root,
        root_exists=Path(root).is_dir() if root else None,
        newest="" if newest is None else str(newest), newest_is_durable=_is_durable(root, newest),
        part="" if part is None else str(part), has_news=_has_news(root, newest, part),
        parity_bytes=sum(file.lstat().st_blocks * 512 for file in path.glob("parity/*.rows")),
        users=tuple(sorted({*_mapping(path), *_writing(records)} - {keeper_pid})),
    )  # fmt: skip


def _root_of(path: Path, keeper_pid: int) -> str:
    with suppress(OSError):
        return (path / ROOT_NAME).read_text().strip()
    with suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{keeper_pid}/cmdline").read_text().split("\0")
        return words[words.index("--root") + 1]
    return ""


def _records(path: Path) -> Iterator[SlotRecord]:
    """What the slots say of themselves; half-made ones say nothing."""
    for slot in sorted(path.glob(f"*{SLOT_SUFFIX}")):
        with suppress(ArenaError), closing(SlotFile.open(slot, writable=False)) as file:
            record = file.read_record()
            if record is not None and record.boot_id == boot_id():
                yield record


def _newest(records: Iterable[SlotRecord]) -> Generation | None:
    """The newest generation that all ranks captured."""
    ranks: dict[tuple[int, int, str, int], set[int]] = {}
    for one in records:
        if one.state == "captured":
            key = (one.step, one.incarnation, one.attempt, one.world)
            ranks.setdefault(key, set()).add(one.rank)
    whole = [key for key, have in ranks.items() if have == set(range(key[3]))]
    step, incarnation = max(whole, default=(0, 0, "", 0))[:2]
    return Generation(incarnation, step) if whole else None


def _newest_part(path: Path, records: Iterable[SlotRecord]) -> Generation | None:
    """The newest generation of several hosts of which an image, or parity, lies here."""
    images = [
        Generation(one.incarnation, one.step) for one in records
        if one.state == "captured" and one.hosts > 1
    ]  # fmt: skip
    return max([*images, *_parity(path)], default=None)


def _parity(path: Path) -> Iterator[Generation]:
    for file in sorted(path.glob("parity/*.record")):
        with suppress(OSError, HoldfastError):  # half-written: of nothing
            if file.lstat().st_size <= MAX_RECORD_BYTES:
                record = unseal(file.read_bytes(), str(file))
                yield Generation(record.incarnation, record.step)


def _has_news(root: str, *held: Generation | None) -> bool | None:
    """Whether any of it is newer than all that storage has; None when that cannot be told."""
    newest = max((one for one in held if one is not None), default=None)
    if newest is None:
        return False
    if not root or not Path(root).is_dir():
        return None
    try:
        store = open_store(root)
        if not is_root(store):
            return None
        stored = catalogue(store).latest
    except HoldfastError:
        return None
    return stored is None or newest > stored


def _is_durable(root: str, newest: Generation | None) -> bool | None:
    """Whether storage has the generation too; None when that cannot be told."""
    if newest is None or not root or not Path(root).is_dir():
        return None
    try:
        return catalogue(open_store(root)).find(newest) is not None
    except HoldfastError:
        return None


def _listener(path: Path) -> int:
    """Who listens on the arena's socket, by the kernel's word; 0: nobody, or unseen from here."""
    try:
        line = connect_socket(path)
    except OSError:
        return 0
    with closing(line):
        raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


def _answers(path: Path, run_id: str, root: str) -> bool | None:
    """Whether the keeper answers a greeting in time; None when nobody listens."""
    try:
        line = connect_socket(path)
    except OSError:
        return None
    with closing(line):
        line.settimeout(ANSWER_TIMEOUT_S)
        try:  # a refusal is an answer
            line.sendall(m.pack(m.Hello(run_id=run_id, root=root), 1))
            return bool(line.recv(1, socket.MSG_WAITALL))
        except OSError:
            return False


def _state(pid: int) -> str:
    """The kernel's letter for what a process does: R, S, D, T (stopped), Z."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _mapping(path: Path) -> tuple[int, ...]:
    """The processes that have part of the arena mapped."""
    below = os.fsencode(os.path.realpath(path)) + b"/"
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return tuple(pid for pid in pids if _has_mapped(pid, below))


def _has_mapped(pid: int, below: bytes) -> bool:
    try:
        return below in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:  # ended, or another user's, who cannot open what is in a private directory
        return False


def _writing(records: Iterable[SlotRecord]) -> set[int]:
    """The living processes that a slot was given to."""
    return {
        one.writer_pid
        for one in records
        if one.state == "writing" and is_running(one.writer_pid, one.writer_start)
    }


def _is_lock_of(path: Path, lock: int) -> bool:
    """Whether the lock that is held is the one in this directory, and none that it replaced."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path / "lock"))
    except OSError:
        return False


def clear(arena: Arena, *, may_lose: bool = False) -> str:
    """Remove a stale arena; "" when it is gone, else why it was left alone.

    Under its lock, and after looking again: a keeper may have been started since, and have gone.
    ``may_lose``: what is newer than storage, too.
    """
    path = Path(arena.path)
    if arena.is_grave:
        if _mapping(path):
            return "it is in use"
        shutil.rmtree(path, ignore_errors=True)
        return ""
    try:
        lock = lock_dir(path)
    except OSError as error:
        return f"it cannot be locked: {error.strerror}"
    if lock is None:
        return "a keeper has it"
    try:
        if not _is_lock_of(path, lock):
            return "it was removed or made anew meanwhile"
        # Nobody can take it from here on: a keeper needs the lock, a trainer a keeper.
        records = list(_records(path))
        if _mapping(path) or _writing(records):
            return "it is in use"
        held = _newest(records), _newest_part(path, records)
        if not may_lose and _has_news(arena.root, *held) is not False:
            return NEWS
        remove_arena(path)
    finally:
        os.close(lock)
    return ""
