"""Ranges are cut so that each byte is asked for once and every connection has work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.transport.wire.admission import LEAST_CHUNK_BYTES, PAGE_BYTES, cut

MIB = 1 << 20
_lengths = st.lists(st.integers(0, 64 * MIB) | st.integers(0, 3 * PAGE_BYTES), max_size=8)


@given(_lengths, st.integers(LEAST_CHUNK_BYTES, 16 * MIB), st.integers(1, 8))
def test_every_byte_is_in_one_chunk_and_none_is_too_large(
    lengths: list[int], chunk_bytes: int, connections: int
) -> None:
    chunks = cut(lengths, chunk_bytes=chunk_bytes, connections=connections)
    at = [0] * len(lengths)
    for chunk in chunks:
        assert chunk.start == at[chunk.wanted] < chunk.stop
        assert chunk.start % PAGE_BYTES == 0
        assert chunk.stop - chunk.start <= chunk_bytes + PAGE_BYTES
        at[chunk.wanted] = chunk.stop
    assert at == lengths
    assert [chunk.wanted for chunk in chunks] == sorted(chunk.wanted for chunk in chunks)


def test_a_range_is_cut_so_that_all_connections_have_a_part_of_it() -> None:
    chunks = cut([8 * MIB], chunk_bytes=8 * MIB, connections=4)
    assert [chunk.stop - chunk.start for chunk in chunks] == [2 * MIB] * 4


def test_a_small_range_is_not_cut() -> None:
    assert len(cut([LEAST_CHUNK_BYTES], chunk_bytes=8 * MIB, connections=4)) == 1


def test_no_chunk_is_a_crumb() -> None:
    chunks = cut([8 * MIB + 1], chunk_bytes=4 * MIB, connections=1)
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert max(sizes) - min(sizes) <= 2 * PAGE_BYTES


def test_nothing_is_cut_to_nothing() -> None:
    assert cut([], chunk_bytes=MIB, connections=4) == []
    assert cut([0, 0], chunk_bytes=MIB, connections=4) == []
