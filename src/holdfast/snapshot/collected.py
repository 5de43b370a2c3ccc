"""A Saver that nobody closes ends when nobody holds it, and gives model and optimizer free.

Its worker and its listener hold no reference to it while they wait. When it is collected both
end, its memory is unmapped, and the keeper sees that the rank is lost. A save that is queued
keeps it, and so does a handle: whoever waits for one is answered.
"""

from __future__ import annotations

import os
import queue
import weakref
from collections.abc import Callable, Mapping
from typing import Generic, ParamSpec, Protocol, TypeVar

from holdfast.snapshot.arena import SlotFile
from holdfast.snapshot.pinning import unpin_memory
from holdfast.snapshot.underway import Capture


class Worker(Protocol):
    """Whoever takes the captures that are queued."""

    def work_off(self, capture: Capture | None) -> None:
        """Take this one; None: see to the keeper."""
        ...


S = TypeVar("S", bound=Worker)
T = TypeVar("T")
P = ParamSpec("P")


class Work(queue.SimpleQueue["tuple[S, Capture | None] | None"], Generic[S]):
    """Captures to take, each with who takes it; None: no more will come."""


def work_off(work: Work[S]) -> None:
    """What the worker's thread does."""
    while (item := work.get()) is not None:
        worker, capture = item
        worker.work_off(capture)
        del item, worker, capture


def weakly(method: Callable[[T], None]) -> Callable[[T], None]:
    """Call ``method`` while its object lives."""
    reference = weakref.WeakMethod(method)

    def call(argument: T) -> None:
        living = reference()
        if living is not None:
            living(argument)

    return call


def when_collected(
    thing: T, act: Callable[P, object], *arguments: P.args, **options: P.kwargs
) -> weakref.finalize[P, T]:
    """Do this when nobody holds ``thing`` any more; not at the process's end, which clears up."""
    finalizer = weakref.finalize(thing, act, *arguments, **options)
    finalizer.atexit = False
    return finalizer


def end_worker(process: int, work: Work[S], slots: Mapping[str, SlotFile]) -> None:
    """No more will come, and nothing is read or written any more, in this ``process``."""
    if process != os.getpid():
        return  # forked off: it has no worker, and what is mapped and pinned is its parent's
    work.put(None)
    # Not left to the collector: pinned memory has to be unpinned while it is still mapped.
    for slot in slots.values():
        unmap(slot)


def unmap(slot: SlotFile) -> None:
    """Let a slot's memory go."""
    unpin_memory(slot)
    slot.close()
