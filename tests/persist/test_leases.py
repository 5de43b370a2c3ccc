"""What a reader holds is not swept, whoever prunes meanwhile; and no lease outlives its reader."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import leases as leases_module
from holdfast.catalogue import (
    LEASES,
    LOCK,
    catalogue,
    layout_path,
    lease_path,
    manifest_path,
)
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.manifest import Generation, Lease, Manifest, seal, unseal
from holdfast.leases import LEASE_S, LONGEST_S, MAX_LEASES, LeaseWatch, ReadLease
from holdfast.persist import commit
from holdfast.persist.removal import plan, remove
from holdfast.policy.when import Keep
from holdfast.restore.reading.verify import verify
from holdfast.storage.base import Store
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import FaultyStore, PassingStore, Stopped
from support.checkpoints.roots import Clock, Retention, save, whole

OLD, NEW = Generation(1, 10), Generation(1, 20)
#: What a store does whose order matters, reads included.
OPERATIONS = ("read", "size_bytes", "exists", "list", "publish", "remove", "remove_tree")


def run_root() -> MemoryStore:
    """Two checkpoints; retention wants the older one gone."""
    store = MemoryStore()
    commit.open_root(store, "r")
    save(store, OLD)
    save(store, NEW)
    return store


def manifest_of(store: Store, generation: Generation = OLD) -> Manifest:
    found = catalogue(store).find(generation)
    assert found is not None
    return found


def is_readable(store: Store, manifest: Manifest) -> bool:
    return not verify(store, manifest, deep=True).faults


def prune(store: Store) -> None:
    """What a person does, who waits for no publication: images go at once."""
    remove(store, plan(store, Keep(last=1), abandoned=False))


def three_publications(store: Store) -> None:
    keeper = Retention(store)
    for _ in range(3):
        keeper.publication()


# ── one side runs between any two operations of the other, and in every order ──────────────────


class Interrupted(PassingStore):
    """Runs ``between`` just before the k-th operation, reads included; counts them all."""

    def __init__(self, inner: Store, k: int, between: Callable[[], None]) -> None:
        super().__init__(inner)
        self._k, self._between, self.operations = k, between, 0

    def __getattribute__(self, name: str) -> object:
        if name in OPERATIONS:
            self.operations += 1
            if self.operations == self._k:
                self._between()
        return super().__getattribute__(name)


class Reader:
    """A restore that has read the manifest, and takes its lease now."""

    def __init__(self, store: Store, by: Store | None = None) -> None:
        self.store, self.manifest = store, manifest_of(store)
        self.lease = ReadLease(by or store)
        self.is_held: bool | None = None

    def take(self) -> None:
        self.is_held = self.lease.take(self.manifest)

    def check(self) -> None:
        """Whatever comes after: what it was told that it holds is there."""
        if self.is_held:
            assert is_readable(self.store, self.manifest)
        self.lease.end()


@pytest.mark.promise
@pytest.mark.parametrize("removing", [three_publications, prune])
def test_a_lease_taken_at_any_moment_of_a_removal_holds_what_it_says_or_says_that_it_is_gone(
    removing: Callable[[Store], None],
) -> None:
    held = []
    for k in range(1, 200):
        store = run_root()
        reader = Reader(store)
        by = Interrupted(store, k, reader.take)
        removing(by)
        if by.operations < k:
            break
        if reader.is_held:
            removing(store)
            prune(store)
        held.append(reader.is_held)
        reader.check()
    assert held[0] and not held[-1] and len(held) > 12


@pytest.mark.promise
@pytest.mark.parametrize("removing", [three_publications, prune])
def test_a_removal_at_any_moment_of_taking_a_lease_never_takes_what_is_held(
    removing: Callable[[Store], None],
) -> None:
    held = []
    for k in range(1, 20):
        store = run_root()
        by = Interrupted(store, k, lambda s=store: removing(s))  # type: ignore[misc]
        reader = Reader(store, by)
        reader.take()
        if by.operations < k:
            break
        removing(store)
        held.append(reader.is_held)
        reader.check()
    assert held == [False, True], "before and after the lease is published"


def schedules(first: int, second: int) -> Iterator[str]:
    """Every order in which two threads of so many operations can take their turns."""
    if not first or not second:
        yield "r" * first + "k" * second
        return
    yield from ("r" + rest for rest in schedules(first - 1, second))
    yield from ("k" + rest for rest in schedules(first, second - 1))


class Turns(PassingStore):
    """Lets its thread do one operation for each turn that it is given."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._may, self._did = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = 0
        self.operations = 0

    def run(self, act: Callable[[], None]) -> threading.Thread:
        def begin() -> None:
            self._thread = threading.get_ident()
            act()
            self.end()

        thread = threading.Thread(target=begin)
        thread.start()
        return thread

    def turn(self) -> None:
        """Wait until one more operation is done, or the thread has none left."""
        self._may.release()
        assert self._did.acquire(timeout=10)

    def end(self) -> None:
        for _ in range(200):
            self._did.release()
            self._may.release()

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name not in OPERATIONS:
            return found

        def one(*arguments: object, **options: object) -> object:
            assert self._may.acquire(timeout=10)
            self.operations += 1
            try:
                return found(*arguments, **options)
            finally:
                self._did.release()

        return one


def test_reader_and_remover_in_every_order_of_their_operations_lose_nothing_that_is_read() -> None:
    """The remover from its look at the leases on, until the images are gone."""

    def remove_old(store: Store, manifest: Manifest) -> None:
        leases = LeaseWatch(store)
        if OLD not in leases.generations():  # list
            store.remove(manifest_path(OLD))
            held = leases.paths()  # list, and read when there is a lease
            for path in sorted(manifest.directories):
                if path not in held:
                    store.remove_tree(path)

    outcomes = set()
    for schedule in schedules(2, 6):  # publish, exists
        store = run_root()
        by_reader, by_keeper = Turns(store), Turns(store)
        reader, manifest = Reader(store, by_reader), manifest_of(store)
        threads = [
            by_reader.run(reader.take),
            by_keeper.run(lambda s=by_keeper, m=manifest: remove_old(s, m)),  # type: ignore[misc]
        ]
        for who in schedule:
            (by_reader if who == "r" else by_keeper).turn()
        for turns, thread in zip((by_reader, by_keeper), threads, strict=True):
            turns.end()
            thread.join(10)
            assert not thread.is_alive()
        is_there = is_readable(store, manifest)
        assert is_there or not reader.is_held, schedule
        outcomes.add((reader.is_held, is_there, store.exists(manifest_path(OLD))))
        store.remove_tree(LEASES)
        reader.check()
    # The third: the manifest went between the lease and the look at it; the images stayed.
    assert outcomes >= {(True, True, True), (False, False, False), (False, True, False)}


# ── a lease ends with its reader ───────────────────────────────────────────────────────────────


def test_what_is_read_stays_through_many_publications_and_goes_when_the_reader_has_done() -> None:
    store = run_root()
    clock = Clock()
    keeper, reader = Retention(store, clock), Reader(store)
    reader.take()
    for step in range(30, 80, 10):
        save(store, Generation(1, step))
        keeper.publication()
        clock.now_s += LEASE_S / 2
        reader.lease.renew()
    assert whole(store) == ["1-10", "1-70"]
    reader.check()
    assert store.list(LEASES) == []
    for _ in range(3):
        keeper.publication()
    assert whole(store) == ["1-70"]
    assert [name.rpartition("-")[0] for name in store.list("steps")] == ["1-70"]


def test_a_lease_that_is_not_renewed_is_over_after_two_minutes_of_the_watchers_own_clock() -> None:
    store, clock = run_root(), Clock()
    reader = Reader(store)
    reader.take()
    watch = LeaseWatch(store, clock)
    assert watch.generations() == {OLD}
    clock.now_s += LEASE_S - 1
    assert watch.generations() == {OLD}
    reader.lease.renew()
    clock.now_s += 1
    assert watch.generations() == {OLD}, "it was renewed"
    clock.now_s += LEASE_S
    assert watch.generations() == frozenset()
    assert store.list(LEASES) == [], "and is removed"
    reader.lease.renew()  # it was only stopped for long: it holds again what is left
    assert LeaseWatch(store).generations() == {OLD}
    reader.lease.end()


@pytest.mark.parametrize("created_s", [0.0, 4e9])
def test_the_clock_of_another_host_means_nothing(created_s: float) -> None:
    store, clock = run_root(), Clock()
    made = Lease(
        run_id="r",
        incarnation=1,
        step=10,
        directories=("steps/1-10-a1x10",),
        layout="0" * 32,
        created_s=created_s,
    )
    watch = LeaseWatch(store, clock)
    for renewals in range(5):
        store.publish(lease_path("a" * 32), seal(made_again(made, renewals)), replace=True)
        assert watch.paths() == {"steps/1-10-a1x10", layout_path("0" * 32)}
        clock.now_s += LEASE_S - 1
    clock.now_s += 2
    assert not watch.paths()


def made_again(lease: Lease, renewals: int) -> Lease:
    fields = {name: getattr(lease, name) for name in lease.__struct_fields__}
    return Lease(**fields | {"renewals": renewals})


def test_no_lease_holds_longer_than_a_day_however_often_it_is_renewed() -> None:
    store, clock = run_root(), Clock()
    reader, watch = Reader(store), LeaseWatch(store, clock)
    reader.take()
    held_s = 0.0
    while watch.generations() and held_s < 2 * LONGEST_S:
        reader.lease.renew()
        clock.now_s += LEASE_S / 2
        held_s += LEASE_S / 2
    assert LONGEST_S - LEASE_S <= held_s <= LONGEST_S + LEASE_S
    reader.lease.end()


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * 10_000, None])
def test_a_lease_that_cannot_be_read_holds_nothing_and_is_removed(content: bytes | None) -> None:
    store, clock = run_root(), Clock()
    reader = Reader(store)
    reader.take()
    (name,) = store.list(LEASES)
    damaged = store.read(f"{LEASES}/{name}")[:-9] if content is None else content
    store.publish(f"{LEASES}/{name}", damaged, replace=True)
    watch = LeaseWatch(store, clock)
    assert watch.held() == ()
    clock.now_s += LEASE_S
    assert watch.held() == ()
    assert store.list(LEASES) == []
    reader.lease.end()


def test_a_lease_that_cannot_be_read_once_holds_on() -> None:
    """On a network file system it may be replaced at the moment it is read."""
    store, clock = run_root(), Clock()
    reader = Reader(store)
    reader.take()
    (name,) = store.list(LEASES)
    watch = LeaseWatch(store, clock)
    (held,) = watch.held()
    store.publish(f"{LEASES}/{name}", b"", replace=True)
    assert watch.held() == (held,)
    clock.now_s += LEASE_S  # it never changed since: it is over
    assert watch.held() == ()
    reader.lease.end()


def test_files_of_other_names_hold_nothing_and_are_left_alone() -> None:
    store, clock = run_root(), Clock()
    reader = Reader(store)
    reader.take()
    (name,) = store.list(LEASES)
    data = store.read(f"{LEASES}/{name}")
    reader.lease.end()
    for other in ("notes.txt", "a.json", "A" * 32 + ".json", "a" * 33 + ".json"):
        store.publish(f"{LEASES}/{other}", data)
    watch = LeaseWatch(store, clock)
    assert watch.held() == ()
    clock.now_s += 2 * LEASE_S
    assert watch.held() == ()
    assert len(store.list(LEASES)) == 4


def test_of_very_many_leases_some_are_watched_and_none_is_too_many() -> None:
    store, clock = run_root(), Clock()
    for number in range(MAX_LEASES + 5):
        store.publish(lease_path(f"{number:032x}"), b"")
    watch = LeaseWatch(store, clock)
    for _ in range(4):
        watch.held()
        clock.now_s += LEASE_S
    assert store.list(LEASES) == []


def test_a_reader_killed_at_any_change_holds_nothing_for_ever() -> None:
    for k in (1, 2):
        store, clock = run_root(), Clock()
        lease = ReadLease(FaultyStore(store, fail_at=k))
        try:
            lease.take(manifest_of(store))
            lease.end()
        except Stopped:
            pass
        keeper = Retention(store, clock)
        for _ in range(4):
            keeper.publication()
            clock.now_s += LEASE_S
        assert whole(store) == ["1-20"]


def test_a_lease_moves_to_what_is_read_next_and_holds_only_that() -> None:
    store = run_root()
    lease = ReadLease(store)
    assert lease.take(manifest_of(store, NEW))
    assert lease.take(manifest_of(store, OLD))
    assert LeaseWatch(store).generations() == {OLD}
    assert len(store.list(LEASES)) == 1
    lease.end()
    lease.end()
    assert store.list(LEASES) == []


def test_the_lease_of_an_object_ends_with_it() -> None:
    class Owner:
        """Whatever reads."""

    store, owner = run_root(), Owner()
    lease = ReadLease(store)
    lease.take(manifest_of(store))
    lease.end_with(owner)
    del owner
    assert store.list(LEASES) == []


def test_a_reader_renews_its_lease_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "RENEW_S", 0.0)
    store, renewed = run_root(), threading.Event()

    class Hearing(PassingStore):
        def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
            super().publish(path, data, replace=replace)
            if unseal(Lease, data, path).renewals > 2:
                renewed.set()

    lease = ReadLease(Hearing(store))
    lease.take(manifest_of(store))
    assert renewed.wait(30)
    lease.end()
    assert store.list(LEASES) == [], "and never after it has ended"


# ── where no lease can be written ──────────────────────────────────────────────────────────────


class ReadOnly(PassingStore):
    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        raise StorageError(f"publish of {path} failed: read-only")


def test_a_root_that_takes_no_lease_is_read_without_one() -> None:
    store = run_root()
    lease = ReadLease(ReadOnly(store))
    assert lease.take(manifest_of(store))
    lease.end()
    store.remove(manifest_path(OLD))
    manifest = manifest_of(store, NEW)
    store.remove(manifest_path(NEW))
    assert not lease.take(manifest), "it has gone: list again"


def test_a_root_that_has_gone_is_not_made_again_by_a_renewal(tmp_path: Path) -> None:
    from holdfast.storage.local import LocalStore

    store = LocalStore(tmp_path / "root")
    commit.open_root(store, "r")
    save(store, OLD)
    lease = ReadLease(store)
    lease.take(manifest_of(store))
    (tmp_path / "root").rename(tmp_path / "moved")
    lease.renew()
    lease.end()
    assert not (tmp_path / "root").exists()


def test_a_lease_that_another_user_owns_is_not_removed_and_holds_nothing_when_it_is_over() -> None:
    class Theirs(PassingStore):
        def remove(self, path: str) -> None:
            if path.startswith(LEASES):
                raise StorageError(f"removal of {path} failed: permission denied")
            super().remove(path)

    store, clock = run_root(), Clock()
    reader = Reader(store)
    reader.take()
    keeper = Retention(Theirs(store), clock)
    for _ in range(5):
        keeper.publication()
        clock.now_s += LEASE_S
    assert whole(store) == ["1-20"]
    reader.lease.end()


# ── a person's prune ───────────────────────────────────────────────────────────────────────────


def test_a_prune_waits_to_see_which_readers_live() -> None:
    store, clock = run_root(), Clock()
    living, dead = Reader(store), ReadLease(store)
    living.take()
    dead.take(manifest_of(store, NEW))
    watch, slept = LeaseWatch(store, clock), []

    def sleep(pause_s: float) -> None:
        slept.append(pause_s)
        clock.now_s += 10
        if len(slept) == 2:
            living.lease.renew()

    watch.settle(sleep)
    assert len(slept) == LEASE_S / 10, "as long as a lease holds, for the one that says nothing"
    assert watch.generations() == {OLD}
    slept.clear()
    with store.lock(LOCK, "prune"):
        gone = remove(store, plan(store, Keep(last=1), abandoned=False, leases=watch), leases=watch)
    assert not gone
    assert whole(store) == ["1-10", "1-20"]
    living.lease.end()
    watch.settle(sleep)
    assert not slept, "nobody reads"
    remove(store, plan(store, Keep(last=1), abandoned=False, leases=watch), leases=watch)
    assert whole(store) == ["1-20"]
    dead.end()


def test_an_error_of_storage_at_the_end_is_no_error_of_the_reader() -> None:
    store = run_root()

    class Failing(PassingStore):
        def remove(self, path: str) -> None:
            raise HoldfastError("no")

    lease = ReadLease(Failing(store))
    lease.take(manifest_of(store))
    lease.end()
    assert len(store.list(LEASES)) == 1
