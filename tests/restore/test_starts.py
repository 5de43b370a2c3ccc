"""What memory and storage say of starts is joined by who recorded it, and when."""

from __future__ import annotations

import pytest

from holdfast.errors import StorageError
from holdfast.format.manifest import AttemptId, Generation, ImageId, Incarnation
from holdfast.persist import commit
from holdfast.protocol.messages import HoldingPart, Inventory
from holdfast.restore.planning.candidates import (
    Candidate,
    StartRecords,
    is_replaced,
    join_parents,
    replaced_starts,
)
from holdfast.restore.planning.selection import Inventories
from holdfast.restore.reading.stored import overview_of, stored_starts
from holdfast.storage.memory import MemoryStore
from holdfast.testing.faults import PassingStore
from support.checkpoints.roots import save

ONE = ("one", 1.0)
MINE, THEIRS = ("mine", 2.0), ("theirs", 3.0)
MEMORY = StartRecords({1: None, 2: (1, 10), 3: (2, 60)}, {1: ONE, 2: MINE, 3: ("later", 4.0)})
STORED = StartRecords({1: None, 2: (1, 10)}, {1: ONE, 2: THEIRS})


def test_a_start_whose_number_is_anothers_and_what_goes_on_from_it_is_none_of_the_line() -> None:
    replaced = replaced_starts(MEMORY, STORED)
    assert replaced == {2, 3}
    assert join_parents([MEMORY], STORED) == STORED.parents
    for n, nonce, expected in (
        (1, "one", False),
        (2, "mine", True),
        (2, "theirs", False),
        (2, "", True),
        (3, "later", True),
        (3, "", True),
    ):
        assert is_replaced(n, nonce, MEMORY, STORED, replaced) == expected, (n, nonce)


def test_what_storage_has_of_the_very_start_goes_on_whatever_its_parent_is() -> None:
    recorded = StartRecords({**STORED.parents, 3: (2, 60)}, {**STORED.starts, 3: ("later", 4.0)})
    assert replaced_starts(MEMORY, recorded) == {2}


def test_a_manifest_tells_another_start_too_where_its_record_is_lost() -> None:
    assert replaced_starts(MEMORY, StartRecords({2: (1, 5)})) == {2, 3}
    assert replaced_starts(MEMORY, StartRecords({2: (1, 10)})) == set()


@pytest.mark.parametrize(
    ("stored_s", "expected"), [(1.0, (1, 50)), (2.0, (1, 50)), (3.0, (1, 100))]
)
def test_of_two_records_of_one_start_the_later_one_counts(
    stored_s: float, expected: tuple[int, int]
) -> None:
    memory = StartRecords({2: (1, 50)}, {2: ("n", 2.0)})
    parent = (1, 50) if stored_s == 2.0 else (1, 100)
    stored = StartRecords({2: parent}, {2: ("n", stored_s)})
    assert join_parents([memory], stored) == {2: expected}
    older = StartRecords({2: (1, 10)}, {2: ("n", 1.5)})  # of a host that missed the second restore
    for memories in ([memory, older], [older, memory]):
        assert join_parents(memories, StartRecords()) == {2: (1, 50)}


def test_records_that_do_not_tell_who_made_them_count_behind_storage() -> None:
    memory = StartRecords({1: None, 2: (1, 50)})
    assert join_parents([memory], StartRecords({2: (1, 100)}, {2: THEIRS})) == {
        1: None,
        2: (1, 100),
    }
    other = StartRecords({2: (1, 20)})
    for memories in ([memory, other], [other, memory]):
        assert join_parents(memories, StartRecords()) == {1: None, 2: (1, 20)}


def test_of_several_hosts_one_tells_for_all_that_an_attempt_is_of_another_start() -> None:
    def part(rank: int, nonce: str) -> HoldingPart:
        images = (ImageId(rank, 1, "h", f"{rank}"),)
        return HoldingPart(AttemptId(2, 60, "a", 2, "l"), images, nonce=nonce)

    holdings = (
        Inventory("x", (part(0, "mine"),), MEMORY.parents, starts=MEMORY.starts),
        Inventory("y", (part(1, ""),)),
    )
    stored = (Candidate(2, 40, "storage", "b"),)
    there = Inventories(holdings, stored, STORED.parents, (), STORED.starts)
    left, numbers = there.of_known_starts()
    assert numbers == {2}
    assert [one.candidate for one in left.find(None).recoveries] == list(stored)
    same = Inventories(holdings, stored, MEMORY.parents, (), MEMORY.starts)
    assert same.of_known_starts() == (same, set())
    assert same.find(None).recoveries[0].candidate.generation == Generation(2, 60)


def test_a_record_that_cannot_be_read_now_does_not_say_that_it_is_the_same_start() -> None:
    class Failing(PassingStore):
        def size_bytes(self, path: str) -> int:
            if path == "incarnations/2.json":
                raise StorageError("the disk fails")
            return super().size_bytes(path)

    inner = MemoryStore()
    commit.open_root(inner, "r")
    save(inner, Generation(1, 10))
    commit.record_incarnation(inner, Incarnation(run_id="r", n=2, nonce="b", parent=(1, 10)))
    store = Failing(inner)
    found = overview_of(store)
    with pytest.raises(StorageError, match="the disk fails"):
        stored_starts(store, found, {2})
    assert stored_starts(store, found, {1}).parents == {1: None}
    inner.publish("incarnations/2.json", b"damaged", replace=True)
    assert stored_starts(inner, overview_of(inner), {2}).parents == {1: None}
