"""What a rank measures of its saves: how long a grant may take without holding an update."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.capture import task
from holdfast.capture.task import SaveTimes, Timeouts
from holdfast.protocol import messages as m
from holdfast.protocol.client import KeeperClient
from support.runs.leftovers import keeper_pids

times = st.floats(0.0, 100.0)


def measured(updates_s: list[float], copies_s: list[float]) -> SaveTimes:
    found = SaveTimes()
    for number, since_s in enumerate(updates_s):
        found.requested(number, 10.0, 0)
        found.update_came(number, 10.0 + since_s)
    for copy_s in copies_s:
        found.copied(copy_s)
    return found


@given(st.lists(times, min_size=3, max_size=20), st.lists(times, min_size=3, max_size=20))
def test_a_grant_may_take_until_its_copy_would_hold_the_update_that_usually_comes(
    updates_s: list[float], copies_s: list[float]
) -> None:
    spare_ms = measured(updates_s, copies_s).spare_ms
    assert spare_ms % 100 == 0 and (spare_ms == 0 or spare_ms >= 1000)
    if spare_ms:
        held = sum(spare_ms / 1000 + min(copies_s[-8:]) > each for each in updates_s[-8:])
        assert held <= (len(updates_s[-8:]) + 1) // 2, "more than half of the updates would wait"


def test_nothing_is_said_before_enough_is_measured_or_of_less_than_a_second() -> None:
    assert measured([9.0] * 2, [1.0] * 9).spare_ms == measured([9.0] * 9, [1.0] * 2).spare_ms == 0
    assert measured([9.05] * 3, [1.0] * 3).spare_ms == 8000
    assert measured([2.0] * 3, [1.5] * 3).spare_ms == measured([1.0] * 3, [9.0] * 3).spare_ms == 0


def test_an_update_counts_once_and_one_before_the_request_leaves_no_time() -> None:
    found = measured([5.0] * 3, [1.0] * 3)
    for _ in range(9):
        found.update_came(2, 99.0)
    assert found.spare_ms == 4000
    for number in range(3, 7):  # the request is not sent yet when these begin
        found.update_came(number, 100.0)
    assert found.spare_ms == 0


@given(times, st.sampled_from([0, 1000, 30_000]), times)
def test_an_update_is_held_for_an_answer_until_it_should_have_come_and_never_longer_than_before(
    now_s: float, spare_ms: int, most_s: float
) -> None:
    found = measured([5.0] * 3, [1.0] * 3)
    found.requested(7, 0.0, spare_ms)
    assert found.wait_s(8, now_s, most_s) == most_s
    wait_s = found.wait_s(7, now_s, most_s)
    assert 0.0 <= wait_s <= most_s
    assert wait_s == most_s if not spare_ms else wait_s + now_s <= max(now_s, spare_ms / 1000 + 0.5)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[m.RequestCapture]:
    """The requests that were sent."""
    found: list[m.RequestCapture] = []
    usual = KeeperClient.send

    def send(self: KeeperClient, message: m.Message, seq: int = 0) -> None:
        if isinstance(message, m.RequestCapture):
            found.append(message)
        usual(self, message, seq)

    monkeypatch.setattr(KeeperClient, "send", send)
    return found


def take_steps(checkpointer: holdfast.Checkpointer, steps: int) -> None:
    for step in range(steps):
        checkpointer.save(step).wait_captured(30)
        time.sleep(0.3)  # a forward and a backward
        checkpointer.before_update()


def test_a_rank_measures_its_steps_and_copies_and_says_so_of_snapshots_only(
    tmp_path: Path,
    arena_dir: Path,
    asked: list[m.RequestCapture],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task, "_LEAST_SPARE_S", 0.1)
    with holdfast.Checkpointer(tmp_path, {"w": torch.zeros(9)}, storage=None) as checkpointer:
        take_steps(checkpointer, 5)
        checkpointer.save(5, durable=True).wait_durable(30)
    assert [one.spare_ms for one in asked[:3]] == [0, 0, 0]
    assert 200 <= asked[4].spare_ms <= 1000
    assert asked[-1].durable and asked[-1].spare_ms == 0


def test_an_update_is_not_held_for_a_keeper_that_should_have_answered_long_before(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "_LEAST_SPARE_S", 0.1)
    with holdfast.Checkpointer(tmp_path, {"w": torch.zeros(9)}, storage=None) as checkpointer:
        take_steps(checkpointer, 4)
        (keeper,) = keeper_pids(arena_dir)
        os.kill(keeper, signal.SIGSTOP)
        try:
            late = checkpointer.save(4)
            time.sleep(0.3)
            began_s = time.monotonic()
            checkpointer.before_update()
            assert time.monotonic() - began_s < Timeouts().grant_s / 2
            with pytest.raises(holdfast.SnapshotSkipped, match="no answer to the request"):
                late.wait_captured(30)
        finally:
            os.kill(keeper, signal.SIGCONT)
