"""Mends what is damaged or missing in a root, from wherever the named bytes still are.

Only what manifests name is brought back, proved by its checksums: by one rename, or one conditional
request. The good bytes are durable before the bad ones are set aside, and nothing is ever removed.
A manifest is brought back last, and only when all that it names is whole. What nobody has is named:
the pieces of leaves that are lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec
from msgspec import structs

from holdfast.catalogue import (
    DAMAGED,
    INCARNATIONS,
    LAYOUTS,
    LOCK,
    MANIFESTS,
    ROOT,
    STEPS,
    Catalogue,
    catalogue,
    generation_of,
    layout_path,
    manifest_path,
    read_bounded,
    read_document,
)
from holdfast.errors import (
    FormatError,
    HoldfastError,
    NewerFormat,
    NotFound,
    RootBusy,
    StorageError,
    UsageError,
)
from holdfast.format.checksum import BLOCK_BYTES, checksum
from holdfast.format.manifest import (
    MAX_DOCUMENT_BYTES,
    Generation,
    ImageRef,
    Incarnation,
    Manifest,
    Root,
    seal,
    unseal,
)
from holdfast.geometry.codec import MAX_BYTES
from holdfast.geometry.layout import Layout, table_hash
from holdfast.maintenance.good_bytes import (
    ByteSource,
    GoodFile,
    copy_good,
    header_in,
    require_damage,
    table_in,
)
from holdfast.maintenance.leased_roots import gone_since, leased, pruned_text
from holdfast.persist.pins import read_pins
from holdfast.protocol.image_plan import plan_rank
from holdfast.storage.base import Store

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class FileDamage:
    """A file that is not what its manifests name. ``lost``: pieces of leaves that nobody has."""

    ref: ImageRef
    generations: tuple[Generation, ...]
    faults: tuple[str, ...]
    blocks: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Its name."""
        return self.ref.path

    @property
    def is_mendable(self) -> bool:
        """True if all of its bytes are somewhere."""
        return not self.lost


@dataclass(frozen=True, slots=True)
class DocumentDamage:
    """A layout, manifest or record that cannot be read. ``data``: its bytes, from elsewhere."""

    path: str
    fault: str
    data: bytes | None
    generations: tuple[Generation, ...] = ()
    """Those that are lost without it."""
    manifest: Manifest | None = None
    """What ``data`` says, if it is a manifest."""
    lacks: tuple[str, ...] = ()
    """What a manifest names and nobody has whole: it is not brought back."""

    @property
    def is_mendable(self) -> bool:
        """True if its bytes are somewhere, with all that it names."""
        return self.data is not None and not self.lacks


Damage = DocumentDamage | FileDamage


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What is damaged in a root, and what of it can be mended. ``unread``: files that could not be
    examined, and why.
    """

    documents: tuple[DocumentDamage, ...]
    files: tuple[FileDamage, ...]
    checkpoints: int
    unread: tuple[tuple[str, str], ...] = ()

    @property
    def damages(self) -> tuple[Damage, ...]:
        """All of it, documents first."""
        return (*self.documents, *self.files)


@dataclass(slots=True)
class RepairReport:
    """What a repair has done: the mended paths, each with where its bad bytes are now ("": there
    were none), and those that it failed at, with the reason.
    """

    mended: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def plan_repair(
    store: Store,
    sources: Sequence[Store],
    wanted: Collection[Generation] | None,
    progress: Progress = lambda *_: None,
    memory: Sequence[ByteSource] = (),
) -> RepairPlan:
    """Reads every block of the ``wanted`` checkpoints (None: all); what is damaged is looked for in
    ``sources``, in the pins, in every other file of these roots, and in ``memory``.
    """
    with leased([store, *sources]) as known:
        return _survey(store, sources, known, wanted, progress, memory)[0]


def repair(
    store: Store,
    sources: Sequence[Store],
    wanted: Collection[Generation] | None,
    progress: Progress = lambda *_: None,
    memory: Sequence[ByteSource] = (),
) -> tuple[RepairPlan, RepairReport]:
    """Mends under the root's lock all that can be mended; returns what was found and what was done.

    Stopped anywhere, each file is the damaged one or the mended one. RootBusy when a source is
    pruned so fast that what is damaged cannot be told: then nothing is mended.
    """
    _require_one_run(store, sources)
    with store.lock(LOCK, "holdfast repair"), leased(sources) as others:
        known = [(store, catalogue(store)), *others]
        plan, elsewhere = _survey(store, sources, known, wanted, progress, memory)
        report = _Repair(store, [*sources, *memory], plan, elsewhere).run()
        gone = [pruned_text(place, there) for place, there in known if gone_since(place, there)]
        failed = {path: " ".join([reason, *gone]) for path, reason in report.failed.items()}
        return plan, replace(report, failed=failed)


def _require_unpruned(
    store: Store, roots: Iterable[tuple[Store, Catalogue]], damages: Iterable[Damage]
) -> None:
    """Raises RootBusy where damage was found that may be none: a file was pruned, or its copy."""
    damages = list(damages)
    is_lost = not all(damage.is_mendable for damage in damages)
    for place, there in roots:
        if damages and (is_lost or place is store) and gone_since(place, there):
            raise RootBusy(pruned_text(place, there) + " Nothing was mended.", name=LOCK)


def _survey(
    store: Store,
    sources: Sequence[Store],
    roots: Sequence[tuple[Store, Catalogue]],
    wanted: Collection[Generation] | None,
    progress: Progress,
    memory: Sequence[ByteSource],
) -> tuple[RepairPlan, _Elsewhere]:
    """``roots``: the root itself, and the sources, as they were read."""
    run_id = _require_one_run(store, sources)
    found, *others = [known for _, known in roots]
    for place, path in ((place, path) for place, known in roots for path, _ in known.broken):
        _try_read(place, path)  # an outage is no damage
    _refuse_forks(store, found, sources, others)
    broken = [*_manifests(store, found, run_id, sources, wanted)]
    manifests = [m for m in found.manifests if wanted is None or m.generation in wanted]
    brought = [one.manifest for one in broken if one.manifest is not None]
    manifests += brought
    layouts = _Layouts(store, sources)
    documents = [*layouts.damages(manifests), *_records(store, found, others, wanted)]
    elsewhere = _Elsewhere(
        (place, ref) for place, known in roots for ref in _named([*known.manifests, *brought])
    )
    search = _DamageSearch(store, [*sources, *memory], elsewhere, layouts, progress)
    files = search.damages(manifests)
    damages: list[Damage] = [*documents, *files]
    bad = {one.path for one in damages if not one.is_mendable} | search.unread.keys()
    documents += [replace(one, lacks=_named_in(one.manifest, bad)) for one in broken]
    unread = tuple(search.unread.items())
    _require_unpruned(store, roots, [*documents, *files])
    return RepairPlan(tuple(documents), tuple(files), len(manifests), unread), elsewhere


class _Repair:
    """One repair under way, whose caller holds the root's lock: what a manifest names comes before
    it.
    """

    def __init__(
        self, store: Store, sources: Sequence[ByteSource], plan: RepairPlan, elsewhere: _Elsewhere
    ) -> None:
        self._store, self._stores = store, [store, *sources]
        self._plan, self._elsewhere = plan, elsewhere
        self._report = RepairReport()

    def run(self) -> RepairReport:
        documents = [one for one in self._plan.documents if one.is_mendable]
        for layout in (one for one in documents if one.path.startswith(f"{LAYOUTS}/")):
            self._try(self._put, layout)
        for file in (one for one in self._plan.files if one.is_mendable):
            self._try(self._write, file)
        for record in (one for one in documents if one.path.startswith(f"{INCARNATIONS}/")):
            self._try(self._put, record)
        damaged = {one.path for one in self._plan.damages}
        for document in (one for one in documents if one.manifest is not None):
            if not _named_in(document.manifest, damaged - self._report.mended.keys()):
                self._try(self._put, document)
        return self._report

    def _try(self, mend: Callable[[Damage, str], None], damage: Damage) -> None:
        """One that fails leaves the others to be mended."""
        try:
            aside = _free_name(self._store, damage.path)
            is_there = self._store.exists(damage.path)
            mend(damage, aside)
            self._report.mended[damage.path] = aside if is_there else ""
        except HoldfastError as error:
            self._report.failed[damage.path] = str(error)

    def _write(self, damage: Damage, aside: str) -> None:
        assert isinstance(damage, FileDamage)
        good = GoodFile(damage.ref, self._stores, self._elsewhere.find)
        copy_good(self._store.create(damage.path, good.size_bytes, aside=aside), good)

    def _put(self, damage: Damage, aside: str) -> None:
        assert isinstance(damage, DocumentDamage) and damage.data is not None
        sink = self._store.create(damage.path, len(damage.data), aside=aside)
        try:
            sink.write(0, memoryview(damage.data))
            sink.finish()
        except BaseException:
            sink.abort()
            raise


def _free_name(store: Store, path: str) -> str:
    names = (f"{DAMAGED}/{path}{f'-{number}' if number else ''}" for number in count())
    return next(name for name in names if not store.exists(name))


def _require_one_run(store: Store, sources: Sequence[Store]) -> str:
    """Returns the run's id. UsageError where a source is this root, or of another run."""
    run_id = read_document(store, Root, ROOT).run_id
    for source in sources:
        other = read_document(source, Root, ROOT).run_id
        if source.identity() == store.identity():
            raise UsageError(f"{source.url} is the root that is to be repaired: give a copy of it")
        if other != run_id:
            raise UsageError(
                f"{source.url} is the root of run {other}, {store.url} of run {run_id}: nothing "
                "of the one is in the other. Give a copy of this root."
            )
    return run_id


def _refuse_forks(
    store: Store, found: Catalogue, sources: Sequence[Store], others: Sequence[Catalogue]
) -> None:
    """Refuses sources that were gone on from by another start than this root."""
    manifests = {m.generation: m for m in found.manifests}
    for source, other in zip(sources, others, strict=True):
        starts = other.starts
        differ = [
            n for n, (nonce, _) in found.starts.items() if starts.get(n, (nonce,))[0] != nonce
        ]
        differ += [m.incarnation for m in other.manifests if manifests.get(m.generation, m) != m]
        if differ:
            raise FormatError(
                f"incarnation {differ[0]} in {source.url} is another start than in {store.url}: "
                "both were gone on from, so the one tells nothing of the other. Give a copy of "
                "this root.",
                path=f"{INCARNATIONS}/{differ[0]}.json",
            )


def _named(manifests: Iterable[Manifest]) -> list[ImageRef]:
    """Returns each file once that manifests name."""
    refs = (ref for m in manifests for ref in (*m.images, *m.parts))
    return list({ref.path: ref for ref in refs}.values())


def _named_in(manifest: Manifest | None, paths: Collection[str]) -> tuple[str, ...]:
    """Returns those of ``paths`` that the manifest names."""
    if manifest is None:
        return ()
    named = {layout_path(manifest.layout), *(ref.path for ref in _named([manifest]))}
    return tuple(sorted(named.intersection(paths)))


def _manifests(
    store: Store,
    found: Catalogue,
    run_id: str,
    sources: Sequence[Store],
    wanted: Collection[Generation] | None,
) -> Iterator[DocumentDamage]:
    """Yields manifests that cannot be read, or that only a pin has, with what they were by a pin or
    by another root.
    """
    attempts = frozenset(store.list(STEPS))
    pins = read_pins(store)
    there = {manifest.generation for manifest in found.manifests}
    faults = {manifest_path(g): (g, "it is missing, and it is pinned") for g in pins.keys() - there}
    for path, fault in found.broken:
        above, _, name = path.partition("/")
        generation = generation_of(name) if above == MANIFESTS else None
        if generation is not None:
            faults[path] = generation, fault
    for path, (generation, fault) in sorted(faults.items(), key=lambda one: one[1][0]):
        if wanted is not None and generation not in wanted:
            continue
        pin = pins[generation].pin if generation in pins else None
        copies = [] if pin is None else [(pin.manifest.encode(), True)]
        read = (_try_read(source, path) for source in sources)
        copies += [(data, False) for data in read if data is not None]
        good = None
        for data, is_pinned in copies:
            manifest = _manifest_in(data)
            if manifest is None or good is not None or manifest.run_id != run_id:
                continue
            is_of_attempt = is_pinned or manifest.images[0].path.split("/")[1] in attempts
            if manifest.generation == generation and is_of_attempt:
                good = data, manifest
        bytes_, manifest = good or (None, None)
        yield DocumentDamage(path, fault, bytes_, manifest=manifest)


def _manifest_in(data: bytes) -> Manifest | None:
    try:
        return unseal(Manifest, data, "a manifest")
    except NewerFormat:
        raise
    except HoldfastError:
        return None


def _records(
    store: Store,
    found: Catalogue,
    others: Sequence[Catalogue],
    wanted: Collection[Generation] | None,
) -> Iterator[DocumentDamage]:
    """Yields records of starts that cannot be read, or that the lineage lacks: with each that is
    mended, the lineage leads on.
    """
    broken, known, done = dict(found.broken), found, set[int]()
    while left := sorted(_wanted_records(known, wanted) - done):
        n = left[-1]
        done.add(n)
        path = f"{INCARNATIONS}/{n}.json"
        there = _try_read(store, path)
        proved = (one for other in others if (one := _proved(n, found, other, there)) is not None)
        good = next(proved, None)
        if good is not None:
            known = structs.replace(known, incarnations=(*known.incarnations, good))
        fault = broken.get(path, f"{path} is missing")
        yield DocumentDamage(path, fault, None if good is None else seal(good))


def _wanted_records(known: Catalogue, wanted: Collection[Generation] | None) -> set[int]:
    """Returns the incarnations whose records are needed and cannot be read."""
    if wanted is None:
        missing = known.line.missing
        return {*known.unreadable, *([] if missing is None else [missing])}
    line = {n for generation in wanted for n in _line(known, generation.incarnation)}
    return {n for n in line if n in known.unreadable or n not in known.parents}


def _line(known: Catalogue, n: int) -> list[int]:
    """Returns incarnation ``n`` and those before it, as far as they are known."""
    line, parents = [n], known.parents
    while (parent := parents.get(line[-1])) is not None and parent[0] not in line:
        line.append(parent[0])
    return line


def _proved(n: int, found: Catalogue, other: Catalogue, there: bytes | None) -> Incarnation | None:
    """Returns the record of incarnation ``n`` in another root, if it is proved to be of this start.

    A root that was gone on from by another start has one of the same number. Proof is a manifest or
    record that both have, of this start or of one that descends from it; or the damaged bytes still
    say the same.
    """
    record = next((one for one in other.incarnations if one.n == n), None)
    said = {m.parent for m in found.manifests if m.incarnation == n}
    if record is None or not said <= {record.parent}:
        return None
    ours = {m.generation: m for m in found.manifests}
    both = {m.incarnation for m in other.manifests if ours.get(m.generation) == m}
    both |= {one.n for one in other.incarnations if one in found.incarnations}
    is_shared = any(n in _line(other, one) for one in both)
    return record if is_shared or _says(there or b"", record) else None


def _says(damaged: bytes, record: Incarnation) -> bool:
    """True if the bytes of a damaged record have the start and the parent of this one."""
    said = (f'"{name}":'.encode() for name in ("nonce", "parent"))
    values = (msgspec.json.encode(one) for one in (record.nonce, record.parent))
    return all(key + value in damaged for key, value in zip(said, values, strict=True))


def _try_read(store: Store, path: str, limit_bytes: int = MAX_DOCUMENT_BYTES) -> bytes | None:
    try:
        return read_bounded(store, path, limit_bytes)
    except HoldfastError as error:
        require_damage(error)
        return None


class _Layouts:
    """The layouts of checkpoints, from whichever root has them whole."""

    def __init__(self, store: Store, sources: Sequence[Store]) -> None:
        self._store, self._sources = store, sources
        self._known: dict[str, bytes | None] = {}

    def damages(self, manifests: Iterable[Manifest]) -> Iterator[DocumentDamage]:
        """Yields the layouts that are damaged or missing in the root itself."""
        manifests = list(manifests)
        for hash_ in sorted({manifest.layout for manifest in manifests}):
            path = layout_path(hash_)
            here = _try_read(self._store, path, MAX_BYTES)
            self._known[hash_] = here
            if here is not None and table_hash(here) == hash_:
                continue
            read = (_try_read(source, path, MAX_BYTES) for source in self._sources)
            good = next((data for data in read if data and table_hash(data) == hash_), None)
            self._known[hash_] = good
            is_there = here is not None or self._store.exists(path)
            fault = "its bytes changed after they were written" if is_there else "it is missing"
            without = tuple(m.generation for m in manifests if m.layout == hash_)
            yield DocumentDamage(path, fault, good, () if good else without)

    def pieces(self, manifest: Manifest, ref: ImageRef) -> list[str]:
        """Returns all pieces that a file has by the layout; no name where there is no layout."""
        data = self._known.get(manifest.layout)
        if data is None:
            return [f"all of rank {ref.rank}, whose layout is lost too"]
        plan = plan_rank(Layout.from_json(data), ref.rank)
        parts = {part.rank: part.path for part in manifest.parts}
        gap = plan.gap[0] if plan.gap is not None and ref.rank in parts else 0
        is_part = parts.get(ref.rank) == ref.path
        names = [one.name for one in plan.entries if not gap or (one.offset < gap) == is_part]
        return names if is_part else [*names, f"the plain values of rank {ref.rank}"]


class _Elsewhere:
    """Every block that the roots have in any file, found by its checksum: what replicas stored."""

    def __init__(self, files: Iterable[tuple[Store, ImageRef]]) -> None:
        self._files = list(files)
        self._turn = threading.Lock()
        self._places: dict[int, list[tuple[int, int]]] | None = None

    def find(self, sum_: int, size_bytes: int) -> bytes | None:
        """Returns a block of this checksum and length, None where no file has it whole."""
        with self._turn:  # threads that write ask for blocks at once
            if self._places is None:  # read when the first block is missing
                self._places = self._read_places()
        for file, start in self._places.get(sum_, ()):
            store, ref = self._files[file]
            data = _try_range(store, ref.path, start, size_bytes)
            if data is not None and checksum(data) == sum_:  # else it is damaged, or shorter
                return data
        return None

    def _read_places(self) -> dict[int, list[tuple[int, int]]]:
        """Returns the files, by their numbers, and offsets of each checksum."""
        places: dict[int, list[tuple[int, int]]] = {}
        for file, (store, ref) in enumerate(self._files):
            try:
                good = GoodFile(ref, [store])
            except HoldfastError as error:
                require_damage(error)
                continue
            assert good.header is not None
            for number, sum_ in enumerate(good.sums):
                start = good.header.data_start + number * BLOCK_BYTES
                places.setdefault(sum_, []).append((file, start))
        return places


def _try_range(store: Store, path: str, start: int, size_bytes: int) -> bytes | None:
    try:
        return store.read(path, start, size_bytes)
    except HoldfastError as error:
        require_damage(error)
        return None


class _DamageSearch:
    """Looks for damage in files, and for what is lost."""

    def __init__(
        self,
        store: Store,
        sources: Sequence[ByteSource],
        elsewhere: _Elsewhere,
        layouts: _Layouts,
        progress: Progress,
    ) -> None:
        self._store, self._stores = store, [store, *sources]
        self._elsewhere, self._layouts = elsewhere, layouts
        self._progress, self._done = progress, 0
        self.unread: dict[str, str] = {}

    def damages(self, manifests: Sequence[Manifest]) -> list[FileDamage]:
        """Returns the damaged files of these checkpoints; ``unread`` has those that an outage of
        storage left unexamined.
        """
        refs, found = _named(manifests), []
        total = sum(ref.size_bytes for ref in refs)
        for ref in refs:
            naming = [m for m in manifests if ref in m.images or ref in m.parts]
            try:
                damage = self._examine(ref, naming)
            except StorageError as error:
                damage, self.unread[ref.path] = None, str(error)
            self._done += ref.size_bytes
            self._progress(self._done, total)
            if damage is not None:
                found.append(damage)
        return found

    def _examine(self, ref: ImageRef, naming: list[Manifest]) -> FileDamage | None:
        generations = tuple(m.generation for m in naming)
        faults = list(self._faults(ref))
        try:
            good = GoodFile(ref, self._stores, self._elsewhere.find)
        except FormatError as error:
            lost = tuple(self._layouts.pieces(naming[0], ref))
            return FileDamage(ref, generations, (*faults, str(error)), (), lost)
        assert good.header is not None
        if not faults and table_in(self._store, ref, good.header) is None:
            faults.append("its block table changed after it was written")
        blocks = good.bad_blocks()
        if blocks and not faults:
            faults.append(f"{len(blocks)} of its {good.blocks} blocks are damaged")
        missing = [number for number in blocks if not good.is_found(number)]
        if not faults:
            return None
        lost = tuple(good.pieces(missing)) or (("padding",) if missing else ())
        return FileDamage(ref, generations, tuple(faults), tuple(blocks), lost)

    def _faults(self, ref: ImageRef) -> Iterator[str]:
        try:
            size_bytes = self._store.size_bytes(ref.path)
        except NotFound:
            yield "it is missing"
            return
        if size_bytes != ref.size_bytes:
            yield f"it has {size_bytes} bytes, its manifest says {ref.size_bytes}"
        elif header_in(self._store, ref) is None:
            yield "its header changed after it was written"
