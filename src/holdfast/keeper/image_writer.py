"""An attempt on its way to storage, and how one of its images is written, on whichever host."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.catalogue import image_path, part_path
from holdfast.errors import ChecksumMismatch
from holdfast.events import ImageDurable, emit
from holdfast.format.manifest import Generation, ImageRef, Incarnation
from holdfast.geometry.codec import has_frozen
from holdfast.persist.parts import Halves, Parts, Stored, halves_of
from holdfast.persist.source import MAX_VALUES_BYTES, ImageSource, WholeImage
from holdfast.persist.writer import Arrival, Written, write_image
from holdfast.storage.base import Store

IMAGES_AT_ONCE = 4


@dataclass(slots=True)
class ImageJob:
    """One image on its way to storage."""

    rank: int
    memory: memoryview
    """The whole image; empty when it passes through ``ring``."""
    arrival: Arrival = field(default_factory=Arrival)
    header_xxh3: str = ""
    table_xxh3: str = ""
    ring: ImageSource | None = None
    chunk_bytes: int = 0
    """What it is written in; 0: what was measured best."""
    source: ImageSource = field(init=False)

    def __post_init__(self) -> None:
        self.source = WholeImage(self.memory) if self.ring is None else self.ring

    @property
    def size_bytes(self) -> int:
        """Of the whole image."""
        return self.source.size_bytes

    def seal(self, header_xxh3: str, table_xxh3: str) -> None:
        """The image is captured; these are its sealed checksums."""
        self.header_xxh3, self.table_xxh3 = header_xxh3, table_xxh3
        self.arrival.copied(self.size_bytes)


class Share(Protocol):
    """The images of an attempt that another host's keeper writes."""

    @property
    def values(self) -> bytes:
        """Of rank 0's image, if it is there; known when all is written."""
        ...

    def write(self) -> list[Stored]:
        """Have them written; blocks. PersistFailed when that came to nothing."""
        ...

    def abort(self, reason: str) -> None:
        """They are not wanted any more: ``write`` ends soon, in another thread."""
        ...


@dataclass(slots=True)
class Job:
    """One attempt on its way to storage."""

    attempt: str
    generation: Generation
    incarnation: Incarnation
    world: int
    layout: str
    layout_data: bytes
    images: dict[int, ImageJob]
    """Those that this keeper writes itself."""
    shares: Sequence[Share] = ()
    """Those of other hosts, which their keepers write."""
    is_ring: bool = False
    is_complete: threading.Event = field(default_factory=threading.Event)
    aborted: str = ""
    is_publishing: bool = False
    broke: Callable[[str], None] = lambda _: None
    """Hears at once that an image cannot be written: who copies into a ring waits for that."""
    #: A try of its own: an earlier one, cut off by a kill, may have left files behind.
    directory: str = field(init=False)

    def __post_init__(self) -> None:
        self.directory = f"{self.attempt}{secrets.token_hex(3)}"

    @property
    def has_rings(self) -> bool:
        """Whether some image passes through a ring: its rank is held until it is written."""
        return self.is_ring or any(image.ring is not None for image in self.images.values())

    def abort(self, reason: str) -> None:
        """The attempt came to nothing."""
        self.aborted = reason
        self.is_complete.set()
        self.stop(reason)

    def stop(self, reason: str) -> None:
        """Nothing more of it is to be written."""
        for image in self.images.values():
            image.arrival.abort(reason)
        for share in self.shares:
            share.abort(reason)


class Writable(Protocol):
    """What the writer of an image must know of its attempt."""

    @property
    def generation(self) -> Generation: ...

    @property
    def directory(self) -> str: ...

    @property
    def layout_data(self) -> bytes: ...


class ImageWriter:
    """Writes images of one root, in one file or two. For several threads at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.parts = Parts(store)

    def write(self, job: Writable, image: ImageJob) -> Stored:
        """Write one image; raises what storage says, or when it is not what was sealed."""
        path = image_path(job.generation, job.directory, image.rank)
        where = f"{path} (step {job.generation.step})"
        started_s = time.monotonic()
        # Only then: the header comes later than the file that is made for it.
        apart = image.ring is None and has_frozen(job.layout_data)
        halves = halves_of(image, where) if apart else None
        if halves is not None:
            return self._write_halves(job, image, halves, path, where)
        sink = self._store.create(path, image.size_bytes)
        try:
            written = write_image(
                sink, image.source, image.arrival, where, chunk_bytes=image.chunk_bytes
            )
            _require_sealed(image, written, where)
            sink.finish()
        except BaseException:
            sink.abort()
            raise
        ref = ImageRef(
            path=path, rank=image.rank, size_bytes=image.size_bytes,
            header_xxh3=image.header_xxh3, table_xxh3=image.table_xxh3,
        )  # fmt: skip
        _tell_durable(job, ref, started_s)
        return Stored(ref)

    def _write_halves(
        self, job: Writable, image: ImageJob, halves: Halves, path: str, where: str
    ) -> Stored:
        """Store an image in two files; its frozen part, if one like it is stored, not again."""
        started_s = time.monotonic()
        image.source.begin(halves.header)
        apart = part_path(job.generation, job.directory, image.rank)
        stored, written = self.parts.write(image, halves, path, apart)
        _require_sealed(image, written, where)
        for ref in (stored.image, None if stored.is_reused else stored.part):
            if ref is not None:
                _tell_durable(job, ref, started_s)
        return stored


def shown_values(image: ImageJob) -> bytes:
    """The values in an image that is written; empty when they are too many to be shown."""
    header = image.source.header
    assert header is not None  # it was written
    if header.values.size_bytes > MAX_VALUES_BYTES:
        return b""
    start = header.data_start + header.values.offset
    return bytes(image.source.kept(start, start + header.values.size_bytes))


def _require_sealed(image: ImageJob, written: Written, where: str) -> None:
    if written != Written(image.header_xxh3, image.table_xxh3):
        raise ChecksumMismatch(
            f"header or block table of {where} changed after the image was sealed: "
            f"sealed {image.header_xxh3} and {image.table_xxh3}, written "
            f"{written.header_xxh3} and {written.table_xxh3}. It is not published."
        )


def _tell_durable(job: Writable, ref: ImageRef, started_s: float) -> None:
    emit(ImageDurable(
        incarnation=job.generation.incarnation, step=job.generation.step, rank=ref.rank,
        elapsed_s=time.monotonic() - started_s, size_bytes=ref.size_bytes, image=ref.path,
    ))  # fmt: skip
