"""Publishes a checkpoint by its manifest, last of all, or leaves no trace; a store makes it atomic.

Images and layout are durable before the manifest names them, so a reader that finds a
manifest finds everything; the manifest is removed before anything it names, so one that
still stands is whole. Only the holder of the root's lock publishes or removes
(docs/invariants.md, 1 and 3).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from holdfast.catalogue import (
    INCARNATIONS,
    LAYOUTS,
    PARTS,
    ROOT,
    STEPS,
    Described,
    find_parent,
    generation_of,
    is_attempt_dir,
    layout_path,
    manifest_path,
    read_document,
    read_manifests,
)
from holdfast.errors import (
    AlreadyPublished,
    ChecksumMismatch,
    FormatError,
    NewerFormat,
    NotFound,
    StorageError,
)
from holdfast.events import warn
from holdfast.format.manifest import Generation, Incarnation, Lease, Manifest, Root, seal
from holdfast.geometry.layout import table_hash
from holdfast.leases import LeaseWatch, leased_paths
from holdfast.overview import Summary, indexed_records
from holdfast.persist.pins import manifests_in_pins, pinned, pinned_alone
from holdfast.storage.base import Store, remove_all, settle_s, unfinished
from holdfast.storage.files import may_be_same

#: Publications from when nothing names a file until it is removed: readers finish meanwhile.
SWEPT_AFTER = 2
#: Directories of a bucket that one publication removes, each of which is listed before: as many as
#: one adds, with its parts. Of many, as after a Keep was lowered, a part of all that are due.
_AT_ONCE, _PART_AT_ONCE = 2, 8
#: From so many ancestors on, the records of a line are looked up in a bucket's index.
_LONG_LINE = 3
_IS_OF = re.compile(rf"(?:{STEPS}|{PARTS})/([0-9]+)-([0-9]+)-")
_IS_LAYOUT = re.compile(r"[0-9a-f]+\.json").fullmatch


def open_root(store: Store, run_id: str) -> Root:
    """Reads the root's identity, or creates it. The first of two racing processes wins."""
    try:
        try:
            return read_document(store, Root, ROOT)
        except NotFound:
            with contextlib.suppress(AlreadyPublished):
                store.publish(ROOT, seal(Root(run_id=run_id, created_s=time.time())))
        return read_document(store, Root, ROOT)
    except NewerFormat:
        raise
    except FormatError as error:
        raise FormatError(
            f"{error}\nMove {ROOT} away: a new one is made, with the run id of the checkpoints "
            "that lie there. To the new one belongs what is in storage, and nothing that is in "
            "memory: that is known by the old one (`holdfast doctor` shows it).",
            path=ROOT,
        ) from error


def require_root(store: Store, run_id: str, root_id: str = "") -> None:
    """Checks that the root exists and is this run's, and creates nothing. Raises StorageError
    otherwise.

    ``root_id``: also checks that it is this very root, and no copy; see ``Store.identity``.
    """
    try:
        found = read_document(store, Root, ROOT)
        identity = store.identity() if root_id else ""
    except NotFound:
        raise StorageError(
            f"{store.url} has no {ROOT}: the root of run {run_id} was removed, moved, or is not "
            "mounted. Nothing is written there until it is back.",
            operation="read",
            path=ROOT,
            url=store.url,
        ) from None
    if found.run_id != run_id:
        raise StorageError(
            f"{store.url} is the root of run {found.run_id} by now, not of run {run_id}. Nothing "
            "is written there; put the old root back, or start the run again.",
            operation="read",
            path=ROOT,
            url=store.url,
        )
    if root_id and not may_be_same(root_id, identity):
        raise StorageError(
            f"{store.url} is another root of run {run_id} by now, a copy ({identity}, not "
            f"{root_id}): the one that this start writes to was moved or removed. Nothing is "
            "written there; put the old root back, or start the run again with its new name.",
            operation="read",
            path=ROOT,
            url=store.url,
        )


def record_incarnation(store: Store, incarnation: Incarnation) -> None:
    """Makes the incarnation and its parent durable: required before its first manifest.

    An existing record of its number is replaced only when it cannot be read, or is of this very
    start: a start that restored twice before its first save goes on from its last restore.
    """
    path = f"{INCARNATIONS}/{incarnation.n}.json"
    data = seal(incarnation)
    try:
        store.publish(path, data)
    except AlreadyPublished:
        try:
            there = read_document(store, Incarnation, path)
        except NewerFormat:
            raise
        except FormatError:  # its bytes changed after they were written
            store.publish(path, data, replace=True)
            return
        if there.nonce != incarnation.nonce:
            raise
        if there.parent != incarnation.parent:
            store.publish(path, data, replace=True)


class _StoredParents:
    """What storage has of the starts in one line; of a long one few are read that are indexed."""

    def __init__(self, store: Store) -> None:
        self._store, self._steps = store, 0
        self._indexed: dict[int, Incarnation] = {}

    def find(self, n: int) -> Incarnation | Manifest | None:
        """See ``find_parent``."""
        if self._steps == _LONG_LINE:
            self._indexed = indexed_records(self._store)
        self._steps += 1
        return self._indexed.get(n) or find_parent(self._store, n)


def record_line(
    store: Store, incarnation: Incarnation, remembered: Iterable[Incarnation]
) -> int | None:
    """Makes the incarnation durable, and before it its ancestors, oldest first.

    ``remembered``: the records that are in memory; what storage says itself comes first, but for
    what a start said of itself later (see ``Incarnations.adopt``). Returns
    the ancestor of which there is no record anywhere; None when the whole line is in storage.
    AlreadyPublished, and nothing is recorded, when what only memory knows goes on from a start
    whose number another has in storage.
    """
    known, stored = {one.n: one for one in remembered}, _StoredParents(store)
    lacking, child = [incarnation], incarnation.parent
    missing = None
    last = incarnation.n
    while child is not None and missing is None:
        n = child[0]
        if n >= last:
            raise FormatError(
                f"incarnation {last} is said to go on from incarnation {n}, which is no older: "
                "nothing of it is recorded",
                path=f"{INCARNATIONS}/{last}.json",
            )
        last = n
        there = stored.find(n)
        if there is not None:
            mine = known.get(n)
            is_another = isinstance(there, Incarnation) and mine and there.nonce != mine.nonce
            if is_another and lacking[-1].parent == child:  # as memory has it
                raise AlreadyPublished(
                    f"incarnation {lacking[-1].n} went on from incarnation {n}, of which memory "
                    f"has another start than {store.url}: nothing of it is recorded there. Start "
                    "the run again.",
                    path=f"{INCARNATIONS}/{n}.json",
                )
            if mine is not None and _is_outdated(there, mine):
                lacking.append(mine)
                there = mine
            child = there.parent
        elif n in known:
            lacking.append(known[n])
            child = known[n].parent
        else:
            missing = n
    for one in reversed(lacking):
        record_incarnation(store, one)
    return missing


def _is_outdated(there: Incarnation | Manifest, known: Incarnation) -> bool:
    """Whether memory's record belongs in place of what storage has of the very start."""
    if isinstance(there, Manifest):  # its record is lost, or cannot be read
        return there.parent == known.parent
    is_same = there.nonce == known.nonce
    return is_same and there.parent != known.parent and there.created_s < known.created_s


def write_layout(store: Store, hash_: str, data: bytes) -> None:
    """Makes a layout durable; it is stored once, for all that need it.

    Raises ChecksumMismatch when these bytes are not those that ``hash_`` names: they replace none.
    An existing file is replaced only when it is wrong itself.
    """
    if table_hash(data) != hash_:
        raise ChecksumMismatch(
            f"layout {hash_} changed in memory: its bytes are now those of {table_hash(data)}. It "
            "is not stored, and no checkpoint that needs it is published. Have the machine's "
            "memory checked.",
            path=layout_path(hash_),
        )
    try:
        store.publish(layout_path(hash_), data)
    except AlreadyPublished:
        with contextlib.suppress(NotFound):  # which a removal took since that landed late
            if store.read(layout_path(hash_)) == data:
                return
        store.publish(layout_path(hash_), data, replace=True)


def publish(store: Store, manifest: Manifest) -> None:
    """Publishes the manifest, which makes the checkpoint. Everything it names must be durable
    already.
    """
    store.publish(manifest_path(manifest.generation), seal(manifest))


def withdraw(store: Store, generation: Generation) -> bool:
    """Removes a checkpoint's manifest unless it was pinned, even just now; returns True if it was
    removed.

    Its images are removed when they are swept. The order of the steps is what makes ``pin`` safe
    without a lock: see ``holdfast.persist.pins``.
    """
    if generation in pinned(store):
        return False
    known = {}
    with contextlib.suppress(NotFound):
        known[generation] = store.read(manifest_path(generation))
    return bool(remove_unpinned(store, [generation], (), known))


def remove_unpinned(
    store: Store,
    generations: Sequence[Generation],
    trees: Sequence[str],
    known: Mapping[Generation, bytes] = MappingProxyType({}),
) -> list[Generation]:
    """Removes manifests that no pin held just now, and directories that nothing names; returns
    those that are removed: what was pinned meanwhile is published back. ``known``: bytes of
    manifests; of others those that the pin has are published, if it can be read.
    """
    held = frozenset[Generation]()
    try:
        remove_all(store, [manifest_path(generation) for generation in generations], trees)
    finally:  # some of it may be removed, whatever failed
        held = pinned(store).intersection(generations) if generations else held
        others = manifests_in_pins(store, held.difference(known))
        data = {g: known[g] for g in held if g in known} | {m.generation: d for m, d in others}
        for generation in sorted(data):
            with contextlib.suppress(AlreadyPublished):  # it was not removed
                store.publish(manifest_path(generation), data[generation])
    return [generation for generation in generations if generation not in held]


def unnamed_directories(store: Store, manifests: Iterable[Described]) -> list[str]:
    """Returns the directories of images and parts that none of ``manifests``, which must be all,
    and no pin names; and in those that are named, what was begun and never finished: nothing waits
    for it. Only names that Holdfast makes: what else a user keeps there stays.
    """
    manifests = list(manifests)
    alone, unclear = _of_pins(store, manifests, pinned(store))
    named = {path for manifest in (*manifests, *alone) for path in manifest.directories}
    begun = (path for path in unfinished(store) if path.rpartition("/")[0] in named)
    below = [path for path in directories_there(store) if not _may_name(unclear, path)]
    unnamed = (path for path in below if path not in named)
    # The lists of a bucket may lag: what was removed a moment ago is no leftover.
    there = (path for path in unnamed if not settle_s(store) or _is_there(store, path))
    return [*there, *begun]


def directories_there(store: Store) -> list[str]:
    """Returns all directories of images and parts; only names that Holdfast makes."""
    below = (f"{above}/{name}" for above in (STEPS, PARTS) for name in store.list(above))
    return [path for path in below if is_attempt_dir(path)]


def generations_of(directories: Iterable[str]) -> set[Generation]:
    """Returns the generations of the attempts that these directories are of."""
    own = filter(None, map(_IS_OF.match, directories))
    return {Generation(int(one[1]), int(one[2])) for one in own}


def _is_there(store: Store, path: str) -> bool:
    """True if there is an object of this name or below it, or one that was begun."""
    if store.exists(path) or any(f"{one}/".startswith(f"{path}/") for one in unfinished(store)):
        return True
    return any(_is_there(store, f"{path}/{name}") for name in store.list(path))


def unnamed_layouts(store: Store, manifests: Iterable[Manifest | Summary]) -> list[str]:
    """Returns the layouts that none of ``manifests``, which must be all, and no pin uses; no
    foreign files. None while a pin cannot be read, which may use any.
    """
    manifests = list(manifests)
    alone, unclear = _of_pins(store, manifests, pinned(store))
    if unclear:
        return []
    named = {layout_path(manifest.layout) for manifest in (*manifests, *alone)}
    below = (f"{LAYOUTS}/{name}" for name in store.list(LAYOUTS) if _IS_LAYOUT(name))
    return [path for path in below if path not in named]


def _of_pins(
    store: Store, manifests: Collection[Described], pins: Collection[Generation]
) -> tuple[list[Manifest], set[Generation]]:
    """Returns the manifests that pins alone have, and the generations of pins alone that cannot be
    read: one may be of a newer version, which repairs the checkpoint with what it has.
    """
    alone = pinned_alone(store, manifests, pins)
    return alone, set(pins).difference(one.generation for one in (*manifests, *alone))


def _may_name(unread: Collection[Generation], path: str) -> bool:
    """True if one of these checkpoints, whose manifests were not read, may name the directory:
    images have the name of their own checkpoint, frozen parts may be of any.
    """
    own = _IS_OF.match(path) if path.startswith(f"{STEPS}/") else None
    return bool(unread) and (own is None or Generation(int(own[1]), int(own[2])) in unread)


@dataclass(slots=True)
class Sweeper:
    """Removes files that no manifest names, at the second publication after they were first seen
    so.

    Files that a reader holds by a lease are not counted until it has finished; a reader that could
    write no lease has until then to finish. The sweeper is called by the one thread that publishes,
    between two publications, under the root's lock: so nothing it examines is about to be named. A
    layout is removed as images are, and a later checkpoint that needs it writes it again
    (``write_layout`` comes first in every publication).

    In a bucket a request may take effect long after it was sent, and an earlier holder of the lock
    may still publish what it had begun. There only what this sweeper saw named, or was told of
    (``know``), is removed, when no request of then can land any more; the rest is for ``holdfast
    prune``. A layout has one name for all who need it, so none is removed there.
    """

    store: Store
    clock: Callable[[], float] = time.monotonic
    after: int = SWEPT_AFTER
    """0 where nobody reads who could not read it elsewhere: in a cache."""
    seen: dict[str, int] = field(default_factory=dict)
    leases: LeaseWatch = field(init=False)
    _since_s: dict[str, float] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)
    spared: frozenset[str] = frozenset()
    """Directories that a later publication will name again."""
    unsettled: Container[str] = frozenset()
    """Directories of a cache that other hosts' caches may name, or are about to."""
    _rounds: int = 0
    _told: frozenset[str] = frozenset()
    _again: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How often a path was to be removed, and in which round it is next."""
    _begun: set[str] = field(default_factory=set)
    """Directories of attempts whose manifests were not seen yet."""

    def __post_init__(self) -> None:
        self.leases = LeaseWatch(self.store)

    def begin(self, directories: Iterable[str]) -> None:
        """Notes directories that an attempt is about to write."""
        self._begun.update(directories)
        self._known.update(self._begun)

    def know(self, directories: Iterable[str]) -> None:
        """Notes directories of this run's own, which a manifest names."""
        self._known.update(directories)

    def may_sweep(self, broken: Collection[tuple[str, str]]) -> bool:
        """Return False while files cannot be read, which may name what looks unnamed: it is told,
        once, as what nothing is removed from fills its disk.
        """
        paths = frozenset(path for path, _ in broken)
        if paths - self._told:
            warn(
                f"no file is removed from {self.store.url}, because "
                f"{', '.join(sorted(paths))} cannot be read and may name it: "
                "`holdfast repair` mends what a pin or another root has, or delete it"
            )
        self._told = paths
        return not paths

    def sweep(self, manifests: Iterable[Manifest]) -> list[str]:
        """Called after each publication with all manifests that are left; returns the removed
        paths.
        """
        manifests = list(manifests)
        if settle_s(self.store):
            removed = self.due(manifests, self.leases.held(), pinned(self.store))
            remove_all(self.store, [], removed)
            self.forget(removed)
            return removed
        layouts = unnamed_layouts(self.store, manifests)
        unnamed = [*unnamed_directories(self.store, manifests), *layouts]
        kept = {one for one in unnamed if one in self.unsettled or one in self.spared}
        unnamed = [path for path in unnamed if path not in kept]
        # Asked after their manifests were removed.
        removed = self._due(unnamed, self.leases.paths() if unnamed else ())
        for path in removed:
            remove = self.store.remove if path in layouts else self.store.remove_tree
            remove(path)
            self.forget([path])
        return removed

    def due(
        self,
        manifests: Iterable[Described],
        held: Iterable[Lease],
        pins: Collection[Generation],
        unread: Collection[Generation] = (),
    ) -> list[str]:
        """Returns directories of a bucket to be removed now, few at a time: of those it was told
        of, because a list of all is long. ``held`` and ``pins``: as they are now. ``unread``:
        checkpoints of which only the names are known.
        """
        manifests = list(manifests)
        refused = getattr(self.store, "refused", ())  # these stand, and may be pinned any time
        unread = {
            *unread,
            *filter(None, (generation_of(one.rpartition("/")[2]) for one in refused)),
        }
        named = {directory for manifest in manifests for directory in manifest.directories}
        self._begun -= named
        unnamed = (p for p in self._known - named - self.spared if not _may_name(unread, p))
        due = self._due(sorted(unnamed), leased_paths(held))
        if due:  # what a pin names is never removed, though its manifest is gone
            alone, unclear = _of_pins(self.store, manifests, set(pins).difference(unread))
            spared = {directory for manifest in alone for directory in manifest.directories}
            due = [path for path in due if path not in spared and not _may_name(unclear, path)]
        self._rounds += 1
        due = [path for path in due if self._again.get(path, (0, 0))[1] <= self._rounds]
        chosen = due[: max(_AT_ONCE, len(due) // _PART_AT_ONCE)]
        for path in chosen:  # one that cannot be removed rests for longer each time
            tries = self._again.get(path, (0, 0))[0] + 1
            self._again[path] = tries, self._rounds + 2**tries
        # A manifest that nobody answered may have landed since the names were listed.
        asked = generations_of(self._begun.intersection(chosen))
        landed, _ = read_manifests(self.store, sorted(asked))
        named = {directory for manifest, _ in landed for directory in manifest.directories}
        asked -= {manifest.generation for manifest, _ in landed}
        unread = {one for one in asked if self.store.exists(manifest_path(one))}
        return [path for path in chosen if path not in named and not _may_name(unread, path)]

    def forget(self, paths: Iterable[str]) -> None:
        """Drops what is known of paths that were removed, or never written to."""
        for path in paths:
            self.seen.pop(path, None)
            self._known.discard(path)
            self._begun.discard(path)
            self._again.pop(path, None)

    def _due(self, unnamed: Iterable[str], held: Collection[str]) -> list[str]:
        free = [path for path in unnamed if path not in held]
        self.seen = {path: self.seen.get(path, -1) + 1 for path in free}
        now_s, settle = self.clock(), settle_s(self.store)
        self._since_s = {path: self._since_s.get(path, now_s) for path in self.seen}
        return [
            path
            for path, times in self.seen.items()
            if times >= self.after and now_s - self._since_s[path] >= settle
        ]
