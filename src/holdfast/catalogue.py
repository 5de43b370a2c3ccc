"""Names every file below a root, and reads all manifests and records of a root at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import FormatError, HoldfastError, NewerFormat, NotFound
from holdfast.format.manifest import (
    MAX_DOCUMENT_BYTES,
    MAX_NUMBER,
    Generation,
    Incarnation,
    Lease,
    Lineage,
    Manifest,
    Pin,
    Root,
    checksum_in,
    unseal,
)
from holdfast.format.values import decode
from holdfast.storage import files
from holdfast.storage.base import Store, read_at_most, settle_s

ROOT, LOCK = files.ROOT_FILE, files.WRITER
MANIFESTS, INCARNATIONS, LAYOUTS, STEPS = "manifests", "incarnations", "layouts", "steps"
PINS = PINS_LOCK = files.PINS
PARTS = "parts"
LEASES = "readers"
#: Notes of copies under way, and what a repair has put aside.
COPIES, DAMAGED = "copies", "damaged"
#: In a cache: marks of the checkpoints that the root has had.
DRAINED = "drained"
#: The number of times a root is listed again when a file was removed while it was read.
NEW_LISTS = 16
_NUMBER = "(0|[1-9][0-9]{0,15})"
_MANIFEST_NAME = re.compile(rf"{_NUMBER}-{_NUMBER}\.json")
_INCARNATION_NAME = re.compile(rf"{_NUMBER}\.json")
_INCARNATION_NUMBER = re.compile(rf"{_NUMBER}(?:\.json\Z|-|\Z)")
#: Matches the path of a directory of images or of frozen parts.
is_attempt_dir = re.compile(
    rf"({STEPS}|{PARTS})/{_NUMBER}-{_NUMBER}-[0-9A-Za-z_-]{{1,160}}"
).fullmatch
D = TypeVar("D", Manifest, Incarnation, Root, Pin, Lease)
C = TypeVar("C", bound="RootContents[Described]")
K = TypeVar("K")
R = TypeVar("R")
_SHOWN = 8
_READERS = 16


def manifest_path(generation: Generation) -> str:
    """Returns the path of a generation's manifest."""
    return f"{MANIFESTS}/{generation.incarnation}-{generation.step}.json"


def pin_path(generation: Generation) -> str:
    """Returns the path of a generation's pin."""
    return f"{PINS}/{generation.incarnation}-{generation.step}.json"


def lease_path(name: str) -> str:
    """Returns the path of a reader's lease."""
    return f"{LEASES}/{name}.json"


def generation_of(name: str) -> Generation | None:
    """Returns the generation of a manifest or pin with this file name; None for other files."""
    matched = _MANIFEST_NAME.fullmatch(name)
    return None if matched is None else Generation(int(matched[1]), int(matched[2]))


def incarnations_in(names: Iterable[str]) -> set[int]:
    """Returns the incarnations that names of records and manifests begin with. What is no number of
    ours, such as one with too many digits, is another's name.
    """
    numbers = (_INCARNATION_NUMBER.match(name) for name in names)
    found = {int(matched[1]) for matched in numbers if matched is not None}
    return {number for number in found if number < MAX_NUMBER}


def attempt_dir(generation: Generation, attempt: str) -> str:
    """Returns the directory of the images of one attempt at a generation; never used twice."""
    return f"{STEPS}/{generation.incarnation}-{generation.step}-{attempt}"


def image_path(generation: Generation, attempt: str, rank: int) -> str:
    """Returns the path of one rank's image."""
    return f"{attempt_dir(generation, attempt)}/live-{rank:05d}.safetensors"


def part_dir(generation: Generation, attempt: str) -> str:
    """Returns the directory of the frozen parts that one attempt wrote; later checkpoints may name
    them too.
    """
    return f"{PARTS}/{generation.incarnation}-{generation.step}-{attempt}"


def part_path(generation: Generation, attempt: str, rank: int) -> str:
    """Returns the path of one rank's frozen part."""
    return f"{part_dir(generation, attempt)}/frozen-{rank:05d}.safetensors"


def damage_note(path: str) -> str:
    """Returns the file beside a part that marks it as damaged: it is not named again."""
    return path.removesuffix(".safetensors") + ".damaged"


def copy_note_path(generation: Generation, attempt: str) -> str:
    """Returns the path of the note on the files of a checkpoint that a copy has finished."""
    return f"{COPIES}/{generation.incarnation}-{generation.step}-{attempt}.json"


def drained_path(generation: Generation, attempt: str) -> str:
    """Returns the path of the mark that the root has had this checkpoint of a cache."""
    return f"{DRAINED}/{generation.incarnation}-{generation.step}-{attempt}.json"


def layout_path(hash_: str) -> str:
    """Returns the path of a layout; its name is the hash of its content."""
    return f"{LAYOUTS}/{hash_}.json"


def is_root(store: Store) -> bool:
    """True if there can be checkpoints here."""
    return store.exists(ROOT)


def read_bounded(store: Store, path: str, limit_bytes: int) -> bytes:
    """Reads a whole file of at most this size; FormatError, before memory is allocated, for a
    larger one.
    """
    found = read_at_most(store, path, limit_bytes)
    if isinstance(found, int):
        raise FormatError(
            f"{store.url}/{path} has {found} bytes, more than any of ours ({limit_bytes})",
            path=path,
        )
    return found


def read_document(store: Store, kind: type[D], path: str) -> D:
    """Reads a sealed document of a root. Raises NotFound or FormatError when there is no readable
    one.
    """
    try:
        return _read_sealed(store, kind, path)[0]
    except NewerFormat:
        raise
    except FormatError as error:
        is_mended = kind in (Manifest, Incarnation)
        how = ", as `holdfast repair ROOT --from COPY` does" if is_mended else ""
        raise type(error)(f"{error}. Put back a good copy of it{how}", **error.fields) from error


def _read_sealed(store: Store, kind: type[D], path: str) -> tuple[D, str]:
    """Reads a document, and the checksum that is sealed in it."""
    data = read_bounded(store, path, MAX_DOCUMENT_BYTES)
    return unseal(kind, data, f"{store.url}/{path}"), checksum_in(data)


def read_incarnation(store: Store, n: int) -> Incarnation:
    """Reads the record of an incarnation. Raises NotFound or FormatError when there is no readable
    one.
    """
    path = f"{INCARNATIONS}/{n}.json"
    found = read_document(store, Incarnation, path)
    if found.n != n:
        raise FormatError(f"{store.url}/{path} speaks of incarnation {found.n}", path=path)
    return found


def find_parent(store: Store, n: int) -> Incarnation | Manifest | None:
    """What storage has that tells the parent of an incarnation; None when nothing there does.

    StorageError when it cannot be read now: that is not to be taken for none.
    """
    try:
        return read_incarnation(store, n)
    except NewerFormat:
        raise
    except (NotFound, FormatError):
        said = (generation_of(name) for name in store.list(MANIFESTS))
        of_it = (generation for generation in said if generation and generation.incarnation == n)
        return next(filter(None, (manifest_there(store, generation) for generation in of_it)), None)


def manifest_there(store: Store, generation: Generation) -> Manifest | None:
    """Reads the manifest of one generation; None for one that is damaged, or not there.

    StorageError when it cannot be read now: that is not to be taken for none.
    """
    try:
        found = read_document(store, Manifest, manifest_path(generation))
    except NewerFormat:
        raise
    except (NotFound, FormatError):
        return None
    return found if found.generation == generation else None


class Described(Protocol):
    """A checkpoint, as its manifest or a summary of that describes it."""

    @property
    def run_id(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def generation(self) -> Generation: ...
    @property
    def parent(self) -> tuple[int, int] | None: ...
    @property
    def attempt(self) -> str: ...
    @property
    def values(self) -> dict[str, Any]: ...
    @property
    def directories(self) -> Collection[str]: ...


M = TypeVar("M", bound=Described, covariant=True)


class RootContents(Struct, Generic[M], frozen=True):
    """The checkpoints and starts of a root."""

    manifests: tuple[M, ...] = ()
    incarnations: tuple[Incarnation, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Returns the generations of the checkpoints."""
        return tuple(m.generation for m in self.manifests)

    @property
    def parents(self) -> dict[int, tuple[int, int] | None]:
        """Returns the parent of each incarnation, from its own record or from its manifests."""
        known = {m.incarnation: m.parent for m in self.manifests}
        return known | {i.n: i.parent for i in self.incarnations}

    @property
    def starts(self) -> dict[int, tuple[str, float]]:
        """Of each incarnation with a record: its nonce, and when the record was made."""
        return {i.n: (i.nonce, i.created_s) for i in self.incarnations}

    @property
    def unreadable(self) -> tuple[int, ...]:
        """Returns the incarnations whose records exist and cannot be read."""
        heads = (path.partition("/") for path, _ in self.broken)
        names = (
            _INCARNATION_NAME.fullmatch(name) for head, _, name in heads if head == INCARNATIONS
        )
        return tuple(int(matched[1]) for matched in names if matched is not None)

    @property
    def line(self) -> Lineage:
        """Returns the lineage of the newest incarnation, as far as it is known here."""
        return Lineage(self.parents, self.unreadable)

    @property
    def lineage(self) -> tuple[Generation, ...]:
        """Returns the generations that the newest incarnation is known to descend from, oldest
        first.

        Ordered by step, because a run continues at larger steps than the one it restored.
        """
        line = self.line
        found = (one for one in self.generations if one in line)
        return tuple(sorted(found, key=lambda g: (g.step, g.incarnation)))

    @property
    def abandoned(self) -> tuple[Generation, ...]:
        """Returns the generations of futures that are known to be given up, oldest first."""
        line = self.line
        return tuple(one for one in self.generations if line.is_abandoned(one))

    @property
    def undecided(self) -> tuple[Generation, ...]:
        """Returns those of which a missing record leaves open whether they were given up, oldest
        first.
        """
        line = self.line
        return tuple(one for one in self.generations if line.is_undecided(one))

    @property
    def gap(self) -> str:
        """Says which record is missing and which question it leaves open; "" for none."""
        missing, undecided = self.line.missing, self.undecided
        return "" if missing is None or not undecided else gap_text(missing, undecided)

    @property
    def latest(self) -> Generation | None:
        """Returns the newest generation that is known not to be abandoned."""
        return next(reversed(self.lineage), None)

    def values_of(self, name: str) -> dict[Generation, float]:
        """Returns the number that each checkpoint has under this name, of those that have one.

        A dot in ``name`` leads into a dictionary, where no value has the whole name.
        """
        found = {m.generation: number_at(m.values, name) for m in self.manifests} if name else {}
        return {generation: value for generation, value in found.items() if value is not None}

    def find(self, generation: Generation) -> M | None:
        """Returns the manifest of a generation."""
        return next((m for m in self.manifests if m.generation == generation), None)


class Catalogue(RootContents[Manifest], frozen=True):
    """The content of a root, read once."""


#: What is known before anything was read.
EMPTY = Catalogue()


def number_at(values: dict[str, Any], name: str) -> float | None:
    """Returns the plain number of this name; None where there is none."""
    if name in values:
        try:
            value = decode(values[name])
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return float(value) if is_number else None
        except (HoldfastError, OverflowError):
            return None
    first, dot, rest = name.partition(".")
    inner = values.get(first)
    return number_at(inner, rest) if dot and isinstance(inner, dict) else None


def gap_text(missing: int, undecided: Collection[Generation]) -> str:
    """Formats which record is missing, and the generations that may have been given up or not."""
    shown = [str(generation) for generation in sorted(undecided)][-_SHOWN:]
    more = ["..."] if len(undecided) > _SHOWN else []
    return (
        f"{INCARNATIONS}/{missing}.json, which says what incarnation {missing} went on from, is "
        f"missing or cannot be read: whether {', '.join([*more, *shown])} were abandoned before it "
        "cannot be told"
    )


def catalogue(store: Store) -> Catalogue:
    """Reads every manifest and incarnation of a root; files that cannot be read are listed as
    broken.

    A manifest of a newer format is an error, not a broken file: its generation must not be taken
    for absent. One that was removed since it was listed is not broken: all is listed again.
    """
    for _ in range(NEW_LISTS):
        found = _list_all(store)
        gone = removed_since(store, found)
        if not gone:
            break
    left = tuple(
        one for one in found.broken if one[0] not in gone and not is_only_listed(store, one[0])
    )
    return Catalogue(found.manifests, found.incarnations, left)


def is_only_listed(store: Store, path: str) -> bool:
    """True for a manifest of a bucket whose lists lag: it is not there any more."""
    is_manifest = path.startswith(f"{MANIFESTS}/")
    return bool(settle_s(store)) and is_manifest and not store.exists(path)


def removed_since(store: Store, found: RootContents[Described]) -> set[str]:
    """Returns the manifests that were listed, could not be read, and are not listed any more."""
    unread = {path for path, _ in found.broken if path.startswith(f"{MANIFESTS}/")}
    return unread - {f"{MANIFESTS}/{name}" for name in store.list(MANIFESTS)} if unread else set()


def _list_all(store: Store) -> Catalogue:
    listed = [one for name in store.list(MANIFESTS) if (one := generation_of(name)) is not None]
    read, broken = read_manifests(store, listed)
    records, unreadable = read_records(store, store.list(INCARNATIONS))
    found = Catalogue(
        tuple(sorted((manifest for manifest, _ in read), key=lambda m: m.generation)),
        tuple(sorted(records, key=lambda i: i.n)),
        (*broken, *unreadable),
    )
    return found if found.line.missing is None else with_missing_records(store, found)


def read_manifests(
    store: Store, generations: Iterable[Generation]
) -> tuple[list[tuple[Manifest, str]], list[tuple[str, str]]]:
    """Reads manifests, each with the checksum that is sealed in it; returns also the paths of those
    that cannot be read, and why.
    """

    def read(one: Generation) -> tuple[tuple[Manifest, str] | None, list[tuple[str, str]]]:
        broken: list[tuple[str, str]] = []
        return _read_manifest(store, one, broken), broken

    found = list(read_each(store, read, generations))
    return [one for one, _ in found if one is not None], [why for _, some in found for why in some]


def read_records(
    store: Store, names: Iterable[str]
) -> tuple[tuple[Incarnation, ...], list[tuple[str, str]]]:
    """Reads the records of starts that have these names; returns also the paths of those that
    cannot be read, and why.
    """

    def read(name: str) -> tuple[Incarnation | None, list[tuple[str, str]]]:
        broken: list[tuple[str, str]] = []
        record = _read(Incarnation, store, f"{INCARNATIONS}/{name}", broken)
        if record is not None and f"{record.n}.json" != name:
            broken.append((f"{INCARNATIONS}/{name}", f"it speaks of incarnation {record.n}"))
            record = None
        return record, broken

    found = list(
        read_each(store, read, (name for name in names if _INCARNATION_NAME.fullmatch(name)))
    )
    there = tuple(record for record, _ in found if record is not None)
    return there, [why for _, some in found for why in some]


def read_each(store: Store, read: Callable[[K], R], items: Iterable[K]) -> Iterable[R]:
    """Reads one after the other; several at once in a bucket, where each is a request."""
    items = list(items)
    if not settle_s(store) or len(items) < 2:
        return map(read, items)
    with ThreadPoolExecutor(min(_READERS, len(items))) as pool:
        return list(pool.map(read, items))


def with_missing_records(store: Store, found: C) -> C:
    """Lists again: a list made while records were published may have one and not the one before
    it.
    """
    incarnations = {one.n: one for one in found.incarnations}
    while (missing := found.line.missing) is not None and missing not in found.unreadable:
        record = _read(Incarnation, store, f"{INCARNATIONS}/{missing}.json", [])
        if record is None or record.n != missing:
            break
        incarnations[missing] = record
        found = replace(found, incarnations=tuple(incarnations[n] for n in sorted(incarnations)))
    return found


def find_manifest(store: Store, generation: Generation) -> tuple[Manifest, str] | None:
    """Reads the manifest of one generation, and no other file; None if none can be read.

    With it comes the checksum that is sealed in it.
    """
    return _read_manifest(store, generation, [])


def _read_manifest(
    store: Store, generation: Generation, broken: list[tuple[str, str]]
) -> tuple[Manifest, str] | None:
    path = manifest_path(generation)
    found = _try_to_read(Manifest, store, path, broken)
    if found is not None and found[0].generation != generation:
        broken.append((path, f"it speaks of {found[0].generation}"))
        return None
    return found


def _read(kind: type[D], store: Store, path: str, broken: list[tuple[str, str]]) -> D | None:
    found = _try_to_read(kind, store, path, broken)
    return None if found is None else found[0]


def _try_to_read(
    kind: type[D], store: Store, path: str, broken: list[tuple[str, str]]
) -> tuple[D, str] | None:
    try:
        return _read_sealed(store, kind, path)
    except NewerFormat:
        raise
    except HoldfastError as error:  # damaged, or removed since it was listed
        broken.append((path, str(error)))
        return None
