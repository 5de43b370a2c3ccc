"""Copies checkpoints from one root to another: every byte verified, each manifest last of all.

A copy that is broken off goes on where it was: a note in the target names the files that are
durable. The notes, and the files of a copy that nobody ends, are found by ``holdfast prune``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import count

import msgspec

from holdfast.catalogue import (
    COPIES,
    DAMAGED,
    INCARNATIONS,
    LOCK,
    ROOT,
    copy_note_path,
    layout_path,
    manifest_path,
    pin_path,
    read_bounded,
    read_document,
)
from holdfast.errors import (
    ChecksumMismatch,
    FormatError,
    HoldfastError,
    NotFound,
    RootBusy,
    UsageError,
)
from holdfast.format.manifest import (
    MAX_DOCUMENT_BYTES,
    Generation,
    ImageRef,
    Incarnation,
    Lineage,
    Manifest,
    Root,
    unseal,
)
from holdfast.geometry.codec import MAX_BYTES
from holdfast.leases import LeaseWatch, ReadLease
from holdfast.maintenance.good_bytes import GoodFile, copy_good
from holdfast.overview import UNSEEN, Overview, confirmed, overview
from holdfast.persist import commit
from holdfast.persist.drain_order import has_file
from holdfast.persist.pins import mend, pin, read_pins
from holdfast.restore.reading.images import StoredImage, decode_layout, read_head
from holdfast.storage.base import Store, new_name

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RootCopyPlan:
    """What is copied, oldest first. ``there``: the target has these already, with all files in
    full length; ``pins``: pinned ones.
    """

    run_id: str
    checkpoints: tuple[Manifest, ...]
    there: tuple[Manifest, ...]
    records: tuple[Incarnation, ...]
    pins: dict[Generation, str]
    broken: tuple[tuple[str, str], ...] = ()
    """Of the source: manifests and records that cannot be read, and why."""
    abandons: tuple[Generation, ...] = ()
    """Of the target: checkpoints that a start has given up whose record is copied."""
    missing: tuple[Generation, ...] = ()
    """Wanted ones that the source has no readable manifest of."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files that are named, whether the target has some of them or not."""
        return sum({r.path: r.size_bytes for m in self.checkpoints for r in _files(m)}.values())


@dataclass(slots=True)
class CopyReport:
    """What a copy has done: ``copied`` and, with the reason, ``failed`` checkpoints.

    ``pruned``: those that retention took from the source before they were copied.
    """

    copied: list[Generation] = field(default_factory=list)
    failed: list[tuple[Generation, str]] = field(default_factory=list)
    pruned: list[Generation] = field(default_factory=list)
    size_bytes: int = 0
    resumed_bytes: int = 0
    """Bytes that an earlier copy, or another checkpoint of the target, had there already."""


def plan_copy(source: Store, target: Store, wanted: Collection[Generation] | None) -> RootCopyPlan:
    """Returns what would be copied: the ``wanted`` checkpoints (None: all), their pins and records.

    Raises UsageError for one root in two roles, and FormatError where the two contradict each
    other. Nothing is written.
    """
    run_id = _common_run(source, target)
    found, there = _read(source, wanted), overview(target)
    chosen = [m for g, m in sorted(found.read.items()) if wanted is None or g in wanted]
    there = _read(target, {m.generation for m in chosen}, there)
    for store, known in ((source, found), (target, there)):
        _refuse_another_run(store, known, run_id)
    _refuse_another(source, target, chosen, there)
    _refuse_other_starts(source, target, found, there)
    line = Lineage(there.parents | found.parents, set(there.unreadable) - found.parents.keys())
    has = _whole(target, there, {manifest.generation for manifest in chosen})
    named = {m.generation for m in chosen}
    return RootCopyPlan(
        run_id=run_id,
        checkpoints=tuple(m for m in chosen if m.generation not in has),
        there=tuple(m for m in chosen if m.generation in has),
        records=found.incarnations,
        pins={g: one.note for g, one in read_pins(source).items() if g in named},
        broken=found.broken,
        abandons=tuple(g for g in there.lineage if line.is_abandoned(g)),
        missing=tuple(sorted(set(wanted or ()) - named)),
    )


def _read(
    store: Store, wanted: Collection[Generation] | None, found: Overview = UNSEEN
) -> Overview:
    """Lists a root, and reads the ``wanted`` manifests (None: all), whatever an index says."""
    found = overview(store) if found is UNSEEN else found
    there = [one for one in found.generations if wanted is None or one in wanted]
    return confirmed(store, found, [one for one in there if one not in found.read])


def copy(
    source: Store, target: Store, wanted: Collection[Generation] | None, progress: Progress
) -> tuple[RootCopyPlan, CopyReport]:
    """Copies under the target's lock. Damaged checkpoints of the source are left out, and named.

    Stopped anywhere, every checkpoint of the target is whole, and the next copy goes on.
    """
    plan = plan_copy(source, target, wanted)  # before anything is made there
    lease = ReadLease(source)
    with target.lock(LOCK, "holdfast copy"):
        commit.open_root(target, plan.run_id)
        mend(target, overview(target))
        plan = plan_copy(source, target, wanted)
        copying = _Copying(source, target, plan, progress)
        try:
            copying.copy_records(plan.records)  # first: they say which checkpoints were given up
            for manifest in plan.checkpoints:
                if lease.take(manifest):
                    copying.copy_checkpoint(manifest)
                else:
                    copying.report.pruned.append(manifest.generation)
            for manifest in plan.there:
                copying.end_copied(manifest)
        finally:
            lease.end()
    return plan, copying.report


def _files(manifest: Manifest) -> tuple[ImageRef, ...]:
    return (*manifest.images, *manifest.parts)


class _Copying:
    """One copy under way, whose caller holds the target's lock."""

    def __init__(
        self, source: Store, target: Store, plan: RootCopyPlan, progress: Progress
    ) -> None:
        self._source, self._target, self._plan = source, target, plan
        self._progress = progress
        # Of others than these only frozen parts may be named here, too.
        found = _read(target, {m.generation for m in (*plan.checkpoints, *plan.there)})
        self._known = frozenset(found.generations)
        self._named = {ref.path: ref for m in found.manifests for ref in m.parts}
        self._named |= {ref.path: ref for m in found.read.values() for ref in m.images}
        self._held = LeaseWatch(target).paths()
        self._noted = frozenset(target.list(COPIES))
        self.report = CopyReport()

    def copy_checkpoint(self, manifest: Manifest) -> None:
        """Copies one checkpoint and its pin; one that is damaged is reported."""
        generation = manifest.generation
        try:
            document = self._document(manifest)
            layout = read_bounded(self._source, layout_path(manifest.layout), MAX_BYTES)
            decode_layout(layout, manifest.layout)
            note = _Note(self._target, manifest)
            for ref in _files(manifest):
                self._copy_file(ref, note)
        except (FormatError, NotFound) as error:
            self.report.failed.append((generation, str(error)))
            return
        commit.write_layout(self._target, manifest.layout, layout)
        if generation not in self._known:  # else files of it were lost
            self._target.publish(manifest_path(generation), document)
        self._named |= {ref.path: ref for ref in _files(manifest)}
        self.report.copied.append(generation)
        self.end_copied(manifest)

    def end_copied(self, manifest: Manifest) -> None:
        """Pins what is pinned in the source, and removes the note; a pin there keeps its text."""
        generation = manifest.generation
        text = self._plan.pins.get(generation)
        if text is not None and not self._target.exists(pin_path(generation)):
            pin(self._target, generation, text)
        path = copy_note_path(generation, manifest.attempt)
        if path.rpartition("/")[2] in self._noted or generation in self.report.copied:
            _Note(self._target, manifest).end(manifest)

    def copy_records(self, records: Iterable[Incarnation]) -> None:
        """Makes the records of starts durable there, the oldest first."""
        for record in sorted(records, key=lambda one: one.n):
            there = _record_in(self._target, record.n)
            if there is None or there.created_s < record.created_s:
                commit.record_incarnation(self._target, record)

    def _document(self, manifest: Manifest) -> bytes:
        path = manifest_path(manifest.generation)
        data = read_bounded(self._source, path, MAX_DOCUMENT_BYTES)
        if unseal(Manifest, data, f"{self._source.url}/{path}") != manifest:
            raise FormatError(f"{path} changed while it was copied: copy again", path=path)
        return data

    def _copy_file(self, ref: ImageRef, note: _Note) -> None:
        if self._is_there(ref, note):
            self.report.resumed_bytes += ref.size_bytes
        else:
            note.forget(ref.path)
            is_named = ref.path in self._named  # and so was never pruned
            if ref.path.rpartition("/")[0] in self._held and not is_named:
                raise RootBusy(
                    f"{ref.path} in {self._target.url} was pruned and is still being read: nothing "
                    "is written over it. Copy again when the reader has finished.",
                    name=LOCK,
                )
            self._write(ref, note)
            note.add(ref.path)
            self.report.size_bytes += ref.size_bytes
        done = self.report.size_bytes + self.report.resumed_bytes
        self._progress(done, max(done, self._plan.size_bytes))

    def _write(self, ref: ImageRef, note: _Note) -> None:
        """Writes a file; what has its name, whole or not, keeps it until the new one is durable."""
        if self._target.exists(ref.path):
            good = GoodFile(ref, [self._source, self._target])
            aside = note.name_aside(ref.path)
            try:
                copy_good(self._target.create(ref.path, ref.size_bytes, aside=aside), good)
            except ChecksumMismatch:  # so nothing took its place: a bucket has it twice
                self._target.remove(aside)
                raise
        else:
            good = GoodFile(ref, [self._source])
            copy_good(self._target.create(ref.path, ref.size_bytes), good)

    def _is_there(self, ref: ImageRef, note: _Note) -> bool:
        """True if the target has the file, durable and as it is named."""
        named = self._named.get(ref.path)
        if named is not None and named != ref:
            raise FormatError(
                f"{ref.path} is another file in {self._target.url} than in {self._source.url}, and "
                "a checkpoint there names it. Copy to another root.",
                path=ref.path,
            )
        if named is None:
            return ref.path in note.paths and _is_good(self._target, ref)
        if not has_file(self._target, ref):
            return False
        try:
            read_head(StoredImage(self._target, ref), {})
        except HoldfastError as error:
            raise FormatError(
                f"{error} It belongs to a checkpoint of {self._target.url}: `holdfast repair "
                f"{self._target.url} --from {self._source.url}` mends it.",
                path=ref.path,
            ) from error
        return True


class _Note:
    """The files of one checkpoint that are durable in the target, in a document there.

    It also has the names of what copied files took the place of, until the checkpoint is copied.
    """

    def __init__(self, target: Store, manifest: Manifest) -> None:
        self._target = target
        self._path = copy_note_path(manifest.generation, manifest.attempt)
        self.paths: list[str] = []
        try:
            data = read_bounded(target, self._path, MAX_DOCUMENT_BYTES)
            self.paths = msgspec.json.decode(data, type=list[str])
        except (HoldfastError, ValueError, RecursionError):
            pass  # none, or none of ours: all is copied

    def add(self, path: str) -> None:
        if path not in self.paths:
            self._write([*self.paths, path])

    def forget(self, path: str) -> None:
        """Called before a file is written anew."""
        if path in self.paths:
            self._write([one for one in self.paths if one != path])

    def name_aside(self, path: str) -> str:
        """Returns the name that the file there gets when the good one takes its place."""
        names = (f"{DAMAGED}/{path}{f'-{number}' if number else ''}" for number in count())
        aside = next(name for name in names if not self._target.exists(name))
        self.add(aside)
        return aside

    def end(self, manifest: Manifest) -> None:
        """Removes the note, and first what was set aside: all files of the checkpoint are whole."""
        asides = tuple(f"{DAMAGED}/{ref.path}" for ref in _files(manifest))
        for path in self.paths:
            if path.startswith(asides):
                self._target.remove(path)
                self._target.remove(new_name(path))
        self._target.remove(self._path)

    def _write(self, paths: list[str]) -> None:
        self._target.publish(self._path, msgspec.json.encode(paths), replace=True)
        self.paths = paths


def _whole(store: Store, found: Overview, among: Collection[Generation]) -> frozenset[Generation]:
    """Returns those of which every file is there in full length, and the layout."""
    chosen = [manifest for generation, manifest in found.read.items() if generation in among]
    refs = {ref for manifest in chosen for ref in _files(manifest)}
    lost = {ref for ref in refs if not has_file(store, ref)}
    layouts = {manifest.layout for manifest in chosen}
    lost_layouts = {one for one in layouts if not store.exists(layout_path(one))}
    return frozenset(
        manifest.generation
        for manifest in chosen
        if lost.isdisjoint(_files(manifest)) and manifest.layout not in lost_layouts
    )


def _is_good(store: Store, ref: ImageRef) -> bool:
    """True if the store has all bytes of the file as they are named."""
    try:
        read_head(StoredImage(store, ref), {})
        return not GoodFile(ref, [store]).bad_blocks()
    except HoldfastError:
        return False


def _common_run(source: Store, target: Store) -> str:
    run_id = read_document(source, Root, ROOT).run_id
    try:
        other = read_document(target, Root, ROOT).run_id
    except NotFound:
        return run_id
    if source.identity() == target.identity():
        raise UsageError(f"{source.url} and {target.url} are one root: give another to copy to")
    if other != run_id:
        raise UsageError(
            f"{target.url} is the root of run {other}, {source.url} of run {run_id}: two runs "
            "never share a root. Copy to an empty one."
        )
    return run_id


def _refuse_another(
    source: Store, target: Store, chosen: Iterable[Manifest], there: Overview
) -> None:
    """Refuses checkpoints that the target has from another attempt, or cannot read."""
    broken = dict(there.broken)
    for manifest in chosen:
        path = manifest_path(manifest.generation)
        if there.read.get(manifest.generation, manifest) != manifest:
            raise FormatError(
                f"{path} in {target.url} is another checkpoint than in {source.url}: both roots "
                "were written to since they were one. Copy to an empty root.",
                path=path,
            )
        if path in broken:
            raise FormatError(
                f"{path} in {target.url} cannot be read: {broken[path]}. `holdfast repair "
                f"{target.url} --from {source.url}` mends it.",
                path=path,
            )


def _refuse_another_run(store: Store, found: Overview, run_id: str) -> None:
    """Refuses a root with documents of another run, and one of which that cannot be told."""
    pins = read_pins(store)
    said = {one.run_id for one in found.manifests} | {one.run_id for one in found.incarnations}
    said |= {one.pin.run_id for one in pins.values() if one.pin is not None}
    if others := sorted(said - {run_id}):
        raise UsageError(
            f"{store.url} has checkpoints or records of run {others[0]}, and the copy is of run "
            f"{run_id}: two runs never share a root. Copy to an empty one."
        )
    broken = [*dict(found.broken), *(pin_path(g) for g, p in pins.items() if p.pin is None)]
    if broken and not store.exists(ROOT):
        raise FormatError(
            f"{store.url} has no {ROOT}, and {', '.join(broken)} there cannot be read: of which "
            "run it is cannot be told. Copy to an empty root.",
            path=broken[0],
        )


def _refuse_other_starts(source: Store, target: Store, found: Overview, there: Overview) -> None:
    """Refuses a start that is another one in the target, and one of which that cannot be told.

    By its record's nonce, by the parent that manifests name; without a record there, a start is the
    same where both roots have one and the same manifest of it.
    """
    here, starts = found.starts, there.starts
    known = {manifest.generation: manifest.seal for manifest in found.manifests}
    same = {m.incarnation for m in there.manifests if known.get(m.generation) == m.seal}
    for n, parent in sorted(found.parents.items()):
        said = {m.parent for m in there.manifests if m.incarnation == n}
        is_other = n in starts and n in here and starts[n][0] != here[n][0]
        if (
            is_other
            or said - {parent}
            or (n not in here and there.parents.get(n, parent) != parent)
        ):
            raise FormatError(
                f"incarnation {n} in {target.url} is another start than in {source.url}: "
                "both were gone on from, so their steps are not those of one run any more. Copy "
                "to an empty root.",
                path=f"{INCARNATIONS}/{n}.json",
            )
        if n not in starts and (said or n in there.unreadable) and n not in same:
            raise FormatError(
                f"{INCARNATIONS}/{n}.json in {target.url} is missing or cannot be read: whether "
                f"incarnation {n} there is the start that it is in {source.url} cannot be told. "
                "Put that record back, or copy to an empty root.",
                path=f"{INCARNATIONS}/{n}.json",
            )


def _record_in(store: Store, n: int) -> Incarnation | None:
    try:
        return read_document(store, Incarnation, f"{INCARNATIONS}/{n}.json")
    except (NotFound, FormatError):
        return None
