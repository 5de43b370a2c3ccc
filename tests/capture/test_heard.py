"""What a rank makes of the keeper's word, above all of a word that comes late."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest
import torch

from holdfast.capture.handles import PendingHandles, SaveHandle
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.save_state import Requested
from holdfast.capture.session import KeeperNotifications, KeeperSession, StepAnnouncements
from holdfast.capture.task import CaptureTask, RankIdentity
from holdfast.protocol import messages as m
from holdfast.state.describe import Describer

PLACE = RankIdentity(run_id="r", incarnation=1, nonce="n", rank=0, world=1)


def request(heard: KeeperNotifications, step: int, turn: int) -> CaptureTask:
    """A capture whose slot was asked for, and that waits for the answer."""
    description = Describer({"model": torch.nn.Linear(2, 2)}, 0).describe()
    capture = CaptureTask(
        number=turn,
        store=heard._store,
        step=step,
        durable=False,
        exact=True,
        description=description,
        overtaking=OvertakeDetector(description.bindings),
        started_s=time.monotonic(),
        handle=SaveHandle(step, durable=False, explain=str),
    )
    capture.begin()
    capture.tell(Requested(turn))
    return capture


def grant(step: int, turn: int, attempt: str) -> m.Grant:
    return m.Grant(
        step=step, attempt=attempt, slot="s", durable=False, layout="l", request_number=turn
    )


@pytest.fixture
def heard() -> KeeperNotifications:
    return KeeperNotifications(PendingHandles())


def test_a_grant_for_a_request_that_was_given_up_is_none_for_the_next_of_the_same_step(
    heard: KeeperNotifications,
) -> None:
    again = request(heard, step=5, turn=2)
    answer = heard.handle(grant(5, 1, "first"), again, PLACE)
    assert isinstance(answer, m.AbortCapture) and answer.attempt == "first"
    # The keeper ends that attempt too: it is no word on the second.
    heard.handle(m.Aborted(step=5, attempt="first", reason="it stopped waiting"), again, PLACE)
    assert again.known.answer is None and not again.known.cancelled
    assert heard.handle(grant(5, 2, "second"), again, PLACE) is None
    assert isinstance(again.known.answer, m.Grant) and again.known.answer.attempt == "second"


def test_a_second_grant_for_one_request_is_abandoned(heard: KeeperNotifications) -> None:
    capture = request(heard, step=5, turn=1)
    assert heard.handle(grant(5, 1, "a"), capture, PLACE) is None
    answer = heard.handle(grant(5, 1, "b"), capture, PLACE)
    assert isinstance(answer, m.AbortCapture) and answer.attempt == "b"
    assert isinstance(capture.known.answer, m.Grant) and capture.known.answer.attempt == "a"


def test_an_announced_step_that_is_passed_over_is_meant_by_the_next_one(
    heard: KeeperNotifications,
) -> None:
    for step, which in ((12, "storage"), (13, "storage"), (30, "storage"), (5, "memory")):
        heard.handle(m.Announced(step=step, which=which), None, PLACE)
    told = StepAnnouncements(KeeperSession(Mock()), heard._store)
    assert not told.consume_announced(11, "storage")
    assert told.consume_announced(20, "storage")
    assert not told.consume_announced(29, "storage")
    assert told.consume_announced(30, "storage") and told.consume_announced(30, "memory")
    assert not heard._store.state.announced
    heard.handle(m.Announced(step=25, which=m.MISSED), None, PLACE)
    assert not told.consume_announced(26, m.MISSED, after=25)  # that one was saved
    assert not told.consume_announced(27, m.MISSED)
