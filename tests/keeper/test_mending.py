"""What a host lost, or has damaged, is made anew out of what its group has and is right."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.errors import TooManyLost
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import header_size, plan_image
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.jobs import Background
from holdfast.keeper.parity import group_access as mending
from holdfast.keeper.parity.group_access import (
    KeeperReach,
    encode_again,
    open_group,
    pieces_of,
)
from holdfast.keeper.parity.rebuild import REBUILDING, RebuildWorker
from holdfast.keeper.published_images import PublishedImages
from holdfast.keeper.scrub import HEADER, DamagedImage, _decode_image
from holdfast.parity.planning.record import ParityRecord, unseal
from holdfast.protocol.arena import SlotRecord
from holdfast.protocol.facts import Fact
from holdfast.restore.cluster.decode import decode_image
from holdfast.transport.wire.http import parity_path, record_path
from support.checkpoints.images import assemble, seals
from support.peers import exchanging
from support.peers.exchanging import ATTEMPT, BEFORE, Group, Host
from support.peers.peering import GENERATION, close_pullers, puller

MIB = 1 << 20
SIZES = [[3 * MIB], [2 * MIB, 5 * MIB + 77], [4 * MIB], [MIB]]
WORLD = 5
LAYOUT = "0" * 32


def make_image(rank: int, size: int) -> bytes:
    """As ``exchanging`` makes it, with all that an image says of itself."""
    data = np.random.default_rng(rank).integers(0, 256, size, dtype=np.uint8).tobytes()
    metadata = {
        "rank": str(rank),
        "incarnation": "3",
        "step": "1200",
        "attempt": ATTEMPT,
        "world": str(WORLD),
        "layout": LAYOUT,
    }
    return bytes(assemble(plan_image([("a", "U8", (size,))]), {"a": data}, metadata=metadata))


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """Four hosts of which two may be lost; their images and rows are offered."""
    monkeypatch.setattr(exchanging, "make_image", make_image)
    with Group(tmp_path / "group", SIZES, 2) as made:
        made.run().check_sealed()
        for host in made.hosts:
            offer_rows(made, host)
        yield made
    close_pullers()


def offer_rows(group: Group, host: Host) -> None:
    for one in group.sealed[host.name]:
        at = ATTEMPT, one.kept.stripe, one.kept.row
        path = host.directory / f"{one.kept.stripe}-{one.kept.row}.rows"
        path.write_bytes(bytes(BEFORE) + host.rows[one.kept.stripe, one.kept.row])
        path.chmod(0o600)
        host.served.offer(parity_path(*at), path, start=BEFORE)
        host.served.do(
            host.served.server.offer_document, record_path(*at), one.record, generation=GENERATION
        )


@pytest.fixture
def memory(tmp_path: Path) -> ArenaFiles:
    directory = tmp_path / "arena"
    directory.mkdir(mode=0o700)
    return ArenaFiles(directory, "run")


def record_of(group: Group, own: str) -> ParityRecord:
    return unseal(group.sealed[own][0].record, "a record")


def reach(group: Group, own: str, memory: ArenaFiles, *lost: str) -> KeeperReach:
    """As the keeper of ``own`` reaches the others; what is its own is gone."""
    peers = {name: peer for name, peer in group.peers.items() if name not in (own, *lost)}
    return KeeperReach(own, memory, {}, [], peers, puller(connections=2))


def whole(image: Any, data_start: int) -> bytes:
    pieces = (bytes(image.view(*piece, bytearray())) for piece in pieces_of(image, data_start))
    return b"".join(pieces)


def test_every_image_of_a_host_is_decoded_out_of_the_others_header_and_all(
    group: Group, memory: ArenaFiles
) -> None:
    host = group.hosts[1]
    for own in ("host-0", "host-1"):  # by another, or by itself out of what others have
        left = open_group(record_of(group, own), reach(group, own, memory, "host-1"))
        for rank, image in host.images.items():
            decoded = decode_image(left, record_of(group, own), rank)
            start = header_size(image, "image", len(image))
            assert whole(decoded, start) == image


def test_what_is_wrong_in_a_source_is_found_and_another_taken(
    group: Group, memory: ArenaFiles
) -> None:
    slot = group.hosts[2].slot(3)
    with slot.open("r+b") as file:
        file.seek(BEFORE + 2 * MIB)
        file.write(b"wrong")
    record = record_of(group, "host-1")
    image = group.hosts[1].images[2]
    start = header_size(image, "image", len(image))
    left = open_group(record, reach(group, "host-1", memory))
    assert whole(decode_image(left, record, 2), start) == image


def test_with_too_few_left_nothing_is_made(group: Group, memory: ArenaFiles) -> None:
    record = record_of(group, "host-1")
    left = open_group(record, reach(group, "host-1", memory, "host-0", "host-2"))
    with pytest.raises(TooManyLost, match=r"host-0 .lost.*host-1 .lost.*replaces 2"):
        decode_image(left, record, 1)


def test_where_images_are_now_is_believed_and_not_where_they_were(
    group: Group, memory: ArenaFiles
) -> None:
    record = record_of(group, "host-0")
    # Of rank 1 it is said that nobody has it, of rank 2 that it is where it was: its host counts
    # as lost with both.
    places = {0: "host-0", 2: "host-1", 3: "host-2", 4: "host-3"}
    left = open_group(record, reach(group, "host-0", memory), places)
    assert set(left.reader._images) == {(1, 1), (2, 0), (3, 0)}


def test_blocks_of_a_row_are_encoded_again(group: Group, memory: ArenaFiles) -> None:
    for host in group.hosts:
        for one in group.sealed[host.name]:
            record = unseal(one.record, "a record")
            left = open_group(record, reach(group, host.name, memory))
            row = bytes(host.rows[one.kept.stripe, one.kept.row])
            for number in {0, (len(row) - 1) // MIB}:
                block = encode_again(left, record, host.name, number)
                assert block is not None
                assert bytes(block) == row[number * MIB : (number + 1) * MIB]


def test_a_row_that_comes_out_otherwise_than_it_was_made_is_not_believed(
    group: Group, memory: ArenaFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mending, "sums_of", lambda record: [0] * 99)
    record = record_of(group, "host-0")
    left = open_group(record, reach(group, "host-0", memory))
    assert encode_again(left, record, "host-0", 0) is None


def test_the_damaged_bytes_of_an_image_are_made_and_no_others(
    group: Group, memory: ArenaFiles
) -> None:
    image, record = group.hosts[0].images[0], record_of(group, "host-0")
    start = header_size(image, "image", len(image))
    header, table = seals(image)
    said = SlotRecord(
        state="captured",
        attempt=ATTEMPT,
        rank=0,
        image_bytes=len(image),
        header_xxh3=header,
        table_xxh3=table,
    )
    block = start + MIB, start + 2 * MIB
    damage = DamagedImage(0, said, (HEADER, block, (len(image) - 4096, len(image))))
    found = _decode_image(damage, record, lambda: reach(group, "host-0", memory))
    assert found == {
        0: image[:start],
        block[0]: image[slice(*block)],
        len(image) - 4096: image[-4096:],
    }


# ── into a slot ──────────────────────────────────────────────────────────────────────────────


class Told(list[Fact]):
    def __call__(self, fact: Fact) -> None:
        self.append(fact)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


ORDER = host_messages.RebuildImage(
    slot=7,
    attempt=ATTEMPT,
    rank=2,
    half=0,
    places={0: "host-0", 1: "host-1", 3: "host-2", 4: "host-3"},
)


def test_a_lost_image_is_whole_in_its_slot_and_says_so(group: Group, memory: ArenaFiles) -> None:
    file = memory.files[7] = memory.create(7, 6 * MIB)
    image, told = group.hosts[1].images[2], Told()

    async def play() -> None:
        rebuilding = RebuildWorker(memory, Background(), PublishedImages(memory))
        rebuilding.begin(
            ORDER,
            record_of(group, "host-0"),
            "host-0",
            lambda: reach(group, "host-0", memory),
            told,
        )
        assert not memory.discovered()[1]  # not before it is whole
        await until(lambda: bool(told))

    asyncio.run(play())
    (fact,) = told
    assert isinstance(fact, host_messages.RebuildComplete) and (fact.slot, fact.image.rank) == (
        7,
        2,
    )
    assert bytes(file.image[: len(image)]) == image
    _, (attempt,) = memory.discovered()
    assert attempt.slots == {2: 7} and attempt.generation == (3, 1200)
    record = file.read_record()
    assert record is not None
    assert (record.header_xxh3, record.table_xxh3) == seals(image)


@pytest.mark.parametrize("moment", ["before", "between"])
def test_nothing_is_written_to_a_slot_once_its_image_was_given_up(
    group: Group, memory: ArenaFiles, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    file = memory.files[7] = memory.create(7, 6 * MIB)
    told, reached, may_go_on = Told(), threading.Event(), threading.Event()
    pieces = mending.pieces_of

    def slow_pieces(*arguments: Any) -> Iterator[tuple[int, int]]:
        for number, piece in enumerate(pieces(*arguments)):
            if number == (moment == "between"):
                reached.set()
                assert may_go_on.wait(30)
            yield piece

    monkeypatch.setattr(mending, "pieces_of", slow_pieces)

    async def play() -> None:
        rebuilding = RebuildWorker(memory, Background(), PublishedImages(memory))
        rebuilding.begin(
            ORDER,
            record_of(group, "host-0"),
            "host-0",
            lambda: reach(group, "host-0", memory),
            told,
        )
        await until(reached.is_set)
        rebuilding.cancel("something newer is captured")
        file.image[:] = b"n" * len(file.image)  # it is another's from now on
        may_go_on.set()
        await until(lambda: bool(told))
        assert not rebuilding.is_busy

    asyncio.run(play())
    (fact,) = told
    assert (
        isinstance(fact, host_messages.RebuildFailed)
        and fact.reason == "something newer is captured"
    )
    assert bytes(file.image) == b"n" * len(file.image)
    record = file.read_record()
    assert record is not None and record.state == REBUILDING
    assert BLOCK_BYTES == MIB
