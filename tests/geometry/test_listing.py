"""Leaves that no mesh describes: what ranks say they hold, what they agree on, and its bytes."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import FormatError, StateMismatch, UsageError
from holdfast.geometry import codec
from holdfast.geometry.box import Box, cover_fault, flat_boxes
from holdfast.geometry.codec import has_listings
from holdfast.geometry.layout import (
    REPLICATE,
    BoxList,
    HolderBoxes,
    Instance,
    Layout,
    LeafEntry,
    LeafSpec,
    Placement,
    merge,
    table_from_json,
    table_to_json,
)
from holdfast.geometry.mesh import MAX_RANKS
from support.models.layouts import held_by, in_order, mesh, on, unhurried

SHAPE = (6, 4)


def entry(*boxes: Box, shape: tuple[int, ...] = SHAPE) -> LeafEntry:
    return LeafEntry("w", "F32", shape, "split", HolderBoxes(boxes))


def rows(a: int, b: int) -> Box:
    return Box((a, 0), (b, 4))


def flat(start: int, stop: int) -> LeafEntry:
    return entry(*flat_boxes(SHAPE, start, stop))


# ── what one rank holds ──────────────────────────────────────────────────────────────────────


def test_each_box_of_a_rank_has_memory_of_its_own() -> None:
    expected = (
        (Box((0, 3), (1, 4)), Box((0, 0), (1, 1))),
        (rows(1, 3), Box((0, 0), (2, 4))),
        (Box((3, 0), (4, 2)), Box((0, 0), (1, 2))),
    )
    layout = merge([[flat(0, 3)], [flat(3, 14)], [flat(14, 24)]])
    assert flat(3, 14).boxes(1) == layout.held(0, 1) == expected
    assert layout.held(0, 3) == () == entry().boxes(0)


@pytest.mark.parametrize(
    ("boxes", "match"),
    [
        ((rows(2, 3), rows(0, 1)), "Sort boxes and memory parts together"),
        ((rows(0, 1), rows(0, 1)), "order of their first elements"),
        ((rows(0, 3), rows(2, 4)), "2 boxes .* have 4 elements twice"),
        ((rows(0, 1), Box((1,), (2,))), r"\[1, 2\] dimensions"),
        ((rows(1, 1),), "such parts are left out"),
    ],
)
def test_what_no_rank_can_hold_is_refused(boxes: tuple[Box, ...], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        HolderBoxes(boxes)


def test_boxes_outside_of_their_leaf_are_refused() -> None:
    for box in (Box((0, 0), (7, 1)), Box((0,), (1,)), Box((0, 0, 0), (1, 1, 1))):
        with pytest.raises(UsageError, match="boxes of w reach to"):
            entry(box)
        with pytest.raises(UsageError, match="boxes of w reach to"):
            LeafSpec("w", "F32", SHAPE, "split", (BoxList(((box, (0,)),)),))
    assert entry(Box((0, 0), (6, 1))).boxes(0)


# ── what all hold ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        (((rows(0, 2), (0,)), (rows(0, 1), (1,))), "sorted"),
        (((rows(0, 2), (0,)), (rows(0, 2), (1,))), "each there once"),
        (((rows(0, 2), ()),), "not by"),
        (((rows(0, 2), (-1, 2)),), "not by"),
        (((rows(0, 2), (0, MAX_RANKS)),), "not by"),
        (((rows(0, 2), (2, 1)),), "rising"),
        (((rows(0, 2), (1, 1)),), "rising"),
        (((rows(2, 2), (1,)),), "left out"),
    ],
)
def test_a_listing_that_means_nothing_is_refused(
    parts: tuple[tuple[Box, tuple[int, ...]], ...], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        BoxList(parts)


def test_a_leaf_has_one_listing_and_no_rank_in_two_places() -> None:
    one, other = BoxList(((rows(0, 6), (0,)),)), BoxList(((rows(0, 6), (1,)),))
    with pytest.raises(UsageError, match="w has 2 listings"):
        LeafSpec("w", "F32", SHAPE, "split", (one, other))
    with pytest.raises(UsageError, match="two instances"):
        Layout(2, (LeafSpec("w", "F32", SHAPE, "split", (on(1), other)),))
    with pytest.raises(UsageError, match="on rank 1 in a world of 1"):
        Layout(1, (LeafSpec("w", "F32", SHAPE, "split", (other,)),))


@st.composite
def replicas(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]]]:
    """What each rank holds of a leaf that one to three groups of ranks each have wholly."""
    shape: tuple[int, ...] = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    is_large = draw(st.booleans())
    if shape and is_large:  # enough to be divided
        shape = (*shape[:-1], 3000 * shape[-1])
    groups = draw(st.integers(1, 3))
    held: list[list[Box]] = [[] for _ in range(3 * groups)]
    for group in range(groups):
        for some, one in draw(held_by(shape, range(3 * group, 3 * group + 3))):
            for rank in some:
                held[rank] += one.boxes
    return shape, held


@unhurried
@given(replicas(), st.sampled_from(["split", "lowest"]), st.booleans())
def test_every_element_of_overlapping_replicas_is_stored_once_by_a_rank_that_holds_it(
    case: tuple[tuple[int, ...], list[list[Box]]], spread: str, is_written: bool
) -> None:
    shape, held = case
    tables = [[LeafEntry("w", "F32", shape, spread, HolderBoxes(in_order(some)))] for some in held]
    layout = merge(tables)
    if is_written:
        layout = Layout.from_json(layout.to_json())
    count = np.zeros(shape, dtype=np.int8)
    for rank, box in layout.owners(0):
        assert any(one.contains(box) for one in held[rank])
        count[box.slices()] += 1
    assert (count == 1).all()
    assert cover_fault(Box.whole(shape), [box for _, box in layout.owners(0)]) is None
    pieces = [(rank, piece.box) for rank in range(len(held)) for piece in layout.pieces(rank)]
    assert sorted(pieces, key=lambda one: one[1].start) == list(layout.owners(0))


def test_replicas_of_flat_shards_store_equal_shares_whether_cut_alike_or_not() -> None:
    shape, count = (1024, 1031), 1024 * 1031
    alike, others = [0, count // 2, count], [0, count // 2 + 70000, count]
    for ends in ([alike, alike], [alike, others], [alike, others, alike]):
        tables = [
            [LeafEntry("w", "F32", shape, "split", HolderBoxes(flat_boxes(shape, a, b)))]
            for some in ends
            for a, b in pairwise(some)
        ]
        layout = merge(tables)
        mine = [sum(piece.box.volume for piece in layout.pieces(r)) for r in range(len(tables))]
        assert sum(mine) == count
        assert max(mine) <= 1.2 * count / len(tables)


def test_what_nobody_holds_is_said_with_leaf_ranks_and_box() -> None:
    with pytest.raises(StateMismatch) as caught:
        merge([[flat(0, 3)], [flat(5, 14)], [flat(14, 24)]])
    assert caught.value.fields["leaves"] == ("w",)
    (text,) = caught.value.fields["problems"]
    assert "no rank holds the box (0, 3) to (1, 4) of its shape (6, 4)" in text
    assert "held by ranks 0-2" in text
    with pytest.raises(StateMismatch, match="held by no rank"):
        merge([[entry()], [entry()]])


def test_ranks_that_are_not_all_may_leave_something_out() -> None:
    layout = merge([[flat(0, 3)], [flat(5, 14)]], is_partial=True)
    assert [box.volume for _, box in layout.owners(0)] == [3, 3, 4, 2]
    assert merge([[entry()]], is_partial=True).owners(0) == ()


def test_a_leaf_without_elements_is_held_by_nobody() -> None:
    layout = merge([[entry(shape=(0, 4))], [entry(shape=(0, 4))]])
    assert not any((layout.owners(0), layout.held(0, 1), layout.pieces(0)))
    assert Layout.from_json(layout.to_json()) == layout


def test_ranks_that_have_it_whole_or_on_a_mesh_share_with_those_that_list_it() -> None:
    cut = Instance(mesh(2, first=1), (Placement(0),))
    large = (64, 16384)
    tables = [
        [LeafEntry("w", "F32", large, "split")],
        *[[LeafEntry("w", "F32", large, "split", cut)] for _ in range(2)],
        [entry(Box((0, 0), (40, 16384)), shape=large)],
        [entry(Box((40, 0), (64, 16384)), shape=large)],
    ]
    layout = merge(tables)
    assert [type(one) for one in layout.leaves[0].instances] == [Instance, Instance, BoxList]
    for rank, table in enumerate(tables):
        assert layout.held(0, rank) == table[0].boxes(rank)
    # Three cells, of rows 0-31, 32-39 and 40-63, each on three ranks.
    assert {box.start[0] for _, box in layout.owners(0)} >= {0, 32, 40}
    assert {rank for rank, _ in layout.owners(0)} == {0, 1, 2, 3, 4}
    whole = merge([tables[0], tables[3]])  # what is listed need not be all of it
    assert sum(box.volume for _, box in whole.owners(0)) == 64 * 16384


def test_ranks_that_differ_are_told_so_before_anything_is_missed() -> None:
    other = LeafEntry("w", "F32", (9, 4), "split", HolderBoxes((rows(0, 2),)))
    with pytest.raises(StateMismatch, match=r"its shape is \(6, 4\) on rank 0, \(9, 4\) on rank 1"):
        merge([[flat(0, 3)], [other]])
    cut = LeafEntry("w", "F32", SHAPE, "split", Instance(mesh(2), (REPLICATE,)))
    with pytest.raises(StateMismatch, match=r"rank 1 in the mesh .* declared another"):
        merge([[cut], [flat(0, 24)]])


# ── bytes ────────────────────────────────────────────────────────────────────────────────────


def test_a_layout_without_listings_is_written_as_ever() -> None:
    data = Layout(1, (LeafSpec("w", "F32", (2,), "split", (on(0),)),)).to_json()
    assert json.loads(data)["version"] == 1
    assert (
        not has_listings(data) and not has_listings(b"nonsense") and not has_listings(b"[" * 9999)
    )
    listed = merge([[flat(0, 24)]]).to_json()
    assert json.loads(listed)["version"] == 2
    assert has_listings(listed)


def test_leaves_that_are_held_alike_are_written_once() -> None:
    """Parameters and moments of one shape, whoever declares them, have one listing."""

    def table(start: int, stop: int) -> list[LeafEntry]:
        names = ("exp_avg", "exp_avg_sq", "master")
        return [
            LeafEntry(n, "F32", SHAPE, "split", HolderBoxes(flat_boxes(SHAPE, start, stop)))
            for n in names
        ]

    tables = [table(0, 7), table(7, 24)]
    layout = merge([table_from_json(table_to_json(one)) for one in tables])
    document = json.loads(layout.to_json())
    assert document["listings"] == [[[6, 4], [0, 0, 0, 0], [4, 3, 1, 16], [0, 0, 1, 0]]]
    assert document["groups"] == [[-1]]
    assert len({id(leaf.instances) for leaf in layout.leaves}) == 1
    assert len(json.loads(table_to_json(tables[0]))["listings"]) == 1


def test_boxes_and_sets_of_ranks_are_written_once_each() -> None:
    columns = [Box((0, n), (6, n + 1)) for n in range(4)]
    both = BoxList(tuple((box, (0, 1) if n % 2 else (2,)) for n, box in enumerate(columns)))
    equal = tuple(sorted({0, 1}))  # an equal set, and another object
    again = BoxList(tuple((box, equal if len(r) == 2 else r) for box, r in both.parts[1:]))
    layout = Layout(
        3,
        tuple(
            LeafSpec(name, "F32", SHAPE, "split", (one,))
            for name, one in (("v", both), ("w", again))
        ),
    )
    document = json.loads(layout.to_json())
    assert document["extents"] == [[6, 1]]
    assert document["sets"] == [[0, 1]]
    assert document["listings"] == [
        [[6, 4], [0] * 4, [-1] * 4, [2, 1, -1, 1]],
        [[6, 4], [1, 0, 0], [-1] * 3, [3, -1, 1]],
    ]
    back = Layout.from_json(layout.to_json())
    assert back == layout
    assert back.leaves[0].instances[0] == both and hash(back.leaves[0].instances[0]) == hash(both)


def test_a_big_listing_takes_at_most_16_bytes_a_box() -> None:
    dice = random.Random(7)
    shape = (32768, 12288)
    ends = sorted(
        {0, shape[0] * shape[1], *(dice.randrange(shape[0] * shape[1]) for _ in range(2047))}
    )
    flats = [(flat_boxes(shape, a, b), n) for n, (a, b) in enumerate(pairwise(ends))]
    columns = [((Box((0, 6 * n), (shape[0], 6 * n + 6)),), n) for n in range(2048)]
    experts = [
        ((Box((n // 32, 0, n % 32 * 64), (n // 32 + 1, 512, n % 32 * 64 + 64)),), n)
        for n in range(2048)
    ]
    for leaf_shape, some in ((shape, flats), (shape, columns), ((64, 512, 2048), experts)):
        tables = [
            [LeafEntry("w", "F32", leaf_shape, "split", HolderBoxes(boxes))] for boxes, _ in some
        ]
        data = merge(tables).to_json()
        assert len(data) <= 16 * sum(len(boxes) for boxes, _ in some)


LISTED = merge(
    [
        [LeafEntry("a", "F32", SHAPE, "split", HolderBoxes((Box((0, 0), (6, 2)),)))],
        [
            LeafEntry(
                "a", "F32", SHAPE, "split", HolderBoxes((Box((0, 0), (6, 2)), Box((0, 2), (6, 4))))
            )
        ],
    ]
)


def listing(*row: object, **fields: object) -> dict[str, Any]:
    return {"listings": [list(row)], **fields}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"version": 1}, "version 1, and 1 listings"),
        ({"listings": []}, "version 2, and 0 listings"),
        (listing([6, 4], [0], [24], [0, 0]), "1 boxes and 2 holders"),
        (listing([6, 4], [0, 0], [24], [0]), "2 gaps and 1 sizes"),
        (listing([6, 4], [-1], [24], [0]), "begins at element -1 of 24"),
        (listing([6, 4], [0, 0], [24, 1], [0, 0]), "begins at element 24 of 24"),
        (listing([6, 4], [0], [25], [0]), "25 elements from number 0"),
        (listing([6, 4], [0], [0], [0]), "0 elements from number 0"),
        (listing([6, 4], [1], [4], [0]), "not one box"),
        (listing([6, 4], [0], [-2], [0]), "no number 1 of the extents, only 1"),
        (listing([6, 4], [0], [-1], [0], extents=[[6]]), r"a box of \(6,\)"),
        (listing([6, 4], [0], [-1], [0], extents=[[6, 0]]), r"a box of \(6, 0\)"),
        (listing([6, 4], [3], [-1], [0], extents=[[6, 2]]), r"from \(0, 3\)"),
        (listing([6, 4], [0], [-1], [0], extents=[[2, 4]]), "is one run"),
        (listing([6, 5], [0], [-1], [0], extents=[[6, 2]]), r"said to reach to \(6, 5\)"),
        (listing([6, 4, 1], [0], [24], [0]), r"reach to \(6, 4, 1\), but its shape"),
        (listing([7, 4], [0], [28], [0]), r"reach to \(7, 4\), but its shape"),
        (listing([2**40, 2**40], [0], [1], [0]), "no tensor can have"),
        (listing([1] * 65, [0], [1], [0]), "no tensor can have"),
        (listing([0, 4], [], [], []), "no tensor can have"),
        (listing([6, 4], [], [], []), r"said to reach to \(6, 4\), and reach to \(\)"),
        (listing([6, 4], [0], [24], [-1]), "not by"),
        (listing([6, 4], [0], [24], [3]), "no number 1 of the set"),
        (listing([6, 4], [0], [24], [2], sets=[[0]]), "not several"),
        (listing([6, 4], [0], [24], [2], sets=[[1, 0]]), "rising"),
        (listing([6, 4], [0], [24], [2], sets=[[0, 2]]), "rank 2 in a world of 2"),
        (listing([6, 4], [0, -24], [24, 24], [0, 1]), "each there once"),
        (listing([6, 4], [0, -20], [20, 20], [0, 1]), "is before"),
        (listing([6, 4], [0], [24], ["0"]), "cannot be read"),
        (listing([6, 4], [0], [24]), "cannot be read"),
        ({"groups": [[-2, -1]]}, "no listing 1"),
        ({"groups": [[-1, -1]]}, "2 listings"),
    ],
)
def test_listings_that_say_nothing_are_refused(fields: dict[str, Any], match: str) -> None:
    document = json.loads(LISTED.to_json())
    assert Layout.from_json(json.dumps(document).encode()) == LISTED
    document.update(fields)
    with pytest.raises(FormatError, match=match):
        Layout.from_json(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 1}, "version 1, and 1 listings"),
        (listing([6, 4], [0], [24], [0]), "no steps"),
        (listing([6, 4], [0, -24], [24, 24], []), "order of their first"),
        (listing([6, 4], [0, -20], [24, 4], []), "elements twice"),
        (listing([7, 4], [0], [24], []), r"said to reach to \(7, 4\)"),
        ({"leaves": [["a", "F32", [6, 4], "split", -3]]}, "no listing 1"),
    ],
)
def test_tables_of_boxes_that_nobody_holds_are_refused(change: dict[str, Any], match: str) -> None:
    document = json.loads(table_to_json([flat(0, 24)]))
    document.update(change)
    with pytest.raises(FormatError, match=match):
        table_from_json(json.dumps(document).encode())


def test_more_boxes_than_any_layout_has_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "MAX_LISTED_DIMS", 4)
    assert Layout.from_json(LISTED.to_json()) == LISTED
    monkeypatch.setattr(codec, "MAX_LISTED_DIMS", 3)
    with pytest.raises(FormatError, match="boxes of 4 dimensions, more than 3"):
        Layout.from_json(LISTED.to_json())


def test_a_long_set_of_ranks_for_each_of_many_boxes_costs_its_length_once() -> None:
    """A small file names 131072 ranks for each of thousands of boxes, and is read all the same."""
    world, boxes = 1 << 17, 1 << 12
    document = {
        "holds": "layout",
        "version": 2,
        "world": world,
        "meshes": [],
        "instances": [],
        "groups": [[-1]],
        "leaves": [["w", "U8", [boxes], "lowest", 0]],
        "sets": [list(range(world))],
        "listings": [[[boxes], [0] * boxes, [1] * boxes, [world] + [0] * (boxes - 1)]],
    }
    layout = Layout.from_json(json.dumps(document).encode())
    assert layout.owners_meeting(0, Box((7,), (8,))) == ((0, Box((7,), (8,))),)
    assert len(layout.held(0, world - 1)) == boxes
