"""What a root says of itself, and the layouts in it: damage is refused, and never spread."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.catalogue import ROOT, layout_path
from holdfast.errors import ChecksumMismatch, FormatError, StorageError
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
