"""Encodes leaf tables and layouts as JSON: equal values always give equal bytes.

Meshes, instances and groups of instances are few and leaves are many, so each distinct one is
written once and named by its number:

    meshes      [[shape, ranks], ...]
    instances   [[mesh, [[dim, split_factor], ...]], ...]
    groups      [[instance, ...], ...]                        (layouts only)
    leaves      [[name, dtype, shape, spread, group], ...]    (tables: the instance; -1: none)
    frozen      [leaf, ...]                                   (absent when there are none)

Boxes held without a mesh are written as columns (box_columns.py), absent when there are none:

    extents     [[extent, ...], ...]
    sets        [[rank, ...], ...]                            (layouts only)
    listings    [[reach, gaps, sizes, steps], ...]            (-1 - n in a group; in a table, where
                                                              steps are empty, -2 - n in a leaf)

Numbers are given in the order of first use. The input may be hostile: everything is bounded and
checked, and wrong bytes raise FormatError.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import xxhash

from holdfast.errors import FormatError, NewerFormat, UsageError
from holdfast.geometry.box_columns import ColumnReader, ColumnWriter, ListingRow, read_held
from holdfast.geometry.leaves import BoxList, HolderBoxes, LeafEntry, LeafSpec
from holdfast.geometry.mesh import Instance, Mesh, Placement, known

#: Readers of version 1 do not know box lists.
VERSION, VERSION_WITH_LISTINGS = 1, 2
MAX_BYTES = 256 << 20
MAX_LEAVES = 1 << 20
#: A limit on the sum over all boxes of a document.
MAX_LISTED_DIMS = 1 << 24
#: The suffix of a part's name in an image. No leaf's name may have it: otherwise a reader that sees
#: only an image's names could take the leaf for a part of another.
LIKE_A_PIECE = re.compile(r"@[0-9]+:[0-9]+(,[0-9]+:[0-9]+)*")

#: On the wire: lists of numbers, those that are ranges, and what follows the meshes of a document.
_NUMBERS = re.compile(rb"\[[0-9]+(?:,[0-9]+){8,}\]")
_RANGE = re.compile(rb'\["([0-9]{1,7})\+([0-9]{1,7})\*([0-9]{1,7})"\]')
_BEHIND_MESHES = b'"instances"'
MAX_MESH_NUMBERS = MAX_BYTES // 8

#: The number in a table that stands for the instance of a plain tensor.
_ALONE = -1

T = TypeVar("T")


class _Document(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of both documents."""

    version: int
    meshes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    instances: list[tuple[int, list[tuple[int, int]]]]
    leaves: list[tuple[str, str, tuple[int, ...], str, int]]
    frozen: list[int] = []
    extents: list[tuple[int, ...]] = []
    listings: list[ListingRow] = []


class _TableDocument(_Document, kw_only=True, tag="table", tag_field="holds"):
    """One rank's leaves."""


class _LayoutDocument(_Document, kw_only=True, tag="layout", tag_field="holds"):
    """All ranks' leaves."""

    world: int
    groups: list[tuple[int, ...]]
    sets: list[tuple[int, ...]] = []


class _Version(msgspec.Struct):
    version: int


class _FrozenOnly(msgspec.Struct):
    frozen: list[int] = []


D = TypeVar("D", bound=_Document)


def table_to_json(entries: Sequence[LeafEntry]) -> bytes:
    """One rank's table of leaves, in the order given."""
    written = _WrittenTable(0)
    leaves = [
        (leaf.name, leaf.dtype, leaf.shape, leaf.spread, written.own(leaf.instance))
        for leaf in entries
    ]
    document = _TableDocument(
        version=_version(written.listings),
        meshes=written.meshes,
        instances=written.instances,
        leaves=leaves,
        frozen=_frozen(entries),
        extents=written.columns.extents,
        listings=written.listings,
    )
    return msgspec.json.encode(document)


def table_from_json(data: bytes | memoryview) -> tuple[LeafEntry, ...]:
    """The table back from its bytes; raises FormatError for any that are not a table."""
    what = "this leaf table"
    document = _decode(data, _TableDocument, what)
    return _build(what, lambda: _read_table(document))


def table_hash(data: bytes | memoryview) -> str:
    """Returns the id of a table: 32 hexadecimal digits from a hash of its bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def deflate(data: bytes) -> bytes:
    """Compresses a document for the wire: its hash, and any file, is that of the document itself.

    Ranks of a mesh that are a range are ``["first+step*count"]`` there, a list that no document
    has: otherwise each of N hosts would be sent N numbers.
    """
    head, key, rest = data.partition(_BEHIND_MESHES)
    return zlib.compress(_NUMBERS.sub(_as_range, head) + key + rest, 1)


def inflate(deflated: bytes, hash_: str) -> bytes:
    """The document that has this hash, from its compressed bytes; FormatError for any other."""
    try:
        data = zlib.decompressobj().decompress(deflated, MAX_BYTES)
    except zlib.error as error:
        raise FormatError(f"the document {hash_} cannot be decompressed: {error}") from None
    head, key, rest = data.partition(_BEHIND_MESHES)
    numbers = sum(int(count) for *_, count in _RANGE.findall(head))
    if numbers > MAX_MESH_NUMBERS:
        raise FormatError(f"the document {hash_} has {numbers} ranks in meshes")
    data = _RANGE.sub(lambda found: _numbers(*map(int, found.groups())), head) + key + rest
    if table_hash(data) != hash_:
        raise FormatError(f"the document named {hash_} is {table_hash(data)}")
    return data


def _as_range(found: re.Match[bytes]) -> bytes:
    numbers = found[0][1:-1].split(b",")
    first, step, count = int(numbers[0]), int(numbers[1]) - int(numbers[0]), len(numbers)
    is_range = step > 0 and len(numbers[-1]) <= 7 and _numbers(first, step, count) == found[0]
    return b'["%d+%d*%d"]' % (first, step, count) if is_range else found[0]


def _numbers(first: int, step: int, count: int) -> bytes:
    return b"[%b]" % b",".join(b"%d" % (first + n * step) for n in range(count))


def layout_to_json(world: int, leaves: Sequence[LeafSpec]) -> bytes:
    """The leaves of all ranks, in the order given."""
    written = _WrittenTable(world)
    rows = [
        (leaf.name, leaf.dtype, leaf.shape, leaf.spread, written.group(leaf.instances))
        for leaf in leaves
    ]
    document = _LayoutDocument(
        version=_version(written.listings),
        world=world,
        meshes=written.meshes,
        instances=written.instances,
        groups=written.groups,
        leaves=rows,
        frozen=_frozen(leaves),
        extents=written.columns.extents,
        sets=written.columns.sets,
        listings=written.listings,
    )
    return msgspec.json.encode(document)


def layout_from_json(data: bytes | memoryview) -> tuple[int, tuple[LeafSpec, ...]]:
    """World and leaves back from their bytes; raises FormatError for any that are not a layout."""
    what = "this layout"
    document = _decode(data, _LayoutDocument, what)
    return document.world, _build(what, lambda: _read_layout(document))


def has_frozen(data: bytes | memoryview) -> bool:
    """True if these bytes of a layout mark some leaf as frozen; nothing else is checked."""
    try:
        return bool(msgspec.json.decode(data, type=_FrozenOnly).frozen)
    except (ValueError, RecursionError):  # no layout: whoever reads it says so
        return False


def has_listings(data: bytes | memoryview) -> bool:
    """True if these bytes of a layout contain box lists; nothing else is checked."""
    try:
        return msgspec.json.decode(data, type=_Version).version == VERSION_WITH_LISTINGS
    except (ValueError, RecursionError):  # no layout: whoever reads it says so
        return False


def _version(listed: Sequence[object]) -> int:
    return VERSION_WITH_LISTINGS if listed else VERSION


def _frozen(leaves: Sequence[LeafEntry | LeafSpec]) -> list[int]:
    return [number for number, leaf in enumerate(leaves) if leaf.is_frozen]


class _WrittenTable:
    """Assigns numbers in the order of first use."""

    def __init__(self, world: int) -> None:
        self.columns = ColumnWriter(world)
        self.meshes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.instances: list[tuple[int, list[tuple[int, int]]]] = []
        self.groups: list[tuple[int, ...]] = []
        self.listings: list[ListingRow] = []
        self._numbers: dict[object, int] = {}
        # Compares identity before hashing, because a mesh may have thousands of ranks.
        self._numbers_by_id: dict[int, int] = {}

    def group(self, instances: tuple[Instance | BoxList, ...]) -> int:
        return self._number(
            instances, self.groups, lambda: tuple(self._in_group(one) for one in instances)
        )

    def own(self, instance: Instance | HolderBoxes | None) -> int:
        if isinstance(instance, HolderBoxes):
            row = self._number(instance, self.listings, lambda: self.columns.held(instance))
            return _ALONE - 1 - row
        return _ALONE if instance is None else self.instance(instance)

    def _in_group(self, one: Instance | BoxList) -> int:
        if isinstance(one, Instance):
            return self.instance(one)
        return -1 - self._number(one, self.listings, lambda: self.columns.listing(one))

    def instance(self, instance: Instance) -> int:
        return self._number(
            instance,
            self.instances,
            lambda: (
                self._mesh(instance.mesh),
                [(placement.dim, placement.split_factor) for placement in instance.placements],
            ),
        )

    def _mesh(self, mesh: Mesh) -> int:
        return self._number(mesh, self.meshes, lambda: (mesh.shape, mesh.ranks))

    def _number(
        self,
        value: Mesh | Instance | HolderBoxes | BoxList | tuple[Instance | BoxList, ...],
        rows: list[T],
        make_row: Callable[[], T],
    ) -> int:
        number = self._numbers_by_id.get(id(value))
        if number is None:
            number = self._numbers.get(value)
            if number is None:
                row = make_row()
                number = self._numbers[value] = len(rows)
                rows.append(row)
            self._numbers_by_id[id(value)] = number
        return number


def _decode(data: bytes | memoryview, kind: type[D], what: str) -> D:
    if len(data) > MAX_BYTES:
        raise FormatError(f"{what} has {len(data)} bytes, more than any of ours")
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version not in (VERSION, VERSION_WITH_LISTINGS):
            raise NewerFormat(
                f"{what} has the version {version}; this Holdfast reads {VERSION} and "
                f"{VERSION_WITH_LISTINGS}"
            )
        document = msgspec.json.decode(data, type=kind)
        refuse_twice(data, document)
    except (ValueError, RecursionError) as error:  # of msgspec's and of text that is not UTF-8
        raise FormatError(f"{what} cannot be read: {error}") from None
    if len(document.leaves) > MAX_LEAVES:
        raise FormatError(f"{what} has {len(document.leaves)} leaves, more than {MAX_LEAVES}")
    for name, *_ in document.leaves:
        if "@" in name and LIKE_A_PIECE.fullmatch(name, name.rindex("@")):
            raise FormatError(f"{what} has a leaf {name!r}, which ends like the name of a part")
    rows = document.listings
    if (version == VERSION_WITH_LISTINGS) != bool(rows):
        raise FormatError(f"{what} has the version {version}, and {len(rows)} listings")
    dims = sum(len(gaps) * max(1, len(reach)) for reach, gaps, _, _ in rows)
    if dims > MAX_LISTED_DIMS:
        raise FormatError(f"{what} lists boxes of {dims} dimensions, more than {MAX_LISTED_DIMS}")
    rising = sorted({number for number in document.frozen if 0 <= number < len(document.leaves)})
    if rising != document.frozen:
        raise FormatError(
            f"{what} says that {document.frozen!s:.50} are frozen, which are not numbers of its "
            f"{len(document.leaves)} leaves in rising order"
        )
    return document


def _build(what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except UsageError as error:  # what the values themselves refuse
        raise FormatError(f"{what} is impossible: {error}") from None


def _read_table(document: _TableDocument) -> tuple[LeafEntry, ...]:
    instances, frozen = _read_instances(document), set(document.frozen)
    held = [read_held(row, document.extents) for row in document.listings]

    def own(number: int) -> Instance | HolderBoxes | None:
        if number < _ALONE:
            return _pick(held, _ALONE - 1 - number, "listing")
        return None if number == _ALONE else _pick(instances, number, "instance")

    return tuple(
        LeafEntry(name, dtype, shape, spread, own(number), at in frozen)
        for at, (name, dtype, shape, spread, number) in enumerate(document.leaves)
    )


def _read_layout(document: _LayoutDocument) -> tuple[LeafSpec, ...]:
    instances, frozen = _read_instances(document), set(document.frozen)
    reader = ColumnReader(document.world, document.extents, document.sets)
    listings = [reader.listing(row) for row in document.listings]

    def one(number: int) -> Instance | BoxList:
        if number < 0:
            return _pick(listings, -1 - number, "listing")
        return _pick(instances, number, "instance")

    groups = [tuple(map(one, group)) for group in document.groups]
    return tuple(
        LeafSpec(name, dtype, shape, spread, _pick(groups, number, "group"), at in frozen)
        for at, (name, dtype, shape, spread, number) in enumerate(document.leaves)
    )


def _read_instances(document: _Document) -> list[Instance]:
    meshes = [known(Mesh(shape, ranks)) for shape, ranks in document.meshes]
    return [
        Instance(
            _pick(meshes, number, "mesh"),
            tuple(Placement(dim, split_factor) for dim, split_factor in placements),
        )
        for number, placements in document.instances
    ]


def _pick(rows: Sequence[T], number: int, what: str) -> T:
    if not 0 <= number < len(rows):
        raise UsageError(f"there is no {what} {number}, only {len(rows)}")
    return rows[number]


# Refuses JSON in which an object has a key twice: readers differ in which of the two they take.
#
# A file that two readers read differently cannot be protected by a checksum.


def refuse_twice(data: bytes | bytearray | memoryview, decoded: Any) -> None:
    """Raises ValueError for an object with a key twice. ``decoded`` is the result of msgspec
    reading ``data``.
    """
    # Decoding drops one of two equal keys; bytes that are the same after encoding again had none.
    # All documents are written that way here, and checking every key takes ten times as long.
    if msgspec.json.encode(decoded) != data:
        json.loads(bytes(data), object_pairs_hook=unique)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object from its keys and values, for ``json.loads``; raises ValueError for a key
    twice.
    """
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name!r} is there twice")
    return dict(pairs)
