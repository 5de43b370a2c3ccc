"""What a root says of itself, and the layouts in it: damage is refused, and never spread."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.catalogue import ROOT, layout_path, read_incarnation
from holdfast.errors import AlreadyPublished, ChecksumMismatch, FormatError, StorageError
from holdfast.format.manifest import Incarnation
from holdfast.geometry.layout import table_hash
from holdfast.persist import commit
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore

LAYOUT = b"the bytes of a layout"
HASH = table_hash(LAYOUT)


def test_a_damaged_name_of_a_root_comes_with_what_to_do() -> None:
    store = MemoryStore()
    commit.open_root(store, "r")
    store.publish(ROOT, b"{}", replace=True)
    with pytest.raises(FormatError, match=r"Move holdfast\.json away") as caught:
        commit.open_root(store, "other")
    assert type(caught.value) is FormatError
    assert store.read(ROOT) == b"{}"


def test_a_layout_that_is_not_what_its_name_says_is_not_stored_and_replaces_none() -> None:
    store = MemoryStore()
    with pytest.raises(ChecksumMismatch, match="changed in memory"):
        commit.write_layout(store, HASH, b"something else")
    assert store.list("layouts") == []
    commit.write_layout(store, HASH, LAYOUT)
    with pytest.raises(ChecksumMismatch, match="changed in memory"):
        commit.write_layout(store, HASH, b"something else")
    assert store.read(layout_path(HASH)) == LAYOUT


def test_a_stored_layout_that_is_damaged_is_replaced_by_the_right_one() -> None:
    store = MemoryStore()
    commit.write_layout(store, HASH, LAYOUT)
    store.publish(layout_path(HASH), b"damaged", replace=True)
    commit.write_layout(store, HASH, LAYOUT)
    assert store.read(layout_path(HASH)) == LAYOUT


def test_a_root_that_vanished_or_is_another_run_s_is_refused_and_nothing_is_made(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path / "run")
    with pytest.raises(StorageError, match=r"has no holdfast\.json: the root of run r was"):
        commit.require_root(store, "r")
    assert list(tmp_path.iterdir()) == []
    commit.open_root(store, "other")
    with pytest.raises(StorageError, match="is the root of run other by now, not of run r"):
        commit.require_root(store, "r")
    commit.require_root(store, "other")


@pytest.mark.promise
@pytest.mark.parametrize("parent", [None, (1, 5)])
def test_a_start_does_not_replace_the_record_of_another_that_has_its_number(
    parent: tuple[int, int] | None,
) -> None:
    store = MemoryStore()
    first = Incarnation(run_id="r", n=2, nonce="first", parent=(1, 5))
    commit.record_incarnation(store, first)
    with pytest.raises(AlreadyPublished):
        commit.record_incarnation(store, Incarnation(run_id="r", n=2, nonce="b", parent=parent))
    assert read_incarnation(store, 2) == first


@pytest.mark.promise
def test_a_copy_in_the_place_of_the_root_is_refused(tmp_path: Path) -> None:
    """It has the run's id, and all files; what is written there is missing in the root itself."""
    root = tmp_path / "run"
    store = LocalStore(root)
    commit.open_root(store, "r")
    identity = store.identity()
    commit.require_root(store, "r", identity)
    root.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", root)
    with pytest.raises(StorageError, match="is another root of run r by now, a copy"):
        commit.require_root(store, "r", identity)
    shutil.rmtree(root)
    (tmp_path / "moved").rename(root)
    commit.require_root(store, "r", identity)


@pytest.mark.promise
def test_a_manifest_that_is_published_is_replaced_by_no_other(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.publish("manifests/1-2.json", b"first")
    with pytest.raises(AlreadyPublished):
        store.publish("manifests/1-2.json", b"second")
    assert store.read("manifests/1-2.json") == b"first"
