"""A server is killed at any moment and comes back: what was told durable is there, every time."""

from __future__ import annotations

import random
import threading
import time
import uuid

import pytest

from holdfast.catalogue import catalogue
from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper.persister import Persister
from holdfast.persist import commit
from holdfast.policy.when import Keep
from holdfast.restore.reading.verify import verify
from holdfast.storage.lease_lock import LeaseTimes
from support.runs.keeper_jobs import job_of
from support.servers.object_servers import ObjectServer, object_store, use

KEPT = 4
RECORD = Incarnation(run_id="r", n=1, nonce="n", parent=None, world=2, created_s=1.0)


def kill_and_restart(
    server: ObjectServer, rounds: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    use(server, monkeypatch)
    prefix = f"killed/{uuid.uuid4().hex}"
    store, chance = object_store(prefix, lease=LeaseTimes()), random.Random(seed)
    commit.open_root(store, "r")
    outcomes = dict[str, str | None]()
    persister = Persister(store, Keep(last=KEPT), outcomes.__setitem__)
    is_over = threading.Event()
    durable, step = [0], 0

    def save() -> None:
        nonlocal step
        while not is_over.is_set():
            step += 1
            job = job_of(Generation(1, step), RECORD)
            persister.work_one(job)
            if outcomes[job.attempt] is None:
                durable.append(step)

    lease = store.lock("writer", "me")
    saving = threading.Thread(target=save)
    saving.start()
    try:
        for _ in range(rounds):
            before = len(durable)
            time.sleep(chance.random() * 0.8)
            server.kill()
            time.sleep(chance.random() * 0.2)
            server.start()
            until_s = time.monotonic() + 30
            while len(durable) < before + 2 and time.monotonic() < until_s:
                time.sleep(0.05)
            assert len(durable) >= before + 2, "nothing is durable any more"
            print(f"killed again, {len(durable) - 1} saves durable", flush=True)
    finally:
        is_over.set()
        saving.join()
        persister.stop()
        lease.release()
    found = catalogue(object_store(prefix))
    there = [one.step for one in found.manifests]
    failed = sum(reason is not None for reason in outcomes.values())
    print(f"{rounds} kills, {len(durable) - 1} saves durable, {failed} failed, {there} there")
    assert not found.broken and set(durable[-KEPT:]) <= set(there)
    for manifest in found.manifests:
        assert not verify(store, manifest, deep=True).faults


@pytest.mark.slow
def test_a_server_that_is_killed_twice_loses_nothing(
    seaweedfs_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_and_restart(seaweedfs_server, 2, monkeypatch, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(2400)  # it takes a quarter of a minute to come back
def test_a_server_that_is_killed_fifty_times_loses_nothing(
    seaweedfs_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_and_restart(seaweedfs_server, 50, monkeypatch, seed=2)
