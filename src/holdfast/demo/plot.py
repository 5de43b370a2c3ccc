"""The loss curves over each other, the kills marked, and below how far they are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from holdfast.demo.result import Curve, Fall, Result
from holdfast.demo.verdict import TOLERANCE

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#111111")
#: Curves that lie on each other are all seen: each one narrower than that below it, the last
#: ones dashed in turn.
_WIDTHS = (5.5, 5.5, 4.0, 2.0, 2.0, 2.0)
_DASH = 2
#: Below this the lower panel is linear, so that "no difference at all" has a place on it.
_LINEAR_BELOW = 1e-9


def draw(result: Result, path: Path) -> None:
    """Write the plot as PNG."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    with mpl.rc_context({"font.size": 9}):
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
        _draw_losses(upper, result.curves)
        _draw_differences(lower, result.curves)
        for order, fall in enumerate(result.falls):
            for axes in (upper, lower):
                _mark(axes, fall)
            _name(upper, fall, order)
        figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, curves: list[Curve]) -> None:
    axes.plot(*_points(curves[0]), color="0.8", linewidth=9, label=curves[0].label)
    for curve, style in _styled(curves):
        axes.plot(*_points(curve), label=curve.label, **style)
    axes.set_title("A byte-level GPT on Python's standard library, killed and resumed")
    axes.set_ylabel("loss (nats per byte)")
    legend = axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for line in legend.get_lines():
        line.set_linestyle("-")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_differences(axes: Axes, curves: list[Curve]) -> None:
    reference = curves[0].losses
    for curve, style in _styled(curves):
        steps = [step for step in sorted(curve.losses) if step in reference]
        apart = [abs(curve.losses[s] - reference[s]) / abs(reference[s]) for s in steps]
        axes.plot(steps, apart, **style | {"linestyle": "-", "linewidth": 1.5})
    axes.axhline(TOLERANCE, color="0.4", linewidth=0.8, linestyle=":")
    axes.annotate(
        "allowed on other ranks", (1.01, TOLERANCE), xycoords=("axes fraction", "data"), va="center"
    )
    axes.set_yscale("symlog", linthresh=_LINEAR_BELOW)
    axes.set_ylim(-_LINEAR_BELOW / 3, TOLERANCE * 100)
    axes.set_yticks([0, 1e-8, 1e-6, 1e-4], ["0: bit for bit", "1e-8", "1e-6", "1e-4"])
    axes.set_ylabel("relative difference\nfrom the reference")
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)


def _styled(curves: list[Curve]) -> list[tuple[Curve, dict[str, Any]]]:
    """Every curve but the reference, and how it is drawn."""
    found = []
    turns = [order for order, curve in enumerate(curves[1:]) if not curve.is_bitwise]
    for order, curve in enumerate(curves[1:]):
        style: dict[str, Any] = {"color": _COLOURS[order % 6], "linewidth": _WIDTHS[order % 6]}
        if order in turns:
            rest = _DASH * (len(turns) - 1)
            style["linestyle"] = (_DASH * turns.index(order), (_DASH, rest)) if rest else "--"
        found.append((curve, style))
    return found


def _mark(axes: Axes, fall: Fall) -> None:
    """The kill as a line, and the steps made again as a shade before it."""
    axes.axvline(fall.at + 0.5, color="black", linewidth=1)
    axes.axvspan(fall.back_to + 0.5, fall.at + 0.5, color="0.5", alpha=0.15, linewidth=0)


def _name(axes: Axes, fall: Fall, order: int) -> None:
    """What was killed, at the top, where no curve is any more; one below the other."""
    lost = fall.at - fall.back_to
    side = "left" if fall.at < 30 else "right"
    axes.annotate(
        f"{fall.what} killed\n{lost} step{'s' * (lost != 1)} lost",
        (fall.at + 0.5, 0.97 - 0.15 * order),
        (5 if side == "left" else -5, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha=side,
        va="top",
    )


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    steps = sorted(curve.losses)
    return steps, [curve.losses[step] for step in steps]
