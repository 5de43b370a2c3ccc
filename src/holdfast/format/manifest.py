"""The documents of a checkpoint: manifest, incarnation, root. JSON, each with its own checksum.

A document is ``{"checksum": "<xxh3-64 of the body's bytes>", "body": {...}}``. Fields this
version does not know are ignored unless the document requires them as features; then it
is refused. See docs/format/v1.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast.errors import ChecksumMismatch, FormatError, NewerFormat
from holdfast.format.checksum import Buffer, checksum, text

FORMAT_VERSION = 1
KNOWN_FEATURES: frozenset[str] = frozenset()
MAX_DOCUMENT_BYTES = 64 << 20


class Generation(NamedTuple):
    """The identity of everything saved: a step alone is not one, a run may save it twice."""

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}-{self.step}"


class ImageRef(msgspec.Struct, frozen=True, kw_only=True):
    """An image a manifest names; the checksums cover its header and its block table."""

    path: str
    rank: int
    size_bytes: int
    header_xxh3: str
    table_xxh3: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is: the file whose existence makes one."""

    format_version: int = FORMAT_VERSION
    requires: tuple[str, ...] = ()
    run_id: str
    incarnation: int
    step: int
    attempt: str
    parent: tuple[int, int] | None = None
    world: int
    layout: str
    images: tuple[ImageRef, ...]
    values: dict[str, Any] = {}
    created_s: float = 0.0

    @property
    def generation(self) -> Generation:
        """(incarnation, step)."""
        return Generation(self.incarnation, self.step)

    @property
    def size_bytes(self) -> int:
        """Bytes of all images."""
        return sum(image.size_bytes for image in self.images)


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the training processes, and the generation it went on from."""

    format_version: int = FORMAT_VERSION
    run_id: str
    n: int
    nonce: str
    parent: tuple[int, int] | None = None
    world: int = 1
    created_s: float = 0.0


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """``holdfast.json``: what a directory of checkpoints says of itself."""

    format_version: int = FORMAT_VERSION
    requires: tuple[str, ...] = ()
    run_id: str
    created_s: float = 0.0


class _Sealed(msgspec.Struct):
    checksum: str
    body: msgspec.Raw


Document = Manifest | Incarnation | Root
D = TypeVar("D", Manifest, Incarnation, Root)


def seal(document: Document) -> bytes:
    """The bytes of ``document``, its checksum in front."""
    body = msgspec.json.encode(document)
    return b'{"checksum":"' + text(checksum(body)).encode() + b'","body":' + body + b"}\n"


def unseal(kind: type[D], data: Buffer, where: str) -> D:
    """Read a document back; FormatError, ChecksumMismatch or NewerFormat name ``where``."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise FormatError(f"{where} has {len(data)} bytes, more than any document of ours")
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not a Holdfast document: {error}") from None
    found = text(checksum(bytes(sealed.body)))
    if found != sealed.checksum:
        raise ChecksumMismatch(
            f"{where}: stored checksum {sealed.checksum}, read {found}; "
            "its bytes changed after they were written",
            path=where,
        )
    _refuse_newer(sealed.body, where)
    try:
        return msgspec.json.decode(sealed.body, type=kind)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not a valid {kind.__name__.lower()}: {error}") from None


class _Claims(msgspec.Struct):
    format_version: int = 0
    requires: tuple[str, ...] = ()


def _refuse_newer(body: msgspec.Raw, where: str) -> None:
    try:
        claims = msgspec.json.decode(body, type=_Claims)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} has no readable format version: {error}") from None
    unknown = sorted(set(claims.requires) - KNOWN_FEATURES)
    if claims.format_version > FORMAT_VERSION or unknown:
        features = f", features {unknown}" if unknown else ""
        raise NewerFormat(
            f"{where} needs format version {claims.format_version}{features}; this Holdfast reads "
            f"{FORMAT_VERSION}: upgrade it"
        )


class Lineage:
    """Which generations the newest incarnation descends from.

    An incarnation that went on from generation (i, s) makes everything incarnation i saved
    after step s *abandoned*: it belongs to a future that was given up, and a zombie that
    publishes it late changes nothing.
    """

    def __init__(self, parents: dict[int, tuple[int, int] | None]) -> None:
        self._last_step: dict[int, float] = {}
        n = max(parents, default=None)
        limit = float("inf")
        while n is not None and n not in self._last_step:
            self._last_step[n] = limit
            parent = parents.get(n)
            n, limit = (None, 0.0) if parent is None else (parent[0], parent[1])

    def __contains__(self, generation: object) -> bool:
        if not isinstance(generation, tuple) or len(generation) != 2:
            return False
        incarnation, step = generation
        return bool(step <= self._last_step.get(incarnation, float("-inf")))
