"""Makes attempts durable, one after the other, without holding up the keeper's conversations.

An attempt's images are written as they are captured, into a directory of this attempt alone.
Only when all are durable, equal to what was sealed, is the manifest published; whatever
goes wrong before leaves the previous checkpoint as it was (promise 3).
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from holdfast.catalogue import (
    Catalogue,
    attempt_dir,
    catalogue,
    image_path,
    manifest_path,
    part_dir,
    part_path,
)
from holdfast.errors import ChecksumMismatch, HoldfastError, PersistFailed
from holdfast.events import CheckpointPruned, CheckpointPublished, ImageDurable, PersistBroke, emit
from holdfast.format.features import needed
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Manifest, unseal
from holdfast.format.values import from_bytes
from holdfast.geometry.codec import has_frozen, has_listings
from holdfast.persist import commit
from holdfast.persist.parts import Halves, Parts, Stored, halves_of
from holdfast.persist.pins import mend, pinned
from holdfast.persist.source import MAX_VALUES_BYTES, ImageSource, WholeImage
from holdfast.persist.writer import Arrival, Written, write_image
from holdfast.policy.retention import Keep
from holdfast.storage.base import Store

_IMAGES_AT_ONCE = 4


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
        return any(image.ring is not None for image in self.images.values())

    def abort(self, reason: str) -> None:
        """The attempt came to nothing."""
        self.aborted = reason
        self.is_complete.set()
        for image in self.images.values():
            image.arrival.abort(reason)


Outcome = Callable[[str, str | None], None]


class Persister:
    """A thread that takes jobs in order. ``done(attempt, None | reason)`` hears how each ended."""

    def __init__(self, store: Store, keep: Keep, done: Outcome, *, stall_s: float = 600.0) -> None:
        self.store = store
        self.keep = keep
        self._done = done
        self._stall_s = stall_s
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._sweeper = commit.Sweeper(store)
        self._parts = Parts(store)
        self._thread = threading.Thread(target=self._work, name="holdfast-persist", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue an attempt."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End after the queued jobs."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.work_one(job)

    def work_one(self, job: Job) -> None:
        """Make one attempt durable, and tell how it ended; whatever storage does."""
        try:
            self._persist(job)
        except Exception as error:
            known = isinstance(error, HoldfastError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            self._clean_up(job)
            if not job.aborted:
                emit(PersistBroke(
                    incarnation=job.generation.incarnation, step=job.generation.step,
                    reason=reason,
                ))  # fmt: skip
            self._done(job.attempt, reason)
        else:
            if job.has_rings:  # the next one would be granted, and wait with its ring full
                self._prune(job)
                self._done(job.attempt, None)
            else:
                self._done(job.attempt, None)
                self._prune(job)  # nobody need wait for it: deleting takes as long as writing

    def _persist(self, job: Job) -> None:
        if job.aborted:
            raise PersistFailed(job.aborted)
        if self._is_published(job):
            return
        started_s = time.monotonic()
        commit.record_incarnation(self.store, job.incarnation)
        commit.write_layout(self.store, job.layout, job.layout_data)
        with ThreadPoolExecutor(_images_at_once(job)) as pool:
            futures = [pool.submit(self._persist_image, job, i) for i in job.images.values()]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failures = [error for future in done if (error := future.exception()) is not None]
            if failures:
                for image in job.images.values():
                    image.arrival.abort(f"another image failed: {failures[0]}")
                job.broke(str(failures[0]))
                raise failures[0]
            stored = [future.result() for future in futures]
        if not job.is_complete.wait(self._stall_s) or job.aborted:
            raise PersistFailed(job.aborted or "the generation was never complete on all ranks")
        document = _values_document(job)
        parts = [one.part for one in stored if one.part is not None]
        manifest = Manifest(
            run_id=job.incarnation.run_id,
            incarnation=job.generation.incarnation,
            step=job.generation.step,
            attempt=job.attempt,
            parent=job.incarnation.parent,
            world=job.world,
            layout=job.layout,
            images=tuple(sorted((one.image for one in stored), key=lambda one: one.rank)),
            parts=tuple(sorted(parts, key=lambda one: one.rank)),
            requires=needed(parts=bool(parts), listings=has_listings(job.layout_data)),
            values=_shown(document, "shared"),
            aliases=_shown(document, "aliases"),
            created_s=time.time(),
        )
        job.is_publishing = True
        commit.publish(self.store, manifest)
        emit(CheckpointPublished(
            incarnation=manifest.incarnation, step=manifest.step, size_bytes=manifest.size_bytes,
            reused_bytes=manifest.reused_bytes, images=len(stored),
            elapsed_s=time.monotonic() - started_s,
        ))  # fmt: skip

    def _persist_image(self, job: Job, image: ImageJob) -> Stored:
        path = image_path(job.generation, job.directory, image.rank)
        where = f"{path} (step {job.generation.step})"
        started_s = time.monotonic()
        # Only then: the header comes later than the file that is made for it.
        apart = image.ring is None and has_frozen(job.layout_data)
        halves = halves_of(image, where) if apart else None
        if halves is not None:
            return self._persist_halves(job, image, halves, path, where)
        sink = self.store.create(path, image.size_bytes)
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

    def _persist_halves(
        self, job: Job, image: ImageJob, halves: Halves, path: str, where: str
    ) -> Stored:
        """Store an image in two files; its frozen part, if one like it is stored, not again."""
        started_s = time.monotonic()
        image.source.begin(halves.header)
        apart = part_path(job.generation, job.directory, image.rank)
        stored, written = self._parts.write(image, halves, path, apart)
        _require_sealed(image, written, where)
        for ref in (stored.image, None if stored.is_reused else stored.part):
            if ref is not None:
                _tell_durable(job, ref, started_s)
        return stored

    def _is_published(self, job: Job) -> bool:
        """Whether an earlier keeper published this attempt. PersistFailed if it was another's."""
        path = manifest_path(job.generation)
        if not self.store.exists(path):
            return False
        data = self.store.read(path)
        there = unseal(Manifest, data, path)
        if there.attempt != job.attempt:
            raise PersistFailed(
                f"{job.generation} is published already, from another attempt; it is not replaced"
            )
        # Whoever published it may have died before its name was durable, or was told so.
        self.store.publish(path, data, replace=True)
        return True

    def _clean_up(self, job: Job) -> None:
        """Remove what this try wrote, unless a manifest may name it: then the sweeper decides."""
        if job.is_publishing:
            return
        for directory in (attempt_dir, part_dir):
            with contextlib.suppress(HoldfastError):  # the sweeper finds it at a later publication
                self.store.remove_tree(directory(job.generation, job.directory))

    def _prune(self, job: Job) -> None:
        """Apply the retention policy; trouble here harms no checkpoint and is only reported."""
        self._parts.forget()
        try:
            found = catalogue(self.store)
            if mend(self.store, found):  # a keeper was killed while it pruned
                found = catalogue(self.store)
            gone = set()
            for generation in self._condemned(found, job):
                if commit.withdraw(self.store, generation):
                    gone.add(generation)
                    emit(CheckpointPruned(
                        incarnation=job.generation.incarnation, step=job.generation.step,
                        pruned_step=generation.step, pruned_incarnation=generation.incarnation,
                    ))  # fmt: skip
            left = [m for m in found.manifests if m.generation not in gone]
            if not found.broken:  # an unreadable manifest may name what looks unnamed
                self._sweeper.sweep(left)
            self._parts.learn(left)
        except Exception as error:  # whatever it is: the next attempt must be made durable
            emit(PersistBroke(
                incarnation=job.generation.incarnation, step=job.generation.step,
                reason=f"published, but pruning failed: {error}",
            ))  # fmt: skip

    def _condemned(self, found: Catalogue, job: Job) -> list[Generation]:
        """What the policy lets go: of the lineage, and what was abandoned before its last."""
        lineage = found.lineage
        spared = pinned(self.store) | {job.generation}
        condemned = list(self.keep.decide(lineage, spared))
        # Which are abandoned cannot be told for sure while a record is unreadable.
        if self.keep.last is not None and len(lineage) >= self.keep.last and not found.broken:
            first = min(lineage[-self.keep.last :])
            condemned += [g for g in found.abandoned if g < first and g not in spared]
        return condemned


def _require_sealed(image: ImageJob, written: Written, where: str) -> None:
    if written != Written(image.header_xxh3, image.table_xxh3):
        raise ChecksumMismatch(
            f"header or block table of {where} changed after the image was sealed: "
            f"sealed {image.header_xxh3} and {image.table_xxh3}, written "
            f"{written.header_xxh3} and {written.table_xxh3}. It is not published."
        )


def _tell_durable(job: Job, ref: ImageRef, started_s: float) -> None:
    emit(ImageDurable(
        incarnation=job.generation.incarnation, step=job.generation.step, rank=ref.rank,
        elapsed_s=time.monotonic() - started_s, size_bytes=ref.size_bytes, image=ref.path,
    ))  # fmt: skip


def _images_at_once(job: Job) -> int:
    """Rings all at once: each rank is held until its own is written."""
    return len(job.images) if job.has_rings else min(_IMAGES_AT_ONCE, len(job.images))


def _values_document(job: Job) -> dict[str, Any]:
    """The values all ranks share, for people and tools that only read the manifest."""
    image = job.images.get(0)
    if image is None:
        return {}
    header = image.source.header
    assert header is not None  # it was written
    start = header.data_start + header.values.offset
    if header.values.size_bytes > MAX_VALUES_BYTES:
        return {}
    kept = image.source.kept(start, start + header.values.size_bytes)
    document = from_bytes(kept, "rank 0's image")
    return document if isinstance(document, dict) else {}


def _shown(document: dict[str, Any], part: str) -> dict[str, Any]:
    found = document.get(part)
    return found if isinstance(found, dict) else {}
