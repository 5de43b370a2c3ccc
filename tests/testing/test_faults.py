from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.errors import AlreadyPublished, RootBusy, StorageError
from holdfast.storage import LocalStore, MemoryStore, Store
from holdfast.testing import FaultyStore, LateFsyncStore, SlowStore, Stopped
from holdfast.testing.faults import Mode, StaleListStore
from holdfast.testing.store_suite import StoreSuite


class TestFaultyStoreThatNeverFails(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return FaultyStore(MemoryStore())


class TestFastSlowStore(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return SlowStore(MemoryStore(), 1e15)


class TestPunctualStore(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return LateFsyncStore(MemoryStore(), lambda: None)


def work(store: Store) -> None:
    """A checkpoint in small: an image, the name that makes it count, and the end of an old one."""
    with store.lock("root", "worker"):
        sink = store.create("steps/2/image", 8)
        try:
            sink.write(0, memoryview(b"2222"))
            sink.write(4, memoryview(b"2222"))
            sink.finish()
            store.publish("manifests/2", b"2")
        except BaseException:
            sink.abort()
            raise
        store.remove("manifests/1")
        store.remove_tree("steps/1")


CHANGES = [
    ("create", "steps/2/image"),
    ("write", "steps/2/image"),
    ("write", "steps/2/image"),
    ("finish", "steps/2/image"),
    ("publish", "manifests/2"),
    ("remove", "manifests/1"),
    ("remove_tree", "steps/1"),
]


def prepared() -> MemoryStore:
    store = MemoryStore()
    store.publish("manifests/1", b"1")
    store.publish("steps/1/image", b"11111111")
    store.publish("steps/1/other", b"11111111")
    return store


def test_changes_are_counted_in_order() -> None:
    store = FaultyStore(prepared())
    work(store)
    assert store.changes == CHANGES
    assert not store.is_stopped


@pytest.mark.parametrize("mode", ["stop", "torn"])
@pytest.mark.parametrize("fail_at", range(1, len(CHANGES) + 1))
def test_the_old_or_the_new_checkpoint_is_whole_after_a_stop_at_any_change(
    fail_at: int, mode: Mode
) -> None:
    inner = prepared()
    store = FaultyStore(inner, fail_at=fail_at, mode=mode)
    with pytest.raises(Stopped, match=CHANGES[fail_at - 1][0]):
        work(store)
    assert store.is_stopped
    assert store.changes == CHANGES[:fail_at]
    newest = inner.list("manifests")[-1]
    assert inner.read(f"steps/{newest}/image") == newest.encode() * 8


def test_a_stop_makes_nothing_of_the_change_and_cleans_nothing_up() -> None:
    inner = prepared()
    with pytest.raises(Stopped):
        work(FaultyStore(inner, fail_at=3))
    assert inner.read("steps/2/image") == b"2222" + bytes(4)


def test_a_torn_write_makes_half_of_it() -> None:
    inner = prepared()
    with pytest.raises(Stopped):
        work(FaultyStore(inner, fail_at=3, mode="torn"))
    assert inner.read("steps/2/image") == b"222222" + bytes(2)


def test_a_torn_removal_of_a_tree_leaves_half_of_it() -> None:
    inner = prepared()
    with pytest.raises(Stopped):
        work(FaultyStore(inner, fail_at=7, mode="torn"))
    assert inner.list("steps/1") == ["other"]


def test_a_torn_creation_leaves_a_file_without_content() -> None:
    inner = prepared()
    with pytest.raises(Stopped):
        work(FaultyStore(inner, fail_at=1, mode="torn"))
    assert inner.read("steps/2/image") == bytes(8)


def test_a_torn_publication_leaves_nothing() -> None:
    inner = prepared()
    with pytest.raises(Stopped):
        work(FaultyStore(inner, fail_at=5, mode="torn"))
    assert inner.list("manifests") == ["1"]


def test_nothing_works_after_a_stop() -> None:
    store = FaultyStore(prepared(), fail_at=2)
    sink = store.create("image", 8)
    with pytest.raises(Stopped):
        store.remove("manifests/1")
    for call in (
        lambda: store.read("manifests/1"),
        lambda: store.read_into("manifests/1", 0, memoryview(bytearray(1))),
        lambda: store.size_bytes("manifests/1"),
        lambda: store.exists("manifests/1"),
        lambda: store.list(""),
        lambda: store.publish("name", b""),
        lambda: store.create("name", 1),
        lambda: store.remove("name"),
        lambda: store.remove_tree("name"),
        lambda: store.lock("root", "me"),
        lambda: sink.write(0, memoryview(b"x")),
        sink.finish,
    ):
        with pytest.raises(Stopped):
            call()
    assert len(store.changes) == 2


def test_a_stop_frees_the_locks_of_the_dead_and_no_others() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, fail_at=1)
    lock = store.lock("root", "the dead")
    with pytest.raises(Stopped):
        store.publish("name", b"")
    with inner.lock("root", "the living"):
        lock.release()
        with pytest.raises(RootBusy, match="the living"):
            inner.lock("root", "another")


@pytest.mark.parametrize("fail_at", range(1, len(CHANGES) + 1))
def test_an_error_happens_once_and_cleaning_up_works(fail_at: int) -> None:
    inner = prepared()
    store = FaultyStore(inner, fail_at=fail_at, mode="error")
    with pytest.raises(StorageError, match="ENOSPC") as caught:
        work(store)
    assert caught.value.retryable
    if fail_at <= 4:  # aborted; from then on the image is finished and stays
        assert not inner.exists("steps/2/image")
        work(store)
    assert inner.read("steps/2/image") == b"2" * 8


def test_a_stop_on_a_disk_leaves_no_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(5):
        with pytest.raises(Stopped):
            work(FaultyStore(LocalStore(tmp_path / str(turn)), fail_at=3, mode="torn"))
    assert len(os.listdir("/proc/self/fd")) <= before + 4


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, wait_s: float) -> None:
        self.now_s += wait_s


def test_a_slow_store_takes_the_time_its_bytes_need() -> None:
    clock = Clock()
    store = SlowStore(MemoryStore(), 1000, clock=clock, sleep=clock.sleep)
    sink = store.create("image", 3000)
    sink.write(0, memoryview(bytes(3000)))
    sink.finish()
    assert clock.now_s == pytest.approx(103)
    store.publish("name", bytes(500))
    assert clock.now_s == pytest.approx(103.5)
    store.read("image", 0, 1000)
    store.read_into("image", 0, memoryview(bytearray(1000)))
    assert clock.now_s == pytest.approx(105.5)


def test_threads_share_one_slow_disk() -> None:
    clock = Clock()
    waits: list[float] = []
    store = SlowStore(MemoryStore(), 1000, clock=clock, sleep=waits.append)
    for _ in range(3):  # none has slept yet when the next asks
        store.publish("name", bytes(1000), replace=True)
    assert waits == pytest.approx([1, 2, 3])


def test_nothing_is_durable_before_the_delay_is_over() -> None:
    inner = MemoryStore()
    reached, over = threading.Event(), threading.Event()

    def delay() -> None:
        reached.set()
        assert over.wait(timeout=30)

    store = LateFsyncStore(inner, delay)
    thread = threading.Thread(target=store.publish, args=("name", b"content"))
    thread.start()
    assert reached.wait(timeout=30)
    assert not inner.exists("name")
    over.set()
    thread.join(timeout=30)
    assert inner.exists("name")


def test_a_late_fsync_comes_after_the_writes_and_before_the_image_is_finished() -> None:
    acts: list[str] = []
    inner = FaultyStore(MemoryStore())
    store = LateFsyncStore(inner, lambda: acts.append(f"after {inner.changes[-1][0]}"))
    sink = store.create("image", 4)
    sink.write(0, memoryview(b"2222"))
    sink.finish()
    assert acts == ["after write"]
    assert inner.changes[-1] == ("finish", "image")


@pytest.mark.parametrize("mode", ["lost", "late", "twice"])
def test_an_answer_that_is_lost_or_late_or_given_twice(mode: Mode) -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, fail_at=2, mode=mode)
    store.publish("a", b"a")
    with pytest.raises(AlreadyPublished if mode == "twice" else StorageError):
        store.publish("b", b"b")
    assert inner.exists("b") == (mode != "late")
    store.publish("c", b"c")
    assert (inner.read("b"), inner.read("c")) == (b"b", b"c")


def test_a_late_change_lands_when_it_is_told_to_or_after_others() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, fail_at=1, mode="late", late_by=3)
    with pytest.raises(StorageError):
        store.remove("b")
    inner.publish("b", b"b")
    store.publish("c", b"c")
    store.publish("d", b"d")
    assert inner.exists("b")
    store.publish("e", b"e")
    assert not inner.exists("b")
    store = FaultyStore(inner, fail_at=1, mode="late", late_by=100)
    with pytest.raises(StorageError):
        store.publish("c", b"another")
    store.land()
    assert inner.read("c") == b"c", "what cannot be done any more is not done"


def test_a_late_write_has_the_bytes_that_it_was_given() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, fail_at=2, mode="late", late_by=100)
    sink, data = store.create("image", 3), bytearray(b"abc")
    with pytest.raises(StorageError):
        sink.write(0, memoryview(data))
    data[:] = b"xyz"
    store.land()
    assert inner.read("image") == b"abc"


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_stale_list_is_that_of_some_changes_ago(lag: int) -> None:
    store = StaleListStore(MemoryStore(), lag)
    for name in "abc":
        store.publish(f"d/{name}", b"")
    assert store.list("d") == ["a", "b", "c"][: 3 - lag]
    store.remove("d/a")
    assert store.list("d") == [["b", "c"], ["a", "b", "c"], ["a", "b"]][lag]
    assert not store.exists("d/a")
