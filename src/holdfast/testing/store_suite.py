"""Tests the contract of a store: inherit ``StoreSuite`` and say how to make one.

    class TestMyStore(StoreSuite):
        def make_store(self, tmp_path):
            return MyStore(tmp_path)

This file is the executable form of ``holdfast.storage.base``; a store that passes it can hold
checkpoints.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import AlreadyPublished, NotFound, RootBusy, StorageError, UsageError
from holdfast.storage.base import Store

# Tests images that threads fill: the half of the suite about sinks.
#
# ``holdfast.testing.store_suite.StoreSuite`` inherits it; there is no need to use it by itself.


PAGE = 4096


def pattern(size_bytes: int, seed: int = 1) -> bytes:
    """Returns bytes in which no two pages are alike, so that a misplaced one shows."""
    unit = b"".join((index * 2654435761 + seed).to_bytes(8, "little") for index in range(2048))
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


def at_once(*calls: Callable[[], None]) -> list[BaseException | None]:
    """Starts all calls at the same moment; returns the exception of each."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        gate.wait(timeout=30)
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(run, call) for call in calls]
        return [future.exception(timeout=30) for future in futures]


class MakesStore:
    """Makes the stores under test."""

    def make_store(self, tmp_path: Path) -> Store:
        """Return an empty store."""
        raise NotImplementedError

    def same_store(self, store: Store) -> Store:
        """Return the same bytes as another process would see them, where there are other
        processes.
        """
        return store

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return self.make_store(tmp_path)


class ImageSuite(MakesStore):
    """The tests of ``create`` and of the sink it returns."""

    @pytest.mark.parametrize("size_bytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 40 * PAGE + 123])
    def test_threads_fill_an_image_in_any_order(self, store: Store, size_bytes: int) -> None:
        content = pattern(size_bytes)
        sink = store.create("steps/1/image", size_bytes)
        starts = range(0, size_bytes, 3 * PAGE)
        with ThreadPoolExecutor(4) as pool, memoryview(content) as view:
            for done in [
                pool.submit(sink.write, start, view[start : start + 3 * PAGE])
                for start in reversed(starts)
            ]:
                done.result(timeout=30)
        sink.finish()
        assert self.same_store(store).read("steps/1/image") == content
        assert store.size_bytes("steps/1/image") == size_bytes

    @pytest.mark.parametrize("chunk", [1000, PAGE, 3 * PAGE + 17])
    @pytest.mark.parametrize("shift", [0, 1, 512])
    def test_no_write_needs_to_be_aligned(self, store: Store, chunk: int, shift: int) -> None:
        size_bytes = 12 * PAGE + 77
        content = pattern(size_bytes)
        with mmap.mmap(-1, shift + size_bytes) as memory:
            memory[shift:] = content
            sink = store.create("image", size_bytes)
            with memoryview(memory) as view, view[shift:] as source:
                for start in range(0, size_bytes, chunk):
                    with source[start : start + chunk] as part:
                        sink.write(start, part)
            sink.finish()
        assert store.read("image") == content

    def test_read_only_memory_and_memory_of_any_shape_is_written(self, store: Store) -> None:
        content = pattern(4 * PAGE)
        sink = store.create("image", 2 * len(content))
        sink.write(0, memoryview(content).toreadonly())
        sink.write(len(content), memoryview(content).cast("i", shape=[2, len(content) // 8]))
        sink.write(0, memoryview(b""))
        sink.finish()
        assert store.read("image") == content * 2

    def test_an_image_with_a_hole_is_not_finished(self, store: Store) -> None:
        sink = store.create("image", 3 * PAGE)
        sink.write(0, memoryview(pattern(PAGE)))
        sink.write(2 * PAGE, memoryview(pattern(PAGE)))
        with pytest.raises(UsageError, match=f"byte {PAGE} was never written"):
            sink.finish()
        sink.write(PAGE, memoryview(pattern(PAGE)))
        sink.finish()
        assert store.read("image") == pattern(PAGE) * 3

    def test_a_write_past_the_end_is_refused_and_harms_nothing(self, store: Store) -> None:
        sink = store.create("image", 10)
        for offset in (-1, 1, 10):
            with pytest.raises(UsageError):
                sink.write(offset, memoryview(b"0123456789"))
        sink.write(0, memoryview(b"0123456789"))
        sink.finish()
        assert store.read("image") == b"0123456789"

    def test_an_image_that_has_ended_is_not_touched_again(self, store: Store) -> None:
        sink = store.create("image", 10)
        sink.write(0, memoryview(b"0123456789"))
        sink.finish()
        with pytest.raises(UsageError, match="finished"):
            sink.write(0, memoryview(b"x"))
        with pytest.raises(UsageError, match="finished"):
            sink.finish()
        sink.abort()
        assert store.read("image") == b"0123456789"

    def test_an_image_does_not_take_a_published_name(self, store: Store) -> None:
        store.publish("name", b"content")
        with pytest.raises(AlreadyPublished, match="name"):
            store.create("name", 10)
        assert store.read("name") == b"content"

    def test_a_finished_image_keeps_its_name(self, store: Store) -> None:
        sink = store.create("image", 1)
        sink.write(0, memoryview(b"x"))
        sink.finish()
        with pytest.raises(AlreadyPublished, match="image"):
            store.create("image", 10)
        with pytest.raises(AlreadyPublished, match="image"):
            store.publish("image", b"content")
        assert store.read("image") == b"x"

    def test_what_an_image_replaces_is_there_until_it_is_durable_and_aside_then(
        self, store: Store
    ) -> None:
        store.publish("steps/1/image", b"old")
        sink = store.create("steps/1/image", 3 * PAGE, aside="aside/steps/1/image")
        sink.write(0, memoryview(pattern(3 * PAGE)))
        assert store.read("steps/1/image") == b"old"
        sink.finish()
        assert self.same_store(store).read("steps/1/image") == pattern(3 * PAGE)
        assert store.read("aside/steps/1/image") == b"old"
        assert store.list("aside/steps/1") == ["image"]
        with pytest.raises(AlreadyPublished, match="aside"):
            store.create("steps/1/image", 1, aside="aside/steps/1/image")

    def test_an_image_that_was_to_replace_one_is_given_up_without_a_trace(
        self, store: Store
    ) -> None:
        store.publish("image", b"old")
        sink = store.create("image", 10, aside="aside/image")
        sink.write(0, memoryview(b"01234"))
        with pytest.raises(UsageError):
            sink.finish()
        sink.abort()
        assert store.read("image") == b"old"
        assert "image.new" not in store.list("aside")

    def test_an_image_takes_the_place_of_none(self, store: Store) -> None:
        sink = store.create("steps/1/image", 1, aside="aside/image")
        sink.write(0, memoryview(b"x"))
        sink.finish()
        assert store.read("steps/1/image") == b"x"
        assert store.list("aside") == []

    def test_an_aborted_image_leaves_nothing(self, store: Store) -> None:
        sink = store.create("steps/1/image", 10)
        sink.write(0, memoryview(b"01234"))
        sink.abort()
        sink.abort()
        assert store.list("steps/1") == []
        with pytest.raises(UsageError, match="aborted"):
            sink.write(5, memoryview(b"56789"))
        again = store.create("steps/1/image", 1)
        sink.abort()
        again.write(0, memoryview(b"x"))
        again.finish()
        assert store.read("steps/1/image") == b"x"

    def test_an_image_can_be_aborted_while_it_is_written(self, store: Store) -> None:
        for turn in range(10):
            sink = store.create(f"image-{turn}", 1 << 20)
            data = memoryview(pattern(1 << 18))

            def write(
                sink_write: Callable[[int, memoryview], None] = sink.write, data: memoryview = data
            ) -> None:
                for start in range(0, 1 << 20, len(data)):
                    sink_write(start, data)

            raised = at_once(write, write, sink.abort)
            assert raised[2] is None
            assert all(error is None or isinstance(error, UsageError) for error in raised), raised
            assert not store.exists(f"image-{turn}")

    def test_an_impossible_size_is_refused(self, store: Store) -> None:
        with pytest.raises(UsageError):
            store.create("image", -1)
        assert not store.exists("image")


class StoreSuite(ImageSuite):
    """Inherit this in a class whose name begins with Test, and override ``make_store``."""

    # Published names.

    def test_what_is_published_reads_back(self, store: Store) -> None:
        store.publish("manifests/1-20.json", b"content")
        assert self.same_store(store).read("manifests/1-20.json") == b"content"
        assert store.size_bytes("manifests/1-20.json") == 7
        assert store.exists("manifests/1-20.json")

    def test_an_empty_file_is_a_file(self, store: Store) -> None:
        store.publish("empty", b"")
        assert store.read("empty") == b""
        assert store.exists("empty")
        assert store.size_bytes("empty") == 0

    def test_a_taken_name_is_refused_and_keeps_its_content(self, store: Store) -> None:
        store.publish("a/name", b"first")
        with pytest.raises(AlreadyPublished, match="a/name"):
            store.publish("a/name", b"second")
        assert store.read("a/name") == b"first"
        assert store.list("a") == ["name"]

    def test_replacing_changes_the_whole_content(self, store: Store) -> None:
        store.publish("a/name", b"a long first content", replace=True)
        store.publish("a/name", b"second", replace=True)
        assert store.read("a/name") == b"second"
        assert store.list("a") == ["name"]

    def test_of_racing_publishers_exactly_one_wins(self, store: Store) -> None:
        for turn in range(20):
            path = f"turn-{turn}/name"
            contents = [pattern(3000, seed) for seed in range(4)]
            others = [self.same_store(store) for _ in contents]

            def publish(writer: Store, content: bytes, path: str = path) -> Callable[[], None]:
                return lambda: writer.publish(path, content)

            raised = at_once(*map(publish, others, contents))
            winners = [index for index, error in enumerate(raised) if error is None]
            assert len(winners) == 1, raised
            assert sum(isinstance(error, AlreadyPublished) for error in raised) == 3, raised
            assert store.read(path) == contents[winners[0]]

    def test_a_reader_sees_the_old_or_the_new_content_while_it_is_replaced(
        self, store: Store
    ) -> None:
        contents = [pattern(50_000, seed) for seed in range(2)]
        store.publish("name", contents[0])
        seen: list[bytes] = []

        def replace() -> None:
            for turn in range(30):
                store.publish("name", contents[turn % 2], replace=True)

        def read() -> None:
            reader = self.same_store(store)
            seen.extend(reader.read("name") for _ in range(60))

        assert at_once(replace, read) == [None, None]
        assert set(seen) <= set(contents)

    def test_a_file_is_not_a_directory(self, store: Store) -> None:
        store.publish("name", b"content")
        with pytest.raises(StorageError):
            store.publish("name/below", b"content")
        with pytest.raises(StorageError):
            store.create("name/below", 10)
        assert store.list("name") == []
        assert not store.exists("name/below")

    # Reading.

    def test_ranges_are_read_exactly(self, store: Store) -> None:
        content = pattern(10_000)
        store.publish("name", content)
        assert store.read("name", 4000) == content[4000:]
        assert store.read("name", 4000, 1000) == content[4000:5000]
        assert store.read("name", 10_000, 0) == b""
        buffer = bytearray(1000)
        store.read_into("name", 9000, memoryview(buffer))
        assert buffer == content[9000:]
        store.read_into("name", 0, memoryview(b""))

    @pytest.mark.parametrize("shift", [0, 1, 512])
    @pytest.mark.parametrize("offset_bytes", [0, 1, 4096, 70_000])
    def test_large_ranges_are_read_exactly_into_memory_however_it_is_aligned(
        self, store: Store, offset_bytes: int, shift: int
    ) -> None:
        content = pattern((1 << 20) + 777)
        store.publish("name", content)
        for stop in (1 << 20, len(content)):
            size_bytes = stop - offset_bytes
            memory = mmap.mmap(-1, shift + size_bytes + 1)
            with memoryview(memory) as view, view[shift : shift + size_bytes] as into:
                self.same_store(store).read_into("name", offset_bytes, into)
            assert memory[:shift] == bytes(shift)
            assert memory[shift : shift + size_bytes] == content[offset_bytes:stop]
            assert memory[-1:] == b"\0"  # nothing behind it was touched
            memory.close()

    def test_memory_of_any_shape_is_filled(self, store: Store) -> None:
        content = pattern(48)
        store.publish("name", content)
        buffer = bytearray(48)
        store.read_into("name", 0, memoryview(buffer).cast("i", shape=[3, 4]))
        assert buffer == content

    def test_a_range_past_the_end_is_an_error_and_not_less(self, store: Store) -> None:
        store.publish("name", b"0123456789")
        with pytest.raises(StorageError, match="ends at byte 10"):
            store.read("name", 5, 6)
        with pytest.raises(StorageError, match="ends at byte 10"):
            store.read("name", 11)
        with pytest.raises(StorageError, match="ends at byte 10"):
            store.read_into("name", 5, memoryview(bytearray(6)))
        with pytest.raises(StorageError):  # before memory is taken for it
            store.read("name", 0, 1 << 60)

    def test_a_range_that_cannot_be_is_refused(self, store: Store) -> None:
        store.publish("name", b"0123456789")
        with pytest.raises(UsageError):
            store.read("name", -1)
        with pytest.raises(UsageError):
            store.read("name", 0, -1)
        with pytest.raises(UsageError):
            store.read_into("name", -1, memoryview(bytearray(1)))

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        store.publish("a/name", b"content")
        for path in ("none", "a", "a/none", "none/none", "a/name/none"):
            assert not store.exists(path)
            with pytest.raises(NotFound, match=path):
                store.read(path)
            with pytest.raises(NotFound, match=path):
                store.read_into(path, 0, memoryview(bytearray(1)))
            with pytest.raises(NotFound, match=path):
                store.size_bytes(path)

    # Listing and removing.

    def test_a_list_names_what_lies_directly_below_in_order(self, store: Store) -> None:
        for path in ("b", "a/2", "a/10", "a/c/deep", "a/c/deeper", "ab/other"):
            store.publish(path, b"")
        assert store.list("") == ["a", "ab", "b"]
        assert store.list("a") == ["10", "2", "c"]
        assert store.list("a/c") == ["deep", "deeper"]

    def test_a_list_of_nothing_is_empty(self, store: Store) -> None:
        assert store.list("") == []
        assert store.list("none") == []
        assert store.list("none/none") == []

    def test_what_is_removed_is_gone_and_what_is_missing_is_fine(self, store: Store) -> None:
        store.publish("a/name", b"content")
        store.publish("a/other", b"content")
        store.remove("a/name")
        store.remove("a/name")
        store.remove("none/none")
        assert store.list("a") == ["other"]
        store.publish("a/name", b"again")
        assert store.read("a/name") == b"again"

    def test_a_removed_tree_takes_no_neighbour_with_it(self, store: Store) -> None:
        for path in ("steps/1-2/a", "steps/1-2/b/c", "steps/1-20/a", "steps/1"):
            store.publish(path, b"content")
        store.remove_tree("steps/1-2")
        store.remove_tree("steps/1-2")
        store.remove_tree("none")
        assert store.list("steps") == ["1", "1-20"]
        store.publish("steps/1-2/a", b"again")
        assert store.list("steps/1-2") == ["a"]

    def test_the_root_is_never_removed(self, store: Store) -> None:
        store.publish("name", b"content")
        with pytest.raises(UsageError):
            store.remove_tree("")
        assert store.exists("name")

    @pytest.mark.parametrize(
        "path", ["", "/etc/x", "../x", "a/../x", "a/./x", "a//x", "a/", "a/.x", "a\0b"]
    )
    def test_a_path_out_of_the_store_is_refused(self, store: Store, path: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.read(path),
            lambda: store.read_into(path, 0, memoryview(b"")),
            lambda: store.size_bytes(path),
            lambda: store.exists(path),
            lambda: store.publish(path, b""),
            lambda: store.create(path, 1),
            lambda: store.remove(path),
            lambda: store.remove_tree(path),
            lambda: store.lock(path, "me"),
        ]
        for call in calls:
            with pytest.raises(UsageError):
                call()
        if path:
            with pytest.raises(UsageError):
                store.list(path)

    # Locks.

    def test_a_held_lock_is_refused_by_the_name_of_its_holder(self, store: Store) -> None:
        with store.lock("root", "run blue on host-1 (pid 7)"):
            with pytest.raises(RootBusy, match=r"run blue on host-1 \(pid 7\)") as caught:
                self.same_store(store).lock("root", "run green")
            assert caught.value.fields["owner"] == "run blue on host-1 (pid 7)"
            self.same_store(store).lock("another", "run green").release()
        self.same_store(store).lock("root", "run green").release()

    def test_a_lock_released_twice_does_not_free_the_next_holder(self, store: Store) -> None:
        first = store.lock("root", "first")
        first.release()
        with self.same_store(store).lock("root", "second"):
            first.release()
            with pytest.raises(RootBusy, match="second"):
                store.lock("root", "third")

    def test_of_racing_lockers_exactly_one_wins(self, store: Store) -> None:
        held = []

        def take(taker: Store) -> Callable[[], None]:
            return lambda: held.append(taker.lock("root", "me"))

        raised = at_once(*(take(self.same_store(store)) for _ in range(4)))
        assert len(held) == 1
        assert sum(isinstance(error, RootBusy) for error in raised) == 3, raised
        held[0].release()

    def test_a_lock_is_not_listed_and_takes_no_name(self, store: Store) -> None:
        with store.lock("root", "me"):
            assert store.list("") == []
            store.publish("root", b"content")
        assert store.read("root") == b"content"

    # Which root it is.

    def test_the_same_root_has_one_identity_and_keeps_it(self, store: Store) -> None:
        with pytest.raises(NotFound, match=r"holdfast\.json"):
            store.identity()
        store.publish("holdfast.json", b"{}")
        identity = store.identity()
        assert identity.isprintable() and 0 < len(identity) < 1024
        store.publish("manifests/1-20.json", b"content")
        store.remove_tree("manifests")
        with store.lock("root", "me"):
            assert self.same_store(store).identity() == identity == store.identity()

    def test_another_root_has_another_identity_whatever_is_in_it(
        self, store: Store, tmp_path: Path
    ) -> None:
        (tmp_path / "another").mkdir()
        other = self.make_store(tmp_path / "another")
        for each in (store, other):
            each.publish("holdfast.json", b"{}")
        assert store.identity() != other.identity()

    def test_a_store_says_where_it_is(self, store: Store) -> None:
        assert "://" in store.url
