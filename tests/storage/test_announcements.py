"""What a holder of a bucket's lock announced and may land again is carried out by no later one.

The server is a model: a request may be refused, or have its effect late, behind what was named
since.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.catalogue import layout_path, manifest_path
from holdfast.errors import NotFound, StorageError
from holdfast.format.manifest import Generation, Incarnation
from holdfast.geometry.layout import Layout, table_hash
from holdfast.keeper.persister import Persister
from holdfast.persist import commit, pins
from holdfast.persist.commit import write_layout
from holdfast.policy.when import Keep
from holdfast.storage.base import settle_s
from holdfast.storage.bucket import Outcome
from holdfast.storage.objects import ObjectStore
from support.checkpoints.images import split_leaf
from support.runs.keeper_jobs import job_of
from support.servers.bucket_model import World, model_store

RECORD = Incarnation(run_id="r", n=1, nonce="n", parent=None, world=2, created_s=1.0)
SPLIT = Layout(2, (split_leaf("w", "F32", (6, 2), 2),))
LAYOUT = layout_path(table_hash(b"layout"))
#: For how long requests are tried again.
TRIES_S = 0.3


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def opened(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ObjectStore]:
    """Opens the model as another process does."""
    return lambda: model_store(world, monkeypatch, tries_s=TRIES_S)


def answer(world: World, **answers: list[str]) -> None:
    """Has requests of a method to what has this in its name be answered so, the last for ever."""
    left = {tuple(name.split("_", 1)): list(said) for name, said in answers.items()}

    def fault(kind: str, key: str) -> str:
        for (method, part), said in left.items():
            if kind == method and part in key:
                return said.pop(0) if len(said) > 1 else said[0]
        return ""

    world.fault = fault


def write(store: ObjectStore) -> None:
    write_layout(store, LAYOUT.removeprefix("layouts/").removesuffix(".json"), b"layout")


def removed(store: ObjectStore) -> None:
    with contextlib.suppress(StorageError):
        store.remove(LAYOUT)


def land_backwards(world: World) -> None:
    late, world.late = world.late, []
    for request in reversed(late):
        request()


def take_last(world: World, opened: Callable[[], ObjectStore]) -> None:
    """Has another take the lock when the server lets all go: it carries out what it finds."""
    answer(world)
    opened().lock("writer", "whoever is last").release()


def refuse_late(world: World, opened: Callable[[], ObjectStore]) -> None:
    """Has a first holder announce the layout's removal, which is refused; the announcement was made
    at its second try, and the first may land.
    """
    write(opened())
    first = opened()
    lease = first.lock("writer", "first")
    answer(world, PUT_removals=["late", ""], DELETE_layouts=["403"])
    removed(first)
    lease.release()


@pytest.mark.promise
def test_an_announcement_of_another_that_cannot_be_emptied_is_removed_with_each_publication(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    refuse_late(world, opened)
    second = opened()
    lease = second.lock("writer", "second")
    answer(world, PUT_removals=["503"])
    write(second)
    world.land()
    answer(world)
    second.publish("manifests/1", b"")
    assert not any("/.removals/" in key for key in world.objects)
    lease.release()
    take_last(world, opened)
    assert f"root/{LAYOUT}" in world.objects


@pytest.mark.promise
def test_an_announcement_whose_removal_may_land_is_emptied_again_with_each_publication(
    world: World, opened: Callable[[], ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.storage.removals._PAUSE_S", 0.0)
    write(opened())
    store = opened()
    lease = store.lock("writer", "first")
    answer(world, PUT_removals=["late", "", "503"], DELETE_removals=["late", ""])
    removed(store)
    answer(world)
    write(store)
    land_backwards(world)
    store.publish("manifests/1", b"")
    lease.release()
    take_last(world, opened)
    assert f"root/{LAYOUT}" in world.objects


@pytest.mark.promise
def test_what_the_next_holder_named_again_is_removed_by_none_though_it_is_announced_anew(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    """Its own removal of the announcement lands, then the first try of that."""
    refuse_late(world, opened)
    second = opened()
    answer(world, DELETE_removals=["late", "503"])
    with pytest.raises(StorageError):
        second.lock("writer", "second")
    answer(world, DELETE_layouts=["403"])
    lease = second.lock("writer", "second")
    write(second)
    second.publish("manifests/1", b"")
    land_backwards(world)
    assert any(LAYOUT.encode() in data for key, data in world.objects.items() if ".rem" in key)
    lease.release()
    take_last(world, opened)
    assert f"root/{LAYOUT}" in world.objects


@pytest.mark.promise
def test_what_is_refused_while_another_lock_is_taken_is_not_forgotten(
    world: World, opened: Callable[[], ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads of one holder one takes the lock of the pins."""
    write(opened())
    store = opened()
    lease = store.lock("writer", "first")
    answer(world, DELETE_layouts=["403"])

    class Switch(dict[str, tuple[str, ...]]):
        """Has another thread run where this one looks through it."""

        def __iter__(self) -> Iterator[str]:
            found = list(super().keys())
            if not self:
                thread = threading.Thread(target=removed, args=(store,))
                thread.start()
                thread.join(30)
            return iter(found)

        def items(self) -> object:  # type: ignore[override]
            return [(key, self[key]) for key in self]

    monkeypatch.setattr(store._removals, "_refused", Switch())
    store.lock("pins", "who copies pins").release()
    assert store._removals.refused == {LAYOUT}
    write(store)
    lease.release()
    take_last(world, opened)
    assert f"root/{LAYOUT}" in world.objects


def test_a_server_that_takes_no_announcement_is_asked_once_in_a_while_and_not_by_each_save(
    world: World, opened: Callable[[], ObjectStore]
) -> None:
    write(opened())
    store = opened()
    lease = store.lock("writer", "first")
    answer(world, PUT_removals=["late", "", "503"])
    removed(store)
    tries = len([kind for kind, key in world.log if kind == "PUT" and "/.removals/" in key])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: store.publish(f"manifests/{n}", b""), range(8)))
    after = [kind for kind, key in world.log if kind == "PUT" and "/.removals/" in key]
    assert tries > 2 and len(after) == tries
    lease.release()


def refuse_bulk(world: World, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Has the server refuse each removal, whatever is asked for, while the list says True."""
    is_refused, plain = [True], World.answer

    def answered(self: World, method: str, key: str, query: object, *rest: object) -> Outcome:
        if method == "POST" and is_refused[0] and "delete" in query:  # type: ignore[operator]
            data = bytes(rest[-1])  # type: ignore[call-overload]
            named = [one.partition(b"</Key>")[0] for one in data.split(b"<Key>")[1:]]
            said = b"".join(
                b"<Error><Key>" + one + b"</Key><Code>AccessDenied</Code></Error>" for one in named
            )
            return Outcome(200, body=b"<DeleteResult>" + said + b"</DeleteResult>")
        return plain(self, method, key, query, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(World, "answer", answered)
    world.fault = lambda kind, key: (
        "403" if is_refused[0] and kind == "DELETE" and ".removals" not in key else ""
    )
    return is_refused


@pytest.mark.promise
def test_images_of_a_checkpoint_stay_for_as_long_as_the_server_keeps_its_manifest(
    world: World, opened: Callable[[], ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others see the manifest, and may pin it."""
    store, now_s, reasons = opened(), [0.0], list[str | None]()
    commit.open_root(store, "r")
    is_refused = refuse_bulk(world, monkeypatch)
    with store.lock("writer", "first"):
        persister = Persister(store, Keep(last=1), lambda _, reason: reasons.append(reason))
        persister._sweeper.clock = lambda: now_s[0]
        for step in range(5):
            persister.work_one(job_of(Generation(1, step), RECORD, layout=SPLIT))
            now_s[0] += settle_s(store)
        persister.stop()
    assert reasons == [None] * 5
    oldest = Generation(1, 0)
    pins.pin(opened(), oldest)
    is_refused[0] = False
    opened().lock("writer", "second").release()
    assert f"root/{manifest_path(oldest)}" in world.objects
    assert any(key.startswith("root/steps/1-0") for key in world.objects)


@pytest.mark.promise
def test_what_is_below_a_directory_that_was_refused_counts_as_gone(
    world: World, opened: Callable[[], ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a frozen part there is named again, which the next holder removes."""
    store = opened()
    store.publish("parts/1-1-a/frozen", b"frozen")
    refuse_bulk(world, monkeypatch)
    with store.lock("writer", "first"):
        with pytest.raises(StorageError):
            store.remove_tree("parts/1-1-a")
        with pytest.raises(NotFound, match="is to be removed"):
            store.size_bytes("parts/1-1-a/frozen")
    assert opened().size_bytes("parts/1-1-a/frozen") == 6
