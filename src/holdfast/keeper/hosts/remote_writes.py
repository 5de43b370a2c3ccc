"""Writes this host's images for a coordinator on another host, which publishes the checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from holdfast.errors import ArenaError, HoldfastError
from holdfast.format.manifest import AttemptId, ImageId
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import messages
from holdfast.keeper.hosts.messages import Report
from holdfast.keeper.image_writer import IMAGES_AT_ONCE, ImageJob, ImageWriter, shown_values
from holdfast.keeper.jobs import Background, image_job
from holdfast.persist import commit
from holdfast.storage.base import Store


class RemoteWrite:
    """The images of one attempt that are being written."""

    def __init__(
        self, order: messages.WriteImage, images: dict[int, ImageJob], layout_data: bytes
    ) -> None:
        self.attempt, self.directory = order.attempt_id.attempt, order.directory
        self.generation = order.attempt_id.generation
        self.layout_data = layout_data
        self.images = images

    def stop(self, reason: str) -> None:
        """Stop writing."""
        for image in self.images.values():
            image.arrival.abort(reason)

    def run(self, writer: ImageWriter, written: Callable[[messages.ImageWritten], None]) -> None:
        """Write all images; raises the first error. Blocks."""
        has_rings = any(image.ring is not None for image in self.images.values())
        count = len(self.images) if has_rings else min(IMAGES_AT_ONCE, len(self.images))

        def write(image: ImageJob) -> None:
            stored = writer.write(self, image)
            written(
                messages.ImageWritten(
                    directory=self.directory,
                    image=stored.image,
                    part=stored.part,
                    is_reused=stored.is_reused,
                    values=b"" if image.rank else shown_values(image),
                )
            )

        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(write, image) for image in self.images.values()]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failures = [error for future in done if (error := future.exception()) is not None]
            if failures:
                self.stop(f"another image failed: {failures[0]}")
                raise failures[0]


class RemoteWriteService:
    """Writes in progress, by directory. On the keeper's loop; each has a thread of its own."""

    def __init__(self, memory: ArenaFiles, store: Store, background: Background) -> None:
        self._memory, self._store, self._background = memory, store, background
        self._writer = ImageWriter(store)
        self._under_way: dict[str, RemoteWrite] = {}

    @property
    def is_busy(self) -> bool:
        """Return True if anything is being written."""
        return bool(self._under_way)

    def start(self, order: messages.WriteImage, report: Report) -> None:
        """Start writing these images; ``report`` is called for each image, and for the end."""
        try:
            writing = self._prepare(order, report)
        except (HoldfastError, KeyError) as error:
            reason = str(error) if isinstance(error, HoldfastError) else "a slot of it is not there"
            report(messages.WriteEnded(directory=order.directory, reason=reason))
            return
        self._under_way[order.directory] = writing
        thread = threading.Thread(
            target=self._run, args=(writing, report), name="holdfast-persist", daemon=True
        )
        thread.start()

    def _prepare(self, order: messages.WriteImage, report: Report) -> RemoteWrite:
        images: dict[int, ImageJob] = {}
        for each in order.images:
            images[each.image.rank] = self._image(order.attempt_id.attempt, each, report)
        return RemoteWrite(order, images, self._memory.layout(order.attempt_id.layout))

    def _image(self, attempt: str, each: messages.ImageOrder, report: Report) -> ImageJob:
        file, rank = self._memory.files[each.slot], each.image.rank
        record = file.read_record()
        if record is None or (record.attempt, record.rank) != (attempt, rank):
            raise ArenaError(f"slot {each.slot} holds no image of rank {rank} in attempt {attempt}")
        capacity_bytes = file.capacity_bytes
        if not (0 <= each.ring_bytes < capacity_bytes) or (
            not each.ring_bytes and each.image.image_bytes > capacity_bytes
        ):
            raise ArenaError(f"slot {each.slot} has no room for the image it is said to hold")

        def freed(size_bytes: int) -> None:
            message = messages.RingFreed(attempt=attempt, rank=rank, size_bytes=size_bytes)
            self._background.from_thread(lambda: report(message))

        image = image_job(self._memory, each.slot, each.image, each.ring_bytes, freed)
        if each.is_sealed:
            image.seal(each.image.header_xxh3, each.image.table_xxh3)
        return image

    def _run(self, writing: RemoteWrite, report: Report) -> None:
        """Write the images and report the end; on a thread."""
        reason = ""
        try:
            # The first file of an image must not recreate a root that has vanished.
            commit.require_root(self._store, self._memory.run_id, self._memory.root_id)
            self._writer.parts.forget()
            writing.run(
                self._writer, lambda said: self._background.from_thread(lambda: report(said))
            )
        except Exception as error:
            known = isinstance(error, HoldfastError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
        self._background.from_thread(lambda: self._settle(writing, reason, report))

    def _settle(self, writing: RemoteWrite, reason: str, report: Report) -> None:
        self._under_way.pop(writing.directory, None)
        for image in writing.images.values():
            image.source.release()
        report(messages.WriteEnded(directory=writing.directory, reason=reason))

    def copied(self, attempt: str, rank: int, size_bytes: int) -> None:
        """Record that the beginning of an image is final."""
        for writing in self._under_way.values():
            if writing.attempt == attempt and rank in writing.images:
                writing.images[rank].arrival.copied(size_bytes)

    def sealed(self, attempt_id: AttemptId, image: ImageId) -> None:
        """Record that an image is captured."""
        for writing in self._under_way.values():
            if writing.attempt == attempt_id.attempt and image.rank in writing.images:
                writing.images[image.rank].seal(image.header_xxh3, image.table_xxh3)

    def stop(self, directory: str, reason: str) -> None:
        """Cancel the write into this directory."""
        writing = self._under_way.get(directory)
        if writing is not None:
            writing.stop(reason)

    def stop_all(self, reason: str) -> None:
        """Cancel all writes."""
        for directory in self._under_way:
            self.stop(directory, reason)
