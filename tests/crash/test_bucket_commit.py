"""A keeper whose root is a bucket is stopped after its k-th request, for every k and in every mode.

The next one takes over, publishes the same attempt, and prunes. What was told durable is there,
every published checkpoint is whole, and nothing is left that pruning does not find.
"""

from __future__ import annotations

import pytest

from holdfast.catalogue import Catalogue, catalogue
from holdfast.errors import HoldfastError
from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper.persister import Persister
from holdfast.leases import LeaseWatch
from holdfast.persist import commit
from holdfast.persist.removal import plan, remove
from holdfast.policy.when import Keep
from holdfast.restore.reading.verify import verify
from holdfast.storage import lease_lock
from holdfast.storage.base import settle_s
from holdfast.storage.lease_lock import LeaseTimes
from holdfast.storage.objects import ObjectStore
from support.runs.keeper_jobs import job_of
from support.servers.bucket_model import World, model_store

PART = 4096
RECORD = Incarnation(run_id="r", n=1, nonce="n", parent=None, world=2, created_s=1.0)
LONG = LeaseTimes(renew_s=100, stop_s=200, take_over_s=300)
DEAD = 4_999_999
"""No process has this number."""


def store_of(world: World, patch: pytest.MonkeyPatch) -> ObjectStore:
    return model_store(world, patch, part_bytes=PART, tries_s=0.004, lease=LONG)


def stopped_at(world: World, patch: pytest.MonkeyPatch, k: int, mode: str) -> tuple[int, int]:
    """Publishes three checkpoints and keeps two, and is stopped at the k-th request.

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
    persister = Persister(store, Keep(last=2), lambda _, reason: outcomes.append(reason))
    durable = -1
    for step in (1, 2, 3):
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


def check(store: ObjectStore, durable: int) -> list[int]:
    found = catalogue(store)
    assert not found.broken
    steps = [manifest.step for manifest in found.manifests]
    assert durable in (-1, *steps)
    for manifest in found.manifests:
        assert not verify(store, manifest, deep=True).faults
    return steps


def go_on(world: World, patch: pytest.MonkeyPatch, durable: int) -> bool:
    """What the next keeper does, and the person who prunes. True if it went on with an image that
    the first had begun.
    """
    store = store_of(world, patch)
    lease = store.lock("writer", "second")
    assert lease.is_alone  # type: ignore[attr-defined]
    check(store, durable)
    before = {f"steps/{name}" for name in store.list("steps")}
    before -= {path for one in catalogue(store).manifests for path in one.directories}
    outcomes: list[str | None] = []
    persister = Persister(store, Keep(last=2), lambda _, reason: outcomes.append(reason))
    for step in range(max(1, durable), 4):
        persister.work_one(job_of(Generation(1, step), RECORD))
    lease.release()
    clean(world, patch, 3)  # removes nothing that a request may name that is under way
    world.land()  # a request that the first sent at its end
    persister.stop()
    assert check(store, 3)[-1] == 3
    is_resumed = any(before & one.directories for one in catalogue(store).manifests)
    world.now_s += settle_s(store)
    store, found = clean(world, patch, 3)
    assert not commit.unnamed_directories(store, found.manifests) and not world.parts
    assert not [key for key in world.objects if "/.removals/" in key]
    return is_resumed


def clean(world: World, patch: pytest.MonkeyPatch, durable: int) -> tuple[ObjectStore, Catalogue]:
    """What `holdfast prune` does, in a process of its own."""
    store = store_of(world, patch)
    lease, leases = store.lock("writer", "pruner"), LeaseWatch(store)
    remove(store, plan(store, Keep(), abandoned=False, leases=leases), leases=leases)
    check(store, durable)
    lease.release()
    return store, catalogue(store)


@pytest.mark.parametrize(
    "mode",
    [
        "lost",
        pytest.param("late", marks=pytest.mark.slow),
        pytest.param("dropped", marks=pytest.mark.slow),
    ],
)
def test_old_or_new_checkpoint_survives_a_stop_at_any_request(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, points, resumed = 0, 0, 0
    while True:
        world = World()
        durable, requests = stopped_at(world, monkeypatch, k, mode)
        try:
            resumed += go_on(world, monkeypatch, durable)
        except (AssertionError, HoldfastError) as error:
            raise AssertionError(
                f"stopped at request {k} of {requests}, {mode}: {error}"
            ) from error
        points += 1
        if requests <= k:
            break
        k += 1
    print(f"{points} points, {resumed} went on with what was there")
    assert points > 60 and resumed > 10
