"""Parity gives way to training, and never so far that what is protected grows old."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.parity.planning.budget import LEAST, MOST, MOST_STEPS, STALE, TOO_SLOW, StepPacing
from holdfast.policy.arguments import LEAST_PARITY_RATE

GB = 10**9


@dataclass(frozen=True)
class Run:
    """Steps are slower in proportion to what parity takes; at ``felt`` by just ``TOO_SLOW``."""

    felt: float
    network: float
    moved: int
    step_s: float

    def speed(self, rate: int | None) -> float:
        return self.network if rate is None else min(self.network, rate)

    def turn(self, pacing: StepPacing) -> StepPacing:
        """A generation is coded, during some steps, and some pass without."""
        speed = self.speed(pacing.rate_bytes_s)
        for _ in range(LEAST):
            pacing = pacing.stepped(self.step_s * (1 + TOO_SLOW * speed / self.felt), 1.0)
        pacing = pacing.made(self.moved, self.moved / speed)
        for _ in range(LEAST):
            pacing = pacing.stepped(self.step_s, 0.0)
        return pacing

    @property
    def floor(self) -> float:
        return max(LEAST_PARITY_RATE, self.moved / (MOST_STEPS * self.step_s))


RUNS = st.builds(
    Run,
    felt=st.floats(1e6, 30 * GB),
    network=st.floats(1e8, 10 * GB),
    moved=st.integers(1, 200 * GB),
    step_s=st.floats(0.01, 60),
)


@settings(max_examples=100)
@given(RUNS)
def test_the_rate_comes_near_what_training_does_not_feel_and_stays_there(run: Run) -> None:
    pacing, rates = StepPacing(), list[int | None]()
    for _ in range(120):
        pacing = run.turn(pacing)
        rates.append(pacing.rate_bytes_s)
    later = [run.speed(rate) for rate in rates[60:]]
    if run.felt > run.network:
        assert set(later) == {run.network} and rates[-1] is None
        return
    floor = min(run.floor, run.network)
    assert max(later) <= max(1.25 * run.felt, floor) * 1.001
    assert min(later) >= min(max(0.49 * run.felt, floor), run.network) * 0.999


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.floats(1e-3, 100), st.sampled_from([0.0, 0.1, 0.5, 1.0])), max_size=200),
    st.integers(1, 10**12),
    st.floats(1e-6, 1e4),
)
def test_whatever_steps_take_a_generation_is_done_in_time_and_memory_is_bounded(
    steps: list[tuple[float, float]], moved: int, took_s: float
) -> None:
    pacing = StepPacing()
    for number, (step_s, coded) in enumerate(steps):
        pacing = pacing.stepped(step_s, coded)
        if number % 10 == 9:
            before, pacing = pacing, pacing.made(moved, took_s)
            rate = pacing.rate_bytes_s
            if rate is not None and rate != before.rate_bytes_s:
                assert rate >= LEAST_PARITY_RATE
                assert moved / rate <= MOST_STEPS * median(pacing.without) * 1.001 + 1
        assert max(len(pacing.without), len(pacing.coding)) <= MOST


def test_what_is_only_chance_is_not_felt() -> None:
    draw = random.Random(7)
    felt = unbound = 0
    pacing = StepPacing()
    for _ in range(400):
        for coded in (0.0, 1.0):
            for _ in range(LEAST):
                pacing = pacing.stepped(draw.gauss(1.0, 0.05), coded)
        felt += pacing.is_felt
        pacing = pacing.made(10 * GB, 10.0)
        unbound += pacing.rate_bytes_s is None
    assert felt < 40 and unbound > 200


def test_a_few_steps_are_no_measure_and_one_that_was_partly_coded_is_neither() -> None:
    pacing = StepPacing()
    for _ in range(LEAST - 1):
        pacing = pacing.stepped(1.0, 0.0).stepped(9.0, 1.0).stepped(5.0, 0.1)
    assert not pacing.is_felt and pacing.made(GB, 1.0) == pacing
    assert 5.0 not in pacing.without + pacing.coding
    assert pacing.stepped(1.0, 0.0).stepped(9.0, 1.0).is_felt


def test_where_parity_never_rests_it_is_to_rest_once_in_a_while() -> None:
    pacing = StepPacing()
    for _ in range(LEAST):
        assert not pacing.needs_rest
        pacing = pacing.stepped(2.0, 1.0)
    assert pacing.needs_rest
    for _ in range(LEAST):
        assert pacing.needs_rest
        pacing = pacing.stepped(1.0, 0.0)
    for _ in range(STALE):
        assert not pacing.needs_rest
        pacing = pacing.stepped(2.0, 1.0)
    assert pacing.stepped(2.0, 1.0).needs_rest
