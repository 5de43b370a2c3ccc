"""Makes attempts durable on a thread: images, then the manifest, then what retention drops goes.

An attempt's images are written as they are captured, into a directory of this attempt alone. Only
when all are durable, equal to what was sealed, is the manifest published; an error before leaves
the previous checkpoint as it was (promise 3).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from holdfast.catalogue import (
    PARTS,
    STEPS,
    Described,
    RootContents,
    attempt_dir,
    catalogue,
    manifest_path,
    part_dir,
)
from holdfast.errors import HoldfastError, PersistFailed
from holdfast.events import CheckpointPruned, CheckpointPublished, PersistBroke, emit
from holdfast.format.manifest import Generation, Incarnation, Manifest, checksum_in, seal, unseal
from holdfast.keeper.image_writer import ImageWriter, PersistJob, manifest_of, write_together
from holdfast.keeper.jobs import is_full, write_all
from holdfast.overview import (
    UNSEEN,
    Overview,
    PagedCheck,
    PagedList,
    leave_index,
    overview,
    read_more,
    summary_of,
)
from holdfast.persist import commit
from holdfast.persist.pins import mend, pinned, without_manifest
from holdfast.policy.when import Keep
from holdfast.storage.base import Store, holding, resume, settle_s, unsettled_s

Outcome = Callable[[str, str | None], None]
Call = Callable[[], None]
_PLACES = attempt_dir, part_dir
#: The index of a bucket is written when it lacks as many documents as the first, and there are as
#: many as the second.
_UNINDEXED, _INDEXED_FROM = 16, 5
#: So many manifests are read with a publication, of those of which only the names are known; and
#: with the one that has seen all names first.
_READ_AT_ONCE, _READ_FIRST = 8, 4
#: So many checkpoints go from a bucket with a publication, or this part of all that are to go.
_GO_AT_ONCE, _PART_AT_ONCE = 3, 8
#: A root that is full is pruned no more often: who reads there without a lease has time to end.
_FULL_PAUSE_S = 60.0
#: Of so many manifests a publication lists a page: their whole list is several requests.
_PAGED_FROM = 900


class PublicationTimes(NamedTuple):
    """What a publication took, and of that until its images were durable, and its manifest."""

    elapsed_s: float
    receipt_s: float
    publish_s: float


class _Turn(NamedTuple):
    """What a publication on a bucket does besides: each is requests, and nothing is swept then."""

    is_late: bool
    """The list of names was several."""
    is_read: bool
    """Manifests are read of which only the names are known: nothing is removed."""
    is_indexed: bool
    """What is known is left to the next keeper."""


class Persister:
    """A thread that executes jobs in order. ``done(attempt, None | reason)`` reports each result.

    ``pruned(attempt)``: old checkpoints are pruned, too, after a job that passed through rings.
    Only the next such job waits for that: its rings would stand full meanwhile. ``remembered()``:
    the records of incarnations in memory, of which storage may lack some.
    """

    def __init__(
        self,
        store: Store,
        keep: Keep,
        done: Outcome,
        pruned: Callable[[str], None] = lambda _: None,
        remembered: Callable[[], Collection[Incarnation]] = tuple,
        *,
        stall_s: float = 600.0,
    ) -> None:
        self.store = store
        self.keep = keep
        self._done, self._pruned = done, pruned
        self._stall_s = stall_s
        self._remembered = remembered
        self._recorded: set[int] = set()
        self._jobs: queue.SimpleQueue[PersistJob | Call | None] = queue.SimpleQueue()
        self._is_stopped, self._submitting = False, threading.Lock()
        self._may_resume = True
        self._resumed: PersistJob | None = None
        self._sweeper = commit.Sweeper(store)
        self._known = UNSEEN
        self._unindexed = _UNINDEXED // 2  # sooner than later ones: this keeper may end soon
        self._is_read = False
        """The last publication read manifests, and so removed nothing."""
        self._check = PagedCheck(store)
        self._first: PagedList | None = PagedList(store, _PAGED_FROM)
        """The list that this keeper begins with; None once it is whole, and after a failure."""
        self._mine: dict[Generation, Manifest] = {}
        self._written: set[tuple[object, str]] = set()
        """Layouts and records, each with the holding of the lock under which it became durable."""
        self._pruned_full_s, self.clock = -_FULL_PAUSE_S, time.monotonic
        self._lost: set[Generation] = set()
        """Pinned checkpoints that cannot be brought back, under this holding of the lock."""
        self._holding = ""
        """The holding of the lock under which all this was read and written; "" after a failure."""
        self._images = ImageWriter(store)
        self._thread = threading.Thread(target=self._work, name="holdfast-persist", daemon=True)
        self._thread.start()

    def submit(self, job: PersistJob | Call) -> None:
        """Queue an attempt, or a call that raises nothing. After ``stop`` an attempt fails, and a
        call is dropped.
        """
        with self._submitting:
            if not self._is_stopped:
                self._jobs.put(job)
                return
        if isinstance(job, PersistJob):
            self._done(job.attempt, "its thread has ended")

    @property
    def has_jobs(self) -> bool:
        """Return True if something waits for this thread."""
        return not self._jobs.empty()

    def stop(self) -> None:
        """End the thread after the queued jobs."""
        with self._submitting:
            self._is_stopped = True
            self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.work_one(job) if isinstance(job, PersistJob) else job()

    def work_one(self, job: PersistJob) -> None:
        """Make one attempt durable, and report the result; handles every storage error."""
        try:
            self._persist(job)
        except Exception as error:
            known = isinstance(error, HoldfastError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            self._forget()
            self._clean_up(job)
            if not job.aborted:
                self._tell_broke(job.generation, reason)
            self._done(job.attempt, reason)
            self._prune_if_full(error)
        else:
            self._done(job.attempt, None)
            self.prune(
                job.generation
            )  # nobody needs to wait for it: deleting takes as long as writing
            if job.is_ring:
                self._pruned(job.attempt)

    def _persist(self, job: PersistJob) -> None:
        if job.aborted:
            raise PersistFailed(job.aborted)
        is_new = self._is_known_absent(job.generation)
        if not is_new and self._is_published(job.generation, job.attempt):
            return
        started_s = time.monotonic()
        self._resume(job)
        self._sweeper.begin(place(job.generation, job.directory) for place in _PLACES)
        self._record(job.incarnation)
        parent = job.incarnation.parent
        self._images.parts.base = max(self._mine, default=parent and Generation(*parent))
        self._write_layout(job.layout, job.layout_data)
        # Other hosts first: they are told at once, and write meanwhile.
        writes = [partial(write_all, job.shares, job.fail)] if job.shares else []
        writes += [partial(self._images.write, job, image) for image in job.images.values()]
        stored = write_together(job, writes, job.at_once + bool(job.shares))
        if not job.is_complete.wait(self._stall_s) or job.aborted:
            raise PersistFailed(job.aborted or "the generation was never complete on all ranks")
        receipt_s = time.monotonic() - started_s
        manifest = manifest_of(job, stored)
        job.is_publishing = True
        self._publish_elsewhere(job, manifest)
        places = {place(job.generation, job.directory) for place in _PLACES}
        self._publish(manifest, started_s, places, receipt_s=receipt_s)

    def _publish_elsewhere(self, job: PersistJob, manifest: Manifest) -> None:
        """Do nothing: a root has one manifest for all hosts."""

    def _publish(
        self,
        manifest: Manifest,
        started_s: float,
        places: Collection[str] = (),
        *,
        receipt_s: float = 0.0,
        is_told: bool = True,
    ) -> None:
        """``places``: the directories that were prepared for it, of which it may name some.
        ``receipt_s``: the time until its images were durable.
        """
        written_s = time.monotonic()
        commit.publish(self.store, manifest)
        publish_s = time.monotonic() - written_s
        if settle_s(self.store):  # where it need not be read again: a request less
            self._mine[manifest.generation] = manifest
            self._sweeper.forget(set(places) - manifest.directories)
        if is_told:
            took = PublicationTimes(time.monotonic() - started_s, receipt_s, publish_s)
            self._tell_published(manifest, took)

    def publish_copy(
        self,
        manifest: Manifest,
        record: Incarnation,
        layout_data: bytes,
        copy: Call,
        remembered: Collection[Incarnation] = (),
        *,
        is_told: bool = True,
    ) -> None:
        """Publish a checkpoint of another tier, whose files ``copy`` makes durable here. On this
        object's thread. ``remembered``: the records of that tier. ``is_told``: by an event.
        """
        if self._is_published(manifest.generation, manifest.attempt):
            return
        started_s = time.monotonic()
        try:
            self._record(record, remembered)
            self._write_layout(manifest.layout, layout_data)
            copy()
            self._publish(manifest, started_s, is_told=is_told)
        except BaseException as error:
            self._forget()
            self._prune_if_full(error)
            raise

    def spare(self, directories: Iterable[str]) -> None:
        """Remove none of these: checkpoints name them that are published later, from a cache."""
        self._sweeper.spared = frozenset(directories)

    # What is told: a cache tells other things.

    def _tell_published(self, manifest: Manifest, took: PublicationTimes) -> None:
        emit(
            CheckpointPublished(
                incarnation=manifest.incarnation,
                step=manifest.step,
                size_bytes=manifest.size_bytes,
                reused_bytes=manifest.reused_bytes,
                images=len(manifest.images),
                elapsed_s=took.elapsed_s,
                receipt_s=took.receipt_s,
                publish_s=took.publish_s,
            )
        )

    def _tell_pruned(self, pruned: Generation, at: Generation, elapsed_s: float) -> None:
        emit(
            CheckpointPruned(
                incarnation=at.incarnation,
                step=at.step,
                pruned_step=pruned.step,
                pruned_incarnation=pruned.incarnation,
                elapsed_s=elapsed_s,
            )
        )

    def _tell_broke(self, generation: Generation, reason: str) -> None:
        emit(PersistBroke(incarnation=generation.incarnation, step=generation.step, reason=reason))

    def _resume(self, job: PersistJob) -> None:
        """Go on with what a keeper that was killed had stored of this attempt, where that is
        possible: of images that are all on this host.
        """
        if job.shares or not self._may_resume:
            return
        self._may_resume = False  # what is left is of the newest attempt, which comes first
        start = f"{job.generation.incarnation}-{job.generation.step}-{job.attempt}"
        for above in (STEPS, PARTS):
            if found := resume(self.store, above, start):
                job.directory = job.attempt + found[len(start) :]
                self._resumed = job
                return

    def _is_known(self) -> bool:
        """True if this keeper has seen the root since it took its lock, and nothing of it failed
        since: then all that changed there is its own doing. Of buckets only.
        """
        return bool(self._holding) and self._holding == holding(self.store)

    def _is_known_absent(self, generation: Generation) -> bool:
        is_listed = generation in self._known.generations
        return self._is_known() and not is_listed and generation not in self._mine

    def _write_layout(self, layout: str, data: bytes) -> None:
        """Make the layout durable; it is looked at once under one holding of a bucket's lock, in
        which nobody removes it, from when no removal of an earlier holder can land.
        """
        if not self._is_written(layout) or unsettled_s(self.store):
            commit.write_layout(self.store, layout, data)
            self._written.add((layout, holding(self.store)))

    def _is_written(self, one: object) -> bool:
        return bool(held_by := holding(self.store)) and (one, held_by) in self._written

    def note_recorded(self, incarnation: Incarnation) -> None:
        """Called when the record of a start and those of its ancestors became durable here."""
        self._written.add((incarnation, holding(self.store)))

    def _forget(self) -> None:
        """Look at everything anew after a failure."""
        self._holding, self._first, self._written = "", None, set()

    def _record(self, incarnation: Incarnation, remembered: Collection[Incarnation] = ()) -> None:
        """Record the incarnation and its ancestors, before anything is published."""
        is_listed = incarnation in self._known.incarnations
        if self._is_known() and is_listed:
            return
        if not is_listed:  # they are listed again: this one may be in the place of an earlier one
            self._known = replace(self._known, incarnations=())
        if self._is_written(incarnation):
            return
        known = [*self._remembered(), *remembered]  # of two of one number the last counts
        if incarnation.n in self._recorded:
            commit.record_incarnation(self.store, incarnation)
        elif commit.record_line(self.store, incarnation, known) is not None:
            return
        self._recorded.add(incarnation.n)
        self._written.add((incarnation, holding(self.store)))

    def _is_published(self, generation: Generation, attempt: str) -> bool:
        """Return True if an earlier keeper published this attempt. PersistFailed if it was another
        attempt.
        """
        path = manifest_path(generation)
        if not self.store.exists(path):
            return False
        data = self.store.read(path)
        there = unseal(Manifest, data, path)
        if there.attempt != attempt:
            raise PersistFailed(
                f"{generation} is published already, from another attempt; it is not replaced"
            )
        # The publisher may have died before the name was durable, or before it was told so.
        # A bucket has it or not; there, to put it again could undo a removal meanwhile.
        if not settle_s(self.store):
            self.store.publish(path, data, replace=True)
        return True

    def _clean_up(self, job: PersistJob) -> None:
        """Remove the files of this write, unless a manifest may name them, as it may those that an
        earlier keeper had begun: then the sweeper decides.
        """
        if job.is_publishing or job is self._resumed:
            return
        for directory in _PLACES:
            with contextlib.suppress(HoldfastError):  # the sweeper removes it later
                self.store.remove_tree(directory(job.generation, job.directory))

    def _prune_if_full(self, error: BaseException) -> None:
        """Prune a directory that has no room for what was to be written, as after a publication:
        there is none there, and what waits to be removed would fill it for good.
        """
        now_s = self.clock()
        if settle_s(self.store) or now_s < self._pruned_full_s + _FULL_PAUSE_S:
            return
        with contextlib.suppress(HoldfastError):
            found = catalogue(self.store)
            newest = found.latest
            if newest is None or not is_full(error, self.store, found.manifests[-1]):
                return
            self._pruned_full_s = now_s
            self._sweeper.spared = frozenset()  # what is copied of them is copied again
            self.prune(newest)

    def _overview(
        self, published: Generation, *, is_known: bool, listed: Mapping[str, str] | None = None
    ) -> Overview:
        """Read what is new in a bucket since the last publication: every manifest is a request.

        A manifest never changes there, and only this keeper publishes; the generation that it has
        just published may have been there before, from another attempt.
        """
        path = manifest_path(published)
        known = tuple(m for m in self._known.manifests if m.generation != published)
        mine = self._mine.keys() - {one.generation for one in known}
        known += tuple(summary_of(m, checksum_in(seal(m))) for m in map(self._mine.get, mine) if m)
        tags = {at: tag for at, tag in self._known.tags.items() if at != path}
        before = replace(self._known, manifests=known, tags=tags)
        has_records = is_known and bool(self._known.incarnations)
        if not has_records or before.broken or len(before.generations) < _PAGED_FROM:
            self._check = PagedCheck(self.store)
        elif (found := self._check.look(before)) is not None:
            self._known = replace(found, lacking=0)
            return self._known
        found = overview(self.store, before, has_records=has_records, is_brief=True, listed=listed)
        self._unindexed += found.lacking  # now: this keeper may end with its first publication
        self._known = replace(found, lacking=0)
        return self._known

    def prune(self, published: Generation, *, is_newest: bool = True) -> None:
        """Apply the retention policy; an error here harms no checkpoint and is only reported."""
        if self._first is None:  # else nothing has gone since these were read
            self._images.parts.forget()
        newest = {published} if is_newest else set[Generation]()
        try:
            if settle_s(self.store):
                self._prune_bucket(published, newest)
                return
            found = catalogue(self.store)  # all is read, so that damage is noticed
            if mend(self.store, found):  # a keeper was killed while it pruned
                found = catalogue(self.store)
            gone = set()
            for generation in self._condemned(found, newest | pinned(self.store)):
                if generation in self._sweeper.leases.generations():  # at a later publication
                    continue
                began_s = time.monotonic()
                if commit.withdraw(self.store, generation):
                    gone.add(generation)
                    self._tell_pruned(generation, published, time.monotonic() - began_s)
            left = [m for m in found.manifests if m.generation not in gone]
            if self._sweeper.may_sweep(found.broken):
                self._sweeper.sweep(left)
            self._images.parts.learn(left)
        except Exception as error:  # the next attempt must be made durable, whatever the error is
            self._written.clear()
            self._images.parts.forget()
            self._tell_broke(published, f"published, but pruning failed: {error}")

    def _prune_bucket(self, published: Generation, newest: set[Generation]) -> None:
        """Apply the retention policy to a bucket: one list of each kind, and one removal of all."""
        is_known, first = self._is_known(), self._first
        held_by, self._holding = holding(self.store), ""  # until all of this has succeeded
        if first is not None:
            first.look(self._mine, held_by)
            if not first.is_whole:  # until all are known nothing is removed
                self._images.parts.add(self._mine.values())
                return
        self._first = None
        found, pins = self._look(published, first, is_known=is_known)
        held = self._sweeper.leases.held()
        read = {lease.generation for lease in held}
        going = [one for one in self._condemned(found, newest | pins) if one not in read]
        turn = self._next_turn(found, first)
        if turn.is_read:
            most = _READ_FIRST if first is not None else _READ_AT_ONCE
            found = self._read_some(found, going, most)
        going = self._going_now(found, going, turn)
        # What is only about to go still names its files: it may be pinned, or not go at all. An
        # unreadable manifest may name files that appear unnamed.
        is_swept = self._sweeper.may_sweep(found.broken) and not any(turn)
        due = self._sweeper.due(found.manifests, held, pins, found.unread) if is_swept else []
        self._note_left(found, self._remove(published, going, due))
        if turn.is_indexed:
            self._unindexed = 0  # where it is refused too: the sweeper has its turns meanwhile
            with contextlib.suppress(HoldfastError):
                leave_index(self.store, self._known)
        self._holding = held_by

    def _look(
        self, published: Generation, first: PagedList | None, *, is_known: bool
    ) -> tuple[Overview, frozenset[Generation]]:
        """Return what the bucket has, and which of it is pinned."""
        found = self._overview(published, is_known=is_known, listed=first.listed if first else None)
        pins = pinned(self.store)
        # A keeper was killed while it pruned, or a request of its landed late.
        gone = without_manifest(found, pins)
        if not (is_known and gone <= self._lost):
            if mend(self.store, found, gone):
                found, gone = self._overview(published, is_known=False), set()
            self._lost = gone
        # A keeper may end with its first publication: of few checkpoints no index is left to the
        # next, so all are known at once.
        if first is not None and len(found.unread) <= _READ_FIRST:
            found = read_more(self.store, found, found.unread)
        self._sweeper.know(path for one in found.manifests for path in one.directories)
        return found, pins

    def _next_turn(self, found: Overview, first: PagedList | None) -> _Turn:
        is_late = first is not None and first.looks > 1
        is_read = self._is_read = bool(found.unread) and not self._is_read
        # A keeper that ends soon leaves what it read to the next, which begins there.
        is_due = first is not None if is_read else self._unindexed >= _UNINDEXED
        return _Turn(is_late, is_read, is_due and len(found.tags) >= _INDEXED_FROM)

    def _going_now(
        self, found: Overview, going: Sequence[Generation], turn: _Turn
    ) -> list[Generation]:
        """Return those that go with this publication: none before all that stay are whole."""
        if turn.is_late or turn.is_read or self._unread_that_stay(found):
            return []
        going = [one for one in going if one not in found.unread]
        return going[: max(_GO_AT_ONCE, len(going) // _PART_AT_ONCE)]

    def _remove(
        self, published: Generation, going: Sequence[Generation], due: Sequence[str]
    ) -> list[Generation]:
        """Remove these, and directories; return those that were not pinned meanwhile."""
        began_s = time.monotonic()
        data = {g: seal(self._mine[g]) for g in going if g in self._mine}
        gone = commit.remove_unpinned(self.store, going, due, data) if going or due else []
        took_s = time.monotonic() - began_s
        self._sweeper.forget(due)
        for generation in gone:
            self._tell_pruned(generation, published, took_s / len(gone))
        return gone

    def _note_left(self, found: Overview, gone: Collection[Generation]) -> None:
        """Remember what the bucket has now."""
        stays = [m for m in found.manifests if m.generation not in gone]
        left = {m.generation for m in stays}  # another holder may have removed some
        self._mine = {g: m for g, m in self._mine.items() if g in left}
        self._known = replace(found, manifests=tuple(stays), read={})
        self._images.parts.learn(stays)
        self._unindexed += 1 + found.lacking

    def _read_some(self, found: Overview, going: Sequence[Generation], most: int) -> Overview:
        """Read a few manifests of which only the names are known: those that stay first, as one may
        be damaged; then those that go, which say which files are their own.
        """
        unread = set(found.unread)
        going = [generation for generation in going if generation in unread]
        wanted = self._unread_that_stay(found)[-most:] or going[:most]
        found = read_more(self.store, found, wanted or found.unread[-most:])
        self._sweeper.know(path for one in found.read.values() for path in one.directories)
        return found

    def _unread_that_stay(self, found: Overview) -> list[Generation]:
        """Return those of which only the names are known, and which must be whole before another
        goes. (Of those that were read, none goes by its value that is among the best of all.)
        """
        unread, last = set(found.unread), found.lineage[-(self.keep.last or 1) :]
        return [generation for generation in last if generation in unread]

    def would_remove(self, manifest: Manifest) -> bool:
        """Return True if retention would remove this as soon as it was published. On this object's
        thread; StorageError.
        """
        if self.keep == Keep():
            return False
        if not settle_s(self.store):
            return self._would_condemn(catalogue(self.store), manifest, manifest)
        short = summary_of(manifest, "")
        is_known = self._is_known() and not self._unread_that_stay(self._known)
        return is_known and self._would_condemn(self._known, manifest, short)

    def _would_condemn(
        self, found: RootContents[Described], manifest: Manifest, described: Described
    ) -> bool:
        newest = found.latest
        if found.broken or newest is None or newest <= manifest.generation:
            return False
        if manifest.generation in found.generations:
            return False
        with_it = replace(found, manifests=(*found.manifests, described))
        return manifest.generation in self._condemned(with_it, {newest} | pinned(self.store))

    def _spared(self, found: RootContents[Described]) -> set[Generation]:
        """Return what stays whatever the policy says."""
        return set()

    def _condemned(self, found: RootContents[Described], kept: set[Generation]) -> list[Generation]:
        """Return the generations to prune: those the policy releases, and abandoned ones before the
        last.
        """
        lineage = found.lineage
        spared = kept | self._spared(found)
        condemned = list(self.keep.decide(lineage, spared, found.values_of(self.keep.by)))
        # Abandoned generations cannot be determined while a record is unreadable.
        if self.keep.last is not None and len(lineage) >= self.keep.last and not found.broken:
            first = min(lineage[-self.keep.last :])
            condemned += [g for g in found.abandoned if g < first and g not in spared]
        return condemned
