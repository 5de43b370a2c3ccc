"""Carries out the coordinator's orders on one host, its own or another, and reports the results.

On its own host the coordinator calls the agent directly; on another host the follower does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.coordinator.actions import AllocateRings, AllocateSlots, RemoveSlot
from holdfast.coordinator.slots import SlotWriter, number_of
from holdfast.errors import ArenaError, HoldfastError, PersistFailed
from holdfast.format.manifest import AttemptId, ImageId
from holdfast.geometry.layout import Layout, inflate
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.connections import TrainerConnection
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.cache_agent import CacheAgent
from holdfast.keeper.image_writer import (
    HostWrite,
    ImageJob,
    ImageWriter,
    shown_values,
    write_together,
)
from holdfast.keeper.jobs import Background
from holdfast.keeper.published_images import PublishedImages
from holdfast.keeper.rank_relay import grant_slots
from holdfast.keeper.slot_allocator import SlotAllocator
from holdfast.persist import commit
from holdfast.persist.frozen_parts import StoredPart
from holdfast.persist.writer import RingImage
from holdfast.protocol import messages as m
from holdfast.protocol.arena import is_running
from holdfast.protocol.facts import Fact, Report, ignore
from holdfast.protocol.image_plan import ImageSizes, chunk_bytes
from holdfast.storage.base import Store

if TYPE_CHECKING:  # a run on one host does not need it
    from holdfast.keeper.parity.worker import ParityWorker


class HostAgent:
    """Slots, images and parity of this host, for whoever coordinates. On the keeper's loop."""

    writes: WriteService

    def __init__(self, memory: ArenaFiles, background: Background) -> None:
        self._memory, self._background = memory, background
        self.published = PublishedImages(memory)
        self.allocator = SlotAllocator(memory, background)
        self.caches = CacheAgent(memory, background)
        self.parity: ParityWorker | None = None
        self.hosts: Sequence[m.HostEntry] = ()
        """Hosts of the incarnation that this keeper has a part in, or will take over."""
        self.serve(ignore)

    def serve(
        self,
        report: Report,
        writer_of: Callable[[int], SlotWriter | None] = lambda _: None,
        trainer_of: Callable[[int], TrainerConnection | None] = lambda _: None,
        is_awaited: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Report to this coordinator from now on; what another ordered before is reported to none.

        The functions return process and connection by the numbers in ``GrantSlots.lines``, and True
        for a slot that a save waits for.
        """
        self.report = report
        self._writer_of, self._trainer_of = writer_of, trainer_of
        self.allocator.serve(report, is_awaited)
        self.caches.serve(report)
        self._watched: dict[int, host_messages.WatchWriter] = {}
        self._layout_error = self._awaited_layout = ""
        self._waiting_plan: host_messages.SizeImages | None = None
        """An order to plan images under the layout whose bytes were asked for."""

    def stop(self, why: str) -> None:
        """Cancel what was ordered: the coordinator is lost."""
        self.writes.stop_all(why)
        if self.parity is not None:
            self.parity.cancel(why)
            self.parity.rebuilding.cancel(why)
        self.serve(ignore)

    def do(self, fact: Any) -> None:
        """Carry out an order."""
        match fact:
            case AllocateSlots():
                slot = number_of(fact.slot)
                self.allocator.make(slot, fact.capacity_bytes, fact.leave_bytes)
            case AllocateRings(needs):
                here = tuple(need._replace(slot=number_of(need.slot)) for need in needs)
                self.allocator.make_rings(here)
            case RemoveSlot(slot):
                self.published.withdraw(number_of(slot))
                self.allocator.remove(number_of(slot))
            case host_messages.GrantSlots():
                for slot in fact.slots:  # its last writer has reported its end by itself
                    self._watched.pop(slot, None)
                published = self.published
                grant_slots(fact, self._memory, published, self._writer_of, self._trainer_of)
            case host_messages.RecordLayout():
                self._record_layout(fact)
            case host_messages.SizeImages():
                self._size_images(fact)
            case host_messages.WatchWriter(slot=slot):
                self._watched[slot] = fact
            case host_messages.WriteImage():
                self.writes.start(fact, self.report)
            case host_messages.CancelWrite(directory=directory, reason=reason):
                self.writes.stop(directory, reason)
                self.caches.cancel(directory)
            case _ if self.parity is not None:
                self.parity.do(fact, self.hosts, self.report)

    def sealed(
        self, of: AttemptId, images: Iterable[tuple[int, ImageId]], *, is_ring: bool
    ) -> None:
        """Have captured images, by slot, written without waiting, and serve them to other hosts."""
        for slot, image in images:
            self.writes.sealed(of.attempt, image)
            if not is_ring:
                self.published.publish(slot, of, image)

    def _record_layout(self, fact: host_messages.RecordLayout) -> None:
        """Store a layout, or ask for its bytes, if this host has not got them."""
        self._awaited_layout = ""
        planning, self._waiting_plan = self._waiting_plan, None
        try:
            is_here = not fact.deflated
            data = self._memory.layout(fact.hash) if is_here else inflate(fact.deflated, fact.hash)
        except ArenaError:  # its bytes are sent on their own, before any grant that names it
            self._awaited_layout = fact.hash
            self.report(host_messages.LayoutMissing(hash=fact.hash))
        else:
            self.store_layout(fact.hash, data, fact.used, fact.tables)
        if planning is not None:
            self._size_images(planning)

    def store_layout(self, hash_: str, data: bytes, used: Collection[str], tables: str) -> None:
        """Store a layout that was agreed from ``tables``, and delete those that are not
        ``used``.
        """
        self._layout_error = ""
        try:
            self._memory.store_layout(hash_, data, used, tables)
        except OSError as error:
            where = self._memory.directory
            reason = f"no room for the layout: {error.strerror}. Free some in {where}"
            self._layout_error = reason
            self.report(host_messages.LayoutFailed(hash=hash_, reason=reason))

    def _size_images(self, fact: host_messages.SizeImages) -> None:
        if fact.layout == self._awaited_layout:
            self._waiting_plan = fact
            return
        try:
            data = self._memory.layout(fact.layout)
        except HoldfastError as error:
            unknown = ImageSizes({}, self._layout_error or str(error))
            self.report(host_messages.ImagesPlanned(layout=fact.layout, sizes=unknown))
        else:
            self.plan_images(fact.layout, data, fact.ranks)

    def plan_images(self, hash_: str, layout: Layout | bytes, ranks: Iterable[int]) -> None:
        """Plan the images of these ranks off the loop, and report their sizes."""

        async def plan() -> None:
            sizes = await self._background.plan_images(layout, ranks)
            self.report(host_messages.ImagesPlanned(layout=hash_, sizes=sizes))

        self._background.spawn(plan())

    def tick(self) -> None:
        """Report watched slots that nobody can write to any more."""
        for slot, each in list(self._watched.items()):
            is_sealed = self._memory.is_sealed(slot, each.attempt)
            if is_sealed or (each.writer.pid and not is_running(*each.writer)):
                del self._watched[slot]
                self.report(host_messages.WriterGone(slot=slot, attempt=each.attempt))


class _Target(NamedTuple):
    """Where images are written: the root, or this host's cache."""

    store: Store
    writer: ImageWriter
    root_id: str


class WriteService:
    """Writes in progress, by directory. On the keeper's loop; each has a thread of its own."""

    def __init__(
        self,
        memory: ArenaFiles,
        store: Store,
        background: Background,
        caches: CacheAgent | None = None,
    ) -> None:
        self._memory, self._background, self._caches = memory, background, caches
        self._root = _Target(store, ImageWriter(store), memory.root_id)
        self._under_way: dict[str, HostWrite] = {}

    @property
    def is_busy(self) -> bool:
        """Return True if anything is being written."""
        return bool(self._under_way)

    @property
    def under_way(self) -> list[HostWrite]:
        """Return the writes that wait or are in progress."""
        return list(self._under_way.values())

    def begin(self, job: HostWrite) -> None:
        """Pass on to ``job`` what becomes of its images in memory, until it ends."""
        self._under_way[job.directory] = job

    def end(self, job: HostWrite) -> None:
        """Release a job's views of its slots: nobody reads them any more."""
        self._under_way.pop(job.directory, None)
        for image in job.images.values():
            image.source.release()

    def start(self, order: host_messages.WriteImage, report: Report) -> None:
        """Start writing these images; ``report`` is called for each image, and for the end."""
        of = order.attempt_id
        try:
            target = self._target(order)
            images, layout_data = self.images(order, report), self._memory.layout(of.layout)
        except (HoldfastError, KeyError) as error:
            reason = str(error) if isinstance(error, HoldfastError) else "a slot of it is not there"
            report(host_messages.WriteEnded(directory=order.directory, reason=reason))
            return
        job = HostWrite(of.attempt, of.generation, layout_data, images, order.directory)
        self.begin(job)
        thread = threading.Thread(
            target=self._run, args=(job, report, target), name="holdfast-persist", daemon=True
        )
        thread.start()

    def _target(self, order: host_messages.WriteImage) -> _Target:
        if not order.to_cache:
            return self._root
        tier = None if self._caches is None else self._caches.begin_write(order)
        if tier is None:
            raise PersistFailed("its cache takes nothing now")
        return _Target(tier.store, tier.writer, "")

    def images(self, order: host_messages.WriteImage, report: Report) -> dict[int, ImageJob]:
        """Return the images to be written, by rank; ``report`` is called with space freed in rings.

        Raises ArenaError for a slot that holds another image.
        """
        attempt = order.attempt_id.attempt
        return {each.image.rank: self._image(attempt, each, report) for each in order.images}

    def _image(self, attempt: str, each: host_messages.ImageOrder, report: Report) -> ImageJob:
        file, rank = self._memory.files[each.slot], each.image.rank
        record = file.read_record()
        if record is None or (record.attempt, record.rank) != (attempt, rank):
            raise ArenaError(f"slot {each.slot} holds no image of rank {rank} in attempt {attempt}")
        size_bytes, start = each.image.image_bytes, file.capacity_bytes - each.ring_bytes
        if not 0 < start <= file.capacity_bytes or (not each.ring_bytes and size_bytes > start):
            raise ArenaError(f"slot {each.slot} has no room for the image it is said to hold")

        def freed(size_bytes: int) -> None:
            message = host_messages.RingFreed(attempt=attempt, rank=rank, size_bytes=size_bytes)
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

    def _run(self, job: HostWrite, report: Report, target: _Target) -> None:
        """Write the images and report the end; on a thread."""

        def tell(fact: Fact) -> None:
            self._background.from_thread(lambda: report(fact))

        def write(image: ImageJob) -> list[StoredPart]:
            (stored,) = target.writer.write(job, image)
            tell(
                host_messages.ImageWritten(
                    directory=job.directory,
                    stored=stored,
                    values=b"" if image.rank else shown_values(image),
                )
            )
            return [stored]

        reason = ""
        try:
            # The first file of an image must not recreate a root that has vanished.
            commit.require_root(target.store, self._memory.run_id, target.root_id)
            target.writer.parts.forget()
            write_together(job, [partial(write, one) for one in job.images.values()], job.at_once)
        except Exception as error:
            known = isinstance(error, HoldfastError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
        self._background.from_thread(lambda: self.end(job))
        tell(host_messages.WriteEnded(directory=job.directory, reason=reason))

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
