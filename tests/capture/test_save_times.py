"""What a rank measures of its saves: how long a grant may take without holding an update."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.capture import task
from holdfast.capture.task import SaveTimes
from holdfast.protocol import messages as m
from holdfast.protocol.client import KeeperClient

times = st.floats(0.0, 100.0)


def measured(updates_s: list[float], copies_s: list[float]) -> SaveTimes:
    found = SaveTimes()
    for number, since_s in enumerate(updates_s):
        found.requested(number, 10.0)
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


def test_a_rank_measures_its_steps_and_copies_and_says_so_of_snapshots_only(
    tmp_path: Path,
    arena_dir: Path,
    asked: list[m.RequestCapture],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task, "_LEAST_SPARE_S", 0.1)
    state = {"w": torch.zeros(9)}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        for step in range(5):
            checkpointer.save(step).wait_captured(30)
            time.sleep(0.3)  # a forward and a backward
            checkpointer.before_update()
            state["w"] += 1
        checkpointer.save(5, durable=True).wait_durable(30)
    assert [one.spare_ms for one in asked[:3]] == [0, 0, 0]
    assert 200 <= asked[4].spare_ms <= 1000
    assert asked[-1].durable and asked[-1].spare_ms == 0
