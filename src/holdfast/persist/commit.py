"""Publish a checkpoint, or leave no trace of it.

Images and layout are durable before the manifest names them, so a reader that finds a
manifest finds everything; the manifest is removed before anything it names, so one that
still stands is whole. Only the holder of the root's lock publishes or removes
(docs/invariants.md, 1 and 3).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from holdfast.catalogue import INCARNATIONS, ROOT, STEPS, layout_path, manifest_path
from holdfast.errors import AlreadyPublished
from holdfast.format.manifest import Generation, Incarnation, Manifest, Root, seal, unseal
from holdfast.storage.base import Store


def open_root(store: Store, run_id: str) -> Root:
    """Read the root's identity, or give it one. The first of two racing processes wins."""
    if not store.exists(ROOT):
        with contextlib.suppress(AlreadyPublished):
            store.publish(ROOT, seal(Root(run_id=run_id, created_s=time.time())))
    return unseal(Root, store.read(ROOT), f"{store.url}/{ROOT}")


def record_incarnation(store: Store, incarnation: Incarnation) -> None:
    """Make the incarnation and its parent durable: required before its first manifest."""
    path = f"{INCARNATIONS}/{incarnation.n}.json"
    data = seal(incarnation)
    try:
        store.publish(path, data)
    except AlreadyPublished:
        there = unseal(Incarnation, store.read(path), path)
        if (there.nonce, there.parent) != (incarnation.nonce, incarnation.parent):
            raise


def write_layout(store: Store, hash_: str, data: bytes) -> None:
    """Make a layout durable; it is there once, whoever needs it."""
    try:
        store.publish(layout_path(hash_), data)
    except AlreadyPublished:
        if store.read(layout_path(hash_)) != data:
            store.publish(layout_path(hash_), data, replace=True)


def publish(store: Store, manifest: Manifest) -> None:
    """The act that makes a checkpoint. Everything it names must be durable already."""
    store.publish(manifest_path(manifest.generation), seal(manifest))


@dataclass(slots=True)
class Sweeper:
    """Removes what no manifest names, at the second publication after it was found so.

    Readers that opened a manifest before it was pruned thus have until then to finish.
    """

    store: Store
    seen: dict[str, int] = field(default_factory=dict)

    def sweep(self, manifests: Iterable[Manifest], in_flight: Collection[str]) -> list[str]:
        """Call after each publication; returns the directories removed."""
        named = {path.rpartition("/")[0] for m in manifests for path in (i.path for i in m.images)}
        unnamed = {
            path
            for name in self.store.list(STEPS)
            if (path := f"{STEPS}/{name}") not in named and path not in in_flight
        }
        self.seen = {path: self.seen.get(path, -1) + 1 for path in unnamed}
        removed = [path for path, times in self.seen.items() if times >= 2]
        for path in removed:
            self.store.remove_tree(path)
            del self.seen[path]
        return removed


def unpublish(store: Store, generation: Generation) -> None:
    """Take a checkpoint away; its images follow at the second publication after."""
    store.remove(manifest_path(generation))
