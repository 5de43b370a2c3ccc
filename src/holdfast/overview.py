"""Lists the checkpoints of a root in short, without reading every manifest of a bucket.

A bucket may have an index: what its manifests say in short, each beside the tag that the bucket
gave the manifest. It is advice. The list of the manifests decides what is there, and an entry
counts only where its tag is that of the list; everything else is read. So an index that is absent,
old, damaged or wrong costs requests, and changes no answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.catalogue import (
    INCARNATIONS,
    MANIFESTS,
    NEW_LISTS,
    RootContents,
    find_manifest,
    generation_of,
    is_attempt_dir,
    is_only_listed,
    manifest_path,
    read_manifests,
    read_records,
    removed_since,
    with_missing_records,
)
from holdfast.errors import HoldfastError
from holdfast.format.checksum import checksum, text
from holdfast.format.manifest import Generation, ImageRef, Incarnation, Lineage, Manifest
from holdfast.format.values import decode
from holdfast.storage.base import Store, note, recall, settle_s, tag_pages, tags

#: The object with the index, and what its content begins with.
INDEX, _FORMAT = "index", b"holdfast index 1 "
_MOST_INDEX_BYTES = 64 << 20
_MOST_UNPACKED_BYTES = 512 << 20
#: So many manifests are read rather than looked up in the index.
FEW = 4
#: A brief look reads as many manifests as this: in a bucket each is a request.
_MOST_READ, _MOST_READ_OF_BUCKET = 64, 1


class Summary(msgspec.Struct, frozen=True, array_like=True):
    """What a manifest says, in short. ``seal``: the checksum in front of it.

    ``values``: those of its plain values that are numbers, and the dictionaries that lead to them.
    """

    run_id: str
    incarnation: int
    step: int
    attempt: str
    parent: tuple[int, int] | None
    world: int
    images: int
    size_bytes: int
    reused_bytes: int
    created_s: float
    seal: str
    directories: tuple[str, ...]
    values: dict[str, Any]
    parts: tuple[ImageRef, ...] = ()
    layout: str = ""
    """"" where an earlier version wrote the index."""

    @property
    def generation(self) -> Generation:
        """(incarnation, step)."""
        return Generation(self.incarnation, self.step)

    @property
    def image_bytes(self) -> int:
        """Bytes of all images, which belong to this checkpoint alone."""
        return self.size_bytes - sum(one.size_bytes for one in self.parts)


def summary_of(manifest: Manifest, sealed: str) -> Summary:
    """Returns a manifest in short. ``sealed``: the checksum in front of it."""
    return Summary(
        manifest.run_id,
        manifest.incarnation,
        manifest.step,
        manifest.attempt,
        manifest.parent,
        manifest.world,
        len(manifest.images),
        manifest.size_bytes,
        manifest.reused_bytes,
        manifest.created_s,
        sealed,
        tuple(sorted(manifest.directories)),
        _numbers(manifest.values),
        manifest.parts,
        manifest.layout,
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        try:
            plain = decode(value)
        except (HoldfastError, OverflowError):
            plain = None
        if isinstance(plain, (int, float)) and not isinstance(plain, bool):
            found[name] = value
        elif isinstance(value, dict) and (inner := _numbers(value)):
            found[name] = inner
    return found


class Overview(RootContents[Summary], frozen=True):
    """The content of a root in short. ``unread``: what is listed, and of which nothing else is
    known yet; it may be damaged. ``tags``: of the documents that are listed, by path. ``read``:
    manifests that were read. ``lacking``: the number of documents that were read, as they were
    neither known nor in the index.
    """

    unread: tuple[Generation, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    read: Mapping[Generation, Manifest] = field(default_factory=dict)
    lacking: int = 0

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Returns what is listed, but for what cannot be read: names tell generations."""
        return tuple(sorted((*(one.generation for one in self.manifests), *self.unread)))


#: What is known before anything was read.
UNSEEN = Overview()


def overview(
    store: Store,
    known: Overview = UNSEEN,
    *,
    has_records: bool = False,
    is_brief: bool = False,
    listed: Mapping[str, str] | None = None,
) -> Overview:
    """Lists a root; what cannot be read is listed as broken.

    ``known``: what was found before; of that nothing is read again whose tag is the same, or that
    has none, for manifests never change. ``has_records``: nor are the records of starts listed.
    ``is_brief``: where many manifests are unknown, none is read but those that tell the parent of a
    start; the others are ``unread``. ``listed``: the paths of the manifests with their tags, where
    they have just been listed. A manifest of a newer format is an error.
    """
    for _ in range(NEW_LISTS):
        found = _look(store, known, has_records, is_brief, listed)
        gone, listed = removed_since(store, found), None
        if not gone:
            break
    return replace(found, broken=_still_broken(store, found.broken, gone))


def _still_broken(
    store: Store, broken: Iterable[tuple[str, str]], gone: Iterable[str]
) -> tuple[tuple[str, str], ...]:
    gone = set(gone)
    return tuple(one for one in broken if one[0] not in gone and not is_only_listed(store, one[0]))


def _look(
    store: Store,
    known: Overview,
    has_records: bool,
    is_brief: bool,
    listed: Mapping[str, str] | None,
) -> Overview:
    named = _listed(store, MANIFESTS) if listed is None else listed
    there = {p: one for p in named if (one := _generation(p))}
    listed = {p: named[p] for p in there}
    starts = {} if has_records else _listed(store, INCARNATIONS)
    manifests = {manifest_path(one.generation): one for one in known.manifests}
    manifests = {p: one for p, one in manifests.items() if _is_same(known.tags.get(p), listed, p)}
    records = {_record_path(one): one for one in known.incarnations}
    if not has_records:  # what has no tag is read again: a record may be replaced
        records = {p: r for p, r in records.items() if known.tags.get(p) and p in starts}
        records = {p: r for p, r in records.items() if known.tags.get(p) == starts[p]}
    asked = {p for p in map(manifest_path, known.unread) if known.tags.get(p) == listed.get(p)}
    lacking = len(listed.keys() - manifests.keys() - asked) + len(starts) - len(records)
    if lacking > FEW and any(listed.values()):
        index = _read_index(store)
        manifests = index.manifests_of(listed) | manifests
        records = index.records_of(starts) | records
    read, broken = read_records(store, [_name(p) for p in starts if p not in records])
    records |= {_record_path(one): one for one in read}
    found = Overview(
        _ordered(manifests.values()),
        tuple(sorted(records.values(), key=lambda one: one.n)),
        tuple(broken),
        tuple(sorted(one for p, one in there.items() if p not in manifests)),
        {p: known.tags.get(p, "") for p in records} | starts | listed,
        known.read,
        len(read),
    )
    # What could not be read before may be whole by now.
    again = [one for path, _ in known.broken if (one := _generation(path))]
    is_all = not is_brief or len(found.unread) <= _most_read(store)
    found = _read_more(store, found, found.unread if is_all else again)
    # The newest may be damaged: then one before it tells the parent of its start.
    while some := _of_unrecorded(found):
        found = _read_more(store, found, some)
    return found if found.line.missing is None else with_missing_records(store, found)


def read_more(store: Store, found: Overview, generations: Iterable[Generation]) -> Overview:
    """Reads those of these manifests that are unread. What was removed since it was listed is
    neither there nor broken.
    """
    more = _read_more(store, found, generations)
    new = [one for one in more.broken if one not in found.broken]
    gone = {path for path, _ in new if not store.exists(path)}
    return replace(more, broken=tuple(one for one in more.broken if one[0] not in gone))


def _read_more(store: Store, found: Overview, generations: Iterable[Generation]) -> Overview:
    wanted = set(generations).intersection(found.unread)
    read, broken = read_manifests(store, sorted(wanted))
    summaries = [summary_of(manifest, sealed) for manifest, sealed in read]
    return replace(
        found,
        manifests=_ordered([*found.manifests, *summaries]),
        broken=(*broken, *found.broken),
        unread=tuple(one for one in found.unread if one not in wanted),
        read={**found.read, **{manifest.generation: manifest for manifest, _ in read}},
        lacking=found.lacking + len(read),
    )


def read_first(
    store: Store, found: Overview, line: Lineage, wanted: int | str | None = None
) -> Overview:
    """Reads the manifests that a restore of ``wanted`` tries first, by their names: the newest of
    this line, or all of this name. What remains unread is no better than what was read.
    """
    if isinstance(wanted, str):
        return read_more(store, found, [one for one in found.unread if str(one) == wanted])
    if wanted is not None:
        return read_more(store, found, [one for one in found.unread if one.step == wanted])
    most = _most_read(store)
    while True:
        fit = [one for one in found.generations if one in line]
        first = set(sorted(fit, key=lambda one: (-one.step, -one.incarnation))[:most])
        if first.isdisjoint(found.unread):
            return found
        found = read_more(store, found, first)


def read_newest(store: Store) -> Overview:
    """Lists a root, and reads the manifests of the newest starts if no other was to be read."""
    found = overview(store, is_brief=True)
    while found.unread and not found.manifests:
        found = read_more(store, found, found.unread[-_most_read(store) :])
    return found


def confirmed(store: Store, found: Overview, generations: Iterable[Generation]) -> Overview:
    """Reads manifests of which no more than summaries are known."""
    wanted = set(generations)
    left = tuple(one for one in found.manifests if one.generation not in wanted)
    unread = tuple(sorted(wanted.union(found.unread)))
    return read_more(store, replace(found, manifests=left, unread=unread), wanted)


def manifest_of(store: Store, found: Overview, generation: Generation) -> Manifest | None:
    """Returns a manifest, which is read where only the index has told of it; None where it is not
    there any more, or cannot be read.
    """
    if generation in found.read:
        return found.read[generation]
    there = find_manifest(store, generation)
    return None if there is None else there[0]


class PagedList:
    """Lists the manifests of a bucket a page at a time, while their only writer, a keeper that has
    just started, goes on. ``many``: shorter pages are listed together.
    """

    def __init__(self, store: Store, many: float) -> None:
        self._store, self._many = store, many
        self._pages: Iterator[dict[str, str]] | None = None
        self._held_by: str | None = None
        self.listed: dict[str, str] = {}
        """The paths with their tags, as far as they are listed."""
        self.is_whole = False
        self.looks = 0

    def look(self, mine: Iterable[Generation], held_by: str) -> None:
        """Lists one more page. ``mine``: what was published meanwhile. ``held_by``: the holding of
        the root's lock; under another one all is listed anew, at once.
        """
        self._held_by = self._held_by or held_by
        is_again = self._held_by != held_by
        pages, self._pages = self._pages, None  # what breaks off is begun anew
        self.looks += 1
        if pages is None or is_again:
            pages, self.listed = tag_pages(self._store, MANIFESTS), {}
        self.is_whole = True
        for page in pages:
            named = ((name, tag) for name, tag in page.items() if generation_of(name))
            self.listed |= {f"{MANIFESTS}/{name}": tag for name, tag in named}
            if len(page) >= self._many and not is_again:
                self.is_whole = False
                break
        self._held_by = held_by  # not before: what broke off is begun anew
        self._pages = pages
        if not is_again:  # else another may have removed some of them
            new = (path for path in map(manifest_path, mine) if path not in self.listed)
            self.listed |= dict.fromkeys(new, "")


class PagedCheck:
    """Compares the list of a bucket's manifests with what its only writer knows of it, one page at
    a time: a list of all is a request for each thousand.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pages: Iterator[dict[str, str]] = iter(())
        self._expected: set[str] = set()
        """What was known when the first page was listed, and is in none that was listed since."""

    def look(self, known: Overview) -> Overview | None:
        """Lists one more page, and returns what is known with its tags; None where the list says
        something else: then all must be listed.
        """
        there = {*map(manifest_path, known.generations)}
        page, self._expected = next(self._pages, None), self._expected & there
        if page is None:
            if self._expected:
                return None
            self._pages, self._expected = tag_pages(self._store, MANIFESTS), there
            page = next(self._pages, {})
        listed = {f"{MANIFESTS}/{name}": tag for name, tag in page.items() if generation_of(name)}
        if not all(_is_same(known.tags.get(path, ""), listed, path) for path in there & {*listed}):
            return None
        self._expected -= listed.keys()
        tags = {path: tag for path, tag in listed.items() if path in there}
        return replace(known, tags={**known.tags, **tags}) if len(tags) == len(listed) else None


def indexed_records(store: Store) -> dict[int, Incarnation]:
    """Returns the records of starts that the index of a bucket has as they are listed now."""
    listed = tags(store, INCARNATIONS) or {}
    listed = {f"{INCARNATIONS}/{name}": tag for name, tag in listed.items()}
    found = _read_index(store).records_of(listed) if listed else {}
    return {one.n: one for one in found.values()}


def leave_index(store: Store, found: Overview) -> None:
    """Writes the index of a bucket anew, of all that ``found`` knows."""
    if found.broken:
        return
    described = [(found.tags.get(manifest_path(m.generation), ""), m) for m in found.manifests]
    recorded = [(found.tags.get(_record_path(r), ""), r) for r in found.incarnations]
    known = [one for one in described if one[0]]
    parts = {one: n for n, one in enumerate(dict.fromkeys(m.parts for _, m in known))}
    manifests = [(tag, msgspec.structs.replace(m, parts=()), parts[m.parts]) for tag, m in known]
    records = [one for one in recorded if one[0]]
    body = zlib.compress(msgspec.msgpack.encode(_Packed(manifests, list(parts), records)), 1)
    note(store, INDEX, _FORMAT + text(checksum(body)).encode() + b"\n" + body)


class _Packed(msgspec.Struct, array_like=True):
    """The content of an index: documents with their tags. Tuples of parts, which many manifests
    share, are kept once, and numbered.
    """

    manifests: list[tuple[str, Summary, int]]
    parts: list[tuple[ImageRef, ...]]
    records: list[tuple[str, Incarnation]]


class _Index(Struct, frozen=True):
    """What an index says, by path, with the tags of its documents."""

    manifests: Mapping[str, tuple[str, Summary]] = field(default_factory=dict)
    records: Mapping[str, tuple[str, Incarnation]] = field(default_factory=dict)

    def manifests_of(self, listed: Mapping[str, str]) -> dict[str, Summary]:
        """Returns what it says of the manifests that are listed with these tags."""
        return {p: one for p, (tag, one) in self.manifests.items() if tag and listed.get(p) == tag}

    def records_of(self, listed: Mapping[str, str]) -> dict[str, Incarnation]:
        """Returns what it says of the records that are listed with these tags."""
        return {p: one for p, (tag, one) in self.records.items() if tag and listed.get(p) == tag}


def _read_index(store: Store) -> _Index:
    """Returns the index; an empty one where it is absent, damaged, or of another version."""
    try:
        data = recall(store, INDEX, _MOST_INDEX_BYTES)
        head, _, body = data.partition(b"\n")
        if head != _FORMAT + text(checksum(body)).encode():
            return _Index()
        unpacked = zlib.decompressobj().decompress(body, _MOST_UNPACKED_BYTES)
        packed = msgspec.msgpack.decode(unpacked, type=_Packed)
        manifests = {}
        for tag, one, number in packed.manifests:
            if all(map(is_attempt_dir, one.directories)):
                full = msgspec.structs.replace(one, parts=packed.parts[number])
                manifests[manifest_path(one.generation)] = tag, full
        return _Index(manifests, {_record_path(one): (tag, one) for tag, one in packed.records})
    except (HoldfastError, zlib.error, msgspec.MsgspecError, IndexError):
        return _Index()


def _most_read(store: Store) -> int:
    return _MOST_READ_OF_BUCKET if settle_s(store) else _MOST_READ


def _of_unrecorded(found: Overview) -> list[Generation]:
    """Returns the newest unread checkpoint of each start without a readable record, whose parent
    only a manifest can tell.
    """
    known = found.parents
    newest = {one.incarnation: one for one in found.unread if one.incarnation not in known}
    return list(newest.values())


def _listed(store: Store, above: str) -> dict[str, str]:
    """Returns the paths directly below a directory, each with its tag."""
    found = tags(store, above)
    names = dict.fromkeys(store.list(above), "") if found is None else found
    return {f"{above}/{name}": tag for name, tag in names.items()}


def _is_same(tag: str | None, listed: Mapping[str, str], path: str) -> bool:
    """True for a manifest that is listed, and not with another tag than it had."""
    return path in listed and (not tag or not listed[path] or tag == listed[path])


def _ordered(summaries: Iterable[Summary]) -> tuple[Summary, ...]:
    return tuple(sorted(summaries, key=lambda one: one.generation))


def _generation(path: str) -> Generation | None:
    return generation_of(_name(path))


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _record_path(record: Incarnation) -> str:
    return f"{INCARNATIONS}/{record.n}.json"
