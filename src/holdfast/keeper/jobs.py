"""The attempts on their way to storage, and handing on to them what is captured meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper.memory import Memory
from holdfast.keeper.persister import ImageJob, Job
from holdfast.persist.source import RingImage
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.handoff import Coordinator
from holdfast.snapshot.rings import chunk_bytes


class Jobs:
    """Between coordinator and persister; lives on the keeper's loop."""

    def __init__(
        self, memory: Memory, coordinator: Coordinator, freed: Callable[[str, int, int], None],
        broke: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._memory = memory
        self._coordinator = coordinator
        self._freed, self._broke = freed, broke
        self._jobs: dict[str, Job] = {}

    def start(self, attempt: Attempt, incarnation: Incarnation) -> Job:
        """A job for ``attempt``, told of all that is sealed already."""
        images = {}
        for rank, slot_id in attempt.slots.items():
            images[rank] = self._image(attempt, rank, slot_id)
        job = Job(
            attempt=attempt.id,
            generation=Generation(attempt.incarnation, attempt.step),
            incarnation=incarnation,
            world=attempt.world,
            layout=attempt.layout,
            layout_data=self._memory.layout(attempt.layout),
            images=images,
        )
        job.broke = lambda reason: self._broke(attempt.id, reason)
        self._jobs[attempt.id] = job
        self.sealed(attempt.id)
        return job

    def _image(self, attempt: Attempt, rank: int, slot_id: int) -> ImageJob:
        slot, memory = self._coordinator.slots[slot_id], self._memory.files[slot_id].image
        if not slot.is_ring:
            return ImageJob(rank, memory[: slot.image_bytes])
        start = slot.capacity_bytes - slot.ring_bytes
        ring = RingImage(
            memory[:start], memory[start : slot.capacity_bytes], slot.image_bytes,
            lambda size_bytes: self._freed(attempt.id, rank, size_bytes),
        )  # fmt: skip
        return ImageJob(rank, memoryview(b""), ring=ring, chunk_bytes=chunk_bytes(slot.ring_bytes))

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
        for rank in attempt.sealed:
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

    def ended(self, attempt_id: str) -> None:
        """The persister is done with it; its views of the slots are let go."""
        job = self._jobs.pop(attempt_id, None)
        if job is not None:
            for image in job.images.values():
                image.source.release()
