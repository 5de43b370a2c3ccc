"""Memory for parity: made once, found again by the next keeper, and never more than fits."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ArenaError
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.parity.store import ShardFiles, ShardStore, StoredParity, division_of
from holdfast.parity.planning.budget import capacity
from holdfast.parity.planning.placement import stored_by
from support.peers.exchanging import Group

MIB = 1 << 20


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    directory = tmp_path / "arena"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with Group(tmp_path / "group", [[3 * MIB], [2 * MIB], [5 * MIB], [MIB]], 2) as made:
        yield made


def test_rows_are_found_again_with_their_records_and_none_whose_half_was_begun_anew(
    arena: Path, group: Group
) -> None:
    memory = ShardFiles(ArenaFiles(arena, "run"))
    terms, own = group.terms, "host-1"
    memory.make(terms, own, 0)
    kept = stored_by(terms.placement, terms.number_of(own))
    sealed = group.run().check_all().sealed[own]
    places = memory.place(0, kept)
    for one in sealed:
        places[one.kept][1][:] = group.hosts[1].rows[one.kept.stripe, one.kept.row]
    memory.store_records(0, [(places[one.kept][0], one.record) for one in sealed])
    found = ShardFiles(ArenaFiles(arena, "run"))
    assert [(r.half, r.record.row) for r in found.scan()] == [(0, 0), (0, 1)]
    assert {r.offset_bytes for r in found.scan()} == {places[one.kept][0] for one in sealed}
    for one in sealed:
        offset = places[one.kept][0]
        again = found.place(0, kept)[one.kept]
        assert again[0] == offset and again[1] == places[one.kept][1]
    assert not ShardFiles(ArenaFiles(arena, "other")).scan()  # and they are gone with that
    memory.store_records(0, [(places[one.kept][0], one.record) for one in sealed])
    found.forget(1)
    assert len(found.scan()) == 2
    for rows in (
        found.scan(),
        memory.store_records(0, [(r.offset_bytes, r.data) for r in found.scan()]),
    ):
        for row in rows:
            where = memoryview(row.data).obj
            assert maps_of(row) == {id(where)}, "headers are read where the record lies"
    found.forget(0)
    assert not found.scan()


def maps_of(row: StoredParity) -> set[int]:
    heads = [image.head for one in row.record.members for image in one.images]
    return {id(head.obj) for head in (*heads, memoryview(row.data))}


def test_a_shard_that_is_made_again_keeps_nothing_of_the_record_that_was_removed(
    arena: Path, group: Group
) -> None:
    memory = ShardFiles(ArenaFiles(arena, "run"))
    memory.make(group.terms, "host-0", 0)
    memory.store_records(0, [(0, group.run().sealed["host-0"][0].record)])
    store = ShardStore(memory, lambda: None)
    (row,) = store.all()
    assert store.quarantine(row) and store.repair(row, {0: b"again"})
    (again,) = store.all()
    assert again.record == row.record and again.offset_bytes == row.offset_bytes
    assert maps_of(again).isdisjoint(maps_of(row))


def test_a_record_that_is_cut_short_or_reaches_beyond_its_half_is_no_row(
    arena: Path, group: Group
) -> None:
    memory = ShardFiles(ArenaFiles(arena, "run"))
    memory.make(group.terms, "host-0", 0)
    sealed = group.run().sealed["host-0"]
    (kept,) = memory.store_records(0, [(0, sealed[0].record)])
    memory.store_records(1, [(1 << 40, sealed[0].record)])
    (memory.directory / "0-0.record").write_bytes(bytes(kept.data)[:-1])
    (memory.directory / "x-y.record").write_bytes(b"")
    assert not memory.scan() and not list(memory.directory.glob("*.record"))


def test_what_parity_takes_counts_against_the_room_and_too_little_is_said_with_numbers(
    arena: Path, group: Group
) -> None:
    needed = capacity(division_of(group.terms))
    short = ArenaFiles(arena, "run", needed.shared - 1)
    with pytest.raises(ArenaError, match=r"parity=2 in groups of 4 takes \d+ MiB") as raised:
        ShardFiles(short).make(group.terms, "host-0", 0)
    assert raised.value.fields["needed_bytes"] == needed.shared
    assert not list((arena / "parity").glob("*.rows"))
    memory = ArenaFiles(arena, "run", needed.shared + (1 << 20))
    ShardFiles(memory).make(group.terms, "host-0", 1)
    assert needed.shared <= memory.parity_bytes <= needed.shared + 3 * 8192
    assert memory.room_bytes() == (1 << 20) - (memory.parity_bytes - needed.shared)
    there = {p.name: p.stat().st_ino for p in (arena / "parity").glob("*.rows")}
    ShardFiles(memory).make(group.terms, "host-0", 0)  # once for all
    assert there == {p.name: p.stat().st_ino for p in (arena / "parity").glob("*.rows")}


@pytest.mark.parametrize("suffix", [".rows", ".record"])
def test_what_cannot_be_opened_now_is_not_taken_for_half_made(
    arena: Path, group: Group, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ShardFiles(ArenaFiles(arena, "run"))
    memory.make(group.terms, "host-0", 0)
    memory.store_records(0, [(0, group.run().sealed["host-0"][0].record)])
    there = sorted(path.name for path in memory.directory.iterdir())
    real_open, real_path_open = os.open, Path.open
    too_many = OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def refuse(path: Any, *flags: int) -> int:
        if str(path).endswith(suffix):
            raise too_many
        return real_open(path, *flags)

    def refuse_path(path: Path, *mode: Any, **named: Any) -> Any:
        if path.suffix == suffix:
            raise too_many
        return real_path_open(path, *mode, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr(Path, "open", refuse_path)
        with pytest.raises(ArenaError, match="Too many open files"):
            ShardFiles(ArenaFiles(arena, "run")).scan()
    assert there == sorted(path.name for path in memory.directory.iterdir())
    (row,) = ShardFiles(ArenaFiles(arena, "run")).scan()
    assert (row.half, row.offset_bytes) == (0, 0)


def test_a_half_that_cannot_be_mapped_now_stays(
    arena: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    ShardFiles(ArenaFiles(arena, "run")).make(group.terms, "host-0", 0)
    there = sorted(path.name for path in (arena / "parity").iterdir())

    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.protocol.arena.mmap.mmap", refuse)
        with pytest.raises(ArenaError, match="cannot map"):
            ShardFiles(ArenaFiles(arena, "run"))
    assert there == sorted(path.name for path in (arena / "parity").iterdir())
