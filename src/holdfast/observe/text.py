"""Sizes, times and rates as short text for people: three digits, decimal units."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping

NOTHING = "-"


def size_text(size_bytes: float | None) -> str:
    """``1.61 GB``: decimal units, as disks and networks are sold."""
    if size_bytes is None:
        return NOTHING
    value, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def shared_text(size_bytes: int, reused_bytes: int) -> str:
    """``14.1 GB (50.0 MB own)``: a size, and what of it was not there before."""
    own = f" ({size_text(size_bytes - reused_bytes)} own)" if reused_bytes else ""
    return size_text(size_bytes) + own


def seconds_text(elapsed_s: float | None) -> str:
    """``41 µs``, ``3.20 ms``, ``1.75 s`` or ``2 h 05 min``."""
    if elapsed_s is None:
        return NOTHING
    if elapsed_s == 0:
        return "0 s"
    if elapsed_s < 1e-3:
        return f"{elapsed_s * 1e6:.0f} µs"
    if elapsed_s < 1:
        return f"{_three_digits(elapsed_s * 1e3)} ms"
    if elapsed_s < 600:
        return f"{_three_digits(elapsed_s)} s"
    hours, minutes = divmod(round(elapsed_s / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def rate_text(bytes_per_s: float | None) -> str:
    """``2.31 GB/s``."""
    return NOTHING if bytes_per_s is None else size_text(bytes_per_s) + "/s"


def count_text(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def counts_text(counts: Mapping[str, int]) -> str:
    """``12 forged, 3 too large``: the most frequent first."""
    by_number = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in by_number)


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2-5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank {shown}" if is_one else f"ranks {shown}"


def moment_text(time_s: float) -> str:
    """Local date and time to the second; ``-`` for a moment nobody recorded."""
    if time_s <= 0:
        return NOTHING
    return datetime.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S")


def _three_digits(value: float) -> str:
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
