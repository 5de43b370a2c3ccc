"""Shows a foreign checkpoint as a root with one checkpoint in it, without copying a byte.

Manifest, layout and the headers of images are computed; the data of an image are ranges of the
foreign files. So whatever reads checkpoints reads this one: planning, the proof that every element
is covered, rules, resharding and the commands. One thing is missing: foreign writers leave no
checksums of blocks, so bytes are taken as they are read (``has_block_sums``). A zip has one of each
storage, which is compared when a read covers all of it, and by a deep check.
"""

from __future__ import annotations

import functools
import math
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from holdfast.catalogue import ROOT, image_path, layout_path, manifest_path
from holdfast.errors import ForeignFormatError, FormatError, NotFound, StorageError
from holdfast.format.checksum import checksum, text
from holdfast.format.image import Image, ImagePlan, fill_in
from holdfast.format.manifest import AttemptId, Generation, ImageRef, Manifest, Root, needed, seal
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.codec import has_listings
from holdfast.geometry.layout import Layout
from holdfast.interop.dcp import locate
from holdfast.interop.extent_reader import WINDOW_BYTES, read_extent
from holdfast.interop.foreign import (
    Extent,
    ForeignCheckpoint,
    MissingFile,
    StoredSum,
    files_of,
    is_contiguous,
)
from holdfast.interop.foreign_images import ForeignImages
from holdfast.interop.rank_copies import RankCopies
from holdfast.interop.source_files import SourceFiles
from holdfast.storage.base import ImageSink, Lock, short_read

#: The manifest shows values up to this size; longer ones are in the images only.
_SHOWN_BYTES = 1 << 20
_INCARNATION = 0
#: Where the elements of items were found, by leaf and box: of so many.
_LOCATED = 1 << 14


#: So many files are asked when they were changed.
_DATED = 64
#: Tensors may be views of the same bytes: they may have so many times the bytes of their files, and
#: so many more.
_VIEWS, _MORE_BYTES = 64, 1 << 30

_POINT = Box((), ())


#: So many of the files that are missing are named in an error.
_LISTED = 3


@dataclass(frozen=True, slots=True)
class _Segment:
    """A run of bytes of an image: some that are computed, or a box of a leaf in the files."""

    start: int
    stop: int
    data: bytes = b""
    leaf: str = ""
    dtype: str = ""
    box: Box = _POINT
    extent: Extent | None = None


class ForeignStore:
    """A read-only store of the checkpoint that a reader found in ``files``."""

    has_block_sums = False

    def __init__(
        self, files: SourceFiles, found: ForeignCheckpoint, *, run_id: str | None = None
    ) -> None:
        self._files, self.found = files, found
        where = str(files.path)
        self.layout: Layout = found.layout(where)
        self._named = set().union(*(files_of(leaf.parts) for leaf in found.leaves.values()))
        self._require_stored(where)
        shared = dict(found.values)
        self._values = [
            msgspec.json.encode(
                {"shared": shared, "own": dict(own), "aliases": dict(found.aliases)}
            )
            for own in found.own or ({},)
        ]
        said = self.layout.to_json() + b"".join(self._values)
        self._run_id = run_id or xxhash.xxh3_64_hexdigest(said)[:12]
        self._generation = Generation(_INCARNATION, found.step)
        attempt = found_attempt(found.format)
        self._id = AttemptId(_INCARNATION, found.step, attempt, found.world, self.layout.hash)
        self._images: dict[int, list[_Segment]] = {}
        self._located = functools.lru_cache(_LOCATED)(self._locate)
        self._copies = RankCopies(files, self._located)
        self._parts = ForeignImages(found.leaves, found.world)
        manifest = self._manifest(shared)
        root = Root(run_id=self._run_id)
        self._documents = {
            ROOT: seal(root),
            manifest_path(self._generation): seal(manifest),
            layout_path(self.layout.hash): self.layout.to_json(),
        }
        self._sizes = {image.path: (image.rank, image.size_bytes) for image in manifest.images}

    # ── what is shown ────────────────────────────────────────────────────────────────────

    def _manifest(self, shared: dict[str, Any]) -> Manifest:
        found, attempt = self.found, found_attempt(self.found.format)
        is_short = len(self._values[0]) <= _SHOWN_BYTES
        refs = []
        zeros = functools.lru_cache(lambda entries: text(checksum(bytes(8 * entries))))
        for rank, plan in enumerate(self._parts.plans()):
            image = self._fill_in(rank, plan)
            path = image_path(self._generation, attempt, rank)
            refs.append(
                ImageRef(
                    path=path,
                    rank=rank,
                    size_bytes=image.size_bytes,
                    header_xxh3=text(checksum(image.header)),
                    table_xxh3=zeros(image.table_entries),
                )
            )
        return Manifest(
            run_id=self._run_id,
            incarnation=_INCARNATION,
            step=found.step,
            attempt=attempt,
            world=found.world,
            layout=self.layout.hash,
            images=tuple(refs),
            requires=needed(parts=False, listings=has_listings(self.layout.to_json())),
            values=shared if is_short else {},
            aliases=dict(found.aliases) if is_short else {},
            created_s=self._changed_s(),
        )

    def _changed_s(self) -> float:
        return max(map(self._files.changed_s, sorted(self._named)[:_DATED]), default=0.0)

    def _require_stored(self, where: str) -> None:
        """Refuse tensors that are so much larger than their files that no state is so."""
        leaves = self.found.leaves.values()
        claimed = sum(math.prod(leaf.shape) * ITEMSIZE[leaf.dtype] for leaf in leaves)
        if claimed <= _MORE_BYTES:
            return
        stored = sum(map(self._files.size_bytes, self._named))
        if claimed > _MORE_BYTES + _VIEWS * stored:
            raise ForeignFormatError(
                f"{where}: its tensors have {claimed} bytes, its files {stored}: they name the "
                "same bytes again and again, as expanded tensors do. Save them as they are needed",
                path=where,
                offset=0,
            )

    def _fill_in(self, rank: int, plan: ImagePlan) -> Image:
        values = self._values[min(rank, len(self._values) - 1)]
        return fill_in(plan, self._id.image_metadata(self._run_id, rank), len(values))

    def _segments(self, rank: int) -> list[_Segment]:
        """What an image consists of: planned again at its first read, as most are never read."""
        if rank in self._images:
            return self._images[rank]
        plan, parts = self._parts.plan(rank)
        image, values = self._fill_in(rank, plan), self._values[min(rank, len(self._values) - 1)]
        segments = [_Segment(0, image.data_start, image.header)]
        for entry in plan.entries:
            name, dtype, part = parts[entry.name]
            start = image.data_start + entry.offset
            segments.append(
                _Segment(start, start + entry.size_bytes, b"", name, dtype, part.box, part.extent)
            )
        at = image.data_start + image.values_offset
        segments.append(_Segment(at, at + len(values), values))
        segments.append(_Segment(at + len(values), image.size_bytes))
        found = [one for one in segments if one.start < one.stop]
        return self._images.setdefault(rank, found)

    # ── the store ────────────────────────────────────────────────────────────────────────

    @property
    def url(self) -> str:
        """The path of the directory or file."""
        return str(self._files.path)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is there and is not read, in words."""
        unverified = {
            part.extent.file
            for leaf in self.found.leaves.values()
            for part in leaf.parts
            if part.extent.sum is None and part.extent.item_bytes is None
        }
        some = (
            f"{self._files.where(file)} is unverified by its writer: it has no checksums"
            for file in sorted(unverified)
        )
        return (*self.found.notes, *some)

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The names of each tensor that is one in the state to be filled."""
        return self.found.ties

    def lacks(self, path: str = "") -> str:
        """What to say of elements that are in no file: the directory, and the files it lacks."""
        missing = [note for note in self.found.notes if isinstance(note, MissingFile)]
        listed = "; ".join([str(self._files.path), *missing[:_LISTED]])
        more = f"; and {len(missing) - _LISTED} files more" if len(missing) > _LISTED else ""
        return f"{listed}{more}. Copy what is missing here, or give a checkpoint that is whole"

    def require_unchanged(self, path: str = "") -> None:
        """See ``storage.base``: there is one checkpoint here."""
        self._files.require_unchanged()

    def facts(self, path: str = "") -> list[str]:
        """See ``storage.base``: the inode, size and time of change of every file that is read."""
        for file in {
            file
            for one in self.found.leaves.values()
            for file in files_of(one.parts) | files_of(one.copies)
        }:
            self._files.size_bytes(file)
        return [f"{name} {fact}" for name, fact in sorted(self._files.facts().items())]

    def names(self) -> list[str]:
        """The names of all that is shown."""
        return [*self._documents, *self._sizes]

    def identity(self) -> str:
        """See ``Store``."""
        return f"foreign {self._run_id}"

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """See ``Store``."""
        if size_bytes is None:
            size_bytes = self.size_bytes(path) - offset_bytes
        buffer = bytearray(max(0, size_bytes))
        self.read_into(path, offset_bytes, memoryview(buffer))
        return bytes(buffer)

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        """See ``Store``: of an image, from the foreign files."""
        have = self.size_bytes(path)
        if offset_bytes < 0 or offset_bytes + len(buffer) > have:
            raise short_read(path, self.url, offset_bytes, len(buffer), have)
        document = self._documents.get(path)
        if document is not None:
            buffer[:] = document[offset_bytes : offset_bytes + len(buffer)]
            return
        segments = self._segments(self._sizes[path][0])
        at = bisect_right(segments, offset_bytes, key=lambda one: one.start) - 1
        stop = offset_bytes + len(buffer)
        while at < len(segments) and segments[at].start < stop:
            one = segments[at]
            first, last = max(one.start, offset_bytes), min(one.stop, stop)
            into = buffer[first - offset_bytes : last - offset_bytes]
            self._fill(one, first - one.start, into)
            at += 1

    def _fill(self, one: _Segment, begin: int, into: memoryview) -> None:
        if one.extent is None:
            data = one.data[begin : begin + len(into)]
            into[:] = data if one.data else bytes(len(into))
            return
        extent = one.extent
        if extent.item_bytes is not None:
            extent = self._located(one.leaf, one.dtype, one.box, extent)
        read_extent(self._files, extent, one.box.shape, one.dtype, begin, into)
        if extent.strides is None or is_contiguous(one.box.shape, extent.strides):
            self._compare(extent, extent.offset + begin, into)
        if copies := self.found.leaves[one.leaf].copies:
            self._copies.require_same(one.leaf, one.dtype, one.box, begin, into, copies)

    def _compare(self, extent: Extent, at: int, data: memoryview) -> None:
        """Compare bytes that were read with their checksum, if they are all that it is of."""
        known = extent.sum
        if known is not None and at <= known.offset:
            inside = data[known.offset - at :][: known.size_bytes]
            if len(inside) == known.size_bytes and zlib.crc32(inside) != known.crc:
                raise self._changed(extent.file, known)

    def _changed(self, file: str, known: StoredSum) -> ForeignFormatError:
        where = self._files.where(file)
        return ForeignFormatError(
            f"{where}: the {known.size_bytes} bytes from byte {known.offset} on have another "
            f"checksum than {known.crc:08x}, which is stored: they changed after they were written",
            path=where,
            offset=known.offset,
        )

    def data_faults(self) -> Iterator[str]:
        """What a deep check finds: data that differ from the checksum that their writer left."""
        seen: set[tuple[str, StoredSum]] = set()
        for name, leaf in self.found.leaves.items():
            for part in leaf.parts:
                extent = part.extent
                try:
                    if extent.item_bytes is not None:
                        extent = self._located(name, leaf.dtype, part.box, extent)
                    if extent.sum is not None and (extent.file, extent.sum) not in seen:
                        seen.add((extent.file, extent.sum))
                        self._compare_all(extent.file, extent.sum)
                except FormatError as error:
                    yield str(error)
        yield from self._copies.faults(self.found.leaves)

    def _compare_all(self, file: str, known: StoredSum) -> None:
        crc = 0
        for start in range(0, known.size_bytes, WINDOW_BYTES):
            count = min(WINDOW_BYTES, known.size_bytes - start)
            crc = zlib.crc32(self._files.read(file, known.offset + start, count), crc)
        if crc != known.crc:
            raise self._changed(file, known)

    def _locate(self, leaf: str, dtype: str, box: Box, extent: Extent) -> Extent:
        return locate(self._files, leaf, dtype, box, extent)

    def size_bytes(self, path: str) -> int:
        """See ``Store``."""
        if path in self._documents:
            return len(self._documents[path])
        if path in self._sizes:
            return self._sizes[path][1]
        raise NotFound(f"{self.url} shows no {path}", path=path)

    def exists(self, path: str) -> bool:
        """See ``Store``."""
        return path in self._documents or path in self._sizes

    def list(self, prefix: str) -> list[str]:
        """See ``Store``."""
        begin = f"{prefix.rstrip('/')}/" if prefix else ""
        below = (name.removeprefix(begin) for name in self.names() if name.startswith(begin))
        return sorted({name.partition("/")[0] for name in below})

    def publish(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Refused, as everything that writes."""
        raise self._read_only("publish", path)

    def create(self, path: str, size_bytes: int, *, aside: str = "") -> ImageSink:
        """Refused."""
        raise self._read_only("create", path)

    def remove(self, path: str) -> None:
        """Refused."""
        raise self._read_only("remove", path)

    def remove_tree(self, prefix: str) -> None:
        """Refused."""
        raise self._read_only("remove", prefix)

    def lock(self, name: str, owner: str) -> Lock:
        """Refused."""
        raise self._read_only("lock", name)

    def _read_only(self, operation: str, path: str) -> StorageError:
        error = StorageError(
            f"{self.url} is a checkpoint of another writer, which is read and never written to",
            operation=operation,
            path=path,
            url=self.url,
        )
        error.retryable = False
        return error


def found_attempt(format_: str) -> str:
    """The name of the attempt that is shown: that of the format."""
    return f"foreign-{format_}"
