"""Any ``parity`` of the members of a code can be lost, and their bytes come back exactly.

A code has ``data`` members, whose bytes are given, and ``parity`` members, whose bytes are sums of
them (``holdfast.redundancy.matrices``). Members are numbered: data from 0, then parity. Everything
here is done in place, in the memory handed over: nothing is copied, nothing is read or written
beyond a buffer's end, and ranges may be taken at any offset, for a byte of parity depends on the
bytes of the data at its own place alone.

Data may differ in length: a shorter one counts as if zeros followed. So a lost member is read
range by range: bytes a to b of it from bytes a to b of the others, each as far as it goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from holdfast.errors import TooManyLost, UsageError
from holdfast.redundancy.matrices import Row, parity_rows, weights
from holdfast.redundancy.numpy_coding import Bytes

#: Memory as anything that Python can look into: memoryview, mmap, bytes, a numpy array.
Buffer = Any


class Backend(Protocol):
    """What does the arithmetic; every one gives the same bytes."""

    @property
    def name(self) -> str:
        """What it is called to users."""
        ...

    def combine(
        self, rows: Sequence[Row], sources: Sequence[Bytes], outputs: Sequence[Bytes], *, add: bool
    ) -> None:
        """Output i becomes the sum of the sources times ``rows[i]``; or, ``add``, that is added.

        There is at least one source and one output; all have one length, above zero.
        """
        ...


class Coder:
    """Makes the parity of ``data`` members, and lost members out of what is left.

    UsageError for a code that does not exist, or for buffers that do not fit: all checks come
    before the first byte is written. Calls from several threads need not wait for each other.
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
        """Add data member ``member`` to ``parity``: one after another, in any order, as they come.

        ``parity`` begins as zeros. Adding the same bytes again takes them out.
        """
        if not 0 <= member < self.data:
            raise UsageError(f"there is no data member {member}: they are 0 to {self.data - 1}")
        sources, outputs = [_readable("data", member, source)], self._parity_outputs(parity)
        _fit(sources, outputs)
        column = [row[member : member + 1] for row in self._rows]
        _combine(self._backend, column, sources, outputs, add=True)

    def solve(self, present: Collection[int], lost: Sequence[int]) -> dict[int, Row]:
        """By what to multiply members that are there to get those that are lost.

        The members to use, each with one factor for each of ``lost``, as ``accumulate`` takes
        them: as many as there are data members, these first. TooManyLost where ``present`` are
        fewer.
        """
        self._check_members([*present, *lost])
        if both := sorted(set(present) & set(lost)):
            raise UsageError(f"members {both} are said to be there and to be lost")
        if len(used := sorted(set(present))[: self.data]) < self.data:
            missing = sorted({*range(self.data + self.parity)} - set(present))
            raise TooManyLost(
                f"{len(missing)} of {self.data + self.parity} members are missing ({missing}), and "
                f"{self.parity} may be: use another source, storage in the end",
                missing=missing, parity=self.parity,
            )  # fmt: skip
        rows = weights(self.data, self.parity, used, lost)
        return {member: bytes(row[n] for row in rows) for n, member in enumerate(used)}

    def accumulate(self, factors: Row, source: Buffer, outputs: Sequence[Buffer]) -> None:
        """Add ``source``, times a factor for each output, to ``outputs``, which begin as zeros.

        When every member of ``solve`` was added, in any order, the outputs are the lost members.
        What of ``source`` goes beyond an output is left out.
        """
        if len(factors) != len(outputs):
            raise UsageError(f"{len(factors)} factors and {len(outputs)} outputs: one for each")
        sources = [_readable("source", 0, source)]
        into = _writable("output", outputs, sources)
        _combine(self._backend, [bytes([one]) for one in factors], sources, into, add=True)

    def decode(self, present: Mapping[int, Buffer], lost: Mapping[int, Buffer]) -> None:
        """Fill the buffers of ``lost`` members from the same range of those ``present``.

        A data member that ends before the range has an empty buffer; the buffer of a lost one is
        as long as that member in this range, and all parity is as long as the longest.
        TooManyLost where fewer are present than there are data members.
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
    """The bytes of ``buffer``, where they lie."""
    try:
        return np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(
            f"buffer {number} of {what} is not memory in one piece ({error}): give a memoryview, "
            "an mmap or a contiguous array"
        ) from None


def _fit(sources: Sequence[Bytes], outputs: Sequence[Bytes]) -> None:
    """All of the data counts in the parity, and nothing is overwritten while it is read."""
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
    """Each can be written, and shares no byte with another or with a source."""
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
    backend: Backend, rows: Sequence[Row], sources: Sequence[Bytes], outputs: Sequence[Bytes],
    *, add: bool,
) -> None:  # fmt: skip
    """Stretch by stretch: within one, every buffer either reaches to its end or has ended."""
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
