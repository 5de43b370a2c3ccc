"""What saves in this process: no torch optimizer steps past a capture that it would overtake.

Each is held weakly: one that nobody closes and nobody holds is not kept by being listed here.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_AT_EXIT_S = 10.0


class Open(Protocol):
    """What is asked of each."""

    def fence(self) -> None:
        """Wait until an update may overwrite the state."""
        ...

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer of this process is about to step."""
        ...

    def end_capture(self, *, timeout_s: float) -> bool:
        """Wait until the snapshot under way is taken or given up."""
        ...


opened: weakref.WeakSet[Open] = weakref.WeakSet()


@atexit.register
def _end_captures() -> None:
    """At the interpreter's end: a capture under way is finished, and its keeper goes on with it."""
    for each in tuple(opened):
        each.end_capture(timeout_s=_AT_EXIT_S)


def fence_all(optimizer: object = None, *_: object) -> None:
    """Before any torch optimizer of this process steps, or has state put in: nothing is overtaken.

    The hook is the global one: it also sees optimizers that were not handed over but share
    parameters, and it survives pickling and copying of an optimizer.
    """
    for each in tuple(opened):
        each.fence()
        if isinstance(optimizer, Optimizer):
            each.stepping(optimizer)


register_optimizer_step_pre_hook(fence_all)
# A forked child (a data loader's worker) has neither the capture thread nor anything to fence.
os.register_at_fork(after_in_child=opened.clear)
