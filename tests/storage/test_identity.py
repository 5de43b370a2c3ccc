"""A root is told by the inode and the birth of its holdfast.json, not by its names."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import NotFound, StorageError
from holdfast.storage import LocalStore
from holdfast.storage import files as identity
from holdfast.storage.files import UNKNOWN, common_identity, file_identity, may_be_same, views

ONE, WEAK, OTHER = "inode a born 1.000000002", "inode a", "inode a born 1.000000003"


def make(root: Path) -> LocalStore:
    store = LocalStore(root)
    store.publish("holdfast.json", b"{}")
    return store


def test_an_identity_stays_through_renames_links_and_changes_of_mode(tmp_path: Path) -> None:
    store = make(tmp_path / "root")
    before = store.identity()
    os.utime(tmp_path / "root" / "holdfast.json", (1, 1))
    os.chmod(tmp_path / "root" / "holdfast.json", 0o600)
    os.link(tmp_path / "root" / "holdfast.json", tmp_path / "hard")
    (tmp_path / "link").symlink_to(tmp_path / "root")
    (tmp_path / "root").rename(tmp_path / "moved")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert LocalStore(tmp_path / "moved").identity() == before
    assert LocalStore(tmp_path / "link").identity() == before


def test_copies_have_identities_of_their_own_also_where_an_inode_is_used_again(
    tmp_path: Path,
) -> None:
    seen = {make(tmp_path / "root").identity()}
    for turn in range(20):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "root", copy)
        shutil.copystat(tmp_path / "root" / "holdfast.json", copy / "holdfast.json")
        seen.add(LocalStore(copy).identity())
        assert len(seen) == turn + 2
        shutil.rmtree(copy)


def test_the_inode_and_the_birth_are_the_kernels(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    words = file_identity(str(path)).split()
    assert words[:2] == ["inode", f"{path.stat().st_ino:x}"]
    if len(words) > 2:
        assert abs(float(words[3]) - path.stat().st_mtime) < 60


def test_without_a_time_of_birth_the_inode_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    monkeypatch.setattr(identity, "_libc", object())  # a C library without statx
    assert file_identity(str(path)) == f"inode {path.stat().st_ino:x}"
    with pytest.raises(FileNotFoundError):
        file_identity(str(tmp_path / "none"))


def test_a_file_that_is_not_there_is_told_from_one_that_cannot_be_seen(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        LocalStore(tmp_path).identity()
    (tmp_path / "file").touch()
    with pytest.raises(NotFound):
        LocalStore(tmp_path / "file").identity()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StorageError, match="ELOOP"):
        LocalStore(tmp_path / "loop").identity()


def test_what_hosts_have_in_common_is_what_all_of_them_see() -> None:
    assert common_identity([ONE, ONE]) == ONE
    assert common_identity([ONE, WEAK, ONE]) == WEAK
    assert common_identity([ONE, OTHER]) == WEAK
    assert common_identity(["inode a", "inode b"]) == UNKNOWN
    assert all(common_identity([ONE, one]) in views(ONE) for one in (ONE, WEAK, OTHER, "inode b"))


def test_only_what_contradicts_is_another_root() -> None:
    assert may_be_same(ONE, ONE) and may_be_same(WEAK, ONE) and may_be_same(ONE, WEAK)
    assert may_be_same(UNKNOWN, ONE) and may_be_same(ONE, UNKNOWN)
    assert not may_be_same(ONE, OTHER) and not may_be_same(WEAK, "inode b")
    assert not may_be_same("memory 1", "memory 2")


def test_a_store_that_has_seen_its_root_never_makes_another_in_its_place(tmp_path: Path) -> None:
    root, moved = tmp_path / "above" / "root", tmp_path / "moved"
    store = make(root)
    store.identity()
    (tmp_path / "above").rename(moved)
    acts: list[Callable[[], object]] = [
        lambda: store.publish("steps/1/a", b"x"),
        lambda: store.create("steps/1/a", 10),
        lambda: store.lock("writer", "me"),
        lambda: store.list("steps"),
        lambda: store.list(""),
    ]
    for act in acts:
        with pytest.raises(StorageError, match="ENOENT"):
            act()
    assert not (tmp_path / "above").exists()
    moved.rename(tmp_path / "above")
    store.publish("steps/1/a", b"x")
    assert store.list("steps") == ["1"] and store.list("none") == []


def test_a_store_follows_its_root_with_the_locks_it_holds(tmp_path: Path) -> None:
    root, moved = tmp_path / "root", tmp_path / "further" / "away" / "moved"
    store = make(root)
    with store.lock("writer", "me"):
        store.publish("a/1", b"1")
        moved.parent.mkdir(parents=True)
        root.rename(moved)
        with pytest.raises(StorageError, match="it was moved"):
            store.publish("a/2", b"2")
        store.follow(str(moved))
        store.publish("a/2", b"2")
        assert store.list("a") == ["1", "2"] and not root.exists()
        shutil.copytree(moved, root)
        store.follow(str(root))
        with pytest.raises(StorageError, match="not the directory"):
            store.publish("a/3", b"3")


def test_the_c_librarys_call_is_there() -> None:
    assert hasattr(ctypes.CDLL(None), "statx")
