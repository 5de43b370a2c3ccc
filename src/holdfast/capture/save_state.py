"""Records what one rank knows of its saves in one value, which one pure function changes.

The training thread, the capture thread and the listener report what happens, and set no flag
themselves: what follows from it, whatever came before, is decided by ``reduce``.
"""

from __future__ import annotations

import threading

import msgspec
from msgspec.structs import replace

from holdfast.protocol import messages as m

#: Number of grants that are remembered, to recognize the end of one that was given up.
_GRANTS_KEPT = 16


class CaptureState(msgspec.Struct, frozen=True):
    """One save of this rank, from its hand-over on."""

    number: int = -1
    step: int = -1
    durable: bool = False
    request_number: int = 0
    """Number of the request for its slot."""
    answer: m.Grant | m.Skip | m.Aborted | None = None
    cancelled: str = ""
    is_unanswered: bool = False
    """True if the request for its slot was waited for as long as training may be held."""
    keeper_lost: bool = False
    """True if a keeper was missing before this rank knew the outcome."""
    durable_lost: bool = False
    """True if a keeper, or another rank, was lost before the save was durable as requested."""
    copied: bool = False
    """True once its bytes are final: it is not cancelled any more."""
    is_resolved: bool = False
    """True once its worker has ended with it."""
    is_settled: bool = False
    """True once it is captured on all ranks, durable, or failed."""

    @property
    def is_carried(self) -> bool:
        """Return True if a missed durable save is due again at the next step."""
        was_skipped = isinstance(self.answer, m.Skip) and self.answer.is_passing
        return self.durable and (self.keeper_lost or self.is_unanswered or was_skipped)

    @property
    def is_open(self) -> bool:
        """Return True while the keeper's loss would cost the capture."""
        went_through = isinstance(self.answer, m.Grant) and self.answer.ring_bytes > 0
        return not self.is_resolved or (went_through and not self.is_settled)

    def is_granted(self, attempt: str) -> bool:
        """Return True if ``attempt`` is the one this capture was granted."""
        return isinstance(self.answer, m.Grant) and self.answer.attempt == attempt

    def cancel(self, reason: str) -> CaptureState:
        """Return the capture cancelled, for its first reason, unless its copy is complete."""
        return self if self.copied else replace(self, cancelled=self.cancelled or reason)


NO_CAPTURE = CaptureState(is_resolved=True)


class SaveState(msgspec.Struct, frozen=True):
    """All that is known of the saves of this rank."""

    capture: CaptureState = NO_CAPTURE
    """The newest one."""
    granted: tuple[str, ...] = ()
    """The attempts of the last grants, taken or not."""
    announced: frozenset[tuple[int, str]] = frozenset()
    order: m.StandingOrder = m.NO_ORDER
    """The steps requested durable that no step reported durable pays."""
    captured: int = -1
    durable: int = -1
    refused: int = -1
    """The newest step that is captured on all ranks; is durable; was refused by storage."""
    fenced: str = ""
    """Reason why this process must stop; "" if it may continue."""

    @property
    def is_newest_settled(self) -> bool:
        """Return True if the newest step in memory is durable, or was refused by storage."""
        return max(self.durable, self.refused) >= self.captured

    def is_of_an_earlier_try(self, message: m.Aborted) -> bool:
        """Return True if it ends an earlier attempt at the step that is captured again now."""
        capture = self.capture
        is_mine = capture.is_granted(message.attempt)
        return capture.step == message.step and not is_mine and message.attempt in self.granted

    def due(self, step: int, which: str) -> frozenset[tuple[int, str]]:
        """Return the announcements of ``which`` that are due at ``step``, skipped ones among
        them.
        """
        return frozenset(one for one in self.announced if one[0] <= step and one[1] == which)


# ── what the threads of this rank report ─────────────────────────────────────────────────────────


class Began(msgspec.Struct, frozen=True):
    """The training thread hands over a save."""

    number: int
    step: int
    durable: bool


class Ordered(msgspec.Struct, frozen=True):
    """``step`` is to be durable, or a later one."""

    step: int


class Requested(msgspec.Struct, frozen=True):
    """The capture thread requests a slot."""

    request_number: int


class Unreached(msgspec.Struct, frozen=True):
    """No keeper could be reached, to request a slot from or to report the image to."""


class Unanswered(msgspec.Struct, frozen=True):
    """The request for a slot was waited for in vain."""


class Cancelled(msgspec.Struct, frozen=True):
    """A thread gives the capture up."""

    reason: str


class Explained(msgspec.Struct, frozen=True):
    """The keeper explained why a cancelled capture had no answer."""

    text: str


class Copied(msgspec.Struct, frozen=True):
    """The bytes of the capture are final."""


class Failed(msgspec.Struct, frozen=True):
    """The save of ``step`` was reported as failed."""

    step: int


class Resolved(msgspec.Struct, frozen=True):
    """The capture thread has ended with the capture."""


class KeeperGone(msgspec.Struct, frozen=True):
    """The keeper was lost."""

    reason: str


class FoundFenced(msgspec.Struct, frozen=True):
    """The keeper refused this rank, because a newer start has begun."""

    reason: str


class Consumed(msgspec.Struct, frozen=True):
    """Announcements that were acted on."""

    announced: frozenset[tuple[int, str]]


Event = (
    Began
    | Ordered
    | Requested
    | Unreached
    | Unanswered
    | Cancelled
    | Explained
    | Copied
    | Failed
    | Resolved
    | KeeperGone
    | FoundFenced
    | Consumed
    | m.Message
)


def reduce(state: SaveState, event: Event) -> SaveState:
    """Return what is known after ``event``."""
    match event:
        case Ordered(step=step):
            return replace(
                state, order=state.order.join(m.StandingOrder(step, step).pay(state.durable))
            )
        case FoundFenced(reason=reason):
            return replace(state, fenced=reason)
        case Consumed(announced=announced):
            return replace(state, announced=state.announced - announced)
        case m.Announced(step=step, which=which):
            return replace(state, announced=state.announced | {(step, which)})
        case m.Complete(step=step):
            state = replace(state, captured=max(state.captured, step))
        case m.Durable(step=step):
            durable = max(state.durable, step)
            state = replace(state, durable=durable, order=state.order.pay(step))
        case m.NotDurable(step=step) if event.in_memory:
            state = replace(state, refused=max(state.refused, step))
        case m.FencedOff(incarnation=n):
            fenced = f"incarnation {n} of this run has begun; this one is over"
            state = replace(state, fenced=fenced)
        case m.Grant(attempt=attempt):
            state = replace(state, granted=(*state.granted, attempt)[-_GRANTS_KEPT:])
        case m.Aborted() if state.is_of_an_earlier_try(event):
            return state
        case _:
            pass
    if isinstance(event, m.Message):
        capture = _hear(state, state.capture, event)
    else:
        capture = _follow(state, state.capture, event)
    return state if capture is state.capture else replace(state, capture=capture)


def _follow(state: SaveState, capture: CaptureState, event: Event) -> CaptureState:
    """Return the capture after an event of this rank's own threads."""
    match event:
        case Began(number=number, step=step, durable=durable):
            return CaptureState(number, step, durable)
        case Requested(request_number=number):
            return replace(capture, request_number=number)
        case Unreached():
            return replace(capture, keeper_lost=True)
        case Unanswered():
            return replace(capture, is_unanswered=True)
        case Cancelled(reason=reason):
            return capture.cancel(reason)
        case Explained(text=text) if capture.cancelled:
            return replace(capture, cancelled=capture.cancelled + text)
        case Copied() if not capture.cancelled:
            return replace(capture, copied=True)
        case Resolved():
            return replace(capture, is_resolved=True)
        case KeeperGone(reason=reason):
            return _lose_keeper(state, capture, reason)
        case Failed(step=step) if step == capture.step:
            return replace(capture, is_settled=True)
        case _:
            return capture


def _hear(state: SaveState, capture: CaptureState, message: m.Message) -> CaptureState:
    """Return the capture after a notification of the keeper."""
    match message:
        case m.FencedOff():
            return capture.cancel(state.fenced)
        case m.Grant() | m.Skip():
            return _take_answer(capture, message)
        case m.Aborted(step=step) if step == capture.step:
            return _abort(capture, message)
        case m.NotDurable(since=since, step=step) if since < capture.step <= step:
            return replace(capture, is_settled=True)
        case m.Durable(step=step) if capture.step <= step:
            return replace(capture, is_settled=True)
        case m.Complete(step=step) | m.Cached(step=step) if step == capture.step:
            return replace(capture, is_settled=True)
        case _:
            return capture


def _lose_keeper(state: SaveState, capture: CaptureState, reason: str) -> CaptureState:
    if state.durable < capture.step:
        capture = replace(capture, durable_lost=capture.durable)
    if capture.is_open:
        capture = replace(capture, keeper_lost=True).cancel(reason)
    return replace(capture, is_settled=True)


def _take_answer(capture: CaptureState, answer: m.Grant | m.Skip) -> CaptureState:
    is_awaited = capture.step == answer.step and capture.answer is None and not capture.cancelled
    if isinstance(answer, m.Grant):
        # A grant for an abandoned request, even of the same step, is for other values.
        is_awaited = is_awaited and answer.request_number == capture.request_number
    return replace(capture, answer=answer) if is_awaited else capture


def _abort(capture: CaptureState, message: m.Aborted) -> CaptureState:
    is_lost = capture.durable and message.is_lost
    capture = replace(capture, durable_lost=is_lost, is_settled=True)
    if capture.answer is None:
        return replace(capture, answer=message)
    return capture.cancel(message.reason)


class SaveStore:
    """The state of this rank's saves, changed by one event after the other, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may save in the middle of it
        self.state = SaveState()

    def tell(self, event: Event, number: int | None = None) -> tuple[SaveState, SaveState]:
        """Change the state by ``event``; return it as it was right before, and is right behind.

        ``number``: the save it concerns; nothing changes if that is not the newest.
        """
        with self._lock:
            while True:
                before = self.state
                if number not in (None, before.capture.number):
                    return before, before
                after = reduce(before, event)
                if self.state is before:  # else a signal handler on this thread has saved meanwhile
                    self.state = after
                    return before, after
