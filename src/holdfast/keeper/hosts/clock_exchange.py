"""Compares the clock of a follower with the coordinator's, by four moments of each exchange.

A request is sent, received, answered, and the answer received: the first and the last moment are of
the follower's monotonic clock, the others of the coordinator's. Had request and answer taken
equally long, the clocks would differ by the mean of the two differences; whatever they took, it is
wrong by half of that at most. So the quickest of a few exchanges counts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from msgspec import Struct

from holdfast.events import ClocksCompared, emit
from holdfast.protocol.arena import boot_id
from holdfast.protocol.facts import Fact, ToCoordinator, ToFollower

#: Exchanges of one comparison, seconds between two comparisons, and for an answer.
EXCHANGES, EVERY_S, ANSWER_S = 5, 30.0, 5.0
BOOT_DIGITS = 8
"""How many digits of a boot's id stand in records."""


class AskTime(ToCoordinator, frozen=True, kw_only=True):
    """Asks the coordinator for its time; ``sent_s``: the moment, by the clock of who asks."""

    sent_s: float


class TellTime(ToFollower, frozen=True, kw_only=True):
    """Answers ``AskTime``: when it was received and answered, by the clock of the coordinator.

    ``boot``: what that clock counts from.
    """

    sent_s: float
    received_s: float
    answered_s: float
    boot: str


def tell_time(asked: AskTime) -> TellTime:
    """Answer a follower that asks for the time; to be called as soon as it was received."""
    now_s = time.monotonic()
    return TellTime(
        sent_s=asked.sent_s,
        received_s=now_s,
        answered_s=time.monotonic(),
        boot=boot_id()[:BOOT_DIGITS],
    )


class ClockReading(Struct, frozen=True):
    """What one exchange says: how far the own clock is ahead, and how long all was under way."""

    ahead_s: float
    round_trip_s: float
    boot: str

    @property
    def error_s(self) -> float:
        """Return the most that ``ahead_s`` can be wrong."""
        return self.round_trip_s / 2


def reading_of(told: TellTime, received_s: float) -> ClockReading | None:
    """Return what an exchange says; None where its moments are in no possible order.

    ``received_s``: when the answer came, by the own clock.
    """
    there_s = told.answered_s - told.received_s
    round_trip_s = received_s - told.sent_s - there_s
    ahead_s = (told.sent_s - told.received_s + received_s - told.answered_s) / 2
    is_possible = there_s >= 0 and round_trip_s >= 0
    if not (is_possible and math.isfinite(ahead_s) and math.isfinite(round_trip_s)):
        return None
    return ClockReading(ahead_s, round_trip_s, told.boot)


class ClockExchange:
    """The follower's side of one connection. Lives on the keeper's loop."""

    def __init__(
        self,
        host: str,
        other: str,
        incarnation: int,
        send: Callable[[Fact], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._other, self._incarnation = host, other, incarnation
        self._send, self._clock = send, clock
        self._answered = asyncio.Event()
        self._sent_s = -math.inf
        self._readings: list[ClockReading] = []

    async def run(self) -> None:
        """Compare the clocks now and then, until cancelled."""
        while True:
            await self.compare()
            await asyncio.sleep(EVERY_S)

    async def compare(self) -> None:
        """Make a few exchanges, and report the quickest; nothing where none is answered."""
        self._readings.clear()
        for _ in range(EXCHANGES):
            self._answered.clear()
            self._sent_s = self._clock()
            self._send(AskTime(sent_s=self._sent_s))
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._answered.wait()
            except TimeoutError:
                break
        if self._readings:
            best = min(self._readings, key=lambda one: one.round_trip_s)
            emit(
                ClocksCompared(
                    incarnation=self._incarnation,
                    host=self._host,
                    other=self._other,
                    other_boot=best.boot,
                    ahead_s=best.ahead_s,
                    error_s=best.error_s,
                    round_trip_s=best.round_trip_s,
                )
            )

    def take(self, told: TellTime) -> None:
        """Take an answer; one to an earlier request counts for nothing."""
        now_s = self._clock()
        if told.sent_s != self._sent_s:
            return
        reading = reading_of(told, now_s)
        if reading is not None:
            self._readings.append(reading)
        self._answered.set()
