"""Block checksums: fixed by the format, so that any tool can check an image."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.checksum import (
    BLOCK_BYTES,
    block_count,
    blocks,
    checksum,
    pack_table,
    text,
    unpack_table,
)

sums = st.lists(st.integers(0, 2**64 - 1), max_size=20)


def test_the_checksum_is_the_published_xxh3_of_64_bits() -> None:
    # Values of the reference implementation (xxHash 0.8, `xxhsum -H3`).
    assert text(checksum(b"")) == "2d06800538d394c2"
    assert text(checksum(b"a")) == "e6c632b61e964e1f"
    assert text(checksum(b"abc")) == "78af5f94892f3950"


def test_a_checksum_is_the_same_of_any_kind_of_memory() -> None:
    data = bytes(range(256)) * 5
    assert checksum(data) == checksum(bytearray(data)) == checksum(memoryview(data))
    assert checksum(memoryview(data)[7:99]) == checksum(data[7:99])


def test_a_checksum_is_written_with_all_its_digits() -> None:
    assert text(0) == "0" * 16
    assert text(2**64 - 1) == "f" * 16


@pytest.mark.parametrize(
    ("size", "count"),
    [(0, 0), (1, 1), (BLOCK_BYTES, 1), (BLOCK_BYTES + 1, 2), (3 * BLOCK_BYTES, 3)],
)
def test_a_started_block_counts(size: int, count: int) -> None:
    assert block_count(size) == count


@given(size=st.integers(0, 5 * BLOCK_BYTES))
def test_blocks_cover_every_byte_once_and_in_order(size: int) -> None:
    found = list(blocks(0, block_count(size), size))
    assert [number for number, _, _ in found] == list(range(block_count(size)))
    reached = 0
    for _, start, stop in found:
        assert start == reached
        assert 0 < stop - start <= BLOCK_BYTES
        reached = stop
    assert reached == size


@given(size=st.integers(1, 5 * BLOCK_BYTES), data=st.data())
def test_some_blocks_are_the_same_as_among_all(size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, block_count(size)))
    last = data.draw(st.integers(first, block_count(size)))
    assert list(blocks(first, last, size)) == list(blocks(0, block_count(size), size))[first:last]


@given(sums=sums, more=st.integers(0, 5))
def test_a_table_reads_back_and_its_unused_entries_are_zero(sums: list[int], more: int) -> None:
    table = pack_table(sums, len(sums) + more)
    assert len(table) == 8 * (len(sums) + more)
    assert unpack_table(table, len(sums)) == tuple(sums)
    assert unpack_table(table, len(sums) + more)[len(sums) :] == (0,) * more


def test_a_table_is_little_endian() -> None:
    assert pack_table([1], 1) == b"\x01" + bytes(7)
