"""Writes this host's images for a coordinator on another host, which publishes the checkpoint."""

from __future__ import annotations

import threading
from functools import partial

from holdfast.errors import ArenaError, HoldfastError
from holdfast.format.manifest import ImageId
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import messages
from holdfast.keeper.hosts.messages import Fact, Report
from holdfast.keeper.image_writer import (
    HostWrite,
    ImageJob,
    ImageWriter,
    shown_values,
    write_together,
)
from holdfast.keeper.jobs import Background
from holdfast.persist import commit
from holdfast.persist.frozen_parts import StoredPart
from holdfast.persist.writer import RingImage
from holdfast.protocol.image_plan import chunk_bytes
from holdfast.storage.base import Store


class RemoteWriteService:
    """Writes in progress, by directory. On the keeper's loop; each has a thread of its own."""

    def __init__(self, memory: ArenaFiles, store: Store, background: Background) -> None:
        self._memory, self._store, self._background = memory, store, background
        self._writer = ImageWriter(store)
        self._under_way: dict[str, HostWrite] = {}

    @property
    def is_busy(self) -> bool:
        """Return True if anything is being written."""
        return bool(self._under_way)

    def begin(self, job: HostWrite) -> None:
        """Pass on to ``job`` what becomes of its images in memory, until it ends."""
        self._under_way[job.directory] = job

    def end(self, job: HostWrite) -> None:
        """Release a job's views of its slots: nobody reads them any more."""
        self._under_way.pop(job.directory, None)
        for image in job.images.values():
            image.source.release()

    def start(self, order: messages.WriteImage, report: Report) -> None:
        """Start writing these images; ``report`` is called for each image, and for the end."""
        of = order.attempt_id
        try:
            images, layout_data = self.images(order, report), self._memory.layout(of.layout)
        except (HoldfastError, KeyError) as error:
            reason = str(error) if isinstance(error, HoldfastError) else "a slot of it is not there"
            report(messages.WriteEnded(directory=order.directory, reason=reason))
            return
        job = HostWrite(of.attempt, of.generation, layout_data, images, order.directory)
        self.begin(job)
        thread = threading.Thread(
            target=self._run, args=(job, report), name="holdfast-persist", daemon=True
        )
        thread.start()

    def images(self, order: messages.WriteImage, report: Report) -> dict[int, ImageJob]:
        """Return the images to be written, by rank; ``report`` is called with space freed in rings.

        Raises ArenaError for a slot that holds another image.
        """
        attempt = order.attempt_id.attempt
        return {each.image.rank: self._image(attempt, each, report) for each in order.images}

    def _image(self, attempt: str, each: messages.ImageOrder, report: Report) -> ImageJob:
        file, rank = self._memory.files[each.slot], each.image.rank
        record = file.read_record()
        if record is None or (record.attempt, record.rank) != (attempt, rank):
            raise ArenaError(f"slot {each.slot} holds no image of rank {rank} in attempt {attempt}")
        size_bytes, start = each.image.image_bytes, file.capacity_bytes - each.ring_bytes
        if not 0 < start <= file.capacity_bytes or (not each.ring_bytes and size_bytes > start):
            raise ArenaError(f"slot {each.slot} has no room for the image it is said to hold")

        def freed(size_bytes: int) -> None:
            message = messages.RingFreed(attempt=attempt, rank=rank, size_bytes=size_bytes)
            self._background.from_thread(lambda: report(message))

        if each.ring_bytes:
            halves = file.image[:start], file.image[start : file.capacity_bytes]
            ring = RingImage(*halves, size_bytes, freed)
            chunk = chunk_bytes(each.ring_bytes)
            image = ImageJob(rank, memoryview(b""), ring=ring, chunk_bytes=chunk)
        else:
            image = ImageJob(rank, file.image[:size_bytes])
        if each.is_sealed:
            image.seal(each.image.header_xxh3, each.image.table_xxh3)
        return image

    def _run(self, job: HostWrite, report: Report) -> None:
        """Write the images and report the end; on a thread."""

        def tell(fact: Fact) -> None:
            self._background.from_thread(lambda: report(fact))

        def write(image: ImageJob) -> list[StoredPart]:
            (stored,) = self._writer.write(job, image)
            tell(
                messages.ImageWritten(
                    directory=job.directory,
                    image=stored.image,
                    part=stored.part,
                    is_reused=stored.is_reused,
                    values=b"" if image.rank else shown_values(image),
                )
            )
            return [stored]

        reason = ""
        try:
            # The first file of an image must not recreate a root that has vanished.
            commit.require_root(self._store, self._memory.run_id, self._memory.root_id)
            self._writer.parts.forget()
            write_together(job, [partial(write, one) for one in job.images.values()], job.at_once)
        except Exception as error:
            known = isinstance(error, HoldfastError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
        self._background.from_thread(lambda: self.end(job))
        tell(messages.WriteEnded(directory=job.directory, reason=reason))

    def copied(self, attempt: str, rank: int, size_bytes: int) -> None:
        """Record that the beginning of an image is final."""
        for job in self._under_way.values():
            if job.attempt == attempt and rank in job.images:
                job.images[rank].arrival.copied(size_bytes)

    def sealed(self, attempt: str, image: ImageId) -> None:
        """Record that an image is captured."""
        for job in self._under_way.values():
            if job.attempt == attempt and image.rank in job.images:
                job.images[image.rank].seal(image.header_xxh3, image.table_xxh3)

    def stop(self, directory: str, reason: str) -> None:
        """Cancel the write into this directory."""
        if directory in self._under_way:
            self._under_way[directory].stop(reason)

    def stop_all(self, reason: str) -> None:
        """Cancel all writes."""
        for job in self._under_way.values():
            job.stop(reason)
