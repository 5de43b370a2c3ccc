"""Roots with a few small checkpoints, made without torch, a trainer or a keeper."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.catalogue import catalogue
from holdfast.format.manifest import Generation
from holdfast.geometry.layout import Layout
from holdfast.persist import commit
from holdfast.policy.when import Keep
from holdfast.restore.reading.verify import verify
from holdfast.storage.base import Store
from support.checkpoints.images import images_of, publish_checkpoint, random_leaf, split_leaf

LAYOUT = Layout(2, (split_leaf("w", "F32", (6, 2), 2),))
OTHER = Layout(2, (split_leaf("w", "F32", (4, 2), 2),))
#: (incarnation, step) of a run that went on from 1-10 after it had saved 1-20 and 1-30.
FALLEN_BACK = ((1, 10), (1, 20), (1, 30), (2, 20), (2, 30), (2, 40))


def save(store: Store, generation: Generation, parent: tuple[int, int] | None = None) -> None:
    """One whole checkpoint. Those of steps from 30 on are in another layout."""
    layout = LAYOUT if generation.step < 30 else OTHER
    leaves = {"w": random_leaf("F32", layout.leaves[0].shape, generation.step)}
    attempt = f"a{generation.incarnation}x{generation.step}"
    images = images_of(layout, leaves, generation=generation, attempt=attempt)
    publish_checkpoint(store, layout, images, generation, attempt=attempt, parent=parent)


def fill(store: Store, generations: Iterable[tuple[int, int]] = FALLEN_BACK) -> None:
    """A root with these checkpoints; incarnation 2 went on from 1-10."""
    commit.open_root(store, "r")
    for incarnation, step in generations:
        save(store, Generation(incarnation, step), (1, 10) if incarnation == 2 else None)


def leave_behind(store: Store, path: str = "steps/2-50-deadbeef/live-00000.safetensors") -> None:
    """What an attempt leaves that was killed."""
    sink = store.create(path, 5000)
    sink.write(0, memoryview(bytes(5000)))
    sink.finish()


def whole(store: Store) -> list[str]:
    """The checkpoints there are. One that is not whole, or unreadable, fails the test."""
    found = catalogue(store)
    assert not found.broken
    for manifest in found.manifests:
        report = verify(store, manifest, deep=True)
        assert not report.faults, (manifest.generation, report.faults)
    return [str(manifest.generation) for manifest in found.manifests]


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Retention:
    """What a keeper removes from a root with ``Keep(last=1)``, one publication after the other."""

    def __init__(self, store: Store, clock: Callable[[], float] | None = None) -> None:
        self.store, self.sweeper = store, commit.Sweeper(store)
        self.sweeper.leases.clock = clock or Clock()

    def publication(self) -> None:
        """After something was published."""
        found, gone = catalogue(self.store), set()
        for generation in Keep(last=1).decide(found.lineage):
            if generation in self.sweeper.leases.generations():
                continue
            if commit.withdraw(self.store, generation):
                gone.add(generation)
        self.sweeper.sweep([m for m in found.manifests if m.generation not in gone])
