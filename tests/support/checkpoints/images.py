"""Images and checkpoints made in a few lines, without torch, a trainer or a keeper."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from holdfast.catalogue import image_path, part_path
from holdfast.format.checksum import blocks, checksum, pack_table, text
from holdfast.format.image import (
    Image,
    ImagePlan,
    fill_in,
    header_size,
    parse_header,
    piece_name,
    split,
)
from holdfast.format.manifest import (
    AttemptId,
    Generation,
    ImageId,
    ImageRef,
    Incarnation,
    Manifest,
    needed,
)
from holdfast.geometry.box import ITEMSIZE
from holdfast.geometry.codec import has_listings
from holdfast.geometry.layout import REPLICATE, Instance, Layout, LeafSpec, Mesh, Placement
from holdfast.persist import commit
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotFile
from holdfast.protocol.image_plan import plan_rank
from holdfast.restore.cluster.open import ClusterReach, LocalSlot, open_recovery
from holdfast.restore.planning.selection import Inventories, find_all
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import CARRIERS
from holdfast.storage.base import Store
from holdfast.transport.client import Puller

Array = np.ndarray[Any, Any]
FIRST = Generation(1, 0)
NO_VALUES = b'{"shared":{},"own":{}}'


def assemble(
    plan: ImagePlan,
    contents: Mapping[str, bytes],
    values: bytes = NO_VALUES,
    metadata: Mapping[str, str] | None = None,
) -> bytearray:
    """A whole image of ``plan``: the same bytes that a capture would have made."""
    image = fill_in(plan, metadata or {"step": "0"}, len(values))
    memory = bytearray(image.size_bytes)
    memory[: image.data_start] = image.header
    for entry in plan.entries:
        start = image.data_start + entry.offset
        memory[start : start + entry.size_bytes] = contents[entry.name]
    start = image.data_start + image.values_offset
    memory[start : start + len(values)] = values
    sum_blocks(memory, image)
    return memory


def sum_blocks(memory: bytearray, image: Image) -> None:
    """Write the table of block checksums."""
    data = memoryview(memory)[image.data_start :]
    covered = blocks(0, image.blocks, image.table_offset)
    sums = [checksum(data[start:stop]) for _, start, stop in covered]
    data[image.table_offset :] = pack_table(sums, image.table_entries)


def seals(memory: bytes | bytearray) -> tuple[str, str]:
    """(checksum of the header, checksum of the block table), as whoever captured it tells them."""
    view = memoryview(memory)
    data_start = 8 + struct.unpack_from("<Q", view)[0]
    document = msgspec.json.decode(view[8:data_start])
    table = data_start + document["__holdfast_blocks__"]["data_offsets"][0]
    return text(checksum(view[:data_start])), text(checksum(view[table:]))


def random_leaf(dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    """Any bits at all, as an array of the carrier of this dtype."""
    count = int(np.prod(shape, dtype=np.int64)) * ITEMSIZE[dtype]
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return raw.view(CARRIERS[ITEMSIZE[dtype]]).reshape(shape)


def split_leaf(
    name: str, dtype: str, shape: tuple[int, ...], world: int, *, is_frozen: bool = False
) -> LeafSpec:
    """A leaf cut along its first dimension, or whole on every rank when it has none."""
    placement = Placement(0) if shape else REPLICATE
    mesh = Mesh((world,), tuple(range(world)))
    return LeafSpec(name, dtype, shape, "split", (Instance(mesh, (placement,)),), is_frozen)


def images_of(
    layout: Layout,
    leaves: Mapping[str, Array],
    *,
    values: bytes = NO_VALUES,
    generation: Generation = FIRST,
    attempt: str = "a0",
) -> dict[int, bytearray]:
    """The image of every rank of ``layout``, holding ``leaves``."""
    images = {}
    for rank in range(layout.world):
        contents = {}
        for piece in layout.pieces(rank):
            leaf = layout.leaves[piece.leaf]
            part = np.ascontiguousarray(leaves[leaf.name][piece.box.slices()])
            contents[piece_name(leaf.name, leaf.shape, piece.box)] = part.tobytes()
        plan = plan_rank(layout, rank)
        metadata = {
            "run": "r",
            "incarnation": str(generation.incarnation),
            "step": str(generation.step),
            "attempt": attempt,
            "rank": str(rank),
            "world": str(layout.world),
            "layout": layout.hash,
        }
        images[rank] = assemble(plan, contents, values, metadata)
    return images


def halves(image: bytes | bytearray) -> tuple[bytes, bytes | None]:
    """The one or two files that an image is stored in: live, and what is frozen."""
    start = header_size(image[:8], "image", len(image))
    header = parse_header(image[:start], "image", len(image))
    found = split(header)
    if found is None:
        return bytes(image), None
    data = bytes(image[start : start + header.table.offset])
    files = []
    for half, raw in (
        (found.live, data[header.frozen_bytes :]),
        (found.part, data[: header.frozen_bytes]),
    ):
        memory = bytearray(half.header + raw + bytes(8 * half.table_entries))
        sum_blocks(memory, half)
        files.append(bytes(memory))
    return files[0], files[1]


def publish_checkpoint(
    store: Store,
    layout: Layout,
    images: Mapping[int, bytes | bytearray],
    generation: Generation = FIRST,
    *,
    attempt: str = "a0",
    parent: tuple[int, int] | None = None,
) -> Manifest:
    """Store ``images`` and the manifest that names them, the plain way."""
    record = Incarnation(run_id="r", n=generation.incarnation, nonce="n", parent=parent)
    commit.record_incarnation(store, record)
    commit.write_layout(store, layout.hash, layout.to_json())
    refs, parts = [], []
    for rank, image in sorted(images.items()):
        live, part = halves(image)
        refs.append(_publish_image(store, image_path(generation, attempt, rank), rank, live))
        if part is not None:
            parts.append(_publish_image(store, part_path(generation, attempt, rank), rank, part))
    manifest = Manifest(
        run_id="r",
        incarnation=generation.incarnation,
        step=generation.step,
        attempt=attempt,
        parent=parent,
        world=layout.world,
        layout=layout.hash,
        images=tuple(refs),
        parts=tuple(parts),
        requires=needed(parts=bool(parts), listings=has_listings(layout.to_json())),
    )
    commit.publish(store, manifest)
    return manifest


def _publish_image(store: Store, path: str, rank: int, image: bytes) -> ImageRef:
    store.publish(path, image)
    header, table = seals(image)
    return ImageRef(
        path=path, rank=rank, size_bytes=len(image), header_xxh3=header, table_xxh3=table
    )


def from_memory(arena: Path, part: m.HoldingPart) -> Checkpoint:
    """Open a generation in the arena of the only host, as its keeper tells of it: each image is in
    the slot that has the number of its rank.
    """
    (recovery,) = find_all(Inventories((m.Inventory("", (part,)),))).recoveries
    slots = {
        (part.attempt_id.attempt, one.rank): LocalSlot(str(arena / f"{one.rank:05}.slot"), one)
        for one in part.images
    }
    nobody = Puller(bytes(32), incarnation=1)
    return open_recovery(recovery, ClusterReach("", arena, nobody, {}, slots))


def slots_in(
    arena: Path, layout: Layout, images: Mapping[int, bytearray], generation: Generation
) -> tuple[m.HoldingPart, list[SlotFile]]:
    """Put images of attempt a0 into an arena, each into the slot that has the number of its rank:
    what its keeper holds then, and the slots.
    """
    (arena / "layouts").mkdir(parents=True)
    (arena / "layouts" / f"{layout.hash}.json").write_bytes(layout.to_json())
    slots = []
    for rank, image in images.items():
        slot = SlotFile.create(arena / f"{rank:05}.slot", len(image))
        slot.image[: len(image)] = image
        slots.append(slot)
    id_ = AttemptId(*generation, "a0", layout.world, layout.hash)
    there = (ImageId(rank, len(image), *seals(image)) for rank, image in images.items())
    return m.HoldingPart(id_, tuple(there)), slots
