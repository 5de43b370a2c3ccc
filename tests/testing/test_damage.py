"""Damage on demand: what the kit changes in an arena is just what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import FormatError, UsageError
from holdfast.format.checksum import checksum
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.parity.store import ShardFiles
from holdfast.parity.planning.placement import stored_by
from holdfast.parity.planning.record import unseal
from holdfast.protocol.arena import IMAGE_START, PAGE_BYTES, SlotFile, SlotRecord
from holdfast.testing.faults import (
    Held,
    Row,
    flip_image,
    flip_row,
    held,
    rows,
    tear_image,
    tear_row_record,
)
from holdfast.testing.faults.events import Region
from support.peers.exchanging import Group

DATA_START, SIZE = 2 * PAGE_BYTES, 10 * PAGE_BYTES


def make_slot(arena: Path, number: int, step: int, state: str = "captured") -> Path:
    path = arena / f"{number:05d}.slot"
    slot = SlotFile.create(path, SIZE)
    slot.image[:8] = (DATA_START - 8).to_bytes(8, "little")
    slot.image[DATA_START:SIZE] = b"\x55" * (SIZE - DATA_START)
    slot.write_record(SlotRecord(state=state, incarnation=1, step=step, image_bytes=SIZE))
    slot.close()
    return path


@pytest.fixture
def image(tmp_path: Path) -> Held:
    make_slot(tmp_path, 0, 7)
    make_slot(tmp_path, 1, 5)
    make_slot(tmp_path, 2, 9, "writing")
    (older, newer) = held(tmp_path)
    assert (older.record.step, newer.record.step) == (5, 7)
    assert newer.data_start == DATA_START
    return newer


@pytest.mark.parametrize(
    ("region", "at", "expected"),
    [
        ("header", 3, 3),
        ("data", 0, DATA_START),
        ("data", 7 * PAGE_BYTES + 1, DATA_START + 1),
        ("table", 5, SIZE - PAGE_BYTES + 5),
    ],
)
def test_one_bit_of_an_image_changes_and_no_other(
    image: Held, region: Region, at: int, expected: int
) -> None:
    before = image.path.read_bytes()
    flip_image(image, region, at=at, bit=6)
    after = image.path.read_bytes()
    changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed == [IMAGE_START + expected]
    assert before[changed[0]] ^ after[changed[0]] == 1 << 6


def test_of_a_torn_image_the_first_half_and_the_table_are_there(image: Held) -> None:
    before = image.path.read_bytes()[IMAGE_START:]
    tear_image(image)
    after = image.path.read_bytes()[IMAGE_START:]
    middle = (DATA_START + SIZE) // 2
    assert after[:middle] == before[:middle]
    assert not any(after[middle : SIZE - PAGE_BYTES])
    assert after[SIZE - PAGE_BYTES :] == before[SIZE - PAGE_BYTES :]


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[list[Row]]:
    (tmp_path / "arena").mkdir(mode=0o700)
    memory = ShardFiles(ArenaFiles(tmp_path / "arena", "run"))
    with Group(tmp_path / "group", [[3 << 20], [2 << 20], [5 << 20], [1 << 20]], 2) as group:
        terms, own = group.terms, "host-1"
        memory.make(terms, own, 0)
        sealed = group.run().sealed[own]
        places = memory.place(0, stored_by(terms.placement, terms.number_of(own)))
        for one in sealed:
            places[one.kept][1][:] = group.hosts[1].rows[one.kept.stripe, one.kept.row]
        memory.store_records(0, [(places[one.kept][0], one.record) for one in sealed])
        yield rows(tmp_path / "arena")


def test_rows_are_found_where_they_lie_and_one_bit_of_one_changes(kept: list[Row]) -> None:
    assert len(kept) == 2
    assert [is_whole(row) for row in kept] == [True, True]
    flip_row(kept[1], at=12345)
    assert [is_whole(row) for row in kept] == [True, False]
    flip_row(kept[1], at=12345 + kept[1].record.size_bytes)  # the same one, and back
    assert is_whole(kept[1])


def is_whole(row: Row) -> bool:
    with row.path.open("rb") as file:
        file.seek(row.offset_bytes)
        first = file.read(min(1 << 20, row.record.size_bytes))
    return checksum(first) == int.from_bytes(row.record.sums[:8], "little")


def test_a_torn_record_of_a_row_is_none(kept: list[Row], tmp_path: Path) -> None:
    tear_row_record(kept[0])
    with pytest.raises(FormatError, match="cut short"):
        unseal(kept[0].record_path.read_bytes(), "it")
    assert [row.record_path for row in rows(tmp_path / "arena")] == [kept[1].record_path]


def test_a_row_without_bytes_has_none_to_change(kept: list[Row]) -> None:
    record = type("Empty", (), {"size_bytes": 0, "row": 0, "stripe": 1})
    with pytest.raises(UsageError, match="row 0 of stripe 1 has no bytes"):
        flip_row(Row(kept[0].path, 0, record(), kept[0].record_path))
