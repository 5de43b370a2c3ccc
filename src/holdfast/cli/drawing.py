"""A grid of cells as text: numbers along both edges, labels inside, a colour for each storing rank.

Without colours, as in a pipe, the labels say the same. On a terminal without the letters for
lines, plain ASCII is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from rich.text import Text

from holdfast.cli.picture import Cell, Grid

#: Neighbouring ranks are easy to tell apart; the eighth looks like the first again.
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_white")
LEGEND = "the numbers are ranks; * stores it, the others hold it too"
#: A single row of cells is stretched to about this width, so that sizes can be compared.
BAR_WIDTH = 64
MAX_SPACED_ROWS = 12


@dataclass(frozen=True, slots=True)
class Lines:
    """What borders are made of: left, middle and right end for top, between and bottom."""

    across: str
    down: str
    corners: tuple[str, str, str]


BOX = Lines("─", "│", ("┌┬┐", "├┼┤", "└┴┘"))
ASCII = Lines("-", "|", ("+++", "+++", "+++"))


def draw(grid: Grid, width: int, lines: Lines) -> Iterator[Text]:
    """The picture, line by line; wide ones are cut into strips of at most ``width``."""
    if len(grid.dims) < 2:
        yield from _draw_bar(grid, width, lines)
        return
    # The two dimensions with the most cuts make the grid; there is one for each part of the others.
    by_cuts = sorted(grid.dims, key=lambda dim: -len(grid.cuts[dim]))
    rows, columns = sorted(by_cuts[:2])
    others = sorted(by_cuts[2:])
    for place in product(*(range(len(grid.cuts[dim]) - 1) for dim in others)):
        fixed = dict(zip(others, place, strict=True))
        where = [f"dim {dim} from {grid.cuts[dim][at]} to {grid.cuts[dim][at + 1]}"
                 for dim, at in fixed.items()]  # fmt: skip
        title = f"dim {rows} down, dim {columns} across"
        yield Text("; ".join([*where, title]))
        yield from _draw_grid(grid, rows, columns, fixed, width, lines)


def _draw_bar(grid: Grid, width: int, lines: Lines) -> Iterator[Text]:
    if not grid.dims:
        (cell,) = grid.cells.values()
        yield from _strip([cell], [0, 0], [len(cell.label) + 2], lines, numbers=False)
        return
    (dim,) = grid.dims
    cuts = grid.cuts[dim]
    cells = [grid.cells[(at,)] for at in range(len(cuts) - 1)]
    least = [_least_width([cell], cut) for cell, cut in zip(cells, cuts, strict=False)]
    widths = _stretched(least, cuts, min(width, BAR_WIDTH))
    yield Text(f"dim {dim}")
    for start, stop in _strips(widths, width - len(str(cuts[-1]))):
        yield from _strip(cells[start:stop], cuts[start : stop + 1], widths[start:stop], lines)


def _strip(
    cells: Sequence[Cell],
    cuts: Sequence[int],
    widths: Sequence[int],
    lines: Lines,
    *,
    numbers: bool = True,
) -> Iterator[Text]:
    """One row of cells between borders, the cuts above."""
    if numbers:
        yield _ruler(cuts, widths)
    yield _border(widths, lines, 0)
    yield _row(cells, widths, lines)
    yield _border(widths, lines, 2)


def _draw_grid(
    grid: Grid, rows: int, columns: int, fixed: dict[int, int], width: int, lines: Lines
) -> Iterator[Text]:
    across, down = grid.cuts[columns], grid.cuts[rows]

    def cell(row: int, column: int) -> Cell:
        at = fixed | {rows: row, columns: column}
        return grid.cells[tuple(at[dim] for dim in grid.dims)]

    table = [[cell(r, c) for c in range(len(across) - 1)] for r in range(len(down) - 1)]
    widths = [
        _least_width(column, cut)
        for column, cut in zip(zip(*table, strict=True), across, strict=False)
    ]
    edge = max(len(str(cut)) for cut in down) + 1
    for start, stop in _strips(widths, width - edge - len(str(across[-1]))):
        some = widths[start:stop]
        yield Text(" " * edge).append(_ruler(across[start : stop + 1], some))
        for number, row in enumerate(table):
            begins = f"{down[number]} ".rjust(edge)
            # Without borders between them, twice as many rows can be taken in at a glance.
            if number == 0 or len(table) <= MAX_SPACED_ROWS:
                yield Text(begins).append(_border(some, lines, 0 if number == 0 else 1))
                begins = " " * edge
            yield Text(begins).append(_row(row[start:stop], some, lines))
        yield Text(f"{down[-1]} ".rjust(edge)).append(_border(some, lines, 2))


def _least_width(cells: Sequence[Cell], cut: int) -> int:
    """What the labels need, and the number of the cut above."""
    return max(len(str(cut)), *(len(cell.label) + 2 for cell in cells))


def _stretched(least: Sequence[int], cuts: Sequence[int], width: int) -> list[int]:
    """Widths that tell large boxes from small ones, where there is room for that."""
    room = width - len(least) - 1
    sizes = [b - a for a, b in pairwise(cuts)]
    wide = [max(n, round(room * size / sum(sizes))) for n, size in zip(least, sizes, strict=True)]
    return wide if sum(wide) <= room else list(least)


def _strips(widths: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """Runs of cells that fit on one line each, at least one cell in every one."""
    start = used = 0
    for at, each in enumerate(widths):
        if at > start and used + each + 2 > width:
            yield start, at
            start, used = at, 0
        used += each + 1
    yield start, len(widths)


def _ruler(cuts: Sequence[int], widths: Sequence[int]) -> Text:
    """Each cut above its border; widths are such that no number reaches the next."""
    text = ""
    for cut, place in zip(cuts, accumulate(widths, lambda x, w: x + w + 1, initial=0), strict=True):
        text = text.ljust(place) + str(cut)
    return Text(text)


def _border(widths: Sequence[int], lines: Lines, kind: int) -> Text:
    left, middle, right = tuple(lines.corners[kind])
    return Text(left + middle.join(lines.across * each for each in widths) + right)


def _row(cells: Sequence[Cell], widths: Sequence[int], lines: Lines) -> Text:
    text = Text(lines.down)
    for cell, each in zip(cells, widths, strict=True):
        text.append(cell.label.center(each), style=_style(cell))
        text.append(lines.down)
    return text


def _style(cell: Cell) -> str:
    return f"bold {COLOURS[cell.stored[0] % len(COLOURS)]}" if cell.stored else "bold"
