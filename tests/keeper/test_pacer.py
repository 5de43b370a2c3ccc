"""How long steps take is known from when a rank asks, and the next turn's rate from that."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.keeper.parity.scheduler import ParityPacer
from holdfast.keeper.trainer_api import TrainerApi
from holdfast.parity.planning.budget import LEAST, StepPacing
from holdfast.protocol import messages as m


class Clock:
    def __init__(self) -> None:
        self.now_s = 500.0

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(
        "holdfast.keeper.parity.scheduler.time", SimpleNamespace(monotonic=lambda: found.now_s)
    )
    return found


def steps(
    pacer: ParityPacer, clock: Clock, first: int, count: int, step_s: float, every: int = 1
) -> int:
    """A run of steps with a snapshot of every so many; the next step."""
    for step in range(first, first + count * every, every):
        clock.pass_(step_s * every)
        pacer.on_request(step)
    return first + count * every


def seen(pacer: ParityPacer) -> StepPacing:
    return pacer._pacing


def test_a_step_is_as_long_as_there_is_between_two_requests_by_as_many_steps(clock: Clock) -> None:
    pacer = ParityPacer()
    step = steps(pacer, clock, 5, 4, 0.5, every=10)
    assert seen(pacer).without == (0.5,) * 3
    pacer.on_request(step)  # at the same moment
    pacer.on_request(3)  # of an earlier step: somebody went back
    clock.pass_(1)
    pacer.on_request(4)
    assert seen(pacer).without == (0.5,) * 3 + (1.0,)


def test_steps_are_those_of_parity_by_how_much_of_them_it_was_made(clock: Clock) -> None:
    pacer = ParityPacer()
    step = steps(pacer, clock, 0, 2, 1.0)
    clock.pass_(0.7)
    pacer.on_begin(10**9)
    clock.pass_(0.1)
    pacer.on_end(is_made=True)
    clock.pass_(0.2)
    pacer.on_request(step)  # a tenth of it: neither
    pacer.on_begin(10**9)
    step = steps(pacer, clock, step + 1, 2, 1.5)
    clock.pass_(0.5)
    pacer.on_end(is_made=False)
    clock.pass_(1.0)
    pacer.on_request(step)  # a third
    assert seen(pacer).without == (1.0,)
    assert seen(pacer).coding == pytest.approx((1.5, 1.5, 1.5))


def test_a_turn_that_is_felt_makes_the_next_one_slower_unless_it_failed(clock: Clock) -> None:
    for is_made in (True, False):
        pacer = ParityPacer()
        step = steps(pacer, clock, 0, LEAST + 1, 1.0)
        assert pacer.rate_bytes_s is None
        pacer.on_begin(80 * 10**9)
        steps(pacer, clock, step, LEAST, 1.25)
        pacer.on_end(is_made=is_made)
        expected = int(80e9 / (LEAST * 1.25) / 2) if is_made else None
        assert pacer.rate_bytes_s == expected
        pacer.on_end(is_made=True)  # it had ended
        assert pacer.rate_bytes_s == expected


def test_where_no_step_is_without_parity_the_next_turn_waits_for_some_and_no_longer(
    clock: Clock,
) -> None:
    pacer, step = ParityPacer(), 0
    for _ in range(LEAST + 1):
        assert pacer.may_begin()
        pacer.on_begin(10**9)
        step = steps(pacer, clock, step, 1, 2.0)
        pacer.on_end(is_made=True)
    assert not pacer.may_begin()
    step = steps(pacer, clock, step, LEAST, 1.0)
    assert pacer.may_begin()  # it has seen enough
    for _ in range(300):
        pacer.on_begin(10**9)
        step = steps(pacer, clock, step, 1, 2.0)
        pacer.on_end(is_made=True)
        if not pacer.may_begin():
            break
    else:
        pytest.fail("what it knew of steps without parity was never too old")
    clock.pass_(2.0 * (LEAST + 1) + 0.1)  # nobody asks any more
    assert pacer.may_begin()


def test_whoever_coordinates_hears_of_each_step_that_a_rank_asks_for() -> None:
    heard: list[tuple[int, int]] = []
    protecting = SimpleNamespace(on_step=lambda rank, step: heard.append((rank, step)))
    asked: Any = TrainerApi.__new__(TrainerApi)
    asked.ranks = SimpleNamespace(require=lambda rank: rank)
    asked.coordinator = SimpleNamespace(world=4, request_captures=lambda *_: [])
    asked.executor = SimpleNamespace(
        carry_out=lambda _: None, followers=SimpleNamespace(parity_scheduler=protecting)
    )
    for rank, step in ((0, 7), (3, 7), (0, 1 << 70)):  # the last means nothing
        ask = m.RequestCapture(step=step, table="", values_bytes=0, durable=False)
        asked.coordinator.decline = lambda *_: []
        asyncio.run(asked._request_capture(rank, ask, 0))
    assert heard == [(0, 7), (3, 7)]
