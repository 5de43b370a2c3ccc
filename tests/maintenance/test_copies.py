"""Copies are bit for bit the same, whole at any moment, and refused where roots contradict."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import holdfast
from holdfast.catalogue import COPIES, LOCK, MANIFESTS, ROOT, catalogue, manifest_path
from holdfast.errors import FormatError, HoldfastError, RootBusy, StorageError, UsageError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.manifest import Generation, ImageRef, Incarnation, seal
from holdfast.maintenance import good_bytes
from holdfast.maintenance.copies import CopyReport, copy, plan_copy
from holdfast.maintenance.good_bytes import GoodFile, copy_good
from holdfast.maintenance.tier_copy import TierCopy
from holdfast.persist import commit
from holdfast.persist.pins import pin, read_pins
from holdfast.persist.removal import plan, remove
from holdfast.persist.writer import CHUNK_BYTES
from holdfast.policy.when import Keep
from holdfast.restore.reading.read import READERS
from holdfast.storage.base import ImageSink, Store
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import FaultyStore, Mode, PassingSink, PassingStore, Stopped
from support.checkpoints.keeper_roots import all_contents, change, paths_in, save_steps
from support.checkpoints.roots import whole
from support.servers.bucket_model import World, model_store

TOP = {"holdfast.json", "incarnations", "layouts", "manifests", "parts", "steps"}
MODES: list[Mode] = ["stop", "torn", "error"]


def quiet(_done: int, _total: int) -> None:
    """Nobody watches."""


def sync(source: Store, target: Store) -> CopyReport:
    return copy(source, target, None, quiet)[1]


def fallen_back() -> MemoryStore:
    """Start 1 saved 10, 20, 30; start 2 went on from 20 and saved 25. 1-30 is abandoned, 1-10
    pinned.
    """
    store = MemoryStore("source")
    save_steps(store, (10, 20, 30))
    save_steps(store, (25,), 2, (1, 20))
    pin(store, Generation(1, 10), "the first")
    return store


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_a_copy_has_every_byte_pin_and_record_of_its_source(kind: str, tmp_path: Path) -> None:
    source = fallen_back()
    target: Store = MemoryStore("t") if kind == "memory" else LocalStore(tmp_path / "target")
    report = sync(source, target)
    assert list(map(str, report.copied)) == whole(target) == ["1-10", "1-20", "1-30", "2-25"]
    assert all_contents(target) == all_contents(source)
    for path in (*paths_in(source, MANIFESTS), *paths_in(source, "incarnations")):
        assert target.read(path) == source.read(path)
    found, there = catalogue(source), catalogue(target)
    assert (there.lineage, there.abandoned) == (found.lineage, found.abandoned)
    assert {g: p.note for g, p in read_pins(target).items()} == {Generation(1, 10): "the first"}
    assert target.identity() != source.identity()
    assert paths_in(target, COPIES) == []
    assert not plan(target, Keep(), abandoned=False)


def test_frozen_parts_are_copied_once() -> None:
    source, target = MemoryStore(), FaultyStore(MemoryStore())
    save_steps(source, range(3))
    sync(source, target)
    made = [path for operation, path in target.changes if operation == "create"]
    assert len(made) == len(set(made)) == 2 + 3 * 2


def test_a_second_copy_copies_nothing_and_a_later_one_what_is_new() -> None:
    source, target = fallen_back(), MemoryStore()
    sync(source, target)
    assert sync(source, target) == CopyReport()
    save_steps(source, (26,), 2, (1, 20))
    assert sync(source, target).copied == [(2, 26)]
    assert whole(target) == whole(source)


@pytest.mark.promise
def test_a_copy_of_one_checkpoint_brings_all_records_so_that_none_given_up_is_the_newest() -> None:
    source, target = fallen_back(), MemoryStore()
    copy(source, target, [Generation(1, 30)], quiet)
    assert whole(target) == ["1-30"]
    found = catalogue(target)
    assert (found.latest, found.abandoned) == (None, ((1, 30),))
    copy(source, target, [Generation(2, 25)], quiet)
    found = catalogue(target)
    assert (found.latest, found.abandoned, found.gap) == ((2, 25), ((1, 30),), "")


def test_a_wanted_checkpoint_that_is_not_there_is_named() -> None:
    target = MemoryStore()
    made, report = copy(fallen_back(), target, [Generation(1, 20), Generation(1, 99)], quiet)
    assert (report.copied, made.missing) == ([(1, 20)], ((1, 99),))


class Pruned(PassingStore):
    """Retention takes 1-10 while a lease on it is written."""

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        super().publish(path, data, replace=replace)
        if path.startswith("readers/"):
            self.inner.remove("manifests/1-10.json")


def test_a_checkpoint_that_was_pruned_meanwhile_is_named() -> None:
    source = MemoryStore()
    save_steps(source, (10, 20))
    report = sync(Pruned(source), MemoryStore())
    assert (report.copied, report.pruned, report.failed) == ([(1, 20)], [(1, 10)], [])


@pytest.mark.promise
@pytest.mark.parametrize("what", ["image", "part", "layout", "length"])
def test_what_the_target_lost_of_a_checkpoint_comes_back(what: str) -> None:
    source, target = fallen_back(), MemoryStore("target")
    sync(source, target)
    found = catalogue(target).find(Generation(2, 25))
    assert found is not None
    image, part = found.images[0].path, found.parts[0].path
    path = {"part": part, "layout": f"layouts/{found.layout}.json"}.get(what, image)
    sound = target.read(path)
    target.remove(path)
    if what == "length":
        target.publish(path, sound[:5000])
    made, report = copy(source, target, None, quiet)
    lost = [(1, 10), (1, 20), (1, 30), (2, 25)] if what in ("part", "layout") else [(2, 25)]
    assert (report.copied, report.failed) == (lost, [])
    assert [m.generation for m in made.checkpoints] == lost
    assert target.read(path) == sound
    assert whole(target) == whole(source)
    assert not plan(target, Keep(), abandoned=False)
    assert sync(source, target) == CopyReport()


@pytest.mark.promise
def test_all_records_are_durable_before_the_first_manifest() -> None:
    target = FaultyStore(MemoryStore())
    sync(fallen_back(), target)
    order = [path.partition("/")[0] for _, path in target.changes]
    assert order.index(MANIFESTS) > max(k for k, one in enumerate(order) if one == "incarnations")


def test_checkpoints_of_the_target_that_the_copied_records_give_up_are_named() -> None:
    source, target = MemoryStore(), MemoryStore()
    save_steps(source, (10, 20, 30))
    assert copy(source, target, None, quiet)[0].abandons == ()
    save_steps(source, (25,), 2, (1, 20))
    assert plan_copy(source, target, [Generation(2, 25)]).abandons == ((1, 30),)
    sync(source, target)
    assert catalogue(target).abandoned == ((1, 30),)
    assert plan_copy(source, target, None).abandons == ()


def image_of(store: Store, n: int, step: int) -> ImageRef:
    found = catalogue(store).find(Generation(n, step))
    assert found is not None
    return found.images[1]


def broken_off(k: int, mode: Mode, source: Store) -> MemoryStore:
    target = MemoryStore()
    with suppress(Stopped, StorageError):
        sync(source, FaultyStore(target, fail_at=k, mode=mode))
    return target


@pytest.mark.promise
@pytest.mark.parametrize("mode", MODES)
def test_stopped_anywhere_a_target_is_whole_and_the_next_copy_ends_it(mode: Mode) -> None:
    source = MemoryStore()
    save_steps(source, (10, 20))
    counted = FaultyStore(MemoryStore())
    sync(source, counted)
    for k in range(1, len(counted.changes) + 1):
        target = broken_off(k, mode, source)
        assert whole(target) in ([], ["1-10"], ["1-10", "1-20"])
        before = set(paths_in(target))
        removal = plan(target, Keep(), abandoned=False)
        report = sync(source, target)
        assert whole(target) == ["1-10", "1-20"]
        assert all_contents(target) == all_contents(source)
        assert paths_in(target, COPIES) == []
        assert not plan(target, Keep(), abandoned=False), "the copy leaves nothing behind"
        assert report.failed == []
        assert {name for name in target.list("") if name != "pins"} == TOP
        # And if nobody goes on: prune finds whatever lies there beside whole checkpoints.
        target = broken_off(k, mode, source)
        assert plan(target, Keep(), abandoned=False) == removal
        remove(target, removal)
        left = {ref for m in catalogue(target).manifests for ref in m.directories}
        for path in set(paths_in(target)) & before:
            if path.startswith(("steps/", "parts/", "copies/")):
                assert path.rpartition("/")[0] in left, (k, path)


def test_what_was_copied_when_a_copy_broke_off_is_not_copied_again() -> None:
    source = MemoryStore()
    save_steps(source, (10,))
    counted = FaultyStore(MemoryStore())
    sync(source, counted)
    images = [k for k, (operation, _) in enumerate(counted.changes, 1) if operation == "finish"]
    target = MemoryStore()
    with pytest.raises(Stopped):
        sync(source, FaultyStore(target, fail_at=images[-1], mode="stop"))
    report = sync(source, target)
    sizes = {path: len(data) for path, data in all_contents(source).items()}
    last = counted.changes[images[-1] - 1][1]
    assert (report.size_bytes, report.resumed_bytes) == (
        sizes[last],
        sum(sizes.values()) - sizes[last],
    )


def test_a_file_that_was_not_finished_is_never_taken_for_copied() -> None:
    source, target = MemoryStore(), MemoryStore()
    save_steps(source, (10,))
    commit.open_root(target, "r")
    for path, data in all_contents(source).items():
        target.publish(path, data)  # whole to look at; whether it is durable, nobody knows
    assert sync(source, target).resumed_bytes == 0


@pytest.mark.parametrize("at", [20, 9000], ids=["header", "block"])
def test_a_damaged_checkpoint_is_left_out_and_named_and_the_others_are_copied(at: int) -> None:
    source, target = MemoryStore("source"), MemoryStore()
    save_steps(source, (10, 20))
    path = image_of(source, 1, 10).path
    change(source, path, at)
    report = sync(source, target)
    assert whole(target) == ["1-20"]
    ((generation, reason),) = report.failed
    assert generation == (1, 10)
    assert path in reason
    assert "holdfast repair" in reason


def test_a_damaged_block_table_is_computed_from_the_blocks_that_it_is_of() -> None:
    source, target = MemoryStore("source"), MemoryStore()
    save_steps(source, (10,))
    sound = all_contents(source)
    change(source, image_of(source, 1, 10).path, -8 * 512)
    sync(source, target)
    assert all_contents(target) == sound


def test_a_damaged_manifest_of_the_source_is_not_copied_and_is_named() -> None:
    source, target = fallen_back(), MemoryStore()
    change(source, "manifests/1-20.json")
    made, report = copy(source, target, None, quiet)
    assert [path for path, _ in made.broken] == ["manifests/1-20.json"]
    assert list(map(str, report.copied)) == ["1-10", "1-30", "2-25"]


def partly_copied(source: Store) -> tuple[MemoryStore, ImageRef]:
    """The target of a copy that broke off before its last manifest; and an image of that."""
    target = MemoryStore("target")
    counted = FaultyStore(MemoryStore())
    sync(source, counted)
    last = [k for k, (_, path) in enumerate(counted.changes, 1) if path.startswith(MANIFESTS)][-1]
    with pytest.raises(Stopped):
        sync(source, FaultyStore(target, fail_at=last, mode="stop"))
    return target, image_of(source, 1, 20)


@pytest.mark.promise
@pytest.mark.parametrize("at", [20, 9000], ids=["header", "block"])
@pytest.mark.parametrize("is_noted", [True, False], ids=["noted", "not noted"])
def test_bytes_that_the_target_alone_has_are_not_lost(at: int, is_noted: bool) -> None:
    source = MemoryStore("source")
    save_steps(source, (10, 20))
    sound = all_contents(source)
    target, ref = partly_copied(source)
    if not is_noted:
        for path in paths_in(target, COPIES):
            target.remove(path)
    change(source, ref.path, at)
    report = sync(source, target)
    assert (report.failed, whole(target)) == ([], ["1-10", "1-20"])
    assert all_contents(target) == sound
    assert not plan(target, Keep(), abandoned=False), "nothing is left behind"


@pytest.mark.promise
@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_in_a_directory_and_in_a_bucket_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MemoryStore("source")
    save_steps(source, (10, 20))
    sound = all_contents(source)
    target: Store = LocalStore(tmp_path)
    if kind == "bucket":
        target = model_store(World(), monkeypatch, part_bytes=1 << 22, tries_s=1.0)
    sync(source, target)
    target.remove("manifests/1-20.json")
    change(source, image_of(source, 1, 20).path, 9000)
    report = sync(source, target)
    assert (report.failed, whole(target)) == ([], ["1-10", "1-20"])
    assert all_contents(target) == sound
    assert not plan(target, Keep(), abandoned=False)


@pytest.mark.promise
def test_where_neither_has_all_bytes_those_of_the_target_stay() -> None:
    source = MemoryStore("source")
    save_steps(source, (10, 20))
    target, ref = partly_copied(source)
    for store in (source, target):
        change(store, ref.path, 9000)
    there = target.read(ref.path)
    report = sync(source, target)
    assert [generation for generation, _ in report.failed] == [(1, 20)]
    assert whole(target) == ["1-10"]
    assert target.read(ref.path) == there


@pytest.mark.promise
def test_bytes_that_changed_after_they_were_copied_are_copied_again() -> None:
    source = MemoryStore("source")
    save_steps(source, (10, 20))
    target, ref = partly_copied(source)
    change(target, ref.path, 9000)
    report = sync(source, target)
    assert report.size_bytes == ref.size_bytes
    assert all_contents(target) == all_contents(source)
    assert not plan(target, Keep(), abandoned=False)


@pytest.mark.promise
def test_no_image_is_removed_before_it_is_written() -> None:
    """In a bucket a removal may take effect late, when the name has its new bytes."""
    source = MemoryStore("source")
    save_steps(source, (10, 20))
    target, _ = partly_copied(source)
    for path in paths_in(target, COPIES):
        target.remove(path)
    counted = FaultyStore(target)
    sync(source, counted)
    removed = {path for operation, path in counted.changes if operation.startswith("remove")}
    assert not {path for path in removed if path.startswith(("steps/", "parts/"))}


def another_run(source: Store, target: Store) -> None:
    commit.open_root(target, "another")


def another_start(source: Store, target: Store) -> None:
    sync(source, target)
    for store, nonce in ((source, "here"), (target, "there")):
        made = Incarnation(run_id="r", n=3, nonce=nonce, parent=(2, 25))
        store.publish("incarnations/3.json", seal(made))


def another_attempt(source: Store, target: Store) -> None:
    sync(source, target)
    target.remove("manifests/2-25.json")
    found = catalogue(source).find(Generation(2, 25))
    assert found is not None
    target.publish("manifests/2-25.json", source.read("manifests/2-25.json"))
    target.remove("manifests/2-25.json")
    other = MemoryStore()
    save_steps(other, (10, 20, 30))
    save_steps(other, (25,), 2, None)
    target.publish("manifests/2-25.json", other.read("manifests/2-25.json"))


def another_run_without_its_root_document(source: Store, target: Store) -> None:
    save_steps(target, (10, 20))
    for m in catalogue(target).manifests:
        data = seal(replace(m, run_id="another"))
        target.publish(manifest_path(m.generation), data, replace=True)
    for path in (ROOT, "incarnations/1.json"):
        target.remove(path)


def another_record_without_its_root_document(source: Store, target: Store) -> None:
    target.publish("incarnations/1.json", seal(Incarnation(run_id="another", n=1, nonce="n1")))


def a_manifest_of_another_run(source: Store, target: Store) -> None:
    commit.open_root(target, "r")
    another_run_without_its_root_document(source, target)
    commit.open_root(target, "r")


def a_mixed_source(source: Store, target: Store) -> None:
    found = catalogue(source).find(Generation(1, 10))
    assert found is not None
    data = seal(replace(found, run_id="another"))
    source.publish(manifest_path(found.generation), data, replace=True)


def an_unreadable_record_of_no_known_run(source: Store, target: Store) -> None:
    target.publish("incarnations/1.json", b"damaged")


def an_unreadable_pin_of_no_known_run(source: Store, target: Store) -> None:
    target.publish("pins/1-10.json", b"damaged")


def an_unreadable_record_of_another_start(source: Store, target: Store) -> None:
    copy(source, target, [Generation(1, 10)], quiet)
    target.publish("incarnations/2.json", b"damaged", replace=True)


def another_parent_without_a_record(source: Store, target: Store) -> None:
    copy(source, target, [Generation(1, 10)], quiet)
    save_steps(target, (40,), 2, (1, 10))
    target.remove("incarnations/2.json")


def the_same_parent_without_a_record(source: Store, target: Store) -> None:
    sync(source, target)
    target.remove("incarnations/2.json")
    found = catalogue(target).find(Generation(2, 25))
    assert found is not None
    target.remove("manifests/2-25.json")
    save_steps(target, (40,), 2, (1, 20))
    target.remove("incarnations/2.json")


def a_broken_manifest(source: Store, target: Store) -> None:
    sync(source, target)
    change(target, "manifests/1-20.json")


def damaged_part(source: Store, target: Store) -> None:
    copy(source, target, [Generation(1, 10)], quiet)
    found = catalogue(target).find(Generation(1, 10))
    assert found is not None
    change(target, found.parts[0].path, 20)


REFUSALS: dict[str, tuple[Callable[[Store, Store], None], str]] = {
    "another run": (another_run, "two runs never share a root"),
    "another run without holdfast.json": (another_run_without_its_root_document, "never share"),
    "a record without holdfast.json": (another_record_without_its_root_document, "never share"),
    "a manifest of another run": (a_manifest_of_another_run, "never share a root"),
    "a manifest of another run in the source": (a_mixed_source, "never share a root"),
    "an unreadable record, no root": (an_unreadable_record_of_no_known_run, "cannot be told"),
    "an unreadable pin, no root": (an_unreadable_pin_of_no_known_run, "cannot be told"),
    "an unreadable record": (an_unreadable_record_of_another_start, "cannot be told"),
    "another parent, no record": (another_parent_without_a_record, "is another start than in"),
    "the same parent, no record": (the_same_parent_without_a_record, "cannot be told"),
    "another start of one number": (another_start, "is another start than in"),
    "another checkpoint of one generation": (another_attempt, "both roots were written to"),
    "a broken manifest": (a_broken_manifest, "holdfast repair memory://target --from"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_roots_that_contradict_each_other_are_left_as_they_are(name: str) -> None:
    make, said = REFUSALS[name]
    source, target = fallen_back(), MemoryStore("target")
    make(source, target)
    before = {path: target.read(path) for path in paths_in(target)}
    with pytest.raises(HoldfastError, match=said):
        sync(source, target)
    assert {path: target.read(path) for path in paths_in(target)} == before


@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "unreadable"])
def test_a_record_that_the_target_lost_comes_back_where_a_manifest_tells_its_start(
    is_missing: bool,
) -> None:
    source, target = fallen_back(), MemoryStore("target")
    sync(source, target)
    target.publish("incarnations/2.json", b"damaged", replace=True)
    if is_missing:
        target.remove("incarnations/2.json")
    sync(source, target)
    assert target.read("incarnations/2.json") == source.read("incarnations/2.json")


def test_a_part_that_is_damaged_in_the_target_is_not_named_once_more() -> None:
    source, target = fallen_back(), MemoryStore("target")
    damaged_part(source, target)
    report = sync(source, target)
    assert report.copied == []
    assert all("holdfast repair memory://target --from" in reason for _, reason in report.failed)


def test_a_root_is_not_copied_to_itself_nor_while_a_run_writes_there() -> None:
    source, target = fallen_back(), MemoryStore()
    with pytest.raises(UsageError, match="are one root"):
        sync(source, source)
    with target.lock(LOCK, "a run"), pytest.raises(RootBusy):
        sync(source, target)
    assert not target.exists(ROOT)
    another_attempt(source, target)
    with pytest.raises(FormatError, match="is another checkpoint"):
        plan_copy(source, target, None)


class ReadsSeen(PassingStore):
    """Counts the reads of data that were begun."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.changed, self.begun = threading.Condition(), 0

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        with self.changed:
            self.begun += 1
            self.changed.notify_all()
        super().read_into(path, offset_bytes, buffer, is_shared=is_shared)


class PatientSink(PassingSink):
    """Ends no write before there are as many more reads under way as a verification has."""

    def __init__(self, inner: ImageSink, source: ReadsSeen, chunks: int) -> None:
        super().__init__(inner)
        self._source, self._chunks, self._ended = source, chunks, 0

    def write(self, offset_bytes: int, data: memoryview) -> None:
        super().write(offset_bytes, data)
        changed = self._source.changed
        with changed:
            least = min(self._chunks, self._ended + READERS + 1) if offset_bytes else 0
            assert changed.wait_for(lambda: self._source.begun >= least, 10), "nothing is read"
            self._ended += bool(offset_bytes)


def test_while_chunks_are_written_as_many_are_read_as_while_none_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(good_bytes, "CHUNK_BYTES", BLOCK_BYTES)
    holdfast.save(tmp_path, {"w": torch.arange(2 << 20)}, step=1)
    source, target = LocalStore(tmp_path), MemoryStore()
    (ref,) = catalogue(source).manifests[0].images
    seen = ReadsSeen(source)
    good = GoodFile(ref, [seen])
    assert good.blocks > 3 * READERS
    copy_good(PatientSink(target.create(ref.path, ref.size_bytes), seen, good.blocks), good)
    assert target.read(ref.path) == source.read(ref.path)


class UncheckedFile(GoodFile):
    """Gives out data that are no whole blocks, too."""

    def _fill(self, start: int, stop: int, view: memoryview) -> None:
        assert self._read(self._stores[0], start, view)


def test_the_bytes_of_a_file_are_those_asked_for_wherever_a_piece_of_them_ends() -> None:
    source = fallen_back()
    ref = catalogue(source).manifests[0].images[0]
    image, good = source.read(ref.path), UncheckedFile(ref, [source])
    assert good.header is not None
    begin, table = good.header.data_start, good.header.data_start + good.header.table.offset
    for stop in (begin + 1, table - 4095, table - 1, table, table + 1, len(image)):
        assert good.chunk(begin, stop) == image[begin:stop], f"{table - stop} before the table"


@pytest.mark.slow
def test_an_image_that_ends_just_behind_a_chunk_is_copied_and_drained(tmp_path: Path) -> None:
    """Its table of blocks is longer than what the last chunk has of its data."""
    weights = torch.zeros(512 << 18)
    weights[::4096] = torch.arange(len(weights) >> 12)
    holdfast.save(tmp_path / "source", {"w": weights}, step=1)
    source, target = LocalStore(tmp_path / "source"), LocalStore(tmp_path / "target")
    header = GoodFile(catalogue(source).manifests[0].images[0], [source]).header
    assert header is not None
    assert 0 < header.table.offset % CHUNK_BYTES < header.table.size_bytes
    assert list(map(str, sync(source, target).copied)) == ["1-1"]
    drained = LocalStore(tmp_path / "drained")
    TierCopy(source, drained).copy_files(catalogue(source).manifests[0])
    there = {"w": torch.zeros_like(weights)}
    holdfast.load(tmp_path / "target", there)
    assert torch.equal(there["w"], weights)
    for ref in catalogue(source).manifests[0].images:
        assert drained.read(ref.path) == source.read(ref.path)
