"""Objects that a server does not let go stop no other removal, no save and no lock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.errors import StorageError
from holdfast.storage import s3
from holdfast.storage.bucket import Outcome
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
