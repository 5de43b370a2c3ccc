"""Measures the copy and update rates of this machine, and runs an update's work on ordered streams.

The measurement takes some tenths of a second, once.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from holdfast.accelerator import devices
from holdfast.offload.host_state import BATCH_ELEMENTS, MASTER
from holdfast.offload.kernels import Group, Kernel, Tensors
from holdfast.offload.planning.simulate import Rates

#: Elements of one copy, and of one update.
_ELEMENTS = 1 << 24
_TRIES = 3
#: The host's update must be slower by this factor beside copies for memory to count as shared.
_SLOWER = 1.05


def measure(
    streams: WorkStreams,
    kernel: Kernel,
    group: Group,
    dtype: torch.dtype,
    elements: int = _ELEMENTS,
) -> Rates:
    """Measure the rates of these streams, for parameters of ``dtype``; the best of several
    tries counts.
    """
    up, down = _copies(streams.device, elements)
    on_host = _update(kernel, group, elements, torch.device("cpu"), BATCH_ELEMENTS, dtype)
    there = _update(kernel, group, elements, streams.device, elements, torch.float32)
    streams.now().wait()  # wait for the allocated tensors
    h2d_s = _best_s([(streams.prefetch, up)])
    d2h_s = _best_s([(streams.flush, down)])
    both_s = _best_s([(streams.prefetch, up), (streams.flush, down)])
    state_bytes, size_bytes = 4 * (1 + len(kernel.kinds(group))), 4 * elements
    host_s = _best_s([(streams.host, on_host)])
    rates = Rates(
        h2d_bytes_s=size_bytes / h2d_s,
        d2h_bytes_s=size_bytes / d2h_s,
        host_update_elements_s=elements / host_s,
        device_update_elements_s=elements / _best_s([(streams.compute, there)]),
        both_ways=min(1.0, max(0.1, max(h2d_s, d2h_s) / both_s)),
        state_in_bytes=state_bytes,
        state_out_bytes=state_bytes,
        gradient_bytes=dtype.itemsize,
        parameter_bytes=dtype.itemsize,
    )
    times = math.ceil(host_s / both_s)  # copies that last as long as the update
    copies = [(streams.prefetch, up), (streams.flush, down)] * times
    beside_s = _best_s([(streams.host, on_host), *copies])
    if beside_s < _SLOWER * max(host_s, times * both_s):
        return rates
    traffic_bytes = elements * rates.update_traffic_bytes + 2 * times * size_bytes
    return replace(rates, host_memory_bytes_s=traffic_bytes / beside_s)


def _copies(device: torch.device, elements: int) -> tuple[Work, Work]:
    """Return a copy to the device and one from it."""
    size_bytes, is_here = 4 * elements, device.type == "cpu"
    host = partial(torch.empty, dtype=torch.uint8, device="cpu")
    make = host if is_here else devices.empty_pinned
    here, back = (make(size_bytes).view(torch.float32).zero_() for _ in range(2))
    there, source = (torch.zeros(elements, device=device) for _ in range(2))

    def up() -> None:
        there.copy_(here, non_blocking=True)

    def down() -> None:
        back.copy_(source, non_blocking=True)

    return up, down


def _update(
    kernel: Kernel,
    group: Group,
    elements: int,
    device: torch.device,
    batch: int,
    dtype: torch.dtype,
) -> Work:
    """Update made-up state, with the casts that gradients and parameters of ``dtype`` need."""
    memory = {kind: torch.zeros(elements, device=device) for kind in (MASTER, *kernel.kinds(group))}
    transfer = torch.zeros(elements, device=device, dtype=dtype)
    room = torch.zeros(min(batch, elements), device=device)
    step = torch.ones((), device=device)

    def update() -> None:
        for start in range(0, elements, batch):
            parts = {kind: [all_[start : start + batch]] for kind, all_ in memory.items()}
            masters, gradient = parts.pop(MASTER), transfer[start : start + batch]
            if dtype != torch.float32:
                gradient = room[: gradient.numel()].copy_(gradient)
            kernel.update(group, Tensors(masters, [gradient], parts, [step]), is_first=False)
            if dtype != torch.float32:
                transfer[start : start + batch].copy_(masters[0])

    return update


def _best_s(work: list[tuple[WorkStream, Work]]) -> float:
    """Return the shortest time, of several tries, of running all of this work at once."""
    best_s = math.inf
    for _ in range(_TRIES + 1):  # the first one warms up
        began_s = time.perf_counter()
        marks: list[StreamMark] = []
        try:
            for stream, one in work:
                marks.append(stream.run(one))
        finally:  # its memory is freed when this raises
            for mark in marks:
                mark.wait()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


# Runs the work of an update on streams: each in order by itself, synchronized only by marks.
#
# On a device a work stream is a stream of it and a mark an event: enqueueing returns at once. On
# the CPU a work stream is a thread, so that the same update runs with both its ends there, really
# in parallel: a missing mark shows as a wrong result there, too, the sooner with ``delay_s``.


Work = Callable[[], None]
#: Cores of a rank left to data loading, the keeper and the training thread.
_CORES_LEFT = 2


class StreamMark(Protocol):
    """A position in the work of a stream."""

    def wait(self) -> None:
        """Block the caller until the stream has passed it; raise the errors of the work before
        it.
        """
        ...


class WorkStream(Protocol):
    """Runs pieces of work in the order in which they are submitted."""

    def run(
        self, work: Work, after: Iterable[StreamMark] = (), uses: Sequence[torch.Tensor] = ()
    ) -> StreamMark:
        """Run ``work`` after all work before it and the marks ``after``; return the mark behind it.

        ``uses``: tensors whose memory must not be freed before.
        """
        ...

    def now(self) -> StreamMark:
        """Return a mark behind everything the caller has computed on the device so far."""
        ...


class PassedMark:
    """The mark of finished work."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class ThreadMark:
    """The mark of a piece of a thread's work."""

    future: Future[None]

    def wait(self) -> None:
        """Wait until the work is done."""
        self.future.result()


@dataclass(frozen=True, slots=True)
class EventMark:
    """The mark behind the work enqueued on a stream of the device."""

    event: torch.Event

    def wait(self) -> None:
        """Wait until the device has passed it."""
        devices.await_event(self.event)


class ThreadStream:
    """A work stream on the CPU. ``threads``: how many of torch's threads compute for it (None:
    default).

    ``delay_s``: each piece of work begins up to so much later, at random.
    """

    def __init__(self, name: str, *, threads: int | None = None, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._random = random.Random(name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"holdfast-{name}")
        if threads is not None:
            before = torch.get_num_threads()
            self._thread.submit(_compute_with, threads).result()
            torch.set_num_threads(before)  # this also sets the default of new threads

    def run(
        self, work: Work, after: Iterable[StreamMark] = (), uses: Sequence[torch.Tensor] = ()
    ) -> StreamMark:
        """The work itself holds ``uses``."""
        return ThreadMark(self._thread.submit(self._run, work, tuple(after)))

    def now(self) -> StreamMark:
        """Return a passed mark: on a CPU, results are computed when the call returns."""
        return PassedMark()

    def _run(self, work: Work, after: tuple[StreamMark, ...]) -> None:
        for mark in after:
            mark.wait()
        if self._delay_s:
            time.sleep(self._random.random() * self._delay_s)
        with torch.no_grad():  # the setting is per thread
            work()


def _compute_with(threads: int) -> None:
    """Set how many of torch's threads compute for the calling thread."""
    torch.get_num_threads()  # the first query sets a thread's own number to the global one
    torch.set_num_threads(threads)


class DeviceStream:
    """A work stream on a device: its own stream, or the caller's current one (``own`` False)."""

    def __init__(self, device: torch.device, *, own: bool = True, delay_s: float = 0.0) -> None:
        self._device, self._delay_s = device, delay_s
        self._stream = devices.make_stream(device) if own else None
        self._random = random.Random(id(self))

    def run(
        self, work: Work, after: Iterable[StreamMark] = (), uses: Sequence[torch.Tensor] = ()
    ) -> StreamMark:
        """Only enqueue the work. For marks of threads the caller waits here, because a stream
        cannot.
        """
        stream = self._stream or devices.current_stream(self._device)
        with devices.use_stream(stream), torch.no_grad():
            for mark in after:
                if isinstance(mark, EventMark):
                    devices.wait_event(stream, mark.event)
                else:
                    mark.wait()
            if self._delay_s:
                devices.delay(self._device, self._random.random() * self._delay_s)
            for tensor in uses:  # first: the work may raise with a part of it enqueued
                tensor.record_stream(stream)
            work()
            return EventMark(devices.record_event(stream))

    def now(self) -> StreamMark:
        """Return a mark on the caller's current stream."""
        return EventMark(devices.record_event(devices.current_stream(self._device)))


@dataclass(frozen=True, slots=True)
class WorkStreams:
    """The work streams of one optimizer, by purpose."""

    gradients: WorkStream
    """Gradients from the device to the host."""
    host: WorkStream
    """Updates on the CPU."""
    parameters: WorkStream
    """New parameters from the CPU to the device."""
    prefetch: WorkStream
    """State from the host to the device."""
    compute: WorkStream
    """Updates on the device."""
    flush: WorkStream
    """State back from the device to the host."""
    device: torch.device

    def now(self) -> StreamMark:
        """Return a mark behind everything the caller has computed on the device so far."""
        return self.compute.now()

    def follow(self, mark: StreamMark) -> None:
        """Order the caller's next work on the device behind ``mark``; on the CPU the caller
        waits.
        """
        if isinstance(mark, EventMark):
            devices.wait_event(devices.current_stream(self.device), mark.event)
        else:
            mark.wait()


def make_streams(device: torch.device, *, threads: int | None, delay_s: float = 0.0) -> WorkStreams:
    """Create the work streams between the host and ``device``, an accelerator or the CPU itself."""
    if devices.is_streamed(device):
        stream = partial(DeviceStream, device, delay_s=delay_s)
        threads = host_threads() if threads is None else threads
        host = ThreadStream("update", threads=threads, delay_s=delay_s)
        return WorkStreams(stream(), host, stream(), stream(), stream(own=False), stream(), device)

    def thread(name: str, threads: int | None = 1) -> ThreadStream:
        return ThreadStream(name, threads=threads, delay_s=delay_s)

    return WorkStreams(
        thread("gradients"),
        thread("update", threads),
        thread("parameters"),
        thread("prefetch"),
        thread("compute"),
        thread("flush"),
        device,
    )


def host_threads() -> int:
    """Return the number of CPU update threads: this rank's share of the cores, less some for
    others.

    ``torchrun`` sets OMP_NUM_THREADS to 1, with which the update would take many times as long. The
    ranks of a host share the cores of the process that started them. A rank that is bound to a
    subset gets at most this subset, which may be its share already.
    """
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    own = os.sched_getaffinity(0)
    try:
        shared = own | os.sched_getaffinity(os.getppid())
    except OSError:  # the process is gone
        shared = own
    return max(1, min(len(own), len(shared) // ranks) - _CORES_LEFT)
