"""Provides a sampler with one place for the whole run; planning.order divides it over ranks.

Its state is a place in the whole run's data, not in this rank's part of it; the next samples, and
their ranks, follow from the place. Batches handed out are not yet trained on: a loader with workers
is several batches ahead. So the training loop calls ``advance`` when it has trained on one.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sized
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from holdfast.data.planning.order import Order, SamplePlace, SampleStep, StepPlan, data_rank
from holdfast.errors import UsageError
from holdfast.events import warn
from holdfast.format.checksum import checksum
from holdfast.policy.arguments import claim, whole

_KEYS = ("seed", "epoch", "consumed", "samples", "shuffle")


class ResumableSampler(Sampler[list[int]]):
    """Gives this rank its batches of indices; goes into the state, and into a loader as
    ``DataLoader(data, batch_sampler=sampler, generator=sampler.generator)``.

    ``data``: an object with a length, or the number of samples. ``batch_size``: samples of one rank
    in a batch. ``global_batch_size``: instead, samples of all ranks together in a step, which then
    takes the same samples on any number of ranks. ``seed``: with the number of an epoch, it gives
    the epoch's order, the same on all ranks. ``shuffle``: without it the order is 0, 1, 2 and so
    on. ``drop_last``: leave out a remainder that does not fill a step. ``rank``: the number of this
    data rank, where these are not all ranks of the run. ``world``: how many data ranks there are.
    ``epoch``: the epoch to begin with.

    The batches of all ranks, laid end to end, are the next samples of the epoch's order. Each of an
    epoch's samples is given once, however the number of ranks changes; so the last step of an epoch
    may be smaller, or larger by less than a sample per rank.

    Call ``advance()`` after each batch was trained on, next to ``optimizer.step()``, on every rank
    alike. Iterating again goes on from there, with the next epoch where one has ended.

    The loader draws its workers' seed from ``generator``. Without it the loader draws from torch's
    default generator, and a run resumed in the middle of an epoch, where an unbroken run begins no
    iteration, has other random numbers from there on.

    Raises UsageError for invalid numbers, such as fewer samples than ranks.
    """

    def __init__(
        self,
        data: Sized | SupportsIndex,
        batch_size: SupportsIndex | None = None,
        *,
        global_batch_size: SupportsIndex | None = None,
        seed: SupportsIndex = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: SupportsIndex | None = None,
        world: SupportsIndex | None = None,
        epoch: SupportsIndex = 0,
    ) -> None:
        if (batch_size is None) == (global_batch_size is None):
            raise UsageError(
                "ResumableSampler takes batch_size, the samples of one rank's batch, or "
                f"global_batch_size, those of all ranks together; got batch_size={batch_size!r}, "
                f"global_batch_size={global_batch_size!r}: give one of the two"
            )
        self.samples = _sample_count(data)
        self.batch_size, self.global_batch_size = (
            None if size is None else whole(name, size, least=1)
            for name, size in (("batch_size", batch_size), ("global_batch_size", global_batch_size))
        )
        self.shuffle, self.drop_last = claim("shuffle", shuffle), claim("drop_last", drop_last)
        self._given_ranks = data_rank(rank, world)
        self._place = SamplePlace(whole("epoch", epoch, least=0), 0)
        self._order = Order(self.samples, whole("seed", seed), shuffle=self.shuffle)
        self._handed_out = self._place
        self.generator = torch.Generator()
        """Seeded at each iteration by the place where it begins, so that it has no state."""
        self.device_generators: list[torch.Generator] = []
        """Seeded likewise: those of loaders made where torch draws on a device by default."""
        self._watch: GeneratorWatch | None = None
        """Set from a restore until the first batch after it."""
        self.saw_generators_moved = False
        """True once torch's default generator moved before the first batch after a restore in the
        middle of an epoch, most likely because a loader has no generator of its own.
        """
        self._ended_from: SamplePlace | None = None
        """The place where the last completed iteration began."""
        self._loads = 0

    # ── where the run is ─────────────────────────────────────────────────────────────────

    @property
    def seed(self) -> int:
        """The seed of the orders."""
        return self._order.seed

    @property
    def epoch(self) -> int:
        """The epoch of the next step to be trained on, which is the number of epochs that are
        done.
        """
        return self._steps().next(self._place).epoch

    @property
    def consumed(self) -> int:
        """The number of samples of ``epoch`` that all ranks together have trained on."""
        return self._place.consumed if self._place.epoch == self.epoch else 0

    def __len__(self) -> int:
        """The number of batches left of the epoch: those that iterating gives now."""
        return self._steps().count(self._place)

    def advance(self, batches: SupportsIndex = 1) -> None:
        """Record that each rank has trained on ``batches`` more of those it was given.

        ``batches``: how many batches the last step took.

        With gradient accumulation: after the optimizer's step, all batches that went into it.
        Raises UsageError when so many were not given out.
        """
        count = whole("batches", batches, least=1)
        place, steps = self._place, self._steps()
        for _ in range(count):
            place = steps.next(place).after
            if place > self._handed_out:
                raise UsageError(
                    f"advance({count if count > 1 else ''}): fewer batches were given out than "
                    f"are said to be trained on, at sample {self._place.consumed} of epoch "
                    f"{self._place.epoch}. Call it once for each batch, after its optimizer step, "
                    "of the loader that was made with this sampler."
                )
        self._place = place

    # ── batches ──────────────────────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches from here to the end of the epoch.

        An event warns of giving a whole epoch out again because ``advance`` was never called.
        """
        if self._ended_from == self._place:
            epoch, consumed = self._place
            warn(
                f"all batches from sample {consumed} of epoch {epoch} on were given out, and are "
                "again: advance() was not called. Call it on the ResumableSampler after each "
                "optimizer step"
            )
        rank, _ = self._rank_and_world()
        for generator in (self.generator, *self.device_generators):
            generator.manual_seed(seed_of(self.seed, *self._place, rank))
        self._look_at_generators()
        return _Batches(self)

    def watch_generators(self) -> None:
        """Called when the generators are as they were saved; checks at the first batch whether they
        still are.
        """
        self._watch, self.saw_generators_moved = GeneratorWatch(), False

    def _look_at_generators(self) -> None:
        if self._watch is not None and self.consumed:  # at an epoch's beginning every run draws
            self._watch.poll()
            self.saw_generators_moved |= self._watch.has_moved

    def _steps(self) -> StepPlan:
        world = self._rank_and_world()[1]
        batch = self.global_batch_size or (self.batch_size or 0) * world
        if batch < world:
            raise UsageError(
                f"global_batch_size={batch} is less than one sample for each of {world} ranks: "
                "make it larger, or take fewer data ranks (rank=, world=)"
            )
        least = batch if self.drop_last else world
        if self.samples < least:
            why = (
                "a step has, and drop_last leaves out what fills none"
                if self.drop_last
                else ("there are ranks, and each needs one in every step")
            )
            raise UsageError(
                f"the data have {self.samples} samples, fewer than the {least} {why}: take more "
                "data, a smaller batch, or fewer data ranks (rank=, world=)"
            )
        return StepPlan(self.samples, batch, world, self.drop_last)

    def _rank_and_world(self) -> tuple[int, int]:
        if self._given_ranks is not None:
            return self._given_ranks
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        world = os.environ.get("WORLD_SIZE", "1")
        if "RANK" in os.environ and world.isdecimal() and int(world) > 1:
            raise UsageError(
                f"this process was started as rank {os.environ['RANK']} of {world}, but "
                "torch.distributed is not initialised: every rank would be given the same samples. "
                "Call init_process_group() first, or give rank= and world="
            )
        return 0, 1

    def _indices(self, step: SampleStep) -> list[int]:
        """Returns this rank's samples of a step."""
        share = step.share(*self._rank_and_world())
        return [index for stretch in share for index in self._order.at(*stretch)]

    # ── the state ────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Return the place, the same on all ranks: the batches trained on, not those given out."""
        return {
            "seed": self.seed,
            "epoch": self._place.epoch,
            "consumed": self._place.consumed,
            "samples": self.samples,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place. Its seed counts, not the one given at the start.

        ``state``: what ``state_dict`` gave, on any number of ranks.

        A running iteration must be started again. Raises UsageError when the data are others.
        """
        problems = self.problems_with(state)
        if problems:
            raise UsageError(f"the sampler cannot go on from there: {'; '.join(problems)}")
        self._place = self._handed_out = SamplePlace(state["epoch"], state["consumed"])
        self._order = Order(self.samples, state["seed"], shuffle=self.shuffle)
        self._ended_from = None
        self._loads += 1

    def problems_with(self, state: Any) -> list[str]:
        """Return the reasons why ``load_state_dict`` would refuse this state, in words; none where
        it would not.
        """
        if not isinstance(state, Mapping) or not set(_KEYS) <= set(state):
            return [f"the state of a ResumableSampler has {', '.join(_KEYS)}; got {state!r:.100}"]
        numbers = [state[key] for key in ("epoch", "consumed", "samples")]
        if type(state["seed"]) is not int or any(type(n) is not int or n < 0 for n in numbers):
            return [f"seed, epoch, consumed and samples are whole numbers; got {state!r:.200}"]
        if not state["consumed"] <= state["samples"]:
            return [f"{state['consumed']} of {state['samples']} samples cannot be consumed"]
        if state["consumed"] == 0:
            return []  # between two epochs the data and their order may change
        problems = []
        for name, here in (("samples", self.samples), ("shuffle", self.shuffle)):
            if state[name] != here:
                problems.append(
                    f"{name} was {state[name]} when it was saved, {state['consumed']} samples into "
                    f"epoch {state['epoch']}, and is {here} here, so that the rest of that epoch "
                    "is another: finish it with the same data, or leave this key out of the state "
                    f"and begin with epoch={state['epoch'] + 1}"
                )
        return problems


class _Batches(Iterator[list[int]]):
    """One iteration through the rest of an epoch.

    It has a state of its own: the place after the batches it has handed out. torchdata's loader
    keeps that state with each batch, and so has the place of the batches trained on although its
    workers are ahead.
    """

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler, self._steps = sampler, sampler._steps()
        self._loads = sampler._loads
        self._begin(sampler._place)

    def _begin(self, place: SamplePlace) -> None:
        self._begun = self._place = self._sampler._handed_out = place
        self._epoch = self._steps.next(place).epoch

    def __next__(self) -> list[int]:
        sampler = self._sampler
        if sampler._loads != self._loads:
            raise UsageError(
                "this iteration over the data began before the sampler was restored: iterate over "
                "the loader anew after restore()"
            )
        step = self._steps.next(self._place)
        if step.epoch > self._epoch:
            if self._place != self._begun:  # else it was restored behind its last batch
                sampler._ended_from = self._begun
            raise StopIteration
        sampler._look_at_generators()
        sampler._watch = None
        indices = sampler._indices(step)
        self._place = sampler._handed_out = step.after
        return indices

    def state_dict(self) -> dict[str, int]:
        """Return the place, and the epoch with which the iteration ends."""
        return {"epoch": self._place.epoch, "consumed": self._place.consumed, "until": self._epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there, and set the sampler there too: the batches a loader gave out were
        trained on.
        """
        place = SamplePlace(state["epoch"], state["consumed"])
        self._begin(place)
        self._epoch = state["until"] if place.epoch > state["until"] else self._epoch
        self._sampler._place = place


def _sample_count(data: Any) -> int:
    """Returns the number of samples that was given, or the length of the data."""
    try:
        found = len(data) if hasattr(data, "__len__") else operator.index(data)
    except TypeError:  # of an IterableDataset, say, or of a tensor with no dimension
        raise UsageError(
            f"data={data!r:.100}: what has a length, or the number of samples, is needed; data "
            "without a length have no order of their own"
        ) from None
    return whole("data", data if isinstance(data, bool) else found, least=1)


# Handles the seed that a loader draws for its workers when an iteration begins.
#
# It comes from torch's default generator unless the loader was given one, also where there are no
# workers. A run that resumes in the middle of an epoch begins an iteration where an unbroken run
# does not, and would draw other numbers from there on.


_POSITIVE = (1 << 63) - 1


def seed_of(*place: int) -> int:
    """Returns a seed that is the same whenever an iteration begins at this place, and at no
    other.
    """
    return checksum(" ".join(map(str, place)).encode()) & _POSITIVE


class GeneratorWatch:
    """Detects that torch's default generator moves before the first batch of an iteration.

    A loader makes its sampler begin, draws the seed, and then makes the sampler begin once more or
    asks for the first batch. Until it begins nothing should move the generator; from then on the
    loop may draw numbers of its own, and only a step of exactly one seed is the loader's.
    """

    def __init__(self) -> None:
        self._before = torch.get_rng_state()
        self._has_begun = False
        self.has_moved = False

    def poll(self) -> None:
        """Called each time that the loader calls its sampler."""
        now = torch.get_rng_state()
        if self._has_begun:
            self.has_moved |= torch.equal(now, _after_a_seed(self._before))
        else:
            self.has_moved = not torch.equal(now, self._before)
        self._before, self._has_begun = now, True


def _after_a_seed(state: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    return generator.get_state()
