"""Sets of ranks as ranges: as large as they have gaps, and not as the ranks are many."""

from __future__ import annotations

from collections.abc import Iterable

#: Ranks from the first to before the second.
Range = tuple[int, int]


def in_ranges(ranks: Iterable[int]) -> list[Range]:
    """Returns these ranks as ranges, in order."""
    return union((rank, rank + 1) for rank in ranks)


def union(ranges: Iterable[Range]) -> list[Range]:
    """Returns what is in any of these ranges, as few ranges in order."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def ranks_in(ranges: Iterable[Range]) -> list[int]:
    """Returns the ranks of these ranges."""
    return [rank for start, stop in ranges for rank in range(start, stop)]


def ranks_text(ranks: Iterable[int]) -> str:
    """Formats ranks as ``rank 3`` or ``ranks 0-2, 5``."""
    found = in_ranges(ranks)
    text = ", ".join(f"{a}" if a == b - 1 else f"{a}-{b - 1}" for a, b in found)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
