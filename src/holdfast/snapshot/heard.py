"""What the keeper says by itself, and what follows from it on this rank.

Everything here runs on the listening thread; a message that must be answered is returned to
whoever holds the line.
"""

from __future__ import annotations

from collections import deque

from holdfast.errors import CaptureOvertaken, NotProtected, PersistFailed, SnapshotSkipped
from holdfast.events import PersistBroke, SnapshotNotProtected, emit
from holdfast.geometry.layout import Layout
from holdfast.snapshot import messages as m
from holdfast.snapshot.handle import DURABLE
from holdfast.snapshot.promises import Promises
from holdfast.snapshot.underway import Capture, Place
from holdfast.snapshot.unlike import events_of


class Heard:
    """What is known from the keeper's word alone."""

    def __init__(self, promises: Promises) -> None:
        self._promises = promises
        self.announced: set[tuple[int, str]] = set()
        self.layouts: dict[str, Layout] = {}
        self._granted: deque[str] = deque(maxlen=16)
        self.fenced = ""
        """Why this process is over; "" while it is not."""
        self.is_silent = False
        """Whether it let a deadline pass and has said nothing since."""

    def hear(self, message: m.Message, current: Capture | None, place: Place) -> m.Message | None:
        """Take in ``message``; what is to be said to it, if anything."""
        self.is_silent = False
        match message:
            case m.LayoutAgreed(hash=hash_, data=data):
                self.layouts = {hash_: Layout.from_json(data)}
            case m.Grant() | m.Skip():
                return self._answered(current, message)
            case m.Aborted():
                self._aborted(current, message)
            case m.Complete() | m.Durable() | m.NotDurable() | m.ReplicasDiffer():
                self._came_of_it(message, place)
            case m.Protected(step=step):
                self._promises.protected(step)
            case m.Unprotected():
                self._not_protected(message, place)
            case m.Freed(attempt=attempt, size_bytes=size_bytes):
                if current is not None and _is_of(current, attempt):
                    current.room.freed(size_bytes)
            case m.Announced(step=step, which=which):
                self.announced.add((step, which))
            case m.FencedOff(incarnation=n):
                self.fenced = f"incarnation {n} of this run has begun; this one is over"
                if current is not None:
                    current.call_off(self.fenced)
        return None

    def lost(self, reason: str, current: Capture | None) -> None:
        """The keeper went away; the next save starts another."""
        self.is_silent = False  # the next one has not been asked yet
        why = f"the keeper went away: {reason}"
        if current is not None and current.handle.state != DURABLE:
            current.durable_lost = current.durable
        if current is not None and (not current.resolved.is_set() or current.is_kept_nowhere):
            current.keeper_lost = True
            current.call_off(why)
        self._promises.fail_all(why)

    def take_announced(self, step: int, which: str, after: int | None = None) -> bool:
        """Whether the policy ``which`` was announced for ``step``, or one passed over; asked once.

        Steps need not follow on each other, so the one that was announced may never come.
        ``after``: up to that step it counts no more.
        """
        found = {one for one in tuple(self.announced) if one[0] <= step and one[1] == which}
        self.announced -= found
        return any(after is None or n > after for n, _ in found)

    def _aborted(self, current: Capture | None, message: m.Aborted) -> None:
        if current is not None and self._is_of_an_earlier_try(current, message):
            return
        kind = CaptureOvertaken if message.overtaken else SnapshotSkipped
        is_mine = current is not None and current.step == message.step
        if current is not None and is_mine:  # before whoever waits for it is told
            current.durable_lost = current.durable and message.is_lost
        self._promises.fail(message.step, kind(message.reason, leaf=message.leaf), captured=False)
        if current is None or not is_mine:
            return
        if current.answer is None:
            current.answer = message
            current.answered.set()
        else:
            current.call_off(message.reason)

    def _is_of_an_earlier_try(self, current: Capture, message: m.Aborted) -> bool:
        """A step that was missed is taken again, and the end of the first try comes late."""
        is_mine = _is_of(current, message.attempt)
        return current.step == message.step and not is_mine and message.attempt in self._granted

    def _answered(self, current: Capture | None, message: m.Grant | m.Skip) -> m.Message | None:
        is_awaited = current is not None and current.step == message.step and current.answer is None
        if current is not None and isinstance(message, m.Grant):
            # One for a request that was given up, of the same step even, is for other values.
            is_awaited = is_awaited and message.turn == current.turn
            self._granted.append(message.attempt)
        if current is not None and is_awaited and not current.called_off:
            current.answer = message
            current.answered.set()
        elif isinstance(message, m.Grant):  # too late: nobody waits for it any more
            return m.Abandon(attempt=message.attempt, reason="its save was given up")
        return None

    def _came_of_it(
        self, message: m.Complete | m.Durable | m.NotDurable | m.ReplicasDiffer, place: Place
    ) -> None:
        match message:
            case m.Complete(step=step):
                self._promises.captured(step)
            case m.Durable(step=step, fulfils=fulfils):
                self._promises.durable(step, fulfils)
            case m.NotDurable():
                self._not_durable(message, place)
            case m.ReplicasDiffer():
                self._differ(message, place)

    def _differ(self, message: m.ReplicasDiffer, place: Place) -> None:
        for event in events_of(message, place.incarnation, place.rank):
            if place.rank in (0, *event.ranks):  # for the people; and whoever is meant
                emit(event)
        self._promises.differ(message.step, {each.leaf: each.ranks for each in message.leaves})

    def _not_protected(self, message: m.Unprotected, place: Place) -> None:
        step, reason = message.step, message.reason
        if place.rank == 0:  # every rank is told, and one tells the people
            emit(SnapshotNotProtected(
                incarnation=place.incarnation, step=step, rank=0, reason=reason
            ))  # fmt: skip
        error = NotProtected(
            f"step {step} is captured and not protected: {reason}",
            generation=f"{place.incarnation}-{step}", host=message.host,
        )  # fmt: skip
        self._promises.not_protected(step, error)

    def _not_durable(self, message: m.NotDurable, place: Place) -> None:
        if place.rank == 0:  # every rank is told, and one tells the people
            emit(PersistBroke(
                incarnation=place.incarnation, step=message.step, rank=0, reason=message.reason
            ))  # fmt: skip
        for step in (message.step, *message.fulfils):
            error = PersistFailed(f"step {message.step}: {message.reason}")
            self._promises.fail(step, error, captured=message.in_memory)


def _is_of(current: Capture, attempt: str) -> bool:
    return isinstance(current.answer, m.Grant) and current.answer.attempt == attempt
