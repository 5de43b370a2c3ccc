"""Encodes the documents of a root, each with its checksum: manifest, incarnation, root, pin, lease.

A document is JSON, ``{"checksum":"<xxh3-64 of the body's bytes>","body":{...}}`` and a line feed,
without spaces, so that any tool finds the body's bytes. Fields this version does not know are
ignored unless the document requires them as features; then it is refused. Every sealed document can
be read back: sealing and reading check the same rules. See docs/format/v1.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast.errors import ChecksumMismatch, FormatError, NewerFormat
from holdfast.format.checksum import Buffer, checksum, text
from holdfast.format.values import nests_too_deep
from holdfast.geometry.codec import refuse_twice
from holdfast.geometry.mesh import MAX_RANKS

FORMAT_VERSION = 1
MAX_DOCUMENT_BYTES = 64 << 20
#: Larger numbers are not exact in every reader of JSON.
MAX_NUMBER = (1 << 53) - 1
MAX_IMAGE_BYTES = (1 << 63) - 1
#: The names of the files below ``steps/``; see ``holdfast.catalogue``.
_ATTEMPT = r"[0-9A-Za-z_-]{1,128}"
_NUMBER = r"(?:0|[1-9][0-9]{0,15})"
# The patterns are built once: msgspec compiles and caches one with numbers for each manifest
# otherwise.
_IS_ATTEMPT = re.compile(_ATTEMPT).fullmatch
_IS_PART_DIRECTORY = re.compile(rf"parts/{_NUMBER}-{_NUMBER}-{_ATTEMPT}").fullmatch
_IS_CHECKSUM = re.compile(r"[0-9a-f]{16}").fullmatch
_ARE_CHECKSUMS = re.compile(r"(?:[0-9a-f]{16};)+").fullmatch
_FRAME = re.compile(rb'\{"checksum":"([0-9a-f]{16})","body":(\{.*\})\}\n', re.DOTALL)


class Generation(NamedTuple):
    """The identity of a saved state. A step alone is not enough, because a run may save it
    twice.
    """

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}-{self.step}"


class AttemptId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Identifies one attempt to capture a generation: what the headers of all its images share."""

    incarnation: int
    step: int
    attempt: str
    world: int
    layout: str

    @property
    def generation(self) -> Generation:
        """(incarnation, step)."""
        return Generation(self.incarnation, self.step)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata in the header of every image of the attempt."""
        return {name: str(value) for name, value in msgspec.structs.asdict(self).items()}

    def image_metadata(self, run_id: str, rank: int) -> dict[str, str]:
        """Return the metadata in the header of one image, in their order."""
        return {
            "run": run_id,
            "incarnation": str(self.incarnation),
            "step": str(self.step),
            "attempt": self.attempt,
            "rank": str(rank),
            "world": str(self.world),
            "layout": self.layout,
        }


class ImageId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Identifies one image of an attempt, by the checksums of its header and its block table."""

    rank: int
    image_bytes: int
    header_xxh3: str
    table_xxh3: str


class ImageRef(msgspec.Struct, frozen=True, kw_only=True):
    """An image a manifest names; the checksums cover its header and its block table."""

    path: str
    rank: int
    size_bytes: int
    header_xxh3: str
    table_xxh3: str


class _RootDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What all documents of a root begin with."""

    format_version: int = FORMAT_VERSION
    requires: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    run_id: str


class _OfGeneration(_RootDocument, frozen=True, kw_only=True):
    """A document about one generation."""

    incarnation: int
    step: int

    @property
    def generation(self) -> Generation:
        """(incarnation, step)."""
        return Generation(self.incarnation, self.step)


class Manifest(_OfGeneration, frozen=True, kw_only=True):
    """The document that makes a checkpoint: a checkpoint exists when its manifest does."""

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
    def attempt_id(self) -> AttemptId:
        """The attempt that it publishes."""
        return AttemptId(self.incarnation, self.step, self.attempt, self.world, self.layout)

    @property
    def size_bytes(self) -> int:
        """Bytes of everything it names: images and frozen parts, whichever checkpoint wrote
        them.
        """
        return sum(one.size_bytes for one in (*self.images, *self.parts))

    @property
    def image_bytes(self) -> int:
        """Bytes of all images, which belong to this checkpoint alone."""
        return sum(image.size_bytes for image in self.images)

    @property
    def reused_bytes(self) -> int:
        """Bytes of the frozen parts that earlier checkpoints wrote."""
        if not self.parts:
            return 0
        own = {one.path.split("/")[-2] for one in self.images}
        return sum(one.size_bytes for one in self.parts if one.path.split("/")[-2] not in own)

    @property
    def directories(self) -> set[str]:
        """The directories of the files that it names."""
        return {one.path.rpartition("/")[0] for one in (*self.images, *self.parts)}


class Incarnation(_RootDocument, frozen=True, kw_only=True):
    """One start of the training processes, and the generation it restored."""

    n: int
    nonce: str
    parent: tuple[int, int] | None = None
    world: int = 1
    created_s: float = 0.0


class Root(_RootDocument, frozen=True, kw_only=True):
    """``holdfast.json``: the identity of a directory of checkpoints."""

    created_s: float = 0.0


class Pin(_OfGeneration, frozen=True, kw_only=True):
    """A user's request to keep a checkpoint; see ``holdfast.persist.pins``.

    ``manifest`` is the pinned manifest, byte for byte: with it a removal that was killed halfway
    can be undone.
    """

    manifest: str
    note: str = ""
    created_s: float = 0.0


class Lease(_OfGeneration, frozen=True, kw_only=True):
    """A reader's claim on a checkpoint it reads; see ``holdfast.leases``.

    ``renewals`` changes while the reader lives: that, and not the reader's clock, keeps the lease.
    """

    directories: tuple[str, ...]
    layout: str
    reader: str = ""
    renewals: int = 0
    created_s: float = 0.0


Document = Manifest | Incarnation | Root | Pin | Lease
D = TypeVar("D", Manifest, Incarnation, Root, Pin, Lease)
_BEFORE = b'{"checksum":"'
#: The first bytes of a sealed document, in which its checksum is.
FRONT_BYTES = len(_BEFORE) + 17


def seal(document: Document) -> bytes:
    """Returns the bytes of ``document``, its checksum in front; raises FormatError when no reader
    could read it.
    """
    body = msgspec.json.encode(document)
    _refuse_faults(document, "this document")
    return _BEFORE + text(checksum(body)).encode() + b'","body":' + body + b"}\n"


def checksum_in(data: bytes) -> str:
    """Returns the checksum in front of a sealed document, as it stands there."""
    return data[len(_BEFORE) : data.find(b'"', len(_BEFORE))].decode(errors="replace")


def unseal(kind: type[D], data: Buffer, where: str) -> D:
    """Reads a document back; FormatError, ChecksumMismatch or NewerFormat name ``where``."""
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
    """Returns the body's bytes, after checking the checksum in front of them."""
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
    """Yields faults of a document that its field types do not exclude."""
    if document.format_version < 1:
        yield f"its format version is {document.format_version}; there is none before 1"
    if isinstance(document, Manifest | Pin | Lease):
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
        if nests_too_deep(document.values):
            yield "its values are nested too deep to be ours"
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
    """Checks that there is one image of every rank, each in the one directory of this attempt."""
    if _is_plain(manifest):
        return
    ranks = sorted(image.rank for image in manifest.images)
    # The number first: a few bytes can claim a world of a million.
    if not 1 <= manifest.world == len(ranks) <= MAX_RANKS or ranks != list(range(len(ranks))):
        yield f"it names images of ranks {ranks!s:.50}, and is of {manifest.world} ranks"
    directories = {image.path.rpartition("/")[0] for image in manifest.images}
    begin = f"steps/{manifest.incarnation}-{manifest.step}-"
    for directory in directories:
        is_its = directory.startswith(begin) and _IS_ATTEMPT(directory, len(begin))
        if len(directories) > 1 or not is_its:
            yield f"its images lie in {sorted(directories)!r:.200}, not in one {begin}{_ATTEMPT}"
    for image in manifest.images:
        if image.path.rpartition("/")[2] != f"live-{image.rank:05d}.safetensors":
            yield f"the image of rank {image.rank} is said to be {image.path!r:.200}"
    yield from _part_faults(manifest)
    for image in (*manifest.images, *manifest.parts):
        if not 0 < image.size_bytes <= MAX_IMAGE_BYTES:
            yield f"image {image.path} is said to have {image.size_bytes} bytes"
        for value in (image.header_xxh3, image.table_xxh3):
            if not _IS_CHECKSUM(value):
                yield f"{value!r:.50} is no checksum of image {image.path}"


def _is_plain(manifest: Manifest) -> bool:
    """True for images without any of the faults below, in the order of their ranks, and no parts:
    so nearly all are, and this takes a third of the time.
    """
    images = manifest.images
    if manifest.parts or not 1 <= manifest.world == len(images) <= MAX_RANKS:
        return False
    above = images[0].path.rpartition("/")[0]
    begin = f"steps/{manifest.incarnation}-{manifest.step}-"
    if not above.startswith(begin) or not _IS_ATTEMPT(above, len(begin)):
        return False
    for rank, image in enumerate(images):
        is_named = image.rank == rank and image.path == f"{above}/live-{rank:05d}.safetensors"
        if not is_named or not 0 < image.size_bytes <= MAX_IMAGE_BYTES:
            return False
    sums = "".join([f"{one.header_xxh3};{one.table_xxh3};" for one in images])
    return len(sums) == 34 * len(images) and _ARE_CHECKSUMS(sums) is not None


def _part_faults(manifest: Manifest) -> Iterator[str]:
    """Checks that a rank has at most one frozen part, in the directory of any attempt of this
    root.
    """
    if manifest.parts and PARTS not in manifest.requires:
        yield f"it names frozen parts and does not require the feature {PARTS!r}"
    ranks = [part.rank for part in manifest.parts]
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(manifest.world)):
        yield f"it names frozen parts of ranks {ranks!s:.50}, and is of {manifest.world} ranks"
    for part in manifest.parts:
        directory, _, name = part.path.rpartition("/")
        if not _IS_PART_DIRECTORY(directory) or name != f"frozen-{part.rank:05d}.safetensors":
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
    """Decides which generations the newest incarnation descends from.

    An incarnation that went on from generation (i, s) makes everything incarnation i saved after
    step s *abandoned*: it belongs to a future that was given up, and a zombie that publishes it
    late changes nothing.

    ``unreadable``: incarnations that exist, whose parents are not known. Where the line leads to
    one of them, or to one without any record, everything older is *undecided*.
    """

    def __init__(
        self, parents: dict[int, tuple[int, int] | None], unreadable: Iterable[int] = ()
    ) -> None:
        self._last_step: dict[int, float] = {}
        self.missing: int | None = None
        """The incarnation in the line whose parent is not known; None: the line is whole."""
        n = max((*parents, *unreadable), default=None)
        limit = float("inf")
        while n is not None and n not in self._last_step:
            self._last_step[n] = limit
            if n not in parents:
                self.missing = n
            parent = parents.get(n)
            n, limit = (None, 0.0) if parent is None else (parent[0], parent[1])

    def is_undecided(self, generation: tuple[int, int]) -> bool:
        """True if the missing parent may be this generation, or descend from it."""
        return self.missing is not None and generation[0] < self.missing

    def is_abandoned(self, generation: tuple[int, int]) -> bool:
        """True if the generation is certainly given up."""
        return generation not in self and not self.is_undecided(generation)

    def __contains__(self, generation: object) -> bool:
        if not isinstance(generation, tuple) or len(generation) != 2:
            return False
        incarnation, step = generation
        return bool(step <= self._last_step.get(incarnation, float("-inf")))


# Lists the features a file can require; a reader that does not know a required one refuses the
# file.
#
# A feature that changes the meaning of bytes (compressed, encrypted) is *required*: a reader that
# does not know it must not read on. One that may be ignored is *optional*.


#: Frozen leaves are in an image of their own, which many manifests name; or before a gap in an
#: image, ready to be cut off.
PARTS = "parts"

#: The layout lists boxes of leaves that no mesh describes.
LISTINGS = "listings"

#: The features this version can read. Version 1 of the format was frozen with none.
KNOWN_FEATURES: frozenset[str] = frozenset({PARTS, LISTINGS})


def needed(*, parts: bool, listings: bool) -> tuple[str, ...]:
    """Returns the features that a manifest requires for frozen parts, or a layout with box
    lists.
    """
    return ((PARTS,) if parts else ()) + ((LISTINGS,) if listings else ())


def unknown_features(requires: Iterable[str]) -> list[str]:
    """Returns those of ``requires`` that this version cannot read."""
    return sorted(set(requires) - KNOWN_FEATURES)
