"""What a rank knows of its saves, whatever its threads and its keeper report in whatever order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.capture import save_state as s
from holdfast.protocol import messages as m

REASON = "reason"
Reduce = Callable[[s.SaveState, s.Event], s.SaveState]


def grant(step: int, number: int, *, ring_bytes: int = 0) -> m.Grant:
    return m.Grant(
        step=step,
        attempt=f"{step}-{number}",
        slot="s",
        durable=True,
        layout="l",
        request_number=number,
        ring_bytes=ring_bytes,
    )


OWN: list[s.Event] = [
    s.Requested(1),
    s.Requested(2),
    s.Unreached(),
    s.Unanswered(),
    s.Cancelled(REASON),
    s.Explained(": nobody asked"),
    s.Copied(),
    s.Resolved(),
]
HEARD: list[s.Event] = [
    grant(1, 1),
    grant(1, 2, ring_bytes=1),
    m.Skip(step=1, reason="skipped"),
    m.Aborted(step=1, attempt="1-1", reason="aborted", is_lost=True),
    m.Aborted(step=1, attempt="1-2", reason="aborted"),
    m.Complete(step=1, attempt="1-1", durable=True),
    m.Durable(step=1, attempt="1-1"),
    m.Durable(step=2, attempt="2-1"),
    m.NotDurable(step=1, since=0, attempt="1-1", reason="disk full"),
    s.KeeperGone("gone"),
    m.FencedOff(incarnation=2),
]
LATER: list[s.Event] = [s.Began(2, 2, durable=False), s.Ordered(2), grant(2, 1)]
START: list[s.Event] = [s.Began(1, 1, durable=True), s.Ordered(1)]


def check(before: s.SaveState, event: s.Event, after: s.SaveState) -> None:
    """What holds of every change."""
    old, new = before.capture, after.capture
    assert not (new.copied and new.cancelled), "final bytes are given up"
    assert (after.captured, after.durable) >= (before.captured, before.durable)
    assert not before.fenced or after.fenced
    check_order(before, event, after)
    if isinstance(event, s.Began):
        assert new == s.CaptureState(event.number, event.step, event.durable)
        return
    for name in ("number", "step", "durable"):
        assert getattr(old, name) == getattr(new, name)
    for name in ("is_unanswered", "keeper_lost", "copied", "is_resolved", "is_settled"):
        assert getattr(new, name) >= getattr(old, name), f"{name} is taken back"
    assert new.cancelled.startswith(old.cancelled), "the first reason is lost"
    assert old.answer is None or new.answer is old.answer, "it was answered before"
    if new.answer is not old.answer:
        assert new.answer is event
        check_answer(old, event)
    if isinstance(event, (s.KeeperGone, m.FencedOff)) and old.number > 0 and not old.is_resolved:
        assert new.cancelled or new.copied, "somebody waits for ever"


def check_answer(old: s.CaptureState, event: s.Event) -> None:
    assert isinstance(event, (m.Grant, m.Skip, m.Aborted)) and event.step == old.step
    if isinstance(event, m.Grant):
        assert event.request_number == old.request_number, "it is for other values"
        assert not old.cancelled, "its slot would be written to by nobody, and kept"


def check_order(before: s.SaveState, event: s.Event, after: s.SaveState) -> None:
    """What was to be durable stays so until a manifest names it or something newer."""
    wanted = before.order.pay(after.durable)
    if wanted.last >= 0:
        assert after.order.last >= wanted.last and 0 <= after.order.first <= wanted.first
    if isinstance(event, s.Ordered) and event.step > before.durable:
        assert after.order.first <= event.step <= after.order.last
    assert after.order.last < 0 or after.order.last > after.durable, "it is paid already"


def walk(reduce: Reduce, events: list[s.Event], depth: int) -> int:
    """Every order of the events, each as often as one likes; how many states there are."""
    state = s.SaveState()
    for event in START:
        state, before = reduce(state, event), state
        check(before, event, state)
    seen, newest = {state}, [state]
    for _ in range(depth):
        found: list[s.SaveState] = []
        for before in newest:
            for event in events:
                after = reduce(before, event)
                check(before, event, after)
                if after not in seen:
                    seen.add(after)
                    found.append(after)
        newest = found
    return len(seen)


def test_no_order_of_events_breaks_what_is_known() -> None:
    count = walk(s.reduce, [*OWN, *HEARD, *LATER], 4)
    print(f"{count} states")
    assert count > 5_000


@pytest.mark.slow
def test_no_longer_order_of_events_breaks_what_is_known() -> None:
    print(f"{walk(s.reduce, [*OWN, *HEARD, *LATER], 6)} states")


events = st.sampled_from([*OWN, *HEARD, *LATER, s.FoundFenced("newer")])


@settings(max_examples=300, deadline=None)
@given(told=st.lists(events, max_size=40))
def test_no_long_order_of_events_does_so_either(told: list[s.Event]) -> None:
    state = s.SaveState()
    for event in [*START, *told]:
        state, before = s.reduce(state, event), state
        check(before, event, state)


# ── mistakes are found ───────────────────────────────────────────────────────────────────────────


def _cancels_what_is_copied(capture: s.CaptureState, reason: str) -> s.CaptureState:
    return replace(capture, cancelled=capture.cancelled or reason)


def _takes_any_grant(capture: s.CaptureState, answer: m.Grant | m.Skip) -> s.CaptureState:
    is_awaited = capture.step == answer.step and capture.answer is None
    return replace(capture, answer=answer) if is_awaited else capture


def _keeps_waiting(_: s.SaveState, capture: s.CaptureState, __: str) -> s.CaptureState:
    return replace(capture, keeper_lost=True)


@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        (s.CaptureState, "cancel", _cancels_what_is_copied),
        (s, "_take_answer", _takes_any_grant),
        (s, "_lose_keeper", _keeps_waiting),
    ],
)
def test_a_reducer_that_makes_a_known_mistake_is_found_out(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mistake: Any
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(AssertionError):
        walk(s.reduce, [*OWN, *HEARD, *LATER], 4)


@pytest.mark.parametrize("forgets_at", [m.NotDurable, s.KeeperGone, m.Complete])
def test_a_reducer_that_forgets_what_was_to_be_durable_is_found_out(forgets_at: type) -> None:
    def reduce(state: s.SaveState, event: s.Event) -> s.SaveState:
        after = s.reduce(state, event)
        return replace(after, order=m.NO_ORDER) if isinstance(event, forgets_at) else after

    with pytest.raises(AssertionError):
        walk(reduce, [*OWN, *HEARD, *LATER], 4)


# ── what is missed is due again ──────────────────────────────────────────────────────────────────


def after(*told: s.Event) -> s.SaveState:
    state = s.SaveState()
    for event in [*START, s.Requested(1), *told]:
        state = s.reduce(state, event)
    return state


@pytest.mark.parametrize(
    ("told", "is_due"),
    [
        ([m.Skip(step=1, reason="a rank is away")], True),
        ([m.Skip(step=1, reason="no such dtype", is_passing=False)], False),
        ([s.Unanswered(), s.Cancelled("no answer")], True),
        ([s.KeeperGone("gone")], True),
        ([grant(1, 1), s.Copied(), s.Resolved(), s.KeeperGone("gone")], False),
        ([grant(1, 1), s.Cancelled("overtaken")], False),
    ],
)
def test_a_durable_save_that_was_missed_for_a_passing_reason_is_due_again(
    told: list[s.Event], *, is_due: bool
) -> None:
    state = after(*told)
    assert state.capture.is_carried is is_due
    assert state.order == m.StandingOrder(1, 1), "the next snapshot is durable for it in any case"


def test_an_image_that_went_through_a_ring_is_lost_with_its_keeper_until_storage_has_it() -> None:
    passed: list[s.Event] = [grant(1, 1, ring_bytes=1), s.Copied(), s.Resolved()]
    assert after(*passed, s.KeeperGone("gone")).capture.is_carried
    kept = after(*passed, m.Durable(step=1, attempt="1-1"), s.KeeperGone("gone"))
    assert not kept.capture.is_carried and not kept.capture.durable_lost


# ── the store ────────────────────────────────────────────────────────────────────────────────────


def test_an_event_of_a_save_that_is_over_says_nothing_of_the_next() -> None:
    store = s.SaveStore()
    store.tell(s.Began(1, 1, durable=True))
    store.tell(s.Began(2, 2, durable=True))
    store.tell(s.Cancelled(REASON), 1)
    assert not store.state.capture.cancelled
    store.tell(s.Cancelled(REASON), 2)
    assert store.state.capture.cancelled == REASON


def test_no_event_is_lost_between_threads() -> None:
    store = s.SaveStore()

    def announce(which: str) -> None:
        for step in range(200):
            store.tell(m.Announced(step=step, which=which))

    threads = [threading.Thread(target=announce, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.state.announced) == 800


def test_no_event_of_a_signal_handler_is_lost_that_comes_in_the_middle_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, reduce = s.SaveStore(), s.reduce
    handlers: Iterator[int] = iter([7])

    def interrupted(state: s.SaveState, event: s.Event) -> s.SaveState:
        for number in handlers:
            signal.raise_signal(signal.SIGUSR1)
            assert number == 7
        return reduce(state, event)

    def handle(_: int, __: FrameType | None) -> None:
        store.tell(s.Ordered(7))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        monkeypatch.setattr(s, "reduce", interrupted)
        store.tell(m.Announced(step=3, which="storage"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert store.state.order == m.StandingOrder(7, 7) and store.state.announced
