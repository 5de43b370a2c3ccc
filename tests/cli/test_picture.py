"""The picture of a leaf: every cell says who holds and who stores it, in any layout."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from holdfast.cli.pictures import (
    ASCII,
    BOX,
    MAX_CELLS,
    DrawnLines,
    cuts_texts,
    draw,
    grid_of,
    ranks_text,
    spread_texts,
)
from holdfast.geometry.box import Box
from holdfast.geometry.layout import REPLICATE, BoxList, Instance, Layout, LeafSpec, Placement
from support.models.layouts import layouts, mesh, on

ROWS, COLUMNS = Placement(0), Placement(1)


def one_leaf(
    shape: tuple[int, ...], *placements: Placement, over: tuple[int, ...], world: int = 0
) -> Layout:
    instance = Instance(mesh(*over), placements)
    leaf = LeafSpec("w", "F32", shape, "split", (instance,))
    return Layout(max(world, math.prod(over)), (leaf,))


def picture(layout: Layout, width: int = 100, lines: DrawnLines = BOX) -> list[str]:
    grid = grid_of(layout, 0)
    assert grid is not None
    return [line.plain for line in draw(grid, width, lines)]


def test_a_leaf_cut_in_rows_is_a_bar_with_its_cuts_above() -> None:
    assert picture(one_leaf((300, 2000), ROWS, over=(4,)), width=24) == [
        "dim 0",
        "0    75   150  225  300",
        "┌────┬────┬────┬────┐",
        "│ 0* │ 1* │ 2* │ 3* │",
        "└────┴────┴────┴────┘",
    ]


def test_an_uneven_shard_is_drawn_smaller() -> None:
    lines = picture(one_leaf((10, 7), ROWS, over=(3,)))
    assert lines[1].split() == ["0", "4", "8", "10"]
    first, second, third = (len(cell) for cell in lines[3].strip("│").split("│"))
    assert first == second > third


def test_a_grid_has_its_cuts_along_both_edges() -> None:
    assert picture(one_leaf((4000, 2000), ROWS, COLUMNS, over=(2, 2))) == [
        "dim 0 down, dim 1 across",
        "     0    1000 2000",
        "   0 ┌────┬────┐",
        "     │ 0* │ 1* │",
        "2000 ├────┼────┤",
        "     │ 2* │ 3* │",
        "4000 └────┴────┘",
    ]


def test_repeated_boxes_say_who_stores_which_part_of_them() -> None:
    lines = picture(one_leaf((4000, 2000), REPLICATE, ROWS, over=(2, 2)))
    assert [cell.strip() for cell in lines[3].strip("│").split("│")] == [
        "0* 2",
        "0 2*",
        "1* 3",
        "1 3*",
    ]


def test_strides_are_drawn_where_they_lie() -> None:
    lines = picture(one_leaf((4000, 2000), ROWS, Placement(0, 3), over=(2, 2)))
    ranks = [cell.strip(" *") for cell in lines[3].strip("│").split("│")]
    assert ranks == ["0", "1", "0", "1", "0", "1", "2", "3", "2", "3", "2", "3"]


def test_a_third_dimension_that_is_cut_has_a_grid_for_each_part() -> None:
    lines = picture(one_leaf((8, 128, 6), ROWS, COLUMNS, Placement(2), over=(2, 2, 2)))
    titles = [line for line in lines if line.startswith("dim")]
    assert [title.partition(";")[0] for title in titles] == [
        "dim 2 from 0 to 3",
        "dim 2 from 3 to 6",
    ]


def test_dimensions_that_nobody_cuts_are_not_drawn() -> None:
    lines = picture(one_leaf((3, 4, 5, 6), Placement(2), over=(5,)))
    assert lines[0] == "dim 2"


def test_many_holders_are_counted() -> None:
    lines = picture(one_leaf((4000, 2000), REPLICATE, ROWS, over=(16, 4)))
    assert any("0* +15" in line for line in lines)


@pytest.mark.parametrize("width", [40, 80, 100])
def test_64_ranks_fit_on_the_screen(width: int) -> None:
    for layout in (
        one_leaf((4096, 128), ROWS, over=(64,)),
        one_leaf((4096, 128), ROWS, COLUMNS, over=(8, 8)),
        one_leaf((4096, 128), ROWS, COLUMNS, over=(32, 2)),
        one_leaf((4096, 4096), REPLICATE, ROWS, over=(8, 8)),
    ):
        lines = picture(layout, width)
        assert max(map(len, lines)) <= width
        for rank in range(64):
            assert any(f" {rank}* " in line for line in lines)
    assert len(picture(one_leaf((4096, 128), ROWS, COLUMNS, over=(8, 8)), 80)) < 24


def test_what_is_too_much_to_draw_is_described() -> None:
    layout = one_leaf((2 * MAX_CELLS * 8 - 4, 1280), ROWS, over=(2 * MAX_CELLS,))
    assert grid_of(layout, 0) is None
    assert cuts_texts(layout, 0) == [
        "512 boxes held and 512 stored, too many to draw:",
        "  dim 0 of 4092: 512 ranges, 4 to 8 each",
    ]


def test_a_leaf_that_every_rank_has_whole_is_one_cell() -> None:
    leaf = LeafSpec("w", "F32", (4,), "lowest", tuple(on(rank) for rank in range(4)))
    layout = Layout(4, (leaf,))
    assert picture(layout) == ["┌──────────┐", "│ 0* 1 2 3 │", "└──────────┘"]
    assert spread_texts(leaf) == ["whole on ranks 0 to 3"]


def test_the_spread_is_told_in_words() -> None:
    layout = one_leaf((8, 8), REPLICATE, ROWS, Placement(0, 2), over=(2, 2, 2))
    assert spread_texts(layout.leaves[0]) == [
        "ranks 0 to 7, mesh 2 x 2 x 2: 2 copies, dim 0 cut in 2, dim 0 cut in 2 in strides of 2"
    ]
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([4, 0, 2]) == "ranks 0, 2, 4"
    assert ranks_text(range(0, 64, 2)) == "32 ranks, 0 to 62"


def test_boxes_that_no_mesh_describes_are_counted_and_drawn() -> None:
    halves = BoxList(((Box((0,), (3,)), (0, 1)), (Box((3,), (8,)), (1,))))
    leaf = LeafSpec("w", "F32", (8,), "lowest", (on(2), halves))
    assert spread_texts(leaf) == ["whole on rank 2", "ranks 0 to 1: 2 boxes, listed one by one"]
    grid = grid_of(Layout(3, (leaf,)), 0)
    assert grid is not None
    assert [cell.label for cell in grid.cells.values()] == ["0* 1 2", "1* 2"]
    one = LeafSpec("w", "F32", (3,), "lowest", (BoxList(halves.parts[:1]),))
    assert spread_texts(one) == ["ranks 0 to 1: 1 box, listed one by one"]
    assert spread_texts(LeafSpec("w", "F32", (0,), "lowest", (BoxList(()),))) == []


def test_terminals_without_lines_get_ascii() -> None:
    lines = picture(one_leaf((4000, 2000), ROWS, COLUMNS, over=(2, 2)), lines=ASCII)
    assert all(line.isascii() for line in lines)


def test_colours_tell_neighbouring_ranks_apart() -> None:
    grid = grid_of(one_leaf((300, 2000), ROWS, over=(2,)), 0)
    assert grid is not None
    console = Console(force_terminal=True, color_system="standard", width=100)
    with console.capture() as capture:
        for line in draw(grid, 100, BOX):
            console.print(line)
    assert "\x1b[1;36m" in capture.get()
    assert "\x1b[1;33m" in capture.get()


@given(layouts(), st.integers(20, 120))
def test_every_cell_of_any_layout_lies_in_the_boxes_it_names(layout: Layout, width: int) -> None:
    for number, leaf in enumerate(layout.leaves):
        grid = grid_of(layout, number)
        if grid is None or Box.whole(leaf.shape).is_empty:
            continue
        owners = layout.owners(number)
        for at, cell in grid.cells.items():
            start, stop = [0] * len(leaf.shape), list(leaf.shape)
            for dim, place in zip(grid.dims, at, strict=True):
                start[dim], stop[dim] = grid.cuts[dim][place], grid.cuts[dim][place + 1]
            box = Box(tuple(start), tuple(stop))
            holding = [
                rank
                for rank in range(layout.world)
                if any(held.contains(box) for held, _ in layout.held(number, rank))
            ]
            assert list(cell.held) == holding
            assert list(cell.stored) == [rank for rank, owned in owners if owned.contains(box)]
        assert list(draw(grid, width, BOX))
