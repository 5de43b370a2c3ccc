"""A cache takes what is to be durable first: it pays no order, and frees the memory."""

from __future__ import annotations

import pytest

from holdfast.coordinator.actions import SendMessage, StartPersist
from holdfast.coordinator.attempts import Attempt, Attempts
from holdfast.coordinator.durability import BACKLOG, DurabilityQueue
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


@pytest.mark.promise
def test_what_the_cache_lost_is_told_no_failure_while_memory_makes_it_durable() -> None:
    keeper = Keeper(1)
    lost = keeper.capture(0, durable=True)
    keeper.c.lifecycle.cached(lost)
    actions = keeper.c.lifecycle.drained((1, 0), lost, "its bytes changed", is_lost=True)
    assert started(actions) == [lost] and not told(actions, m.NotDurable)
    (failed,) = told(keeper.c.lifecycle.persist_failed(lost, "full"), m.NotDurable)
    assert (failed.step, failed.reason) == (0, "full")


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
    keeper.c.durability.found_cached([((1, 7), "a")])
    keeper.c.durability.add(m.StandingOrder(7, 7))
    keeper.capture(8)
    assert not keeper.c.durability.is_requested
    assert SendMessage(m.Durable(step=7, attempt="a")) in keeper.c.lifecycle.drained(
        (1, 7), "a", "", is_lost=False
    )


@pytest.mark.promise
def test_what_passed_through_rings_to_the_cache_is_not_durable_once_the_cache_lost_it() -> None:
    attempts = Attempts()
    queue = DurabilityQueue(attempts)
    queue.begin(1)
    snapshot = whole_attempt(attempts, "old", 4)
    ring = Attempt("ring", 1, 5, 1, "L", durable=True, phase="draining", is_ring=True)
    queue.cached(ring)
    queue.ended("ring")
    assert queue.not_durable() == ""  # it waits for its drain
    queue.cache_lost((1, 5), "ring", "its bytes changed")
    snapshot.persisting = False
    assert not durable(queue.make_durable(5))
    snapshot.durable = False
    assert queue.not_durable() == "old"


@pytest.mark.promise
@pytest.mark.parametrize("how", ["lost", "another cache"])
def test_what_a_cache_lost_of_an_earlier_start_is_made_durable_from_memory(how: str) -> None:
    attempts = Attempts()
    queue = DurabilityQueue(attempts)
    queue.begin(1)
    snapshot = whole_attempt(attempts, "a", 5)
    snapshot.durable = True
    queue.cached(snapshot)
    assert queue.not_durable() == ""
    queue.begin(2)
    queue.cache_lost((1, 5), "a", "gone") if how == "lost" else queue.forget_cached()
    assert queue.not_durable() == "a"


def whole_attempt(attempts: Attempts, id_: str, step: int) -> Attempt:
    attempt = Attempt(id_, 1, step, 1, "L", slots={0: 0}, phase="complete")
    attempts[id_] = attempt
    attempts.captured(id_)
    return attempt


@pytest.mark.promise
def test_a_step_is_told_durable_that_was_drained_and_left_memory() -> None:
    keeper = Keeper(1)
    drained = keeper.capture(0, durable=True)
    keeper.c.lifecycle.cached(drained)
    for step in range(1, 9):
        keeper.capture(step)
    keeper.c.lifecycle.drained((1, 0), drained, "", is_lost=False)
    assert durable(keeper.c.durability.make_durable(0)) == [0]


def test_after_an_outage_due_saves_wait_for_no_older_steps() -> None:
    queue = DurabilityQueue(Attempts())
    queue.begin(2)
    queue.found_cached(((1, step), f"old{step}") for step in range(50))
    assert not queue.is_storage_busy
    queue.found_cached(((2, step), f"a{step}") for step in range(50))
    assert queue.is_storage_busy
    queue.drained((2, 49), "a49")
    assert not queue.is_storage_busy


@pytest.mark.promise
def test_a_save_that_must_be_durable_itself_is_known_as_such_until_it_is() -> None:
    keeper = Keeper(1)
    exact = keeper.capture(3, durable=True, exact=True)
    keeper.c.lifecycle.cached(exact)
    queue = keeper.c.durability
    assert queue.exact == {(1, 3)}
    keeper.c.lifecycle.drained((1, 3), exact, "", is_lost=False)
    assert queue.exact == set()
    queue.found_cached([((1, 5), "a"), ((0, 9), "b")])  # an earlier keeper's, of this start
    assert queue.exact == {(1, 5)}
    queue.make_durable(5)
    queue.forget_cached()
    assert queue.exact == set()


@pytest.mark.promise
def test_a_cache_that_is_opened_before_its_start_is_known_tells_what_must_be_durable_itself() -> (
    None
):
    queue = DurabilityQueue(Attempts())
    queue.found_cached([((2, 5), "a"), ((1, 9), "b")])  # by a keeper that takes over
    queue.begin(2)
    assert queue.exact == {(2, 5)}
    queue.begin(3)
    assert queue.exact == {(2, 5)}  # it was promised


@pytest.mark.promise
def test_what_is_superseded_is_not_told_durable_and_is_waited_for_no_more() -> None:
    keeper = Keeper(1)
    old = keeper.capture(0, durable=True)
    keeper.c.lifecycle.cached(old)
    actions = keeper.c.lifecycle.drained((1, 0), old, "", is_lost=False, is_superseded=True)
    assert not durable(actions)
    assert keeper.c.durability.draining == {}
    assert keeper.c.durability.newest_durable == (0, -1)
