"""The loss curves over each other, the kills marked, and below how far they are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from holdfast.demo.result import Curve, Fall, Result
from holdfast.demo.verdict import TOLERANCE

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
_DASHES = ((4, 2), (1, 2), (6, 2, 1, 2))
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
    axes.plot(*_points(curves[0]), color="0.8", linewidth=7, label=curves[0].label)
    for order, curve in enumerate(curves[1:]):
        axes.plot(*_points(curve), label=curve.label, **_style(order, curve))
    axes.set_title("A byte-level GPT on Python's standard library, killed twice")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_differences(axes: Axes, curves: list[Curve]) -> None:
    reference = curves[0].losses
    for order, curve in enumerate(curves[1:]):
        steps = [step for step in curve.losses if step in reference]
        apart = [abs(curve.losses[s] - reference[s]) / abs(reference[s]) for s in steps]
        axes.plot(steps, apart, **_style(order, curve))
    axes.axhline(TOLERANCE, color="0.4", linewidth=0.8, linestyle=":")
    axes.annotate("allowed on other ranks", (0, TOLERANCE), (2, -10), textcoords="offset points")
    axes.set_yscale("symlog", linthresh=_LINEAR_BELOW)
    axes.set_ylim(-_LINEAR_BELOW / 3, TOLERANCE * 10)
    axes.set_yticks([0, 1e-8, 1e-6, 1e-4], ["0: bit for bit", "1e-8", "1e-6", "1e-4"])
    axes.set_ylabel("relative difference\nfrom the reference")
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)


def _mark(axes: Axes, fall: Fall) -> None:
    """The kill as a line, and the steps made again as a shade before it."""
    axes.axvline(fall.at + 0.5, color="black", linewidth=1)
    axes.axvspan(fall.back_to + 0.5, fall.at + 0.5, color="0.5", alpha=0.15, linewidth=0)


def _name(axes: Axes, fall: Fall, order: int) -> None:
    """What was killed, at the top, where no curve is any more; one below the other."""
    lost = fall.at - fall.back_to
    text = f"{fall.what} killed\n{lost} step{'s' * (lost != 1)} lost"
    place, beside = (fall.at + 0.5, 0.97 - 0.15 * order), (5, 0)
    axes.annotate(
        text, place, beside, xycoords=("data", "axes fraction"), textcoords="offset points",
        va="top",
    )  # fmt: skip


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    steps = sorted(curve.losses)
    return steps, [curve.losses[step] for step in steps]


def _style(order: int, curve: Curve) -> dict[str, Any]:
    colour = _COLOURS[order % len(_COLOURS)]
    if curve.is_bitwise:
        return {"color": colour, "linewidth": 2}
    return {"color": colour, "linewidth": 1.4, "dashes": _DASHES[order % len(_DASHES)]}
