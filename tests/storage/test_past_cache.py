"""Reads past the page cache give the same bytes, and where they are refused the plain way does."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.storage import LocalStore, local
from holdfast.storage import direct as past_cache
from holdfast.storage.direct import fill_past_cache, is_cached
from holdfast.testing.store_suite import StoreSuite, pattern

PAGE = 4096
CONTENT = pattern(40 * PAGE + 123)


class TestReadingPastTheCache(StoreSuite):
    """A store that finds nothing in the cache keeps every promise."""

    @pytest.fixture(autouse=True)
    def _nothing_is_cached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "is_cached", lambda *_: False)
        monkeypatch.setattr(local, "_DIRECT_BYTES", 1)
        monkeypatch.setattr(past_cache, "BOUNCE_BYTES", 8 * PAGE)
        monkeypatch.setattr(past_cache, "_thread", type("Fresh", (), {})())

    def make_store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path)


def refused_always(*_: object) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def has_direct_reads(directory: Path) -> bool:
    probe = directory / "probe"
    probe.write_bytes(bytes(PAGE))
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def dropped(path: Path) -> int:
    """A descriptor of a file of which nothing is cached; skips where that cannot be had."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(descriptor, 0, path.stat().st_size):
        os.close(descriptor)
        pytest.skip("this file system lies in memory")
    return descriptor


def test_what_was_read_is_cached_and_what_was_dropped_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    descriptor = dropped(path)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        assert not is_cached(descriptor, 5, 3 * PAGE)
        os.pread(descriptor, 8 * PAGE, 0)
        assert is_cached(descriptor, 5, 3 * PAGE)
        assert not is_cached(descriptor, 20 * PAGE, 3 * PAGE)
    finally:
        os.close(descriptor)


def test_a_cold_read_leaves_the_cache_as_it_was_and_a_warm_one_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_direct_reads(tmp_path):
        pytest.skip("no direct I/O here")
    content = pattern(2 << 20)
    store = LocalStore(tmp_path)
    store.publish("name", content)
    descriptor = dropped(tmp_path / "name")
    buffer = bytearray(len(content))
    store.read_into("name", 0, memoryview(buffer))
    assert buffer == content
    assert not is_cached(descriptor, 0, len(content))
    assert store.read("name") == content  # through the cache
    assert is_cached(descriptor, 0, len(content))
    os.close(descriptor)

    def unexpected(*_: object) -> int:
        raise AssertionError("read past the cache that had it")

    monkeypatch.setattr(local, "fill_past_cache", unexpected)
    store.read_into("name", 0, memoryview(buffer))


def test_where_direct_reads_are_refused_the_plain_way_gives_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "is_cached", lambda *_: False)
    monkeypatch.setattr(local, "_DIRECT_BYTES", 1)
    store = LocalStore(tmp_path)
    store.publish("name", CONTENT)
    plainly, buffer = os.preadv, bytearray(len(CONTENT))

    def refused(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            return refused_always()
        return plainly(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refused)
        store.read_into("name", 0, memoryview(buffer))
    assert buffer == CONTENT
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", lambda _, command, *rest: refused_always() if rest else 0)
        store.read_into("name", 0, memoryview(buffer))
    assert buffer == CONTENT


def test_aligned_memory_is_read_into_as_it_lies_and_the_file_may_end_in_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    descriptor = os.open(path, os.O_RDONLY)
    monkeypatch.setattr(past_cache, "_bounce", refused_always)
    with mmap.mmap(-1, 8 * PAGE) as memory, memoryview(memory) as view:
        assert fill_past_cache(descriptor, 2 * PAGE, view) in (0, 8 * PAGE)  # 0: refused here
    monkeypatch.undo()
    buffer = bytearray(len(CONTENT))
    assert fill_past_cache(descriptor, 0, memoryview(buffer)) in (0, len(CONTENT))
    more = memoryview(bytearray(3 * PAGE))
    assert fill_past_cache(descriptor, 40 * PAGE, more) in (0, 123)
    assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
    os.close(descriptor)
