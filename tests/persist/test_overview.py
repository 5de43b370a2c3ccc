"""The list of a root in short: the index of a bucket saves requests, and changes no answer."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.catalogue import (
    INCARNATIONS,
    MANIFESTS,
    STEPS,
    catalogue,
    image_path,
    manifest_path,
)
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Manifest, checksum_in, seal
from holdfast.overview import (
    INDEX,
    UNSEEN,
    Overview,
    PagedCheck,
    PagedList,
    indexed_records,
    leave_index,
    overview,
    read_first,
    read_more,
    summary_of,
)
from holdfast.persist import commit
from holdfast.restore.planning.candidates import choose
from holdfast.restore.reading.stored import choose_stored, overview_of, stored
from holdfast.storage import objects
from holdfast.storage.base import Store
from holdfast.storage.memory import MemoryStore
from holdfast.storage.objects import ObjectStore
from support.servers.bucket_model import World, model_store

COUNT, STARTS = 60, 20


def manifest(incarnation: int, step: int, **changed: object) -> Manifest:
    generation, attempt = Generation(incarnation, step), f"attempt{step:04d}"
    image = ImageRef(
        path=image_path(generation, attempt, 0),
        rank=0,
        size_bytes=10 * step,
        header_xxh3="0" * 16,
        table_xxh3="1" * 16,
    )
    values = {"loss": 1.0 / step, "name": "text", "inner": {"n": step, "text": "t"}}
    parent = parent_of(incarnation)
    made = dict[str, object](
        run_id="r", incarnation=incarnation, step=step, attempt=attempt, parent=parent, world=1
    )
    made |= {"layout": "0" * 32, "images": (image,), "values": values, "created_s": float(step)}
    return Manifest(**(made | changed))  # type: ignore[arg-type]


def parent_of(incarnation: int) -> tuple[int, int] | None:
    """Every start went on from the first but last checkpoint of the one before it."""
    per = COUNT // STARTS
    return (incarnation - 1, (incarnation - 1) * per - 1) if incarnation > 1 else None


def fill(store: Store) -> None:
    commit.open_root(store, "r")
    for n in range(1, STARTS + 1):
        record = Incarnation(run_id="r", n=n, nonce=f"n{n}", parent=parent_of(n))
        store.publish(f"{INCARNATIONS}/{n}.json", seal(record))
    for step in range(1, COUNT + 1):
        one = manifest((step - 1) * STARTS // COUNT + 1, step)
        store.publish(manifest_path(one.generation), seal(one))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def bucket(world: World, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    store = model_store(world, monkeypatch, tries_s=0.01)
    fill(store)
    leave_index(store, overview(store))
    world.log.clear()
    return store


def is_equal(found: Overview, store: Store) -> bool:
    """True if this is what reading every document of the root says."""
    whole = catalogue(store)
    shorts = tuple(summary_of(m, checksum_in(seal(m))) for m in whole.manifests)
    return (found.manifests, found.incarnations, found.unread) == (shorts, whole.incarnations, ())


@pytest.mark.promise
def test_with_an_index_a_list_takes_three_requests_and_says_what_all_documents_say(
    bucket: ObjectStore, world: World
) -> None:
    found = overview(bucket)
    assert [kind for kind, _ in world.log] == ["GET list-type", "GET list-type", "GET"]
    assert is_equal(found, bucket)
    whole = catalogue(bucket)
    for name in ("loss", "inner.n", "name", "inner.text", "absent"):
        assert found.values_of(name) == whole.values_of(name)
    assert (found.lineage, found.abandoned, found.latest) == (
        whole.lineage,
        whole.abandoned,
        whole.latest,
    )


def another(key: str, change: Callable[[bytes], bytes]) -> Callable[[World], None]:
    def damage(world: World) -> None:
        world.keep(key, change(world.objects[key]))

    return damage


def unpacked(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        head, _, body = data.partition(b"\n")
        return head + b"\n" + zlib.compress(change(zlib.decompress(body)))

    return damage


INDEX_KEY = f"root/.{INDEX}"
BAD: dict[str, Callable[[World], None]] = {
    "empty": another(INDEX_KEY, lambda _: b""),
    "cut": another(INDEX_KEY, lambda data: data[: len(data) // 2]),
    "of another version": another(INDEX_KEY, lambda data: data.replace(b"index 1", b"index 2", 1)),
    "changed": another(
        INDEX_KEY, unpacked(lambda body: body.replace(b"attempt0001", b"attempt9999"))
    ),
    "no msgpack": another(INDEX_KEY, lambda data: data[:5] + b"\0" * 50),
    "absent": lambda world: world.objects.__delitem__(INDEX_KEY),
}


@pytest.mark.promise
@pytest.mark.parametrize("bad", BAD)
def test_an_index_that_is_damaged_or_absent_changes_no_answer(
    bad: str, bucket: ObjectStore, world: World
) -> None:
    BAD[bad](world)
    assert is_equal(overview(bucket), bucket)


@pytest.mark.promise
def test_what_was_pruned_added_replaced_or_damaged_since_the_index_is_told_as_it_is(
    bucket: ObjectStore, world: World
) -> None:
    def key(step: int) -> str:
        return f"root/{manifest_path(Generation((step - 1) * STARTS // COUNT + 1, step))}"

    del world.objects[key(7)]
    world.keep(key(8), world.objects[key(8)][:-9])
    replaced = manifest(3, 9, created_s=99.0)
    world.keep(key(9), seal(replaced))
    added = manifest(STARTS, COUNT + 1)
    world.keep(f"root/{manifest_path(added.generation)}", seal(added))
    record = Incarnation(run_id="r", n=5, nonce="again", parent=(4, 10))
    world.keep(f"root/{INCARNATIONS}/5.json", seal(record))
    found = overview(bucket)
    assert is_equal(found, bucket)
    assert [path for path, _ in found.broken] == ["manifests/3-8.json"]
    assert found.broken == catalogue(bucket).broken
    there = {one.generation: one for one in found.manifests}
    assert Generation(3, 7) not in there and there[Generation(3, 9)].created_s == 99.0
    assert found.latest == added.generation
    assert found.parents[5] == (4, 10)
    assert indexed_records(bucket)[4].nonce == "n4" and 5 not in indexed_records(bucket)


@pytest.mark.promise
def test_no_entry_counts_where_the_server_gives_no_tags(
    bucket: ObjectStore, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "tag", lambda self, key: "")
    world.keep("root/manifests/3-9.json", seal(manifest(3, 9, created_s=99.0)))
    assert is_equal(overview(bucket), bucket)


@pytest.mark.promise
def test_an_index_says_nothing_of_directories_that_no_attempt_has(bucket: ObjectStore) -> None:
    found = overview(bucket)
    for path in (STEPS, "events", "steps/../x", f"{STEPS}/1-1-a/../..", ""):
        wrong = msgspec.structs.replace(found.manifests[0], directories=(path,))
        leave_index(bucket, replace(found, manifests=(wrong, *found.manifests[1:])))
        assert is_equal(overview(bucket), bucket)


def test_without_an_index_a_brief_look_reads_the_newest_of_the_line_alone(
    bucket: ObjectStore, world: World
) -> None:
    BAD["absent"](world)
    world.log.clear()
    contents, fit = choose_stored(bucket, None)
    read = [key for kind, key in world.log if "/manifests/" in key and kind == "GET"]
    assert fit[0].generation == catalogue(bucket).latest
    assert read == [f"root/{manifest_path(fit[0].generation)}"]
    assert len(contents.unread) == COUNT - 1


@pytest.mark.promise
@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("step", [None, 3, 30, 60, "1-3", "10-30", 31, 999])
def test_a_choice_after_a_brief_look_is_the_one_after_reading_all(
    step: int | str | None, with_index: bool, bucket: ObjectStore, world: World
) -> None:
    if not with_index:
        BAD["absent"](world)
    whole = overview_of(bucket)
    wanted = choose(stored(whole), whole.parents, step, whole.unreadable)
    if not wanted:
        with pytest.raises(Exception, match="no checkpoint"):
            choose_stored(bucket, step)
        return
    assert choose_stored(bucket, step)[1][0] == wanted[0]


@pytest.mark.promise
@pytest.mark.parametrize("with_index", [True, False])
def test_what_is_damaged_or_gone_is_passed_over_for_the_next_newest(
    with_index: bool, bucket: ObjectStore, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_index:
        BAD["absent"](world)
    whole = catalogue(bucket).lineage[::-1]
    real, tags = world.objects, {f"root/{manifest_path(one)}": "" for one in whole[:5]}
    tags = {key: world.tag(key) for key in tags}
    for key in tags:  # the server still lists them with their old tags: damaged below it
        real[key] = real[key][:-7] + bytes(7)
    monkeypatch.setattr(World, "tag", lambda self, key: tags.get(key) or _tag(self, key))
    assert choose_stored(bucket, None)[1][0].generation == whole[5]


_tag = World.tag


def test_a_record_that_is_lost_is_told_by_the_manifests_of_its_start(
    bucket: ObjectStore, world: World
) -> None:
    BAD["absent"](world)
    for n in (STARTS, 7):
        del world.objects[f"root/{INCARNATIONS}/{n}.json"]
    found = overview(bucket, is_brief=True)
    assert found.parents == catalogue(bucket).parents
    assert len(found.unread) > COUNT - 5
    assert read_first(bucket, found, found.line).latest == catalogue(bucket).latest


@pytest.mark.promise
def test_where_record_and_newest_manifest_of_a_start_are_lost_the_one_before_tells_its_parent(
    bucket: ObjectStore, world: World
) -> None:
    BAD["absent"](world)
    del world.objects[f"root/{INCARNATIONS}/{STARTS}.json"]
    newest = f"root/{manifest_path(Generation(STARTS, COUNT))}"
    world.objects[newest] = world.objects[newest][:-7] + bytes(7)
    assert choose_stored(bucket, None)[1][0].generation == (STARTS, COUNT - 1)
    assert overview(bucket, is_brief=True).parents == catalogue(bucket).parents


def test_a_second_look_reads_what_is_new_alone(bucket: ObjectStore, world: World) -> None:
    known = overview(bucket)
    added = manifest(STARTS, COUNT + 1)
    world.keep(f"root/{manifest_path(added.generation)}", seal(added))
    world.log.clear()
    assert is_equal(overview(bucket, known), bucket)
    new = [key for kind, key in world.log[: 2 + 1] if kind == "GET"]
    assert new == [f"root/{manifest_path(added.generation)}"]


@pytest.mark.promise
def test_a_check_by_pages_notices_what_another_removed_added_or_replaced(
    bucket: ObjectStore, world: World
) -> None:
    known, keys = overview(bucket), sorted(key for key in world.objects if "/manifests/" in key)
    added = f"root/{manifest_path(Generation(9, 1000))}"
    real = dict(world.objects)

    def change(kind: str, key: str) -> None:
        if kind == "added":
            world.keep(added, seal(manifest(9, 1000)))
        elif kind == "removed":
            del world.objects[key]
        elif kind == "replaced":
            world.keep(key, world.objects[key] + b" ")

    for kind in ("", "removed", "added", "replaced"):
        for key in (keys[0], keys[35], keys[-1]):
            world.objects = dict(real)
            check = PagedCheck(bucket)
            change(kind, key)
            found = [check.look(known) for _ in range(2)]
            assert (None in found) == bool(kind), (kind, key)
    world.objects = dict(real)
    check = PagedCheck(bucket)
    seen = check.look(replace(known, tags={}))
    assert seen is not None and seen.tags.items() <= known.tags.items() and len(seen.tags) == COUNT
    less = replace(known, manifests=known.manifests[1:])  # retention removed it meanwhile
    del world.objects[f"root/{manifest_path(known.manifests[0].generation)}"]
    assert check.look(less) is not None


@pytest.mark.promise
def test_a_list_by_pages_is_begun_anew_under_another_holding_of_the_lock(
    bucket: ObjectStore, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_PAGE", 10)
    world.page = 10
    pages, mine = PagedList(bucket, 9), [Generation(9, 1000)]
    pages.look(mine, "one")
    assert not pages.is_whole and manifest_path(mine[0]) in pages.listed
    pages.look(mine, "one")
    # Another holder removed what this one had published, and something of the first page.
    gone = min(pages.listed)
    del world.objects[f"root/{gone}"]
    pages.look(mine, "another")
    assert pages.is_whole
    assert pages.listed.keys() == {f"{MANIFESTS}/{name}" for name in bucket.list(MANIFESTS)}
    assert gone not in pages.listed and manifest_path(mine[0]) not in pages.listed


def test_a_root_in_memory_or_a_directory_has_no_index() -> None:
    store = MemoryStore()
    fill(store)
    leave_index(store, overview(store))
    assert is_equal(overview(store), store)
    assert store.list("") == ["holdfast.json", "incarnations", "manifests"]
    assert overview(store, UNSEEN).tags["manifests/1-1.json"] == ""


@pytest.mark.promise
def test_an_index_of_a_part_is_gone_on_with_and_is_read_once(
    bucket: ObjectStore, world: World
) -> None:
    BAD["absent"](world)
    found = overview(bucket, is_brief=True)
    some = found.unread[:20]
    assert set(some) < set(found.generations) and len(found.unread) == COUNT
    leave_index(bucket, read_more(bucket, found, some))
    found = overview(bucket, is_brief=True)
    assert [one.generation for one in found.manifests] == list(some)
    world.log.clear()
    again = overview(bucket, found, is_brief=True)
    assert not [key for kind, key in world.log if kind == "GET"], "nothing is asked for again"
    assert again.generations == found.generations == catalogue(bucket).generations
    assert is_equal(overview(bucket), bucket)
