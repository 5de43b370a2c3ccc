"""This host's cache: takes attempts first, and drains them to the root one after the other.

The cache's own thread writes and prunes it; the root's thread drains, between other writes there.
See docs/design/0018-tiers.md.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, Protocol

from holdfast.catalogue import (
    INCARNATIONS,
    LOCK,
    MANIFESTS,
    ROOT,
    catalogue,
    drained_path,
    find_manifest,
    layout_path,
    manifest_path,
    read_bounded,
    read_document,
    read_incarnation,
)
from holdfast.errors import (
    AlreadyPublished,
    FormatError,
    HoldfastError,
    NotFound,
    PersistFailed,
    StorageError,
)
from holdfast.events import PersistBroke, Warned, emit
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Manifest, Root
from holdfast.geometry.codec import MAX_BYTES
from holdfast.keeper.image_writer import ImageWriter, PersistJob
from holdfast.keeper.jobs import RemoteImages, write_all
from holdfast.keeper.persister import CachePersister, Outcome, Persister
from holdfast.persist import commit
from holdfast.persist.pins import copy_pin
from holdfast.persist.tiers import (
    has_file,
    mark_all_drained,
    mark_drained,
    next_to_drain,
    pinned_in,
    ranks_held,
    waiting,
)
from holdfast.policy.when import Keep
from holdfast.storage.base import Store, settle_s, sync_names
from holdfast.storage.files import may_be_same
from holdfast.storage.wrap import RateLimit

RATE = "HOLDFAST_DRAIN_BYTES_S"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
#: Seconds for which a cache is not asked again after it refused.
REFUSED_S = 60.0


class Drained(NamedTuple):
    """What came of one generation. ``reason``: why it is not in the root; "" if it is."""

    generation: Generation
    attempt: str
    reason: str = ""
    is_lost: bool = False
    """The cache has it no more as its manifest names it, or another start has its number."""


class OtherCaches(Protocol):
    """The caches of the other hosts of a run; each has the images of its own ranks."""

    def drain(self, manifest: Manifest) -> Sequence[RemoteImages]:
        """Return one share for each host that can be asked to copy its images to the root."""
        ...

    def publish(self, job: PersistJob, manifest: Manifest) -> Sequence[RemoteImages]:
        """Return one share for each host of ``job`` that is to publish the manifest."""
        ...

    def where(self, manifest: Manifest, ranks: Collection[int]) -> tuple[str, bool]:
        """Say where the images of these ranks are, and whether they may yet come."""
        ...

    def drained(self, manifest: Manifest) -> None:
        """Tell all hosts that the root has published this."""
        ...


class CacheTier:
    """One cache, locked. Created and closed on any thread; raises StorageError or RootBusy.

    In a run on several hosts each has the images of its own ranks; see ``others``.
    """

    def __init__(
        self,
        store: Store,
        root: Store,
        run_id: str,
        owner: str,
        keep: Keep,
        outcome: Outcome,
        pruned: Callable[[str], None],
        remembered: Callable[[], Collection[Incarnation]],
        *,
        limit: RateLimit | None = None,
    ) -> None:
        self.store = store
        self.place = ""
        """Its name, as trainers told it."""
        self._root, self._run_id = root, run_id
        commit.open_root(self.store, run_id)
        commit.require_root(self.store, run_id)
        self.identity = self.store.identity()
        self._lock = self.store.lock(LOCK, owner)
        try:
            mark_all_drained(self.store, root)
            _copy_records(root, self.store)
        except BaseException:
            self._lock.release()
            raise
        self.persister = CachePersister(self.store, keep, outcome, pruned, remembered)
        from holdfast.maintenance.tier_copy import TierCopy  # no keeper without a cache loads it

        self._copy_to = TierCopy
        rate = limit or RateLimit(_rate())
        self._draining, self._is_stopped, self._is_closed = threading.Lock(), False, False
        self._drain = TierCopy(self.store, root, rate, gives_way=lambda: self._is_stopped)
        self._lost: set[Generation] = set()
        self._unmarked: dict[Generation, Manifest] = {}
        """What the root has had, and could not be marked."""
        self._refused_s = float("-inf")
        self.others: OtherCaches | None = None
        """The caches of the other hosts, on the host that coordinates; None where there are none,
        or another host coordinates.
        """
        self.writer = ImageWriter(self.store)
        """Writes this host's images for a coordinator elsewhere."""
        self.writer.is_told = False

    @property
    def is_taking(self) -> bool:
        """Return True unless it refused something a short while ago."""
        return time.monotonic() >= self._refused_s + REFUSED_S

    def refused(self) -> None:
        """Record that it refused an attempt."""
        self._refused_s = time.monotonic()

    def is_gone(self) -> bool:
        """Return True if another directory is in its place by now, or none."""
        try:
            found = read_document(self.store, Root, ROOT)
            identity = self.store.identity()
        except NotFound:
            return True
        except HoldfastError:  # it cannot be read now
            return False
        return found.run_id != self._run_id or not may_be_same(self.identity, identity)

    def close(self) -> None:
        """Finish what was queued, and release the cache. Blocks."""
        self._is_closed = True
        self.stop_drain()
        self.persister.stop()
        with self._draining:  # nobody else may drain these images meanwhile
            self._lock.release()

    def fill(self, generation: Generation, ranks: Collection[int] | None = None) -> None:
        """Have a checkpoint of the root that was restored copied here, until a save comes; or the
        images of these ranks.
        """
        self.persister.submit(lambda: self._fill(generation, ranks))

    def _fill(self, generation: Generation, ranks: Collection[int] | None) -> None:
        """See ``fill``; on the cache's thread. It costs a restore from the root if it fails."""
        try:
            found = find_manifest(self._root, generation)
            if found is None or self.store.exists(manifest_path(generation)):
                return
            manifest = found[0]
            layout = read_bounded(self._root, layout_path(manifest.layout), MAX_BYTES)
            record = read_incarnation(self._root, generation.incarnation)
            copy = self._copy_to(self._root, self.store, gives_way=lambda: self.persister.has_jobs)
            sync_names(self._root, MANIFESTS)
            mark_drained(self.store, manifest)  # before it is there: the root has it
            self.persister.publish_copy(
                manifest,
                record,
                layout,
                lambda: copy.copy_files(manifest, ranks),
                is_told=ranks is None,
            )
        except PersistFailed:
            return
        except HoldfastError as error:
            text = f"{generation} was restored from the root, and not copied to the cache: {error}"
            emit(Warned(message=text))
        else:
            self.persister.prune_drained()

    # ── for a coordinator on another host ────────────────────────────────────────────────────────

    def share(self, others: OtherCaches | None, *, is_shared: bool) -> None:
        """Set this host's part in the run from now on. ``is_shared``: one of several hosts."""
        self.others = others
        self.persister.share(is_shared=is_shared)
        self.persister.spread = (lambda *_: ()) if others is None else others.publish
        self.try_lost_again()

    def try_lost_again(self) -> None:
        """Drain again what could not be: another host's cache may have it."""
        self._lost = set(self._unmarked)

    def expect(self, directories: Iterable[str]) -> None:
        """Keep what is written here: a manifest names it later. Before anything is written."""
        self.persister.unsettled.under_way.update(directories)

    def give_up(self, directories: Collection[str]) -> None:
        """Remove what was written: no manifest will name it."""

        def remove() -> None:
            named = {path for m in catalogue(self.store).manifests for path in m.directories}
            for path in directories:
                if path not in named:
                    self.store.remove_tree(path)

        self.persister.unsettled.under_way.difference_update(directories)
        self.persister.submit(lambda: _try(remove))

    def publish(self, manifest: Manifest, record: Incarnation, layout: bytes) -> None:
        """Publish a checkpoint of which this host has its images, or none. On the cache's thread,
        as all that follows; raises what a store raises.
        """
        self.persister.publish_copy(manifest, record, layout, lambda: None, is_told=False)
        self.persister.unsettled.under_way.difference_update(manifest.directories)

    def drain_own(self, manifest: Manifest, done: Callable[[int], None]) -> None:
        """Copy the images that this host has to the root; ``done`` is called with each rank. On
        one thread.
        """
        with self._draining:
            self._is_stopped = self._is_closed
            self._drain.copy_files(manifest, ranks_held(self.store, manifest), done)

    def stop_drain(self) -> None:
        """Have a drain of this host's images end soon."""
        self._is_stopped = True

    @property
    def drain_lost(self) -> str:
        """Return why no other try of the last drain can succeed; "" if one may."""
        return self._drain.lost

    def drained(self, generation: Generation, attempt: str) -> None:
        """Mark what the root has published, and apply the retention."""
        self._mark_again()
        found = find_manifest(self.store, generation)
        unsettled = self.persister.unsettled
        unsettled.newest_drained = max(unsettled.newest_drained, generation)
        if found is not None and found[0].attempt == attempt:
            self._drain.forget(found[0])
            self._mark(found[0])
        self.persister.prune_drained()

    def documents(self, generation: Generation) -> tuple[Manifest, Incarnation, bytes]:
        """Return manifest, record and layout of a checkpoint here. NotFound, FormatError."""
        found = find_manifest(self.store, generation)
        if found is None:
            raise NotFound(f"{self.store.url} has no {generation}", path=manifest_path(generation))
        return found[0], *self._documents(found[0])

    def waiting(self) -> tuple[tuple[Generation, str], ...]:
        """Return what the root has not had yet. Blocks; StorageError."""
        return tuple((m.generation, m.attempt) for m in waiting(self.store).values())

    def is_drained(self, generation: Generation, attempt: str) -> bool:
        """Return True if there is a mark that the root has had it. Blocks; StorageError."""
        return self.store.exists(drained_path(generation, attempt))

    def files(self) -> dict[str, int]:
        """Return paths and sizes of what other hosts may read here: documents, and the files that
        manifests name. Blocks; StorageError.
        """
        found = catalogue(self.store)
        refs = {ref.path: ref for m in found.manifests for ref in (*m.images, *m.parts)}
        paths = {path for path, ref in refs.items() if has_file(self.store, ref)}
        paths |= {manifest_path(m.generation) for m in found.manifests}
        paths |= {layout_path(m.layout) for m in found.manifests}
        paths |= {f"{INCARNATIONS}/{one.n}.json" for one in found.incarnations}
        sizes = {}
        for path in paths:
            with suppress(NotFound):
                sizes[path] = self.store.size_bytes(path)
        return sizes

    # ── on the root's thread ─────────────────────────────────────────────────────────────────────

    def drain_one(
        self, persister: Persister, expected: Mapping[tuple[int, int], str]
    ) -> Drained | None:
        """Drain what is next; None when nothing waits. Handles every storage error.

        ``expected``: what was cached and is not known to be drained, with the attempts.
        """
        try:
            self._mark_again()
            left = waiting(self.store)
            persister.spare(path for one in left.values() for path in one.directories)
            gone = [(Generation(*g), attempt) for g, attempt in expected.items() if g not in left]
            if gone:
                return look_for(self._root, *gone[0])
            manifest = self._next(left)
        except HoldfastError as error:
            return Drained(Generation(0, -1), "", str(error))
        if manifest is None:
            return None
        generation, attempt = manifest.generation, manifest.attempt
        self._drain.lost = ""
        try:
            record, layout = self._documents(manifest)
            persister.publish_copy(
                manifest,
                record,
                layout,
                lambda: self._copy(manifest),
                catalogue(self.store).incarnations,
            )
        except Exception as error:
            reason = str(error) or type(error).__name__
            is_lost = bool(self._drain.lost) or self._is_refused_for_good(manifest, error)
            if is_lost:
                self._lost.add(generation)
            return _not_drained(generation, attempt, reason, is_lost=is_lost)
        self._drain.forget(manifest)
        self._mark(manifest)
        if self.others is not None:
            self.others.drained(manifest)
        persister.prune(generation, is_newest=False)  # something newer may be there already
        self.persister.submit(self.persister.prune_drained)
        return Drained(generation, attempt)

    def _copy(self, manifest: Manifest) -> None:
        self._copy_together(manifest)
        copy_pin(self.store, self._root, manifest)  # before retention can see it

    def _copy_together(self, manifest: Manifest) -> None:
        """Have every host copy the images that it has; all must be in the root then."""
        shares = () if self.others is None else self.others.drain(manifest)
        here = ranks_held(self.store, manifest)
        with ThreadPoolExecutor(1, thread_name_prefix="holdfast-drain") as pool:
            there = pool.submit(write_all, shares)
            try:
                self._drain.copy_files(manifest, here)
            except BaseException as error:
                for share in shares:
                    share.abort(str(error))
                raise
            try:
                receipts = {one.image for one in there.result()}
            except PersistFailed as error:
                if any(share.is_lost for share in shares):
                    self._drain.lost = str(error)
                raise
        left = [ref for ref in manifest.images if ref.rank not in here and ref not in receipts]
        ranks = sorted(ref.rank for ref in left if not self._is_in_bucket(ref))
        if ranks:
            where, may_come = "in no cache of the hosts that are here", False
            if self.others is not None:
                where, may_come = self.others.where(manifest, ranks)
            reason = f"the images of ranks {ranks} are {where}"
            self._drain.lost = "" if may_come else reason
            raise PersistFailed(reason)

    def _is_in_bucket(self, ref: ImageRef) -> bool:
        """Return True if an earlier try copied it: a bucket has an object whole, or not."""
        if not settle_s(self._root):
            return False
        try:
            return self._root.size_bytes(ref.path) == ref.size_bytes
        except NotFound:
            return False

    def _next(self, found: Mapping[Generation, Manifest]) -> Manifest | None:
        left = {g: m for g, m in found.items() if g not in self._lost}
        return next_to_drain(left, pinned_in(self.store, self._root)) if left else None

    def _documents(self, manifest: Manifest) -> tuple[Incarnation, bytes]:
        """Return the record of its start and its layout, as the cache has them."""
        try:
            layout = read_bounded(self.store, layout_path(manifest.layout), MAX_BYTES)
            return read_incarnation(self.store, manifest.incarnation), layout
        except (FormatError, NotFound) as error:
            self._drain.lost = str(error)
            raise

    def _is_refused_for_good(self, manifest: Manifest, error: Exception) -> bool:
        """Return True if the root has another attempt at this generation, or another start of this
        number. A request of an earlier try may have landed only now: then the next try goes on.
        """
        try:
            there = find_manifest(self._root, manifest.generation)
        except HoldfastError:
            return False
        if there is not None:
            return there[0].attempt != manifest.attempt
        if not isinstance(error, AlreadyPublished):
            return False
        return str(error.fields.get("path", "")).startswith(f"{INCARNATIONS}/")

    def _mark_again(self) -> None:
        for manifest in list(self._unmarked.values()):
            self._mark(manifest)

    def _mark(self, manifest: Manifest) -> None:
        try:
            mark_drained(self.store, manifest)
            self._unmarked.pop(manifest.generation, None)
        except HoldfastError as error:  # it is marked later, and stays until then
            self._lost.add(manifest.generation)
            self._unmarked[manifest.generation] = manifest
            emit(
                Warned(message=f"{manifest.generation} is durable, and stays in the cache: {error}")
            )


def _try(act: Callable[[], None]) -> None:
    with suppress(HoldfastError):  # it is swept later
        act()


def look_for(root: Store, generation: tuple[int, int], attempt: str) -> Drained:
    """Say of what is not in the cache any more whether the root has it. Blocks; StorageError."""
    found = Generation(*generation)
    there = find_manifest(root, found)
    if there is not None and there[0].attempt == attempt:
        sync_names(root, MANIFESTS)
        return Drained(found, attempt)
    return _not_drained(found, attempt, "it is not in the cache any more", is_lost=True)


def _not_drained(generation: Generation, attempt: str, reason: str, *, is_lost: bool) -> Drained:
    if is_lost:
        reason = f"it was cached and cannot be drained: {reason}"
    else:
        reason = f"it is cached, and drained when storage takes it again: {reason}"
    emit(PersistBroke(incarnation=generation.incarnation, step=generation.step, reason=reason))
    return Drained(generation, attempt, reason, is_lost)


def _copy_records(root: Store, cache: Store) -> None:
    """Copy the records of starts that the cache lacks: its retention asks for whole lines."""
    for name in sorted(set(root.list(INCARNATIONS)) - set(cache.list(INCARNATIONS))):
        head = name.partition(".")[0]
        if head.isdecimal():
            try:
                commit.record_incarnation(cache, read_incarnation(root, int(head)))
            except (FormatError, NotFound):
                continue
            except StorageError as error:  # a full disk; the cache's retention spares more then
                emit(Warned(message=f"the cache has no record of incarnation {head}: {error}"))


def _rate() -> float:
    try:
        return max(0.0, float(os.environ.get(RATE, "") or 0.0))
    except ValueError:
        emit(Warned(message=f"{RATE} is no number of bytes a second: there is no limit"))
        return 0.0


class DrainQueue:
    """Has the root's thread drain one generation after the other. On the keeper's loop."""

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], None],
        drain: Callable[[Mapping[tuple[int, int], str]], Drained | None],
        expected: Callable[[], Mapping[tuple[int, int], str]],
        told: Callable[[Drained], None],
        call_on_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        self._submit, self._drain, self._told = submit, drain, told
        self._expected = expected
        self._call_on_loop = call_on_loop
        self._is_running, self._is_woken = False, True
        self._pause_s, self._next_s = _FIRST_PAUSE_S, 0.0
        self.is_failing = False
        """True after storage refused, until it has taken something again."""

    @property
    def is_busy(self) -> bool:
        """Return True while something is drained, or is about to be."""
        return self._is_running or (self._is_woken and not self.is_failing)

    def wake(self) -> None:
        """Look for something to drain at the next tick."""
        self._is_woken = True

    def tick(self, now_s: float) -> None:
        """Begin with the next generation, unless storage refused one a moment ago."""
        if self._is_running or not self._is_woken or now_s < self._next_s:
            return
        self._is_running, self._is_woken = True, False
        expected = self._expected()
        self._submit(lambda: self._run(expected))

    def reset(self) -> None:
        """Begin anew: the thread that was to drain has ended, and there is another."""
        self._is_running, self._is_woken, self._next_s = False, True, 0.0

    def rest(self) -> None:
        """Handle that nothing can be drained now."""
        self._is_running = False

    def _run(self, expected: Mapping[tuple[int, int], str]) -> None:
        try:
            drained = self._drain(expected)
        except Exception as error:  # the next one may succeed; this thread must go on
            drained = Drained(Generation(0, -1), "", str(error))
        self._call_on_loop(lambda: self._ended(drained))

    def _ended(self, drained: Drained | None) -> None:
        self._is_running = False
        if drained is None:
            self.is_failing = False
            return
        self._is_woken = True
        self.is_failing = bool(drained.reason) and not drained.is_lost
        if self.is_failing:
            self._next_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        else:
            self._pause_s = _FIRST_PAUSE_S
        self._told(drained)
