"""A holder that is stopped anywhere and woken after a take-over changes nothing that is relied on.

Two holders of one lock run request by request, in every order with two switches: one prunes a
checkpoint and removes the part that it named, the other takes the lease over, goes on from what it
finds, and publishes a checkpoint that names the same part again where that is there. In a second
search the first removes a layout, which the server refuses or answers at a later try, and the
second names it again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from holdfast.catalogue import layout_path
from holdfast.errors import HoldfastError, RootBusy, StorageError
from holdfast.geometry.layout import table_hash
from holdfast.persist.commit import write_layout
from holdfast.storage import lease_lock, objects
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

    def step_to_end(self) -> None:
        """Lets it do all that is left."""
        while self.step():
            pass


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
    zombie.step_to_end()
    heir.step_to_end()
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


#: What the server answers to requests of the first and of the second to remove the layout, the last
#: of it for ever; and to the first one of the first to announce that.
ANSWERS = (
    (["403"], ["403"], ""),
    (["403"], ["queued", "403"], ""),
    (["403"], ["queued", ""], ""),
    (["queued", "403"], ["403"], ""),
    (["queued", ""], ["queued", ""], ""),
    (["403"], ["403"], "queued"),
    (["403"], [""], "queued"),
    ([""], [""], "queued"),
)
#: When it does what it has answered that it does not do now: at once, before the second writes the
#: layout, before it names it, or when it has named it.
LANDS = "at once", "PUT root/layouts/", "PUT root/manifests/", "named"
HASH = table_hash(b"layout")


def remove_layout(store: ObjectStore, lease: ObjectLease) -> None:
    """What the first does, as `holdfast prune`."""
    with contextlib.suppress(StorageError):
        store.remove(layout_path(HASH))
    lease.release()


def name_layout(store: ObjectStore, wait: Callable[[], None]) -> None:
    """What the second does, as a keeper: it looks at its layout with each publication while a
    request may land. It waits between the first and the second.
    """
    with store.lock("writer", "second") as lease:
        assert isinstance(lease, ObjectLease)
        write_layout(store, HASH, b"layout")
        publish(store, "3", layout_path(HASH))
        wait()
        if lease.unsettled_s:
            write_layout(store, HASH, b"layout")
        publish(store, "4", layout_path(HASH))


@dataclass
class LateServer:
    """A server that refuses to remove the layout, or answers that at a later try."""

    world: World
    answers: dict[threading.Thread, list[str]]
    announcement: str
    lands: str
    heir: threading.Thread

    def fault(self, kind: str, key: str) -> str:
        """Returns what happens to a request."""
        thread = threading.current_thread()
        if thread is self.heir and f"{kind} {key}".startswith(self.lands):
            self.world.land()
        if kind == "PUT" and "/.removals/" in key:
            answer, self.announcement = self.announcement, ""
            return answer
        if (kind, key) != ("DELETE", f"root/{layout_path(HASH)}"):
            return ""
        left = self.answers[thread]
        return left.pop(0) if len(left) > 1 else left[0]


def run_layout(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    answers: tuple[list[str], list[str], str],
    lands: str,
    first: int,
    second: int,
) -> tuple[World, bool, bool]:
    """The first does ``first`` requests and is stopped long, the second ``second`` until it has
    named the layout, the first the rest, then the second. A third and a fourth take the lock when
    the server lets all go. Returns what is there, and if the first and the second had more to do.
    """
    world = World()
    one = model_store(world, monkeypatch, tries_s=5.0, lease=TIMES)
    other = model_store(world, monkeypatch, tries_s=5.0, lease=TIMES)
    write_layout(one, HASH, b"layout")
    lease, has_named = one.lock("writer", "first"), threading.Event()
    assert isinstance(lease, ObjectLease)

    def wait() -> None:
        has_named.set()
        heir.wait_turn()

    def name(most: int) -> None:
        for _ in range(most):
            if not has_named.is_set():
                heir.step()

    def turn() -> None:
        actors[threading.current_thread()].wait_turn()
        if lands == "at once":
            world.land()

    zombie = Actor(lambda: remove_layout(one, lease))
    heir = Actor(lambda: name_layout(other, wait))
    actors = {zombie.thread: zombie, heir.thread: heir}
    said = {zombie.thread: list(answers[0]), heir.thread: list(answers[1])}
    server = LateServer(world, said, answers[2], lands, heir.thread)
    world.before, world.fault = turn, server.fault
    goes_on = [zombie.step() for _ in range(first + 1)][-1]
    clock.now_s += TIMES.take_over_s if goes_on else 0.0
    name(second + 1)
    has_more = not has_named.is_set()
    zombie.step_to_end()
    name(1000)
    world.land()
    heir.step_to_end()
    world.before, world.fault = lambda: None, lambda kind, key: ""
    assert heir.error is None and has_named.is_set(), heir.error
    for held in (lease, *other._held):
        held._ended.set()
    for owner in ("third", "fourth"):  # announcements that may land again were emptied for both
        model_store(world, monkeypatch, lease=TIMES).lock("writer", owner).release()
    return world, goes_on, has_more


def layout_orders(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> Iterator[tuple[tuple[object, ...], World]]:
    for answers, lands in itertools.product(ANSWERS, LANDS):
        first, goes_on = 0, True
        while goes_on:
            second, has_more = 0, True
            while has_more:
                world, goes_on, has_more = run_layout(
                    monkeypatch, clock, answers, lands, first, second
                )
                yield (answers, lands, first, second), world
                second, has_more = second + 1, has_more and goes_on
            first += 1


@pytest.mark.promise
def test_in_no_order_a_layout_is_lost_whose_removal_was_refused_or_answered_late(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    count = 0
    for order, world in layout_orders(monkeypatch, clock):
        count += 1
        assert "root/manifests/4" in world.objects and not broken(world, []), order
        assert not any("/.removals/" in key for key in world.objects), order
    print(f"{count} orders")
    assert count > 1000


@pytest.mark.promise
@pytest.mark.parametrize("rule", ["no longer announced", "expected late", "earlier holders"])
def test_without_any_one_of_the_rules_for_layouts_the_search_finds_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, rule: str
) -> None:
    if rule == "no longer announced":
        monkeypatch.setattr(Removals, "name_again", lambda self, path, leases: None)
    elif rule == "expected late":
        monkeypatch.setattr(objects, "named_again", lambda below, lock: ())
    else:
        own = property(lambda lease: lease.late_removals_s())
        monkeypatch.setattr(ObjectLease, "unsettled_s", own)
    assert any(broken(world, []) for _, world in layout_orders(monkeypatch, clock))


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
