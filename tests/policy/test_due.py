"""When a save is due on every rank alike, though only rank 0's clock counts."""

from __future__ import annotations

from holdfast.policy.when import DueTimer, Every, Pace, step_ahead


def due_steps(due: DueTimer, steps: range, seconds: float, *, is_alone: bool = True) -> list[int]:
    """The steps that are due, of steps that take ``seconds`` each."""
    return [
        step
        for step in steps
        if due.is_due(step, None, step * seconds, was_announced=False, is_alone=is_alone)
    ]


def test_without_a_policy_nothing_is_ever_due() -> None:
    due = DueTimer("memory", None, 0.0)
    assert not due.is_timed
    assert due_steps(due, range(100), 60.0) == []


def test_alone_the_clock_is_obeyed_at_once_and_starts_anew() -> None:
    assert due_steps(DueTimer("storage", Every(minutes=1), 0.0), range(10), 30.0) == [2, 4, 6, 8]


def test_steps_and_minutes_count_together() -> None:
    due = DueTimer("storage", Every(steps=5, minutes=1), 0.0)
    assert due_steps(due, range(10), 30.0) == [2, 4, 6, 8, 9]


def test_among_several_ranks_the_clock_is_obeyed_only_by_announcement() -> None:
    due = DueTimer("storage", Every(minutes=1), 0.0)
    assert due_steps(due, range(100), 60.0, is_alone=False) == []
    assert due.is_due(100, None, 6000.0, was_announced=True, is_alone=False)
    assert due.to_announce(101, 6059.0, Pace()) is None  # the minute begins anew


def test_a_save_is_announced_half_a_second_ahead_and_at_least_two_steps() -> None:
    for step_s, ahead in ((10.0, 2), (0.125, 5), (0.0, 501)):
        due, pace = DueTimer("storage", Every(minutes=1), 0.0), Pace()
        for step in range(7):
            pace.learn(step, step * step_s)
        assert due.to_announce(7, 59.0, pace) is None
        assert due.to_announce(7, 60.0, pace) == 7 + ahead
        assert due.to_announce(8, 61.0, pace) is None  # until that step has passed
        assert due.to_announce(8 + ahead, 61.0, pace) == 8 + 2 * ahead


def test_where_not_every_step_is_told_of_so_many_of_those_that_are_lie_between() -> None:
    pace = Pace()
    assert pace.ahead(7) == 9
    for step in range(0, 70, 10):
        pace.learn(step, step / 100)
    assert pace.ahead(70) == 70 + 10 * 6
    pace.learn(60, 0.7)  # once more
    assert pace.ahead(70) == 70 + 10 * 6


def test_the_last_step_is_the_next_one_where_ranks_can_still_hear_of_it() -> None:
    assert step_ahead(7, since_s=3.0, pace_s=10.0) == 8
    assert step_ahead(7, since_s=9.8, pace_s=10.0) == 9
    assert step_ahead(7, since_s=0.05, pace_s=0.1) == 13
    assert step_ahead(7, since_s=0.0, pace_s=0.0) == 507
    # A step that takes longer than steps do, an evaluation say, ends at any moment.
    assert step_ahead(7, since_s=600.0, pace_s=1.0) == 9


def test_the_pace_is_that_of_the_last_steps() -> None:
    pace = Pace()
    assert pace.step_s == 1.0
    for step, now_s in enumerate((0.0, 100.0, 200.0)):
        pace.learn(step, now_s)
    assert pace.step_s == 100.0
    for step in range(20):
        pace.learn(3 + step, 300.0 + step * 0.5)
    assert pace.step_s == 0.5
