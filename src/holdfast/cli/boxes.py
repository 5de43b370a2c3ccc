"""Reads and writes boxes as people do: ``[0:4, 10:20]``, as Python indexes."""

from __future__ import annotations

import re

from holdfast.errors import UsageError
from holdfast.geometry.box import Box

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
