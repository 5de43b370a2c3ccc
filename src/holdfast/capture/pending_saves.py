"""Repeats missed durable saves of this rank: at a later step, or at the end.

A durable save that failed through no fault of its state is made good by a later one. On a single
rank that is the next step. Of several ranks some may have missed a save that others have made, when
a keeper dies in the middle of it, and none may save alone: then it is the next step that all ranks
save anyway, or one that is announced to all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from holdfast.capture.handles import DURABLE, SaveHandle
from holdfast.capture.saver import Saver
from holdfast.errors import SaveError, SnapshotSkipped, StatePoisoned, UnsupportedState, UsageError
from holdfast.policy.when import Pace
from holdfast.protocol.messages import MISSED

_RETRY_S, _LONGEST_RETRY_S = 0.05, 1.0

Save = Callable[..., SaveHandle]


class PendingSaves:
    """The last save of this rank, and whether the next one must be durable in its place."""

    def __init__(self, saver: Saver, pace: Pace, *, is_alone: bool) -> None:
        self._saver, self._pace, self._is_alone = saver, pace, is_alone
        self.last_step: int | None = None
        self.last: SaveHandle | None = None
        """Handle of the last save; None once that save was missed."""
        self._again: SaveHandle | None = None
        """Handle of a later request to make the same step durable."""
        self._is_missed = False
        """True if the next save must fulfil the handles of the last one too."""
        self._is_owed = False
        """True if the next save must be durable in place of a save that this rank could not
        make.
        """
        self._announced_at = -1
        """Last step that this rank announced to repeat a missed save."""
        self._updates_at_save = 0
        self._ended: tuple[int | None, int] = None, 0
        """The last step that ended, and the number of updates at that time."""

    # ── during training ──────────────────────────────────────────────────────────────────────────

    def step_ended(self, step: int) -> None:
        """Record that the state is that of ``step``, until the next update."""
        self._ended = step, self._saver.updates

    def save(
        self, step: int, *, durable: bool, exact: bool, handle: SaveHandle | None = None
    ) -> SaveHandle:
        """Save ``step`` and fulfil what was missed with it; save again only if it was missed.

        ``handle``: the existing handle of a deferred save.
        """
        if step == self.last_step and self.last is not None:
            if durable:
                with suppress(SnapshotSkipped):  # of the save before, which has not ended
                    self._saver.previous_was_skipped()  # known only after the save before has ended
            missed = self.last.state == "failed"
            if not missed and not durable:
                return self.last if handle is None else self._saver.join(step, handle)
            if not missed:
                self._again = self._saver.make_durable(step, handle)
                return self._again
        is_repeated = self._was_missed()
        durable = durable or is_repeated or self._is_owed
        if handle is not None:
            handle.durable = durable
        handle = self._saver.save(
            step, durable=durable, exact=exact, is_repeated=is_repeated, handle=handle
        )
        self._is_missed = self._is_owed = False
        self.last_step, self.last, self._again = step, handle, None
        self._updates_at_save = self._saver.updates
        return handle

    def decline(
        self, step: int, *, durable: bool, error: Exception, handle: SaveHandle | None = None
    ) -> SaveHandle:
        """Handle a step that this rank cannot save: the next due save is durable in its place.

        Raise the ``error`` of an invalid call.
        """
        if is_mistake(error):
            raise error
        self.last_step, self._updates_at_save = step, self._saver.updates
        self._is_owed |= durable
        self.last = self._saver.decline(step, durable, error, handle)
        return self.last

    def is_retaken(self, step: int, *, is_due: bool) -> bool:
        """Return True if a missed save is repeated at ``step``; ``is_due``: the step is saved
        anyway.
        """
        # A step that is not saved does not wait for the capture of another.
        is_open = self._saver.is_capturing and not is_due
        try:
            is_missed = self._is_missed if is_open else self._was_missed()
        except SnapshotSkipped:
            if is_due or not self._is_alone:
                raise  # of several ranks none waits for this one
            return False
        if self._is_alone:
            return is_missed
        self._saver.keep_in_touch()
        announcing = self._saver.announcements
        was_announced = announcing.consume_announced(step, MISSED, after=self.last_step)
        if is_missed and not (was_announced or is_due) and step >= self._announced_at:
            self._announced_at = self._pace.ahead(step)
            announcing.announce(self._announced_at, MISSED)
        return was_announced or (is_missed and is_due)

    def _was_missed(self) -> bool:
        """Return True if the last save was to be durable, and was missed."""
        handle = self.last
        if handle is None or not handle.durable:
            return self._is_missed
        try:
            was_skipped = self._saver.previous_was_skipped()
        except SnapshotSkipped:  # its capture was cancelled, and has not ended yet
            self._miss()
            raise
        if was_skipped and handle.state != DURABLE:
            self._miss()
        return self._is_missed

    def _miss(self) -> None:
        self._is_missed, self.last = True, None

    # ── at the end ───────────────────────────────────────────────────────────────────────────────

    def keep(self, save: Save, *, timeout_s: float, is_newest_promised: bool) -> None:
        """Wait for the pending saves, and ``save`` again what was missed while its state still
        exists.

        ``is_newest_promised``: the newest snapshot must become durable, whatever it was saved as.
        Raises the error of a save that could not be kept.
        """
        deadline = time.monotonic() + timeout_s
        if is_newest_promised:
            self._retake_newest(save, deadline)
        self._saver.end_capture(timeout_s=timeout_s)
        while True:
            self._retake_missed(save, deadline)
            try:
                self._wait(deadline)
                return
            except SaveError:
                if self.last is None or not self._saver.previous_was_lost:
                    raise
                self._retake_lost(self.last.step, deadline)

    def _wait(self, deadline: float) -> None:
        for handle in (self.last, self._again):
            if handle is not None and handle.durable:
                handle.wait_durable(_left_s(deadline))

    def _retake_newest(self, save: Save, deadline: float) -> None:
        """Save a missed newest step again, once: all ranks know that it was missed, but one may be
        gone.
        """
        handle = self.last
        if handle is None or handle.durable:
            return
        try:
            handle.wait_captured(_left_s(deadline))
        except SaveError:
            if self._saver.updates != self._updates_at_save:
                raise
            # The save is durable at once: there may be no memory to keep a snapshot.
            save(handle.step, durable=True)

    def _retake_lost(self, step: int, deadline: float) -> None:
        """Handle a keeper that died before ``step`` was durable: it is repeated, unless the next
        keeper has all of it in memory.
        """
        if self._saver.is_whole(step, timeout_s=_left_s(deadline)):
            self._again, self.last = self._saver.make_durable(step), None
        else:
            self._miss()

    def _retake_missed(self, save: Save, deadline: float) -> None:
        pause_s = _RETRY_S
        while self._was_missed():
            step = self._step_of_state()
            if step is None or time.monotonic() > deadline:
                raise self._missed_for_good()
            time.sleep(min(pause_s, _left_s(deadline)))
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
            if not (self._saver.unpaid() or self._is_owed):
                self._is_missed = False  # the next keeper discovered the whole generation
                return
            save(step, durable=True)
            self._saver.end_capture(timeout_s=_left_s(deadline))

    def _step_of_state(self) -> int | None:
        """Return the step whose state is still unchanged; None if there were updates since."""
        saved = self.last_step, self._updates_at_save
        found = [step for step, updates in (saved, self._ended) if updates == self._saver.updates]
        return max((step for step in found if step is not None), default=None)

    def _missed_for_good(self) -> SnapshotSkipped:
        missed = self._saver.unpaid()
        last = next((one.failure for one in missed if one.failure), None)
        reason = SnapshotSkipped(
            f"step {self.last_step} was to be durable, was missed, and could not be saved again "
            f"before the state went on or time was up{f' ({last})' if last else ''}"
        )
        for one in missed:
            one.fail(reason, captured=False)
        return reason


def is_mistake(error: Exception) -> bool:
    """Return True for an invalid call, the same on every rank: the caller must know, nobody
    waits.
    """
    is_usage = isinstance(error, UsageError) and not isinstance(error, UnsupportedState)
    return is_usage or isinstance(error, StatePoisoned)


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
