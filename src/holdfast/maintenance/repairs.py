"""Mends what is damaged or missing in a root, from wherever the named bytes still are.

Only what manifests name is brought back, proved by its checksums: by one rename, or one conditional
request. The good bytes are durable before the bad ones are set aside, and nothing is ever removed.
What nobody has is named: the pieces of leaves that are lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from holdfast.catalogue import (
    DAMAGED,
    INCARNATIONS,
    LOCK,
    ROOT,
    STEPS,
    Catalogue,
    catalogue,
    layout_path,
    manifest_path,
    read_bounded,
    read_document,
)
from holdfast.errors import HoldfastError, NewerFormat, NotFound, UsageError
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
from holdfast.maintenance.good_bytes import GoodFile, header_in, table_in, write_good
from holdfast.persist.pins import mend, read_pins
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

    @property
    def is_mendable(self) -> bool:
        """True if its bytes are somewhere."""
        return self.data is not None


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What is damaged in a root, and what of it can be mended."""

    documents: tuple[DocumentDamage, ...]
    files: tuple[FileDamage, ...]
    checkpoints: int

    @property
    def damages(self) -> tuple[DocumentDamage | FileDamage, ...]:
        """All of it, documents first."""
        return (*self.documents, *self.files)


@dataclass(slots=True)
class RepairReport:
    """What a repair has done: the mended paths, each with where its bad bytes are now."""

    mended: dict[str, str] = field(default_factory=dict)


def plan_repair(
    store: Store,
    sources: Sequence[Store],
    wanted: Collection[Generation] | None,
    progress: Progress = lambda *_: None,
) -> RepairPlan:
    """Reads every block of the ``wanted`` checkpoints (None: all); what is damaged is looked for in
    ``sources``, in the pins, and in every other file of these roots.
    """
    run_id = _require_one_run(store, sources)
    found, others = catalogue(store), [catalogue(source) for source in sources]
    documents = [*_records(store, found, sources, others)]
    manifests = list(found.manifests)
    for damage, manifest in _manifests(store, found, run_id, sources):
        documents.append(damage)
        manifests += [manifest] if manifest is not None else []
    manifests = [m for m in manifests if wanted is None or m.generation in wanted]
    layouts = _Layouts(store, sources)
    documents += layouts.damages(manifests)
    elsewhere = _Elsewhere(
        (place, ref)
        for place, known in zip((store, *sources), (found, *others), strict=True)
        for ref in _named(known.manifests)
    )
    search = _DamageSearch(store, sources, elsewhere, layouts, progress)
    files = search.damages(manifests)
    return RepairPlan(tuple(documents), tuple(files), len(manifests))


def repair(
    store: Store,
    sources: Sequence[Store],
    wanted: Collection[Generation] | None,
    progress: Progress = lambda *_: None,
) -> tuple[RepairPlan, RepairReport]:
    """Mends under the root's lock all that can be mended; returns what was found and what was done.

    Stopped anywhere, each file is the damaged one or the mended one.
    """
    report = RepairReport()
    _require_one_run(store, sources)
    with store.lock(LOCK, "holdfast repair"):
        mend(store, catalogue(store))
        plan = plan_repair(store, sources, wanted, progress)
        known = [(place, catalogue(place)) for place in (store, *sources)]
        elsewhere = _Elsewhere(
            (place, ref) for place, one in known for ref in _named(one.manifests)
        )
        for document in plan.documents:
            if document.data is not None:
                _put(store, document.path, document.data, report)
        for damage in plan.files:
            if damage.is_mendable:
                good = GoodFile(damage.ref, [store, *sources], elsewhere.find)
                aside = _free_name(store, damage.path)
                sink = store.create(damage.path, damage.ref.size_bytes, aside=aside)
                write_good(sink, good)
                report.mended[damage.path] = aside
    return plan, report


def _put(store: Store, path: str, data: bytes, report: RepairReport) -> None:
    aside = _free_name(store, path)
    sink = store.create(path, len(data), aside=aside)
    try:
        sink.write(0, memoryview(data))
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    report.mended[path] = aside


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


def _named(manifests: Iterable[Manifest]) -> list[ImageRef]:
    """Returns each file once that manifests name."""
    refs = (ref for m in manifests for ref in (*m.images, *m.parts))
    return list({ref.path: ref for ref in refs}.values())


def _manifests(
    store: Store, found: Catalogue, run_id: str, sources: Sequence[Store]
) -> Iterator[tuple[DocumentDamage, Manifest | None]]:
    """Yields manifests that cannot be read, with what they were by a pin or by another root."""
    broken = dict(found.broken)
    attempts = frozenset(store.list(STEPS))
    pins = {manifest_path(g): one.pin for g, one in read_pins(store).items()}
    for path in (path for path in broken if path.startswith("manifests/")):
        pin = pins.get(path)
        copies = [pin.manifest.encode()] if pin is not None else []
        copies += [data for source in sources if (data := _try_read(source, path)) is not None]
        good = None
        for data in copies:
            manifest = _manifest_in(data)
            if manifest is None or good is not None or manifest.run_id != run_id:
                continue
            is_its = manifest_path(manifest.generation) == path
            if is_its and manifest.images[0].path.split("/")[1] in attempts:  # of this very attempt
                good = data, manifest
        data, manifest = good or (None, None)
        yield DocumentDamage(path, broken[path], data), manifest


def _manifest_in(data: bytes) -> Manifest | None:
    try:
        return unseal(Manifest, data, "a manifest")
    except NewerFormat:
        raise
    except HoldfastError:
        return None


def _records(
    store: Store, found: Catalogue, sources: Sequence[Store], others: Sequence[Catalogue]
) -> Iterator[DocumentDamage]:
    """Yields records of starts that cannot be read, or that the lineage lacks."""
    broken = dict(found.broken)
    missing = {found.line.missing} - {None}
    for n in sorted({*found.unreadable, *(n for n in missing if n is not None)}):
        path = f"{INCARNATIONS}/{n}.json"
        said = {m.parent for m in found.manifests if m.incarnation == n}
        known = (one for other in others for one in other.incarnations if one.n == n)
        good: Incarnation | None = next((one for one in known if said <= {one.parent}), None)
        fault = broken.get(path, f"{path} is missing")
        yield DocumentDamage(path, fault, None if good is None else seal(good))


def _try_read(store: Store, path: str, limit_bytes: int = MAX_DOCUMENT_BYTES) -> bytes | None:
    try:
        return read_bounded(store, path, limit_bytes)
    except HoldfastError:
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
        self._files = files
        self._tables: list[tuple[Store, ImageRef, int, int, array[int]]] | None = None

    def find(self, sum_: int, size_bytes: int) -> bytes | None:
        """Returns a block of this checksum and length, None where no file has it whole."""
        if self._tables is None:  # read when the first block is missing
            self._tables = [
                table for store, ref in self._files if (table := self._table(store, ref))
            ]
        for store, ref, begin, end, sums in self._tables:
            if sum_ not in sums:
                continue
            start = sums.index(sum_) * BLOCK_BYTES
            if min(BLOCK_BYTES, end - start) == size_bytes:
                data = _try_range(store, ref.path, begin + start, size_bytes)
                if data is not None and checksum(data) == sum_:  # else it is damaged too
                    return data
        return None

    @staticmethod
    def _table(store: Store, ref: ImageRef) -> tuple[Store, ImageRef, int, int, array[int]] | None:
        try:
            good = GoodFile(ref, [store])
        except HoldfastError:
            return None
        assert good.header is not None
        header = good.header
        return store, ref, header.data_start, header.table.offset, array("Q", good.sums)


def _try_range(store: Store, path: str, start: int, size_bytes: int) -> bytes | None:
    try:
        return store.read(path, start, size_bytes)
    except HoldfastError:
        return None


class _DamageSearch:
    """Looks for damage in files, and for what is lost."""

    def __init__(
        self,
        store: Store,
        sources: Sequence[Store],
        elsewhere: _Elsewhere,
        layouts: _Layouts,
        progress: Progress,
    ) -> None:
        self._store, self._stores = store, [store, *sources]
        self._elsewhere, self._layouts = elsewhere, layouts
        self._progress, self._done = progress, 0

    def damages(self, manifests: Sequence[Manifest]) -> Iterator[FileDamage]:
        """Yields the damaged files of these checkpoints."""
        refs = _named(manifests)
        total = sum(ref.size_bytes for ref in refs)
        for ref in refs:
            naming = [m for m in manifests if ref in m.images or ref in m.parts]
            damage = self._examine(ref, naming)
            self._done += ref.size_bytes
            self._progress(self._done, total)
            if damage is not None:
                yield damage

    def _examine(self, ref: ImageRef, naming: list[Manifest]) -> FileDamage | None:
        generations = tuple(m.generation for m in naming)
        faults = list(self._faults(ref))
        try:
            good = GoodFile(ref, self._stores, self._elsewhere.find)
        except HoldfastError as error:
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
