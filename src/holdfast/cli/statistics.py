"""What the elements of a box are like, collected portion by portion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.cli.elements import CHUNK_ELEMENTS, numbers, plain
from holdfast.load.read import Array


@dataclass(slots=True)
class Statistics:
    """Smallest, largest, mean and standard deviation (of the population) of the finite elements.

    Of complex numbers, their magnitudes. Elements that are not finite are counted instead.
    """

    dtype: str
    elements: int = 0
    finite: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    negative_inf: int = 0
    min: Any = None
    max: Any = None
    mean: float | None = None
    _squares: float = 0.0  # sum of the squared distances from the mean

    @property
    def std(self) -> float | None:
        """Of the finite elements; None when there are none."""
        return math.sqrt(self._squares / self.finite) if self.finite else None

    def add(self, raw: Array) -> None:
        """Take the carriers of more elements into account."""
        flat = raw.reshape(-1)
        for start in range(0, flat.size, CHUNK_ELEMENTS):
            self._add(numbers(flat[start : start + CHUNK_ELEMENTS], self.dtype))

    def record(self) -> dict[str, Any]:
        """The same for machines."""
        names = ("elements", "finite", "zeros", "nan", "inf", "negative_inf", "min", "max", "mean")
        return {name: getattr(self, name) for name in names} | {"std": self.std}

    def _add(self, found: Array) -> None:
        if found.dtype.kind == "c":
            with np.errstate(over="ignore", invalid="ignore"):
                found = np.abs(found.astype("c16"))
        self.elements += found.size
        self.zeros += int((found == 0).sum())
        if found.dtype.kind == "f":
            self.nan += int(np.isnan(found).sum())
            self.inf += int((found == np.inf).sum())
            self.negative_inf += int((found == -np.inf).sum())
            found = found[np.isfinite(found)]
        if found.size:
            self._extend(found)

    def _extend(self, found: Array) -> None:
        low, high = plain(found.min(), self.dtype), plain(found.max(), self.dtype)
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        wide = found.astype("f8")
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(wide.mean())
            squares = float(((wide - mean) ** 2).sum())
        # Two sets are joined as T. F. Chan, G. H. Golub and R. J. LeVeque do (1979): one sum of
        # squares over everything would lose what a mean far from zero hides.
        before, self.finite = self.finite, self.finite + found.size
        apart = mean - (self.mean or 0.0)
        self.mean = (self.mean or 0.0) + apart * found.size / self.finite
        self._squares += squares + apart * apart * before * found.size / self.finite
