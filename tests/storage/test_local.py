"""LocalStore passes the suite on a disk and on tmpfs, and reaches the disk the way it says."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import AlreadyPublished, RootBusy, StorageError
from holdfast.storage import LocalStore, Store
from holdfast.testing.store_suite import PAGE, StoreSuite, at_once, pattern

SHARED_MEMORY = Path("/dev/shm")


class TestLocalStore(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "root")

    def same_store(self, store: Store) -> Store:
        return LocalStore(store.url.removeprefix("file://"))


class TestLocalStoreInSharedMemory(TestLocalStore):
    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        if not os.access(SHARED_MEMORY, os.W_OK):
            pytest.skip(f"{SHARED_MEMORY} is not there")
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as path:
            yield Path(path)


class TestLocalStoreWithoutDirectIO(TestLocalStore):
    """A file system that refuses to open a file for direct I/O, as tmpfs did before Linux 6.6."""

    @pytest.fixture(autouse=True)
    def refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plainly = os.open

        def refusing(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            return plainly(path, flags, mode)

        monkeypatch.setattr(os, "open", refusing)


class TestLocalStoreThatRefusesDirectWrites(TestLocalStore):
    """A file system that takes the flag and then no write, whatever its alignment."""

    @pytest.fixture(autouse=True)
    def refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plainly = os.pwritev

        def refusing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if _is_direct(descriptor):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return plainly(descriptor, buffers, offset)

        monkeypatch.setattr(os, "pwritev", refusing)


class TestLocalStoreWithShortWrites(TestLocalStore):
    """A kernel that takes less than it was given, every time, and not in whole pages."""

    @pytest.fixture(autouse=True)
    def shorten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plainly = os.pwritev

        def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            [data] = buffers
            most = max(512, len(data) // 2 // 512 * 512)
            return plainly(descriptor, [data[:most]], offset)

        monkeypatch.setattr(os, "pwritev", short)


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


class TestRefusals:
    """What the operating system refuses arrives as one error that says where, what and why."""

    def test_a_full_file_system_is_found_before_a_byte_is_written(self) -> None:
        if not os.access(SHARED_MEMORY, os.W_OK):
            pytest.skip(f"{SHARED_MEMORY} is not there")
        size_bytes = 2 * shutil.disk_usage(SHARED_MEMORY).total
        if not PAGE < size_bytes < 1 << 50:
            pytest.skip(f"{SHARED_MEMORY} has no limit to run into")
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as root:
            store = LocalStore(root)
            with pytest.raises(StorageError, match=r"steps/image.*ENOSPC") as caught:
                store.create("steps/image", size_bytes)
            assert caught.value.retryable
            assert caught.value.fields["errno"] == errno.ENOSPC
            assert isinstance(caught.value.__cause__, OSError)
            assert store.list("steps") == []

    def test_a_publication_into_a_full_file_system_leaves_nothing(self, small_disk: Path) -> None:
        store = LocalStore(small_disk)
        store.publish("first", pattern(PAGE))
        with pytest.raises(StorageError, match="ENOSPC") as caught:
            store.publish("second", pattern(4 << 20))
        assert caught.value.retryable
        assert os.listdir(small_disk) == ["first"]

    def test_a_file_too_large_for_its_limit_is_not_worth_another_try(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(StorageError, match="EFBIG") as created:
                store.create("image", 2 << 20)
            with pytest.raises(StorageError, match="EFBIG") as published:
                store.publish("name", bytes(2 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not created.value.retryable
        assert not published.value.retryable
        assert os.listdir(tmp_path) == []

    def test_an_image_is_broken_by_a_failed_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path)
        sink = store.create("image", 2 * PAGE)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", _failing)
            with pytest.raises(StorageError, match=r"write of image .*EIO") as caught:
                sink.write(0, memoryview(pattern(PAGE)))
        assert caught.value.retryable
        with pytest.raises(StorageError, match="an earlier write"):
            sink.write(0, memoryview(pattern(2 * PAGE)))
        with pytest.raises(StorageError, match="an earlier write"):
            sink.finish()
        sink.abort()
        assert os.listdir(tmp_path) == []

    def test_an_aborted_image_leaves_what_another_has_put_in_its_place(
        self, tmp_path: Path
    ) -> None:
        store = LocalStore(tmp_path)
        sink = store.create("image", PAGE)
        store.remove("image")
        other = LocalStore(tmp_path).create("image", PAGE)
        other.write(0, memoryview(pattern(PAGE)))
        other.finish()
        sink.abort()
        assert store.read("image") == pattern(PAGE)

    def test_an_fsync_that_failed_once_is_never_asked_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second answer would be success: Linux reports a lost page once."""
        store = LocalStore(tmp_path)
        sink = store.create("image", PAGE)
        sink.write(0, memoryview(pattern(PAGE)))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", _failing)
            with pytest.raises(StorageError, match=r"fsync of image .*EIO"):
                sink.finish()
        with pytest.raises(StorageError):
            sink.finish()
        sink.abort()
        assert not store.exists("image")

    @pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
    def test_what_needs_a_person_is_not_worth_another_try(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def refusing(path: str, flags: int, mode: int = 0o777) -> int:
            raise OSError(code, os.strerror(code), path)

        store = LocalStore(tmp_path)
        monkeypatch.setattr(os, "open", refusing)
        with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
            store.publish("name", b"")
        assert not caught.value.retryable

    def test_a_directory_that_cannot_be_synced_is_passed_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plainly = os.fsync

        def refusing(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            plainly(descriptor)

        monkeypatch.setattr(os, "fsync", refusing)
        LocalStore(tmp_path).publish("a/name", b"content")
        assert LocalStore(tmp_path).read("a/name") == b"content"

    def test_a_link_that_succeeded_unheard_is_a_success(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NFS sends a request again when the answer is lost, and is told the name exists."""
        plainly = os.link

        def twice(source: str, target: str) -> None:
            plainly(source, target)
            plainly(source, target)

        monkeypatch.setattr(os, "link", twice)
        store = LocalStore(tmp_path)
        store.publish("name", b"content")
        assert store.read("name") == b"content"


def _failing(*arguments: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class TestProcesses:
    """The same promises between processes that know nothing of each other."""

    def test_of_racing_processes_exactly_one_publishes(self, tmp_path: Path) -> None:
        program = (
            "import sys\n"
            "from holdfast.errors import AlreadyPublished\n"
            "from holdfast.storage import LocalStore\n"
            "store = LocalStore(sys.argv[1])\n"
            "print('ready', flush=True)\n"
            "sys.stdin.readline()\n"
            "for turn in range(20):\n"
            "    try:\n"
            "        store.publish(f'{turn}/name', sys.argv[2].encode() * 3000)\n"
            "        print(turn)\n"
            "    except AlreadyPublished:\n"
            "        pass\n"
        )
        racers = [_python(program, str(tmp_path), name) for name in "ab"]
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        won = [racer.communicate("go\n", timeout=60)[0].split() for racer in racers]
        assert sorted(won[0] + won[1]) == sorted(map(str, range(20)))
        for name, turns in zip(b"ab", won, strict=True):
            for turn in turns:
                assert LocalStore(tmp_path).read(f"{turn}/name") == bytes([name]) * 3000

    def test_the_lock_of_a_killed_process_is_free(self, tmp_path: Path) -> None:
        program = (
            "import sys\n"
            "from holdfast.storage import LocalStore\n"
            "lock = LocalStore(sys.argv[1]).lock('root', 'the one to be killed')\n"
            "print('held', flush=True)\n"
            "sys.stdin.readline()\n"
        )
        holder = _python(program, str(tmp_path))
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        store = LocalStore(tmp_path)
        with pytest.raises(RootBusy, match="the one to be killed"):
            store.lock("root", "next")
        holder.kill()
        holder.communicate(timeout=60)
        store.lock("root", "next").release()

    def test_who_comes_before_a_lock_is_signed_waits_for_the_signature(
        self, tmp_path: Path
    ) -> None:
        store = LocalStore(tmp_path / "root")
        store.lock("root", "a much longer name of the last owner").release()
        (file,) = (tmp_path / "root").glob(".*.lock")
        with store.lock("root", "run blue"):
            assert file.read_text() == "run blue"
        os.truncate(file, 0)
        with open(file, "r+") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            sign = threading.Timer(0.2, file.write_text, ["run green"])
            sign.start()
            with pytest.raises(RootBusy, match="run green"):
                store.lock("root", "run red")
            sign.join()

    def test_a_holder_of_a_lock_removes_nothing_in_a_root_that_took_the_place_of_its_own(
        self, tmp_path: Path
    ) -> None:
        root, copy = tmp_path / "root", LocalStore(tmp_path / "copy")
        store = LocalStore(root)
        copy.publish("steps/1/image", b"")
        with store.lock("writer", "first"), copy.lock("writer", "its own run"):
            root.rename(tmp_path / "away")
            (tmp_path / "copy").rename(root)
            with pytest.raises(StorageError, match="writer"):
                store.remove("steps/1/image")
            with pytest.raises(StorageError, match="writer"):
                store.remove_tree("steps/1")
        assert LocalStore(root).list("steps/1") == ["image"]

    def test_a_forked_child_keeps_no_lock_of_its_killed_parent(self, tmp_path: Path) -> None:
        program = (
            "import os, signal, sys\n"
            "from holdfast.storage import LocalStore\n"
            "lock = LocalStore(sys.argv[1]).lock('root', 'the one to be killed')\n"
            "begun, begins = os.pipe()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    lock.release()\n"  # which is not its own
            "    os.close(1)\n"
            "    os.write(begins, b'!')\n"
            "    signal.pause()\n"
            "os.read(begun, 1)\n"  # before it, the child may not have run at all
            "print(child, flush=True)\n"
            "sys.stdin.readline()\n"
        )
        holder = _python(program, str(tmp_path))
        assert holder.stdout is not None
        child = os.pidfd_open(int(holder.stdout.readline()))
        store = LocalStore(tmp_path)
        with pytest.raises(RootBusy, match="the one to be killed"):
            store.lock("root", "next")
        holder.kill()
        holder.wait(60)
        store.lock("root", "next").release()
        signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        holder.communicate(timeout=60)

    def test_an_image_abandoned_by_its_writer_can_be_seen_and_removed(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        sink = store.create("steps/1/image", PAGE)
        before = len(os.listdir("/proc/self/fd"))
        del sink
        assert len(os.listdir("/proc/self/fd")) < before
        assert store.list("steps/1") == ["image"]
        with pytest.raises(AlreadyPublished):
            store.create("steps/1/image", PAGE)
        store.remove_tree("steps/1")
        assert store.list("steps") == []

    def test_a_tree_is_removed_by_two_at_once(self, tmp_path: Path) -> None:
        stores = [LocalStore(tmp_path) for _ in range(2)]
        for name in range(200):
            stores[0].publish(f"tree/{name % 10}/{name}", b"")
        assert at_once(*(lambda s=one: s.remove_tree("tree") for one in stores)) == [None, None]
        assert stores[0].list("") == []


def _python(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
