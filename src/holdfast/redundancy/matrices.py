"""Which sums of which members the parity is: arithmetic in GF(2^8), exact and the same everywhere.

**These numbers are part of what keepers send each other**: parity made by one must be undone by
another. A test pins them. One parity is the XOR of the data. Two are P and Q of RAID 6 (generator
2), so that whatever computes RAID 6 computes these. From three on the rows are those of a Cauchy
matrix, for powers of 2 would leave losses that cannot be undone. All three as ISA-L makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import UsageError

#: x^8 + x^4 + x^3 + x^2 + 1, of which 2 generates every element but 0.
POLYNOMIAL = 0x11D
#: Members of one code, data and parity together.
MAX_MEMBERS = 255

Row = bytes  # one coefficient for each source


def _powers() -> bytes:
    """2^0 to 2^254, twice over, so that a sum of two logarithms needs no modulo."""
    value, found = 1, bytearray()
    for _ in range(255):
        found.append(value)
        value = value << 1 ^ (POLYNOMIAL if value & 0x80 else 0)
    return bytes(found) * 2


_EXP = _powers()
_LOG = bytes(_EXP.index(value) if value else 0 for value in range(256))


def multiply(a: int, b: int) -> int:
    """The product of two elements."""
    return _EXP[_LOG[a] + _LOG[b]] if a and b else 0


def inverse(a: int) -> int:
    """The element whose product with ``a`` is 1; ``a`` is not 0."""
    return _EXP[255 - _LOG[a]]


def times(factor: int) -> bytes:
    """The products of ``factor`` with 0 to 255: ``data.translate(times(f))`` multiplies bytes."""
    return bytes(multiply(factor, value) for value in range(256))


def parity_rows(data: int, parity: int) -> tuple[Row, ...]:
    """For each of ``parity`` members, by what each of ``data`` members is multiplied in its sum.

    Any ``data`` of all members determine the others. UsageError for counts that no code has.
    """
    if data < 1 or parity < 0 or data + parity > MAX_MEMBERS:
        raise UsageError(
            f"no code has {data} data and {parity} parity members: at least one of data and at "
            f"most {MAX_MEMBERS} together. Make the groups smaller."
        )
    if parity <= 2:
        return tuple(bytes(_EXP[row * column % 255] for column in range(data))
                     for row in range(parity))  # fmt: skip
    return tuple(bytes(inverse(row ^ column) for column in range(data))
                 for row in range(data, data + parity))  # fmt: skip


def weights(data: int, parity: int, sources: Sequence[int], wanted: Sequence[int]) -> list[Row]:
    """For each member in ``wanted``, by what each of ``sources`` is multiplied to give it.

    Members are numbered: data from 0, then parity. ``sources`` are ``data`` different ones.
    """
    rows = generator(data, parity)
    undone = inverted([rows[member] for member in sources])
    return [_product(rows[member], undone) for member in wanted]


def generator(data: int, parity: int) -> list[Row]:
    """What every member is made of: itself for data, its row for parity."""
    own = [bytes(int(row == column) for column in range(data)) for row in range(data)]
    return [*own, *parity_rows(data, parity)]


def inverted(matrix: Sequence[Row]) -> list[Row]:
    """The matrix that undoes this square one (Gauss-Jordan); ValueError where none does."""
    size = len(matrix)
    rows = [[*row, *(int(n == number) for n in range(size))] for number, row in enumerate(matrix)]
    for column in range(size):
        found = next((n for n in range(column, size) if rows[n][column]), None)
        if found is None:
            raise ValueError("two members say the same of the data: the matrix has no inverse")
        rows[column], rows[found] = rows[found], rows[column]
        scale = times(inverse(rows[column][column]))
        rows[column] = pivot = [scale[value] for value in rows[column]]
        for number in range(size):
            if number != column and (factor := rows[number][column]):
                by = times(factor)
                rows[number] = [a ^ by[b] for a, b in zip(rows[number], pivot, strict=True)]
    return [bytes(row[size:]) for row in rows]


def _product(row: Row, matrix: Sequence[Row]) -> Row:
    """``row`` times ``matrix``."""
    found = bytearray(len(matrix[0]))
    for factor, line in zip(row, matrix, strict=True):
        if factor:
            by = times(factor)
            found = bytearray(a ^ by[b] for a, b in zip(found, line, strict=True))
    return bytes(found)
