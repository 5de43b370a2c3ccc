"""Which samples of which epoch each step takes, for any number of ranks.

Every sample of an epoch is taken once, in the epoch's order, and every rank has a batch in every
step: with collectives in the backward, a rank without one would hold up all others. Both hold
after any change of the number of ranks, because a step is a function of the place alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """How far all ranks together are: ``consumed`` samples of ``epoch``. Places are ordered."""

    epoch: int
    consumed: int


class Stretch(NamedTuple):
    """Places ``start`` to ``stop`` of an epoch's order."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many samples."""
        return self.stop - self.start


class Step(NamedTuple):
    """What all ranks together take at once, and where they are after it."""

    stretches: tuple[Stretch, ...]
    after: Place

    @property
    def epoch(self) -> int:
        """The epoch that the step belongs to."""
        return self.stretches[-1].epoch

    def share(self, rank: int, world: int) -> list[Stretch]:
        """The part of one rank; those of all ranks, one after the other, are the step.

        As equal as can be: they differ by at most one sample.
        """
        total = sum(stretch.size for stretch in self.stretches)
        first, last = total * rank // world, total * (rank + 1) // world
        found, before = [], 0
        for epoch, start, stop in self.stretches:
            begin, end = max(first - before, 0), min(last - before, stop - start)
            if begin < end:
                found.append(Stretch(epoch, start + begin, start + end))
            before += stop - start
        return found


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of ``batch`` samples, those of all ranks together, over epochs of ``samples``.

    What is left at the end of an epoch is a smaller step, as long as it has a sample for each
    rank. If it is less, it goes with the step before it; if that one is past, because the number
    of ranks changed just there, with the first step of the next epoch. With ``drop_last``, what
    does not fill a step is left out instead.

    To be checked by the caller: batch >= world, samples >= world, with ``drop_last`` >= batch.
    """

    samples: int
    batch: int
    world: int
    drop_last: bool

    def next(self, place: Place) -> Step:
        """The step that is taken at ``place``."""
        epoch, consumed = place
        left = self.samples - consumed
        if left >= self.batch:
            rest = left - self.batch
            is_last = rest < (self.batch if self.drop_last else self.world)
            stop = self.samples if is_last and not self.drop_last else consumed + self.batch
            after = Place(epoch + 1, 0) if is_last else Place(epoch, stop)
            return Step((Stretch(epoch, consumed, stop),), after)
        if left >= self.world and not self.drop_last:
            return Step((Stretch(epoch, consumed, self.samples),), Place(epoch + 1, 0))
        first = self.next(Place(epoch + 1, 0))
        if self.drop_last or not left:
            return first
        return Step((Stretch(epoch, consumed, self.samples), *first.stretches), first.after)

    def count(self, place: Place) -> int:
        """How many steps there are from ``place`` to the end of the epoch of the next one."""
        left = self.samples - place.consumed
        if left < (self.batch if self.drop_last else self.world):
            left = self.samples
        whole, rest = divmod(left, self.batch)
        return whole + (not self.drop_last and rest >= self.world)
