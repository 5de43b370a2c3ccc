"""The documents of a checkpoint: manifest, incarnation, root, pin; each with its own checksum.

A document is JSON, ``{"checksum":"<xxh3-64 of the body's bytes>","body":{...}}`` and a line feed,
without spaces, so that any tool finds the body's bytes. Fields this version does not know are
ignored unless the document requires them as features; then it is refused. What is sealed here can
be read here: both sides check the same rules. See docs/format/v1.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast.errors import ChecksumMismatch, FormatError, NewerFormat
from holdfast.format.checksum import Buffer, checksum, text
from holdfast.format.features import PARTS, unknown_features
from holdfast.geometry.placements import MAX_RANKS
from holdfast.geometry.unique import refuse_twice

FORMAT_VERSION = 1
MAX_DOCUMENT_BYTES = 64 << 20
#: Larger numbers are not exact in every reader of JSON.
MAX_NUMBER = (1 << 53) - 1
MAX_IMAGE_BYTES = (1 << 63) - 1
#: What the files below ``steps/`` are called; see ``holdfast.catalogue``.
_ATTEMPT = r"[0-9A-Za-z_-]{1,128}"
_NUMBER = r"(?:0|[1-9][0-9]{0,15})"
_FRAME = re.compile(rb'\{"checksum":"([0-9a-f]{16})","body":(\{.*\})\}\n', re.DOTALL)


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
    optional: tuple[str, ...] = ()
    run_id: str
    incarnation: int
    step: int
    attempt: str
    parent: tuple[int, int] | None = None
    world: int
    layout: str
    images: tuple[ImageRef, ...]
    values: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    created_s: float = 0.0
    parts: tuple[ImageRef, ...] = ()

    @property
    def generation(self) -> Generation:
        """(incarnation, step)."""
        return Generation(self.incarnation, self.step)

    @property
    def size_bytes(self) -> int:
        """Bytes of all that it names: of images and of frozen parts, whoever wrote them."""
        return sum(one.size_bytes for one in (*self.images, *self.parts))

    @property
    def image_bytes(self) -> int:
        """Bytes of all images: of what is this checkpoint's alone."""
        return sum(image.size_bytes for image in self.images)

    @property
    def reused_bytes(self) -> int:
        """Bytes of the frozen parts that earlier checkpoints wrote."""
        own = {one.path.split("/")[-2] for one in self.images}
        return sum(one.size_bytes for one in self.parts if one.path.split("/")[-2] not in own)

    @property
    def directories(self) -> set[str]:
        """Where the files lie that it names."""
        return {one.path.rpartition("/")[0] for one in (*self.images, *self.parts)}


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the training processes, and the generation it went on from."""

    format_version: int = FORMAT_VERSION
    requires: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
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
    optional: tuple[str, ...] = ()
    run_id: str
    created_s: float = 0.0


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A person's word that a checkpoint stays; see ``holdfast.persist.pins``.

    ``manifest`` is the pinned manifest, byte for byte: whoever was killed while taking it
    away can be made up for.
    """

    format_version: int = FORMAT_VERSION
    requires: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    run_id: str
    incarnation: int
    step: int
    manifest: str
    note: str = ""
    created_s: float = 0.0

    @property
    def generation(self) -> Generation:
        """(incarnation, step)."""
        return Generation(self.incarnation, self.step)


Document = Manifest | Incarnation | Root | Pin
D = TypeVar("D", Manifest, Incarnation, Root, Pin)


def seal(document: Document) -> bytes:
    """The bytes of ``document``, its checksum in front; FormatError when nobody could read it."""
    body = msgspec.json.encode(document)
    _refuse_faults(document, "this document")
    return b'{"checksum":"' + text(checksum(body)).encode() + b'","body":' + body + b"}\n"


def unseal(kind: type[D], data: Buffer, where: str) -> D:
    """Read a document back; FormatError, ChecksumMismatch or NewerFormat name ``where``."""
    body = _checked_body(data, where)
    _refuse_newer(body, where)
    try:
        document = msgspec.json.decode(body, type=kind)
        refuse_twice(body, document)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not a valid {kind.__name__.lower()}: {error}") from None
    _refuse_faults(document, where)
    return document


def _checked_body(data: Buffer, where: str) -> memoryview:
    """The body's bytes, which have the checksum in front of them."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise FormatError(f"{where} has {len(data)} bytes, more than any document of ours")
    framed = _FRAME.fullmatch(data)
    if framed is None:
        raise FormatError(f"{where} is not a Holdfast document: it is cut short, or another file")
    stored, body = framed[1].decode(), memoryview(data)[framed.start(2) : framed.end(2)]
    found = text(checksum(body))
    if found != stored:
        raise ChecksumMismatch(
            f"{where}: stored checksum {stored}, read {found}; "
            "its bytes changed after they were written",
            path=where,
        )
    return body


def _refuse_faults(document: Document, where: str) -> None:
    kind = type(document).__name__.lower()
    for fault in _faults(document):
        raise FormatError(f"{where} is not a valid {kind}: {fault}")


def _faults(document: Document) -> Iterator[str]:
    """What no document may say, although each field has its type."""
    if document.format_version < 1:
        yield f"its format version is {document.format_version}; there is none before 1"
    if isinstance(document, Manifest | Pin):
        yield from _number_faults(incarnation=document.incarnation, step=document.step)
    if isinstance(document, Incarnation):
        yield from _number_faults(n=document.n)
        yield from _parent_faults(document.parent, document.n)
        if not 1 <= document.world <= MAX_RANKS:
            yield f"it is of {document.world} ranks"
    if isinstance(document, Manifest):
        yield from _parent_faults(document.parent, document.incarnation)
        if not re.fullmatch(r"[0-9a-f]{32}", document.layout):
            yield f"its layout {document.layout!r:.50} is not 32 hexadecimal digits"
        yield from _image_faults(document)


def _number_faults(**numbers: int) -> Iterator[str]:
    for name, value in numbers.items():
        if not 0 <= value <= MAX_NUMBER:
            yield f"its {name} {value} is outside of 0 to {MAX_NUMBER}"


def _parent_faults(parent: tuple[int, int] | None, incarnation: int) -> Iterator[str]:
    if parent is not None:
        yield from _number_faults(**{"parent's incarnation": parent[0], "parent's step": parent[1]})
        if parent[0] >= incarnation:
            yield f"its parent's incarnation {parent[0]} is not before its own, {incarnation}"


def _image_faults(manifest: Manifest) -> Iterator[str]:
    """One image of every rank, each in the one directory of this attempt, and nowhere else."""
    ranks = sorted(image.rank for image in manifest.images)
    # The number first: a world of a million is claimed in a few bytes.
    if not 1 <= manifest.world == len(ranks) <= MAX_RANKS or ranks != list(range(len(ranks))):
        yield f"it names images of ranks {ranks!s:.50}, and is of {manifest.world} ranks"
    directories = {image.path.rpartition("/")[0] for image in manifest.images}
    expected = rf"steps/{manifest.incarnation}-{manifest.step}-{_ATTEMPT}"
    for directory in directories:
        if len(directories) > 1 or not re.fullmatch(expected, directory):
            yield f"its images lie in {sorted(directories)!r:.200}, not in one {expected}"
    is_checksum = re.compile(r"[0-9a-f]{16}").fullmatch
    for image in manifest.images:
        if image.path.rpartition("/")[2] != f"live-{image.rank:05d}.safetensors":
            yield f"the image of rank {image.rank} is said to be {image.path!r:.200}"
    yield from _part_faults(manifest)
    for image in (*manifest.images, *manifest.parts):
        if not 0 < image.size_bytes <= MAX_IMAGE_BYTES:
            yield f"image {image.path} is said to have {image.size_bytes} bytes"
        for value in (image.header_xxh3, image.table_xxh3):
            if not is_checksum(value):
                yield f"{value!r:.50} is no checksum of image {image.path}"


def _part_faults(manifest: Manifest) -> Iterator[str]:
    """At most one frozen part of a rank, wherever an attempt of this root put it."""
    if manifest.parts and PARTS not in manifest.requires:
        yield f"it names frozen parts and does not require the feature {PARTS!r}"
    ranks = [part.rank for part in manifest.parts]
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(manifest.world)):
        yield f"it names frozen parts of ranks {ranks!s:.50}, and is of {manifest.world} ranks"
    for part in manifest.parts:
        expected = rf"parts/{_NUMBER}-{_NUMBER}-{_ATTEMPT}/frozen-{part.rank:05d}\.safetensors"
        if not re.fullmatch(expected, part.path):
            yield f"the frozen part of rank {part.rank} is said to be {part.path!r:.200}"


class _Claims(msgspec.Struct):
    format_version: int
    requires: tuple[str, ...] = ()


def _refuse_newer(body: memoryview, where: str) -> None:
    try:
        claims = msgspec.json.decode(body, type=_Claims)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} has no readable format version: {error}") from None
    unknown = unknown_features(claims.requires)
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
