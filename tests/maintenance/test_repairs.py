"""A repair brings back the very bytes that manifests name, removes nothing, names what is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.catalogue import DAMAGED, LOCK, catalogue, layout_path, manifest_path
from holdfast.errors import FormatError, HoldfastError, RootBusy, StorageError, UsageError
from holdfast.format.manifest import Generation, Incarnation, Manifest
from holdfast.geometry.layout import Layout
from holdfast.maintenance import memory_files
from holdfast.maintenance.copies import copy
from holdfast.maintenance.memory_files import MemoryFiles
from holdfast.maintenance.repairs import RepairPlan, RepairReport, plan_repair, repair
from holdfast.parity.planning.record import ParityRecord, seal
from holdfast.persist import commit
from holdfast.persist.pins import pin
from holdfast.persist.removal import plan, remove
from holdfast.policy.when import Keep
from holdfast.protocol.arena import SLOT_SUFFIX, SlotFile, SlotRecord, root_key
from holdfast.restore.cluster.arena_shards import RECORD_SUFFIX, shard_path
from holdfast.restore.cluster.decode import GroupAccess
from holdfast.storage.base import ImageSink, Store
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import FaultyStore, Mode, PassingStore, Stopped
from support.checkpoints import keeper_roots
from support.checkpoints.images import seals, split_leaf
from support.checkpoints.keeper_roots import (
    LAYOUT,
    all_contents,
    change,
    job_at,
    paths_in,
    save_steps,
)
from support.checkpoints.roots import whole
from support.peers.lost_hosts import Group

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
    assert list(report.mended.values()) == ([f"{DAMAGED}/{path}"] if bad is not None else [""])
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


@pytest.mark.promise
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_manifest_stays_broken_while_a_file_that_it_names_is_lost(is_pinned: bool) -> None:
    root, backup = pair()
    if is_pinned:
        pin(root, SECOND)
    path, manifest = image_of(root), manifest_path(SECOND)
    change(root, manifest, 30)
    bad = root.read(manifest)
    root.remove(path)
    sound = backup.read(path)
    backup.remove(path)
    made, report = mended(root, backup)
    (damage,) = made.documents
    assert (damage.path, damage.lacks, damage.is_mendable) == (manifest, (path,), False)
    assert [(one.path, one.is_mendable) for one in made.files] == [(path, False)]
    assert report.mended == {}
    assert root.read(manifest) == bad
    backup.publish(path, sound)
    assert list(mended(root, backup)[1].mended) == [path, manifest]
    assert whole(root) == ["1-10", "1-20"]


@pytest.mark.promise
def test_a_manifest_is_mended_after_all_that_it_names() -> None:
    root, backup = pair()
    sound = image_of(root)
    for path in (sound, manifest_path(SECOND), layout_path(LAYOUT.hash), "incarnations/1.json"):
        change(root, path, 300 if path == sound else -3)
    mended_paths = list(mended(root, backup)[1].mended)
    order = [layout_path(LAYOUT.hash), sound, "incarnations/1.json", manifest_path(SECOND)]
    assert mended_paths == order
    assert whole(root) == ["1-10", "1-20"]


@pytest.mark.promise
def test_a_manifest_stays_broken_when_a_file_could_not_be_mended() -> None:
    root, backup = pair()
    change(root, manifest_path(SECOND))
    change(root, image_of(backup), 5000)
    change(root, part_of(backup), 5000)
    full = _Full(root, image_of(backup))
    _, report = repair(full, [backup], None)
    assert list(report.mended) == [part_of(backup)]
    assert list(report.failed) == [image_of(backup)]
    assert "No space" in report.failed[image_of(backup)]
    mended(root, backup)
    assert whole(root) == ["1-10", "1-20"]


def test_a_pinned_checkpoint_whose_manifest_and_a_file_are_gone_is_brought_back() -> None:
    root, backup = pair()
    pin(root, SECOND)
    path, manifest = image_of(root), manifest_path(SECOND)
    root.remove(manifest)
    root.remove(path)
    assert [one.path for one in plan_repair(root, [], None).damages] == [manifest, path]
    assert mended(root)[1].mended == {}
    assert list(mended(root, backup)[1].mended) == [path, manifest]
    assert whole(root) == ["1-10", "1-20"]


@pytest.mark.promise
def test_what_a_pin_names_is_never_swept_though_its_manifest_is_gone() -> None:
    root, backup = pair()
    pin(root, FIRST)
    path, manifest = image_of(root, FIRST), manifest_path(FIRST)
    root.remove(manifest)
    root.remove(path)
    left = image_of(backup, FIRST).replace("live-00001", "live-00000")
    remove(root, plan(root, Keep(last=1), abandoned=False))
    assert root.exists(left)
    save_steps(root, (30, 40, 50, 60), keep=Keep(last=1))
    assert root.exists(left)
    assert list(mended(root, backup)[1].mended) == [path, manifest]
    assert whole(root) == ["1-10", "1-60"]


def record(store: Store, nonce: str, parent: tuple[int, int]) -> None:
    commit.record_incarnation(
        store, Incarnation(run_id="r", n=2, nonce=nonce, parent=parent, created_s=5.0)
    )


@pytest.mark.promise
def test_the_record_of_another_start_is_never_brought_in() -> None:
    root, backup = pair()
    record(root, "A", (1, 20))
    record(backup, "B", (1, 10))
    change(root, "incarnations/2.json", 20)
    bad = root.read("incarnations/2.json")
    made, report = mended(root, backup)
    assert [(one.path, one.is_mendable) for one in made.damages] == [("incarnations/2.json", False)]
    assert report.mended == {}
    assert root.read("incarnations/2.json") == bad
    assert catalogue(root).abandoned == ()


def test_a_record_whose_damaged_bytes_still_tell_the_start_is_brought_back() -> None:
    root, backup = pair()
    for store in (root, backup):
        record(store, "A", (1, 20))
    sound = root.read("incarnations/2.json")
    change(root, "incarnations/2.json", 20)
    mended(root, backup)
    assert root.read("incarnations/2.json") == sound


def test_a_source_that_another_start_went_on_from_is_refused() -> None:
    root, backup = pair()
    record(root, "A", (1, 20))
    record(backup, "B", (1, 10))
    change(root, image_of(root), 5000)
    with pytest.raises(FormatError, match=r"incarnation 2 in .* is another start"):
        mended(root, backup)


def test_all_records_that_the_lineage_lacks_are_brought_back() -> None:
    root, backup = MemoryStore("root"), MemoryStore("backup")
    for n in (1, 2, 3, 4):
        save_steps(root, (10 * n,), n, (n - 1, 10 * n - 10) if n > 1 else None)
    copy(root, backup, None, lambda *_: None)
    for n in (2, 3):
        root.remove(manifest_path(Generation(n, 10 * n)))
        root.remove(f"incarnations/{n}.json")
    mended(root, backup)
    assert catalogue(root).line.missing is None
    assert catalogue(root).parents == catalogue(backup).parents


class _Full(MemoryStore):
    """A store without room for one image."""

    def __init__(self, inner: MemoryStore, path: str) -> None:
        super().__init__()
        self.__dict__.update(inner.__dict__)
        self._path = path

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        if path == self._path:
            raise StorageError("No space left")
        return super().create(path, size_bytes, aside=aside)


class _Unreachable(MemoryStore):
    """A store that does not answer for one file."""

    def __init__(self, inner: MemoryStore, path: str) -> None:
        super().__init__()
        self.__dict__.update(inner.__dict__)
        self._path = path

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        if path == self._path:
            raise StorageError("no answer")
        return super().read(path, offset_bytes, size_bytes)


@pytest.mark.promise
def test_an_outage_is_no_damage_and_leaves_the_others_to_be_mended() -> None:
    root, backup = pair()
    path = image_of(root)
    change(root, part_of(root), 5000)
    made, report = repair(_Unreachable(root, path), [backup], None)
    assert made.unread == ((path, "no answer"),)
    assert [one.path for one in made.files] == list(report.mended) == [part_of(root)]
    change(root, path, 5000)
    made, report = repair(root, [_Unreachable(backup, path)], None)
    assert (made.unread, made.damages, report.mended) == (((path, "no answer"),), (), {})
    for document in (manifest_path(SECOND), "incarnations/1.json", layout_path(LAYOUT.hash)):
        with pytest.raises(StorageError, match="no answer"):
            repair(_Unreachable(root, document), [backup], None)
    with pytest.raises(StorageError, match="no answer"):
        repair(root, [_Unreachable(backup, "incarnations/1.json")], None)


def test_one_step_is_mended_with_its_documents_alone() -> None:
    root, backup = pair()
    for generation in (FIRST, SECOND):
        change(root, image_of(backup, generation), 5000)
        change(root, manifest_path(generation))
    made, report = repair(root, [backup], {SECOND})
    assert list(report.mended) == [image_of(backup), manifest_path(SECOND)]
    assert [one.path for one in made.documents] == [manifest_path(SECOND)]


def test_every_place_of_a_block_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 800_000)  # of each rank three equal blocks
    monkeypatch.setattr(keeper_roots, "LAYOUT", Layout(2, (split_leaf("w", "F32", shape, 2),)))
    monkeypatch.setattr(keeper_roots, "SHAPE", shape)
    monkeypatch.setattr(keeper_roots, "random_leaf", lambda *_: np.zeros(shape, "f4"))
    root = MemoryStore()
    save_steps(root, (10,))
    sound = all_contents(root)
    for path in sound:
        change(root, path, 5000)
    assert sorted(mended(root)[1].mended) == sorted(sound)
    assert all_contents(root) == sound


class _Slow(MemoryStore):
    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        time.sleep(0.001)
        return super().read(path, offset_bytes, size_bytes)


def test_threads_that_write_find_blocks_elsewhere_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 6_300_000)  # of each rank three chunks
    leaf = split_leaf("w", "F32", shape, 2)
    monkeypatch.setattr(keeper_roots, "LAYOUT", Layout(2, (leaf,)))
    monkeypatch.setattr(keeper_roots, "SHAPE", shape)
    root = _Slow()
    save_steps(root, (10,))
    save_steps(root, (10,), 2, None)
    path = image_of(root, FIRST)
    sound = root.read(path)
    for number in range(3):
        change(root, path, 5000 + number * (9 << 20), 1 << 20)
    report = mended(root)[1]
    assert (list(report.mended), report.failed) == ([path], {})
    assert root.read(path) == sound


class _PrunedWhileRead(PassingStore):
    """A root whose newest checkpoint another process prunes when its image is read."""

    def __init__(self, inner: Store, path: str, reads: int, *, is_read_only: bool) -> None:
        super().__init__(inner)
        self._path, self._left, self._is_read_only = path, reads, is_read_only

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        if self._is_read_only:
            raise StorageError("read-only")
        super().publish(path, data, replace=replace)

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        if path == self._path:
            self._left -= 1
            if not self._left:
                self._prune()
        super().read_into(path, offset_bytes, buffer, is_shared=is_shared)

    def _prune(self) -> None:
        with self.inner.lock(LOCK, "pruner"):
            commit.withdraw(self.inner, SECOND)
            sweeper = commit.Sweeper(self.inner)
            for _ in range(4):
                sweeper.sweep(catalogue(self.inner).manifests)


@pytest.mark.promise
@pytest.mark.parametrize("reads", [1, 2])
def test_a_source_that_is_pruned_meanwhile_stays_readable_until_the_repair_has_ended(
    reads: int,
) -> None:
    root, backup = pair()
    sound, path = all_contents(root), image_of(root)
    change(root, path, 9000)
    source = _PrunedWhileRead(backup, path, reads, is_read_only=False)
    _, report = repair(root, [source], {SECOND})
    assert list(report.mended) == [path] and all_contents(root) == sound
    assert not backup.exists(manifest_path(SECOND)) and backup.list("readers") == []


@pytest.mark.promise
@pytest.mark.parametrize("reads", [1, 2])
def test_a_source_that_is_pruned_and_takes_no_lease_leads_to_an_error_that_says_so(
    reads: int,
) -> None:
    root, backup = pair()
    path = image_of(root)
    change(root, path, 9000)
    before = all_contents(root)
    source = _PrunedWhileRead(backup, path, reads, is_read_only=True)
    if reads == 1:  # before anything was written
        with pytest.raises(RootBusy, match="pruned while it was read: 1-20"):
            repair(root, [source], {SECOND})
    else:
        _, report = repair(root, [source], {SECOND})
        assert report.mended == {} and "pruned while it was read: 1-20" in report.failed[path]
    assert all_contents(root) == before


def fill_arena(
    arena: Path, images: dict[int, bytes], shards: Iterable[tuple[bytes, ParityRecord]] = ()
) -> None:
    """The shared memory of one host: captured images, and shards of parity."""
    (arena / "parity").mkdir(parents=True)
    for rank, image in images.items():
        slot = SlotFile.create(arena / f"{rank:05}{SLOT_SUFFIX}", len(image))
        slot.image[: len(image)] = image
        header, table = seals(image)
        slot.write_record(
            SlotRecord(
                state="captured",
                image_bytes=len(image),
                header_xxh3=header,
                table_xxh3=table,
            )
        )
        slot.close()
    rows = [*shards]
    buffer = SlotFile.create(shard_path(arena, "0"), sum(len(data) for data, _ in rows) + 1)
    at = 0
    for data, record in rows:
        buffer.image[at : at + len(data)] = data
        (arena / "parity" / f"0-{at}{RECORD_SUFFIX}").write_bytes(seal(record))
        at += len(data)
    buffer.close()


def captured_at(step: int) -> dict[int, bytes]:
    """The images of this step, as they were in memory: frozen parts are in them."""
    return {rank: bytes(one.memory) for rank, one in job_at(step).images.items()}


@pytest.mark.parametrize("is_damaged_there", [False, True])
def test_what_shared_memory_still_has_is_brought_back(
    is_damaged_there: bool, tmp_path: Path
) -> None:
    root = LocalStore(tmp_path / "root")
    save_steps(root, (10, 20))
    kept = all_contents(root)
    (_, newest), home = catalogue(root).manifests, tmp_path / "memory"
    memory = captured_at(20)
    if is_damaged_there:  # behind the frozen part
        memory[0] = memory[0][:-20_000] + bytes(1) + memory[0][-19_999:]
    fill_arena(home / f"r+{root_key(root.identity())}@host", memory)
    fill_arena(home / "r+0123456789abcdef@host", captured_at(10))  # of another root
    first, second = newest.images
    part, other = newest.parts
    change(root, first.path, 4100)
    change(root, first.path, -20_000)
    change(root, part.path, 4100)
    root.remove(second.path)
    root.remove(other.path)
    assert not any(one.is_mendable for one in plan_repair(root, [], None).files)
    files = MemoryFiles(root, catalogue(root).manifests, home)
    assert len(files._files) == 4
    plan, report = repair(root, [], None, memory=[files])
    files.close()
    mended = {second.path, part.path, other.path} | (set() if is_damaged_there else {first.path})
    assert set(report.mended) == mended and not report.failed
    assert {one.path for one in plan.files if one.is_mendable} == mended
    now = all_contents(root)
    assert {path: now[path] for path in mended} == {path: kept[path] for path in mended}
    assert (now == kept) is not is_damaged_there


def lost_host(
    tmp_path: Path, layout: Layout, slot: str = "there"
) -> tuple[LocalStore, dict[str, bytes], Path, Path]:
    """A root without the files of rank 0's image, whose host "a" is lost with its memory; the
    arenas of "b", which is this host, and of "c".
    """
    root = LocalStore(tmp_path / "root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper_roots, "LAYOUT", layout)
        save_steps(root, (10, 20))
        images = captured_at(20)
    kept = all_contents(root)
    newest = manifest_of(root, SECOND)
    hosts = {"a": [0], "b": [1], "c": list[int]()}
    group = Group(hosts, images, 1, newest.attempt, newest.generation, layout)
    shards = group.rows.values()
    rows = {host: [(bytes(d), r) for at, d, r in shards if at == host] for host in hosts}
    assert rows["b"] and rows["c"]
    if slot == "changed":
        changed = bytearray(images[1])
        part = slice(10_000, 1_000_000, 5_000)
        changed[part] = bytes(one ^ 1 for one in changed[part])
        images[1] = bytes(changed)
    own, other = tmp_path / "memory", tmp_path / "from c"
    slots = {} if slot == "gone" else {1: images[1]}
    fill_arena(own / f"r+{root_key(root.identity())}@b", slots, rows["b"])
    fill_arena(other / "r+fedcba9876543210@c", {}, rows["c"])
    for ref in (*newest.images[:1], *newest.parts[:1]):
        root.remove(ref.path)
    return root, kept, own, other


WHOLE = Layout(2, (split_leaf("w", "F32", (2, 280_000), 2),))


@pytest.mark.promise
@pytest.mark.parametrize("slot", ["there", "changed", "gone"])
@pytest.mark.parametrize("layout", [LAYOUT, WHOLE])
def test_what_a_lost_host_had_is_brought_back_by_the_parity_of_the_others(
    layout: Layout, slot: str, tmp_path: Path
) -> None:
    """The other image may be in memory alone, or in the root, too, which then has it whole."""
    root, kept, own, other = lost_host(tmp_path, layout, slot)
    files = MemoryFiles(root, catalogue(root).manifests, own, others=[other])
    plan, report = repair(root, [], None, memory=[files])
    files.close()
    assert len(plan.files) == (2 if layout is LAYOUT else 1)
    now = all_contents(root) if not report.failed and len(report.mended) == len(plan.files) else {}
    if layout is WHOLE or slot == "there":
        assert now == kept
    else:  # nothing wrong takes the place of what is lost
        assert not now and not report.failed
        lost = [one.path for one in plan.files if one.lost]
        assert lost and not any(root.exists(path) for path in lost)
        assert all(root.read(path) == kept[path] for path in report.mended)


def test_no_group_is_opened_for_files_that_are_whole_and_no_slot_is_checked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, kept, own, other = lost_host(tmp_path, WHOLE, "changed")
    opened, checked = list[object](), list[object]()
    is_sound = memory_files._is_sound

    def open_group(*rest: Any) -> Any:
        opened.append(rest)
        return GroupAccess(*rest)

    def check(slot: Any) -> bool:
        checked.append(slot)
        return is_sound(slot)

    monkeypatch.setattr(memory_files, "GroupAccess", open_group)
    monkeypatch.setattr(memory_files, "_is_sound", check)
    files = MemoryFiles(root, catalogue(root).manifests, own, others=[other])
    assert not plan_repair(root, [], {FIRST}, memory=[files]).files and not opened
    report = repair(root, [], None, memory=[files])[1]
    assert all_contents(root) == kept and report.mended
    assert len(opened) == 1 and len(checked) == 1
    repair(root, [], None, memory=[files])
    assert len(opened) == 1 and len(checked) == 1
    files.close()


def test_without_the_memory_of_all_others_a_lost_host_has_nothing(tmp_path: Path) -> None:
    root, _, own, other = lost_host(tmp_path, WHOLE)
    files = MemoryFiles(root, catalogue(root).manifests, own)
    assert not repair(root, [], None, memory=[files])[1].mended
    files.close()
    with pytest.raises(UsageError, match="no arenas in it"):
        MemoryFiles(root, [], own, others=[other, tmp_path / "elsewhere"])
