"""The coefficients of the codes: any members lost up to the parity can be undone; the numbers."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.parity.coding.codes import (
    MAX_MEMBERS,
    POLYNOMIAL,
    generator,
    inverse,
    inverted,
    multiply,
    parity_rows,
    times,
    weights,
)

elements = st.integers(0, 255)


def slowly(a: int, b: int) -> int:
    """A product by its definition: of polynomials, modulo the polynomial."""
    found = 0
    for bit in range(8):
        found ^= (a << bit) * (b >> bit & 1)
    for bit in range(15, 7, -1):
        found ^= (POLYNOMIAL << (bit - 8)) * (found >> bit & 1)
    return found


def test_products_are_those_of_the_field() -> None:
    for a in range(256):
        assert times(a) == bytes(slowly(a, b) for b in range(256))
        assert all(times(a)[b] == multiply(a, b) for b in (0, 1, 2, 77, 255))


def test_every_element_but_zero_has_an_inverse() -> None:
    assert all(multiply(a, inverse(a)) == 1 for a in range(1, 256))


def test_one_parity_is_xor_and_two_are_raid_6_with_generator_2() -> None:
    assert parity_rows(5, 1) == (bytes([1] * 5),)
    assert parity_rows(10, 2) == (bytes([1] * 10), bytes.fromhex("0102040810204080 1d3a"))


def test_three_and_more_are_the_cauchy_rows_of_isa_l() -> None:
    """Row r, column c: the inverse of (data + r) xor c."""
    assert [row.hex() for row in parity_rows(4, 3)] == ["47a77aba", "a747ba7a", "7aba47a7"]
    assert parity_rows(6, 4)[3].hex() == "9dad98ddaa3d"
    for data, parity in ((4, 3), (6, 4)):
        for r, row in enumerate(parity_rows(data, parity)):
            assert [multiply(row[c], (data + r) ^ c) for c in range(data)] == [1] * data


@pytest.mark.parametrize("parity", [1, 2, 3, 4])
@pytest.mark.parametrize("data", range(1, 9))
def test_any_members_as_many_as_the_data_determine_the_rest(data: int, parity: int) -> None:
    rows = generator(data, parity)
    for sources in combinations(range(data + parity), data):
        matrix = [rows[member] for member in sources]
        undone = inverted(matrix)
        assert product(matrix, undone) == identity(data)


@given(st.data())
def test_wide_codes_can_be_undone_too(draw: st.DataObject) -> None:
    parity = draw.draw(st.integers(1, 8))
    data = draw.draw(st.integers(1, 60))
    sources = draw.draw(
        st.lists(st.sampled_from(range(data + parity)), min_size=data, max_size=data, unique=True)
    )
    rows = generator(data, parity)
    matrix = [rows[member] for member in sources]
    assert product(matrix, inverted(matrix)) == identity(data)


@pytest.mark.parametrize(("data", "parity"), [(254, 1), (253, 2), (252, 3), (251, 4)])
def test_the_widest_codes_are_codes(data: int, parity: int) -> None:
    """Every minor of the parity rows is regular, which says it for all losses of data."""
    rows = parity_rows(data, parity)
    assert all(min(row) > 0 for row in rows)
    for c in range(data - 1):
        for d in (c + 1, data - 1) if c < data - 2 else (data - 1,):
            for r, s in combinations(range(parity), 2):
                assert multiply(rows[r][c], rows[s][d]) != multiply(rows[r][d], rows[s][c])


@pytest.mark.parametrize(("data", "parity"), [(0, 1), (4, -1), (254, 2), (MAX_MEMBERS, 1)])
def test_counts_that_no_code_has_are_refused(data: int, parity: int) -> None:
    with pytest.raises(UsageError, match=f"no code has {data} data and {parity} parity"):
        parity_rows(data, parity)


def test_the_same_member_twice_cannot_be_undone() -> None:
    with pytest.raises(ValueError, match="no inverse"):
        inverted([b"\1\1", b"\1\1"])


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_the_weights_of_what_is_there_are_the_unit(
    data: int, parity: int, draw: st.DataObject
) -> None:
    order = draw.draw(st.permutations(range(data + parity)))
    sources = order[:data]
    assert weights(data, parity, sources, sources) == identity(data)


def product(a: list[bytes], b: list[bytes]) -> list[bytes]:
    def entry(row: bytes, column: int) -> int:
        found = 0
        for n, factor in enumerate(row):
            found ^= multiply(factor, b[n][column])
        return found

    return [bytes(entry(row, column) for column in range(len(b[0]))) for row in a]


def identity(size: int) -> list[bytes]:
    return [bytes(int(row == column) for column in range(size)) for row in range(size)]
