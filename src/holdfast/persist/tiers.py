"""Says what a cache has that the root has not had, and in which order it is drained.

A cache is a root of its own, in a directory of this host. A mark in it says that the root published
the same checkpoint: without one it stays, whatever the cache's retention says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.catalogue import (
    DRAINED,
    EMPTY,
    MANIFESTS,
    Catalogue,
    catalogue,
    drained_path,
    find_manifest,
)
from holdfast.errors import AlreadyPublished, StorageError
from holdfast.events import Warned, emit
from holdfast.format.manifest import Generation, Manifest
from holdfast.persist.pins import pinned
from holdfast.storage.base import Store, sync_names


def waiting(cache: Store, found: Catalogue = EMPTY) -> dict[Generation, Manifest]:
    """Returns the checkpoints of a cache without a mark; ``found``: its content, if it is known."""
    marks = set(cache.list(DRAINED))
    manifests = (found if found is not EMPTY else catalogue(cache)).manifests
    return {m.generation: m for m in manifests if _mark(m).rpartition("/")[2] not in marks}


def next_to_drain(
    waiting: Mapping[Generation, Manifest], pinned: Collection[Generation]
) -> Manifest | None:
    """Returns the oldest pinned one, else the newest; None when nothing waits."""
    first = min((g for g in waiting if g in pinned), key=_age, default=None)
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
                emit(Warned(message=f"{generation} is durable, and stays in the cache: {error}"))


def forget_marks(cache: Store) -> None:
    """Removes the marks of checkpoints that have left the cache."""
    found = catalogue(cache)
    if found.broken:
        return
    needed = {_mark(manifest).rpartition("/")[2] for manifest in found.manifests}
    for name in set(cache.list(DRAINED)) - needed:
        cache.remove(f"{DRAINED}/{name}")


def _mark(manifest: Manifest) -> str:
    return drained_path(manifest.generation, manifest.attempt)
