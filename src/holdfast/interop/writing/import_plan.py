"""Plans an import: opens what another writer left, and says which images are made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from holdfast.catalogue import (
    ROOT,
    catalogue,
    image_path,
    is_root,
)
from holdfast.errors import CoverageError, HoldfastError, NotFound, UsageError
from holdfast.format import values as codec
from holdfast.format.image import Image, fill_in, piece_name
from holdfast.format.manifest import (
    AttemptId,
    Generation,
)
from holdfast.geometry.box import Box, cover_fault
from holdfast.geometry.layout import HolderBoxes, Layout, LeafEntry, merge
from holdfast.interop.arrange import Orders
from holdfast.interop.bucket_files import files_at
from holdfast.interop.directories import read_directory, recognize
from holdfast.interop.foreign import ForeignCheckpoint
from holdfast.interop.foreign_store import ForeignStore
from holdfast.interop.near_places import refuse_level
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.steps import find_steps, finished
from holdfast.interop.writing.planned_files import (
    KnownBytes,
    LeafBytes,
    PlannedFile,
)
from holdfast.interop.writing.saved_state import saved_state
from holdfast.interop.writing.state_tree import IMPORTED, SavedState, unnamed_optimizers
from holdfast.protocol.image_plan import plan_rank
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.restore.reading.read import read_values
from holdfast.storage.open import is_bucket, open_store

#: Chooses, renames and converts what is imported.
Portion = Callable[[SavedState, Checkpoint], SavedState]


@dataclass(frozen=True, slots=True)
class ImportSource:
    """A checkpoint of another writer: where it is, and what is taken of it."""

    path: Path | str
    files: SourceFiles
    format: str
    step: int
    checkpoint: Checkpoint
    saved: SavedState
    notes: tuple[str, ...]
    facts: tuple[str, ...] = ()
    """What tells the files from others of the same names."""


def find_sources(source: str, format_: str | None) -> tuple[list[Path | str], list[str]]:
    """The checkpoints at a path: itself, or the finished steps below it; notes about others.

    In a bucket, that at the URL alone. Raises NotFound where there is none, UsageError for a root
    of ours.
    """
    path = Path(source)
    if is_bucket(source):
        if is_root(open_store(source)):
            raise _is_ours_already(source)
        return [source], []
    if (path / ROOT).exists():
        raise _is_ours_already(source)
    if not path.exists():
        raise NotFound(f"{path} is not there")
    if format_ is not None or recognize(SourceFiles(path)) is not None:
        return [path], []
    places, notes = find_steps(path) if path.is_dir() else ([], [])
    if not places:
        refuse_level(path)
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


def _is_ours_already(source: str) -> UsageError:
    return UsageError(f"{source} is a root of ours already: `holdfast copy` brings it elsewhere")


def open_imports(
    source: str, format_: str | None, portion: Portion, orders: Orders | None = None
) -> tuple[list[ImportSource], list[str]]:
    """Read everything of each checkpoint at a path but its tensors; notes about those left out.

    Of several, one that can't be read is left out. Raises as the readers do where none can.
    ``orders``: the parameters of optimizers that number them, as in ``arrange``.
    """
    paths, notes = find_sources(source, format_)
    opened: list[ImportSource] = []
    for path in paths:
        files = files_at(path)
        try:
            found = _read(files, format_, orders)
        except HoldfastError as error:
            if path == paths[-1] and not opened:
                raise
            notes.append(f"{path} is left out: {error}")
            continue
        opened.append(_opened(files, found, portion, orders))
    return opened, notes


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
                "two: nothing is imported. `holdfast verify` lists what is missing. "
                f"{checkpoint.lacks()}"
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
