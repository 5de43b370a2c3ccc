"""Roots as a keeper writes them: records of starts, frozen parts that many checkpoints name."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

from holdfast.catalogue import catalogue
from holdfast.errors import StorageError
from holdfast.format.manifest import Generation, Incarnation, Manifest
from holdfast.geometry.layout import Layout
from holdfast.keeper.image_writer import ImageJob, PersistJob
from holdfast.keeper.incarnations import RootAccess
from holdfast.keeper.jobs import Background
from holdfast.keeper.persister import Persister
from holdfast.persist import commit
from holdfast.policy.when import Keep
from holdfast.storage.base import Store
from holdfast.testing.faults import PassingStore
from support.checkpoints.images import NO_VALUES, images_of, random_leaf, seals, split_leaf

#: Of each rank a little more than a block, and as much again that is frozen.
SHAPE = (2, 280_000)
LAYOUT = Layout(
    2, (split_leaf("base", "F32", SHAPE, 2, is_frozen=True), split_leaf("w", "F32", SHAPE, 2))
)


def job_at(
    step: int, n: int = 1, parent: tuple[int, int] | None = None, values: bytes = NO_VALUES
) -> PersistJob:
    """A captured generation, as a keeper hands it to its persister."""
    generation, attempt = Generation(n, step), f"a{n}x{step}"
    leaves = {"base": random_leaf("F32", SHAPE, 0), "w": random_leaf("F32", SHAPE, 1 + step)}
    images = images_of(LAYOUT, leaves, values=values, generation=generation, attempt=attempt)
    jobs = {rank: ImageJob(rank, memoryview(image)) for rank, image in images.items()}
    for rank, image in images.items():
        jobs[rank].seal(*seals(image))
    record = Incarnation(run_id="r", n=n, nonce=f"n{n}", parent=parent, world=2, created_s=float(n))
    job = PersistJob(attempt, generation, LAYOUT.to_json(), jobs, record, 2, LAYOUT.hash)
    job.is_complete.set()
    return job


def save_steps(
    store: Store,
    steps: Iterable[int],
    n: int = 1,
    parent: tuple[int, int] | None = None,
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """One start of a run saves these steps; what goes wrong raises."""
    commit.open_root(store, "r")
    outcomes: list[str | None] = []
    persister = Persister(store, keep, lambda _, reason: outcomes.append(reason))
    for step in steps:
        persister.work_one(job_at(step, n, parent))
    persister.stop()
    assert not any(outcomes), outcomes


def root_access(root: object, owner: str, **reports: Any) -> RootAccess:
    """Access to the root of the run that ``owner`` names, as a keeper on this event loop has it.

    ``reports``: what is to be told of a cache, as ``Executor`` and its coordinator are told it, and
    what it is known to have.
    """

    async def opened() -> None:
        reports.get("cache_opened", lambda: None)()

    def nothing(*_: object) -> None:
        """Nobody is told."""

    run_id = owner.split()[1].rstrip(",")
    durability = SimpleNamespace(
        draining=reports.get("draining", {}),
        exact=set(),
        found_cached=nothing,
        forget_cached=nothing,
    )
    executor = SimpleNamespace(
        memory=SimpleNamespace(run_id=run_id, root_id="", incarnations=tuple),
        background=Background(),
        coordinator=SimpleNamespace(durability=durability),
        drained=reports.get("drained", nothing),
        cache_opened=opened,
        **dict.fromkeys(("persist_ended", "pruned", "cache_ended"), nothing),
    )
    return RootAccess(str(root), owner, cast(Any, executor), nothing)


def contents(store: Store, manifest: Manifest) -> dict[str, bytes]:
    """Every file that a manifest names."""
    return {ref.path: store.read(ref.path) for ref in (*manifest.images, *manifest.parts)}


def all_contents(store: Store) -> dict[str, bytes]:
    """Every file that any manifest names."""
    found: dict[str, bytes] = {}
    for manifest in catalogue(store).manifests:
        found |= contents(store, manifest)
    return found


def paths_in(store: Store, prefix: str = "") -> list[str]:
    """Every file of a store."""
    found: list[str] = []
    for name in store.list(prefix):
        path = f"{prefix}/{name}" if prefix else name
        found += [path] if store.exists(path) else paths_in(store, path)
    return sorted(found)


def change(store: Store, path: str, offset_bytes: int = -1, size_bytes: int = 1) -> None:
    """Flip bits of a file, as a disk might."""
    data = bytearray(store.read(path))
    at = offset_bytes % len(data)
    data[at : at + size_bytes] = bytes(one ^ 0xFF for one in data[at : at + size_bytes])
    store.publish(path, bytes(data), replace=True)


class Unreachable(PassingStore):
    """A root that does not answer now."""

    is_away = False

    def _reach(self) -> Store:
        if self.is_away:
            raise StorageError("503", operation="read", path="", url=self.url)
        return self.inner
