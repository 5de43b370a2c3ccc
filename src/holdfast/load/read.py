"""Read what a plan says, in parallel; no byte is used before its block is verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from holdfast.errors import ChecksumMismatch, FormatError
from holdfast.format.checksum import BLOCK_BYTES, blocks, checksum
from holdfast.format.values import from_bytes
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.load.plan import Batch, Slab, Want, plan_batches, plan_fetches
from holdfast.load.source import Checkpoint

READERS = 4
#: An element of any dtype, by its size: destinations and sources are moved as these.
CARRIERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}
Array = np.ndarray[Any, Any]
_thread = threading.local()


def read_wants(
    checkpoint: Checkpoint,
    wants: Sequence[Want],
    destinations: Mapping[int, Array],
    *,
    batches: Sequence[Batch] | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> int:
    """Fill ``destinations[want.key]`` (arrays of carriers, shaped as the wanted boxes).

    ``batches``: what ``plan_reads`` said, if it was asked. Returns the number of bytes read. Raises
    CoverageError before anything is read, ChecksumMismatch, FormatError or StorageError while
    reading; destinations are then not to be used.
    """
    if batches is None:
        batches = plan_reads(checkpoint, wants)

    def run(batch: Batch) -> int:
        size = _read_batch(checkpoint, batch, wants, destinations)
        on_bytes(size)
        return size

    if len(batches) < 2:
        return sum(run(batch) for batch in batches)
    with ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-read") as pool:
        return sum(pool.map(run, batches))


def plan_reads(checkpoint: Checkpoint, wants: Sequence[Want]) -> list[Batch]:
    """What to read for ``wants``; CoverageError when the images do not hold all of it once.

    To be asked before memory is taken for what a layout says there is.
    """
    fetches = plan_fetches(wants, checkpoint.layout)
    return plan_batches(fetches, {rank: checkpoint.header(rank) for rank in fetches})


def _read_batch(
    checkpoint: Checkpoint,
    batch: Batch,
    wants: Sequence[Want],
    destinations: Mapping[int, Array],
) -> int:
    data = _verified_blocks(checkpoint, batch.rank, batch.first_block, batch.stop_block)
    begin = batch.first_block * BLOCK_BYTES
    for slab in batch.slabs:
        want = wants[slab.fetch.want]
        carrier = CARRIERS[ITEMSIZE[slab.fetch.dtype]]
        raw: Array = np.frombuffer(data[slab.start - begin : slab.stop - begin], dtype=carrier)
        _scatter(slab, raw, destinations[want.key], want)
    return len(data)


def _scatter(slab: Slab, raw: Array, destination: Array, want: Want) -> None:
    if not slab.rows.ndim:
        destination[...] = raw.reshape(())
        return
    inside = slab.part.relative_to(slab.fetch.piece).relative_to(slab.rows)
    target = slab.part.relative_to(want.box)
    np.copyto(destination[target.slices()], raw.reshape(slab.rows.shape)[inside.slices()])


def _verified_blocks(checkpoint: Checkpoint, rank: int, first: int, stop: int) -> memoryview:
    """The data of whole blocks, each equal to its checksum. Valid until this thread's next call."""
    file, header, table = checkpoint.files[rank], checkpoint.header(rank), checkpoint.table(rank)
    begin, end = first * BLOCK_BYTES, min(stop * BLOCK_BYTES, header.table.offset)
    if len(getattr(_thread, "staging", b"")) < end - begin:
        _thread.staging = bytearray(end - begin)
    data = file.view(header.data_start + begin, header.data_start + end, _thread.staging)
    for number, at, after in blocks(first, stop, header.table.offset):
        found = checksum(data[at - begin : after - begin])
        if found != table[number]:
            raise ChecksumMismatch(
                f"{file.block_name(number)}: stored {table[number]:016x}, read {found:016x}. "
                "The bytes changed after they were written. Run `holdfast verify --deep`.",
                block=number,
                image=file.name,
            )
    return data


def verified_range(checkpoint: Checkpoint, rank: int, start: int, stop: int) -> bytes:
    """The data bytes from ``start`` to ``stop`` of one image, verified."""
    first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
    data = _verified_blocks(checkpoint, rank, first, last)
    return bytes(data[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES])


def read_values(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """The plain values of one image, as encoded; verified."""
    header, name = checkpoint.header(rank), checkpoint.files[rank].name
    data = verified_range(checkpoint, rank, header.values.offset, header.values.stop)
    found = from_bytes(data, name)
    if not isinstance(found, dict):
        raise FormatError(f"{name}: its values are not an object")
    return found


def read_aliases(checkpoint: Checkpoint, document: Mapping[str, Any]) -> dict[str, str]:
    """Further names of leaves -> the leaf they are, out of the values of an image."""
    found = document.get("aliases", {})
    leaves = {leaf.name for leaf in checkpoint.layout.leaves}
    if not isinstance(found, dict) or not all(target in leaves for target in found.values()):
        raise FormatError("the aliases of an image do not name leaves of its layout")
    return found


def verify_blocks(checkpoint: Checkpoint, rank: int, first: int, stop: int) -> int:
    """Check blocks without using them; returns how many bytes were read."""
    return len(_verified_blocks(checkpoint, rank, first, stop))
