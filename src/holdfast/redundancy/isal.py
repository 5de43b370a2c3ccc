"""The arithmetic of the codes by ISA-L, in place, through ctypes, without Python's lock.

The library comes with the wheel of ``pyeclib`` (whose own calls copy, and hold the lock) or with
the system. Where it lies in the wheel is nobody's promise: whoever takes it tries it first
(``holdfast.redundancy.backends``).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from holdfast.redundancy.matrices import Row
from holdfast.redundancy.numpy_coding import Bytes

#: Lengths are C ints there.
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
    """(what it is called to users, what to load) of the libraries that may be there, best first."""
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
    """``load``: the path or the name of a libisal. OSError or AttributeError if it is none."""

    def __init__(self, name: str, load: str) -> None:
        self.name = name
        self._library = ctypes.CDLL(load)  # CDLL, not PyDLL: calls let go of Python's lock
        for function, arguments in _SIGNATURES.items():
            found = getattr(self._library, function)
            found.argtypes, found.restype = arguments, None
        self._tables = lru_cache(maxsize=256)(self._new_tables)

    def combine(
        self, rows: Sequence[Row], sources: Sequence[Bytes], outputs: Sequence[Bytes], *, add: bool
    ) -> None:
        """See ``holdfast.redundancy.erasure.Backend``."""
        if add and [*rows] == _XOR:  # half the time of a multiplication by 1
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
                        length, len(sources), len(rows), number, tables,
                        source.ctypes.data + start, into,
                    )  # fmt: skip
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
