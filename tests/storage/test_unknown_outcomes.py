"""A request that nobody answered is read back: the same is success, different is taken, absent is
unknown."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from msgspec.structs import replace

from holdfast.errors import AlreadyPublished, RootBusy, StorageError
from holdfast.keeper import incarnations
from holdfast.persist import commit
from holdfast.persist.commit import Sweeper
from holdfast.policy.when import Keep
from holdfast.storage import Store
from holdfast.storage.base import settle_s
from holdfast.storage.lease_lock import ONE_WRITER, ObjectLease
from holdfast.storage.uploads import ComparingSink
from holdfast.storage.wrap import Patience
from holdfast.testing.store_suite import StoreSuite
from support.checkpoints.keeper_roots import root_access
from support.servers.bucket_model import ModelBucket, World, model_store
from support.servers.object_servers import TIMES


@pytest.fixture
def world() -> World:
    return World()


class TestModel(StoreSuite):
    """The model is a server like the others: what is proven with it holds for them."""

    @pytest.fixture(autouse=True)
    def patched(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.patch, self.made = world, monkeypatch, 0

    def make_store(self, tmp_path: object) -> Store:
        self.made += 1
        return model_store(self.world, self.patch, f"root-{self.made}", tries_s=5.0, lease=TIMES)


def puts(world: World, fault: str, times: int = 1) -> None:
    """Has the next requests to publish "name" end so."""
    left = [times]

    def chosen(kind: str, key: str) -> str:
        if kind == "PUT" and key == "root/name" and left[0]:
            left[0] -= 1
            return fault
        return ""

    world.fault = chosen


@pytest.mark.promise
def test_a_publication_whose_answer_was_lost_has_succeeded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch)
    for times in (1, 1000):  # its second try finds the first; or no try is answered at all
        world.objects.pop("root/name", None)
        puts(world, "lost", times)
        store.publish("name", b"mine")
        assert world.objects["root/name"] == b"mine"


@pytest.mark.promise
@pytest.mark.parametrize("fault", ["late", "busy"])
def test_a_publication_that_found_anothers_content_after_a_lost_answer_was_beaten(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    store = model_store(world, monkeypatch)
    store.publish("other", b"")
    world.objects["root/name"] = b"theirs"
    puts(world, fault, 1)
    with pytest.raises(AlreadyPublished):
        store.publish("name", b"mine")
    assert world.objects["root/name"] == b"theirs"


@pytest.mark.promise
def test_a_publication_that_is_neither_answered_nor_there_is_unknown_and_may_land(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch)
    puts(world, "late", 1000)
    with pytest.raises(
        StorageError, match="is not known: it is not there now, and may be"
    ) as raised:
        store.publish("name", b"mine")
    assert raised.value.retryable and not isinstance(raised.value, AlreadyPublished)
    world.land()
    world.fault = lambda kind, key: ""
    assert store.read("name") == b"mine"


def test_a_conflict_of_the_moment_is_tried_again_and_no_taken_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch, tries_s=1.0)
    puts(world, "busy", 3)
    store.publish("name", b"mine")
    assert store.bucket.traffic.retries["PUT"] == 3


@pytest.mark.promise
@pytest.mark.parametrize("size_bytes", [1000, 5 << 20])
@pytest.mark.parametrize("fault", ["lost", "busy"])
def test_an_image_is_whole_whichever_request_of_it_was_not_answered(
    world: World, monkeypatch: pytest.MonkeyPatch, size_bytes: int, fault: str
) -> None:
    content = bytes(range(256)) * (size_bytes // 256 + 1)
    content = content[:size_bytes]
    store = model_store(world, monkeypatch, tries_s=1.0)
    store.publish("other", b"")
    for number in range(20):
        path, begun, hit = f"image-{number}", len(world.log), [False]

        def chosen(kind: str, key: str, number: int = number, begun: int = begun) -> str:
            is_it = len(world.log) - begun == number + 1
            hit[0] = hit[0] or is_it  # noqa: B023
            return fault if is_it else ""

        world.fault = chosen
        sink = store.create(path, size_bytes)
        with memoryview(content) as view:
            for start in range(0, size_bytes, 700_000):
                sink.write(start, view[start : start + 700_000])
        sink.finish()
        world.fault = lambda kind, key: ""
        assert store.read(path) == content
        if not hit[0]:
            assert number > 1
            return
    raise AssertionError("more requests than an image takes")


def test_no_server_of_the_model_has_the_name_of_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By that name a process keeps what it found out of a server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    names = [ModelBucket(World(), "name", "url", Patience(total_s=0.0)).server for _ in range(50)]
    assert len({*names}) == 50


@pytest.mark.promise
def test_a_server_that_ignores_conditions_is_refused_by_name_and_nothing_is_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ignores_conditions = True
    store = model_store(world, monkeypatch)
    for change in (
        lambda: store.publish("name", b""),
        lambda: store.create("image", 1),
        lambda: store.lock("writer", "me"),
    ):
        with pytest.raises(StorageError, match=r"without a name.*If-None-Match") as raised:
            change()
        assert not raised.value.retryable
    assert world.objects == {}


def test_an_upload_that_nobody_ends_is_listed_and_goes_with_its_directory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch)
    sink = store.create("steps/1-2-x/live", 3 << 20)
    sink.write(0, memoryview(bytes(2 << 20)))
    assert store.list("steps") == ["1-2-x"] and not store.exists("steps/1-2-x/live")
    store.remove_tree("steps/1-2-x")
    assert store.list("steps") == [] and not world.parts


def test_a_lock_of_a_lost_holder_is_freed_by_hand_and_one_that_is_renewed_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch, lease=TIMES)
    assert store.view_lock("writer").holder() is None
    lease = store.lock("writer", "run blue")
    assert isinstance(lease, ObjectLease)
    view = store.view_lock("writer")
    found = view.holder()
    assert found is not None and (found.owner, found.pid) == ("run blue", os.getpid())
    with pytest.raises(RootBusy, match=r"run blue.*renewed a moment ago"):
        view.require_silent()
    lease._ended.set()  # its process is lost
    lease._thread.join()
    assert view.holder() is not None
    begun_s = time.monotonic()
    assert view.require_silent() is not None
    assert time.monotonic() - begun_s >= TIMES.take_over_s
    view.free()
    assert view.holder() is None
    next_ = store.lock("writer", "run green")
    assert isinstance(next_, ObjectLease) and not next_.is_alone  # the first may yet write
    next_.release()


@pytest.mark.promise
def test_nothing_is_removed_unless_the_lease_is_renewed_after_it_was_announced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch)
    store.publish("name", b"mine")
    store.lock("writer", "me")
    world.fault = lambda kind, key: "dropped" if key.endswith(".lock") else ""
    with pytest.raises(StorageError, match="could not be renewed just now"):
        store.remove("name")
    assert "root/name" in world.objects
    assert not any("/.removals/" in key for key in world.objects)  # it was given up


def test_a_lease_whose_object_was_removed_is_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch)
    lease = store.lock("writer", "me")
    assert isinstance(lease, ObjectLease)
    del world.objects[lease.key]
    lease.renew()
    with pytest.raises(RootBusy):
        store.publish("name", b"mine")


@pytest.mark.promise
def test_an_image_that_an_earlier_try_stored_stays_when_this_one_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch)
    store.publish("image", b"stored")
    sink = ComparingSink(store, "image", 6)
    with pytest.raises(StorageError, match="with other"):
        sink.write(0, memoryview(b"others"))
    sink.abort()
    assert store.read("image") == b"stored"


def test_without_compare_and_swap_a_root_has_one_writer_only_by_an_option(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch)
    store.publish("name", b"")
    assert store._kept is not None
    store._kept = replace(store._kept, replace=False)
    with pytest.raises(StorageError, match=rf"set {ONE_WRITER}=1"):
        store.lock("writer", "me")
    monkeypatch.setenv(ONE_WRITER, "1")
    store.lock("writer", "me").release()


@pytest.mark.promise
@pytest.mark.parametrize("fault", ["busy", "lost"])
@pytest.mark.parametrize("tries_s", [0.0, 5.0])
def test_no_try_of_a_publication_begins_or_counts_after_a_take_over(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: str, tries_s: float
) -> None:
    store = model_store(world, monkeypatch, tries_s=tries_s)
    lease = store.lock("writer", "me")
    assert isinstance(lease, ObjectLease)
    tries: list[str] = []

    def chosen(kind: str, key: str) -> str:
        if (kind, key) != ("PUT", "root/name"):
            return ""
        tries.append(key)
        lease._taken_by = "run green"
        return fault if len(tries) == 1 else ""

    world.fault = chosen
    expected = StorageError if fault == "busy" and not tries_s else RootBusy
    with pytest.raises(expected):
        store.publish("name", b"mine")
    assert len(tries) == 1 and ("root/name" in world.objects) == (fault == "lost")


@pytest.mark.promise
def test_no_try_of_a_holder_begins_after_its_time_even_if_the_machine_was_suspended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch, tries_s=5.0)
    lease = store.lock("writer", "me")
    assert isinstance(lease, ObjectLease)
    suspended_s = [0.0]
    plain = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: plain(clock) + suspended_s[0])

    def chosen(kind: str, key: str) -> str:
        if (kind, key) == ("PUT", "root/name"):
            suspended_s[0] = 31.0
            return "busy"
        return ""

    world.fault = chosen
    with pytest.raises(StorageError, match="could not be renewed for"):
        store.publish("name", b"mine")
    assert world.log.count(("PUT", "root/name")) == 1


@pytest.mark.promise
def test_a_holder_that_could_not_renew_changes_nothing_until_it_can(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch, lease=TIMES)
    lease = store.lock("writer", "me")
    assert isinstance(lease, ObjectLease)
    world.fault = lambda kind, key: "busy" if key.endswith(".lock") else ""
    time.sleep(TIMES.stop_s + 0.1)
    for change in (
        lambda: store.publish("name", b""),
        lambda: store.create("image", 1),
        lambda: store.remove_tree("steps/1"),
    ):
        with pytest.raises(StorageError, match="could not be renewed for"):
            change()
    world.fault = lambda kind, key: ""
    time.sleep(2 * TIMES.renew_s)
    store.publish("name", b"")
    lease.release()


@pytest.mark.promise
def test_in_a_bucket_only_what_was_known_is_swept_and_not_before_no_request_can_land(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = model_store(world, monkeypatch), [0.0]
    sweeper = Sweeper(store, clock=lambda: now[0])
    for path in ("steps/1-1-mine/image", "steps/1-1-theirs/image", "layouts/00ff.json"):
        store.publish(path, b"")
    sweeper.know(["steps/1-1-mine"])
    for _ in range(4):
        assert sweeper.sweep([]) == []
    now[0] += settle_s(store)
    assert sweeper.sweep([]) == ["steps/1-1-mine"]
    assert store.list("steps") == ["1-1-theirs"] and store.list("layouts") == ["00ff.json"]


@pytest.mark.promise
def test_a_removal_that_was_announced_is_not_completed_once_its_checkpoint_is_pinned(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch)
    for name in ("manifests/1-1.json", "manifests/1-2.json", "pins/1-1.json"):
        store.publish(name, b"{}")
    for number in (1, 2):
        said = f'{{"path": "manifests/1-{number}.json", "is_tree": false}}'
        world.objects[f"root/.removals/writer/nonce-{number}"] = said.encode()
    store.lock("writer", "me").release()
    assert store.list("manifests") == ["1-1.json"]
    assert not any("/.removals/" in key for key in world.objects)


@pytest.mark.promise
def test_a_keeper_whose_lock_was_taken_over_locks_its_root_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = model_store(world, monkeypatch, lease=TIMES)
    commit.open_root(store, "r")
    monkeypatch.setattr(incarnations, "open_store", lambda root: store)

    async def run() -> None:
        access = root_access("s3://model/root", "run r, host a")
        first = await access.open()
        first.keep = Keep(last=3)
        assert await access.open() is first
        (lease,) = store._held
        del world.objects[lease.key]
        lease.renew()
        with pytest.raises(RootBusy):
            store.publish("name", b"")
        access.lock_anew_if_lost()
        second = await access.open()
        assert second is not first and second.keep == Keep(last=3)
        store.publish("name", b"")
        access.release()

    asyncio.run(run())
