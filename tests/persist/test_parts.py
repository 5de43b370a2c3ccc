"""Frozen leaves are written once, and again only if they changed; what is named is always whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.catalogue import catalogue, damage_note
from holdfast.errors import ChecksumMismatch, StorageError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Manifest
from holdfast.geometry.layout import Layout
from holdfast.keeper.image_writer import ImageJob, PersistJob
from holdfast.keeper.persister import Persister
from holdfast.persist import commit
from holdfast.persist.pins import pin
from holdfast.persist.removal import plan, remove
from holdfast.policy.when import Keep
from holdfast.restore.reading.images import from_manifest
from holdfast.restore.reading.read import verify_blocks
from holdfast.restore.reading.verify import verify
from holdfast.storage.base import Store
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import FaultyStore, Mode, PassingStore, Stopped
from support.checkpoints.images import halves, images_of, random_leaf, seals, split_leaf
from support.checkpoints.roots import whole

SHAPE = (2, 280_000)  # of each rank a little more than a block
LAYOUT = Layout(
    2, (split_leaf("base", "F32", SHAPE, 2, is_frozen=True), split_leaf("lora", "F32", (6, 3), 2))
)
#: A state in which nothing is frozen any more.
THAWED = Layout(2, (split_leaf("base", "F32", SHAPE, 2), split_leaf("lora", "F32", (6, 3), 2)))
BASES = [random_leaf("F32", SHAPE, seed) for seed in range(3)]
FIRST = Generation(1, 0)


def job_at(
    step: int,
    base: int = 0,
    incarnation: int = 1,
    parent: tuple[int, int] | None = None,
    layout: Layout = LAYOUT,
) -> PersistJob:
    """A captured generation, as the keeper hands it to its persister."""
    generation, attempt = Generation(incarnation, step), f"a{incarnation}x{step}"
    leaves = {"base": BASES[base], "lora": random_leaf("F32", (6, 3), 1000 + step)}
    images = images_of(layout, leaves, generation=generation, attempt=attempt)
    jobs = {rank: ImageJob(rank, memoryview(image)) for rank, image in images.items()}
    for rank, image in images.items():
        jobs[rank].seal(*seals(image))
    record = Incarnation(run_id="r", n=incarnation, nonce=f"n{incarnation}", parent=parent)
    job = PersistJob(attempt, generation, layout.to_json(), jobs, record, 2, layout.hash)
    job.is_complete.set()
    return job


def run(store: Store, jobs: Sequence[PersistJob], keep: Keep = Keep()) -> list[str | None]:  # noqa: B008
    """One keeper makes these durable one after the other; how each ended."""
    outcomes: list[str | None] = []
    persister = Persister(store, keep, lambda _, reason: outcomes.append(reason))
    try:
        for job in jobs:
            persister.work_one(job)
    except Stopped:
        outcomes.append("stopped")
    persister.stop()
    return outcomes


def named(store: Store, step: int, incarnation: int = 1) -> Manifest:
    found = catalogue(store).find(Generation(incarnation, step))
    assert found is not None
    return found


def parts_of(store: Store, step: int, incarnation: int = 1) -> list[str]:
    return [part.path for part in named(store, step, incarnation).parts]


def written(store: FaultyStore) -> list[str]:
    return [path for operation, path in store.changes if operation == "create"]


def leaves_of(store: Store, step: int, incarnation: int = 1) -> list[bytes]:
    """The bytes of every leaf of a checkpoint, by rank, read block by block and verified."""
    checkpoint = from_manifest(store, named(store, step, incarnation))
    found = []
    for rank in range(2):
        header = checkpoint.header(rank)
        verify_blocks(checkpoint, rank, 0, header.blocks)
        file = checkpoint.files[rank]
        for name in sorted(header.entries):
            entry = header.entries[name]
            start = header.data_start + entry.offset
            found.append(bytes(file.view(start, start + entry.size_bytes, bytearray())))
    return found


def content(base: int, step: int) -> list[bytes]:
    lora = random_leaf("F32", (6, 3), 1000 + step)
    return [
        one
        for rank in range(2)
        for one in (BASES[base][rank].tobytes(), lora[3 * rank : 3 * rank + 3].tobytes())
    ]


# ── once ─────────────────────────────────────────────────────────────────────────────────────


def test_frozen_leaves_are_written_once_and_named_by_every_manifest() -> None:
    counted = FaultyStore(MemoryStore())
    heard: list[Any] = []
    end = events.subscribe(lambda event, _: heard.append(event))
    assert run(counted, [job_at(step) for step in range(3)]) == [None] * 3
    end()
    parts = [path for path in written(counted) if path.startswith("parts/")]
    assert sorted(parts) == parts_of(counted, 0) == parts_of(counted, 1) == parts_of(counted, 2)
    assert len(parts) == 2
    assert sum(path.startswith("steps/") for path in written(counted)) == 6
    told = [event for event in heard if isinstance(event, events.CheckpointPublished)]
    first, *others = (event.size_bytes - event.reused_bytes for event in told)
    assert first > 2 * BLOCK_BYTES
    assert [event.size_bytes for event in told] == [first] * 3
    for step, own in enumerate(others, 1):
        assert own == sum(image.size_bytes for image in named(counted, step).images) < 50_000
    durable = [event.image for event in heard if isinstance(event, events.ImageDurable)]
    assert sorted(durable) == sorted(written(counted))
    for step in range(3):
        assert leaves_of(counted, step) == content(0, step)
    assert whole(counted) == ["1-0", "1-1", "1-2"]


def test_a_keeper_started_later_finds_what_an_earlier_one_wrote() -> None:
    store = MemoryStore()
    assert run(store, [job_at(0)]) == [None]
    counted = FaultyStore(store)
    assert run(counted, [job_at(1, incarnation=2, parent=(1, 0))]) == [None]
    assert not any(path.startswith("parts/") for path in written(counted))
    assert parts_of(store, 1, 2) == parts_of(store, 0)
    assert whole(store) == ["1-0", "2-1"]


def test_what_changed_is_written_anew_and_what_was_there_before_is_named_again() -> None:
    store = MemoryStore()
    assert run(store, [job_at(0, 0), job_at(1, 1), job_at(2, 0), job_at(3, 1)]) == [None] * 4
    assert parts_of(store, 2) == parts_of(store, 0)
    assert parts_of(store, 3) == parts_of(store, 1)
    assert set(parts_of(store, 0)).isdisjoint(parts_of(store, 1))
    for step, base in enumerate((0, 1, 0, 1)):
        assert leaves_of(store, step) == content(base, step)
    assert len(store.list("parts")) == 2


def test_only_the_rank_whose_part_changed_writes_it() -> None:
    store = MemoryStore()
    both = BASES[0].copy()
    both[1] = BASES[1][1]
    BASES.append(both)
    try:
        assert run(store, [job_at(0, 0), job_at(1, 3)]) == [None] * 2
        one, other = parts_of(store, 0), parts_of(store, 1)
        assert one[0] == other[0] and one[1] != other[1]
        assert leaves_of(store, 1) == content(3, 1)
    finally:
        BASES.pop()


def test_leaves_that_are_frozen_no_more_lie_in_the_image_again() -> None:
    store = MemoryStore()
    jobs = [job_at(0), job_at(1, layout=THAWED), job_at(2)]
    assert run(store, jobs) == [None] * 3
    assert parts_of(store, 1) == []
    assert named(store, 1).requires == ()
    assert named(store, 1).image_bytes > 2 * BLOCK_BYTES
    assert parts_of(store, 2) == parts_of(store, 0)
    for step in range(3):
        assert leaves_of(store, step) == content(0, step)


# ── never trusted ────────────────────────────────────────────────────────────────────────────


def damage(store: MemoryStore, path: str, at: int) -> None:
    data = bytearray(store.read(path))
    data[at] ^= 1
    store.publish(path, bytes(data), replace=True)


@pytest.mark.promise
@pytest.mark.parametrize("how", ["header", "table", "short", "gone", "noted"])
def test_a_stored_part_that_is_not_what_it_was_is_not_named_again(how: str) -> None:
    store = MemoryStore()
    assert run(store, [job_at(0)]) == [None]
    path = parts_of(store, 0)[1]
    if how == "header":
        damage(store, path, 100)
    elif how == "table":
        damage(store, path, len(store.read(path)) - 4096)
    elif how == "short":
        store.publish(path, store.read(path)[:-4096], replace=True)
    elif how == "gone":
        store.remove(path)
    else:
        store.publish(damage_note(path), b"")
    assert run(store, [job_at(1), job_at(2)]) == [None] * 2
    kept, anew = parts_of(store, 1)
    assert kept == parts_of(store, 0)[0] and anew != path
    assert parts_of(store, 2) == [kept, anew]
    assert leaves_of(store, 2) == content(0, 2)


@pytest.mark.parametrize("finder", ["verify", "read"])
def test_a_changed_block_is_found_noted_and_the_part_written_anew(finder: str) -> None:
    store = MemoryStore()
    assert run(store, [job_at(0), job_at(1)]) == [None] * 2
    path = parts_of(store, 0)[0]
    damage(store, path, 8192 + BLOCK_BYTES)
    # Nobody has looked yet: it is named again, for a durable save reads no stored blocks.
    assert run(store, [job_at(2)]) == [None]
    assert parts_of(store, 2) == parts_of(store, 0)
    if finder == "verify":
        (fault,) = verify(store, named(store, 2), deep=True).faults
    else:
        with pytest.raises(ChecksumMismatch) as caught:
            leaves_of(store, 2)
        fault = str(caught.value)
    assert f"block 1 of {path} (a frozen part: it is noted as damaged" in fault
    assert run(store, [job_at(3), job_at(4)]) == [None] * 2
    assert parts_of(store, 3)[0] != path
    assert parts_of(store, 3)[1] == parts_of(store, 0)[1]
    assert parts_of(store, 4) == parts_of(store, 3)
    assert leaves_of(store, 4) == content(0, 4)
    # Every bit of the old checkpoints that is good stays readable, and they stay faulty.
    assert verify(store, named(store, 0), deep=True).faults


class _ReadOnly(PassingStore):
    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        raise StorageError(f"{path}: read-only")


def test_who_may_not_write_says_what_to_do() -> None:
    store = MemoryStore()
    assert run(store, [job_at(0)]) == [None]
    damage(store, parts_of(store, 0)[0], 8192)
    (fault,) = verify(_ReadOnly(store), named(store, 0), deep=True).faults
    assert "(a frozen part: move it away, so that the next durable save writes another)" in fault


@pytest.mark.parametrize("half", ["frozen", "live"])
def test_a_bit_that_changes_in_memory_after_the_seal_is_never_stored(half: str) -> None:
    store, job = MemoryStore(), job_at(0)
    at = 8192 if half == "frozen" else 4096 + 2 * BLOCK_BYTES + 8
    job.images[1].memory[at] ^= 1
    (reason,) = run(store, [job])
    assert reason is not None and "block 0 of" in reason
    assert store.list("manifests") == store.list("steps") == store.list("parts") == []


def test_a_bit_of_a_frozen_block_that_is_stored_already_is_not_read_from_memory() -> None:
    store = MemoryStore()
    assert run(store, [job_at(0)]) == [None]
    job = job_at(1)
    job.images[1].memory[8192] ^= 1  # what was captured is what is stored
    assert run(store, [job]) == [None]
    assert leaves_of(store, 1) == content(0, 1)


@pytest.mark.parametrize("what", ["header", "table"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_an_image_that_is_not_the_sealed_one_is_not_published(what: str, is_stored: bool) -> None:
    store = MemoryStore()
    if is_stored:
        assert run(store, [job_at(0)]) == [None]
    before = store.list("parts")
    job = job_at(1)
    if what == "header":
        job.images[1].header_xxh3 = "0" * 16
    else:
        job.images[1].table_xxh3 = "0" * 16
    (reason,) = run(store, [job])
    assert reason is not None and "changed after the image was sealed" in reason
    assert store.list("parts") == before
    assert len(store.list("manifests")) == is_stored


# ── kept as long as it is named, and no longer ───────────────────────────────────────────────


def test_a_part_goes_at_the_second_publication_after_nobody_names_it() -> None:
    store = MemoryStore()
    lives = []
    jobs = [job_at(0, 0), job_at(1, 0), *(job_at(step, 1) for step in range(2, 6))]
    persister = Persister(store, Keep(last=1), lambda *_: None)
    for job in jobs:
        persister.work_one(job)
        lives.append([name[:4] for name in store.list("parts")])
        check(store)
    persister.stop()
    assert lives == [["1-0-"]] * 2 + [["1-0-", "1-2-"]] * 2 + [["1-2-"]] * 2
    assert whole(store) == ["1-5"]


def test_a_pinned_checkpoint_keeps_its_parts() -> None:
    store = MemoryStore()
    assert run(store, [job_at(0)]) == [None]
    pin(store, FIRST)
    assert run(store, [job_at(step, 1) for step in range(1, 6)], Keep(last=1)) == [None] * 5
    assert whole(store) == ["1-0", "1-5"]


def test_a_pruner_killed_before_it_saw_the_pin_is_made_up_for() -> None:
    store = MemoryStore()
    assert run(store, [job_at(0), job_at(1, 1)]) == [None] * 2
    pin(store, FIRST)
    store.remove("manifests/1-0.json")
    assert run(store, [job_at(2, 1)], Keep(last=1)) == [None]
    assert whole(store) == ["1-0", "1-2"]


@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_checkpoint_whose_part_is_not_whole_is_not_published_back(how: str) -> None:
    store = MemoryStore()
    assert run(store, [job_at(0), job_at(1, 1)]) == [None] * 2
    pin(store, FIRST)
    path = parts_of(store, 0)[1]
    store.remove("manifests/1-0.json")
    data = store.read(path)
    store.remove(path)
    if how == "short":
        store.publish(path, data[:-4096])
    assert run(store, [job_at(2, 1)], Keep(last=1)) == [None]
    assert whole(store) == ["1-2"]


def test_pruning_by_hand_frees_the_parts_that_nothing_left_names() -> None:
    store = MemoryStore()
    assert run(store, [job_at(0, 0), job_at(1, 1), job_at(2, 1)]) == [None] * 3
    sizes = {path: len(data) for path, data in store._files.items()}
    removal = plan(store, Keep(last=1), abandoned=False)
    assert [one.path for one in removal.parts] == [parts_of(store, 0)[0].rpartition("/")[0]]
    assert removal.directories == ()
    gone = remove(store, removal)
    assert gone == removal
    freed = {path: size for path, size in sizes.items() if path not in store._files}
    documents = sum(size for path, size in freed.items() if path.startswith("manifests/"))
    assert removal.size_bytes == sum(freed.values()) - documents
    assert whole(store) == ["1-2"]
    assert len(store.list("parts")) == 1


def test_what_a_killed_attempt_left_of_a_part_is_a_leftover() -> None:
    store = MemoryStore()
    assert run(store, [job_at(0)]) == [None]
    store.publish("parts/1-7-dead/frozen-00000.safetensors", b"x" * 500)
    removal = plan(store, Keep(), abandoned=False)
    assert [(one.path, one.size_bytes) for one in removal.directories] == [("parts/1-7-dead", 500)]
    remove(store, removal)
    assert whole(store) == ["1-0"]


def check(store: Store) -> None:
    """Every manifest there names a whole checkpoint."""
    found = catalogue(store)
    assert not found.broken
    for manifest in found.manifests:
        assert not verify(store, manifest, deep=True).faults, manifest.generation


#: Unchanged, changed, changed back while the first may be on its way out.
BASE_AT = [0, 0, 1, 1, 0, 1]


def jobs_of(incarnation: int = 1, parent: tuple[int, int] | None = None) -> list[PersistJob]:
    first = 10 * incarnation
    return [job_at(first + n, base, incarnation, parent) for n, base in enumerate(BASE_AT)]


@pytest.mark.parametrize("mode", ["stop", "torn", "error"])
def test_no_fault_at_any_operation_takes_or_spoils_a_part_that_a_manifest_names(mode: Mode) -> None:
    counted = FaultyStore(MemoryStore())
    assert run(counted, jobs_of(), Keep(last=1)) == [None] * len(BASE_AT)
    names = [path for operation, path in counted.changes if operation == "remove_tree"]
    assert any(path.startswith("parts/") for path in names)
    for k in range(1, len(counted.changes) + 1):
        inner = MemoryStore()
        outcomes = run(FaultyStore(inner, fail_at=k, mode=mode), jobs_of(), Keep(last=1))
        check(inner)
        found = catalogue(inner)
        if None in outcomes:
            assert found.latest is not None
        if k % 5:
            continue  # the next start of the run, after every fifth
        again = jobs_of(2, found.latest)
        assert run(inner, again, Keep(last=1)) == [None] * len(BASE_AT)
        check(inner)
        assert [m.generation for m in catalogue(inner).manifests] == [(2, 25)]
        assert leaves_of(inner, 25, 2) == content(1, 25)


def test_in_a_directory_a_part_is_durable_before_the_manifest_that_names_it(tmp_path: Path) -> None:
    counted = FaultyStore(LocalStore(tmp_path))
    assert run(counted, [job_at(0), job_at(1, 1)]) == [None] * 2
    manifest = counted.changes.index(("publish", "manifests/1-1.json"))
    for path in (*parts_of(counted, 1), *(i.path for i in named(counted, 1).images)):
        assert counted.changes.index(("finish", path)) < manifest
    assert whole(counted) == ["1-0", "1-1"]


# ── other forms ──────────────────────────────────────────────────────────────────────────────


def test_an_image_with_its_frozen_leaves_in_one_file_is_read_beside_those_in_two() -> None:
    """As it is written where it passes through a window of memory."""
    store = MemoryStore()
    assert run(store, [job_at(0)]) == [None]
    job = job_at(1)
    refs = []
    for rank, image in job.images.items():
        path = f"steps/1-1-whole/live-{rank:05d}.safetensors"
        store.publish(path, bytes(image.memory))
        refs.append(
            ImageRef(
                path=path,
                rank=rank,
                size_bytes=len(image.memory),
                header_xxh3=image.header_xxh3,
                table_xxh3=image.table_xxh3,
            )
        )
    commit.publish(
        store,
        Manifest(
            run_id="r",
            incarnation=1,
            step=1,
            attempt=job.attempt,
            world=2,
            layout=LAYOUT.hash,
            images=tuple(refs),
        ),
    )
    assert run(store, [job_at(2)]) == [None]
    assert parts_of(store, 2) == parts_of(store, 0)
    for step in range(3):
        assert leaves_of(store, step) == content(0, step)
    assert whole(store) == ["1-0", "1-1", "1-2"]
    # Whoever does not know of gaps refuses the image, with or without its manifest.
    (header,) = {
        image.memory[:4096].tobytes().count(b'"requires":"parts"') for image in job.images.values()
    }
    assert header == 1


def test_a_rank_that_has_too_little_that_is_frozen_has_no_part() -> None:
    shape = (3, 180_000)  # 720 kB for each of three ranks, 1.4 MB for the first of two
    three = Layout(3, (split_leaf("base", "F32", shape, 3, is_frozen=True),))
    base = {"base": random_leaf("F32", shape, 1)}
    plain, apart = (
        images_of(three, base),
        images_of(Layout(2, (split_leaf("base", "F32", shape, 2, is_frozen=True),)), base),
    )
    assert [halves(image)[1] is not None for image in plain.values()] == [False] * 3
    assert [halves(image)[1] is not None for image in apart.values()] == [True, False]


def test_a_root_whose_manifests_cannot_be_listed_gets_its_parts_anew() -> None:
    class Blind(PassingStore):
        def list(self, prefix: str) -> list[str]:
            raise StorageError(f"{prefix}: not now")

    store = MemoryStore()
    assert run(store, [job_at(0)]) == [None]
    assert run(Blind(store), [job_at(1)]) == [None]
    assert set(parts_of(store, 1)).isdisjoint(parts_of(store, 0))
    assert leaves_of(store, 1) == content(0, 1)


@pytest.mark.parametrize("is_stored", [False, True])
def test_no_byte_of_an_image_in_two_files_is_written_before_it_arrived(is_stored: bool) -> None:
    store = MemoryStore()
    if is_stored:
        assert run(store, [job_at(0)]) == [None]
    final = job_at(1)
    job = PersistJob(
        final.attempt,
        final.generation,
        final.layout_data,
        {
            rank: ImageJob(rank, memoryview(bytearray(len(one.memory))))
            for rank, one in final.images.items()
        },
        final.incarnation,
        2,
        LAYOUT.hash,
    )

    def copy() -> None:
        for start in range(0, len(final.images[0].memory), 300_000):
            for rank, one in final.images.items():
                stop = min(start + 300_000, len(one.memory))
                job.images[rank].memory[start:stop] = one.memory[start:stop]
                job.images[rank].arrival.copied(stop - 1)
            time.sleep(0.001)
        for rank, one in final.images.items():
            job.images[rank].seal(one.header_xxh3, one.table_xxh3)
        job.is_complete.set()

    copier = threading.Thread(target=copy)
    copier.start()
    assert run(store, [job]) == [None]
    copier.join()
    assert leaves_of(store, 1) == content(0, 1)
