"""Computes a grid of cells that shows which ranks hold and store which part of a leaf.

Each dimension is cut everywhere that any box cuts it: each cell then lies in whole boxes, and one
label describes it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from rich.text import Text

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.layout import Instance, Layout, LeafSpec

#: More cells than this are described, not drawn.
MAX_CELLS = 256
#: More ranks than this in one cell are counted, not named.
MAX_NAMED = 4

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A box that is not cut further: the ranks that hold it, and those of them that store it."""

    held: tuple[int, ...]
    stored: tuple[int, ...]

    @property
    def label(self) -> str:
        """Formats ``0* 2``: ranks 0 and 2 hold it, 0 stores it; ``0* +7``: and seven more hold
        it.
        """
        if len(self.held) <= MAX_NAMED:
            ranks = sorted({*self.held, *self.stored})
            return " ".join(f"{rank}*" if rank in self.stored else str(rank) for rank in ranks)
        stored = " ".join(f"{rank}*" for rank in self.stored)
        return f"{stored} +{len(set(self.held) - set(self.stored))}"


@dataclass(frozen=True, slots=True)
class Grid:
    """``cuts[d]`` are all boundaries in dimension d, its ends included.

    ``cells`` are indexed by the position between the cuts of ``dims``, the dimensions that are cut.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    cells: Mapping[Index, Cell]

    def extent(self, dim: int, at: int) -> tuple[int, int]:
        """Returns the begin and end of position ``at`` of a dimension."""
        return self.cuts[dim][at], self.cuts[dim][at + 1]


def boxes_of(layout: Layout, leaf: int) -> tuple[list[tuple[int, Box]], list[tuple[int, Box]]]:
    """Returns (rank, box) of all held parts of a leaf, and of all stored ones."""
    held = [(rank, box) for rank in range(layout.world) for box, _ in layout.held(leaf, rank)]
    return held, list(layout.owners(leaf))


def cuts_of(shape: tuple[int, ...], boxes: Iterable[Box]) -> tuple[tuple[int, ...], ...]:
    """Returns the positions where each dimension is cut by any box, ascending, from 0 to its
    size.
    """
    found: list[set[int]] = [{0, size} for size in shape]
    for box in boxes:
        for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
            found[dim] |= {start, stop}
    return tuple(tuple(sorted(cuts)) for cuts in found)


def grid_of(layout: Layout, leaf: int) -> Grid | None:
    """Returns the cells of a leaf; None when there are too many to draw."""
    shape = layout.leaves[leaf].shape
    held, stored = boxes_of(layout, leaf)
    cuts = cuts_of(shape, (box for _, box in held + stored))
    dims = tuple(dim for dim, at in enumerate(cuts) if len(at) > 2)
    if math.prod(len(cuts[dim]) - 1 for dim in dims) > MAX_CELLS:
        return None
    holders = _ranks_at(held, cuts, dims)
    storers = _ranks_at(stored, cuts, dims)
    everywhere = product(*(range(len(cuts[dim]) - 1) for dim in dims))
    cells = {at: Cell(holders.get(at, ()), storers.get(at, ())) for at in everywhere}
    return Grid(shape, cuts, dims, cells)


def _ranks_at(
    boxes: Iterable[tuple[int, Box]], cuts: tuple[tuple[int, ...], ...], dims: tuple[int, ...]
) -> dict[Index, tuple[int, ...]]:
    """Returns the ranks that have each cell, ascending."""
    found: dict[Index, set[int]] = {}
    for rank, box in boxes:
        spans = [
            range(bisect_left(cuts[dim], box.start[dim]), bisect_left(cuts[dim], box.stop[dim]))
            for dim in dims
        ]
        for at in product(*spans):
            found.setdefault(at, set()).add(rank)
    return {at: tuple(sorted(ranks)) for at, ranks in found.items()}


def spread_texts(leaf: LeafSpec) -> list[str]:
    """Describes how a leaf is spread: one line for each way its ranks have it."""
    there = [one for one in leaf.instances if isinstance(one, Instance)]
    whole = [instance for instance in there if instance.is_whole]
    texts = []
    if whole:
        ranks = sorted(rank for instance in whole for rank in instance.mesh.ranks)
        texts.append(f"whole on {ranks_text(ranks)}")
    if leaf.listing is not None and leaf.listing.parts:
        count = len(leaf.listing.parts)
        boxes = "1 box" if count == 1 else f"{count} boxes"
        texts.append(f"{ranks_text(leaf.listing.ranks)}: {boxes}, listed one by one")
    for instance in there:
        if instance.is_whole:
            continue
        parts = []
        for size, placement in zip(instance.mesh.shape, instance.placements, strict=True):
            if placement.dim == -1:
                parts.append("the same" if size == 1 else f"{size} copies")
            else:
                factor = placement.split_factor
                strides = f" in strides of {factor}" if factor > 1 else ""
                parts.append(f"dim {placement.dim} cut in {size}{strides}")
        mesh = " x ".join(map(str, instance.mesh.shape))
        texts.append(f"{ranks_text(instance.mesh.ranks)}, mesh {mesh}: {', '.join(parts)}")
    return texts


def ranks_text(ranks: Iterable[int]) -> str:
    """Formats ``rank 3``, ``ranks 0 to 7``, ``ranks 0, 2, 5``; of many, how many."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    if found == list(range(found[0], found[-1] + 1)):
        return f"ranks {found[0]} to {found[-1]}"
    if len(found) <= 2 * MAX_NAMED:
        return f"ranks {', '.join(map(str, found))}"
    return f"{len(found)} ranks, {found[0]} to {found[-1]}"


def cuts_texts(layout: Layout, leaf: int) -> list[str]:
    """Describes the cuts of a leaf that has too many cells to be drawn."""
    shape = layout.leaves[leaf].shape
    held, stored = boxes_of(layout, leaf)
    cuts = cuts_of(shape, (box for _, box in held + stored))
    texts = [f"{len(held)} boxes held and {len(stored)} stored, too many to draw:"]
    for dim, at in enumerate(cuts):
        if len(at) > 2:
            sizes = sorted({b - a for a, b in pairwise(at)})
            each = f"{sizes[0]} each" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} each"
            texts.append(f"  dim {dim} of {shape[dim]}: {len(at) - 1} ranges, {each}")
    return texts


# Draws a grid of cells as text: numbers along both edges, labels inside, a colour for each storing
# rank.
#
# Without colours, as in a pipe, the labels say the same. On a terminal without line characters,
# plain ASCII is used.


#: Neighbouring ranks are easy to tell apart; the eighth looks like the first again.
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_white")
LEGEND = "the numbers are ranks; * stores it, the others hold it too"
#: A single row of cells is stretched to about this width, so that sizes can be compared.
BAR_WIDTH = 64
MAX_SPACED_ROWS = 12


@dataclass(frozen=True, slots=True)
class DrawnLines:
    """The characters of borders: left, middle and right end for top, between and bottom."""

    across: str
    down: str
    corners: tuple[str, str, str]


BOX = DrawnLines("─", "│", ("┌┬┐", "├┼┤", "└┴┘"))
ASCII = DrawnLines("-", "|", ("+++", "+++", "+++"))


def draw(grid: Grid, width: int, lines: DrawnLines) -> Iterator[Text]:
    """Yields the picture line by line; wide ones are cut into strips of at most ``width``."""
    if len(grid.dims) < 2:
        yield from _draw_bar(grid, width, lines)
        return
    # The two dimensions with the most cuts make the grid; there is one for each part of the others.
    by_cuts = sorted(grid.dims, key=lambda dim: -len(grid.cuts[dim]))
    rows, columns = sorted(by_cuts[:2])
    others = sorted(by_cuts[2:])
    for place in product(*(range(len(grid.cuts[dim]) - 1) for dim in others)):
        fixed = dict(zip(others, place, strict=True))
        where = [
            f"dim {dim} from {grid.cuts[dim][at]} to {grid.cuts[dim][at + 1]}"
            for dim, at in fixed.items()
        ]
        title = f"dim {rows} down, dim {columns} across"
        yield Text("; ".join([*where, title]))
        yield from _draw_grid(grid, rows, columns, fixed, width, lines)


def _draw_bar(grid: Grid, width: int, lines: DrawnLines) -> Iterator[Text]:
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
    lines: DrawnLines,
    *,
    numbers: bool = True,
) -> Iterator[Text]:
    """Yields one row of cells between borders, the cuts above."""
    if numbers:
        yield _ruler(cuts, widths)
    yield _border(widths, lines, 0)
    yield _row(cells, widths, lines)
    yield _border(widths, lines, 2)


def _draw_grid(
    grid: Grid, rows: int, columns: int, fixed: dict[int, int], width: int, lines: DrawnLines
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
            # Without borders between them, twice as many rows fit on a screen.
            if number == 0 or len(table) <= MAX_SPACED_ROWS:
                yield Text(begins).append(_border(some, lines, 0 if number == 0 else 1))
                begins = " " * edge
            yield Text(begins).append(_row(row[start:stop], some, lines))
        yield Text(f"{down[-1]} ".rjust(edge)).append(_border(some, lines, 2))


def _least_width(cells: Sequence[Cell], cut: int) -> int:
    """Returns the width that the labels need, and the number of the cut above."""
    return max(len(str(cut)), *(len(cell.label) + 2 for cell in cells))


def _stretched(least: Sequence[int], cuts: Sequence[int], width: int) -> list[int]:
    """Returns widths proportional to the boxes, where there is room for that."""
    room = width - len(least) - 1
    sizes = [b - a for a, b in pairwise(cuts)]
    wide = [max(n, round(room * size / sum(sizes))) for n, size in zip(least, sizes, strict=True)]
    return wide if sum(wide) <= room else list(least)


def _strips(widths: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """Yields runs of cells that fit on one line each, at least one cell in every one."""
    start = used = 0
    for at, each in enumerate(widths):
        if at > start and used + each + 2 > width:
            yield start, at
            start, used = at, 0
        used += each + 1
    yield start, len(widths)


def _ruler(cuts: Sequence[int], widths: Sequence[int]) -> Text:
    """Returns each cut above its border; widths are such that no number reaches the next."""
    text = ""
    for cut, place in zip(cuts, accumulate(widths, lambda x, w: x + w + 1, initial=0), strict=True):
        text = text.ljust(place) + str(cut)
    return Text(text)


def _border(widths: Sequence[int], lines: DrawnLines, kind: int) -> Text:
    left, middle, right = tuple(lines.corners[kind])
    return Text(left + middle.join(lines.across * each for each in widths) + right)


def _row(cells: Sequence[Cell], widths: Sequence[int], lines: DrawnLines) -> Text:
    text = Text(lines.down)
    for cell, each in zip(cells, widths, strict=True):
        text.append(cell.label.center(each), style=_style(cell))
        text.append(lines.down)
    return text


def _style(cell: Cell) -> str:
    return f"bold {COLOURS[cell.stored[0] % len(COLOURS)]}" if cell.stored else "bold"


# Reads and writes boxes as people do: ``[0:4, 10:20]``, as Python indexes.


_RANGE = re.compile(r"\s*(-?\d*)\s*(:?)\s*(-?\d*)\s*")


def box_text(box: Box) -> str:
    """Formats a box as ``[0:4, 10:20]``; that of a scalar as ``[]``."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"


def parse_box(text: str | None, shape: tuple[int, ...]) -> Box:
    """Parses a box from ``0:4,:,7``: Python's slices without steps, or single numbers.

    Raises UsageError for text that is no box, or not inside ``shape``. None is the whole.
    """
    if text is None:
        return Box.whole(shape)
    inside = text.strip().removeprefix("[").removesuffix("]")
    ranges = inside.split(",") if inside.strip() else []
    if len(ranges) != len(shape):
        raise UsageError(
            f"--box {text}: the leaf has {len(shape)} dimensions, {list(shape)}; give a range or "
            "a number for each, as in 0:4,:"
        )
    bounds = [_bounds(each, size, text) for each, size in zip(ranges, shape, strict=True)]
    return Box(tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))


def _bounds(text: str, size: int, whole: str) -> tuple[int, int]:
    matched = _RANGE.fullmatch(text)
    first, colon, last = matched.groups() if matched else ("-", "", "")
    if not (colon or first) or "-" in (first, last):
        raise UsageError(f"--box {whole}: {text.strip()!r} is no range; write 0:4, 7, :10 or :")
    start = _from_end(int(first), size) if first else 0
    stop = _from_end(int(last), size) if last else size
    stop = stop if colon else start + 1
    if not 0 <= start <= stop <= size:
        raise UsageError(f"--box {whole}: {text.strip()} is not within 0:{size}")
    return start, stop


def _from_end(index: int, size: int) -> int:
    return index + size if index < 0 else index
