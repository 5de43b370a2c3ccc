"""State of one capture in progress, shared by training thread, worker and listener."""

from __future__ import annotations

import math
import os
import queue
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Generic, ParamSpec, Protocol, TypeVar

import torch
from msgspec import Struct, field

from holdfast.accelerator import devices
from holdfast.capture.copy_plan import SharedCopy
from holdfast.capture.handles import SaveHandle
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyCancelled
from holdfast.capture.replica_samples import UNTRAINED, TrainedParameters
from holdfast.capture.save_state import (
    Began,
    Cancelled,
    CaptureState,
    Copied,
    Event,
    Resolved,
    SaveStore,
)
from holdfast.protocol.arena import SlotFile
from holdfast.state.describe import Description

# An event that an interrupt cannot break, for waits of the training thread.


_LOOK_S = 0.5


class SignalSafeEvent:
    """An event that is set once; from any thread, and safe wherever a signal handler raises.

    ``threading.Event`` takes its lock in Python: an exception of a signal handler right behind that
    leaves the lock held, and every later ``set`` or ``wait`` blocks forever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Return True if the event was set."""
        return self._is_set

    def set(self) -> None:
        """Wake all waiting threads."""
        self._is_set = True
        self._open()

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until the event is set, or the timeout passes; return True if it is set."""
        until_s = time.monotonic() + timeout_s
        while not self._is_set:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            # A thread interrupted behind this wakes no other: so the others check again.
            if self._gate.acquire(timeout=min(left_s, _LOOK_S)):
                self._open()
        return self._is_set

    def _open(self) -> None:
        try:
            self._gate.release()
        except RuntimeError:
            return  # another thread has set it


# Tracks how much of a ring may be overwritten: set by the listener, waited for by the copier.


class RingCredit:
    """The part of one capture's image, from its beginning, that storage has written."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._freed_bytes = 0
        self.closed_reason = ""
        """Reason why no more space will be freed; "" while there may be."""
        self._moved_at_s = 0.0

    def freed(self, size_bytes: int) -> None:
        """Record that exactly the first ``size_bytes`` of the image are written."""
        with self._changed:
            if size_bytes > self._freed_bytes:
                self._freed_bytes, self._moved_at_s = size_bytes, time.monotonic()
                self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Wake all waiting threads: storage writes no more of the image, or it was cancelled."""
        with self._changed:
            self.closed_reason = self.closed_reason or reason
            self._changed.notify_all()

    def wait(self, needed_bytes: int, timeout_s: float) -> bool:
        """Wait at most ``timeout_s``; return True if the first ``needed_bytes`` are written."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed_reason or self._freed_bytes >= needed_bytes, timeout=timeout_s
            )
            return self._freed_bytes >= needed_bytes

    @property
    def moved_at_s(self) -> float:
        """Return the monotonic time of the last write by storage; 0.0: never."""
        return self._moved_at_s


class Timeouts(Struct, frozen=True):
    """Longest waits of the training thread, in seconds, before a snapshot is abandoned."""

    first_grant_s: float = 300.0
    grant_s: float = 5.0
    durable_grant_s: float = 60.0
    copy_s: float = 600.0
    room_s: float = 60.0
    """Longest time without a write by storage while a copy waits for ring space."""


_TIMES_KEPT, _TIMES_NEEDED = 8, 3
#: Less spare time than this says nothing: healthy hosts' requests are as far apart.
_LEAST_SPARE_S = 1.0
#: How long the answer takes when the coordinator has decided.
_ANSWER_S = 0.5


class SaveTimes:
    """Measures on the last saves when the next update came after each, and how long copies took."""

    def __init__(self) -> None:
        self._updates_s: tuple[float, ...] = ()
        self._copies_s: tuple[float, ...] = ()
        self._requested = -1, 0.0, 0
        self._updated = -1

    def requested(self, number: int, now_s: float, spare_ms: int) -> None:
        """Record the request for a slot of this save, which said what time there is."""
        self._requested = number, now_s, spare_ms

    def update_came(self, number: int, now_s: float) -> None:
        """Record that an update begins, if it is the first one after this save."""
        if number != self._updated:
            self._updated, (requested, at_s, _) = number, self._requested
            since_s = now_s - at_s if requested == number else 0.0
            self._updates_s = (*self._updates_s, since_s)[-_TIMES_KEPT:]

    def wait_s(self, number: int, now_s: float, most_s: float) -> float:
        """Return how long the answer is waited for from now on, and the next update held."""
        requested, at_s, spare_ms = self._requested
        if number != requested or not spare_ms:
            return most_s
        return min(most_s, max(0.0, at_s + spare_ms / 1000 + _ANSWER_S - now_s))

    def copied(self, elapsed_s: float) -> None:
        """Record the time from a grant until the image was reported."""
        self._copies_s = (*self._copies_s, elapsed_s)[-_TIMES_KEPT:]

    @property
    def spare_ms(self) -> int:
        """Return how long a grant may take until its copy would hold the next update; 0: unknown.

        Medians, in whole tenths of a second: mostly the same number on all ranks of a host.
        """
        if min(len(self._updates_s), len(self._copies_s)) < _TIMES_NEEDED:
            return 0
        spare_s = statistics.median(self._updates_s) - statistics.median(self._copies_s)
        return int(10 * spare_s) * 100 if spare_s >= _LEAST_SPARE_S else 0


class RankIdentity(Struct, frozen=True):
    """Identity of this rank in the run."""

    run_id: str
    incarnation: int
    nonce: str
    rank: int
    world: int
    root_id: str = ""
    """Identity of the run's root (``Store.identity``)."""


class Reading(Struct):
    """A save that reads the state on ``thread`` until ``over``; no update begins meanwhile."""

    thread: int = field(default_factory=threading.get_ident)
    over: SignalSafeEvent = field(default_factory=SignalSafeEvent)
    is_overtaken: bool = False
    """True if an update waited for the reading in vain, and began."""


class CaptureTask(Struct):
    """One capture in progress: what it copies, and who waits for it. What is known of it is in the
    ``SaveStore``.
    """

    number: int
    store: SaveStore
    step: int
    durable: bool
    exact: bool
    description: Description
    overtaking: OvertakeDetector
    handle: SaveHandle
    started_s: float
    grant_s: float = 0.0
    """How long its worker waited for the keeper's grant."""
    trained: TrainedParameters = UNTRAINED
    parameters: str = ""
    """Checksum of the trained parameters in the sealed image; "": there are none."""
    ready: dict[torch.device, torch.Event] = field(default_factory=dict)
    answered: SignalSafeEvent = field(default_factory=SignalSafeEvent)
    released: SignalSafeEvent = field(default_factory=SignalSafeEvent)
    resolved: SignalSafeEvent = field(default_factory=SignalSafeEvent)
    events: list[torch.Event] = field(default_factory=list)
    _last: CaptureState = field(default_factory=CaptureState)
    _sharing: SharedCopy | None = None
    thread: int = field(default_factory=threading.get_native_id)
    """The thread that saved, by a number that no thread of a forked child has."""
    _is_waited_for: bool = False
    _is_helped: bool = False
    room: RingCredit = field(default_factory=RingCredit)

    def begin(self) -> None:
        """Make this the newest save; it is cancelled by what is heard from now on."""
        self.store.tell(Began(self.number, self.step, self.durable))

    def give_up(self, reason: str) -> None:
        """Cancel it unless its copy is complete, also where an interrupt came before it began."""
        if self.store.state.capture.number < self.number:
            self.begin()
        self.cancel(reason)

    @property
    def known(self) -> CaptureState:
        """What is known of it; of one that a newer save followed, what was known last."""
        newest = self.store.state.capture
        if newest.number == self.number:
            self._last = newest
        return self._last

    def tell(self, event: Event) -> None:
        """Report an event of this capture, and wake who waits for what follows from it."""
        self.store.tell(event, self.number)
        self.wake()

    def wake(self) -> None:
        """Wake the threads that wait for what is known by now."""
        known = self.known
        if known.answer is not None or known.cancelled:
            self.answered.set()
        if known.cancelled:
            self.release()

    def cancel(self, reason: str) -> None:
        """Cancel the capture unless its copy is complete."""
        self.room.close(reason)  # its copier may still wait for this
        self.tell(Cancelled(reason))

    def release(self) -> None:
        """Let updates continue."""
        self.released.set()

    def share(self, sharing: SharedCopy) -> None:
        """Offer its copying to a second thread, which takes part once training waits."""
        self._sharing = sharing
        if self._is_waited_for:
            self.add_helper()

    def add_helper(self) -> None:
        """Copy on a second thread, too: training waits, for the fence or for the snapshot."""
        self._is_waited_for = True
        if self._sharing is not None and not (self._is_helped or self.released.is_set()):
            self._is_helped = True
            helper = threading.Thread(target=self._sharing.work, name="holdfast-help", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: one copies alone
                helper.start()

    def wait_released(self, timeout_s: float) -> bool:
        """Wait until updates may continue while a second thread copies; return True if they may."""
        self.add_helper()
        return self.released.wait(timeout_s)

    def is_copied(self, events: list[torch.Event]) -> None:
        """Mark the bytes as final (behind ``events``): it is not cancelled any more. Raises
        CopyCancelled.
        """
        self.events = events
        self.tell(Copied())
        self.check()

    def is_update_recorded(self) -> bool:
        """Return True if this thread captures an update into a graph: it moves versions alone."""
        return any(map(devices.is_capturing, self.ready))

    def order_updates(self) -> None:
        """Let all that this thread enqueues from now on come behind the copies from devices."""
        if self.events:
            self.overtaking.pass_fence()
        for event in self.events:
            devices.wait_event(devices.current_stream(event.device), event)

    def resolve(self) -> None:
        """Report that nothing more becomes of it here, and wake everybody."""
        self.store.tell(Resolved(), self.number)
        self.answered.set()
        self.release()
        self.resolved.set()

    def check(self) -> None:
        """Raise CopyCancelled if the capture was cancelled."""
        if self.known.cancelled:
            raise CopyCancelled(self.known.cancelled)


# Worker thread of a Saver: ends when the Saver is collected, so that model and optimizer are freed.
# Worker and listener hold no reference to the Saver while they wait. When it is collected both end,
# its memory is unmapped, and the keeper sees that the rank is lost. A queued save keeps the Saver
# alive, and so does a handle, so that waiting callers get an answer.


class Worker(Protocol):
    """Protocol of the object that executes queued captures."""

    def execute(self, capture: CaptureTask | None) -> None:
        """Execute this capture; None: reconnect the keeper."""
        ...


S = TypeVar("S", bound=Worker)
T = TypeVar("T")
P = ParamSpec("P")


class CaptureQueue(queue.SimpleQueue["tuple[S, CaptureTask | None] | None"], Generic[S]):
    """Queue of captures, each with the object that executes it; None ends the worker."""


def run_worker(work: CaptureQueue[S]) -> None:
    """Run the worker thread: execute captures, each once, until the queue ends."""
    while (item := work.get()) is not None:
        worker, capture = item
        if capture is None or not capture.resolved.is_set():
            worker.execute(capture)
        del item, worker, capture


def weakly(method: Callable[[T], None]) -> Callable[[T], None]:
    """Return a function that calls ``method`` only while its object lives."""
    reference = weakref.WeakMethod(method)

    def call(argument: T) -> None:
        living = reference()
        if living is not None:
            living(argument)

    return call


def call_later(wait_s: float, method: Callable[[], object]) -> None:
    """Call ``method`` after a while on a thread of its own, if its object lives then."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        living = reference()
        if living is not None:
            living()

    timer = threading.Timer(wait_s, call)
    timer.daemon = True
    timer.start()


def finalize_weakly(
    thing: T, act: Callable[P, object], *arguments: P.args, **options: P.kwargs
) -> weakref.finalize[P, T]:
    """Call ``act`` when ``thing`` is collected; not at process exit, which cleans up anyway."""
    finalizer = weakref.finalize(thing, act, *arguments, **options)
    finalizer.atexit = False
    return finalizer


def stop_worker(process: int, work: CaptureQueue[S], slots: Mapping[str, SlotFile]) -> None:
    """End the worker and unmap all slots, if this is still the process ``process``."""
    if process != os.getpid():
        return  # a forked child: no worker, and the memory is its parent's
    work.put(None)
    # Not left to the collector: pinned memory must be unpinned while it is still mapped.
    for slot in slots.values():
        slot.close()
