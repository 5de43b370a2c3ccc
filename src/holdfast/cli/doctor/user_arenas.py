"""Finds the arenas of this user and their keepers, and clears those of dead runs.

The next start restores from the arena of a dead run, so it is only cleared on request: when nobody
holds its lock, nobody listens on its socket, no process has any of it mapped, and nothing in it is
newer than storage, unless the user accepts that loss.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from holdfast.catalogue import ROOT, read_document
from holdfast.cli.checkpoints import holders
from holdfast.cli.command import confirmed, print_json
from holdfast.cli.doctor.rules.probe_facts import Arena
from holdfast.cli.output import stdout
from holdfast.errors import ArenaError, HoldfastError
from holdfast.format.manifest import Generation, Root
from holdfast.observe.text import count_text, on_one_line, size_text
from holdfast.overview import Overview, overview
from holdfast.protocol import messages as m
from holdfast.protocol.arena import (
    ROOT_NAME,
    SLOT_SUFFIX,
    SlotFile,
    SlotRecord,
    arena_home,
    boot_id,
    is_running,
    lock_dir,
    parse_arena_name,
    remove_arena,
    root_key,
)
from holdfast.protocol.client import connect_socket
from holdfast.restore.cluster.arena_shards import shards_in
from holdfast.storage.base import Store
from holdfast.storage.files import views
from holdfast.storage.open import is_place, open_store

ANSWER_TIMEOUT_S = 2.0
NEWS = "it holds a snapshot that storage is not known to have, or a newer one"


def probe_arenas(home: Path) -> tuple[Arena, ...]:
    """Returns every arena below ``home``, by name."""
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
    run_id, key, host_id = parse_arena_name(path.name)
    keeper_pid = next(iter(holders(path / "lock")), 0) or _listener(path)
    root = _root_of(path, keeper_pid)
    records = list(_records(path))
    newest, part = newest_whole(records), newest_part(path, run_id, records)
    storage = contents(root, run_id, key)
    return Arena(
        path=str(path),
        run_id=run_id,
        root_key=key,
        host_id=host_id,
        size_bytes=size_bytes,
        keeper_pid=keeper_pid,
        keeper_state=_state(keeper_pid) if keeper_pid else "",
        answers=_answers(path, run_id, root),
        root=root,
        root_exists=is_place(root) if root else None,
        is_its_root=storage.is_its_root,
        newest="" if newest is None else str(newest.generation),
        newest_is_durable=None if newest is None else storage.has(newest),
        part="" if part is None else str(part.generation),
        has_news=storage.lacks_any((newest, part)),
        parity_bytes=sum(file.lstat().st_blocks * 512 for file in path.glob("parity/*.rows")),
        users=tuple(sorted({*_mapping(path), *_writing(records)} - {keeper_pid})),
    )


def _root_of(path: Path, keeper_pid: int) -> str:
    with suppress(OSError):
        return os.fsdecode((path / ROOT_NAME).read_bytes()).strip()
    with suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{keeper_pid}/cmdline").read_text().split("\0")
        return words[words.index("--root") + 1]
    return ""


def _records(path: Path) -> Iterator[SlotRecord]:
    """Yields the records of this run's slots; incomplete ones are left out."""
    run_id, key, _ = parse_arena_name(path.name)
    for slot in sorted(path.glob(f"*{SLOT_SUFFIX}")):
        with suppress(ArenaError), closing(SlotFile.open(slot, writable=False)) as file:
            record = file.read_record()
            if record is None or (record.boot_id, record.run_id) != (boot_id(), run_id):
                continue
            if key == (root_key(record.root_id) if record.root_id else ""):
                yield record


def _listener(path: Path) -> int:
    """Returns the process that listens on the arena's socket, from the kernel; 0: none, or not
    visible from here.
    """
    try:
        line = connect_socket(path)
    except OSError:
        return 0
    with closing(line):
        raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


def _answers(path: Path, run_id: str, root: str) -> bool | None:
    """True if the keeper answers a greeting in time; None when nobody listens."""
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
    """Returns the kernel's letter for a process's state: R, S, D, T (stopped), Z."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _mapping(path: Path) -> tuple[int, ...]:
    """Returns the processes that have part of the arena mapped."""
    below = os.fsencode(os.path.realpath(path)) + b"/"
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return tuple(pid for pid in pids if _has_mapped(pid, below))


def _has_mapped(pid: int, below: bytes) -> bool:
    try:
        return below in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:  # ended, or another user's, who cannot open what is in a private directory
        return False


def _writing(records: Iterable[SlotRecord]) -> set[int]:
    """Returns the living processes that a slot was granted to."""
    return {
        one.writer_pid
        for one in records
        if one.state == "writing" and is_running(one.writer_pid, one.writer_start)
    }


def _is_lock_of(path: Path, lock: int) -> bool:
    """True if the held lock is the one in this directory, and not an earlier one that it
    replaced.
    """
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path / "lock"))
    except OSError:
        return False


def clear(arena: Arena, *, may_lose: bool = False) -> str:
    """Removes a stale arena; returns "" when it is gone, else the reason why it was left alone.

    Under its lock, and after checking again: a keeper may have been started meanwhile, and have
    ended. ``may_lose``: removes snapshots newer than storage, too.
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
        held = newest_whole(records), newest_part(path, arena.run_id, records)
        storage = contents(arena.root, arena.run_id, arena.root_key)
        if not may_lose and storage.lacks_any(held) is not False:
            return NEWS
        remove_arena(path)
    finally:
        os.close(lock)
    return ""


# Frees the shared memory of dead runs, after showing which arenas would go, which stay, and why.
#
# Never an arena that a keeper or a trainer uses, and none with a snapshot newer than storage unless
# the user accepts that loss.


def clean(args: argparse.Namespace) -> int:
    """Removes the arenas that may go, with ``lose_snapshots`` all that are stale; returns 0."""
    may_lose = args.lose_snapshots
    stale = [one for one in probe_arenas(arena_home()) if one.is_stale or one.is_grave]
    going = [one for one in stale if may_lose or one.may_go]
    left = {one.path: NEWS for one in stale if one not in going}
    if not args.json:
        _show(stale, going)
    question = "Clear this, and lose the snapshots in it?" if may_lose else "Clear this?"
    if going and not confirmed(question, yes=args.yes, as_json=args.json):
        return 0
    refused = {one.path: why for one in going if (why := clear(one, may_lose=may_lose))}
    cleared = [one for one in going if one.path not in refused]
    freed = sum(one.size_bytes for one in cleared)
    if args.json:
        rows = [{"path": x.path, "newest": x.newest, "size_bytes": x.size_bytes} for x in cleared]
        print_json({"cleared": rows, "left": {**left, **refused}, "size_bytes": freed})
        return 0
    for path, reason in refused.items():
        stdout().print(
            f"{escape(path)} was left alone: {escape(on_one_line(reason))}", soft_wrap=True
        )
    none = "nothing is stale" if not stale else ""
    stdout().print(none or f"{count_text(len(cleared), 'arena')} cleared, {size_text(freed)} freed")
    if left:
        held = count_text(len(left), "arena")
        remedy = "start their runs again, or give them up: holdfast doctor --clean --lose-snapshots"
        stdout().print(f"{held} left for the snapshots there: {remedy}", soft_wrap=True)
    return 0


def _show(stale: Iterable[Arena], going: list[Arena]) -> None:
    for one in stale:
        fate = "goes " if one in going else "stays"
        text = f"{fate}  {escape(one.path)}  {size_text(one.size_bytes)}  {_held(one)}"
        stdout().print(text, soft_wrap=True)


def _held(arena: Arena) -> str:
    if arena.is_grave:
        return "half removed"
    if not (arena.newest or arena.part):
        return "no whole snapshot"
    if arena.newest:
        durable = {True: "in storage too", False: "NOT in storage", None: "perhaps not in storage"}
        text = f"newest snapshot {arena.newest}, {durable[arena.newest_is_durable]}"
    else:
        text = ""
    if arena.part and arena.part != arena.newest:
        newer = {
            True: "NOT in storage",
            False: "not newer than storage",
            None: "perhaps not in storage",
        }
        text += f"{', ' * bool(text)}part of snapshot {arena.part}, {newer[arena.has_news]}"
    return text


# Finds out which snapshots an arena holds, and which of them storage has: by run, root and attempt.
#
# Numbers alone prove nothing: every run has a step 100. An attempt's name is never given twice, so
# that a manifest with that name is of this very snapshot. A snapshot older than everything in
# storage is given up only if it is of the same root, and of a start that storage does not know as
# another one.


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A generation in memory. ``nonce``: that of the start that captured it, "" where it is
    unknown.
    """

    generation: Generation
    attempt: str
    nonce: str = ""


def newest_whole(records: Iterable[SlotRecord]) -> Snapshot | None:
    """Returns the newest that all ranks captured."""
    ranks: dict[tuple[int, int, str, int], set[int]] = {}
    nonces: dict[str, str] = {}
    for one in records:
        if one.state == "captured":
            key = (one.incarnation, one.step, one.attempt, one.world)
            ranks.setdefault(key, set()).add(one.rank)
            nonces[one.attempt] = nonces.get(one.attempt) or one.nonce
    whole = [key for key, have in ranks.items() if have == set(range(key[3]))]
    if not whole:
        return None
    incarnation, step, attempt, _ = max(whole)  # the keeper's order: the newest start first
    return Snapshot(Generation(incarnation, step), attempt, nonces[attempt])


def newest_part(path: Path, run_id: str, records: Iterable[SlotRecord]) -> Snapshot | None:
    """Returns the newest of several hosts of which an image, or parity, is in this arena."""
    images = [
        Snapshot(Generation(one.incarnation, one.step), one.attempt, one.nonce)
        for one in records
        if one.state == "captured" and one.hosts > 1
    ]
    return max([*images, *_parity(path, run_id)], key=lambda one: one.generation, default=None)


def _parity(path: Path, run_id: str) -> Iterator[Snapshot]:
    for shard in shards_in(path):
        if shard.record.run_id == run_id:
            yield Snapshot(shard.record.generation, shard.record.attempt)


def root_keys(store: Store) -> tuple[str, ...]:
    """Returns the keys that arenas of this root may have. Raises NotFound where there is no
    root.
    """
    return tuple(root_key(view) for view in views(store.identity()))


@dataclass(frozen=True, slots=True)
class Contents:
    """The checkpoints of a run in storage, at the root that its memory names. None: it cannot be
    read.

    ``is_its_root``: True if the very root is there, and no other one of the same run.
    """

    is_its_root: bool | None = None
    found: Overview | None = None

    def has(self, snapshot: Snapshot) -> bool | None:
        """True if this very snapshot is there."""
        if self.found is None:
            return None
        manifest = self.found.find(snapshot.generation)
        return manifest is not None and manifest.attempt == snapshot.attempt

    def lacks_any(self, snapshots: Iterable[Snapshot | None]) -> bool | None:
        """True if one of these is neither there nor older than everything there; None: unknown."""
        missing = [one for one in snapshots if one is not None and not self.has(one)]
        if not missing:
            return False
        if self.found is None or not self.is_its_root:
            return None
        return any(not self._is_past(one) for one in missing)

    def _is_past(self, snapshot: Snapshot) -> bool:
        assert self.found is not None
        latest = self.found.latest
        begun = {one.n: one.nonce for one in self.found.incarnations}
        nonce = begun.get(snapshot.generation.incarnation, "")
        is_another = bool(nonce and snapshot.nonce) and nonce != snapshot.nonce
        return latest is not None and snapshot.generation < latest and not is_another


def contents(root: str, run_id: str, key: str) -> Contents:
    """Returns the checkpoints of the run that are at ``root`` now, for the root with this key."""
    if not root or not is_place(root):
        return Contents()
    store = open_store(root)
    try:
        if read_document(store, Root, ROOT).run_id != run_id:
            return Contents(is_its_root=False)
        return Contents(key in root_keys(store), overview(store))
    except HoldfastError:
        return Contents()
