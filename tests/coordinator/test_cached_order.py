"""A cache takes what is to be durable first: it pays no order, and frees the memory."""

from __future__ import annotations

import pytest

from holdfast.coordinator.actions import SendMessage, StartPersist
from holdfast.coordinator.durability import BACKLOG
from holdfast.protocol import messages as m
from support.coordinator.coordinators import Actions, Keeper, of, told


def started(actions: Actions) -> list[str]:
    return [action.attempt for action in of(actions, StartPersist)]


def durable(actions: Actions) -> list[int]:
    return [message.step for message in told(actions, m.Durable)]


@pytest.mark.promise
def test_what_is_cached_is_not_told_durable_and_pays_no_order() -> None:
    keeper = Keeper(1)
    attempt = keeper.capture(5, durable=True)
    actions = keeper.c.lifecycle.cached(attempt)
    assert [message.step for message in told(actions, m.Cached)] == [5]
    assert not durable(actions) and not started(actions)
    assert keeper.c.durability.order == m.StandingOrder(5, 5)
    assert started(keeper.c.durability.make_durable(5)) == []  # it is drained already
    assert started(keeper.c.tick(1e3)) == []
    assert durable(keeper.c.lifecycle.drained((1, 5), attempt, "", is_lost=False)) == [5]
    assert keeper.c.durability.order == m.NO_ORDER


def test_what_is_cached_holds_no_slot() -> None:
    keeper = Keeper(1)
    old = keeper.capture(0, durable=True)
    keeper.c.lifecycle.cached(old)
    for step in range(1, 9):
        keeper.capture(step)
    assert old not in keeper.c.attempts
    assert keeper.c.is_whole(0), "it need not be saved again"
    assert durable(keeper.c.lifecycle.drained((1, 0), old, "", is_lost=False)) == [0]


@pytest.mark.promise
def test_what_the_cache_lost_is_paid_by_the_newest_snapshot() -> None:
    keeper = Keeper(1)
    lost = keeper.capture(0, durable=True)
    keeper.c.lifecycle.cached(lost)
    newest = keeper.capture(3)
    actions = keeper.c.lifecycle.drained((1, 0), lost, "its bytes changed", is_lost=True)
    (failed,) = told(actions, m.NotDurable)
    assert (failed.step, failed.since, failed.reason) == (0, -1, "its bytes changed")
    assert started(actions) == [newest]
    assert durable(keeper.c.lifecycle.persisted(newest)) == [3]


def test_while_storage_takes_nothing_everything_due_is_cached() -> None:
    keeper = Keeper(1)
    keeper.c.durability.is_drain_failing = True
    for step in range(BACKLOG + 3):
        attempt = keeper.capture(step, durable=True)
        actions = keeper.c.lifecycle.drained((1, step - 1), "", "full", is_lost=False)
        assert not durable(actions) and not started(actions)
        keeper.c.lifecycle.cached(attempt)
    assert len(keeper.c.durability.draining) == BACKLOG + 3


def test_due_saves_wait_for_a_long_queue_that_moves_and_the_newest_is_taken() -> None:
    keeper = Keeper(1)
    cached = {step: keeper.capture(step, durable=True) for step in range(1)}
    keeper.c.lifecycle.cached(cached[0])
    for step in range(1, BACKLOG + 1):
        cached[step] = keeper.capture(step, durable=True)
        keeper.c.lifecycle.cached(cached[step])
    waiting = keeper.capture(10, durable=True)
    newest = keeper.capture(11)
    assert not keeper.c.attempts[newest].durable and not keeper.c.attempts[waiting].durable
    actions = keeper.c.lifecycle.drained((1, BACKLOG), cached[BACKLOG], "", is_lost=False)
    assert durable(actions) == [BACKLOG] and started(actions) == [newest]


@pytest.mark.promise
def test_what_an_earlier_keeper_cached_is_not_written_again() -> None:
    keeper = Keeper(1)
    keeper.c.lifecycle.found_cached([((1, 7), "a")])
    keeper.c.durability.add(m.StandingOrder(7, 7))
    keeper.capture(8)
    assert not keeper.c.durability.is_requested
    assert SendMessage(m.Durable(step=7, attempt="a")) in keeper.c.lifecycle.drained(
        (1, 7), "a", "", is_lost=False
    )
