"""Gradients on their way to the host: begun while the backward goes on, used only if still true.

A gradient is copied as soon as it is complete. Whatever changes it afterwards, clipping, a scaler,
the next micro-batch, an average over ranks, shows by its version or, as writes through ``.data``
and some of torch's own kernels move none, by a checksum of its bits; it is then copied once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.offload.checksums import Bits, are_same, checksum
from holdfast.offload.lanes import Lanes, Mark
from holdfast.offload.rows import Place, Row
from holdfast.offload.small import Small

#: Elements of a parameter: from, to.
Range = tuple[int, int]


@dataclass(slots=True)
class _Arrival:
    """What was sent of one gradient."""

    gradient: torch.Tensor
    """The very tensor, held so that no other can come to stand in its place unseen."""
    version: int
    bits: Bits
    ranges: tuple[Range, ...]
    mark: Mark


class Gradients:
    """Sends gradients to the rows of their parameters."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._sent: dict[Place, _Arrival] = {}
        self.sent_again = 0
        """How many gradients had changed after they were sent, all in all."""

    def send(self, row: Row, place: Place, flat: torch.Tensor, ranges: Sequence[Range]) -> Mark:
        """Begin to copy these parts of a gradient, ``flat``, as it is now."""
        gradient, local = place.parameter.grad, place.gradient
        assert gradient is not None and local is not None
        bits = checksum(flat)
        into = row.transfer[place.start : place.start + place.size]

        def copy() -> None:
            for start, stop in ranges:
                into[start:stop].copy_(flat[start:stop], non_blocking=True)

        mark = self._lanes.gradients.run(copy, after=[self._lanes.now()], uses=[flat])
        self._sent[place] = _Arrival(gradient, local._version, bits, tuple(ranges), mark)
        return mark

    def send_small(self, row: Row, small: Small, flats: Mapping[Place, torch.Tensor]) -> Mark:
        """Copy the gradients of these small parameters of a row, as they are now."""
        together = small.gathered(flats)
        into = row.transfer[small.start : small.stop]

        def copy() -> None:
            into.copy_(together, non_blocking=True)

        return self._lanes.gradients.run(copy, after=[self._lanes.now()], uses=[together])

    def true(self, wanted: Mapping[Place, Sequence[Range]]) -> dict[Place, Mark]:
        """The marks of those whose gradient still is what was sent, all that is wanted of it."""
        same = [place for place, ranges in wanted.items() if self._is_same(place, ranges)]
        before = [self._sent[place].bits for place in same]
        found = are_same(before, [checksum(place.flat(_local(place))) for place in same])
        self.sent_again += found.count(False)
        return {
            place: self._sent[place].mark
            for place, is_same in zip(same, found, strict=True)
            if is_same
        }

    def _is_same(self, place: Place, ranges: Sequence[Range]) -> bool:
        sent = self._sent.get(place)
        if sent is None:
            return False
        is_same = sent.gradient is place.parameter.grad and sent.ranges == tuple(ranges)
        if is_same and sent.version == _local(place)._version:
            return True
        self.sent_again += 1
        return False

    def forget(self) -> None:
        """What was sent is used, or not wanted any more."""
        self._sent.clear()


def _local(place: Place) -> torch.Tensor:
    found = place.gradient
    assert found is not None
    return found
