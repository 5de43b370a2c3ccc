"""What was lost comes back bit for bit, in place, whatever was lost up to the parity."""

from __future__ import annotations

import hashlib
import mmap
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import TooManyLost, UsageError
from holdfast.parity.coding.backends import chosen
from holdfast.parity.coding.codes import Backend, Coder, NumpyBackend, parity_rows, times

GUARD = 0x5A


class Memory:
    """Buffers in one piece of memory, at addresses of any alignment, with guards between them."""

    def __init__(self, sizes: Sequence[int], gap: int = 3) -> None:
        self._whole = bytearray([GUARD]) * (sum(sizes) + gap * (len(sizes) + 1))
        self.views: list[memoryview] = []
        self._guards, at = [range(gap)], gap
        for size in sizes:
            self.views.append(memoryview(self._whole)[at : at + size])
            self._guards.append(range(at + size, at + size + gap))
            at += size + gap

    def is_unharmed(self) -> bool:
        return all(self._whole[place] == GUARD for guard in self._guards for place in guard)


def members(coder: Coder, sizes: Sequence[int], seed: int = 0) -> list[bytes]:
    """Random data of these sizes, and its parity."""
    data = [random.Random(seed + n).randbytes(size) for n, size in enumerate(sizes)]
    memory = Memory([max(sizes)] * coder.parity)
    coder.encode(data, memory.views)
    assert memory.is_unharmed()
    return [*data, *map(bytes, memory.views)]


def reference(coder: Coder, data: Sequence[bytes]) -> list[bytes]:
    """Parity by its definition, from the rows of the code."""
    found, size = [], max(map(len, data))
    for row in parity_rows(coder.data, coder.parity):
        total = 0
        for factor, part in zip(row, data, strict=True):
            product = part.translate(times(factor)).ljust(size, b"\0")
            total ^= int.from_bytes(product, "little")
        found.append(total.to_bytes(size, "little"))
    return found


@pytest.mark.parametrize("parity", [1, 2, 3, 4])
@pytest.mark.parametrize("data", range(1, 9))
def test_every_loss_up_to_the_parity_comes_back(data: int, parity: int, backend: Backend) -> None:
    coder = Coder(data, parity, backend)
    sizes = [67 - 9 * n for n in range(data)]
    whole = members(coder, sizes)
    assert whole[data:] == reference(coder, whole[:data])
    for count in range(1, parity + 1):
        for lost in combinations(range(data + parity), count):
            memory = Memory([len(whole[member]) for member in lost])
            present = {n: part for n, part in enumerate(whole) if n not in lost}
            coder.decode(present, dict(zip(lost, memory.views, strict=True)))
            assert [bytes(view) for view in memory.views] == [whole[member] for member in lost]
            assert memory.is_unharmed()


shapes = st.tuples(st.integers(1, 14), st.integers(1, 4))


@given(shapes, st.data())
def test_any_range_of_lost_members_is_read_from_the_same_range_of_the_others(
    shape: tuple[int, int], draw: st.DataObject
) -> None:
    data, parity = shape
    coder = Coder(data, parity, chosen().backend)
    sizes = draw.draw(st.lists(st.integers(0, 200), min_size=data, max_size=data))
    whole = members(coder, sizes, draw.draw(st.integers(0, 1000)))
    lost = draw.draw(st.sets(st.integers(0, data + parity - 1), max_size=parity))
    start = draw.draw(st.integers(0, max(sizes)))
    stop = draw.draw(st.integers(start, max(sizes)))
    memory = Memory([len(whole[n][start:stop]) for n in sorted(lost)], draw.draw(st.integers(1, 9)))
    present = {n: memoryview(part)[start:stop] for n, part in enumerate(whole) if n not in lost}
    coder.decode(present, dict(zip(sorted(lost), memory.views, strict=True)))
    assert [bytes(view) for view in memory.views] == [whole[n][start:stop] for n in sorted(lost)]
    assert memory.is_unharmed()


@given(shapes, st.data())
def test_members_added_one_by_one_in_any_order_give_the_same_parity(
    shape: tuple[int, int], draw: st.DataObject
) -> None:
    data, parity = shape
    coder = Coder(data, parity, chosen().backend)
    sizes = draw.draw(st.lists(st.integers(0, 150), min_size=data, max_size=data))
    whole = members(coder, sizes)
    memory = Memory([max(sizes)] * parity)
    for view in memory.views:
        view[:] = bytes(len(view))
    for member in draw.draw(st.permutations(range(data))):
        cut = draw.draw(st.integers(0, sizes[member]))
        for start, stop in ((cut, sizes[member]), (0, cut)):  # chunks, also in any order
            parts = [view[start:stop] for view in memory.views]
            coder.add(member, whole[member][start:stop], parts)
    assert [bytes(view) for view in memory.views] == whole[data:]
    assert memory.is_unharmed()


@given(shapes, st.data())
def test_lost_members_build_up_from_one_source_after_another(
    shape: tuple[int, int], draw: st.DataObject
) -> None:
    data, parity = shape
    coder = Coder(data, parity, chosen().backend)
    whole = members(coder, draw.draw(st.lists(st.integers(0, 150), min_size=data, max_size=data)))
    lost = sorted(
        draw.draw(st.sets(st.integers(0, data + parity - 1), min_size=1, max_size=parity))
    )
    memory = Memory([len(whole[member]) for member in lost])
    for view in memory.views:
        view[:] = bytes(len(view))
    factors = coder.solve([n for n in range(data + parity) if n not in lost], lost)
    assert len(factors) == data
    for member in draw.draw(st.permutations(sorted(factors))):
        coder.accumulate(factors[member], whole[member], memory.views)
    assert [bytes(view) for view in memory.views] == [whole[member] for member in lost]
    assert memory.is_unharmed()


@pytest.mark.parametrize("parity", [1, 2, 3, 4])
def test_one_loss_more_than_the_parity_is_refused(parity: int, backend: Backend) -> None:
    coder = Coder(4, parity, backend)
    whole = members(coder, [20] * 4)
    for lost in combinations(range(4 + parity), parity + 1):
        outputs = {member: bytearray(b"\7" * 20) for member in lost}
        present = {n: part for n, part in enumerate(whole) if n not in lost}
        with pytest.raises(TooManyLost, match=f"{parity + 1} of {4 + parity} members") as raised:
            coder.decode(present, outputs)
        assert raised.value.fields == {"missing": list(lost), "parity": parity}
        assert all(bytes(output) == b"\7" * 20 for output in outputs.values())


def test_more_members_than_needed_are_welcome(backend: Backend) -> None:
    coder = Coder(3, 2, backend)
    whole = members(coder, [10, 20, 30])
    output = bytearray(20)
    coder.decode({n: whole[n] for n in (0, 2, 3, 4)}, {1: output})
    assert output == whole[1]


def test_a_lost_member_known_to_have_ended_counts_as_zeros(backend: Backend) -> None:
    """Two are lost and the parity replaces one: what lies behind the end of one comes back."""
    coder = Coder(3, 1, backend)
    whole = members(coder, [10, 30, 30])
    output = bytearray(20)
    coder.decode({0: b"", 1: whole[1][10:], 3: whole[3][10:]}, {2: output})
    assert output == whole[2][10:]


# ── known answers: parity lies in memory that another version of this code may read ──────────


@pytest.mark.parametrize(
    ("data", "parity", "digest"),
    [
        (4, 1, "dc92d69406555b51"),
        (5, 2, "f0087c7bba538d27"),
        (4, 3, "d567bb9c9fd49b8d"),
        (6, 4, "276c0c84b1f0c260"),
    ],
)
def test_parity_never_changes(data: int, parity: int, digest: str, backend: Backend) -> None:
    parts = [
        bytes((37 * n + 11 * place + place * place // 7) % 256 for place in range(1000 - 100 * n))
        for n in range(data)
    ]
    outputs = [bytearray(1000) for _ in range(parity)]
    Coder(data, parity, backend).encode(parts, outputs)
    assert hashlib.sha256(b"".join(outputs)).hexdigest()[:16] == digest


def test_one_parity_is_xor(backend: Backend) -> None:
    output = bytearray(3)
    Coder(3, 1, backend).encode([b"\1\2\4", b"\x10\x20", b"\xff"], [output])
    assert output == b"\xee\x22\4"


def test_two_are_p_and_q_of_raid_6(backend: Backend) -> None:
    """Q by Horner's rule, as every implementation of RAID 6 computes it."""
    parts = [random.Random(n).randbytes(256) for n in range(10)]
    p, q = bytearray(256), bytearray(256)
    Coder(10, 2, backend).encode(parts, [p, q])
    for place in range(256):
        total, horner = 0, 0
        for part in reversed(parts):
            total ^= part[place]
            horner = (horner << 1 ^ (0x11D if horner & 0x80 else 0)) ^ part[place]
        assert (p[place], q[place]) == (total, horner)


# ── memory ───────────────────────────────────────────────────────────────────────────────────


def test_shared_memory_is_coded_where_it_lies(backend: Backend) -> None:
    arena = mmap.mmap(-1, 4 * 4096)
    whole = memoryview(arena)
    views = [whole[n * 4096 : (n + 1) * 4096] for n in range(4)]
    for n in range(2):
        views[n][:] = bytes([n + 1]) * 4096
    Coder(2, 2, backend).encode(views[:2], views[2:])
    assert arena[2 * 4096] == 1 ^ 2 and arena[-1] == 1 ^ 2 * 2
    for view in (*views, whole):
        view.release()
    arena.close()  # raises where anything still holds the memory


def test_arrays_of_any_type_are_bytes(backend: Backend) -> None:
    data = [np.arange(6, dtype=np.float64).reshape(2, 3), np.ones((2, 3), np.int64)]
    output = np.zeros(48, np.uint8)
    Coder(2, 1, backend).encode(data, [output])
    expected = np.frombuffer(data[0], np.uint8) ^ np.frombuffer(data[1], np.uint8)
    assert np.array_equal(output, expected)


def test_nothing_is_a_length_too(backend: Backend) -> None:
    coder = Coder(2, 2, backend)
    coder.encode([b"", b""], [bytearray(), bytearray()])
    coder.add(0, b"", [bytearray(), bytearray()])
    coder.decode({0: b"", 1: b""}, {2: bytearray(), 3: bytearray()})
    coder.decode({0: b"", 1: b""}, {})
    output = bytearray(b"\7\7")
    coder.encode([b"", b"\1"], [output, bytearray(2)])
    assert output == b"\1\0"


def test_threads_may_code_at_once(backend: Backend) -> None:
    coder = Coder(4, 2, backend)
    parts = [random.Random(n).randbytes(300_001) for n in range(4)]

    def parity(_: int) -> bytes:
        outputs = [bytearray(300_001) for _ in range(2)]
        coder.encode(parts, outputs)
        return b"".join(outputs)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(parity, range(8)))) == 1


# ── what is refused ──────────────────────────────────────────────────────────────────────────

CODER = Coder(2, 2, NumpyBackend())


def test_a_code_without_parity_is_refused() -> None:
    with pytest.raises(UsageError, match="a code of 0 parity members protects nothing"):
        Coder(3, 0, NumpyBackend())
    with pytest.raises(UsageError, match="no code has 254 data and 2 parity"):
        Coder(254, 2, NumpyBackend())


@pytest.mark.parametrize("count", [1, 3])
def test_a_wrong_number_of_buffers_is_refused(count: int) -> None:
    buffers = [bytearray(4) for _ in range(count)]
    right = [bytearray(4), bytearray(4)]
    with pytest.raises(UsageError, match=f"{count} buffers of data: this code has 2"):
        CODER.encode(buffers, right)
    with pytest.raises(UsageError, match=f"{count} buffers of parity: this code has 2"):
        CODER.encode(right, buffers)
    with pytest.raises(UsageError, match=f"{count} factors and 2 outputs"):
        CODER.accumulate(bytes(count), bytes(4), right)


def test_parity_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(UsageError, match=r"of one length, not of \[4, 5\] bytes"):
        CODER.encode([b"abcd", b"abcd"], [bytearray(4), bytearray(5)])


def test_data_longer_than_the_parity_is_refused() -> None:
    outputs = [bytearray(4), bytearray(4)]
    with pytest.raises(UsageError, match="buffer 1 of data has 5 bytes, the parity 4"):
        CODER.encode([b"abcd", b"abcde"], outputs)
    with pytest.raises(UsageError, match="buffer 0 of data has 5 bytes, the parity 4"):
        CODER.add(0, b"abcde", outputs)
    assert outputs == [bytes(4), bytes(4)]


def test_read_only_outputs_are_refused() -> None:
    with pytest.raises(UsageError, match="buffer 1 of parity is read-only"):
        CODER.encode([b"abcd", b"abcd"], [bytearray(4), bytes(4)])
    with pytest.raises(UsageError, match="buffer 0 of lost member is read-only"):
        CODER.decode({0: b"abcd", 2: b"abcd"}, {1: bytes(4)})
    with pytest.raises(UsageError, match="buffer 0 of output is read-only"):
        CODER.accumulate(b"\1", b"abcd", [bytes(4)])


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 3), (4, 1), (1, 2)])
def test_outputs_that_share_memory_are_refused(first: int, second: int) -> None:
    memory = memoryview(bytearray(8))
    output, other = memory[first : first + 4], memory[second : second + 4]
    with pytest.raises(UsageError, match="of parity shares memory with another buffer"):
        CODER.encode([b"abcd", b"abcd"], [output, other])
    with pytest.raises(UsageError, match="of parity shares memory with another buffer"):
        CODER.encode([b"abcd", output], [bytearray(4), other])
    with pytest.raises(UsageError, match="of lost member shares memory"):
        CODER.decode({0: output, 2: b"abcd"}, {1: other})


def test_an_output_within_a_long_source_is_refused() -> None:
    memory = memoryview(bytearray(20))
    with pytest.raises(UsageError, match="shares memory"):
        CODER.accumulate(b"\1", memory, [memory[12:16]])
    with pytest.raises(UsageError, match="shares memory"):
        Coder(2, 1, NumpyBackend()).decode({0: memory, 2: memory[2:4]}, {1: memory[12:16]})


def test_sources_may_share_memory_and_buffers_may_touch() -> None:
    memory = memoryview(bytearray(range(12)))
    CODER.encode([memory[:4], memory[:4]], [memory[4:8], memory[8:]])
    assert bytes(memory[4:8]) == bytes(4)


def test_what_is_not_one_piece_of_memory_is_refused() -> None:
    good = [bytearray(4), bytearray(4)]
    for bad in (np.zeros((4, 2), np.uint8)[:, 0], "text", 3, None):
        with pytest.raises(UsageError, match="buffer 1 of data is not memory in one piece"):
            CODER.encode([b"abcd", bad], good)


def test_members_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="there is no data member 2: they are 0 to 1"):
        CODER.add(2, b"", [bytearray(), bytearray()])
    with pytest.raises(UsageError, match="no member 4: data are 0 to 1, parity 2 to 3"):
        CODER.solve([0, 4], [1])
    with pytest.raises(UsageError, match="no member -1"):
        CODER.solve([0, 1], [-1])
    with pytest.raises(UsageError, match=r"members \[1\] are said to be there and to be lost"):
        CODER.solve([0, 1], [1, 2])
