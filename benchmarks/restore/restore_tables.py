"""Show the results of restores as markdown, and how near they are to the limits."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.kit import markdown
from benchmarks.restore.restore_limits import DIRECT, PREADV, SUMMED, SUMMED_NEW


def ratios(found: dict[str, list[float]]) -> dict[str, float]:
    """How near the limits: medians of the ratios of one round each. More is better."""
    pairs = {
        "cold storage, of the direct read": (DIRECT, "Holdfast, cold"),
        "warm cache, of plain preadv": (PREADV, "Holdfast, warm"),
        "warm cache, times as fast as DCP load": ("DCP load, warm", "Holdfast, warm"),
        "cold storage, times as fast as DCP load": ("DCP load, cold", "Holdfast, cold"),
        "arena, of copy and xxh3": (SUMMED, "Holdfast, arena"),
        "arena, of copy and xxh3 out of newly mapped memory": (SUMMED_NEW, "Holdfast, arena"),
    }
    return {
        name: round(float(np.median([a / b for a, b in zip(found[x], found[y], strict=True)])), 3)
        for name, (x, y) in pairs.items()
    }


def tables(result: dict[str, Any], facts: dict[str, str]) -> str:
    """All of it as markdown."""
    parts = [
        f"{markdown.heading(facts)}. Medians of {result['rounds']} rounds (lowest–highest), in "
        "seconds; every restore was compared bit for bit."
    ]
    for kind, found in result["states"].items():
        size = found["size_bytes"]
        rows = [
            [
                name + (f" ({found['settings'][name]})" if name in found["settings"] else ""),
                markdown.spread(figure),
                "–" if name.startswith("one ") else f"{size / figure['median'] / 1e9:.2f}",
                found["restored"].get(name, "–"),
            ]
            for name, figure in found["figures"].items()
        ]
        parts += [
            f"{kind}: {size / 1e9:.2f} GB, {found['leaves']} tensors.",
            markdown.table(["", "seconds", "GB/s", "restored"], rows),
            markdown.table(["ratio", ""], [[n, f"{r:.2f}"] for n, r in found["ratios"].items()]),
        ]
    rows = [[name, markdown.spread(found)] for name, found in result["ranks"].items()]
    parts.append(markdown.table(["ranks, warm cache", "seconds"], rows))
    return "\n\n".join(parts)
