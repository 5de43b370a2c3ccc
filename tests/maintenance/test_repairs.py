"""A repair brings back the very bytes that manifests name, removes nothing, names what is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.catalogue import DAMAGED, LOCK, catalogue, layout_path
from holdfast.errors import HoldfastError, RootBusy, StorageError, UsageError
from holdfast.format.manifest import Generation, Manifest
from holdfast.maintenance.copies import copy
from holdfast.maintenance.repairs import RepairPlan, RepairReport, plan_repair, repair
from holdfast.persist import commit
from holdfast.persist.pins import pin
from holdfast.persist.removal import plan, remove
from holdfast.policy.when import Keep
from holdfast.storage.base import Store
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import FaultyStore, Mode, Stopped
from support.checkpoints.keeper_roots import LAYOUT, all_contents, change, paths_in, save_steps
from support.checkpoints.roots import whole

FIRST, SECOND = Generation(1, 10), Generation(1, 20)


def pair() -> tuple[MemoryStore, MemoryStore]:
    """A root with two checkpoints, and its copy."""
    root, backup = MemoryStore("root"), MemoryStore("backup")
    save_steps(root, (10, 20))
    copy(root, backup, None, lambda *_: None)
    return root, backup


def mended(store: Store, *sources: Store) -> tuple[RepairPlan, RepairReport]:
    return repair(store, sources, None)


def manifest_of(store: Store, generation: Generation) -> Manifest:
    found = catalogue(store).find(generation)
    assert found is not None
    return found


def image_of(store: Store, generation: Generation = SECOND) -> str:
    return manifest_of(store, generation).images[1].path


def part_of(store: Store) -> str:
    return manifest_of(store, SECOND).parts[0].path


DAMAGE: dict[str, Callable[[Store, str], None]] = {
    "a flipped bit": lambda store, path: change(store, path, 9000),
    "a whole block": lambda store, path: change(store, path, 5000, 1 << 20),
    "the header": lambda store, path: change(store, path, 20),
    "the length of the header": lambda store, path: change(store, path, 0),
    "the block table": lambda store, path: change(store, path, -4096, 4096),
    "cut short": lambda store, path: store.publish(path, store.read(path)[:70_000], replace=True),
    "too long": lambda store, path: store.publish(path, store.read(path) + b"x", replace=True),
    "empty": lambda store, path: store.publish(path, b"", replace=True),
    "missing": lambda store, path: store.remove(path),
}


@pytest.mark.promise
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("find", [image_of, part_of], ids=["image", "frozen part"])
def test_a_damaged_file_is_mended_from_another_root_and_what_was_there_is_kept(
    find: Callable[[Store], str], name: str
) -> None:
    root, backup = pair()
    sound = all_contents(root)
    path = find(root)
    DAMAGE[name](root, path)
    bad = root.read(path) if root.exists(path) else None
    before = set(paths_in(root))
    shown = plan_repair(root, [backup], None)
    assert set(paths_in(root)) == before
    made, report = mended(root, backup)
    assert made == shown
    assert [one.path for one in made.files] == [path] == list(report.mended)
    assert made.files[0].is_mendable
    assert all_contents(root) == sound
    assert whole(root) == ["1-10", "1-20"]
    kept = {f"{DAMAGED}/{path}"} if bad is not None else set()
    assert set(paths_in(root)) - before - {path} == kept
    assert all(root.read(one) == bad for one in kept)
    assert mended(root)[0].damages == ()


def test_prune_removes_what_was_set_aside() -> None:
    root, backup = pair()
    change(root, image_of(root), 9000)
    mended(root, backup)
    removal = plan(root, Keep(), abandoned=False)
    assert [one.path for one in removal.others] == [f"{DAMAGED}/{image_of(root)}"]
    remove(root, removal)
    assert root.list(DAMAGED) == []


def test_blocks_that_are_damaged_here_and_there_are_mended_from_both() -> None:
    root, backup = pair()
    sound = all_contents(root)
    path = image_of(root)
    change(root, path, 5000)  # the first block here, the second there
    change(backup, path, 4096 + (1 << 20) + 5)
    mended(root, backup)
    assert all_contents(root) == sound
    mended(backup, root)
    assert all_contents(backup) == sound


@pytest.mark.promise
def test_what_nobody_has_is_lost_and_named_and_nothing_is_changed() -> None:
    root, backup = pair()
    path = image_of(root)
    change(root, path, 5000)
    change(backup, path, 5001)
    before = {one: root.read(one) for one in paths_in(root)}
    made, report = mended(root, backup)
    (damage,) = made.files
    assert (damage.blocks, damage.lost) == ((0,), ("w@1:2,0:280000",))
    assert damage.generations == (SECOND,)
    assert report.mended == {}
    assert {one: root.read(one) for one in paths_in(root)} == before


def test_a_file_that_is_gone_everywhere_is_lost_with_all_its_leaves() -> None:
    root, _ = pair()
    for path in (image_of(root), part_of(root)):
        root.remove(path)
    lost = {one.path: one.lost for one in mended(root)[0].files}
    assert lost == {
        image_of(root): ("w@1:2,0:280000", "the plain values of rank 1"),
        part_of(root): ("base@0:1,0:280000",),
    }


def test_blocks_that_another_file_has_are_taken_from_there() -> None:
    root = MemoryStore()
    save_steps(root, (10,))
    save_steps(root, (10,), 2, None)  # the same state, saved once more
    sound = all_contents(root)
    change(root, image_of(root, FIRST), 5000, 1 << 20)
    made, _ = mended(root)
    assert [one.is_mendable for one in made.files] == [True]
    assert all_contents(root) == sound


def test_a_block_table_is_computed_from_its_blocks() -> None:
    root, _ = pair()
    sound = all_contents(root)
    change(root, image_of(root), -4096, 4096)
    mended(root)
    assert all_contents(root) == sound


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_layout_is_brought_back_or_its_checkpoints_are_named(is_missing: bool) -> None:
    root, backup = pair()
    path = layout_path(LAYOUT.hash)
    sound = root.read(path)
    if is_missing:
        root.remove(path)
    else:
        change(root, path)
    (damage,) = plan_repair(root, [], None).documents
    assert (damage.path, damage.generations) == (path, (FIRST, SECOND))
    assert not damage.is_mendable
    mended(root, backup)
    assert root.read(path) == sound
    assert whole(root) == ["1-10", "1-20"]


def test_a_manifest_is_brought_back_from_its_pin_or_from_another_root() -> None:
    for is_pinned in (True, False):
        root, backup = pair()
        if is_pinned:
            pin(root, SECOND)
        path = "manifests/1-20.json"
        sound = root.read(path)
        change(root, path)
        assert not any(one.is_mendable for one in plan_repair(root, [], None).damages) or is_pinned
        mended(root, *([] if is_pinned else [backup]))
        assert root.read(path) == sound
        assert whole(root) == ["1-10", "1-20"]


@pytest.mark.promise
def test_a_manifest_of_another_attempt_is_never_brought_in() -> None:
    root, backup = pair()
    root.remove_tree(image_of(root).rpartition("/")[0])
    change(root, "manifests/1-20.json")
    made, report = mended(root, backup)
    assert [one.is_mendable for one in made.documents] == [False]
    assert report.mended == {}


def test_the_record_of_a_start_is_brought_back() -> None:
    root, backup = MemoryStore("root"), MemoryStore("backup")
    save_steps(root, (10, 20))
    save_steps(root, (25,), 2, (1, 20))
    copy(root, backup, None, lambda *_: None)
    root.remove("incarnations/2.json")
    root.remove("incarnations/1.json")
    root.remove("manifests/1-10.json")
    root.remove("manifests/1-20.json")
    assert catalogue(root).line.missing == 1
    made, _ = mended(root, backup)
    assert [one.path for one in made.documents] == ["incarnations/1.json"]
    assert catalogue(root).line.missing is None


@pytest.mark.promise
@pytest.mark.parametrize("mode", ["stop", "torn", "error"])
@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_stopped_anywhere_each_file_is_the_old_or_the_mended_one(
    kind: str, mode: Mode, tmp_path: Path
) -> None:
    _, backup = pair()
    sound = all_contents(backup)

    def broken(number: int) -> Store:
        store: Store = MemoryStore() if kind == "memory" else LocalStore(tmp_path / str(number))
        copy(backup, store, None, lambda *_: None)
        change(store, image_of(store), 5000)
        store.remove(part_of(store))
        change(store, layout_path(LAYOUT.hash))
        return store

    counted = FaultyStore(broken(0))
    mended(counted, backup)
    points = range(1, len(counted.changes) + 1)
    for k in points if kind == "memory" else list(points)[:: len(points) // 4]:
        inner = broken(k)
        bad = {path: inner.read(path) for path in paths_in(inner)}
        with suppress(Stopped, StorageError):
            mended(FaultyStore(inner, fail_at=k, mode=mode), backup)
        for path, data in bad.items():
            good = sound.get(path, backup.read(path) if backup.exists(path) else data)
            assert inner.read(path) in (data, good), (k, path)
        mended(inner, backup)
        assert whole(inner) == ["1-10", "1-20"]
        assert all_contents(inner) == sound
        removal = plan(inner, Keep(), abandoned=False)
        remove(inner, removal)
        assert set(paths_in(inner)) - set(paths_in(backup)) == set()


def test_a_source_is_another_root_of_the_same_run_and_nothing_is_mended_under_a_run() -> None:
    root, backup = pair()
    change(root, image_of(root), 9000)
    with pytest.raises(UsageError, match="is the root that is to be repaired"):
        mended(root, root)
    other = MemoryStore("other")
    commit.open_root(other, "another")
    with pytest.raises(UsageError, match="is the root of run another"):
        mended(root, other)
    with root.lock(LOCK, "a run"), pytest.raises(RootBusy):
        mended(root, backup)
    assert plan_repair(root, [backup], [FIRST]).files == ()
    with pytest.raises(HoldfastError):
        mended(root, MemoryStore("nothing"))
