"""Draw results as plain SVG; a plot needs no library."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from benchmarks.systems.contenders import OURS

WIDTH, NAMES, FIGURES, BAR, GAP, HEAD = 760, 220, 70, 16, 6, 44
OWN, OTHER, LIMIT = "#0b7285", "#adb5bd", "#c92a2a"


def bars(
    title: str, values: Mapping[str, float | None], *, limit: tuple[str, float] | None = None
) -> str:
    """Horizontal bars, the smallest first; None: nothing right was stored."""
    known = sorted((value, name) for name, value in values.items() if value is not None)
    unknown = [name for name, value in values.items() if value is None]
    highest = max([value for value, _ in known] + ([limit[1]] if limit else []), default=1) or 1
    room = WIDTH - NAMES - FIGURES
    height = HEAD + (BAR + GAP) * len(values) + (GAP + BAR if limit else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(8, 24, title, size=14),
    ]
    for row, (value, name) in enumerate(known):
        top = HEAD + row * (BAR + GAP)
        length = max(1.0, value / highest * room)
        colour = OWN if name == OURS else OTHER
        parts += [
            _text(NAMES - 8, top + 12, name, anchor="end"),
            f'<rect x="{NAMES}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
            _text(NAMES + length + 6, top + 12, f"{value:.3f}"),
        ]
    for row, name in enumerate(unknown, start=len(known)):
        top = HEAD + row * (BAR + GAP)
        parts += [
            _text(NAMES - 8, top + 12, name, anchor="end"),
            _text(NAMES, top + 12, "stored something else"),
        ]
    if limit:
        at = NAMES + limit[1] / highest * room
        end = HEAD + (BAR + GAP) * len(values)
        parts += [
            f'<line x1="{at:.1f}" y1="{HEAD - 6}" x2="{at:.1f}" y2="{end}" stroke="{LIMIT}" '
            'stroke-dasharray="4 3"/>',
            _text(at, end + 14, f"{limit[0]} {limit[1]:.3f}", anchor="middle", colour=LIMIT),
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    colour: str = "#212529",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
