"""Makes a checkpoint of ours of what another writer left: images, layout and, last, the manifest.

Block checksums are made once, of the bytes on their way. What an import that was stopped has
finished is named by a note in the root, with its checksums; it is compared with them and kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from holdfast.catalogue import (
    LOCK,
    ROOT,
    Catalogue,
    catalogue,
    copy_note_path,
    image_path,
    read_bounded,
)
from holdfast.errors import CoverageError, HoldfastError, NotFound, RootBusy, UsageError
from holdfast.format import values as codec
from holdfast.format.checksum import block_count, blocks, checksum, pack_table, text
from holdfast.format.image import Image, fill_in, piece_name
from holdfast.format.manifest import (
    MAX_DOCUMENT_BYTES,
    AttemptId,
    Generation,
    ImageRef,
    Incarnation,
    Manifest,
    needed,
)
from holdfast.geometry.box import Box, cover_fault
from holdfast.geometry.codec import has_listings
from holdfast.geometry.layout import HolderBoxes, Layout, LeafEntry, merge
from holdfast.interop.arrange import Orders
from holdfast.interop.directories import read_directory, recognize
from holdfast.interop.foreign import ForeignCheckpoint
from holdfast.interop.foreign_store import ForeignStore
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.steps import find_steps, finished
from holdfast.interop.writing.chosen_leaves import LeafReader
from holdfast.interop.writing.export_files import WORKERS, Progress, window_bytes
from holdfast.interop.writing.planned_files import (
    KnownBytes,
    LeafBytes,
    PlannedFile,
    fill_window,
)
from holdfast.interop.writing.saved_state import saved_state
from holdfast.interop.writing.state_tree import IMPORTED, SavedState, unnamed_optimizers
from holdfast.leases import LeaseWatch
from holdfast.persist import commit
from holdfast.protocol.image_plan import plan_rank
from holdfast.restore.reading.images import Checkpoint, StoredImage, from_manifest
from holdfast.restore.reading.read import in_parallel, read_values, verify_blocks
from holdfast.restore.reading.stored import run_id_of
from holdfast.storage.base import ImageSink, Store, unfinished
from holdfast.storage.direct import aligned_memory
from holdfast.storage.open import is_bucket

_MAX_SHOWN_BYTES = 1 << 20

#: Chooses, renames and converts what is imported.
Portion = Callable[[SavedState, Checkpoint], SavedState]


@dataclass(frozen=True, slots=True)
class ImportSource:
    """A checkpoint of another writer: where it is, and what is taken of it."""

    path: Path
    files: SourceFiles
    format: str
    step: int
    checkpoint: Checkpoint
    saved: SavedState
    notes: tuple[str, ...]
    facts: tuple[str, ...] = ()
    """What tells the files from others of the same names."""


def find_sources(source: str, format_: str | None) -> tuple[list[Path], list[str]]:
    """The checkpoints at a path: itself, or the finished steps below it; notes about others.

    Raises NotFound where there is none, UsageError for a bucket or a root of ours.
    """
    path = Path(source)
    if is_bucket(source):
        raise UsageError(f"{source}: checkpoints of others in buckets can't be read: copy it first")
    if (path / ROOT).exists():
        raise UsageError(f"{path} is a root of ours already: `holdfast copy` brings it elsewhere")
    if not path.exists():
        raise NotFound(f"{path} is not there")
    if format_ is not None or recognize(SourceFiles(path)) is not None:
        return [path], []
    places, notes = find_steps(path) if path.is_dir() else ([], [])
    if not places:
        raise NotFound(
            "; ".join(
                [
                    f"{path} is no checkpoint of a kind that is read, and has none of a step in "
                    "the directories below it: give the path of one, or name its kind with "
                    "--format",
                    *notes,
                ]
            )
        )
    places, unfinished = finished(path, places)
    return [path / place.name for place in places], notes + unfinished


def open_imports(
    source: str, format_: str | None, portion: Portion, orders: Orders | None = None
) -> tuple[list[ImportSource], list[str]]:
    """Open each checkpoint at a path as ``open_import``; notes about those that are left out.

    Of several, one that can't be read is left out. Raises as the readers do where none can.
    """
    paths, notes = find_sources(source, format_)
    opened: list[ImportSource] = []
    for path in paths:
        files = SourceFiles(path)
        try:
            found = _read(files, format_, orders)
        except HoldfastError as error:
            if path == paths[-1] and not opened:
                raise
            notes.append(f"{path} is left out: {error}")
            continue
        opened.append(_opened(files, found, portion, orders))
    return opened, notes


def open_import(
    path: Path, format_: str | None, portion: Portion, orders: Orders | None = None
) -> ImportSource:
    """Read everything of a checkpoint but its tensors. Raises as the readers do.

    ``orders``: the parameters of optimizers that number them, as in ``arrange``.
    """
    files = SourceFiles(path)
    return _opened(files, _read(files, format_, orders), portion, orders)


def _read(files: SourceFiles, format_: str | None, orders: Orders | None) -> ForeignCheckpoint:
    found = read_directory(files, format_, orders)
    if found is None:
        raise UsageError(f"{files.path} is no checkpoint of a kind that is read")
    return found


def _opened(
    files: SourceFiles, found: ForeignCheckpoint, portion: Portion, orders: Orders | None
) -> ImportSource:
    path = files.path
    for key in orders or {}:
        if key not in found.values:  # the names given do not fit it, or there is no such key
            why = next((note for note in found.notes if note.startswith(key)), f"no {key} is there")
            raise UsageError(f"{path}: {why}")
    store = ForeignStore(files, found)
    (manifest,) = catalogue(store).manifests
    checkpoint = from_manifest(store, manifest)
    facts = tuple(store.facts())
    saved = portion(saved_state(checkpoint), checkpoint)
    if unnamed := unnamed_optimizers(saved):
        raise UsageError(
            f"{path}: {unnamed[0]} has its state by numbers, without the names of their "
            "parameters: give these with --parameters FILE, or leave it out with --only 'model.**'"
        )
    return ImportSource(
        path, files, found.format, found.step, checkpoint, saved, store.notes, facts
    )


# ── the plan ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """What an import of one checkpoint makes."""

    source: ImportSource
    layout: Layout
    shared: Mapping[str, Any]
    own: tuple[Mapping[str, Any], ...]
    """The values that each rank has its own of, by rank."""
    nonce: str

    def values(self, rank: int) -> bytes:
        """The values in the image of a rank, as they are stored."""
        aliases = dict(self.source.saved.aliases)
        return codec.to_bytes({"shared": self.shared, "own": self.own[rank], "aliases": aliases})

    @property
    def attempt(self) -> str:
        """The name of the attempt: the same whenever the same is imported again."""
        return self.nonce[:16]

    @property
    def world(self) -> int:
        """The number of images."""
        return self.source.checkpoint.world

    @property
    def size_bytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.size_bytes for leaf in self.source.saved.leaves.values())

    def image(self, rank: int, id_: AttemptId, run_id: str) -> tuple[Image, PlannedFile]:
        """The header of an image, and all of it up to its block table."""
        plan, values = plan_rank(self.layout, rank), self.values(rank)
        image = fill_in(plan, id_.image_metadata(run_id, rank), len(values))
        boxes = {}
        for piece in self.layout.pieces(rank):
            leaf = self.layout.leaves[piece.leaf]
            boxes[piece_name(leaf.name, leaf.shape, piece.box)] = leaf.name, piece.box
        parts: list[KnownBytes | LeafBytes] = [KnownBytes(0, image.header)]
        for entry in plan.entries:
            name, box = boxes[entry.name]
            if entry.size_bytes:
                offset = image.data_start + entry.offset
                parts.append(LeafBytes(offset, name, box, entry.dtype))
        parts.append(KnownBytes(image.data_start + image.values_offset, values))
        path = image_path(Generation(id_.incarnation, id_.step), id_.attempt, rank)
        return image, PlannedFile(path, image.data_start + image.table_offset, tuple(parts))


def plan_import(source: ImportSource) -> ImportPlan:
    """What is made of a checkpoint. Raises UsageError for one that nothing of is taken."""
    source.saved.require_agreement()
    if not source.saved.leaves and not source.saved.values:
        raise UsageError(f"{source.path}: nothing is left to import")
    layout = _layout(source.saved, source.checkpoint)
    values: dict[str, Any] = dict(source.saved.values)
    values.setdefault(
        IMPORTED, {"source": str(source.path), "format": source.format, "step": source.step}
    )
    own = tuple(_own_values(source, rank) for rank in range(source.checkpoint.world))
    plan = ImportPlan(source, layout, values, own, "")
    found = xxhash.xxh3_128(layout.to_json())
    found.update(plan.values(0))
    for rank in range(1, len(own) if any(own) else 0):
        found.update(codec.to_bytes(own[rank]))
    for fact in source.facts:
        found.update(f"{fact}\n".encode(errors="surrogatepass"))
    for name, leaf in sorted(source.saved.leaves.items()):
        found.update(f"{name} {leaf}\n".encode(errors="surrogatepass"))
    return replace(plan, nonce=found.hexdigest())


def _own_values(source: ImportSource, rank: int) -> dict[str, Any]:
    """What a rank has its own of, as far as it was chosen."""
    if not source.saved.own:
        return {}
    own = read_values(source.checkpoint, rank).get("own", {})
    return {key: value for key, value in own.items() if key in source.saved.own}


def _layout(saved: SavedState, checkpoint: Checkpoint) -> Layout:
    """The boxes of each leaf: as its files have them, or whole where it is put together."""
    numbers = {leaf.name: number for number, leaf in enumerate(checkpoint.layout.leaves)}
    tables: list[list[LeafEntry]] = [[] for _ in range(checkpoint.world)]
    sizes = [0] * checkpoint.world
    for name, leaf in sorted(saved.leaves.items()):
        whole = Box.whole(leaf.shape)
        stored = leaf.patches[0].leaf if _keeps_boxes(leaf.patches, leaf.shape) else None
        owned = (
            () if stored is None or whole.is_empty else checkpoint.layout.owners(numbers[stored])
        )
        boxes: dict[int, list[Box]] = {}
        for rank, box in owned:
            boxes.setdefault(rank, []).append(box)
        fault = cover_fault(whole, (box for _, box in owned)) if stored is not None else None
        if fault is not None and not whole.is_empty:
            raise CoverageError(
                f"{name}: box {fault.box.start}:{fault.box.stop} is in none of the files, or in "
                "two: nothing is imported. `holdfast verify` lists what is missing"
            )
        if stored is None or whole.is_empty:
            boxes = {min(range(len(sizes)), key=sizes.__getitem__): [whole]}
        for rank, some in boxes.items():
            in_order = tuple(sorted(some, key=lambda box: (box.start, box.stop)))
            instance = None if some == [whole] else HolderBoxes(in_order)
            tables[rank].append(LeafEntry(name, leaf.dtype, leaf.shape, "lowest", instance))
            sizes[rank] += leaf.size_bytes // len(boxes)
    return merge(tables, is_partial=True)


def _keeps_boxes(patches: Sequence[Any], shape: tuple[int, ...]) -> bool:
    """True for a leaf that is another, or has another type, and no other elements."""
    if len(patches) != 1:
        return False
    (patch,) = patches
    return bool(patch.leaf_shape == shape and patch.dims == tuple(range(len(shape))))


# ── the work ─────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class ImportReport:
    """What an import has done: checkpoints made, and those that were there already."""

    imported: list[Generation] = field(default_factory=list)
    there: list[Generation] = field(default_factory=list)
    size_bytes: int = 0
    resumed_bytes: int = 0


def import_all(
    plans: Sequence[ImportPlan], root: Store, progress: Progress, memory_bytes: int
) -> ImportReport:
    """Make checkpoints of all ``plans``, in order of their steps, under the root's lock.

    Stopped anywhere, every checkpoint of the root is whole, and the next import goes on. Raises
    UsageError where the root goes on from what it has in another way.
    """
    report = ImportReport()
    found = catalogue(root)
    record = commit.open_root(root, run_id_of(found) or plans[0].nonce[:12])
    total = sum(plan.size_bytes for plan in plans)
    with root.lock(LOCK, "holdfast import"):
        for plan in sorted(plans, key=lambda plan: plan.source.step):
            found = catalogue(root)
            there = [m.generation for m in found.manifests if m.attempt == plan.attempt]
            if there:
                report.there += there
                report.size_bytes += plan.size_bytes
                continue
            _refuse_order(root, found, plan)
            importing = _Import(plan, root, record.run_id, found, report, progress, total)
            report.imported.append(importing.run(memory_bytes))
    return report


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
        run_id: str,
        found: Catalogue,
        report: ImportReport,
        progress: Progress,
        total_bytes: int,
    ) -> None:
        self._plan, self._root = plan, root
        self._report, self._progress, self._total_bytes = report, progress, total_bytes
        self._incarnation = _incarnation(plan, run_id, found)
        self.generation = Generation(self._incarnation.n, plan.source.step)
        self._id = AttemptId(
            self._incarnation.n, plan.source.step, plan.attempt, plan.world, plan.layout.hash
        )
        self._note = _ImportNote(root, copy_note_path(self.generation, plan.attempt))
        self._reader = LeafReader(plan.source.checkpoint, plan.source.saved.leaves)

    def run(self, memory_bytes: int) -> Generation:
        """Write all images, then publish; returns the generation."""
        size = window_bytes(memory_bytes, self._reader.is_plain)
        refs = tuple(self._image(rank, size) for rank in range(self._plan.world))
        self._plan.source.files.require_unchanged()
        commit.record_incarnation(self._root, self._incarnation)
        commit.write_layout(self._root, self._plan.layout.hash, self._plan.layout.to_json())
        commit.publish(self._root, self._manifest(refs))
        self._note.end()
        return self.generation

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

    def _image(self, rank: int, size: int) -> ImageRef:
        image, file = self._plan.image(rank, self._id, self._incarnation.run_id)
        known = self._note.find(file.path)
        if known is not None and self._is_good(known, image):
            self._report.resumed_bytes += image.size_bytes
            self._count(image.size_bytes)
            return known
        self._clear(file.path)
        writing = _ImageWriting(image, file, self._reader, self._count)
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


class _ImageWriting:
    """Fills one image by windows, whose blocks are summed before they are handed to the store."""

    def __init__(
        self,
        image: Image,
        file: PlannedFile,
        reader: LeafReader,
        count: Callable[[int], None],
    ) -> None:
        self._image, self._file, self._reader, self._count = image, file, reader, count
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
    """The images of one checkpoint that are durable, with their checksums, in a document there."""

    def __init__(self, root: Store, path: str) -> None:
        self._root, self._path = root, path
        self._refs: list[ImageRef] = []
        try:
            data = read_bounded(root, path, MAX_DOCUMENT_BYTES)
            self._refs = msgspec.json.decode(data, type=list[ImageRef])
        except (HoldfastError, ValueError, RecursionError):
            pass  # none, or none of ours: all is written

    def find(self, path: str) -> ImageRef | None:
        """What is noted of an image."""
        return next((ref for ref in self._refs if ref.path == path), None)

    def add(self, ref: ImageRef) -> None:
        """Note that an image is durable."""
        self._refs = [one for one in self._refs if one.path != ref.path] + [ref]
        self._root.publish(self._path, msgspec.json.encode(self._refs), replace=True)

    def end(self) -> None:
        """Remove the note: the checkpoint names them now."""
        self._root.remove(self._path)
