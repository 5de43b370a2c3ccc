"""Publish a checkpoint, or leave no trace of it.

Images and layout are durable before the manifest names them, so a reader that finds a
manifest finds everything; the manifest is removed before anything it names, so one that
still stands is whole. Only the holder of the root's lock publishes or removes
(docs/invariants.md, 1 and 3).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.errors import AlreadyPublished, FormatError, HoldfastError, NewerFormat
from holdfast.format.manifest import (
    Generation,
    Incarnation,
    Lineage,
    Manifest,
    Root,
    seal,
    unseal,
)
from holdfast.storage.base import Store

ROOT, LOCK = "holdfast.json", "writer"
MANIFESTS, INCARNATIONS, LAYOUTS, STEPS = "manifests", "incarnations", "layouts", "steps"
_MANIFEST_NAME = re.compile(r"(\d+)-(\d+)\.json")
_INCARNATION_NAME = re.compile(r"(\d+)\.json")
T = TypeVar("T")


def manifest_path(generation: Generation) -> str:
    """Where the manifest of a generation stands."""
    return f"{MANIFESTS}/{generation.incarnation}-{generation.step}.json"


def attempt_dir(generation: Generation, attempt: str) -> str:
    """Where the images of one attempt at a generation lie; never used twice."""
    return f"{STEPS}/{generation.incarnation}-{generation.step}-{attempt}"


def image_path(generation: Generation, attempt: str, rank: int) -> str:
    """Where the image of one rank lies."""
    return f"{attempt_dir(generation, attempt)}/live-{rank:05d}.safetensors"


def layout_path(hash_: str) -> str:
    """Where a layout lies; its name is its content."""
    return f"{LAYOUTS}/{hash_}.json"


def open_root(store: Store, run_id: str) -> Root:
    """Read the root's identity, or give it one. The first of two racing processes wins."""
    if not store.exists(ROOT):
        try:
            store.publish(ROOT, seal(Root(run_id=run_id, created_s=time.time())))
        except AlreadyPublished:
            pass
    return unseal(Root, store.read(ROOT), f"{store.url}/{ROOT}")


def is_root(store: Store) -> bool:
    """Whether checkpoints can lie here."""
    return store.exists(ROOT)


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


def read_incarnation(store: Store, n: int) -> Incarnation:
    """The record of an incarnation. NotFound or FormatError when there is none to be read."""
    path = f"{INCARNATIONS}/{n}.json"
    return unseal(Incarnation, store.read(path), path)


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


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What a root holds, read once."""

    manifests: tuple[Manifest, ...] = ()
    incarnations: tuple[Incarnation, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()

    @property
    def parents(self) -> dict[int, tuple[int, int] | None]:
        """The parent of each incarnation, from its own record or from its manifests."""
        known = {m.incarnation: m.parent for m in self.manifests}
        return known | {i.n: i.parent for i in self.incarnations}

    @property
    def lineage(self) -> tuple[Generation, ...]:
        """The generations that are not abandoned, oldest first."""
        line = Lineage(self.parents)
        return tuple(m.generation for m in self.manifests if m.generation in line)

    @property
    def abandoned(self) -> tuple[Generation, ...]:
        """The generations of futures that were given up, oldest first."""
        line = Lineage(self.parents)
        return tuple(m.generation for m in self.manifests if m.generation not in line)

    @property
    def latest(self) -> Generation | None:
        """The newest generation that is not abandoned."""
        return max(self.lineage, key=lambda g: (g.step, g.incarnation), default=None)

    def find(self, generation: Generation) -> Manifest | None:
        """The manifest of a generation."""
        return next((m for m in self.manifests if m.generation == generation), None)


def catalogue(store: Store) -> Catalogue:
    """Read every manifest and incarnation of a root; what cannot be read is listed as broken.

    A manifest of a newer format is an error, not a broken file: what it holds must not be
    taken for absent.
    """
    broken: list[tuple[str, str]] = []
    manifests: list[Manifest] = []
    incarnations: list[Incarnation] = []
    for name in store.list(MANIFESTS):
        if matched := _MANIFEST_NAME.fullmatch(name):
            found = _read(lambda n=name: _manifest(store, n), f"{MANIFESTS}/{name}", broken)
            if found is not None:
                generation = Generation(int(matched[1]), int(matched[2]))
                if found.generation == generation:
                    manifests.append(found)
                else:
                    broken.append((f"{MANIFESTS}/{name}", f"it speaks of {found.generation}"))
    for name in store.list(INCARNATIONS):
        if _INCARNATION_NAME.fullmatch(name):
            path = f"{INCARNATIONS}/{name}"
            record = _read(lambda p=path: unseal(Incarnation, store.read(p), p), path, broken)
            if record is not None:
                incarnations.append(record)
    return Catalogue(
        tuple(sorted(manifests, key=lambda m: m.generation)),
        tuple(sorted(incarnations, key=lambda i: i.n)),
        tuple(broken),
    )


def _manifest(store: Store, name: str) -> Manifest:
    path = f"{MANIFESTS}/{name}"
    return unseal(Manifest, store.read(path), f"{store.url}/{path}")


def _read(read: Callable[[], T], path: str, broken: list[tuple[str, str]]) -> T | None:
    try:
        return read()
    except NewerFormat:
        raise
    except FormatError as error:
        broken.append((path, str(error)))
    except HoldfastError as error:  # removed by a prune between the listing and the reading
        broken.append((path, str(error)))
    return None


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

