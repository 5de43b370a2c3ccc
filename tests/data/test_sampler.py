"""The sampler with torch's loaders: what was trained on is what counts, not what was fetched."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data.planning.order import Order

TORCHDATA_IS_OLDER_THAN_TORCH = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated:UserWarning"
)


class Squares(Dataset[int]):
    """Sample i is i * i, so that a batch shows which samples it is made of."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index * index


class Endless(IterableDataset[int]):
    """Data that nobody can count."""

    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


def _epochs(samples: int, seed: int, epochs: int) -> list[int]:
    """What is to be trained on, from the beginning."""
    order = Order(samples, seed, shuffle=True)
    return list(chain(*(order.at(epoch, 0, samples) for epoch in range(epochs))))


def _indices(batch: torch.Tensor) -> list[int]:
    return [int(value) for value in batch.sqrt().round()] if len(batch) else []


def _samplers(world: int, samples: int, **options: Any) -> list[holdfast.ResumableSampler]:
    return [
        holdfast.ResumableSampler(samples, rank=rank, world=world, **options)
        for rank in range(world)
    ]


def _restored(
    samplers: list[holdfast.ResumableSampler], state: dict[str, Any] | None
) -> list[holdfast.ResumableSampler]:
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    return samplers


@settings(max_examples=60)
@given(
    samples=st.integers(6, 40),
    seed=st.integers(0, 3),
    lives=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9), st.integers(0, 3)),
        min_size=1,
        max_size=6,
    ),
)
def test_no_sample_is_missed_or_seen_twice_over_any_kills_and_numbers_of_ranks(
    samples: int, seed: int, lives: list[tuple[int, int, int, int]]
) -> None:
    """Each life begins with the state of the last; loaders had fetched more than was trained on."""
    trained: list[int] = []
    state: dict[str, Any] | None = None
    for world, batch_size, count, ahead in lives:
        ranks = _samplers(world, samples, batch_size=batch_size, seed=seed)
        iterations = [iter(sampler) for sampler in _restored(ranks, state)]
        for _ in range(count):
            try:
                for rank in ranks:
                    trained += next(iterations[ranks.index(rank)])
            except StopIteration:
                iterations = [iter(sampler) for sampler in ranks]
                continue
            for rank in ranks:
                rank.advance()
        for _ in range(ahead):
            for iteration in iterations:
                next(iteration, None)
        states = [sampler.state_dict() for sampler in ranks]
        assert states == states[:1] * world
        state = states[0]
    assert trained == _epochs(samples, seed, 1 + len(trained) // samples)[: len(trained)]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_have_fetched_is_not_counted(workers: int) -> None:
    def loader(sampler: holdfast.ResumableSampler) -> Iterator[torch.Tensor]:
        return iter(DataLoader(Squares(40), batch_sampler=sampler, num_workers=workers))

    sampler = holdfast.ResumableSampler(40, batch_size=4)
    order, batches, seen = Order(40, 0, shuffle=True).at(0, 0, 40), loader(sampler), []
    for _ in range(3):
        seen += _indices(next(batches))
        sampler.advance()
    assert sampler.state_dict() == {
        "seed": 0,
        "epoch": 0,
        "consumed": 12,
        "samples": 40,
        "shuffle": True,
    }
    again = holdfast.ResumableSampler(40, batch_size=5, seed=9)
    again.load_state_dict(sampler.state_dict())
    assert len(again) == 6
    for batch in loader(again):
        seen += _indices(batch)
        again.advance()
    assert seen == order
    assert (again.seed, again.epoch, again.consumed) == (0, 1, 0)


def test_each_epoch_is_another_order_without_a_word_from_the_loop() -> None:
    sampler = holdfast.ResumableSampler(Squares(10), batch_size=3, seed=4)
    loader = DataLoader(Squares(10), batch_sampler=sampler)
    epochs: list[list[int]] = []
    while sampler.epoch < 3:
        assert len(loader) == 4
        epochs.append([])
        for batch in loader:
            epochs[-1] += _indices(batch)
            sampler.advance()
    assert epochs == [Order(10, 4, shuffle=True).at(epoch, 0, 10) for epoch in range(3)]


def test_what_was_given_out_and_not_trained_on_comes_again() -> None:
    sampler = holdfast.ResumableSampler(20, batch_size=2, shuffle=False)
    batches = iter(sampler)
    first, second = next(batches), next(batches)
    sampler.advance()
    assert (first, second, next(iter(sampler))) == ([0, 1], [2, 3], [2, 3])


def test_batches_that_went_into_one_step_are_counted_together() -> None:
    sampler = holdfast.ResumableSampler(20, batch_size=2, shuffle=False)
    batches = iter(sampler)
    for _ in range(3):
        next(batches)
    sampler.advance(3)
    assert sampler.consumed == 6


def test_one_batch_size_over_all_ranks_gives_the_same_steps_on_any_number_of_them() -> None:
    def steps(world: int) -> list[list[int]]:
        ranks = [iter(one) for one in _samplers(world, 64, global_batch_size=16, seed=1)]
        return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]

    assert steps(1) == steps(3) == steps(16)
    assert [len(step) for step in steps(3)] == [16] * 4


# ── torchdata's loader ───────────────────────────────────────────────────────────────────────


@TORCHDATA_IS_OLDER_THAN_TORCH
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("trained", [3, 10])
def test_a_stateful_loader_alone_has_the_place_of_what_it_gave_out(
    workers: int, trained: int
) -> None:
    def loader(sampler: holdfast.ResumableSampler) -> StatefulDataLoader[torch.Tensor]:
        return StatefulDataLoader(Squares(40), batch_sampler=sampler, num_workers=workers)

    sampler = holdfast.ResumableSampler(40, batch_size=4, seed=2)
    first, seen = loader(sampler), []
    batches = iter(first)
    for _ in range(trained):
        seen += _indices(next(batches))
        sampler.advance()
    state = first.state_dict()

    again = holdfast.ResumableSampler(40, batch_size=4)
    second = loader(again)
    second.load_state_dict(state)
    if trained == 10:
        assert not list(second)  # all of the epoch that it was in was trained on
    while again.epoch < 2:
        for batch in second:
            seen += _indices(batch)
            again.advance()
    assert seen == _epochs(40, 2, 2)


@TORCHDATA_IS_OLDER_THAN_TORCH
def test_a_stateful_loader_goes_on_on_another_number_of_ranks() -> None:
    ranks = _samplers(2, 41, batch_size=4, seed=2)
    loaders = [StatefulDataLoader(Squares(41), batch_sampler=one, num_workers=1) for one in ranks]
    seen: list[int] = []
    batches = [iter(loader) for loader in loaders]
    for _ in range(3):
        for rank, sampler in enumerate(ranks):
            seen += _indices(next(batches[rank]))
            sampler.advance()
    state = loaders[0].state_dict()

    ranks = _samplers(3, 41, batch_size=4)
    loaders = [StatefulDataLoader(Squares(41), batch_sampler=one, num_workers=1) for one in ranks]
    for loader in loaders:
        loader.load_state_dict(state)
    for parts in zip(*loaders, strict=True):
        for part, sampler in zip(parts, ranks, strict=True):
            seen += _indices(part)
            sampler.advance()
    assert seen == Order(41, 2, shuffle=True).at(0, 0, 41)
    assert [sampler.epoch for sampler in ranks] == [1, 1, 1]


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((10,), {}, "give one of the two"),
        ((10, 2), {"global_batch_size": 4}, "give one of the two"),
        ((0, 2), {}, "data=0"),
        ((10, 0), {}, "batch_size=0"),
        ((10, True), {}, "batch_size=True"),
        ((10, 2.0), {}, "batch_size=2.0"),
        ((10,), {"global_batch_size": -1}, "global_batch_size=-1"),
        ((10, 2), {"seed": 0.5}, "seed=0.5"),
        ((10, 2), {"shuffle": 1}, "shuffle=1: True or False"),
        ((10, 2), {"drop_last": None}, "drop_last=None"),
        ((10, 2), {"epoch": -1}, "epoch=-1"),
        ((10, 2), {"rank": 0}, "give both"),
        ((10, 2), {"rank": 2, "world": 2}, "begin with 0"),
        ((10.0, 2), {}, "has a length"),
        ((Endless(), 2), {}, "has a length"),
        (("", 2), {}, "data=0"),
    ],
)
def test_what_means_nothing_is_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(holdfast.UsageError, match=said):
        holdfast.ResumableSampler(*arguments, **options)


def test_numbers_of_numpy_are_numbers() -> None:
    sampler = holdfast.ResumableSampler(np.int64(6), batch_size=np.int32(3), shuffle=False)
    assert list(sampler) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 2, "world": 11}, "fewer than the 11 there are ranks"),
        ({"batch_size": 4, "world": 3, "drop_last": True}, "fewer than the 12 a step has"),
        ({"global_batch_size": 2, "world": 3}, "less than one sample for each of 3 ranks"),
    ],
)
def test_too_little_for_the_ranks_there_are_is_said(options: dict[str, Any], said: str) -> None:
    sampler = holdfast.ResumableSampler(10, rank=0, **options)
    for use in (iter, len):
        with pytest.raises(holdfast.UsageError, match=said):
            use(sampler)


def test_one_of_several_processes_without_a_group_is_not_taken_for_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(holdfast.UsageError, match="same samples"):
        iter(holdfast.ResumableSampler(10, batch_size=2))
    iter(holdfast.ResumableSampler(10, batch_size=2, rank=1, world=2))


def test_more_is_not_trained_on_than_was_given_out() -> None:
    sampler = holdfast.ResumableSampler(10, batch_size=2)
    with pytest.raises(holdfast.UsageError, match="fewer batches were given out"):
        sampler.advance()
    batches = iter(sampler)
    next(batches)
    with pytest.raises(holdfast.UsageError, match=r"advance\(2\)"):
        sampler.advance(2)
    with pytest.raises(holdfast.UsageError, match="batches=0"):
        sampler.advance(0)
    sampler.advance()
    assert sampler.consumed == 2


def test_a_loop_that_never_says_what_it_trained_on_is_warned() -> None:
    heard: list[holdfast.Event] = []
    stop = holdfast.subscribe(lambda event, _: heard.append(event))
    try:
        sampler = holdfast.ResumableSampler(10, batch_size=2)
        next(iter(sampler))  # a look at the first batch is no mistake
        for _ in sampler:
            sampler.advance()
        assert len(list(sampler)) == 5
        assert not heard
        assert len(list(sampler)) == 5
    finally:
        stop()
    assert "advance() was not called" in getattr(heard[0], "message", "")


def test_an_iteration_from_before_the_restore_gives_nothing_more() -> None:
    sampler = holdfast.ResumableSampler(10, batch_size=2)
    batches = iter(sampler)
    next(batches)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(holdfast.UsageError, match="anew after restore"):
        next(batches)


GOOD = {"seed": 0, "epoch": 2, "consumed": 4, "samples": 10, "shuffle": True}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"samples": 11},
            "samples was 11 .* leave this key out of the state and begin with epoch=3",
        ),
        ({"shuffle": False}, "shuffle was False"),
        ({"consumed": 11}, "11 of 10 samples"),
        ({"consumed": -1}, "whole numbers"),
        ({"seed": "x"}, "whole numbers"),
        ({"epoch": True}, "whole numbers"),
        (None, "has seed, epoch, consumed"),
    ],
)
def test_a_place_in_other_data_is_refused_and_changes_nothing(
    change: dict[str, Any] | None, said: str
) -> None:
    sampler = holdfast.ResumableSampler(10, batch_size=2)
    state: Any = None if change is None else GOOD | change
    with pytest.raises(holdfast.UsageError, match=said):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == GOOD | {"epoch": 0, "consumed": 0}


def test_between_two_epochs_the_data_may_grow() -> None:
    sampler = holdfast.ResumableSampler(12, batch_size=2)
    sampler.load_state_dict(GOOD | {"consumed": 0})
    assert sorted(chain(*sampler)) == list(range(12))
    assert sampler.epoch == 2


def test_a_restore_into_other_data_fails_before_anything_is_changed(tmp_path: Any) -> None:
    sampler = holdfast.ResumableSampler(10, batch_size=2)
    next(iter(sampler))
    sampler.advance()
    holdfast.save(tmp_path, {"data": sampler, "tokens": 7})
    other = holdfast.ResumableSampler(11, batch_size=2)
    state = {"data": other, "tokens": 0}
    with pytest.raises(holdfast.StateMismatch, match="data: samples was 10"):
        holdfast.load(tmp_path, state)
    assert (state["tokens"], other.consumed) == (0, 0)
