"""What reaches the operating system, and in which order, when LocalStore makes bytes durable."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import AlreadyPublished, StorageError
from holdfast.storage import LocalStore, files
from holdfast.storage.base import Store, publish_transient, remove_transient
from holdfast.storage.memory import MemoryStore
from holdfast.storage.tiered import TieredStore
from holdfast.testing.store_suite import PAGE, pattern


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _takes_direct_io(directory: Path) -> bool:
    probe = directory / "probe"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        with mmap.mmap(-1, PAGE) as page:
            os.pwritev(descriptor, [page], 0)
        os.close(descriptor)
    except OSError:
        return False
    return True


class Spy:
    """Records what reaches the operating system, by file name, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.acts: list[tuple[str, str]] = []
        self.direct_bytes = 0
        self.buffered_bytes = 0
        self._root = root
        fsync, pwritev = os.fsync, os.pwritev

        def spied_fsync(descriptor: int) -> None:
            self._note("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        def spied_pwritev(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            count = pwritev(descriptor, buffers, offset)
            if _is_direct(descriptor):
                self.direct_bytes += count
            else:
                self.buffered_bytes += count
            self._note("write", os.readlink(f"/proc/self/fd/{descriptor}"))
            return count

        monkeypatch.setattr(os, "fsync", spied_fsync)
        monkeypatch.setattr(os, "pwritev", spied_pwritev)
        for name in ("mkdir", "link", "replace", "unlink"):
            self._spy(monkeypatch, name)

    def _spy(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        plainly = getattr(os, name)

        def spied(*arguments: str) -> None:
            plainly(*arguments)
            self._note(name, arguments[-1])

        monkeypatch.setattr(os, name, spied)

    def _note(self, act: str, path: str) -> None:
        name = os.path.relpath(path, self._root)
        parts = ["<temporary>" if part.startswith(".publish") else part for part in name.split("/")]
        self.acts.append((act, "/".join(parts)))


class TestOrder:
    """A loss of power after any of these acts leaves the whole file or no name."""

    @pytest.mark.promise
    def test_a_name_is_linked_after_its_content_is_durable_and_before_its_directory_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path)
        spy = Spy(monkeypatch, tmp_path)
        store.publish("manifests/1-20.json", b"content")
        assert spy.acts == [
            ("mkdir", "manifests"),
            ("fsync", "."),
            ("write", "manifests/<temporary>"),
            ("fsync", "manifests/<temporary>"),
            ("link", "manifests/1-20.json"),
            ("unlink", "manifests/<temporary>"),
            ("fsync", "manifests"),
        ]

    @pytest.mark.parametrize("is_tiered", [False, True])
    def test_what_a_living_process_says_of_itself_waits_for_no_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_tiered: bool
    ) -> None:
        store: Store = LocalStore(tmp_path)
        store = TieredStore(MemoryStore("cache"), store) if is_tiered else store
        store.publish("readers/another.json", b"content")
        spy = Spy(monkeypatch, tmp_path)
        publish_transient(store, "readers/a.json", b"first")
        publish_transient(store, "readers/a.json", b"second")
        assert store.read("readers/a.json") == b"second"
        remove_transient(store, "readers/a.json")
        remove_transient(store, "readers/a.json")
        assert spy.acts == [
            ("write", "readers/<temporary>"),
            ("replace", "readers/a.json"),
            ("write", "readers/<temporary>"),
            ("replace", "readers/a.json"),
            ("unlink", "readers/a.json"),
        ]
        assert store.list("readers") == ["another.json"]

    def test_a_checkpoint_is_loaded_without_waiting_for_a_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only the first reader of a root makes the directory of the leases."""
        holdfast.save(tmp_path, {"weight": torch.ones(4)})
        holdfast.load(tmp_path, {"weight": torch.zeros(4)})
        spy = Spy(monkeypatch, tmp_path)
        state = {"weight": torch.zeros(4)}
        holdfast.load(tmp_path, state)
        assert torch.equal(state["weight"], torch.ones(4))
        acts = [act for act, _ in spy.acts]
        assert "fsync" not in acts
        assert "replace" in acts, "it took no lease"

    def test_a_replacement_is_durable_before_it_is_renamed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path)
        store.publish("name", b"old")
        spy = Spy(monkeypatch, tmp_path)
        store.publish("name", b"new", replace=True)
        assert spy.acts == [
            ("write", "<temporary>"),
            ("fsync", "<temporary>"),
            ("replace", "name"),
            ("fsync", "."),
        ]

    @pytest.mark.promise
    def test_a_name_that_is_there_is_made_durable_and_nothing_is_written_beside_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path)
        store.publish("layouts/a.json", b"content")
        spy = Spy(monkeypatch, tmp_path)
        with pytest.raises(AlreadyPublished):
            store.publish("layouts/a.json", b"content")
        assert spy.acts == [("fsync", "layouts")]
        assert store.read("layouts/a.json") == b"content"

    @pytest.mark.promise
    def test_an_image_and_every_directory_above_it_are_durable_when_it_is_finished(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spy = Spy(monkeypatch, tmp_path)
        sink = LocalStore(tmp_path / "new" / "root").create("steps/1-20-a/image", PAGE)
        assert spy.acts == [
            ("mkdir", "new"),
            ("fsync", "."),
            ("mkdir", "new/root"),
            ("fsync", "new"),
            ("mkdir", "new/root/steps"),
            ("fsync", "new/root"),
            ("mkdir", "new/root/steps/1-20-a"),
            ("fsync", "new/root/steps"),
        ]
        spy.acts.clear()
        sink.write(0, memoryview(pattern(PAGE)))
        sink.finish()
        assert spy.acts[-2:] == [
            ("fsync", "new/root/steps/1-20-a/image"),
            ("fsync", "new/root/steps/1-20-a"),
        ]

    def test_a_directory_another_process_made_is_not_trusted_to_be_durable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "steps" / "1").mkdir(parents=True)
        store = LocalStore(tmp_path)
        spy = Spy(monkeypatch, tmp_path)
        store.publish("steps/1/name", b"")
        assert spy.acts[:2] == [("fsync", "."), ("fsync", "steps")]
        spy.acts.clear()
        store.publish("steps/1/other", b"")
        assert [act for act in spy.acts if act[0] == "fsync"] == [
            ("fsync", "steps/1/<temporary>"),
            ("fsync", "steps/1"),
        ]

    def test_a_directory_removed_and_made_again_is_made_durable_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path)
        store.publish("steps/1/name", b"")
        store.remove_tree("steps")
        spy = Spy(monkeypatch, tmp_path)
        store.publish("steps/1/name", b"")
        assert spy.acts[:4] == [
            ("mkdir", "steps"),
            ("fsync", "."),
            ("mkdir", "steps/1"),
            ("fsync", "steps"),
        ]

    def test_a_directory_removed_here_and_made_again_elsewhere_is_made_durable_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path)
        store.publish("steps/1/name", b"")
        store.remove_tree("steps/1")
        (tmp_path / "steps" / "1").mkdir()
        spy = Spy(monkeypatch, tmp_path)
        store.publish("steps/1/name", b"")
        assert spy.acts[0] == ("fsync", "steps")

    @pytest.mark.promise
    def test_a_removal_is_durable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = LocalStore(tmp_path)
        store.publish("manifests/1-20.json", b"")
        spy = Spy(monkeypatch, tmp_path)
        store.remove("manifests/1-20.json")
        assert spy.acts == [("unlink", "manifests/1-20.json"), ("fsync", "manifests")]


class TestDirectIO:
    def test_whole_pages_go_past_the_page_cache_and_only_the_tail_through_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not _takes_direct_io(tmp_path):
            pytest.skip(f"{tmp_path} takes no direct I/O")
        spy = Spy(monkeypatch, tmp_path)
        size_bytes = 64 * PAGE + 100
        _write_from_shared_file(LocalStore(tmp_path), tmp_path, size_bytes, 16 * PAGE)
        assert spy.direct_bytes == 64 * PAGE
        assert spy.buffered_bytes == 100

    @pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_WRITE])
    def test_memory_of_a_shared_file_is_written_whether_it_is_mapped_to_read_or_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: int
    ) -> None:
        if not _takes_direct_io(tmp_path):
            pytest.skip(f"{tmp_path} takes no direct I/O")
        spy = Spy(monkeypatch, tmp_path)
        _write_from_shared_file(LocalStore(tmp_path), tmp_path, 8 * PAGE, 4 * PAGE, access)
        assert spy.direct_bytes == 8 * PAGE
        assert len([act for act in spy.acts if act[0] == "write"]) == 2

    def test_unaligned_memory_still_goes_past_the_page_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not _takes_direct_io(tmp_path):
            pytest.skip(f"{tmp_path} takes no direct I/O")
        spy = Spy(monkeypatch, tmp_path)
        store = LocalStore(tmp_path)
        content = pattern(8 * PAGE)
        with mmap.mmap(-1, 9 * PAGE) as memory:
            memory[1 : 1 + len(content)] = content
            sink = store.create("image", len(content))
            with memoryview(memory) as view, view[1 : 1 + len(content)] as source:
                sink.write(0, source)
            sink.finish()
        assert spy.direct_bytes == len(content)
        assert spy.buffered_bytes == 0
        assert store.read("image") == content

    def test_an_unaligned_range_goes_past_the_page_cache_but_for_its_ends(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not _takes_direct_io(tmp_path):
            pytest.skip(f"{tmp_path} takes no direct I/O")
        spy = Spy(monkeypatch, tmp_path)
        content = pattern(9 * PAGE)
        sink = LocalStore(tmp_path).create("image", len(content))
        sink.write(0, memoryview(content)[:100])
        sink.write(100, memoryview(content)[100:-100])
        sink.write(len(content) - 100, memoryview(content)[-100:])
        sink.finish()
        assert spy.direct_bytes == 7 * PAGE
        assert spy.buffered_bytes == 2 * PAGE
        assert LocalStore(tmp_path).read("image") == content

    def test_room_is_taken_before_the_first_byte(self, tmp_path: Path) -> None:
        sink = LocalStore(tmp_path).create("image", 100 * PAGE)
        status = (tmp_path / "image").stat()
        assert status.st_size == 100 * PAGE
        assert status.st_blocks * 512 >= 100 * PAGE
        sink.abort()


def _write_from_shared_file(
    store: LocalStore,
    tmp_path: Path,
    size_bytes: int,
    chunk_bytes: int,
    access: int = mmap.ACCESS_READ,
) -> None:
    """Four threads write a mapped file, as a keeper writes a slot."""
    content = pattern(size_bytes)
    slot = tmp_path / "slot"
    slot.write_bytes(content)
    sink = store.create("image", size_bytes)
    with (
        slot.open("r+b") as file,
        mmap.mmap(file.fileno(), 0, access=access) as memory,
        memoryview(memory) as view,
        ThreadPoolExecutor(4) as pool,
    ):

        def write(start: int) -> None:
            with view[start : start + chunk_bytes] as part:
                sink.write(start, part)

        list(pool.map(write, range(0, size_bytes, chunk_bytes)))
    sink.finish()
    assert store.read("image") == content


class NoAllocation:
    """A file system that cannot allocate space (NFSv3, FUSE), as the C library reports it."""

    @staticmethod
    def fallocate(*_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1


def writes_so_far() -> int:
    (line,) = (
        one for one in Path("/proc/self/io").read_text().splitlines() if one.startswith("syscw")
    )
    return int(line.split()[1])


def test_where_space_cannot_be_allocated_nothing_is_written_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_libc", NoAllocation)
    size = 16 << 20
    before = writes_so_far()
    sink = LocalStore(tmp_path).create("a", size)
    assert writes_so_far() - before < 100
    (path,) = tmp_path.rglob("a")
    found = path.stat()
    assert (found.st_size, found.st_blocks) == (size, 0)
    sink.write(0, memoryview(pattern(size)))
    sink.finish()
    assert path.read_bytes() == pattern(size)


def test_where_space_cannot_be_allocated_a_full_disk_is_still_found_before_a_byte_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_libc", NoAllocation)
    with pytest.raises(StorageError, match="No space left"):
        LocalStore(tmp_path).create("a", 1 << 60)


def test_what_the_system_says_of_an_allocation_is_an_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="seek") as caught:
        files.allocate(writing, 4096)
    assert caught.value.errno == errno.ESPIPE
    os.close(reading)
    os.close(writing)
    with (tmp_path / "a").open("wb") as file:
        files.allocate(file.fileno(), 1 << 20)
        found = os.fstat(file.fileno())
    assert found.st_size == 1 << 20 and found.st_blocks * 512 >= 1 << 20
