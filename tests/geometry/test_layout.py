"""Layouts and tables as bytes: they come back the same, and what is impossible is refused."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import FormatError, NewerFormat, UsageError
from holdfast.geometry import codec
from holdfast.geometry.layout import (
    REPLICATE,
    BoxList,
    HolderBoxes,
    Instance,
    Layout,
    LeafEntry,
    LeafSpec,
    Mesh,
    Placement,
    deflate,
    inflate,
    table_from_json,
    table_hash,
    table_to_json,
)
from holdfast.geometry.mesh import MAX_STRIDES
from support.models.layouts import layouts, mesh, on, unhurried


@unhurried
@given(layouts())
def test_a_layout_comes_back_from_its_bytes(layout: Layout) -> None:
    data = layout.to_json()
    back = Layout.from_json(data)
    assert back == layout
    assert back.to_json() == data
    assert back.hash == layout.hash == table_hash(data)
    assert len(layout.hash) == 32
    for rank in range(layout.world):
        assert back.pieces(rank) == layout.pieces(rank)


def declared(one: Instance | BoxList) -> Instance | HolderBoxes:
    """What the lowest of its ranks says of a leaf."""
    if isinstance(one, Instance):
        return one
    return HolderBoxes(one.of_rank(min(one.ranks, default=0)))


@unhurried
@given(layouts())
def test_a_table_comes_back_from_its_bytes(layout: Layout) -> None:
    table = tuple(
        LeafEntry(leaf.name, leaf.dtype, leaf.shape, leaf.spread, declared(leaf.instances[0]))
        for leaf in layout.leaves
    )
    assert table_from_json(table_to_json(table)) == table


def test_a_mesh_is_written_once_however_many_leaves_are_on_it() -> None:
    def leaf(number: int) -> LeafSpec:  # equal instances, but not the same objects
        return LeafSpec(f"{number:03d}", "F32", (4,), "split", (Instance(mesh(512), (REPLICATE,)),))

    data = Layout(512, tuple(map(leaf, range(100)))).to_json()
    assert data.count(b"509,510,511") == 1


def test_the_hash_changes_with_everything_that_is_in_a_layout() -> None:
    def layout(name: str, dtype: str, size: int, spread: str, instance: Instance) -> Layout:
        return Layout(2, (LeafSpec(name, dtype, (size, 3), spread, (instance,)),))

    whole = Instance(mesh(2), (REPLICATE,))
    hashes = {
        layout("w", "F32", 4, "split", whole).hash,
        layout("v", "F32", 4, "split", whole).hash,
        layout("w", "I32", 4, "split", whole).hash,
        layout("w", "F32", 5, "split", whole).hash,
        layout("w", "F32", 4, "lowest", whole).hash,
        layout("w", "F32", 4, "split", Instance(mesh(2), (Placement(0),))).hash,
        layout("w", "F32", 4, "split", Instance(mesh(2), (Placement(0, 2),))).hash,
        layout("w", "F32", 4, "split", Instance(Mesh((2,), (1, 0)), (REPLICATE,))).hash,
    }
    assert len(hashes) == 8


def valid() -> dict[str, Any]:
    first = Instance(mesh(2, 2), (Placement(0, 2), Placement(0)))
    leaves = (
        LeafSpec("a", "F32", (8, 8), "split", (first,)),
        LeafSpec("b", "I64", (), "lowest", (on(0), on(2))),
    )
    document: dict[str, Any] = json.loads(Layout(4, leaves).to_json())
    assert Layout.from_json(json.dumps(document).encode()).leaves == leaves
    return document


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A change to the document: the last argument goes where the others lead."""

    def change(document: dict[str, Any]) -> None:
        at: Any = document
        for key in path[:-2]:
            at = at[key]
        at[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("holds", "table"),
        put("world", 3),
        put("world", 0),
        put("world", -1),
        put("world", 1 << 80),
        put("world", None),
        put("meshes", 0, [[2, 3], [0, 1, 2, 3]]),
        put("meshes", 0, [[2, 2], [0, 1, 2, 2]]),
        put("meshes", 0, [[2, 2], [0, 1, 2, -3]]),
        put("meshes", 0, [[1 << 40, 1 << 40], [0, 1, 2, 3]]),
        put("meshes", 0, [[2.0, 2], [0, 1, 2, 3]]),
        put("meshes", []),
        put("instances", 0, [9, [[0, 2], [0, 1]]]),
        put("instances", 0, [-1, [[0, 2], [0, 1]]]),
        put("instances", 0, [0, [[0, 2]]]),
        put("instances", 0, [0, [[2, 1], [0, 1]]]),
        put("instances", 0, [0, [[-5, 1], [0, 1]]]),
        put("instances", 0, [0, [[0, 0], [0, 1]]]),
        put("instances", 0, [0, [[0, MAX_STRIDES + 1], [0, 1]]]),
        put("groups", 0, []),
        put("groups", 0, [7]),
        put("groups", 0, [-1]),
        put("groups", 0, [0, 0]),
        put("groups", 1, [1, 1]),
        put("leaves", 0, ["b", "F32", [8, 8], "split", 0]),
        put("leaves", 0, ["c", "F32", [8, 8], "split", 0]),
        put("leaves", 0, ["a", "F31", [8, 8], "split", 0]),
        put("leaves", 0, ["a", "F32", [8, -8], "split", 0]),
        put("leaves", 0, ["a", "F32", [1 << 62, 8], "split", 0]),
        put("leaves", 0, ["a", "F32", [8] * 65, "split", 0]),
        put("leaves", 0, ["a", "F32", [], "split", 0]),
        put("leaves", 0, ["a", "F32", [8, 8], "some", 0]),
        put("leaves", 0, ["a", "F32", [8, 8], "split", 2]),
        put("leaves", 0, ["a", "F32", [8, 8], "split", -1]),
        put("leaves", 0, ["a", "F32", [8, 8], "split"]),
        put("leaves", 0, ["", "F32", [8, 8], "split", 0]),
        put("leaves", 0, ["a" * 70000, "F32", [8, 8], "split", 0]),
        put("leaves", {}),
        lambda document: document.pop("groups"),
        lambda document: document.pop("version"),
    ],
)
def test_impossible_layouts_are_refused(change: Callable[[dict[str, Any]], None]) -> None:
    document = valid()
    change(document)
    with pytest.raises(FormatError, match="layout"):
        Layout.from_json(json.dumps(document).encode())


def test_a_layout_of_a_later_version_is_refused_as_such() -> None:
    document = valid()
    document["version"] = 3
    with pytest.raises(NewerFormat, match="version 3; this Holdfast reads 1 and 2"):
        Layout.from_json(json.dumps(document).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"\xff" * 40, b"[" * 100_000, b'{"version":1}', b'{"version":"1"}'],
)
def test_bytes_that_are_no_document_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        Layout.from_json(data)
    with pytest.raises(FormatError):
        table_from_json(data)


def test_sizes_are_bounded_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps(valid()).encode()
    monkeypatch.setattr(codec, "MAX_LEAVES", 1)
    with pytest.raises(FormatError, match="2 leaves"):
        Layout.from_json(data)
    monkeypatch.setattr(codec, "MAX_BYTES", len(data) - 1)
    with pytest.raises(FormatError, match=f"{len(data)} bytes"):
        Layout.from_json(data)


def test_a_layout_cut_short_anywhere_is_refused() -> None:
    data = json.dumps(valid()).encode()
    for stop in range(len(data)):
        with pytest.raises(FormatError):
            Layout.from_json(data[:stop])


def test_damaged_bytes_give_a_layout_or_a_format_error_and_nothing_else() -> None:
    data = json.dumps(valid()).encode()
    dice = random.Random(1)
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(len(data))] = dice.choice(b'0123456789-,[]{}":.eax\xc3')
        try:
            layout = Layout.from_json(bytes(damaged))
        except FormatError:
            continue
        assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    "leaf",
    [
        ["a", "F32", [8], "split", 1],
        ["a", "F32", [8], "split", -2],
        ["a", "F32", [8], 3, 0],
        ["a", "?", [8], "split", 0],
    ],
)
def test_impossible_tables_are_refused(leaf: list[Any]) -> None:
    document = json.loads(table_to_json([LeafEntry("a", "F32", (8,), "split", on(0))]))
    document["leaves"][0] = leaf
    with pytest.raises(FormatError, match="leaf table"):
        table_from_json(json.dumps(document).encode())


def test_layouts_that_mean_nothing_are_refused() -> None:
    leaf = LeafSpec("w", "F32", (4,), "split", (on(0),))
    with pytest.raises(UsageError, match="sorted"):
        Layout(1, (leaf, leaf))
    with pytest.raises(UsageError, match="not 0"):
        Layout(0, (leaf,))
    with pytest.raises(UsageError, match="rank 3 in a world of 2"):
        Layout(2, (LeafSpec("w", "F32", (4,), "split", (on(3),)),))
    with pytest.raises(UsageError, match="two instances"):
        Layout(2, (LeafSpec("w", "F32", (4,), "split", (on(0), Instance(mesh(2), (REPLICATE,)))),))


# ── on the wire ──────────────────────────────────────────────────────────────────────────────


@unhurried
@given(layouts())
def test_a_document_comes_back_from_the_wire(layout: Layout) -> None:
    data = layout.to_json()
    assert inflate(deflate(data), layout.hash) == data


@unhurried
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 40), st.booleans())
def test_meshes_of_all_kinds_come_back_from_the_wire(
    first: int, step: int, count: int, is_turned: bool
) -> None:
    ranks = [first + n * step for n in range(count)]
    one = Instance(Mesh((count,), tuple(ranks[::-1] if is_turned else ranks)), (Placement(0),))
    names = [*map(str, ranks), '["0+1*9"]', f"{ranks}", '"instances"']
    data = table_to_json([LeafEntry(name, "F32", (8,), "split", one) for name in names])
    assert inflate(deflate(data), table_hash(data)) == data


def test_of_a_mesh_the_wire_has_a_few_bytes_however_many_ranks_it_has() -> None:
    sizes = []
    for count in (16, 16384):
        for step in (1, 8):
            ranks = Mesh((count,), tuple(range(3, 3 + count * step, step)))
            leaf = LeafEntry("w", "F32", (count,), "split", Instance(ranks, (Placement(0),)))
            sizes.append(len(deflate(table_to_json([leaf]))))
    assert max(sizes) < min(sizes) + 16


@pytest.mark.parametrize(
    "head",
    [b'{"meshes":["0+1*9999999"]' * 10, b'["1+1*9"]', b"[1,2,3,4,5,6,7,8,9]", b"", b"[[["],
)
def test_what_is_not_the_document_that_was_named_is_refused(head: bytes) -> None:
    for sent in (head, zlib.compress(head), deflate(head), deflate(head)[:-1], head * 9):
        with pytest.raises(FormatError, match="the document"):
            inflate(sent, "0" * 32)
