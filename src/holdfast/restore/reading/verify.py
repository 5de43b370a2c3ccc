"""Verifies a published checkpoint without restoring it: nothing missing, duplicated or changed.

Shallow: every image exists with its length, headers and block tables match their checksums, and the
pieces of every leaf fill it exactly once. Deep: every block is read and its checksum compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct, field

from holdfast.errors import HoldfastError, UsageError
from holdfast.format.image import piece_name
from holdfast.format.manifest import Manifest
from holdfast.geometry.box import Box, cover_fault
from holdfast.geometry.layout import Layout
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.restore.reading.read import READERS, read_aliases, read_values, verify_blocks
from holdfast.storage.base import Store

_BLOCKS_AT_ONCE = 8


class VerifyReport(Struct, frozen=True):
    """The extent of a check and its ``faults`` in words; without faults the checkpoint is good.

    ``blocks`` and ``size_bytes``: what was read.
    """

    faults: tuple[str, ...]
    images: int
    blocks: int
    size_bytes: int
    elapsed_s: float


class ReadPart(Struct, frozen=True):
    """One of ``of`` parts of all blocks, from 1 on: together they are all, each in one."""

    number: int = 1
    of: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise UsageError(f"part {self.number}/{self.of}: give one from 1/{self.of} on")


#: Every block.
EVERYTHING = ReadPart()


class DeepProgress(Struct):
    """How far a deep check of one checkpoint has read, in runs of blocks, and what it found."""

    runs: int = 0
    faults: list[str] = field(default_factory=list)


def verify(
    store: Store,
    manifest: Manifest,
    *,
    deep: bool,
    progress: Callable[[int, int], None] | None = None,
    part: ReadPart = EVERYTHING,
    begun: DeepProgress | None = None,
) -> VerifyReport:
    """Check one checkpoint. A deep check calls ``progress(done_bytes, all_bytes)`` while it reads.

    Faults are collected, not raised. ``part``: the blocks that a deep check reads. ``begun``: where
    an earlier one was broken off; it is kept up to date before each call of ``progress``.
    """
    started_s = time.monotonic()
    faults: list[str] = []
    blocks = size_bytes = 0
    try:
        checkpoint = from_manifest(store, manifest)
    except HoldfastError as error:
        return VerifyReport((str(error),), 0, 0, 0, time.monotonic() - started_s)
    faults += _coverage_faults(checkpoint.layout)
    named = [image.rank for image in manifest.images]
    if manifest.world != checkpoint.layout.world or sorted(named) != list(range(manifest.world)):
        faults.append(
            f"the manifest names images of ranks {named}, its layout is of {manifest.world} ranks"
        )
    for image in manifest.images:
        try:
            faults += _image_faults(store, checkpoint, image.rank, image.path, image.size_bytes)
        except HoldfastError as error:
            faults.append(str(error))
    if deep and not faults:
        begun = begun or DeepProgress()
        runs = _runs(checkpoint, manifest, part)[begun.runs :]
        total = _runs_bytes(checkpoint, manifest, runs)
        for (_, first, stop), (found_faults, size) in zip(
            runs, _deep(checkpoint, runs), strict=True
        ):
            begun.runs += 1
            begun.faults += found_faults
            size_bytes += size
            blocks += stop - first
            if progress is not None:
                progress(size_bytes, max(size_bytes, total))
        faults += begun.faults
        # A store of files of another writer knows the checksums that these have.
        of_data = getattr(store, "data_faults", None)
        faults = list(dict.fromkeys([*faults, *(of_data() if of_data else ())]))
    return VerifyReport(
        tuple(faults), len(manifest.images), blocks, size_bytes, time.monotonic() - started_s
    )


def _coverage_faults(layout: Layout) -> list[str]:
    faults = []
    for number, leaf in enumerate(layout.leaves):
        fault = cover_fault(Box.whole(leaf.shape), [box for _, box in layout.owners(number)])
        if fault is not None:
            how = "stored twice" if fault.kind == "overlap" else "not stored"
            faults.append(f"{leaf.name}: box {fault.box.start}:{fault.box.stop} is {how}")
    return faults


def _image_faults(
    store: Store, checkpoint: Checkpoint, rank: int, path: str, size_bytes: int
) -> list[str]:
    there = store.size_bytes(path)
    if there != size_bytes:
        return [f"{path} has {there} bytes, the manifest says {size_bytes}"]
    header = checkpoint.header(rank)
    read_aliases(checkpoint, read_values(checkpoint, rank))
    faults = []
    layout = checkpoint.layout
    for piece in layout.pieces(rank):
        leaf = layout.leaves[piece.leaf]
        name = piece_name(leaf.name, leaf.shape, piece.box)
        if header.piece(name, leaf.dtype, piece.box.shape) is None:
            faults.append(f"{path}: its part of {leaf.name} is missing or has another form")
    return faults


def _runs(checkpoint: Checkpoint, manifest: Manifest, part: ReadPart) -> list[tuple[int, int, int]]:
    """Returns the runs of blocks of a part: (rank, first, stop).

    Those of small checkpoints are in one part or another by their step.
    """
    runs = [
        (image.rank, first, min(first + _BLOCKS_AT_ONCE, checkpoint.header(image.rank).blocks))
        for image in manifest.images
        for first in range(0, checkpoint.header(image.rank).blocks, _BLOCKS_AT_ONCE)
    ]
    return runs[(part.number - 1 - sum(manifest.generation)) % part.of :: part.of]


def _runs_bytes(
    checkpoint: Checkpoint, manifest: Manifest, runs: list[tuple[int, int, int]]
) -> int:
    """Returns about how many bytes these runs have; exactly, where they are all blocks."""
    headers = [checkpoint.header(image.rank) for image in manifest.images]
    total = sum(header.blocks for header in headers)
    wanted = sum(stop - first for _, first, stop in runs)
    return sum(header.table.offset for header in headers) * wanted // max(1, total)


def _deep(
    checkpoint: Checkpoint, runs: list[tuple[int, int, int]]
) -> Iterator[tuple[list[str], int]]:
    """Return (faults, bytes read) of runs of blocks, several read at once."""

    def check(stretch: tuple[int, int, int]) -> tuple[list[str], int]:
        try:
            return [], verify_blocks(checkpoint, *stretch)
        except HoldfastError as error:
            return [str(error)], 0

    with ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-verify") as pool:
        yield from pool.map(check, runs)
