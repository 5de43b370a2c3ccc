"""Selects the library that computes parity: ISA-L if it computes correctly here, or numpy.

Each library is tested on small sums before it is used: at odd lengths and addresses, against plain
arithmetic, with a check of the bytes beside the output.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial

import numpy as np
from msgspec import Struct

from holdfast.parity.coding.codes import Backend, Bytes, NumpyBackend, Row, parity_rows, times

_SIZES = (1, 15, 32, 63, 64, 100, 257)
_GUARD = 0xA5


class BackendChoice(Struct, frozen=True):
    """The selected backend, and why each faster one was rejected."""

    backend: Backend
    refused: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return one line for users."""
        return self.backend.name + "".join(f"; {reason}" for reason in self.refused)


@cache
def chosen() -> BackendChoice:
    """Return the fastest backend that computes correctly here; selected once in a process."""
    return choose(_attempts())


def choose(attempts: Iterator[tuple[str, Callable[[], Backend]]]) -> BackendChoice:
    """Return the first backend of (name, factory) that works, or numpy."""
    refused: list[str] = []
    for name, make in attempts:
        try:
            backend = make()
        except (OSError, AttributeError) as error:
            refused.append(f"{name} is not used: {error}")
            continue
        if not (fault := fault_of(backend)):
            return BackendChoice(backend, tuple(refused))
        refused.append(f"{name} is not used: {fault}")
    refused.append("`pip install 'holdfast[parity]'` brings ISA-L, which is several times faster")
    return BackendChoice(NumpyBackend(), tuple(refused))


def _attempts() -> Iterator[tuple[str, Callable[[], Backend]]]:
    for name, load in candidates():
        yield name, partial(IsalBackend, name, load)


def fault_of(backend: Backend) -> str:
    """Describe what ``backend`` computes wrongly; "" when no fault was found."""
    for data, parity in ((1, 1), (4, 1), (5, 2), (4, 3)):
        rows = parity_rows(data, parity)
        for size in _SIZES:
            sources = [_noise(size, seed) for seed in range(data)]
            for add in (False, True):
                if wrong := _try(backend, rows, sources, add=add):
                    return f"{wrong}, {size} bytes of {data}+{parity} members"
    return ""


def _try(backend: Backend, rows: Sequence[Row], sources: Sequence[Bytes], *, add: bool) -> str:
    size = len(sources[0])
    memory = [np.full(size + 130, _GUARD, np.uint8) for _ in rows]
    outputs = [one[65 : 65 + size] for one in memory]  # an odd address, with bytes on both sides
    backend.combine(rows, sources, outputs, add=add)
    for row, output, whole in zip(rows, outputs, memory, strict=True):
        if not np.array_equal(output, plain_sum(row, sources) ^ np.uint8(_GUARD * add)):
            return "it adds wrongly" if add else "it computes wrongly"
        if not ((whole[:65] == _GUARD).all() and (whole[65 + size :] == _GUARD).all()):
            return "it writes beside the output"
    return ""


def plain_sum(row: Row, sources: Sequence[Bytes]) -> Bytes:
    """Compute the same sum by tables of products: slow, and simple enough to be correct."""
    total = np.zeros(len(sources[0]), np.uint8)
    for factor, source in zip(row, sources, strict=True):
        total ^= np.frombuffer(times(factor), np.uint8)[source]
    return total


def _noise(size: int, seed: int) -> Bytes:
    numbers = np.arange(seed * 1000 + 1, seed * 1000 + 1 + size, dtype=np.uint64)
    return (numbers * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(56)).astype(np.uint8)


# Computes the codes with ISA-L through ctypes, in place and without the GIL.
#
# The library comes with the wheel of ``pyeclib`` (whose own calls copy, and hold the GIL) or with
# the system. Its path in the wheel is not guaranteed: callers test the library first
# (``holdfast.parity.coding.backends``).


#: The largest length of one call: ISA-L takes C ints.
MAX_BYTES = 1 << 30
SYSTEM_NAMES = ("libisal.so.2",)
_TABLE_BYTES = 32  # for one coefficient
_XOR = [b"\1"]  # one source, added to one output
_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "ec_init_tables": (_INT, _INT, _POINTER, _POINTER),
    "ec_encode_data": (_INT, _INT, _INT, _POINTER, _POINTER, _POINTER),
    "ec_encode_data_update": (_INT, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER),
}


def candidates() -> Iterator[tuple[str, str]]:
    """Yield (name shown to users, path or name to load) of each possible library, best first."""
    try:
        files = importlib.metadata.distribution("pyeclib").files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libisal"):
            yield "ISA-L of pyeclib", str(file.locate())
    for name in SYSTEM_NAMES:
        yield "ISA-L of the system", name


class IsalBackend:
    """Loads a libisal by path or name (``load``). OSError or AttributeError if it is not one."""

    def __init__(self, name: str, load: str) -> None:
        self.name = name
        self._library = ctypes.CDLL(load)  # CDLL, not PyDLL: calls release the GIL
        for function, arguments in _SIGNATURES.items():
            entry = getattr(self._library, function)
            entry.argtypes, entry.restype = arguments, None
        self._tables = lru_cache(maxsize=256)(self._new_tables)

    def combine(
        self, rows: Sequence[Row], sources: Sequence[Bytes], outputs: Sequence[Bytes], *, add: bool
    ) -> None:
        """See ``holdfast.parity.coding.codes.Backend``."""
        if add and [*rows] == _XOR:  # takes half the time of a multiplication by 1
            np.bitwise_xor(outputs[0], sources[0], out=outputs[0])
            return
        tables = self._tables(b"".join(rows), len(rows))
        size = len(outputs[0])
        for start in range(0, size, MAX_BYTES):
            length = min(MAX_BYTES, size - start)
            into = _pointers(outputs, start)
            if add:
                for number, source in enumerate(sources):
                    self._library.ec_encode_data_update(
                        length,
                        len(sources),
                        len(rows),
                        number,
                        tables,
                        source.ctypes.data + start,
                        into,
                    )
            else:
                self._library.ec_encode_data(
                    length, len(sources), len(rows), tables, _pointers(sources, start), into
                )

    def _new_tables(self, coefficients: bytes, rows: int) -> ctypes.Array[ctypes.c_char]:
        tables = ctypes.create_string_buffer(_TABLE_BYTES * len(coefficients))
        self._library.ec_init_tables(len(coefficients) // rows, rows, coefficients, tables)
        return tables


def _pointers(arrays: Sequence[Bytes], start: int) -> ctypes.Array[ctypes.c_void_p]:
    return (_POINTER * len(arrays))(*(array.ctypes.data + start for array in arrays))
