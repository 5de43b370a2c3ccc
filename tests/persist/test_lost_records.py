"""The records of starts: a child is never stored before its parent, and a lost one is no beginning.

The root of these tests: incarnation 1 saved 10 and 20; 2 went on from 1-20 and saved nothing in
storage; 3 went on from 2's snapshot of step 25 and saved 30. Without the record of 2 nobody can
tell whether 1-10 and 1-20 are of the run's line.
"""

from __future__ import annotations

import pytest

from holdfast.catalogue import Catalogue, catalogue
from holdfast.errors import AlreadyPublished, FormatError, NewerFormat, StorageError
from holdfast.format.checksum import checksum, text
from holdfast.format.manifest import Generation, Incarnation, seal
from holdfast.keeper.persister import Persister
from holdfast.persist import commit, removal
from holdfast.policy.when import Keep
from holdfast.storage.base import Store
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import FaultyStore, Mode, PassingStore, Stopped
from support.checkpoints.roots import save, whole
from support.runs.keeper_jobs import job_of

ONE = Incarnation(run_id="r", n=1, nonce="n")
TWO = Incarnation(run_id="r", n=2, nonce="b", parent=(1, 20))
THREE = Incarnation(run_id="r", n=3, nonce="n", parent=(2, 25))
FOUR = Incarnation(run_id="r", n=4, nonce="d", parent=(3, 30))
LOST = "incarnations/2.json"


def filled() -> MemoryStore:
    """The root without the record of 2."""
    store = MemoryStore()
    commit.open_root(store, "r")
    for step in (10, 20):
        save(store, Generation(1, step))
    save(store, Generation(3, 30), (2, 25))
    return store


def names(generations: tuple[Generation, ...]) -> str:
    return " ".join(map(str, generations))


# ── recording ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise
@pytest.mark.parametrize("mode", ["stop", "error"])
def test_stopped_anywhere_no_start_is_recorded_before_what_it_descends_from(mode: Mode) -> None:
    k, is_last = 0, False
    while not is_last:
        k += 1
        inner = MemoryStore()
        store = FaultyStore(inner, fail_at=k, mode=mode)
        try:
            assert commit.record_line(store, FOUR, [THREE, ONE, TWO]) is None
            is_last = True
        except (Stopped, StorageError):
            pass
        there = inner.list("incarnations")
        assert there == [f"{n}.json" for n in range(1, len(there) + 1)]
        assert commit.record_line(inner, FOUR, [THREE, ONE, TWO]) is None
        assert catalogue(inner).incarnations == (ONE, TWO, THREE, FOUR)
    assert k == 5


def test_what_an_older_version_left_out_is_recorded_at_the_next_start() -> None:
    store = filled()
    assert commit.record_line(store, FOUR, [ONE, TWO, THREE]) is None
    assert names(catalogue(store).lineage) == "1-10 1-20 3-30"


def test_a_record_that_is_nowhere_is_told_and_the_start_is_recorded_all_the_same() -> None:
    store = filled()
    assert commit.record_line(store, FOUR, [THREE]) == 2
    assert catalogue(store).incarnations[-1] == FOUR


def test_what_storage_says_of_a_start_counts_before_what_is_in_memory() -> None:
    store = filled()
    commit.record_incarnation(store, TWO)
    stale = Incarnation(run_id="r", n=2, nonce="stale", parent=None)
    assert commit.record_line(store, FOUR, [stale]) is None
    assert TWO in catalogue(store).incarnations


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_record_that_cannot_be_read_is_made_good_from_memory(n: int) -> None:
    store = filled()
    store.publish(f"incarnations/{n}.json", b"damaged", replace=n == 3)
    assert commit.record_line(store, FOUR, [TWO, THREE]) is None
    found = catalogue(store)
    assert not found.broken
    assert found.incarnations[1:] == (TWO, THREE, FOUR)


def test_a_record_of_a_newer_format_is_never_replaced() -> None:
    store = filled()
    newer = seal(TWO).replace(b'"format_version":1', b'"format_version":9')
    body = newer[newer.index(b'"body":') + 7 : -2]
    data = b'{"checksum":"' + text(checksum(body)).encode() + b'","body":' + body + b"}\n"
    store.publish(LOST, data)
    with pytest.raises(NewerFormat):
        commit.record_line(store, FOUR, [TWO])
    assert store.read(LOST) == data


def test_a_record_that_storage_cannot_read_now_is_not_taken_for_lost() -> None:
    class Failing(PassingStore):
        def size_bytes(self, path: str) -> int:
            if path == LOST:
                raise StorageError("the disk fails")
            return super().size_bytes(path)

    store = filled()
    with pytest.raises(StorageError, match="the disk fails"):
        commit.record_line(Failing(store), FOUR, [])
    assert "4.json" not in store.list("incarnations")


def test_a_manifest_that_storage_cannot_read_now_is_not_taken_for_none() -> None:
    """Of start 3 only its manifest is left."""

    class Failing(PassingStore):
        def size_bytes(self, path: str) -> int:
            if path == "manifests/3-30.json":
                raise StorageError("the disk fails")
            return super().size_bytes(path)

    store = filled()
    store.remove("incarnations/3.json")
    with pytest.raises(StorageError, match="the disk fails"):
        commit.record_line(Failing(store), FOUR, [THREE])
    assert "4.json" not in store.list("incarnations")
    assert commit.record_line(store, FOUR, [THREE, TWO]) is None


def test_what_only_memory_knows_is_not_recorded_on_top_of_another_start() -> None:
    """Storage has another start of the number that memory's went on from."""
    store = filled()
    commit.record_incarnation(store, TWO)
    of_ours = Incarnation(run_id="r", n=2, nonce="another", parent=(1, 20))
    five = Incarnation(run_id="r", n=5, nonce="e", parent=(2, 60))
    with pytest.raises(AlreadyPublished, match="another start than"):
        commit.record_line(store, five, [of_ours, THREE])
    assert store.list("incarnations") == ["1.json", "2.json", "3.json"]
    assert commit.record_line(store, five, [TWO, THREE]) is None


def test_the_second_restore_of_a_start_is_recorded_where_storage_was_full_for_it() -> None:
    store = filled()
    commit.record_incarnation(store, TWO)
    again = Incarnation(run_id="r", n=2, nonce="b", parent=(1, 10), created_s=1.0)
    assert commit.record_line(store, FOUR, [again, THREE]) is None
    assert again in catalogue(store).incarnations
    assert commit.record_line(store, FOUR, [TWO]) is None  # of a host that missed it
    assert again in catalogue(store).incarnations


def test_the_first_checkpoint_brings_the_records_that_a_full_disk_refused() -> None:
    store, outcomes = MemoryStore(), list[str | None]()
    persister = Persister(
        store, Keep(), lambda _, reason: outcomes.append(reason), remembered=lambda: [ONE, TWO]
    )
    persister.work_one(job_of(Generation(3, 30), THREE))
    persister.stop()
    assert outcomes == [None]
    assert catalogue(store).incarnations == (ONE, TWO, THREE)


# ── telling ──────────────────────────────────────────────────────────────────────────────────


def states(found: Catalogue) -> tuple[str, str, str]:
    return names(found.lineage), names(found.undecided), names(found.abandoned)


def test_what_is_older_than_a_lost_record_is_undecided_and_neither_kept_nor_abandoned() -> None:
    store = filled()
    assert states(catalogue(store)) == ("3-30", "1-10 1-20", "")
    assert LOST in catalogue(store).gap
    commit.record_incarnation(store, TWO)
    assert states(catalogue(store)) == ("1-10 1-20 3-30", "", "")
    assert catalogue(store).gap == ""


def test_a_damaged_record_of_the_newest_start_leaves_all_before_it_undecided() -> None:
    store = filled()
    commit.record_incarnation(store, TWO)
    store.publish("incarnations/4.json", b"damaged")
    found = catalogue(store)
    assert states(found) == ("", "1-10 1-20 3-30", "")
    assert "incarnations/4.json" in found.gap


def test_a_start_that_goes_on_from_one_by_its_name_settles_it() -> None:
    store = filled()
    commit.record_incarnation(store, Incarnation(run_id="r", n=4, nonce="d", parent=(1, 10)))
    assert states(catalogue(store)) == ("1-10", "", "1-20 3-30")


def test_a_list_that_lacks_a_record_made_just_now_is_not_believed() -> None:
    class Late(PassingStore):
        def list(self, prefix: str) -> list[str]:
            return [name for name in super().list(prefix) if name != "2.json"]

    store = filled()
    commit.record_incarnation(store, TWO)
    assert states(catalogue(Late(store))) == ("1-10 1-20 3-30", "", "")


# ── removing ─────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_pruned_of_which_it_is_not_known_whether_it_was_abandoned() -> None:
    store = filled()
    with pytest.raises(FormatError, match=LOST):
        removal.plan(store, Keep(), abandoned=True)
    assert not removal.plan(store, Keep(last=1), abandoned=False)
    save(store, Generation(3, 40), (2, 25))
    remove(store, Keep(last=1), abandoned=False)
    assert whole(store) == ["1-10", "1-20", "3-40"]


def remove(store: Store, keep: Keep, *, abandoned: bool) -> None:
    removal.remove(store, removal.plan(store, keep, abandoned=abandoned))


def test_a_run_neither_counts_nor_removes_what_is_undecided() -> None:
    store, outcomes = filled(), list[str | None]()
    persister = Persister(store, Keep(last=2), lambda _, reason: outcomes.append(reason))
    for step in (40, 50, 60):
        persister.work_one(job_of(Generation(3, step), THREE))
    persister.stop()
    assert outcomes == [None] * 3
    assert whole(store) == ["1-10", "1-20", "3-50", "3-60"]
