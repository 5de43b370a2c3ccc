"""Captured generations, as a keeper hands them to its persister."""

from __future__ import annotations

from holdfast.format.manifest import Generation, Incarnation
from holdfast.geometry.layout import Layout
from holdfast.keeper.image_writer import ImageJob, PersistJob
from support.checkpoints.images import images_of, random_leaf, seals
from support.checkpoints.roots import LAYOUT


def job_of(
    generation: Generation, record: Incarnation, attempt: str = "", layout: Layout = LAYOUT
) -> PersistJob:
    """Of a start with this record; all its images are sealed."""
    attempt = attempt or f"a{generation.incarnation}x{generation.step}"
    leaves = {
        leaf.name: random_leaf(leaf.dtype, leaf.shape, generation.step) for leaf in layout.leaves
    }
    images = images_of(layout, leaves, generation=generation, attempt=attempt)
    jobs = {rank: ImageJob(rank, memoryview(image)) for rank, image in images.items()}
    for rank, image in images.items():
        jobs[rank].seal(*seals(image))
    job = PersistJob(attempt, generation, layout.to_json(), jobs, record, 2, layout.hash)
    job.is_complete.set()
    return job
