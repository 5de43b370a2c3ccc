"""Erasure codes in GF(2^8): coefficients, encoding, decoding, and the numpy backend.

A code has ``data`` members, whose bytes are given, and ``parity`` members, whose bytes are sums of
them. Members are numbered: data from 0, then parity. All functions work in place, in the memory of
the caller: they copy nothing and touch no byte beyond a buffer's end. A range may begin at any
offset, because a byte of parity depends only on the data bytes at the same offset.

Data may differ in length: a shorter member counts as if zeros followed. So a lost member is read
range by range: bytes a to b of it from bytes a to b of the others, each as far as it goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from holdfast.errors import TooManyLost, UsageError

#: Any memory with the buffer protocol: memoryview, mmap, bytes, a numpy array.
Buffer = Any


class Backend(Protocol):
    """Computes the sums; all backends give the same bytes."""

    @property
    def name(self) -> str:
        """The name that is shown to users."""
        ...

    def combine(
        self, rows: Sequence[Row], sources: Sequence[Bytes], outputs: Sequence[Bytes], *, add: bool
    ) -> None:
        """Set output i to the sum of the sources times ``rows[i]``; with ``add``, add that sum to
        it.

        There is at least one source and one output; all have one length, above zero.
        """
        ...


class Coder:
    """Makes the parity of ``data`` members, and rebuilds lost members from the others.

    UsageError for a code that does not exist, or for buffers that do not fit: all checks precede
    the first write. Thread-safe: concurrent calls do not block each other.
    """

    def __init__(self, data: int, parity: int, backend: Backend) -> None:
        if parity < 1:
            raise UsageError(f"a code of {parity} parity members protects nothing: take 1 or more")
        self.data, self.parity = data, parity
        self._rows = parity_rows(data, parity)
        self._backend = backend

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        """Fill ``parity``, buffers of one length, with the parity of ``data``, none longer."""
        sources = self._parts("data", data, self.data)
        outputs = self._parity_outputs(parity)
        _fit(sources, outputs)
        _combine(self._backend, self._rows, sources, outputs, add=False)

    def add(self, member: int, source: Buffer, parity: Sequence[Buffer]) -> None:
        """Add data member ``member`` to ``parity``; the members may come in any order.

        ``parity`` begins as zeros. Adding the same bytes again removes them.
        """
        if not 0 <= member < self.data:
            raise UsageError(f"there is no data member {member}: they are 0 to {self.data - 1}")
        sources, outputs = [_readable("data", member, source)], self._parity_outputs(parity)
        _fit(sources, outputs)
        column = [row[member : member + 1] for row in self._rows]
        _combine(self._backend, column, sources, outputs, add=True)

    def solve(self, present: Collection[int], lost: Sequence[int]) -> dict[int, Row]:
        """Return the factors by which present members are multiplied to rebuild the lost ones.

        The result maps each member to use to one factor for each of ``lost``, in the form that
        ``accumulate`` takes: as many members as there are data members, data members first.
        TooManyLost where ``present`` are fewer.
        """
        self._check_members([*present, *lost])
        if both := sorted(set(present) & set(lost)):
            raise UsageError(f"members {both} are said to be there and to be lost")
        if len(used := sorted(set(present))[: self.data]) < self.data:
            missing = sorted({*range(self.data + self.parity)} - set(present))
            raise TooManyLost(
                f"{len(missing)} of {self.data + self.parity} members are missing ({missing}), and "
                f"{self.parity} may be: use another source, storage in the end",
                missing=missing,
                parity=self.parity,
            )
        rows = weights(self.data, self.parity, used, lost)
        return {member: bytes(row[n] for row in rows) for n, member in enumerate(used)}

    def accumulate(self, factors: Row, source: Buffer, outputs: Sequence[Buffer]) -> None:
        """Add ``source``, times a factor for each output, to ``outputs``, which begin as zeros.

        When every member of ``solve`` was added, in any order, the outputs are the lost members.
        Bytes of ``source`` beyond the end of an output are ignored.
        """
        if len(factors) != len(outputs):
            raise UsageError(f"{len(factors)} factors and {len(outputs)} outputs: one for each")
        sources = [_readable("source", 0, source)]
        into = _writable("output", outputs, sources)
        _combine(self._backend, [bytes([one]) for one in factors], sources, into, add=True)

    def decode(self, present: Mapping[int, Buffer], lost: Mapping[int, Buffer]) -> None:
        """Fill the buffers of ``lost`` members from the same range of those ``present``.

        A data member that ends before the range has an empty buffer. The buffer of a lost member is
        as long as that member in this range, and all parity is as long as the longest. TooManyLost
        where fewer members are present than there are data members.
        """
        factors = self.solve(present, list(lost))
        sources = [_readable("member", member, present[member]) for member in factors]
        outputs = _writable("lost member", list(lost.values()), sources)
        rows = [bytes(of[n] for of in factors.values()) for n in range(len(lost))]
        _combine(self._backend, rows, sources, outputs, add=False)

    def _check_members(self, members: Iterable[int]) -> None:
        for member in members:
            if not 0 <= member < self.data + self.parity:
                raise UsageError(
                    f"there is no member {member}: data are 0 to {self.data - 1}, parity "
                    f"{self.data} to {self.data + self.parity - 1}"
                )

    def _parts(self, what: str, buffers: Sequence[Buffer], count: int) -> list[Bytes]:
        if len(buffers) != count:
            raise UsageError(f"{len(buffers)} buffers of {what}: this code has {count}")
        return [_readable(what, number, buffer) for number, buffer in enumerate(buffers)]

    def _parity_outputs(self, parity: Sequence[Buffer]) -> list[Bytes]:
        outputs = self._parts("parity", parity, self.parity)
        if len({len(output) for output in outputs}) > 1:
            lengths = [len(output) for output in outputs]
            raise UsageError(f"buffers of parity are of one length, not of {lengths} bytes")
        return outputs


def _readable(what: str, number: int, buffer: Buffer) -> Bytes:
    """Return the bytes of ``buffer`` without a copy."""
    try:
        return np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(
            f"buffer {number} of {what} is not memory in one piece ({error}): give a memoryview, "
            "an mmap or a contiguous array"
        ) from None


def _fit(sources: Sequence[Bytes], outputs: Sequence[Bytes]) -> None:
    """Check that parity covers all of the data, and that no output overlaps a source."""
    room = len(outputs[0])
    for number, source in enumerate(sources):
        if len(source) > room:
            raise UsageError(
                f"buffer {number} of data has {len(source)} bytes, the parity {room}: parity is as "
                "long as the longest of the data"
            )
    _check_outputs("parity", outputs, sources)


def _writable(what: str, buffers: Sequence[Buffer], sources: Sequence[Bytes]) -> list[Bytes]:
    outputs = [_readable(what, number, buffer) for number, buffer in enumerate(buffers)]
    _check_outputs(what, outputs, sources)
    return outputs


def _check_outputs(what: str, outputs: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """Check that each output is writable and shares no byte with another output or a source."""
    for number, output in enumerate(outputs):
        if len(output) and not output.flags.writeable:
            raise UsageError(f"buffer {number} of {what} is read-only: give memory to write into")
    spans = sorted(
        (array.ctypes.data, array.ctypes.data + len(array), is_output)
        for arrays, is_output in ((sources, False), (outputs, True))
        for array in arrays
        if len(array)
    )
    read_to = written_to = 0
    for start, stop, is_output in spans:
        if start < written_to or (is_output and start < read_to):
            raise UsageError(
                f"a buffer of {what} shares memory with another buffer of the call: what is "
                "written must be apart"
            )
        if is_output:
            written_to = stop
        else:
            read_to = max(read_to, stop)


def _combine(
    backend: Backend,
    rows: Sequence[Row],
    sources: Sequence[Bytes],
    outputs: Sequence[Bytes],
    *,
    add: bool,
) -> None:
    """Combine section by section: within one section every buffer either spans it or has ended."""
    start = 0
    for stop in sorted({len(array) for array in (*sources, *outputs)}):
        columns = [n for n, source in enumerate(sources) if len(source) >= stop > start]
        into = [n for n, output in enumerate(outputs) if len(output) >= stop > start]
        if columns and into:
            backend.combine(
                [bytes(rows[n][column] for column in columns) for n in into],
                [sources[n][start:stop] for n in columns],
                [outputs[n][start:stop] for n in into],
                add=add,
            )
        elif not add:
            for n in into:
                outputs[n][start:stop] = 0
        start = stop


# Defines the parity coefficients: exact arithmetic in GF(2^8), the same on every machine.
#
# **These numbers are part of the protocol between keepers**: parity made by one keeper is decoded
# by another. A test pins them. One parity is the XOR of the data. Two are P and Q of RAID 6
# (generator 2), so that any RAID 6 implementation computes them. From three on the rows are those
# of a Cauchy matrix, because powers of 2 would leave losses that cannot be decoded. All three match
# ISA-L.


#: The polynomial x^8 + x^4 + x^3 + x^2 + 1; 2 generates every element but 0.
POLYNOMIAL = 0x11D
#: The most members of one code, data and parity together.
MAX_MEMBERS = 255

Row = bytes  # one coefficient for each source


def _powers() -> bytes:
    """Return 2^0 to 2^254, twice over, so that a sum of two logarithms needs no modulo."""
    value, powers = 1, bytearray()
    for _ in range(255):
        powers.append(value)
        value = value << 1 ^ (POLYNOMIAL if value & 0x80 else 0)
    return bytes(powers) * 2


_EXP = _powers()
_LOG = bytes(_EXP.index(value) if value else 0 for value in range(256))


def multiply(a: int, b: int) -> int:
    """Return the product of two elements."""
    return _EXP[_LOG[a] + _LOG[b]] if a and b else 0


def inverse(a: int) -> int:
    """Return the element whose product with ``a`` is 1; ``a`` is not 0."""
    return _EXP[255 - _LOG[a]]


def times(factor: int) -> bytes:
    """Return the products of ``factor`` with 0 to 255: ``data.translate(times(f))`` multiplies
    bytes.
    """
    return bytes(multiply(factor, value) for value in range(256))


def parity_rows(data: int, parity: int) -> tuple[Row, ...]:
    """Return, for each of ``parity`` members, the factor of each of ``data`` members in its sum.

    Any ``data`` of all members determine the others. UsageError for counts that no code has.
    """
    if data < 1 or parity < 0 or data + parity > MAX_MEMBERS:
        raise UsageError(
            f"no code has {data} data and {parity} parity members: at least one of data and at "
            f"most {MAX_MEMBERS} together. Make the groups smaller."
        )
    if parity <= 2:
        return tuple(
            bytes(_EXP[row * column % 255] for column in range(data)) for row in range(parity)
        )
    return tuple(
        bytes(inverse(row ^ column) for column in range(data)) for row in range(data, data + parity)
    )


def weights(data: int, parity: int, sources: Sequence[int], wanted: Sequence[int]) -> list[Row]:
    """Return, for each member in ``wanted``, the factors of ``sources`` whose sum gives it.

    Members are numbered: data from 0, then parity. ``sources`` are ``data`` different ones.
    """
    rows = generator(data, parity)
    undone = inverted([rows[member] for member in sources])
    return [_product(rows[member], undone) for member in wanted]


def generator(data: int, parity: int) -> list[Row]:
    """Return the generator matrix: a unit row for each data member, a parity row for each other."""
    own = [bytes(int(row == column) for column in range(data)) for row in range(data)]
    return [*own, *parity_rows(data, parity)]


def inverted(matrix: Sequence[Row]) -> list[Row]:
    """Return the inverse of a square matrix (Gauss-Jordan); ValueError where there is none."""
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
    """Return ``row`` times ``matrix``."""
    product = bytearray(len(matrix[0]))
    for factor, line in zip(row, matrix, strict=True):
        if factor:
            by = times(factor)
            product = bytearray(a ^ by[b] for a, b in zip(product, line, strict=True))
    return bytes(product)


# Computes the codes in numpy, bit for bit as ISA-L does, where ISA-L is missing.
#
# A sum is built bit by bit of its coefficients (Horner): from the highest bit down, the sum so far
# is doubled and the sources that have the bit are added. For RAID 6 that is the usual Q. The
# computation goes through the buffers in tiles that stay in the processor's cache; numpy holds no
# lock meanwhile.


Bytes = np.ndarray[Any, np.dtype[np.uint8]]

TILE_BYTES = 1 << 18
_SIGN = np.int8(7)
_REDUCE = np.uint8(POLYNOMIAL & 0xFF)


class NumpyBackend:
    """Computes with numpy alone."""

    name = "numpy"

    def combine(
        self, rows: Sequence[Row], sources: Sequence[Bytes], outputs: Sequence[Bytes], *, add: bool
    ) -> None:
        """See ``holdfast.parity.coding.codes.Backend``."""
        size = len(outputs[0])
        spare, total = (np.empty(min(size, TILE_BYTES), np.uint8) for _ in range(2))
        for start in range(0, size, TILE_BYTES):
            tiles = [source[start : start + TILE_BYTES] for source in sources]
            for row, whole in zip(rows, outputs, strict=True):
                output = whole[start : start + TILE_BYTES]
                result = total[: len(output)] if add else output
                _sum(row, tiles, result, spare[: len(output)])
                if add:
                    np.bitwise_xor(output, result, out=output)


def _sum(row: Row, tiles: Sequence[Bytes], total: Bytes, spare: Bytes) -> None:
    """Set ``found`` to the sum of the tiles, each times its coefficient."""
    begun = False
    for bit in reversed(range(max(row).bit_length())):
        if begun:
            _double(total, spare)
        for factor, tile in zip(row, tiles, strict=True):
            if factor >> bit & 1 and begun:
                np.bitwise_xor(total, tile, out=total)
            elif factor >> bit & 1:
                np.copyto(total, tile)
                begun = True
    if not begun:
        total[:] = 0


def _double(value: Bytes, spare: Bytes) -> None:
    """Multiply by 2 in GF(2^8). Shifting the sign out gives 255 where the polynomial must be
    added.
    """
    np.right_shift(value.view(np.int8), _SIGN, out=spare.view(np.int8))
    np.bitwise_and(spare, _REDUCE, out=spare)
    np.add(value, value, out=value)
    np.bitwise_xor(value, spare, out=value)
