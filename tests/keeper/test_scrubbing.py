"""What changes by itself in memory is found, and nothing else is taken for that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.events import DamageFound, Event, subscribe
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import header_size
from holdfast.keeper import scrub as scrubbing
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.jobs import Background
from holdfast.keeper.parity.store import ShardFiles, StoredParity
from holdfast.keeper.published_images import PublishedImages
from holdfast.keeper.scrub import DAMAGED, HEADER, DamagedImage, DamagedShard, Repairer, Scrubber
from holdfast.parity.planning.placement import stored_by
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotFile, SlotRecord
from holdfast.protocol.facts import Fact
from support.checkpoints.images import seals
from support.coordinator.coordinators import Keeper, granted
from support.peers.exchanging import Group, make_image

MIB = 1 << 20


@pytest.fixture
def memory(tmp_path: Path) -> ArenaFiles:
    directory = tmp_path / "arena"
    directory.mkdir(mode=0o700)
    return ArenaFiles(directory, "run")


def fill(memory: ArenaFiles, slot: int, image: bytes, rank: int = 0) -> SlotFile:
    """A slot with a sealed image of attempt a0."""
    file = memory.files[slot] = memory.create(slot, len(image) + 4096)
    file.image[: len(image)] = image
    header, table = seals(image)
    file.write_record(
        SlotRecord(
            state="captured",
            boot_id=memory.boot_id,
            run_id="run",
            incarnation=1,
            step=4,
            attempt="a0",
            rank=rank,
            world=2,
            layout="l",
            image_bytes=len(image),
            header_xxh3=header,
            table_xxh3=table,
            hosts=2,
        )
    )
    return file


class Looking:
    """One pass after another over a memory, and what was found."""

    def __init__(self, memory: ArenaFiles, rows: Callable[[], list[StoredParity]] = list) -> None:
        self.found: list[Any] = []
        self.scrubbing = Scrubber(memory, rows, self.found.append, rate_bytes_s=1 << 40)

    def look(self) -> list[Any]:
        self.found.clear()
        self.scrubbing.run_pass()
        return list(self.found)


def flip(file: SlotFile, at: int) -> None:
    file.image[at] ^= 0x10


def test_a_flipped_bit_is_found_wherever_it_is_in_a_sealed_image(memory: ArenaFiles) -> None:
    image = make_image(0, 3 * MIB + 5)
    file, looking = fill(memory, 3, image), Looking(memory)
    data = header_size(image, "image", len(image))
    table = len(image) - 4096
    cases = {
        0: HEADER,  # then the header cannot even be told from the rest
        20: HEADER,
        data: (data, data + BLOCK_BYTES),
        data + 2 * MIB + 7: (data + 2 * MIB, data + 3 * MIB),
        table - 1: (data + 3 * MIB, table),
        table: (table, len(image)),
        len(image) - 1: (table, len(image)),
    }
    assert not looking.look()
    for at, span in cases.items():
        flip(file, at)
        (damage,) = looking.look()
        assert (damage.slot, damage.spans) == (3, (span,)), at
        flip(file, at)
    assert not looking.look()
    assert looking.scrubbing.passes == len(cases) + 2


def test_all_that_is_wrong_in_an_image_is_told_at_once(memory: ArenaFiles) -> None:
    image = make_image(0, 4 * MIB)
    file, looking = fill(memory, 0, image), Looking(memory)
    data = header_size(image, "image", len(image))
    for at in (data + 1, data + 3 * MIB):
        flip(file, at)
    (damage,) = looking.look()
    assert [start - data for start, _ in damage.spans] == [0, 3 * MIB]


@pytest.mark.parametrize("state", ["writing", "free", DAMAGED, "rebuilding"])
def test_slots_that_are_not_sealed_are_not_looked_at(memory: ArenaFiles, state: str) -> None:
    file = fill(memory, 0, make_image(0, MIB))
    record = file.read_record()
    assert record is not None
    flip(file, MIB // 2)
    for other in (replace(record, state=state), replace(record, run_id="another")):
        file.write_record(other)
        assert not Looking(memory).look()


def test_a_slot_that_is_given_away_while_it_is_read_is_no_damage(
    memory: ArenaFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = make_image(0, 2 * MIB)
    file = fill(memory, 0, image)
    pieces = scrubbing._pieces

    def given_away(*arguments: Any) -> Iterator[Any]:
        for number, piece in enumerate(pieces(*arguments)):
            if number == 2:  # said in the slot before anybody writes to it
                record = file.read_record()
                assert record is not None
                file.write_record(replace(record, state="writing", attempt="a1"))
                file.image[: len(image)] = bytes(len(image))
            yield piece

    monkeypatch.setattr(scrubbing, "_pieces", given_away)
    assert not Looking(memory).look()


def test_the_rate_is_kept_whatever_there_is_and_nothing_is_read_while_others_work(
    memory: ArenaFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(memory, 0, make_image(0, 9 * MIB))
    looking = Scrubber(memory, list, lambda _: None, rate_bytes_s=2 * MIB)
    waited_s: list[float] = []

    def wait(seconds: float) -> bool:
        waited_s.append(seconds)
        if looking.is_busy and len(waited_s) > 20:
            looking.is_busy = False
        return False

    monkeypatch.setattr(looking._over, "wait", wait)
    looking.run_pass()
    read = looking.checked_bytes
    assert read >= 9 * MIB and 0.0 <= read / (2 * MIB) - sum(waited_s) <= 2.0
    waited_s.clear()
    looking.is_busy = True
    looking.run_pass()
    assert len(waited_s) > 20 and not looking.is_busy


def test_something_that_hangs_does_not_keep_memory_from_being_looked_at(
    memory: ArenaFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(memory, 0, make_image(0, 9 * MIB))
    looking = Scrubber(memory, list, lambda _: None)
    looking.is_busy = True
    monkeypatch.setattr(looking._over, "wait", lambda _: False)
    looking.run_pass()
    assert looking.passes == 1


def test_it_ends_in_the_middle_of_a_pass(memory: ArenaFiles) -> None:
    fill(memory, 0, make_image(0, 9 * MIB))
    looking = Scrubber(memory, list, lambda _: None, rate_bytes_s=1, pause_s=0.0)
    looking.begin()
    looking.end()
    for thread in threading.enumerate():
        if thread.name == "holdfast-scrub":
            thread.join(10)
    assert not [t for t in threading.enumerate() if t.name == "holdfast-scrub"]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with Group(tmp_path / "group", [[3 * MIB], [2 * MIB], [5 * MIB], [MIB]], 2) as made:
        yield made


@pytest.mark.promise
def test_a_flipped_bit_is_found_in_a_row_of_parity_unless_it_is_made_anew(
    memory: ArenaFiles, group: Group
) -> None:
    files, terms, own = ShardFiles(memory), group.terms, "host-1"
    files.make(terms, own, 0)
    kept = stored_by(terms.placement, terms.number_of(own))
    sealed = group.run().check_all().sealed[own]
    places = files.place(0, kept)
    for one in sealed:
        places[one.kept][1][:] = group.hosts[1].rows[one.kept.stripe, one.kept.row]
    rows = files.store_records(0, [(places[one.kept][0], one.record) for one in sealed])
    looking = Looking(memory, lambda: rows)
    assert not looking.look()
    places[kept[1]][1][-1] ^= 1
    (damage,) = looking.look()
    assert isinstance(damage, DamagedShard) and damage.row is rows[1]
    last = (kept[1].size_bytes - 1) // MIB
    assert damage.numbers == (last,)
    asked = 0

    def forgotten() -> list[StoredParity]:
        nonlocal asked
        asked += 1
        return rows if asked == 1 else []

    assert not Looking(memory, forgotten).look()


# ── what comes of it where nobody has parity of it ───────────────────────────────────────────


class AlonePart:
    """A host that nobody keeps parity for."""

    parity = None

    def __init__(self) -> None:
        self.lost: list[tuple[int, str]] = []

    def decode_access(self, *_: object) -> None:
        return None

    def report(self, fact: Fact) -> None:
        assert isinstance(fact, host_messages.ImageLost)
        self.lost.append((fact.slot, fact.attempt))


def test_an_image_that_nobody_can_repair_is_dropped_and_told(memory: ArenaFiles) -> None:
    image = make_image(0, 2 * MIB)
    file = fill(memory, 5, image)
    flip(file, MIB)
    heard: list[Event] = []
    stop = subscribe(lambda event, _: heard.append(event))
    part: Any = AlonePart()

    async def play() -> None:
        background = Background()
        repairing = Repairer("a", memory, background, PublishedImages(memory), part)
        looking = Looking(memory)
        (damage,) = looking.look()
        repairing.on_damage(damage)
        repairing.on_damage(damage)  # a second word of the same
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(play())
    stop()
    (event,) = [one for one in heard if isinstance(one, DamageFound)]
    assert (event.host, event.what, event.name) == ("a", "image", "rank 0")
    assert event.outcome == "dropped"
    assert (event.incarnation, event.step, event.size_bytes) == (1, 4, MIB)
    assert part.lost == [(5, "a0")]
    record = file.read_record()
    assert record is not None and record.state == DAMAGED
    assert not memory.discovered()[1]  # nobody believes it, now or later


def damaged(memory: ArenaFiles) -> tuple[SlotFile, DamagedImage, bytes]:
    image = make_image(0, 2 * MIB)
    file = fill(memory, 5, image)
    flip(file, MIB + 9)
    (damage,) = Looking(memory).look()
    return file, damage, image


@pytest.mark.parametrize("is_given_away", [False, True])
def test_what_was_decoded_is_written_only_into_the_slot_that_it_is_for(
    memory: ArenaFiles, is_given_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, damage, image = damaged(memory)
    part: Any = AlonePart()
    part.decode_access = lambda *_: (None, None)
    ((start, stop),) = damage.spans

    async def play() -> None:
        repairing = Repairer("a", memory, Background(), PublishedImages(memory), part)

        def decode(_: Any, *__: Any) -> dict[int, bytes]:
            if is_given_away:
                record = damage.record
                file.write_record(replace(record, state="writing", attempt="a1"))
                file.image[: len(image)] = b"n" * len(image)
            return {start: image[start:stop]}

        monkeypatch.setattr("holdfast.keeper.scrub._decode_image", decode)
        repairing.on_damage(damage)
        for _ in range(100):
            await asyncio.sleep(0.01)
            record = file.read_record()
            if repairing.repaired or (record and record.state == "writing"):
                break
        await asyncio.sleep(0.05)
        assert repairing.repaired == (not is_given_away) and not repairing.dropped

    asyncio.run(play())
    record = file.read_record()
    assert record is not None
    if is_given_away:
        assert bytes(file.image[: len(image)]) == b"n" * len(image)
        assert record.attempt == "a1" and not part.lost
    else:
        assert bytes(file.image[: len(image)]) == image
        assert record == damage.record and not Looking(memory).look()


def test_a_coordinator_forgets_an_image_that_is_lost_and_what_it_was_part_of() -> None:
    keeper = Keeper(2)
    c = keeper.c
    for step in (1, 2):
        attempt = granted(keeper.ask_all(step))
        for rank in range(2):
            size = c.slots[c.attempts[attempt].slots[rank]].image_bytes
            c.lifecycle.captured(
                rank,
                m.Captured(attempt=attempt, image_bytes=size, header_xxh3="h", table_xxh3="t"),
                0.0,
            )
    newest = c.attempts.newest_complete()
    assert newest is not None and newest.step == 2
    slots = dict(newest.slots)
    c.lifecycle.image_lost(slots[1], "another")
    assert c.attempts.newest == newest.id
    c.lifecycle.image_lost(slots[1], newest.id)
    found = c.attempts.newest_complete()
    assert found is not None and found.step == 1
    assert {c.slots[slot].state for slot in slots.values()} == {"free"}
    assert newest.id not in c.attempts
