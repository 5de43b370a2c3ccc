"""A sampler that any number of ranks goes on with in the middle of an epoch.

Its state is a place in the whole run's data, not in this rank's part of it; which samples come
next, and to whom, follows from the place. What was handed out is not what was trained on: a loader
with workers is several batches ahead. So the training loop says when it has trained on one.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sized
from typing import Any, SupportsIndex

import torch.distributed as dist
from torch.utils.data import Sampler

from holdfast.data.arguments import data_rank
from holdfast.data.order import Order
from holdfast.data.steps import Place, Step, Steps
from holdfast.errors import UsageError
from holdfast.events import Warned, emit
from holdfast.policy.arguments import claim, whole

_KEYS = ("seed", "epoch", "consumed", "samples", "shuffle")


class ResumableSampler(Sampler[list[int]]):
    """Gives this rank its batches of indices; goes into the state, and into a loader as
    ``DataLoader(data, batch_sampler=sampler)``.

    ``data``: what has a length, or the number of samples. ``batch_size`` is of one rank; instead,
    ``global_batch_size`` is of all ranks together, and every step then takes the same samples on
    any number of ranks. ``seed`` and the number of an epoch give its order, the same on all ranks;
    without ``shuffle`` it is 0, 1, 2... ``rank`` and ``world`` count data ranks, where these are
    not all ranks of the run.

    The batches of all ranks, laid end to end, are the next samples of the epoch's order. Each of
    an epoch's samples is given once, whatever becomes of the number of ranks; so the last step
    of an epoch may be smaller, or larger by less than a sample per rank (see ``data/steps.py``).
    With ``drop_last`` what does not fill a step is left out.

    Call ``advance()`` after each batch was trained on, next to ``optimizer.step()``, on every rank
    alike. Iterating again goes on from there, with the next epoch where one has ended.

    Raises UsageError for numbers that mean nothing, such as fewer samples than ranks.
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
        self._place = Place(whole("epoch", epoch, least=0), 0)
        self._order = Order(self.samples, whole("seed", seed), shuffle=self.shuffle)
        self._handed_out = self._place
        self._ended_from: Place | None = None
        """Where the last iteration that came to its end had begun."""
        self._loads = 0

    # ── where the run is ─────────────────────────────────────────────────────────────────

    @property
    def seed(self) -> int:
        """What the orders are made of."""
        return self._order.seed

    @property
    def epoch(self) -> int:
        """The epoch of the next step to be trained on; so many are done."""
        return self._steps().next(self._place).epoch

    @property
    def consumed(self) -> int:
        """How many samples of ``epoch`` all ranks together have trained on."""
        return self._place.consumed if self._place.epoch == self.epoch else 0

    def __len__(self) -> int:
        """How many batches are left of the epoch: what iterating gives now."""
        return self._steps().count(self._place)

    def advance(self, batches: SupportsIndex = 1) -> None:
        """Say that each rank has trained on ``batches`` more of what it was given.

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
        """This rank's batches from here to the end of the epoch.

        An event warns of giving a whole epoch out again because ``advance`` was never called.
        """
        if self._ended_from == self._place:
            epoch, consumed = self._place
            emit(Warned(message=(
                f"all batches from sample {consumed} of epoch {epoch} on were given out, and are "
                "again: advance() was not called. Call it on the ResumableSampler after each "
                "optimizer step"
            )))  # fmt: skip
        return _Batches(self)

    def _steps(self) -> Steps:
        world = self._rank_and_world()[1]
        batch = self.global_batch_size or (self.batch_size or 0) * world
        if batch < world:
            raise UsageError(
                f"global_batch_size={batch} is less than one sample for each of {world} ranks: "
                "make it larger, or take fewer data ranks (rank=, world=)"
            )
        least = batch if self.drop_last else world
        if self.samples < least:
            why = "a step has, and drop_last leaves out what fills none" if self.drop_last else (
                "there are ranks, and each needs one in every step"
            )  # fmt: skip
            raise UsageError(
                f"the data have {self.samples} samples, fewer than the {least} {why}: take more "
                "data, a smaller batch, or fewer data ranks (rank=, world=)"
            )
        return Steps(self.samples, batch, world, self.drop_last)

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

    def _indices(self, step: Step) -> list[int]:
        """What this rank takes of a step."""
        share = step.share(*self._rank_and_world())
        return [index for stretch in share for index in self._order.at(*stretch)]

    # ── the state ────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """The place, the same on all ranks: what was trained on, not what was given out."""
        return {
            "seed": self.seed, "epoch": self._place.epoch, "consumed": self._place.consumed,
            "samples": self.samples, "shuffle": self.shuffle,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place. Its seed counts, not the one given at the start.

        What is iterating now must begin anew. Raises UsageError when the data are others.
        """
        problems = self.problems_with(state)
        if problems:
            raise UsageError(f"the sampler cannot go on from there: {'; '.join(problems)}")
        self._place = self._handed_out = Place(state["epoch"], state["consumed"])
        self._order = Order(self.samples, state["seed"], shuffle=self.shuffle)
        self._ended_from = None
        self._loads += 1

    def problems_with(self, state: Any) -> list[str]:
        """Why ``load_state_dict`` would refuse this, in words; nothing where it would not."""
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
    """One way through the rest of an epoch.

    It has a state of its own, the place behind what it has handed out. torchdata's loader keeps
    that of each batch with the batch, and so has the place of what was trained on although its
    workers are ahead.
    """

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler, self._steps = sampler, sampler._steps()
        self._loads = sampler._loads
        self._begin(sampler._place)

    def _begin(self, place: Place) -> None:
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
            sampler._ended_from = self._begun
            raise StopIteration
        indices = sampler._indices(step)
        self._place = sampler._handed_out = step.after
        return indices

    def state_dict(self) -> dict[str, int]:
        """Where it is, and the epoch with which it ends."""
        return {"epoch": self._place.epoch, "consumed": self._place.consumed, "until": self._epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there, and have the sampler do so: what a loader gave out was trained on."""
        place = Place(state["epoch"], state["consumed"])
        self._begin(place)
        self._epoch = state["until"] if place.epoch > state["until"] else self._epoch
        self._sampler._place = place


def _sample_count(data: Any) -> int:
    """The number of samples that was given, or that there are."""
    try:
        found = len(data) if hasattr(data, "__len__") else operator.index(data)
    except TypeError:  # of an IterableDataset, say, or of a tensor with no dimension
        raise UsageError(
            f"data={data!r:.100}: what has a length, or the number of samples, is needed; data "
            "without a length have no order of their own"
        ) from None
    return whole("data", data if isinstance(data, bool) else found, least=1)
