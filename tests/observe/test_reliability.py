"""What a run's interruptions cost, and how sure their rate is."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import events
from holdfast.observe.ledger import LifeTimes, RankTimes, account
from holdfast.observe.reliability import Exposure, Interrupted, SavePace, measure, poisson_interval
from holdfast.observe.report_builder import read_report
from support.runs.told import Told, of, tell_save, tell_start

S = 1_000_000


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # Garwood's table, which half the quantiles of chi-squared give.
    [(0, 0.0, 2.9957), (1, 0.0253, 5.5716), (2, 0.2422, 7.2247), (10, 4.7954, 18.3904)],
)
def test_the_interval_of_a_count_is_garwoods(count: int, low: float, high: float) -> None:
    assert poisson_interval(count) == pytest.approx((low, high), abs=1e-3)


def lives() -> dict[int, LifeTimes]:
    """Two ranks; rank 1 dies at 100 s, the rest is gone at 104; 3 steps of 10 s are lost."""
    first = LifeTimes(
        world=2,
        ranks={
            0: RankTimes(0, 100 * S, died_us=104 * S),
            1: RankTimes(0, 99 * S, died_us=100 * S),
        },
        over_us=104 * S,
        saved_us={step: 10 * S * (step + 1) for step in range(10)},
    )
    second = LifeTimes(
        world=2,
        ranks={
            n: RankTimes(120 * S, 170 * S, process_us=6 * S, restored=(122 * S, 125 * S))
            for n in (0, 1)
        },
        over_us=170 * S,
        parent=(1, 6),
        source="memory",
        saved_us={step: (125 + 10 * (step - 6)) * S for step in range(7, 11)},
    )
    return {1: first, 2: second}


def test_coming_back_is_divided_and_the_lost_work_is_that_of_the_ledger() -> None:
    ledger = account(lives())
    told = Interrupted(1, 1, "b", "training", "killed", 3, 155 * S)
    found = measure(ledger, lives(), [told], SavePace(10.0, 1.0, 0.5))
    one = found.interruptions[0]
    assert (one.detect_s, one.restart_s, one.restore_s, one.repeat_s) == (4, 18, 3, 30)
    assert (one.at_s, one.back_after_s, one.source) == (100, 25, "memory")
    assert one.rank_hours * 3600 == pytest.approx(60) == ledger.rank_seconds["lost_work"]
    assert found.mttr_s == {"detect": 4, "restart": 18, "restore": 3, "repeat": 30, "all": 55}
    assert (found.failures, found.mtti_s, found.lost_steps) == (1, 170, 3)
    assert found.mtti_low_s == pytest.approx(170 / 5.5716, rel=1e-3)
    assert found.mtti_high_s == pytest.approx(170 / 0.0253, rel=1e-2)
    assert found.recovery_s == {"memory": 25}
    assert found.predicted_ettr == pytest.approx(1 - 0.05 - 30 / 170)
    assert found.predicted_ettr_bytecheckpoint == pytest.approx(10 / (10 + 0.5 + 5 + 3))


def test_without_interruptions_only_the_least_time_to_one_is_known() -> None:
    alone = {1: lives()[1]}
    exposure = (Exposure("a process", "1-9", 0, 1.0),)
    found = measure(account(alone), alone, [], SavePace(exposure=exposure))
    assert (found.failures, found.mtti_s, found.mtti_high_s, found.mttr_s) == (0, None, None, {})
    assert found.mtti_low_s == pytest.approx(104 / 2.9957, rel=1e-3)
    assert found.predicted_ettr is None and found.exposure == exposure


def test_a_host_that_vanished_with_its_keeper_is_the_victim(tmp_path: Path) -> None:
    """Ranks of the others failed for want of it, which their keepers saw."""
    ranks = {0: "a", 1: "a", 2: "b", 3: "c"}
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, ranks)
    tell_save(told, 1, 0, 20.0, ranks)
    for rank, at_s in ((2, 30.2), (3, 30.1)):
        ended = {"outcome": "failed", "reason": "Connection closed by peer"}
        told(of(events.RunEnded, 1, rank, **ended), at_s, ranks[rank])
        told(of(events.TrainerLost, 1, rank, host=ranks[rank], pid=1), at_s + 0.1, ranks[rank])
    tell_start(told, 2, 40.0, ranks, (1, 0))
    reliability = read_report(told.write()).reliability
    assert reliability is not None
    (one,) = reliability.interruptions
    assert (one.rank, one.host) == (0, "a")


OWN, OF_A_PEER = "ValueError: the loss is not a number", "RuntimeError: Connection closed by peer"


def interruption(
    root: Path, ends: dict[int, tuple[float, str]], lost: dict[int, float], by: str
) -> tuple[int, str, str]:
    """Who is said to be the victim of a start that ended so. ``ends``: when ranks failed, at what;
    ``lost``: when the keeper of host ``by`` saw the end of ranks.
    """
    ranks = {0: "a", 1: "b", 2: "c"}
    told = Told(root)
    tell_start(told, 1, 10.0, ranks)
    tell_save(told, 1, 0, 20.0, ranks)
    for rank, (at_s, reason) in ends.items():
        ended = {"outcome": "failed", "reason": reason}
        told(of(events.RunEnded, 1, rank, **ended), at_s, ranks[rank])
    for rank, at_s in lost.items():
        told(of(events.TrainerLost, 1, rank, host=ranks[rank], pid=1), at_s, by)
    tell_start(told, 2, 40.0, ranks, (1, 0))
    reliability = read_report(told.write()).reliability
    assert reliability is not None
    (one,) = reliability.interruptions
    return one.rank, one.host, one.reason


def test_who_was_killed_is_the_victim_though_its_end_was_seen_behind_that_of_others(
    tmp_path: Path,
) -> None:
    ends = {0: (30.0, OF_A_PEER), 2: (30.01, OF_A_PEER)}
    lost = {0: 29.99, 1: 30.064, 2: 30.0}
    assert interruption(tmp_path, ends, lost, "a") == (1, "b", "")


def test_what_torchrun_was_told_says_who_failed_for_want_of_another(tmp_path: Path) -> None:
    """Seen before the end of who was killed."""
    ranks = {0: "a", 1: "b", 2: "c"}
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, ranks)
    tell_save(told, 1, 0, 20.0, ranks)
    for rank, at_s in ((2, 30.0), (1, 30.064)):
        told(of(events.TrainerLost, 1, rank, host=ranks[rank], pid=1), at_s, "a")
        died = {"host": ranks[rank], "phase": "training", "reason": OF_A_PEER * (rank == 2)}
        told(of(events.TrainerDied, 1, rank, **died), at_s + 0.5, ranks[rank])
    told(of(events.TrainerLost, 1, 0, host="a", pid=1), 30.7, "a")
    tell_start(told, 2, 40.0, ranks, (1, 0))
    reliability = read_report(told.write()).reliability
    assert reliability is not None
    (one,) = reliability.interruptions
    assert (one.rank, one.host, one.reason) == (1, "b", "")


def test_who_is_seen_to_end_first_is_the_victim_though_it_began_last(tmp_path: Path) -> None:
    ranks = {0: "a", 1: "b", 2: "c"}
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, ranks)
    tell_save(told, 1, 0, 20.0, ranks)
    for rank, (began_s, ended_s) in {0: (24.0, 30.2), 1: (28.0, 30.1), 2: (24.5, 30.3)}.items():
        times = {"quiet_s": 30.5 - began_s, "alive_s": ended_s - began_s}
        died = {"host": ranks[rank], "phase": "restoring", **times}
        told(of(events.TrainerDied, 1, rank, **died), 30.5, ranks[rank])
    tell_start(told, 2, 40.0, ranks, (1, 0))
    reliability = read_report(told.write()).reliability
    assert reliability is not None
    (one,) = reliability.interruptions
    assert (one.rank, one.host) == (1, "b")


def test_who_failed_first_at_something_of_its_own_is_the_victim(tmp_path: Path) -> None:
    """The launcher killed the others for that, which left no word."""
    ends = {2: (30.0, OWN)}
    assert interruption(tmp_path, ends, {0: 30.1, 1: 30.2, 2: 29.9}, "a") == (2, "c", OWN)


def test_a_host_that_was_ended_for_an_error_of_another_is_not_the_victim(tmp_path: Path) -> None:
    """With its keeper, as containers are."""
    assert interruption(tmp_path, {0: (30.0, OWN)}, {0: 30.1}, "a") == (0, "a", OWN)


def test_a_host_whose_keeper_saw_the_end_of_another_rank_is_not_the_victim(tmp_path: Path) -> None:
    assert interruption(tmp_path, {}, {1: 30.2, 2: 30.1}, "a") == (2, "c", "")
