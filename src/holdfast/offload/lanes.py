"""Where the work of an update goes on: lanes, each in order by itself, tied only by marks.

On a GPU a lane is a stream and a mark an event: enqueueing returns at once. On the CPU a lane is a
thread, so that the same update runs with both its ends on the CPU, really beside each other: a
mark that is missing shows as a wrong result there, too, the sooner with ``delay_s``.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

Work = Callable[[], None]
#: Cycles of a GPU in a second, roughly: delays need not be exact.
_CYCLES = 1.5e9
#: Cores left to data loading, the keeper and the training's own thread, of those of a rank.
_CORES_LEFT = 2


class Mark(Protocol):
    """A place in a lane's work."""

    def wait(self) -> None:
        """Hold the caller until the lane is past it; raises what the work before it raised."""
        ...


class Lane(Protocol):
    """Does what it is given in that order."""

    def run(
        self, work: Work, after: Iterable[Mark] = (), uses: Sequence[torch.Tensor] = ()
    ) -> Mark:
        """Have ``work`` done behind all before it and the marks ``after``; the mark behind it.

        ``uses``: tensors whose memory must not be given away before.
        """
        ...

    def now(self) -> Mark:
        """Behind all that the caller itself has had computed on the device."""
        ...


class Passed:
    """The mark of what is done already."""

    def wait(self) -> None:
        """Holds nobody."""


@dataclass(frozen=True, slots=True)
class ThreadMark:
    """Behind a piece of a thread's work."""

    future: Future[None]

    def wait(self) -> None:
        """Until it is done."""
        self.future.result()


@dataclass(frozen=True, slots=True)
class EventMark:
    """Behind what was enqueued on a stream."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Until the GPU is past it."""
        self.event.synchronize()


class ThreadLane:
    """A lane on the CPU. ``threads``: so many of torch's own compute for it (None: as elsewhere).

    ``delay_s``: each piece of work begins up to so much later, by chance.
    """

    def __init__(self, name: str, *, threads: int | None = None, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._random = random.Random(name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"holdfast-{name}")
        if threads is not None:
            before = torch.get_num_threads()
            self._thread.submit(_compute_with, threads).result()
            torch.set_num_threads(before)  # what other threads begin with was changed as well

    def run(
        self, work: Work, after: Iterable[Mark] = (), uses: Sequence[torch.Tensor] = ()
    ) -> Mark:
        """``uses`` are held by the work itself."""
        return ThreadMark(self._thread.submit(self._run, work, tuple(after)))

    def now(self) -> Mark:
        """On a CPU it is computed when the call returns."""
        return Passed()

    def _run(self, work: Work, after: tuple[Mark, ...]) -> None:
        for mark in after:
            mark.wait()
        if self._delay_s:
            time.sleep(self._random.random() * self._delay_s)
        with torch.no_grad():  # this is a matter of each thread
            work()


def _compute_with(threads: int) -> None:
    """Set how many of torch's threads compute for the calling one."""
    torch.get_num_threads()  # what a thread asks first sets its own number to everybody's
    torch.set_num_threads(threads)


class StreamLane:
    """A lane on a GPU: a stream of its own, or whichever is the caller's (``own`` False)."""

    def __init__(self, device: torch.device, *, own: bool = True, delay_s: float = 0.0) -> None:
        self._device, self._delay_s = device, delay_s
        self._stream = torch.cuda.Stream(device) if own else None
        self._random = random.Random(id(self))

    def run(
        self, work: Work, after: Iterable[Mark] = (), uses: Sequence[torch.Tensor] = ()
    ) -> Mark:
        """Only enqueues; for marks of threads the caller waits here, as a stream cannot."""
        stream = self._stream or torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(stream), torch.no_grad():
            for mark in after:
                if isinstance(mark, EventMark):
                    stream.wait_event(mark.event)
                else:
                    mark.wait()
            if self._delay_s:
                torch.cuda._sleep(int(self._random.random() * self._delay_s * _CYCLES))
            work()
            for tensor in uses:
                tensor.record_stream(stream)
            return EventMark(stream.record_event())

    def now(self) -> Mark:
        """On the stream that is the caller's."""
        return EventMark(torch.cuda.current_stream(self._device).record_event())


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of one optimizer, by what they do."""

    gradients: Lane
    """Gradients from the device to the host."""
    host: Lane
    """Updates on the CPU."""
    parameters: Lane
    """What the CPU updated, to the device."""
    prefetch: Lane
    """State from the host to the device."""
    compute: Lane
    """Updates on the device."""
    flush: Lane
    """State back from the device to the host."""
    device: torch.device

    def now(self) -> Mark:
        """Behind all that the caller itself has had computed on the device."""
        return self.compute.now()

    def follow(self, mark: Mark) -> None:
        """What the caller enqueues from now on comes behind ``mark``; on the CPU it waits."""
        if isinstance(mark, EventMark):
            torch.cuda.current_stream(self.device).wait_event(mark.event)
        else:
            mark.wait()


def make_lanes(device: torch.device, *, threads: int | None, delay_s: float = 0.0) -> Lanes:
    """The lanes between the host and ``device``, a GPU or the CPU itself."""
    if device.type == "cuda":
        stream = partial(StreamLane, device, delay_s=delay_s)
        threads = host_threads() if threads is None else threads
        host = ThreadLane("update", threads=threads, delay_s=delay_s)
        return Lanes(stream(), host, stream(), stream(), stream(own=False), stream(), device)

    def thread(name: str, threads: int | None = 1) -> ThreadLane:
        return ThreadLane(name, threads=threads, delay_s=delay_s)

    return Lanes(
        thread("gradients"), thread("update", threads), thread("parameters"), thread("prefetch"),
        thread("compute"), thread("flush"), device,
    )  # fmt: skip


def host_threads() -> int:
    """How many threads update on the CPU: this rank's share of the cores, less some for others.

    ``torchrun`` sets OMP_NUM_THREADS to 1, with which the update would take many times as long.
    The ranks of a host share what the process has that started them. One that was bound to a part
    of that has no more than this part, which may be its share already.
    """
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    own = os.sched_getaffinity(0)
    try:
        shared = own | os.sched_getaffinity(os.getppid())
    except OSError:  # it is gone
        shared = own
    return max(1, min(len(own), len(shared) // ranks) - _CORES_LEFT)
