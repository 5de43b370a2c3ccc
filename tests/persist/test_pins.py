"""Pins keep checkpoints, whoever prunes meanwhile and wherever either side is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from holdfast.catalogue import catalogue, manifest_path, pin_path
from holdfast.errors import HoldfastError, NotFound, RootBusy
from holdfast.format.manifest import Generation, Manifest, Pin, Root, seal, unseal
from holdfast.geometry.layout import Layout
from holdfast.persist import commit, pins
from holdfast.persist.pins import mend, pin, pinned, read_pins, unpin
from holdfast.restore.reading.verify import verify
from holdfast.storage.base import Store
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import FaultyStore, PassingStore, Stopped
from support.checkpoints.images import images_of, publish_checkpoint, random_leaf, split_leaf

LAYOUT = Layout(2, (split_leaf("w", "F32", (6, 2), 2),))
OLD, NEW = Generation(1, 10), Generation(1, 20)


def checkpoint(store: Store, generation: Generation) -> None:
    leaves = {"w": random_leaf("F32", (6, 2), generation.step)}
    attempt = f"a{generation.step}"
    images = images_of(LAYOUT, leaves, generation=generation, attempt=attempt)
    publish_checkpoint(store, LAYOUT, images, generation, attempt=attempt)


def run_root() -> MemoryStore:
    """Two checkpoints; retention wants the older one gone."""
    store = MemoryStore()
    checkpoint(store, OLD)
    checkpoint(store, NEW)
    return store


def stands(store: Store, generation: Generation = OLD) -> bool:
    """Whether the checkpoint is there, whole. A manifest over missing images fails the test."""
    manifest = catalogue(store).find(generation)
    if manifest is None:
        return False
    report = verify(store, manifest, deep=True)
    assert not report.faults
    return True


def prune(store: Store) -> None:
    """What a keeper does after each publication, and what a sweep twice over would do at once."""
    found = catalogue(store)
    if mend(store, found):
        found = catalogue(store)
    gone = {OLD} if found.find(OLD) and commit.withdraw(store, OLD) else set()
    for path in commit.unnamed_directories(
        store, [m for m in found.manifests if m.generation not in gone]
    ):
        store.remove_tree(path)


# ── one side runs between any two operations of the other ──────────────────────────────────────


class Interrupted(PassingStore):
    """Runs ``between`` just before the k-th operation, reads included; counts them all."""

    def __init__(self, inner: Store, k: int, between: Callable[[], None]) -> None:
        super().__init__(inner)
        self._k, self._between, self.operations = k, between, 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("read", "size_bytes", "exists", "list", "publish", "remove", "remove_tree"):
            self.operations += 1
            if self.operations == self._k:
                self._between()
        return super().__getattribute__(name)


def try_pin(store: Store) -> bool:
    try:
        pin(store, OLD)
    except NotFound:
        return False
    return True


@pytest.mark.promise
def test_a_pin_that_succeeds_at_any_moment_of_a_pruning_is_of_a_checkpoint_that_stays() -> None:
    told = []
    for k in range(1, 100):
        store, said = run_root(), list[bool]()
        between = Interrupted(store, k, lambda s=store, w=said: w.append(try_pin(s)))  # type: ignore[misc]
        prune(between)
        if not said:  # the pruning has fewer operations: every moment was tried
            break
        prune(store)
        assert stands(store) == said[0]
        assert (OLD in pinned(store)) == said[0]
        told.append(said[0])
    assert told[0] and not told[-1], "early pins succeed, late ones are refused"
    assert len(told) > 8


@pytest.mark.promise
def test_a_pruning_at_any_moment_of_a_pin_takes_no_checkpoint_that_was_pinned() -> None:
    told = []
    for k in range(1, 100):
        store = run_root()
        between = Interrupted(store, k, lambda s=store: prune(s))  # type: ignore[misc]
        said = try_pin(between)
        if between.operations < k:
            break
        prune(store)
        assert stands(store) == said
        assert (OLD in pinned(store)) == said
        told.append(said)
    assert not told[0] and told[-1]


def schedules(first: int, second: int) -> Iterator[str]:
    """Every order in which two threads of so many operations can take their turns."""
    if not first or not second:
        yield "p" * first + "r" * second
        return
    yield from ("p" + rest for rest in schedules(first - 1, second))
    yield from ("r" + rest for rest in schedules(first, second - 1))


class Turns(PassingStore):
    """Lets its thread do one operation for each turn that it is given."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._may, self._did = threading.Semaphore(0), threading.Semaphore(0)
        self._free = False

    def turn(self) -> None:
        """Wait until one more operation is done, or the thread has none left."""
        self._may.release()
        assert self._did.acquire(timeout=10)

    def run_free(self) -> None:
        """From now on wait for nobody."""
        self._free = True
        self._may.release()

    def end(self) -> None:
        """The thread is done: every turn it is still given is over at once."""
        for _ in range(100):
            self._did.release()

    @contextmanager
    def _one(self) -> Iterator[None]:
        if not self._free:
            assert self._may.acquire(timeout=10)
        try:
            yield
        finally:
            self._did.release()

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        with self._one():
            return super().read(path, offset_bytes, size_bytes)

    def exists(self, path: str) -> bool:
        with self._one():
            return super().exists(path)

    def list(self, prefix: str) -> list[str]:
        with self._one():
            return super().list(prefix)

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        with self._one():
            super().publish(path, data, replace=replace)

    def remove(self, path: str) -> None:
        with self._one():
            super().remove(path)


@pytest.mark.promise
def test_pin_and_pruner_in_every_order_of_their_operations_lose_no_pinned_checkpoint() -> None:
    outcomes = set()
    # withdraw: list, read, remove, list, publish. pin: read, publish, exists, remove.
    for schedule in schedules(4, 5):
        store, said = run_root(), list[bool]()
        pinner, pruner = Turns(store), Turns(store)

        def set_pin(by: Turns = pinner, into: list[bool] = said) -> None:
            into.append(try_pin(by))
            by.end()

        def take(by: Turns = pruner) -> None:
            commit.withdraw(by, OLD)
            by.end()

        threads = [threading.Thread(target=set_pin), threading.Thread(target=take)]
        for thread in threads:
            thread.start()
        for who in schedule:
            (pinner if who == "p" else pruner).turn()
        for turns, thread in zip((pinner, pruner), threads, strict=True):
            turns.run_free()
            thread.join(10)
            assert not thread.is_alive()
        assert stands(store) or not said[0], schedule
        assert (OLD in pinned(store)) == said[0], schedule
        outcomes.add((said[0], stands(store)))
    # The third: the pin was refused in the moment in which it brought the checkpoint back.
    assert outcomes == {(True, True), (False, False), (False, True)}


@pytest.mark.promise
def test_a_pin_of_the_moment_of_a_pruning_that_cannot_be_read_keeps_its_checkpoint_too() -> None:
    store = run_root()

    class Pinned(PassingStore):
        """A pin comes just before the manifest goes; its bytes are damaged."""

        def remove(self, path: str) -> None:
            pin(self.inner, OLD)
            self.inner.publish(pin_path(OLD), b"damaged", replace=True)
            super().remove(path)

    assert not commit.withdraw(Pinned(store), OLD)
    assert stands(store) and pinned(store) == {OLD}


def test_a_second_pin_in_the_moment_of_a_pruning_does_not_undo_the_first() -> None:
    """The pruner has removed the manifest and not yet looked again: a second pin is refused."""
    store = run_root()
    pin(store, OLD, "mine")
    data = store.read(manifest_path(OLD))

    class Withdrawn(PassingStore):
        """The manifest goes between the pin's first look and its second."""

        def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
            super().publish(path, data, replace=replace)
            self.inner.remove(manifest_path(OLD))

    pin(Withdrawn(store), OLD, "also mine")
    assert pinned(store) == {OLD}
    store.publish(manifest_path(OLD), data)
    assert read_pins(store)[OLD].note == "also mine"


# ── whoever is killed, wherever ────────────────────────────────────────────────────────────────


def test_a_pruner_killed_at_any_change_loses_no_pinned_checkpoint() -> None:
    killed_at = set()
    for k in range(1, 20):
        for moment in range(1, 12):  # the pin succeeds at some moment of the pruning, then a kill
            store, said = run_root(), list[bool]()
            faulty = FaultyStore(store, fail_at=k)
            between = Interrupted(faulty, moment, lambda s=store, w=said: w.append(try_pin(s)))  # type: ignore[misc]
            try:
                prune(between)
            except Stopped:
                killed_at.add(faulty.changes[-1])
            prune(store)  # the next keeper's
            if said and said[0]:
                assert stands(store), (k, moment)
    assert ("publish", manifest_path(OLD)) in killed_at, "between removal and publishing back"


def test_a_pin_killed_at_any_change_leaves_the_checkpoint_to_retention_or_kept() -> None:
    counted = FaultyStore(run_root())
    pin(counted, OLD)
    for k in range(1, len(counted.changes) + 1):
        store = run_root()
        with pytest.raises(Stopped):
            pin(FaultyStore(store, fail_at=k), OLD)
        assert stands(store)
        pin(store, OLD)  # its lock died with it
        prune(store)
        assert stands(store)


def test_what_is_missing_an_image_is_not_mended() -> None:
    store = run_root()
    pin(store, OLD)
    manifest = catalogue(store).find(OLD)
    assert manifest is not None
    store.remove(manifest_path(OLD))
    store.remove(manifest.images[1].path)
    assert not mend(store, catalogue(store))
    assert not stands(store)


def test_an_unreadable_manifest_is_not_mended_over() -> None:
    store = run_root()
    pin(store, OLD)
    store.publish(manifest_path(OLD), b"damaged", replace=True)
    assert not mend(store, catalogue(store))
    assert store.read(manifest_path(OLD)) == b"damaged"


# ── pins themselves ────────────────────────────────────────────────────────────────────────────


def test_a_pin_holds_the_manifest_byte_for_byte_and_the_note() -> None:
    store = run_root()
    pin(store, OLD, "the paper's figure 3")
    (one,) = read_pins(store).values()
    assert (one.generation, one.note, one.reason) == (OLD, "the paper's figure 3", "")
    assert one.pin is not None
    assert one.pin.manifest.encode() == store.read(manifest_path(OLD))
    assert unseal(Manifest, one.pin.manifest.encode(), "copy").generation == OLD
    assert one.pin.run_id == "r"


def test_a_damaged_pin_still_pins_and_says_why_it_cannot_be_read() -> None:
    store = run_root()
    pin(store, OLD)
    store.publish(pin_path(OLD), store.read(pin_path(OLD))[:-9], replace=True)
    assert pinned(store) == {OLD}
    assert not commit.withdraw(store, OLD)
    (one,) = read_pins(store).values()
    assert one.pin is None and "pins/1-10.json" in one.reason


def test_a_pin_that_speaks_of_another_checkpoint_pins_by_its_name_only() -> None:
    store = run_root()
    pin(store, NEW)
    store.publish(pin_path(OLD), store.read(pin_path(NEW)))
    assert pinned(store) == {OLD, NEW}
    assert read_pins(store)[OLD].pin is None
    assert read_pins(store)[OLD].reason == "it speaks of 1-20"
    store.remove(manifest_path(OLD))
    assert not mend(store, catalogue(store))


def test_files_of_other_names_pin_nothing() -> None:
    store = run_root()
    for name in ("notes.txt", "1-10", "1-10.json.bak", "-1-2.json"):
        store.publish(f"pins/{name}", b"")
    assert pinned(store) == frozenset()


def test_a_checkpoint_that_is_not_there_cannot_be_pinned() -> None:
    store = run_root()
    with pytest.raises(NotFound, match=r"no checkpoint 1-11 in memory://store"):
        pin(store, Generation(1, 11))
    assert store.list("pins") == []


def test_a_pinned_checkpoint_is_not_touched_at_all() -> None:
    store = run_root()
    pin(store, OLD)
    counted = FaultyStore(store)
    assert not commit.withdraw(counted, OLD)
    assert counted.changes == []


def test_an_unpinned_checkpoint_belongs_to_retention_again() -> None:
    store = run_root()
    pin(store, OLD)
    unpin(store, OLD)
    with pytest.raises(NotFound, match="1-10 in memory://store is not pinned"):
        unpin(store, OLD)
    assert commit.withdraw(store, OLD)


def test_pins_take_turns_and_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "_PATIENCE_S", 0.0)
    store = run_root()
    with store.lock("pins", "another"), pytest.raises(RootBusy, match="another"):
        pin(store, OLD)
    pin(store, OLD)


@pytest.mark.parametrize("copy", ["", "{}", None])
def test_a_pin_with_another_manifest_inside_mends_nothing(copy: str | None) -> None:
    store = run_root()
    other = store.read(manifest_path(NEW)).decode() if copy is None else copy
    made = msgspec.structs.replace(pin(store, OLD), manifest=other)
    store.publish(pin_path(OLD), seal(made), replace=True)
    store.remove(manifest_path(OLD))
    assert not mend(store, catalogue(store))


def test_another_document_is_no_pin() -> None:
    with pytest.raises(HoldfastError, match="not a valid pin"):
        unseal(Pin, seal(Root(run_id="r")), "pins/1-1.json")
