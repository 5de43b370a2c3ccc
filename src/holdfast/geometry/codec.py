"""Leaf tables and layouts as JSON: the same bytes for the same values, whoever writes them.

Meshes, instances and groups of instances are few and leaves are many, so each distinct one is
written once and named by its number:

    meshes      [[shape, ranks], ...]
    instances   [[mesh, [[dim, split_factor], ...]], ...]
    groups      [[instance, ...], ...]                        (layouts only)
    leaves      [[name, dtype, shape, spread, group], ...]    (tables: the instance; -1: none)
    frozen      [leaf, ...]                                   (absent when there are none)

What ranks hold without a mesh is written as columns (columns.py), and absent when there is none:

    extents     [[extent, ...], ...]
    sets        [[rank, ...], ...]                            (layouts only)
    listings    [[reach, gaps, sizes, steps], ...]            (-1 - n in a group; in a table, where
                                                              steps are empty, -2 - n in a leaf)

Numbers are given in the order of first use. What is read may be hostile: everything is bounded
and checked, and wrong bytes are FormatErrors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import xxhash

from holdfast.errors import FormatError, NewerFormat, UsageError
from holdfast.geometry.columns import ListingRow, Reader, Writer, read_held
from holdfast.geometry.leaves import LeafEntry, LeafSpec
from holdfast.geometry.listing import Held, Listing
from holdfast.geometry.placements import Instance, Mesh, Placement, known
from holdfast.geometry.unique import refuse_twice

#: Readers of version 1 know no listings.
VERSION, VERSION_WITH_LISTINGS = 1, 2
MAX_BYTES = 256 << 20
MAX_LEAVES = 1 << 20
#: Of all boxes of a document, added up.
MAX_LISTED_DIMS = 1 << 24
#: How the name of a part ends in an image. No leaf's does: or one could be taken for a part of
#: another by whoever reads the names of an image only.
LIKE_A_PIECE = re.compile(r"@[0-9]+:[0-9]+(,[0-9]+:[0-9]+)*")

#: Stands in a table for the instance of a plain tensor.
_ALONE = -1

T = TypeVar("T")


class _Document(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What both documents hold."""

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
    written = _Written(0)
    leaves = [
        (leaf.name, leaf.dtype, leaf.shape, leaf.spread, written.own(leaf.instance))
        for leaf in entries
    ]
    document = _TableDocument(
        version=_version(written.listings), meshes=written.meshes, instances=written.instances,
        leaves=leaves, frozen=_frozen(entries), extents=written.columns.extents,
        listings=written.listings,
    )  # fmt: skip
    return msgspec.json.encode(document)


def table_from_json(data: bytes | memoryview) -> tuple[LeafEntry, ...]:
    """The table back from its bytes; FormatError for any that are not a table."""
    what = "this leaf table"
    document = _decode(data, _TableDocument, what)
    return _build(what, lambda: _read_table(document))


def table_hash(data: bytes | memoryview) -> str:
    """What a table is known by: 32 hexadecimal digits of its bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def layout_to_json(world: int, leaves: Sequence[LeafSpec]) -> bytes:
    """The leaves of all ranks, in the order given."""
    written = _Written(world)
    rows = [
        (leaf.name, leaf.dtype, leaf.shape, leaf.spread, written.group(leaf.instances))
        for leaf in leaves
    ]
    document = _LayoutDocument(
        version=_version(written.listings), world=world, meshes=written.meshes,
        instances=written.instances, groups=written.groups, leaves=rows, frozen=_frozen(leaves),
        extents=written.columns.extents, sets=written.columns.sets, listings=written.listings,
    )  # fmt: skip
    return msgspec.json.encode(document)


def layout_from_json(data: bytes | memoryview) -> tuple[int, tuple[LeafSpec, ...]]:
    """World and leaves back from their bytes; FormatError for any that are not a layout."""
    what = "this layout"
    document = _decode(data, _LayoutDocument, what)
    return document.world, _build(what, lambda: _read_layout(document))


def has_frozen(data: bytes | memoryview) -> bool:
    """Whether these bytes of a layout say that some leaf is frozen; nothing else is looked at."""
    try:
        return bool(msgspec.json.decode(data, type=_FrozenOnly).frozen)
    except (ValueError, RecursionError):  # no layout: whoever reads it says so
        return False


def has_listings(data: bytes | memoryview) -> bool:
    """Whether these bytes of a layout say that it lists boxes; nothing else is looked at."""
    try:
        return msgspec.json.decode(data, type=_Version).version == VERSION_WITH_LISTINGS
    except (ValueError, RecursionError):  # no layout: whoever reads it says so
        return False


def _version(listed: Sequence[object]) -> int:
    return VERSION_WITH_LISTINGS if listed else VERSION


def _frozen(leaves: Sequence[LeafEntry | LeafSpec]) -> list[int]:
    return [number for number, leaf in enumerate(leaves) if leaf.is_frozen]


class _Written:
    """Gives out numbers in the order of first use."""

    def __init__(self, world: int) -> None:
        self.columns = Writer(world)
        self.meshes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.instances: list[tuple[int, list[tuple[int, int]]]] = []
        self.groups: list[tuple[int, ...]] = []
        self.listings: list[ListingRow] = []
        self._numbers: dict[object, int] = {}
        # Before hashing what may be a mesh of thousands of ranks, see if it is the same object.
        self._numbers_by_id: dict[int, int] = {}

    def group(self, instances: tuple[Instance | Listing, ...]) -> int:
        return self._number(
            instances, self.groups, lambda: tuple(self._in_group(one) for one in instances)
        )

    def own(self, instance: Instance | Held | None) -> int:
        if isinstance(instance, Held):
            row = self._number(instance, self.listings, lambda: self.columns.held(instance))
            return _ALONE - 1 - row
        return _ALONE if instance is None else self.instance(instance)

    def _in_group(self, one: Instance | Listing) -> int:
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
        value: Mesh | Instance | Held | Listing | tuple[Instance | Listing, ...],
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

    def own(number: int) -> Instance | Held | None:
        if number < _ALONE:
            return _pick(held, _ALONE - 1 - number, "listing")
        return None if number == _ALONE else _pick(instances, number, "instance")

    return tuple(
        LeafEntry(name, dtype, shape, spread, own(number), at in frozen)
        for at, (name, dtype, shape, spread, number) in enumerate(document.leaves)
    )  # fmt: skip


def _read_layout(document: _LayoutDocument) -> tuple[LeafSpec, ...]:
    instances, frozen = _read_instances(document), set(document.frozen)
    reader = Reader(document.world, document.extents, document.sets)
    listings = [reader.listing(row) for row in document.listings]

    def one(number: int) -> Instance | Listing:
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
