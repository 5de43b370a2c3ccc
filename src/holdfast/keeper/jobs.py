"""Persist jobs in progress: creates them, and passes on progress and seals of captures."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.layouts import Agreement, Tables, agree_layout
from holdfast.coordinator.slots import host_of
from holdfast.errors import PersistFailed
from holdfast.format.manifest import Generation, ImageId, Incarnation
from holdfast.geometry.layout import Layout
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.image_writer import ImageJob, PersistJob
from holdfast.persist.frozen_parts import StoredPart
from holdfast.persist.writer import RingImage
from holdfast.protocol.image_plan import ImageSizes, chunk_bytes, plan_sizes

# Stands for the images of an attempt that another host's keeper writes, toward the persister.


STALL_S = 7200.0
"""Timeout without a receipt or ring progress: an image of hundreds of GB takes its time."""
END_S = 60.0
"""Timeout for ending after cancellation."""
_LOOK_S = 0.5


class RemoteImages:
    """The images of one attempt on one other host. ``begin`` and ``stop`` are called on the
    loop.
    """

    def __init__(
        self,
        host: str,
        ranks: frozenset[int],
        begin: Callable[[], None],
        stop: Callable[[str], None],
        *,
        stall_s: float = STALL_S,
        end_s: float = END_S,
    ) -> None:
        self.host, self.ranks = host, ranks
        self.stored: dict[int, StoredPart] = {}
        self.values = b""
        """Values of rank 0's image, if it is among them."""
        self._begin, self._stop = begin, stop
        self._stall_s, self._end_s = stall_s, end_s
        self._moved_s = time.monotonic()
        self._is_aborted = False
        self._ended = threading.Event()
        self._failure = ""

    def write(self) -> list[StoredPart]:
        """Have the images written; see ``image_writer.RemotePart``. On a thread of the
        persister.
        """
        self.progressed()
        self._begin()
        self._wait()
        if self._failure:
            raise PersistFailed(self._failure)
        if self.stored.keys() != self.ranks:
            missing = sorted(self.ranks - self.stored.keys())
            raise PersistFailed(f"host {self.host} gave no receipt for ranks {missing}")
        return list(self.stored.values())

    def _wait(self) -> None:
        """Wait until all is written, or no progress is made for too long: a keeper may live and yet
        hang.

        Raises PersistFailed on a stall.
        """
        while not self._ended.wait(_LOOK_S):
            quiet_s = time.monotonic() - self._moved_s
            if quiet_s > (self._end_s if self._is_aborted else self._stall_s):
                self._stop("nothing was heard of it for too long")
                raise PersistFailed(
                    f"host {self.host} has written nothing for {quiet_s:.0f} s: look at its keeper "
                    "and at its way to storage"
                )

    def progressed(self) -> None:
        """Record progress."""
        self._moved_s = time.monotonic()

    def abort(self, reason: str) -> None:
        """Cancel the write; see ``image_writer.RemotePart``."""
        if not self._ended.is_set():
            if not self._is_aborted:
                self._is_aborted = True
                self.progressed()  # restarts the timeout: a short time remains to end
            self._stop(reason)

    def receive(self, stored: StoredPart, values: bytes) -> None:
        """Handle the receipt for one image."""
        self.progressed()
        if stored.image.rank in self.ranks:
            self.stored[stored.image.rank] = stored
            self.values = self.values or values

    def end(self, reason: str = "") -> None:
        """Handle the end of the write; ``reason``: why it is incomplete, "" if it is complete."""
        if not self._ended.is_set():
            self._failure = f"host {self.host}: {reason}" if reason else ""
            self._ended.set()


MakeShare = Callable[[PersistJob, int, frozenset[int]], RemoteImages]


class Jobs:
    """Jobs between coordinator and persister; lives on the keeper's loop.

    ``share(job, host, ranks)`` creates the proxy for the images of another host.
    """

    def __init__(
        self,
        memory: ArenaFiles,
        coordinator: Coordinator,
        freed: Callable[[str, int, int], None],
        broke: Callable[[str, str], None],
        share: MakeShare,
    ) -> None:
        self._memory = memory
        self._coordinator = coordinator
        self._freed, self._broke = freed, broke
        self._share = share
        self._jobs: dict[str, PersistJob] = {}

    def start(self, attempt: Attempt, incarnation: Incarnation) -> PersistJob:
        """Create a job for ``attempt``, with the seals of images that are sealed already."""
        images = {}
        far: dict[int, set[int]] = {}
        for rank, slot_id in attempt.slots.items():
            if host_of(slot_id):
                far.setdefault(host_of(slot_id), set()).add(rank)
            else:
                images[rank] = self._image(attempt, rank, slot_id)
        job = PersistJob(
            attempt=attempt.id,
            generation=Generation(attempt.incarnation, attempt.step),
            incarnation=incarnation,
            world=attempt.world,
            layout=attempt.layout,
            layout_data=self._memory.layout(attempt.layout),
            images=images,
            is_ring=attempt.is_ring,
        )
        job.shares = [self._share(job, host, frozenset(ranks)) for host, ranks in far.items()]
        job.broke = lambda reason: self._broke(attempt.id, reason)
        self._jobs[attempt.id] = job
        self.sealed(attempt.id)
        return job

    def _image(self, attempt: Attempt, rank: int, slot_id: int) -> ImageJob:
        slot = self._coordinator.slots[slot_id]
        return image_job(
            self._memory,
            slot_id,
            slot.image,
            slot.ring_bytes,
            lambda size_bytes: self._freed(attempt.id, rank, size_bytes),
        )

    def copied(self, attempt_id: str, rank: int, size_bytes: int) -> None:
        """Record that the beginning of one image is final."""
        job = self._jobs.get(attempt_id)
        if job is not None and rank in job.images:
            job.images[rank].arrival.copied(size_bytes)

    def sealed(self, attempt_id: str) -> None:
        """Pass the seals of newly sealed images to the attempt's job."""
        job, attempt = self._jobs.get(attempt_id), self._coordinator.attempts.get(attempt_id)
        if job is None or attempt is None:
            return
        for rank in attempt.sealed & job.images.keys():
            slot = self._coordinator.slots[attempt.slots[rank]]
            job.images[rank].seal(slot.header_xxh3, slot.table_xxh3)
        if attempt.phase in ("complete", "draining"):
            job.is_complete.set()

    def abort(self, attempt_id: str) -> bool:
        """Cancel the job of a failed capture; return True if storage had begun with it."""
        job = self._jobs.get(attempt_id)
        if job is not None:
            job.abort("the capture came to nothing")
        return job is not None

    def abort_all(self, reason: str) -> None:
        """Cancel all jobs, because another keeper decides from now on."""
        for job in self._jobs.values():
            if not job.is_publishing:
                job.abort(reason)

    def abort_shared(self, reason: str) -> None:
        """Cancel all jobs with images on other hosts, because hosts are renumbered."""
        for job in self._jobs.values():
            if job.shares and not job.is_publishing:
                job.abort(reason)

    def ended(self, attempt_id: str) -> None:
        """Forget a job that the persister has finished; its views of the slots are released."""
        job = self._jobs.pop(attempt_id, None)
        if job is not None:
            for image in job.images.values():
                image.source.release()


def image_job(
    memory: ArenaFiles,
    number: int,
    image: ImageId,
    ring_bytes: int,
    freed: Callable[[int], None],
) -> ImageJob:
    """Return the write job for the image in a slot of this host; ``freed`` as in ``RingImage``."""
    file = memory.files[number]
    if not ring_bytes:
        return ImageJob(image.rank, file.image[: image.image_bytes])
    start = file.capacity_bytes - ring_bytes
    ring = RingImage(
        file.image[:start], file.image[start : file.capacity_bytes], image.image_bytes, freed
    )
    return ImageJob(image.rank, memoryview(b""), ring=ring, chunk_bytes=chunk_bytes(ring_bytes))


# Runs blocking work beside the keeper's event loop, and returns its results to the loop.


#: So many new objects are passed through in 10 ms.
_MANY_OBJECTS = 100_000


class Background:
    """Two helper threads, and background tasks. Created on the loop it serves."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._helpers = ThreadPoolExecutor(2, thread_name_prefix="holdfast-keeper")
        self._computing = 0

    async def in_thread(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Run a function that may block on a helper thread, and return its result."""
        return await self._loop.run_in_executor(self._helpers, function, *arguments)

    async def agree_layout(
        self,
        find: Callable[[Tables], bytes | None],
        tables: Tables,
        held: Mapping[str, bytes],
    ) -> Agreement:
        """Agree the layout of these tables on a helper thread; the reason, where that is
        impossible.
        """
        try:
            return cast(Agreement, await self._compute(agree_layout, find, tables, held))
        except RuntimeError as error:  # no thread can be started
            return Agreement(reason=f"its layout could not be agreed: {error}")

    async def plan_images(self, layout: Layout | bytes, ranks: Iterable[int]) -> ImageSizes:
        """Plan these ranks' images on a helper thread; the reason, where that is impossible."""
        try:
            return cast(ImageSizes, await self._compute(plan_sizes, layout, ranks))
        except RuntimeError as error:  # no thread can be started
            return ImageSizes({}, f"its images could not be planned: {error}")

    async def _compute(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Run a function that makes many objects on a helper thread.

        The garbage collector holds all threads while it passes through objects, for 0.1 s if they
        are the leaves of a large layout: it waits until then, and passes through those no more.
        """
        self._computing += 1
        gc.disable()
        try:
            return await self.in_thread(function, *arguments)
        finally:
            self._computing -= 1
            if not self._computing:
                if gc.get_count()[0] > _MANY_OBJECTS:
                    gc.freeze()
                gc.enable()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop; its failure is printed to the keeper's log."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(_complain)

    def from_thread(self, function: Callable[[], None]) -> None:
        """Schedule a call of ``function`` on the loop, from another thread."""
        self._loop.call_soon_threadsafe(function)


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        traceback.print_exception(task.exception(), file=sys.stderr)
