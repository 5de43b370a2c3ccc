"""The order of an epoch is a shuffling that anyone can compute anywhere, and it stays as it is."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.planning.order import Order

SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 2**40)


@given(samples=st.integers(1, 3000), seed=SEEDS, epoch=EPOCHS)
def test_every_sample_stands_in_the_order_once(samples: int, seed: int, epoch: int) -> None:
    assert sorted(Order(samples, seed, shuffle=True).at(epoch, 0, samples)) == list(range(samples))


@given(data=st.data(), samples=st.integers(1, 2**62), seed=SEEDS, epoch=EPOCHS)
def test_any_stretch_can_be_computed_by_itself(
    data: st.DataObject, samples: int, seed: int, epoch: int
) -> None:
    order = Order(samples, seed, shuffle=True)
    start = data.draw(st.integers(0, samples - 1))
    stop = min(samples, start + data.draw(st.integers(0, 40)))
    whole = order.at(epoch, start, stop)
    assert all(0 <= sample < samples for sample in whole)
    assert len(set(whole)) == stop - start
    assert whole == [order.at(epoch, place, place + 1)[0] for place in range(start, stop)]


def test_seed_epoch_and_number_of_samples_each_give_another_order() -> None:
    orders = [
        Order(samples, seed, shuffle=True).at(epoch, 0, 90)
        for samples in (90, 91)
        for seed in (0, 1, 2**64, -1)
        for epoch in (0, 1, 10)
    ]
    assert len(set(map(tuple, orders))) == len(orders)
    assert all(sum(a == b for a, b in zip(one, range(90), strict=True)) < 12 for one in orders)


@pytest.mark.parametrize("samples", [4, 7])
def test_no_sample_prefers_a_place(samples: int) -> None:
    epochs = 3000
    found = Counter(
        (place, sample)
        for epoch in range(epochs)
        for place, sample in enumerate(Order(samples, 5, shuffle=True).at(epoch, 0, samples))
    )
    expected = epochs / samples
    assert len(found) == samples**2
    assert max(abs(count - expected) for count in found.values()) < 5 * expected**0.5


def test_unshuffled_samples_come_as_they_lie() -> None:
    assert Order(100, 3, shuffle=False).at(7, 20, 25) == [20, 21, 22, 23, 24]


def test_the_order_is_the_one_that_running_trainings_have() -> None:
    """A change here gives samples twice to every run that is resumed in the middle of an epoch."""
    assert Order(10, 0, shuffle=True).at(0, 0, 10) == [6, 0, 7, 4, 9, 1, 8, 5, 2, 3]
    assert Order(1000, 0, shuffle=True).at(0, 0, 8) == [817, 999, 132, 240, 273, 274, 769, 334]
    assert Order(7, -5, shuffle=True).at(1, 0, 7) == [6, 0, 1, 5, 3, 2, 4]
    large = Order(10**12, 42, shuffle=True).at(3, 10**11, 10**11 + 3)
    assert large == [548769919227, 806099575957, 673998111004]
