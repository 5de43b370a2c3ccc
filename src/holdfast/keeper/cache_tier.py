"""This host's cache: takes attempts first, and drains (copies) them to the root one by one.

The cache's own thread writes and prunes it; the root's thread drains, between other writes there.
See docs/design/0018-tiers.md.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

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
    manifest_there,
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
from holdfast.events import PersistBroke, emit, warn
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Manifest, Root
from holdfast.geometry.codec import MAX_BYTES
from holdfast.geometry.layout import table_hash
from holdfast.keeper.cache_persister import CachePersister
from holdfast.keeper.drain_queue import Drained
from holdfast.keeper.image_writer import ImageWriter
from holdfast.keeper.persister import Outcome, Persister
from holdfast.keeper.shared_drain import NOWHERE, SharedDrain
from holdfast.persist import commit
from holdfast.persist.drain_order import (
    has_file,
    mark_all_drained,
    mark_drained,
    next_to_drain,
    pinned_in,
    ranks_held,
    sign_cache,
    waiting,
)
from holdfast.persist.pins import copy_pin
from holdfast.policy.when import Keep
from holdfast.storage.base import Store, free_bytes, settle_s, sync_names
from holdfast.storage.files import may_be_same
from holdfast.storage.wrap import RateLimit

if TYPE_CHECKING:  # it uses the cache of its own host
    from holdfast.keeper.hosts.follower_caches import FollowerCaches

RATE = "HOLDFAST_DRAIN_BYTES_S"
#: Seconds for which a cache is not asked again after it refused.
REFUSED_S = 60.0


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
            sign_cache(self.store)
            mark_all_drained(self.store, root)
            _copy_records(root, self.store)
        except BaseException:
            self._lock.release()
            raise
        self.persister = CachePersister(self.store, keep, outcome, pruned, remembered)
        from holdfast.maintenance.tier_copy import TierCopy  # no keeper without a cache loads it

        self._copy_to = TierCopy
        rate = limit or RateLimit(_rate())
        self._draining, self._shared = threading.Lock(), SharedDrain()
        self._is_cancelled: Callable[[], bool] = lambda: False
        self._drain = TierCopy(
            self.store, root, rate, lambda: self._shared.is_closed or self._is_cancelled()
        )
        self._lost: set[Generation] = set()
        self._is_exact_next = True
        self._unmarked: dict[Generation, Manifest] = {}
        """What the root has had, and could not be marked."""
        self._refused_s = float("-inf")
        self.others: FollowerCaches | None = None
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
        self.end_drains()
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
            self._require_room(manifest, ranks)
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
            warn(text)
        else:
            self.persister.prune_drained()

    def _require_room(self, manifest: Manifest, ranks: Collection[int] | None) -> None:
        """Raise StorageError unless there is room for these files, and for as many after them:
        what is to be stored comes first.
        """
        refs = (*manifest.images, *manifest.parts)
        needed = 2 * sum(one.size_bytes for one in refs if ranks is None or one.rank in ranks)
        free = free_bytes(self.store)
        if free is not None and free < needed:
            raise StorageError(
                f"{needed} bytes are needed, with room for the next save, and {free} are free in "
                f"{self.store.url}",
                operation="fill",
                path=manifest_path(manifest.generation),
                url=self.store.url,
            )

    # ── for a coordinator on another host ────────────────────────────────────────────────────────

    def share(self, others: FollowerCaches | None, *, is_shared: bool) -> None:
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

    def drain_own(
        self,
        manifest: Manifest,
        done: Callable[[int], None],
        is_cancelled: Callable[[], bool] = lambda: False,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy the images that this host has to the root; ``done`` is called with each rank,
        ``progressed`` often meanwhile. On one thread. It ends soon once ``is_cancelled``.
        """
        with self._draining:  # an earlier coordinator may have ordered one that goes on
            self._drain.lost = ""  # the one before says nothing of this one
            ranks = ranks_held(self.store, manifest)
            self._is_cancelled = is_cancelled
            self._drain.copy_files(manifest, ranks, done, progressed)

    def _copy_own(self, manifest: Manifest, ranks: Collection[int]) -> None:
        with self._draining:  # an earlier coordinator may have ordered one that goes on
            self._is_cancelled = lambda: False
            self._drain.copy_files(manifest, ranks)

    def end_drains(self) -> None:
        """Have the drain under way end soon, on all hosts, and every later one at once."""
        self._shared.close()

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
        self,
        persister: Persister,
        expected: Mapping[tuple[int, int], str],
        exact: Collection[tuple[int, int]] = (),
    ) -> Drained | None:
        """Drain what is next; None when nothing waits. Handles every storage error.

        ``expected``: what was cached and is not known to be drained, with the attempts; ``exact``:
        those that must be durable themselves.
        """
        if self._shared.is_closed:
            return None
        try:
            self._mark_again()
            left = waiting(self.store)
            persister.spare(path for one in left.values() for path in one.directories)
            gone = [(Generation(*g), attempt) for g, attempt in expected.items() if g not in left]
            if gone:
                return look_for(self._root, *gone[0])
            pins = pinned_in(self.store, self._root) if left else set[Generation]()
            manifest = self._next(left, pins, exact)
            if manifest is not None and self._is_superseded(persister, manifest, pins, exact):
                return self._pass_over(manifest)
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
            if self._shared.is_closed:  # who opens the cache next goes on with it
                return None
            reason = str(error) or type(error).__name__
            is_lost = bool(self._drain.lost) or self._is_refused_for_good(manifest, error)
            if is_lost:
                self._lost.add(generation)
            return _not_drained(generation, attempt, reason, is_lost=is_lost)
        self._note_drained(manifest)
        persister.prune(generation, is_newest=False)  # something newer may be there already
        return Drained(generation, attempt)

    def _note_drained(self, manifest: Manifest) -> None:
        self._drain.forget(manifest)
        self._mark(manifest)
        if self.others is not None:
            self.others.drained(manifest)
        self.persister.submit(self.persister.prune_drained)

    def _is_superseded(
        self,
        persister: Persister,
        manifest: Manifest,
        pins: Collection[Generation],
        exact: Collection[tuple[int, int]],
    ) -> bool:
        if manifest.generation in pins or manifest.generation in exact:
            return False
        try:
            n = manifest.incarnation
            is_known = persister.would_remove(manifest) and (
                read_incarnation(self._root, n).nonce == read_incarnation(self.store, n).nonce
            )
        except (FormatError, NotFound):
            return False
        return is_known

    def _pass_over(self, manifest: Manifest) -> Drained:
        """Let the cache drop what the root would drop at once."""
        self._note_drained(manifest)
        return Drained(manifest.generation, manifest.attempt, is_superseded=True)

    def _copy(self, manifest: Manifest) -> None:
        self._copy_together(manifest)
        self._shared.require_open()
        copy_pin(self.store, self._root, manifest)  # before retention can see it

    def _copy_together(self, manifest: Manifest) -> None:
        """Have every host copy the images that it has; all must be in the root then. A host that
        cannot take part fails it only if something is missing.
        """
        here = ranks_held(self.store, manifest)
        shares, failure = self._shared.run(
            lambda: () if self.others is None else self.others.drain(manifest),
            lambda: self._copy_own(manifest, here),
        )
        if failure is not None and not all(share.has_ended for share in shares):
            raise failure  # who hangs may write there yet
        receipts = {one.image for share in shares for one in share.stored.values()}
        copied = {ref.rank for ref in manifest.images if ref in receipts} | here
        left = [ref for ref in (*manifest.images, *manifest.parts) if ref.rank not in copied]
        ranks = sorted({ref.rank for ref in left if not self._is_in_bucket(ref)})
        if ranks and failure is not None:
            if any(share.is_lost for share in shares):
                self._drain.lost = str(failure)
            raise failure
        if ranks:
            reason, may_come = f"the images of ranks {ranks} {NOWHERE}", False
            if self.others is not None:
                reason, may_come = self.others.explain(manifest, ranks)
            self._drain.lost = "" if may_come else reason
            raise PersistFailed(reason)
        self._require_there(manifest)
        self._shared.tell_absent(manifest, failure)

    def _require_there(self, manifest: Manifest) -> None:
        """Raise PersistFailed unless a directory has every file: two hosts may have had one, as of
        a cloned disk, and the second has put the first one's file away.
        """
        refs = () if settle_s(self._root) else (*manifest.images, *manifest.parts)
        gone = [ref.path for ref in refs if not has_file(self._root, ref)]
        if gone:
            raise PersistFailed(f"{', '.join(gone)} was copied to the root and is not there")

    def _is_in_bucket(self, ref: ImageRef) -> bool:
        """Return True if an earlier try copied it: a bucket has an object whole, or not."""
        if not settle_s(self._root):
            return False
        try:
            return self._root.size_bytes(ref.path) == ref.size_bytes
        except NotFound:
            return False

    def _next(
        self,
        found: Mapping[Generation, Manifest],
        pins: Collection[Generation],
        exact: Collection[tuple[int, int]],
    ) -> Manifest | None:
        """Return what is drained next: of those that must be durable themselves the oldest, by
        turns with the newest, so that none waits for ever while newer ones keep coming.
        """
        left = {g: m for g, m in found.items() if g not in self._lost}
        self._is_exact_next = not self._is_exact_next
        return next_to_drain(left, pins, exact if self._is_exact_next else ())

    def _documents(self, manifest: Manifest) -> tuple[Incarnation, bytes]:
        """Return the record of its start and its layout, as the cache has them."""
        try:
            return read_incarnation(self.store, manifest.incarnation), self._layout(manifest.layout)
        except (FormatError, NotFound) as error:
            self._drain.lost = str(error)
            raise

    def _layout(self, hash_: str) -> bytes:
        """Return a layout as the cache has it; as the root has it where that is damaged."""
        path = layout_path(hash_)
        for store in (self.store, self._root):
            with suppress(FormatError, NotFound):
                data = read_bounded(store, path, MAX_BYTES)
                if table_hash(data) == hash_:
                    return data
        raise FormatError(f"{path} is damaged or gone in {self.store.url}", path=path)

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
            warn(f"{manifest.generation} is durable, and stays in the cache: {error}")


def _try(act: Callable[[], None]) -> None:
    with suppress(HoldfastError):  # it is swept later
        act()


def look_for(root: Store, generation: tuple[int, int], attempt: str) -> Drained:
    """Say of what is not in the cache any more whether the root has it. Blocks; StorageError."""
    found = Generation(*generation)
    there = manifest_there(root, found)
    if there is not None and there.attempt == attempt:
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
                warn(f"the cache has no record of incarnation {head}: {error}")


def _rate() -> float:
    try:
        return max(0.0, float(os.environ.get(RATE, "") or 0.0))
    except ValueError:
        warn(f"{RATE} is no number of bytes a second: there is no limit")
        return 0.0
