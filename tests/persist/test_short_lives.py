"""Keepers of buckets that live for a few publications, restore twice, or lose a lock between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest

from holdfast.catalogue import catalogue, manifest_path
from holdfast.errors import StorageError
from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper import persister as persister_module
from holdfast.keeper.persister import Persister
from holdfast.overview import PagedList, read_newest
from holdfast.persist import commit
from holdfast.policy.when import Keep
from holdfast.storage import objects
from holdfast.storage.base import Store
from holdfast.storage.bucket import Outcome
from holdfast.storage.lease_lock import LeaseTimes, ObjectLease
from support.runs.keeper_jobs import job_of
from support.servers.bucket_model import World, model_store

Patch = pytest.MonkeyPatch

RECORD = Incarnation(run_id="r", n=1, nonce="n", parent=None, world=2, created_s=1.0)
TIMES = LeaseTimes(renew_s=0.1, stop_s=0.2, take_over_s=0.5)
PART = "parts/1-1-aaaaaaaaa"


def start(n: int, parent: tuple[int, int], created_s: float) -> Incarnation:
    return Incarnation(run_id="r", n=n, nonce=f"n{n}", parent=parent, world=2, created_s=created_s)


class Keeper:
    """What makes saves durable in a bucket; it says if one failed."""

    def __init__(self, store: Store, keep: Keep) -> None:
        self.store, self.failed = store, list[Any]()
        self.persister = Persister(store, keep, lambda _, reason: self.failed.append(reason))

    def publish(self, steps: Collection[int], record: Incarnation = RECORD) -> int:
        """The number of checkpoints that are left."""
        for step in steps:
            self.persister.work_one(job_of(Generation(record.n, step), record))
        return len(catalogue(self.store).manifests)

    def record(self, one: Incarnation) -> None:
        assert commit.record_line(self.store, one, []) is None
        self.persister.note_recorded(one)

    def end(self) -> None:
        self.persister.stop()
        assert not any(self.failed)


@pytest.fixture
def short_pages(monkeypatch: Patch) -> World:
    monkeypatch.setattr(persister_module, "_PAGED_FROM", 9)
    monkeypatch.setattr(objects, "_PAGE", 10)
    return World(page=10)


@pytest.mark.promise
@pytest.mark.parametrize("life", [1, 4])
def test_retention_goes_on_however_short_the_lives_of_keepers_are(
    life: int, monkeypatch: Patch
) -> None:
    world, step, left = World(), 0, 0
    for number in range(24):
        store = model_store(world, monkeypatch, tries_s=0.1)
        if not number:
            commit.open_root(store, "r")
        keeper = Keeper(store, Keep(last=40))
        with store.lock("writer", "me"):
            count = life if number else 60
            left = keeper.publish(range(step, step + count))
            step += count
            keeper.end()
    assert left <= 60


@pytest.mark.promise
@pytest.mark.parametrize(
    ("keep", "life", "is_one_start"),
    [
        *[(2, 1, False), (5, 2, False), (9, 1, False), (12, 3, False), (31, 1, False)],
        *[(5, 1, True), (8, 1, True), (20, 1, True)],
    ],
)
def test_no_more_stay_where_each_start_ends_with_its_first_publications_and_a_start_asks_little(
    keep: int, life: int, is_one_start: bool, monkeypatch: Patch
) -> None:
    """``is_one_start``: keepers alone end, and its trainers go on."""
    world, step = World(), 0
    most = Counter[str]()
    for n in range(1, keep + 41):
        store = model_store(world, monkeypatch, tries_s=0.1)
        if n == 1:
            commit.open_root(store, "r")
        begun, latest = len(world.log), read_newest(store).latest
        one = start(n, latest, float(n)) if latest and not is_one_start else RECORD
        keeper = Keeper(store, Keep(last=keep))
        with store.lock("writer", "me"):
            keeper.record(one)
            most["start"] = max(most["start"], len(world.log) - begun)
            for _ in range(life):
                begun, step = len(world.log), step + 1
                keeper.persister.work_one(job_of(Generation(one.n, step), one))
                asked = [key for _, key in world.log[begun:] if "/live-" not in key]
                most["publication"] = max(most["publication"], len(asked))
            keeper.end()
        count = sum("/manifests/" in key for key in world.objects)
        most["over"] = max(most["over"], count - keep)
    print(dict(most))
    assert most["start"] <= 30 and most["over"] <= life
    assert most["publication"] <= 28  # the first looks at what its keeper has not seen


@pytest.mark.promise
def test_a_start_that_restores_twice_keeps_what_it_goes_on_from(monkeypatch: Patch) -> None:
    store = model_store(World(), monkeypatch, tries_s=0.1)
    commit.open_root(store, "r")
    keeper = Keeper(store, Keep())
    with store.lock("writer", "me"):
        keeper.publish((1, 5, 10))
        keeper.record(start(2, (1, 10), 2.0))
        keeper.persister._holding = ""  # as after a failure: all is listed again
        keeper.persister.prune(Generation(1, 10))
        again = start(2, (1, 5), 3.0)
        keeper.record(again)
        keeper.persister.keep = Keep(last=2)
        keeper.publish((6, 7), again)
    keeper.end()
    left = {manifest.generation for manifest in catalogue(store).manifests}
    assert {Generation(2, 6), Generation(2, 7)} <= left
    assert keeper.persister._known.parents == catalogue(store).parents


def test_a_start_without_a_checkpoint_between_two_others_stops_no_retention(
    short_pages: World, monkeypatch: Patch
) -> None:
    store = model_store(short_pages, monkeypatch, tries_s=0.1)
    commit.open_root(store, "r")
    keeper = Keeper(store, Keep(last=30))
    with store.lock("writer", "me"):
        keeper.publish(range(1, 41))
        third = start(3, (2, 45), 3.0)
        for one in (start(2, (1, 40), 2.0), third):
            keeper.record(one)
        assert keeper.publish(range(46, 66), third) <= 33
    keeper.end()


def test_what_another_holder_removed_does_not_come_back_into_a_keepers_view(
    short_pages: World, monkeypatch: Patch
) -> None:
    store = model_store(short_pages, monkeypatch, tries_s=0.1, lease=TIMES)
    commit.open_root(store, "r")
    keeper = Keeper(store, Keep())
    with store.lock("writer", "me"):
        keeper.publish(range(100, 150))
    with store.lock("writer", "other"):
        commit.withdraw(store, Generation(1, 149))
    lists = []
    with store.lock("writer", "me again"):
        for step in range(150, 165):
            begun = len(short_pages.log)
            keeper.publish((step,))
            lists.append(sum(kind == "GET list-type" for kind, _ in short_pages.log[begun:]))
    keeper.end()
    known = {summary.generation for summary in keeper.persister._known.manifests}
    assert Generation(1, 149) not in known


def test_a_list_under_another_holding_that_fails_is_begun_anew(
    short_pages: World, monkeypatch: Patch
) -> None:
    bucket = model_store(short_pages, monkeypatch, tries_s=0.02)
    for n in range(50):
        bucket.publish(f"manifests/1-{n}.json", b"{}")
    mine = [Generation(9, 1000)]
    pages = PagedList(bucket, 9)
    pages.look(mine, "one")
    short_pages.fault = lambda kind, _: "dropped" if kind == "GET list-type" else ""
    with pytest.raises(StorageError):
        pages.look(mine, "another")
    short_pages.fault = lambda *_: ""
    while not pages.is_whole:
        pages.look(mine, "another")
    pages.look(mine, "another")
    assert manifest_path(mine[0]) not in pages.listed


# ── announcements ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise
@pytest.mark.parametrize("fate", ["lost", "late"])
def test_an_announcement_that_nobody_answered_is_carried_out_by_no_later_holder(
    fate: str, monkeypatch: Patch
) -> None:
    world = World()
    store = model_store(world, monkeypatch, tries_s=0.05, lease=TIMES)
    lease = store.lock("writer", "the run")
    path = f"{PART}/f"
    store.publish(path, b"x")
    faults: list[str] = []

    def fault(kind: str, key: str) -> str:
        if kind == "PUT" and "/.removals/" in key and (fate == "lost" or not faults):
            faults.append(key)
            return fate
        return ""

    world.fault = fault
    if fate == "lost":
        with pytest.raises(StorageError):
            store.remove_tree(PART)
    else:
        store.remove_tree(PART)
        world.land()
        store.publish(path, b"x")
    world.fault = lambda *_: ""
    store.publish("manifests/1-2.json", b"{}")  # relies on it
    lease.release()
    model_store(world, monkeypatch, tries_s=0.02, lease=TIMES).lock("writer", "next").release()
    assert store.exists(path)


@pytest.mark.parametrize("place", ["", "/.removals/"])
def test_a_server_that_lets_no_announcement_go_stops_no_save(
    place: str, monkeypatch: Patch
) -> None:
    world = World()
    inner = World.answer

    def answer(self: World, method: str, key: str, query: dict[str, str], *rest: Any) -> Outcome:
        if method == "DELETE" and "uploadId" not in query and place in key:
            return Outcome(403, "AccessDenied", "no")
        return inner(self, method, key, query, *rest)

    monkeypatch.setattr(World, "answer", answer)
    store = model_store(world, monkeypatch, tries_s=0.02, lease=TIMES)
    lease = store.lock("writer", "the run")
    store.publish(f"{PART}/f", b"x")
    world.fault = lambda kind, key: "dropped" if kind == "PUT" and ".writer.lock" in key else ""
    with pytest.raises(StorageError):
        store.remove_tree(PART)
    world.fault = lambda *_: ""
    assert isinstance(lease, ObjectLease)
    lease.renew()
    store.publish("manifests/1-2.json", b"{}")
    assert store.exists("manifests/1-2.json")
