"""Computes the checksums of bodies that travel to a bucket with them.

By ISA-L where it is installed, of any contiguous memory, without a copy; each cloud has its own.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib.metadata
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

Body = Sequence[memoryview | bytes]
#: What ISA-L's code for vectors of 512 bits needs of a processor.
_WIDE = frozenset({"avx512f", "avx512dq", "avx512bw", "avx512vl", "vpclmulqdq"})
#: A text whose checksums are known, and as often as vectors take at once and more.
_TEXT, _TIMES = b"123456789", 500


def crc64nvme(body: Body) -> int | None:
    """Returns the CRC64NVME of a body; None without ISA-L."""
    function = _crc64nvme()
    return None if function is None else _over(body, function)


def crc32c(body: Body) -> int | None:
    """Returns the CRC32C of a body; None without ISA-L."""
    function = _crc32c()
    return None if function is None else _over(body, function)


def crc32(body: Body) -> int:
    """Returns the CRC32 of a body."""
    return _over(body, lambda before, piece: zlib.crc32(piece, before))


def md5(body: Body) -> bytes:
    """Returns the MD5 of a body."""
    found = hashlib.md5(usedforsecurity=False)
    for piece in body:
        found.update(piece)
    return found.digest()


def text(checksum: bytes) -> str:
    """Returns a checksum as a header has it."""
    return base64.b64encode(checksum).decode()


#: Goes on from a checksum over one more piece.
_Function = Callable[[int, memoryview | bytes], int]


def _over(body: Body, function: _Function) -> int:
    found = 0
    for piece in body:
        found = function(found, piece)
    return found


class _Crc64:
    """CRC64NVME by ISA-L."""

    def __init__(self, load: str) -> None:
        function = _widest(load, "crc64_rocksoft_refl")
        function.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
        function.restype = ctypes.c_uint64
        self._function = function

    def __call__(self, before: int, piece: memoryview | bytes) -> int:
        if not len(piece):
            return before
        with _address_of(piece) as address:
            return int(self._function(before, address, len(piece)))


class _Crc32C:
    """CRC32C by ISA-L, whose length is an int."""

    _LONGEST = 1 << 30

    def __init__(self, load: str) -> None:
        function = _widest(load, "crc32_iscsi")
        function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32)
        function.restype = ctypes.c_uint32
        self._function = function

    def __call__(self, before: int, piece: memoryview | bytes) -> int:
        found = ~before & 0xFFFFFFFF
        with _address_of(piece) as address:
            for start in range(0, len(piece), self._LONGEST):
                count = min(self._LONGEST, len(piece) - start)
                found = int(self._function((address or 0) + start, count, found))
        return ~found & 0xFFFFFFFF


def _widest(load: str, name: str) -> Any:
    """Returns a function of ISA-L: by vectors of 512 bits, if the processor has them. Not every
    build takes these by itself; they need half of the time for bytes that are in the cache.
    """
    library = ctypes.CDLL(load)
    wide = getattr(library, f"{name}_by16_10", None) if _has_wide_vectors() else None
    return wide or getattr(library, name)


@cache
def _has_wide_vectors() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return False
    return _WIDE.issubset(flags.split())


class _Buffer(ctypes.Structure):
    """A Py_buffer: the one way to the address of memory that is read only."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@contextmanager
def _address_of(piece: memoryview | bytes) -> Iterator[int | None]:
    """Yields the address of contiguous memory, which stays where it is meanwhile."""
    found = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(piece), ctypes.byref(found), 0)
    try:
        yield found.buf
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))


@cache
def _crc64nvme() -> _Function | None:
    return _first_right(_Crc64, 0xAE8B14860A799888, 0x4104BA9377F5543B)


@cache
def _crc32c() -> _Function | None:
    return _first_right(_Crc32C, 0xE3069283, 0x5E513C71)


def _first_right(kind: Callable[[str], _Function], of_text: int, of_many: int) -> _Function | None:
    """Returns the function of the first library that computes what is known of these texts."""
    for load in _libraries():
        try:
            found = kind(load)
        except (OSError, AttributeError):
            continue
        if (found(0, _TEXT), found(0, _TEXT * _TIMES)) == (of_text, of_many):
            return found
    return None


def _libraries() -> Iterable[str]:
    try:
        files = importlib.metadata.distribution("pyeclib").files or ()
        yield from (str(file.locate()) for file in files if file.name.startswith("libisal"))
    except importlib.metadata.PackageNotFoundError:
        pass
    yield "libisal.so.2"
