"""Publish a checkpoint, or leave no trace of it.

Images and layout are durable before the manifest names them, so a reader that finds a
manifest finds everything; the manifest is removed before anything it names, so one that
still stands is whole. Only the holder of the root's lock publishes or removes
(docs/invariants.md, 1 and 3).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.catalogue import (
    INCARNATIONS,
    LAYOUTS,
    PARTS,
    ROOT,
    STEPS,
    layout_path,
    manifest_path,
    read_document,
)
from holdfast.errors import (
    AlreadyPublished,
    ChecksumMismatch,
    FormatError,
    NewerFormat,
    NotFound,
    StorageError,
)
from holdfast.format.manifest import Generation, Incarnation, Manifest, Root, seal
from holdfast.geometry.layout import table_hash
from holdfast.persist.pins import pinned
from holdfast.storage.base import Store


def open_root(store: Store, run_id: str) -> Root:
    """Read the root's identity, or give it one. The first of two racing processes wins."""
    if not store.exists(ROOT):
        with contextlib.suppress(AlreadyPublished):
            store.publish(ROOT, seal(Root(run_id=run_id, created_s=time.time())))
    try:
        return read_document(store, Root, ROOT)
    except NewerFormat:
        raise
    except FormatError as error:
        raise FormatError(
            f"{error}\nMove {ROOT} away: a new one is made, with the run id of the checkpoints "
            "that lie there. Should there be none yet, set HOLDFAST_RUN_ID to the run's id to find "
            "what is in memory.",
            path=ROOT,
        ) from error


def require_root(store: Store, run_id: str) -> None:
    """Make sure that the root is there and this run's, and make nothing. StorageError otherwise."""
    try:
        found = read_document(store, Root, ROOT)
    except NotFound:
        raise StorageError(
            f"{store.url} has no {ROOT}: the root of run {run_id} was removed, moved, or is not "
            "mounted. Nothing is written there until it is back.",
            operation="read", path=ROOT, url=store.url,
        ) from None  # fmt: skip
    if found.run_id != run_id:
        raise StorageError(
            f"{store.url} is the root of run {found.run_id} by now, not of run {run_id}. Nothing "
            "is written there; put the old root back, or start the run again.",
            operation="read", path=ROOT, url=store.url,
        )  # fmt: skip


def record_incarnation(store: Store, incarnation: Incarnation) -> None:
    """Make the incarnation and its parent durable: required before its first manifest."""
    path = f"{INCARNATIONS}/{incarnation.n}.json"
    data = seal(incarnation)
    try:
        store.publish(path, data)
    except AlreadyPublished:
        there = read_document(store, Incarnation, path)
        if (there.nonce, there.parent) != (incarnation.nonce, incarnation.parent):
            raise


def write_layout(store: Store, hash_: str, data: bytes) -> None:
    """Make a layout durable; it is there once, whoever needs it.

    ChecksumMismatch when these bytes are not what ``hash_`` names: they replace none. What lies
    there is replaced only when it is wrong itself.
    """
    if table_hash(data) != hash_:
        raise ChecksumMismatch(
            f"layout {hash_} changed in memory: its bytes are now those of {table_hash(data)}. It "
            "is not stored, and no checkpoint that needs it is published. Have the machine's "
            "memory checked.",
            path=layout_path(hash_),
        )
    try:
        store.publish(layout_path(hash_), data)
    except AlreadyPublished:
        if store.read(layout_path(hash_)) != data:
            store.publish(layout_path(hash_), data, replace=True)


def publish(store: Store, manifest: Manifest) -> None:
    """The act that makes a checkpoint. Everything it names must be durable already."""
    store.publish(manifest_path(manifest.generation), seal(manifest))


def withdraw(store: Store, generation: Generation) -> bool:
    """Take a checkpoint away, unless somebody pinned it, if only just now; whether it went.

    Its images follow when they are swept. The order of the steps is what makes ``pin`` safe
    without a lock: see ``holdfast.persist.pins``.
    """
    path = manifest_path(generation)
    if generation in pinned(store):
        return False
    data = store.read(path)
    store.remove(path)
    if generation in pinned(store):
        store.publish(path, data)
        return False
    return True


def unnamed_directories(store: Store, manifests: Iterable[Manifest]) -> list[str]:
    """The directories of images and parts that none of ``manifests``, which must be all, names."""
    named = {directory for manifest in manifests for directory in manifest.directories}
    below = [f"{above}/{name}" for above in (STEPS, PARTS) for name in store.list(above)]
    return [path for path in below if path not in named]


def unnamed_layouts(store: Store, manifests: Iterable[Manifest]) -> list[str]:
    """The layouts that none of ``manifests``, which must be all, is in."""
    named = {layout_path(manifest.layout) for manifest in manifests}
    below = (f"{LAYOUTS}/{name}" for name in store.list(LAYOUTS))
    return [path for path in below if path not in named]


@dataclass(slots=True)
class Sweeper:
    """Removes what no manifest names, at the second publication after it was found so.

    Readers that opened a manifest before it was pruned thus have until then to finish.
    """

    store: Store
    seen: dict[str, int] = field(default_factory=dict)

    def sweep(self, manifests: Iterable[Manifest]) -> list[str]:
        """Call after each publication; returns the directories removed."""
        unnamed = unnamed_directories(self.store, manifests)
        self.seen = {path: self.seen.get(path, -1) + 1 for path in unnamed}
        removed = [path for path, times in self.seen.items() if times >= 2]
        for path in removed:
            self.store.remove_tree(path)
            del self.seen[path]
        return removed
