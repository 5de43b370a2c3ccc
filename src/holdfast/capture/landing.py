"""Copies data from staging pieces to the slot, and checksums it, on several threads.

The thread that enqueues copies adds a job for each; several threads wait for its events, copy,
and checksum the blocks while they are in the processor's cache.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
from msgspec import Struct, field

from holdfast.accelerator import devices
from holdfast.capture import staging
from holdfast.capture.copy_plan import Segment, check_nothing, copy_segment
from holdfast.protocol.control_groups import rank_cores

#: Threads that land the copies of one rank: as many as there are cores up to the first, then
#: three of four cores up to the second. Each checksums 5 to 8 GB/s, and a link brings 55.
_FEW_THREADS, _MOST_THREADS = 4, 12
#: How long a thread waits for a piece before it looks for an error of another.
_LOOK_S = 0.5


class LandingJob(Struct):
    """What is done when the copies before these events are in host memory."""

    segment: Segment
    """The image data, and the copies into each block from the pieces; none: it landed in place."""
    events: Sequence[torch.Event] = ()
    pieces: list[torch.Tensor] = field(default_factory=list)
    """Taken back once they were copied on."""
    is_summed: bool = True
    """False while other bytes of the segment are still missing."""
    is_new: bool = False
    """True if the memory of the segment may not be mapped yet, page by page."""


class Landing:
    """The jobs of one save, in the order in which copies were enqueued.

    ``data`` is the memory that segments count from, at address ``base``. ``check`` is called before
    each job and raises if the capture was cancelled.
    """

    def __init__(self, data: memoryview, base: int, check: Callable[[], None]) -> None:
        self._data, self._base, self._check = data, base, check
        self._changed = threading.Condition()
        self._jobs: deque[LandingJob] = deque()
        self._in_work = 0
        self._threads = 0
        self._is_over = False
        self._error: BaseException | None = None
        self._sums: dict[int, tuple[int, list[int]]] = {}
        """Start of a segment -> its end, and the checksums of its whole blocks."""
        self._final_bytes = 0
        self._taken: dict[int, torch.Tensor] = {}
        self._uses: dict[int, int] = {}
        """Of pieces that several give back, how often."""

    def take_piece(self) -> torch.Tensor:
        """Return a staging piece; while all are in use, do the jobs that give some back."""
        while True:
            piece = staging.pieces.take()
            if piece is None and not self._work_one():
                piece = staging.pieces.take(_LOOK_S)
            self._raise_error()
            if piece is not None:
                self._taken[id(piece)] = piece
                return piece
            self._check()

    def share(self, piece: torch.Tensor) -> None:
        """Take ``piece`` back only when it was given back once more."""
        with self._changed:
            self._uses[id(piece)] = self._uses.get(id(piece), 1) + 1

    def give_back(self, piece: torch.Tensor) -> None:
        """Give back a piece that was taken, or shared, and is in no job for it."""
        with self._changed:
            unused = self._unused([piece])
        staging.pieces.give_back(unused)

    def _unused(self, pieces: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Count that these were given back; return those that nobody uses any more."""
        unused = []
        for piece in pieces:
            left = self._uses.pop(id(piece), 1) - 1
            if left:
                self._uses[id(piece)] = left
            else:
                unused.append(self._taken.pop(id(piece)))
        return unused

    def add(self, jobs: Iterable[LandingJob]) -> None:
        """Have these jobs done, by more threads the more there are."""
        with self._changed:  # behind an error nobody does them
            self._raise_error()
            self._jobs.extend(jobs)
            wanted = min(land_threads() - 1, len(self._jobs) - 1)
            self._changed.notify_all()
        while self._threads < wanted:
            self._threads += 1
            with suppress(RuntimeError):  # no thread can be started: this one does all of it
                threading.Thread(target=self._help, name="holdfast-land", daemon=True).start()

    def finish(self, done: Callable[[int], None] = lambda _: None) -> list[int]:
        """Do the jobs so far; return the checksums of the summed segments' whole blocks, in order.

        ``done`` is called on this thread with the offset up to which all data is final. Raises the
        error of any thread.
        """
        while self._work_one():
            done(self._final_bytes)
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or not (self._in_work or self._jobs)
            )
        self._raise_error()
        done(self._final_bytes)
        return [one for start in sorted(self._sums) for one in self._sums[start][1]]

    def stop(self, *, is_stuck: bool = False) -> None:
        """Wait until no thread copies, and take back all pieces; no copy into them is in flight.

        ``is_stuck``: the device no longer answers, and may still write to them.
        """
        with self._changed:
            self._is_over = True
            self._jobs.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._in_work)
            self._data, self._check = memoryview(b""), check_nothing
            left = list(self._taken.values())
            self._taken.clear()
            self._uses.clear()
        if is_stuck:
            staging.pieces.abandon(left)
        else:
            staging.pieces.give_back(left)

    def _help(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (self._jobs and self._error is None) or self._is_over
                )
                if self._is_over:
                    return
            self._work_one()

    def _work_one(self) -> bool:
        """Do one job; return False if there is none to do now."""
        with self._changed:
            if not self._jobs or self._error is not None:
                return False
            job = self._jobs.popleft()
            self._in_work += 1
        try:
            self._do(job)
        except BaseException as error:  # without this job the image is invalid
            with self._changed:
                self._error = self._error or error
                self._jobs.clear()
        finally:
            with self._changed:
                self._in_work -= 1
                self._changed.notify_all()
        return True

    def _do(self, job: LandingJob) -> None:
        for event in job.events:
            devices.await_event(event)
        self._check()
        how = {"is_summed": job.is_summed, "is_new": job.is_new}
        sums = copy_segment(job.segment, self._data, self._base, **how)
        with self._changed:
            unused = self._unused(job.pieces)
            if job.is_summed:
                self._sums[job.segment.start] = job.segment.stop, sums
                while self._final_bytes in self._sums:
                    self._final_bytes = self._sums[self._final_bytes][0]
        staging.pieces.give_back(unused)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def land_threads() -> int:
    """Return the number of threads that land copies, by this rank's share of the cores."""
    cores = rank_cores()
    return max(1, min(_FEW_THREADS, cores), min(_MOST_THREADS, cores * 3 // 4))
