"""Says what a cache has that the root has not had, and in which order it is drained (copied).

A cache is a root of its own, in a directory of this host. A mark in it says that the root published
the same checkpoint: without one it stays, whatever the cache's retention says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.catalogue import (
    DRAINED,
    EMPTY,
    MANIFESTS,
    PARTS,
    STEPS,
    Catalogue,
    Described,
    M,
    RootContents,
    catalogue,
    drained_path,
    find_manifest,
)
from holdfast.errors import AlreadyPublished, NotFound, StorageError
from holdfast.events import warn
from holdfast.format.manifest import Generation, ImageRef, Manifest
from holdfast.persist.pins import pinned
from holdfast.storage.base import Store, sync_names

#: Says that a root is a cache, also while the root has had nothing of it.
_SIGN = f"{DRAINED}/cache.json"


def sign_cache(cache: Store) -> None:
    """Leaves a file that says what this root is: ``holdfast prune`` removes nothing there that the
    root lacks. A full disk costs a warning.
    """
    try:
        if not cache.exists(_SIGN):
            cache.publish(_SIGN, b"{}\n", replace=True)
    except StorageError as error:
        text = f"{cache.url} cannot say that it is a cache: do not prune it by hand: {error}"
        warn(text)


def waiting(cache: Store, found: Catalogue = EMPTY) -> dict[Generation, Manifest]:
    """Returns the checkpoints of a cache without a mark; ``found``: its content, if it is known."""
    return unmarked(cache, found if found is not EMPTY else catalogue(cache))


def unmarked(cache: Store, found: RootContents[M]) -> dict[Generation, M]:
    """Returns those of these checkpoints of a cache that have no mark."""
    marks = set(cache.list(DRAINED))
    return {m.generation: m for m in found.manifests if _mark(m).rpartition("/")[2] not in marks}


def next_to_drain(
    waiting: Mapping[Generation, Manifest],
    pinned: Collection[Generation],
    exact: Collection[tuple[int, int]] = (),
) -> Manifest | None:
    """Returns the oldest pinned one, else the oldest of ``exact``, else the newest; None when
    nothing waits.
    """
    first = min((g for g in waiting if g in pinned), key=_age, default=None)
    first = first or min((g for g in waiting if g in exact), key=_age, default=None)
    first = first or max(waiting, key=_age, default=None)
    return None if first is None else waiting[first]


def _age(generation: Generation) -> tuple[int, int]:
    return generation.incarnation, generation.step


def pinned_in(*stores: Store) -> set[Generation]:
    """Returns what is pinned in any of these."""
    return {generation for store in stores for generation in pinned(store)}


def mark_drained(cache: Store, manifest: Manifest) -> None:
    """Marks a checkpoint that the root has published."""
    try:
        cache.publish(_mark(manifest), b"{}\n")
    except AlreadyPublished:
        return


def mark_all_drained(cache: Store, root: Store) -> None:
    """Marks all that the root has; before anything is drained, or removed from either."""
    for generation, manifest in waiting(cache).items():
        there = find_manifest(root, generation)
        if there is not None and there[0].attempt == manifest.attempt:
            try:
                sync_names(root, MANIFESTS)  # who published it may have died before
                mark_drained(cache, manifest)
            except StorageError as error:  # a full disk: it is found there when it is drained
                warn(f"{generation} is durable, and stays in the cache: {error}")


def forget_marks(cache: Store) -> None:
    """Removes the marks of checkpoints that have left the cache."""
    found = catalogue(cache)
    if found.broken:
        return
    needed = {_mark(manifest) for manifest in found.manifests} | {_SIGN}
    for path in {f"{DRAINED}/{name}" for name in cache.list(DRAINED)} - needed:
        cache.remove(path)


def _mark(manifest: Described) -> str:
    return drained_path(manifest.generation, manifest.attempt)


class UnsettledDirectories:
    """The directories of one of several hosts' caches that are kept though no manifest there names
    them: those of attempts under way, and those newer than all that was drained, which another
    host's cache may name.
    """

    def __init__(self) -> None:
        self.under_way: set[str] = set()
        self.newest_drained = Generation(0, -1)

    def __contains__(self, path: object) -> bool:
        if path in self.under_way:
            return True
        above, _, name = str(path).partition("/")
        numbers = name.split("-")[:2]
        if above not in (STEPS, PARTS) or not all(one.isdecimal() for one in numbers):
            return False
        return tuple(map(int, numbers)) > self.newest_drained

    def learn(self, cache: Store, found: Catalogue) -> None:
        """Take from the marks which is the newest that was drained."""
        left = waiting(cache, found)
        drained = (m.generation for m in found.manifests if m.generation not in left)
        self.newest_drained = max((self.newest_drained, *drained))


def ranks_held(store: Store, manifest: Manifest) -> set[int]:
    """Returns the ranks whose images a tier has, as far as names and sizes show."""
    return {ref.rank for ref in manifest.images if has_file(store, ref)}


def has_file(store: Store, ref: ImageRef) -> bool:
    """Returns True if a tier has a file of this name and size."""
    try:
        return store.size_bytes(ref.path) == ref.size_bytes
    except NotFound:
        return False
