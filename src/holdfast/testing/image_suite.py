"""What every store must do with images that threads fill: the half of the suite about sinks.

``holdfast.testing.store_suite.StoreSuite`` inherits it; there is no need to use it by itself.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import AlreadyPublished, UsageError
from holdfast.storage.base import Store

PAGE = 4096


def pattern(size_bytes: int, seed: int = 1) -> bytes:
    """Bytes in which no two pages are alike, so that a misplaced one shows."""
    unit = b"".join((index * 2654435761 + seed).to_bytes(8, "little") for index in range(2048))
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


def at_once(*calls: Callable[[], None]) -> list[BaseException | None]:
    """Start all calls at the same moment; what each raised."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        gate.wait(timeout=30)
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(run, call) for call in calls]
        return [future.exception(timeout=30) for future in futures]


class MakesStore:
    """Where the tests get their store from."""

    def make_store(self, tmp_path: Path) -> Store:
        """An empty store."""
        raise NotImplementedError

    def same_store(self, store: Store) -> Store:
        """The same bytes as another process would see them, where there are other processes."""
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

            def write(sink_write: Callable[[int, memoryview], None] = sink.write,
                      data: memoryview = data) -> None:  # fmt: skip
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
