"""In a bucket nothing is removed that a request may still name, or that a pin names meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.catalogue import PINS_LOCK, catalogue, layout_path, manifest_path, pin_path
from holdfast.errors import AlreadyPublished, FormatError, StorageError
from holdfast.events import Event, PersistBroke, subscribe
from holdfast.format.manifest import Generation, Incarnation, Pin, seal
from holdfast.geometry.layout import Layout
from holdfast.keeper import persister as persister_module
from holdfast.keeper.persister import Persister
from holdfast.leases import LeaseWatch
from holdfast.persist import commit, pins
from holdfast.persist.removal import Removal, plan, remove
from holdfast.policy.when import Keep
from holdfast.restore.reading.verify import verify
from holdfast.storage import lease_lock, objects
from holdfast.storage.base import Store, settle_s
from holdfast.storage.lease_lock import ONE_WRITER, LeaseTimes, ObjectLease, _parsed
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.storage.objects import ObjectStore
from support.checkpoints.images import split_leaf
from support.runs.keeper_jobs import job_of
from support.servers.bucket_model import World, heard, model_store

TIMES = LeaseTimes(renew_s=0.1, stop_s=0.2, take_over_s=0.5)
RECORD = Incarnation(run_id="r", n=1, nonce="n", parent=None, world=2, created_s=1.0)
SPLIT = Layout(2, (split_leaf("w", "F32", (6, 2), 2),))
OTHER = Layout(2, (split_leaf("v", "F32", (6, 2), 2),))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def opened(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ObjectStore]:
    """Opens the root as another process does."""
    return lambda: model_store(world, monkeypatch, tries_s=0.02, lease=TIMES)


@pytest.fixture
def calm(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ObjectStore]:
    """As ``opened``, with a lease that lasts on the busiest machine, and time for a second try."""
    return lambda: model_store(world, monkeypatch, tries_s=5.0)


def saved(store: Store, step: int, layout: Layout = OTHER) -> str | None:
    """Makes one checkpoint durable, as a keeper does; returns why it failed."""
    outcomes = list[str | None]()
    persister = Persister(store, Keep(), lambda _, reason: outcomes.append(reason))
    persister.work_one(job_of(Generation(1, step), RECORD, layout=layout))
    persister.stop()
    return outcomes[0]


def pinned_root(calm: Callable[[], ObjectStore]) -> tuple[ObjectStore, Generation]:
    """Makes a root with one checkpoint, which another process pins."""
    store, generation = calm(), Generation(1, 1)
    commit.open_root(store, "r")
    assert saved(store, 1) is None
    pins.pin(calm(), generation)
    return store, generation


def silent(store: ObjectStore) -> None:
    """Its process renews its lease no more, and cannot be known to have ended."""
    for lease in store._held:
        lease._ended.set()
        lease._thread.join()


def pruned(store: ObjectStore) -> Removal:
    """What `holdfast prune` does."""
    with store.lock("writer", "pruner"):
        leases = LeaseWatch(store)
        return remove(store, plan(store, Keep(), abandoned=False, leases=leases), leases=leases)


def require_whole(store: ObjectStore, steps: list[int]) -> None:
    found = catalogue(store)
    assert [manifest.step for manifest in found.manifests] == steps and not found.broken
    for manifest in found.manifests:
        assert not verify(store, manifest, deep=True).faults


def saves_and_falls_silent(world: World, store: ObjectStore) -> None:
    """One checkpoint is durable; the next one's manifest is sent, and lands later."""
    commit.open_root(store, "r")
    store.lock("writer", "the run")
    assert saved(store, 1, SPLIT) is None
    named = f"root/{manifest_path(Generation(1, 2))}"
    world.fault = lambda kind, key: "late" if (kind, key) == ("PUT", named) else ""
    assert saved(store, 2) is not None
    world.fault = lambda kind, key: ""
    world.late = world.late[:1]
    silent(store)


@pytest.mark.promise
def test_prune_leaves_what_a_save_that_was_taken_over_is_about_to_name(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    saves_and_falls_silent(world, opened())
    removal = pruned(opened())  # takes the lease over, because it is silent
    assert removal.waits_s > settle_s(opened()) - 60
    assert not removal.directories and not removal.layouts
    again = pruned(opened())  # that the first pruner has ended says nothing of the run
    assert again.waits_s > 0 and not again.directories
    world.land()
    require_whole(opened(), [1, 2])


@pytest.mark.promise
@pytest.mark.parametrize(
    ("is_damaged", "is_pinned"), [(False, False), (True, False), (False, True)]
)
def test_prune_leaves_what_a_manifest_names_that_no_list_shows_yet(
    world: World, opened: Callable[[], ObjectStore], is_damaged: bool, is_pinned: bool
) -> None:
    store = opened()
    commit.open_root(store, "r")
    with store.lock("writer", "the run"):
        assert saved(store, 1, SPLIT) is None and saved(store, 2) is None
    if is_pinned:
        pins.pin(opened(), Generation(1, 2))
    newest = f"root/{manifest_path(Generation(1, 2))}"
    whole = world.objects[newest]
    world.listed = sorted(world.objects.keys() - {newest})
    if is_damaged:
        world.objects[newest] = whole[:-9]
        with pytest.raises(FormatError, match="nothing is removed"):
            pruned(opened())
        world.objects[newest] = whole
    else:
        removal = pruned(opened())
        assert (removal.directories, removal.layouts) == ((), ())
    world.listed = None
    require_whole(store, [1, 2])


@pytest.mark.promise
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_manifest_that_landed_when_the_names_were_listed_already_keeps_its_images(
    world: World,
    opened: Callable[[], ObjectStore],
    is_damaged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(persister_module, "_PAGED_FROM", 9)
    monkeypatch.setattr(objects, "_PAGE", 10)
    world.page = 10
    store, outcomes, now = opened(), list[str | None](), [0.0]
    commit.open_root(store, "r")
    persister = Persister(store, Keep(), lambda _, reason: outcomes.append(reason))
    persister._sweeper.clock = lambda: now[0]

    def save(step: int) -> None:
        now[0] += settle_s(store)
        persister.work_one(job_of(Generation(1, step), RECORD, layout=SPLIT))

    late = f"root/{manifest_path(Generation(1, 199))}"  # the last of all that are listed
    with store.lock("writer", "the run"):
        for step in range(100, 160):
            save(step)
        world.fault = lambda kind, key: "late" if (kind, key) == ("PUT", late) else ""
        save(199)
        world.fault = lambda kind, key: ""
        save(200)  # all are listed once more, then a page with each
        world.late = world.late[:1]
        world.land()
        whole = world.objects[late]
        world.objects[late] = whole[: -9 if is_damaged else None]
        for step in range(201, 206):
            save(step)
        world.objects[late] = whole
    persister.stop()
    assert [reason is None for reason in outcomes].count(False) == 1
    require_whole(store, [*range(100, 160), 199, *range(200, 206)])


@pytest.mark.promise
def test_what_nothing_can_name_any_more_goes_by_the_servers_clock_alone(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    saves_and_falls_silent(world, opened())
    world.late.clear()
    assert pruned(opened()).waits_s
    world.now_s += settle_s(opened())
    removal = pruned(opened())
    assert removal.waits_s == 0
    assert [len(found) for found in (removal.directories, removal.layouts)] == [1, 1]
    require_whole(opened(), [1])


def test_a_run_that_ended_with_all_its_requests_answered_leaves_nothing_to_wait_for(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    store = opened()
    commit.open_root(store, "r")
    with store.lock("writer", "the run"):
        store.publish("steps/1-9-a/live-00000.safetensors", b"unnamed")
    removal = pruned(opened())
    assert removal.waits_s == 0 and len(removal.directories) == 1
    store = opened()
    with store.lock("writer", "the run"):
        world.fault = lambda kind, key: "dropped" if key == "root/name" else ""
        with pytest.raises(StorageError):
            store.publish("name", b"")
        world.fault = lambda kind, key: ""
    assert pruned(opened()).waits_s > 0


@pytest.mark.promise
def test_who_locks_a_root_after_a_silent_holder_is_not_alone_until_nothing_of_it_can_land(
    opened: Callable[[], ObjectStore], world: World
) -> None:
    store = opened()
    store.lock("writer", "silent")
    silent(store)
    is_alone = []
    for _ in range(3):
        with opened().lock("writer", "next") as lease:
            assert isinstance(lease, ObjectLease)
            is_alone.append(lease.is_alone)
        world.now_s += settle_s(store) / 3
    assert is_alone == [False] * 3
    world.now_s += 60
    with opened().lock("writer", "last") as lease:
        assert isinstance(lease, ObjectLease) and lease.is_alone


@pytest.mark.promise
def test_who_locks_a_root_after_killed_holders_is_alone_unless_one_before_them_was_silent(
    opened: Callable[[], ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = list[bool]()
    monkeypatch.setattr(lease_lock, "is_dead", lambda _: killed[-1])
    is_alone = []
    for was_killed in (True, True, True, False, True, True):
        store = opened()
        lease = store.lock("writer", "holder")
        assert isinstance(lease, ObjectLease)
        is_alone.append(lease.is_alone)
        silent(store)
        killed.append(was_killed)
    assert is_alone == [True, True, True, True, False, False]


@pytest.mark.promise
def test_without_a_lease_prune_leaves_all_that_is_unnamed_while_the_root_is_written_to(
    world: World, opened: Callable[[], ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ONE_WRITER, "1")
    store = opened()
    commit.open_root(store, "r")
    store.publish("steps/1-9-a/live-00000.safetensors", b"of a save that takes long")
    world.now_s += settle_s(store)
    store.publish("events/1.jsonl", b"{}")
    assert pruned(opened()).waits_s == settle_s(store)
    world.now_s += settle_s(store)
    removal = pruned(opened())
    assert removal.waits_s == 0 and len(removal.directories) == 1


@pytest.mark.promise
def test_lists_that_lag_and_manifests_that_come_back_stop_no_retention_and_are_no_leftovers(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    store, outcomes, now = opened(), list[str | None](), [0.0]
    commit.open_root(store, "r")
    persister = Persister(store, Keep(last=2), lambda _, reason: outcomes.append(reason))
    persister._sweeper.clock = lambda: now[0]
    lease = store.lock("writer", "the run")
    events: list[Event] = []
    end = subscribe(lambda event, _: events.append(event))
    before: list[list[str]] = []
    for step in range(1, 12):
        before.append(sorted(world.objects))
        world.listed = before[max(0, step - 3)] if step > 3 else None
        reborn = f"root/{manifest_path(Generation(1, 4))}"
        if step == 4:
            persister.work_one(job_of(Generation(1, 4), RECORD))
            data = world.objects[reborn]
        else:
            if step == 9:  # a removal is undone behind our back
                world.objects[reborn] = data
            persister.work_one(job_of(Generation(1, step), RECORD))
        now[0] += settle_s(store)
    end()
    persister.stop()
    assert outcomes == [None] * 11
    assert not [one for one in events if isinstance(one, PersistBroke)]
    lease.release()
    there = opened()
    assert not catalogue(there).broken
    world.listed = sorted({*before[-1], *before[-2], *before[-3], *world.objects})
    leftovers = commit.unnamed_directories(there, catalogue(there).manifests)
    assert all(any(f"root/{path}/" in key for key in world.objects) for path in leftovers)
    world.listed = None
    assert reborn not in world.objects
    steps = [manifest.step for manifest in catalogue(there).manifests]
    require_whole(there, steps)
    assert steps[-2:] == [10, 11]


@pytest.mark.promise
def test_the_sweeper_of_a_bucket_looks_for_pins_before_it_removes(
    opened: Callable[[], ObjectStore],
) -> None:
    store, now = opened(), [0.0]
    commit.open_root(store, "r")
    for step in (1, 2):
        assert saved(store, step, SPLIT) is None
    old, new = catalogue(store).manifests
    data = store.read(manifest_path(old.generation))
    sweeper = commit.Sweeper(store, clock=lambda: now[0])
    sweeper.know(old.directories)
    store.remove(manifest_path(old.generation))
    for _ in range(3):
        assert sweeper.sweep([new]) == []
    now[0] += settle_s(store)
    # A pin that another pruner, killed before it put the manifest back, was too late to see.
    pin = Pin(run_id="r", incarnation=1, step=1, manifest=data.decode(), note="", created_s=1.0)
    store.publish(pin_path(old.generation), seal(pin))
    assert sweeper.sweep([new]) == []
    store.publish(manifest_path(old.generation), data)
    require_whole(store, [1, 2])
    store.remove(pin_path(old.generation))
    store.remove(manifest_path(old.generation))
    assert sweeper.sweep([new]) == sorted(old.directories)


@pytest.mark.promise
def test_what_a_cache_is_about_to_have_published_is_not_swept(
    opened: Callable[[], ObjectStore],
) -> None:
    store, now = opened(), [0.0]
    commit.open_root(store, "r")
    for step in (1, 2):
        assert saved(store, step, SPLIT) is None
    old, new = catalogue(store).manifests
    sweeper = commit.Sweeper(store, clock=lambda: now[0])
    sweeper.know(old.directories)
    sweeper.spared = frozenset(old.directories)
    store.remove(manifest_path(old.generation))
    for _ in range(4):
        assert sweeper.sweep([new]) == []
        now[0] += settle_s(store)
    sweeper.spared = frozenset()
    for _ in range(3):
        removed = sweeper.sweep([new])
        now[0] += settle_s(store)
    assert removed == sorted(old.directories)


def test_nothing_is_written_below_a_directory_that_the_server_did_not_let_go(
    opened: Callable[[], ObjectStore],
) -> None:
    store = opened()
    store._removals._refused = {"of an earlier holder": ("parts/1-2-attempt0a1b2c",)}
    with pytest.raises(StorageError, match="is to be removed, which the server refuses"):
        store.create("parts/1-2-attempt0a1b2c/frozen-00000", 10)
    store.create("parts/1-2-attempt0a1b2cd/frozen-00000", 10).abort()


@pytest.mark.promise
def test_a_checkpoint_pinned_while_it_is_removed_comes_back_though_a_directory_stays(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    store = opened()
    commit.open_root(store, "r")
    for step in (1, 2):
        assert saved(store, step) is None
    old = catalogue(store).manifests[0]
    data = store.read(manifest_path(old.generation))
    pin = Pin(run_id="r", incarnation=1, step=1, manifest=data.decode(), note="", created_s=1.0)
    plain = store.remove_all

    def fails(files: Sequence[str], trees: Sequence[str]) -> None:
        store.publish(pin_path(old.generation), seal(pin))  # too late to be seen before
        plain(files, ())
        raise StorageError("a directory stays")

    store.remove_all = fails  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="a directory stays"):
        commit.remove_unpinned(store, [old.generation], ["steps/1-9-x"])
    require_whole(opened(), [1, 2])


@pytest.mark.promise
@pytest.mark.parametrize("is_renewed", [True, False])
def test_what_was_announced_once_takes_nothing_that_has_the_name_since(
    world: World, opened: Callable[[], ObjectStore], is_renewed: bool
) -> None:
    """The announcement could not be taken back: of what was removed, or was not to be removed."""
    store, path = opened(), "parts/1-1-a/frozen-00000.safetensors"
    lease = store.lock("writer", "the run")
    assert isinstance(lease, ObjectLease)
    store.publish(path, b"frozen")
    lost = ("DELETE", "/.removals/"), ("PUT", "" if is_renewed else "/.writer.lock")
    world.fault = lambda kind, key: (
        "dropped" if any(one == kind and part and part in key for one, part in lost) else ""
    )
    if is_renewed:
        store.remove_tree("parts/1-1-a")
        assert not store.exists(path)
    else:
        with pytest.raises(StorageError, match="could not be renewed"):
            store.remove_tree("parts/1-1-a")
        assert store.exists(path)
    assert any("/.removals/" in key for key in world.objects)
    with pytest.raises(StorageError):  # while it is there nothing is named
        store.publish("manifests/1-2.json", b"{}")
    world.fault = lambda kind, key: ""
    lease.renew()
    if is_renewed:
        store.publish(path, b"frozen")  # a later checkpoint names it again
    store.publish("manifests/1-2.json", b"{}")
    lease.release()
    opened().lock("writer", "the next").release()
    assert store.read(path) == b"frozen"


@pytest.mark.promise
@pytest.mark.parametrize("fault", ["lost", "late"])
def test_an_announcement_that_was_sent_before_its_lease_was_over_is_taken_back(
    world: World, calm: Callable[[], ObjectStore], fault: str
) -> None:
    """Its next try is not allowed any more; later the lease is renewed, and its holder goes on."""
    store, path = calm(), "parts/1-1-a/frozen-00000.safetensors"
    lease = store.lock("writer", "the run")
    assert isinstance(lease, ObjectLease)
    store.publish(path, b"frozen")

    def quiet(kind: str, key: str) -> str:
        if kind == "PUT" and "/.removals/" in key:
            lease._renewed_s -= 100
            return fault
        return ""

    world.fault = quiet
    with pytest.raises(StorageError, match="could not be renewed for"):
        store.remove_tree("parts/1-1-a")
    world.fault = lambda kind, key: ""
    lease.renew()
    world.land()
    assert any("/.removals/" in key for key in world.objects)
    store.publish("manifests/1-2.json", b"{}")  # names it
    lease.release()
    calm().lock("writer", "the next").release()
    assert store.read(path) == b"frozen"


@pytest.mark.promise
@pytest.mark.parametrize("end", ["removed", "refused", "unknown", "given up"])
@pytest.mark.parametrize("is_last", [True, False])
def test_an_announcement_that_lands_when_it_was_taken_back_is_carried_out_by_no_later_holder(
    world: World, monkeypatch: pytest.MonkeyPatch, end: str, is_last: bool
) -> None:
    """``is_last``: it lands when its holder has named all that it ever does."""
    store, path = model_store(world, monkeypatch, tries_s=0.3), "layouts/a"
    lease = store.lock("writer", "the run")
    assert isinstance(lease, ObjectLease)
    store.publish(path, b"1")
    announced = iter(["queued"])
    removed = {"refused": "403", "unknown": "dropped"}.get(end, "")

    def chosen(kind: str, key: str) -> str:
        if kind == "PUT" and "/.removals/" in key:
            return next(announced, "")
        if end == "given up" and (kind, key) == ("PUT", lease.key):
            return "dropped"
        return removed if (kind, key) == ("DELETE", f"root/{path}") else ""

    world.fault = chosen
    with suppress(StorageError):
        store.remove(path)
    if end != "refused":
        world.fault = lambda kind, key: ""
    lease.renew()
    with suppress(AlreadyPublished):
        store.publish(path, b"1")
    assert len(world.late) == 1
    if not is_last:
        world.land()
    store.publish("manifests/1-2.json", b"{}")  # relies on it
    world.land()
    lease.release()
    world.fault = lambda kind, key: ""
    for _ in range(2):
        model_store(world, monkeypatch).lock("writer", "whoever is next").release()
    assert store.read(path) == b"1"
    assert not any("/.removals/" in key for key in world.objects)


@pytest.mark.promise
@pytest.mark.parametrize("is_released", [True, False])
def test_an_announcement_that_lands_when_another_has_the_lock_is_carried_out_by_none(
    world: World, opened: Callable[[], ObjectStore], is_released: bool
) -> None:
    store, path = opened(), "parts/1-1-a/frozen-00000.safetensors"
    lease = store.lock("writer", "the run")
    store.publish(path, b"frozen")
    world.fault = lambda kind, key: "late" if kind == "PUT" and "/.removals/" in key else ""
    with pytest.raises(StorageError):
        store.remove_tree("parts/1-1-a")
    world.fault = lambda kind, key: ""
    if is_released:
        lease.release()
    else:
        silent(store)
    second = opened()
    with second.lock("writer", "the second"):
        world.land()
        assert any("/.removals/" in key for key in world.objects)
        second.publish("manifests/1-2.json", b"{}")  # names it
    third = opened()
    with third.lock("writer", "the third"):
        assert third.read(path) == b"frozen"
    assert not any("/.removals/" in key for key in world.objects)


def test_who_may_have_announced_is_noted_though_a_renewal_before_was_not_answered(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    store = opened()
    store.lock("writer", "the run")
    silent(store)
    lease = opened().lock("writer", "the next")
    assert isinstance(lease, ObjectLease) and lease.unsettled_s
    faults = iter(["lost"])  # it lands, and all tries after it are in vain
    world.fault = lambda kind, key: next(faults, "dropped") if kind == "PUT" else ""
    lease.renew()
    world.fault = lambda kind, key: ""
    lease.note_completed(["of another"])
    assert json.loads(world.objects[lease.key])["announced"] == ["of another", lease.nonce]
    lease.release()


def test_a_lease_can_be_read_however_many_holders_were_refused_a_removal(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    lease = opened().lock("writer", "the run")
    assert isinstance(lease, ObjectLease)
    lease.note_completed([f"{number:032x}" for number in range(1000)])
    lease.require_renewed()
    assert _parsed(world.objects[lease.key], 0.0).nonce == lease.nonce
    assert lease.may_have_announced("any")
    lease.release()


@pytest.mark.promise
def test_a_pin_is_not_promised_while_a_request_to_remove_it_may_land(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    store, generation = opened(), Generation(1, 1)
    commit.open_root(store, "r")
    assert saved(store, 1) is None
    pins.pin(opened(), generation)
    world.fault = lambda kind, key: "late" if kind == "DELETE" and "/pins/" in key else ""
    with pytest.raises(StorageError):
        pins.unpin(opened(), generation)
    world.fault = lambda kind, key: ""
    with pytest.raises(StorageError, match="Pin it again in 31 minutes"):
        pins.pin(opened(), generation)
    assert pins.pinned(store) == {generation}
    world.land()
    assert not pins.pinned(store)
    world.now_s += settle_s(store)
    pins.pin(opened(), generation)
    pins.pin(opened(), generation, "again")
    assert pins.pinned(store) == {generation}


@pytest.mark.promise
def test_a_layout_that_an_earlier_holders_request_removes_late_is_written_again(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    store = opened()
    commit.open_root(store, "r")
    with store.lock("writer", "a run that ends before its first checkpoint"):
        commit.write_layout(store, SPLIT.hash, SPLIT.to_json())
    world.now_s += settle_s(store)
    world.fault = lambda kind, key: "late" if kind == "DELETE" and "/layouts/" in key else ""
    with pytest.raises(StorageError):
        pruned(opened())
    world.fault = lambda kind, key: ""
    store, outcomes = opened(), list[str | None]()
    persister = Persister(store, Keep(), lambda _, reason: outcomes.append(reason))
    with store.lock("writer", "the next run"):
        for step in (1, 2):
            persister.work_one(job_of(Generation(1, step), RECORD, layout=SPLIT))
            if step == 1:
                require_whole(store, [1])
                world.land()
                assert not store.list("layouts")
    persister.stop()
    assert outcomes == [None, None]
    require_whole(store, [1, 2])


def to_removals_of(world: World, above: str, *answers: str) -> None:
    """Has requests to remove one object below ``above`` answered so, the last for ever."""
    left = list(answers)

    def chosen(kind: str, key: str) -> str:
        is_meant = kind == "DELETE" and f"root/{above}/" in key
        return (left.pop(0) if len(left) > 1 else left[0]) if is_meant else ""

    world.fault = chosen


@pytest.mark.promise
def test_a_layout_that_the_server_refused_to_remove_stays_once_a_checkpoint_names_it(
    world: World, calm: Callable[[], ObjectStore]
) -> None:
    store = calm()
    commit.open_root(store, "r")
    with store.lock("writer", "a run that ends before its first checkpoint"):
        commit.write_layout(store, SPLIT.hash, SPLIT.to_json())
    to_removals_of(world, "layouts", "403")
    with pytest.raises(StorageError):
        pruned(calm())
    store = calm()
    with store.lock("writer", "who names it"):
        assert saved(store, 1, SPLIT) is None
    to_removals_of(world, "layouts", "")
    calm().lock("writer", "the next, when the server lets it").release()
    require_whole(calm(), [1])
    assert not any("/.removals/" in key for key in world.objects)


@pytest.mark.promise
@pytest.mark.parametrize("fault", ["queued", "stale"])
@pytest.mark.parametrize("answer", ["", "403"])
@pytest.mark.parametrize("is_own", [False, True])
def test_a_layout_whose_removal_was_answered_at_a_later_try_is_written_again_when_the_first_lands(
    world: World, calm: Callable[[], ObjectStore], fault: str, answer: str, is_own: bool
) -> None:
    """``is_own``: it was asked for by who names it, else by who was refused and had ended."""
    store, outcomes = calm(), list[str | None]()
    commit.open_root(store, "r")
    with store.lock("writer", "a run that ends before its first checkpoint"):
        commit.write_layout(store, SPLIT.hash, SPLIT.to_json())
    if not is_own:
        to_removals_of(world, "layouts", "403")
        with pytest.raises(StorageError):
            pruned(calm())
    to_removals_of(world, "layouts", fault, answer)
    store = calm()
    persister = Persister(store, Keep(), lambda _, reason: outcomes.append(reason))
    with store.lock("writer", "the next run"):
        if is_own:
            with suppress(StorageError):
                store.remove(layout_path(SPLIT.hash))
        assert len(world.late) == 1
        for step in (1, 2):
            persister.work_one(job_of(Generation(1, step), RECORD, layout=SPLIT))
            if step == 1:
                require_whole(calm(), [1])
                world.land()
                assert not calm().list("layouts")
    persister.stop()
    assert outcomes == [None, None]
    require_whole(calm(), [1, 2])


@pytest.mark.promise
@pytest.mark.parametrize("fault", ["queued", "stale"])
@pytest.mark.parametrize("answer", ["", "403"])
@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_pin_is_not_promised_where_its_removal_was_answered_at_a_later_try(
    world: World, calm: Callable[[], ObjectStore], fault: str, answer: str, is_adopted: bool
) -> None:
    """``is_adopted``: by the very call that sets it, else by the one before."""
    store, generation = pinned_root(calm)
    if is_adopted:
        to_removals_of(world, "pins", "403")
        with pytest.raises(StorageError):
            pins.unpin(calm(), generation)
        to_removals_of(world, "pins", fault, answer)
    else:
        to_removals_of(world, "pins", fault, answer)
        with suppress(StorageError):
            pins.unpin(calm(), generation)
    to_removals_of(world, "pins", fault, answer)
    with pytest.raises(StorageError, match="Pin it again in 31 minutes"):
        pins.pin(calm(), generation)
    to_removals_of(world, "pins", answer)
    with pytest.raises(StorageError, match="Pin it again in 31 minutes"):
        pins.pin(calm(), generation)  # for as long as it may land
    world.land()
    world.now_s += settle_s(store)
    pins.pin(calm(), generation)
    assert pins.pinned(calm()) == {generation}


@pytest.mark.promise
def test_a_pin_that_the_server_refused_to_remove_stays_once_it_is_set_again(
    world: World, calm: Callable[[], ObjectStore]
) -> None:
    _, generation = pinned_root(calm)
    to_removals_of(world, "pins", "403")
    for _ in range(2):  # announced twice
        with pytest.raises(StorageError):
            pins.unpin(calm(), generation)
    pins.pin(calm(), generation)
    to_removals_of(world, "pins", "")
    calm().lock(PINS_LOCK, "whoever is next").release()
    assert pins.pinned(calm()) == {generation}
    assert not any("/.removals/" in key for key in world.objects)


@pytest.mark.promise
def test_a_pin_that_another_set_again_is_seen_by_who_could_not_remove_it(
    world: World, calm: Callable[[], ObjectStore]
) -> None:
    store, generation = pinned_root(calm)
    to_removals_of(world, "pins", "403")
    with pytest.raises(StorageError):
        pins.unpin(store, generation)
    pins.pin(calm(), generation)
    assert pins.pinned(store) == {generation}


def refused_pin(
    world: World, calm: Callable[[], ObjectStore]
) -> tuple[ObjectStore, MemoryStore, Generation]:
    """Makes a root with a pin whose removal the server refused, and a cache that has it too."""
    (store, generation), source = pinned_root(calm), MemoryStore()
    source.publish(pin_path(generation), store.read(pin_path(generation)))
    to_removals_of(world, "pins", "403")
    with pytest.raises(StorageError):
        pins.unpin(calm(), generation)
    return store, source, generation


@pytest.mark.promise
def test_a_pin_that_is_copied_stays_though_the_server_had_refused_to_remove_it(
    world: World, calm: Callable[[], ObjectStore]
) -> None:
    store, source, generation = refused_pin(world, calm)
    with store.lock("writer", "who drains a cache"):
        pins.copy_pin(source, store, catalogue(store).manifests[0])
    to_removals_of(world, "pins", "")
    calm().lock(PINS_LOCK, "whoever is next").release()
    assert pins.pinned(calm()) == {generation}


def test_a_pin_that_cannot_be_removed_keeps_no_other_from_being_copied(
    world: World, calm: Callable[[], ObjectStore]
) -> None:
    store, source = calm(), MemoryStore()
    commit.open_root(store, "r")
    assert saved(store, 1) is None and saved(store, 2) is None
    stuck, copied = Generation(1, 1), Generation(1, 2)
    for generation in (stuck, copied):
        pins.pin(calm(), generation)
    source.publish(pin_path(copied), store.read(pin_path(copied)))
    pins.unpin(calm(), copied)
    world.fault = lambda kind, key: "busy" if (kind, key) == away else ""
    away = "DELETE", f"root/{pin_path(stuck)}"
    with pytest.raises(StorageError):
        pins.unpin(calm(), stuck)
    with store.lock("writer", "who drains a cache"), heard() as told:
        pins.copy_pin(source, store, catalogue(store).manifests[-1])
    assert copied in pins.pinned(calm())
    assert any("is copied all the same" in one for one in told), told


def test_a_copied_pin_that_may_be_removed_late_is_told(
    world: World, calm: Callable[[], ObjectStore]
) -> None:
    store, source, _ = refused_pin(world, calm)
    answers = iter(["late"])
    world.fault = lambda kind, key: (
        next(answers, "403") if kind == "DELETE" and "/pins/" in key and "rem" not in key else ""
    )
    with store.lock("writer", "who drains a cache"), heard() as told:
        pins.copy_pin(source, store, catalogue(store).manifests[0])
    assert any("may still remove this pin" in one for one in told), told


def test_a_pin_is_copied_while_a_process_that_was_stopped_has_the_lock_of_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "_PATIENCE_S", 0.1)
    store, source, generation = LocalStore(tmp_path), MemoryStore(), Generation(1, 1)
    commit.open_root(store, "r")
    assert saved(store, 1) is None
    pins.pin(store, generation)
    source.publish(pin_path(generation), store.read(pin_path(generation)))
    pins.unpin(store, generation)
    with LocalStore(tmp_path).lock(PINS_LOCK, "holdfast pin"):
        pins.copy_pin(source, store, catalogue(store).manifests[0])
    assert pins.pinned(store) == {generation}


@pytest.mark.promise
def test_a_pinned_checkpoint_comes_back_that_a_late_request_removed(
    world: World, opened: Callable[[], ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch, tries_s=5.0)
    commit.open_root(store, "r")
    store.lock("writer", "the run")
    outcomes, first = list[str | None](), Generation(1, 1)
    persister = Persister(store, Keep(last=1), lambda _, reason: outcomes.append(reason))
    removals = iter(["late"])

    def chosen(kind: str, key: str) -> str:
        if (kind, key) != ("DELETE", f"root/{manifest_path(first)}"):
            return ""
        if fault := next(removals, ""):
            pins.pin(opened(), first)  # the second try is answered, and it is published back
        return fault

    world.fault = chosen
    for step in (1, 2):
        persister.work_one(job_of(Generation(1, step), RECORD, layout=OTHER))
    assert first in catalogue(store).generations
    world.land()
    assert first not in catalogue(store).generations
    persister.work_one(job_of(Generation(1, 3), RECORD, layout=OTHER))
    persister.stop()
    assert outcomes == [None] * 3
    require_whole(store, [1, 3])
