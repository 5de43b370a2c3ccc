"""Queues the images that this host writes for an attempt; ``persist.writer`` writes each one."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from holdfast.catalogue import image_path, part_path
from holdfast.errors import ChecksumMismatch
from holdfast.events import ImageDurable, emit
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Manifest, needed
from holdfast.format.values import from_bytes
from holdfast.geometry.codec import has_frozen, has_listings
from holdfast.keeper.jobs import RemoteImages
from holdfast.persist.frozen_parts import FrozenParts, SplitWrite, StoredPart, halves_of
from holdfast.persist.writer import (
    MAX_VALUES_BYTES,
    Arrival,
    ImageSource,
    WholeImage,
    WrittenImage,
    write_image,
)
from holdfast.storage.base import Store

IMAGES_AT_ONCE = 4


@dataclass(slots=True)
class ImageJob:
    """One image to be written to storage."""

    rank: int
    memory: memoryview
    """The whole image; empty if it passes through ``ring``."""
    arrival: Arrival = field(default_factory=Arrival)
    header_xxh3: str = ""
    table_xxh3: str = ""
    ring: ImageSource | None = None
    chunk_bytes: int = 0
    """Size of one write; 0: the size measured as best."""
    source: ImageSource = field(init=False)

    def __post_init__(self) -> None:
        self.source = WholeImage(self.memory) if self.ring is None else self.ring

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole image."""
        return self.source.size_bytes

    def seal(self, header_xxh3: str, table_xxh3: str) -> None:
        """Record the sealed checksums of the captured image."""
        self.header_xxh3, self.table_xxh3 = header_xxh3, table_xxh3
        self.arrival.copied(self.size_bytes)


@dataclass
class HostWrite:
    """The images of one attempt in the memory of one host, to be written to storage."""

    attempt: str
    generation: Generation
    layout_data: bytes
    images: dict[int, ImageJob]
    directory: str
    asked_s: float = field(init=False, default_factory=time.monotonic)

    @property
    def at_once(self) -> int:
        """Return how many images are written at once: of rings all, as each holds up its rank."""
        has_rings = any(image.ring is not None for image in self.images.values())
        return len(self.images) if has_rings else min(IMAGES_AT_ONCE, len(self.images))

    def stop(self, reason: str) -> None:
        """Stop writing."""
        for image in self.images.values():
            image.arrival.abort(reason)

    def fail(self, reason: str) -> None:
        """Stop writing, because one image cannot be written."""
        self.stop(f"another image failed: {reason}")


@dataclass
class PersistJob(HostWrite):
    """One attempt to be written to storage; ``images`` are those of this host."""

    #: Unique to this write: an earlier one, ended by a kill, may have left files.
    directory: str = field(init=False)
    incarnation: Incarnation
    world: int
    layout: str
    shares: Sequence[RemoteImages] = ()
    """The images of other hosts, which their keepers write."""
    is_ring: bool = False
    to_cache: bool = False
    """It is written to the caches of its hosts, and drained from there."""
    is_complete: threading.Event = field(default_factory=threading.Event)
    aborted: str = ""
    is_publishing: bool = False
    broke: Callable[[str], None] = lambda _: None
    """Called at once when an image cannot be written: a copier may wait for space in its ring."""

    def __post_init__(self) -> None:
        self.directory = f"{self.attempt}{secrets.token_hex(3)}"

    def abort(self, reason: str) -> None:
        """Cancel the job because the attempt failed."""
        self.aborted = reason
        self.is_complete.set()
        self.stop(reason)

    def stop(self, reason: str) -> None:
        """Stop writing, here and on other hosts."""
        super().stop(reason)
        for share in self.shares:
            share.abort(reason)

    def fail(self, reason: str) -> None:
        """Stop writing, and report it before all writers have ended."""
        super().fail(reason)
        self.broke(reason)


def write_together(
    job: HostWrite, writes: Iterable[Callable[[], list[StoredPart]]], at_once: int
) -> list[StoredPart]:
    """Run all ``writes`` of a job; raises the first error. Blocks."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(write) for write in writes]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failures = [error for future in done if (error := future.exception()) is not None]
        if failures:
            job.fail(str(failures[0]))
            raise failures[0]
        return [one for future in futures for one in future.result()]


class ImageWriter:
    """Writes images of one root, in one file or two. Usable by several threads at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_told = True
        """False for a cache: what it has is not durable."""
        self.parts = FrozenParts(store)

    def write(self, job: HostWrite, image: ImageJob) -> list[StoredPart]:
        """Write one image; raises storage errors, or an error if the image is not the sealed
        one.
        """
        path = image_path(job.generation, job.directory, image.rank)
        where = f"{path} (step {job.generation.step})"
        started_s = time.monotonic()
        # Only now: the header is written after its file is created.
        apart = image.ring is None and has_frozen(job.layout_data)
        halves = halves_of(image, where) if apart else None
        if halves is not None:
            return [self._write_halves(job, image, halves, path, where)]
        sink = self._store.create(path, image.size_bytes)
        try:
            written = write_image(
                sink, image.source, image.arrival, where, chunk_bytes=image.chunk_bytes
            )
            _require_sealed(image, written, where)
            written_s = time.monotonic()
            sink.finish()
        except BaseException:
            sink.abort()
            raise
        ref = ImageRef(
            path=path,
            rank=image.rank,
            size_bytes=image.size_bytes,
            header_xxh3=image.header_xxh3,
            table_xxh3=image.table_xxh3,
        )
        if self.is_told:
            _tell_durable(job, ref, started_s, finish_s=time.monotonic() - written_s)
        return [StoredPart(ref)]

    def _write_halves(
        self, job: HostWrite, image: ImageJob, halves: SplitWrite, path: str, where: str
    ) -> StoredPart:
        """Store an image in two files; an identical frozen part that is already stored is
        reused.
        """
        started_s = time.monotonic()
        image.source.begin(halves.header)
        apart = part_path(job.generation, job.directory, image.rank)
        stored, written = self.parts.write(image, halves, path, apart)
        _require_sealed(image, written, where)
        for ref in (stored.image, None if stored.is_reused else stored.part):
            if ref is not None and self.is_told:
                _tell_durable(job, ref, started_s)
        return stored


def shown_values(image: ImageJob) -> bytes:
    """Return the values of a written image; empty if they are too large to show."""
    header = image.source.header
    assert header is not None  # it was written
    if header.values.size_bytes > MAX_VALUES_BYTES:
        return b""
    start = header.data_start + header.values.offset
    return bytes(image.source.kept(start, start + header.values.size_bytes))


def manifest_of(job: PersistJob, stored: Sequence[StoredPart]) -> Manifest:
    """Return the manifest of an attempt whose images are all durable."""
    document = _values_document(job)
    images, parts = [one.image for one in stored], [one.part for one in stored if one.part]
    return Manifest(
        run_id=job.incarnation.run_id,
        incarnation=job.generation.incarnation,
        step=job.generation.step,
        attempt=job.attempt,
        parent=job.incarnation.parent,
        world=job.world,
        layout=job.layout,
        images=tuple(sorted(images, key=lambda one: one.rank)),
        parts=tuple(sorted(parts, key=lambda one: one.rank)),
        requires=needed(parts=bool(parts), listings=has_listings(job.layout_data)),
        values=_shown_part(document, "shared"),
        aliases=_shown_part(document, "aliases"),
        created_s=time.time(),
    )


def _values_document(job: PersistJob) -> dict[str, Any]:
    """Return the values all ranks share, for people and tools that only read the manifest."""
    image = job.images.get(0)
    far = b"".join(share.values for share in job.shares)  # from one host at most
    kept = far if image is None else shown_values(image)
    document = from_bytes(kept, "rank 0's image") if kept else None
    return document if isinstance(document, dict) else {}


def _shown_part(document: dict[str, Any], part: str) -> dict[str, Any]:
    """Return a part of such a document; empty where it has none."""
    found = document.get(part)
    return found if isinstance(found, dict) else {}


def _require_sealed(image: ImageJob, written: WrittenImage, where: str) -> None:
    if written != WrittenImage(image.header_xxh3, image.table_xxh3):
        raise ChecksumMismatch(
            f"header or block table of {where} changed after the image was sealed: "
            f"sealed {image.header_xxh3} and {image.table_xxh3}, written "
            f"{written.header_xxh3} and {written.table_xxh3}. It is not published."
        )


def _tell_durable(
    job: HostWrite, ref: ImageRef, started_s: float, *, finish_s: float = 0.0
) -> None:
    emit(
        ImageDurable(
            incarnation=job.generation.incarnation,
            step=job.generation.step,
            rank=ref.rank,
            elapsed_s=time.monotonic() - started_s,
            size_bytes=ref.size_bytes,
            image=ref.path,
            finish_s=finish_s,
            queue_s=max(0.0, started_s - job.asked_s),
        )
    )
