"""Makes a checkpoint of ours of what another writer left: images, layout and, last, the manifest.

Block checksums are made once, of the bytes on their way. What an import that was stopped has
finished is named by notes in the root, with its checksums; it is compared with them and kept. Of
several ranks each makes its share of the images; rank 0 alone removes and publishes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from holdfast.catalogue import (
    COPIES,
    LOCK,
    Catalogue,
    catalogue,
    copy_note_path,
    image_path,
    read_bounded,
)
from holdfast.errors import HoldfastError, RootBusy, UsageError
from holdfast.format.checksum import block_count, blocks, checksum, pack_table, text
from holdfast.format.image import Image
from holdfast.format.manifest import (
    MAX_DOCUMENT_BYTES,
    AttemptId,
    Generation,
    ImageRef,
    Incarnation,
    Manifest,
    needed,
)
from holdfast.geometry.codec import has_listings
from holdfast.interop.writing.chosen_leaves import LeafReader
from holdfast.interop.writing.command_ranks import CommandRanks
from holdfast.interop.writing.export_files import WORKERS, Progress, window_bytes
from holdfast.interop.writing.import_plan import ImportPlan
from holdfast.interop.writing.planned_files import (
    PlannedFile,
    fill_window,
)
from holdfast.leases import LeaseWatch
from holdfast.persist import commit
from holdfast.restore.reading.images import Checkpoint, StoredImage
from holdfast.restore.reading.read import in_parallel, verify_blocks
from holdfast.restore.reading.stored import run_id_of
from holdfast.storage.base import ImageSink, Store, unfinished
from holdfast.storage.direct import aligned_memory

_MAX_SHOWN_BYTES = 1 << 20


@dataclass(slots=True)
class ImportReport:
    """What an import has done: checkpoints made, and those that were there already."""

    imported: list[Generation] = field(default_factory=list)
    there: list[Generation] = field(default_factory=list)
    size_bytes: int = 0
    resumed_bytes: int = 0


def import_all(
    plans: Sequence[ImportPlan],
    root: Store,
    progress: Progress,
    memory_bytes: int,
    ranks: CommandRanks | None = None,
) -> ImportReport:
    """Make checkpoints of all ``plans``, in order of their steps, under the root's lock.

    Stopped anywhere, every checkpoint of the root is whole, and the next import goes on.
    ``ranks``: that make them together; an error of one is raised on all. Raises UsageError where
    the root goes on from what it has in another way.
    """
    ranks = ranks or CommandRanks("the import")
    report = ImportReport()
    total = sum(plan.size_bytes for plan in plans)
    with ExitStack() as held:

        def begin() -> bytes:
            found = catalogue(root)
            record = commit.open_root(root, run_id_of(found) or plans[0].nonce[:12])
            held.enter_context(root.lock(LOCK, "holdfast import"))
            return record.run_id.encode()

        run_id = ranks.from_rank0(begin).decode()
        for plan in sorted(plans, key=lambda plan: plan.source.step):
            start = _agreed_start(plan, root, run_id, ranks)
            if start.there:
                report.there += [Generation(*one) for one in start.there]
                report.size_bytes += plan.size_bytes
                continue
            assert start.incarnation is not None
            importing = _Import(plan, root, start.incarnation, report, progress, total, ranks)
            report.imported.append(importing.run(memory_bytes))
    return report


class _Start(msgspec.Struct):
    """What rank 0 has decided of one checkpoint: it is there already, or of this incarnation."""

    nonce: str
    there: list[tuple[int, int]] = []
    incarnation: Incarnation | None = None


def _agreed_start(plan: ImportPlan, root: Store, run_id: str, ranks: CommandRanks) -> _Start:
    def decide() -> bytes:
        found = catalogue(root)
        start = _Start(plan.nonce)
        there = [m.generation for m in found.manifests if m.attempt == plan.attempt]
        if there:
            start.there = [(one.incarnation, one.step) for one in there]
        else:
            _refuse_order(root, found, plan)
            start.incarnation = _incarnation(plan, run_id, found)
        return msgspec.msgpack.encode(start)

    start = msgspec.msgpack.decode(ranks.from_rank0(decide), type=_Start)
    if start.nonce != plan.nonce:
        raise UsageError(
            f"rank {ranks.rank} would import something else than rank 0: all ranks need the same "
            "arguments, and see the same files"
        )
    return start


def _refuse_order(root: Store, found: Catalogue, plan: ImportPlan) -> None:
    """Raises UsageError for a step that lies before what a restore of the root takes."""
    latest = found.latest
    if latest is not None and latest.step >= plan.source.step:
        raise UsageError(
            f"{plan.source.path} is of step {plan.source.step}, and {root.url} has step "
            f"{latest.step} already: a checkpoint that is imported is the newest. Import to "
            "another root, or choose later ones with --step"
        )


def _incarnation(plan: ImportPlan, run_id: str, found: Catalogue) -> Incarnation:
    """The start that a checkpoint is of; the same again where an import of it was stopped."""
    newest = max(found.incarnations, key=lambda one: one.n, default=None)
    if newest is not None and newest.nonce == plan.nonce:
        return newest
    parent = found.latest
    return Incarnation(
        run_id=run_id,
        n=max((*found.parents, *found.unreadable), default=0) + 1,
        nonce=plan.nonce,
        parent=None if parent is None else (parent.incarnation, parent.step),
        world=plan.world,
        created_s=time.time(),
    )


class _Import:
    """One checkpoint being made, whose caller holds the root's lock."""

    def __init__(
        self,
        plan: ImportPlan,
        root: Store,
        incarnation: Incarnation,
        report: ImportReport,
        progress: Progress,
        total_bytes: int,
        ranks: CommandRanks,
    ) -> None:
        self._plan, self._root, self._ranks = plan, root, ranks
        self._report, self._progress, self._total_bytes = report, progress, total_bytes
        self._incarnation = incarnation
        self.generation = Generation(self._incarnation.n, plan.source.step)
        self._id = AttemptId(
            self._incarnation.n, plan.source.step, plan.attempt, plan.world, plan.layout.hash
        )
        self._note = _ImportNote(root, copy_note_path(self.generation, plan.attempt), ranks.rank)
        self._reader = LeafReader(plan.source.checkpoint, plan.source.saved.leaves)

    def run(self, memory_bytes: int) -> Generation:
        """Write all images, then publish; returns the generation."""
        size = window_bytes(memory_bytes, self._reader.is_plain)
        before = self._report.resumed_bytes
        good: dict[int, ImageRef] = {}

        def compare() -> bytes:
            found = (self._good_image(rank) for rank in self._share())
            good.update((ref.rank, ref) for ref in found if ref is not None)
            lacking = [rank for rank in self._share() if rank not in good]
            return msgspec.msgpack.encode(lacking)

        def clear(lacking: bytes) -> bytes:
            for rank in sorted(msgspec.msgpack.decode(lacking, type=list[int])):
                self._clear(image_path(self.generation, self._plan.attempt, rank))
            return b""

        def write() -> bytes:
            refs = [good.get(rank) or self._image(rank, size) for rank in self._share()]
            self._plan.source.files.require_unchanged()
            resumed = self._report.resumed_bytes - before
            return msgspec.msgpack.encode((resumed, refs))

        self._ranks.gather(compare, _join_lists, clear)
        told = self._ranks.gather(write, _join_images, self._publish)
        self._report.resumed_bytes = before + msgspec.msgpack.decode(told, type=int)
        return self.generation

    def _share(self) -> range:
        return range(self._ranks.rank, self._plan.world, self._ranks.size)

    def _publish(self, told: bytes) -> bytes:
        """On rank 0, when all images are durable. Returns the bytes that were there already."""
        resumed, refs = msgspec.msgpack.decode(told, type=tuple[int, list[ImageRef]])
        commit.record_incarnation(self._root, self._incarnation)
        commit.write_layout(self._root, self._plan.layout.hash, self._plan.layout.to_json())
        in_order = tuple(sorted(refs, key=lambda ref: ref.rank))
        commit.publish(self._root, self._manifest(in_order))
        self._note.end()
        return msgspec.msgpack.encode(resumed)

    def _manifest(self, refs: tuple[ImageRef, ...]) -> Manifest:
        layout = self._plan.layout
        values = self._plan.values(0)
        shown, is_short = msgspec.json.decode(values), len(values) <= _MAX_SHOWN_BYTES
        return Manifest(
            run_id=self._incarnation.run_id,
            incarnation=self._incarnation.n,
            step=self.generation.step,
            attempt=self._plan.attempt,
            parent=self._incarnation.parent,
            world=self._plan.world,
            layout=layout.hash,
            images=refs,
            requires=needed(parts=False, listings=has_listings(layout.to_json())),
            values=shown["shared"] if is_short else {},
            aliases=shown["aliases"] if is_short else {},
            created_s=time.time(),
        )

    def _good_image(self, rank: int) -> ImageRef | None:
        """An image that an import that was stopped has finished, if it is as it was written."""
        image, file = self._plan.image(rank, self._id, self._incarnation.run_id)
        known = self._note.find(file.path)
        if known is None or not self._is_good(known, image):
            return None
        self._report.resumed_bytes += image.size_bytes
        self._count(image.size_bytes)
        return known

    def _image(self, rank: int, size: int) -> ImageRef:
        image, file = self._plan.image(rank, self._id, self._incarnation.run_id)
        writing = _ImageWriting(image, file, self._reader, self._count, self._ranks)
        sink = self._root.create(file.path, image.size_bytes)
        try:
            table = writing.run(sink, size)
            sink.finish()
        except BaseException:
            sink.abort()
            raise
        ref = ImageRef(
            path=file.path,
            rank=rank,
            size_bytes=image.size_bytes,
            header_xxh3=text(checksum(image.header)),
            table_xxh3=text(checksum(table)),
        )
        self._note.add(ref)
        return ref

    def _clear(self, path: str) -> None:
        """Remove what an import that was stopped has left of an image. No manifest names it."""
        if self._root.exists(path):
            if path.rpartition("/")[0] in LeaseWatch(self._root).paths():
                raise RootBusy(
                    f"{path} in {self._root.url} was pruned and is still being read: import again "
                    "when the reader has finished",
                    name=LOCK,
                )
            self._root.remove(path)
        if path in unfinished(self._root):
            self._root.remove_tree(path)

    def _count(self, size_bytes: int) -> None:
        self._report.size_bytes += size_bytes
        self._progress(self._report.size_bytes, max(self._report.size_bytes, self._total_bytes))

    def _is_good(self, ref: ImageRef, image: Image) -> bool:
        """True if all bytes of an image are as they were written, and it is the one meant."""
        if ref.header_xxh3 != text(checksum(image.header)):
            return False
        try:
            checkpoint = Checkpoint(
                self._plan.layout,
                {ref.rank: StoredImage(self._root, ref)},
                self._plan.world,
                self._id.metadata,
            )
            count = checkpoint.header(ref.rank).blocks
            for first in range(0, count, 8):
                verify_blocks(checkpoint, ref.rank, first, min(first + 8, count))
        except HoldfastError:
            return False
        return True


def _join_lists(one: bytes, other: bytes) -> bytes:
    found = (msgspec.msgpack.decode(each, type=list[int]) for each in (one, other))
    return msgspec.msgpack.encode([rank for some in found for rank in some])


def _join_images(one: bytes, other: bytes) -> bytes:
    kind = tuple[int, list[ImageRef]]
    (first, refs), (second, more) = (
        msgspec.msgpack.decode(each, type=kind) for each in (one, other)
    )
    return msgspec.msgpack.encode((first + second, refs + more))


class _ImageWriting:
    """Fills one image by windows, whose blocks are summed before they are handed to the store."""

    def __init__(
        self,
        image: Image,
        file: PlannedFile,
        reader: LeafReader,
        count: Callable[[int], None],
        ranks: CommandRanks,
    ) -> None:
        self._image, self._file, self._reader, self._count = image, file, reader, count
        self._ranks = ranks
        self._sums: dict[int, int] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()

    def run(self, sink: ImageSink, size: int) -> bytes:
        """Write everything; returns the block table."""
        image = self._image
        sink.write(0, memoryview(image.header))
        windows = list(self._windows(size))
        in_parallel(
            lambda window: self._write(sink, *window, size),
            windows,
            threads=max(1, min(WORKERS, len(windows))),
            name="holdfast-import",
        )
        sums = [self._sums[number] for number in range(block_count(image.table_offset))]
        table = pack_table(sums, image.table_entries)
        sink.write(image.data_start + image.table_offset, memoryview(table))
        return table

    def _windows(self, size: int) -> Iterator[tuple[int, int]]:
        for start in range(0, self._image.table_offset, size):
            yield start, min(start + size, self._image.table_offset)

    def _write(self, sink: ImageSink, start: int, stop: int, size: int) -> int:
        self._ranks.require_others()
        if not hasattr(self._thread, "memory"):
            self._thread.memory = memoryview(aligned_memory(size))
        memory = self._thread.memory[: stop - start]
        at = self._image.data_start + start
        fill_window(self._file, at, memory, self._reader.fill)
        sums = {
            number: checksum(memory[begin - start : end - start])
            for number, begin, end in blocks(start >> 20, block_count(stop), stop)
        }
        sink.write(at, memory)
        with self._lock:
            self._sums |= sums
            self._count(len(memory))
        return len(memory)


class _ImportNote:
    """The images of one checkpoint that are durable, with their checksums, in documents there: one
    of each rank that wrote some.
    """

    def __init__(self, root: Store, path: str, rank: int) -> None:
        self._root = root
        self._path = path if not rank else f"{path.removesuffix('.json')}-{rank}.json"
        self._prefix = path.removesuffix(".json")
        self._refs: list[ImageRef] = []
        for other in self._paths():
            try:
                data = read_bounded(root, other, MAX_DOCUMENT_BYTES)
                self._refs += msgspec.json.decode(data, type=list[ImageRef])
            except (HoldfastError, ValueError, RecursionError):
                pass  # none of ours: all is written

    def _paths(self) -> list[str]:
        names = (f"{COPIES}/{name}" for name in self._root.list(COPIES))
        return sorted(name for name in names if name.startswith(self._prefix))

    def find(self, path: str) -> ImageRef | None:
        """What is noted of an image."""
        return next((ref for ref in reversed(self._refs) if ref.path == path), None)

    def add(self, ref: ImageRef) -> None:
        """Note that an image is durable."""
        self._refs = [one for one in self._refs if one.path != ref.path] + [ref]
        self._root.publish(self._path, msgspec.json.encode(self._refs), replace=True)

    def end(self) -> None:
        """Remove the notes: the checkpoint names them now."""
        for path in {*self._paths(), self._path}:
            self._root.remove(path)
