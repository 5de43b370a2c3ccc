"""Whatever becomes of the number of ranks, each sample is taken once, by all in one order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.data.planning.order import SamplePlace, SampleStep, StepPlan, Stretch

#: (ranks, samples per rank, how many steps until the next change).
LIVES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 12)), min_size=1, max_size=8
)


def _run(
    samples: int, drop_last: bool, lives: list[tuple[int, int, int]]
) -> Iterator[tuple[StepPlan, SamplePlace, SampleStep]]:
    """The steps of a run that is resumed on other numbers of ranks."""
    place = SamplePlace(0, 0)
    for world, each, count in lives:
        steps = StepPlan(samples, world * each, world, drop_last)
        if samples < (steps.batch if drop_last else world):
            continue
        for _ in range(count):
            step = steps.next(place)
            yield steps, place, step
            place = step.after


def _places(stretches: list[Stretch]) -> list[tuple[int, int]]:
    return [(epoch, place) for epoch, start, stop in stretches for place in range(start, stop)]


@given(samples=st.integers(1, 60), lives=LIVES)
@example(samples=10, lives=[(1, 1, 9), (4, 2, 3)])  # fewer left than ranks
@example(samples=9, lives=[(4, 2, 4)])  # the rest goes with the step before it
def test_every_sample_of_every_epoch_is_taken_once_and_in_order(
    samples: int, lives: list[tuple[int, int, int]]
) -> None:
    taken: list[tuple[int, int]] = []
    for _, _, step in _run(samples, False, lives):
        taken += _places(list(step.stretches))
    assert taken == [divmod(number, samples) for number in range(len(taken))]


@given(samples=st.integers(1, 60), lives=LIVES)
def test_what_fills_no_step_is_left_out_on_request_and_nothing_else(
    samples: int, lives: list[tuple[int, int, int]]
) -> None:
    expected = SamplePlace(0, 0)
    for steps, _, step in _run(samples, True, lives):
        if samples - expected.consumed < steps.batch:
            expected = SamplePlace(expected.epoch + 1, 0)
        assert step.stretches == (Stretch(*expected, expected.consumed + steps.batch),)
        expected = SamplePlace(expected.epoch, expected.consumed + steps.batch)
        if samples - expected.consumed < steps.batch:  # that epoch stays over on any ranks
            expected = SamplePlace(expected.epoch + 1, 0)
        assert step.after == expected


@given(samples=st.integers(1, 60), drop_last=st.booleans(), lives=LIVES)
def test_every_rank_has_a_share_of_every_step_and_all_shares_make_it(
    samples: int, drop_last: bool, lives: list[tuple[int, int, int]]
) -> None:
    for steps, _, step in _run(samples, drop_last, lives):
        shares = [_places(step.share(rank, steps.world)) for rank in range(steps.world)]
        sizes = [len(share) for share in shares]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= -(-steps.batch // steps.world) + 2
        assert list(chain(*shares)) == _places(list(step.stretches))


@given(samples=st.integers(1, 60), drop_last=st.booleans(), lives=LIVES)
def test_the_steps_that_are_counted_are_the_steps_there_are(
    samples: int, drop_last: bool, lives: list[tuple[int, int, int]]
) -> None:
    for steps, place, step in _run(samples, drop_last, lives):
        counted, there = 0, place
        while (following := steps.next(there)).epoch == step.epoch:
            there, counted = following.after, counted + 1
        assert steps.count(place) == counted


@given(samples=st.integers(1, 60), each=st.integers(1, 24), worlds=st.lists(st.integers(1, 24)))
def test_steps_of_one_size_over_all_ranks_are_the_same_on_any_number_of_them(
    samples: int, each: int, worlds: list[int]
) -> None:
    """Unless less is left at an epoch's end than there are ranks: one would have nothing."""
    rest = samples % each or each
    fitting = [world for world in worlds if world <= rest]
    taken = set()
    for world in fitting:
        steps, place, found = StepPlan(samples, each, world, False), SamplePlace(0, 0), []
        while place.epoch < 2:
            step = steps.next(place)
            found.append(step.stretches)
            place = step.after
        taken.add(tuple(found))
    assert len(taken) <= 1
