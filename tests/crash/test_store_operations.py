"""Every operation on a root meets a fault at every change to storage: the root stays whole.

Save, drain, prune, pin, start, copy and repair are spoilt at the k-th change, for every k, in every
mode. Then the root opens, every published step restores bit for bit, the newest is the older or the
newer one, and `prune` finds whatever is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import get_args

import pytest

from holdfast.catalogue import DAMAGED, catalogue, layout_path, manifest_path
from holdfast.errors import HoldfastError
from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper.cache_tier import CacheTier
from holdfast.keeper.persister import Persister
from holdfast.maintenance.copies import copy
from holdfast.maintenance.repairs import repair
from holdfast.persist import commit
from holdfast.persist.pins import mend, pin, pinned
from holdfast.persist.removal import plan, remove
from holdfast.policy.when import Keep
from holdfast.storage.base import Store
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import FaultyStore, Mode, Stopped
from support.checkpoints.keeper_roots import change, paths_in
from support.checkpoints.roots import LAYOUT, whole
from support.project.sample import points_of_the_day
from support.runs.keeper_jobs import job_of

MODES: tuple[Mode, ...] = get_args(Mode)
OLD, NEW = Generation(1, 20), Generation(2, 30)
#: Seconds for the points that `make test` takes from all of them.
SAMPLE_S = 8.0


def record(n: int) -> Incarnation:
    return Incarnation(run_id="r", n=n, nonce=f"n{n}", parent=(1, 20) if n == 2 else None)


def persist(store: Store, generation: Generation, keep: Keep = Keep()) -> None:  # noqa: B008
    commit.open_root(store, "r")
    persister = Persister(store, keep, lambda *_: None)
    persister.work_one(job_of(generation, record(generation.incarnation)))
    persister.stop()


def drain(store: Store, cache: Store, keep: Keep = Keep()) -> None:  # noqa: B008
    """What a keeper does with a cache that has more than the root."""
    commit.open_root(store, "r")
    tier = CacheTier(
        cache, store, "r", "test", Keep(last=1), lambda *_: None, lambda _: None, tuple
    )
    persister = Persister(store, keep, lambda *_: None)
    try:
        while (drained := tier.drain_one(persister, {})) is not None and not drained.reason:
            pass
    finally:
        persister.stop()
        tier.close()


def old_root() -> MemoryStore:
    """Checkpoints 1-10 and 1-20."""
    store = MemoryStore("root")
    for step in (10, 20):
        persist(store, Generation(1, step))
    return store


def newer_root() -> MemoryStore:
    """One more, of the start after."""
    store = old_root()
    persist(store, NEW)
    return store


@cache
def source() -> MemoryStore:
    return newer_root()


def copied(*generations: Generation) -> MemoryStore:
    store = MemoryStore("root")
    copy(source(), store, generations or None, lambda *_: None)
    return store


def broken_off() -> MemoryStore:
    """A copy was killed before its last manifest, and a bit of what it had written changed."""
    store = copied()
    found = catalogue(store).find(NEW)
    assert found is not None
    store.remove(manifest_path(NEW))
    change(store, found.images[0].path, 4100)
    return store


def damaged_root() -> MemoryStore:
    store = copied()
    found = catalogue(store).find(OLD)
    assert found is not None
    change(store, found.images[0].path, 4100)
    store.remove(found.images[1].path)
    change(store, layout_path(LAYOUT.hash))
    return store


def start(store: Store) -> None:
    """What a start writes before its first checkpoint."""
    commit.open_root(store, "r")
    mend(store, catalogue(store))
    commit.record_line(store, record(2), [record(1)])


def half_pruned() -> MemoryStore:
    """A pruner was killed after it took the manifest of a checkpoint that was pinned meanwhile."""
    store = old_root()
    pin(store, Generation(1, 10))
    store.remove("manifests/1-10.json")
    return store


@dataclass(frozen=True, slots=True)
class Work:
    """An operation on a root, and the newest checkpoint that may be there whatever comes of it."""

    make: Callable[[], MemoryStore]
    act: Callable[[Store], object]
    newest: tuple[Generation | None, ...]
    stays: tuple[Generation, ...] = ()
    """Those that must still be there."""


WORKS: dict[str, Work] = {
    "save": Work(old_root, lambda s: persist(s, NEW), (OLD, NEW), (OLD,)),
    "save and prune": Work(old_root, lambda s: persist(s, NEW, Keep(last=1)), (OLD, NEW)),
    "drain": Work(old_root, lambda s: drain(s, copied()), (OLD, NEW), (OLD,)),
    "drain and prune": Work(old_root, lambda s: drain(s, copied(), Keep(last=1)), (OLD, NEW)),
    "prune": Work(newer_root, lambda s: remove(s, plan(s, Keep(last=1), abandoned=False)), (NEW,)),
    "pin": Work(newer_root, lambda s: pin(s, OLD), (NEW,), (OLD, NEW)),
    "start": Work(old_root, start, (OLD,), (OLD,)),
    "start after a killed pruner": Work(half_pruned, start, (OLD,), (OLD,)),
    "copy": Work(
        MemoryStore,
        lambda s: copy(source(), s, None, lambda *_: None),
        (None, Generation(1, 10), OLD, NEW),
    ),
    "copy what is new": Work(
        lambda: copied(Generation(1, 10), OLD),
        lambda s: copy(source(), s, None, lambda *_: None),
        (OLD, NEW),
        (OLD,),
    ),
    "copy over what is damaged": Work(
        broken_off,
        lambda s: copy(source(), s, None, lambda *_: None),
        (OLD, NEW),
        (OLD,),
    ),
    "repair": Work(damaged_root, lambda s: repair(s, [source()], None), (NEW,), (OLD, NEW)),
}


def points() -> Iterator[tuple[str, Mode, int]]:
    """Every operation, mode and change."""
    for name, work in WORKS.items():
        counted = FaultyStore(work.make())
        work.act(counted)
        for mode in MODES:
            for k in range(1, len(counted.changes) + 1):
                yield name, mode, k


def check(name: str, mode: Mode, k: int) -> None:
    """Spoil the k-th change, and look at what is left; then the operation is done once more."""
    work = WORKS[name]
    inner = work.make()
    faulty = FaultyStore(inner, fail_at=k, mode=mode, late_by=1 + k % 3)
    try:
        with suppress(Stopped, HoldfastError):
            work.act(faulty)
    finally:
        faulty.land()
    if name == "repair":
        work.act(inner)
    mend(inner, catalogue(inner))
    found = catalogue(inner)
    assert set(whole(inner)) >= set(map(str, work.stays)), "what was published is there, whole"
    assert found.latest in work.newest
    pins = pinned(inner)
    assert all(found.find(generation) for generation in pins)
    remove(inner, plan(inner, Keep(), abandoned=False))
    assert leaked(inner) == set()
    with suppress(HoldfastError):  # pinned already, say
        work.act(inner)
    assert set(whole(inner)) >= set(map(str, work.stays))
    assert catalogue(inner).latest == work.newest[-1]


def leaked(store: Store) -> set[str]:
    """Files that no checkpoint, pin, start or reader needs."""
    found = catalogue(store)
    named = {directory for manifest in found.manifests for directory in manifest.directories}
    layouts = {layout_path(manifest.layout) for manifest in found.manifests}
    known = ("holdfast.json", "manifests/", "incarnations/", "pins/")
    return {
        path
        for path in paths_in(store)
        if not (path.startswith(known) or path in layouts or path.rpartition("/")[0] in named)
    }


@pytest.mark.promise
def test_a_root_is_whole_after_a_fault_at_any_change_of_any_operation() -> None:
    for point in points_of_the_day(list(points()), least=51, for_s=SAMPLE_S):
        check(*point)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WORKS)
def test_every_point_of_every_operation(name: str, mode: Mode) -> None:
    mine = [point for point in points() if point[:2] == (name, mode)]
    print(f"{len(mine)} points")
    assert mine
    for point in mine:
        check(*point)


@pytest.mark.promise
def test_what_is_set_aside_is_no_leak_before_prune_takes_it() -> None:
    store = damaged_root()
    repair(store, [source()], None)
    assert {path.partition("/")[0] for path in leaked(store)} == {DAMAGED}
