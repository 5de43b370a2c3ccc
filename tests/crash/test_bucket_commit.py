"""A keeper whose root is a bucket is stopped after its k-th request, for every k and in every mode.

The next one takes over, publishes the same attempt, and prunes. What was told durable is there,
every published checkpoint is whole, and nothing is left that pruning does not find.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import NamedTuple

import pytest

from holdfast import overview as overview_module
from holdfast.catalogue import Catalogue, catalogue, manifest_path, pin_path
from holdfast.errors import HoldfastError
from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper import persister as persister_module
from holdfast.keeper.persister import Persister
from holdfast.leases import LeaseWatch
from holdfast.overview import INDEX
from holdfast.persist import commit
from holdfast.persist.pins import pin
from holdfast.persist.removal import plan, remove
from holdfast.policy.when import Keep
from holdfast.restore.reading.verify import verify
from holdfast.storage import lease_lock, objects
from holdfast.storage.base import settle_s
from holdfast.storage.lease_lock import LeaseTimes
from holdfast.storage.objects import ObjectStore
from support.runs.keeper_jobs import job_of
from support.servers.bucket_model import World, model_store

PART = 4096
RECORD = Incarnation(run_id="r", n=1, nonce="n", parent=None, world=2, created_s=1.0)
LONG = LeaseTimes(renew_s=100, stop_s=200, take_over_s=300)
LONG_LASTING = pytest.mark.slow, pytest.mark.timeout(900)
DEAD = 4_999_999
"""No process has this number."""


def store_of(world: World, patch: pytest.MonkeyPatch) -> ObjectStore:
    return model_store(world, patch, part_bytes=PART, tries_s=0.004, lease=LONG)


class Root(NamedTuple):
    """What is published in it while its keeper is stopped."""

    steps: range
    has_history: bool
    """There are checkpoints and pins, and no index yet, when the keeper starts."""


YOUNG, GROWN = Root(range(1, 4), False), Root(range(11, 17), True)
SWEPT, LAST = Root(range(11, 22), True), 40
"""With its last publication, of fewer requests than these, a directory is removed, too."""
NEVER = 10**9
PINNED, GONE = 2, 3
"""A checkpoint that is pinned; and one whose manifest is gone, and whose pin nobody can read."""


def copy_of(world: World) -> World:
    return World(dict(world.objects), made_s=dict(world.made_s), page=world.page)


def grow(world: World, patch: pytest.MonkeyPatch) -> None:
    """Eight checkpoints of an earlier keeper. Few are many here: pages and the index are short."""
    for name, value in {
        "_PAGED_FROM": 4,
        "_READ_AT_ONCE": 2,
        "_READ_FIRST": 1,
        "_UNINDEXED": 2,
        "_INDEXED_FROM": 4,
    }.items():
        patch.setattr(persister_module, name, value)
    patch.setattr(overview_module, "FEW", 2)
    patch.setattr(objects, "_PAGE", 4)
    world.page = 4
    store = store_of(world, patch)
    commit.open_root(store, "r")
    with store.lock("writer", "before"):
        persister = Persister(store, Keep(), lambda *_: None)
        for step in range(1, 9):
            persister.work_one(job_of(Generation(1, step), RECORD))
        persister.stop()
        pin(store, Generation(1, PINNED))
        store.publish(pin_path(Generation(1, GONE)), b"of a version that is not there yet")
        store.remove(manifest_path(Generation(1, GONE)))
    del world.objects[f"root/.{INDEX}"]


def stopped_at(
    world: World, patch: pytest.MonkeyPatch, root: Root, k: int, mode: str
) -> tuple[int, int]:
    """Publishes checkpoints and keeps two, and is stopped at the k-th request.

    Returns the newest step that was told durable, -1 for none, and how many requests there were.
    """
    parts = lease_lock.process_name().split("/")
    store = store_of(world, patch)
    with pytest.MonkeyPatch.context() as dying:
        dying.setattr(lease_lock, "process_name", lambda: "/".join([*parts[:2], str(DEAD), "1"]))
        commit.open_root(store, "r")
        store.lock("writer", "first")
    begun, outcomes = len(world.log), list[str | None]()

    def fault(kind: str, key: str) -> str:
        number = len(world.log) - begun
        return "" if number < k else mode if number == k else "dropped"

    world.fault = fault
    persister = keeper_of(store, root, outcomes)
    durable = -1
    for step in root.steps:
        persister.work_one(job_of(Generation(1, step), RECORD))
        if outcomes[-1] is None:
            durable = step
        if len(world.log) - begun > k:
            break
    persister.stop()
    world.fault = lambda kind, key: ""
    for lease in store._held:
        lease._ended.set()
    return durable, len(world.log) - begun


def keeper_of(store: ObjectStore, root: Root, outcomes: list[str | None]) -> Persister:
    """What keeps two; with a history, where half an hour passes whenever it is looked at."""
    persister = Persister(store, Keep(last=2), lambda _, reason: outcomes.append(reason))
    if root.has_history:
        persister._sweeper.clock = partial(next, count(0.0, settle_s(store)))
    return persister


def check(store: ObjectStore, root: Root, durable: int) -> list[int]:
    found = catalogue(store)
    assert not found.broken
    steps = [manifest.step for manifest in found.manifests]
    assert durable in (-1, *steps)
    if root.has_history:
        assert PINNED in steps
        assert any(name.startswith(f"1-{GONE}-") for name in store.list("steps"))
    for manifest in found.manifests:
        assert not verify(store, manifest, deep=True).faults
    return steps


def go_on(world: World, patch: pytest.MonkeyPatch, root: Root, durable: int) -> bool:
    """What the next keeper does, and the person who prunes. True if it went on with an image that
    the first had begun.
    """
    store = store_of(world, patch)
    lease = store.lock("writer", "second")
    assert lease.is_alone  # type: ignore[attr-defined]
    check(store, root, durable)
    before = {f"steps/{name}" for name in store.list("steps")}
    before -= {path for one in catalogue(store).manifests for path in one.directories}
    outcomes: list[str | None] = []
    persister, last = keeper_of(store, root, outcomes), root.steps[-1]
    for step in range(max(root.steps[0], durable), last + 1):
        persister.work_one(job_of(Generation(1, step), RECORD))
    lease.release()
    clean(world, patch, root)  # removes nothing that a request may name that is under way
    world.land()  # a request that the first sent at its end
    persister.stop()
    assert check(store, root, last)[-1] == last
    is_resumed = any(before & one.directories for one in catalogue(store).manifests)
    world.now_s += settle_s(store)
    store, found = clean(world, patch, root)
    assert not commit.unnamed_directories(store, found.manifests) and not world.parts
    assert not [key for key in world.objects if "/.removals/" in key]
    return is_resumed


def clean(world: World, patch: pytest.MonkeyPatch, root: Root) -> tuple[ObjectStore, Catalogue]:
    """What `holdfast prune` does, in a process of its own."""
    store = store_of(world, patch)
    lease, leases = store.lock("writer", "pruner"), LeaseWatch(store)
    remove(store, plan(store, Keep(), abandoned=False, leases=leases), leases=leases)
    check(store, root, root.steps[-1])
    lease.release()
    return store, catalogue(store)


@pytest.mark.parametrize(
    ("root", "mode"),
    [
        (YOUNG, "lost"),
        pytest.param(YOUNG, "late", marks=pytest.mark.slow),
        pytest.param(YOUNG, "dropped", marks=pytest.mark.slow),
        pytest.param(GROWN, "lost", marks=LONG_LASTING),
        pytest.param(GROWN, "late", marks=LONG_LASTING),
        pytest.param(GROWN, "dropped", marks=LONG_LASTING),
        pytest.param(SWEPT, "lost", marks=LONG_LASTING),
        pytest.param(SWEPT, "late", marks=LONG_LASTING),
        pytest.param(SWEPT, "dropped", marks=LONG_LASTING),
    ],
)
def test_old_or_new_checkpoint_survives_a_stop_at_any_request(
    root: Root, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, points, resumed = 0, 0, 0
    kinds, gone, before = set[str](), set[str](), World()
    if root.has_history:
        grow(before, monkeypatch)
    if root is SWEPT:
        monkeypatch.setattr(persister_module, "_UNINDEXED", 8)
        monkeypatch.setattr(persister_module, "_READ_AT_ONCE", 4)
        k = stopped_at(copy_of(before), monkeypatch, root, NEVER, mode)[1] - LAST
    while True:
        world = copy_of(before)
        durable, requests = stopped_at(world, monkeypatch, root, k, mode)
        kinds |= {f"{kind} {key}" for kind, key in world.log if root.has_history}
        gone |= before.objects.keys() - world.objects.keys()
        try:
            resumed += go_on(world, monkeypatch, root, durable)
        except (AssertionError, HoldfastError) as error:
            raise AssertionError(
                f"stopped at request {k} of {requests}, {mode}: {error}"
            ) from error
        points += 1
        if requests <= k:
            break
        k += 1
    print(f"{points} points, {resumed} went on with what was there")
    assert points > (LAST if root is SWEPT else 60) and resumed > 10
    if root.has_history:  # pages were listed, the index was written, and several manifests went
        assert (points > 120 or root is SWEPT) and f"PUT root/.{INDEX}" in kinds
        assert "POST delete " in kinds
    assert any(key.startswith("root/steps/") for key in gone) == (root is SWEPT)
