"""One layout from the tables of all ranks, or all their differences."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from msgspec.structs import replace

from holdfast.errors import StateMismatch
from holdfast.geometry.box import Box
from holdfast.geometry.codec import has_frozen
from holdfast.geometry.layout import (
    REPLICATE,
    HolderBoxes,
    Instance,
    Layout,
    LeafEntry,
    Mesh,
    Placement,
    merge,
    table_from_json,
    table_to_json,
)
from support.models.layouts import layouts, mesh, on, unhurried

Table = list[LeafEntry]


@unhurried
@given(layouts())
def test_merged_tables_hold_what_every_rank_declared(layout: Layout) -> None:
    tables: list[Table] = [[] for _ in range(layout.world)]
    for number, leaf in enumerate(layout.leaves):
        for one in leaf.instances:
            for rank in one.ranks:
                mine = one if isinstance(one, Instance) else HolderBoxes(one.of_rank(rank))
                entry = LeafEntry(leaf.name, leaf.dtype, leaf.shape, leaf.spread, mine)
                tables[rank].append(entry)
                assert entry.boxes(rank) == layout.held(number, rank)
    merged = merge([table_from_json(table_to_json(table)) for table in tables])
    assert merged == merge(tables)
    # Nobody declared a leaf without elements of which all that is listed is nothing.
    there = [n for n, leaf in enumerate(layout.leaves) if any(one.ranks for one in leaf.instances)]
    assert [leaf.name for leaf in merged.leaves] == [layout.leaves[n].name for n in there]
    for number, before in enumerate(there):
        for rank in range(layout.world):
            assert merged.held(number, rank) == layout.held(before, rank)
    for rank, table in enumerate(tables):
        merged.require_declared(rank, table)


CUT, OTHERWISE = Instance(mesh(2), (Placement(0),)), Instance(mesh(2), (Placement(1),))
HALVES = HolderBoxes((Box((0, 0), (2, 4)),)), HolderBoxes((Box((2, 0), (4, 4)),))


@pytest.mark.parametrize(
    "other",
    [
        {"name": "v"},
        {"dtype": "I32"},
        {"shape": (4, 5)},
        {"spread": "lowest"},
        {"instance": None},
        {"instance": OTHERWISE},
        {"instance": Instance(mesh(2), (REPLICATE,))},
        {"instance": Instance(Mesh((2,), (1, 0)), (Placement(0),))},
        {"instance": HALVES[0]},
        {"instance": HolderBoxes(())},
    ],
)
def test_a_rank_refuses_a_layout_that_is_not_that_of_what_it_declared(
    other: dict[str, Any],
) -> None:
    """Wherever it comes from: whoever says so may be wrong."""
    entry = LeafEntry("w", "F32", (4, 4), "split", CUT)
    first = LeafEntry("a", "F32", (4,), "split")
    layout = merge([[first, entry]] * 2)
    for rank in range(2):
        layout.require_declared(rank, [first, entry])
        layout.require_declared(rank, [first, replace(entry, is_frozen=True)])
        for wrong in ([replace(entry, **other), first], [first], [entry], []):
            with pytest.raises(StateMismatch, match="not that of this state"):
                layout.require_declared(rank, wrong)


def test_a_rank_refuses_a_layout_in_which_it_holds_the_boxes_of_another() -> None:
    tables = [[LeafEntry("w", "F32", (4, 4), "split", half)] for half in HALVES]
    layout = merge(tables)
    for rank in range(2):
        layout.require_declared(rank, tables[rank])
        with pytest.raises(StateMismatch, match=f"rank {rank} declared w otherwise"):
            layout.require_declared(rank, tables[1 - rank])
    with pytest.raises(StateMismatch):
        layout.require_declared(2, tables[0])


def test_plain_tensors_of_many_ranks_become_one_instance() -> None:
    tables = [[LeafEntry("w", "F32", (4,), "split", on(rank))] for rank in range(64)]
    layout = merge(tables)
    assert layout.leaves[0].instances == (Instance(mesh(64), (REPLICATE,)),)


def test_ranks_with_the_same_plain_tensors_declare_the_same_table() -> None:
    """It does not say which rank declares it, and comes to what naming each rank comes to."""
    entries = [LeafEntry("w", "F32", (4,), "split"), LeafEntry("x", "F32", (0, 3), "lowest")]
    data = table_to_json(entries)
    table = table_from_json(data)
    assert list(table) == entries and table_to_json(table) == data
    named = [
        [LeafEntry(e.name, e.dtype, e.shape, e.spread, on(rank)) for e in entries]
        for rank in range(64)
    ]
    assert merge([table] * 64).to_json() == merge(named).to_json()
    assert merge([*named[:7], *[table] * 57]).to_json() == merge(named).to_json()
    for one, other in zip(entries, named[5], strict=True):
        assert one.boxes(5) == other.boxes(5)


def test_plain_on_some_ranks_and_on_a_mesh_elsewhere_is_a_contradiction() -> None:
    both = LeafEntry("w", "F32", (4,), "split", Instance(mesh(2), (REPLICATE,)))
    error = mismatch([both], [LeafEntry("w", "F32", (4,), "split")])
    assert "rank 1 in the mesh (2,) of ranks 0-1 declared another mesh or placement" in str(error)


def test_a_leaf_declared_twice_by_several_ranks_names_them_all() -> None:
    table = [LeafEntry("w", "F32", (4,), "split")] * 2
    assert "w: ranks 0-2 declare it twice" in str(mismatch(table, table, table))


def test_ranks_may_have_leaves_of_their_own() -> None:
    tables = [[LeafEntry(f"stage.{rank}", "F32", (4,), "split", on(rank))] for rank in range(2)]
    layout = merge(tables)
    assert [layout.owners(n)[0][0] for n in range(2)] == [0, 1]
    assert layout.held(0, 1) == ()


def entry(
    name: str,
    rank: int,
    *,
    dtype: str = "F32",
    size: int = 4,
    spread: str = "split",
    is_frozen: bool = False,
) -> LeafEntry:
    return LeafEntry(name, dtype, (size,), spread, on(rank), is_frozen)


LARGE = 1 << 18  # of F32, one block


def test_a_leaf_is_frozen_if_all_ranks_that_have_it_say_so() -> None:
    tables = [
        [
            entry("all", rank, size=LARGE, is_frozen=True),
            entry("live", rank),
            entry("some", rank, size=LARGE, is_frozen=rank == 1),
        ]
        for rank in range(2)
    ]
    tables[1].append(entry("stage", 1, size=LARGE, is_frozen=True))
    layout = merge([table_from_json(table_to_json(table)) for table in tables])
    assert [leaf.name for leaf in layout.leaves if leaf.is_frozen] == ["all", "stage"]
    assert Layout.from_json(layout.to_json()) == layout
    assert has_frozen(layout.to_json())
    for data in (table_to_json(tables[0][1:2]), b"", b'{"frozen":[]}', b'{"frozen":', b"[" * 99999):
        assert not has_frozen(data)


def test_frozen_leaves_that_are_too_small_together_are_like_all_others() -> None:
    def layout(*, is_frozen: bool) -> Layout:
        leaves = [("a", LARGE - 20), ("b", 19)]
        return merge([[entry(name, 0, size=size, is_frozen=is_frozen) for name, size in leaves]])

    assert layout(is_frozen=True) == layout(is_frozen=False)
    assert layout(is_frozen=True).to_json() == layout(is_frozen=False).to_json()


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
    assert [problem.partition(":")[0] for problem in error.fields["problems"]] == names
