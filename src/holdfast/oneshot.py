"""Saves, loads and opens checkpoints without a keeper: one call each, for scripts, exports and
evaluation.

``save`` writes as a run does, image by image and manifest last, only through private memory and on
the calling thread.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from holdfast.accelerator.devices import computation_so_far
from holdfast.capture.copy_plan import SlotTarget, plan_copies
from holdfast.capture.copy_slot import copy_image
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyProgress
from holdfast.capture.volatile_copies import stage
from holdfast.catalogue import LOCK, attempt_dir, image_path
from holdfast.errors import HoldfastError, NotFound, PersistFailed, StorageError, UsageError
from holdfast.events import warn
from holdfast.format.image import fill_in
from holdfast.format.manifest import AttemptId, Generation, ImageRef, Incarnation, Manifest, needed
from holdfast.geometry.codec import has_listings
from holdfast.geometry.layout import Layout, merge, table_from_json
from holdfast.interop.opening import open_source
from holdfast.meeting import host_id
from holdfast.observe.log import shown_events
from holdfast.overview import read_newest
from holdfast.persist import commit
from holdfast.persist.writer import Arrival, WrittenImage, write_image
from holdfast.policy.arguments import duration_s, step_number, wanted_step
from holdfast.restore.from_storage import READ_PATIENCE, restore_stored
from holdfast.restore.match import RestoreRequest
from holdfast.restore.reading.reader import CheckpointReader
from holdfast.restore.reading.stored import overview_of, run_id_of
from holdfast.restore.restore import Restored
from holdfast.rules import Rules
from holdfast.state.bindings import Bindings
from holdfast.state.describe import Describer, Description
from holdfast.state.mapped.mapper import check_rules, require_all_used
from holdfast.state.objects import State, require_state
from holdfast.state.saved_values import parameter_orders
from holdfast.state.selection import choose
from holdfast.state.step_calls import Rest, refuse_inside
from holdfast.storage.base import Lock, Store
from holdfast.storage.direct import aligned_memory
from holdfast.storage.open import open_store
from holdfast.transport.wire.rank_tree import Said, by_rank
from holdfast.world import World, all_said_or_raise, current_world, refuse_rank_without_group

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

    ``path``: the root, a directory that all ranks reach. ``state``: names to modules, optimizers,
    schedulers, objects with ``state_dict`` and ``load_state_dict``, and plain values. ``step``: the
    step that the checkpoint is of; checkpoints there of this step and larger ones are abandoned.
    ``rules``: how its tensors correspond to leaves of the checkpoint, where the two differ.
    ``timeout_s``: the bound, in seconds, of every wait for other ranks; ten times as long for their
    writing.

    Raises UnsupportedState before anything is written, RootBusy while a run saves there, and
    StorageError when storage refuses; then the existing checkpoints are unchanged. In the middle of
    an optimizer's step it raises UsageError; beside a thread that trains it raises CaptureOvertaken
    when a step begins before the state is copied, because no step waits for this.
    """
    refuse_inside("holdfast.save()")
    timeout_s, step = duration_s("timeout_s", timeout_s), step_number(step)
    refuse_rank_without_group()
    store, world = open_store(path), current_world(timeout_s=timeout_s)
    rest = Rest(timeout_s)

    def describe() -> tuple[Description, bytes]:
        require_state(state)
        check_rules("rules", rules)
        describer = Describer(state, world.rank, world.size, rules=rules)
        usage = describer.usage()
        return describer.describe(), usage

    try:
        with shown_events(world.rank):
            save_described(store, world, describe, step, timeout_s=timeout_s, check=rest.check)
    finally:
        world.close()


def save_described(
    store: Store,
    world: World,
    describe: Callable[[], tuple[Description, bytes]],
    step: int,
    *,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
    published: Callable[[Generation], None] = lambda _: None,
) -> Generation:
    """Store what ``describe`` describes on each rank, durable on return; all ranks call it.

    ``describe``: also returns which rules it used. ``check``: called when this rank's image is
    written; what it raises ends the save. ``published``: called on rank 0 under the root's lock.
    """
    lock: list[Lock] = []
    is_publishing = False
    try:
        described, layout, begun = _agree_layout(
            world, describe, timeout_s, lambda: _begin(world, store, step, lock)
        )
        incarnation = msgspec.json.decode(begun, type=Incarnation)
        attempt = incarnation.nonce[:8]
        generation = Generation(incarnation.n, step)

        def write() -> tuple[bytes]:
            _require_same_root(world, store, incarnation.run_id)
            ref = _write_image(world, store, described, layout, incarnation, generation, attempt)
            check()
            return (msgspec.json.encode(ref),)

        def publish(columns: Sequence[Sequence[Said]]) -> bytes:
            nonlocal is_publishing
            images = tuple(msgspec.json.decode(ref, type=ImageRef) for ref in by_rank(columns[0]))
            is_publishing = True  # from now on a manifest may name them
            try:
                _require_images(store, images)
            except HoldfastError:
                _clear(store, generation, attempt)
                raise
            commit.record_incarnation(store, incarnation)
            commit.write_layout(store, layout.hash, layout.to_json())
            commit.publish(store, _manifest_of(incarnation, step, layout, images, described))
            published(generation)
            return b""

        try:
            all_said_or_raise(
                world, "save: write", write, timeout_s=timeout_s * READ_PATIENCE, conclude=publish
            )
        except BaseException:
            if world.rank == 0 and not is_publishing:
                # Before the lock is released; what another rank still writes stays.
                _clear(store, generation, attempt)
            raise
        return generation
    finally:
        for held in lock:
            held.release()


def _manifest_of(
    incarnation: Incarnation,
    step: int,
    layout: Layout,
    images: tuple[ImageRef, ...],
    described: Description,
) -> Manifest:
    return Manifest(
        run_id=incarnation.run_id,
        incarnation=incarnation.n,
        step=step,
        attempt=incarnation.nonce[:8],
        parent=incarnation.parent,
        world=incarnation.world,
        layout=layout.hash,
        images=images,
        requires=needed(parts=False, listings=has_listings(layout.to_json())),
        created_s=time.time(),
        **_shown(described.values),
    )


def _shown(values: bytes) -> dict[str, Any]:
    """Returns values and aliases for readers of the manifest alone; none where they would make it
    too long.

    A restore reads them from the images.
    """
    if len(values) > _MAX_SHOWN_BYTES:
        return {}
    document = msgspec.json.decode(values)
    return {"values": document["shared"], "aliases": document.get("aliases", {})}


def _require_same_root(world: World, store: Store, run_id: str) -> None:
    """Raises UsageError on a rank that finds another root than rank 0, or none."""
    try:
        commit.require_root(store, run_id)
    except StorageError as error:
        raise _apart(store, f"rank {world.rank} does not find rank 0's root of run {run_id}") from (
            error
        )


def _require_images(store: Store, images: tuple[ImageRef, ...]) -> None:
    """On rank 0: raises UsageError when the other ranks' images are not where the manifest says."""
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
    """Removes all files of a failed save: no manifest names them."""
    with contextlib.suppress(HoldfastError):
        store.remove_tree(attempt_dir(generation, attempt))


def _agree_layout(
    world: World,
    describe_state: Callable[[], tuple[Description, bytes]],
    timeout_s: float,
    begin: Callable[[], bytes],
) -> tuple[Description, Layout, bytes]:
    """Returns this rank's leaves, and all ranks' together. One rank's error is raised on all.

    ``begin``: called on rank 0 when all agree; what it returns is the last.
    """
    described: list[Description] = []
    layouts: list[Layout] = []

    def describe() -> tuple[bytes, bytes]:
        found, usage = describe_state()
        described.append(found)
        return found.table, usage

    def begin_if_agreed(columns: Sequence[Sequence[Said]]) -> bytes:
        try:
            layouts.append(_layout_of(*columns))
        except HoldfastError:  # every rank finds the same, and raises it
            return b""
        return begin()

    tables, usages, [begun] = all_said_or_raise(
        world, "save: state", describe, timeout_s=timeout_s, conclude=begin_if_agreed
    )
    layout = layouts[0] if layouts else _layout_of(tables, usages)
    return described[0], layout, begun.value


def _layout_of(tables: Sequence[Said], usages: Sequence[Said]) -> Layout:
    require_all_used([usage.value for usage in usages])
    decoded = {table.value: table_from_json(table.value) for table in tables}
    return merge([decoded[table] for table in by_rank(tables)])


def _begin(world: World, store: Store, step: int, lock: list[Lock]) -> bytes:
    """On rank 0: locks the root, and makes this save an incarnation of its own."""
    root = commit.open_root(store, run_id_of(read_newest(store)) or uuid.uuid4().hex[:12])
    owner = f"holdfast.save, process {os.getpid()} on {host_id()}"
    lock.append(store.lock(LOCK, owner))
    found = overview_of(store)
    newest = max((g.step for g in found.lineage), default=step)
    if newest > step:
        warn(
            f"step {step} is saved in {store.url}, which has step {newest}: the steps "
            f"from {step} on are abandoned by it, and a restore takes step {step}. Give step= "
            "the step that the state is of, or save it in another directory."
        )
    before = [g for g in found.lineage if g.step < step]
    parent = max(before, key=lambda g: (g.step, g.incarnation), default=None)
    if parent is None and step and any(g.step < step for g in found.undecided):
        # Earlier checkpoints are not given up because a record is missing.
        parent = Generation(max((*found.parents, *found.unreadable)), step - 1)
    incarnation = Incarnation(
        run_id=root.run_id,
        n=max((*found.parents, *found.unreadable), default=0) + 1,
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
    """Assembles this rank's image and streams it out while it grows."""
    plan = plan_copies(layout, world.rank, described.bindings)
    id_ = AttemptId(incarnation.n, generation.step, attempt, world.size, layout.hash)
    metadata = id_.image_metadata(incarnation.run_id, world.rank)
    image = fill_in(plan.image, metadata, len(described.values))
    memory = memoryview(aligned_memory(image.size_bytes))  # written past the page cache
    stage(described.bindings.volatile)
    path = image_path(generation, attempt, world.rank)
    arrival = Arrival()
    progress = CopyProgress(check=lambda: None, copied=arrival.copied, enqueued=lambda _: None)
    sink = store.create(path, image.size_bytes)
    try:
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write_image, sink, memory, arrival, path)
            try:
                seal = copy_image(
                    SlotTarget(memory, plan),
                    image,
                    described.values,
                    OvertakeDetector(Bindings(joined=described.bindings.joined)),
                    progress,
                    0,
                    computation_so_far(described.bindings.gpus),
                )
                arrival.copied(image.size_bytes)
            except BaseException as error:
                arrival.abort(f"the state could not be copied: {error}")
                raise
            written = writing.result()
        if written != WrittenImage(seal.header_xxh3, seal.table_xxh3):
            raise PersistFailed(f"{path} changed while it was written")
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    return ImageRef(
        path=path,
        rank=world.rank,
        size_bytes=image.size_bytes,
        header_xxh3=seal.header_xxh3,
        table_xxh3=seal.table_xxh3,
    )


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
    format: str | None = None,
) -> Restored:
    """Fill ``state`` from the newest checkpoint below ``path``, whatever layout it was saved in.

    ``path``: the root; or a checkpoint of another writer, of a kind that is read, whose model is
    the key ``model`` where it has no key of its own. ``state``: what is filled, as for ``save``.
    ``step``: the step to load instead, as in ``Checkpointer.restore``. ``rules``: how its tensors
    correspond to leaves of the checkpoint. ``stored_rules``: the rules that the checkpoint should
    have been saved with, where it was saved without. ``only``: patterns of the names to restore;
    everything else stays as it is. ``allow_missing``: patterns of names that need not be stored.
    ``timeout_s``: as in ``save``.
    ``format``: the format of another writer's checkpoint, where its content does not tell it.

    All ranks call it. Raises NotFound when there is no checkpoint, StateMismatch listing every
    difference, RestoreError when none could be read, or a lost record leaves open which are the
    run's (name one then); after RestoreError the state may hold a part of it and must not be used.
    The checkpoint is not pruned while it is read, if this process can write a lease below ``path``.
    """
    refuse_inside("holdfast.load()")
    timeout_s, step = duration_s("timeout_s", timeout_s), wanted_step(step)
    request = RestoreRequest(rules, stored_rules, choose(only, allow_missing))
    check_rules("rules", rules)
    check_rules("stored_rules", stored_rules)
    require_state(state)
    store = open_source(path, format, partial(parameter_orders, state), step)
    world = current_world(timeout_s=timeout_s)
    try:
        with shown_events(world.rank):
            return restore_stored(world, state, store, request, step, timeout_s=timeout_s)
    except UsageError as error:  # of the state and the rules, which know no directory
        is_ours = getattr(store, "has_block_sums", True)
        if not is_ours and os.fspath(path) not in str(error):
            error.args = (f"{os.fspath(path)}: {error}",)
        raise
    finally:
        world.close()


def open(
    path: str | os.PathLike[str], step: int | str | None = None, *, format: str | None = None
) -> CheckpointReader:
    """Open a checkpoint for reading without torch.distributed and without the training code.

    ``path``: the root, or a checkpoint of another writer, of a kind that is read. ``step``: the
    step to open; None for the newest. ``format``: as in ``load``.

    Raises NotFound when there is none, RestoreError when a lost record leaves open which are the
    run's. While it is open it is not pruned, for a day at most, if this process can write a lease
    below ``path``.
    """
    step = wanted_step(step)
    with shown_events(0):
        return CheckpointReader(open_source(path, format, step=step), step)
