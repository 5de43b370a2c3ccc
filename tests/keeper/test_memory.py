"""What a keeper finds again in its arena: never a slot somebody writes to, never a mixture."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import events
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.layouts import agreement_id
from holdfast.coordinator.slots import Slot, SlotWriter, slot_id_of
from holdfast.errors import ArenaError
from holdfast.format.checksum import checksum, text
from holdfast.format.manifest import Incarnation
from holdfast.geometry.layout import table_hash
from holdfast.keeper import arena_files
from holdfast.keeper.arena_files import ArenaFiles, discover
from holdfast.keeper.hosts import host_messages
from holdfast.protocol import messages as m
from holdfast.protocol.arena import PAGE_BYTES, SlotFile, SlotRecord, boot_id, process_start

CAPACITY = 2 * PAGE_BYTES


@pytest.fixture
def memory(arena_dir: Path) -> ArenaFiles:
    return ArenaFiles(arena_dir, "run")


def captured(rank: int, **changes: Any) -> SlotRecord:
    """The record of a sealed image of attempt a7 at step 7, by a living process."""
    record = SlotRecord(
        state="captured",
        boot_id=boot_id(),
        run_id="run",
        incarnation=2,
        nonce="n",
        step=7,
        attempt="a7",
        rank=rank,
        world=2,
        layout="l" * 32,
        image_bytes=CAPACITY - 5,
        header_xxh3=f"{rank:016x}",
        table_xxh3=f"{rank + 50:016x}",
        writer_pid=os.getpid(),
        writer_start=process_start(os.getpid()),
    )
    return msgspec.structs.replace(record, **changes)


def leave(memory: ArenaFiles, *records: SlotRecord | None) -> None:
    """Slots as a keeper that was killed leaves them, numbered from 0."""
    for slot_id, record in enumerate(records):
        file = SlotFile.create(memory.slot_path(slot_id), CAPACITY)
        if record is not None:
            file.write_record(record)
        file.close()


def scan(memory: ArenaFiles) -> tuple[list[Slot], list[Attempt]]:
    """What the next keeper finds."""
    return ArenaFiles(memory.directory, "run").scan()


def the_only(memory: ArenaFiles, record: SlotRecord | None) -> Slot:
    """The slot found when there is one with this record, and no attempt."""
    leave(memory, record)
    (slot,), attempts = scan(memory)
    assert attempts == []
    return slot


# ── one slot ─────────────────────────────────────────────────────────────────────────────────


def test_an_empty_arena_holds_nothing(memory: ArenaFiles) -> None:
    assert scan(memory) == ([], [])


def test_a_slot_without_a_record_is_free(memory: ArenaFiles) -> None:
    slot = the_only(memory, None)
    assert (slot.id, slot.state, slot.capacity_bytes) == (0, "free", CAPACITY)


def test_a_slot_whose_record_is_torn_is_what_it_was_before(memory: ArenaFiles) -> None:
    leave(memory, captured(0, world=1))
    file = SlotFile.open(memory.slot_path(0), writable=True)
    file.write_record(captured(0, state="writing", step=8, attempt="a8"))
    file.map[PAGE_BYTES + 60] ^= 1
    (slot,), (attempt,) = scan(memory)
    assert slot.state == "captured"
    assert (attempt.id, attempt.step) == ("a7", 7)


@pytest.mark.promise
def test_a_slot_that_a_living_process_writes_to_is_given_to_nobody(memory: ArenaFiles) -> None:
    slot = the_only(memory, captured(1, state="writing"))
    assert slot.state == "quarantined"
    assert slot.writer == SlotWriter(os.getpid(), process_start(os.getpid()))
    assert (slot.rank, slot.incarnation) == (1, 2)  # of whom alone it is believed that it stopped


def test_a_slot_whose_writer_is_dead_is_free(memory: ArenaFiles) -> None:
    # The pid lives, but it is another process's now.
    slot = the_only(memory, captured(1, state="writing", writer_start=1))
    assert slot.state == "free"
    assert slot.writer is None


def test_a_slot_whose_writer_cannot_be_seen_is_given_to_nobody(memory: ArenaFiles) -> None:
    slot = the_only(memory, captured(1, state="writing", writer_pid=0, writer_start=0))
    assert (slot.state, slot.writer) == ("quarantined", SlotWriter(0, 0))


def test_a_slot_that_another_hosts_coordinator_orders_is_this_hosts_all_the_same(
    memory: ArenaFiles,
) -> None:
    """Its writer lives: the next keeper here gives the slot to nobody."""
    memory.files[0] = memory.create(0, CAPACITY)
    order = captured(0, state="writing", boot_id="the coordinator's", root_id="as it sees it")
    memory.stamp(0, order)
    (slot,), _ = scan(memory)
    assert slot.state == "quarantined"


def test_what_a_host_tells_of_its_slots_is_read_as_it_is_there(memory: ArenaFiles) -> None:
    leave(
        memory,
        captured(0, hosts=2),
        captured(1, attempt="a8", state="writing"),
        captured(1, attempt="a8", state="writing", writer_start=1),
        captured(0, attempt="a9", run_id="another"),
        None,
    )
    there = ArenaFiles(memory.directory, "run")
    slots, (attempt,) = there.scan()
    inventory = host_messages.HostInventory(arena="", slots=tuple(there.stored()), next_number=5)
    told = host_messages.from_follower(host_messages.pack(inventory))
    assert isinstance(told, host_messages.HostInventory)
    found, (same,) = discover(told.slots, 3)
    assert [slot.state for slot in slots] == ["captured", "quarantined", "free", "free", "free"]
    assert found == [msgspec.structs.replace(s, id=slot_id_of(3, s.id)) for s in slots]
    assert same == msgspec.structs.replace(attempt, slots={0: slot_id_of(3, 0)})


def test_a_slot_is_quarantined_for_as_long_as_its_writer_lives(memory: ArenaFiles) -> None:
    command = [sys.executable, "-SIc", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as writer:
        start = process_start(writer.pid)
        leave(memory, captured(0, state="writing", writer_pid=writer.pid, writer_start=start))
        (slot,), _ = scan(memory)
        assert slot.state == "quarantined"
        writer.kill()
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
        (slot,), attempts = scan(memory)
        assert (slot.state, attempts) == ("free", [])


@pytest.mark.parametrize("state", ["free", "granted", "sealed", ""])
def test_a_slot_in_any_other_state_is_free(memory: ArenaFiles, state: str) -> None:
    assert the_only(memory, captured(0, state=state)).state == "free"


@pytest.mark.parametrize("state", ["captured", "writing"])
@pytest.mark.parametrize("changed", [{"boot_id": "another"}, {"run_id": "another"}])
def test_what_another_boot_or_another_run_left_counts_for_nothing(
    memory: ArenaFiles, state: str, changed: dict[str, str]
) -> None:
    assert the_only(memory, captured(0, state=state, world=1, **changed)).state == "free"


@pytest.mark.promise
@pytest.mark.parametrize("state", ["captured", "writing"])
def test_what_belongs_to_a_copy_of_the_root_counts_for_nothing(
    memory: ArenaFiles, state: str
) -> None:
    leave(memory, captured(0, state=state, world=1, root_id="that of the copy"))
    (slot,), attempts = ArenaFiles(memory.directory, "run", root_id="that of the root").scan()
    assert (slot.state, attempts) == ("free", [])


def test_an_image_longer_than_its_slot_counts_for_nothing(memory: ArenaFiles) -> None:
    too_long = captured(0, world=1, image_bytes=CAPACITY + 1)
    assert the_only(memory, too_long).state == "free"


def test_an_image_that_fills_its_slot_counts(memory: ArenaFiles) -> None:
    leave(memory, captured(0, world=1, image_bytes=CAPACITY))
    (slot,), attempts = scan(memory)
    assert (slot.state, slot.image_bytes, len(attempts)) == ("captured", CAPACITY, 1)


def test_a_slot_says_itself_when_its_writer_is_done_with_this_very_attempt(
    memory: ArenaFiles,
) -> None:
    leave(memory, captured(0, state="writing"))
    memory.scan()
    assert not memory.is_sealed(0, "a7")
    trainer = SlotFile.open(memory.slot_path(0), writable=True)
    trainer.write_record(captured(0, attempt="a6"))
    assert not memory.is_sealed(0, "a7")
    trainer.write_record(captured(0))
    assert memory.is_sealed(0, "a7")
    assert not memory.is_sealed(1, "a7")


# ── attempts ─────────────────────────────────────────────────────────────────────────────────


def test_a_complete_generation_is_found_whole(memory: ArenaFiles) -> None:
    leave(memory, None, captured(1), captured(0))
    slots, (attempt,) = scan(memory)
    assert [slot.state for slot in slots] == ["free", "captured", "captured"]
    assert attempt.slots == {1: 1, 0: 2}
    said = (attempt.id, attempt.incarnation, attempt.step, attempt.world, attempt.layout)
    assert said == ("a7", 2, 7, 2, "l" * 32)
    assert [(slot.rank, slot.header_xxh3, slot.table_xxh3) for slot in slots[1:]] == [
        (1, f"{1:016x}", f"{51:016x}"),
        (0, f"{0:016x}", f"{50:016x}"),
    ]
    assert all(slot.image_bytes == CAPACITY - 5 for slot in slots[1:])


def test_a_generation_outlives_the_process_that_captured_it(memory: ArenaFiles) -> None:
    leave(memory, *[captured(rank, writer_start=1) for rank in (0, 1)])
    _, (attempt,) = scan(memory)
    assert sorted(attempt.slots) == [0, 1]


def test_an_incomplete_generation_of_one_host_is_nothing(memory: ArenaFiles) -> None:
    leave(memory, captured(0), captured(1, state="writing"))
    slots, attempts = scan(memory)
    assert attempts == []
    assert [slot.state for slot in slots] == ["free", "quarantined"]
    found = ArenaFiles(memory.directory, "run")
    found.scan()
    assert not found.holds_images()


def test_a_part_of_a_generation_of_several_hosts_has_the_ranks_that_are_here(
    memory: ArenaFiles,
) -> None:
    leave(memory, captured(0, hosts=2), captured(1, state="writing", hosts=2))
    slots, (attempt,) = scan(memory)
    assert (slots[0].state, attempt.hosts) == ("captured", 2)
    assert attempt.slots == {0: 0}
    assert attempt.world == 2
    assert slots[1].state == "quarantined"


def test_two_generations_are_two_attempts(memory: ArenaFiles) -> None:
    later = [captured(rank, step=8, attempt="a8") for rank in (0, 1)]
    leave(memory, captured(0), later[0], later[1], captured(1))
    _, attempts = scan(memory)
    assert {one.id: one.slots for one in attempts} == {"a7": {0: 0, 1: 3}, "a8": {0: 1, 1: 2}}


def test_of_two_slots_for_one_rank_only_one_counts(memory: ArenaFiles) -> None:
    leave(memory, captured(0), captured(0), captured(1))
    slots, (attempt,) = scan(memory)
    assert sorted(attempt.slots) == [0, 1]
    assert [slot.state for slot in slots] == ["captured", "free", "captured"]
    assert attempt.slots[0] == 0


@pytest.mark.promise
@pytest.mark.parametrize(
    "other", [{"step": 8}, {"incarnation": 3}, {"world": 3}, {"layout": "m" * 32}, {"hosts": 3}]
)
def test_images_that_disagree_are_never_one_attempt_whatever_they_are_called(
    memory: ArenaFiles, other: dict[str, Any]
) -> None:
    leave(memory, captured(0, hosts=2), captured(1, **{"hosts": 2} | other))
    slots, attempts = scan(memory)
    for attempt in attempts:
        assert len(attempt.slots) == 1
        said = (attempt.incarnation, attempt.step, attempt.world, attempt.layout)
        assert said == (2, 7, 2, "l" * 32)
    assert [slot.state for slot in slots] == ["captured", "free"]


# ── files that are no slots ──────────────────────────────────────────────────────────────────


def test_half_made_slots_are_removed_and_others_kept(memory: ArenaFiles) -> None:
    leave(memory, captured(0, world=1))
    (memory.directory / "00001.slot").write_bytes(b"")
    (memory.directory / "tmp.slot").write_bytes(bytes(5 * PAGE_BYTES))
    (memory.directory / "00002.slot").symlink_to(memory.slot_path(0))
    (slot,), (attempt,) = scan(memory)
    assert (slot.id, attempt.slots) == (0, {0: 0})
    assert [path.name for path in memory.directory.glob("*.slot")] == ["00000.slot"]


def test_a_slot_that_cannot_be_opened_now_is_not_taken_for_a_half_made_one(
    memory: ArenaFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(memory, captured(0, world=1))
    real_open = os.open

    def refuse(path: Any, *flags: int) -> int:
        if str(path).endswith(".slot"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real_open(path, *flags)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(ArenaError, match="Too many open files"):
            ArenaFiles(memory.directory, memory.run_id).scan()
    _, (attempt,) = scan(memory)
    assert attempt.slots == {0: 0}


def test_a_slot_is_made_stamped_and_removed(memory: ArenaFiles) -> None:
    memory.files[4] = memory.create(4, CAPACITY)
    memory.stamp(4, captured(0, world=1))
    (slot,), (attempt,) = scan(memory)
    assert (slot.id, attempt.slots) == (4, {0: 4})
    removed = memory.unlink(4)
    assert removed is not None
    removed.close()
    assert memory.unlink(4) is None  # missing is fine
    assert not memory.slot_path(4).exists()
    assert scan(memory) == ([], [])


def test_a_slot_that_does_not_fit_is_an_arena_error(memory: ArenaFiles) -> None:
    with pytest.raises(ArenaError, match="too small"):
        memory.create(0, 1 << 50)
    assert scan(memory) == ([], [])


# ── layouts and incarnations ─────────────────────────────────────────────────────────────────


def test_layouts_and_incarnations_are_found_by_the_next_keeper(memory: ArenaFiles) -> None:
    first = Incarnation(run_id="run", n=1, nonce="x")
    second = Incarnation(run_id="run", n=2, nonce="y", parent=(1, 30))
    for incarnation in (first, second):
        memory.store_incarnation(incarnation)
    hash_ = table_hash(b"{}")
    memory.store_layout(hash_, b"{}")
    later = ArenaFiles(memory.directory, "run")
    assert sorted(later.incarnations(), key=lambda i: i.n) == [first, second]
    assert later.layout(hash_) == b"{}"


TABLES = ("one", "one", "other")


@pytest.mark.promise
def test_a_layout_is_remembered_for_the_tables_that_it_was_agreed_from(
    memory: ArenaFiles,
) -> None:
    data, hash_ = b"{}", table_hash(b"{}")
    memory.store_layout(hash_, data)
    assert memory.remembered_layout(TABLES) is None
    memory.store_layout(hash_, data, tables=agreement_id(TABLES, hash_))
    later = ArenaFiles(memory.directory, "run")
    assert later.remembered_layout(TABLES) == data
    for others in (TABLES[::-1], TABLES[:2], (*TABLES, "other"), ()):
        assert later.remembered_layout(others) is None
    memory.store_layout(table_hash(b"[]"), b"[]", used=[hash_])
    assert later.remembered_layout(TABLES) == data
    memory.store_layout(table_hash(b"[]"), b"[]")
    assert later.remembered_layout(TABLES) is None
    assert len(list((memory.directory / "layouts").iterdir())) == 1


def test_a_full_arena_keeps_a_layout_without_its_tables(
    memory: ArenaFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_ = table_hash(b"{}")
    memory.store_layout(hash_, b"{}")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(arena_files, "write_whole", fail)
    memory.store_layout(hash_, b"{}", tables=agreement_id(TABLES, hash_))
    assert memory.layout(hash_) == b"{}" and memory.remembered_layout(TABLES) is None


@pytest.mark.promise
@pytest.mark.parametrize("damage", ["document changed", "document gone", "of another", "empty"])
def test_a_layout_that_may_be_another_than_the_agreed_one_is_not_remembered(
    memory: ArenaFiles, damage: str
) -> None:
    data, hash_ = b"{}", table_hash(b"{}")
    memory.store_layout(hash_, data, tables=agreement_id(TABLES, hash_))
    document = memory.directory / "layouts" / f"{hash_}.json"
    agreed = document.with_suffix(".agreed")
    match damage:
        case "document changed":
            document.write_bytes(b"[]")
        case "document gone":
            document.unlink()
        case "of another":  # a whole layout, and a whole record that is of another one
            other = table_hash(b"[]")
            document.with_stem(other).write_bytes(b"[]")
            agreed.rename(agreed.with_stem(other))
        case "empty":
            agreed.write_bytes(b"")
    assert memory.remembered_layout(TABLES) is None


def test_records_and_layouts_are_read_once_however_many_hosts_attach(
    memory: ArenaFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in (1, 2, 3):
        memory.store_incarnation(Incarnation(run_id="run", n=n, nonce="x"))
    memory.store_layout(table_hash(b"{}"), b"{}")
    read: list[Path] = []
    read_bytes = Path.read_bytes

    def counted(path: Path) -> bytes:
        read.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    for _ in range(5):
        assert {one.n for one in memory.incarnations()} == {1, 2, 3}
        assert memory.is_layout_intact(table_hash(b"{}"))
    assert len(read) == 4
    memory.store_incarnation(Incarnation(run_id="run", n=4, nonce="x"))
    memory.forget_incarnation(2)
    assert {one.n for one in memory.incarnations()} == {1, 3, 4}
    memory.incarnations().clear()
    assert len(memory.incarnations()) == 3
    path = memory.directory / "layouts" / f"{table_hash(b'{}')}.json"
    path.write_bytes(b"{ }")
    assert not memory.is_layout_intact(table_hash(b"{}"))
    path.unlink()
    assert not memory.is_layout_intact(table_hash(b"{}"))


def test_a_record_whose_bytes_changed_is_not_believed_and_told_once(memory: ArenaFiles) -> None:
    kept = Incarnation(run_id="run", n=1, nonce="x")
    memory.store_incarnation(kept)
    data = (memory.directory / "incarnations" / "1.json").read_bytes()
    (memory.directory / "incarnations" / "2.json").write_bytes(data[:-9])
    (memory.directory / "incarnations" / "3.json").write_bytes(b"")
    told: list[events.Event] = []
    stop = events.subscribe(lambda event, _: told.append(event))
    assert memory.incarnations() == memory.incarnations() == [kept]
    stop()
    assert len(told) == 2


def test_what_is_to_be_durable_is_found_by_the_next_keeper_of_this_start_and_by_no_other(
    memory: ArenaFiles,
) -> None:
    assert memory.order(3, "x") == m.NO_ORDER
    memory.store_order(3, "x", m.StandingOrder(5, 9))
    assert memory.order(3, "x") == m.StandingOrder(5, 9)
    assert memory.order(3, "y") == memory.order(4, "x") == m.NO_ORDER
    memory.store_order(3, "x", m.NO_ORDER)
    assert memory.order(3, "x") == m.NO_ORDER


@pytest.mark.parametrize(
    "data", [b"", b"[3", b'["3","x",5,9]', b'[3,"x",5]', b'[3,"x",9,5]', b'[3,"x",-7,9]']
)
def test_a_damaged_order_is_none(memory: ArenaFiles, data: bytes) -> None:
    memory.store_order(3, "x", m.StandingOrder(5, 9))
    sealed = f"{text(checksum(data))} ".encode() + data
    for damaged in (data, sealed):
        (memory.directory / "order").write_bytes(damaged)
        assert memory.order(3, "x") == m.NO_ORDER


def test_an_order_of_which_half_was_written_is_none(memory: ArenaFiles) -> None:
    memory.store_order(3, "x", m.StandingOrder(111, 111))
    old = (memory.directory / "order").read_bytes()
    memory.store_order(3, "x", m.StandingOrder(222, 222))
    new = (memory.directory / "order").read_bytes()
    assert len(old) == len(new)
    at = [n for n in range(len(old)) if old[n] != new[n]]
    for cut in range(at[0] + 1, at[-1] + 1):
        (memory.directory / "order").write_bytes(new[:cut] + old[cut:])
        assert memory.order(3, "x") == m.NO_ORDER


@pytest.mark.parametrize("name", ["incarnations/1.json", "begun"])
def test_a_record_that_cannot_be_read_now_is_not_taken_for_none(
    memory: ArenaFiles, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    memory.store_incarnation(Incarnation(run_id="run", n=1, nonce="x"))
    memory.store_begun(2)
    real_read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if str(path).endswith(name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real_read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(ArenaError, match="Too many open files"):
            memory.incarnations() if "/" in name else memory.begun()
    assert len(memory.incarnations()) == 1
    assert memory.begun() == 2


def test_a_record_that_the_arena_has_no_room_for_is_remembered_while_its_keeper_lives(
    memory: ArenaFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Incarnation(run_id="run", n=1, nonce="x")
    with monkeypatch.context() as patch:

        def refuse(*_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(Path, "write_bytes", refuse)
        with pytest.raises(OSError, match="No space left"):
            memory.store_incarnation(first)
    assert memory.incarnations() == [first]
    assert ArenaFiles(memory.directory, "run").incarnations() == []
    memory.store_incarnation(first)
    assert ArenaFiles(memory.directory, "run").incarnations() == [first]


def test_a_record_that_cannot_be_replaced_is_not_left_as_it_was(
    memory: ArenaFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start restored twice; what it went on from at first is not so any more."""
    first = Incarnation(run_id="run", n=2, nonce="x", parent=(1, 100))
    second = Incarnation(run_id="run", n=2, nonce="x", parent=(1, 50))
    memory.store_incarnation(first)

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    memory.store_incarnation(first)  # it is there as it is
    with pytest.raises(OSError, match="No space left"):
        memory.store_incarnation(second)
    assert memory.incarnations() == [second]
    assert ArenaFiles(memory.directory, "run").incarnations() == []


def test_an_incarnation_is_replaced_whole(memory: ArenaFiles) -> None:
    for parent in (None, (1, 5)):
        memory.store_incarnation(Incarnation(run_id="run", n=2, nonce="x", parent=parent))
    assert [one.parent for one in memory.incarnations()] == [(1, 5)]
    assert [path.name for path in (memory.directory / "incarnations").iterdir()] == ["2.json"]
