"""Refuses, by name, what a fit of Lightning cannot be resumed with to the bit."""

from __future__ import annotations

import weakref
from typing import Any

from holdfast.errors import UsageError

#: The callback of HOLDFAST_ROOT whose fit began first in this process.
_first: list[weakref.ref[Any]] = []


def take_environment(callback: Any) -> None:
    """Raises UsageError for a second Trainer of this process with the root in HOLDFAST_ROOT."""
    if _first and _first[0]() is not callback:
        raise UsageError(
            "HOLDFAST_ROOT gives a second Trainer of this process the root of the first: unset it, "
            "and give each Trainer a HoldfastLightningCallback with a root of its own"
        )
    _first[:] = [weakref.ref(callback)]


def refuse_unknown(trainer: Any) -> None:
    """Raises UsageError for callbacks and options whose place in a run is not restored."""
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        BatchSizeFinder,
        LearningRateFinder,
        StochasticWeightAveraging,
    )

    for one in trainer.callbacks:
        if isinstance(one, BatchSizeFinder | LearningRateFinder):
            raise UsageError(
                f"{type(one).__qualname__} trains in the fit, at each start, and these steps would "
                "be saved as the run's: search with a Trainer of its own, by Tuner(trainer), and "
                "give this one what was found"
            )
        if isinstance(one, BaseFinetuning | StochasticWeightAveraging):
            raise UsageError(
                f"{type(one).__qualname__} needs its state before the Trainer makes optimizers, "
                "and HoldfastLightningCallback restores it later: leave out one of the two "
                "(EMAWeightAveraging averages weights and is kept)"
            )
    every = trainer.reload_dataloaders_every_n_epochs
    if every > 1:
        raise UsageError(
            f"reload_dataloaders_every_n_epochs={every}: a restart between two reloads would make "
            "the loaders of another epoch. Use 0 or 1"
        )


def batches_an_update(trainer: Any) -> int:
    """Returns the batches of an update in the epoch of a Trainer, also before the epoch began."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    found: int = trainer.accumulate_grad_batches
    for one in trainer.callbacks:
        if isinstance(one, GradientAccumulationScheduler):
            found = one.get_accumulate_grad_batches(trainer.current_epoch)
    return found


def check_validation(loop: Any) -> None:
    """Raises UsageError for loaders of a validation that keep their workers."""
    loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
    if any(getattr(one, "persistent_workers", False) for one in loaders):
        raise UsageError(
            "a validation loader has persistent_workers=True: a restart starts them once more, "
            "which draws from torch's generator. Use persistent_workers=False for validation"
        )
