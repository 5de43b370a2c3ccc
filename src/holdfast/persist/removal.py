"""Removes by hand the checkpoints a user chose, and unnamed files; every remaining checkpoint is
whole.

A keeper does the same by its policy, one publication after the other (``commit.Sweeper``). Here
nobody publishes, so images are removed at once: manifests first, then files that no manifest names.
The removal is planned as a value first, which a dry run shows. Checkpoints that are being read
stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from holdfast.catalogue import (
    COPIES,
    DAMAGED,
    DRAINED,
    INCARNATIONS,
    LAYOUTS,
    MANIFESTS,
    PARTS,
    STEPS,
    M,
    RootContents,
    manifest_path,
)
from holdfast.errors import FormatError, NotFound
from holdfast.format.manifest import Generation, Manifest
from holdfast.leases import LeaseWatch
from holdfast.overview import UNSEEN, Overview, Summary, confirmed, overview
from holdfast.persist import commit
from holdfast.persist.drain_order import unmarked
from holdfast.persist.pins import mend, mendable, pinned
from holdfast.policy.when import Keep
from holdfast.storage.base import Store, is_link, unfinished, unsettled_s

_NUMBER = "(?:0|[1-9][0-9]{0,15})"
_GENERATION = f"{_NUMBER}-{_NUMBER}"
_ATTEMPT = rf"{_GENERATION}-[0-9A-Za-z_-]{{1,128}}"
_SET_ASIDE = (
    rf"{STEPS}/{_ATTEMPT}/live-[0-9]{{5,}}\.safetensors",
    rf"{PARTS}/{_ATTEMPT}/frozen-[0-9]{{5,}}\.safetensors",
    rf"{LAYOUTS}/[0-9a-f]+\.json",
    rf"{MANIFESTS}/{_GENERATION}\.json",
    rf"{INCARNATIONS}/{_NUMBER}\.json",
)
#: The names of files that a repair or a copy makes beside those that checkpoints name.
_BESIDE = re.compile(
    rf"{COPIES}/{_ATTEMPT}\.json|{DAMAGED}/(?:{'|'.join(_SET_ASIDE)})(?:-[1-9][0-9]*)?(?:\.new)?"
)


class Leftover(Struct, frozen=True):
    """A directory or file that no manifest names."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Removal:
    """The plan of a removal: checkpoints with their images, directories of dead attempts, layouts.

    ``parts``: directories of frozen parts that no remaining checkpoint names. ``others``: what a
    repair has set aside, and notes of copies that were broken off.
    """

    checkpoints: tuple[Summary, ...]
    directories: tuple[Leftover, ...]
    layouts: tuple[Leftover, ...]
    parts: tuple[Leftover, ...] = ()
    others: tuple[Leftover, ...] = ()
    waits_s: float = field(default=0.0, compare=False)
    """Seconds for which nothing was removed for being unnamed: a request to name it may land."""

    @property
    def size_bytes(self) -> int:
        """Bytes that become free."""
        leftovers = (*self.directories, *self.layouts, *self.parts, *self.others)
        return sum(m.image_bytes for m in self.checkpoints) + sum(x.size_bytes for x in leftovers)

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.directories or self.layouts or self.others)


def removable(
    found: RootContents[M], pins: Collection[Generation], keep: Keep, *, abandoned: bool
) -> tuple[M, ...]:
    """Returns the checkpoints that ``keep`` releases and, if asked for, all that are ``abandoned``.

    Never a pinned one, never the newest that a restore takes, never one of which a missing record
    leaves open whether it was abandoned. While the newest incarnation has no checkpoint yet, not
    the newest abandoned one either: it is the only copy.
    """
    going = set(keep.decide(found.lineage, pins, found.values_of(keep.by)))
    if abandoned:
        only = () if found.lineage else found.abandoned[-1:]
        going |= {g for g in found.abandoned if g not in pins and g not in only}
    return tuple(m for m in found.manifests if m.generation in going)


def plan(store: Store, keep: Keep, *, abandoned: bool, leases: LeaseWatch | None = None) -> Removal:
    """Returns the removal that would be made now.

    Raises FormatError while anything there cannot be read, or with ``abandoned`` while a record is
    missing that would decide.
    """
    found, leases = _readable(store), leases or LeaseWatch(store)
    if abandoned and found.gap:
        raise FormatError(
            f"no abandoned checkpoint is removed from {store.url}: {found.gap}. Put that record "
            "back, or have a run go on from one of them by its name: then it is known.",
            path=f"{INCARNATIONS}/{found.line.missing}.json",
        )
    spared = pinned(store) | leases.generations()
    if store.list(DRAINED):  # of a cache: what its root has not had
        spared |= unmarked(store, found).keys()
    going = removable(found, spared, keep, abandoned=abandoned)
    gone = {one.generation for one in going}
    staying: list[Summary | Manifest] = [m for m in found.manifests if m.generation not in gone]
    staying += [manifest for manifest, _ in mendable(store, found)]
    left_behind = commit.unnamed_directories(store, [*going, *staying])
    freed = commit.unnamed_directories(store, staying)
    held = leases.paths()
    left_behind = [p for p in left_behind if p not in held]
    freed = [p for p in freed if p not in held]
    unnamed_layouts = [p for p in commit.unnamed_layouts(store, staying) if p not in held]
    parts = [p for p in freed if p.startswith(f"{PARTS}/") and p not in left_behind]
    return Removal(
        going,
        tuple(leftover(store, path) for path in left_behind),
        tuple(leftover(store, path) for path in unnamed_layouts),
        tuple(leftover(store, path) for path in parts),
        tuple(leftover(store, path) for path in _beside(store)),
    )


def remove(
    store: Store,
    removal: Removal,
    progress: Callable[[int, int], None] = lambda *_: None,
    *,
    leases: LeaseWatch | None = None,
) -> Removal:
    """Executes the plan under the root's lock; returns what was really removed.

    A checkpoint pinned or read since the plan was made stays. Stopped anywhere, every remaining
    manifest is whole, and the next call removes the rest.

    In a bucket a request of whoever had the lock before may land late, and name directories and
    layouts that are unnamed now: until none can any more, these stay (``waits_s``).
    """
    waits_s = unsettled_s(store)
    leases = leases or LeaseWatch(store)
    found = overview(store)
    mend(store, found)
    gone = tuple(
        m
        for m in removal.checkpoints
        if m.generation not in leases.generations() and commit.withdraw(store, m.generation)
    )
    # Read again: only files that are unnamed now, and were in the plan, are swept.
    left = _readable(store, found, {m.generation for m in gone}).manifests
    planned = {one.path for one in (*removal.directories, *removal.layouts)} | _directories(gone)
    planned = set() if waits_s else planned
    held = leases.paths()  # after the manifests were removed: see holdfast.leases
    unnamed = commit.unnamed_directories(store, left)
    directories = [p for p in unnamed if p in planned and p not in held]
    layouts = [p for p in commit.unnamed_layouts(store, left) if p in planned and p not in held]
    for done, path in enumerate(directories):
        progress(done, len(directories))
        store.remove_tree(path)
    for path in layouts:
        store.remove(path)
    beside = frozenset(_beside(store))
    others = tuple(one for one in removal.others if one.path in beside)
    for one in others:
        store.remove(one.path)
    return Removal(
        gone,
        tuple(one for one in removal.directories if one.path in directories),
        tuple(one for one in removal.layouts if one.path in layouts),
        tuple(one for one in removal.parts if one.path in directories),
        others,
        waits_s,
    )


def _beside(store: Store) -> list[str]:
    """Returns the files that no checkpoint ever names: what was set aside, notes of copies.

    Only names that Holdfast makes; what else a user keeps there stays, and links lead nowhere.
    """
    found = [path for above in (DAMAGED, COPIES) for path in _files_below(store, above)]
    return [path for path in found if _BESIDE.fullmatch(path)]


def _files_below(store: Store, directory: str) -> Iterator[str]:
    if is_link(store, directory):
        return
    for name in store.list(directory):
        path = f"{directory}/{name}"
        if is_link(store, path):
            continue
        if store.exists(path):
            yield path
        else:
            yield from _files_below(store, path)


def _readable(
    store: Store, known: Overview = UNSEEN, removed: Collection[Generation] = ()
) -> Overview:
    """Lists a root of which all can be read. ``removed``: what is known to be gone."""
    found = overview(store, known)
    # A list may lag: what has images may have a manifest that it does not show yet.
    said = commit.generations_of(commit.directories_there(store)).difference(removed)
    found = confirmed(store, found, (g for g in said if manifest_path(g) not in found.tags))
    # An earlier version's index does not say which layouts are named.
    found = confirmed(store, found, [m.generation for m in found.manifests if not m.layout])
    if found.broken:
        listed = "\n".join(f"  {path}: {reason}" for path, reason in found.broken)
        raise FormatError(
            f"nothing is removed from {store.url}, because files there cannot be read that may "
            f"name what looks unnamed, or say what is abandoned:\n{listed}\nPut back a good copy "
            "of each, or delete it if its checkpoint can go, and prune again.",
            broken=[path for path, _ in found.broken],
        )
    return found


def _directories(manifests: Iterable[Summary]) -> set[str]:
    return {directory for manifest in manifests for directory in manifest.directories}


def leftover(store: Store, path: str) -> Leftover:
    """Returns a directory or file with its size in bytes."""
    if path in unfinished(store):  # a file of this name stays
        return Leftover(path, 0)
    names = store.list(path)
    files = [f"{path}/{name}" for name in names] or [path]
    return Leftover(path, sum(_size_bytes(store, file) for file in files))


def _size_bytes(store: Store, path: str) -> int:
    try:
        return store.size_bytes(path)
    except NotFound:  # a directory, or gone since it was listed
        return 0
