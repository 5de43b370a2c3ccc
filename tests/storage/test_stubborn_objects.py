"""Objects that a server does not let go stop no other removal, no save and no lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.errors import HoldfastError, StorageError
from holdfast.storage import s3
from holdfast.storage.bucket import SETTLE_S, Bucket, Outcome
from holdfast.storage.lease_lock import ObjectLease
from holdfast.storage.removals import Removals
from support.servers.bucket_model import World, heard, model_store


def failing(
    monkeypatch: pytest.MonkeyPatch, times: Mapping[str, int], **codes: str
) -> list[list[str]]:
    """Has the server answer, so often by the code, that of the objects to be removed these stay."""
    plain, asked = World.answer, list[list[str]]()

    def answer(self: World, method: str, key: str, *more: Any) -> Outcome:
        there = dict(self.objects)
        done = plain(self, method, key, *more)
        gone = sorted(there.keys() - self.objects.keys())
        if method == "POST" and not key:
            asked.append(gone)
            said = ""
            for one, code in codes.items():
                path = f"root/{one}"
                if path in gone and len(asked) <= times[code]:
                    self.objects[path] = there[path]
                    said += f"<Error><Key>{path}</Key><Code>{code}</Code></Error>"
            return Outcome(200, body=f"<DeleteResult>{said}</DeleteResult>".encode())
        return done

    monkeypatch.setattr(World, "answer", answer)
    return asked


NOT_NOW = "InternalError", "SlowDown", "SlowDownWrite", "SlowDownRead", "TooManyRequests"


@pytest.mark.promise
@pytest.mark.parametrize("code", NOT_NOW)
def test_an_object_of_many_that_a_busy_server_did_not_remove_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    world = World()
    store = model_store(world, monkeypatch, tries_s=5.0)
    store.publish("one", b"1")
    store.publish("other", b"2")
    lease, asked = store.lock("writer", "me"), failing(monkeypatch, {code: 2}, one=code)
    with heard() as told:
        store.remove_all(["one", "other"], [])
    assert len(asked) == 3 and store.list("") == []
    assert store.bucket.traffic.retries == {"POST delete": 2}
    assert code in str(told)
    lease.release()


@pytest.mark.promise
@pytest.mark.parametrize("is_of_one", [True, False])
@pytest.mark.parametrize("path", ["layouts/a", "manifests/1-1.json"])
def test_of_many_that_were_removed_at_a_later_try_a_late_one_is_expected(
    monkeypatch: pytest.MonkeyPatch, is_of_one: bool, path: str
) -> None:
    """``is_of_one``: the server says of one of them alone that it is busy."""
    world = World()
    store = model_store(world, monkeypatch, tries_s=5.0)
    store.publish(path, b"1")
    store.publish("other", b"2")
    with store.lock("writer", "me") as lease:
        assert isinstance(lease, ObjectLease)
        tries = iter(["busy"])
        if is_of_one:
            failing(monkeypatch, {"SlowDown": 1}, **{path: "SlowDown"})
        else:
            world.fault = lambda kind, key: next(tries, "") if kind == "POST delete" else ""
        assert not lease.unsettled_s
        store.remove_all([path, "other"], [])
        assert store.list("") == [] and lease.unsettled_s > SETTLE_S - 60
    with model_store(world, monkeypatch).lock("writer", "next") as lease:
        assert isinstance(lease, ObjectLease) and lease.unsettled_s > SETTLE_S - 60


@pytest.mark.promise
def test_of_what_stays_only_what_may_go_later_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch, tries_s=5.0)
    for one in ("busy", "held", "other"):
        store.publish(one, b"1")
    lease = store.lock("writer", "me")
    asked = failing(
        monkeypatch, {"SlowDown": 2, "AccessDenied": 9}, busy="SlowDown", held="AccessDenied"
    )
    with pytest.raises(StorageError, match="AccessDenied"):
        store.remove_all(["busy", "held", "other"], [])
    busy = ["root/busy"]
    assert asked == [["root/busy", "root/held", "root/other"], busy, busy]
    assert sorted(key for key in world.objects if "/." not in key) == ["root/held"]
    lease.release()


@pytest.mark.promise
def test_an_object_that_a_server_never_lets_go_stops_no_others_and_no_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "_BULK", 2)
    world = World()
    store = model_store(world, monkeypatch)
    for number in range(6):
        store.publish(f"steps/1-1-abcdefgh/{number}", b"1")
    lease = store.lock("writer", "me")
    never = "steps/1-1-abcdefgh/1"
    failing(monkeypatch, {"InternalError": 10**9}, **{never: "InternalError"})
    with pytest.raises(StorageError, match="InternalError") as raised:
        store.remove_tree("steps/1-1-abcdefgh")
    assert not raised.value.retryable
    assert [key for key in world.objects if "/steps/" in key] == [f"root/{never}"]
    assert store.list("steps") == []  # it counts as gone
    store.publish("manifests/1-2.json", b"{}")
    store.create("steps/1-2-abcdefgh/0", 1).abort()
    with pytest.raises(StorageError, match="is to be removed"):
        store.create("steps/1-1-abcdefgh/0", 1)
    lease.release()
    after = model_store(world, monkeypatch)
    with heard() as told, after.lock("writer", "next"):
        assert "counts as removed" in str(told)
        assert after.list("steps") == []
        after.publish("manifests/1-3.json", b"{}")
    monkeypatch.undo()
    model_store(world, monkeypatch).lock("writer", "when it is well").release()
    assert not any("/.removals/" in key or "/steps/" in key for key in world.objects)


@pytest.mark.promise
@pytest.mark.parametrize("unknown", ["dropped", "busy", "lost"])
def test_of_many_objects_one_that_nobody_answered_is_told_before_one_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    """As they are removed one by one, as where a server has no request for many."""
    world = World()
    bucket = model_store(world, monkeypatch).bucket
    keys = [f"root/{number:02}" for number in range(40)]
    for key in keys:
        world.keep(key, b"1")
    faults = {"root/00": "403", "root/30": unknown, "root/39": "403"}
    world.fault = lambda kind, key: faults.get(key, "")
    with pytest.raises(StorageError, match="removal of root/30") as raised:
        Bucket.delete_many(bucket, keys)
    assert raised.value.retryable
    assert world.objects.keys() - {"root/30"} == {"root/00", "root/39"}  # each was asked for
    faults.pop("root/30")
    with pytest.raises(StorageError, match="removal of root/00") as raised:
        Bucket.delete_many(bucket, keys)
    assert not raised.value.retryable


@pytest.mark.promise
def test_an_upload_that_a_server_does_not_end_hides_no_removal_that_nobody_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, tree = World(), "steps/1-1-abcdefgh"
    store = model_store(world, monkeypatch)
    lease = store.lock("writer", "me")
    for number in range(2):
        store.publish(f"{tree}/{number}", b"1")
    store.create(f"{tree}/2", 3 << 20).write(0, memoryview(bytes(3 << 20)))
    faults = {"DELETE uploadId": "403", "POST delete": "dropped"}
    world.fault = lambda kind, key: faults.get(kind, "")
    with pytest.raises(StorageError):
        store.remove_tree(tree)
    with pytest.raises(StorageError, match="no answer"):  # it waits for what may yet go
        store.publish("manifests/1-2.json", b"{}")
    faults.pop("POST delete")
    store.publish("manifests/1-2.json", b"{}")
    assert store.list("steps") == [] and not any("/steps/" in key for key in world.objects)
    assert world.parts  # it counts as gone
    lease.release()


@pytest.mark.promise
@pytest.mark.parametrize("fault", ["", "lost", "late", "dropped", "other"])
def test_a_name_that_is_used_again_is_no_longer_announced_and_others_are(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """``fault``: of the first request that says so; "other": the announcement changed meanwhile."""
    world = World()
    store = model_store(world, monkeypatch, tries_s=5.0 if fault in ("late", "dropped") else 0.0)
    for one in ("layouts/a", "layouts/b"):
        store.publish(one, b"1")
    failing(
        monkeypatch,
        {"AccessDenied": 9},
        **dict.fromkeys(("layouts/a", "layouts/b"), "AccessDenied"),
    )
    with store.lock("writer", "me"):
        with pytest.raises(StorageError, match="AccessDenied"):
            store.remove_all(["layouts/a", "layouts/b"], [])
        assert store.list("layouts") == []
        faults = iter([fault])

        def chosen(kind: str, key: str) -> str:
            if kind != "PUT" or "/.removals/" not in key:
                return ""
            found = next(faults, "")
            if found == "other":
                world.keep(key, world.objects[key] + b" ")
            return "" if found == "other" else found

        world.fault = chosen
        if fault == "other":
            with pytest.raises(StorageError, match="PreconditionFailed"):
                store.publish("layouts/a", b"1", replace=True)
        store.publish("layouts/a", b"1", replace=True)
        assert store.list("layouts") == ["a"]
        store.publish("layouts/b", b"1", replace=True)
        assert not any("/.removals/" in key for key in world.objects)
        world.land()
        assert not any("/.removals/" in key for key in world.objects)
    monkeypatch.undo()
    after = model_store(world, monkeypatch)
    after.lock("writer", "when it is let").release()
    assert after.list("layouts") == ["a", "b"]


@pytest.mark.promise
def test_what_was_refused_is_forgotten_when_the_lock_is_taken_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    store.publish("layouts/a", b"1")
    world.fault = lambda kind, key: "403" if (kind, key) == ("DELETE", "root/layouts/a") else ""
    with store.lock("writer", "me"), pytest.raises(StorageError):
        store.remove("layouts/a")
    world.fault = lambda kind, key: ""
    other = model_store(world, monkeypatch)
    with other.lock("writer", "another, who removes it and names it anew"):
        other.publish("layouts/a", b"1")
    with store.lock("writer", "me"):
        assert store.list("layouts") == ["a"]


@pytest.mark.promise
def test_what_was_pinned_when_others_of_its_removal_were_refused_is_removed_by_no_later_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    for one in (1, 2):
        store.publish(f"manifests/1-{one}.json", b"{}")
    failing(monkeypatch, {"AccessDenied": 9}, **{"manifests/1-1.json": "AccessDenied"})
    world.fault = lambda kind, key: "dropped" if kind == "POST delete" else ""
    with store.lock("writer", "me"), pytest.raises(StorageError):
        store.remove_all(["manifests/1-1.json", "manifests/1-2.json"], [])
    store.publish("pins/1-2.json", b"{}")
    answers = {("DELETE", "root/manifests/1-1.json"): "403"}
    world.fault = lambda *request: answers.get(request, "")
    after = model_store(world, monkeypatch)
    with after.lock("writer", "who goes on from it"):
        assert after.list("manifests") == ["1-2.json"]
    after.remove("pins/1-2.json")
    world.fault = lambda kind, key: ""
    for owner in ("whoever is next", "and next"):  # as long as it may land, it is emptied
        model_store(world, monkeypatch).lock("writer", owner).release()
        assert after.list("manifests") == ["1-2.json"]
    assert not any("/.removals/" in key for key in world.objects)


@pytest.mark.promise
def test_what_a_busy_server_did_not_remove_is_not_taken_for_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the request itself is not answered, nothing is known of single objects."""
    world = World()
    store = model_store(world, monkeypatch)
    store.publish("one", b"1")
    store.publish("other", b"2")
    lease = store.lock("writer", "me")
    world.fault = lambda kind, key: "busy" if kind == "POST delete" else ""
    with pytest.raises(StorageError, match="slow down") as raised:
        store.remove_all(["one", "other"], [])
    assert raised.value.retryable and store.list("") == ["one", "other"]
    world.fault = lambda kind, key: ""
    store.publish("third", b"")
    assert store.list("") == ["third"]
    lease.release()


@pytest.mark.promise
def test_threads_that_wait_for_a_removal_that_fails_do_not_try_it_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, count = World(), 8
    store = model_store(world, monkeypatch)
    store.publish("one", b"1")
    lease = store.lock("writer", "me")
    world.fault = lambda kind, key: "dropped" if kind == "DELETE" else ""
    with pytest.raises(StorageError):
        store.remove("one")
    tries, waiting, plain = list[str](), threading.Semaphore(0), Removals._complete

    def complete(*all_: Any) -> bool:
        tries.append("")
        for _ in range(count):
            assert waiting.acquire(timeout=30)
        return plain(*all_)

    class Counted:
        """The lock, of which each who comes is counted first."""

        def __init__(self) -> None:
            self._lock = threading.RLock()

        def __enter__(self) -> None:
            waiting.release()
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    monkeypatch.setattr(Removals, "_complete", complete)
    monkeypatch.setattr(store._removals, "_finishing", Counted())
    failed = list[HoldfastError]()

    def write(number: int) -> None:
        try:
            store.publish(f"manifests/1-{number}.json", b"{}")
        except HoldfastError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tries) == 1 and len(failed) == count and store.list("manifests") == []
    monkeypatch.setattr(Removals, "_complete", plain)
    world.fault = lambda kind, key: ""
    store.publish("manifests/1-9.json", b"{}")  # who comes later tries again
    assert store.list("") == ["manifests"]
    lease.release()


def test_a_forked_child_does_not_wait_for_a_removal_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removals = model_store(World(), monkeypatch)._removals
    is_in, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with removals._lock, removals._finishing:
            is_in.set()
            assert may_end.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_in.wait(30)
    pid = os.fork()
    if not pid:
        os._exit(0 if removals._lock.acquire(False) and removals._finishing.acquire(False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    may_end.set()
    thread.join()
