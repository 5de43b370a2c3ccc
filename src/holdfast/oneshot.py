"""Save, load and open without a keeper: one call each, for scripts, exports and evaluation.

``save`` takes the same way as a run does, image by image and manifest last, only through private
memory and on the calling thread.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from holdfast.catalogue import LOCK, attempt_dir, image_path
from holdfast.errors import HoldfastError, NotFound, PersistFailed, StorageError, UsageError
from holdfast.format.features import needed
from holdfast.format.image import fill_in
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Manifest
from holdfast.geometry.codec import has_listings
from holdfast.geometry.layout import Layout, merge, table_from_json
from holdfast.load.choose import Candidate
from holdfast.load.compare import Request
from holdfast.load.reader import CheckpointReader
from holdfast.load.restore import Restored, restore_first
from holdfast.load.source import Checkpoint
from holdfast.load.stored import catalogue_of, choose_stored, open_stored, run_id_of
from holdfast.persist import commit
from holdfast.persist.writer import Arrival, Written, write_image
from holdfast.policy.arguments import duration_s, step_number, wanted_step
from holdfast.rules import Rules
from holdfast.snapshot.capture import (
    Overtaking,
    Progress,
    Target,
    computation_so_far,
    copy_image,
    stage,
)
from holdfast.snapshot.copies import plan_copies
from holdfast.state.binding import Bindings
from holdfast.state.choice import choose
from holdfast.state.describe import Describer, Description
from holdfast.state.objects import State
from holdfast.state.usage import check_rules, refuse_unused
from holdfast.storage.base import Lock, Store
from holdfast.storage.open import open_store
from holdfast.world import World, agree, current_world, host_id, refuse_rank_without_group, tell_all

#: Reading and writing may take this many times as long as meeting the other ranks.
_IO_PATIENCE = 10
_MAX_SHOWN_BYTES = 1 << 20


def save(
    path: str | os.PathLike[str],
    state: State,
    step: int = 0,
    *,
    rules: Rules | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Store ``state`` below ``path``, durable on return; all ranks call it.

    ``rules``: what its tensors are in the checkpoint, where that is something else than here.
    ``timeout_s`` bounds every wait for other ranks; ten times as long for their writing. Raises
    UnsupportedState before anything is written, RootBusy while a run saves there, and
    StorageError when storage refuses; then the checkpoints there are as they were.
    """
    timeout_s, step = duration_s("timeout_s", timeout_s), step_number(step)
    refuse_rank_without_group()
    store, world = open_store(path), current_world(timeout_s=timeout_s)
    described, layout = _agree_layout(world, state, rules, timeout_s)
    lock: list[Lock] = []
    try:
        told = tell_all(
            world, "save: begin", lambda: _begin(world, store, step, lock), timeout_s=timeout_s
        )
        incarnation = msgspec.json.decode(told, type=Incarnation)
        attempt = incarnation.nonce[:8]
        generation = Generation(incarnation.n, step)

        def write() -> bytes:
            _require_same_root(world, store, incarnation.run_id)
            return msgspec.json.encode(
                _write_image(world, store, described, layout, incarnation, generation, attempt)
            )

        def publish() -> bytes:
            try:
                _require_images(store, images)
            except HoldfastError:
                _clear(store, generation, attempt)
                raise
            commit.record_incarnation(store, incarnation)
            commit.write_layout(store, layout.hash, layout.to_json())
            commit.publish(store, Manifest(
                run_id=incarnation.run_id, incarnation=incarnation.n, step=step, attempt=attempt,
                parent=incarnation.parent, world=world.size, layout=layout.hash, images=images,
                requires=needed(parts=False, listings=has_listings(layout.to_json())),
                created_s=time.time(), **_shown(described.values),
            ))  # fmt: skip
            return b""

        try:
            refs = agree(world, "save: write", write, timeout_s=timeout_s * _IO_PATIENCE)
        except BaseException:
            if world.rank == 0:  # before the lock is released; what another rank still writes stays
                _clear(store, generation, attempt)
            raise
        images = tuple(msgspec.json.decode(ref, type=ImageRef) for ref in refs)
        tell_all(world, "save: publish", publish, timeout_s=timeout_s * _IO_PATIENCE)
    finally:
        for held in lock:
            held.release()


def _shown(values: bytes) -> dict[str, Any]:
    """Values and aliases for who reads only the manifest; none where they would make it too long.

    A restore takes them from the images.
    """
    if len(values) > _MAX_SHOWN_BYTES:
        return {}
    document = msgspec.json.decode(values)
    return {"values": document["shared"], "aliases": document.get("aliases", {})}


def _require_same_root(world: World, store: Store, run_id: str) -> None:
    """Rank 0 named the root's run: UsageError on a rank that finds another root, or none."""
    try:
        commit.require_root(store, run_id)
    except StorageError as error:
        raise _apart(store, f"rank {world.rank} does not find rank 0's root of run {run_id}") from (
            error
        )


def _require_images(store: Store, images: tuple[ImageRef, ...]) -> None:
    """On rank 0: UsageError when what the others wrote is not where the manifest says."""
    for image in images:
        try:
            found: int | None = store.size_bytes(image.path)
        except NotFound:
            found = None
        if found != image.size_bytes:
            what = "is not there" if found is None else f"has {found} bytes there"
            raise _apart(
                store,
                f"{image.path}, {image.size_bytes} bytes by rank {image.rank}, {what} for rank 0",
            )


def _apart(store: Store, what: str) -> UsageError:
    return UsageError(
        f"the ranks see different directories at {store.url}: {what}. No checkpoint was published. "
        "Give a directory that all ranks reach, and not one of each node's own."
    )


def _clear(store: Store, generation: Generation, attempt: str) -> None:
    """Leave nothing of a save that came to nothing: no manifest names it."""
    with contextlib.suppress(HoldfastError):
        store.remove_tree(attempt_dir(generation, attempt))


def _agree_layout(
    world: World, state: State, rules: Rules | None, timeout_s: float
) -> tuple[Description, Layout]:
    """This rank's leaves, and all ranks' together. One rank's error is everybody's."""
    described: list[Description] = []

    def describe() -> bytes:
        if not isinstance(state, dict) or not state:
            raise UsageError("the state is a dict from names to objects, and not empty")
        check_rules("rules", rules)
        describer = Describer(state, world.rank, world.size, rules=rules)
        usage = describer.usage()
        described.append(describer.describe())
        return msgspec.msgpack.encode((described[0].table, usage))

    told = agree(world, "save: state", describe, timeout_s=timeout_s)
    said = [msgspec.msgpack.decode(each, type=tuple[bytes, bytes]) for each in told]
    refuse_unused([usage for _, usage in said])
    return described[0], merge([table_from_json(table) for table, _ in said])


def _begin(world: World, store: Store, step: int, lock: list[Lock]) -> bytes:
    """On rank 0: lock the root, and make this save an incarnation of its own."""
    root = commit.open_root(store, run_id_of(store) or uuid.uuid4().hex[:12])
    owner = f"holdfast.save, process {os.getpid()} on {host_id()}"
    lock.append(store.lock(LOCK, owner))
    found = catalogue_of(store)
    before = [g for g in found.lineage if g.step < step]
    parent = max(before, key=lambda g: (g.step, g.incarnation), default=None)
    incarnation = Incarnation(
        run_id=root.run_id,
        n=max(found.parents, default=0) + 1,
        nonce=uuid.uuid4().hex,
        parent=None if parent is None else (parent.incarnation, parent.step),
        world=world.size,
        created_s=time.time(),
    )
    return msgspec.json.encode(incarnation)


def _write_image(
    world: World,
    store: Store,
    described: Description,
    layout: Layout,
    incarnation: Incarnation,
    generation: Generation,
    attempt: str,
) -> ImageRef:
    """Assemble this rank's image and stream it out while it grows."""
    plan = plan_copies(layout, world.rank, described.bindings)
    metadata = {
        "run": incarnation.run_id, "incarnation": str(incarnation.n), "step": str(generation.step),
        "attempt": attempt, "rank": str(world.rank), "world": str(world.size),
        "layout": layout.hash,
    }  # fmt: skip
    image = fill_in(plan.image, metadata, len(described.values))
    memory = memoryview(bytearray(image.size_bytes))
    stage(described.bindings.volatile)
    path = image_path(generation, attempt, world.rank)
    arrival = Arrival()
    progress = Progress(check=lambda: None, copied=arrival.copied, enqueued=lambda _: None)
    sink = store.create(path, image.size_bytes)
    try:
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write_image, sink, memory, arrival, path)
            try:
                seal = copy_image(
                    Target(memory, plan),
                    image,
                    described.values,
                    Overtaking(Bindings(joined=described.bindings.joined)),
                    progress,
                    0,
                    computation_so_far(described.bindings.gpus),
                )
                arrival.copied(image.size_bytes)
            except BaseException as error:
                arrival.abort(f"the state could not be copied: {error}")
                raise
            written = writing.result()
        if written != Written(seal.header_xxh3, seal.table_xxh3):
            raise PersistFailed(f"{path} changed while it was written")
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    return ImageRef(
        path=path, rank=world.rank, size_bytes=image.size_bytes, header_xxh3=seal.header_xxh3,
        table_xxh3=seal.table_xxh3,
    )  # fmt: skip


def load(
    path: str | os.PathLike[str],
    state: State,
    step: int | str | None = None,
    *,
    rules: Rules | None = None,
    stored_rules: Rules | None = None,
    only: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    timeout_s: float = 600.0,
) -> Restored:
    """Fill ``state`` from the newest checkpoint below ``path``, whatever layout it was saved in.

    ``rules``: what its tensors are in the checkpoint; ``stored_rules``: for a checkpoint that was
    saved without the rules that it should have been saved with, these. ``only``: patterns of the
    names to restore, all else stays as it is; ``allow_missing``: of names that need not be stored.
    All ranks call it. ``step`` as in ``Checkpointer.restore``, ``timeout_s`` as in ``save``. Raises
    NotFound when there is no checkpoint, StateMismatch listing every difference, RestoreError when
    none could be read; after RestoreError the state may hold a part of it and must not be used.
    """
    timeout_s, step = duration_s("timeout_s", timeout_s), wanted_step(step)
    request = Request(rules, stored_rules, choose(only, allow_missing))
    check_rules("rules", rules)
    check_rules("stored_rules", stored_rules)
    store, world = open_store(path), current_world(timeout_s=timeout_s)
    listed = tell_all(
        world, "load: candidates", lambda: msgspec.json.encode(choose_stored(store, step)[1]),
        timeout_s=timeout_s,
    )  # fmt: skip

    def open_checkpoint(candidate: Candidate) -> Checkpoint:
        return open_stored(store, candidate, world.rank)

    restored = restore_first(
        world, state, msgspec.json.decode(listed, type=list[Candidate]), open_checkpoint,
        incarnation=0, timeout_s=timeout_s * _IO_PATIENCE, on_poison=lambda _: None,
        request=request,
    )  # fmt: skip
    assert restored is not None  # there was a candidate, and no error
    return restored


def open(path: str | os.PathLike[str], step: int | str | None = None) -> CheckpointReader:
    """Look into a checkpoint without torch.distributed and without the training code.

    Gives its newest step, or ``step``. Raises NotFound when there is none.
    """
    return CheckpointReader(open_store(path), wanted_step(step))
