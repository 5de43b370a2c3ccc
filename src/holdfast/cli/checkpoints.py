"""Finds the checkpoints of a root, the one that a user named, and a leaf in it."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from holdfast.catalogue import (
    LOCK,
    NEW_LISTS,
    Catalogue,
    Described,
    RootContents,
    catalogue,
    is_root,
)
from holdfast.errors import NotFound, UsageError
from holdfast.format.manifest import Generation, Manifest
from holdfast.interop.opening import open_source
from holdfast.leases import ReadLease
from holdfast.overview import Overview, overview
from holdfast.restore.planning.candidates import Candidate
from holdfast.restore.planning.candidates import choose as choose_candidates
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.restore.reading.stored import require_whole_line
from holdfast.storage.base import Store
from holdfast.storage.open import is_place, normal_root, open_lock, open_store

STEP_HELP = "a step as restore() takes it, or INCARNATION-STEP for any that `holdfast ls` shows"
#: A step has no more digits; Python itself refuses to read numbers of thousands of digits.
MAX_DIGITS = 20
#: An error lists at most this many checkpoints.
MAX_LISTED = 10


C = TypeVar("C", bound=RootContents[Described], covariant=True)


@dataclass(frozen=True, slots=True)
class _Opened(Generic[C]):
    """A root and its content."""

    root: str
    store: Store
    catalogue: C
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


class OpenedRoot(_Opened[Catalogue]):
    """A root and its catalogue."""


class ListedRoot(_Opened[Overview]):
    """A root and its content in short."""


def open_root(root: str) -> OpenedRoot:
    """Reads the catalogue of ``root``; raises NotFound when it is no directory of checkpoints."""
    if not is_place(root):
        raise NotFound(f"{root} is not a directory", root=root)
    return _opened(root, open_store(root))


def open_readable(root: str) -> OpenedRoot:
    """Opens as ``open_root``, and checkpoints of other writers too, for commands that only read."""
    return _opened(root, _source(root))


def open_listed(root: str, *, is_brief: bool = False) -> ListedRoot:
    """Opens as ``open_readable``, where a list in short is enough. ``is_brief``: names are."""
    store = _source(root)
    found = overview(store, is_brief=is_brief)
    _require_any(root, store, found)
    lineage = found.lineage
    return ListedRoot(root, store, found, frozenset(lineage), lineage[-1] if lineage else None)


def _source(root: str) -> Store:
    if not is_place(root) and not Path(normal_root(root)).is_file():
        raise NotFound(f"{root} is not a directory", root=root)
    return open_source(root)


def _opened(root: str, store: Store) -> OpenedRoot:
    found = catalogue(store)
    _require_any(root, store, found)
    lineage = found.lineage
    return OpenedRoot(root, store, found, frozenset(lineage), lineage[-1] if lineage else None)


def _require_any(root: str, store: Store, found: RootContents[Described]) -> None:
    if not (found.manifests or found.broken or is_root(store)):
        raise NotFound(f"{root} holds no checkpoints (it has no holdfast.json)", root=root)


def choose(opened: OpenedRoot, name: str | None) -> Manifest:
    """Returns the checkpoint that a restore of ``name`` (None: the newest) takes.

    NotFound lists the existing ones, RestoreError names the lost record that leaves it open.
    """
    found = opened.catalogue
    stored = [Candidate(*each.generation, "storage", each.attempt) for each in found.manifests]
    wanted = _wanted(name)
    fit = choose_candidates(stored, found.parents, wanted, found.unreadable)
    manifest = found.find(fit[0].generation) if fit else None
    if manifest is None:
        require_whole_line(opened.store, stored, found.line, wanted)
        raise NotFound(_absent(opened, name), root=opened.root, step=name)
    return manifest


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
            if lease.take(choose(opened, name)):
                break
            opened = open_readable(opened.root)  # retention was faster
        chosen = open_checkpoint(opened, name)
    except BaseException:
        lease.end()
        raise
    lease.end_with(chosen.checkpoint)
    return chosen


def open_checkpoint(opened: OpenedRoot, name: str | None) -> ChosenCheckpoint:
    """Opens the checkpoint that ``choose`` takes; its layout is read and checked."""
    manifest = choose(opened, name)
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


def _absent(opened: OpenedRoot, name: str | None) -> str:
    what = "no checkpoint" if name is None else f"no checkpoint of step {name}"
    generations = [each.generation for each in opened.catalogue.manifests]
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
