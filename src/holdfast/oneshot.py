"""Save, load and open without a keeper: one call each, for scripts, exports and evaluation.

``save`` takes the same way as a run does, image by image and manifest last, only through private
memory and on the calling thread.
"""

from __future__ import annotations

import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import msgspec

from holdfast.catalogue import LOCK, catalogue, image_path, is_root
from holdfast.errors import NotFound, PersistFailed
from holdfast.format.image import fill_in
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Manifest
from holdfast.geometry.layout import Layout, merge, table_from_json
from holdfast.load.choose import Candidate, choose
from holdfast.load.reader import CheckpointReader
from holdfast.load.restore import Restored, restore_first
from holdfast.load.source import Checkpoint, from_manifest
from holdfast.persist import commit
from holdfast.persist.writer import Arrival, Written, write_image
from holdfast.snapshot.capture import (
    Overtaking,
    Progress,
    Target,
    computation_so_far,
    copy_image,
    stage,
)
from holdfast.snapshot.copies import plan_copies
from holdfast.state.describe import Describer, Description, State
from holdfast.storage.base import Lock, Store
from holdfast.storage.open import open_store
from holdfast.world import World, agree, current_world, tell_all

_TIMEOUT_S = 600.0


def save(path: str | os.PathLike[str], state: State, step: int = 0) -> None:
    """Store ``state`` below ``path``, durable on return; all ranks call it.

    Raises UnsupportedState before anything is written, RootBusy while a run saves there, and
    StorageError when storage refuses; then the checkpoints there are as they were.
    """
    world, store = current_world(), open_store(path)
    described = Describer(state, world.rank).describe()
    layout = _agree_layout(world, described)
    lock: list[Lock] = []
    try:
        told = tell_all(
            world, "begin", lambda: _begin(world, store, step, lock), timeout_s=_TIMEOUT_S
        )
        incarnation = msgspec.json.decode(told, type=Incarnation)
        attempt = incarnation.nonce[:8]
        generation = Generation(incarnation.n, step)

        def write() -> bytes:
            return msgspec.json.encode(
                _write_image(world, store, described, layout, incarnation, generation, attempt)
            )

        refs = agree(world, "write", write, timeout_s=_TIMEOUT_S * 10)
        images = tuple(msgspec.json.decode(ref, type=ImageRef) for ref in refs)

        def publish() -> bytes:
            commit.record_incarnation(store, incarnation)
            commit.write_layout(store, layout.hash, layout.to_json())
            commit.publish(store, Manifest(
                run_id=incarnation.run_id, incarnation=incarnation.n, step=step, attempt=attempt,
                parent=incarnation.parent, world=world.size, layout=layout.hash, images=images,
                values=msgspec.json.decode(described.values)["shared"], created_s=time.time(),
            ))  # fmt: skip
            return b""

        tell_all(world, "publish", publish, timeout_s=_TIMEOUT_S)
    finally:
        for held in lock:
            held.release()


def _agree_layout(world: World, described: Description) -> Layout:
    tables = agree(world, "layout", lambda: described.table, timeout_s=_TIMEOUT_S)
    return merge([table_from_json(table) for table in tables])


def _begin(world: World, store: Store, step: int, lock: list[Lock]) -> bytes:
    """On rank 0: lock the root, and make this save an incarnation of its own."""
    root = commit.open_root(store, uuid.uuid4().hex[:12])
    lock.append(store.lock(LOCK, f"holdfast.save, process {os.getpid()}"))
    found = catalogue(store)
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
    stage(described.bindings)
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
                    Overtaking(()),
                    progress,
                    0,
                    computation_so_far(described.bindings),
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


def load(path: str | os.PathLike[str], state: State, step: int | str | None = None) -> Restored:
    """Fill ``state`` from the newest checkpoint below ``path``, whatever layout it was saved in.

    All ranks call it. ``step`` as in ``Checkpointer.restore``. Raises NotFound when there is no
    checkpoint, StateMismatch listing every difference, RestoreError when none could be read.
    """
    world, store = current_world(), open_store(path)

    def look() -> bytes:
        found = catalogue(store)
        stored = [Candidate(*x.generation, "storage", x.attempt) for x in found.manifests]
        fit = choose(stored, found.parents, step)
        if not fit:
            raise NotFound(_nothing(store, step))
        return msgspec.json.encode(fit)

    listed = tell_all(world, "candidates", look, timeout_s=_TIMEOUT_S)
    candidates = msgspec.json.decode(listed, type=list[Candidate])

    def open_checkpoint(candidate: Candidate) -> Checkpoint:
        manifest = catalogue(store).find(candidate.generation)
        if manifest is None:
            raise NotFound(f"{candidate.generation} is no longer in {store.url}")
        return from_manifest(store, manifest)

    restored = restore_first(
        world, state, candidates, open_checkpoint, incarnation=0, timeout_s=_TIMEOUT_S,
        on_poison=lambda _: None,
    )  # fmt: skip
    if restored is None:
        raise NotFound(_nothing(store, step))
    return restored


def _nothing(store: Store, step: int | str | None) -> str:
    if not is_root(store):
        return f"{store.url} is not a directory of Holdfast checkpoints"
    return f"{store.url} has no checkpoint" + ("" if step is None else f" of step {step}")


def open(path: str | os.PathLike[str], step: int | str | None = None) -> CheckpointReader:
    """Look into a checkpoint without torch.distributed and without the training code.

    Gives its newest step, or ``step``. Raises NotFound when there is none.
    """
    return CheckpointReader(open_store(path), step)
