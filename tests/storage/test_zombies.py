"""A holder that is stopped anywhere and woken after a take-over changes nothing that is relied on.

Two holders of one lock run request by request, in every order with two switches: one prunes a
checkpoint and removes the part that it named, the other takes the lease over, goes on from what it
finds, and publishes a checkpoint that names the same part again where that is there.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from holdfast.errors import HoldfastError, RootBusy, StorageError
from holdfast.storage import lease_lock
from holdfast.storage.lease_lock import LeaseTimes, ObjectLease
from holdfast.storage.objects import ObjectStore
from holdfast.storage.removals import Removals
from support.servers.bucket_model import World, model_store

TIMES = LeaseTimes(renew_s=4, stop_s=5, take_over_s=6)
PART = "parts/1-1-a/frozen"


@dataclass
class Clock:
    """Stands for the module ``time`` in ``lease_lock``: who sleeps makes time pass."""

    now_s: float = 0.0
    CLOCK_BOOTTIME: int = 7

    def clock_gettime(self, clock: int) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Actor:
    """A process that does one request whenever it is let."""

    act: Callable[[], None]
    may: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    did: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    has_ended: bool = False
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.may.acquire()
        try:
            self.act()
        except HoldfastError as error:
            self.error = error
        finally:
            self.has_ended = True
            self.did.release()

    def wait_turn(self) -> None:
        """Called in its thread before each request."""
        self.did.release()
        self.may.acquire()

    def step(self) -> bool:
        """Lets it go on to its next request; False once it has ended."""
        if not self.has_ended:
            self.may.release()
            assert self.did.acquire(timeout=30)
        return not self.has_ended


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease_lock, "time", clock)
    return clock


def publish(store: ObjectStore, name: str, part: str) -> None:
    store.publish(f"manifests/{name}", json.dumps(part).encode())


def prune(store: ObjectStore, taken: list[ObjectLease]) -> None:
    """What the first holder does: the manifest goes, then the part that only it named."""
    store.remove("manifests/1")
    store.remove_tree("parts/1-1-a")
    publish(store, "2", "")


def go_on(store: ObjectStore, found: list[str]) -> None:
    """What the second does: it names the part of the checkpoint that stands, or writes its own."""
    store.lock("writer", "second")
    standing = store.list("manifests")
    found += standing
    if "1" in standing and store.exists(PART):
        publish(store, "3", PART)
        return
    store.publish("parts/2-3-b/frozen", b"frozen")
    publish(store, "3", "parts/2-3-b/frozen")


def broken(world: World, found: list[str]) -> list[str]:
    """Returns the manifests that name what is not there, and those that the second holder found and
    that are gone: it removes none.
    """
    lost = [name for name in found if f"root/manifests/{name}" not in world.objects]
    named = {key: json.loads(data) for key, data in world.objects.items() if "/manifests/" in key}
    return lost + [
        key for key, part in named.items() if part and f"root/{part}" not in world.objects
    ]


def run_both(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, first: int, second: int, is_long: bool
) -> tuple[World, list[str], bool]:
    """The first does ``first`` requests, the second ``second``, then each the rest. ``is_long``:
    the first is stopped so long that its lease is over.
    """
    world = World()
    one = model_store(world, monkeypatch, tries_s=5.0, lease=TIMES)
    other = model_store(world, monkeypatch, tries_s=5.0, lease=TIMES)
    found: list[str] = []
    one.publish(PART, b"frozen")
    publish(one, "1", PART)
    lease = one.lock("writer", "first")
    assert isinstance(lease, ObjectLease)
    zombie, heir = Actor(lambda: prune(one, [lease])), Actor(lambda: go_on(other, found))
    actors = {zombie.thread: zombie, heir.thread: heir}
    world.before = lambda: actors[threading.current_thread()].wait_turn()
    for _ in range(first + 1):
        zombie.step()
    if is_long:
        clock.now_s += TIMES.take_over_s
    took_all = [heir.step() for _ in range(second + 1)][-1]
    while zombie.step():
        pass
    while heir.step():
        pass
    world.before = lambda: None
    for error in (zombie.error, heir.error):
        assert error is None or isinstance(error, (RootBusy, StorageError)), error
    lease._ended.set()
    for held in other._held:
        held._ended.set()
    return world, found, took_all


def orders(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> Iterator[tuple[int, int, World, list[str]]]:
    for is_long in (False, True):
        for first in range(18):
            second, goes_on = 0, True
            while goes_on:
                world, found, goes_on = run_both(monkeypatch, clock, first, second, is_long)
                yield first, second, world, found
                second += 1


@pytest.mark.promise
def test_in_no_order_of_two_holders_a_stopped_one_takes_what_the_next_relies_on(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    count = 0
    for first, second, world, found in orders(monkeypatch, clock):
        count += 1
        assert not broken(world, found), (first, second, sorted(world.objects))
        if "root/manifests/3" not in world.objects:  # the first renewed: it was not stopped long
            lease = json.loads(world.objects["root/.writer.lock"])
            assert (lease["owner"], lease["beat"] > 0) == ("first", True), (first, second)
    print(f"{count} orders")
    assert count > 400


@pytest.mark.promise
@pytest.mark.parametrize("rule", ["adopt", "announce", "check"])
def test_without_any_one_of_the_rules_the_search_finds_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, rule: str
) -> None:
    if rule == "adopt":
        monkeypatch.setattr(Removals, "adopt", lambda self, lease: None)
    elif rule == "check":
        monkeypatch.setattr(ObjectLease, "require_held", lambda self: None)
        monkeypatch.setattr(ObjectLease, "require_renewed", lambda self: None)
    else:
        plain = Removals.remove

        def unannounced(
            self: Removals, files: Sequence[str], trees: Sequence[str], lease: object
        ) -> None:
            if isinstance(lease, ObjectLease):
                lease.require_held()
            plain(self, files, trees, None)

        monkeypatch.setattr(Removals, "remove", unannounced)
    assert any(broken(world, found) for _, _, world, found in orders(monkeypatch, clock))


@pytest.mark.promise
def test_a_renewal_counts_from_when_the_object_changed_and_not_from_when_it_was_looked_at(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """A renewal lands, its answer is lost, and the network is gone until another may take over."""
    for before in range(-1, 4):  # the request of the holder before which the other takes over
        world, clock.now_s = World(), 0.0
        store = model_store(world, monkeypatch)
        lease = store.lock("writer", "first")
        assert isinstance(lease, ObjectLease)
        clock.now_s, left = 1.0, [before]
        world.fault = lambda kind, key: "lost" if key.endswith(".lock") else ""
        lease.renew()
        world.fault = lambda kind, key: ""
        watched, taken = world.tag(lease.key), [False]

        def take(
            world: World = world,
            key: str = lease.key,
            watched: str = watched,
            taken: list[bool] = taken,
        ) -> None:
            said = {**json.loads(world.objects[key]), "owner": "second", "nonce": "other"}
            if_match, data = {"if-match": watched}, json.dumps(said).encode()
            taken[0] = world.answer("PUT", key, {}, if_match, data).is_done

        def count(left: list[int] = left, take: Callable[[], None] = take) -> None:
            if left[0] == 0:
                take()
            left[0] -= 1

        clock.now_s = 60.9
        world.before = count
        with contextlib.suppress(HoldfastError):
            lease.require_renewed()
        world.before = lambda: None
        clock.now_s = 61.0
        if before < 0:
            take()
        clock.now_s = 68.0
        if taken[0]:
            with pytest.raises(HoldfastError):
                lease.require_held()
        else:
            lease.require_held()
        assert taken[0] == (0 <= before < 3), before
        lease._ended.set()
