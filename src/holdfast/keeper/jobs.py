"""The attempts on their way to storage, and handing on to them what is captured meanwhile."""

from __future__ import annotations

from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper.memory import Memory
from holdfast.keeper.persister import ImageJob, Job
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.handoff import Coordinator


class Jobs:
    """Between coordinator and persister; lives on the keeper's loop."""

    def __init__(self, memory: Memory, coordinator: Coordinator) -> None:
        self._memory = memory
        self._coordinator = coordinator
        self._jobs: dict[str, Job] = {}

    def start(self, attempt: Attempt, incarnation: Incarnation) -> Job:
        """A job for ``attempt``, told of all that is sealed already."""
        images = {}
        for rank, slot_id in attempt.slots.items():
            size = self._coordinator.slots[slot_id].image_bytes
            images[rank] = ImageJob(rank, self._memory.files[slot_id].image[:size])
        job = Job(
            attempt=attempt.id,
            generation=Generation(attempt.incarnation, attempt.step),
            incarnation=incarnation,
            world=attempt.world,
            layout=attempt.layout,
            layout_data=self._memory.layout(attempt.layout),
            images=images,
        )
        self._jobs[attempt.id] = job
        self.sealed(attempt.id)
        return job

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
        if attempt.phase == "complete":
            job.is_complete.set()

    def abort(self, attempt_id: str) -> None:
        """The capture came to nothing."""
        job = self._jobs.get(attempt_id)
        if job is not None:
            job.abort("the capture came to nothing")

    def ended(self, attempt_id: str) -> None:
        """The persister is done with it; its views of the slots are let go."""
        job = self._jobs.pop(attempt_id, None)
        if job is not None:
            for image in job.images.values():
                image.memory.release()
