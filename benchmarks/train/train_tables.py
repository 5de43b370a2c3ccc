"""Show the results of trainings with saves as markdown and as an image."""

from __future__ import annotations

from typing import Any

from benchmarks.kit import markdown

ROW, BAR, LEFT, RIGHT = 26, 16, 300, 560
COLOURS = {"Holdfast": "#2a6f97", "": "#c0a36e"}


def tables(result: dict[str, Any], facts: dict[str, str]) -> str:
    """Every figure of every world, and the targets."""
    parts = [
        f"{markdown.heading(facts)}. Medians of {result['rounds']} rounds (lowest–highest). "
        "Inflation: how much longer a step takes than the same steps right before and after, "
        "without saves."
    ]
    for world, found in result["worlds"].items():
        parts += [f"**{world}**: {_what(found)}", _table(found)]
    rows = [
        [one["what"], f"{one['got']:.3f}", f"{one['target']:.2f}", _met(one)]
        for one in result["targets"]
    ]
    return "\n\n".join([*parts, markdown.table(["target", "got", "at most", "met"], rows)])


def _met(one: dict[str, Any]) -> str:
    return "yes" if one["got"] <= one["target"] else "no"


def _what(found: dict[str, Any]) -> str:
    alone = [figures["step alone"]["median"] for figures in found["figures"].values()]
    return (
        f"state {found['size_bytes'] / 1e9:.2f} GB in {found['leaves']} leaves; "
        f"{found['sequences']} sequences and {found['threads']} threads a rank; a step alone takes "
        f"{sorted(alone)[len(alone) // 2]:.2f} s"
    )


def _table(found: dict[str, Any]) -> str:
    rows = []
    for key, figures in found["figures"].items():
        interval, _, name = key.partition("|")
        inflation = figures["inflation"]
        rows.append(
            [
                f"{name} ({found['settings'][name]})",
                interval,
                f"{inflation['median']:+.1%} ({inflation['min']:+.1%} – {inflation['max']:+.1%})",
                f"{figures['lost']['median']:.3f}",
                f"{figures['blocked']['median']:.3f}",
                f"{figures['trainer cpu']['median']:.2f} + {figures['helper cpu']['median']:.2f}",
                f"{figures['steps to done']['median']:.0f}",
                found["stored"][name],
            ]
        )
    rows += [[name, "", *["failed"] * 5, error] for name, error in found["failed"].items()]
    head = [
        "",
        "a save every … steps",
        "inflation",
        "lost per save, s",
        "blocked per save, s",
        "CPU s per save, trainer + others",
        "steps until the last is done",
        "stored",
    ]
    return markdown.table(head, rows)


def svg(result: dict[str, Any]) -> str:
    """Inflation as bars, one picture of all worlds, with lowest and highest as a line."""
    rows: list[tuple[str, dict[str, float] | None]] = []
    for world, found in result["worlds"].items():
        rows.append((world, None))
        for key, figures in found["figures"].items():
            interval, _, name = key.partition("|")
            rows.append((f"{name}, every {interval}", figures["inflation"]))
    most = max([0.05, *(found["max"] for _, found in rows if found)])
    height = ROW * (len(rows) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + RIGHT + 90}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="8" y="{ROW - 8}" font-weight="bold">Longer steps by snapshots</text>',
    ]
    for number, (label, found) in enumerate(rows, start=1):
        lines += _row(label, found, y=ROW * number, scale=RIGHT / most)
    return "\n".join([*lines, "</svg>", ""])


def _row(label: str, found: dict[str, float] | None, *, y: int, scale: float) -> list[str]:
    if found is None:
        return [f'<text x="8" y="{y + BAR}" font-weight="bold">{label}</text>']
    colour = COLOURS["Holdfast" if label.startswith("Holdfast") else ""]
    width, middle = max(1.0, found["median"] * scale), y + ROW // 2 - 2
    low, high = max(0.0, found["min"] * scale), max(0.0, found["max"] * scale)
    return [
        f'<text x="{LEFT - 8}" y="{y + BAR}" text-anchor="end">{label}</text>',
        f'<rect x="{LEFT}" y="{y + 3}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
        f'<line x1="{LEFT + low:.1f}" x2="{LEFT + high:.1f}" y1="{middle}" y2="{middle}" '
        'stroke="black"/>',
        f'<text x="{LEFT + max(width, high) + 8:.1f}" y="{y + BAR}">{found["median"]:+.1%}</text>',
    ]
