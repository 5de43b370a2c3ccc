from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.policy import Every, Keep


class Saved(NamedTuple):
    """Anything with a step will do."""

    incarnation: int
    step: int


lineages = st.sets(st.integers(0, 60)).map(lambda steps: [Saved(1, step) for step in sorted(steps)])
optional = st.none() | st.integers(1, 12)
keeps = st.builds(Keep, last=optional, every=optional)


def at(*steps: int) -> tuple[Saved, ...]:
    return tuple(Saved(1, step) for step in steps)


def test_the_newest_three_are_kept() -> None:
    assert Keep(last=3).decide(at(19, 39, 59, 79, 99)) == at(19, 39)


def test_round_steps_are_kept_beside_the_newest() -> None:
    assert Keep(last=1, every=100).decide(at(0, 50, 100, 150, 200, 250)) == at(50, 150)


def test_round_steps_alone_still_keep_the_newest() -> None:
    assert Keep(every=100).decide(at(50, 100, 150)) == at(50)


def test_the_steps_that_the_storage_policy_acts_at_are_the_round_ones() -> None:
    policy, steps = Every(steps=500), range(4000)
    saved = at(*(step for step in steps if policy.is_due_by_steps(step, None)))
    left = set(saved) - set(Keep(last=1, every=1000).decide(saved))
    assert left == set(at(999, 1999, 2999, 3999))


def test_nothing_said_keeps_everything() -> None:
    assert Keep().decide(at(1, 2, 3)) == ()


@pytest.mark.promise
def test_a_pinned_one_stays_however_old_it_is() -> None:
    assert Keep(last=1).decide(at(1, 2, 3, 4), pinned=at(2)) == at(1, 3)


def test_a_pinned_one_counts_among_the_last() -> None:
    assert Keep(last=2).decide(at(1, 2, 3), pinned=at(3)) == at(1)


def test_the_same_step_of_another_incarnation_is_another() -> None:
    fell_back = (Saved(1, 10), Saved(2, 10), Saved(2, 20))
    assert Keep(last=1).decide(fell_back, pinned={Saved(1, 10)}) == (Saved(2, 10),)


@given(keep=keeps, saved=lineages, data=st.data())
def test_the_newest_and_the_pinned_are_never_removed(
    keep: Keep, saved: list[Saved], data: st.DataObject
) -> None:
    pinned = data.draw(st.sets(st.sampled_from(saved))) if saved else set()
    removed = keep.decide(saved, pinned)
    assert not pinned & set(removed)
    assert not set(removed) & set(saved[-1:])


@given(keep=keeps, saved=lineages)
def test_what_goes_is_older_than_the_last_and_not_round(keep: Keep, saved: list[Saved]) -> None:
    removed = keep.decide(saved)
    if keep.last is None and keep.every is None:
        assert removed == ()
        return
    for index, one in enumerate(saved):
        is_last = index >= len(saved) - (keep.last or 1)
        is_round = keep.every is not None and one.step % keep.every in (0, keep.every - 1)
        assert (one in removed) == (not is_last and not is_round)


@given(keep=keeps, saved=lineages)
def test_deciding_again_removes_nothing_more(keep: Keep, saved: list[Saved]) -> None:
    removed = keep.decide(saved)
    assert keep.decide([one for one in saved if one not in removed]) == ()


@given(keep=keeps, saved=lineages)
def test_pruning_after_each_save_keeps_what_pruning_once_keeps(
    keep: Keep, saved: list[Saved]
) -> None:
    kept: list[Saved] = []
    for one in saved:
        kept.append(one)
        removed = keep.decide(kept)
        kept = [other for other in kept if other not in removed]
    removed = keep.decide(saved)
    assert kept == [one for one in saved if one not in removed]


@pytest.mark.parametrize(
    "options", [{"last": 0}, {"last": -1}, {"every": 0}, {"last": 1.5}, {"every": True}]
)
def test_a_number_that_is_not_a_count_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Keep"):
        Keep(**options)


def best(count: int = 1, *, largest: bool = False, **others: Any) -> Keep:
    return Keep(best=count, by="val_loss", largest=largest, **others)


def test_the_best_stay_beside_the_newest_and_the_round_ones() -> None:
    losses = dict(zip(at(1, 2, 3, 4, 5), (3.0, 1.0, 2.0, 4.0, 5.0), strict=True))
    assert best(2).decide(at(1, 2, 3, 4, 5), values=losses) == at(1, 4)
    assert best(2, largest=True).decide(at(1, 2, 3, 4, 5), values=losses) == at(1, 2, 3)
    assert best(last=2).decide(at(1, 2, 3, 4, 5), values=losses) == at(1, 3)
    assert best(every=4).decide(at(1, 2, 3, 4, 5), values=losses) == at(1)


@pytest.mark.parametrize("largest", [False, True])
def test_of_equal_ones_the_newest_is_best(largest: bool) -> None:
    losses = dict.fromkeys(at(1, 2, 3, 4), 1.0)
    assert best(2, largest=largest).decide(at(1, 2, 3, 4, 5), values=losses) == at(1, 2)


@pytest.mark.promise
@pytest.mark.parametrize("largest", [False, True])
def test_an_absent_value_and_nan_are_never_best(largest: bool) -> None:
    losses = {Saved(1, 1): math.nan, Saved(1, 3): 7.0, Saved(1, 4): math.nan}
    assert best(3, largest=largest).decide(at(1, 2, 3, 4, 5), values=losses) == at(1, 2, 4)
    infinite = {Saved(1, 1): math.inf, Saved(1, 2): -math.inf}
    goes = at(2) if largest else at(1)
    assert best(1, largest=largest).decide(at(1, 2, 3), values=infinite) == goes


@pytest.mark.promise
def test_a_value_that_no_checkpoint_has_removes_nothing() -> None:
    assert best(last=1).decide(at(1, 2, 3)) == ()
    assert best(last=1).decide(at(1, 2, 3), values={Saved(1, 2): math.nan}) == ()


@given(lineages, st.data())
def test_pruning_after_each_save_keeps_the_best_of_all(
    saved: list[Saved], data: st.DataObject
) -> None:
    keep = best(data.draw(st.integers(1, 5)), last=1, largest=data.draw(st.booleans()))
    losses = {one: data.draw(st.floats(allow_nan=False)) for one in saved}
    kept: list[Saved] = []
    for one in saved:
        kept.append(one)
        removed = keep.decide(kept, values=losses)
        kept = [other for other in kept if other not in removed]
    removed = keep.decide(saved, values=losses)
    assert kept == [one for one in saved if one not in removed]


@pytest.mark.parametrize(
    "options",
    [
        {"best": 3},
        {"by": "loss"},
        {"largest": True},
        {"best": 0, "by": "loss"},
        {"best": True, "by": "loss"},
        {"best": 1, "by": 3},
        {"best": 1, "by": "x" * 5000},
        {"best": 1, "by": "loss", "largest": 1},
    ],
)
def test_best_without_a_name_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Keep"):
        Keep(**options)
