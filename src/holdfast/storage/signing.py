"""Signs requests to an S3 bucket (Signature Version 4), and computes the checksums of their bodies.

A part's checksum travels in a signed header, so a server that checks it refuses bytes that changed
on the way, also where the body itself is not signed (over TLS).
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import hmac
import importlib.metadata
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import quote

UNSIGNED = "UNSIGNED-PAYLOAD"
_ALGORITHM = "AWS4-HMAC-SHA256"
_SERVICE = "s3"

Body = Sequence[memoryview | bytes]


@dataclass(frozen=True, slots=True)
class Credentials:
    """What requests are signed with; none of it is ever shown."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str = field(default="", repr=False)

    def hidden_in(self, text: str) -> str:
        """Returns ``text`` without anything of the credentials."""
        for secret in filter(None, (self.secret_key, self.token, self.access_key)):
            text = text.replace(secret, "***")
        return text


def encoded_path(path: str) -> str:
    """Returns a path as it is sent and signed."""
    return quote(path, safe="/-_.~")


def encoded_query(query: Mapping[str, str]) -> str:
    """Returns a query as it is sent and signed: sorted, everything encoded."""
    pairs = sorted(
        (quote(key, safe="-_.~"), quote(value, safe="-_.~")) for key, value in query.items()
    )
    return "&".join(f"{key}={value}" for key, value in pairs)


def sha256(body: Body) -> str:
    """Returns the hash of a body."""
    found = hashlib.sha256()
    for piece in body:
        found.update(piece)
    return found.hexdigest()


def signed_headers(
    credentials: Credentials,
    region: str,
    time: str,
    method: str,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    payload: str,
) -> dict[str, str]:
    """Returns all headers of the request, signed. ``headers`` has the host; names in lower case.

    ``time``: as ``20260102T030405Z``. ``payload``: the hash of the body, or UNSIGNED.
    """
    all_ = {**headers, "x-amz-date": time, "x-amz-content-sha256": payload}
    if credentials.token:
        all_["x-amz-security-token"] = credentials.token
    names = sorted(all_)
    canonical = "\n".join(
        (
            method,
            encoded_path(path),
            encoded_query(query),
            *(f"{name}:{' '.join(all_[name].split())}" for name in names),
            "",
            ";".join(names),
            payload,
        )
    )
    scope = f"{time[:8]}/{region}/{_SERVICE}/aws4_request"
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = "\n".join((_ALGORITHM, time, scope, hashed))
    key = _signing_key(credentials.secret_key, time[:8], region)
    signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    all_["authorization"] = (
        f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return all_


def _signing_key(secret: str, day: str, region: str) -> bytes:
    key = b"AWS4" + secret.encode()
    for part in (day, region, _SERVICE, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key


# Checksums of parts: CRC64NVME where ISA-L is installed, the CRC32 of zlib elsewhere.


def checksum_header(body: Body) -> tuple[str, str]:
    """Returns the header with the checksum of a body, by the fastest function that there is."""
    crc64 = _crc64nvme()
    if crc64 is not None:
        found = 0
        for piece in body:
            found = crc64(found, piece)
        return "x-amz-checksum-crc64nvme", base64.b64encode(found.to_bytes(8, "big")).decode()
    found = 0
    for piece in body:
        found = zlib.crc32(piece, found)
    return "x-amz-checksum-crc32", base64.b64encode(found.to_bytes(4, "big")).decode()


def checksum_algorithm() -> str:
    """Returns the name of the checksum that ``checksum_header`` computes here."""
    return "CRC32" if _crc64nvme() is None else "CRC64NVME"


class _Crc64:
    """CRC64NVME by ISA-L, of any contiguous memory, without a copy."""

    def __init__(self, load: str) -> None:
        function = ctypes.CDLL(load).crc64_rocksoft_refl
        function.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
        function.restype = ctypes.c_uint64
        self._function = function

    def __call__(self, before: int, piece: memoryview | bytes) -> int:
        if not len(piece):
            return before
        with _address_of(piece) as address:
            return int(self._function(before, address, len(piece)))


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
def _crc64nvme() -> _Crc64 | None:
    for load in _libraries():
        try:
            found = _Crc64(load)
        except (OSError, AttributeError):
            continue
        if found(0, b"123456789") == 0xAE8B14860A799888:
            return found
    return None


def _libraries() -> Iterable[str]:
    try:
        files = importlib.metadata.distribution("pyeclib").files or ()
        yield from (str(file.locate()) for file in files if file.name.startswith("libisal"))
    except importlib.metadata.PackageNotFoundError:
        pass
    yield "libisal.so.2"
