"""Clocks of two keepers are compared by four moments, within the error that is told."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.events import ClocksCompared, Event, subscribe
from holdfast.keeper.hosts.clock_exchange import (
    AskTime,
    ClockExchange,
    TellTime,
    reading_of,
    tell_time,
)
from holdfast.protocol.arena import boot_id
from holdfast.protocol.facts import Fact

WAY = st.floats(0, 10)


@pytest.mark.promise
@given(ahead_s=st.floats(-1e6, 1e6), out_s=WAY, there_s=WAY, back_s=WAY)
def test_the_true_difference_lies_within_the_error(
    ahead_s: float, out_s: float, there_s: float, back_s: float
) -> None:
    """The coordinator's clock stands at 1000 s when the request is sent."""
    told = TellTime(
        sent_s=1000 + ahead_s,
        received_s=1000 + out_s,
        answered_s=1000 + out_s + there_s,
        boot="b",
    )
    found = reading_of(told, 1000 + ahead_s + out_s + there_s + back_s)
    if found is None:  # nothing was under way, to the last digit
        assert out_s + back_s < 1e-6
        return
    assert abs(found.ahead_s - ahead_s) <= found.error_s + 1e-6
    assert found.round_trip_s == pytest.approx(out_s + back_s, abs=1e-6)


@pytest.mark.parametrize(
    ("received_s", "answered_s"), [(5.0, 4.0), (5.0, 6.0), (math.nan, 1.0), (0.0, math.inf)]
)
def test_moments_that_cannot_be_say_nothing(received_s: float, answered_s: float) -> None:
    told = TellTime(sent_s=1.0, received_s=received_s, answered_s=answered_s, boot="b")
    assert reading_of(told, 1.5) is None


class Link:
    """A coordinator that answers at once, late, or not at all; its clock is 500 s behind."""

    def __init__(self, ways_s: list[float | None]) -> None:
        self.now_s, self._ways_s = 1000.0, ways_s
        self.exchange = ClockExchange("b", "a", 3, self.send, clock=lambda: self.now_s)

    def send(self, fact: Fact) -> None:
        assert isinstance(fact, AskTime)
        way_s = self._ways_s.pop(0)
        if way_s is None:
            return
        there_s = self.now_s + way_s - 500
        answer = TellTime(sent_s=fact.sent_s, received_s=there_s, answered_s=there_s, boot="x")
        self.now_s += way_s + 0.001
        asyncio.get_running_loop().call_soon(self.exchange.take, answer)


def compared(link: Link) -> list[ClocksCompared]:
    found: list[Event] = []
    stop = subscribe(lambda event, _: found.append(event))
    try:
        asyncio.run(link.exchange.compare())
    finally:
        stop()
    return [event for event in found if isinstance(event, ClocksCompared)]


def test_of_a_few_exchanges_the_quickest_is_reported() -> None:
    (one,) = compared(Link([0.9, 0.001, 0.3, 0.2, 0.8]))
    assert (one.host, one.other, one.other_boot, one.incarnation) == ("b", "a", "x", 3)
    assert one.ahead_s == pytest.approx(500.0) and one.round_trip_s == pytest.approx(0.002)
    assert one.error_s == one.round_trip_s / 2


def test_a_coordinator_that_does_not_answer_holds_up_nothing_and_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.keeper.hosts.clock_exchange.ANSWER_S", 0.01)
    assert compared(Link([None])) == []
    assert len(compared(Link([0.001, None]))) == 1


def test_an_answer_to_an_earlier_request_is_none() -> None:
    link = Link([])
    link.exchange.take(TellTime(sent_s=3.0, received_s=1.0, answered_s=1.0, boot="x"))
    assert link.exchange._readings == []


def test_the_answer_has_the_boot_as_records_have_it() -> None:
    told = tell_time(AskTime(sent_s=7.0))
    assert told.sent_s == 7.0 and told.received_s <= told.answered_s
    assert boot_id().startswith(told.boot) and len(told.boot) == 8
