"""The small parameters of a row: handled all at once, for each alone costs more than its bytes.

They lie last in their row, so that one copy takes the gradients of all to the host and one brings
the new parameters back, to memory beside them which keeps what was written: so whether others wrote
to them is compared bit by bit. Their gradients go at the step, in a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from holdfast.offload.cutting import aligned

if TYPE_CHECKING:
    from holdfast.offload.rows import Place

#: A parameter is small with fewer elements than these, if that is little for a subgroup.
SMALL_ELEMENTS = 1 << 13
#: That is: at most this part of one.
PART_OF_SUBGROUP = 16


def limit(subgroup_elements: int) -> int:
    """With fewer elements than this a parameter is small."""
    return min(SMALL_ELEMENTS, subgroup_elements // PART_OF_SUBGROUP)


@dataclass(eq=False)
class Small:
    """Small parameters that lie one behind the other, from ``start`` to ``stop`` of a row."""

    places: Sequence[Place]
    start: int
    stop: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def noted(self) -> torch.Tensor:
        """What was written to the parameters when they were last updated, where they are."""
        with torch.inference_mode(False):
            return torch.zeros(self.stop - self.start, dtype=self.dtype, device=self.device)

    def make(self) -> None:
        """Have memory for that, before an update begins: then it is too late to have none."""
        _ = self.noted

    @cached_property
    def _pieces(self) -> list[torch.Tensor]:
        """Views of it: of each parameter, and of what pads it."""
        sizes = []
        for place in self.places:
            padding = aligned(place.size) - place.size
            sizes += [place.size, padding] if padding else [place.size]
        return list(self.noted.split(sizes))

    @cached_property
    def _numbers(self) -> dict[Place, int]:
        """Of which piece is whose."""
        found: dict[Place, int] = {}
        at = 0
        for place in self.places:
            found[place] = at
            at += 1 + (aligned(place.size) != place.size)
        return found

    def all_between(self, start: int, stop: int) -> torch.Tensor:
        """The noted elements of these places in the row."""
        return self.noted[start - self.start : stop - self.start]

    def part(self, place: Place, start: int, stop: int) -> torch.Tensor:
        """The noted elements of a part of a parameter; mostly of all of it."""
        piece = self._pieces[self._numbers[place]]
        return piece if stop - start == place.size else piece[start:stop]

    def gathered(self, flats: Mapping[Place, torch.Tensor]) -> torch.Tensor:
        """These, each for a parameter, in one tensor as in the row; for the others anything."""
        parts, numbers = list(self._pieces), self._numbers
        for place, flat in flats.items():
            parts[numbers[place]] = flat
        return torch.cat(parts)

    def changed(self, doubtful: Iterable[Place]) -> set[Place]:
        """Those of them whose parameter is not what was noted."""
        flats = {place: place.own for place in doubtful}
        as_integers = torch.int32 if self.dtype.itemsize == 4 else torch.int16
        differs = self.gathered(flats).view(as_integers) != self.noted.view(as_integers)
        if not bool(differs.any()):
            return set()
        here = differs.cpu()
        return {
            place
            for place in flats
            if bool(here[place.start - self.start :][: place.size].any())
        }  # fmt: skip
