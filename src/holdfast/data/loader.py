"""Makes a loader that draws nothing from torch's default generator: a run resumes exactly."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from holdfast.data.sampler import ResumableSampler
from holdfast.errors import UsageError

#: Arguments of a DataLoader that the sampler decides.
_OF_SAMPLER = (
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "drop_last",
    "generator",
)


def loader(data: Dataset[Any] | Any, sampler: ResumableSampler, **options: Any) -> DataLoader[Any]:
    """Make a DataLoader over ``data`` in the batches of ``sampler``, with a generator of its own.

    ``data``: the data set. ``sampler``: a ResumableSampler; it goes into the state, and the loader
    does not. ``options``: further arguments of torch's DataLoader, such as ``num_workers`` and
    ``collate_fn``.

    An iteration seeds the workers from the sampler's generator, which is seeded by the place in the
    data. So a run that resumes in the middle of an epoch leaves torch's default generator as the
    restore set it, and draws the same dropout as a run that never stopped.

    Raises UsageError for another sampler, for data of another length than the sampler's, and for
    arguments that the sampler decides.
    """
    if not isinstance(sampler, ResumableSampler):
        raise UsageError(
            f"loader(): sampler={sampler!r:.100} is not a holdfast.ResumableSampler. Make one of "
            "the data, and put it into the state"
        )
    given = [name for name in _OF_SAMPLER if name in options]
    if given:
        raise UsageError(
            f"loader(): {', '.join(given)} given, which the sampler decides: say it to "
            "holdfast.ResumableSampler, or make a DataLoader yourself"
        )
    if isinstance(data, Sized) and len(data) != sampler.samples:
        raise UsageError(
            f"loader(): the data have {len(data)} samples, the sampler was made for "
            f"{sampler.samples}: make it of the same data"
        )
    return DataLoader(data, batch_sampler=sampler, generator=_generator(sampler), **options)


def _generator(sampler: ResumableSampler) -> torch.Generator:
    """Returns the sampler's generator; where torch draws on a device by default, one of that."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return sampler.generator
    made = torch.Generator(device)
    sampler.device_generators.append(made)  # seeded by the place, too
    return made
