"""What a slot says of itself: the newest record, or when that one is torn the one before."""

from __future__ import annotations

import os
import re

import msgspec
import numpy as np
import pytest

from holdfast.errors import ArenaError
from holdfast.protocol.arena import (
    IMAGE_START,
    PAGE_BYTES,
    SlotFile,
)
from support.checkpoints.slots import record


def pages(slot: SlotFile) -> list[bytes]:
    return [bytes(slot.map[at : at + PAGE_BYTES]) for at in (0, PAGE_BYTES)]


def test_a_new_slot_has_no_record(slot: SlotFile) -> None:
    assert slot.read_record() is None


def test_the_last_record_written_is_the_one_read(slot: SlotFile) -> None:
    for step in range(7):
        slot.write_record(record(step))
        assert slot.read_record() == record(step)


def test_records_alternate_between_two_pages_and_leave_the_image_alone(slot: SlotFile) -> None:
    slot.image[:] = b"\xaa" * slot.capacity_bytes
    slot.write_record(record(0))
    before, changed = pages(slot), []
    for step in range(1, 7):
        slot.write_record(record(step))
        changed.append([one != other for one, other in zip(before, pages(slot), strict=True)])
        before = pages(slot)
    assert changed == [[False, True], [True, False]] * 3
    assert bytes(slot.image) == b"\xaa" * slot.capacity_bytes


@pytest.mark.parametrize("written_before", [0, 1, 2, 3, 4])
def test_a_record_torn_at_any_byte_leaves_the_one_before(
    slot: SlotFile, written_before: int
) -> None:
    for step in range(written_before):
        slot.write_record(record(step))
    last = slot.read_record()
    before = bytes(slot.map[:IMAGE_START])
    slot.write_record(record(100))
    after = bytes(slot.map[:IMAGE_START])
    different = [at for at in range(IMAGE_START) if before[at] != after[at]]
    start, stop = different[0], different[-1] + 1
    assert start // PAGE_BYTES == (stop - 1) // PAGE_BYTES
    for torn in range(start, stop):  # written up to here, or from here on: pages have no order
        for mixture in (after[:torn] + before[torn:], before[: torn + 1] + after[torn + 1 :]):
            slot.map[:IMAGE_START] = mixture
            expected = record(100) if mixture == after else last
            assert slot.read_record() == expected
    slot.map[:IMAGE_START] = after
    assert slot.read_record() == record(100)


def test_after_a_torn_record_the_next_one_is_written_over_it(slot: SlotFile) -> None:
    slot.write_record(record(0))
    slot.write_record(record(1))
    slot.map[PAGE_BYTES + 50] ^= 1
    assert slot.read_record() == record(0)
    slot.write_record(record(2))
    assert slot.read_record() == record(2)
    slot.map[PAGE_BYTES + 50] ^= 1  # and that one torn in its turn
    assert slot.read_record() == record(0)


@pytest.mark.promise
def test_a_flipped_bit_at_any_byte_of_a_record_is_noticed(slot: SlotFile) -> None:
    slot.write_record(record(0))
    slot.write_record(record(1))
    length = len(pages(slot)[1].rstrip(b"\0"))
    for at in range(PAGE_BYTES, PAGE_BYTES + length):
        slot.map[at] ^= 4
        assert slot.read_record() == record(0)
        slot.map[at] ^= 4
    assert slot.read_record() == record(1)


@pytest.mark.parametrize("first_by", ["keeper", "trainer"])
def test_keeper_and_trainer_writing_in_turn_never_shadow_each_other(
    slot: SlotFile, first_by: str
) -> None:
    trainer = SlotFile.open(slot.path, writable=True)
    writers = [slot, trainer] if first_by == "keeper" else [trainer, slot]
    # Also several times in a row, so that neither can get by with a count of its own.
    for step, who in enumerate([0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 1, 0, 1]):
        writers[who].write_record(record(step))
        assert slot.read_record() == record(step)
        assert trainer.read_record() == record(step)
        assert SlotFile.open(slot.path, writable=False).read_record() == record(step)


def test_a_page_of_noise_is_no_record(slot: SlotFile) -> None:
    slot.map[:IMAGE_START] = os.urandom(IMAGE_START)
    assert slot.read_record() is None
    slot.write_record(record(1))
    assert slot.read_record() == record(1)


def test_a_record_longer_than_its_page_does_not_harm_the_one_before(slot: SlotFile) -> None:
    slot.write_record(record(0))
    slot.image[:8] = b"an image"
    for step in (1, 2):
        long = msgspec.structs.replace(record(step), run_id="r" * 5000)
        with pytest.raises(ArenaError):
            slot.write_record(long)
    assert slot.read_record() == record(0)
    assert bytes(slot.image[:8]) == b"an image"


def test_the_record_and_the_image_outlive_the_mapping(slot: SlotFile) -> None:
    slot.write_record(record(5))
    slot.image[:3] = b"abc"
    slot.close()
    again = SlotFile.open(slot.path, writable=False)
    assert again.read_record() == record(5)
    assert bytes(again.image[:3]) == b"abc"
    assert again.capacity_bytes == 3 * PAGE_BYTES


def test_closing_waits_for_whoever_still_looks(slot: SlotFile) -> None:
    slot.image[:3] = b"abc"
    view, array = slot.image[:3], np.frombuffer(slot.image, np.uint8, 3)
    reading = re.finditer(b"[abc]", slot.image)  # holds the memory itself, as a write under way
    slot.close()
    assert bytes(view) == bytes(array) == b"abc"
    assert [found[0] for found in reading] == [b"a", b"b", b"c"]
