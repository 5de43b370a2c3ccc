"""How many requests a publication in a bucket takes: as many with fifty checkpoints as with two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest

from holdfast.catalogue import catalogue, image_path, manifest_path, part_path, pin_path
from holdfast.errors import FormatError
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Manifest, seal
from holdfast.keeper import persister as persister_module
from holdfast.keeper.persister import Persister
from holdfast.overview import INDEX, leave_index, overview
from holdfast.persist import commit
from holdfast.persist.frozen_parts import FrozenParts
from holdfast.persist.pins import pin
from holdfast.policy.when import Keep
from holdfast.restore.reading.images import StoredImage, read_head
from holdfast.storage import objects
from holdfast.storage.base import settle_s
from holdfast.storage.lease_lock import LeaseTimes
from support.runs.keeper_jobs import job_of
from support.servers.bucket_model import World, model_store

IMAGES = 2
RECORD = Incarnation(run_id="r", n=1, nonce="n", parent=None, world=2, created_s=1.0)


@pytest.mark.parametrize("kept", [2, 50])
@pytest.mark.parametrize("page", [1000, 10])
def test_a_publication_takes_few_requests_whatever_the_number_of_checkpoints(
    kept: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``page``: how many names the server lists at once."""
    monkeypatch.setattr(persister_module, "_PAGED_FROM", 0.9 * page)
    monkeypatch.setattr(objects, "_PAGE", page)
    world, outcomes = World(page=page), list[str | None]()
    store = model_store(world, monkeypatch, tries_s=1.0)
    commit.open_root(store, "r")
    persister = Persister(store, Keep(last=kept), lambda _, reason: outcomes.append(reason))
    lease, now = store.lock("writer", "me"), [0.0]
    persister._sweeper.clock = lambda: now[0]
    since_index = 0
    for step in count():
        begun = len(world.log)
        now[0] += settle_s(store)
        persister.work_one(job_of(Generation(1, step), RECORD))
        requests = world.log[begun:]
        images = [key for _, key in requests if "/live-" in key]
        is_indexed = ("PUT", f"root/.{INDEX}") in requests  # then no directory is removed
        since_index = 0 if is_indexed else since_index + 1
        assert len(requests) - len(images) <= 12 - 2 * is_indexed or step < 2, Counter(requests)
        if step >= kept + 22 and since_index >= 6:  # what the index put off is made up for
            break
    manifest = f"root/{manifest_path(Generation(1, step))}"
    durable = requests.index(("PUT", manifest)) + 1
    assert not any(outcomes)
    images = [key for _, key in requests if "/live-" in key]
    assert len(images) <= 2 * IMAGES
    assert durable - len(images) == 1
    # With retention: one checkpoint goes, and the images of one that went before.
    print(Counter(kind for kind, key in requests if "/live-" not in key))
    assert len(requests) - len(images) <= 12
    assert f"root/{manifest_path(Generation(1, step - kept))}" not in world.objects
    assert len(store.list("steps")) == kept + 3
    assert (f"root/.{INDEX}" in world.objects) == (kept > 32)
    persister.stop()
    lease.release()


@pytest.mark.promise
def test_in_a_bucket_a_manifest_is_not_put_again_and_what_was_gone_on_with_is_not_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, outcomes = World(), list[str | None]()
    store = model_store(world, monkeypatch, tries_s=1.0)
    commit.open_root(store, "r")
    job = job_of(Generation(1, 1), RECORD)
    for _ in range(2):  # the second is a keeper that was started anew
        persister = Persister(store, Keep(), lambda _, reason: outcomes.append(reason))
        persister.work_one(job)
        persister.stop()
    assert outcomes == [None, None]
    assert world.log.count(("PUT", f"root/{manifest_path(Generation(1, 1))}")) == 1
    left = job_of(Generation(1, 2), RECORD)
    start = f"1-2-{left.attempt}"
    store.publish(f"steps/{start}abcdef/live-00000.safetensors", b"another's")
    monkeypatch.setattr(store, "resume", lambda above, start: f"{start}abcdef")
    persister = Persister(store, Keep(), lambda _, reason: outcomes.append(reason))
    persister.work_one(left)
    persister.stop()
    assert outcomes[-1] is not None
    assert store.read(f"steps/{start}abcdef/live-00000.safetensors") == b"another's"


@pytest.mark.promise
def test_images_never_go_together_with_the_manifest_that_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, outcomes, now = World(), list[str | None](), [0.0]
    store = model_store(world, monkeypatch, tries_s=0.004)
    commit.open_root(store, "r")
    persister = Persister(store, Keep(last=1), lambda _, reason: outcomes.append(reason))
    persister._sweeper.clock = lambda: now[0]
    lease = store.lock("writer", "me")

    def save(step: int) -> None:
        now[0] += settle_s(store)
        persister.work_one(job_of(Generation(1, step), RECORD))

    save(1)
    first = catalogue(store).manifests[0]
    world.fault = lambda kind, key: "dropped" if kind == "PUT" and "/.removals/" in key else ""
    for step in range(2, 6):  # none of them can remove the first
        save(step)
    world.fault = lambda kind, key: ""
    assert first in catalogue(store).manifests
    save(6)
    assert first not in catalogue(store).manifests
    assert all(store.exists(image.path) for image in first.images)
    for step in range(7, 12):
        save(step)
    assert not any(store.exists(image.path) for image in first.images)
    assert outcomes == [None] * 11
    persister.stop()
    lease.release()


@pytest.mark.promise
@pytest.mark.parametrize("is_broken_off", [False, True])
def test_a_keeper_that_starts_where_many_are_lists_them_page_by_page_and_removes_none_before(
    is_broken_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persister_module, "_PAGED_FROM", 9)
    monkeypatch.setattr(objects, "_PAGE", 10)
    world, outcomes = World(page=10), list[str | None]()
    store = model_store(world, monkeypatch, tries_s=0.1)
    commit.open_root(store, "r")
    first = Persister(store, Keep(), lambda _, reason: outcomes.append(reason))
    with store.lock("writer", "me"):
        for step in range(100, 148):
            first.work_one(job_of(Generation(1, step), RECORD))
        first.stop()
    assert f"root/.{INDEX}" in world.objects
    store = model_store(world, monkeypatch, tries_s=0.1)
    persister = Persister(store, Keep(last=40), lambda _, reason: outcomes.append(reason))
    seen = list[int]()
    with store.lock("writer", "the next"):
        for step in range(148, 166):
            begun = len(world.log)
            if is_broken_off and step == 151:  # a list that fails is begun anew
                world.fault = lambda kind, key: "dropped" if kind == "GET list-type" else ""
            persister.work_one(job_of(Generation(1, step), RECORD))
            world.fault = lambda kind, key: ""
            requests = [key for _, key in world.log[begun:] if "/live-" not in key]
            if not is_broken_off or step != 151:
                assert len(requests) <= 12, (step, requests)
            seen.append(len(catalogue(store).manifests))
    persister.stop()
    assert outcomes == [None] * 66
    listed = next(n for n, count in enumerate(seen) if count != 49 + n)
    assert listed >= 5, "all pages were seen before anything went"
    steps = [manifest.step for manifest in catalogue(store).manifests]
    assert steps == list(range(166 - len(steps), 166)) and len(steps) >= 40


#: A frozen part that two of the planted checkpoints name.
PART = part_path(Generation(1, 0), "planted0", 0)
PLANTED, ADDED, MORE = 80, 64, 100
#: A lease that is renewed with removals alone, however slow the machine is.
RARELY = LeaseTimes(renew_s=1000.0, stop_s=3000.0, take_over_s=6000.0)


def plant(world: World, step: int) -> Manifest:
    """Puts a checkpoint with one image into a bucket."""
    generation, attempt = Generation(1, step), f"planted{step}"
    sums = {"header_xxh3": "0" * 16, "table_xxh3": "0" * 16}
    image = ImageRef(path=image_path(generation, attempt, 0), rank=0, size_bytes=1 << 20, **sums)
    has_part = step in (0, 60)
    made = Manifest(
        run_id="r",
        incarnation=1,
        step=step,
        attempt=attempt,
        parent=None,
        world=1,
        layout="0" * 32,
        images=(image,),
        parts=(ImageRef(path=PART, rank=0, size_bytes=1 << 20, **sums),) if has_part else (),
        requires=("parts",) if has_part else (),
        values={"loss": 1.0 + abs(step - 30)},
    )
    world.keep(f"root/{manifest_path(generation)}", seal(made))
    for path in (image.path, PART):
        world.keep(f"root/{path}", b"data")
    return made


def directories_of(world: World) -> set[str]:
    """The directories of images and frozen parts that are there."""
    above = ("root/steps/", "root/parts/")
    return {key.rpartition("/")[0] for key in world.objects if key.startswith(above)}


@pytest.mark.promise
@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Keep(), range(144)),
        (Keep(last=70), range(74, 144)),
        (Keep(last=2), [142, 143]),
        (Keep(last=30, best=2, by="loss"), [30, 31, *range(114, 144)]),
    ],
    ids=["all", "last 70", "last 2", "best"],
)
@pytest.mark.parametrize("damaged", [None, 79, 40])
def test_a_keeper_that_starts_on_many_without_an_index_reads_few_and_removes_none_too_early(
    keep: Keep, left: Sequence[int], damaged: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persister_module, "_PAGED_FROM", 9)
    monkeypatch.setattr(objects, "_PAGE", 10)
    world, outcomes, now, read = World(page=10), list[str | None](), [0.0], set[int]()
    store = model_store(world, monkeypatch, tries_s=0.1, lease=RARELY)
    commit.open_root(store, "r")
    there = {step: plant(world, step) for step in range(PLANTED)}
    keys = {step: f"root/{manifest_path(one.generation)}" for step, one in there.items()}
    if damaged is not None:
        world.objects[keys[damaged]] += b"more"
    persister = Persister(store, keep, lambda _, reason: outcomes.append(reason))
    persister._sweeper.clock = lambda: now[0]
    with store.lock("writer", "the next"):
        for step in range(PLANTED, PLANTED + ADDED):
            now[0] += settle_s(store)
            begun, directories = len(world.log), directories_of(world)
            persister.work_one(job_of(Generation(1, step), RECORD))
            requests = [one for one in world.log[begun:] if "/live-" not in one[1]]
            # While a lowered Keep is worked off, each directory that goes is listed before: two
            # are within the budget. What is damaged is looked for each time: it may be repaired.
            beyond = max(0, len(directories - directories_of(world)) - 2)
            assert len(requests) <= 12 + beyond or damaged is not None, (step, Counter(requests))
            assert beyond <= PLANTED // 8
            asked = {key for kind, key in requests if kind == "GET"}
            some = {s for s in there if keys[s] in asked}
            assert len(some) <= 8 + (damaged is not None)
            read |= some
            gone = {s for s in there if keys[s] not in world.objects}
            assert gone <= read, "what it names was known before it went"
            stay = [one for s, one in there.items() if s not in gone]
            files = {file.path for one in stay for file in (*one.images, *one.parts)}
            assert all(f"root/{path}" in world.objects for path in files)
        assert outcomes == [None] * ADDED
        found = catalogue(store)
        if keep.last == 2:  # an eighth of what is due goes with each
            for step in range(PLANTED + ADDED, PLANTED + ADDED + MORE):
                now[0] += settle_s(store)
                persister.work_one(job_of(Generation(1, step), RECORD))
            left_over = (damaged is not None, len(store.list("steps")) > 8)
            assert left_over == (f"root/{PART}" in world.objects,) * 2
    persister.stop()
    expected = sorted({*left} - {damaged})
    if keep.last == 70 and damaged == 79:
        expected = [73, *expected]  # what cannot be read does not count
    assert [one.step for one in found.manifests] == expected
    assert (damaged is None) == (not found.broken)


@pytest.mark.promise
def test_what_only_names_show_does_not_count_as_one_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, now = World(), [0.0]
    store = model_store(world, monkeypatch, tries_s=0.1)
    commit.open_root(store, "r")
    there = {plant(world, step).generation for step in range(60)}
    leave_index(store, overview(store))
    for step in range(60, PLANTED):
        world.objects[f"root/{manifest_path(plant(world, step).generation)}"] += b"damage"
    persister = Persister(store, Keep(last=70), lambda *_: None)
    persister._sweeper.clock = lambda: now[0]
    with store.lock("writer", "the next"):
        for step in range(PLANTED, PLANTED + 9):
            now[0] += settle_s(store)
            persister.work_one(job_of(Generation(1, step), RECORD))
            assert there.issubset(catalogue(store).generations), "fewer than 70 can be read"
    persister.stop()


def test_in_a_bucket_a_frozen_part_is_found_by_the_checkpoint_that_the_run_went_on_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    store = model_store(world, monkeypatch, tries_s=0.1)
    commit.open_root(store, "r")
    for step in range(PLANTED):
        plant(world, step)
    parts = FrozenParts(store)
    parts.base = Generation(1, 60)
    world.log.clear()
    assert [one.path for one in parts._published()] == [PART]
    assert world.log == [("GET", f"root/{manifest_path(parts.base)}")]
    parts.forget()
    parts.base = Generation(1, 900)  # it is in memory alone
    world.log.clear()
    assert parts._published() == []
    assert len(world.log) <= 6, "of many the newest alone is read"


def test_the_length_of_an_image_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, outcomes = World(), list[str | None]()
    store = model_store(world, monkeypatch, tries_s=1.0)
    commit.open_root(store, "r")
    persister = Persister(store, Keep(), lambda _, reason: outcomes.append(reason))
    persister.work_one(job_of(Generation(1, 1), RECORD))
    persister.stop()
    (manifest,) = catalogue(store).manifests
    image = StoredImage(store, manifest.images[0])
    world.log.clear()
    read_head(image, {})
    read_head(image, {})
    assert Counter(kind for kind, _ in world.log) == {"HEAD": 2, "GET": 6}
    world.objects[f"root/{image.name}"] += b"more"
    with pytest.raises(FormatError, match="the manifest says"):
        read_head(image, {})


@pytest.mark.promise
def test_pins_without_their_checkpoint_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, outcomes, later = World(), list[str | None](), count(1)
    store = model_store(world, monkeypatch, tries_s=1.0)
    commit.open_root(store, "r")
    persister = Persister(store, Keep(last=1), lambda _, reason: outcomes.append(reason))
    lease = store.lock("writer", "me")

    def pins_read() -> set[str]:
        begun = len(world.log)
        persister.work_one(job_of(Generation(1, next(later)), RECORD))
        asked = world.log[begun:]
        return {key for kind, key in asked if kind == "GET" and key.startswith("root/pins/")}

    for step in range(1, 9):
        assert not pins_read()
        pin(model_store(world, monkeypatch), Generation(1, step))
    manifest = catalogue(store).manifests[0]
    assert manifest.generation == Generation(1, 1)
    whole = dict(world.objects)
    for path in (manifest_path(manifest.generation), manifest.images[0].path):
        del world.objects[f"root/{path}"]
    lease.release()
    lease = store.lock("writer", "me again")
    lost = f"root/{pin_path(manifest.generation)}"
    assert pins_read() == {lost}
    assert not pins_read()
    # Another that is gone is brought back all the same, and the first is looked at once more.
    second = f"root/{manifest_path(Generation(1, 2))}"
    del world.objects[second]
    lease.release()
    lease = store.lock("writer", "me at last")
    assert pins_read() == {lost, f"root/{pin_path(Generation(1, 2))}"}
    assert second in world.objects and pins_read() == {lost} and not pins_read()
    # Under the next holding it may be whole again.
    world.objects |= {key: data for key, data in whole.items() if "/steps/1-1-" in key}
    lease.release()
    lease = store.lock("writer", "the next")
    assert pins_read() == {lost} and f"root/{manifest_path(manifest.generation)}" in world.objects
    persister.stop()
    lease.release()
    assert not any(outcomes)
