"""The attempts on their way to storage, and handing on to them what is captured meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper.images import ImageJob, Job
from holdfast.keeper.memory import Memory
from holdfast.keeper.shares import FarShare
from holdfast.persist.source import RingImage
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.handoff import Coordinator
from holdfast.snapshot.rings import chunk_bytes
from holdfast.snapshot.slots import host_of

MakeShare = Callable[[Job, int, frozenset[int]], FarShare]


class Jobs:
    """Between coordinator and persister; lives on the keeper's loop.

    ``share(job, host, ranks)`` makes what stands for the images of another host.
    """

    def __init__(
        self, memory: Memory, coordinator: Coordinator, freed: Callable[[str, int, int], None],
        broke: Callable[[str, str], None], share: MakeShare,
    ) -> None:  # fmt: skip
        self._memory = memory
        self._coordinator = coordinator
        self._freed, self._broke = freed, broke
        self._share = share
        self._jobs: dict[str, Job] = {}

    def start(self, attempt: Attempt, incarnation: Incarnation) -> Job:
        """A job for ``attempt``, told of all that is sealed already."""
        images = {}
        far: dict[int, set[int]] = {}
        for rank, slot_id in attempt.slots.items():
            if host_of(slot_id):
                far.setdefault(host_of(slot_id), set()).add(rank)
            else:
                images[rank] = self._image(attempt, rank, slot_id)
        job = Job(
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
            self._memory, slot_id, rank, slot.image_bytes, slot.ring_bytes,
            lambda size_bytes: self._freed(attempt.id, rank, size_bytes),
        )  # fmt: skip

    def copied(self, attempt_id: str, rank: int, size_bytes: int) -> None:
        """The beginning of one image is final."""
        job = self._jobs.get(attempt_id)
        if job is not None and rank in job.images:
            job.images[rank].arrival.copied(size_bytes)

    def sealed(self, attempt_id: str) -> None:
        """Some image of the attempt was sealed: hand on what is."""
        job, attempt = self._jobs.get(attempt_id), self._coordinator.attempts.get(attempt_id)
        if job is None or attempt is None:
            return
        for rank in attempt.sealed & job.images.keys():
            slot = self._coordinator.slots[attempt.slots[rank]]
            job.images[rank].seal(slot.header_xxh3, slot.table_xxh3)
        if attempt.phase in ("complete", "draining"):
            job.is_complete.set()

    def abort(self, attempt_id: str) -> bool:
        """The capture came to nothing; whether storage had begun with it."""
        job = self._jobs.get(attempt_id)
        if job is not None:
            job.abort("the capture came to nothing")
        return job is not None

    def abort_all(self, reason: str) -> None:
        """Another keeper decides from now on."""
        for job in self._jobs.values():
            if not job.is_publishing:
                job.abort(reason)

    def abort_shared(self, reason: str) -> None:
        """Hosts are numbered anew: what others write is not theirs to be told of any more."""
        for job in self._jobs.values():
            if job.shares and not job.is_publishing:
                job.abort(reason)

    def ended(self, attempt_id: str) -> None:
        """The persister is done with it; its views of the slots are let go."""
        job = self._jobs.pop(attempt_id, None)
        if job is not None:
            for image in job.images.values():
                image.source.release()


def image_job(
    memory: Memory, number: int, rank: int, image_bytes: int, ring_bytes: int,
    freed: Callable[[int], None],
) -> ImageJob:  # fmt: skip
    """What the writer needs of the image in a slot of this host; ``freed`` as in ``RingImage``."""
    file = memory.files[number]
    if not ring_bytes:
        return ImageJob(rank, file.image[:image_bytes])
    start = file.capacity_bytes - ring_bytes
    ring = RingImage(
        file.image[:start], file.image[start : file.capacity_bytes], image_bytes, freed
    )
    return ImageJob(rank, memoryview(b""), ring=ring, chunk_bytes=chunk_bytes(ring_bytes))
