"""Storage that is full, read-only, limited or gone: training and older checkpoints are unharmed."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import holdfast
from holdfast import events
from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore
from support.runs.keepers import arena_of, kill_keeper
from support.runs.mishaps import build, content, files, listening, remount, small_disk, train

WIDE = 7000  # an image of 3.3 MB


def test_a_full_disk_costs_a_checkpoint_and_the_next_one_succeeds_when_there_is_room(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "run", "6m") as root:
        state = build(wide=WIDE)
        checkpointer = holdfast.Checkpointer(root, state, storage=holdfast.Every(steps=1))
        train(state, 0)
        first = content(state)
        checkpointer.save(0, durable=True).wait_durable(30)
        whole = files(root)
        train(state, 1)
        with listening() as heard:
            handle = checkpointer.save(1, durable=True)
            with pytest.raises(holdfast.PersistFailed) as caught:
                handle.wait_durable(30)
            handle.wait_captured(30)  # in memory it is
        # The trainer's own sinks hear of it, once, though the keeper is another process.
        (broke,) = [event for event in heard if isinstance(event, events.PersistBroke)]
        assert (broke.step, broke.rank) == (1, 0)
        assert "ENOSPC" in broke.reason
        text = str(caught.value)
        assert "No space left on device (ENOSPC)" in text and "bytes needed" in text
        assert "Free some space or keep fewer checkpoints" in text
        assert files(root) == whole
        into = build(1, wide=WIDE)
        assert holdfast.load(root, into).step == 0
        assert content(into) == first
        (root / "manifests" / "1-0.json").unlink()
        shutil.rmtree(root / "steps")
        train(state, 2)
        checkpointer.save(2, durable=True).wait_durable(30)
        checkpointer.close()
        assert holdfast.load(root, into).step == 2
        assert content(into) == content(state)


def test_a_start_while_the_disk_is_full_does_not_cut_the_line_of_the_run(
    tmp_path: Path, arena_dir: Path
) -> None:
    with small_disk(tmp_path / "run", "6m") as root:
        state = build()
        first = holdfast.Checkpointer(root, state, storage=None)
        for step in range(3):
            train(state, step)
            first.save(step, durable=True).wait_durable(60)
        saved = content(state)
        first.__exit__(RuntimeError, RuntimeError(), None)  # its keeper stays
        _fill(root / "filler")
        second = holdfast.Checkpointer(root, state, storage=None)
        restored = second.restore()
        assert restored is not None and restored.source == "memory"
        train(state, 3)
        second.save(3).wait_captured(60)
        second.__exit__(RuntimeError, RuntimeError(), None)
        assert sorted(path.name for path in (root / "incarnations").iterdir()) == ["1.json"]
        (root / "filler").unlink()
        third = holdfast.Checkpointer(root, state, storage=None)
        restored = third.restore()
        assert restored is not None and restored.generation == (2, 3)
        third.__exit__(RuntimeError, RuntimeError(), None)
        kill_keeper(arena_dir)
        shutil.rmtree(arena_of(arena_dir))  # the host is lost
        found = catalogue(LocalStore(root))
        assert [i.parent for i in found.incarnations] == [None, (1, 2), (2, 3)]
        assert [str(one) for one in found.lineage] == ["1-0", "1-1", "1-2"]
        assert found.abandoned == ()
        into = build(1)
        with holdfast.Checkpointer(root, into, storage=None) as fourth:
            restored = fourth.restore()
            assert restored is not None and restored.generation == (1, 2)
        assert content(into) == saved


def _fill(path: Path) -> None:
    """Take all the room that there is on a disk."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(path).f_bavail == 0


def test_a_save_that_does_not_fit_says_how_much_it_needs_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "run", "4m") as root:
        small = build()
        holdfast.save(root, small, 1)
        big = build(wide=20_000)
        train(big, 0)
        whole, directories = files(root), sorted(root.rglob("*"))
        with pytest.raises(holdfast.StorageError) as caught:
            holdfast.save(root, big, 2)
        assert caught.value.retryable
        text = str(caught.value)
        assert "bytes needed" in text and "free" in text and str(root) in text
        assert files(root) | {".writer.lock": b""} == whole | {".writer.lock": b""}
        assert sorted(root.rglob("*")) == directories
        assert holdfast.load(root, build(1)).step == 1
        holdfast.save(root, small, 2)


def test_a_read_only_root_can_be_read_and_is_refused_for_writing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", "4m") as root:
        state = build()
        holdfast.save(root, state, 1)
        remount(root, "ro")
        assert holdfast.load(root, build(1)).step == 1
        for write in (
            lambda: holdfast.save(root, state, 2),
            lambda: holdfast.Checkpointer(root, state),
        ):
            with pytest.raises(holdfast.StorageError, match=r"EROFS.*Mount it writable"):
                write()


@contextmanager
def _files_up_to(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_the_size_of_files_is_an_error_and_never_a_signal(tmp_path: Path) -> None:
    state = build(wide=WIDE)
    with _files_up_to(1 << 20):
        with pytest.raises(holdfast.StorageError, match=r"EFBIG.*Raise the file size limit"):
            holdfast.save(tmp_path / "one", state)
        with holdfast.Checkpointer(tmp_path / "two", state, storage=None) as checkpointer:
            handle = checkpointer.save(0)
            with pytest.raises(holdfast.SnapshotSkipped, match="ulimit -f"):
                handle.wait_captured(30)


@pytest.mark.parametrize("then", ["gone", "made anew", "made anew by another run"])
def test_a_root_that_is_taken_away_is_not_begun_anew_in_silence(tmp_path: Path, then: str) -> None:
    root, away = tmp_path / "run", tmp_path / "away"
    state = build()
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    train(state, 0)
    checkpointer.save(0, durable=True).wait_durable(30)
    root.rename(away)  # as when its file system is unmounted
    if then == "made anew":
        root.mkdir()
    if then == "made anew by another run":
        holdfast.save(root, build(5), 7)
    there = files(root)
    train(state, 1)
    handle = checkpointer.save(1, durable=True)
    with pytest.raises(holdfast.PersistFailed, match="is not the directory any more"):
        handle.wait_durable(30)
    handle.wait_captured(30)
    assert files(root) == there
    if root.exists():
        shutil.rmtree(root)
    away.rename(root)
    train(state, 2)
    checkpointer.save(2, durable=True).wait_durable(30)
    checkpointer.close()
    into = build(1)
    assert holdfast.load(root, into).step == 2
    assert content(into) == content(state)


def test_whoever_holds_a_lock_writes_nowhere_but_below_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    lock = store.lock("writer", "me")
    store.publish("a/one", b"1")
    (tmp_path / "run" / ".writer.lock").unlink()
    with pytest.raises(holdfast.StorageError, match="whose lock 'writer' is held"):
        store.publish("a/two", b"2")
    with pytest.raises(holdfast.StorageError, match="Bring it back"):
        store.create("a/three", 10)
    lock.release()
    store.publish("a/two", b"2")
