"""A lock of which the server does not say all is not taken for one that nobody had before."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.errors import RootBusy, StorageError
from holdfast.storage.bucket import Outcome
from holdfast.storage.lease_lock import LeaseTimes, ObjectLease
from support.servers.bucket_model import World, heard, model_store


@pytest.mark.promise
def test_who_finds_no_lock_in_an_old_root_is_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody removed it by hand, while a run may have held it."""
    for age_s, waits in ((0.0, False), (3600.0, True)):
        world = World()
        store = model_store(world, monkeypatch)
        store.publish("holdfast.json", b"{}")
        world.now_s = age_s
        for name, is_used in (("pins", False), ("writer", waits)):
            with heard() as told:
                lease = model_store(world, monkeypatch).lock(name, "me")
            said = "had no lock 'writer'", "For 31 minutes no upload", "`holdfast prune` leaves"
            assert all(one in "".join(told) for one in said) == is_used == bool(told)
            assert isinstance(lease, ObjectLease)
            assert (lease.unsettled_s > 0, lease.is_alone) == (is_used, not is_used)
            lease.release()
        after = model_store(world, monkeypatch).lock("writer", "next")
        assert isinstance(after, ObjectLease)
        assert (after.unsettled_s > 0, after.is_alone) == (waits, not waits)
        after.release()


@pytest.mark.promise
def test_a_lease_is_never_renewed_without_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on whose way the tags of what was written are dropped."""
    world = World()
    plain = World.answer

    def answer(self: World, method: str, key: str, *more: Any) -> Outcome:
        done = plain(self, method, key, *more)
        return replace(done, headers={}) if method == "PUT" and key.endswith(".lock") else done

    monkeypatch.setattr(World, "answer", answer)
    lease = model_store(world, monkeypatch).lock("writer", "me")
    assert isinstance(lease, ObjectLease)
    lease.renew()
    lease.require_held()
    world.keep(lease.key, b'{"owner": "other", "nonce": "theirs"}')
    lease.renew()
    assert b"theirs" in world.objects[lease.key]
    with pytest.raises(RootBusy):
        lease.require_held()


@pytest.mark.promise
@pytest.mark.parametrize(
    ("times", "fault", "request_"),
    [
        (1, "lost", ("PUT", "root/.writer.lock")),
        (10**9, "dropped", ("HEAD", "root/holdfast.json")),
        (10**9, "busy", ("HEAD", "root/holdfast.json")),
    ],
)
def test_who_finds_no_lock_is_not_alone_where_an_answer_was_lost(
    monkeypatch: pytest.MonkeyPatch, times: int, fault: str, request_: tuple[str, str]
) -> None:
    faults = itertools.repeat(fault, times)
    world = World()
    store = model_store(world, monkeypatch)
    store.publish("holdfast.json", b"{}")
    world.now_s = 3600.0
    world.fault = lambda *request: next(faults, "") if request == request_ else ""
    lease = model_store(world, monkeypatch, tries_s=0.5).lock("writer", "me")
    world.fault = lambda method, key: ""
    for _ in range(2):
        assert isinstance(lease, ObjectLease)
        assert lease.unsettled_s > 0 and not lease.is_alone
        lease.release()
        lease = model_store(world, monkeypatch).lock("writer", "next")
    lease.release()


@pytest.mark.promise
def test_who_finds_its_own_lock_after_another_s_took_it_from_one_that_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch)
    store.publish("holdfast.json", b"{}")
    store.lock("writer", "before").release()
    world.now_s = 3600.0
    puts = iter(["", "lost"])  # the lock's creation is refused, its replacement not answered
    is_lock = ("PUT", "root/.writer.lock")
    world.fault = lambda *request: next(puts, "") if request == is_lock else ""
    with model_store(world, monkeypatch).lock("writer", "me") as lease:
        assert isinstance(lease, ObjectLease)
        assert lease.is_alone and not lease.unsettled_s


@pytest.mark.parametrize(
    ("weaken", "says"), [(lambda tag: "", "shows none"), (lambda tag: f"W/{tag}", r"refuses .*W/")]
)
def test_a_server_that_shows_no_tag_by_which_a_lock_is_replaced_is_named_and_not_asked_on_and_on(
    monkeypatch: pytest.MonkeyPatch, weaken: Callable[[str], str], says: str
) -> None:
    world = World()
    times = LeaseTimes(renew_s=0.2, stop_s=0.4, take_over_s=0.6)
    store = model_store(world, monkeypatch, lease=times)
    store.lock("writer", "before").release()
    plain = World.answer

    def answer(self: World, method: str, key: str, *more: Any) -> Outcome:
        done = plain(self, method, key, *more)
        if method != "GET" or not key.endswith(".lock"):
            return done
        headers = dict(done.headers or {})
        return replace(done, headers=headers | {"etag": weaken(headers["etag"])})

    def before() -> None:
        assert len(world.log) < 100

    monkeypatch.setattr(World, "answer", answer)
    world.log.clear()
    world.before = before
    with pytest.raises(StorageError, match=says) as raised:
        store.lock("writer", "next")
    assert f"model-{world.number}" in str(raised.value) and not raised.value.retryable


def test_a_lock_that_another_took_first_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    store = model_store(
        world, monkeypatch, lease=LeaseTimes(renew_s=0.2, stop_s=0.4, take_over_s=30)
    )
    with store.lock("writer", "before") as lease:
        assert isinstance(lease, ObjectLease)
    others = iter([b'{"pending_s": 1.0}', b'{"pending_s": 2.0}'])

    def outrun(method: str, key: str) -> str:
        if (method, key) == ("PUT", lease.key) and (theirs := next(others, b"")):
            world.keep(key, theirs)  # who had it meanwhile, and released it
        return ""

    world.fault = outrun
    store.lock("writer", "next").release()
    assert not next(others, b"")
