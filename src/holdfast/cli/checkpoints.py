"""Finds the checkpoints of a root, the one that a user named, and a leaf in it."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.catalogue import LOCK, NEW_LISTS, is_root
from holdfast.errors import NotFound, UsageError
from holdfast.format.manifest import Generation, Manifest
from holdfast.interop.opening import open_source
from holdfast.leases import ReadLease
from holdfast.overview import Overview, confirmed, overview
from holdfast.restore.planning.candidates import choose as choose_candidates
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.restore.reading.stored import require_whole_line, stored
from holdfast.storage.base import Store
from holdfast.storage.open import is_place, normal_root, open_lock, open_store

STEP_HELP = "a step as restore() takes it, or INCARNATION-STEP for any that `holdfast ls` shows"
#: A step has no more digits; Python itself refuses to read numbers of thousands of digits.
MAX_DIGITS = 20
#: An error lists at most this many checkpoints.
MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class OpenedRoot:
    """A root and its content in short."""

    root: str
    store: Store
    catalogue: Overview
    lineage: frozenset[Generation]
    latest: Generation | None

    @property
    def notes(self) -> list[str]:
        """What is there of another writer's checkpoint and is not read, in words."""
        return list(getattr(self.store, "notes", ()))

    @property
    def has_sums(self) -> bool:
        """False for the checkpoint of another writer, who left no checksums of blocks."""
        return bool(getattr(self.store, "has_block_sums", True))

    def state_of(self, generation: Generation) -> str:
        """Returns newest | kept | abandoned: of a future given up, restored only when named.

        "undecided": one of these, a record that would decide is missing.
        """
        if generation == self.latest:
            return "newest"
        if generation in self.lineage:
            return "kept"
        return "undecided" if self.catalogue.line.is_undecided(generation) else "abandoned"


def open_root(root: str, *, is_brief: bool = False) -> OpenedRoot:
    """Lists ``root``; raises NotFound when it is no directory of checkpoints. In a bucket with an
    index few manifests are read. ``is_brief``: names are enough.
    """
    if not is_place(root):
        raise NotFound(f"{root} is not a directory", root=root)
    return _opened(root, open_store(root), is_brief=is_brief)


def open_readable(root: str, *, is_brief: bool = False) -> OpenedRoot:
    """Opens as ``open_root``, and checkpoints of other writers too, for commands that only read."""
    if not is_place(root) and not Path(normal_root(root)).is_file():
        raise NotFound(f"{root} is not a directory", root=root)
    return _opened(root, open_source(root), is_brief=is_brief)


def _opened(root: str, store: Store, *, is_brief: bool = False) -> OpenedRoot:
    found = overview(store, is_brief=is_brief)
    if not (found.generations or found.broken or is_root(store)):
        raise NotFound(f"{root} holds no checkpoints (it has no holdfast.json)", root=root)
    lineage = found.lineage
    return OpenedRoot(root, store, found, frozenset(lineage), lineage[-1] if lineage else None)


def choose(opened: OpenedRoot, name: str | None) -> Manifest:
    """Returns the checkpoint that a restore of ``name`` (None: the newest) takes.

    NotFound lists the existing ones, RestoreError names the lost record that leaves it open.
    """
    found, wanted = opened.catalogue, _wanted(name)
    while True:
        there = stored(found)
        fit = choose_candidates(there, found.parents, wanted, found.unreadable)
        if not fit:
            require_whole_line(opened.store, there, found.line, wanted)
            raise NotFound(_absent(opened, found, name), root=opened.root, step=name)
        if (manifest := found.read.get(fit[0].generation)) is not None:
            return manifest
        # Only the index has told of it. One that is gone or cannot be read leaves its place.
        found = confirmed(opened.store, found, [fit[0].generation])


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    """An open checkpoint.

    ``leaves``: name -> number in the layout; tied tensors have several names, and are stored once.
    ``values``: those of rank 0, as they are stored.
    """

    root: str
    manifest: Manifest
    checkpoint: Checkpoint
    leaves: dict[str, int]
    values: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        """The checkpoint's identity, as in every command's JSON."""
        return {
            "root": self.root,
            "checkpoint": str(self.manifest.generation),
            "step": self.manifest.step,
            "world": self.manifest.world,
        }


def hold_checkpoint(opened: OpenedRoot, name: str | None) -> ChosenCheckpoint:
    """Opens as ``open_checkpoint``, and prevents pruning while the ``checkpoint`` of the result
    lives.
    """
    lease = ReadLease(opened.store)
    try:
        for _ in range(NEW_LISTS):
            manifest = choose(opened, name)
            if lease.take(manifest):
                break
            opened = open_readable(opened.root)  # retention was faster
        chosen = _open(opened, manifest)
    except BaseException:
        lease.end()
        raise
    lease.end_with(chosen.checkpoint)
    return chosen


def open_checkpoint(opened: OpenedRoot, name: str | None) -> ChosenCheckpoint:
    """Opens the checkpoint that ``choose`` takes; its layout is read and checked."""
    return _open(opened, choose(opened, name))


def _open(opened: OpenedRoot, manifest: Manifest) -> ChosenCheckpoint:
    checkpoint = from_manifest(opened.store, manifest)
    leaves = {leaf.name: number for number, leaf in enumerate(checkpoint.layout.leaves)}
    values, aliases = _values(manifest, checkpoint)
    tied = {name: leaves[of] for name, of in aliases.items() if of in leaves}
    return ChosenCheckpoint(opened.root, manifest, checkpoint, leaves | tied, values)


def _values(manifest: Manifest, checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns values and aliases, from the image where they were too long for the manifest."""
    if manifest.values or manifest.aliases:
        return manifest.values, manifest.aliases
    # Imported by name, because it loads numpy, and completion must be fast.
    read = importlib.import_module("holdfast.restore.reading.read")
    document = read.read_values(checkpoint, 0)
    return document.get("shared", {}), read.read_aliases(checkpoint, document)


def unknown(what: str, name: str, known: Sequence[str], root: str) -> NotFound:
    """Returns the error for a name that does not exist; it suggests similar ones."""
    close = ", ".join(difflib.get_close_matches(name, known, n=3))
    hint = f"did you mean {close}?" if close else f"`holdfast show {root}` lists them"
    return NotFound(f"no {what} {name}: {hint}", leaf=name)


def _wanted(name: str | None) -> int | str | None:
    if name is None or ("-" in name and len(name) <= 2 * MAX_DIGITS):
        return name
    if not name.isdecimal() or len(name) > MAX_DIGITS:
        raise UsageError(f"--step {name}: give {STEP_HELP}")
    return int(name)


def _absent(opened: OpenedRoot, found: Overview, name: str | None) -> str:
    what = "no checkpoint" if name is None else f"no checkpoint of step {name}"
    generations = [each.generation for each in found.manifests]
    shown = [
        str(each) if each in opened.lineage else f"{each} ({opened.state_of(each)})"
        for each in generations[-MAX_LISTED:]
    ]
    if len(generations) > MAX_LISTED:
        shown.insert(0, f"{len(generations) - MAX_LISTED} older")
    return f"{what} in {opened.root}; there are: {', '.join(shown) or 'none'}"


# Finds who holds a lock file without touching it: trying a lock can make the start of a run fail.


@dataclass(frozen=True, slots=True)
class Holder:
    """The signer of a lock. ``pid`` is 0 when no process of this machine holds it.

    Then the signer was killed, or runs on another host or in another container.
    """

    pid: int
    signed: str


def root_holder(root: str) -> Holder | None:
    """Returns who holds the lock of a root; None when it is free."""
    if (lock := open_lock(root, LOCK)) is not None:
        there = lock.holder()
        return None if there is None else Holder(there.pid, there.owner)
    path = Path(normal_root(root)) / f".{LOCK}.lock"  # as LocalStore names it
    try:
        signed = path.read_text(errors="replace").strip("\0\n ")
    except OSError:
        return None
    pids = holders(path)
    return Holder(pids[0] if pids else 0, signed) if pids or signed else None


def holders(path: Path, proc: Path = Path("/proc")) -> list[int]:
    """Returns the processes of this machine that hold an flock on ``path``."""
    try:
        inode = path.stat().st_ino
        table = (proc / "locks").read_text().splitlines()
    except OSError:
        return []
    lines = [line.split() for line in table]
    # "1: FLOCK ADVISORY WRITE 4711 fd:00:1234 0 EOF"; a waiting one has "->" second.
    locks = [f for f in lines if len(f) >= 6 and f[1] == "FLOCK"]
    pids = {int(f[4]) for f in locks if f[5].rpartition(":")[2] == str(inode)}
    return sorted(pid for pid in pids if pid > 0 and _may_have_open(pid, path, proc))


def _may_have_open(pid: int, path: Path, proc: Path) -> bool:
    """True if the process has this very file open: device numbers in /proc/locks are not always the
    file's.
    """
    wanted = os.path.realpath(path)
    try:
        descriptors = list((proc / str(pid) / "fd").iterdir())
    except PermissionError:
        return True  # another user's: its number is all there is to go by
    except OSError:
        return False
    return any(_target(descriptor) == wanted for descriptor in descriptors)


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""
