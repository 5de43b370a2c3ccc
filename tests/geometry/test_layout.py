"""Layouts: what is held, what is stored, agreement between ranks, and the bytes on disk.

That the boxes are those of real DTensors is shown in test_dtensor_boxes.py.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import FormatError, NewerFormat, StateMismatch, UsageError
from holdfast.geometry.box import Box, cover_fault
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.layout import (
    REPLICATE,
    Instance,
    Layout,
    LeafEntry,
    LeafSpec,
    Mesh,
    Piece,
    Placement,
    local_boxes,
    local_shape,
    merge,
    table_from_json,
    table_hash,
    table_to_json,
)
from holdfast.geometry.owners import PART_BYTES
from holdfast.geometry.placements import MAX_RANKS, MAX_STRIDES, Cut, local_ranges

Table = list[LeafEntry]

unhurried = settings(deadline=None)  # a busy machine is no fault of the code


def mesh(*shape: int, first: int = 0) -> Mesh:
    return Mesh(shape, tuple(range(first, first + math.prod(shape))))


def on(rank: int) -> Instance:
    """What a rank declares of a plain tensor."""
    return Instance(mesh(1, first=rank), (REPLICATE,))


# ── strategies ───────────────────────────────────────────────────────────────────────────────

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
mesh_shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple).filter(
    lambda shape: math.prod(shape) <= 12
)  # fmt: skip


@st.composite
def instances(draw: st.DrawFn, ndim: int, ranks: Sequence[int] | None = None) -> Instance:
    """Any mesh over some of ``ranks`` (or over as many as it likes), with any placements."""
    if ranks is None:
        shape = draw(mesh_shapes)
        order = draw(st.permutations(range(math.prod(shape))))
    else:
        order = list(draw(st.permutations(ranks)))
        shape = (len(order),)
        if len(order) % 2 == 0:
            shape = draw(st.sampled_from([shape, (2, len(order) // 2), (len(order) // 2, 2)]))
    cuts = st.builds(Placement, st.integers(0, ndim - 1), st.sampled_from([1, 1, 1, 2, 3, 4]))
    placement = st.just(REPLICATE) | cuts if ndim else st.just(REPLICATE)
    return Instance(Mesh(shape, tuple(order)), tuple(draw(placement) for _ in shape))


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], Instance]:
    shape = draw(shapes)
    return shape, draw(instances(len(shape)))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world = draw(st.integers(1, 8))
    leaves = []
    for name in sorted(draw(st.sets(st.text(min_size=1, max_size=4), max_size=5))):
        shape, is_large = draw(shapes), draw(st.booleans())
        if shape and is_large:  # enough to be divided
            shape = (*shape[:-1], 200 * shape[-1])
        ranks = draw(st.permutations(range(world)))
        bounds = sorted(draw(st.sets(st.integers(1, world), max_size=2)) | {0})
        groups = [ranks[a:b] for a, b in pairwise(bounds)] or [ranks]
        spec = LeafSpec(
            name, draw(st.sampled_from(sorted(ITEMSIZE))), shape,
            draw(st.sampled_from(["split", "lowest"])),
            tuple(draw(instances(len(shape), group)) for group in groups),
        )  # fmt: skip
        leaves.append(spec)
    return Layout(world, tuple(leaves))


# ── placements ───────────────────────────────────────────────────────────────────────────────


def test_a_rank_finds_itself_on_the_mesh() -> None:
    grid = Mesh((2, 3), (5, 4, 3, 2, 1, 0))
    where = [grid.coordinate(rank) for rank in (5, 4, 3, 2, 1, 0)]
    assert where == list(product(range(2), range(3)))
    assert grid.coordinate(6) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mesh((2, 2), (0, 1, 2)),
        lambda: Mesh((2,), (1, 1)),
        lambda: Mesh((), ()),
        lambda: Mesh((0,), ()),
        lambda: Mesh((1,), (-1,)),
        lambda: Mesh((1,), (MAX_RANKS,)),
        lambda: Mesh((-1, -1), (0,)),
        lambda: Placement(-2),
        lambda: Placement(0, 0),
        lambda: Placement(-1, 2),
        lambda: Instance(mesh(2), ()),
        lambda: Instance(mesh(2, 2), (Placement(0, 1 << 9), Placement(1, 1 << 9))),
        lambda: LeafSpec("w", "F32", (4,), "split", ()),
        lambda: LeafSpec("w", "F33", (4,), "split", (on(0),)),
        lambda: LeafSpec("w", "F32", (-4,), "split", (on(0),)),
        lambda: LeafSpec("w", "F32", (1 << 40, 1 << 40), "split", (on(0),)),
        lambda: LeafSpec("w", "F32", (1,) * 65, "split", (on(0),)),
        lambda: LeafSpec("w", "F32", (4,), "all", (on(0),)),
        lambda: LeafSpec("", "F32", (4,), "split", (on(0),)),
        lambda: LeafEntry("w", "F32", (4,), "split", Instance(mesh(2), (Placement(1),))),
    ],
)
def test_values_that_mean_nothing_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        make()


def test_chunks_are_as_large_as_the_first_and_the_last_may_be_empty() -> None:
    found = [local_ranges(7, [Cut(6, at)]) for at in range(6)]
    assert found == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 7),), (), ()]


def test_fsdp_after_tensor_parallel_cuts_what_tensor_parallel_left() -> None:
    # 7 rows on a 3x2 mesh, read from torch: the rank with dp 2 and tp 0 has nothing, although
    # cutting from left to right would give it row 6.
    def rows(dp: int, tp: int) -> tuple[tuple[int, int], ...]:
        return local_ranges(7, [Cut(3, dp, split_factor=2), Cut(2, tp)])

    assert [rows(dp, tp) for dp, tp in product(range(3), range(2))] == [
        ((0, 2),), ((4, 5),), ((2, 4),), ((5, 6),), (), ((6, 7),),
    ]  # fmt: skip


def test_a_stride_that_no_other_cut_explains_gives_several_ranges() -> None:
    # A fused weight of three parts over two ranks: each has its half of every part.
    fused = [local_ranges(12, [Cut(2, at, split_factor=3)]) for at in range(2)]
    assert fused == [((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))]
    # FSDP2 then cuts each of these as if it were one.
    first = local_ranges(12, [Cut(2, 0, split_factor=2), Cut(2, 0, split_factor=3)])
    assert first == ((0, 2), (4, 5))


@unhurried
@given(placed())
def test_ranks_hold_every_element_once_for_each_time_it_is_repeated(
    case: tuple[tuple[int, ...], Instance],
) -> None:
    shape, instance = case
    where, placements = instance.mesh, instance.placements
    copies = math.prod(
        extent for extent, p in zip(where.shape, placements, strict=True) if p.dim == -1
    )
    count = np.zeros(shape, dtype=int)
    for rank in where.ranks:
        boxes = local_boxes(shape, where, placements, rank)
        local = local_shape(shape, where, placements, rank)
        assert local is not None
        assert cover_fault(Box.whole(local), [inside for _, inside in boxes]) is None
        for box, inside in boxes:
            assert box.shape == inside.shape
            assert not box.is_empty
            count[box.slices()] += 1
    assert (count == copies).all()


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    assert local_boxes((4,), mesh(2), (Placement(0),), 2) == ()
    assert local_shape((4,), mesh(2), (Placement(0),), 2) is None


# ── who stores what ──────────────────────────────────────────────────────────────────────────


@unhurried
@given(layouts())
def test_every_element_is_stored_once_by_a_rank_that_holds_it(layout: Layout) -> None:
    for number, leaf in enumerate(layout.leaves):
        count = np.zeros(leaf.shape, dtype=np.int8)
        for rank, box in layout.owners(number):
            assert any(held.contains(box) for held, _ in layout.held(number, rank))
            count[box.slices()] += 1
        assert (count == 1).all()
        assert cover_fault(Box.whole(leaf.shape), [b for _, b in layout.owners(number)]) is None


@unhurried
@given(layouts())
def test_pieces_are_the_owners_by_rank_in_the_order_of_the_leaves(layout: Layout) -> None:
    by_rank = {
        rank: [
            Piece(number, box)
            for number in range(len(layout.leaves))
            for owner, box in layout.owners(number)
            if owner == rank
        ]
        for rank in range(layout.world)
    }
    assert {rank: list(layout.pieces(rank)) for rank in by_rank} == by_rank


@unhurried
@given(layouts())
def test_leaves_that_may_differ_come_whole_from_the_lowest_rank(layout: Layout) -> None:
    for number, leaf in enumerate(layout.leaves):
        if leaf.spread == "lowest" and all(one.is_whole for one in leaf.instances):
            lowest = min(rank for one in leaf.instances for rank in one.mesh.ranks)
            whole = Box.whole(leaf.shape)
            assert layout.owners(number) == (() if whole.is_empty else ((lowest, whole),))


def transformer(world: int, instance: Callable[[int], Instance], norm: Instance) -> Layout:
    """About the shapes of a small GPT with its two moments; ``instance`` by dimension to cut."""
    matrices: dict[str, tuple[int, ...]]
    matrices = {"qkv": (2304, 768), "proj": (768, 768), "up": (3072, 768), "down": (768, 3072)}
    leaves: dict[str, tuple[tuple[int, ...], Instance]]
    leaves = {
        f"{state}.{layer:02d}.{name}": (shape, instance(0 if name in ("qkv", "up") else 1))
        for state in ("model", "m", "v")
        for layer in range(6)
        for name, shape in matrices.items()
    }
    leaves |= {f"{state}.wte": ((50257, 768), instance(0)) for state in ("model", "m", "v")}
    leaves |= {f"{s}.{layer}.norm": ((768,), norm) for s in ("model", "m") for layer in range(12)}
    specs = (
        LeafSpec(name, "F32", shape, "split", (one,))
        for name, (shape, one) in sorted(leaves.items())
    )
    return Layout(world, tuple(specs))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("placement", [REPLICATE, Placement(0)])
def test_ranks_store_equal_shares(world: int, placement: Placement) -> None:
    whole = Instance(mesh(world), (REPLICATE,))
    check_balance(transformer(world, lambda _: Instance(mesh(world), (placement,)), whole))


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_replicas_of_shards_store_equal_shares(replicas: int) -> None:
    world, grid = 2 * replicas, mesh(replicas, 2)
    whole = Instance(mesh(world), (REPLICATE,))
    check_balance(
        transformer(world, lambda dim: Instance(grid, (REPLICATE, Placement(dim))), whole)
    )


def check_balance(layout: Layout) -> None:
    world = layout.world
    loads = [sum(4 * p.box.volume for p in layout.pieces(rank)) for rank in range(world)]
    assert max(loads) <= 1.02 * sum(loads) / world


@st.composite
def small_leaves(draw: st.DrawFn) -> Layout:
    """Leaves too small to be cut, each whole on some ranks."""
    held = st.sets(st.integers(0, 4), min_size=1)
    leaves = draw(st.lists(st.tuples(st.integers(1, 20), held), max_size=12))
    return Layout(5, tuple(
        LeafSpec(f"{n:02d}", "U8", (size,), "split",
                 (Instance(Mesh((len(ranks),), tuple(ranks)), (REPLICATE,)),))
        for n, (size, ranks) in enumerate(leaves)
    ))  # fmt: skip


@unhurried
@given(small_leaves())
def test_the_biggest_goes_first_to_the_least_loaded_of_those_that_hold_it(layout: Layout) -> None:
    loads = dict.fromkeys(range(layout.world), 0)
    expected = {}
    held_by = {n: sorted(leaf.instances[0].mesh.ranks) for n, leaf in enumerate(layout.leaves)}
    # What has no choice counts first.
    for n in sorted(held_by, key=lambda n: (len(held_by[n]) > 1, -layout.leaves[n].size_bytes)):
        expected[n] = min(held_by[n], key=lambda rank: (loads[rank], rank))
        loads[expected[n]] += layout.leaves[n].size_bytes
    assert {n: layout.owners(n)[0][0] for n in held_by} == expected


def test_small_boxes_are_not_cut_and_ties_go_to_the_lowest_rank() -> None:
    whole = Instance(mesh(4), (REPLICATE,))
    small = PART_BYTES // 4 - 1
    layout = Layout(
        4, tuple(LeafSpec(f"{n}", "F32", (small,), "split", (whole,)) for n in range(4))
    )
    assert [layout.owners(n) for n in range(4)] == [((n, Box.whole((small,))),) for n in range(4)]


def test_a_large_box_is_cut_over_all_that_hold_it() -> None:
    whole = Instance(mesh(4), (REPLICATE,))
    layout = Layout(4, (LeafSpec("w", "F32", (8, PART_BYTES), "split", (whole,)),))
    rows = [(rank, Box((2 * rank, 0), (2 * rank + 2, PART_BYTES))) for rank in range(4)]
    assert layout.owners(0) == tuple(rows)


def test_instances_that_are_cut_alike_share_the_work() -> None:
    # FSDP2 with tensor parallelism, which leaves a norm's weight alone: twice whole, cut in two.
    twice = (Instance(Mesh((2,), (0, 2)), (Placement(0),)),
             Instance(Mesh((2,), (1, 3)), (Placement(0),)))  # fmt: skip
    layout = Layout(4, (LeafSpec("norm", "F32", (4 * PART_BYTES,), "split", twice),))
    assert [rank for rank, _ in layout.owners(0)] == [0, 1, 2, 3]


def test_of_instances_that_are_cut_differently_the_lowest_rank_s_is_stored() -> None:
    across = Instance(Mesh((2,), (1, 2)), (Placement(1),))
    along = Instance(Mesh((2,), (0, 3)), (Placement(0),))
    layout = Layout(4, (LeafSpec("w", "F32", (4, 4), "split", (across, along)),))
    assert layout.owners(0) == ((0, Box((0, 0), (2, 4))), (3, Box((2, 0), (4, 4))))
    assert layout.held(0, 2) == ((Box((0, 2), (4, 4)), Box((0, 0), (4, 2))),)


def test_who_holds_nothing_and_what_is_empty_store_nothing() -> None:
    layout = Layout(3, (LeafSpec("w", "F32", (0, 4), "split", (on(1),)),))
    assert layout.owners(0) == ()
    assert layout.pieces(1) == layout.pieces(0) == ()
    assert layout.held(0, 0) == ()


@pytest.mark.timeout(20)
def test_thousands_of_leaves_are_laid_out_at_once() -> None:
    grid = mesh(4, 2)
    cut, whole = Instance(grid, (REPLICATE, Placement(0))), Instance(grid, (REPLICATE,) * 2)
    leaves = tuple(
        LeafSpec(f"{n:05d}", "F32", (1024, 1024 + n % 5), "split", (whole if n % 3 else cut,))
        for n in range(4000)
    )
    layout = Layout.from_json(Layout(8, leaves).to_json())
    started_s = time.perf_counter()
    for rank in range(8):
        assert layout.pieces(rank)
    # 0.04 s on an idle core; the bound is for busy ones.
    assert time.perf_counter() - started_s < 1.0


# ── bytes ────────────────────────────────────────────────────────────────────────────────────


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


@unhurried
@given(layouts())
def test_a_table_comes_back_from_its_bytes(layout: Layout) -> None:
    table = tuple(
        LeafEntry(leaf.name, leaf.dtype, leaf.shape, leaf.spread, leaf.instances[0])
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
    leaves = (LeafSpec("a", "F32", (8, 8), "split", (first,)),
              LeafSpec("b", "I64", (), "lowest", (on(0), on(2))))  # fmt: skip
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
    document["version"] = 2
    with pytest.raises(NewerFormat, match="version 2"):
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
        ["a", "F32", [8], "split", -1],
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


# ── agreement ────────────────────────────────────────────────────────────────────────────────


@unhurried
@given(layouts())
def test_merged_tables_hold_what_every_rank_declared(layout: Layout) -> None:
    tables: list[Table] = [[] for _ in range(layout.world)]
    for leaf in layout.leaves:
        for one in leaf.instances:
            entry = LeafEntry(leaf.name, leaf.dtype, leaf.shape, leaf.spread, one)
            for rank in one.mesh.ranks:
                tables[rank].append(entry)
    merged = merge([table_from_json(table_to_json(table)) for table in tables])
    assert merged == merge(tables)
    assert [leaf.name for leaf in merged.leaves] == [leaf.name for leaf in layout.leaves]
    for number in range(len(layout.leaves)):
        for rank in range(layout.world):
            assert merged.held(number, rank) == layout.held(number, rank)


def test_plain_tensors_of_many_ranks_become_one_instance() -> None:
    tables = [[LeafEntry("w", "F32", (4,), "split", on(rank))] for rank in range(64)]
    layout = merge(tables)
    assert layout.leaves[0].instances == (Instance(mesh(64), (REPLICATE,)),)


def test_ranks_may_have_leaves_of_their_own() -> None:
    tables = [[LeafEntry(f"stage.{rank}", "F32", (4,), "split", on(rank))] for rank in range(2)]
    layout = merge(tables)
    assert [layout.owners(n)[0][0] for n in range(2)] == [0, 1]
    assert layout.held(0, 1) == ()


def entry(
    name: str, rank: int, *, dtype: str = "F32", size: int = 4, spread: str = "split"
) -> LeafEntry:
    return LeafEntry(name, dtype, (size,), spread, on(rank))


def mismatch(*tables: Table) -> StateMismatch:
    with pytest.raises(StateMismatch) as caught:
        merge(tables)
    return caught.value


def test_every_leaf_that_differs_is_listed_with_its_ranks() -> None:
    error = mismatch(
        [entry("a", 0), entry("b", 0), entry("c", 0), entry("d", 0)],
        [entry("a", 1), entry("b", 1, dtype="BF16"), entry("c", 1, size=5), entry("d", 1)],
        [entry("a", 2), entry("b", 2), entry("c", 2), entry("d", 2, spread="lowest")],
        [entry("a", 3), entry("b", 3), entry("c", 3, size=6), entry("d", 3)],
    )
    assert str(error).splitlines() == [
        "the states of the ranks do not fit each other in 3 leaves:",
        "  b: its dtype is F32 on ranks 0, 2-3, BF16 on rank 1",
        "  c: its shape is (4,) on ranks 0, 2, (5,) on rank 1, (6,) on rank 3",
        "  d: its spread is split on ranks 0-1, 3, lowest on rank 2",
    ]
    assert error.fields["leaves"] == ("b", "c", "d")


def test_a_rank_that_lacks_its_part_of_a_leaf_is_named() -> None:
    cut = Instance(mesh(4), (Placement(0),))
    table = [LeafEntry("w", "F32", (8,), "split", cut)]
    error = mismatch(table, [], table, [])
    assert "w: ranks 1, 3 in the mesh (4,) of ranks 0-3 did not declare it" in str(error)


def test_a_rank_that_sees_another_cut_is_named() -> None:
    rows, columns = (Instance(mesh(2), (Placement(dim),)) for dim in (0, 1))
    error = mismatch(
        [LeafEntry("w", "F32", (8, 8), "split", rows)],
        [LeafEntry("w", "F32", (8, 8), "split", columns)],
    )
    assert "rank 1 in the mesh (2,) of ranks 0-1 declared another mesh or placement" in str(error)


def test_ranks_outside_of_their_mesh_or_of_the_world_are_named() -> None:
    error = mismatch([entry("w", 0)], [entry("w", 0)])
    assert "w: rank 1 declared the mesh (1,) of rank 0, outside of it" in str(error)
    error = mismatch([LeafEntry("w", "F32", (8,), "split", Instance(mesh(2), (REPLICATE,)))])
    assert "names rank 1, but the world has 1" in str(error)


def test_a_leaf_declared_twice_by_a_rank_is_named() -> None:
    assert "w: rank 0 declares it twice" in str(mismatch([entry("w", 0), entry("w", 0)]))


def test_a_long_list_of_differences_is_cut_in_the_message_only() -> None:
    names = [f"{number:03d}" for number in range(100)]
    error = mismatch([entry(name, 0) for name in names], [entry(name, 1, size=5) for name in names])
    assert str(error).endswith("and 80 more")
    assert error.fields["leaves"] == tuple(names)
