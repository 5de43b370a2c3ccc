"""Remove by hand what a person named, and what nothing names; every checkpoint left is whole.

A keeper does the same by its policy, one publication after the other (``commit.Sweeper``). Here
nobody publishes, so images go at once: manifests first, then what no manifest names. What is
removed is planned as a value first, which is what a dry run shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from holdfast.catalogue import PARTS, Catalogue, catalogue
from holdfast.errors import FormatError, NotFound
from holdfast.format.manifest import Generation, Manifest
from holdfast.persist import commit
from holdfast.persist.pins import mend, mendable, pinned
from holdfast.policy.retention import Keep
from holdfast.storage.base import Store


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory or file that no manifest names."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Removal:
    """What goes: checkpoints with their images, directories of dead attempts, layouts.

    ``parts``: directories of frozen parts that no checkpoint names which stays.
    """

    checkpoints: tuple[Manifest, ...]
    directories: tuple[Leftover, ...]
    layouts: tuple[Leftover, ...]
    parts: tuple[Leftover, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes that become free."""
        leftovers = (*self.directories, *self.layouts, *self.parts)
        return sum(m.image_bytes for m in self.checkpoints) + sum(x.size_bytes for x in leftovers)

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.directories or self.layouts)


def condemned(
    found: Catalogue, pins: Collection[Generation], keep: Keep, *, abandoned: bool
) -> tuple[Manifest, ...]:
    """The checkpoints that ``keep`` lets go and, if asked for, all that are ``abandoned``.

    Never a pinned one, never the newest that a restore takes; and while the newest incarnation
    has none yet, not the newest abandoned one either: it is the only copy.
    """
    going = set(keep.decide(found.lineage, pins))
    if abandoned:
        only = () if found.lineage else found.abandoned[-1:]
        going |= {g for g in found.abandoned if g not in pins and g not in only}
    return tuple(m for m in found.manifests if m.generation in going)


def plan(store: Store, keep: Keep, *, abandoned: bool) -> Removal:
    """What would be removed now. FormatError while anything there cannot be read."""
    found = _readable(store)
    going = condemned(found, pinned(store), keep, abandoned=abandoned)
    staying = [m for m in found.manifests if m not in going]
    staying += [manifest for manifest, _ in mendable(store, found)]
    left_behind = commit.unnamed_directories(store, [*going, *staying])
    freed = commit.unnamed_directories(store, staying)
    parts = [p for p in freed if p.startswith(f"{PARTS}/") and p not in left_behind]
    return Removal(
        going,
        tuple(leftover(store, path) for path in left_behind),
        tuple(leftover(store, path) for path in commit.unnamed_layouts(store, staying)),
        tuple(leftover(store, path) for path in parts),
    )


def remove(
    store: Store, removal: Removal, progress: Callable[[int, int], None] = lambda *_: None
) -> Removal:
    """Remove what was planned, under the root's lock; returns what really went.

    A checkpoint pinned since it was planned stays. Stopped anywhere, every manifest that is left
    is whole, and the next call removes the rest.
    """
    mend(store, catalogue(store))
    gone = tuple(m for m in removal.checkpoints if commit.withdraw(store, m.generation))
    # Read again: what is swept is what nothing names now, and only if it was to go.
    left = _readable(store).manifests
    planned = {one.path for one in (*removal.directories, *removal.layouts)} | _directories(gone)
    directories = [p for p in commit.unnamed_directories(store, left) if p in planned]
    layouts = [p for p in commit.unnamed_layouts(store, left) if p in planned]
    for done, path in enumerate(directories):
        progress(done, len(directories))
        store.remove_tree(path)
    for path in layouts:
        store.remove(path)
    return Removal(
        gone,
        tuple(one for one in removal.directories if one.path in directories),
        tuple(one for one in removal.layouts if one.path in layouts),
        tuple(one for one in removal.parts if one.path in directories),
    )


def _readable(store: Store) -> Catalogue:
    found = catalogue(store)
    if found.broken:
        listed = "\n".join(f"  {path}: {reason}" for path, reason in found.broken)
        raise FormatError(
            f"nothing is removed from {store.url}, because files there cannot be read that may "
            f"name what looks unnamed, or say what is abandoned:\n{listed}\nPut back a good copy "
            "of each, or delete it if its checkpoint can go, and prune again.",
            broken=[path for path, _ in found.broken],
        )
    return found


def _directories(manifests: Iterable[Manifest]) -> set[str]:
    return {directory for manifest in manifests for directory in manifest.directories}


def leftover(store: Store, path: str) -> Leftover:
    """A directory or file with the bytes that lie in it."""
    names = store.list(path)
    files = [f"{path}/{name}" for name in names] or [path]
    return Leftover(path, sum(_size_bytes(store, file) for file in files))


def _size_bytes(store: Store, path: str) -> int:
    try:
        return store.size_bytes(path)
    except NotFound:  # a directory, or gone since it was listed
        return 0
