"""Tracks the optimizers that have a step in a graph of a device, whose replays call no hook.

A step that is captured into a graph updates nothing; each replay does. So leaves of such an
optimizer count as not hooked, and are copied before ``save`` returns, until ``before_update`` is
called outside of a capture: from then on it fences the replays.
"""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

from holdfast.accelerator import devices
from holdfast.events import warn

_captured: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
"""True for those whose replays are fenced."""
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def is_capturing(optimizer: Optimizer) -> bool:
    """True if this thread captures what the optimizer does on its device."""
    for group in optimizer.param_groups:
        for parameter in group["params"][:1]:
            if devices.is_on_device(parameter) and devices.is_capturing(parameter.device):
                return True
    return False


def note_captured(optimizer: Optimizer) -> None:
    """Note that a step of the optimizer is captured."""
    _captured.setdefault(optimizer, False)


def has_unfenced() -> bool:
    """True if the replays of any optimizer are not fenced."""
    return bool(_captured) and not all(_captured.values())


def is_unfenced(optimizer: Optimizer) -> bool:
    """True if the replays of this optimizer are not fenced."""
    return not _captured.get(optimizer, True)


def note_fenced(optimizer: Optimizer) -> None:
    """Note that ``before_update`` is called before each replay."""
    if optimizer in _captured and not is_capturing(optimizer):
        _captured[optimizer] = True


def warn_of_replays(key: str, optimizer: Optimizer) -> None:
    """Say once that the state of this optimizer is copied before ``save`` returns."""
    if optimizer not in _warned:
        _warned.add(optimizer)
        warn(
            f"a step of {key} was captured into a graph, and replays call no hook: what it updates "
            "is copied before save returns, which takes as much memory of the device again. Call "
            "checkpointer.before_update() before each replay, and it is copied behind training."
        )
