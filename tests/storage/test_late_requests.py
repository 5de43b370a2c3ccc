"""A request that nobody answered may land as late as a server takes it: nothing relies on less."""

from __future__ import annotations

import builtins
import math
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from holdfast.catalogue import pin_path
from holdfast.errors import AlreadyPublished, HoldfastError, StorageError
from holdfast.format.manifest import Generation
from holdfast.persist.commit import Sweeper
from holdfast.storage import lease_lock
from holdfast.storage.bucket import SETTLE_S, Outcome
from holdfast.storage.google import GoogleBucket
from holdfast.storage.lease_lock import LeaseTimes, ObjectLease
from holdfast.storage.removals import Removals
from holdfast.storage.tokens import RENEW_S, Token, TokenSource
from holdfast.storage.wrap import Patience
from support.servers.bucket_model import World, model_store

#: A server takes a signature that is so much older or newer than its own clock says.
TAKEN_S = 15 * 60


@pytest.mark.promise
def test_a_clock_that_is_fast_signs_requests_that_land_for_twice_as_long() -> None:
    fast_s = TAKEN_S - 1  # ahead of the server's, which takes that
    assert fast_s + TAKEN_S < SETTLE_S


@pytest.mark.promise
def test_a_request_may_land_for_as_long_as_the_token_in_it_is_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://localhost:1")
    bucket = GoogleBucket("bucket", "gs://bucket")
    assert bucket.settle_s > 3600
    valid_s = iter((86_400.0, 3600.0))
    bucket._tokens = TokenSource(lambda: Token("token", next(valid_s)))
    for _ in range(2):  # also of the token before this one
        bucket._signed("PUT", "key", {}, {}, [])
        assert bucket.settle_s > 86_400
        bucket._tokens.forget()


@pytest.mark.promise
def test_a_process_that_is_hidden_from_us_is_not_taken_for_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = lease_lock.process_name().split("/", 4)
    old = "/".join([*mine[:2], str(child.pid), "1"])
    names = [old, f"{old}/{mine[4]}"]
    plain: Any = builtins.open

    def hidden(file: Any, *more: Any, **named: Any) -> Any:  # as with hidepid=2
        if file == f"/proc/{child.pid}/stat":
            raise FileNotFoundError(file)
        return plain(file, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", hidden)
        assert not any(map(lease_lock.is_dead, names))
    child.communicate(b"\n")
    assert all(map(lease_lock.is_dead, names))  # as an earlier version named it, too
    assert not lease_lock.is_dead("/".join([*mine[:2], str(child.pid), "1", "another-host"]))
    assert not lease_lock.is_dead(f"{mine[0]}/{mine[1]}/{10**30}/1/{mine[4]}")


def dropped_end(kind: str, key: str) -> str:
    is_end = key == "root/image" and kind in ("PUT", "POST uploadId")
    return "dropped" if is_end else ""


@pytest.mark.promise
def test_an_image_whose_end_is_not_known_is_removed_by_no_request_that_nobody_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for size_bytes in (1000, 3 << 20):
        world = World()
        store = model_store(world, monkeypatch)
        store.lock("writer", "me")
        sink = store.create("image", size_bytes)
        sink.write(0, memoryview(bytes(size_bytes)))
        world.fault = dropped_end
        with pytest.raises(StorageError):
            sink.finish()
        world.fault = lambda kind, key: ""
        world.log.clear()
        sink.abort()
        assert ("DELETE", "root/image") not in world.log


@pytest.mark.promise
def test_who_locks_after_a_holder_with_unanswered_requests_is_not_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    lease = store.lock("writer", "me")
    world.fault = lambda kind, key: "late" if key == "root/name" else ""
    with pytest.raises(StorageError):
        store.publish("name", b"")
    world.fault = lambda kind, key: ""
    lease.release()
    after = model_store(world, monkeypatch).lock("writer", "next")
    assert isinstance(after, ObjectLease)
    assert after.unsettled_s > 0 and not after.is_alone
    after.release()


@pytest.mark.promise
def test_a_request_that_ends_in_an_error_or_is_under_way_counts_as_unanswered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    bucket = store.bucket
    store.publish("first", b"")
    assert bucket.unanswered_s() == -math.inf
    is_in, may_end = threading.Event(), threading.Event()

    def wait(kind: str, key: str) -> str:
        is_in.set()
        assert may_end.wait(30)
        return ""

    world.fault = wait
    thread = threading.Thread(target=store.publish, args=("second", b""))
    thread.start()
    assert is_in.wait(30)
    assert time.monotonic() - bucket.unanswered_s() < 30
    may_end.set()
    thread.join()
    assert bucket.unanswered_s() == -math.inf

    def fails(kind: str, key: str) -> str:
        raise HoldfastError("between the request and its answer")

    world.fault = fails
    with pytest.raises(HoldfastError):
        bucket.delete("root/first")
    assert bucket.unanswered_s() > 0


def test_what_was_sent_where_is_forgotten_when_nothing_of_it_can_land(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    bucket = model_store(world, monkeypatch).bucket
    bucket.settle_s = 0.0
    for number in range(3):
        bucket.put(f"root/{number}/name", [b""])
        world.fault = lambda kind, key: "dropped"
        bucket.delete(f"root/{number}/name")
        world.fault = lambda kind, key: ""
        assert not bucket._under_way
        assert list(bucket._unanswered) == [f"DELETE root/{number}/"]


def test_without_time_a_request_is_tried_once_and_a_strict_one_never_after_its_time() -> None:
    now_s = [0.0]

    def tries(patience: Patience) -> int:
        count = 0
        for count in patience.pauses(clock=lambda: now_s[0], sleep=lambda _: None):  # noqa: B007
            now_s[0] += 20.0  # each takes all the time there is
        return count

    assert tries(Patience(total_s=0.0)) == 1
    assert tries(Patience(total_s=10.0, is_strict=True)) == 1
    assert tries(Patience(total_s=10.0)) == 2


def test_a_token_that_cannot_be_renewed_is_asked_for_seldom_and_by_one_thread() -> None:
    now_s, asked = [0.0], [0]
    is_in, may_end = threading.Event(), threading.Event()

    def fetch() -> Token:
        asked[0] += 1
        if asked[0] == 1:
            return Token("first", 3600.0)
        is_in.set()
        assert may_end.wait(30)
        raise StorageError("away")

    source = TokenSource(fetch, clock=lambda: now_s[0])
    assert source.current().text == "first"
    now_s[0] = 3600.0 - RENEW_S + 1
    thread = threading.Thread(target=source.current)
    thread.start()
    assert is_in.wait(30)
    assert source.current().text == "first"  # while the other thread waits
    may_end.set()
    thread.join()
    for _ in range(5):
        assert source.current().text == "first"
    assert asked[0] == 2
    now_s[0] += 31
    source.current()
    assert asked[0] == 3


@pytest.mark.promise
def test_an_object_that_nobody_may_remove_stops_no_lock_and_counts_as_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    plain = World.answer

    def answer(self: World, method: str, key: str, *more: Any) -> Outcome:
        if method == "DELETE" and key == "root/manifests/1-1.json":
            return Outcome(403, "AccessDenied")
        return plain(self, method, key, *more)

    monkeypatch.setattr(World, "answer", answer)
    store = model_store(world, monkeypatch)
    for number in (1, 2):
        store.publish(f"manifests/1-{number}.json", b"{}")
    lease = store.lock("writer", "me")
    with pytest.raises(StorageError, match="AccessDenied"):
        store.remove("manifests/1-1.json")
    assert store.list("manifests") == ["1-2.json"]
    store.publish("other", b"")
    lease.release()
    after = model_store(world, monkeypatch)
    after.lock("writer", "next").release()
    assert after.list("manifests") == ["1-2.json"]
    assert any("/.removals/" in key for key in world.objects)  # it may go when it is let


@pytest.mark.promise
def test_a_removal_that_failed_is_completed_before_its_holder_publishes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    store.publish("manifests/1-1.json", b"{}")
    lease = store.lock("writer", "me")
    world.fault = lambda kind, key: "dropped" if kind == "DELETE" else ""
    with pytest.raises(StorageError):
        store.remove("manifests/1-1.json")
    with pytest.raises(StorageError):
        store.publish("manifests/1-2.json", b"{}")
    assert "root/manifests/1-2.json" not in world.objects
    world.fault = lambda kind, key: ""
    store.publish("manifests/1-2.json", b"{}")
    assert store.list("manifests") == ["1-2.json"]
    assert not any("/.removals/" in key for key in world.objects)
    lease.release()


@pytest.mark.promise
def test_an_announcement_that_cannot_be_read_or_completed_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    store.publish("other", b"")
    key = "root/.removals/writer/nonce-1"
    for data in (b"no document", b'{"files": ["../up"], "trees": []}'):
        world.objects[key] = data
        with pytest.raises(StorageError, match="cannot be read"):
            store.lock("writer", "me")
        assert world.objects[key] == data
    world.objects[key] = b'{"files": ["other"], "trees": []}'

    def fails(self: Removals, files: object, trees: object) -> None:
        raise ValueError("in the removal itself")

    with monkeypatch.context() as patch:
        patch.setattr(Removals, "_remove", fails)
        with pytest.raises(ValueError, match="itself"):
            store.lock("writer", "me")
    assert key in world.objects


def test_directories_that_cannot_be_removed_leave_the_others_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, now_s = model_store(World(), monkeypatch), [0.0]
    sweeper = Sweeper(store, clock=lambda: now_s[0])
    paths = [f"steps/1-{number}-x" for number in range(4)]
    sweeper.know(paths)
    for _ in range(3):
        assert sweeper.due([], [], []) == []
    now_s[0] = SETTLE_S
    assert sweeper.due([], [], []) == paths[:2]  # they fail
    assert sweeper.due([], [], []) == paths[2:]
    sweeper.know(f"steps/2-{number}-x" for number in range(60))
    for _ in range(3):
        sweeper.due([], [], [])
    now_s[0] *= 2
    assert len(sweeper.due([], [], [])) >= 7


@pytest.mark.promise
def test_what_a_pin_that_cannot_be_read_may_name_is_not_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, now_s = model_store(World(), monkeypatch), [0.0]
    pinned_alone = Generation(1, 0)
    store.publish(pin_path(pinned_alone), b"of a version that is not there yet")
    sweeper = Sweeper(store, clock=lambda: now_s[0])
    sweeper.know(["steps/1-0-x", "steps/1-1-x", "parts/1-1-x"])
    for _ in range(3):
        assert sweeper.due([], [], {pinned_alone}) == []
    now_s[0] = SETTLE_S
    assert sweeper.due([], [], {pinned_alone}) == ["steps/1-1-x"]


@pytest.mark.promise
def test_an_image_that_should_take_anothers_place_is_not_told_finished_while_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    store.publish("image", bytes(3 << 20))
    sink = store.create("image", 3 << 20, aside="aside")
    sink.write(0, memoryview(b"x" * (3 << 20)))

    def complete(self: World, key: str, upload: str, data: bytes) -> Outcome:
        del self.parts[key, upload]  # ended by another
        return Outcome(200)

    monkeypatch.setattr(World, "complete", complete)
    world.fault = lambda kind, key: "lost" if kind == "POST uploadId" else ""
    with pytest.raises(StorageError, match="finish of image"):
        sink.finish()
    assert world.objects["root/image"] == bytes(3 << 20)


def test_an_error_in_a_renewal_does_not_end_the_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, again = [0], threading.Event()

    def renew(self: ObjectLease) -> None:
        tried[0] += 1
        if tried[0] == 1:
            raise ValueError("in an answer")
        again.set()

    monkeypatch.setattr(ObjectLease, "renew", renew)
    times = LeaseTimes(renew_s=0.05, stop_s=0.2, take_over_s=0.5)
    lease = model_store(World(), monkeypatch, lease=times).lock("writer", "me")
    assert again.wait(30)
    lease.release()


@pytest.mark.promise
@pytest.mark.parametrize("fault", ["dropped", "busy"])
def test_a_pin_waits_for_late_removals_of_pins_alone(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    root, bucket = store.lock("writer", "me"), store.bucket
    for method, path, waits in (
        ("PUT", "manifests/1-0.json", False),
        ("DELETE", "manifests/1-0.json", False),
        ("PUT", "pins/1-0.json", False),
        ("DELETE", "pins/1-0.json", True),
        ("PUT", ".removals/pins/1", True),
        ("DELETE", ".removals/pins/1", True),
    ):
        turn, asked = store.lock("pins", "first"), (method, f"root/{path}")
        world.fault = lambda *request, asked=asked: fault if request == asked else ""
        outcome = bucket.put(asked[1], [b""]) if method == "PUT" else bucket.delete(asked[1])
        assert not outcome.status
        world.fault = lambda kind, key: ""
        turn.release()
        after = store.lock("pins", "next")
        assert isinstance(after, ObjectLease)
        assert (after.unsettled_s > 0) == waits, asked
        after.release()
        bucket._unanswered.clear()
        world.now_s += SETTLE_S
    world.fault = lambda kind, key: fault if key == "root/name" else ""
    with pytest.raises(StorageError):
        store.publish("name", b"")
    world.fault = lambda kind, key: ""
    root.release()
    after = store.lock("writer", "next")
    assert isinstance(after, ObjectLease)
    assert after.unsettled_s > 0  # of the root all counts
    after.release()


@pytest.mark.promise
def test_a_replacement_that_lands_late_does_not_undo_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch, tries_s=5.0)
    store.publish("incarnations/1.json", b"first")
    tries = iter(["late"])

    def chosen(kind: str, key: str) -> str:
        return next(tries, "") if (kind, key) == ("PUT", "root/incarnations/1.json") else ""

    world.fault = chosen
    store.publish("incarnations/1.json", b"second", replace=True)
    store.publish("incarnations/1.json", b"third", replace=True)
    world.land()
    assert store.read("incarnations/1.json") == b"third"


@pytest.mark.promise
def test_a_replacement_that_nobody_answered_is_unknown_and_its_name_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    store.publish("name", b"first")
    world.fault = lambda kind, key: "dropped" if (kind, key) == ("PUT", "root/name") else ""
    with pytest.raises(StorageError, match="is not known") as raised:
        store.publish("name", b"second", replace=True)
    assert raised.value.retryable and not isinstance(raised.value, AlreadyPublished)


def test_a_replacement_that_another_came_before_is_not_said_to_be_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    store.publish("name", b"first")

    def outrun(kind: str, key: str) -> str:
        if (kind, key) == ("PUT", "root/name"):
            world.keep(key, b"another's")
        return ""

    world.fault = outrun
    with pytest.raises(StorageError, match=r"another wrote it meanwhile$") as raised:
        store.publish("name", b"second", replace=True)
    assert raised.value.retryable and store.read("name") == b"another's"


@pytest.mark.promise
def test_what_is_about_to_be_removed_when_the_lock_is_released_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    store.publish("name", b"")
    lease = store.lock("writer", "me")

    def release(kind: str, key: str) -> str:
        if kind == "PUT" and "/.removals/" in key:
            world.fault = lambda kind, key: ""
            lease.release()
            store_of_next.lock("writer", "next")
        return ""

    store_of_next = model_store(world, monkeypatch)
    world.fault = release
    with pytest.raises(StorageError, match="could not be renewed just now"):
        store.remove("name")
    assert "root/name" in world.objects


@pytest.mark.promise
def test_a_removal_is_completed_by_one_thread_before_any_names_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    store.publish("manifests/1-1.json", b"{}")
    lease, is_in, may_end = store.lock("writer", "me"), threading.Event(), threading.Event()
    world.fault = lambda kind, key: "dropped" if kind == "DELETE" else ""
    with pytest.raises(StorageError):
        store.remove("manifests/1-1.json")

    def wait() -> None:
        kind = threading.current_thread().name == "slow" and not may_end.is_set()
        if kind and world.log and world.log[-1] == ("HEAD", "root/pins/1-1.json"):
            is_in.set()
            assert may_end.wait(30)

    world.fault, world.before = (lambda kind, key: ""), wait
    slow = threading.Thread(target=store.publish, args=("one", b""), name="slow")
    slow.start()
    assert is_in.wait(30)
    fast = threading.Thread(target=store.publish, args=("manifests/1-1.json", b"{}"))
    fast.start()
    fast.join(0.5)
    may_end.set()
    slow.join()
    fast.join()
    assert store.list("manifests") == ["1-1.json"]
    lease.release()


def test_what_changed_on_the_way_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = model_store(World(), monkeypatch).bucket
    assert bucket.failure(Outcome(400, "BadDigest"), "write", "key").retryable
    assert not bucket.failure(Outcome(400, "EntityTooLarge"), "write", "key").retryable


@pytest.mark.promise
def test_what_a_server_refused_to_remove_lets_no_late_announcement_be_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, held, path = World(), "root/manifests/1-1.json", "manifests/1-2.json"
    plain = World.answer

    def answer(self: World, method: str, key: str, *more: Any) -> Outcome:
        is_refused = method == "DELETE" and key == held and held in world.objects
        return Outcome(403, "AccessDenied") if is_refused else plain(self, method, key, *more)

    monkeypatch.setattr(World, "answer", answer)
    store = model_store(world, monkeypatch)
    store.publish("manifests/1-1.json", b"{}")
    store.publish(path, b"{}")
    lease = store.lock("writer", "me")
    with pytest.raises(StorageError, match="AccessDenied"):
        store.remove("manifests/1-1.json")
    world.fault = lambda kind, key: "late" if kind == "PUT" and "/.removals/" in key else ""
    with pytest.raises(StorageError):
        store.remove(path)
    world.fault = lambda kind, key: ""
    lease.release()
    with model_store(world, monkeypatch).lock("writer", "the second"):
        world.land()  # and the second relies on what it names
    with model_store(world, monkeypatch).lock("writer", "the third"):
        assert path in (one.removeprefix("root/") for one in world.objects)
    del world.objects[held]
    model_store(world, monkeypatch).lock("writer", "the fourth").release()
    assert not any("/.removals/" in key for key in world.objects)
