"""Opens images in a store or in shared memory slots, and reads both through one interface."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from holdfast.catalogue import damage_note, layout_path, manifest_path, read_bounded
from holdfast.errors import (
    AlreadyPublished,
    ChecksumMismatch,
    CoverageError,
    FormatError,
    HoldfastError,
)
from holdfast.format.checksum import BLOCK_BYTES, checksum, text, unpack_table
from holdfast.format.image import (
    PART_METADATA,
    Header,
    fill_in,
    header_size,
    image_bytes,
    join,
    parse_header,
)
from holdfast.format.manifest import ImageId, ImageRef, Manifest
from holdfast.geometry.codec import MAX_BYTES
from holdfast.geometry.layout import Layout, table_hash
from holdfast.protocol.arena import SlotFile
from holdfast.protocol.image_plan import plan_rank
from holdfast.restore.planning.plan import Fetch, Want, plan_fetches
from holdfast.storage.base import (
    MappedBytes,
    Store,
    mapped,
    reporting,
    require_unchanged,
    short_read,
)

#: Lengths of values that are tried: up to so many bytes from that of the image opened last.
_TRIED = 64


class ImageFile(Protocol):
    """Reads the bytes of one image."""

    name: str
    size_bytes: int
    header_xxh3: str
    table_xxh3: str
    is_mapped: bool
    """True if the image lies in memory: ``view`` then reads nothing and needs no staging buffer."""
    is_decoded: bool = False
    """True if ``view`` decodes what it returns."""

    def check_length(self) -> None:
        """Raise FormatError unless the length is the one in the manifest or slot record."""
        ...

    def open(self, expected: Mapping[str, str]) -> tuple[Header, tuple[int, ...]]:
        """Return header and block checksums, verified; FormatError unless the metadata are
        ``expected``.

        Must be called before ``view``.
        """
        return read_head(self, expected)

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """Return the bytes from ``start`` to ``stop``; in ``staging`` where it has room for them.

        ``is_shared`` as in ``Store.read_into``.
        """
        ...

    def block_name(self, number: int) -> str:
        """Name a block in words, for errors about changed blocks."""
        return f"block {number} of {self.name}"


class StoredImage(ImageFile):
    """An image in a store."""

    is_mapped = False

    def __init__(self, store: Store, ref: ImageRef, planned: PlannedHeaders | None = None) -> None:
        self.store, self.name, self.size_bytes = store, ref.path, ref.size_bytes
        self.header_xxh3, self.table_xxh3 = ref.header_xxh3, ref.table_xxh3
        self._ref, self._planned = ref, planned
        self.known: Mapping[int, bytes] = {}
        """Bytes that need not be read, by where they begin."""
        self._is_whole = False
        """True if the file was found to have its length: in a bucket that is a request."""

    def open(self, expected: Mapping[str, str]) -> tuple[Header, tuple[int, ...]]:
        """See ``ImageFile``: the header is not read where it can be computed."""
        if self._planned is None:
            return read_head(self, expected)
        raw = self._planned.find(self._ref)
        header, sums = read_head(self, expected) if raw is None else self._open(raw, expected)
        self._planned.values_bytes = header.values.size_bytes
        return header, sums

    def _open(self, raw: bytes, expected: Mapping[str, str]) -> tuple[Header, tuple[int, ...]]:
        """Return header and block checksums, of which only the entries in use are read."""
        self.check_length()
        header = checked_header(self, raw, expected)
        at, size_bytes = header.data_start + header.table.offset, 8 * header.blocks
        entries = bytes(self.view(at, at + size_bytes, bytearray(size_bytes)))
        return header, checked_table(self, header, entries.ljust(header.table.size_bytes, b"\0"))

    def check_length(self) -> None:
        """See ``ImageFile``."""
        size_bytes = self.store.size_bytes(self.name)
        if size_bytes != self.size_bytes:
            raise FormatError(
                f"{self.name} has {size_bytes} bytes, the manifest says {self.size_bytes}",
                image=self.name,
            )
        self._is_whole = True

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """See ``ImageFile``."""
        known = memoryview(self.known.get(start, b""))[: stop - start]
        if len(known) == stop - start:
            if len(staging) < len(known):
                return known
            memoryview(staging)[: len(known)] = known
            return memoryview(staging)[: len(known)]
        if len(staging) < stop - start:
            self._require_bytes(start, stop)
            # A stored exception may hold a view of the old staging buffer, which then cannot be
            # resized.
            staging = bytearray(stop - start)
        view = memoryview(staging)[: stop - start]
        self.store.read_into(self.name, start, view, is_shared=is_shared)
        return view

    def _require_bytes(self, start: int, stop: int) -> None:
        """Check the range before memory is allocated for it: sizes come from files that may be
        corrupt.
        """
        have = self.size_bytes if self._is_whole else self.store.size_bytes(self.name)
        if have < stop:
            raise short_read(self.name, self.store.url, start, stop - start, have)


class PlannedHeaders:
    """Computes the headers of a checkpoint's images from its layout, so that few are read.

    What the layout does not tell is how long the values in an image are: nearly as long as those in
    another. The checksum in the manifest shows which length is right.
    """

    def __init__(self, manifest: Manifest, layout: Layout) -> None:
        self._manifest, self._layout = manifest, layout
        self.values_bytes: int | None = None
        """Of the image opened last."""

    def find(self, ref: ImageRef) -> bytes | None:
        """Return the bytes of an image before its data; None where they must be read."""
        if (near := self.values_bytes) is None:
            return None
        with suppress(HoldfastError):
            plan = plan_rank(self._layout, ref.rank)
            metadata = self._manifest.attempt_id.image_metadata(self._manifest.run_id, ref.rank)
            lengths = range(max(0, near - _TRIED), near + _TRIED)
            for values_bytes in sorted(lengths, key=lambda length: abs(length - near)):
                if image_bytes(plan, values_bytes) == ref.size_bytes:
                    raw = fill_in(plan, metadata, values_bytes).header
                    if text(checksum(raw)) == ref.header_xxh3:
                        return raw
        return None


class SlotImage(ImageFile):
    """An image in a slot of this host's arena."""

    is_mapped = True

    def __init__(self, path: str, image: ImageId) -> None:
        self.slot = SlotFile.open(Path(path), writable=False)
        self.name, self.size_bytes = path, image.image_bytes
        self.header_xxh3, self.table_xxh3 = image.header_xxh3, image.table_xxh3
        self.check_length()

    def check_length(self) -> None:
        """See ``ImageFile``: a slot may be longer."""
        if self.size_bytes > self.slot.capacity_bytes:
            raise FormatError(f"slot {self.name} is shorter than the image it is said to hold")

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """See ``ImageFile``: the shared memory itself."""
        return self.slot.image[start:stop]


class MappedImage(ImageFile):
    """An image in a store, as memory that maps its file."""

    is_mapped = True

    def __init__(self, stored: StoredImage, found: MappedBytes) -> None:
        self._stored, self._found, self.memory = stored, found, found.memory
        self.name, self.size_bytes = stored.name, stored.size_bytes
        self.header_xxh3, self.table_xxh3 = stored.header_xxh3, stored.table_xxh3

    def check_length(self) -> None:
        """See ``ImageFile``."""
        if len(self.memory) != self.size_bytes:
            raise FormatError(
                f"{self.name} has {len(self.memory)} bytes, the manifest says {self.size_bytes}",
                image=self.name,
            )

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """See ``ImageFile``: the mapping itself, its pages loaded."""
        with reporting("read", self.name, self._stored.store.url):
            self._found.load(start, stop)
        return self.memory[start:stop]


class SplitImage(ImageFile):
    """Joins an image and its frozen part, two files of a store, into the one image they were in
    memory.

    A damaged part gets a note beside it, if that can be written: the next durable save of the run
    then writes the part again instead of referring to it once more.
    """

    is_mapped = False

    def __init__(self, live: StoredImage, part: StoredImage) -> None:
        self.live, self.part = live, part
        self.name, self.size_bytes = live.name, live.size_bytes
        self.header_xxh3, self.table_xxh3 = live.header_xxh3, live.table_xxh3
        self._shift = 0
        """Offset of the part's data relative to the joined image."""
        self._frozen_bytes = self._boundary = 0

    def check_length(self) -> None:
        """See ``ImageFile``."""
        self.live.check_length()
        try:
            self.part.check_length()
        except FormatError:
            self._note_damage()
            raise

    def open(self, expected: Mapping[str, str]) -> tuple[Header, tuple[int, ...]]:
        """See ``ImageFile``: header and checksums of the joined image."""
        live, live_sums = self.live.open(expected)
        try:
            part, sums = self.part.open(PART_METADATA | {"rank": expected["rank"]})
        except FormatError:
            self._note_damage()
            raise
        header = join(live, part, f"{self.name} with {self.part.name}")
        self._frozen_bytes = header.frozen_bytes
        self._boundary = header.data_start + header.frozen_bytes
        self._shift = part.data_start - header.data_start
        self.size_bytes = header.size_bytes
        return header, sums + live_sums

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """See ``ImageFile``: of the joined image."""
        first = self._boundary - start
        if first <= 0:
            moved = start - self._frozen_bytes, stop - self._frozen_bytes
            return self.live.view(*moved, staging, is_shared=is_shared)
        if stop <= self._boundary:
            moved = start + self._shift, stop + self._shift
            return self.part.view(*moved, staging, is_shared=is_shared)
        if len(staging) < stop - start:
            staging = bytearray(stop - start)
        moved = start + self._shift, self._boundary + self._shift
        self.part.view(*moved, staging, is_shared=is_shared)
        view = memoryview(staging)[: stop - start]
        at = self._boundary - self._frozen_bytes
        self.live.store.read_into(self.live.name, at, view[first:], is_shared=is_shared)
        return view

    def block_name(self, number: int) -> str:
        """See ``ImageFile``: in the file where it lies."""
        frozen = self._frozen_bytes // BLOCK_BYTES
        if number >= frozen:
            return self.live.block_name(number - frozen)
        is_noted = self._note_damage()
        remedy = "it is noted as damaged" if is_noted else "move it away"
        return (
            f"{self.part.block_name(number)} (a frozen part: {remedy}, so that the next durable "
            "save writes another)"
        )

    def _note_damage(self) -> bool:
        """Write the note; return whether it exists now. A reader without write access can only
        report it.
        """
        try:
            with suppress(AlreadyPublished):
                self.part.store.publish(damage_note(self.part.name), b"found damaged\n")
        except HoldfastError:
            return False
        return True


class Checkpoint:
    """The images of one generation, with verified headers and block tables."""

    def __init__(
        self,
        layout: Layout,
        files: Mapping[int, ImageFile],
        world: int,
        identity: Mapping[str, str],
        *,
        has_sums: bool = True,
        require_unchanged: Callable[[], None] = lambda: None,
        origin: str = "",
        lacks: Callable[[], str] = str,
    ) -> None:
        self.layout = layout
        self.lacks = lacks
        """Says which directory of another writer this is, and the files that it lacks; else ""."""
        self.origin = origin
        """Where images in memory are for this host: "memory" | "peers" | "decoded"; else ""."""
        self.require_unchanged = require_unchanged
        """Raises ForeignFormatError when another writer has changed what was read."""
        self.has_sums = has_sums
        """False for files of another writer, which has left no checksums to compare blocks with."""
        self.identity = dict(identity)
        self.files = files
        self.world = world
        self._headers: dict[int, Header] = {}
        self._tables: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def fetches(self, wants: Sequence[Want]) -> dict[int, list[Fetch]]:
        """Return the fetches for ``wants``, by image; CoverageError, which says what another
        writer's directory lacks, unless the images hold each element once.
        """
        try:
            return plan_fetches(wants, self.layout)
        except CoverageError as error:
            if lacks := self.lacks():
                error.args = (f"{error}: {lacks}",)
            raise

    def header(self, rank: int) -> Header:
        """Return the header of one image, checked against the manifest or the slot."""
        with self._lock:
            if rank not in self._headers:
                self._read_header(rank)
            return self._headers[rank]

    def table(self, rank: int) -> tuple[int, ...]:
        """Return the block checksums of one image, themselves verified."""
        self.header(rank)
        return self._tables[rank]

    def map(self, rank: int) -> memoryview | None:
        """Read an image through a mapping of its file from now on; None where there can be none.

        The memory is the caller's own: what is written to it does not reach the file.
        """
        with self._lock:
            file = self.files.get(rank)
            if isinstance(file, StoredImage) and (found := mapped(file.store, file.name)):
                file = MappedImage(file, found)
                file.check_length()
                self.files = {**self.files, rank: file}
            return file.memory if isinstance(file, MappedImage) else None

    def _read_header(self, rank: int) -> None:
        file = self.files.get(rank)
        if file is None:
            raise FormatError(f"the checkpoint names no image of rank {rank}")
        header, table = file.open(self.identity | {"rank": str(rank)})
        self._headers[rank] = header
        self._tables[rank] = table


def read_head(file: ImageFile, identity: Mapping[str, str]) -> tuple[Header, tuple[int, ...]]:
    """Return header and block checksums of one file, checked against the manifest or slot
    record.
    """
    file.check_length()
    data_start = header_size(bytes(file.view(0, 8, bytearray())), file.name, file.size_bytes)
    header = checked_header(file, bytes(file.view(0, data_start, bytearray())), identity)
    at = data_start + header.table.offset
    table = bytes(file.view(at, file.size_bytes, bytearray()))
    return header, checked_table(file, header, table)


def checked_header(file: ImageFile, raw: bytes, identity: Mapping[str, str]) -> Header:
    """Parse the header from the bytes before the data; FormatError when it is not the expected
    one.
    """
    _expect(text(checksum(raw)), file.header_xxh3, f"header of {file.name}")
    header = parse_header(raw, file.name, file.size_bytes)
    for name, expected in identity.items():
        if header.metadata.get(name) != expected:
            raise FormatError(
                f"{file.name} is of {name} {header.metadata.get(name)!r}, {expected!r} was "
                "expected: it is not the image it is said to be"
            )
    return header


def checked_table(file: ImageFile, header: Header, raw: bytes) -> tuple[int, ...]:
    """Parse the block checksums from the bytes of the table. ChecksumMismatch."""
    _expect(text(checksum(raw)), file.table_xxh3, f"block table of {file.name}")
    return unpack_table(raw, header.blocks)


def _expect(actual: str, stored: str, what: str) -> None:
    if actual != stored:
        raise ChecksumMismatch(
            f"{what}: stored {stored}, read {actual}. Its bytes changed after they were written.",
            path=what.rpartition(" ")[2],
        )


def decode_layout(data: bytes, hash_: str) -> Layout:
    """Decode a layout whose bytes must have this hash."""
    _expect(table_hash(data), hash_, f"layout {layout_path(hash_)}")
    return Layout.from_json(data)


def from_manifest(
    store: Store, manifest: Manifest, layout: Layout | None = None, *, plans_headers: bool = False
) -> Checkpoint:
    """Open a published checkpoint; ``layout`` is its layout, where that is read already.

    ``plans_headers``: headers that can be computed from the layout are not read.
    """
    if layout is None:
        data = read_bounded(store, layout_path(manifest.layout), MAX_BYTES)
        layout = decode_layout(data, manifest.layout)
    planned = PlannedHeaders(manifest, layout) if plans_headers else None
    files: dict[int, ImageFile] = {
        ref.rank: StoredImage(store, ref, planned) for ref in manifest.images
    }
    live = {ref.rank: ref for ref in manifest.images}
    for part in manifest.parts:  # what is left of the image has a header of its own
        files[part.rank] = SplitImage(StoredImage(store, live[part.rank]), StoredImage(store, part))
    return Checkpoint(
        layout,
        files,
        manifest.world,
        manifest.attempt_id.metadata,
        has_sums=getattr(store, "has_block_sums", True),
        require_unchanged=partial(require_unchanged, store, manifest_path(manifest.generation)),
        lacks=partial(getattr(store, "lacks", _lacks_nothing), manifest_path(manifest.generation)),
    )


def _lacks_nothing(path: str) -> str:
    return ""
